"""Whole simulations: what `simulate` and `check` answer, and that they agree."""

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from clustersim import Scenario, simulate
from clustersim.build import build_simulation, distinct_comm_calls, distinct_kernels
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
from tests.small_pipeline import pipeline


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
def simulated(*overrides: str) -> SimulationResult:
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
    "no overlap": ("layout.pipeline_overlap=false", "layout.data.ddp.overlap=false", "layout.backward_overlap=false"),
    "sends together": ("schedule.interleaved.chunks=4", "layout.pipeline_overlap=false"),
    "zero bubble": ("schedule=zb-2p",),
    "zero bubble in a V": ("schedule=zb-v",),
    "breadth first": ("schedule.bfs.chunks=4", "layout.pipeline_overlap=false"),
    "selective operations": ("training.recompute=selective_op",),
    "older attention on a slow host": ("training.attention=flash1", "framework=megatron-2021", "training.sequence=512"),
}
SMALL = (
    "cluster.gpus=4", "layout.tp=1", "layout.pp=1", "layout.dp=4", "layout.sequence_parallel=false",
    "model=gpt2-small", "training.sequence=1024", "layout.data=data_parallel",
)  # fmt: skip


@pytest.fixture(scope="module", params=[*VARIANTS, "one process"])
def result(request: pytest.FixtureRequest) -> SimulationResult:
    return simulated(*VARIANTS.get(request.param, SMALL))


def test_the_breakdown_sums_to_the_step_on_every_rank(result: SimulationResult) -> None:
    for rank in range(result.rank_count):
        assert sum(result.breakdown.rank_seconds(rank).values()) == pytest.approx(result.step_time)


def test_every_part_is_there_and_none_is_negative(result: SimulationResult) -> None:
    mean = result.breakdown.mean_seconds()
    assert set(mean) == {str(part.value) if hasattr(part, "value") else str(part) for part in TIME_CATEGORIES}
    assert min(mean.values()) >= -1e-12


TINY = (
    "model=gpt2-small", "model.layers=4", "model.vocab=50432", "training.sequence=128", "training.global_batch=8",
    "layout.pp=1", "layout.dp=8",
)  # fmt: skip


@pytest.mark.parametrize("jitter", ["0 %", "5 %"])
def test_a_gpu_that_waits_for_its_host_says_so(jitter: str) -> None:
    """Kernels of some µs that the host needs 64 µs each to launch: most of the step is launching, on every rank."""
    tiny = scenario(*TINY, f"disturbances.jitter={jitter}")
    hosts = (replace(tiny.framework, launch_seconds=launch, backward_launch_seconds=launch) for launch in (64e-6, 0.0))
    late, ready = (simulate(replace(tiny, framework=host)) for host in hosts)
    for rank in range(late.rank_count):
        parts = late.breakdown.rank_seconds(rank)
        assert sum(parts.values()) == pytest.approx(late.step_time)
        assert parts["kernel launch"] > 0.5 * late.step_time
        assert ready.breakdown.rank_seconds(rank)["kernel launch"] == 0.0
    assert late.step_time > 2 * ready.step_time
    if tiny.jitter is None:
        for part in (
            TimeCategory.COMPUTE,
            TimeCategory.OPTIMIZER,
        ):  # as long as without waiting: what kernels take does not change
            assert late.breakdown.category_total(part) == pytest.approx(ready.breakdown.category_total(part))


def test_a_gpu_with_much_to_do_does_not_wait_for_its_host() -> None:
    """Kernels of 4,096 tokens take longer than 10 µs of launching each; only the optimizer's few may not."""
    assert simulated().breakdown.category_total(TimeCategory.LAUNCH) < 1e-3 * simulated().step_time


