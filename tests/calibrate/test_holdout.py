"""Real steps that a record was not measured for: which, how long, and how far from what it predicts."""

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
from tests.calibrate.check_scenarios import LLAMA, one_thread, scenario
from tests.calibrate.synthetic_records import record_of
from tests.conftest import examples

torch = pytest.importorskip("torch")

from calibrate.check.prediction import peak_allocated, predict_step  # noqa: E402 - torch first
from calibrate.devices.cpu import CpuDevice  # noqa: E402
from calibrate.holdout import measure  # noqa: E402
from calibrate.holdout.measure import ROUNDS, measure_holdout_steps  # noqa: E402
from calibrate.holdout.one_device import one_device_scenario, pipeline_depths  # noqa: E402
from calibrate.holdout.variants import MIN_STEPS, HoldoutVariant, holdout_variants  # noqa: E402

CPU = "cpu-laptop"
PLENTY = 2.0**40
WHOLE = scenario(LLAMA, "model.layers=4")


def record(of: Scenario = WHOLE) -> CalibrationRecord:
    """Kernels of a scenario's ranks as the model of a CPU has them."""
    return record_of(load_accelerator(CPU), distinct_kernels(of))


@dataclass(frozen=True, slots=True)
class Room(CpuDevice):
    """A CPU with so much memory."""

    free: Bytes = PLENTY

    def free_bytes(self) -> Bytes:
        """What it was given."""
        return self.free


@dataclass
class Clock:
    """A clock that only work moves on."""

    now: Seconds = 0.0

    def __call__(self) -> Seconds:
        """Its time."""
        return self.now


@dataclass
class Stood:
    """A trainer whose steps take a known time."""

    clock: Clock
    seconds: Seconds
    model: Any = None
    weight_update: Any = field(default_factory=lambda: Nothing())

    def run_passes(self, _batch: object, _timeline: object) -> None:
        """Take it."""
        self.clock.now += self.seconds


class Nothing:
    """An update of nothing."""

    def zero(self) -> None:
        """No gradients."""

    def step(self) -> None:
        """No weights."""


@dataclass
class Stage:
    """Real steps stood in for: each takes `factor` times what the record says; trained: those that were built."""

    clock: Clock
    record: CalibrationRecord
    factor: float = 1.0
    building: Seconds = 0.0
    too_large: int = 1000  # layers
    error: Exception = field(default_factory=lambda: torch.OutOfMemoryError("CUDA out of memory"))
    trained: list[Scenario] = field(default_factory=list)

    def trainer_of(self, given: Scenario, _device: object) -> Stood:
        """A stand-in for the scenario's."""
        if given.model.layer_count >= self.too_large:
            raise self.error
        self.trained.append(given)
        self.clock.now += self.building
        return Stood(self.clock, self.factor * predict_step(given, self.record).seconds)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    made = Stage(Clock(), record())
    monkeypatch.setattr("calibrate.check.phase_timer.perf_counter", made.clock)
    monkeypatch.setattr("calibrate.holdout.measure.monotonic", made.clock)
    monkeypatch.setattr("calibrate.check.training_setup.build_trainer", made.trainer_of)
    return made


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    with one_thread():
        yield


def longest(of: Sequence[HoldoutVariant]) -> Seconds:
    return max(holdout_variant.prediction.seconds for holdout_variant in of)


@pytest.mark.parametrize("factor", [1.0, 1.25, 0.8])
def test_steps_that_take_some_times_what_is_predicted_are_off_by_that(stage: Stage, factor: float) -> None:
    stage.factor = factor
    rows = measure_holdout_steps(WHOLE, Room(), stage.record, 60.0 * longest(chosen(WHOLE, stage.record)))
    assert len(rows) == 3
    for row in rows:
        assert row.error == pytest.approx(1.0 / factor - 1.0)
        assert row.measured == pytest.approx(factor * row.predicted)
        assert "precision fp32" in row.kinds


