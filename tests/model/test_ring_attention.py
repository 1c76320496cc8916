"""Ring attention block by block: the FLOP of one kernel, and the passes that merge results, counted from the code."""

from typing import Any

import pytest

from clustersim import Scenario, simulate
from clustersim.build import build_plan
from clustersim.model.kernels import ATTENTION_KINDS, Kernel, KernelKind, MemoryBoundOp, MemoryBoundShape
from clustersim.model.operators import Operator
from clustersim.program.task import CollectiveType
from tests.parallel.test_context_parallel import HEAD_DIM, HEADS, KV_HEADS, SEQUENCE, context_ops, scenario

RANKS = 8
QUERIES = SEQUENCE // RANKS * HEADS * HEAD_DIM  # elements of a rank's own queries, or outputs
KEYS = SEQUENCE // RANKS * 2 * KV_HEADS * HEAD_DIM  # of its keys and values
BLOCKS = {"ring_attention": "blocks"}


def ring(kind: str = "ring", *, fused: bool = True, **overheads: Any) -> Scenario:
    """A scenario whose blocks are kernels of their own."""
    training = {"sequence": SEQUENCE, "global_batch": 1, "gradient_clipping": False, "fused": fused}
    return scenario(kind, cp=RANKS, training=training | {"overheads": BLOCKS | overheads})


def replace_layout(built: Scenario, **changes: Any) -> Scenario:
    """The scenario with another layout."""
    return built.with_overrides(*(f"layout.{key}={str(value).lower()}" for key, value in changes.items()))


def layer_operators(built: Scenario) -> tuple[Operator, ...]:
    """The operators of a layer."""
    return next(iter(build_plan(built).layer_by_spec.values())).operators


def core_kernels(built: Scenario, *, backward: bool = False) -> list[Kernel]:
    """Kernels of attention's core in one pass."""
    (core,) = [operator for operator in layer_operators(built) if operator.name == "attention.core"]
    return list(core.input_gradient if backward else core.forward)


def merged_bytes(kernels: list[Kernel]) -> float:
    """Bytes of the kernels that merge."""
    return sum(
        kernel.bytes
        for kernel in kernels
        if isinstance(kernel.shape, MemoryBoundShape) and kernel.shape.routine is MemoryBoundOp.MERGE
    )


@pytest.mark.parametrize("backward", [False, True])
def test_blocks_compute_what_one_kernel_does(backward: bool) -> None:
    """P equal kernels of a rank's own queries and as many keys."""
    blocks = [kernel for kernel in core_kernels(ring(), backward=backward) if kernel.kind in ATTENTION_KINDS]
    (whole,) = [kernel for kernel in core_kernels(scenario(), backward=backward) if kernel.kind in ATTENTION_KINDS]
    assert len(blocks) == RANKS
    assert sum(kernel.flops for kernel in blocks) == pytest.approx(whole.flops)


