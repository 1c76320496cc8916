"""Holdout steps: real steps that the record was not measured for, their selection, and their prediction error."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.build import distinct_kernels
from clustersim.common.units import Bytes, Seconds
from clustersim.cost.calibration_record import (
    CalibrationRecord,
    DeviceInfo,
    KernelSample,
    MeasurementConditions,
    signature_of,
)
from clustersim.hardware.accelerator import load_accelerator
from clustersim.model.kernels import KernelKind
from clustersim.scenario import Scenario
from tests.calibrate.check_scenarios import LLAMA, single_thread, small_scenario
from tests.calibrate.synthetic_records import synthetic_record
from tests.conftest import examples

torch = pytest.importorskip("torch")

from calibrate.check.prediction import peak_allocated, predict_step  # noqa: E402 - torch first
from calibrate.devices.cpu import CpuDevice  # noqa: E402
from calibrate.holdout import measure  # noqa: E402
from calibrate.holdout.measure import ROUNDS, measure_holdout_steps  # noqa: E402
from calibrate.holdout.one_device import one_device_scenario, pipeline_depths  # noqa: E402
from calibrate.holdout.variants import MIN_STEPS, HoldoutVariant, holdout_variants  # noqa: E402

CPU_NAME = "cpu-laptop"
AMPLE_MEMORY = 2.0**40
FULL_SCENARIO = small_scenario(LLAMA, "model.layers=4")


def scenario_record(scenario: Scenario = FULL_SCENARIO) -> CalibrationRecord:
    """Kernels of a scenario's ranks, with modelled CPU times."""
    return synthetic_record(load_accelerator(CPU_NAME), distinct_kernels(scenario))


@dataclass(frozen=True, slots=True)
class SizedCpuDevice(CpuDevice):
    """A CPU with that much free memory."""

    free: Bytes = AMPLE_MEMORY

    def free_bytes(self) -> Bytes:
        """The configured memory."""
        return self.free


@dataclass
class ManualClock:
    """A clock that only advances by fake work."""

    now: Seconds = 0.0

    def __call__(self) -> Seconds:
        """The current time."""
        return self.now


@dataclass
class FakeTrainer:
    """A trainer whose steps take a known time."""

    clock: ManualClock
    seconds: Seconds
    model: Any = None
    weight_update: Any = field(default_factory=lambda: NullUpdate())

    def run_passes(self, _batch: object, _timeline: object) -> None:
        """Advance the clock by one step."""
        self.clock.now += self.seconds


class NullUpdate:
    """A weight update that does nothing."""

    def zero_gradients(self) -> None:
        """Zero no gradients."""

    def update_weights(self) -> None:
        """Update no weights."""


@dataclass
class FakeTraining:
    """Fakes of real steps: each takes `factor` times its prediction; built_scenarios: those of built trainers."""

    clock: ManualClock
    record: CalibrationRecord
    factor: float = 1.0
    build_seconds: Seconds = 0.0
    too_large: int = 1000  # layers
    error: Exception = field(default_factory=lambda: torch.OutOfMemoryError("CUDA out of memory"))
    built_scenarios: list[Scenario] = field(default_factory=list)

    def build_trainer(self, scenario: Scenario, _device: object) -> FakeTrainer:
        """A fake trainer of a scenario."""
        if scenario.model.layer_count >= self.too_large:
            raise self.error
        self.built_scenarios.append(scenario)
        self.clock.now += self.build_seconds
        return FakeTrainer(self.clock, self.factor * predict_step(scenario, self.record).seconds)


@pytest.fixture
def fake_training(monkeypatch: pytest.MonkeyPatch) -> FakeTraining:
    fake = FakeTraining(ManualClock(), scenario_record())
    monkeypatch.setattr("calibrate.check.phase_timer.perf_counter", fake.clock)
    monkeypatch.setattr("calibrate.holdout.measure.monotonic", fake.clock)
    monkeypatch.setattr("calibrate.check.training_setup.build_trainer", fake.build_trainer)
    return fake


@pytest.fixture(autouse=True)
def _single_thread() -> Iterator[None]:
    with single_thread():
        yield


def longest_seconds(step_variants: Sequence[HoldoutVariant]) -> Seconds:
    return max(variant.prediction.seconds for variant in step_variants)


@pytest.mark.parametrize("factor", [1.0, 1.25, 0.8])
def test_relative_error_of_slower_and_faster_steps(fake_training: FakeTraining, factor: float) -> None:
    fake_training.factor = factor
    steps = measure_holdout_steps(
        FULL_SCENARIO,
        SizedCpuDevice(),
        fake_training.record,
        60.0 * longest_seconds(choose_variants(FULL_SCENARIO, fake_training.record)),
    )
    assert len(steps) == 3
    for step in steps:
        assert step.error == pytest.approx(1.0 / factor - 1.0)
        assert step.measured == pytest.approx(factor * step.predicted)
        assert "precision fp32" in step.categories