def test_the_slowest_of_the_gpus_sets_the_pace_of_products() -> None:
    """Rate 1/(1 + spread x slowest(n)): without spread the step is shorter, and a rate of 0.94 is slower than 1."""
    usual = scenario("cost.interference=0")
    gpu = usual.cluster.accelerator
    seconds = []
    for pace in (
        TrainingDerating(),
        TrainingDerating(sustained_ratio=0.94),
        TrainingDerating(sustained_ratio=0.94, gpu_spread=0.05),
    ):
        cluster = replace(usual.cluster, accelerator=replace(gpu, derating=pace))
        seconds.append(simulate(replace(usual, cluster=cluster)).step_time)
    ideal, warm, uneven = seconds
    assert ideal < warm < ideal / 0.94
    assert warm < uneven < warm * (1 + 0.05 * slowest_deviation(16))


@pytest.mark.parametrize(("attention", "times"), [("flash2", 1.6), ("flash1", 3.2)])
def test_older_attention_takes_its_times_longer_and_nothing_else_does(attention: str, times: float) -> None:
    """One GPU's step takes longer by (times - 1) of its attention: `flash2_slowdown` of H100's file, for flash1 twice that."""
    alone = scenario("cluster.gpus=1", "model.layers=2", layout={}, training={"sequence": 4096, "global_batch": 1})
    assert alone.cluster.accelerator.derating.flash2_slowdown == 1.6
    alone = replace(alone, framework=replace(alone.framework, launch_seconds=0.0, backward_launch_seconds=0.0))
    newest, older = (
        simulate(replace(alone, training=replace(alone.training, attention=AttentionBackend(item))))
        for item in ("flash", attention)
    )

    assert attention_seconds(older) == pytest.approx(times * attention_seconds(newest))
    assert older.step_time - newest.step_time == pytest.approx((times - 1) * attention_seconds(newest))


def attention_seconds(result: SimulationResult) -> float:
    """Seconds of flash attention in a step of one GPU."""
    blocks = [task.segment for task in result.program.programs[0].tasks if isinstance(task, ComputeTask)]
    return sum(
        seconds
        for block in blocks
        for operation, seconds in zip(block.operations, result.cost.time_segment(0, block).durations, strict=True)
        if operation.kernel is not None and operation.kernel.name.startswith("attention.core")
    )


def test_without_overlap_in_backward_tensor_collectives_are_exposed() -> None:
    beside, alone = (simulated(f"layout.backward_overlap={item}") for item in ("true", "false"))
    assert alone.breakdown.category_total(TimeCategory.EXPOSED_TP) > beside.breakdown.category_total(
        TimeCategory.EXPOSED_TP
    )
    assert alone.breakdown.category_total(TimeCategory.SLOWED) < beside.breakdown.category_total(TimeCategory.SLOWED)
    assert alone.breakdown.category_total(TimeCategory.COMPUTE) == pytest.approx(
        beside.breakdown.category_total(TimeCategory.COMPUTE)
    )
    assert alone.step_time > beside.step_time


def test_selective_operations_cost_less_time_than_full_recomputation_and_less_memory_than_none() -> None:
    none, selective, full = (simulated(f"training.recompute={item}") for item in ("none", "selective_op", "full"))
    assert none.step_time < selective.step_time < full.step_time
    assert none.peak_memory > selective.peak_memory > full.peak_memory
    assert (
        0
        < selective.breakdown.category_total(TimeCategory.RECOMPUTE)
        < full.breakdown.category_total(TimeCategory.RECOMPUTE)
    )


def test_provenance_sums_to_one(result: SimulationResult) -> None:
    assert sum(result.provenance_shares.values()) == pytest.approx(1.0)
    assert all(share >= 0 for share in result.provenance_shares.values())


def test_the_critical_path_fills_the_step(result: SimulationResult) -> None:
    """It is a chain without gaps from the start to the last end, so its parts sum to the step time."""
    assert sum(result.critical_path_breakdown.values()) == pytest.approx(result.step_time)


