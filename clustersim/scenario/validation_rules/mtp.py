"""Consistency checks of multi-token prediction (MTP) layers with layout and training.

Each reports in one sentence what conflicts and what would fit.
"""

from collections.abc import Iterator

from clustersim.model.transformer import PositionEncoding
from clustersim.parallel.layer_partition import PipelineLayoutString, mtp_stage_index
from clustersim.scenario.nearest_values import divisors
from clustersim.scenario.resolved import ResolvedScenario
from clustersim.scenario.validation_rules.remedies import Problem, Remedy


def find_mtp_layout_problem(scenario: ResolvedScenario) -> str | None:
    """The problem of a layout string whose number of MTP layers is not the model's; None if there is none."""
    model, split = scenario.model, scenario.layout.layers_per_stage
    if not isinstance(split, PipelineLayoutString) or sum(split.mtp_layer_counts) == model.mtp_layers:
        return None
    layout_count, model_count = sum(split.mtp_layer_counts), model.mtp_layers
    return (
        f"layout.layers_per_stage: has {layout_count} m, but {model.name} has {model_count} layers that predict "
        "further tokens; "
        f"write {model_count or 'no'} m, or model.mtp_layers {layout_count}"
    )


def add_mtp_layers(scenario: ResolvedScenario, layer_counts: tuple[int, ...]) -> tuple[int, ...]:
    """Layer count of each stage, MTP layers included."""
    mtp_stage, mtp_layers = (
        mtp_stage_index(scenario.layout.layers_per_stage, len(layer_counts)),
        scenario.model.mtp_layers,
    )
    return tuple(count + mtp_layers * (stage == mtp_stage) for stage, count in enumerate(layer_counts))


def check_mtp(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that MTP is compatible with position encoding and LoRA, and that tp divides its projection."""
    model, tp = scenario.model, scenario.layout.tp
    if not model.mtp_layers:
        return
    if model.positions is PositionEncoding.LEARNED:
        yield (
            f"model.mtp_layers: {model.mtp_layers} further tokens, but {model.name} has learned positions, with "
            "which Megatron-LM predicts none; they need rotary ones"
        )
    if scenario.training.lora is not None:
        yield Problem(
            f"model.mtp_layers: {model.mtp_layers}, but adapters with such layers are not modelled",
            Remedy("model.mtp_layers", ((0,),)),
        )
    if model.hidden % tp:
        yield Problem(
            f"layout.tp: {tp} does not divide hidden {model.hidden} of {model.name}, which layers that predict further "
            "tokens are projected to",
            Remedy.nearest("layout.tp", tp, divisors(model.hidden)),
        )
