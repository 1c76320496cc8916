"""MoE kernels compute what their shapes state, and a record of them covers a MoE layer."""

from collections.abc import Iterator
from typing import Any

import pytest

from clustersim.build import distinct_kernels
from clustersim.common.dtypes import DType
from clustersim.cost.measured_kernels import MeasuredKernels
from clustersim.cost.timing import Provenance
from clustersim.hardware.accelerator import load_accelerator
from clustersim.model.kernels import (
    GROUPED_MATMUL_KINDS,
    Kernel,
    KernelKind,
    MatmulLayout,
    MatmulShape,
    MemoryBoundOp,
    MemoryBoundShape,
)
from clustersim.scenario import Scenario
from tests.calibrate.check_scenarios import LLAMA, single_thread, small_scenario

torch = pytest.importorskip("torch")

from calibrate.kernels import moe_formulas, pytorch_ops  # noqa: E402 - torch first
from calibrate.kernels.pytorch_ops import grouped_gemm  # noqa: E402

CPU_DEVICE = torch.device("cpu")
GROUPS, GROUP_ROWS, OUT_FEATURES, IN_FEATURES = 3, 8, 24, 16
MOE_CONFIGS = {
    "softmax": "{count: 8, top_k: 2, ffn: 48}",
    "sigmoid": "{count: 8, top_k: 2, ffn: 48, router: sigmoid, router_bias: true}",
    "groups": "{count: 16, top_k: 4, ffn: 48, router: sigmoid, router_bias: true, num_groups: 8, group_topk: 4}",
}


@pytest.fixture(autouse=True)
def _seeded_single_thread() -> Iterator[None]:
    torch.manual_seed(0)
    with single_thread():
        yield


def _moe_scenario(experts: str, *overrides: str) -> Scenario:
    return small_scenario(LLAMA, f"model.experts={experts}", "cluster.gpus=2", "layout.ep=2", *overrides)


def _kernel(operands: MatmulLayout, kind: KernelKind, accumulated: DType | None = None) -> Kernel:
    sizes = {
        MatmulLayout.NT: (GROUP_ROWS, OUT_FEATURES, IN_FEATURES),
        MatmulLayout.NN: (GROUP_ROWS, IN_FEATURES, OUT_FEATURES),
        MatmulLayout.TN: (OUT_FEATURES, IN_FEATURES, GROUP_ROWS),
    }
    shape = MatmulShape(*sizes[operands], GROUPS, operands, accumulated)
    return Kernel("test", kind, DType.FP32, 1.0, 1.0, shape)


@pytest.mark.parametrize("experts", MOE_CONFIGS.values(), ids=MOE_CONFIGS)
def test_every_moe_kernel_runs_on_a_cpu(experts: str) -> None:
    for kernel in distinct_kernels(_moe_scenario(experts)):
        action = pytorch_ops.prepare_kernel(kernel, CPU_DEVICE)
        action()
        action()
        assert pytorch_ops.allocated_bytes(kernel, CPU_DEVICE) >= pytorch_ops.touched_bytes(kernel) > 0.0


@pytest.mark.parametrize("kind", sorted(GROUPED_MATMUL_KINDS, key=lambda kind: kind.value))
@pytest.mark.parametrize("rows", [None, (3, 0, 21)], ids=["balanced", "imbalanced"])
@pytest.mark.parametrize("operands", MatmulLayout)
def test_grouped_matmuls_equal_the_matmul_of_each_group(
    monkeypatch: pytest.MonkeyPatch, operands: MatmulLayout, rows: tuple[int, ...] | None, kind: KernelKind
) -> None:
    """Compared with one matmul per group; empty groups yield no rows, and zero weight gradients."""
    all_operands: list[Any] = []
    original = grouped_gemm.grouped_operands

    def recording_operands(*arguments: Any) -> Any:
        all_operands[:] = original(*arguments)
        return tuple(all_operands)

    monkeypatch.setattr(grouped_gemm, "grouped_operands", recording_operands)
    kernel = _kernel(operands, kind)
    assert isinstance(kernel.shape, MatmulShape)
    action: Any = grouped_gemm.prepare_grouped(kernel, kernel.shape, CPU_DEVICE, rows)
    action()
    a, b = all_operands
    sizes = list(rows or (GROUP_ROWS,) * GROUPS)
    if operands is MatmulLayout.TN:
        expected_results = [x @ y for x, y in zip(a.split(sizes, 1), b.split(sizes), strict=True)]
    else:
        expected_results = [x @ y for x, y in zip(a.split(sizes), b, strict=True)]
    results = (
        action.result
        if kind is KernelKind.STREAMED_MATMULS or operands is MatmulLayout.TN
        else action.result.split(sizes)
    )
    for result, expected in zip(results, expected_results, strict=True):
        torch.testing.assert_close(result, expected)


