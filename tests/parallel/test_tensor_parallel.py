"""One layer on the ranks of a tensor- and context-parallel group: golden listings, volumes, FLOP.

The listings in tests/golden/programs were printed by this code and then reviewed line by line against the
papers and functions that each names. They are for a layer of 64 hidden, 4 heads, 2 key/value heads of 16,
ffn 128, on one sequence of 32 tokens in bf16: the activation between layers has 32 x 64 x 2 = 4096 bytes,
keys and values 2 x 32 x 2 x 16 x 2.
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
from tests.parallel.operation_listing import comparable_operations, format_operations, golden_listing

SMALL = uniform_model(
    name="small", layers=2, hidden=64, ffn=128, heads=4, kv_heads=2, head_dim=16,
    vocab=256, max_positions=32, mlp=MlpType.SWIGLU, norm=Norm.RMSNORM, positions=PositionEncoding.ROTARY,
    tied_embeddings=False, linear_bias=False, qkv_bias=False,
)  # fmt: skip
LAYOUTS = {
    "layer_tp1": Layout(),
    "layer_tp2": Layout(tp=2),
    "layer_tp2_sequence_parallel": Layout(tp=2, sequence_parallel=True),
    "layer_tp2_sequence_parallel_overlap": Layout(tp=2, sequence_parallel=True, tp_comm_overlap=True),
    "layer_cp2": Layout(cp=2),
}


def layer_plan(layout: Layout, model: TransformerModel = SMALL, sequence: int = 32) -> Plan:
    return Plan(model, Training(sequence, 1), layout)


def forward_and_backward(plan: Plan) -> tuple[list[Operation], list[Operation]]:
    layer = plan.layer_by_spec[plan.model.distinct_specs[0]]
    return forward_operations(layer, plan.layer_sharding(plan.model.distinct_specs[0])), backward_operations(
        layer, plan.layer_sharding(plan.model.distinct_specs[0])
    )


def comm_ops(operations: list[Operation]) -> list[CommOp]:
    return [operation.comm_op for operation in operations if operation.comm_op is not None]


def kernels(operations: list[Operation]) -> list[Kernel]:
    return [operation.kernel for operation in operations if operation.kernel is not None]


def ring_bytes(comm_op: CommOp) -> float:
    """What each rank sends, in units of the payload times (n - 1)/n (Thakur et al. 2005: all-reduce twice)."""
    return comm_op.payload * (2 if comm_op.collective is CollectiveType.ALL_REDUCE else 1)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layers_operations_are_those_of_the_golden_listing(name: str) -> None:
    forward, backward = forward_and_backward(layer_plan(LAYOUTS[name]))
    assert format_operations([*forward, *backward]) == golden_listing(name)


def test_embedding_and_head_under_sequence_parallelism() -> None:
    """Token ids are not sharded and activations leave scattered.

    The head gathers, and the loss leaves nothing to reduce.
    """
    plan = layer_plan(Layout(tp=2, sequence_parallel=True))
    embedding, head = (
        builder(plan.model, plan.training, plan.layer_shard) for builder in (layers.embedding_layer, layers.head_layer)
    )
    embedding_sharding, head_sharding = (
        replace(plan.layer_sharding(plan.model.distinct_specs[0]), has_sharded_input=False),
        replace(plan.layer_sharding(plan.model.distinct_specs[0]), has_sharded_output=False),
    )
    operations = [
        *forward_operations(embedding, embedding_sharding),
        *backward_operations(embedding, embedding_sharding),
        *forward_operations(head, head_sharding),
        *backward_operations(head, head_sharding),
    ]
    assert format_operations(operations) == golden_listing("embedding_and_head_tp2_sequence_parallel")


def test_tensor_parallelism_has_four_all_reduces_per_layer() -> None:
    """Shoeybi et al. 2019 (arXiv:1909.08053) section 3: two in forward, two in backward, of b s h elements each."""
    plan = layer_plan(Layout(tp=2))
    for operations in forward_and_backward(plan):
        assert [(comm_op.collective, comm_op.payload) for comm_op in comm_ops(operations)] == [
            (CollectiveType.ALL_REDUCE, 32 * 64 * 2)
        ] * 2


def test_sequence_parallelism_sends_the_same_and_two_gathers_more() -> None:
    """Korthikanti et al. 2022 (arXiv:2205.05198) section 4.2.2.

    An all-reduce is a reduce-scatter and an all-gather, so forward and backward send what they did before; the
    inputs of the two column-parallel matmuls are gathered once more in backward because only a shard was kept.
    """
    unsplit, split = (
        forward_and_backward(layer_plan(Layout(tp=2, sequence_parallel=parallel))) for parallel in (False, True)
    )
    before, after = ([sum(map(ring_bytes, comm_ops(item))) for item in pair] for pair in (unsplit, split))
    assert after[0] == before[0]
    repeated_gathers = [comm_op for comm_op in comm_ops(split[1]) if comm_op.name == "gather input again"]
    assert len(repeated_gathers) == 2
    assert after[1] == before[1] + sum(map(ring_bytes, repeated_gathers))
    kinds = Counter(element.collective for element in comm_ops([*split[0], *split[1]]))
    assert kinds == {CollectiveType.ALL_GATHER: 6, CollectiveType.REDUCE_SCATTER: 4}


def test_overlap_changes_no_volume() -> None:
    plain, overlapped = (
        forward_and_backward(layer_plan(Layout(tp=2, sequence_parallel=True, tp_comm_overlap=overlap)))
        for overlap in (False, True)
    )
    for one, other in zip(plain, overlapped, strict=True):
        assert Counter(comm_ops(one)) == Counter(comm_ops(other))
        assert Counter(kernels(one)) == Counter(kernels(other))


@given(tp=st.sampled_from([2, 4, 8]), sequence_parallel=st.booleans())
def test_tensor_overlap_overlaps_every_collective(tp: int, sequence_parallel: bool) -> None:
    layout = Layout(tp=tp, sequence_parallel=sequence_parallel, tp_comm_overlap=True)
    for operations in forward_and_backward(layer_plan(layout, load_preset("llama3-8b"), 1024)):
        assert not any(isinstance(operation.body, CommOp) for operation in operations)


@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    cp=st.sampled_from([1, 2, 4]),
    sequence_parallel=st.booleans(),
    attention=st.sampled_from(AttentionBackend),
)
def test_sharding_preserves_flop(tp: int, cp: int, sequence_parallel: bool, attention: AttentionBackend) -> None:
    """Matmuls are split by heads, columns, rows and queries: tp x cp shards do the unsharded layer's work exactly."""
    training = Training(4096, 1, attention=attention)

    def flops(layout: Layout) -> list[float]:
        plan = Plan(load_preset("llama3-8b"), training, layout)
        return [
            sum(operation.kernel.flops for operation in operations if operation.kernel)
            for operations in forward_and_backward(plan)
        ]

    shards = flops(Layout(tp=tp, cp=cp, sequence_parallel=sequence_parallel))
    assert [tp * cp * shard for shard in shards] == pytest.approx(flops(Layout()), rel=1e-12)


