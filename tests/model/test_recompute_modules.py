"""What a layer keeps where some of its modules are recomputed, by hand from Megatron-LM's modules."""

from dataclasses import replace

import pytest

from clustersim.model.layer_stack import BlockForm, DenseMlp, LatentAttention, LayerGroup, LayerSpec, MlpType, MoeMlp
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
BF16 = 2
ATTENTION = load_preset("llama-tiny").distinct_attentions[0]
H = load_preset("llama-tiny").hidden
X = BF16 * S * B * H  # bytes of the residual stream on a rank
WIDE = BF16 * S * B * TOP_K * FFN  # of what an expert's activation makes, of all tokens and their experts
ROUTED = MoeMlp(8, TOP_K, FFN, MlpType.SWIGLU, shared=SHARED)


def model(mlp: DenseMlp | MoeMlp, block: BlockForm = BlockForm.PRE_NORM) -> TransformerModel:
    return replace(load_preset("llama-tiny"), stack=(LayerGroup(LayerSpec(ATTENTION, mlp, block), 2),))


def plan(of: TransformerModel, *modules: RecomputeModule, layout: Layout | None = None, **training: object) -> Plan:
    asked = Training(S, B, B, recompute=SelectiveRecompute(frozenset(modules)), **training)  # type: ignore[arg-type]
    return Plan(of, asked, layout or Layout())


def dropped(of: TransformerModel, *modules: RecomputeModule, layout: Layout | None = None, **training: object) -> float:
    """Bytes that a layer does not keep."""
    layer = plan(of, *modules, layout=layout, **training).layer_by_spec[of.distinct_specs[0]]
    return layer.saved_bytes - layer.saved_bytes_with_recompute(frozenset(modules))


def again(made: Plan, *modules: RecomputeModule, early_stop: bool = False) -> list[Operation]:
    spec = made.model.distinct_specs[0]
    return recomputed_modules(made.layer_by_spec[spec], made.layer_sharding(spec), set(modules), early_stop=early_stop)


def names(operations: list[Operation]) -> list[str]:
    """Kernels and collectives, in their order."""
    exchanges = (operation.comm_op.collective.value if operation.comm_op else "" for operation in operations)
    return [item.kernel.name if item.kernel else sent for item, sent in zip(operations, exchanges, strict=True)]


DENSE, MIXTURE = model(DenseMlp(FFN, MlpType.SWIGLU)), model(ROUTED)
GATED = 3 * BF16 * S * B  # of a dense SwiGLU MLP of width one: gate, up and the input of the last product


@pytest.mark.parametrize(
    ("modules", "bytes_dropped"),
    [
        (
            [RecomputeModule.LAYERNORM],
            2 * X,
        ),  # what the norms make, which attention and MLP read; their own inputs stay
        ([RecomputeModule.MLP], GATED * FFN),  # the input of the MLP stays
        ([RecomputeModule.MLP, RecomputeModule.LAYERNORM], GATED * FFN + 2 * X),  # which now is made again, too
        ([RecomputeModule.MOE], 0),
        ([RecomputeModule.MOE_ACTIVATION], 0),
        ([RecomputeModule.SHARED_EXPERTS], 0),
    ],
)
def test_what_a_dense_layer_drops(modules: list[RecomputeModule], bytes_dropped: float) -> None:
    assert dropped(DENSE, *modules) == bytes_dropped