@pytest.mark.parametrize("building", [0.0, 0.5])
def test_steps_take_turns_and_keep_to_their_time(stage: Stage, building: float) -> None:
    """All that is beyond is one step of each, and what a build takes that began in time."""
    found = chosen(WHOLE, stage.record)
    seconds = 100.0 * longest(found)
    stage.building = building * seconds / len(found) / ROUNDS
    rows = measure_holdout_steps(WHOLE, Room(), stage.record, seconds)
    order = [(item.model.layer_count, item.training.microbatch) for item in stage.trained]
    assert order == ROUNDS * order[: len(rows)]
    assert 0.9 * seconds <= stage.clock.now <= seconds + len(rows) * MIN_STEPS * longest(found)


def chosen(
    given: Scenario, of: CalibrationRecord, seconds: Seconds = 1e6, room: Bytes = PLENTY
) -> list[HoldoutVariant]:
    return holdout_variants(one_device_scenario(given, CPU), pipeline_depths(given), of, room, seconds)


def test_neither_depth_nor_microbatch_were_measured() -> None:
    found = [holdout_variant.scenario for holdout_variant in chosen(WHOLE, record())]
    assert [(item.model.layer_count, item.training.microbatch) for item in found] == [(3, 2), (3, 1), (1, 2)]
    assert {element.training.global_batch for element in found} == {WHOLE.training.global_batch}
    lacking = [known(entry) - known(WHOLE) for entry in found]
    assert all(lacking)  # the optimizer's, and those of another microbatch
    assert len(lacking[1]) > len(lacking[0])


def known(of: Scenario) -> set[Any]:
    return {signature_of(kernel) for kernel in distinct_kernels(of)}


def test_a_microbatch_of_one_is_tried_as_two() -> None:
    found = chosen(scenario(LLAMA, "training.microbatch=1"), record())
    assert {holdout_variant.scenario.training.microbatch for holdout_variant in found} == {1, 2}
    assert "1 layer, 4 microbatches of 1" in {item.label for item in found}


@examples(16)
@given(st.integers(1, 6), st.floats(-2.0, 2.0))
def test_whatever_is_chosen_fits_into_its_time(layers: int, part: float) -> None:
    """As often as it must be run; shorter steps where time is short."""
    given_, of = scenario(LLAMA, f"model.layers={layers}"), record()
    seconds = 10.0**part * MIN_STEPS * predict_step(one_device_scenario(given_, CPU), of).seconds
    try:
        found = chosen(given_, of, seconds)
    except measure.InputError as reason:
        assert "3 steps of 1 layer, 1 microbatch of 2 take about" in str(reason)
        return
    assert all(MIN_STEPS * holdout_variant.prediction.seconds <= seconds for holdout_variant in found)
    assert len({item.label for item in found}) == len(found)


def test_layers_leave_half_of_the_memory() -> None:
    given_ = scenario(LLAMA, "model.layers=12")
    room = peak_allocated(scenario(LLAMA, "model.layers=5"))
    rows = measure.select_variants(given_, Room(2.0 * room), record(given_), 1e6)
    assert max(holdout_variant.scenario.model.layer_count for holdout_variant in rows) == 4  # of a chain five
    assert all(peak_allocated(item.scenario) <= room for item in rows)


def test_a_rank_of_a_layout_is_one_process(stage: Stage) -> None:
    """Its heads, columns, vocabulary and layers; its products are among those of the layout, all of them."""
    given_ = scenario(
        LLAMA,
        "model.layers=6",
        "cluster={name: dgx-h100, gpus: 8}",
        "layout={tp: 2, pp: 2, dp: 2}",
        "training.global_batch=8",
    )
    one = one_device_scenario(given_, CPU)
    assert one.layout.world_size == one.cluster.gpu_count == 1
    assert one.model.layer_count == 3
    assert one.model.vocab == given_.model.vocab // 2
    assert [distinct_attention.heads for distinct_attention in one.model.distinct_attentions] == [2]
    assert products(one) == products(given_)
    rows = measure_holdout_steps(given_, Room(), stage.record, 30.0 * longest(chosen(given_, stage.record)))
    assert [row.what for row in rows] == [
        "2 layers, 2 microbatches of 2", "2 layers, 4 microbatches of 1", "1 layer, 2 microbatches of 2",
    ]  # fmt: skip


