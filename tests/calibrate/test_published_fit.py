"""Packaged kernel constants are what published measurements support, and predict them as accurately as promised."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from calibrate.__main__ import main
from calibrate.fit import published_fit
from calibrate.fit.grid_search import GridSearch
from calibrate.fit.published_fit import DERIVED_ACCELERATORS, TARGETS, AcceleratorFits
from calibrate.fit.published_kernels import attention_samples, best_matmul_rates, matmul_samples
from clustersim.common.dtypes import LOW_PRECISION_DTYPES, DType
from clustersim.cost.roofline import Roofline
from clustersim.hardware.accelerator import load_accelerator
from clustersim.hardware.efficiency import KernelEfficiency
from clustersim.model.kernels import Kernel, KernelKind
from clustersim.model.layer_stack import MlpType
from clustersim.model.layers import LayerOperators, LayerShard
from clustersim.model.precision_recipe import mixed_precision
from clustersim.model.recompute_modules import RecomputeModule
from clustersim.model.training import AttentionBackend, Training
from clustersim.model.transformer import Norm, PositionEncoding, uniform_model
from tests.uniform_models import uniform_layer

BLACKWELL = ("b200-sxm-180gb", "gb200")  # one of their machines is a quarter slower than the others in long kernels


@pytest.mark.parametrize(
    "name", [target.name for target in TARGETS] + [derived.name for derived in DERIVED_ACCELERATORS]
)
def test_packaged_constants_are_the_recommended_ones(fits: AcceleratorFits, name: str) -> None:
    def rounded(efficiency: KernelEfficiency) -> KernelEfficiency:
        latency, grouped = round(efficiency.kernel_latency, 9), efficiency.expert_matmul
        rounded_grouped = replace(grouped, host_launch=round(grouped.host_launch, 9))
        return replace(efficiency, kernel_latency=latency, launch_interval=0.0, grouped_gemm=rounded_grouped)

    assert rounded(load_accelerator(name).efficiency) == rounded(fits.efficiencies[name])


def test_matmul_errors_are_below_20_percent_and_large_ones_below_10(fits: AcceleratorFits) -> None:
    """Errors are means over all samples of an accelerator; leave-one-out changes little.

    Three squares each of MI325X and MI355X, which HipKittens timed, judge constants derived from MI300X.
    """
    dense = [quality for quality in fits.qualities if quality.kind.startswith("matmul")]
    assert {quality.accelerator for quality in dense} >= {target.name for target in TARGETS}
    for quality in dense:
        derived_limit = 0.15 if quality.accelerator in ("mi325x", "mi355x") else 0.10
        assert quality.loo_mape <= (0.25 if quality.accelerator in BLACKWELL else 0.20), quality
        assert quality.large_loo_mape is None or quality.large_loo_mape <= (
            0.25 if quality.accelerator in BLACKWELL else derived_limit
        ), quality


def test_flash_attention_errors_are_below_15_percent(fits: AcceleratorFits) -> None:
    for quality in fits.qualities:
        if quality.kind.startswith("attention"):
            assert quality.loo_mape <= (0.20 if quality.accelerator in BLACKWELL else 0.15), quality


def test_roofline_equals_the_fitted_model(fits: AcceleratorFits) -> None:
    """The fit works on arrays of samples; the cost source times one kernel. Both are the same model."""
    name = "h100-sxm-80gb"
    roofline = Roofline(load_accelerator(name))
    samples = [
        sample for sample in matmul_samples() if sample.accelerator == name and sample.dtype not in LOW_PRECISION_DTYPES
    ]
    kernels = [
        Kernel("row", KernelKind.MATMUL, sample.dtype, sample.flops, sample.moved_bytes, sample.shape)
        for sample in samples
    ]
    ratios = [
        roofline.time_kernel(kernel).seconds / sample.seconds for kernel, sample in zip(kernels, samples, strict=True)
    ]
    quality = next(entry for entry in fits.qualities if entry.accelerator == name and entry.kind == "matmul")
    assert np.mean(np.abs(np.array(ratios) - 1.0)) == pytest.approx(quality.mape, rel=1e-6)


@pytest.mark.parametrize(("sequence_parallel", "measured"), [(False, 7.7e-3), (True, 7.2e-3)])
def test_published_22b_layer_forward_time(sequence_parallel: bool, measured: float) -> None:
    """Korthikanti et al. 2022 (arXiv:2205.05198), table 4: one layer of the 22B model, tp 8, microbatch 4, A100.

    It was not fitted. The measured time includes two all-reduces of 4 x 2048 x 6144 FP16: at the 235 GB/s bus
    bandwidth of eight A100 they take 2 x 2 x 7/8 x 100.7 MB / 235 GB/s = 1.5 ms.
    """
    layer = layer_22b(sequence_parallel)
    roofline = Roofline(load_accelerator("a100-sxm-80gb"))
    kernels = [kernel for operator in layer.operators for kernel in operator.forward]
    predicted = sum(roofline.time_kernel(kernel).seconds for kernel in kernels) + 1.5e-3
    assert predicted == pytest.approx(measured, rel=0.1)


def test_published_selective_recompute_time() -> None:
    """Korthikanti table 4, without communication: selective recomputation adds 13.1 - 11.8 = 1.3 ms (+-0.1 ms)."""
    roofline = Roofline(load_accelerator("a100-sxm-80gb"))
    core_kernels = [
        kernel
        for operator in layer_22b(True).operators
        if operator.is_in_modules({RecomputeModule.CORE_ATTENTION})
        for kernel in operator.forward
    ]
    assert sum(roofline.time_kernel(kernel).seconds for kernel in core_kernels) == pytest.approx(1.3e-3, abs=0.25e-3)


def layer_22b(sequence_parallel: bool) -> LayerOperators:
    model = uniform_model(
        name="korthikanti-22b",
        layers=48,
        hidden=6144,
        ffn=4 * 6144,
        heads=64,
        kv_heads=64,
        head_dim=96,
        vocab=51200,
        max_positions=2048,
        mlp=MlpType.GELU,
        norm=Norm.LAYERNORM,
        positions=PositionEncoding.LEARNED,
        tied_embeddings=True,
        linear_bias=True,
        qkv_bias=True,
        dropout=True,
    )
    precision = mixed_precision(compute=DType.FP16)
    training = Training(2048, global_batch=4, microbatch=4, recipe=precision, attention=AttentionBackend.STANDARD)
    return uniform_layer(model, training, LayerShard(4, 2048, 2048, tp=8, sequence_parallel=sequence_parallel))


def test_best_matmul_rates_are_bounds_and_not_fit_samples() -> None:
    assert best_matmul_rates()[("h100-sxm-80gb", DType.BF16)] == 794.5e12
    assert not any(sample.flops / sample.seconds == pytest.approx(794.5e12, rel=1e-4) for sample in matmul_samples())
    for (name, dtype), rate in best_matmul_rates().items():
        assert rate < load_accelerator(name).peak_flops(dtype)


def test_causal_sample_with_full_matrix_flops_is_halved() -> None:
    """SimuMax prints 1646.5 TFLOP/s over 166.95 us for a causal kernel of 32 heads, 4096 tokens, dimension 128:

    4 * 32 * 4096^2 * 128 FLOP / 166.95 us = 1646.5 TFLOP/s, of which a causal kernel executes half.
    """
    candidate = next(
        sample for sample in attention_samples() if sample.accelerator == "b200-sxm-180gb" and sample.shape.heads == 32
    )
    assert candidate.seconds == pytest.approx(166.95e-6, rel=1e-3)
    assert candidate.flops == 4 * 32 * 4096**2 * 128 / 2


def test_leave_one_out_predicts_each_sample_from_the_others() -> None:
    """Candidates predict a constant; samples are 1 s and 4 s, so the weights are 1/3 and 2/3.

    Of the candidates 1, 2 and 4 the best overall is 4 (|log| errors 1.39, 0); without the second sample it is 1,
    and without the first it is 4.
    """
    search = GridSearch(np.array([1.0, 4.0]))
    for value in (1.0, 2.0, 4.0):
        search.evaluate([(value,)], np.array([[value, value]]))
    winner = search.optimum()
    assert winner.constants == (4.0,)
    assert winner.leave_one_out.tolist() == [4.0, 1.0]


def test_held_out_source_is_predicted_from_the_others() -> None:
    """Samples of 1 s and 1 s of one source and 4 s of another: without the other 1 is best, without the one 4 is."""
    search = GridSearch(np.array([1.0, 1.0, 4.0]), ["one", "one", "other"])
    for value in (1.0, 2.0, 4.0):
        search.evaluate([(value,)], np.full((1, 3), value))
    predictions = search.optimum().source_held_out
    assert predictions is not None
    assert predictions.tolist() == [4.0, 4.0, 1.0]


def test_a_single_source_is_not_held_out() -> None:
    search = GridSearch(np.array([1.0, 4.0]), ["one", "one"])
    search.evaluate([(2.0,)], np.full((1, 2), 2.0))
    assert search.optimum().source_held_out is None


def test_equal_source_weights_ignore_sample_counts() -> None:
    """Nine samples of 1 s of one source, and two of 2 s of one source each.

    Weighted by samples 1 is best, weighted by sources 2.
    """
    optima = []
    for is_equal_weighted in (False, True):
        search = GridSearch(
            np.array([1.0] * 9 + [2.0] * 2), [*["many"] * 9, "first", "second"], equal_source_weights=is_equal_weighted
        )
        for value in (1.0, 2.0):
            search.evaluate([(value,)], np.full((1, 11), value))
        optima.append(search.optimum().constants[0])
    assert optima == [1.0, 2.0]


def test_sources_are_evaluated_separately_and_held_out_if_possible(fits: AcceleratorFits) -> None:
    """An accelerator's samples of a kind are divided among its sources; a single source cannot be held out."""
    for evaluation in fits.evaluations:
        source_errors = [
            source_error
            for source_error in fits.source_errors
            if (source_error.accelerator, source_error.kind) == (evaluation.accelerator, evaluation.kind)
        ]
        assert sum(item.n for item in source_errors) == len(evaluation.samples)
        is_fitted = not evaluation.kind.endswith("not fitted")
        assert all(
            (element.held_out_mape is None) == (len(source_errors) == 1 and is_fitted) for element in source_errors
        )
        mean = sum(entry.n * entry.mape for entry in source_errors) / len(evaluation.samples)
        assert mean == pytest.approx(evaluation.quality.mape)


