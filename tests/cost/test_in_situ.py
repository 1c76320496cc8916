"""In-situ factors of kernels in real layers multiply standalone times once, and change nothing else."""

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
from tests.cost.records import (
    H100,
    MODEL,
    attention_kernel,
    kernel_fit_of,
    matmul_kernel,
    norm_kernel,
    record_of,
    spread,
)
from tests.sentences import parts

LARGE = matmul_kernel(MatmulShape(8192, 8192, 8192))
NORM = norm_kernel(8192, 8192)
OTHER_NORM = norm_kernel(8192, 8192, MemoryBoundOp.LAYERNORM)
FLASH = attention_kernel(AttentionShape(1, 32, 32, 4096, 4096, 128, causal=True))
BACKWARD = replace(FLASH, kind=KernelKind.ATTENTION_BACKWARD)
KERNELS = (LARGE, NORM, OTHER_NORM, FLASH, BACKWARD)


def family_name(kernel: Kernel) -> str:
    kernel_signature = signature_of(kernel)
    assert kernel_signature is not None
    return family_of(kernel_signature)


def with_in_situ_factors(
    record: CalibrationRecord, *family_factors: tuple[Kernel, float], standalone_seconds: float = 1.0
) -> CalibrationRecord:
    """The record with in-situ samples: each kernel's family takes the given factor of its standalone time."""
    return replace(
        record,
        in_situ=tuple(
            InSituSample(family_name(kernel), 4, standalone_seconds, standalone_seconds * factor)
            for kernel, factor in family_factors
        ),
    )


def standalone_seconds_of(kernel: Kernel) -> float:
    return 2.0 * MODEL.time_kernel(kernel).seconds


def measured_timing(record: CalibrationRecord, kernel: Kernel) -> KernelTiming:
    return MeasuredKernels(record, H100).time_kernel(kernel)


@given(st.lists(st.floats(0.3, 3.0), min_size=len(KERNELS), max_size=len(KERNELS)))
def test_a_kernel_takes_the_in_situ_factor_of_its_family(factors: Sequence[float]) -> None:
    """Each family has its own factor: forward and backward, and two routines of one kind. The error stays the same."""
    record = record_of(KERNELS, standalone_seconds_of, 0.1)
    in_situ_record = with_in_situ_factors(record, *zip(KERNELS, factors, strict=True))
    for kernel, factor in zip(KERNELS, factors, strict=True):
        in_situ, standalone = measured_timing(in_situ_record, kernel), measured_timing(record, kernel)
        assert in_situ == replace(standalone, seconds=standalone.seconds * factor)
        assert in_situ.provenance is Provenance.MEASURED


def test_interpolated_and_fitted_kernels_take_the_family_factor_too() -> None:
    """A fit is of standalone kernels, so its times are scaled in a step as well."""
    sizes = (1024, 8192)
    grid_record = record_of(
        [matmul_kernel(MatmulShape(m, n, k)) for m in sizes for n in sizes for k in sizes], standalone_seconds_of
    )
    record = replace(grid_record, kernel_fit=kernel_fit_of(matmul_bf16=0.08))
    for shape, provenance in ((MatmulShape(2048, 4096, 4096), Provenance.INTERPOLATED), (
        MatmulShape(4096, 4096, 16384), Provenance.FITTED)):  # fmt: skip
        standalone, in_situ = (
            measured_timing(calibration_record, matmul_kernel(shape))
            for calibration_record in (record, with_in_situ_factors(record, (LARGE, 1.3)))
        )
        assert in_situ == replace(standalone, seconds=standalone.seconds * 1.3)
        assert in_situ.provenance is provenance