def test_checked_memory_is_simulated_memory(result: SimulationResult) -> None:
    """The peak follows from the order of passes; simulated times change nothing."""
    assert result.peak_memory == pytest.approx(check(result.scenario).peak_memory_bytes, rel=1e-12)
    assert result.fits_in_memory is check(result.scenario).fits
    assert result.memory_capacity == check(result.scenario).memory_capacity_bytes


def test_ledgers_follow_the_trace(result: SimulationResult) -> None:
    """Activations are there from the start of the first pass, also where it is cut into pieces."""
    for pipeline_rank, made in enumerate(result.ledgers):
        rank = int(np.flatnonzero(result.program.program_index == pipeline_rank)[0])
        computed = [task for task in result.program.programs[pipeline_rank].tasks if isinstance(task, ComputeTask)]
        first = next(place for place, task in enumerate(computed) if task.action is not None)
        rows = result.trace.rank_events(int(result.trace.representative[rank]), stream=0)
        assert made.times[0] == result.trace.start[rows[first]]
        assert (np.diff(made.times) >= 0).all()
        assert made.times[0] >= 0
        assert made.times[-1] <= result.step_time
        assert abs(made.activations[-1]) <= 1e-9 * made.peak_activations


def test_fewer_ranks_are_simulated_than_there_are(result: SimulationResult) -> None:
    assert 1 <= result.simulated_rank_count < result.rank_count


def test_spans_are_the_operations_of_the_simulated_ranks(result: SimulationResult) -> None:
    """Kernels and collectives: as many as one finds by going through the simulated ranks' tasks."""
    count = 0
    for rank in result.trace.simulated_ranks.tolist():
        tasks = result.program.programs[int(result.program.program_index[rank])].tasks
        assert len(result.trace.rank_events(rank)) == len(tasks)
        count += sum(len(task.segment.operations) if hasattr(task, "segment") else 1 for task in tasks)
    assert result.operation_count == count


def test_folding_changes_no_answer(result: SimulationResult) -> None:
    """Every rank on its own: the same step, breakdown, memory; only more ranks and spans."""
    cost = replace(result.scenario.cost, symmetry=Symmetry.OFF)
    unfolded = simulate(replace(result.scenario, cost=cost))
    assert unfolded.simulated_rank_count == unfolded.rank_count == result.rank_count
    assert unfolded.step_time == pytest.approx(result.step_time, rel=1e-12)
    assert unfolded.breakdown.mean_seconds() == pytest.approx(result.breakdown.mean_seconds())
    assert unfolded.peak_memory == pytest.approx(result.peak_memory)
    assert unfolded.model_flops == result.model_flops
    assert dict(unfolded.provenance_shares) == pytest.approx(dict(result.provenance_shares))


