"""Can a mixture of experts be trained so?

Checks of experts beside layout and adapters, each of which says in one sentence which numbers clash and which nearby
values are legal.
"""

from collections.abc import Iterator

from clustersim.model.layer_stack import RoutedMlp
from clustersim.model.lora import Projection
from clustersim.model.moe_expert_load import MeasuredLoad
from clustersim.model.transformer import every_projection
from clustersim.parallel.data_parallel_strategy import NaiveDataParallel
from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import PIPELINE
from clustersim.program.task import TokenDispatcher
from clustersim.scenario.nearest_values import around, divisors
from clustersim.scenario.resolved import Setup


def check_experts(scenario: Setup) -> Iterator[str]:
    """Whether there are experts to be spread."""
    layout, model = scenario.layout, scenario.model
    if not _mixtures(scenario) and layout.has_expert_mesh:
        key, degree = ("ep", layout.ep) if layout.ep > 1 else ("etp", layout.effective_etp)
        yield f"layout.{key}: {degree} spreads experts, but {model.name} has none; leave it out"


def check_dispatcher(scenario: Setup) -> Iterator[str]:
    """Whether the dispatcher has kernels of its own, where multiprocessors are counted out to them."""
    dispatcher, sms = scenario.layout.dispatcher, scenario.layout.dispatcher_sms
    units = min(kind.compute_units for kind in scenario.cluster.kinds()[0])
    if sms is not None and not dispatcher.has_custom_kernels:
        yield f"layout.dispatcher_sms: {sms}, but {dispatcher.value} runs the library's kernels; leave it out"
    elif sms is not None and sms > units:
        yield f"layout.dispatcher_sms: {sms}, but a GPU has {units} multiprocessors; {units} is the most"


def check_folded(scenario: Setup) -> Iterator[str]:
    """Whether experts can be folded onto the ranks of all else."""
    if _mixtures(scenario):
        yield from _folded(scenario.layout.as_configured)


def check_tokens_of_experts(scenario: Setup) -> Iterator[str]:
    """Whether each rank has tokens of its own for the experts."""
    layout = scenario.layout
    if _mixtures(scenario) and layout.tp > 1 and not layout.sequence_parallel:
        yield (
            f"layout.sequence_parallel: false, so all tp {layout.tp} ranks would send the same tokens to experts, "
            "which Megatron-LM refuses; write true"
        )


def check_spread(scenario: Setup) -> Iterator[str]:
    """Whether experts divide the ranks, and ranks divide an expert."""
    for mixture in _mixtures(scenario):
        yield from _spread(scenario, mixture)


def _mixtures(scenario: Setup) -> list[RoutedMlp]:
    """The model's mixtures in which there is something to choose."""
    return [mixture for mixture in scenario.model.mixtures if mixture.alone is None]


def _folded(layout: Layout) -> Iterator[str]:
    """Whether the ranks of tp, cp and dp are as many as experts are spread over, or several times so many."""
    room = layout.tp * layout.cp * layout.dp
    if room % (layout.ep * layout.effective_etp):
        yield (
            f"layout.ep: {layout.ep} x etp {layout.effective_etp} does not divide the {room} ranks of tp x cp x dp "
            f"that experts are folded onto; {_fitting(layout, room)}"
        )
    elif layout.has_expert_mesh:
        yield from _apart(layout)


def _apart(layout: Layout) -> Iterator[str]:
    """Whether what else the layout has goes with experts that are spread in another way than all else."""
    if layout.is_pipelined and layout.order[-1] != PIPELINE.name:
        legal = [*(axis for axis in layout.order if axis != PIPELINE.name), PIPELINE.name]
        yield (
            f"layout.order: {list(layout.order)} has pp before its end, which experts on ranks of their own need last; "
            f"{legal} fits"
        )
    if isinstance(layout.data, NaiveDataParallel):
        yield f"layout.data: data_parallel copies the whole model to each GPU, and ep is {layout.ep}; use ddp"
    room, within = layout.tp * (layout.data.shard_size or 0), layout.data.shard_size
    if within and layout.cp * layout.dp % within == 0 and room % (layout.ep * layout.effective_etp):
        key = "secondary" if layout.data.secondary else "shard"
        yield (
            f"layout.data: {key} {within} x tp {layout.tp} = {room} ranks are one copy of the weights, which "
            f"ep {layout.ep} x etp {layout.effective_etp} does not divide; {_fitting(layout, room)}"
        )


