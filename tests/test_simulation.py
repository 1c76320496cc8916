"""Full simulations: results of `simulate` and `check`, and their consistency."""

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from calibrate.collectives.scenario_calls import distinct_comm_calls
from clustersim import Scenario, simulate
from clustersim.build import build_simulation, distinct_kernels
from clustersim.collectives.tuner import cached_tuner
from clustersim.common.errors import InputError
from clustersim.cost.calibration_record import (
    CalibrationRecord,
    CollectiveCall,
    CollectiveSample,
    DeviceInfo,
    InterferenceSample,
    KernelSample,
    MeasurementConditions,
    TimeStatistics,
)
from clustersim.cost.device_models import slowest_deviation
from clustersim.cost.interference import KernelClass
from clustersim.cost.roofline import Roofline
from clustersim.cost.timing import Provenance
from clustersim.hardware.efficiency import TrainingDerating
from clustersim.memory.footprint import MemoryCategory
from clustersim.model.kernels import KernelKind
from clustersim.model.training import AttentionBackend
from clustersim.program.task import CollectiveType, ComputeTask
from clustersim.results.memory_check import check, peak_memory
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.time_categories import TIME_CATEGORIES, TimeCategory
from clustersim.scenario.settings import Symmetry
from tests.small_pipeline import pipeline_scenario


def scenario(*overrides: str, **sections: Any) -> Scenario:
    mapping = {
        "model": "llama3-8b",
        "cluster": {"name": "dgx-h100", "gpus": 16},
        "layout": {"tp": 2, "pp": 2, "dp": 4, "sequence_parallel": True},
        "schedule": "1f1b",
        "training": {"sequence": 4096, "global_batch": 32},
        **sections,
    }
    return Scenario.from_mapping(mapping, overrides=overrides)


@cache
def simulate_cached(*overrides: str) -> SimulationResult:
    return simulate(scenario(*overrides))


VARIANTS = {
    "3d": (),
    "gpipe": ("schedule=gpipe",),
    "interleaved": ("schedule.interleaved.chunks=4",),
    "zero 1": ("layout.data=zero1",),
    "zero 2": ("layout.data=zero2",),
    "zero 3": ("layout.data=fsdp",),
    "full recomputation": ("training.recompute=full",),
    "context": ("layout.cp=2", "layout.dp=2"),
    "uneven": ("layout.layers_per_stage=[17, 15]",),
    "no overlap": (
        "layout.overlap_p2p_comm=false",
        "layout.data.ddp.overlap=false",
        "layout.async_tensor_model_parallel_allreduce=false",
    ),
    "sends together": ("schedule.interleaved.chunks=4", "layout.overlap_p2p_comm=false"),
    "zero bubble": ("schedule=zb-2p",),
    "zero bubble in a V": ("schedule=zb-v",),
    "breadth first": ("schedule.bfs.chunks=4", "layout.overlap_p2p_comm=false"),
    "selective operations": ("training.recompute=selective_op",),
    "all but products": ("training.recompute=dots_with_no_batch_dims_saveable",),
    "older attention on a slow host": ("training.attention=flash1", "framework=megatron-2021", "training.sequence=512"),
}
ONE_PROCESS = (
    "cluster.gpus=4", "layout.tp=1", "layout.pp=1", "layout.dp=4", "layout.sequence_parallel=false",
    "model=gpt2-small", "training.sequence=1024", "layout.data=data_parallel",
)  # fmt: skip


@pytest.fixture(scope="module", params=[*VARIANTS, "one process"])
def variant_result(request: pytest.FixtureRequest) -> SimulationResult:
    return simulate_cached(*VARIANTS.get(request.param, ONE_PROCESS))


def test_the_breakdown_sums_to_the_step_on_every_rank(variant_result: SimulationResult) -> None:
    for rank in range(variant_result.rank_count):
        assert sum(variant_result.breakdown.rank_seconds(rank).values()) == pytest.approx(variant_result.step_time)