def test_what_a_mixture_drops() -> None:
    """The experts' input (a row for each expert of a token), gate and up (twice) and the last product's input.

    Beside it what routing keeps, and the shared experts; the router's input is the mixture's and stays. Routing keeps
    scores in FP32 and a byte for whether a token goes to an expert, an INT32 map of its rows (two for each expert, and
    how many), and each row's probability in FP32, which is the recomputed activation's input.
    """
    experts, shared = TOP_K * X + 3 * WIDE, GATED * SHARED
    logits = S * B * ((4 + 1) * ROUTED.experts + 4 * (2 * ROUTED.experts + 1) + 4 * TOP_K)
    assert dropped(MIXTURE, RecomputeModule.MOE_ACTIVATION) == WIDE
    assert dropped(MIXTURE, RecomputeModule.SHARED_EXPERTS) == shared
    assert dropped(MIXTURE, RecomputeModule.MOE_ACTIVATION, RecomputeModule.SHARED_EXPERTS) == WIDE + shared
    assert dropped(MIXTURE, RecomputeModule.MOE) == experts + logits + shared
    assert (
        dropped(MIXTURE, *set(RecomputeModule) - {RecomputeModule.CORE_ATTENTION}) == experts + logits + shared + 2 * X
    )


@pytest.mark.parametrize("block", BlockForm)
def test_each_norm_before_a_branch_is_dropped_once(block: BlockForm) -> None:
    made = {BlockForm.POST_NORM: 0, BlockForm.PARALLEL: 1}.get(block, 2)
    assert dropped(model(DenseMlp(FFN, MlpType.SWIGLU), block), RecomputeModule.LAYERNORM) == made * X


@pytest.mark.parametrize("block", BlockForm)
def test_a_recomputed_mlp_keeps_its_input_once_however_branches_are_joined(block: BlockForm) -> None:
    assert dropped(model(DenseMlp(FFN, MlpType.SWIGLU), block), RecomputeModule.MLP) == GATED * FFN


def test_a_norm_within_the_linear_layer_behind_it_is_the_mlps() -> None:
    """Transformer Engine's: nothing of plain layers is recomputed as `layernorm`, and `mlp` keeps the norm's input."""
    within = {"overheads": Overheads(norm_in_linear=True)}
    assert dropped(DENSE, RecomputeModule.LAYERNORM, **within) == 0
    assert dropped(DENSE, RecomputeModule.MLP, **within) == GATED * FFN + X
    assert dropped(MIXTURE, RecomputeModule.LAYERNORM, **within) == X  # before the mixture it is by itself
    assert names(again(plan(DENSE, **within), RecomputeModule.MLP))[0] == "mlp.norm"


LATENT = LatentAttention(heads=4, query_rank=24, kv_rank=16, nope=8, rope=4, value_dim=6)
HEADS = BF16 * S * B * 4 * (2 * 12 + 6)  # queries, keys and values of all heads


@pytest.mark.parametrize(
    ("attention", "within", "bytes_dropped"),
    [
        (LATENT, False, HEADS),  # the latent vectors behind their norms are what the module reads
        (LATENT, True, HEADS + BF16 * S * B * (24 + 16)),  # the norms are within its linear layers
        (replace(LATENT, query_rank=None), False, HEADS),  # the input, which makes the queries, stays
    ],
)
def test_what_latent_attentions_up_projections_drop(
    attention: LatentAttention, within: bool, bytes_dropped: float
) -> None:
    spec = LayerSpec(attention, DenseMlp(FFN, MlpType.SWIGLU))
    made = replace(DENSE, stack=(LayerGroup(spec, 1),))
    overheads = {"overheads": Overheads(norm_in_linear=within)}
    assert dropped(made, RecomputeModule.MLA_UP_PROJECTION, **overheads) == bytes_dropped
    assert dropped(
        made, RecomputeModule.MLA_UP_PROJECTION, RecomputeModule.LAYERNORM, **overheads
    ) == bytes_dropped + X * (1 if within else 2)
    norms = ["attention.query_norm", "attention.kv_norm"] if within and attention.query_rank else []
    kernels = [
        name
        for name in names(again(plan(made, **overheads), RecomputeModule.MLA_UP_PROJECTION))
        if name != "all_gather"
    ]
    assert kernels == [*norms, "attention.query_up", "attention.kv_up", "attention.rotary"]