def test_matmuls_run_sequentially_without_a_grouped_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they accumulate, which the grouped kernel does not support."""
    kernel, accumulating_kernel = (
        _kernel(MatmulLayout.NT, KernelKind.GROUPED_MATMUL),
        _kernel(MatmulLayout.TN, KernelKind.GROUPED_MATMUL, DType.FP32),
    )
    for grouped_kernel in (kernel, accumulating_kernel):
        assert isinstance(grouped_kernel.shape, MatmulShape)
    assert grouped_gemm.has_grouped_kernel(DType.FP32, CPU_DEVICE)
    monkeypatch.setattr(grouped_gemm, "has_grouped_kernel", lambda _dtype, _device: False)
    action: Any = pytorch_ops.prepare_kernel(kernel, CPU_DEVICE)
    action()
    assert [tuple(item.shape) for item in action.result] == [(GROUP_ROWS, OUT_FEATURES)] * GROUPS
    accumulating_action: Any = pytorch_ops.prepare_kernel(accumulating_kernel, CPU_DEVICE)
    accumulating_action()
    first = [element.clone() for element in accumulating_action.result]
    accumulating_action()
    accumulating_action()
    for before, after in zip(first, accumulating_action.result, strict=True):
        assert not torch.allclose(before, after)


def test_kernels_only_fused_by_transformer_engine_are_unsupported() -> None:
    shape = MemoryBoundShape(MemoryBoundOp.UNPERMUTE, 8, 16, fused=True, table=16)
    with pytest.raises(pytorch_ops.UnsupportedKernel, match="unpermute: PyTorch has no fused kernel"):
        pytorch_ops.prepare_kernel(Kernel("test", KernelKind.COPY, DType.BF16, 0.0, 1.0, shape), CPU_DEVICE)


def test_top_k_softmax_selects_the_largest_and_renormalizes() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    probabilities, routing_map = moe_formulas.top_k_softmax(logits, 2)
    assert routing_map.tolist() == [[False, True, False, True]]
    e = torch.tensor([3.0, 2.0]).exp()
    torch.testing.assert_close(probabilities[0, [1, 3]], e / e.sum())


def test_expert_bias_affects_selection_but_not_weights() -> None:
    logits, bias = torch.tensor([[0.0, 3.0, 1.0, 2.0]]), torch.tensor([9.0, 0.0, 0.0, 0.0])
    probabilities, routing_map = moe_formulas.top_k_sigmoid(logits, 2, bias)
    assert routing_map.tolist() == [[True, True, False, False]]
    s = torch.sigmoid(torch.tensor([0.0, 3.0]))
    torch.testing.assert_close(probabilities[0, :2], s / s.sum())


def test_group_limited_routing_uses_at_most_the_allowed_groups() -> None:
    logits = torch.randn(64, 32)
    _, routing_map = moe_formulas.top_k_sigmoid(logits, 8, None, grouped=True)
    assert routing_map.sum(1).tolist() == [8] * 64
    assert (
        int(routing_map.view(64, moe_formulas.EXPERT_GROUPS, -1).any(-1).sum(1).max())
        <= moe_formulas.MAX_GROUPS_PER_TOKEN
    )
    _, unlimited = moe_formulas.top_k_sigmoid(logits, 8, None)
    assert (
        int(unlimited.view(64, moe_formulas.EXPERT_GROUPS, -1).any(-1).sum(1).max()) > moe_formulas.MAX_GROUPS_PER_TOKEN
    )


def test_permuted_tokens_are_sorted_by_expert_and_restored() -> None:
    """Unpermuting permuted tokens multiplies every token by its number of experts."""
    routing = moe_formulas.top_k_softmax(torch.randn(16, 8), 3)
    token_indices, weights = moe_formulas.permutation_map(routing)
    experts = routing[1].t().nonzero()
    assert token_indices.tolist() == experts[:, 1].tolist()
    torch.testing.assert_close(weights, routing[0][token_indices, experts[:, 0]])
    x = torch.randn(16, 4)
    torch.testing.assert_close(
        moe_formulas.unpermute_tokens(moe_formulas.permute_tokens(x, token_indices), token_indices, 16), 3.0 * x
    )


def test_reorder_backward_restores_the_order() -> None:
    tokens, order = torch.randn(6, 2, requires_grad=True, dtype=torch.float64), torch.randperm(6)
    inverse = torch.argsort(order)
    assert torch.autograd.gradcheck(lambda x: moe_formulas._ReorderTokens.apply(x, order, inverse), (tokens,))


def _constant_record(kernels: list[Kernel], seconds: float) -> Any:
    from clustersim.cost.calibration_record import (
        CalibrationRecord,
        DeviceInfo,
        KernelSample,
        MeasurementConditions,
        TimeStatistics,
    )

    samples = []
    for kernel in kernels:
        assert kernel.shape is not None
        fields = kernel.name, kernel.kind, kernel.dtype, kernel.shape, kernel.flops, kernel.bytes, kernel.launches
        samples.append(KernelSample(*fields, TimeStatistics(seconds, seconds, seconds, 3)))
    return CalibrationRecord(
        DeviceInfo("cpu-laptop", "a CPU"), MeasurementConditions("2026-11-23", "test", "test"), tuple(samples)
    )


def test_record_covers_the_same_moe_layer_and_interpolates_batches() -> None:
    """Equal shapes are measured.

    A batch between two measured ones is interpolated, in every family of expert kernels.
    """
    small, large, between = (
        _moe_scenario(MOE_CONFIGS["softmax"], f"training.sequence={tokens}") for tokens in (16, 64, 32)
    )
    small_kernels, large_kernels, kernels = (
        [distinct_kernel for distinct_kernel in distinct_kernels(scenario) if _depends_on_tokens(distinct_kernel)]
        for scenario in (small, large, between)
    )
    record = _constant_record([*small_kernels, *large_kernels], 1e-3)
    cost = MeasuredKernels(record, load_accelerator("cpu-laptop"))
    assert {cost.time_kernel(small_kernel).provenance for small_kernel in (*small_kernels, *large_kernels)} == {
        Provenance.MEASURED
    }
    timings = {kernel.name: cost.time_kernel(kernel) for kernel in kernels}
    assert len(timings) > 14
    assert {name for name, timing in timings.items() if timing.provenance is not Provenance.INTERPOLATED} == set()
    assert {kernel_timing.seconds for kernel_timing in timings.values()} != {1e-3}


def _depends_on_tokens(kernel: Kernel) -> bool:
    """True for kernels whose time depends on the number of tokens; accumulation depends on the weights."""
    is_routed = kernel.name.startswith(("experts.", "mlp.top_k", "mlp.permute", "mlp.unpermute"))
    return is_routed and not kernel.name.endswith("accumulate")


def test_routers_have_distinct_kernels() -> None:
    kernels_by_router = {name: distinct_kernels(_moe_scenario(experts)) for name, experts in MOE_CONFIGS.items()}
    ops = {
        name: {
            kernel.shape.routine
            for kernel in kernels
            if isinstance(kernel.shape, MemoryBoundShape) and kernel.name == "mlp.top_k"
        }
        for name, kernels in kernels_by_router.items()
    }
    assert ops == {
        "softmax": {MemoryBoundOp.TOP_K},
        "sigmoid": {MemoryBoundOp.TOP_K_SIGMOID},
        "groups": {MemoryBoundOp.TOP_K_GROUPED},
    }