def test_check_does_not_simulate(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("simulated")

    for name in ("simulation.run", "assembly.lower", "assembly.alike", "assembly.alike_shared"):
        monkeypatch.setattr(f"clustersim.{name}", fail)
    report = check(scenario())
    assert report.fits
    assert report.peak_memory_bytes == peak_memory(scenario())


def test_a_layout_that_does_not_fit_is_simulated_flagged_and_helped() -> None:
    """8 B parameters x 18 bytes = 145 GB on one H100 of 80."""
    result = simulated("layout={dp: 16}")
    assert result.step_time > 0
    assert not result.fits_in_memory
    assert result.oom_suggestions == check(result.scenario).suggestions
    assert result.oom_suggestions
    assert set(result.oom_suggestions) < set(result.warnings) | {""}


def test_what_fits_has_no_suggestions() -> None:
    assert simulated().oom_suggestions == ()


def test_fragmentation_and_context_are_counted() -> None:
    parts = simulated().ledgers[0].peak_by_category()
    assert parts[MemoryCategory.CONTEXT] == scenario().cluster.accelerator.context_bytes > 0
    assert parts[MemoryCategory.FRAGMENTATION] > 0
    assert parts[MemoryCategory.COMMUNICATION] > 0


def test_the_same_scenario_gives_the_same_trace() -> None:
    first, again = simulate(scenario()), simulate(scenario())
    for column in ("rank", "task", "start", "end", "cause"):
        assert (getattr(first.trace, column) == getattr(again.trace, column)).all()


def test_twice_the_batch_takes_longer_by_as_many_microbatches() -> None:
    """1F1B on one stage: the passes of a microbatch repeat, all else happens once."""
    flat = ("layout={tp: 2, dp: 8, sequence_parallel: true}",)
    times = [simulated(*flat, f"training.global_batch={batch}").step_time for batch in (16, 24, 32)]
    assert times[2] - times[1] == pytest.approx(times[1] - times[0], rel=1e-9)


def test_131072_ranks() -> None:
    """Eight times the largest example; a handful of ranks stands for all."""
    large = Scenario.from_mapping(
        {
            "model": "llama3-405b",
            "cluster": {"name": "llama3-roce", "gpus": 131072, "fabric": {"core": {"pods": 43}}},
            "layout": {"tp": 8, "pp": 16, "dp": 1024, "sequence_parallel": True, "data": "zero2"},
            "schedule": {"interleaved": {"chunks": 2}},
            "training": {"sequence": 8192, "global_batch": 16384, "recompute": {"layers": 1}},
        }
    )
    result = simulate(large)
    assert result.rank_count == 131072
    assert result.simulated_rank_count <= 1024
    assert result.fits_in_memory
    assert 1.0 < result.step_time < 60.0


def test_a_single_gpu() -> None:
    """No groups, no exchanges: the step is its kernels, and memory has no communication buffers."""
    alone = simulate(
        scenario("model=gpt2-small", "cluster.gpus=1", "layout={}", "training.sequence=1024", "training.global_batch=2")
    )
    assert alone.rank_count == alone.simulated_rank_count == 1
    parts = alone.breakdown.mean_seconds()
    assert sum(seconds for name, seconds in parts.items() if "communication" in name or "exposed" in name) == 0.0
    assert alone.ledgers[0].peak_by_category()[MemoryCategory.COMMUNICATION] == 0.0


@pytest.mark.parametrize("answer", [simulate, check])
def test_what_is_no_scenario_is_refused_with_the_way_to_one(answer: Callable[[Any], object]) -> None:
    with pytest.raises(TypeError, match=r"str is not a Scenario; build one, as in Scenario.load"):
        answer("plan.yaml")


@pytest.mark.parametrize("answer", [simulate, check])
def test_parts_that_no_longer_agree_are_refused(answer: Callable[[Scenario], object]) -> None:
    agreed = scenario()
    with pytest.raises(InputError, match="ranks, but the cluster has 16 GPUs"):
        answer(replace(agreed, layout=replace(agreed.layout, tp=4)))


def test_collectives_of_a_machine_that_nobody_measured_are_no_published_ones() -> None:
    """On the changed machine what is left of `published` are kernels: H100's own constants."""
    changed = {"name": "dgx-h100", "gpus": 16, "node": {"nvlink": {"bandwidth": "7 GB/s"}}}
    assert simulated().provenance_shares["published"] == pytest.approx(1)
    assert 0 < simulate(scenario(cluster=changed)).provenance_shares["published"] < 0.9


def test_each_stage_has_the_memory_of_its_smallest_gpu_and_the_peak_is_the_mean_of_all() -> None:
    """The second stage is on the second node, of GPUs with half the memory and a third of the peak."""
    mixed = {"name": "dgx-h100", "gpus": 16, "mixed": {"node": 1, "accelerator": "a100-sxm-40gb"}}
    result = simulate(scenario(cluster=mixed))
    big, small = result.scenario.cluster.accelerator_kinds()[0]
    assert result.memory_capacities == (big.memory_bytes, small.memory_bytes)
    precision = result.scenario.training.recipe.compute
    assert result.peak_flops == (big.peak_flops(precision) + small.peak_flops(precision)) / 2
    report = check(scenario(cluster=mixed))
    assert report.memory_capacity_bytes == result.memory_capacity
    assert report.peak_memory_bytes == result.peak_memory
    both = {"name": "dgx-h100", "gpus": 16, "mixed": {"node": 0, "accelerator": "a100-sxm-40gb"}}
    spread = simulate(scenario("layout.order=[tp, pp, cp, dp]", cluster=both))
    assert spread.memory_capacities == (small.memory_bytes, small.memory_bytes), "each stage has GPUs of both nodes"


def test_several_steps_are_answered_by_their_mean() -> None:
    one, three = simulated(), simulated("steps=3")
    assert three.step_times.sum() == pytest.approx(three.trace.makespan)
    assert three.step_time == pytest.approx(three.step_times.mean())
    assert three.model_flops == one.model_flops
    assert three.peak_memory == one.peak_memory
    assert sum(three.breakdown.mean_seconds().values()) == pytest.approx(three.step_time)


def test_interference_costs_time_and_can_be_turned_off() -> None:
    usual, without, doubled = (
        simulated(*changes, "layout.data=zero1")
        for changes in ((), ("cost.interference=0",), ("cost.interference=38 %",))
    )
    assert without.step_time < usual.step_time < doubled.step_time
    assert without.breakdown.mean_seconds()["slowed by communication"] == 0
    assert usual.scenario.cluster.accelerator.interference == 0.19


def recorded(calls: dict[CollectiveCall, float]) -> CalibrationRecord:
    rows = tuple(
        CollectiveSample(call, TimeStatistics(seconds, seconds, seconds, 20)) for call, seconds in calls.items()
    )
    return CalibrationRecord(
        DeviceInfo("h100-sxm-80gb", "a test's GPU"),
        MeasurementConditions("2026-11-20", "none", "made up"),
        collectives=rows,
    )


def test_who_says_by_which_part_kernels_and_collectives_are_slowed() -> None:
    """The scenario before the record, the record before the accelerator's file; a record knows kinds and classes."""
    case = scenario("layout.data=zero1")
    norm = next(kernel for kernel in distinct_kernels(case) if kernel.kind is KernelKind.NORM)
    assert norm.shape is not None
    time = TimeStatistics(1.0, 1.0, 1.0, 9)
    row = KernelSample(norm.name, norm.kind, norm.dtype, norm.shape, norm.flops, norm.bytes, norm.launches, time)
    gathered = CollectiveCall(CollectiveType.ALL_GATHER, 1e6, 8, 1)
    pair = InterferenceSample(
        row, "all_gather", TimeStatistics(1.5, 1.5, 1.5, 9), gathered, time, TimeStatistics(3.0, 3.0, 3.0, 9)
    )
    reduced = replace(pair, beside="all_reduce", call=None, together=time, call_alone=None, call_together=None)
    record = replace(recorded({}), beside=(pair, reduced))
    measured = replace(case, cost=replace(case.cost, record=record))
    said = replace(measured, cost=replace(measured.cost, interference=0.07))
    tables = [build_simulation(item).cost.device_models.models[0].interference for item in (case, measured, said)]
    both = [(kind, KernelClass.MEMORY) for kind in (CollectiveType.ALL_GATHER, CollectiveType.ALL_REDUCE)]
    assert [[table.kernels[element] for element in both] for table in tables] == [[0.19] * 2, [0.5, 0.0], [0.07] * 2]
    assert [[table.collectives[entry] for entry in both] for table in tables] == [[0.0] * 2, [2.0] * 2, [0.0] * 2]


def test_one_number_for_all_kinds_is_that_number_to_the_last_digit() -> None:
    """Whether the scenario says it, or a record in which every pair was slowed by it."""
    case = scenario("layout.data=zero1")
    rows = []
    for kernel in distinct_kernels(case):
        if kernel.shape is not None and kernel.kind in (KernelKind.MATMUL, KernelKind.NORM):
            time = TimeStatistics(1.0, 1.0, 1.0, 9)
            known = (kernel.name, kernel.kind, kernel.dtype, kernel.shape, kernel.flops, kernel.bytes, kernel.launches)
            together = TimeStatistics(1.5, 1.5, 1.5, 9)
            rows += [
                InterferenceSample(KernelSample(*known, time), kind, together) for kind in ("all_gather", "reduce")
            ]
    record = replace(recorded({}), beside=tuple(rows))
    by_record = simulate(replace(case, cost=replace(case.cost, record=record)))
    by_number = simulate(replace(case, cost=replace(case.cost, interference=0.5)))
    for name in ("start", "end", "slowed"):
        assert getattr(by_record.trace, name).tolist() == getattr(by_number.trace, name).tolist()
    assert by_number.trace.slowed.any()


def test_a_record_s_collectives_take_what_was_measured() -> None:
    """Without overlap a step is longer by as much as its one reduction."""
    plain = scenario("layout.tp=1", "layout.pp=1", "layout.dp=16", "layout.data.ddp.overlap=false")
    reduction = next(call for call in distinct_comm_calls(plain) if call.payload > 1e6)
    assert (reduction.ranks, reduction.nodes) == (16, 2)
    took = [
        simulate(replace(plain, cost=replace(plain.cost, record=recorded({reduction: seconds}))))
        for seconds in (1.0, 3.0)
    ]
    assert took[1].step_time == pytest.approx(took[0].step_time + 2.0)
    assert took[1].provenance_shares["measured"] > took[0].provenance_shares["measured"] > 0


def test_a_record_is_left_aside_where_it_cannot_answer() -> None:
    """On a disturbed network, and for algorithms that the user has chosen."""
    calls = dict.fromkeys(distinct_comm_calls(scenario()), 1e-3)
    kinds = {call.collective.value for call in calls} & {"all_gather", "reduce_scatter", "all_reduce"}
    forced = {"collectives": dict.fromkeys(kinds, "ring")}
    for case, uses in (
        (scenario(), True),
        (scenario(disturbances={"nics": [{"gpu": 3, "bandwidth": 0.5}]}), False),
        (scenario(cost=forced), True),  # messages of the pipeline still
    ):
        result = simulate(replace(case, cost=replace(case.cost, record=recorded(calls))))
        assert (result.provenance_shares["measured"] > 0) == uses
    chosen = {item.body.collective.value for item in result.busy_time_items if item.provenance is Provenance.MEASURED}  # type: ignore[union-attr]
    assert chosen == {call.collective.value for call in calls} - kinds


def as_modelled(case: Scenario) -> Scenario:
    """With a record that says of every kernel of the scenario what the model says of it by itself."""
    gpu, rows = case.cluster.accelerator, []
    for distinct_kernel in distinct_kernels(case):
        took = Roofline(gpu).time_kernel(distinct_kernel).seconds
        assert distinct_kernel.shape is not None
        amounts = distinct_kernel.flops, distinct_kernel.bytes, distinct_kernel.launches
        rows.append(
            KernelSample(
                distinct_kernel.name,
                distinct_kernel.kind,
                distinct_kernel.dtype,
                distinct_kernel.shape,
                *amounts,
                TimeStatistics(took, took, took, 20),
            )
        )
    record = CalibrationRecord(
        DeviceInfo(gpu.name, "this machine"), MeasurementConditions("2026-11-22", "", ""), tuple(rows)
    )
    return replace(case, cost=replace(case.cost, record=record))


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("training.attention=flash1", "framework=megatron-2021"),
        ("cluster=dgx-a100", "layout.data=fsdp", "layout.pp=1", "layout.dp=8", "training.recompute=full"),
        ("layout.tensor_overlap=true", "training.attention=standard"),
        ("disturbances.slow={gpu: 3, speed: 0.9}",),
    ],
)
def test_a_record_of_what_the_model_says_changes_no_digit_of_the_step(overrides: tuple[str, ...]) -> None:
    """What a step does to kernels alone it does whoever timed them: their pace, the slowest GPU, older attention."""
    case = scenario("model.layers=4", *overrides)
    modelled, recorded = simulate(case), simulate(as_modelled(case))
    assert recorded.provenance_shares["measured"] > 0.5
    assert recorded.step_time == modelled.step_time
    assert recorded.breakdown.mean_seconds() == modelled.breakdown.mean_seconds()


