"""Do layout and training fit a block that several layers share? Each problem in one sentence.

Its uses read the embedding, and add gradients to the same weights: pipeline ranks would have to send the one, and to
hold and reduce the others, which no framework that trains such models does.
"""

from collections.abc import Iterator

from clustersim.scenario.resolved import ResolvedScenario
from clustersim.scenario.validation_rules.remedies import Problem, Remedy


def check_shared_blocks(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that one rank has all uses of a shared block, whose weights are trained and gathered as a whole."""
    model, layout = scenario.model, scenario.layout
    if all(spec.shared is None for spec in model.distinct_specs):
        return
    if layout.pp > 1:
        yield Problem(
            f"layout.pp: {layout.pp} stages split layers of {model.name} that share a block of attention and an MLP",
            Remedy("layout.pp", ((1,),)),
        )
    settings = {"training.lora": scenario.training.lora is not None}
    settings["layout.data: deepspeed_zero3"] = layout.data.gathers_single_parameters
    for setting in (name for name, is_set in settings.items() if is_set):
        yield f"{setting} with the block that layers of {model.name} share is not modelled; leave it out"