@pytest.mark.parametrize("building", [0.0, 0.5])
def test_steps_are_interleaved_within_their_time_budget(fake_training: FakeTraining, building: float) -> None:
    """It may exceed its budget by one step per variant, and by a build that began in time."""
    step_variants = choose_variants(FULL_SCENARIO, fake_training.record)
    seconds = 100.0 * longest_seconds(step_variants)
    fake_training.build_seconds = building * seconds / len(step_variants) / ROUNDS
    steps = measure_holdout_steps(FULL_SCENARIO, SizedCpuDevice(), fake_training.record, seconds)
    order = [(built.model.layer_count, built.training.microbatch) for built in fake_training.built_scenarios]
    assert order == ROUNDS * order[: len(steps)]
    assert 0.9 * seconds <= fake_training.clock.now <= seconds + len(steps) * MIN_STEPS * longest_seconds(step_variants)


def choose_variants(
    scenario: Scenario, source_record: CalibrationRecord, seconds: Seconds = 1e6, free: Bytes = AMPLE_MEMORY
) -> list[HoldoutVariant]:
    return holdout_variants(
        one_device_scenario(scenario, CPU_NAME), pipeline_depths(scenario), source_record, free, seconds
    )


def test_variants_have_unmeasured_depth_or_microbatch() -> None:
    scenarios = [variant.scenario for variant in choose_variants(FULL_SCENARIO, scenario_record())]
    assert [(item.model.layer_count, item.training.microbatch) for item in scenarios] == [(3, 2), (3, 1), (1, 2)]
    assert {element.training.global_batch for element in scenarios} == {FULL_SCENARIO.training.global_batch}
    unmeasured = [kernel_signatures(entry) - kernel_signatures(FULL_SCENARIO) for entry in scenarios]
    assert all(unmeasured)  # kernels of the optimizer, and of another microbatch
    assert len(unmeasured[1]) > len(unmeasured[0])


def kernel_signatures(scenario: Scenario) -> set[Any]:
    return {signature_of(kernel) for kernel in distinct_kernels(scenario)}


def test_microbatch_of_one_has_a_variant_of_two() -> None:
    step_variants = choose_variants(small_scenario(LLAMA, "training.microbatch=1"), scenario_record())
    assert {variant.scenario.training.microbatch for variant in step_variants} == {1, 2}
    assert "1 layer, 4 microbatches of 1" in {variant.label for variant in step_variants}


@examples(16)
@given(st.integers(1, 6), st.floats(-2.0, 2.0))
def test_chosen_variants_fit_their_time_budget(layers: int, fraction: float) -> None:
    """With the minimum number of repetitions; smaller steps where time is short."""
    scenario, source_record = small_scenario(LLAMA, f"model.layers={layers}"), scenario_record()
    seconds = 10.0**fraction * MIN_STEPS * predict_step(one_device_scenario(scenario, CPU_NAME), source_record).seconds
    try:
        step_variants = choose_variants(scenario, source_record, seconds)
    except measure.InputError as reason:
        assert "3 steps of 1 layer, 1 microbatch of 2 take about" in str(reason)
        return
    assert all(MIN_STEPS * variant.prediction.seconds <= seconds for variant in step_variants)
    assert len({variant.label for variant in step_variants}) == len(step_variants)


def test_depths_leave_half_of_the_memory() -> None:
    scenario = small_scenario(LLAMA, "model.layers=12")
    training_bytes = peak_allocated(small_scenario(LLAMA, "model.layers=5"))
    step_variants = measure.select_variants(
        scenario, SizedCpuDevice(2.0 * training_bytes), scenario_record(scenario), 1e6
    )
    assert (
        max(variant.scenario.model.layer_count for variant in step_variants) == 4
    )  # in-situ measurement would use five
    assert all(peak_allocated(variant.scenario) <= training_bytes for variant in step_variants)


def test_rank_of_a_layout_is_one_process(fake_training: FakeTraining) -> None:
    """Its heads, columns, vocabulary and layers; its matmuls are exactly those of the layout."""
    scenario = small_scenario(
        LLAMA,
        "model.layers=6",
        "cluster={name: dgx-h100, gpus: 8}",
        "layout={tp: 2, pp: 2, dp: 2}",
        "training.global_batch=8",
    )
    single = one_device_scenario(scenario, CPU_NAME)
    assert single.layout.world_size == single.cluster.gpu_count == 1
    assert single.model.layer_count == 3
    assert single.model.vocab == scenario.model.vocab // 2
    assert [attention.heads for attention in single.model.distinct_attentions] == [2]
    assert matmul_signatures(single) == matmul_signatures(scenario)
    steps = measure_holdout_steps(
        scenario,
        SizedCpuDevice(),
        fake_training.record,
        30.0 * longest_seconds(choose_variants(scenario, fake_training.record)),
    )
    assert [step.description for step in steps] == [
        "2 layers, 2 microbatches of 2", "2 layers, 4 microbatches of 1", "1 layer, 2 microbatches of 2",
    ]  # fmt: skip


