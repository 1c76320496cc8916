"""Constants of training steps: recovered from synthetic steps, without using held-out sources.

Synthetic steps take w/r + n l + b k seconds: w seconds of arithmetic at the rate r of their accelerator, n
launches of l seconds in their framework's forward and b of k seconds in its backward. Their table is exact,
since it is linear between its nodes in 1/r, l and k.
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
    fit_publisher_held_out,
    fit_step_constants,
    out_of_sample_steps,
    relative_errors,
    step_quality,
    subsample_cases,
)
from calibrate.fit.step_table import CARRIED_OVER, INTERPOLATION_NODES, TabulatedStep
from clustersim.common.errors import OutputError
from clustersim.hardware.accelerator import load_accelerator
from clustersim.uncertainty.model_file import MODEL_NAMES
from clustersim.uncertainty.step_features import StepFeatures
from clustersim.validation.cases import ValidationCase
from tests.conftest import examples
from tests.validation.sample_cases import step_case as row

H100, A100, B200 = "h100-sxm-80gb", "a100-sxm-80gb", "b200-sxm-180gb"
HOST_BOUND_FRAMEWORK, OTHER_FRAMEWORK = "megatron-2021", "pytorch"
TRUE_RATES = {H100: 0.91, A100: 0.97, B200: 0.83}
LAUNCH_SECONDS, BACKWARD_SECONDS = 37e-6, 83e-6
NO_FEATURES = StepFeatures(frozenset(), frozenset(), {}, {})


@dataclass(frozen=True)
class SyntheticStep:
    """A step of `work` seconds at full rate and that many launches; measured_ratio: measured over true time."""

    accelerator: str = H100
    source: str = "paper"
    work: float = 1.0
    launches: float = 0.0
    backward: float = 0.0
    framework: str = OTHER_FRAMEWORK
    measured_ratio: float = 1.0
    is_software_identified: bool = True

    def tabulate(self, name: str) -> TabulatedStep:
        slowness, launch, backward = np.meshgrid(*INTERPOLATION_NODES, indexing="ij")
        step_seconds = (
            self.work / TRUE_RATES[self.accelerator] + self.launches * LAUNCH_SECONDS + self.backward * BACKWARD_SECONDS
        )
        return TabulatedStep(
            name,
            self.source,
            self.accelerator,
            self.framework,
            self.is_software_identified,
            self.measured_ratio * step_seconds,
            self.work * slowness + self.launches * launch + self.backward * backward,
            NO_FEATURES,
            None,
        )


def tabulate_steps(steps: Sequence[SyntheticStep]) -> list[TabulatedStep]:
    return [step.tabulate(f"case {index}") for index, step in enumerate(steps)]


def scaled_steps(step: SyntheticStep, count: int = MIN_CASES) -> list[SyntheticStep]:
    """Steps of different lengths."""
    return [replace(step, work=step.work * (1 + index / 4)) for index in range(count)]


def launch_bound_steps(count: int = MIN_CASES) -> list[SyntheticStep]:
    """Steps with visible launch times, of forward and of backward."""
    steps = [
        SyntheticStep(
            A100, "host", framework=HOST_BOUND_FRAMEWORK, work=0.1, launches=1000.0, backward=500.0 * multiple
        )
        for multiple in (1, 3)
    ]
    return [scaled for step in steps for scaled in scaled_steps(step, count // 2)]


ALL_STEPS = [
    *scaled_steps(SyntheticStep(H100)),
    *scaled_steps(SyntheticStep(A100, "other")),
    *scaled_steps(SyntheticStep(B200, "third")),
    *launch_bound_steps(2 * MIN_CASES),
]


def test_step_constants_are_recovered() -> None:
    constants = fit_step_constants(tabulate_steps(ALL_STEPS))
    assert {name: constants.sustained[name] for name in TRUE_RATES} == pytest.approx(TRUE_RATES)
    assert constants.launch[HOST_BOUND_FRAMEWORK] == pytest.approx(LAUNCH_SECONDS)
    assert constants.backward[HOST_BOUND_FRAMEWORK] == pytest.approx(BACKWARD_SECONDS)
    assert np.abs(relative_errors(tabulate_steps(ALL_STEPS), constants)).max() < 1e-9


def test_fit_is_independent_of_case_order() -> None:
    assert fit_step_constants(tabulate_steps(ALL_STEPS)) == fit_step_constants(tabulate_steps(ALL_STEPS[::-1]))


def test_constants_with_too_few_cases_are_not_fitted() -> None:
    """The rate stays that of single kernels; the launch time stays the packaged one."""
    steps = [
        *scaled_steps(SyntheticStep(H100)),
        *scaled_steps(SyntheticStep(A100, "other")),
        *scaled_steps(SyntheticStep(B200), MIN_CASES - 1),
        *launch_bound_steps(MIN_CASES - 1),
    ]
    constants, defaults = fit_step_constants(tabulate_steps(steps)), fit_step_constants([])
    assert constants.sustained[B200] == 1.0
    assert constants.launch == defaults.launch
    assert constants.sustained[H100] == pytest.approx(TRUE_RATES[H100])


def test_invisible_launch_time_is_not_fitted() -> None:
    """At most 40 launches of at most 60 us in more than a second: 0.2 %."""
    hidden = [replace(step, work=1.0, launches=40.0, backward=0.0) for step in launch_bound_steps()]
    assert (
        fit_step_constants(tabulate_steps([*ALL_STEPS[: -2 * MIN_CASES], *hidden])).launch
        == fit_step_constants([]).launch
    )


def test_accelerators_with_too_few_cases_use_their_fallback() -> None:
    constants = fit_step_constants(tabulate_steps(ALL_STEPS))
    assert FALLBACK_ACCELERATORS
    for name, other in FALLBACK_ACCELERATORS.items():
        assert name in FITTED_ACCELERATORS
        assert constants.sustained[name] == constants.sustained[other] != 1.0


def test_sources_have_equal_weight_whatever_their_case_count() -> None:
    """Two sources agree, one of 40 cases differs by 8 %: the rate is that of the two."""
    deviating = scaled_steps(SyntheticStep(H100, "odd", measured_ratio=1.08), 40)
    constants = fit_step_constants(
        tabulate_steps(
            [*scaled_steps(SyntheticStep(H100, "one")), *scaled_steps(SyntheticStep(H100, "two")), *deviating]
        )
    )
    assert constants.sustained[H100] == pytest.approx(TRUE_RATES[H100])


def test_held_out_source_is_not_used_in_the_fit() -> None:
    """Its accelerator's rate is 0.83, without it 1: predicted 0.83 of the measurement. In sample, it is exact."""
    without = fit_publisher_held_out(tabulate_steps(ALL_STEPS))
    qualities = {
        quality.source: quality
        for quality in step_quality(tabulate_steps(ALL_STEPS), fit_step_constants(tabulate_steps(ALL_STEPS)), without)
    }
    third = qualities["third"]
    assert (third.n, third.mape, third.bias) == (MIN_CASES, pytest.approx(0.0, abs=1e-9), pytest.approx(0.0, abs=1e-9))
    assert third.loo_bias == pytest.approx(TRUE_RATES[B200] - 1.0)
    assert third.loo_mape == pytest.approx(1.0 - TRUE_RATES[B200])
    steps = [step for step in out_of_sample_steps(tabulate_steps(ALL_STEPS), without) if step.source == "third"]
    assert [step.log_error for step in steps] == pytest.approx([-np.log(TRUE_RATES[B200])] * MIN_CASES)


