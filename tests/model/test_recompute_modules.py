"""What a layer keeps where some of its modules are recomputed, by hand from Megatron-LM's modules."""

from dataclasses import replace

import pytest

from clustersim.model.attention_spec import LatentAttention
from clustersim.model.layer_stack import BlockForm, DenseMlp, LayerGroup, LayerSpec, MlpType, MoeMlp
from clustersim.model.lora import Lora, LoraTarget
from clustersim.model.operators import EXPERTS
from clustersim.model.overheads import Grouping, Overheads
from clustersim.model.presets import load_preset
from clustersim.model.recompute_modules import RecomputeModule
from clustersim.model.training import SelectiveRecompute, Training
from clustersim.model.transformer import TransformerModel
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan
from clustersim.parallel.tensor_parallel import forward_operations, recomputed_modules
from clustersim.program.task import CollectiveType, Operation, TokenDispatcher, WorkType

S, B, TOP_K, FFN, SHARED = 64, 2, 2, 96, 48
BF16_BYTES = 2
ATTENTION = load_preset("llama-tiny").distinct_attentions[0]
H = load_preset("llama-tiny").hidden
RESIDUAL_BYTES = BF16_BYTES * S * B * H  # bytes of the residual stream on a rank
EXPERT_BYTES = BF16_BYTES * S * B * TOP_K * FFN  # of an expert activation's output, for all routed tokens
MOE_MLP = MoeMlp(8, TOP_K, FFN, MlpType.SWIGLU, shared=SHARED)


def two_layer_model(mlp: DenseMlp | MoeMlp, block: BlockForm = BlockForm.PRE_NORM) -> TransformerModel:
    return replace(load_preset("llama-tiny"), stack=(LayerGroup(LayerSpec(ATTENTION, mlp, block), 2),))


def plan_with_recompute(
    spec_model: TransformerModel, *modules: RecomputeModule, layout: Layout | None = None, **training: object
) -> Plan:
    training_config = Training(S, B, B, recompute=SelectiveRecompute(frozenset(modules)), **training)  # type: ignore[arg-type]
    return Plan(spec_model, training_config, layout or Layout())


def dropped_bytes(
    spec_model: TransformerModel, *modules: RecomputeModule, layout: Layout | None = None, **training: object
) -> float:
    """Bytes that a layer does not keep."""
    layer = plan_with_recompute(spec_model, *modules, layout=layout, **training).layer_by_spec[
        spec_model.distinct_specs[0]
    ]
    return layer.saved_bytes - layer.saved_bytes_with_recompute(frozenset(modules))


def recomputed_operations(lowered_plan: Plan, *modules: RecomputeModule, early_stop: bool = False) -> list[Operation]:
    spec = lowered_plan.model.distinct_specs[0]
    return recomputed_modules(
        lowered_plan.layer_by_spec[spec], lowered_plan.layer_sharding(spec), set(modules), early_stop=early_stop
    )


def operation_names(operations: list[Operation]) -> list[str]:
    """Kernels and collectives in order."""
    collective_names = (operation.comm_op.collective.value if operation.comm_op else "" for operation in operations)
    return [
        item.kernel.name if item.kernel else collective_name
        for item, collective_name in zip(operations, collective_names, strict=True)
    ]


DENSE, MOE = two_layer_model(DenseMlp(FFN, MlpType.SWIGLU)), two_layer_model(MOE_MLP)
GATED_BYTES = 3 * BF16_BYTES * S * B  # of a dense SwiGLU MLP of width one: gate, up and the input of the last matmul


@pytest.mark.parametrize(
    ("modules", "bytes_dropped"),
    [
        (
            [RecomputeModule.LAYERNORM],
            2 * RESIDUAL_BYTES,
        ),  # the norms' outputs, which attention and MLP read; their inputs stay
        ([RecomputeModule.MLP], GATED_BYTES * FFN),  # the input of the MLP stays
        (
            [RecomputeModule.MLP, RecomputeModule.LAYERNORM],
            GATED_BYTES * FFN + 2 * RESIDUAL_BYTES,
        ),  # which is now recomputed, too
        ([RecomputeModule.MOE], 0),
        ([RecomputeModule.MOE_ACTIVATION], 0),
        ([RecomputeModule.SHARED_EXPERTS], 0),
    ],
)
def test_dropped_bytes_of_a_dense_layer(modules: list[RecomputeModule], bytes_dropped: float) -> None:
    assert dropped_bytes(DENSE, *modules) == bytes_dropped


