"""Host samples of a record: which software they apply to, which overheads add, what a device waits for."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.cost.calibration_record import CalibrationRecord, DeviceInfo, HostLaunchSample
from clustersim.cost.host_launch import AsyncHost, HostModel, SyncHost
from clustersim.cost.measured_host import host_model, host_states
from clustersim.cost.measured_kernels import MeasuredKernels
from clustersim.cost.record_kinds import LaunchMode, RecordOrigin
from clustersim.model.framework import Framework
from clustersim.model.framework_files import load_framework
from clustersim.parallel.data_parallel_strategy import FullyShard, Zero1
from clustersim.parallel.layout import Layout
from clustersim.program.task import Segment, WorkType
from clustersim.scenario import Scenario
from clustersim.simulation import simulate
from tests.conftest import examples
from tests.cost.records import CONDITIONS, DEVICE, H100, record_of
from tests.cost.test_host_launch import comm_operation, kernel_operation, overlapped_operation
from tests.cost.test_measured_kernels import CUBE

TORCH, MEGATRON, MEGATRON_2021 = (load_framework(name) for name in ("pytorch", "megatron", "megatron-2021"))
EAGER, FSDP, DTENSOR, COMPILED, GRAPH = LaunchMode
SAMPLES = (
    HostLaunchSample(EAGER, 4e-6, 6e-6, (100, 200), (1e-6, 2e-6)),
    HostLaunchSample(FSDP, 5e-6, 9e-6, (100, 200), (1e-6, 2e-6)),
    HostLaunchSample(DTENSOR, 14e-6, 10e-6, (110, 210), (1e-6, 2e-6)),
    HostLaunchSample(COMPILED, 3e-6, 2e-6, (100, 200), (1e-6, 2e-6)),
    HostLaunchSample(GRAPH, 20e-6, 30e-6, (100, 200)),
)
SINGLE_RANK, SHARDED, TENSOR_PARALLEL = Layout(), Layout(dp=2, data=FullyShard()), Layout(tp=2)
SHARDED_TENSOR_PARALLEL = Layout(tp=2, dp=2, data=FullyShard())


def host_record(*samples: HostLaunchSample, threads: int = 0) -> CalibrationRecord:
    return CalibrationRecord(replace(DEVICE, threads=threads), CONDITIONS, host_launches=samples)


def launch_microseconds(framework: Framework, layout: Layout, *samples: HostLaunchSample) -> tuple[float, float]:
    """Microseconds for a launch of forward and of backward."""
    host = host_model(host_record(*(samples or SAMPLES)), framework, layout)
    assert isinstance(host, AsyncHost)
    return host.forward_seconds * 1e6, host.backward_seconds * 1e6


@pytest.mark.parametrize(
    ("framework", "layout", "wanted"),
    [
        (TORCH, SINGLE_RANK, (4, 6)),
        (TORCH, SHARDED, (5, 9)),
        (TORCH, replace(SHARDED, data=Zero1()), (4, 6)),
        (TORCH, TENSOR_PARALLEL, (14, 10)),
        (TORCH, SHARDED_TENSOR_PARALLEL, (4 + 1 + 10, 6 + 3 + 4)),
        (MEGATRON, SHARDED_TENSOR_PARALLEL, (4, 6)),  # Megatron's own sharding and tensor parallelism
        (MEGATRON_2021, SHARDED_TENSOR_PARALLEL, (20, 75)),  # its Python is not today's
        (TORCH.with_compiled(), SINGLE_RANK, (3, 2)),
        (TORCH.with_compiled(), TENSOR_PARALLEL, (3, 2)),  # compiled layers have no dispatch left
        (TORCH.with_compiled(), SHARDED_TENSOR_PARALLEL, (3 + 1, 2 + 3)),
        (TORCH.with_launch_seconds(7e-6, None), SHARDED_TENSOR_PARALLEL, (7, 7)),  # explicit values take precedence
        (TORCH.with_launch_seconds(7e-6, 8e-6), SINGLE_RANK, (7, 8)),
        (TORCH.with_launch_seconds(None, 8e-6), SINGLE_RANK, (31, 8)),
        (TORCH.with_compiled().with_launch_seconds(7e-6, None), SINGLE_RANK, (7, 7)),
    ],
)
def test_launch_times_are_those_measured_for_equivalent_software(
    framework: Framework, layout: Layout, wanted: tuple[float, float]
) -> None:
    assert launch_microseconds(framework, layout) == pytest.approx(wanted)


def test_states_that_were_not_measured_add_nothing() -> None:
    assert launch_microseconds(TORCH, SHARDED_TENSOR_PARALLEL, SAMPLES[0]) == pytest.approx((4, 6))
    assert launch_microseconds(TORCH.with_compiled(), TENSOR_PARALLEL, SAMPLES[0], SAMPLES[2]) == pytest.approx(
        (14, 10)
    ), "as if it were eager"
    assert launch_microseconds(TORCH, SINGLE_RANK, *SAMPLES[1:]) == pytest.approx((31, 27)), (
        "nothing to compare with: the framework's own"
    )


def test_a_faster_state_gives_no_negative_overhead() -> None:
    faster = replace(SAMPLES[1], forward=1e-6)
    assert launch_microseconds(TORCH, SHARDED, SAMPLES[0], faster) == pytest.approx((4, 9))


@pytest.mark.parametrize("origin", [RecordOrigin.PUBLISHED, RecordOrigin.DERIVED])
def test_host_samples_of_unmeasured_records_are_ignored(origin: RecordOrigin) -> None:
    framework_host = host_model(None, TORCH, SINGLE_RANK)
    assert framework_host == AsyncHost(
        TORCH.launch_seconds, TORCH.backward_launch_seconds, call_seconds=TORCH.eager_call_seconds
    )
    assert host_model(replace(host_record(*SAMPLES), origin=origin), TORCH, SINGLE_RANK) == framework_host


def test_a_captured_pass_takes_the_launch_of_a_graph() -> None:
    captured = TORCH.with_cuda_graphs()
    hosts = [host_model(host_record(*samples), captured, SINGLE_RANK) for samples in (SAMPLES, SAMPLES[:4])]
    assert [host.graph_seconds for host in hosts if isinstance(host, AsyncHost)] == pytest.approx([25e-6, 12.5e-6])
    eager = host_model(host_record(*SAMPLES), TORCH, SINGLE_RANK)
    assert isinstance(eager, AsyncHost)
    assert eager.graph_seconds is None


def test_required_host_states_of_frameworks_and_layouts() -> None:
    assert host_states(TORCH, SHARDED_TENSOR_PARALLEL) == (EAGER, DTENSOR, FSDP)
    assert host_states(TORCH.with_compiled().with_cuda_graphs(), SHARDED_TENSOR_PARALLEL) == (
        EAGER,
        COMPILED,
        FSDP,
        GRAPH,
    )
    assert (host_states(MEGATRON, SHARDED_TENSOR_PARALLEL), host_states(MEGATRON_2021, SHARDED_TENSOR_PARALLEL)) == (
        (EAGER,),
        (),
    )


def test_on_a_cpu_the_missing_launch_time_is_added_per_launch() -> None:
    """3 and 4 us are left of 4 and 6: of 2 launches forward, 1 recomputed, 3 backward and 5 of the optimizer."""
    works = [(2, WorkType.FORWARD), (1, WorkType.RECOMPUTE), (3, WorkType.BACKWARD), (5, WorkType.OPTIMIZER)]
    operations = [kernel_operation(count, work) for count, work in works]
    host = host_model(host_record(*SAMPLES, threads=1), TORCH, SINGLE_RANK)
    waits = host.launch_stalls(Segment("block", tuple(operations)), np.ones((1, 4)))[0]
    assert waits.tolist() == pytest.approx([6e-6, 3e-6, 12e-6, 0.0])


def test_on_a_cpu_a_collective_launch_is_counted_at_the_next_kernel() -> None:
    host = SyncHost(1.0, 2.0)
    segment = Segment(
        "block",
        (
            comm_operation(),
            kernel_operation(2),
            overlapped_operation(2.0),
            kernel_operation(work=WorkType.BACKWARD),
            comm_operation(WorkType.BACKWARD),
        ),
    )
    assert host.launch_stalls(segment, np.ones((1, 5)))[0].tolist() == [0.0, 1.0 + 2.0, 0.0, 4.0 + 2.0, 0.0]


def test_on_a_cpu_launch_overhead_is_never_negative() -> None:
    slow = replace(SAMPLES[0], in_kernel_times=(9e-6, 9e-6))
    assert host_model(host_record(slow, threads=2), TORCH, SINGLE_RANK) == SyncHost(0.0, 0.0)


HOSTS = st.sampled_from([AsyncHost(1.0, 2.5), AsyncHost(1.0, 2.5, graph_seconds=4.0), SyncHost(1.0, 2.5)])
OPERATIONS = st.lists(
    st.tuples(st.integers(1, 4), st.sampled_from(list(WorkType)), st.sampled_from([0.0, 0.5, 1.0, 4.0])),
    min_size=1,
    max_size=6,
)


@examples(100)
@given(HOSTS, OPERATIONS, st.integers(0, 5))
def test_more_launches_never_make_a_segment_faster(
    host: HostModel, cases: list[tuple[int, WorkType, float]], changed_index: int
) -> None:
    def segment_seconds(extra_launches: int) -> float:
        counts = [
            launches + extra_launches * (index == changed_index % len(cases))
            for index, (launches, _, _) in enumerate(cases)
        ]
        operations = [kernel_operation(count, work) for count, (_, work, _) in zip(counts, cases, strict=True)]
        seconds = [item for _, _, item in cases]
        return sum(seconds) + float(host.launch_stalls(Segment("block", tuple(operations)), np.array([seconds])).sum())

    assert segment_seconds(1) >= segment_seconds(0) - 1e-9


def test_kernels_are_not_launch_bound_where_the_host_was_measured() -> None:
    """4 launches of 3 us bound 5 us from below only where no host samples model the waiting, or on a CPU."""
    short_kernel = replace(CUBE[0], launches=4)
    plain = replace(record_of([short_kernel], lambda _: 5e-6), launch_interval=3e-6)
    with_host = replace(plain, host_launches=SAMPLES)
    on_cpu = replace(with_host, device=replace(DEVICE, threads=1))
    derived = replace(with_host, origin=RecordOrigin.DERIVED)
    seconds = [
        MeasuredKernels(calibration_record, H100).time_kernel(short_kernel).seconds
        for calibration_record in (plain, with_host, on_cpu, derived)
    ]
    assert seconds == pytest.approx([12e-6, 5e-6, 12e-6, 12e-6])


MAPPING = {
    "model": {"preset": "llama3-8b", "layers": 2},
    "cluster": {"name": "dgx-h100", "gpus": 1},
    "layout": {"dp": 1},
    "training": {"sequence": 128, "global_batch": 2, "fused": False},
}


def step_seconds(host: tuple[HostLaunchSample, ...], **framework: object) -> float:
    scenario = Scenario.from_mapping({**MAPPING, "framework": framework} if framework else MAPPING)
    measured_record = replace(host_record(*host), device=DeviceInfo("h100-sxm-80gb", "NVIDIA H100 80GB HBM3"))
    return simulate(replace(scenario, cost=replace(scenario.cost, record=measured_record))).step_time


def test_a_launch_bound_step_takes_its_launches() -> None:
    """With so slow a host only launches matter: each extra second per launch counts once per launch."""
    times = [step_seconds((HostLaunchSample(EAGER, item, item, (1, 1)),)) for item in (0.1, 0.2, 0.3)]
    assert times[2] - times[1] == pytest.approx(times[1] - times[0])
    assert times[1] > 1.9 * times[0]


def test_compiled_is_as_fast_as_its_samples() -> None:
    eager, compiled = HostLaunchSample(EAGER, 1e-4, 1e-4, (1, 1)), HostLaunchSample(COMPILED, 2e-5, 3e-5, (1, 1))
    times = [
        step_seconds((eager, compiled)),
        step_seconds((eager, compiled), torch_compile=True),
        step_seconds((eager,), torch_compile=True),
    ]
    assert times[1] < times[0] == times[2]
