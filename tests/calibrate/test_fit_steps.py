"""Constants of training steps: steps of known constants give these back, and what is left out is not seen.

Made-up steps take w/r + n l + b k seconds: w seconds of arithmetic at the rate r of their accelerator, n launches of l
seconds of their framework's forward and b of k seconds of its backward. A table of these is exact, since it is linear
between its nodes in 1/r, l and k.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibrate.fit.out_of_sample import out_of_sample_path
from calibrate.fit.step_constants import (
    FALLBACK_ACCELERATORS,
    FITTED_ACCELERATORS,
    MAX_CASES_PER_SOURCE,
    MIN_CASES,
    StepConstants,
    add_arguments,
    command,
    fit_source_held_out,
    fit_step_constants,
    out_of_sample_steps,
    relative_errors,
    step_quality,
    subsample_cases,
)
from calibrate.fit.step_table import INTERPOLATION_NODES, TabulatedStep
from clustersim.uncertainty.model_file import MODEL_NAMES
from clustersim.uncertainty.step_features import StepFeatures
from clustersim.validation.cases import ValidationCase
from tests.conftest import examples
from tests.validation.sample_cases import case as row

H100, A100, B200 = "h100-sxm-80gb", "a100-sxm-80gb", "b200-sxm-180gb"
OLD, NEW = "megatron-2021", "pytorch"
RATES = {H100: 0.91, A100: 0.97, B200: 0.83}
LAUNCH, BACKWARD = 37e-6, 83e-6
FACTS = StepFeatures(frozenset(), frozenset(), {}, {})


@dataclass(frozen=True)
class Made:
    """A step of `work` seconds at full rate and so many launches; longer: measured over what it takes."""

    accelerator: str = H100
    source: str = "paper"
    work: float = 1.0
    launches: float = 0.0
    backward: float = 0.0
    framework: str = NEW
    longer: float = 1.0
    known: bool = True

    def tabulated(self, name: str) -> TabulatedStep:
        slowness, launch, back = np.meshgrid(*INTERPOLATION_NODES, indexing="ij")
        takes = self.work / RATES[self.accelerator] + self.launches * LAUNCH + self.backward * BACKWARD
        return TabulatedStep(
            name, self.source, self.accelerator, self.framework, self.known, self.longer * takes,
            self.work * slowness + self.launches * launch + self.backward * back, FACTS,
        )  # fmt: skip


def table(made: Sequence[Made]) -> list[TabulatedStep]:
    return [item.tabulated(f"case {number}") for number, item in enumerate(made)]


def many(made: Made, count: int = MIN_CASES) -> list[Made]:
    """Like one, of different lengths."""
    return [replace(made, work=made.work * (1 + number / 4)) for number in range(count)]


def launched(count: int = MIN_CASES) -> list[Made]:
    """Steps in which launches show, of forward and of backward."""
    both = [Made(A100, "host", framework=OLD, work=0.1, launches=1000.0, backward=500.0 * part) for part in (1, 3)]
    return [item for made in both for item in many(made, count // 2)]


EVERY = [*many(Made(H100)), *many(Made(A100, "other")), *many(Made(B200, "third")), *launched(2 * MIN_CASES)]


def test_known_constants_come_back() -> None:
    found = fit_step_constants(table(EVERY))
    assert {name: found.sustained[name] for name in RATES} == pytest.approx(RATES)
    assert found.launch[OLD] == pytest.approx(LAUNCH)
    assert found.backward[OLD] == pytest.approx(BACKWARD)
    assert np.abs(relative_errors(table(EVERY), found)).max() < 1e-9


def test_the_order_of_cases_changes_nothing() -> None:
    assert fit_step_constants(table(EVERY)) == fit_step_constants(table(EVERY[::-1]))


def test_a_constant_that_too_few_cases_depend_on_is_not_searched() -> None:
    """A rate stays that of single kernels; a launch stays as it is shipped."""
    few = [*many(Made(H100)), *many(Made(A100, "other")), *many(Made(B200), MIN_CASES - 1), *launched(MIN_CASES - 1)]
    found, nothing = fit_step_constants(table(few)), fit_step_constants([])
    assert found.sustained[B200] == 1.0
    assert found.launch == nothing.launch
    assert found.sustained[H100] == pytest.approx(RATES[H100])


def test_a_launch_that_does_not_show_is_not_searched() -> None:
    """At most 40 launches of at most 60 us in more than a second: 0.2 %."""
    hidden = [replace(item, work=1.0, launches=40.0, backward=0.0) for item in launched()]
    assert fit_step_constants(table([*EVERY[: -2 * MIN_CASES], *hidden])).launch == fit_step_constants([]).launch


def test_an_accelerator_with_too_few_cases_takes_its_siblings_constant() -> None:
    found = fit_step_constants(table(EVERY))
    assert FALLBACK_ACCELERATORS
    for name, other in FALLBACK_ACCELERATORS.items():
        assert name in FITTED_ACCELERATORS
        assert found.sustained[name] == found.sustained[other] != 1.0


def test_every_source_counts_once_however_many_cases_it_has() -> None:
    """Two sources agree, one of 40 cases differs by 8 %: the rate is the two's."""
    odd = many(Made(H100, "odd", longer=1.08), 40)
    found = fit_step_constants(table([*many(Made(H100, "one")), *many(Made(H100, "two")), *odd]))
    assert found.sustained[H100] == pytest.approx(RATES[H100])


