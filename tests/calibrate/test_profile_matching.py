"""Matching of calls with the plan's kernels: nothing is lost, order is kept, equal parts add up."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibrate.profile.anchors import anchor_blocks, match_anchors, part_of, split_block
from calibrate.profile.matching import ForwardMap, match_in_order, match_pass
from calibrate.profile.plan_kernels import PlanKernel, PlanPass, plan_passes
from calibrate.profile.step_calls import Call, read_step
from calibrate.profile.transfers import is_transfer, match_transfers
from calibrate.profile.windows import UNMATCHED
from clustersim.build import build_simulation
from clustersim.interop.kineto import read_traces
from clustersim.results.profiled_step import GpuSpanKind
from tests.calibrate.profiled_steps import TRACES, llama, scenario_of
from tests.conftest import examples

DRY_RUN = "h200_llama2_7b_4_layers_fake_fsdp2"
PREPARED = build_simulation(llama("model.layers=2"))
PASSES = plan_passes(PREPARED, 0)
FORWARD: PlanPass = PASSES[0]
OPERATORS = ["aten::add", "aten::mul", "aten::pow", "aten::copy_", "aten::silu", "aten::cat", "aten::gather", ""]


def matmul_call(shape: tuple[int, int, int], seconds: float = 1e-3) -> Call:
    m, n, k = max(shape[:2]), min(shape[:2]), shape[2]
    return Call("nvjet", GpuSpanKind.MATMUL, 0.0, seconds, seconds, operator="aten::mm", matmul=(m, n, k, 1))


def pointwise_call(operator: str, seconds: float = 1e-5) -> Call:
    return Call("elementwise", GpuSpanKind.POINTWISE, 0.0, seconds, seconds, operator=operator)


CALLS = st.lists(
    st.sampled_from(OPERATORS).map(pointwise_call)
    | st.sampled_from([(8192, 4096, 4096), (8192, 11008, 4096), (8192, 4096, 11008), (7, 5, 3)]).map(matmul_call)
    | st.just(Call("flash_fwd", GpuSpanKind.ATTENTION, 0.0, 1e-3, 1e-3)),
    max_size=30,
)


@examples(60)
@given(CALLS, st.booleans())
def test_every_call_is_divided_completely_and_in_order(calls: list[Call], can_skip: bool) -> None:
    shares = match_in_order(FORWARD.kernels, calls, range(len(calls)), can_skip=can_skip)
    totals: Counter[int] = Counter()
    for index, kernel, fraction in shares:
        totals[index] += fraction  # type: ignore[assignment]
        assert kernel == UNMATCHED or 0 <= kernel < len(FORWARD.kernels)
    assert dict(totals) == pytest.approx(dict.fromkeys(range(len(calls)), 1.0))
    anchors = sorted((index, kernel) for index, kernel, _ in shares if kernel >= 0 and calls[index].is_anchor)
    assert all(first <= second for (_, first), (_, second) in pairwise(anchors))


SHARDED = plan_passes(build_simulation(scenario_of(DRY_RUN)), 0)
COPIES = {index: kernel for index, kernel in enumerate(SHARDED[1].kernels) if is_transfer(kernel)}
SIZES = sorted({float(kernel.kernel.shape.elements) for kernel in COPIES.values()})


@examples(60)
@given(st.lists(st.sampled_from([0.0, *(size * near for size in SIZES for near in (0.95, 1.0, 1.05))]), max_size=40))
def test_what_fsdp_copies_belongs_to_the_copies_of_its_unit(sizes: list[float]) -> None:
    """By the unit's size, in order; nothing else does."""
    calls = [replace(pointwise_call("aten::copy_"), transfer=size) for size in sizes]
    shares = match_transfers(SHARDED[1].kernels, calls)
    assert sorted(call for call, _, _ in shares) == [index for index, size in enumerate(sizes) if size]
    for call, kernel, fraction in shares:
        assert fraction == 1.0
        assert float(COPIES[kernel].kernel.shape.elements) == pytest.approx(sizes[call], rel=0.06)
    for size in SIZES:
        order = [kernel for _, kernel, _ in sorted(shares) if COPIES[kernel].kernel.shape.elements == size]
        assert order == sorted(order)
    assert match_transfers(FORWARD.kernels, calls) == []