def test_an_unbalanced_last_rank_has_one_causal_square_and_whole_ones() -> None:
    """2P - 1 causal squares in all, where a balanced rank has P; its kernels have as many queries as keys."""
    unbalanced = replace_layout(ring(), cp_balanced=False)
    first, *later = [kernel for kernel in core_kernels(unbalanced) if kernel.kind in ATTENTION_KINDS]
    balanced = [kernel for kernel in core_kernels(ring()) if kernel.kind in ATTENTION_KINDS]
    assert [kernel.flops / first.flops for kernel in later] == pytest.approx([2.0] * (RANKS - 1))
    total = first.flops + sum(kernel.flops for kernel in later)
    assert total == pytest.approx((2 - 1 / RANKS) * sum(kernel.flops for kernel in balanced), rel=1e-3)
    assert {(kernel.shape.causal, kernel.shape.key) for kernel in later} == {(False, SEQUENCE // RANKS)}


def test_buffers_of_sums_in_flight() -> None:
    """FP32: of keys received, sent, received next; the larger sum twice; queries; and the keys' concatenation."""
    (core,) = [operator for operator in layer_operators(ring("ring")) if operator.name == "attention.core"]
    assert core.temporary_bytes == 4 * (QUERIES + 3 * KEYS + max(QUERIES, KEYS)) + 2 * KEYS


@pytest.mark.parametrize("framework", [{"name": "pytorch", "torch_compile": True}, "megatron"])
@pytest.mark.parametrize("kind", ["ring", "all_gather"])
@pytest.mark.parametrize("tp", [1, 2])
def test_balanced_halves_are_never_slower(framework: Any, kind: str, tp: int) -> None:
    """Also where the ring crosses nodes, so that messages and not kernels bound it."""
    mapping = {
        "model": {"preset": "llama3-8b", "layers": 2},
        "cluster": {"name": "dgx-h100", "gpus": 16 * tp},
        "layout": {"cp": {"degree": 8, "kind": kind}, "tp": tp, "dp": 2, "data": "zero1"},
        "training": {"sequence": 16384, "global_batch": 2},
        "framework": framework,
    }
    balanced = Scenario.from_mapping(mapping)
    assert simulate(balanced).step_time <= simulate(replace_layout(balanced, cp_balanced=False)).step_time


def test_compiled_merges_are_one_kernel_each() -> None:
    """Forward: the first output in bf16 and FP32, P - 1 times bf16 and FP32 twice; backward P times of both tensors."""
    assert merged_bytes(core_kernels(ring())) == QUERIES * (2 + 4 + (RANKS - 1) * (2 + 2 * 4))
    assert merged_bytes(core_kernels(ring(), backward=True)) == RANKS * (QUERIES + KEYS) * (2 + 2 * 4)


def test_eager_merges_are_a_kernel_for_each_operation() -> None:
    """Conversion, difference, product and difference; both concatenations; the result's conversion."""
    merges = (RANKS - 1) * (2 + 4 + 3 * 4 + 2 * 4 + 3 * 4)
    forward = QUERIES * (2 + 4 + merges + 4 + 2) + (RANKS - 1) * KEYS * 2 * 2
    assert merged_bytes(core_kernels(ring(fused=False))) == forward
    sums = QUERIES * (2 + 2 * 4) + KEYS * ((2 + 2 * 4) / 2 + 2 * 4 + 2 * 4)
    backward = RANKS * sums + (RANKS - 1) * KEYS * 2 * 2
    assert merged_bytes(core_kernels(ring(fused=False), backward=True)) == backward


def test_sums_of_gradients_go_round_in_fp32() -> None:
    """P - 1 hops of keys and values in bf16 in each pass, and P of their gradients in FP32 backward, in each layer."""
    hops = [op for op in context_ops(ring()) if op.collective is CollectiveType.SHIFT]
    moved = sum(op.payload * (RANKS - 1) / RANKS for op in hops)
    assert moved == pytest.approx(2 * (2 * (RANKS - 1) * KEYS * 2 + RANKS * KEYS * 4))


def test_gathered_keys_hide_behind_the_first_block() -> None:
    operations = context_ops(ring("all_gather"))
    gathers = [op for op in operations if op.collective is CollectiveType.ALL_GATHER]
    assert [op.payload for op in gathers] == 4 * [RANKS * KEYS * 2]
    hops = [op for op in operations if op.collective is CollectiveType.SHIFT]
    assert len(hops) == 2 * RANKS
    assert sum(op.payload * (RANKS - 1) / RANKS for op in hops) == pytest.approx(2 * RANKS * KEYS * 4)


def test_repeated_keys_are_as_many_as_queries() -> None:
    payloads = [[op.payload for op in context_ops(ring(repeats_kv=flag))] for flag in (False, True)]
    assert payloads[1] == pytest.approx([HEADS / KV_HEADS * payload for payload in payloads[0]])


@pytest.mark.parametrize("kind", ["ring", "all_gather"])
def test_blocks_are_never_faster_than_one_kernel(kind: str) -> None:
    one = simulate(ring("ring", ring_attention="one_kernel")).step_time
    assert one < simulate(ring(kind)).step_time < simulate(ring(kind, fused=False)).step_time


@pytest.mark.parametrize("layout", [{"cp": 1}, {"cp": 8, "cp_kind": "ulysses"}])
def test_other_layouts_have_one_kernel(layout: dict[str, Any]) -> None:
    """One rank has no blocks, ranks that exchange heads none, and consecutive queries no equal ones."""
    training = {"sequence": SEQUENCE, "global_batch": 8, "overheads": BLOCKS}
    kernels = core_kernels(scenario(layout=layout, training=training))
    assert [kernel.kind for kernel in kernels] == [KernelKind.ATTENTION_FORWARD]