def test_a_source_that_is_left_out_is_not_seen() -> None:
    """Its accelerator's rate is 0.83, without it 1: predicted 0.83 of what was measured. With it, exactly."""
    without = fit_source_held_out(table(EVERY))
    qualities = {
        source_quality.source: source_quality
        for source_quality in step_quality(table(EVERY), fit_step_constants(table(EVERY)), without)
    }
    third = qualities["third"]
    assert (third.n, third.mape, third.bias) == (MIN_CASES, pytest.approx(0.0, abs=1e-9), pytest.approx(0.0, abs=1e-9))
    assert third.loo_bias == pytest.approx(RATES[B200] - 1.0)
    assert third.loo_mape == pytest.approx(1.0 - RATES[B200])
    rows = [
        out_of_sample_step
        for out_of_sample_step in out_of_sample_steps(table(EVERY), without)
        if out_of_sample_step.source == "third"
    ]
    assert [item.log_error for item in rows] == pytest.approx([-np.log(RATES[B200])] * MIN_CASES)


def test_a_source_is_predicted_by_the_constants_of_the_others() -> None:
    """Measured 10 % longer than the two others say, it is predicted 1/1.1 of what it took."""
    cases = table([*many(Made(H100, "one")), *many(Made(H100, "two")), *many(Made(H100, "odd", longer=1.1))])
    found = fit_step_constants(cases)
    odd = next(
        source_quality
        for source_quality in step_quality(cases, found, fit_source_held_out(cases))
        if source_quality.source == "odd"
    )
    assert odd.loo_bias == pytest.approx(1 / 1.1 - 1)
    assert found.sustained[H100] == pytest.approx(RATES[H100])


def test_between_nodes_a_step_is_linear_in_the_time_per_flop_and_in_the_launch() -> None:
    """So it is beyond them: 2 s at rate 0.9, and 1000 launches of 90 us, more than the table has."""
    case = Made(work=2.0, launches=1000.0).tabulated("case")
    others = [np.array([float(nodes[0])]) for nodes in INTERPOLATION_NODES[2:]]
    (error,) = case.log_errors(np.array([0.9]), np.array([90e-6]), *others)
    assert np.exp(error) * case.measured_seconds == pytest.approx(2.0 / 0.9 + 0.09)


def case(source: str, number: int, **columns: str) -> ValidationCase:
    row = {"case_id": f"{source}-{number}", "source": source, "precision": "bf16", "quality": "A", "experts": ""}
    return ValidationCase(row | columns, line_number=2 + number)


def test_steps_that_are_searched_are_dense_certain_and_of_16_bits() -> None:
    wanted = [case("paper", 0), case("paper", 1, precision="fp16", experts="1", quality="B")]
    others = [case("paper", 2, experts="8"), case("paper", 3, precision="fp8"), case("paper", 4, quality="C")]
    assert subsample_cases([*wanted, *others]) == wanted