def test_the_pace_of_a_step_that_was_not_measured_is_told() -> None:
    """One GPU alone: of its measured products each takes 1/sustained times as long, which the band has below it."""
    alone = scenario("cluster.gpus=1", "model.layers=2", layout={}, training={"sequence": 4096, "global_batch": 1})
    told = simulate(as_modelled(alone))
    sustained = alone.cluster.accelerator.derating.sustained_ratio
    assert told.in_situ_slowdown.slowdown == pytest.approx(
        1 / sustained, rel=0.01
    )  # less 5.5 us of each that are no arithmetic
    assert (
        f"{told.in_situ_slowdown.share:.0%} as kernels alone, times {told.in_situ_slowdown.slowdown:.3f}"
        in told.interval_description
    )
    assert told.to_json()["in_step"] == {
        "share": told.in_situ_slowdown.share,
        "times_longer": told.in_situ_slowdown.slowdown,
    }
    gpu = replace(alone.cluster.accelerator, derating=TrainingDerating())
    cool = simulate(as_modelled(replace(alone, cluster=replace(alone.cluster, accelerator=gpu))))
    assert cool.in_situ_slowdown.share == 0.0
    assert "alone" not in cool.interval_description
    assert told.step_time_interval[0] < cool.step_time < told.step_time


OTHERS = (
    ("layout.tp=4", "layout.dp=2"),
    ("training.global_batch=16", "layout.data=zero1"),
    ("cost.network=uncontended",),
    ("cluster=dgx-a100", "cluster.gpus=16"),
)