def test_a_family_without_in_situ_samples_takes_the_mean_of_its_kind() -> None:
    """Norms: 1 s standalone and 2 s in situ, 3 s and 3 s: 5 / 4 in total. The error grows by as much."""
    sampled = [norm_kernel(8192, 8192, routine) for routine in (MemoryBoundOp.RMSNORM, MemoryBoundOp.LAYERNORM)]
    unsampled = replace(sampled[0], shape=replace(sampled[0].shape, backward=True))
    record = record_of([*sampled, unsampled, LARGE], standalone_seconds_of, 0.1)
    chain = (InSituSample(family_name(sampled[0]), 1, 1.0, 2.0), InSituSample(family_name(sampled[1]), 1, 3.0, 3.0), *(
        with_in_situ_factors(record, (LARGE, 7.0), standalone_seconds=100.0).in_situ))  # fmt: skip
    timing = measured_timing(replace(record, in_situ=chain), unsampled)
    assert timing.seconds == pytest.approx(standalone_seconds_of(unsampled) * 5.0 / 4.0)
    assert timing.error == pytest.approx(0.1 + 0.25)
    assert timing.provenance is Provenance.MEASURED


def test_a_kind_without_in_situ_samples_takes_the_mean_of_all() -> None:
    """1 s of matmuls and 3 s of norms both take 1.2 times as long in situ."""
    record = record_of(KERNELS, standalone_seconds_of, 0.1)
    samples = (InSituSample(family_name(LARGE), 1, 1.0, 1.2), InSituSample(family_name(NORM), 1, 3.0, 3.0 * 1.2))
    assert mean_factor(samples) == pytest.approx(1.2)
    assert measured_timing(replace(record, in_situ=samples), FLASH).seconds == pytest.approx(
        1.2 * standalone_seconds_of(FLASH)
    )
    unknown = replace(LARGE, shape=None)
    fitted = replace(record, kernel_fit=kernel_fit_of(matmul_bf16=0.1))
    assert measured_timing(replace(fitted, in_situ=samples), unknown).seconds == pytest.approx(
        1.2 * measured_timing(fitted, unknown).seconds
    )


@given(st.sampled_from(KERNELS))
def test_without_in_situ_samples_nothing_changes(kernel: Kernel) -> None:
    """Exactly: kernels, and the derating from published steps."""
    record = record_of(KERNELS, standalone_seconds_of, 0.1)
    timing = measured_timing(record, kernel)
    assert InSituFactors.from_record(record).apply(timing, kernel.kind, signature_of(kernel)) == timing
    derating = TrainingDerating(sustained_ratio=0.9, gpu_spread=0.02)
    assert unmeasured_effects(derating, record) == unmeasured_effects(derating, None) == derating


def test_launch_bound_kernels_take_no_in_situ_factor() -> None:
    """4 launches of 3 us exceed 5 us of a kernel, whatever the in-situ factor, until the kernel takes longer."""
    kernel = replace(NORM, launches=4)
    record = replace(record_of([kernel], lambda _: 5e-6), launch_interval=3e-6)
    for factor, seconds in ((0.5, 12e-6), (2.0, 12e-6), (3.0, 15e-6)):
        assert measured_timing(with_in_situ_factors(record, (kernel, factor)), kernel).seconds == pytest.approx(seconds)


def test_in_situ_samples_replace_the_published_step_derating() -> None:
    """On one GPU nothing is left to add: neither time nor error."""
    derating = TrainingDerating(sustained_ratio=0.8, gpu_spread=0.05)
    record = with_in_situ_factors(record_of([LARGE], standalone_seconds_of, 0.1), (LARGE, 1.1))
    measured_kernels = MeasuredKernels(record, H100)
    sustained = SustainedKernels.from_rate(
        measured_kernels,
        measured_kernels.model,
        rate=job_rate(unmeasured_effects(derating, record), 1),
    )
    assert sustained.time_kernel(LARGE) == measured_kernels.time_kernel(LARGE)
    assert unmeasured_effects(derating, record) == replace(derating, sustained_ratio=1.0)


