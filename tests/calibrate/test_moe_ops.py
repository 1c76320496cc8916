"""Routines of experts compute what their shapes say, and a record of them answers for a mixture."""

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
from tests.calibrate.check_scenarios import LLAMA, one_thread, scenario

torch = pytest.importorskip("torch")

from calibrate.kernels import moe_formulas, pytorch_ops  # noqa: E402 - torch first
from calibrate.kernels.pytorch_ops import grouped_gemm  # noqa: E402

CPU = torch.device("cpu")
GROUPS, ROWS, WIDE, DEEP = 3, 8, 24, 16
MIXTURES = {
    "softmax": "{count: 8, top_k: 2, ffn: 48}",
    "sigmoid": "{count: 8, top_k: 2, ffn: 48, router: sigmoid, router_bias: true}",
    "groups": "{count: 16, top_k: 4, ffn: 48, router: sigmoid, router_bias: true, groups: 8, limit: 4}",
}


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    torch.manual_seed(0)
    with one_thread():
        yield


def _mixture(experts: str, *overrides: str) -> Scenario:
    return scenario(LLAMA, f"model.experts={experts}", "cluster.gpus=2", "layout.ep=2", *overrides)


def _kernel(operands: MatmulLayout, kind: KernelKind, accumulated: DType | None = None) -> Kernel:
    sizes = {
        MatmulLayout.NT: (ROWS, WIDE, DEEP),
        MatmulLayout.NN: (ROWS, DEEP, WIDE),
        MatmulLayout.TN: (WIDE, DEEP, ROWS),
    }
    shape = MatmulShape(*sizes[operands], GROUPS, operands, accumulated)
    return Kernel("test", kind, DType.FP32, 1.0, 1.0, shape)


@pytest.mark.parametrize("experts", MIXTURES.values(), ids=MIXTURES)
def test_every_kernel_of_a_mixture_runs_on_a_cpu(experts: str) -> None:
    for kernel in distinct_kernels(_mixture(experts)):
        action = pytorch_ops.prepare_kernel(kernel, CPU)
        action()
        action()
        assert pytorch_ops.allocated_bytes(kernel, CPU) >= pytorch_ops.touched_bytes(kernel) > 0.0


@pytest.mark.parametrize("kind", sorted(GROUPED_MATMUL_KINDS, key=lambda kind: kind.value))
@pytest.mark.parametrize("rows", [None, (3, 0, 21)], ids=["even", "uneven"])
@pytest.mark.parametrize("operands", MatmulLayout)
def test_grouped_products_are_those_of_each_group(
    monkeypatch: pytest.MonkeyPatch, operands: MatmulLayout, rows: tuple[int, ...] | None, kind: KernelKind
) -> None:
    """Against one product after the other, by hand; groups without rows give nothing, and zeros for their weights."""
    given: list[Any] = []
    real = grouped_gemm.grouped_operands

    def kept(*arguments: Any) -> Any:
        given[:] = real(*arguments)
        return tuple(given)

    monkeypatch.setattr(grouped_gemm, "grouped_operands", kept)
    kernel = _kernel(operands, kind)
    assert isinstance(kernel.shape, MatmulShape)
    action: Any = grouped_gemm.prepare_grouped(kernel, kernel.shape, CPU, rows)
    action()
    a, b = given
    sizes = list(rows or (ROWS,) * GROUPS)
    if operands is MatmulLayout.TN:
        wanted = [x @ y for x, y in zip(a.split(sizes, 1), b.split(sizes), strict=True)]
    else:
        wanted = [x @ y for x, y in zip(a.split(sizes), b, strict=True)]
    parts = (
        action.result
        if kind is KernelKind.STREAMED_MATMULS or operands is MatmulLayout.TN
        else action.result.split(sizes)
    )
    for item, expected in zip(parts, wanted, strict=True):
        torch.testing.assert_close(item, expected)


def test_without_a_grouped_kernel_products_follow_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """And so they do where they are added to what is there, which the kernel cannot."""
    kernel, summed = (
        _kernel(MatmulLayout.NT, KernelKind.GROUPED_MATMUL),
        _kernel(MatmulLayout.TN, KernelKind.GROUPED_MATMUL, DType.FP32),
    )
    for item in (kernel, summed):
        assert isinstance(item.shape, MatmulShape)
    assert grouped_gemm.has_grouped_kernel(DType.FP32, CPU)
    monkeypatch.setattr(grouped_gemm, "has_grouped_kernel", lambda _dtype, _device: False)
    action: Any = pytorch_ops.prepare_kernel(kernel, CPU)
    action()
    assert [tuple(element.shape) for element in action.result] == [(ROWS, WIDE)] * GROUPS
    adding: Any = pytorch_ops.prepare_kernel(summed, CPU)
    adding()
    first = [entry.clone() for entry in adding.result]
    adding()
    adding()
    for before, after in zip(first, adding.result, strict=True):
        assert not torch.allclose(before, after)


def test_what_only_transformer_engine_fuses_is_said() -> None:
    shape = MemoryBoundShape(MemoryBoundOp.UNPERMUTE, 8, 16, fused=True, table=16)
    with pytest.raises(pytorch_ops.UnsupportedKernel, match="unpermute: PyTorch has no fused kernel"):
        pytorch_ops.prepare_kernel(Kernel("test", KernelKind.COPY, DType.BF16, 0.0, 1.0, shape), CPU)


