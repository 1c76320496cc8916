"""Do layout and training fit mixers that read what the embedding or the first layer made? Each problem in one sentence.

Pipeline ranks would have to send that on, and those that share a block to hold its weights and reduce their gradients,
which no framework that trains such models does.
"""

from collections.abc import Iterator

from clustersim.model.shared_block_spec import SharedBlock
from clustersim.scenario.resolved import ResolvedScenario
from clustersim.scenario.validation_rules.remedies import Problem, Remedy


def check_first_layer_readers(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that one rank has all layers, and that a shared block's weights are trained and gathered as a whole."""
    model, layout = scenario.model, scenario.layout
    for mixer in (mixer for mixer in model.distinct_mixers if mixer.reads_first_layer and layout.pp > 1):
        yield Problem(
            f"layout.pp: {layout.pp} stages split {model.name}, whose layers with {mixer.label} read what is before "
            "the first one",
            Remedy("layout.pp", ((1,),)),
        )
        return
    if not any(isinstance(mixer, SharedBlock) for mixer in model.distinct_mixers):
        return
    settings = {"training.lora": scenario.training.lora is not None}
    settings["layout.data: deepspeed_zero3"] = layout.data.gathers_single_parameters
    for setting in (name for name, is_set in settings.items() if is_set):
        yield f"{setting} with the block that layers of {model.name} share is not modelled; leave it out"
