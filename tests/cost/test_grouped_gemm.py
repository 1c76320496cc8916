"""Products of experts: closed forms of a machine of which every number is known, and laws of any."""

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


def machine(**grouped: float) -> Accelerator:
    """One tile, no prologue, perimeter or start: a product is its waves."""
    made = load_accelerator("h100-sxm-80gb")
    known = {"share": SHARE, "kernel_share": SHARE, "prologue": 0.0, "edge": 0.0, "call": 0.0}
    own = GroupedGemmEfficiency(**{**known, **grouped})
    matmul = replace(made.efficiency.matmul, share=SHARE, prologue=0.0, edge=0.0, tiles=((TILE, TILE),))
    efficiency = replace(made.efficiency, matmul=matmul, grouped=own, kernel_latency=0.0, launch_interval=0.0)
    return replace(made, compute_units=UNITS, efficiency=efficiency)


def products(experts: int, rows: int, grouping: Grouping = Grouping.STREAMS, width: int = 8192) -> Kernel:
    """Forward of experts with so many rows each, whose k and outputs are a width."""
    formats = MatmulFormats.uniform(DType.BF16)
    linear = GroupedLinear("up", experts, experts * rows, width, width, formats, grouping=grouping)
    return linear.forward(mixed_precision())[0]


def test_tiles_of_all_experts_flow_behind_one_another() -> None:
    """66 experts of 64 tiles are 65 waves of 65 units, where one by one each takes a wave of its own."""
    kernel = products(66, TILE, width=TILE * 64)
    rate = machine().peak_flops(DType.BF16) * SHARE / UNITS
    waves = 65 * 2.0 * TILE * TILE * TILE * 64 / rate
    memory = kernel.bytes / (machine().memory_bandwidth * machine().efficiency.memory)
    found = Roofline(machine()).time_kernel(kernel).seconds
    assert found == pytest.approx((waves**2 + memory**2) ** 0.5)


def test_many_small_products_wait_for_their_calls_and_one_kernel_does_not() -> None:
    slow = Roofline(machine(call=CALL))
    assert slow.time_kernel(products(64, 1, width=256)).seconds == pytest.approx(64 * CALL)
    assert slow.time_kernel(products(64, 1, Grouping.KERNEL, width=256)).seconds < 8 * CALL


def test_a_loop_is_one_product_for_each_expert() -> None:
    formats = MatmulFormats.uniform(DType.BF16)
    loop = GroupedLinear("up", 4, 1024, 512, 256, formats, grouping=Grouping.LOOP).forward(mixed_precision())
    alone = GroupedLinear("up", 1, 256, 512, 256, formats).forward(mixed_precision())
    assert loop == alone * 4
    assert {kernel.kind for kernel in loop} == {KernelKind.MATMUL}


def test_a_power_limit_slows_only_what_is_faster_than_it_leaves() -> None:
    """Products sustain 0.8 of 0.5: experts' at 0.3 stay as they are, those at 0.5 take 1.25 times as long."""
    kernel = products(8, 8192)
    slow, same = machine(share=0.3), machine()
    assert Roofline(slow, in_step_rate=0.8).time_kernel(kernel) == Roofline(slow).time_kernel(kernel)
    longer = Roofline(same, in_step_rate=0.8).time_kernel(kernel).seconds / Roofline(same).time_kernel(kernel).seconds
    assert longer == pytest.approx(1.25, rel=0.01)


GROUPED = [Grouping.STREAMS, Grouping.KERNEL]


@given(experts=st.integers(2, 64), rows=st.integers(1, 2048), grouping=st.sampled_from(GROUPED))
@examples(40)
def test_more_experts_or_rows_take_no_less(experts: int, rows: int, grouping: Grouping) -> None:
    source = Roofline(load_accelerator("b200-sxm-180gb"))
    once = source.time_kernel(products(experts, rows, grouping)).seconds
    assert once <= source.time_kernel(products(experts + 1, rows, grouping)).seconds
    assert once <= source.time_kernel(products(experts, 2 * rows, grouping)).seconds * 1.000001
