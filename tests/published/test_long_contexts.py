"""Contexts of 128k tokens and more, losses without logits, Muon: what the validation page states of them."""

from collections.abc import Sequence
from statistics import fmean

import pytest

from clustersim import Scenario, simulate
from clustersim.common.dtypes import DType
from clustersim.cost.roofline import Roofline
from clustersim.cost.sustained_rate import job_rate
from clustersim.hardware.accelerator import load_accelerator
from clustersim.model.newton_schulz import (
    momentum_kernel,
    newton_schulz_flops,
    product_kernel,
    shared_iteration,
    update_kernels,
    weight_update_kernel,
)
from clustersim.model.optimizers import Muon
from clustersim.model.precision_recipe import WeightFormats
from clustersim.model.weight_matrices import WeightMatrix
from clustersim.validation.case_scenario import is_fully_specified, scenario_mapping
from clustersim.validation.cases import ValidationCase
from clustersim.validation.comparison import CaseComparison
from clustersim.validation.memory import compare_memory, read_memory
from clustersim.validation.steps import compare_step, read_steps
from tests.published.documents import VALIDATION_PAGE, assert_states

pytestmark = pytest.mark.slow

LONG = 1 << 17  # tokens of a sequence


def signed(error: float | None) -> str:
    assert error is not None
    return f"{100 * error:+.1f}%"


def long_contexts() -> dict[str, list[CaseComparison]]:
    """Predicted steps of fully specified runs, by source."""
    by_source: dict[str, list[CaseComparison]] = {}
    for case in read_steps():
        if is_fully_specified(case) and case.positive_int("seq") >= LONG:
            by_source.setdefault(case.text("source"), []).append(compare_step(case))
    return by_source


def test_steps_of_long_contexts() -> None:
    """One line for each source: steps, mean error, bias."""
    lines = []
    for source, comparisons in long_contexts().items():
        errors = [comparison.error for comparison in comparisons if comparison.error is not None]
        mean_error = 100 * fmean(map(abs, errors))
        lines.append(f"| {source} | {len(errors)} | {mean_error:.1f}% | {signed(fmean(errors))} |")
    assert_states(VALIDATION_PAGE, *lines)


def test_memory_of_losses_without_logits() -> None:
    """TRL's chunked_nll at a million tokens, with and without offload."""
    cases = [case for case in read_memory() if case.text("source") == "trl"]
    errors = ", ".join(
        f"{_name(case)} {signed(row.error)}" for case, row in zip(cases, compare_memory(cases), strict=True)
    )
    assert_states(VALIDATION_PAGE, errors)


def _name(case: ValidationCase) -> str:
    return case.text("case_id").removeprefix("trl-qwen3-")


def iteration_seconds(gpu: str, gpus: int, matrices: Sequence[WeightMatrix]) -> float:
    """Seconds of one step of the Newton-Schulz iteration within a training step."""
    accelerator = load_accelerator(gpu)
    model, muon = Roofline(accelerator, job_rate(accelerator.derating, gpus)), Muon(batched=True)
    iterations = [shared_iteration(matrix, muon, 1) for matrix in matrices]
    kernels = [kernel for step in iterations for kernel in (product_kernel(step, muon), *update_kernels(step, muon))]
    return sum(model.time_kernel(kernel).seconds for kernel in kernels)


def test_newton_schulz_of_experts() -> None:
    """Of marin on 8 H100 on 8 H100 (marin-community/marin issue 6493, comment of 2026-06-18).

    Two layers of 256 experts, hidden 2560, of width 1280, gate and up in one matrix: 5 steps take 66.46 ms, one
    17.66 ms. Its count of FLOP, 59.22 % of the peak in 66.46 ms, is ours.
    """
    matrices = [WeightMatrix(2560, 2560, 64), WeightMatrix(1280, 2560, 64)]
    flops = sum(newton_schulz_flops(matrix, 5) for matrix in matrices)
    assert flops == pytest.approx(0.5922 * 989.5e12 * 66.46e-3, rel=1e-3)
    measured = (66.46e-3 - 17.66e-3) / 4
    error = iteration_seconds("h100-sxm-80gb", 8, matrices) / measured - 1
    assert_states(VALIDATION_PAGE, f"12.2 ms, {signed(error)}")