def test_blackwell_matmul_constants_rest_on_three_sources(fits: AcceleratorFits) -> None:
    """Constants of any two sources predict the third within a quarter, with errors of both signs."""
    source_errors = [
        source_error
        for source_error in fits.source_errors
        if source_error.accelerator == "b200-sxm-180gb" and source_error.kind == "matmul"
    ]
    biases = [item.held_out_bias for item in source_errors if item.held_out_bias is not None]
    assert len(biases) == len(source_errors) == 3
    assert min(biases) < 0.0 < max(biases)
    assert max(map(abs, biases)) < 0.25


_ONE_TARGET_SCRIPT = """
import sys
from calibrate.__main__ import main
from calibrate.fit import published_fit
published_fit.TARGETS = [target for target in published_fit.TARGETS if target.name == "h100-sxm-80gb"]
published_fit.DERIVED_ACCELERATORS = ()
main(sys.argv[1:])
sys.exit("torch" in sys.modules)
"""


@pytest.mark.slow
def test_fit_published_writes_json_without_importing_torch(tmp_path: Path) -> None:
    target = tmp_path / "fits.json"
    subprocess.run([sys.executable, "-c", _ONE_TARGET_SCRIPT, "fit-published", "--json", str(target)], check=True)
    result = json.loads(target.read_text())
    assert result["efficiency"]["h100-sxm-80gb"]["matmul"]["peak_fraction"] == pytest.approx(0.75, abs=0.1)
    assert set(result["efficiency"]["h100-sxm-80gb"]["matmul"]["peak_fraction_by_format"]) == {
        "fp8",
        "fp8-rowwise",
        "fp8-blockwise",
    }
    kinds = {(item["accelerator"], item["kind"]) for item in result["qualities"]}
    assert {("h100-sxm-80gb", "matmul"), ("h100", "collectives < 1 MiB")} <= kinds
    assert {"accelerator", "kind", "n", "mape", "loo_mape", "large_n", "large_loo_mape"} <= set(result["qualities"][0])


@pytest.mark.slow
def test_unwritable_target_is_one_sentence_and_status_2(
    fits: AcceleratorFits, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(published_fit, "fit_published", lambda: fits)
    assert main(["fit-published", "--json", str(tmp_path / "no" / "where.json")]) == 2
    assert "there is no directory" in capsys.readouterr().err