def test_dropped_bytes_of_a_moe_layer() -> None:
    """The experts' input (top-k copies of each token), gate and up (twice) and the last matmul's input.

    In addition what routing keeps, and the shared experts; the router's input is the layer's and stays. Routing
    keeps scores in FP32 and one byte for whether a token goes to an expert, an INT32 map of its routed tokens
    (two for each expert, and the count), and each routed token's probability in FP32, the recomputed activation's
    input.
    """
    expert_bytes, shared_bytes = TOP_K * RESIDUAL_BYTES + 3 * EXPERT_BYTES, GATED_BYTES * SHARED
    router_bytes = S * B * ((4 + 1) * MOE_MLP.experts + 4 * (2 * MOE_MLP.experts + 1) + 4 * TOP_K)
    assert dropped_bytes(MOE, RecomputeModule.MOE_ACTIVATION) == EXPERT_BYTES
    assert dropped_bytes(MOE, RecomputeModule.SHARED_EXPERTS) == shared_bytes
    assert (
        dropped_bytes(MOE, RecomputeModule.MOE_ACTIVATION, RecomputeModule.SHARED_EXPERTS)
        == EXPERT_BYTES + shared_bytes
    )
    assert dropped_bytes(MOE, RecomputeModule.MOE) == expert_bytes + router_bytes + shared_bytes
    assert (
        dropped_bytes(MOE, *set(RecomputeModule) - {RecomputeModule.CORE_ATTENTION})
        == expert_bytes + router_bytes + shared_bytes + 2 * RESIDUAL_BYTES
    )


@pytest.mark.parametrize("block", BlockForm)
def test_each_norm_before_a_branch_is_dropped_once(block: BlockForm) -> None:
    norm_count = {BlockForm.POST_NORM: 0, BlockForm.PARALLEL: 1, BlockForm.PARALLEL_FUSED: 1}.get(block, 2)
    assert (
        dropped_bytes(two_layer_model(DenseMlp(FFN, MlpType.SWIGLU), block), RecomputeModule.LAYERNORM)
        == norm_count * RESIDUAL_BYTES
    )


@pytest.mark.parametrize("block", BlockForm)
def test_a_recomputed_mlp_keeps_its_input_once_however_branches_are_joined(block: BlockForm) -> None:
    assert (
        dropped_bytes(two_layer_model(DenseMlp(FFN, MlpType.SWIGLU), block), RecomputeModule.MLP) == GATED_BYTES * FFN
    )


def test_a_norm_fused_into_the_linear_layer_is_the_mlps() -> None:
    """Transformer Engine's: dense layers recompute nothing as `layernorm`, and `mlp` keeps the norm's input."""
    fused_norm = {"overheads": Overheads(norm_in_linear=True)}
    assert dropped_bytes(DENSE, RecomputeModule.LAYERNORM, **fused_norm) == 0
    assert dropped_bytes(DENSE, RecomputeModule.MLP, **fused_norm) == GATED_BYTES * FFN + RESIDUAL_BYTES
    assert (
        dropped_bytes(MOE, RecomputeModule.LAYERNORM, **fused_norm) == RESIDUAL_BYTES
    )  # before a MoE layer it is a separate kernel
    assert (
        operation_names(recomputed_operations(plan_with_recompute(DENSE, **fused_norm), RecomputeModule.MLP))[0]
        == "mlp.norm"
    )


