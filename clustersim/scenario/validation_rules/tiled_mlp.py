"""Do MLPs that run on tiles of the sequence fit model, layout and training? Each problem in one sentence."""

from collections.abc import Iterator

from clustersim.model.layer_stack import DenseMlp
from clustersim.scenario.resolved import ResolvedScenario


def check_tiled_mlp(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that a tile's MLP is a whole one on its rank, whose backward runs at once."""
    training, layout, model = scenario.training, scenario.layout, scenario.model
    tiling = training.tiled_mlp
    if tiling is None:
        return
    if not any(isinstance(spec.mlp, DenseMlp) and not spec.mlp.token_shift for spec in model.distinct_specs):
        yield f"training.tiled_mlp: {model.name} has no dense MLP to run on tiles; leave it out"
    tokens = training.sequence // layout.cp
    if tiling.tokens is not None and tiling.tokens > tokens:
        yield f"training.tiled_mlp.tokens: {tiling.tokens}, but a rank has {tokens} tokens of a sequence; give fewer"
    conflicts = {
        f"layout.tp: {layout.tp}, as every tile would be summed over ranks": layout.tp > 1,
        "training.lora": training.lora is not None,
        f"schedule: {scenario.schedule.name}, which splits backward": scenario.schedule.takes_pass_costs,
        "training.precision with matmuls in fewer bits, whose casts would be each tile's": (
            training.recipe.casts is not None
        ),
        f"the images of {model.name}": model.patches is not None or model.encoder is not None,
    }
    for setting in (name for name, is_set in conflicts.items() if is_set):
        yield f"training.tiled_mlp with {setting}, is not modelled; leave one of them out"