def test_every_category_is_present_and_none_is_negative(variant_result: SimulationResult) -> None:
    mean = variant_result.breakdown.mean_seconds()
    assert set(mean) == {
        str(category.value) if hasattr(category, "value") else str(category) for category in TIME_CATEGORIES
    }
    assert min(mean.values()) >= -1e-12


LAUNCH_BOUND = (
    "model=gpt2-small", "model.layers=4", "model.vocab=50432", "training.sequence=128", "training.global_batch=8",
    "layout.pp=1", "layout.dp=8",
)  # fmt: skip


@pytest.mark.parametrize("jitter", ["0 %", "5 %"])
def test_launch_stalls_dominate_a_launch_bound_step(jitter: str) -> None:
    """Kernels of some us that take the host 64 us each to launch: most of the step is launch stalls, on every rank."""
    tiny = scenario(*LAUNCH_BOUND, f"degradations.jitter={jitter}")
    frameworks = (
        replace(tiny.framework, launch_seconds=launch, backward_launch_seconds=launch) for launch in (64e-6, 0.0)
    )
    launch_bound, without_launch = (simulate(replace(tiny, framework=framework)) for framework in frameworks)
    for rank in range(launch_bound.rank_count):
        category_seconds = launch_bound.breakdown.rank_seconds(rank)
        assert sum(category_seconds.values()) == pytest.approx(launch_bound.step_time)
        assert category_seconds["kernel launch"] > 0.5 * launch_bound.step_time
        assert without_launch.breakdown.rank_seconds(rank)["kernel launch"] == 0.0
    assert launch_bound.step_time > 2 * without_launch.step_time
    if tiny.jitter is None:
        for category in (
            TimeCategory.COMPUTE,
            TimeCategory.OPTIMIZER,
        ):  # kernel seconds do not depend on launch stalls
            assert launch_bound.breakdown.category_total(category) == pytest.approx(
                without_launch.breakdown.category_total(category)
            )


def test_large_kernels_have_no_launch_stalls() -> None:
    """Kernels of 4,096 tokens take longer than PyTorch's 31 us for a launch; the few over a rank's heads may not."""
    assert simulate_cached().breakdown.category_total(TimeCategory.LAUNCH) < 2e-3 * simulate_cached().step_time


def test_the_slowest_gpu_determines_the_matmul_rate() -> None:
    """Rate 1/(1 + spread x slowest(n)): without spread the step is shorter, and a rate of 0.94 is slower than 1."""
    base = scenario("cost.interference=0")
    gpu = base.cluster.accelerator
    seconds = []
    for derating in (
        TrainingDerating(),
        TrainingDerating(sustained_ratio=0.94),
        TrainingDerating(sustained_ratio=0.94, gpu_spread=0.05),
    ):
        cluster = replace(base.cluster, accelerator=replace(gpu, derating=derating))
        seconds.append(simulate(replace(base, cluster=cluster)).step_time)
    ideal, sustained, with_spread = seconds
    assert ideal < sustained < ideal / 0.94
    assert sustained < with_spread < sustained * (1 + 0.05 * slowest_deviation(16))


@pytest.mark.parametrize("attention", ["flash3", "flash2", "flash1"])
def test_another_library_changes_only_attention(attention: str) -> None:
    """One GPU's step changes by what its attention does; FlashAttention-3 is faster than cuDNN of that time."""
    single_gpu = scenario("cluster.gpus=1", "model.layers=2", layout={}, training={"sequence": 4096, "global_batch": 1})
    single_gpu = replace(
        single_gpu, framework=replace(single_gpu.framework, launch_seconds=0.0, backward_launch_seconds=0.0)
    )
    flash, older = (
        simulate(replace(single_gpu, training=replace(single_gpu.training, attention=AttentionBackend(item))))
        for item in ("flash", attention)
    )

    assert older.step_time - flash.step_time == pytest.approx(attention_seconds(older) - attention_seconds(flash))
    ratio = attention_seconds(older) / attention_seconds(flash)
    assert 0.8 < ratio < 1 if attention == "flash3" else ratio > 1.3


