"""Which recomputation is refused, has no effect, or only costs time?"""

from collections.abc import Iterator

from clustersim.model.layer_stack import LatentAttention
from clustersim.model.recompute_modules import Module
from clustersim.model.training import Attention, SelectiveRecompute
from clustersim.parallel.plan import Plan
from clustersim.scenario.resolved import Setup


def nothing_to_drop(scenario: Setup) -> Iterator[str]:
    """The attention core, where flash attention keeps nothing of it."""
    training = scenario.training
    match training.recompute:
        case SelectiveRecompute(modules) if Module.CORE in modules and training.attention is not Attention.STANDARD:
            name = "selective" if modules == SelectiveRecompute().modules else Module.CORE.value
            yield f"training.recompute {name} only costs time with flash attention, which keeps no scores to recompute"


def check_modules(scenario: Setup) -> Iterator[str]:
    """Whether there is latent attention whose projections are to be recomputed; Megatron-LM refuses it, too."""
    recompute, model = scenario.training.recompute, scenario.model
    if not isinstance(recompute, SelectiveRecompute) or Module.LATENT_UP not in recompute.modules:
        return
    if not any(isinstance(attention, LatentAttention) for attention in model.attentions):
        legal = ", ".join(module.value for module in Module if module is not Module.LATENT_UP)
        yield (
            f"training.recompute.modules: {Module.LATENT_UP.value} is of latent attention, which {model.name} has not; "
            f"{legal} fit"
        )


def modules_that_nobody_has(scenario: Setup) -> Iterator[str]:
    """Megatron-LM runs with them, too, and recomputes nothing for them."""
    recompute = scenario.training.recompute
    if not isinstance(recompute, SelectiveRecompute):
        return
    layers = Plan(scenario.model, scenario.training, scenario.layout).layer_by_spec.values()
    there = {item.module for layer in layers for operator in layer.operators for item in operator.within}
    for module in (element for element in Module if element in recompute.modules - there):
        within = " of its own" if module is Module.LAYERNORM else ""
        legal = ", ".join(entry.value for entry in Module if entry in there)
        yield (
            f"training.recompute.modules: {module.value} has no effect: no layer of {scenario.model.name} has such a "
            f"module{within}; it has {legal}"
        )