def _fitting(layout: Layout, room: int) -> str:
    legal = [divisor for divisor in divisors(room) if room % (divisor * layout.effective_etp) == 0]
    return f"ep {around(layout.ep, legal)} fits" if legal else "a smaller etp fits"


def check_loads(scenario: Setup) -> Iterator[str]:
    """Whether the load that is stated is of this model's experts."""
    load, model = scenario.training.expert_load, scenario.model
    mixtures = model.routed
    if load is None:
        return
    if not mixtures:
        yield f"training.expert_load: {model.name} has no experts; leave it out"
    if not isinstance(load, MeasuredLoad):
        return
    if load.layered and len(load.rows) != len(mixtures):
        yield (
            f"training.expert_load.rows: {len(load.rows)} lists, and {model.name} has {len(mixtures)} routed layers; "
            f"write one list of all layers, or {len(mixtures)}"
        )
        return
    for place, (rows, routed) in enumerate(zip(load.rows, mixtures, strict=False), start=1):
        if len(rows) != routed.experts:
            yield (
                f"training.expert_load.rows: list {place} is of {len(rows)} experts, and {model.name} has "
                f"{routed.experts}; write as many"
            )


def check_routers(scenario: Setup) -> Iterator[str]:
    """Whether a router can choose so many experts."""
    for mixture in scenario.model.mixtures:
        router, top_k = mixture.router, mixture.top_k
        if top_k > mixture.experts:
            yield f"model.experts: top_k {top_k} is above the {mixture.experts} experts; at most {mixture.experts} fits"
        elif mixture.experts % router.groups:
            legal, experts = around(router.groups, divisors(mixture.experts)), mixture.experts
            yield f"model.experts: groups {router.groups} does not divide the {experts} experts; groups {legal} fits"
        elif router.limit is not None and router.limit > router.groups:
            yield f"model.experts: limit {router.limit} is above the {router.groups} groups; {router.groups} fits"
        elif router.limit is not None and top_k > (room := router.limit * mixture.experts // router.groups):
            left = f"the {room} experts that limit {router.limit} leaves"
            yield f"model.experts: top_k {top_k} is above {left}; raise limit"
        elif mixture.capacity is not None:
            yield from _capacity(scenario, mixture.capacity, mixture.experts / top_k)


def _capacity(scenario: Setup, capacity: float, most: float) -> Iterator[str]:
    if capacity > most:
        yield f"model.experts: capacity {capacity:g} is above {most:g}, at which every expert takes every token"
    if (dispatcher := scenario.layout.dispatcher) is not TokenDispatcher.ALL_TO_ALL:
        yield (
            f"layout.dispatcher: {dispatcher.value} sends as many rows as there are, and experts have a capacity; "
            f"{TokenDispatcher.ALL_TO_ALL.value} pads and drops"
        )


def _spread(scenario: Setup, routed: RoutedMlp) -> Iterator[str]:
    layout, name = scenario.layout, scenario.model.name
    if routed.experts % layout.ep:
        legal = around(layout.ep, divisors(routed.experts))
        yield f"layout.ep: {layout.ep} does not divide the {routed.experts} experts of {name}; ep {legal} fits"
    if routed.ffn % layout.effective_etp:
        legal = around(layout.effective_etp, divisors(routed.ffn))
        cut = f"layout.etp: {layout.effective_etp} does not divide expert width {routed.ffn}"
        yield f"{cut} of {name}; etp {legal} fits"
    if routed.shared % layout.tp:
        legal = around(layout.tp, divisors(routed.shared))
        yield f"layout.tp: {layout.tp} does not divide shared width {routed.shared} of {name}; tp {legal} fits"


def check_adapted_experts(scenario: Setup) -> Iterator[str]:
    """Whether adapters are asked for beside experts, or experts in the adapters' base format."""
    lora, model = scenario.training.lora, scenario.model
    if lora is None or all(mixture.alone is not None for mixture in model.mixtures):
        return
    of_mlps = {Projection.GATE, Projection.UP, Projection.DOWN}
    if any(of_mlps.intersection(target.covers) for target in lora.targets):
        fits = "targets: attention fits" if every_projection(model) - of_mlps else "leave lora out"
        yield f"training.lora.targets: {model.name} has experts, beside which adapters are not modelled; {fits}"
    if lora.base is not None:
        yield f"training.lora.base: {lora.base.value} of experts is not modelled, and {model.name} has some; none fits"