def attention_seconds(result: SimulationResult) -> float:
    """Seconds of flash attention in a step of one GPU."""
    segments = [task.segment for task in result.program.programs[0].tasks if isinstance(task, ComputeTask)]
    return sum(
        seconds
        for segment in segments
        for operation, seconds in zip(segment.operations, result.cost.time_segment(0, segment).durations, strict=True)
        if operation.kernel is not None and operation.kernel.name.startswith("attention.core")
    )


def test_without_backward_overlap_tensor_collectives_are_exposed() -> None:
    overlapped, separate = (
        simulate_cached(f"layout.async_tensor_model_parallel_allreduce={item}") for item in ("true", "false")
    )
    assert separate.breakdown.category_total(TimeCategory.EXPOSED_TP) > overlapped.breakdown.category_total(
        TimeCategory.EXPOSED_TP
    )
    assert separate.breakdown.category_total(TimeCategory.SLOWED) < overlapped.breakdown.category_total(
        TimeCategory.SLOWED
    )
    assert separate.breakdown.category_total(TimeCategory.COMPUTE) == pytest.approx(
        overlapped.breakdown.category_total(TimeCategory.COMPUTE)
    )
    assert separate.step_time > overlapped.step_time


def test_selective_op_recompute_is_between_none_and_full() -> None:
    """With the allocator of Megatron-LM, whose fragmentation does not depend on it."""
    none, selective, full = (
        simulate_cached(f"training.recompute={item}", "framework=megatron") for item in ("none", "selective_op", "full")
    )
    assert none.step_time < selective.step_time < full.step_time
    assert none.peak_memory > selective.peak_memory > full.peak_memory
    assert (
        0
        < selective.breakdown.category_total(TimeCategory.RECOMPUTE)
        < full.breakdown.category_total(TimeCategory.RECOMPUTE)
    )


def test_provenance_sums_to_one(variant_result: SimulationResult) -> None:
    assert sum(variant_result.provenance_shares.values()) == pytest.approx(1.0)
    assert all(share >= 0 for share in variant_result.provenance_shares.values())


def test_the_critical_path_sums_to_the_step(variant_result: SimulationResult) -> None:
    """It is a chain without gaps from the start to the last end, so its categories sum to the step time."""
    assert sum(variant_result.critical_path_breakdown.values()) == pytest.approx(variant_result.step_time)


def test_the_memory_check_matches_the_simulation(variant_result: SimulationResult) -> None:
    """The peak follows from the order of passes, and does not depend on simulated times."""
    assert variant_result.peak_memory == pytest.approx(check(variant_result.scenario).peak_memory_bytes, rel=1e-12)
    assert variant_result.fits_in_memory is check(variant_result.scenario).fits
    assert variant_result.memory_capacity == check(variant_result.scenario).memory_capacity_bytes


def test_ledgers_follow_the_trace(variant_result: SimulationResult) -> None:
    """Activations are allocated from the start of the first pass, also where it is split into sub-segments."""
    for pipeline_rank, ledger in enumerate(variant_result.ledgers):
        rank = int(np.flatnonzero(variant_result.program.program_index == pipeline_rank)[0])
        compute_tasks = [
            task for task in variant_result.program.programs[pipeline_rank].tasks if isinstance(task, ComputeTask)
        ]
        first_pass = next(index for index, task in enumerate(compute_tasks) if task.action is not None)
        events = variant_result.trace.rank_events(int(variant_result.trace.representative[rank]), stream=0)
        assert ledger.times[0] == variant_result.trace.start[events[first_pass]]
        assert (np.diff(ledger.times) >= 0).all()
        assert ledger.times[0] >= 0
        assert ledger.times[-1] <= variant_result.step_time
        assert abs(ledger.activations[-1]) <= 1e-9 * ledger.peak_activations