def test_experts_in_a_loop_do_what_a_grouped_product_does() -> None:
    """As many products as experts, of the same work, and what they move with it."""
    loop, grouped = (
        plan(MIXTURE, overheads=Overheads(grouping=item)).layer_by_spec[MIXTURE.distinct_specs[0]]
        for item in (Grouping.LOOP, Grouping.STREAMS)
    )
    for one, other in zip(loop.operators, grouped.operators, strict=True):
        many = ROUTED.experts if one.parameter_group == EXPERTS else 1
        assert (len(one.forward), len(other.forward)) == (many * len(other.forward), len(other.forward))
        assert sum(kernel.flops for kernel in one.forward) == pytest.approx(
            sum(element.flops for element in other.forward)
        )
        assert sum(entry.bytes for entry in one.forward) == pytest.approx(sum(each.bytes for each in other.forward))


def test_frozen_layers_keep_what_a_recomputed_module_reads() -> None:
    """A frozen MLP keeps no input for its products' gradients; that of the whole stays, for it is run again."""
    kept = plan(DENSE, lora=Lora(1, (LoraTarget.Q,), alpha=1.0)).layer_by_spec[DENSE.distinct_specs[0]]
    of_mlp = [operator for operator in kept.operators if operator.is_in_modules({RecomputeModule.MLP})]
    assert sum(item.saved_bytes for item in of_mlp) == GATED * FFN - BF16 * S * B * FFN  # gate and up
    assert sum(element.saved_bytes_with_recompute({RecomputeModule.MLP}) for element in of_mlp) == X


def test_a_recomputed_mlp_gathers_and_scatters_again() -> None:
    made = plan(DENSE, layout=Layout(tp=2, sequence_parallel=True))
    operations = again(made, RecomputeModule.MLP)
    assert all(operation.work_type is WorkType.RECOMPUTE for operation in operations)
    gather, scatter = CollectiveType.ALL_GATHER.value, CollectiveType.REDUCE_SCATTER.value
    assert names(operations) == [gather, "mlp.up", "mlp.activation", "mlp.down", scatter]
    assert names(again(made, RecomputeModule.MLP, early_stop=True)) == [gather, "mlp.up", "mlp.activation"]
    assert names(again(made, RecomputeModule.LAYERNORM, early_stop=True)) == ["attention.norm", "mlp.norm"]


@pytest.mark.parametrize("dispatcher", TokenDispatcher)
def test_a_recomputed_mixture_dispatches_and_combines_again(dispatcher: TokenDispatcher) -> None:
    """All that forward does between the mixture's norm and its sum with the residual stream, exchanges included."""
    made = plan(MIXTURE, layout=Layout(dp=4, ep=4, dispatcher=dispatcher))
    spec = MIXTURE.distinct_specs[0]
    ahead = [
        forward_operation.body
        for forward_operation in forward_operations(made.layer_by_spec[spec], made.layer_sharding(spec))
    ]
    mixture = again(made, RecomputeModule.MOE)
    assert all(operation.work_type is WorkType.RECOMPUTE for operation in mixture)
    assert [item.body for item in mixture] == ahead[-len(mixture) - 1 : -1]
    assert (names(mixture)[0], names(mixture)[-1]) == ("mlp.router", "mlp.sum")
    assert sum(element.comm_op is not None for element in mixture) >= 2


def test_modules_of_a_mixture_are_run_again_by_themselves_and_within_it_once_more() -> None:
    made = plan(MIXTURE, layout=Layout(dp=4, ep=4))
    whole = names(again(made, RecomputeModule.MOE))
    assert names(again(made, RecomputeModule.MOE, RecomputeModule.MOE_ACTIVATION)) == [*whole, "experts.activation"]
    assert names(again(made, RecomputeModule.MOE_ACTIVATION)) == ["experts.activation"]
    assert names(again(made, RecomputeModule.SHARED_EXPERTS)) == ["shared.up", "shared.activation", "shared.down"]
