"""Which recomputation is refused, has no effect, or only costs time?"""

from collections.abc import Iterator

from clustersim.model.recompute_modules import RecomputeModule
from clustersim.model.training import AttentionBackend, SelectiveRecompute
from clustersim.parallel.plan import Plan
from clustersim.scenario.resolved import ResolvedScenario


def useless_core_recompute(scenario: ResolvedScenario) -> Iterator[str]:
    """Warn about recomputing the attention core with flash attention, which does not store its scores."""
    training = scenario.training
    match training.recompute:
        case SelectiveRecompute(modules) if (
            RecomputeModule.CORE_ATTENTION in modules and training.attention is not AttentionBackend.STANDARD
        ):
            name = "selective" if modules == SelectiveRecompute().modules else RecomputeModule.CORE_ATTENTION.value
            yield f"training.recompute {name} only costs time with flash attention, which keeps no scores to recompute"


def check_mla_recompute(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that MLA projections are recomputed only in models with MLA; Megatron-LM refuses it, too."""
    recompute, model = scenario.training.recompute, scenario.model
    if RecomputeModule.MLA_UP_PROJECTION not in recompute.modules:
        return
    if not model.uses_latent_attention:
        allowed = ", ".join(
            recompute_module.value
            for recompute_module in RecomputeModule
            if recompute_module is not RecomputeModule.MLA_UP_PROJECTION
        )
        yield (
            f"training.recompute.modules: {RecomputeModule.MLA_UP_PROJECTION.value} is of latent attention, which "
            f"{model.name} has not; write any of {allowed}"
        )


def absent_recompute_modules(scenario: ResolvedScenario) -> Iterator[str]:
    """Warn about recomputed modules that no layer has; Megatron-LM accepts and ignores them."""
    recompute = scenario.training.recompute
    if not recompute.modules:
        return
    layers = Plan(scenario.model, scenario.training, scenario.layout).layer_by_spec.values()
    present_modules = {
        membership.module for layer in layers for operator in layer.operators for membership in operator.memberships
    }
    for module in (
        recompute_module
        for recompute_module in RecomputeModule
        if recompute_module in recompute.modules - present_modules
    ):
        qualifier = " of its own" if module is RecomputeModule.LAYERNORM else ""
        present_text = ", ".join(module.value for module in RecomputeModule if module in present_modules)
        yield (
            f"training.recompute.modules: {module.value} has no effect: no layer of {scenario.model.name} has such a "
            f"module{qualifier}; it has {present_text}"
        )