def test_fewer_ranks_are_simulated_than_exist(variant_result: SimulationResult) -> None:
    assert 1 <= variant_result.simulated_rank_count < variant_result.rank_count


def test_spans_are_the_operations_of_the_simulated_ranks(variant_result: SimulationResult) -> None:
    """Kernels and collectives: as many as are counted in the tasks of the simulated ranks."""
    count = 0
    for rank in variant_result.trace.simulated_ranks.tolist():
        tasks = variant_result.program.programs[int(variant_result.program.program_index[rank])].tasks
        assert len(variant_result.trace.rank_events(rank)) == len(tasks)
        count += sum(len(task.segment.operations) if hasattr(task, "segment") else 1 for task in tasks)
    assert variant_result.operation_count == count


def test_folding_does_not_change_the_result(variant_result: SimulationResult) -> None:
    """With every rank simulated: the same step, breakdown, memory; only more simulated ranks and spans."""
    cost = replace(variant_result.scenario.cost, symmetry=Symmetry.OFF)
    unfolded = simulate(replace(variant_result.scenario, cost=cost))
    assert unfolded.simulated_rank_count == unfolded.rank_count == variant_result.rank_count
    assert unfolded.step_time == pytest.approx(variant_result.step_time, rel=1e-12)
    assert unfolded.breakdown.mean_seconds() == pytest.approx(variant_result.breakdown.mean_seconds())
    assert unfolded.peak_memory == pytest.approx(variant_result.peak_memory)
    assert unfolded.model_flops == variant_result.model_flops
    assert dict(unfolded.provenance_shares) == pytest.approx(dict(variant_result.provenance_shares))