def products(of: Scenario) -> set[Any]:
    return {signature_of(kernel) for kernel in distinct_kernels(of) if kernel.kind is KernelKind.MATMUL}


def test_context_parallel_ranks_have_their_tokens() -> None:
    one = one_device_scenario(scenario(LLAMA, "cluster={name: dgx-h100, gpus: 4}", "layout={cp: 4}"), CPU)
    assert one.training.sequence == 8


def without_kernels(of: CalibrationRecord) -> CalibrationRecord:
    return replace(of, kernels=tuple(map(_failed, of.kernels)))


def _failed(row: KernelSample) -> KernelSample:
    return replace(row, time=None)


@pytest.mark.parametrize(
    ("overrides", "free", "seconds", "kernels", "says"),
    [
        ((), PLENTY, 1e-9, True, "3 steps of 1 layer, 1 microbatch of 2 take about .* give more time"),
        ((), 1e3, 1e3, True, "with only 1 layers needs"),
        ((), PLENTY, 1e3, False, "the record has no kernels"),
        (("training.lora=8",), PLENTY, 1e3, True, "training.lora: adapters beside frozen weights cannot be checked"),
        (("model.window=64",), PLENTY, 1e3, True, "model.window"),
    ],
)
def test_what_cannot_be_run_gives_a_sentence_and_no_rows(
    stage: Stage,
    capsys: pytest.CaptureFixture[str],
    overrides: tuple[str, ...],
    free: Bytes,
    seconds: Seconds,
    *,
    kernels: bool,
    says: str,
) -> None:
    of = stage.record if kernels else without_kernels(stage.record)
    assert measure_holdout_steps(scenario(LLAMA, *overrides), Room(free), of, seconds) == ()
    told = capsys.readouterr().err
    assert told.startswith("no real steps beside their prediction: ")
    assert told.count("\n") == 1
    with pytest.raises(measure.InputError, match=says):
        measure.select_variants(scenario(LLAMA, *overrides), Room(free), of, seconds)
    assert not stage.trained


def test_a_step_that_runs_out_of_memory_leaves_the_others(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage.too_large = 3
    rows = measure_holdout_steps(WHOLE, Room(), stage.record, 30.0 * longest(chosen(WHOLE, stage.record)))
    assert [row.what for row in rows] == ["1 layer, 2 microbatches of 2"]
    told = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in told] == [
        "no real step of 3 layers, 2 microbatches of 2", "no real step of 3 layers, 4 microbatches of 1",
    ]  # fmt: skip
    assert all("do not fit on" in line for line in told)


def test_an_error_of_another_kind_is_not_hidden(stage: Stage) -> None:
    stage.too_large, stage.error = 1, RuntimeError("a mistake")
    with pytest.raises(RuntimeError, match="a mistake"):
        measure_holdout_steps(WHOLE, Room(), stage.record, 1e3)


def test_fused_formulas_need_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    given_ = scenario(LLAMA, "training.fused=true", "model.layers=1", "training.microbatch=4")
    assert measure_holdout_steps(given_, Room(), record(given_), 1e3) == ()
    assert "training.fused: rotary" in capsys.readouterr().err


def test_real_steps_are_run_as_they_are() -> None:
    """The real trainer on this machine: something is measured, and precision is as it was."""
    before = torch.get_float32_matmul_precision()
    rows = measure_holdout_steps(WHOLE, CpuDevice(), record(), 0.5)
    assert rows
    assert all(row.measured > 0.0 for row in rows)
    assert torch.get_float32_matmul_precision() == before


def test_a_record_of_another_accelerator_is_tried_on_that_one() -> None:
    device, conditions = DeviceInfo("h100-sxm-80gb", "a GPU"), MeasurementConditions("2026-11-20", "test", "test")
    assert one_device_scenario(WHOLE, device.accelerator).cluster.accelerator.name == "h100-sxm-80gb"
    assert not CalibrationRecord(device, conditions).kernels
