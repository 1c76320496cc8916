"""Eager operators are as slow as the elements of their unvectorized kernels, as a profile of an H200 counts them."""

import gzip
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.common.dtypes import DType
from clustersim.cost.elementwise import ELEMENT_RATE, elementwise_seconds
from clustersim.cost.roofline import Roofline
from clustersim.hardware.accelerator import load_accelerator
from clustersim.model import memory_bound
from clustersim.model.kernels import Kernel, KernelKind, MemoryBoundOp, MemoryBoundShape
from clustersim.model.layer_stack import MlpType
from clustersim.model.memory_bound import MemoryBoundSpec
from clustersim.model.transformer import Norm

TRACE = Path(__file__).parents[1] / "interop" / "traces" / "h200_llama2_7b_4_layers.json.gz"
H200 = load_accelerator("h200-sxm-141gb")
TOKENS, HIDDEN, FFN, HEAD = 2 * 4096, 4096, 11008, 128
UNVECTORIZED = ("elementwise_kernel<128", "unrolled_elementwise_kernel", "CatArrayBatchedCopy")
STEPS = 2


@lru_cache(maxsize=1)
def kernels() -> tuple[dict[str, Any], ...]:
    """Kernels of two profiled steps in the order in which they started."""
    with gzip.open(TRACE) as stream:
        events = json.load(stream)["traceEvents"]
    return tuple(sorted((event for event in events if event.get("cat") == "kernel"), key=lambda event: event["ts"]))


def between(first: str, last: str) -> Sequence[dict[str, Any]]:
    """Kernels of the first step behind the first one of a name and before the next one of another."""
    names = [kernel["name"] for kernel in kernels()]
    begin = next(index for index, name in enumerate(names) if first in name)
    end = next(index for index in range(begin + 1, len(names)) if last in names[index])
    return kernels()[begin + 1 : end]


def seconds(events: Sequence[dict[str, Any]]) -> float:
    return float(sum(event["dur"] for event in events)) * 1e-6


def predicted(spec: MemoryBoundSpec, rows: int, width: int, *, backward: bool = False) -> float:
    shape = spec.shape_for(rows, width)
    (kernel,) = (
        spec.backward_kernels("op", DType.BF16, shape) if backward else (spec.forward_kernel("op", DType.BF16, shape),)
    )
    return Roofline(H200).time_kernel(kernel).seconds


def rotary_events() -> Sequence[dict[str, Any]]:
    """Forward of queries and keys: what runs between the last product before attention and attention."""
    names = [kernel["name"] for kernel in kernels()]
    attention = next(index for index, name in enumerate(names) if "flash_fprop" in name)
    begin = max(index for index in range(attention) if "nvjet" in names[index])
    return kernels()[begin + 1 : attention]


def test_rotary_embedding_is_five_unvectorized_kernels() -> None:
    """X cos + (-x2, x1) sin: a product, half a negation, a concatenation, a product, a sum; of queries and of keys."""
    events = rotary_events()
    assert len(events) == 2 * 5
    assert all(any(name in event["name"] for name in UNVECTORIZED) for event in events)
    rotary = predicted(memory_bound.rotary_spec(fused=False), TOKENS * HIDDEN // HEAD, HEAD)
    assert 2 * rotary == pytest.approx(seconds(events), rel=0.12)


def test_the_norm_of_the_profile() -> None:
    """RMSNorm of forward runs between the embedding's lookup and the first product, with the tables of positions.

    It is predicted 15 % too long: the start of each kernel is counted, of which kernels this long hide a part.
    """
    events = [event for event in between("vectorized_gather_kernel", "TNT") if event["dur"] > 30.0]
    unvectorized = [
        event for event in events if any(event["name"].startswith(f"void at::native::{name}") for name in UNVECTORIZED)
    ]
    assert (len(events), len(unvectorized)) == (6, 3)
    norm = predicted(memory_bound.norm_spec(Norm.RMSNORM, fused=False), TOKENS, HIDDEN)
    assert norm == pytest.approx(seconds(events), rel=0.17)


def test_the_activation_of_the_profile_streams() -> None:
    """SwiGLU's sigmoid is vectorized, as its product is: 2 of its 5 passes, which are as fast as copies."""
    events = [event for event in kernels() if "silu_kernel" in event["name"]]
    assert len(events) == STEPS * 4
    forward = predicted(memory_bound.activation_spec(MlpType.SWIGLU, fused=False), TOKENS, FFN)
    assert forward * 2 / 5 == pytest.approx(seconds(events) / len(events), rel=0.12)


def test_fused_adam_of_16_bit_states_is_bound_by_elements() -> None:
    """4 layers of 202.4 million weights, embedding and head of 131.1 million: in FP32 bytes are the limit."""
    events = [event for event in kernels() if "FusedOptimizerTensorListMetadata" in event["name"]]
    weights = 4 * (4 * HIDDEN**2 + 3 * HIDDEN * FFN) + 2 * 32000 * HIDDEN

    def adam(dtype: DType) -> Kernel:
        shape = MemoryBoundShape(MemoryBoundOp.ADAM, 1, weights, fused=True, formats=(dtype, dtype))
        return Kernel("adam", KernelKind.OPTIMIZER, dtype, 0.0, 7.0 * dtype.bytes * weights, shape)

    assert Roofline(H200).time_kernel(adam(DType.BF16)).seconds == pytest.approx(seconds(events) / STEPS, rel=0.05)
    full = adam(DType.FP32)
    bandwidth = H200.efficiency.operator_bandwidth(H200.memory_bandwidth)
    assert elementwise_seconds(H200, full) == full.bytes / bandwidth


def test_a_compute_unit_of_mi355x_computes_as_many_elements() -> None:
    """HipKittens' PyTorch baseline: 16 x 16 x 16,384 x 128 elements in 3.94 ms; its concatenation with nothing, too."""
    elements = 16 * 16 * 16384 * 128
    rate = 5 * elements / 3.94e-3 / load_accelerator("mi355x").compute_units
    assert rate == pytest.approx(ELEMENT_RATE, rel=0.1)


@given(
    routine=st.sampled_from([MemoryBoundOp.RMSNORM, MemoryBoundOp.ROTARY, MemoryBoundOp.SWIGLU]),
    backward=st.booleans(),
    units=st.integers(1, 10_000),
    size=st.integers(1, 10**9),
)
def test_never_faster_than_its_bytes_and_never_slower_with_more_units(
    routine: MemoryBoundOp, backward: bool, units: int, size: int
) -> None:
    shape = MemoryBoundShape(routine, 1, size, backward=backward)
    kernel = Kernel("op", KernelKind.NORM, DType.BF16, 0.0, 20.0 * size, shape)
    few, many = (replace(H200, compute_units=count) for count in (units, units + 1))
    bandwidth = H200.efficiency.reached_bandwidth(H200.memory_bandwidth)
    slow, fast = elementwise_seconds(few, kernel), elementwise_seconds(many, kernel)
    assert slow is not None
    assert fast is not None
    assert slow >= fast >= kernel.bytes / bandwidth * (1.0 - 1e-12)


@pytest.mark.parametrize("fused", [True, False])
def test_other_operators_are_bound_by_bytes(fused: bool) -> None:
    shape = MemoryBoundShape(MemoryBoundOp.RMSNORM if fused else MemoryBoundOp.RESIDUAL, 8, 8, fused=fused)
    assert elementwise_seconds(H200, Kernel("op", KernelKind.NORM, DType.BF16, 0.0, 1e9, shape)) is None
