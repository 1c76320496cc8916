"""What real layers do to kernels comes on top of what they take alone, once, and leaves the rest as it is."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.build import build_plan, build_program, distinct_kernels
from clustersim.cost.calibration_record import CalibrationRecord, GpuSample, InSituSample, family_of, signature_of
from clustersim.cost.device_models import slowest_deviation
from clustersim.cost.in_situ import InSituFactors, mean_factor
from clustersim.cost.measured_kernels import MeasuredKernels
from clustersim.cost.sustained_rate import SustainedKernels, job_rate, unmeasured_effects
from clustersim.cost.timing import KernelTiming, Provenance
from clustersim.hardware.efficiency import TrainingDerating
from clustersim.model.kernels import AttentionShape, Kernel, KernelKind, MatmulShape, MemoryBoundOp
from clustersim.program.task import ComputeTask
from clustersim.scenario import Scenario
from clustersim.simulation import simulate
from tests.conftest import examples
from tests.cost.records import H100, MODEL, attention, fit, measured, product, spread, streamed

LARGE = product(MatmulShape(8192, 8192, 8192))
NORM = streamed(8192, 8192)
OTHER_NORM = streamed(8192, 8192, MemoryBoundOp.LAYERNORM)
FLASH = attention(AttentionShape(1, 32, 32, 4096, 4096, 128, causal=True))
BACKWARD = replace(FLASH, kind=KernelKind.ATTENTION_BACKWARD)
KERNELS = (LARGE, NORM, OTHER_NORM, FLASH, BACKWARD)


def named(kernel: Kernel) -> str:
    known = signature_of(kernel)
    assert known is not None
    return family_of(known)


def chained(record: CalibrationRecord, *factors: tuple[Kernel, float], alone: float = 1.0) -> CalibrationRecord:
    """With a chain in which families of kernels take some times what they take alone."""
    return replace(
        record, chain=tuple(InSituSample(named(kernel), 4, alone, alone * factor) for kernel, factor in factors)
    )


def alone(kernel: Kernel) -> float:
    return 2.0 * MODEL.time_kernel(kernel).seconds


def timed(record: CalibrationRecord, kernel: Kernel) -> KernelTiming:
    return MeasuredKernels(record, H100).time_kernel(kernel)


@given(st.lists(st.floats(0.3, 3.0), min_size=len(KERNELS), max_size=len(KERNELS)))
def test_a_kernel_takes_the_factor_of_its_family_and_is_as_well_known(factors: Sequence[float]) -> None:
    """Each its own: forward and backward, and two routines of one kind."""
    record = measured(KERNELS, alone, 0.1)
    step = chained(record, *zip(KERNELS, factors, strict=True))
    for kernel, factor in zip(KERNELS, factors, strict=True):
        found, before = timed(step, kernel), timed(record, kernel)
        assert found == replace(before, seconds=before.seconds * factor)
        assert found.provenance is Provenance.MEASURED


def test_what_lies_between_and_beyond_rows_takes_its_family_s_factor_too() -> None:
    """A fit is of kernels alone, so what it says takes longer in a step."""
    sizes = (1024, 8192)
    rows = measured([product(MatmulShape(m, n, k)) for m in sizes for n in sizes for k in sizes], alone)
    record = replace(rows, kernel_fit=fit(matmul_bf16=0.08))
    for shape, provenance in ((MatmulShape(2048, 4096, 4096), Provenance.INTERPOLATED), (
        MatmulShape(4096, 4096, 16384), Provenance.FITTED)):  # fmt: skip
        before, found = (
            timed(calibration_record, product(shape)) for calibration_record in (record, chained(record, (LARGE, 1.3)))
        )
        assert found == replace(before, seconds=before.seconds * 1.3)
        assert found.provenance is provenance


def test_a_family_that_was_not_in_the_chain_takes_the_mean_of_its_kind() -> None:
    """Norms: 1 s alone and 2 s in the chain, 3 s and 3 s: together 5 / 4. And it is that much less sure."""
    others = [streamed(8192, 8192, routine) for routine in (MemoryBoundOp.RMSNORM, MemoryBoundOp.LAYERNORM)]
    wanted = replace(others[0], shape=replace(others[0].shape, backward=True))
    record = measured([*others, wanted, LARGE], alone, 0.1)
    chain = (InSituSample(named(others[0]), 1, 1.0, 2.0), InSituSample(named(others[1]), 1, 3.0, 3.0), *(
        chained(record, (LARGE, 7.0), alone=100.0).chain))  # fmt: skip
    found = timed(replace(record, chain=chain), wanted)
    assert found.seconds == pytest.approx(alone(wanted) * 5.0 / 4.0)
    assert found.error == pytest.approx(0.1 + 0.25)
    assert found.provenance is Provenance.MEASURED


def test_a_kind_that_was_not_in_the_chain_takes_the_mean_of_all() -> None:
    """1 s of products takes 1.2 s, 3 s of norms 2.8 s: together as long as alone."""
    record = measured(KERNELS, alone, 0.1)
    rows = (InSituSample(named(LARGE), 1, 1.0, 1.2), InSituSample(named(NORM), 1, 3.0, 3.0 * 1.2))
    assert mean_factor(rows) == pytest.approx(1.2)
    assert timed(replace(record, chain=rows), FLASH).seconds == pytest.approx(1.2 * alone(FLASH))
    unknown = replace(LARGE, shape=None)
    fitted = replace(record, kernel_fit=fit(matmul_bf16=0.1))
    assert timed(replace(fitted, chain=rows), unknown).seconds == pytest.approx(1.2 * timed(fitted, unknown).seconds)


@given(st.sampled_from(KERNELS))
def test_without_a_chain_nothing_changes(kernel: Kernel) -> None:
    """To the last digit: kernels, and the pace of published steps."""
    record = measured(KERNELS, alone, 0.1)
    timing = timed(record, kernel)
    assert InSituFactors.from_record(record).apply(timing, kernel.kind, signature_of(kernel)) == timing
    pace = TrainingDerating(sustained_ratio=0.9, gpu_spread=0.02, flash2_slowdown=1.5)
    assert unmeasured_effects(pace, record) == unmeasured_effects(pace, None) == pace


def test_launches_are_the_host_s_and_take_no_factor() -> None:
    """4 launches of 3 us: more than 5 us of a kernel, whatever the chain makes of it, until that is longer."""
    kernel = replace(NORM, launches=4)
    record = replace(measured([kernel], lambda _: 5e-6), launch_interval=3e-6)
    for factor, seconds in ((0.5, 12e-6), (2.0, 12e-6), (3.0, 15e-6)):
        assert timed(chained(record, (kernel, factor)), kernel).seconds == pytest.approx(seconds)


def test_the_pace_of_published_steps_is_not_added_to_a_chain_s() -> None:
    """Of one GPU nothing is left to add: no longer, no larger error."""
    pace = TrainingDerating(sustained_ratio=0.8, gpu_spread=0.05, flash2_slowdown=1.5)
    record = chained(measured([LARGE], alone, 0.1), (LARGE, 1.1))
    recorded = MeasuredKernels(record, H100)
    step = SustainedKernels.from_rate(
        recorded, recorded.model, rate=job_rate(unmeasured_effects(pace, record), 1), attention_slowdown=1.0
    )
    assert step.time_kernel(LARGE) == recorded.time_kernel(LARGE)
    assert unmeasured_effects(pace, record) == replace(pace, sustained_ratio=1.0)


def test_the_slowest_gpu_is_as_far_from_the_mean_as_gpus_of_the_node_differ() -> None:
    """Times of 0.97, 1.00 and 1.03 s: a standard deviation of 3 %; of one GPU alone nothing is known."""
    pace, record = (
        TrainingDerating(sustained_ratio=0.8, gpu_spread=0.05),
        chained(measured([LARGE], alone), (LARGE, 1.1)),
    )
    gpus = tuple(GpuSample(str(place), spread(seconds)) for place, seconds in enumerate((0.97, 1.0, 1.03)))
    assert unmeasured_effects(pace, replace(record, gpus=gpus)).gpu_spread == pytest.approx(0.03)
    assert unmeasured_effects(pace, replace(record, gpus=gpus[:1])).gpu_spread == 0.05
    rate = job_rate(unmeasured_effects(pace, replace(record, gpus=gpus)), 64)
    assert rate == pytest.approx(1.0 / (1.0 + 0.03 * slowest_deviation(64)))
    unchained = replace(record, chain=(), gpus=gpus)
    assert unmeasured_effects(pace, unchained) == pace


STEP = {
    "model": {"preset": "llama3-8b", "layers": 2},
    "cluster": {"name": "dgx-h100", "gpus": 1, "placement": {"per_node": 1}},
    "training": {"sequence": 2048, "global_batch": 2},
}


def ran(scenario: Scenario) -> Iterator[Kernel]:
    """Every kernel of the only rank's step, as often as it runs."""
    (program,) = build_program(scenario, build_plan(scenario)).programs
    for task in program.tasks:
        if isinstance(task, ComputeTask):
            yield from (operation.kernel for operation in task.segment.operations if operation.kernel is not None)


