"""What a layer keeps where some of its modules are recomputed, by hand from Megatron-LM's modules."""

from dataclasses import replace

import pytest

from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan
from clustersim.parallel.tensor import modules_again
from clustersim.program.task import Collective, Operation, Work
from clustersim.workload.lora import Lora, Target
from clustersim.workload.modules import Module
from clustersim.workload.overheads import Overheads
from clustersim.workload.presets import preset
from clustersim.workload.stack import BlockForm, DenseMlp, LayerRun, LayerSpec, Mlp, RoutedMlp
from clustersim.workload.training import SelectiveRecompute, Training
from clustersim.workload.transformer import Model

S, B, TOP_K, FFN, SHARED = 64, 2, 2, 96, 48
BF16 = 2
ATTENTION = preset("llama-tiny").attentions[0]
H = preset("llama-tiny").hidden
X = BF16 * S * B * H  # bytes of the residual stream on a rank
WIDE = BF16 * S * B * TOP_K * FFN  # of what an expert's activation makes, of all tokens and their experts
ROUTED = RoutedMlp(8, TOP_K, FFN, Mlp.SWIGLU, shared=SHARED)


def model(mlp: DenseMlp | RoutedMlp, block: BlockForm = BlockForm.PRE_NORM) -> Model:
    return replace(preset("llama-tiny"), stack=(LayerRun(LayerSpec(ATTENTION, mlp, block), 2),))


def plan(of: Model, *modules: Module, layout: Layout | None = None, **training: object) -> Plan:
    asked = Training(S, B, B, recompute=SelectiveRecompute(frozenset(modules)), **training)  # type: ignore[arg-type]
    return Plan(of, asked, layout or Layout())


def dropped(of: Model, *modules: Module, layout: Layout | None = None, **training: object) -> float:
    """Bytes that a layer does not keep."""
    layer = plan(of, *modules, layout=layout, **training).layers[of.specs[0]]
    return layer.kept - layer.kept_beside(frozenset(modules))


def again(made: Plan, *modules: Module, early_stop: bool = False) -> list[Operation]:
    spec = made.model.specs[0]
    return modules_again(made.layers[spec], made.sharding(spec), set(modules), early_stop=early_stop)


def names(operations: list[Operation]) -> list[str]:
    """Kernels and collectives, in their order."""
    exchanges = (each.exchange.collective.value if each.exchange else "" for each in operations)
    return [each.kernel.name if each.kernel else sent for each, sent in zip(operations, exchanges, strict=True)]


DENSE, MIXTURE = model(DenseMlp(FFN, Mlp.SWIGLU)), model(ROUTED)
GATED = 3 * BF16 * S * B  # of a dense SwiGLU MLP of width one: gate, up and the input of the last product


@pytest.mark.parametrize(
    ("modules", "bytes_dropped"),
    [
        ([Module.LAYERNORM], 2 * X),  # what the norms make, which attention and MLP read; their own inputs stay
        ([Module.MLP], GATED * FFN),  # the input of the MLP stays
        ([Module.MLP, Module.LAYERNORM], GATED * FFN + 2 * X),  # which now is made again, too
        ([Module.MIXTURE], 0),
        ([Module.EXPERTS_ACTIVATION], 0),
        ([Module.SHARED_EXPERTS], 0),
    ],
)
def test_what_a_dense_layer_drops(modules: list[Module], bytes_dropped: float) -> None:
    assert dropped(DENSE, *modules) == bytes_dropped


def test_what_a_mixture_drops() -> None:
    """The experts' input (a row for each expert of a token), gate and up (twice) and the last product's input.

    Beside it the logits in FP32, and the shared experts; the router's input is the mixture's and stays.
    """
    experts, logits, shared = TOP_K * X + 3 * WIDE, 4 * S * B * ROUTED.experts, GATED * SHARED
    assert dropped(MIXTURE, Module.EXPERTS_ACTIVATION) == WIDE
    assert dropped(MIXTURE, Module.SHARED_EXPERTS) == shared
    assert dropped(MIXTURE, Module.EXPERTS_ACTIVATION, Module.SHARED_EXPERTS) == WIDE + shared
    assert dropped(MIXTURE, Module.MIXTURE) == experts + logits + shared
    assert dropped(MIXTURE, *set(Module) - {Module.CORE}) == experts + logits + shared + 2 * X


@pytest.mark.parametrize("block", BlockForm)
def test_each_norm_before_a_branch_is_dropped_once(block: BlockForm) -> None:
    made = {BlockForm.POST_NORM: 0, BlockForm.PARALLEL: 1}.get(block, 2)
    assert dropped(model(DenseMlp(FFN, Mlp.SWIGLU), block), Module.LAYERNORM) == made * X


def test_a_norm_within_the_linear_layer_behind_it_is_the_mlps() -> None:
    """Transformer Engine's: nothing of plain layers is recomputed as `layernorm`, and `mlp` keeps the norm's input."""
    within = {"overheads": Overheads(norm_in_linear=True)}
    assert dropped(DENSE, Module.LAYERNORM, **within) == 0
    assert dropped(DENSE, Module.MLP, **within) == GATED * FFN + X
    assert dropped(MIXTURE, Module.LAYERNORM, **within) == X  # before the mixture it is by itself
    assert names(again(plan(DENSE, **within), Module.MLP))[0] == "mlp.norm"


def test_frozen_layers_keep_what_a_recomputed_module_reads() -> None:
    """A frozen MLP keeps no input for its products' gradients; that of the whole stays, for it is run again."""
    kept = plan(DENSE, lora=Lora(1, (Target.Q,), alpha=1.0)).layers[DENSE.specs[0]]
    of_mlp = [each for each in kept.operators if each.inside({Module.MLP})]
    assert sum(each.kept for each in of_mlp) == GATED * FFN - BF16 * S * B * FFN  # gate and up
    assert sum(each.kept_beside({Module.MLP}) for each in of_mlp) == X


def test_a_recomputed_mlp_gathers_and_scatters_again() -> None:
    made = plan(DENSE, layout=Layout(tp=2, sequence_parallel=True))
    operations = again(made, Module.MLP)
    assert all(each.work is Work.RECOMPUTE for each in operations)
    gather, scatter = Collective.ALL_GATHER.value, Collective.REDUCE_SCATTER.value
    assert names(operations) == [gather, "mlp.up", "mlp.activation", "mlp.down", scatter]
    assert names(again(made, Module.MLP, early_stop=True)) == [gather, "mlp.up", "mlp.activation"]
    assert names(again(made, Module.LAYERNORM, early_stop=True)) == ["attention.norm", "mlp.norm"]


def test_a_recomputed_mixture_dispatches_and_combines_again() -> None:
    made = plan(MIXTURE, layout=Layout(dp=4, ep=4))
    forward = names(again(made, Module.MIXTURE))
    to_all = Collective.ALL_TO_ALL.value
    assert forward.count(to_all) == 2
    assert forward.index("mlp.permute") < forward.index(to_all) < forward.index("experts.up")
    assert forward[0] == "mlp.router" and forward[-1] == "mlp.sum"
    inner = again(made, Module.MIXTURE, Module.EXPERTS_ACTIVATION)
    assert names(inner) == [*forward, "experts.activation"]  # of the second forward dropped, so made once more
    assert names(again(made, Module.EXPERTS_ACTIVATION)) == ["experts.activation"]
    assert names(again(made, Module.SHARED_EXPERTS)) == ["shared.up", "shared.activation", "shared.down"]