@given(tp=st.sampled_from([2, 4, 8]))
def test_sequence_parallelism_splits_the_replicated_kernels(tp: int) -> None:
    """Norms and residuals run on sequence / tp tokens instead of all: 1/tp of the bytes."""

    def replicated_bytes(*, sequence_parallel: bool) -> float:
        plan = layer_plan(Layout(tp=tp, sequence_parallel=sequence_parallel), load_preset("llama3-8b"), 1024)
        kernels = [
            operation.kernel
            for operations in forward_and_backward(plan)
            for operation in operations
            if operation.kernel
        ]
        return sum(kernel.bytes for kernel in kernels if "norm" in kernel.name or "residual" in kernel.name)

    assert replicated_bytes(sequence_parallel=True) * tp == pytest.approx(replicated_bytes(sequence_parallel=False))


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_parameters_gradient_is_marked_complete_once(name: str) -> None:
    plan = layer_plan(LAYOUTS[name])
    forward, backward = forward_and_backward(plan)
    assert (
        sum(operation.gradient_count for operation in backward)
        == plan.layer_by_spec[plan.model.distinct_specs[0]].parameter_count
    )
    assert not any(item.gradient_count for item in forward)


def test_the_cp_ring_sends_kv_forward_and_kv_with_gradients_backward() -> None:
    """Ring attention (arXiv:2310.01889) section 3: K and V forward; K, V, dK and dV backward; once, under the core."""
    forward, backward = forward_and_backward(layer_plan(Layout(cp=2)))
    rings = [operation.body for operation in (*forward, *backward) if operation.comm_op is not None]
    assert all(isinstance(ring, CommOverlap) and ring.chunk_count == 2 for ring in rings)
    assert [comm_op.payload for comm_op in (*comm_ops(forward), *comm_ops(backward))] == [4096, 8192]