def test_held_out_source_is_predicted_by_the_constants_of_the_others() -> None:
    """Measured 10 % longer than in the two others, it is predicted 1/1.1 of the measurement."""
    cases = tabulate_steps(
        [
            *scaled_steps(SyntheticStep(H100, "one")),
            *scaled_steps(SyntheticStep(H100, "two")),
            *scaled_steps(SyntheticStep(H100, "odd", measured_ratio=1.1)),
        ]
    )
    constants = fit_step_constants(cases)
    odd = next(
        quality for quality in step_quality(cases, constants, fit_publisher_held_out(cases)) if quality.source == "odd"
    )
    assert odd.loo_bias == pytest.approx(1 / 1.1 - 1)
    assert constants.sustained[H100] == pytest.approx(TRUE_RATES[H100])


def test_step_time_is_linear_in_inverse_rate_and_launch_time() -> None:
    """Also in extrapolation: 2 s at rate 0.9, and 1000 launches of 90 us, beyond the table."""
    case = SyntheticStep(work=2.0, launches=1000.0).tabulate("case")
    other_nodes = [np.array([float(nodes[0])]) for nodes in INTERPOLATION_NODES[2:]]
    (error,) = case.log_errors(np.array([0.9]), np.array([90e-6]), *other_nodes)
    assert np.exp(error) * case.measured_seconds == pytest.approx(2.0 / 0.9 + 0.09)


