"""One layer on the ranks of a tensor- and context-parallel group: golden listings, volumes, FLOP.

The listings in tests/golden/programs were printed by this code and then read line by line against the papers and
functions that each names. They are for a layer of 64 hidden, 4 heads, 2 key/value heads of 16, ffn 128, on one sequence
of 32 tokens in bf16: the activation between layers has 32 x 64 x 2 = 4096 bytes, keys and values 2 x 32 x 2 x 16 x 2.
"""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.model import layers
from clustersim.model.kernels import Kernel, MatmulShape
from clustersim.model.layer_stack import MlpType
from clustersim.model.presets import load_preset
from clustersim.model.recompute_modules import RecomputeModule
from clustersim.model.training import AttentionBackend, Training
from clustersim.model.transformer import Norm, PositionEncoding, TransformerModel, resize_model, uniform_model
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan
from clustersim.parallel.tensor_parallel import (
    backward_operations,
    forward_operations,
    recomputed_forward,
    recomputed_modules,
    recomputed_operations,
)
from clustersim.program.task import CollectiveType, CommOp, CommOverlap, Operation, WorkType
from tests.parallel.operation_listing import golden, listing

SMALL = uniform_model(
    name="small", layers=2, hidden=64, ffn=128, heads=4, kv_heads=2, head_dim=16,
    vocab=256, max_positions=32, mlp=MlpType.SWIGLU, norm=Norm.RMSNORM, positions=PositionEncoding.ROTARY,
    tied_embeddings=False, linear_bias=False, qkv_bias=False,
)  # fmt: skip
LAYOUTS = {
    "layer_tp1": Layout(),
    "layer_tp2": Layout(tp=2),
    "layer_tp2_sequence_parallel": Layout(tp=2, sequence_parallel=True),
    "layer_tp2_sequence_parallel_overlap": Layout(tp=2, sequence_parallel=True, tensor_overlap=True),
    "layer_cp2": Layout(cp=2),
}


def plan(layout: Layout, model: TransformerModel = SMALL, sequence: int = 32) -> Plan:
    return Plan(model, Training(sequence, 1), layout)


def both(of: Plan) -> tuple[list[Operation], list[Operation]]:
    layer = of.layer_by_spec[of.model.distinct_specs[0]]
    return forward_operations(layer, of.layer_sharding(of.model.distinct_specs[0])), backward_operations(
        layer, of.layer_sharding(of.model.distinct_specs[0])
    )


def exchanges(operations: list[Operation]) -> list[CommOp]:
    return [operation.comm_op for operation in operations if operation.comm_op is not None]


def kernels(operations: list[Operation]) -> list[Kernel]:
    return [operation.kernel for operation in operations if operation.kernel is not None]


def ring_bytes(exchange: CommOp) -> float:
    """What each rank sends, in units of the payload times (n - 1)/n (Thakur et al. 2005: all-reduce twice)."""
    return exchange.payload * (2 if exchange.collective is CollectiveType.ALL_REDUCE else 1)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layers_operations_are_those_of_the_golden_listing(name: str) -> None:
    ahead, back = both(plan(LAYOUTS[name]))
    assert listing([*ahead, *back]) == golden(name)


def test_embedding_and_head_under_sequence_parallelism() -> None:
    """Tokens come in whole and leave scattered; the head gathers, and the loss leaves nothing to reduce."""
    of = plan(Layout(tp=2, sequence_parallel=True))
    table, last = (part(of.model, of.training, of.layer_shard) for part in (layers.embedding_layer, layers.head_layer))
    into, out = (
        replace(of.layer_sharding(of.model.distinct_specs[0]), has_sharded_input=False),
        replace(of.layer_sharding(of.model.distinct_specs[0]), has_sharded_output=False),
    )
    operations = [
        *forward_operations(table, into),
        *backward_operations(table, into),
        *forward_operations(last, out),
        *backward_operations(last, out),
    ]
    assert listing(operations) == golden("embedding_and_head_tp2_sequence_parallel")


def test_tensor_parallelism_all_reduces_four_times_a_layer() -> None:
    """Shoeybi et al. 2019 (arXiv:1909.08053) section 3: two in forward, two in backward, of b s h elements each."""
    of = plan(Layout(tp=2))
    for operations in both(of):
        assert [(exchange.collective, exchange.payload) for exchange in exchanges(operations)] == [
            (CollectiveType.ALL_REDUCE, 32 * 64 * 2)
        ] * 2