@pytest.mark.parametrize("attention", AttentionBackend)
def test_selective_recomputation_runs_only_the_attention_core(attention: AttentionBackend) -> None:
    training = Training(32, 1, attention=attention)
    plan = Plan(SMALL, training, Layout(tp=2, sequence_parallel=True))
    recomputed = recomputed_modules(
        plan.layer_by_spec[SMALL.distinct_specs[0]],
        plan.layer_sharding(SMALL.distinct_specs[0]),
        {RecomputeModule.CORE_ATTENTION},
        early_stop=False,
    )
    names = [operation.kernel.name for operation in recomputed if operation.kernel]
    core = ["scores", "softmax", "context"] if attention is AttentionBackend.STANDARD else ["core"]
    assert [name.removeprefix("attention.") for name in names] == core
    assert all(item.work_type is WorkType.RECOMPUTE for item in recomputed)
    assert not comm_ops(recomputed)


def selective_op_recompute(
    model: TransformerModel, layout: Layout, attention: AttentionBackend = AttentionBackend.FLASH
) -> list[Operation]:
    """What selective op recompute runs again of a layer."""
    training = Training(32, 1, attention=attention)
    plan = Plan(model, training, layout)
    return recomputed_operations(
        plan.layer_by_spec[model.distinct_specs[0]], plan.layer_sharding(plan.model.distinct_specs[0]), early_stop=False
    )


@pytest.mark.parametrize(
    ("attention", "core"),
    [
        (AttentionBackend.FLASH, ["attention.core"]),
        (AttentionBackend.STANDARD, ["attention.scores", "attention.softmax", "attention.context"]),
    ],
)
def test_where_dots_are_saveable_all_but_products_with_weights_is_recomputed(
    attention: AttentionBackend, core: list[str]
) -> None:
    """Backward reads neither the last product nor the residual stream behind it."""
    plan = Plan(SMALL, Training(32, 1, attention=attention), Layout())
    (spec,) = SMALL.distinct_specs
    operations = recomputed_operations(
        plan.layer_by_spec[spec], plan.layer_sharding(spec), early_stop=True, saves_products=True
    )
    assert [kernel.name for kernel in kernels(operations)] == [
        *("attention.norm", "attention.rotary"),
        *core,
        *("attention.residual", "mlp.norm", "mlp.activation"),
    ]


def matmul_columns(operations: list[Operation]) -> dict[str, int]:
    """Columns of the matmuls among some operations."""
    return {kernel.name: kernel.shape.n for kernel in kernels(operations) if isinstance(kernel.shape, MatmulShape)}


ATTENTIONS = (AttentionBackend.FLASH, AttentionBackend.STANDARD)
MEMORY_BOUND = [
    "attention.norm",
    "attention.rotary",
    "attention.residual",
    "mlp.norm",
    "mlp.activation",
    "mlp.residual",
]


