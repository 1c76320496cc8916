"""Do kernels, number format and adapters fit attention to selected keys? Each problem in one sentence."""

from collections.abc import Iterator

from clustersim.model.optimizers import MatrixOptimizer, Optimizer
from clustersim.model.training import AttentionBackend
from clustersim.scenario.resolved import ResolvedScenario
from clustersim.scenario.validation_rules.remedies import Problem, Remedy


def check_selected_keys(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that attention to selected keys runs by its own kernels, in the activation format, without adapters."""
    training = scenario.training
    mixer = next((mixer for mixer in scenario.model.distinct_mixers if mixer.saves_by_selection), None)
    if mixer is None:
        return
    if training.attention is AttentionBackend.STANDARD:
        yield Problem(
            f"training.attention: {AttentionBackend.STANDARD.value} computes the scores of all keys, and "
            f"{scenario.model.name} has {mixer.label}",
            Remedy("training.attention", ((AttentionBackend.FLASH.value,),)),
        )
    if training.recipe.attention is not None:
        yield (
            f"training.precision.attention: {training.recipe.attention.value}, but {mixer.label} is modelled in "
            f"{training.recipe.activations.value} alone; leave it out"
        )
    if training.lora is not None and mixer.has_indexer:
        yield f"training.lora: adapters of {mixer.label}, whose indexer learns by itself, are not modelled"
    if scenario.model.trains_indexer_only and isinstance(training.optimizer, MatrixOptimizer):
        yield Problem(
            f"training.optimizer: {training.optimizer.name} of an indexer that is trained alone is not modelled",
            Remedy("training.optimizer", ((Optimizer.ADAM.value,),)),
        )