def test_check_does_not_simulate(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("simulated")

    for name in (
        "simulation.simulate_step",
        "build.lower_step",
        "build.equivalence_classes",
        "build.contended_classes",
    ):
        monkeypatch.setattr(f"clustersim.{name}", fail)
    report = check(scenario())
    assert report.fits
    assert report.peak_memory_bytes == peak_memory(scenario())


def test_a_layout_that_does_not_fit_is_simulated_with_suggestions() -> None:
    """8 B parameters x 18 bytes = 145 GB on one H100 of 80."""
    result = simulate_cached("layout={dp: 16}")
    assert result.step_time > 0
    assert not result.fits_in_memory
    assert result.oom_suggestions == check(result.scenario).suggestions
    assert result.oom_suggestions
    assert {suggestion.description for suggestion in result.oom_suggestions} < set(result.warnings) | {""}


def test_a_layout_that_fits_has_no_suggestions() -> None:
    assert simulate_cached().oom_suggestions == ()


def test_fragmentation_and_context_are_counted() -> None:
    peak_bytes = simulate_cached().ledgers[0].peak_by_category()
    assert peak_bytes[MemoryCategory.CONTEXT] == scenario().cluster.accelerator.context_bytes > 0
    assert peak_bytes[MemoryCategory.FRAGMENTATION] > 0
    assert peak_bytes[MemoryCategory.COMMUNICATION] > 0


def test_simulation_is_deterministic() -> None:
    first, second = simulate(scenario()), simulate(scenario())
    for column in ("rank", "task", "start", "end", "critical_predecessor"):
        assert (getattr(first.trace, column) == getattr(second.trace, column)).all()


def test_the_step_time_is_linear_in_the_microbatches() -> None:
    """Without a pipeline: the passes of a microbatch repeat, all else happens once."""
    without_pipeline = ("layout={tp: 2, dp: 8, sequence_parallel: true}",)
    times = [simulate_cached(*without_pipeline, f"training.global_batch={batch}").step_time for batch in (16, 24, 32)]
    assert times[2] - times[1] == pytest.approx(times[1] - times[0], rel=1e-9)


def test_131072_ranks() -> None:
    """Eight times the largest example; few ranks represent all."""
    large = Scenario.from_mapping(
        {
            "model": "llama3-405b",
            "cluster": {"name": "llama3-roce", "gpus": 131072, "fabric": {"core": {"pods": 43}}},
            "layout": {"tp": 8, "pp": 16, "dp": 1024, "sequence_parallel": True, "data": "zero2"},
            "schedule": {"interleaved": {"chunks": 2}},
            "training": {"sequence": 8192, "global_batch": 16384, "recompute": {"layers": 1}},
            "framework": "megatron",
        }
    )
    result = simulate(large)
    assert result.rank_count == 131072
    assert result.simulated_rank_count <= 1024
    assert result.fits_in_memory
    assert 1.0 < result.step_time < 60.0


def test_a_single_gpu() -> None:
    """No groups, no communication: the step is its kernels, and memory has no communication buffers."""
    result = simulate(
        scenario("model=gpt2-small", "cluster.gpus=1", "layout={}", "training.sequence=1024", "training.global_batch=2")
    )
    assert result.rank_count == result.simulated_rank_count == 1
    category_seconds = result.breakdown.mean_seconds()
    assert (
        sum(seconds for name, seconds in category_seconds.items() if "communication" in name or "exposed" in name)
        == 0.0
    )
    assert result.ledgers[0].peak_by_category()[MemoryCategory.COMMUNICATION] == 0.0


@pytest.mark.parametrize("answer", [simulate, check])
def test_wrong_argument_types_are_refused_with_a_hint(answer: Callable[[Any], object]) -> None:
    with pytest.raises(TypeError, match=r"str is not a Scenario; build one, as in Scenario.load"):
        answer("plan.yaml")


@pytest.mark.parametrize("answer", [simulate, check])
def test_inconsistent_scenarios_are_refused(answer: Callable[[Scenario], object]) -> None:
    consistent = scenario()
    with pytest.raises(InputError, match="ranks, but the cluster has 16 GPUs"):
        answer(replace(consistent, layout=replace(consistent.layout, tp=4)))


def test_collectives_on_a_changed_machine_are_not_published() -> None:
    """On the changed machine only kernels are still `published`: with H100's constants."""
    changed = {"name": "dgx-h100", "gpus": 16, "node": {"nvlink": {"bandwidth": "7 GB/s"}}}
    assert simulate_cached().provenance_shares["published"] == pytest.approx(1)
    assert 0 < simulate(scenario(cluster=changed)).provenance_shares["published"] < 0.9


def test_mixed_clusters_use_the_smallest_memory_per_stage_and_the_mean_peak() -> None:
    """The second stage is on the second node, of GPUs with half the memory and a third of the peak."""
    mixed = {"name": "dgx-h100", "gpus": 16, "mixed": {"node": 1, "accelerator": "a100-sxm-40gb"}}
    result = simulate(scenario(cluster=mixed))
    big, small = result.scenario.cluster.accelerator_kinds()[0]
    assert result.memory.capacities == (big.memory_bytes, small.memory_bytes)
    precision = result.scenario.training.recipe.compute
    assert result.peak_flops == (big.peak_flops(precision) + small.peak_flops(precision)) / 2
    report = check(scenario(cluster=mixed))
    assert report.memory_capacity_bytes == result.memory_capacity
    assert report.peak_memory_bytes == result.peak_memory
    mixed_first_node = {"name": "dgx-h100", "gpus": 16, "mixed": {"node": 0, "accelerator": "a100-sxm-40gb"}}
    spread_result = simulate(scenario("layout.order=[tp, pp, cp, dp]", cluster=mixed_first_node))
    assert spread_result.memory.capacities == (small.memory_bytes, small.memory_bytes), (
        "each stage has GPUs of both nodes"
    )


def test_several_steps_are_reported_by_their_mean() -> None:
    one, three = simulate_cached(), simulate_cached("steps=3")
    assert three.step_times.sum() == pytest.approx(three.trace.makespan)
    assert three.step_time == pytest.approx(three.step_times.mean())
    assert three.model_flops == one.model_flops
    assert three.peak_memory == one.peak_memory
    assert sum(three.breakdown.mean_seconds().values()) == pytest.approx(three.step_time)


def test_interference_costs_time_and_can_be_disabled() -> None:
    default, without, doubled = (
        simulate_cached(*changes, "layout.data=zero1")
        for changes in ((), ("cost.interference=0",), ("cost.interference=38 %",))
    )
    assert without.step_time < default.step_time < doubled.step_time
    assert without.breakdown.mean_seconds()["slowed by communication"] == 0
    assert default.scenario.cluster.accelerator.interference == 0.19


def collective_record(calls: dict[CollectiveCall, float]) -> CalibrationRecord:
    samples = tuple(
        CollectiveSample(call, TimeStatistics(seconds, seconds, seconds, 20)) for call, seconds in calls.items()
    )
    return CalibrationRecord(
        DeviceInfo("h100-sxm-80gb", "a test's GPU"),
        MeasurementConditions("2026-11-20", "none", "made up"),
        collectives=samples,
    )


def test_precedence_of_interference_levels() -> None:
    """The scenario before the record, the record before the accelerator's file.

    Records have levels by kind and class.
    """
    base = scenario("layout.data=zero1")
    norm = next(kernel for kernel in distinct_kernels(base) if kernel.kind is KernelKind.NORM)
    assert norm.shape is not None
    statistics = TimeStatistics(1.0, 1.0, 1.0, 9)
    sample = KernelSample(
        norm.name, norm.kind, norm.dtype, norm.shape, norm.flops, norm.bytes, norm.launches, statistics
    )
    gathered = CollectiveCall(CollectiveType.ALL_GATHER, 1e6, 8, 1)
    gather_sample = InterferenceSample(
        sample, "all_gather", TimeStatistics(1.5, 1.5, 1.5, 9), gathered, statistics, TimeStatistics(3.0, 3.0, 3.0, 9)
    )
    reduce_sample = replace(
        gather_sample,
        overlapped_with="all_reduce",
        call=None,
        overlapped_time=statistics,
        isolated_call_time=None,
        overlapped_call_time=None,
    )
    record = replace(collective_record({}), interference=(gather_sample, reduce_sample))
    measured = replace(base, cost=replace(base.cost, record=record))
    overridden = replace(measured, cost=replace(measured.cost, interference=0.07))
    tables = [build_simulation(item).cost.device_models.models[0].interference for item in (base, measured, overridden)]
    memory_pairs = [(kind, KernelClass.MEMORY) for kind in (CollectiveType.ALL_GATHER, CollectiveType.ALL_REDUCE)]
    assert [[table.kernels[element] for element in memory_pairs] for table in tables] == [
        [0.19] * 2,
        [0.5, 0.0],
        [0.07] * 2,
    ]
    assert [[table.collectives[entry] for entry in memory_pairs] for table in tables] == [
        [0.0] * 2,
        [2.0] * 2,
        [0.0] * 2,
    ]


def test_a_uniform_interference_table_equals_one_level_exactly() -> None:
    """Whether the level is in the scenario, or in a record in which every pair was slowed by it."""
    base = scenario("layout.data=zero1", "training.attention=flash")
    samples = []
    for kernel in distinct_kernels(base):
        if kernel.shape is not None and kernel.kind in (KernelKind.MATMUL, KernelKind.NORM):
            statistics = TimeStatistics(1.0, 1.0, 1.0, 9)
            key_fields = (
                kernel.name,
                kernel.kind,
                kernel.dtype,
                kernel.shape,
                kernel.flops,
                kernel.bytes,
                kernel.launches,
            )
            overlapped = TimeStatistics(1.5, 1.5, 1.5, 9)
            samples += [
                InterferenceSample(KernelSample(*key_fields, statistics), kind, overlapped)
                for kind in ("all_gather", "reduce")
            ]
    record = replace(collective_record({}), interference=tuple(samples))
    by_record = simulate(replace(base, cost=replace(base.cost, record=record)))
    by_level = simulate(replace(base, cost=replace(base.cost, interference=0.5)))
    for name in ("start", "end", "slowed"):
        assert getattr(by_record.trace, name).tolist() == getattr(by_level.trace, name).tolist()
    assert by_level.trace.slowed.any()


def test_recorded_collectives_take_their_measured_time() -> None:
    """Without overlap a step grows by the additional time of its one reduction."""
    plain = scenario("layout.tp=1", "layout.pp=1", "layout.dp=16", "layout.data.ddp.overlap=false")
    reduction = next(call for call in distinct_comm_calls(plain) if call.payload > 1e6)
    assert (reduction.ranks, reduction.nodes) == (16, 2)
    results = [
        simulate(replace(plain, cost=replace(plain.cost, record=collective_record({reduction: seconds}))))
        for seconds in (1.0, 3.0)
    ]
    assert results[1].step_time == pytest.approx(results[0].step_time + 2.0)
    assert results[1].provenance_shares["measured"] > results[0].provenance_shares["measured"] > 0


def test_a_record_is_not_used_for_degraded_networks_and_forced_algorithms() -> None:
    """On a degraded network, and for algorithms forced by the user."""
    calls = dict.fromkeys(distinct_comm_calls(scenario()), 1e-3)
    kinds = {call.collective.value for call in calls} & {"all_gather", "reduce_scatter", "all_reduce"}
    forced = {"collectives": dict.fromkeys(kinds, "ring")}
    for case, is_used in (
        (scenario(), True),
        (scenario(degradations={"nics": [{"gpu": 3, "bandwidth": 0.5}]}), False),
        (scenario(cost=forced), True),  # still used for messages of the pipeline
    ):
        result = simulate(replace(case, cost=replace(case.cost, record=collective_record(calls))))
        assert (result.provenance_shares["measured"] > 0) == is_used
    chosen = {item.body.collective.value for item in result.busy_time_items if item.provenance is Provenance.MEASURED}  # type: ignore[union-attr]
    assert chosen == {call.collective.value for call in calls} - kinds


def with_model_record(case: Scenario) -> Scenario:
    """With a record that holds the modelled standalone time of every kernel of the scenario."""
    gpu, samples = case.cluster.accelerator, []
    for distinct_kernel in distinct_kernels(case):
        seconds = Roofline(gpu).time_kernel(distinct_kernel).seconds
        assert distinct_kernel.shape is not None
        amounts = distinct_kernel.flops, distinct_kernel.bytes, distinct_kernel.launches
        samples.append(
            KernelSample(
                distinct_kernel.name,
                distinct_kernel.kind,
                distinct_kernel.dtype,
                distinct_kernel.shape,
                *amounts,
                TimeStatistics(seconds, seconds, seconds, 20),
            )
        )
    record = CalibrationRecord(
        DeviceInfo(gpu.name, "this machine"), MeasurementConditions("2026-11-22", "", ""), tuple(samples)
    )
    return replace(case, cost=replace(case.cost, record=record))


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("training.attention=flash1", "framework=megatron-2021"),
        ("cluster=dgx-a100", "layout.data=fsdp", "layout.pp=1", "layout.dp=8", "training.recompute=full"),
        ("layout.tp_comm_overlap=true", "training.attention=standard"),
        ("degradations.slow={gpu: 3, speed: 0.9}",),
    ],
)
def test_a_record_of_modelled_kernels_does_not_change_the_step(overrides: tuple[str, ...]) -> None:
    """In-situ effects apply to measured kernels too: sustained rate, the slowest GPU, older attention.

    A faster library than the measured one is the exception: the measured system may not have it.
    """
    case = scenario("model.layers=4", "training.attention=flash", *overrides)
    modelled, with_record = simulate(case), simulate(with_model_record(case))
    assert with_record.provenance_shares["measured"] > 0.5
    assert with_record.step_time == modelled.step_time
    assert with_record.breakdown.mean_seconds() == modelled.breakdown.mean_seconds()


