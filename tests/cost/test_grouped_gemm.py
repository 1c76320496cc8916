"""Grouped GEMMs: closed forms for an accelerator of known constants, and monotonicity on a real one."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.common.dtypes import DType
from clustersim.cost.roofline import Roofline
from clustersim.hardware.accelerator import Accelerator, load_accelerator
from clustersim.hardware.efficiency import GroupedGemmEfficiency
from clustersim.model.grouped_linear import GroupedLinear
from clustersim.model.kernels import Kernel, KernelKind
from clustersim.model.overheads import Grouping
from clustersim.model.precision_recipe import MatmulFormats, mixed_precision
from tests.conftest import examples

TILE, UNITS, SHARE, CALL = 128, 65, 0.5, 9e-6


def accelerator_with(**grouped: float) -> Accelerator:
    """One tile, no prologue, edge or call cost: a matmul takes exactly its waves."""
    h100 = load_accelerator("h100-sxm-80gb")
    defaults = {
        "multi_stream_peak_fraction": SHARE,
        "kernel_peak_fraction": SHARE,
        "prologue": 0.0,
        "edge": 0.0,
        "host_launch": 0.0,
    }
    grouped_efficiency = GroupedGemmEfficiency(**{**defaults, **grouped})
    matmul = replace(h100.efficiency.matmul, peak_fraction=SHARE, prologue=0.0, edge=0.0, tiles=((TILE, TILE),))
    efficiency = replace(
        h100.efficiency, matmul=matmul, grouped_gemm=grouped_efficiency, kernel_latency=0.0, launch_interval=0.0
    )
    return replace(h100, compute_units=UNITS, efficiency=efficiency)


def grouped_kernel(experts: int, tokens: int, grouping: Grouping = Grouping.STREAMS, width: int = 8192) -> Kernel:
    """Forward of experts with equal token counts, whose k and output width are equal."""
    matmul_formats = MatmulFormats.uniform(DType.BF16)
    linear = GroupedLinear("up", experts, experts * tokens, width, width, matmul_formats, grouping=grouping)
    return linear.forward(mixed_precision())[0]


def test_tiles_of_all_experts_share_waves() -> None:
    """66 experts of 64 tiles are 65 waves of 65 units, where separately each takes a wave of its own."""
    kernel = grouped_kernel(66, TILE, width=TILE * 64)
    rate = accelerator_with().peak_flops(DType.BF16) * SHARE / UNITS
    waves = 65 * 2.0 * TILE * TILE * TILE * 64 / rate
    memory = kernel.bytes / (
        accelerator_with().memory_bandwidth * accelerator_with().efficiency.memory_bandwidth_fraction
    )
    seconds = Roofline(accelerator_with()).time_kernel(kernel).seconds
    assert seconds == pytest.approx((waves**2 + memory**2) ** 0.5)


def test_only_separate_small_matmuls_are_call_bound() -> None:
    slow = Roofline(accelerator_with(host_launch=CALL))
    assert slow.time_kernel(grouped_kernel(64, 1, width=256)).seconds == pytest.approx(64 * CALL)
    assert slow.time_kernel(grouped_kernel(64, 1, Grouping.KERNEL, width=256)).seconds < 8 * CALL


def test_a_loop_is_one_matmul_per_expert() -> None:
    formats = MatmulFormats.uniform(DType.BF16)
    loop = GroupedLinear("up", 4, 1024, 512, 256, formats, grouping=Grouping.LOOP).forward(mixed_precision())
    single = GroupedLinear("up", 1, 256, 512, 256, formats).forward(mixed_precision())
    assert loop == single * 4
    assert {kernel.kind for kernel in loop} == {KernelKind.MATMUL}


def test_a_power_limit_slows_only_matmuls_above_the_sustained_rate() -> None:
    """Matmuls sustain 0.8 of 0.5: grouped ones at 0.3 are unchanged, those at 0.5 take 1.25 times as long."""
    kernel = grouped_kernel(8, 8192)
    slow, fast = accelerator_with(multi_stream_peak_fraction=0.3), accelerator_with()
    assert Roofline(slow, in_step_rate=0.8).time_kernel(kernel) == Roofline(slow).time_kernel(kernel)
    slowdown = Roofline(fast, in_step_rate=0.8).time_kernel(kernel).seconds / Roofline(fast).time_kernel(kernel).seconds
    assert slowdown == pytest.approx(1.25, rel=0.01)


GROUPED = [Grouping.STREAMS, Grouping.KERNEL]


@given(experts=st.integers(2, 64), rows=st.integers(1, 2048), grouping=st.sampled_from(GROUPED))
@examples(40)
def test_more_experts_or_tokens_take_no_less_time(experts: int, rows: int, grouping: Grouping) -> None:
    source = Roofline(load_accelerator("b200-sxm-180gb"))
    baseline = source.time_kernel(grouped_kernel(experts, rows, grouping)).seconds
    assert baseline <= source.time_kernel(grouped_kernel(experts + 1, rows, grouping)).seconds
    assert baseline <= source.time_kernel(grouped_kernel(experts, 2 * rows, grouping)).seconds * 1.000001