def published_case(source: str, index: int, **columns: str) -> ValidationCase:
    cells = {"case_id": f"{source}-{index}", "source": source, "precision": "bf16", "quality": "A", "experts": ""}
    return ValidationCase(cells | columns, line_number=2 + index)


def test_only_dense_16_bit_cases_of_good_quality_are_fitted() -> None:
    expected = [published_case("paper", 0), published_case("paper", 1, precision="fp16", experts="1", quality="B")]
    excluded = [
        published_case("paper", 2, experts="8"),
        published_case("paper", 3, precision="fp8"),
        published_case("paper", 4, quality="C"),
    ]
    assert subsample_cases([*expected, *excluded]) == expected


def test_large_sources_are_subsampled_evenly() -> None:
    """2.4 times as many as the limit: every third."""
    count = int(2.4 * MAX_CASES_PER_SOURCE)
    small, large = [published_case("small", 0)], [published_case("large", index) for index in range(count)]
    assert subsample_cases([*large, *small]) == [*large[::3], *small]


SIMULATED_COLUMNS = {"step_time_origin": "simulated by somebody"}


@given(st.lists(st.sampled_from(["measured", "simulated", "elsewhere"]), max_size=40), st.integers(1, 10))
@examples(100)
def test_simulated_cases_do_not_affect_subsampling(kinds: list[str], max_cases: int) -> None:
    """Wherever they are in the table, the selection is that of a table without them."""
    cases_by_kind = {
        "measured": ("paper", {}),
        "simulated": ("paper", SIMULATED_COLUMNS),
        "elsewhere": ("simulator", SIMULATED_COLUMNS),
    }
    all_cases = [
        published_case(source, index, **columns)
        for index, kind in enumerate(kinds)
        for source, columns in (cases_by_kind[kind],)
    ]
    measured = [case for case, kind in zip(all_cases, kinds, strict=True) if kind == "measured"]
    assert subsample_cases(all_cases, max_cases) == subsample_cases(measured, max_cases)


MOE_COLUMNS = {
    **{"tp": "1", "pp": "1", "dp": "8", "schedule": "", "mlp": "swiglu", "zero_stage": "1", "ep": "8"},
    **{"experts": "16", "top_k": "4", "moe_ffn_hidden": "512", "shared_experts": "2"},
}
SCALED_FORMAT_COLUMNS = {"precision": "mxfp8", "framework": "megatron-bridge v0.4.0", "year": "2025", "gpu": "gb200"}
SCALED_FORMAT_COLUMNS |= {"gpus_per_node": "4", "interconnect": "nvl72"}