@pytest.mark.parametrize("asked", [(), ("layout.data=zero1", "steps=2"), ("disturbances.slow=[{gpu: 3, speed: 0.9}]",)])
def test_what_is_remembered_of_other_scenarios_changes_nothing(asked: tuple[str, ...]) -> None:
    cached_tuner.cache_clear()
    first = simulate(scenario(*asked))
    for other in OTHERS:
        simulate(scenario(*other))
    again = simulate(scenario(*asked))
    assert {**again.to_json(), "simulate_wall_s": 0} == {**first.to_json(), "simulate_wall_s": 0}
    assert (again.trace.end == first.trace.end).all()
    assert (again.trace.critical_predecessor == first.trace.critical_predecessor).all()


def test_a_program_is_lowered_once_for_what_changes_none_of_it() -> None:
    """Slow GPUs change no task; a batch and a placement of stages do."""
    same = pipeline("disturbances={slow: [{gpu: 3, speed: 0.9}]}")
    assert build_simulation(pipeline()).program is build_simulation(same).program
    for change in ("training.global_batch=32", "schedule={interleaved: {chunks: 2}}", "training.recompute=full"):
        assert build_simulation(pipeline(change)).program is not build_simulation(pipeline()).program


@pytest.mark.parametrize(
    "asked",
    [
        scenario("layout.data=zero1"),
        pipeline("training.global_batch=64"),
        pipeline("disturbances.slow={gpu: 1, speed: 0.5}", "layout.data=fsdp"),
    ],
)
def test_a_simulation_leaves_nothing_for_the_garbage_collector(asked: Scenario) -> None:
    """What refers to itself would stay until the collector walks all that there is.

    A pipeline's steps are watched, and beside a slow GPU ranks run blocks together.
    """
    simulate(asked)
    gc.collect()
    gc.disable()
    try:
        simulate(asked)
        assert gc.collect() == 0
    finally:
        gc.enable()
