"""The predicted memory of a kernel benchmark is the peak that PyTorch allocates."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from clustersim.common.dtypes import DType
from clustersim.model.kernels import (
    AttentionShape,
    Kernel,
    KernelKind,
    MatmulLayout,
    MatmulShape,
    MemoryBoundOp,
    MemoryBoundShape,
)
from tests.calibrate.check_scenarios import single_thread
from tests.calibrate.test_kernel_grid import NOT_MEASURED

torch = pytest.importorskip("torch")

from calibrate.check.step_profile import _allocation_events  # noqa: E402 - torch first
from calibrate.kernels import formulas, pytorch_ops  # noqa: E402

CPU_DEVICE = torch.device("cpu")
TOKENS, WIDTH, TABLE_ROWS = 256, 512, 64
FORMATS = (DType.FP32, DType.BF16)
TABLES = {
    MemoryBoundOp.LOOKUP: TABLE_ROWS, MemoryBoundOp.POSITIONS: TABLE_ROWS, MemoryBoundOp.ROTARY: TABLE_ROWS,
    MemoryBoundOp.TOP_K: 4, MemoryBoundOp.TOP_K_SIGMOID: 4, MemoryBoundOp.TOP_K_GROUPED: 4,
    MemoryBoundOp.ROW_MAP: 2 * TOKENS, MemoryBoundOp.PERMUTE: 3 * TOKENS, MemoryBoundOp.UNPERMUTE: 5 * TOKENS // 2,
}  # fmt: skip
OPTIMIZER_OPS = (MemoryBoundOp.ADAM, MemoryBoundOp.SGD)
COMPILED_OPS = (
    MemoryBoundOp.SWIGLU,
    MemoryBoundOp.ROTARY,
    MemoryBoundOp.RESIDUAL_DROPOUT,
    MemoryBoundOp.SOFTMAX,
    MemoryBoundOp.SOFTCAP,
    MemoryBoundOp.LOSS_FUSED,
    MemoryBoundOp.LOSS_CHUNKED,
    MemoryBoundOp.SCALED_SUM,
)


def _memory_bound_kernels(op: MemoryBoundOp, dtype: DType, *, fused: bool, backward: bool) -> Iterator[Kernel]:
    """Kernels of the op with all format choices that it has."""
    shape = MemoryBoundShape(op, TOKENS, WIDTH, backward=backward, fused=fused, table=TABLES.get(op, 0))
    format_choices: tuple[tuple[DType, ...], ...] = ((),)
    if op in OPTIMIZER_OPS:
        format_choices = (dtype, dtype), (dtype, dtype, DType.FP16), (DType.FP16, dtype)
    elif op in (MemoryBoundOp.ACCUMULATE, MemoryBoundOp.POSITIONS):
        format_choices = ((DType.FP32,),)
    elif op is MemoryBoundOp.COPY:
        format_choices = (), (DType.FP16,)
    for formats in format_choices:
        yield Kernel("test", KernelKind.COPY, dtype, 0.0, 1.0, replace(shape, formats=formats))


def _other_kernels(dtype: DType) -> Iterator[Kernel]:
    """Matmuls, also grouped, permutation, and attention with as many or fewer key/value heads than query heads."""
    for operands in MatmulLayout:
        yield Kernel("test", KernelKind.GROUPED_MATMUL, dtype, 1.0, 1.0, MatmulShape(128, 256, 192, 3, operands))
    sort = MemoryBoundShape(MemoryBoundOp.PERMUTE, TOKENS, WIDTH, fused=True, table=TOKENS)
    yield Kernel("test", KernelKind.COPY, dtype, 0.0, 1.0, sort)
    for batch in (1, 3):
        shape = MatmulShape(256, 384, 512, batch=batch, accumulated=dtype if batch == 1 else None)
        yield Kernel("test", KernelKind.MATMUL, dtype, 1.0, 1.0, shape)
    for kind, kv_heads in product((KernelKind.ATTENTION_FORWARD, KernelKind.ATTENTION_BACKWARD), (4, 2)):
        yield Kernel("test", kind, dtype, 1.0, 1.0, AttentionShape(2, 256, 256, 4, kv_heads, 64, causal=True))


def _all_kernels() -> dict[str, Kernel]:
    """All ops, forward and backward, in both formats."""
    variants = product(MemoryBoundOp, FORMATS, (False, True), (False, True))
    kernels = [
        kernel
        for routine, dtype, fused, backward in variants
        for kernel in _memory_bound_kernels(routine, dtype, fused=fused, backward=backward)
    ]
    return {
        _kernel_label(kernel): kernel for kernel in (*kernels, *_other_kernels(DType.FP32), *_other_kernels(DType.BF16))
    }


def _kernel_label(kernel: Kernel) -> str:
    shape = kernel.shape
    if not isinstance(shape, MemoryBoundShape):
        return f"{kernel.kind.value} {kernel.dtype.value} {shape}"
    labels = shape.routine.value, "fused" * shape.fused, "backward" * shape.backward, kernel.dtype.value
    return " ".join(filter(None, (*labels, *(dtype.value for dtype in shape.formats))))


def _peak_bytes(kernels: Mapping[str, Kernel]) -> dict[str, float | None]:
    """Peak bytes while a kernel is prepared and run twice; None: there is no such kernel."""
    peaks: dict[str, float | None] = {}
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profiler:
        for name, kernel in kernels.items():
            with torch.profiler.record_function(name):
                peaks[name] = _run_kernel(kernel)
    for event in profiler.profiler.kineto_results.experimental_event_tree():
        if peaks.get(event.name) is not None:
            peaks[event.name] = _peak_of_events(event.children)
    return peaks


def _run_kernel(kernel: Kernel) -> float | None:
    try:
        action = pytorch_ops.prepare_kernel(kernel, CPU_DEVICE)
        action()
        action()
    except pytorch_ops.UnsupportedKernel:
        return None
    return 0.0


def _peak_of_events(events: Sequence[Any]) -> float:
    allocated, peak = 0, 0
    for _, size in sorted(_allocation_events(events)):
        allocated += size
        peak = max(peak, allocated)
    return float(peak)


@pytest.fixture(scope="module")
def measured_peaks() -> dict[str, tuple[Kernel, float]]:
    with single_thread():
        kernels = _all_kernels()
        return {name: (kernels[name], peak) for name, peak in _peak_bytes(kernels).items() if peak is not None}


def test_predicted_memory_is_what_pytorch_allocates(measured_peaks: dict[str, tuple[Kernel, float]]) -> None:
    """Within 5 %: row statistics are not counted.

    Nor are packing buffers of BF16 matmuls and of attention on a CPU: up to a fifth of operands this small; CPUs with
    matrix units (AMX) pack copies of keys and values, too, half as much as the operands and the result.
    """
    ratios = {
        name: pytorch_ops.allocated_bytes(kernel, CPU_DEVICE) / peak for name, (kernel, peak) in measured_peaks.items()
    }
    assert len(ratios) > 100
    lowest = {name: 0.8 if "Shape" in name else 0.95 for name in ratios}
    lowest |= {name: 0.55 for name in ratios if name.startswith("attention_forward bf16")}
    assert {name: ratio for name, ratio in ratios.items() if not lowest[name] <= ratio <= 1.05} == {}


def test_every_cpu_op_is_measured(measured_peaks: dict[str, tuple[Kernel, float]]) -> None:
    """Except those that only a compiler fuses, those that are not run on a CPU, and those of linear mixers."""
    ops = {kernel.shape.routine for kernel, _ in measured_peaks.values() if isinstance(kernel.shape, MemoryBoundShape)}
    compiled = {MemoryBoundOp.LOSS_FUSED, MemoryBoundOp.LOSS_CHUNKED, MemoryBoundOp.QUANTIZE}
    assert set(MemoryBoundOp) - ops == {
        *compiled,
        MemoryBoundOp.DEQUANTIZE,
        MemoryBoundOp.BALANCE,
        MemoryBoundOp.UPDATE,
        *NOT_MEASURED,
    }


def test_touched_memory_is_part_of_the_allocated(measured_peaks: dict[str, tuple[Kernel, float]]) -> None:
    for kernel, _ in measured_peaks.values():
        assert 0.0 < pytorch_ops.touched_bytes(kernel) <= pytorch_ops.allocated_bytes(kernel, CPU_DEVICE)


def test_gpu_kernels_keep_byte_masks_and_statistics() -> None:
    """By the shapes and formats of PyTorch's declarations: x and result (and mask), and the gradients of both."""
    gpu, x = torch.device("cuda"), torch.empty(TOKENS, WIDTH, dtype=torch.bfloat16, device="meta")
    dropped = sum(item.nbytes for item in torch.ops.aten.native_dropout(x, 0.1, True))
    normed = sum(element.nbytes for element in torch.ops.aten._fused_rms_norm(x, [WIDTH], x[0], 1e-5))
    for routine, results in ((MemoryBoundOp.DROPOUT, dropped), (MemoryBoundOp.RMSNORM, normed)):
        (forward,) = _memory_bound_kernels(routine, DType.BF16, fused=True, backward=False)
        (backward,) = _memory_bound_kernels(routine, DType.BF16, fused=True, backward=True)
        assert pytorch_ops.allocated_bytes(forward, gpu) == pytest.approx(x.nbytes + results, rel=0.01)
        assert pytorch_ops.allocated_bytes(backward, gpu) == pytest.approx(3 * x.nbytes + results, rel=0.01)


@pytest.mark.slow
def test_compiled_formulas_have_no_temporaries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled for this CPU: inductor's partitioner decides what is saved, on GPUs as here."""
    monkeypatch.setattr(formulas, "_maybe_compiled", lambda formula, _x, **_: formulas.compiled(formula))
    kernels = [
        kernel
        for routine, is_backward in product(COMPILED_OPS, (False, True))
        for kernel in _memory_bound_kernels(routine, DType.BF16, fused=True, backward=is_backward)
    ]
    with single_thread(), pytorch_ops.compile_settings():
        for kernel in kernels:
            _run_kernel(kernel)
        peaks = _peak_bytes({_kernel_label(kernel): kernel for kernel in kernels})
    for kernel in kernels:
        peak = peaks[_kernel_label(kernel)]
        assert peak is not None
        assert 0.7 <= pytorch_ops.allocated_bytes(kernel, torch.device("cuda")) / peak <= 1.3, _kernel_label(kernel)