@examples(10)
@given(st.floats(0.5, 2.0))
def test_a_step_whose_kernels_take_k_times_as_long_takes_k_times_as_long(k: float) -> None:
    """Kernels alone take what the model says, the host launches them in no time, and there is one GPU."""
    read = Scenario.from_mapping(STEP)
    scenario = replace(read, framework=replace(read.framework, launch_seconds=0.0, backward_launch_seconds=0.0))
    kernels = tuple(ran(scenario))
    record = replace(measured(kernels, lambda each: MODEL.time_kernel(each).seconds), launch_interval=0.0)
    own = chained(record, *((kernel, k) for kernel in {named(item): item for item in kernels}.values()))
    step = simulate(replace(scenario, cost=replace(scenario.cost, record=own)))
    assert step.step_time == pytest.approx(
        k * sum(MODEL.time_kernel(element).seconds for element in kernels), rel=1e-12
    )
    assert step.provenance_shares["measured"] == pytest.approx(1.0)
    assert (
        step.in_situ_slowdown.share,
        step.kernel_time_uncertainty.error,
        step.kernel_time_uncertainty.unknown_share,
    ) == (0.0, 0.0, 0.0)


def test_an_answer_says_which_pace_was_not_measured() -> None:
    """Eight GPUs wait for the slowest of them, and what is said of it depends on who knows how they differ."""
    eight = {"gpus": 8, "name": "dgx-h100"}
    scenario = Scenario.from_mapping({**STEP, "cluster": eight, "training": {"sequence": 2048, "global_batch": 8}})
    record = measured(tuple(distinct_kernels(scenario)), alone)
    step = chained(record, (LARGE, 1.1))
    gpus = tuple(GpuSample(str(place), spread(seconds)) for place, seconds in enumerate((0.98, 1.0, 1.02)))
    said = [
        simulate(replace(scenario, cost=replace(scenario.cost, record=calibration_record))).interval_description
        for calibration_record in (record, step, replace(step, gpus=gpus))
    ]
    assert "for the pace of a step and of the slowest GPU: from published steps, not measured here" in said[0]
    assert "for the pace of the slowest GPU: from published steps, not measured here" in said[1]
    assert "for the pace of the slowest GPU: as GPUs of its node differ" in said[2]
