"""What a kernel is said to take while it is measured is what PyTorch allocates, at its fullest moment."""

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
from tests.calibrate.check_scenarios import one_thread

torch = pytest.importorskip("torch")

from calibrate.check.step_profile import _allocation_events  # noqa: E402 - torch first
from calibrate.kernels import formulas, pytorch_ops  # noqa: E402

CPU = torch.device("cpu")
ROWS, WIDTH, TABLE = 256, 512, 64
FORMATS = (DType.FP32, DType.BF16)
TABLES = {
    MemoryBoundOp.LOOKUP: TABLE, MemoryBoundOp.POSITIONS: TABLE, MemoryBoundOp.ROTARY: TABLE,
    MemoryBoundOp.TOP_K: 4, MemoryBoundOp.TOP_K_SIGMOID: 4, MemoryBoundOp.TOP_K_GROUPED: 4,
    MemoryBoundOp.ROW_MAP: 2 * ROWS, MemoryBoundOp.PERMUTE: 3 * ROWS, MemoryBoundOp.UNPERMUTE: 5 * ROWS // 2,
}  # fmt: skip
UPDATES = (MemoryBoundOp.ADAM, MemoryBoundOp.SGD)
COMPILED = (
    MemoryBoundOp.SWIGLU, MemoryBoundOp.ROTARY, MemoryBoundOp.RESIDUAL_DROPOUT, MemoryBoundOp.SOFTMAX, MemoryBoundOp.SOFTCAP, MemoryBoundOp.LOSS_FUSED,
    MemoryBoundOp.LOSS_CHUNKED, MemoryBoundOp.SCALED_SUM,
)  # fmt: skip


def _streams(routine: MemoryBoundOp, dtype: DType, *, fused: bool, backward: bool) -> Iterator[Kernel]:
    """The routine with every further format that it may have."""
    shape = MemoryBoundShape(routine, ROWS, WIDTH, backward=backward, fused=fused, table=TABLES.get(routine, 0))
    choices: tuple[tuple[DType, ...], ...] = ((),)
    if routine in UPDATES:
        choices = (dtype, dtype), (dtype, dtype, DType.FP16), (DType.FP16, dtype)
    elif routine in (MemoryBoundOp.ACCUMULATE, MemoryBoundOp.POSITIONS):
        choices = ((DType.FP32,),)
    elif routine is MemoryBoundOp.COPY:
        choices = (), (DType.FP16,)
    for formats in choices:
        yield Kernel("test", KernelKind.COPY, dtype, 0.0, 1.0, replace(shape, formats=formats))


def _others(dtype: DType) -> Iterator[Kernel]:
    """Products, of experts too, rows in another order, and attention with as many keys as queries, or fewer."""
    for operands in MatmulLayout:
        yield Kernel("test", KernelKind.GROUPED_MATMUL, dtype, 1.0, 1.0, MatmulShape(128, 256, 192, 3, operands))
    sort = MemoryBoundShape(MemoryBoundOp.PERMUTE, ROWS, WIDTH, fused=True, table=ROWS)
    yield Kernel("test", KernelKind.COPY, dtype, 0.0, 1.0, sort)
    for batch in (1, 3):
        shape = MatmulShape(256, 384, 512, batch=batch, accumulated=dtype if batch == 1 else None)
        yield Kernel("test", KernelKind.MATMUL, dtype, 1.0, 1.0, shape)
    for kind, kv_heads in product((KernelKind.ATTENTION_FORWARD, KernelKind.ATTENTION_BACKWARD), (4, 2)):
        yield Kernel("test", kind, dtype, 1.0, 1.0, AttentionShape(2, 256, 256, 4, kv_heads, 64, causal=True))


def _every() -> dict[str, Kernel]:
    """What a CPU runs: each routine, both ways, in both formats."""
    ways = product(MemoryBoundOp, FORMATS, (False, True), (False, True))
    found = [
        stream
        for routine, dtype, fused, back in ways
        for stream in _streams(routine, dtype, fused=fused, backward=back)
    ]
    return {_words(kernel): kernel for kernel in (*found, *_others(DType.FP32), *_others(DType.BF16))}


def _words(kernel: Kernel) -> str:
    shape = kernel.shape
    if not isinstance(shape, MemoryBoundShape):
        return f"{kernel.kind.value} {kernel.dtype.value} {shape}"
    words = shape.routine.value, "fused" * shape.fused, "backward" * shape.backward, kernel.dtype.value
    return " ".join(filter(None, (*words, *(d_type.value for d_type in shape.formats))))