def test_sequence_parallelism_sends_the_same_and_two_gathers_more() -> None:
    """Korthikanti et al. 2022 (arXiv:2205.05198) section 4.2.2.

    An all-reduce is a reduce-scatter and an all-gather, so forward and backward send what they did before; the inputs
    of the two column-parallel products are gathered once more in backward because only a part was kept.
    """
    whole, split = (both(plan(Layout(tp=2, sequence_parallel=parallel))) for parallel in (False, True))
    before, after = ([sum(map(ring_bytes, exchanges(item))) for item in pair] for pair in (whole, split))
    assert after[0] == before[0]
    again = [exchange for exchange in exchanges(split[1]) if exchange.name == "gather input again"]
    assert len(again) == 2
    assert after[1] == before[1] + sum(map(ring_bytes, again))
    kinds = Counter(comm_op.collective for comm_op in exchanges([*split[0], *split[1]]))
    assert kinds == {CollectiveType.ALL_GATHER: 6, CollectiveType.REDUCE_SCATTER: 4}


def test_overlap_changes_no_volume() -> None:
    plain, overlapped = (
        both(plan(Layout(tp=2, sequence_parallel=True, tensor_overlap=overlap))) for overlap in (False, True)
    )
    for one, other in zip(plain, overlapped, strict=True):
        assert Counter(exchanges(one)) == Counter(exchanges(other))
        assert Counter(kernels(one)) == Counter(kernels(other))


@given(tp=st.sampled_from([2, 4, 8]), sequence_parallel=st.booleans())
def test_overlap_leaves_no_tensor_collective_alone(tp: int, sequence_parallel: bool) -> None:
    layout = Layout(tp=tp, sequence_parallel=sequence_parallel, tensor_overlap=True)
    for operations in both(plan(layout, load_preset("llama3-8b"), 1024)):
        assert not any(isinstance(operation.body, CommOp) for operation in operations)


@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    cp=st.sampled_from([1, 2, 4]),
    sequence_parallel=st.booleans(),
    attention=st.sampled_from(AttentionBackend),
)
def test_sharding_preserves_flop(tp: int, cp: int, sequence_parallel: bool, attention: AttentionBackend) -> None:
    """Products are split by heads, columns, rows and queries, so tp x cp shards do exactly the whole layer's work."""
    training = Training(4096, 1, attention=attention)

    def flops(layout: Layout) -> list[float]:
        of = Plan(load_preset("llama3-8b"), training, layout)
        return [sum(operation.kernel.flops for operation in part if operation.kernel) for part in both(of)]

    shards = flops(Layout(tp=tp, cp=cp, sequence_parallel=sequence_parallel))
    assert [tp * cp * shard for shard in shards] == pytest.approx(flops(Layout()), rel=1e-12)


@given(tp=st.sampled_from([2, 4, 8]))
def test_sequence_parallelism_splits_the_replicated_kernels(tp: int) -> None:
    """Norms and residuals run on sequence / tp tokens instead of all: 1/tp of the bytes."""

    def moved(*, sequence_parallel: bool) -> float:
        of = plan(Layout(tp=tp, sequence_parallel=sequence_parallel), load_preset("llama3-8b"), 1024)
        kernels = [operation.kernel for part in both(of) for operation in part if operation.kernel]
        return sum(kernel.bytes for kernel in kernels if "norm" in kernel.name or "residual" in kernel.name)

    assert moved(sequence_parallel=True) * tp == pytest.approx(moved(sequence_parallel=False))


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_parameters_gradient_is_marked_complete_once(name: str) -> None:
    of = plan(LAYOUTS[name])
    ahead, back = both(of)
    assert (
        sum(operation.gradient_count for operation in back)
        == of.layer_by_spec[of.model.distinct_specs[0]].parameter_count
    )
    assert not any(item.gradient_count for item in ahead)


def test_the_ring_carries_keys_and_values_forward_and_their_gradients_too_in_backward() -> None:
    """Ring attention (arXiv:2310.01889) section 3: K and V forward; K, V, dK and dV backward; once, under the core."""
    ahead, back = both(plan(Layout(cp=2)))
    rings = [operation.body for operation in (*ahead, *back) if operation.comm_op is not None]
    assert all(isinstance(ring, CommOverlap) and ring.chunk_count == 2 for ring in rings)
    assert [exchange.payload for exchange in (*exchanges(ahead), *exchanges(back))] == [4096, 8192]


@pytest.mark.parametrize("attention", AttentionBackend)
def test_selective_recomputation_runs_the_core_and_nothing_else(attention: AttentionBackend) -> None:
    training = Training(32, 1, attention=attention)
    of = Plan(SMALL, training, Layout(tp=2, sequence_parallel=True))
    again = recomputed_modules(
        of.layer_by_spec[SMALL.distinct_specs[0]],
        of.layer_sharding(SMALL.distinct_specs[0]),
        {RecomputeModule.CORE_ATTENTION},
        early_stop=False,
    )
    names = [operation.kernel.name for operation in again if operation.kernel]
    core = ["scores", "softmax", "context"] if attention is AttentionBackend.STANDARD else ["core"]
    assert [name.removeprefix("attention.") for name in names] == core
    assert all(item.work_type is WorkType.RECOMPUTE for item in again)
    assert not exchanges(again)