def test_the_in_situ_slowdown_of_measured_kernels_is_reported() -> None:
    """On one GPU, measured matmuls take 1/sustained times as long, which is included in the prediction interval."""
    single_gpu = scenario("cluster.gpus=1", "model.layers=2", layout={}, training={"sequence": 4096, "global_batch": 1})
    result = simulate(with_model_record(single_gpu))
    sustained = single_gpu.cluster.accelerator.derating.sustained_ratio
    assert result.in_situ_slowdown.slowdown == pytest.approx(
        1 / sustained, rel=0.01
    )  # without 5.5 us of fixed time per kernel
    assert (
        f"{result.in_situ_slowdown.share:.0%} as standalone kernels, times {result.in_situ_slowdown.slowdown:.3f}"
        in result.interval_description
    )
    assert result.to_json()["in_situ"] == {
        "share": result.in_situ_slowdown.share,
        "slowdown": result.in_situ_slowdown.slowdown,
    }
    gpu = replace(single_gpu.cluster.accelerator, derating=TrainingDerating())
    without_derating = simulate(
        with_model_record(replace(single_gpu, cluster=replace(single_gpu.cluster, accelerator=gpu)))
    )
    assert without_derating.in_situ_slowdown.share == 0.0
    assert "standalone" not in without_derating.interval_description
    assert result.step_time_interval[0] < without_derating.step_time < result.step_time