LATENT = LatentAttention(heads=4, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
HEADS = BF16_BYTES * S * B * 4 * (2 * 12 + 6)  # queries, keys and values of all heads


@pytest.mark.parametrize(
    ("attention", "within", "bytes_dropped"),
    [
        (LATENT, False, HEADS),  # the module reads the normalized latent vectors
        (LATENT, True, HEADS + BF16_BYTES * S * B * (24 + 16)),  # the norms are fused into its linear layers
        (replace(LATENT, q_lora_rank=None), False, HEADS),  # the input, from which queries are computed, stays
    ],
)
def test_dropped_bytes_of_mla_up_projections(attention: LatentAttention, within: bool, bytes_dropped: float) -> None:
    spec = LayerSpec(attention, DenseMlp(FFN, MlpType.SWIGLU))
    mla_model = replace(DENSE, stack=(LayerGroup(spec, 1),))
    overheads = {"overheads": Overheads(norm_in_linear=within)}
    assert dropped_bytes(mla_model, RecomputeModule.MLA_UP_PROJECTION, **overheads) == bytes_dropped
    assert dropped_bytes(
        mla_model, RecomputeModule.MLA_UP_PROJECTION, RecomputeModule.LAYERNORM, **overheads
    ) == bytes_dropped + RESIDUAL_BYTES * (1 if within else 2)
    norms = ["attention.query_norm", "attention.kv_norm"] if within and attention.q_lora_rank else []
    kernels = [
        name
        for name in operation_names(
            recomputed_operations(plan_with_recompute(mla_model, **overheads), RecomputeModule.MLA_UP_PROJECTION)
        )
        if name != "all_gather"
    ]
    assert kernels == [*norms, "attention.query_up", "attention.kv_up", "attention.rotary"]


def test_experts_in_a_loop_do_the_work_of_a_grouped_gemm() -> None:
    """As many matmuls as experts, with the same total FLOP and bytes."""
    loop, grouped = (
        plan_with_recompute(MOE, overheads=Overheads(grouping=grouping)).layer_by_spec[MOE.distinct_specs[0]]
        for grouping in (Grouping.LOOP, Grouping.STREAMS)
    )
    for loop_operator, grouped_operator in zip(loop.operators, grouped.operators, strict=True):
        matmul_count = MOE_MLP.experts if loop_operator.parameter_group == EXPERTS else 1
        assert (len(loop_operator.forward), len(grouped_operator.forward)) == (
            matmul_count * len(grouped_operator.forward),
            len(grouped_operator.forward),
        )
        assert sum(kernel.flops for kernel in loop_operator.forward) == pytest.approx(
            sum(item.flops for item in grouped_operator.forward)
        )
        assert sum(element.bytes for element in loop_operator.forward) == pytest.approx(
            sum(entry.bytes for entry in grouped_operator.forward)
        )


def test_frozen_layers_keep_what_a_recomputed_module_reads() -> None:
    """A frozen MLP keeps no inputs for weight gradients; the module's input stays, for it is recomputed."""
    frozen_layer = plan_with_recompute(DENSE, lora=Lora(1, (LoraTarget.Q,), alpha=1.0)).layer_by_spec[
        DENSE.distinct_specs[0]
    ]
    mlp_operators = [operator for operator in frozen_layer.operators if operator.is_in_modules({RecomputeModule.MLP})]
    assert (
        sum(mlp_operator.saved_bytes for mlp_operator in mlp_operators) == GATED_BYTES * FFN - BF16_BYTES * S * B * FFN
    )  # gate and up
    assert sum(item.saved_bytes_with_recompute({RecomputeModule.MLP}) for item in mlp_operators) == RESIDUAL_BYTES


def test_a_recomputed_mlp_gathers_and_scatters_again() -> None:
    parallel_plan = plan_with_recompute(DENSE, layout=Layout(tp=2, sequence_parallel=True))
    operations = recomputed_operations(parallel_plan, RecomputeModule.MLP)
    assert all(operation.work_type is WorkType.RECOMPUTE for operation in operations)
    gather, scatter = CollectiveType.ALL_GATHER.value, CollectiveType.REDUCE_SCATTER.value
    assert operation_names(operations) == [gather, "mlp.up", "mlp.activation", "mlp.down", scatter]
    assert operation_names(recomputed_operations(parallel_plan, RecomputeModule.MLP, early_stop=True)) == [
        gather,
        "mlp.up",
        "mlp.activation",
    ]
    assert operation_names(recomputed_operations(parallel_plan, RecomputeModule.LAYERNORM, early_stop=True)) == [
        "attention.norm",
        "mlp.norm",
    ]


@pytest.mark.parametrize("dispatcher", TokenDispatcher)
def test_a_recomputed_moe_layer_dispatches_and_combines_again(dispatcher: TokenDispatcher) -> None:
    """All that forward does between the MoE layer's norm and its residual sum, collectives included."""
    moe_plan = plan_with_recompute(MOE, layout=Layout(dp=4, ep=4, dispatcher=dispatcher))
    spec = MOE.distinct_specs[0]
    forward_bodies = [
        forward_operation.body
        for forward_operation in forward_operations(moe_plan.layer_by_spec[spec], moe_plan.layer_sharding(spec))
    ]
    recomputed = recomputed_operations(moe_plan, RecomputeModule.MOE)
    assert all(operation.work_type is WorkType.RECOMPUTE for operation in recomputed)
    assert [item.body for item in recomputed] == forward_bodies[-len(recomputed) - 1 : -1]
    assert (operation_names(recomputed)[0], operation_names(recomputed)[-1]) == ("mlp.router", "mlp.sum")
    assert sum(element.comm_op is not None for element in recomputed) >= 2


def test_moe_submodules_are_recomputed_separately_and_within_the_layer() -> None:
    moe_plan = plan_with_recompute(MOE, layout=Layout(dp=4, ep=4))
    full_names = operation_names(recomputed_operations(moe_plan, RecomputeModule.MOE))
    assert operation_names(recomputed_operations(moe_plan, RecomputeModule.MOE, RecomputeModule.MOE_ACTIVATION)) == [
        *full_names,
        "experts.activation",
    ]
    assert operation_names(recomputed_operations(moe_plan, RecomputeModule.MOE_ACTIVATION)) == ["experts.activation"]
    assert operation_names(recomputed_operations(moe_plan, RecomputeModule.SHARED_EXPERTS)) == [
        "shared.up",
        "shared.activation",
        "shared.down",
    ]