def _peaks(kernels: Mapping[str, Kernel]) -> dict[str, float | None]:
    """Bytes that each takes while it is prepared and run twice; None: there is no such kernel."""
    found: dict[str, float | None] = {}
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profiler:
        for name, kernel in kernels.items():
            with torch.profiler.record_function(name):
                found[name] = _ran(kernel)
    for event in profiler.profiler.kineto_results.experimental_event_tree():
        if found.get(event.name) is not None:
            found[event.name] = _peak(event.children)
    return found


def _ran(kernel: Kernel) -> float | None:
    try:
        action = pytorch_ops.prepare_kernel(kernel, CPU)
        action()
        action()
    except pytorch_ops.UnsupportedKernel:
        return None
    return 0.0


def _peak(events: Sequence[Any]) -> float:
    held, peak = 0, 0
    for _, size in sorted(_allocation_events(events)):
        held += size
        peak = max(peak, held)
    return float(peak)


@pytest.fixture(scope="module")
def measured() -> dict[str, tuple[Kernel, float]]:
    with one_thread():
        every = _every()
        return {name: (every[name], peak) for name, peak in _peaks(every).items() if peak is not None}


def test_memory_is_what_pytorch_allocates(measured: dict[str, tuple[Kernel, float]]) -> None:
    """Within a twentieth: statistics of rows are not counted.

    Nor is what a CPU packs blocks of BF16 products and of attention into: up to a fifth of operands this small.
    """
    parts = {name: pytorch_ops.allocated_bytes(kernel, CPU) / peak for name, (kernel, peak) in measured.items()}
    assert len(parts) > 100
    packed = [name for name in parts if "Shape" in name]
    assert {name: part for name, part in parts.items() if not (0.8 if name in packed else 0.95) <= part <= 1.05} == {}


def test_every_routine_that_a_cpu_runs_is_measured(measured: dict[str, tuple[Kernel, float]]) -> None:
    """But for those that only a compiler fuses, and those that nobody runs here."""
    found = {kernel.shape.routine for kernel, _ in measured.values() if isinstance(kernel.shape, MemoryBoundShape)}
    compiled = {MemoryBoundOp.LOSS_FUSED, MemoryBoundOp.LOSS_CHUNKED, MemoryBoundOp.QUANTIZE}
    assert set(MemoryBoundOp) - found == {*compiled, MemoryBoundOp.DEQUANTIZE, MemoryBoundOp.BALANCE}


def test_touched_memory_is_part_of_it(measured: dict[str, tuple[Kernel, float]]) -> None:
    for kernel, _ in measured.values():
        assert 0.0 < pytorch_ops.touched_bytes(kernel) <= pytorch_ops.allocated_bytes(kernel, CPU)


def test_a_gpus_own_kernels_keep_a_mask_of_bytes_and_no_formula() -> None:
    """From the shapes and formats of PyTorch's own declarations: x and result (and mask), and the gradients of both."""
    gpu, x = torch.device("cuda"), torch.empty(ROWS, WIDTH, dtype=torch.bfloat16, device="meta")
    dropped = sum(item.nbytes for item in torch.ops.aten.native_dropout(x, 0.1, True))
    normed = sum(element.nbytes for element in torch.ops.aten._fused_rms_norm(x, [WIDTH], x[0], 1e-5))
    for routine, results in ((MemoryBoundOp.DROPOUT, dropped), (MemoryBoundOp.RMSNORM, normed)):
        (forward,) = _streams(routine, DType.BF16, fused=True, backward=False)
        (backward,) = _streams(routine, DType.BF16, fused=True, backward=True)
        assert pytorch_ops.allocated_bytes(forward, gpu) == pytest.approx(x.nbytes + results, rel=0.01)
        assert pytorch_ops.allocated_bytes(backward, gpu) == pytest.approx(3 * x.nbytes + results, rel=0.01)


@pytest.mark.slow
def test_compiled_formulas_have_no_temporaries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled for this CPU: inductor's partitioner decides what is kept, for GPUs as here."""
    monkeypatch.setattr(formulas, "_maybe_compiled", lambda formula, _x, **_: formulas.compiled(formula))
    kernels = [
        kernel
        for routine, back in product(COMPILED, (False, True))
        for kernel in _streams(routine, DType.BF16, fused=True, backward=back)
    ]
    with one_thread(), pytorch_ops.compile_settings():
        for kernel in kernels:
            _ran(kernel)
        peaks = _peaks({_words(kernel): kernel for kernel in kernels})
    for kernel in kernels:
        peak = peaks[_words(kernel)]
        assert peak is not None
        assert 0.7 <= pytorch_ops.allocated_bytes(kernel, torch.device("cuda")) / peak <= 1.3, _words(kernel)
