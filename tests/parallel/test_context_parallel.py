"""What each kind of context parallelism moves, in closed form, and laws between kinds."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim import Scenario, simulate
from clustersim.build import build_plan, build_simulation
from clustersim.common.dtypes import DType
from clustersim.common.errors import ClusterSimError
from clustersim.memory.layer_gradients import activation_gradient_bytes
from clustersim.model.attention import causal_factor
from clustersim.model.framework_files import load_framework
from clustersim.model.kernels import AttentionShape, KernelKind
from clustersim.model.overheads import RingAttention
from clustersim.parallel.context_parallel import ContextParallel, ContextParallelKind
from clustersim.program.task import CollectiveType, CommOp, ComputeTask
from tests.laws.timelines import assert_same_trace

KINDS = [*ContextParallelKind]
SEQUENCE, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 16384, 2048, 16, 8, 128
WITH_GROUPS = {"two_dimensional", "hierarchical"}


def scenario(kind: str = "ring", cp: int = 8, tp: int = 1, **changes: Any) -> Scenario:
    """Two layers of grouped-query attention over `cp` ranks."""
    model = {"layers": 2, "hidden": HIDDEN, "heads": HEADS, "kv_heads": KV_HEADS, "ffn": 4096, "vocab": 32000}
    layout = {"cp": cp, "tp": tp, "cp_kind": kind} | ({"cp_inner": cp // 2} if kind in WITH_GROUPS and cp > 1 else {})
    overheads = {"ring_attention": "one_kernel"}
    training = {"sequence": SEQUENCE, "global_batch": 1, "gradient_clipping": False, "overheads": overheads}
    mapping = {"model": model, "cluster": {"name": "dgx-h100", "gpus": cp * tp}, "layout": layout, "training": training}
    return Scenario.from_mapping({**mapping, **changes})


def context_ops(built: Scenario) -> list[CommOp]:
    """Collectives of context parallelism of one step of rank 0, in order."""
    (program,) = build_simulation(built).program.programs
    tasks = [task for task in program.tasks if isinstance(task, ComputeTask)]
    operations = [operation for task in tasks for operation in task.segment.operations]
    return [op.comm_op for op in operations if op.comm_op is not None and op.comm_op.comm_group.startswith("cp")]


def moved_bytes(comm_op: CommOp, ranks: int) -> float:
    """Bytes that each rank sends (or receives): all but its own share."""
    return comm_op.payload * (ranks - 1) / ranks


def kv_bytes(tp: int = 1) -> float:
    """Keys and values of the sequence in bf16 on one tensor-parallel rank."""
    return 2 * SEQUENCE * 2 * (KV_HEADS // tp) * HEAD_DIM


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", ["ring", "all_gather", "hierarchical"])
def test_keys_and_values_move_once_forward_and_twice_backward(kind: str, tp: int) -> None:
    """(P - 1) / P of those of the full sequence, in each layer and pass, over one group or two."""
    sizes = {"cp": 8, "cp_inner": 4, "cp_outer": 2}
    built = scenario(kind, tp=tp)
    moved = sum(moved_bytes(comm_op, sizes[comm_op.comm_group]) for comm_op in context_ops(built))
    assert moved == pytest.approx(2 * 3 * kv_bytes(tp) * 7 / 8)


def test_ulysses_exchanges_queries_keys_values_and_outputs() -> None:
    """Each rank's S / P tokens: 16 + 2 x 8 heads before, 16 after, in each direction; 7 of 8 parts leave the rank."""
    heads = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    tokens = 2 * SEQUENCE / 8
    sizes = [comm_op.payload for comm_op in context_ops(scenario("ulysses"))]
    forward, backward = [tokens * heads, tokens * HEADS * HEAD_DIM], [tokens * HEADS * HEAD_DIM, tokens * heads]
    assert sizes == [*forward, *forward, *backward, *backward]


def test_ulysses_copies_heads_where_ranks_are_more() -> None:
    """16 ranks and 8 heads of keys: each is sent twice."""
    first = context_ops(scenario("ulysses", cp=16))[0]
    assert first.payload == 2 * SEQUENCE / 16 * (HEADS + 2 * 16) * HEAD_DIM


def test_two_dimensions_exchange_heads_inside_and_send_keys_of_fewer_heads_across() -> None:
    """Inner groups of 4: a ring of 2 ranks over 2 of 8 heads of keys."""
    exchange, ring, output = context_ops(scenario("two_dimensional"))[:3]
    assert (exchange.comm_group, ring.comm_group, output.comm_group) == ("cp_inner", "cp_outer", "cp_inner")
    assert exchange.payload == 2 * SEQUENCE / 8 * (HEADS + 2 * KV_HEADS) * HEAD_DIM
    assert ring.payload == kv_bytes() / 4
    assert ring.collective is CollectiveType.SHIFT


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_of_any_kind_is_none(kind: ContextParallelKind) -> None:
    assert_same_trace(simulate(scenario(kind.value, cp=1)).trace, simulate(scenario(cp=1)).trace)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_computes_the_same_attention(kind: ContextParallelKind) -> None:
    """All ranks together: the FLOP of the whole sequence on one rank, whatever is exchanged; balanced or not."""

    def attention_flops(built: Scenario) -> float:
        plan = build_plan(built)
        operators = next(iter(plan.layer_by_spec.values())).operators
        kernels = [kernel for operator in operators for kernel in operator.forward]
        return sum(kernel.flops for kernel in kernels if kernel.kind is KernelKind.ATTENTION_FORWARD)

    assert 8 * attention_flops(scenario(kind.value)) == pytest.approx(attention_flops(scenario(cp=1)))