def test_of_a_source_with_very_many_cases_an_even_choice_is_searched() -> None:
    """2.4 times as many as are wanted: every third."""
    count = int(2.4 * MAX_CASES_PER_SOURCE)
    few, lots = [case("small", 0)], [case("large", number) for number in range(count)]
    assert subsample_cases([*lots, *few]) == [*lots[::3], *few]


SIMULATED = {"step_time_origin": "simulated by somebody"}


@given(st.lists(st.sampled_from(["measured", "simulated", "elsewhere"]), max_size=40), st.integers(1, 10))
@examples(100)
def test_what_somebody_simulated_thins_out_nothing(kinds: list[str], most: int) -> None:
    """Whatever their places, the choice is that of a table without them."""
    made = {"measured": ("paper", {}), "simulated": ("paper", SIMULATED), "elsewhere": ("simulator", SIMULATED)}
    all_cases = [case(source, number, **more) for number, kind in enumerate(kinds) for source, more in (made[kind],)]
    runs = [all_case for all_case, kind in zip(all_cases, kinds, strict=True) if kind == "measured"]
    assert subsample_cases(all_cases, most) == subsample_cases(runs, most)


EXPERTS = {
    **{"tp": "1", "pp": "1", "dp": "8", "schedule": "", "mlp": "swiglu", "zero_stage": "1", "ep": "8"},
    **{"experts": "16", "top_k": "4", "moe_ffn_hidden": "512", "shared_experts": "2"},
}
SCALED = {"precision": "mxfp8", "framework": "megatron-bridge v0.4.0", "year": "2025", "gpu": "gb200"}
SCALED |= {"gpus_per_node": "4", "interconnect": "nvl72"}


def rows(count: int, **cells: str) -> list[ValidationCase]:
    """Rows of one source, of different lengths."""
    name, software = "-".join(cells.values()), {"framework": "megatron-lm", "year": "2021"}
    lengths = [str(16 * (number + 1)) for number in range(count)]
    return [row(**{"case_id": f"{name} {length}", "global_batch": length, **software, **cells}) for length in lengths]


def of_every_kind(dense: int, narrow: int, **cells: str) -> list[ValidationCase]:
    """Of small models that wait for their host; narrow: enough for a rate of their own, or not."""
    mixtures = (rows(1, **EXPERTS, **cells), rows(1, **EXPERTS, **SCALED, **cells))
    return [*rows(dense, **cells), *rows(narrow, **SCALED, **cells), *chain(*mixtures)]


def fitted(cases: list[ValidationCase], folder: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> dict[str, str]:
    """What `fit-steps` writes of published cases, by file."""
    folder.mkdir()
    monkeypatch.setattr("calibrate.fit.step_constants.read_steps", lambda: cases)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    told = ["--json", str(folder / "found.json"), "--left-out", str(folder), "--workers", "1", "--most", "4"]
    command(parser.parse_args([*told, *more]))
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_constants_and_errors_rest_on_no_simulated_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They say a tenth or four times what was measured, among a source's runs and alone, in every kind of steps."""
    runs = [*of_every_kind(4, 1), *rows(4, source="another", hidden="2048", step_time_s="0.2")]
    beside = of_every_kind(13, 11, step_time_s="0.01", **SIMULATED)
    alone = of_every_kind(5, 11, source="simulator", step_time_s="0.4", **SIMULATED)
    mixed = [*alone, *beside[::2], *runs, *beside[1::2]]
    without, having = (
        {more: fitted(cases, tmp_path / f"{name}{len(more)}", monkeypatch, *more) for more in ((), ("--narrow",))}
        for name, cases in (("runs", runs), ("mixed", mixed))
    )
    assert set(without[()]) == {"found.json", *(out_of_sample_path(kind).name for kind in MODEL_NAMES)}
    assert having == without


def test_constants_of_a_case_are_its_accelerators_and_its_frameworks() -> None:
    found = fit_step_constants(table(EVERY))
    assert isinstance(found, StepConstants)
    other = replace(Made().tabulated("case"), accelerator="v100-sxm-32gb", framework=OLD)
    assert found.for_step(other) == (1.0, found.launch[OLD], found.backward[OLD])