def again(
    model: TransformerModel, layout: Layout, attention: AttentionBackend = AttentionBackend.FLASH
) -> list[Operation]:
    """What selective recomputation by operations runs again of a layer."""
    training = Training(32, 1, attention=attention)
    of = Plan(model, training, layout)
    return recomputed_operations(
        of.layer_by_spec[model.distinct_specs[0]], of.layer_sharding(of.model.distinct_specs[0]), early_stop=False
    )


def products(operations: list[Operation]) -> dict[str, int]:
    """Columns of the matrix products among some operations."""
    return {kernel.name: kernel.shape.n for kernel in kernels(operations) if isinstance(kernel.shape, MatmulShape)}


ATTENTIONS = (AttentionBackend.FLASH, AttentionBackend.STANDARD)
STREAMED = ["attention.norm", "attention.rotary", "attention.residual", "mlp.norm", "mlp.activation", "mlp.residual"]


@pytest.mark.parametrize("attention", [AttentionBackend.FLASH, AttentionBackend.FLASH2, AttentionBackend.FLASH1])
def test_of_a_gated_layers_seven_products_every_second_is_run_again(attention: AttentionBackend) -> None:
    """Of q, k, v, output, gate, up, down (as torchtitan counts): k (2 heads of 16), the output and up (ffn).

    Nor is anything that is neither a product nor flash attention.
    """
    operations = again(SMALL, Layout(), attention)
    assert products(operations) == {"attention.qkv": 32, "attention.out": 64, "mlp.up": 128}
    assert [kernel.name for kernel in kernels(operations) if kernel.name not in products(operations)] == STREAMED
    assert {operation.work_type for operation in operations} == {WorkType.RECOMPUTE}


def test_of_an_ungated_layers_six_products_every_second_is_run_again() -> None:
    """q, k, v, output, up, down: k, the output and down."""
    operations = again(resize_model(SMALL, mlp=MlpType.GELU), Layout())
    assert products(operations) == {"attention.qkv": 32, "attention.out": 64, "mlp.down": 64}


def test_scores_that_are_written_are_run_again() -> None:
    """Batched products of scores and of values are no `mm`; all three kernels of the core run again."""
    flash, standard = (
        {kernel.name for kernel in kernels(again(SMALL, Layout(), attention_backend))}
        for attention_backend in ATTENTIONS
    )
    assert standard - flash == {"attention.scores", "attention.softmax", "attention.context"}
    assert flash < standard


def test_what_is_kept_needs_neither_its_sums_nor_its_ring_again() -> None:
    """As in torchtitan, which keeps reduce-scatters, not gathers; flash attention is kept with its ring."""
    split = again(SMALL, Layout(tp=2, sequence_parallel=True))
    assert [exchange.name for exchange in exchanges(split)] == ["gather input"] * 2
    assert not exchanges(again(SMALL, Layout(cp=2)))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_without_overlap_in_backward_its_collectives_stand_alone(sequence_parallel: bool) -> None:
    beside, alone = (
        both(plan(Layout(tp=2, sequence_parallel=sequence_parallel, backward_overlap=overlap)))
        for overlap in (True, False)
    )
    assert any(isinstance(operation.body, CommOverlap) for operation in beside[1])
    assert not any(isinstance(item.body, CommOverlap) for item in alone[1])
    assert alone[0] == beside[0], "forward is as it was"
    assert Counter(exchanges(alone[1])) == Counter(exchanges(beside[1]))
    assert Counter(kernels(alone[1])) == Counter(kernels(beside[1]))


def test_without_overlap_in_backward_tensor_overlap_still_cuts_its_collectives_into_chunks() -> None:
    layout = Layout(tp=2, sequence_parallel=True, tensor_overlap=True, backward_overlap=False)
    _, back = both(plan(layout))
    assert exchanges(back)
    assert {operation.body.chunk_count for operation in back if isinstance(operation.body, CommOverlap)} == {2}
    assert not any(isinstance(item.body, CommOp) for item in back)


def test_full_recomputation_repeats_forward_with_its_collectives() -> None:
    """Megatron's checkpoint runs the layer's whole forward again, its reductions included."""
    of = plan(Layout(tp=2, sequence_parallel=True))
    layer = of.layer_by_spec[of.model.distinct_specs[0]]
    again = recomputed_forward(layer, of.layer_sharding(of.model.distinct_specs[0]), early_stop=False)
    assert [operation.body for operation in again] == [
        forward_operation.body
        for forward_operation in forward_operations(layer, of.layer_sharding(of.model.distinct_specs[0]))
    ]
    assert {item.work_type for item in again} == {WorkType.RECOMPUTE}