def source_cases(count: int, **cells: str) -> list[ValidationCase]:
    """Cases of one source, of different lengths."""
    case_name, software = "-".join(cells.values()), {"framework": "megatron-lm", "year": "2021"}
    lengths = [str(16 * (index + 1)) for index in range(count)]
    return [
        row(**{"case_id": f"{case_name} {length}", "global_batch": length, **software, **cells}) for length in lengths
    ]


def cases_of_all_kinds(dense_count: int, low_precision_count: int, **cells: str) -> list[ValidationCase]:
    """Cases of small host-bound models; low_precision_count: enough for a rate of their own, or not."""
    moe_cases = (
        source_cases(1, **MOE_COLUMNS, **cells),
        source_cases(1, **MOE_COLUMNS, **SCALED_FORMAT_COLUMNS, **cells),
    )
    return [
        *source_cases(dense_count, **cells),
        *source_cases(low_precision_count, **SCALED_FORMAT_COLUMNS, **cells),
        *chain(*moe_cases),
    ]


def run_fit_steps(
    cases: list[ValidationCase], folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str
) -> dict[str, str]:
    """The files that `fit-steps` writes for published cases, by name."""
    folder.mkdir()
    monkeypatch.setattr("calibrate.fit.step_constants.read_steps", lambda: cases)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    arguments = [
        "--json",
        str(folder / "fit.json"),
        "--out-of-sample",
        str(folder),
        "--workers",
        "1",
        "--max-cases",
        "4",
    ]
    command(parser.parse_args([*arguments, *options]))
    return {path.name: path.read_text() for path in folder.iterdir()}


@pytest.mark.slow
def test_simulated_steps_do_not_affect_constants_or_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated times are a tenth or four times the measured ones, in every kind of steps.

    They are mixed into a source with measured times, or are all that a source has.
    """
    runs = [*cases_of_all_kinds(4, 1), *source_cases(4, source="another", hidden="2048", step_time_s="0.2")]
    simulated_same_source = cases_of_all_kinds(13, 11, step_time_s="0.01", **SIMULATED_COLUMNS)
    simulated_only = cases_of_all_kinds(5, 11, source="simulator", step_time_s="0.4", **SIMULATED_COLUMNS)
    mixed = [*simulated_only, *simulated_same_source[::2], *runs, *simulated_same_source[1::2]]
    without, with_simulated = (
        {
            options: run_fit_steps(cases, tmp_path / f"{name}{len(options)}", monkeypatch, *options)
            for options in ((), ("--low-precision",))
        }
        for name, cases in (("runs", runs), ("mixed", mixed))
    )
    assert set(without[()]) == {"fit.json", *(out_of_sample_path(kind).name for kind in MODEL_NAMES)}
    assert with_simulated == without


def test_constants_for_a_step_are_by_accelerator_and_framework() -> None:
    constants = fit_step_constants(tabulate_steps(ALL_STEPS))
    assert isinstance(constants, StepConstants)
    other = replace(SyntheticStep().tabulate("case"), accelerator="cpu-laptop", framework=HOST_BOUND_FRAMEWORK)
    launches = constants.launch[HOST_BOUND_FRAMEWORK], constants.backward[HOST_BOUND_FRAMEWORK]
    assert constants.for_step(other) == (1.0, *launches)
    carried = replace(other, accelerator="mi300x")
    assert constants.for_step(carried) == (constants.sustained[H100], *launches)


def test_accelerators_carry_over_what_their_files_have() -> None:
    """A file of one to which nothing is fitted has the rate of the one whose it is fitted with."""
    for name, measured in CARRIED_OVER.items():
        derating = load_accelerator(name).derating
        assert derating.sustained_ratio == load_accelerator(measured).derating.sustained_ratio, name


def test_a_missing_folder_is_reported_before_anything_is_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fit takes minutes, which nobody wants to lose."""
    monkeypatch.setattr("calibrate.fit.step_constants.subsample_cases", lambda *_: pytest.fail("it has begun"))
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(OutputError, match="there is no directory"):
        command(parser.parse_args(["--out-of-sample", str(tmp_path / "missing")]))