@given(st.integers(1, 16), st.integers(1, 64), st.none() | st.integers(1, 200))
def test_consecutive_queries_of_the_last_rank_attend_to_most(ranks: int, tokens: int, window: int | None) -> None:
    """Counted key by key; without a window 2 - 1 / P times the mean, up to the diagonal."""
    keys = ranks * tokens
    shape = AttentionShape(1, tokens, keys, 1, 1, 64, causal=True, window=window, trailing=True)
    seen = sum(min(position + 1, window or keys) for position in range(keys - tokens, keys))
    assert causal_factor(shape) == pytest.approx(seen / (tokens * keys))
    if window is None:
        assert causal_factor(shape) == pytest.approx((2 * keys - tokens + 1) / (2 * keys))


def test_unbalanced_ranks_wait_for_the_last() -> None:
    times = [
        simulate(scenario(layout={"cp": {"degree": 8, "kind": "ring", "balanced": flag}})).step_time
        for flag in (True, False)
    ]
    assert times[0] < times[1]


def test_gathered_keys_and_their_gradients_exist_while_attention_runs() -> None:
    """Two of each of the full sequence, beside what a ring has: never less, and at most those."""

    def gradients(kind: str) -> float:
        plan = build_plan(scenario(kind))
        return activation_gradient_bytes(next(iter(plan.layer_by_spec.values())), 2.0)

    assert gradients("ring") <= gradients("all_gather") <= gradients("ring") + 2 * kv_bytes()
    context = ContextParallel(ContextParallelKind.ALL_GATHER, 8, 1, DType.BF16, kv_bytes(), 0.0, 0.0)
    assert [comm_op.payload for comm_op in context.exchange(backward=True).before] == [kv_bytes()]


def test_the_mapping_is_short_for_the_keys() -> None:
    short = scenario(layout={"cp": {"degree": 8, "kind": "two_dimensional", "inner": 4, "balanced": False}})
    long = scenario(layout={"cp": 8, "cp_kind": "two_dimensional", "cp_inner": 4, "cp_balanced": False})
    assert short == long


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"cp": 8, "cp_inner": 4}, "has no inner groups"),
        ({"cp": 8, "cp_kind": "hierarchical"}, "is not given"),
        ({"cp": 8, "cp_kind": "hierarchical", "cp_inner": 3}, "does not divide"),
        ({"cp": 8, "cp_kind": "ulyses"}, "did you mean ulysses"),
        ({"cp": {"degree": 8, "knd": "ring"}}, "did you mean kind"),
        ({"cp": {"degree": 8, "kind": "rng"}}, r"layout\.cp\.kind: 'rng' is unknown"),
        ({"cp": {"degree": 8, "kind": "ring"}, "cp_kind": "ulysses"}, "given by cp, too"),
    ],
)
def test_bad_context_parallelism_is_refused(layout: dict[str, Any], words: str) -> None:
    with pytest.raises(ClusterSimError, match=words):
        simulate(scenario(layout=layout))


def test_more_ranks_than_heads_are_refused() -> None:
    with pytest.raises(ClusterSimError, match="exchange heads"):
        simulate(scenario("ulysses", cp=32))


@pytest.mark.parametrize(
    ("framework", "kind"),
    [("pytorch", "all_gather"), ("maxtext", "all_gather"), ("megatron", "ring"), ("deepspeed", "ulysses")],
)
def test_left_out_the_kind_is_the_frameworks(framework: str, kind: str) -> None:
    """context_parallel's default rotation, MaxText's strategy, --cp-comm-type p2p, DeepSpeed-Ulysses."""
    assert scenario(framework=framework, layout={"cp": 8}).layout.cp_kind.value == kind
    assert scenario(framework=framework, layout={"cp": 8, "cp_kind": "ring"}).layout.cp_kind.value == "ring"


@pytest.mark.parametrize(
    ("date", "blocks", "repeats"),
    [("2024-12-26", True, True), ("2026-03-01", True, False), ("2026-09-01", False, False)],
)
def test_torchtitan_gathers_before_flex_attention_since_august_2026(date: str, blocks: bool, repeats: bool) -> None:
    overheads = load_framework("torchtitan", date).overheads
    assert (overheads.ring_attention is RingAttention.BLOCKS, overheads.repeats_kv) == (blocks, repeats)