def test_share_of_muon_in_a_step() -> None:
    """The step of torch.optim's Muon and that of fused AdamW, else alike, on one H200."""
    ids = ("h200-llama2-4l-eager-fused", "h200-llama2-4l-muon")
    adam, muon = (compare_step(case) for case_id in ids for case in read_steps() if case.text("case_id") == case_id)
    assert adam.predicted is not None and muon.predicted is not None
    measured, predicted = (1 - first / second for first, second in (
        (adam.measured, muon.measured), (adam.predicted, muon.predicted)
    ))  # fmt: skip
    assert_states(VALIDATION_PAGE, f"{measured:.0%} of the step, predicted {predicted:.0%}".replace("%", " %"))


# TFLOP/s of the model, without the iteration's, with AdamW and with Muon, on GB300 in MXFP8, Megatron Bridge 26.02:
# table 1 of NVIDIA's developer blog of 2026-04-22, Advancing Emerging Optimizers for Accelerated LLM Training.
MUON_ON_GB300 = {
    "mb-26.02.01-Kimi_K2-DGX-GB300-MXFP8-256-gbs4096": (1051, 1029),
    "mb-26.02.01-Qwen3_30B_a3B-DGX-B200-MXFP8-8-gbs512": (713, 686),  # its recipe is the same on both
}


def test_time_that_muon_adds_on_gb300() -> None:
    """Steps with Muon over those with AdamW; batches are not stated, those of the recipes are taken."""
    cases = {case.text("case_id"): case for case in read_steps() if case.text("case_id") in MUON_ON_GB300}
    for case_id, (adamw, muon) in MUON_ON_GB300.items():
        case = cases[case_id]
        by_adamw, by_muon = (predicted_seconds(case, optimizer) for optimizer in ("adam", "muon"))
        measured, predicted = adamw / muon - 1, by_muon / by_adamw - 1
        assert predicted == pytest.approx(measured, rel=0.25)
        assert_states(VALIDATION_PAGE, f"{100 * measured:.1f} % to the step, predicted {100 * predicted:.1f} %")


def predicted_seconds(case: ValidationCase, optimizer: str) -> float:
    """The step of a run on as many GB300, with another optimizer."""
    mapping = scenario_mapping(case)
    training = {**mapping["training"], "optimizer": optimizer}
    cluster = {"name": "gb300-nvl72", "gpus": case.positive_int("n_gpus")}
    return simulate(Scenario.from_mapping({**mapping, "cluster": cluster, "training": training})).step_time


def test_muon_compiled_by_xla() -> None:
    """The whole update of the matrices of `test_newton_schulz_of_experts`, FP32 states: 66.46 ms."""
    matrices = [WeightMatrix(2560, 2560, 64), WeightMatrix(1280, 2560, 64)]
    formats = WeightFormats(DType.FP32, DType.BF16, DType.FP32, None, DType.FP32)
    accelerator = load_accelerator("h100-sxm-80gb")
    model, count = Roofline(accelerator, job_rate(accelerator.derating, 8)), sum(m.elements * m.count for m in matrices)
    kernels = [make(formats, count, compiled=True) for make in (momentum_kernel, weight_update_kernel)]
    seconds = 5 * iteration_seconds("h100-sxm-80gb", 8, matrices) + sum(model.time_kernel(k).seconds for k in kernels)
    assert_states(VALIDATION_PAGE, f"whole update of both, compiled by XLA, {signed(seconds / 66.46e-3 - 1)}")


def test_newton_schulz_on_gb300() -> None:
    """5 steps on 12288 x 10240 by cuBLAS, alone and in training, and by kernels of one triangle.

    NVIDIA/Megatron-LM@4950068da, message.
    """
    matrix, accelerator = WeightMatrix(12288, 10240), load_accelerator("gb300")
    errors = []
    for rate, symmetric, measured in (
        (1.0, False, 23.4e-3),
        (job_rate(accelerator.derating, 32), False, 26.0e-3),
        (1.0, True, 17.5e-3),
    ):
        model, muon = Roofline(accelerator, rate), Muon(symmetric=symmetric)
        step = shared_iteration(matrix, muon, 1)
        kernels = product_kernel(step, muon), *update_kernels(step, muon)
        errors.append(signed(5 * sum(model.time_kernel(kernel).seconds for kernel in kernels) / measured - 1))
    assert_states(
        VALIDATION_PAGE, "23.4 ms {}, 26.0 ms in training {}, 17.5 ms by kernels of one triangle {}".format(*errors)
    )