OTHER_OVERRIDES = (
    ("layout.tp=4", "layout.dp=2"),
    ("training.global_batch=16", "layout.data=zero1"),
    ("cost.network=uncontended",),
    ("cluster=dgx-a100", "cluster.gpus=16"),
)


@pytest.mark.parametrize("asked", [(), ("layout.data=zero1", "steps=2"), ("degradations.slow=[{gpu: 3, speed: 0.9}]",)])
def test_caches_of_other_scenarios_do_not_change_the_result(asked: tuple[str, ...]) -> None:
    cached_tuner.cache_clear()
    first = simulate(scenario(*asked))
    for other in OTHER_OVERRIDES:
        simulate(scenario(*other))
    second = simulate(scenario(*asked))
    assert {**second.to_json(), "simulate_wall_s": 0} == {**first.to_json(), "simulate_wall_s": 0}
    assert (second.trace.end == first.trace.end).all()
    assert (second.trace.critical_predecessor == first.trace.critical_predecessor).all()


def test_scenarios_with_the_same_program_share_it() -> None:
    """Slow GPUs change no task; the batch and the placement of stages do."""
    same = pipeline_scenario("degradations={slow: [{gpu: 3, speed: 0.9}]}")
    assert build_simulation(pipeline_scenario()).program is build_simulation(same).program
    for change in ("training.global_batch=32", "schedule={interleaved: {chunks: 2}}", "training.recompute=full"):
        assert build_simulation(pipeline_scenario(change)).program is not build_simulation(pipeline_scenario()).program


@pytest.mark.parametrize(
    "asked",
    [
        scenario("layout.data=zero1"),
        pipeline_scenario("training.global_batch=64"),
        pipeline_scenario("degradations.slow={gpu: 1, speed: 0.5}", "layout.data=fsdp"),
    ],
)
def test_a_simulation_leaves_nothing_for_the_garbage_collector(asked: Scenario) -> None:
    """Reference cycles would stay until a full collection.

    A pipeline's steady state is detected, and with a slow GPU ranks run segments as a group.
    """
    simulate(asked)
    gc.collect()
    gc.disable()
    try:
        simulate(asked)
        assert gc.collect() == 0
    finally:
        gc.enable()