def matmul_signatures(scenario: Scenario) -> set[Any]:
    return {signature_of(kernel) for kernel in distinct_kernels(scenario) if kernel.kind is KernelKind.MATMUL}


def test_context_parallel_rank_has_its_tokens() -> None:
    single = one_device_scenario(small_scenario(LLAMA, "cluster={name: dgx-h100, gpus: 4}", "layout={cp: 4}"), CPU_NAME)
    assert single.training.sequence == 8


def without_kernels(source_record: CalibrationRecord) -> CalibrationRecord:
    return replace(source_record, kernels=tuple(map(_without_time, source_record.kernels)))


def _without_time(sample: KernelSample) -> KernelSample:
    return replace(sample, time=None)


@pytest.mark.parametrize(
    ("overrides", "free", "seconds", "kernels", "message"),
    [
        ((), AMPLE_MEMORY, 1e-9, True, "3 steps of 1 layer, 1 microbatch of 2 take about .* give more time"),
        ((), 1e3, 1e3, True, "with only 1 layers needs"),
        ((), AMPLE_MEMORY, 1e3, False, "the record has no kernels"),
        (
            ("training.lora=8",),
            AMPLE_MEMORY,
            1e3,
            True,
            "training.lora: adapters of frozen weights cannot be checked",
        ),
        (("model.window=64",), AMPLE_MEMORY, 1e3, True, "model.window"),
    ],
)
def test_unrunnable_steps_give_a_message_and_no_samples(
    fake_training: FakeTraining,
    capsys: pytest.CaptureFixture[str],
    overrides: tuple[str, ...],
    free: Bytes,
    seconds: Seconds,
    *,
    kernels: bool,
    message: str,
) -> None:
    source_record = fake_training.record if kernels else without_kernels(fake_training.record)
    assert measure_holdout_steps(small_scenario(LLAMA, *overrides), SizedCpuDevice(free), source_record, seconds) == ()
    output = capsys.readouterr().err
    assert output.startswith("no holdout steps: ")
    assert output.count("\n") == 1
    with pytest.raises(measure.InputError, match=message):
        measure.select_variants(small_scenario(LLAMA, *overrides), SizedCpuDevice(free), source_record, seconds)
    assert not fake_training.built_scenarios


def test_out_of_memory_step_is_skipped(fake_training: FakeTraining, capsys: pytest.CaptureFixture[str]) -> None:
    fake_training.too_large = 3
    steps = measure_holdout_steps(
        FULL_SCENARIO,
        SizedCpuDevice(),
        fake_training.record,
        30.0 * longest_seconds(choose_variants(FULL_SCENARIO, fake_training.record)),
    )
    assert [step.description for step in steps] == ["1 layer, 2 microbatches of 2"]
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "no real step of 3 layers, 2 microbatches of 2", "no real step of 3 layers, 4 microbatches of 1",
    ]  # fmt: skip
    assert all("do not fit into the free memory" in line for line in lines)


def test_other_errors_are_raised(fake_training: FakeTraining) -> None:
    fake_training.too_large, fake_training.error = 1, RuntimeError("a mistake")
    with pytest.raises(RuntimeError, match="a mistake"):
        measure_holdout_steps(FULL_SCENARIO, SizedCpuDevice(), fake_training.record, 1e3)


def test_fused_kernels_need_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    scenario = small_scenario(LLAMA, "training.fused=true", "model.layers=1", "training.microbatch=4")
    assert measure_holdout_steps(scenario, SizedCpuDevice(), scenario_record(scenario), 1e3) == ()
    assert "training.fused: rotary" in capsys.readouterr().err


def test_real_steps_keep_the_matmul_precision() -> None:
    """The real trainer on this machine: steps are measured, and the matmul precision is restored."""
    precision = torch.get_float32_matmul_precision()
    steps = measure_holdout_steps(FULL_SCENARIO, CpuDevice(), scenario_record(), 0.5)
    assert steps
    assert all(step.measured > 0.0 for step in steps)
    assert torch.get_float32_matmul_precision() == precision


def test_record_of_another_accelerator_changes_the_cluster() -> None:
    device, conditions = DeviceInfo("h100-sxm-80gb", "a GPU"), MeasurementConditions("2026-11-20", "test", "test")
    assert one_device_scenario(FULL_SCENARIO, device.accelerator).cluster.accelerator.name == "h100-sxm-80gb"
    assert not CalibrationRecord(device, conditions).kernels
