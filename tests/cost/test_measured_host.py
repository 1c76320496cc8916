"""The host of a record: whose launches its rows are, what adds to what, and what a device still waits for."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.cost.calibration_record import CalibrationRecord, DeviceInfo, HostLaunchSample, HostState, RecordOrigin
from clustersim.cost.host_launch import AsyncHost, HostModel, SyncHost
from clustersim.cost.measured_host import host_model, host_states
from clustersim.cost.measured_kernels import MeasuredKernels
from clustersim.model.framework import Framework, load_framework
from clustersim.parallel.data_parallel_strategy import FullyShard, Zero1
from clustersim.parallel.layout import Layout
from clustersim.program.task import Segment, WorkType
from clustersim.scenario import Scenario
from clustersim.simulation import simulate
from tests.conftest import examples
from tests.cost.records import CONDITIONS, DEVICE, H100, measured
from tests.cost.test_host_launch import cut, kernel, sent
from tests.cost.test_measured_kernels import CUBE

TORCH, MEGATRON, OLD = (load_framework(name) for name in ("pytorch", "megatron", "megatron-2021"))
EAGER, FSDP, DTENSOR, COMPILED, GRAPH = HostState
ROWS = (
    HostLaunchSample(EAGER, 4e-6, 6e-6, (100, 200), (1e-6, 2e-6)),
    HostLaunchSample(FSDP, 5e-6, 9e-6, (100, 200), (1e-6, 2e-6)),
    HostLaunchSample(DTENSOR, 14e-6, 10e-6, (110, 210), (1e-6, 2e-6)),
    HostLaunchSample(COMPILED, 3e-6, 2e-6, (100, 200), (1e-6, 2e-6)),
    HostLaunchSample(GRAPH, 20e-6, 30e-6, (100, 200)),
)
ONE, SHARDED, SPLIT = Layout(), Layout(dp=2, data=FullyShard()), Layout(tp=2)
BOTH = Layout(tp=2, dp=2, data=FullyShard())


def record(*rows: HostLaunchSample, threads: int = 0) -> CalibrationRecord:
    return CalibrationRecord(replace(DEVICE, threads=threads), CONDITIONS, host=rows)


def pace(framework: Framework, layout: Layout, *rows: HostLaunchSample) -> tuple[float, float]:
    """Microseconds for a launch of forward and of backward."""
    found = host_model(record(*(rows or ROWS)), framework, layout)
    assert isinstance(found, AsyncHost)
    return found.forward_seconds * 1e6, found.backward_seconds * 1e6


@pytest.mark.parametrize(
    ("framework", "layout", "wanted"),
    [
        (TORCH, ONE, (4, 6)),
        (TORCH, SHARDED, (5, 9)),
        (TORCH, replace(SHARDED, data=Zero1()), (4, 6)),
        (TORCH, SPLIT, (14, 10)),
        (TORCH, BOTH, (4 + 1 + 10, 6 + 3 + 4)),
        (MEGATRON, BOTH, (4, 6)),  # its own sharding and its own tensor parallelism
        (OLD, BOTH, (20, 75)),  # its Python is not today's
        (TORCH.with_compiled(), ONE, (3, 2)),
        (TORCH.with_compiled(), SPLIT, (3, 2)),  # compiled layers have no dispatch left
        (TORCH.with_compiled(), BOTH, (3 + 1, 2 + 3)),
        (TORCH.with_launch_seconds(7e-6, None), BOTH, (7, 7)),  # what somebody says wins
        (TORCH.with_launch_seconds(7e-6, 8e-6), ONE, (7, 8)),
        (TORCH.with_launch_seconds(None, 8e-6), ONE, (10, 8)),
        (TORCH.with_compiled().with_launch_seconds(7e-6, None), ONE, (7, 7)),
    ],
)
def test_a_launch_takes_what_was_measured_of_software_that_launches_so(
    framework: Framework, layout: Layout, wanted: tuple[float, float]
) -> None:
    assert pace(framework, layout) == pytest.approx(wanted)


def test_states_that_were_not_measured_add_nothing() -> None:
    assert pace(TORCH, BOTH, ROWS[0]) == pytest.approx((4, 6))
    assert pace(TORCH.with_compiled(), SPLIT, ROWS[0], ROWS[2]) == pytest.approx((14, 10)), "as if it were eager"
    assert pace(TORCH, ONE, *ROWS[1:]) == pytest.approx((10, 10)), "nothing to compare with: the framework's own"


def test_a_state_that_is_measured_as_faster_takes_nothing_off() -> None:
    faster = replace(ROWS[1], forward=1e-6)
    assert pace(TORCH, SHARDED, ROWS[0], faster) == pytest.approx((4, 9))


@pytest.mark.parametrize("origin", [RecordOrigin.PUBLISHED, RecordOrigin.DERIVED])
def test_hosts_of_other_machines_do_not_count(origin: RecordOrigin) -> None:
    own = host_model(None, TORCH, ONE)
    assert own == AsyncHost(TORCH.launch_seconds, TORCH.backward_launch_seconds, call_seconds=TORCH.eager_call_seconds)
    assert host_model(replace(record(*ROWS), origin=origin), TORCH, ONE) == own


def test_a_captured_pass_takes_the_launch_of_a_graph() -> None:
    captured = TORCH.with_cuda_graphs()
    found = [host_model(record(*rows), captured, ONE) for rows in (ROWS, ROWS[:4])]
    assert [item.graph_seconds for item in found if isinstance(item, AsyncHost)] == pytest.approx([25e-6, 12.5e-6])
    eager = host_model(record(*ROWS), TORCH, ONE)
    assert isinstance(eager, AsyncHost)
    assert eager.graph_seconds is None


def test_what_is_measured_for_a_scenario_is_what_answers_for_it() -> None:
    assert host_states(TORCH, BOTH) == (EAGER, DTENSOR, FSDP)
    assert host_states(TORCH.with_compiled().with_cuda_graphs(), BOTH) == (EAGER, COMPILED, FSDP, GRAPH)
    assert (host_states(MEGATRON, BOTH), host_states(OLD, BOTH)) == ((EAGER,), ())


def test_on_a_cpu_what_kernels_by_themselves_lack_is_added_launch_by_launch() -> None:
    """3 and 4 us are left of 4 and 6: of 2 launches forward, 1 run again, 3 backward and 5 of the optimizer."""
    works = [(2, WorkType.FORWARD), (1, WorkType.RECOMPUTE), (3, WorkType.BACKWARD), (5, WorkType.OPTIMIZER)]
    operations = [kernel(number, work) for number, work in works]
    host = host_model(record(*ROWS, threads=1), TORCH, ONE)
    waits = host.launch_stalls(Segment("block", tuple(operations)), np.ones((1, 4)))[0]
    assert waits.tolist() == pytest.approx([6e-6, 3e-6, 12e-6, 0.0])


def test_on_a_cpu_a_collective_is_a_launch_that_shows_at_the_next_kernel() -> None:
    host = SyncHost(1.0, 2.0)
    block = Segment("block", (sent(), kernel(2), cut(2.0), kernel(work=WorkType.BACKWARD), sent(WorkType.BACKWARD)))
    assert host.launch_stalls(block, np.ones((1, 5)))[0].tolist() == [0.0, 1.0 + 2.0, 0.0, 4.0 + 2.0 + 2.0, 0.0]


def test_on_a_cpu_nothing_is_taken_off_kernels_that_take_longer_by_themselves() -> None:
    slow = replace(ROWS[0], alone=(9e-6, 9e-6))
    assert host_model(record(slow, threads=2), TORCH, ONE) == SyncHost(0.0, 0.0)


HOSTS = st.sampled_from([AsyncHost(1.0, 2.5), AsyncHost(1.0, 2.5, graph_seconds=4.0), SyncHost(1.0, 2.5)])
OPERATIONS = st.lists(
    st.tuples(st.integers(1, 4), st.sampled_from(list(WorkType)), st.sampled_from([0.0, 0.5, 1.0, 4.0])),
    min_size=1,
    max_size=6,
)


@examples(100)
@given(HOSTS, OPERATIONS, st.integers(0, 5))
def test_more_launches_never_make_a_block_faster(
    host: HostModel, made: list[tuple[int, WorkType, float]], place: int
) -> None:
    def lasts(more: int) -> float:
        counts = [number + more * (at == place % len(made)) for at, (number, _, _) in enumerate(made)]
        operations = [kernel(count, work) for count, (_, work, _) in zip(counts, made, strict=True)]
        seconds = [item for _, _, item in made]
        return sum(seconds) + float(host.launch_stalls(Segment("block", tuple(operations)), np.array([seconds])).sum())

    assert lasts(1) >= lasts(0) - 1e-9


def test_kernels_take_what_the_device_does_where_the_host_is_known() -> None:
    """4 launches of 3 us are a floor under 5 us only where nothing else says when the device waits, or on a CPU."""
    short = replace(CUBE[0], launches=4)
    plain = replace(measured([short], lambda _: 5e-6), launch_interval=3e-6)
    hosted = replace(plain, host=ROWS)
    on_cpu = replace(hosted, device=replace(DEVICE, threads=1))
    derived = replace(hosted, origin=RecordOrigin.DERIVED)
    found = [
        MeasuredKernels(calibration_record, H100).time_kernel(short).seconds
        for calibration_record in (plain, hosted, on_cpu, derived)
    ]
    assert found == pytest.approx([12e-6, 5e-6, 12e-6, 12e-6])


MAPPING = {
    "model": {"preset": "llama3-8b", "layers": 2},
    "cluster": {"name": "dgx-h100", "gpus": 1},
    "layout": {"dp": 1},
    "training": {"sequence": 128, "global_batch": 2, "fused": False},
}


def step(host: tuple[HostLaunchSample, ...], **framework: object) -> float:
    scenario = Scenario.from_mapping({**MAPPING, "framework": framework} if framework else MAPPING)
    given = replace(record(*host), device=DeviceInfo("h100-sxm-80gb", "NVIDIA H100 80GB HBM3"))
    return simulate(replace(scenario, cost=replace(scenario.cost, record=given))).step_time


def test_a_step_that_waits_for_its_host_takes_its_launches() -> None:
    """Of a host that slow they are all that matters: each second more of a launch is one for each launch."""
    times = [step((HostLaunchSample(EAGER, item, item, (1, 1)),)) for item in (0.1, 0.2, 0.3)]
    assert times[2] - times[1] == pytest.approx(times[1] - times[0])
    assert times[1] > 1.9 * times[0]


def test_compiled_is_no_slower_where_its_row_says_so() -> None:
    eager, compiled = HostLaunchSample(EAGER, 1e-4, 1e-4, (1, 1)), HostLaunchSample(COMPILED, 2e-5, 3e-5, (1, 1))
    times = [step((eager, compiled)), step((eager, compiled), compiled=True), step((eager,), compiled=True)]
    assert times[1] < times[0] == times[2]
