"""The measured kernels: those of scenarios, of presets, and a grid that the device can run in time."""

from pathlib import Path
from typing import Any

import pytest

from calibrate.kernels import kernel_grid
from clustersim.build import distinct_kernels
from clustersim.common.dtypes import DType
from clustersim.common.errors import InputError
from clustersim.cost.calibration_record import signature_of
from clustersim.model.kernels import KernelKind, MatmulLayout, MatmulShape, MemoryBoundOp, MemoryBoundShape
from clustersim.scenario import Scenario

NOT_MEASURED = {
    *(MemoryBoundOp.CAUSAL_CONV1D, MemoryBoundOp.CAUSAL_CONV1D_CUDA, MemoryBoundOp.GATED_RMSNORM),
    *(MemoryBoundOp.L2NORM, MemoryBoundOp.SILU, MemoryBoundOp.GATE),
    *(MemoryBoundOp.PASS_OVERHEAD, MemoryBoundOp.STEP_OVERHEAD),
    *(MemoryBoundOp.MERGE, MemoryBoundOp.Z_LOSS, MemoryBoundOp.FACTORIZATION, MemoryBoundOp.ROTARY_COMPLEX),
}
"""Of linear mixers, ring attention, z-loss, Dion, torchtitan, and what a step does besides the model's operators."""
FAST_RATES = kernel_grid.DeviceRates(flops=1e15, bandwidth=1e13)


def _scenario(**training: Any) -> dict[str, Any]:
    return {
        "model": "llama3-8b",
        "cluster": {"name": "dgx-h100", "gpus": 8},
        "layout": {"tp": 4, "pp": 2, "sequence_parallel": True},
        "training": {
            "sequence": 4096,
            "global_batch": 8,
            "microbatch": 2,
            "precision": "bf16",
            "loss": "vocab_parallel",
            **training,
        },
        "framework": "ideal",
    }


@pytest.mark.parametrize(
    "training", [{"fused": True}, {"fused": False, "loss": "torch"}, {"fused": True, "recompute": "full"}]
)
def test_presets_cover_the_kernels_of_a_scenario(training: dict[str, Any]) -> None:
    """Except the optimizer kernels, whose sizes depend on the layout, and what frameworks do besides the model."""
    preset_signatures = {signature_of(kernel) for kernel in kernel_grid.preset_kernels(["llama3-8b"])}
    kernels = distinct_kernels(Scenario.from_mapping(_scenario(**training)))
    missing = [kernel.name for kernel in kernels if signature_of(kernel) not in preset_signatures]
    assert {name.partition(".")[0] for name in missing} == {"optimizer"}


def test_kernels_of_several_scenarios_are_merged(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("{model: llama-tiny, cluster: {name: laptop, gpus: 2}, training: {sequence: 64, global_batch: 4}}")
    scenario = Scenario.load(path, ["layout.dp=2"])
    assert kernel_grid.scenario_kernels([scenario, scenario]) == list(distinct_kernels(scenario))


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(InputError, match="did you mean llama3-70b"):
        kernel_grid.preset_kernels(["lama3-70b"])


def test_grid_covers_all_kinds_layouts_and_ops() -> None:
    kernels = kernel_grid.grid_kernels([DType.BF16, DType.FP8], FAST_RATES, 1.0)
    assert {kernel.kind for kernel in kernels} == set(KernelKind) - {KernelKind.SCAN, KernelKind.SPARSE_ATTENTION}
    matmuls = [kernel for kernel in kernels if isinstance(kernel.shape, MatmulShape)]
    layouts = {(kernel.dtype, kernel.shape.operands) for kernel in matmuls if isinstance(kernel.shape, MatmulShape)}
    assert layouts == {(dtype, operands) for dtype in (DType.BF16, DType.FP8) for operands in MatmulLayout}
    ops = {kernel.shape.routine for kernel in kernels if isinstance(kernel.shape, MemoryBoundShape)}
    lora_ops = {MemoryBoundOp.SCALED_SUM, MemoryBoundOp.SCALE, MemoryBoundOp.DEQUANTIZE}
    overhead_ops = {MemoryBoundOp.BIAS_ADD, MemoryBoundOp.CAUSAL_MASK, MemoryBoundOp.UNSCALE, MemoryBoundOp.ZERO}
    overhead_ops |= {MemoryBoundOp.UPDATE}
    excluded = (
        {MemoryBoundOp.POSITIONS, MemoryBoundOp.COPY, MemoryBoundOp.BALANCE} | lora_ops | overhead_ops | NOT_MEASURED
    )  # copies have separate samples
    assert ops == set(MemoryBoundOp) - excluded


def test_grid_matmuls_have_the_flops_and_bytes_of_the_model() -> None:
    """2 m n k FLOP; every operand once, the result once, or read and written where it is accumulated."""
    for kernel in kernel_grid.grid_kernels([DType.BF16], FAST_RATES, 1.0):
        shape = kernel.shape
        if isinstance(shape, MatmulShape):
            size = shape.batch * shape.m * shape.n
            result = 2 * size if shape.accumulated is None else 8 * size
            assert kernel.flops == 2.0 * size * shape.k
            assert kernel.bytes == 2 * shape.batch * (shape.m * shape.k + shape.k * shape.n) + result


def test_grid_is_limited_by_the_device_rates() -> None:
    """At 100 GFLOP/s a matmul of 10^9 FLOP or more takes over 10 ms."""
    slow_rates = kernel_grid.DeviceRates(flops=1e11, bandwidth=1e10)
    kernels = kernel_grid.grid_kernels([DType.FP32], slow_rates, 10e-3)
    assert 50 < len(kernels) < len(kernel_grid.grid_kernels([DType.FP32], FAST_RATES, 10e-3))
    assert all(kernel.flops <= 1e9 and kernel.bytes <= 1e8 for kernel in kernels)


def test_grid_signatures_are_unique() -> None:
    kernels = kernel_grid.grid_kernels([DType.BF16, DType.FP16, DType.TF32, DType.FP32, DType.FP8], FAST_RATES, 1.0)
    assert len({signature_of(kernel) for kernel in kernels}) == len(kernels)