def test_copies_of_parameters_do_not_grow_with_tokens() -> None:
    """What FSDP2's operators launch in a pass that gathers parameters is in no kernel of tokens."""
    spans, launches = next(
        (traces.ranks[0], traces.launches[0]) for traces in [read_traces(TRACES / f"{DRY_RUN}.json.gz")]
    )
    step = read_step(spans, launches, 0)
    forward, matched = ForwardMap(), 0
    for plan, calls in zip(SHARDED, step.passes, strict=False):
        shares = match_pass(plan, calls, forward)
        forward.add(plan, calls, shares)
        if any(map(is_transfer, plan.kernels)):
            for call, kernel, _ in shares:
                assert bool(calls.calls[call].transfer) is is_transfer(plan.kernels[kernel]) or kernel == UNMATCHED
                matched += bool(calls.calls[call].transfer)
    assert matched > 0


def kernel_named(name: str) -> PlanKernel:
    return next(kernel for each in PASSES for kernel in each.kernels if kernel.kernel.name == name)


@pytest.mark.parametrize(
    ("kernel", "shape", "part"),
    [
        ("attention.qkv", (8192, 4096, 4096), 1 / 3),
        ("attention.qkv", (8192, 12288, 4096), 1.0),
        ("attention.qkv", (8192, 4096, 11008), None),
        ("attention.qkv.input_gradient", (8192, 4096, 4096), 1 / 3),
        ("attention.qkv.weight_gradient", (4096, 4096, 8192), 1 / 3),
        ("mlp.up", (8192, 11008, 4096), 1 / 2),
        ("head.logits", (1024, 32000, 4096), 1 / 8),
        ("head.logits", (1024, 32000, 2048), None),
    ],
)
def test_parts_of_matmuls(kernel: str, shape: tuple[int, int, int], part: float | None) -> None:
    assert part_of(kernel_named(kernel), matmul_call(shape)) == (None if part is None else pytest.approx(part))


def test_three_matmuls_are_one_operator_and_order_tells_equal_ones_apart() -> None:
    """Queries, keys and values, and the output projection, all 4096 wide."""
    layer = [*[(8192, 4096, 4096)] * 3, (8192, 4096, 4096), *[(8192, 11008, 4096)] * 2, (8192, 4096, 11008)]
    attention = Call("flash_fwd", GpuSpanKind.ATTENTION, 0.0, 5e-4, 5e-4)
    calls = [
        call
        for _ in range(2)
        for call in [*map(matmul_call, layer[:3]), attention, *map(matmul_call, layer[3:])]
    ] + [matmul_call((8192, 32000, 4096))]  # fmt: skip
    blocks = anchor_blocks(FORWARD.kernels)
    block_of = match_anchors(FORWARD.kernels, blocks, calls, range(len(calls)))
    names = [FORWARD.kernels[blocks[block_of[index]][0]].kernel.name for index in range(len(calls))]
    own_layer = [*["attention.qkv"] * 3, "attention.core", "attention.out", *["mlp.up"] * 2, "mlp.down"]
    assert names == [*own_layer, *own_layer, "head.logits"]


def test_calls_without_shapes_are_divided_by_modelled_time() -> None:
    backward = next(each for each in PASSES if any("weight_gradient" in kernel.kernel.name for kernel in each.kernels))
    block = next(block for block in anchor_blocks(backward.kernels) if len(block) == 2)
    call = Call("gemm", GpuSpanKind.MATMUL, 0.0, 1.0, 1.0)
    shares = split_block(backward.kernels, block, [call], [0])
    modelled = [backward.kernels[index].seconds for index in block]
    assert [fraction for _, _, fraction in shares] == pytest.approx([each / sum(modelled) for each in modelled])
