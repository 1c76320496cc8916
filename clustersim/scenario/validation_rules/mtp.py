"""Can layers that predict further tokens be trained so?

Checks of them beside layout and training, each of which says in one sentence what clashes and what would fit.
"""

from collections.abc import Iterator

from clustersim.model.transformer import Positions
from clustersim.parallel.layer_partition import PipelineLayoutString, mtp_stage_index
from clustersim.scenario.nearest_values import around, divisors
from clustersim.scenario.resolved import Setup


def undrawn(scenario: Setup) -> str | None:
    """Whether a layout string has a place for all layers that predict further tokens."""
    model, split = scenario.model, scenario.layout.layers_per_stage
    if not isinstance(split, PipelineLayoutString) or sum(split.mtp_layer_counts) == model.mtp_layers:
        return None
    drawn, many = sum(split.mtp_layer_counts), model.mtp_layers
    return (
        f"layout.layers_per_stage: has {drawn} m, but {model.name} has {many} layers that predict further tokens; "
        f"write {many or 'no'} m, or model.mtp_layers {drawn}"
    )


def with_further(scenario: Setup, counts: tuple[int, ...]) -> tuple[int, ...]:
    """Layers of each stage, with those that predict further tokens."""
    at, further = mtp_stage_index(scenario.layout.layers_per_stage, len(counts)), scenario.model.mtp_layers
    return tuple(count + further * (stage == at) for stage, count in enumerate(counts))


def check_further(scenario: Setup) -> Iterator[str]:
    """Whether the model can have layers that predict further tokens, and tensor parallelism cut their projection."""
    model, tp = scenario.model, scenario.layout.tp
    if not model.mtp_layers:
        return
    if model.positions is Positions.LEARNED:
        yield (
            f"model.mtp_layers: {model.mtp_layers} further tokens, but {model.name} has learned positions, beside "
            "which Megatron-LM predicts none; rotary ones fit"
        )
    if scenario.training.lora is not None:
        yield f"model.mtp_layers: {model.mtp_layers}, but adapters beside such layers are not modelled; 0 fits"
    if model.hidden % tp:
        yield (
            f"layout.tp: {tp} does not divide hidden {model.hidden} of {model.name}, which layers that predict further "
            f"tokens are projected to; tp {around(tp, divisors(model.hidden))} fits"
        )