def test_softmax_chooses_the_largest_and_weights_them_by_themselves() -> None:
    logits = torch.differentiable([[0.0, 3.0, 1.0, 2.0]])
    probabilities, marks = moe_formulas.top_k_softmax(logits, 2)
    assert marks.tolist() == [[False, True, False, True]]
    e = torch.differentiable([3.0, 2.0]).exp()
    torch.testing.assert_close(probabilities[0, [1, 3]], e / e.sum())


def test_a_bias_chooses_and_does_not_weight() -> None:
    logits, bias = torch.differentiable([[0.0, 3.0, 1.0, 2.0]]), torch.differentiable([9.0, 0.0, 0.0, 0.0])
    probabilities, marks = moe_formulas.top_k_sigmoid(logits, 2, bias)
    assert marks.tolist() == [[True, True, False, False]]
    s = torch.sigmoid(torch.differentiable([0.0, 3.0]))
    torch.testing.assert_close(probabilities[0, :2], s / s.sum())


def test_limited_choices_stay_in_four_of_eight_groups() -> None:
    logits = torch.randn(64, 32)
    _, marks = moe_formulas.top_k_sigmoid(logits, 8, None, grouped=True)
    assert marks.sum(1).tolist() == [8] * 64
    assert int(marks.view(64, moe_formulas.EXPERT_GROUPS, -1).any(-1).sum(1).max()) <= moe_formulas.MAX_GROUPS_PER_TOKEN
    _, free = moe_formulas.top_k_sigmoid(logits, 8, None)
    assert int(free.view(64, moe_formulas.EXPERT_GROUPS, -1).any(-1).sum(1).max()) > moe_formulas.MAX_GROUPS_PER_TOKEN


def test_copies_are_sorted_by_expert_and_come_back_to_their_tokens() -> None:
    """Unpermuting what was permuted gives each token as often as it was copied."""
    choice = moe_formulas.top_k_softmax(torch.randn(16, 8), 3)
    places, weights = moe_formulas.permutation_map(choice)
    experts = choice[1].t().nonzero()
    assert places.tolist() == experts[:, 1].tolist()
    torch.testing.assert_close(weights, choice[0][places, experts[:, 0]])
    x = torch.randn(16, 4)
    torch.testing.assert_close(
        moe_formulas.unpermute_tokens(moe_formulas.permute_tokens(x, places), places, 16), 3.0 * x
    )


def test_a_sort_puts_gradients_back() -> None:
    rows, order = torch.randn(6, 2, requires_grad=True, dtype=torch.float64), torch.randperm(6)
    back = torch.argsort(order)
    assert torch.autograd.gradcheck(lambda x: moe_formulas._ReorderTokens.apply(x, order, back), (rows,))


def _record_of(kernels: list[Kernel], seconds: float) -> Any:
    from clustersim.cost.calibration_record import (
        CalibrationRecord,
        DeviceInfo,
        KernelSample,
        MeasurementConditions,
        TimeStatistics,
    )

    rows = []
    for kernel in kernels:
        assert kernel.shape is not None
        known = kernel.name, kernel.kind, kernel.dtype, kernel.shape, kernel.flops, kernel.bytes, kernel.launches
        rows.append(KernelSample(*known, TimeStatistics(seconds, seconds, seconds, 3)))
    return CalibrationRecord(
        DeviceInfo("cpu-laptop", "a CPU"), MeasurementConditions("2026-11-23", "test", "test"), tuple(rows)
    )


def test_a_record_answers_for_the_same_mixture_and_between_two() -> None:
    """Same shapes are measured; a batch between two measured ones is interpolated, in each family of experts."""
    small, large, between = (_mixture(MIXTURES["softmax"], f"training.sequence={tokens}") for tokens in (16, 64, 32))
    few, many, asked = (
        [distinct_kernel for distinct_kernel in distinct_kernels(given) if _of_experts(distinct_kernel)]
        for given in (small, large, between)
    )
    record = _record_of([*few, *many], 1e-3)
    cost = MeasuredKernels(record, load_accelerator("cpu-laptop"))
    assert {cost.time_kernel(kernel).provenance for kernel in (*few, *many)} == {Provenance.MEASURED}
    found = {item.name: cost.time_kernel(item) for item in asked}
    assert len(found) > 14
    assert {
        name for name, kernel_timing in found.items() if kernel_timing.provenance is not Provenance.INTERPOLATED
    } == set()
    assert {element.seconds for element in found.values()} != {1e-3}


def _of_experts(kernel: Kernel) -> bool:
    """Those that more tokens take longer; what is accumulated is of the weights."""
    routed = kernel.name.startswith(("experts.", "mlp.top_k", "mlp.permute", "mlp.unpermute"))
    return routed and not kernel.name.endswith("accumulate")


def test_another_way_to_choose_is_another_measurement() -> None:
    choices = {name: distinct_kernels(_mixture(experts)) for name, experts in MIXTURES.items()}
    found = {
        name: {
            kernel.shape.routine
            for kernel in kernels
            if isinstance(kernel.shape, MemoryBoundShape) and kernel.name == "mlp.top_k"
        }
        for name, kernels in choices.items()
    }
    assert found == {
        "softmax": {MemoryBoundOp.TOP_K},
        "sigmoid": {MemoryBoundOp.TOP_K_SIGMOID},
        "groups": {MemoryBoundOp.TOP_K_GROUPED},
    }