@pytest.mark.parametrize("attention", [AttentionBackend.FLASH, AttentionBackend.FLASH2, AttentionBackend.FLASH1])
def test_every_second_of_seven_matmuls_of_a_gated_layer_is_recomputed(attention: AttentionBackend) -> None:
    """Of q, k, v, output, gate, up, down (as torchtitan counts): k (2 heads of 16), the output and up (ffn).

    Memory-bound kernels are recomputed as well, flash attention is not.
    """
    operations = selective_op_recompute(SMALL, Layout(), attention)
    assert matmul_columns(operations) == {"attention.qkv": 32, "attention.out": 64, "mlp.up": 128}
    assert [
        kernel.name for kernel in kernels(operations) if kernel.name not in matmul_columns(operations)
    ] == MEMORY_BOUND
    assert {operation.work_type for operation in operations} == {WorkType.RECOMPUTE}


def test_every_second_of_six_matmuls_of_an_ungated_layer_is_recomputed() -> None:
    """q, k, v, output, up, down: k, the output and down."""
    operations = selective_op_recompute(resize_model(SMALL, mlp=MlpType.GELU), Layout())
    assert matmul_columns(operations) == {"attention.qkv": 32, "attention.out": 64, "mlp.down": 64}


def test_materialized_attention_scores_are_recomputed() -> None:
    """Batched matmuls of scores and of values are no `mm`; all three kernels of the core are recomputed."""
    flash, standard = (
        {kernel.name for kernel in kernels(selective_op_recompute(SMALL, Layout(), attention_backend))}
        for attention_backend in ATTENTIONS
    )
    assert standard - flash == {"attention.scores", "attention.softmax", "attention.context"}
    assert flash < standard


def test_kept_outputs_need_no_repeated_reductions_or_ring() -> None:
    """As in torchtitan, which keeps reduce-scatters, not gathers; flash attention is kept with its ring."""
    sequence_parallel = selective_op_recompute(SMALL, Layout(tp=2, sequence_parallel=True))
    assert [comm_op.name for comm_op in comm_ops(sequence_parallel)] == ["gather input"] * 2
    assert not comm_ops(selective_op_recompute(SMALL, Layout(cp=2)))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_without_backward_overlap_collectives_are_separate(sequence_parallel: bool) -> None:
    overlapped, separate = (
        forward_and_backward(
            layer_plan(Layout(tp=2, sequence_parallel=sequence_parallel, async_tensor_model_parallel_allreduce=overlap))
        )
        for overlap in (True, False)
    )
    assert any(isinstance(operation.body, CommOverlap) for operation in overlapped[1])
    assert not any(isinstance(item.body, CommOverlap) for item in separate[1])
    assert comparable_operations(separate[0]) == comparable_operations(overlapped[0]), "forward is as it was"
    assert Counter(comm_ops(separate[1])) == Counter(comm_ops(overlapped[1]))
    assert Counter(kernels(separate[1])) == Counter(kernels(overlapped[1]))


def test_without_backward_overlap_tensor_overlap_still_chunks_collectives() -> None:
    layout = Layout(tp=2, sequence_parallel=True, tp_comm_overlap=True, async_tensor_model_parallel_allreduce=False)
    _, backward = forward_and_backward(layer_plan(layout))
    assert comm_ops(backward)
    assert {operation.body.chunk_count for operation in backward if isinstance(operation.body, CommOverlap)} == {2}
    assert not any(isinstance(item.body, CommOp) for item in backward)


def test_full_recomputation_repeats_forward_with_its_collectives() -> None:
    """Megatron's checkpoint runs the layer's full forward again, its reductions included."""
    plan = layer_plan(Layout(tp=2, sequence_parallel=True))
    layer = plan.layer_by_spec[plan.model.distinct_specs[0]]
    recomputed = recomputed_forward(layer, plan.layer_sharding(plan.model.distinct_specs[0]), early_stop=False)
    assert [operation.body for operation in recomputed] == [
        forward_operation.body
        for forward_operation in forward_operations(layer, plan.layer_sharding(plan.model.distinct_specs[0]))
    ]
    assert {item.work_type for item in recomputed} == {WorkType.RECOMPUTE}