def test_the_straggler_spread_is_the_measured_gpu_spread() -> None:
    """Times of 0.97, 1.00 and 1.03 s: a standard deviation of 3 %; a single GPU says nothing about the spread."""
    derating, record = (
        TrainingDerating(sustained_ratio=0.8, gpu_spread=0.05),
        with_in_situ_factors(record_of([LARGE], standalone_seconds_of), (LARGE, 1.1)),
    )
    gpus = tuple(GpuSample(str(gpu), spread(seconds)) for gpu, seconds in enumerate((0.97, 1.0, 1.03)))
    assert unmeasured_effects(derating, replace(record, gpus=gpus)).gpu_spread == pytest.approx(0.03)
    assert unmeasured_effects(derating, replace(record, gpus=gpus[:1])).gpu_spread == 0.05
    rate = job_rate(unmeasured_effects(derating, replace(record, gpus=gpus)), 64)
    assert rate == pytest.approx(1.0 / (1.0 + 0.03 * slowest_deviation(64)))
    unchained = replace(record, in_situ=(), gpus=gpus)
    assert unmeasured_effects(derating, unchained) == derating


STEP = {
    "model": {"preset": "llama3-8b", "layers": 2},
    "cluster": {"name": "dgx-h100", "gpus": 1, "placement": {"per_node": 1}},
    "training": {"sequence": 2048, "global_batch": 2},
    "framework": {"name": "ideal", "launch": "10 us"},
}


def kernels_of_step(scenario: Scenario) -> Iterator[Kernel]:
    """Every kernel of the only rank's step, as often as it runs."""
    (program,) = build_program(scenario, build_plan(scenario)).programs
    for task in program.tasks:
        if isinstance(task, ComputeTask):
            yield from (operation.kernel for operation in task.segment.operations if operation.kernel is not None)


@examples(10)
@given(st.floats(0.5, 2.0))
def test_step_time_is_proportional_to_the_in_situ_factor(k: float) -> None:
    """Standalone kernels take the model's time, launches take none, and there is one GPU."""
    loaded = Scenario.from_mapping(STEP)
    scenario = replace(loaded, framework=replace(loaded.framework, launch_seconds=0.0, backward_launch_seconds=0.0))
    kernels = tuple(kernels_of_step(scenario))
    record = replace(record_of(kernels, lambda kernel: MODEL.time_kernel(kernel).seconds), launch_interval=0.0)
    in_situ_record = with_in_situ_factors(
        record, *((kernel, k) for kernel in {family_name(item): item for item in kernels}.values())
    )
    step = simulate(replace(scenario, cost=replace(scenario.cost, record=in_situ_record)))
    assert step.step_time == pytest.approx(
        k * sum(MODEL.time_kernel(element).seconds for element in kernels), rel=1e-12
    )
    assert step.provenance_shares["measured"] == pytest.approx(1.0)
    assert (
        step.in_situ_slowdown.share,
        step.kernel_time_uncertainty.error,
        step.kernel_time_uncertainty.unknown_share,
    ) == (0.0, 0.0, 0.0)


def test_a_result_states_which_rates_were_not_measured() -> None:
    """Eight GPUs wait for the slowest; the text says whether their spread was measured."""
    eight = {"gpus": 8, "name": "dgx-h100"}
    scenario = Scenario.from_mapping({**STEP, "cluster": eight, "training": {"sequence": 2048, "global_batch": 8}})
    record = record_of(tuple(distinct_kernels(scenario)), standalone_seconds_of)
    in_situ_record = with_in_situ_factors(record, (LARGE, 1.1))
    gpus = tuple(GpuSample(str(gpu), spread(seconds)) for gpu, seconds in enumerate((0.98, 1.0, 1.02)))
    uncertainty_texts = [
        simulate(replace(scenario, cost=replace(scenario.cost, record=calibration_record))).interval_description
        for calibration_record in (record, in_situ_record, replace(in_situ_record, gpus=gpus))
    ]
    assert parts("slowdown within a step ... slowest GPU: ... published steps, not measured").search(
        uncertainty_texts[0]
    )
    assert "for the slowest GPU: from published steps, not measured here" in uncertainty_texts[1]
    assert "for the slowest GPU: as GPUs of its node differ" in uncertainty_texts[2]
