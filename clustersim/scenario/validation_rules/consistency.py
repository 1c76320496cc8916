"""Do the parts of a scenario agree with each other?

Each check compares numbers of two parts and says in one sentence which numbers clash and which nearby values are
legal. What runs, but hardly as intended, is in `warnings`.
"""

import math
from collections.abc import Callable, Iterable, Iterator

from clustersim.common.errors import InputError, shown
from clustersim.cost.jitter import MOST_NORMAL, Distribution
from clustersim.model.layer_stack import MOST_LAYERS
from clustersim.model.lora import Target
from clustersim.model.offload import NOTHING
from clustersim.model.training import FullRecompute
from clustersim.model.transformer import Model, Positions, projections
from clustersim.parallel.data_parallel_strategy import DeepspeedZero3Strategy, FullyShard, NaiveDataParallel
from clustersim.parallel.layer_partition import partition_evenly, partition_layers
from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import DISPLAY_AXES, Axis
from clustersim.scenario.config.offload import check_offload
from clustersim.scenario.config_reader import MOST_TOKENS, MOST_WIDTH
from clustersim.scenario.nearest_values import around, divisors, multiples_around
from clustersim.scenario.resolved import Setup
from clustersim.scenario.validation_rules.moe import (
    check_adapted_experts,
    check_dispatcher,
    check_experts,
    check_folded,
    check_loads,
    check_routers,
    check_spread,
    check_tokens_of_experts,
)
from clustersim.scenario.validation_rules.moe_overlap import check_overlap, check_shared
from clustersim.scenario.validation_rules.mtp import check_further, undrawn, with_further
from clustersim.scenario.validation_rules.precision import (
    check_adapted,
    check_attention,
    check_blocks,
    check_ends,
    check_formats,
    check_tokens,
)
from clustersim.scenario.validation_rules.recompute import check_modules

MOST_PASSES = 2**17  # forward passes of microbatches through stages in one step; a real run has some thousands


def problems(scenario: Setup) -> list[str]:
    """What makes the scenario impossible, one sentence each; empty if nothing does."""
    absurd = [*_sizes(scenario.model), *check_degrees(scenario), *check_placement(scenario)]
    return absurd or [problem for check in _CHECKS for problem in check(scenario)]


def _sizes(model: Model) -> Iterator[str]:
    """A config.json's dimensions have the limits of the file's own."""
    widths = {
        "hidden": [model.hidden],
        "ffn": [mlp.ffn for mlp in model.mlps],
        **{
            key: [getattr(attention, key) for attention in model.attentions]
            for key in ("heads", "kv_heads", "head_dim")
        },
        "vocab": [model.vocab],
    }
    limits = {key: (max(sizes, default=0), MOST_WIDTH) for key, sizes in widths.items()}
    limits = {"layers": (model.layers, MOST_LAYERS), **limits, "max_positions": (model.max_positions, MOST_TOKENS)}
    for key, (size, most) in limits.items():
        if size > most:
            yield f"model.{key}: {shown(size)} of {model.name} is too large; {most:,} is the most"


def check_degrees(scenario: Setup) -> Iterator[str]:
    """Whether the degrees make as many ranks as the cluster has GPUs."""
    layout, gpus = scenario.layout, scenario.cluster.gpus
    if layout.world_size == gpus:
        return
    product, fits = _product(layout.as_configured, DISPLAY_AXES), _degrees_that_fit(scenario)
    yield f"layout: {product} = {layout.world_size} ranks, but the cluster has {gpus} GPUs; {fits}"


def check_placement(scenario: Setup) -> Iterator[str]:
    """Whether the schedule is one for so many pipeline ranks."""
    try:
        scenario.schedule.placement(scenario.layout.pp)
    except InputError as error:
        yield f"schedule: {error}"


def _degrees_that_fit(scenario: Setup) -> str:
    """The change of one degree that fits, or of one degree beside dp, or of the cluster."""
    layout, gpus = scenario.layout.as_configured, scenario.cluster.gpus
    degrees = layout.degrees
    for axis in reversed(DISPLAY_AXES):
        others = layout.world_size // degrees[axis.name]
        if gpus % others == 0:
            return f"{axis.name} {gpus // others} fits"
    *of_replica, data = DISPLAY_AXES
    replica = layout.world_size // degrees[data.name]
    for axis in reversed(of_replica):
        degree = degrees[axis.name]
        room = divisors(gpus // (replica // degree)) if gpus % (replica // degree) == 0 else []
        if room:
            return f"{axis.name} {around(degree, room)} fits with another {data.name}"
    return f"{multiples_around(gpus, replica)} GPUs fit {_product(layout, of_replica)}"


def _product(layout: Layout, axes: Iterable[Axis]) -> str:
    return " x ".join(f"{axis.name} {layout.degrees[axis.name]}" for axis in axes)


def check_heads(scenario: Setup) -> Iterator[str]:
    """Whether tensor parallelism can cut the heads."""
    name, tp = scenario.model.name, scenario.layout.tp
    for heads, kv_heads in dict.fromkeys(
        (attention.heads, attention.kv_heads) for attention in scenario.model.attentions
    ):
        if heads % kv_heads:
            legal = around(kv_heads, divisors(heads))
            yield f"model: heads {heads} is not a multiple of kv_heads {kv_heads}; kv_heads {legal} fits"
        elif heads % tp:
            yield f"layout.tp: {tp} does not divide the {heads} heads of {name}; tp {around(tp, divisors(heads))} fits"
        elif kv_heads % tp and tp % kv_heads:
            shared = [d for d in divisors(heads) if kv_heads % d == 0 or d % kv_heads == 0]
            yield (
                f"layout.tp: {tp} neither divides the {kv_heads} kv_heads of {name} nor is a multiple of them "
                f"(each then held by several ranks); tp {around(tp, shared)} fits"
            )


def check_widths(scenario: Setup) -> Iterator[str]:
    """Whether tensor parallelism can cut the MLP and the vocabulary."""
    model, tp = scenario.model, scenario.layout.tp
    for ffn in dict.fromkeys(mlp.ffn for mlp in model.mlps):
        if ffn % tp:
            yield f"layout.tp: {tp} does not divide ffn {ffn} of {model.name}; tp {around(tp, divisors(ffn))} fits"
    if model.vocab % tp:
        padded = math.ceil(model.vocab / (128 * tp)) * 128 * tp  # Megatron-LM: make-vocab-size-divisible-by 128, x tp
        yield (
            f"layout.tp: {tp} does not divide vocab {model.vocab} of {model.name}; "
            f"pad it as Megatron-LM does: model.vocab {padded}"
        )


def check_layers(scenario: Setup) -> Iterator[str]:
    """Whether every stage has something to do."""
    layers, stages = scenario.model.layers, len(scenario.placement.stage_ranks)
    shape = _shape(scenario)
    try:
        counts = partition_layers(scenario.layout.layers_per_stage, layers, scenario.placement)
    except InputError as error:
        yield f"layout.layers_per_stage: {error}; such as {list(partition_evenly(layers, stages))}, or even"
        return
    if len(counts) != stages or sum(counts) != layers:
        yield (
            f"layout.layers_per_stage: {len(counts)} stage{'s' * (len(counts) > 1)} with {sum(counts)} layers, "
            f"but {shape} and {scenario.model.name} has {layers} layers; such as {list(partition_evenly(layers, stages))}"
        )
    elif further := undrawn(scenario):
        yield further
    elif _idle_stages(counts := with_further(scenario, counts)) and layers >= stages:
        idle = counts[1:-1].index(0) + 1 if 0 in counts[1:-1] else 0
        even = list(partition_evenly(layers, stages))
        yield f"layout.layers_per_stage: stage {idle} of {shape} holds nothing; such as {even}"
    elif _idle_stages(counts):
        yield f"layout.pp: {shape}, but {scenario.model.name} has only {layers} layers; {_fewer_stages(scenario)}"


def _shape(scenario: Setup) -> str:
    """How many stages there are, and why."""
    pp, stages = scenario.layout.as_configured.pp, len(scenario.placement.stage_ranks)
    chunks = 1 if scenario.layout.mirrored else scenario.placement.max_chunks
    if stages == pp * chunks:
        return f"pp {pp} x {chunks} chunks = {stages} stages"
    return f"schedule {scenario.schedule.name} has {stages} stages on pp {pp}"


def _idle_stages(counts: tuple[int, ...]) -> bool:
    """Whether a stage has nothing to do: only the first (embedding) and the last (logits) can do without layers."""
    return 0 in counts[1:-1] or not any(counts)


def check_recomputed(scenario: Setup) -> Iterator[str]:
    """Whether a stage has as many layers as are to be recomputed."""
    recompute, split = scenario.training.recompute, scenario.layout.layers_per_stage
    if not isinstance(recompute, FullRecompute) or [*check_layers(scenario)]:
        return
    most = max(partition_layers(split, scenario.model.layers, scenario.placement))
    if (recompute.layers or 0) > most:
        yield f"training.recompute.layers: {recompute.layers}, but no stage holds more than {most} layers; {most} fits"


def _fewer_stages(scenario: Setup) -> str:
    layers, layout = scenario.model.layers, scenario.layout
    each = len(scenario.placement.stage_ranks) // layout.as_configured.pp
    legal = [pp for pp in divisors(scenario.cluster.gpus // (layout.tp * layout.cp)) if pp * each <= layers]
    return f"pp {legal[-1]} fits" if legal else f"at most {layers} stages fit"


def check_batch(scenario: Setup) -> Iterator[str]:
    """Whether replicas and their schedule can share out the batch."""
    batch, micro, dp = scenario.training.global_batch, scenario.training.microbatch, scenario.layout.dp
    ways = f"dp {scenario.layout.as_configured.dp} x 2 ways of {scenario.schedule.name}"
    pipelines = ways if scenario.layout.mirrored else f"dp {dp}"
    if batch < dp * micro:
        fed = batch // micro
        yield (
            f"training.global_batch: {batch} sequences feed at most {fed} data-parallel ranks with microbatches of "
            f"{micro}, but {pipelines.replace('dp ', 'dp is ', 1)}; {_fed_by(scenario)}"
        )
    elif batch % (dp * micro):
        product = f"{pipelines} x microbatch {micro} = {dp * micro}"
        legal = multiples_around(batch, dp * micro)
        yield f"training.global_batch: {batch} is not a multiple of {product}; {legal} fits"
    elif len(scenario.placement.stage_ranks) * scenario.microbatches > MOST_PASSES:
        yield (
            f"training.global_batch: {batch} sequences are {scenario.microbatches:,} microbatches on each of "
            f"{len(scenario.placement.stage_ranks)} stages; {MOST_PASSES:,} passes a step are the most"
        )
    else:
        yield from _order(scenario)


def _fed_by(scenario: Setup) -> str:
    """A layout of the same GPUs that the batch can feed: more tensor parallelism, or else a larger batch."""
    layout, training, model = scenario.layout.as_configured, scenario.training, scenario.model
    sequences, pipelines = training.global_batch // training.microbatch, scenario.layout.dp
    for factor in divisors(layout.dp):
        tp, dp = layout.tp * factor, layout.dp // factor
        divided = not any(attention.heads % tp or attention.kv_heads % tp for attention in model.attentions)
        if sequences % (pipelines // factor) == 0 and sequences and divided:
            return f"tp {tp} x dp {dp} fits"
    return f"global_batch {pipelines * training.microbatch} fits"


def _order(scenario: Setup) -> Iterator[str]:
    if scenario.layout.pp == 1 and scenario.placement.max_chunks > 1:
        yield f"schedule: {scenario.schedule.name} needs a pipeline, but layout.pp is 1; write 1f1b"
        return
    try:
        scenario.run_schedule.require_supported(scenario.layout.pp, scenario.microbatches)
    except InputError as error:
        yield f"schedule: {error}"


def check_sequence(scenario: Setup) -> Iterator[str]:
    """Whether the model has such positions, and whether ranks can cut the sequence."""
    model, layout, sequence = scenario.model, scenario.layout, scenario.training.sequence
    if model.positions is Positions.LEARNED and sequence > model.max_positions:
        yield (
            f"training.sequence: {sequence} is longer than the {model.max_positions} learned positions of "
            f"{model.name}; at most {model.max_positions} fits"
        )
    zigzag = 2 * layout.cp if layout.cp > 1 else 1
    parts = zigzag * layout.tp if layout.sequence_parallel else zigzag
    if sequence % parts:
        causes = [f"2 x cp {layout.cp}"] * (layout.cp > 1) + [f"tp {layout.tp}"] * layout.sequence_parallel
        legal = multiples_around(sequence, parts)
        yield f"training.sequence: {sequence} is not a multiple of {' x '.join(causes)} = {parts}; {legal} fits"


def _steps(scenario: Setup) -> Iterator[str]:
    passes = len(scenario.placement.stage_ranks) * scenario.microbatches
    if scenario.steps > 1 and scenario.steps * passes > MOST_PASSES:
        yield (
            f"steps: {scenario.steps:,} of {passes:,} passes each are {scenario.steps * passes:,} passes; "
            f"{MOST_PASSES:,} are the most, so {MOST_PASSES // passes:,} steps fit"
        )


def _jitter(scenario: Setup) -> Iterator[str]:
    jitter = scenario.jitter
    if jitter and jitter.distribution is Distribution.NORMAL and jitter.std > MOST_NORMAL:
        yield (
            f"disturbances.jitter: normal jitter of {jitter.std:.6g} would make a duration negative; "
            f"at most {MOST_NORMAL:.0%} fits, or {{std: {jitter.std:.6g}, distribution: lognormal}}"
        )


def check_adapters(scenario: Setup) -> Iterator[str]:
    """Whether the model has what adapters stand beside, and whether it and tensor parallelism can have their rank."""
    lora, model, tp = scenario.training.lora, scenario.model, scenario.layout.tp
    if lora is None or [*check_adapted_experts(scenario)]:
        return
    layers = [projections(model, spec) for spec in model.specs]
    there = {projection: sizes for layer in layers for projection, sizes in layer.items()}
    for target in lora.targets:
        if not there.keys() & set(target.covers):
            legal = (item.value for item in Target if there.keys() & set(item.covers))
            yield f"training.lora.targets: {model.name} has no {target.value}; it has {', '.join(legal)}"
    if not lora.targets:
        yield f"training.lora.targets: {model.name} has none of these matrices"
    narrow = [
        min(layer[cover]) for layer in layers for target in lora.targets for cover in target.covers if cover in layer
    ]
    if narrow and lora.rank > min(narrow):
        yield (
            f"training.lora.rank: {lora.rank} is more than the {min(narrow)} inputs or outputs of a matrix of "
            f"{model.name}; at most {min(narrow)} fits"
        )
    elif lora.rank % tp:
        yield (
            f"training.lora.rank: {lora.rank} is not a multiple of tp {tp}, which splits the adapters' columns; "
            f"{multiples_around(lora.rank, tp)} fits"
        )


def _naive(scenario: Setup) -> Iterator[str]:
    layout, node = scenario.layout, scenario.cluster.gpus_per_node
    if not isinstance(layout.data, NaiveDataParallel):
        return
    if layout.world_size > layout.dp or scenario.cluster.nodes > 1:
        yield (
            f"layout.data: data_parallel is one process on one node of {node} GPUs, but the layout is "
            f"{_product(layout, DISPLAY_AXES)}; use ddp"
        )


def check_shards(scenario: Setup) -> Iterator[str]:
    """Whether the ranks that hold the same weights fall into groups that share them out."""
    layout = scenario.layout.as_configured
    within, ranks = layout.data.shard_size, layout.cp * layout.dp
    legal = [layout.cp * divisor for divisor in divisors(layout.dp)]
    if within is not None and within not in legal:
        key = "secondary" if layout.data.secondary else "shard"
        of = f"dp {layout.dp}" if layout.cp == 1 else f"cp {layout.cp} x dp {layout.dp}"
        yield (
            f"layout.data: {key} {within} does not divide the {ranks} ranks ({of}) that hold the same weights"
            f"{'' if layout.cp == 1 else f' into groups of whole cp {layout.cp}'}; {key} {around(within, legal)} fits"
        )


def check_secondary(scenario: Setup) -> Iterator[str]:
    """Whether backward gathers from the second copy of the weights, if there is one."""
    data, pipelined = scenario.layout.data, scenario.layout.is_pipelined
    if isinstance(data, FullyShard) and data.secondary and not data.reshards_parameters(is_pipelined=pipelined):
        why = "beside a pipeline what forward gathers stays" if pipelined else "reshard_after_forward is false"
        yield (
            f"layout.data: secondary {data.secondary} is for backward's gathers, and there are none ({why}); leave it "
            "out, or write reshard_after_forward: true"
        )


def check_by_parameter(scenario: Setup) -> Iterator[str]:
    """Whether DeepSpeed's first ZeRO-3 runs beside what else the scenario has."""
    layout, training = scenario.layout, scenario.training
    if not isinstance(layout.data, DeepspeedZero3Strategy):
        return
    beside = {
        "model.experts": bool(scenario.model.mixtures),
        f"layout.pp {layout.as_configured.pp}": layout.pp > 1,
        "training.lora": training.lora is not None,
        "training.offload": training.offload != NOTHING,
    }
    for what in (name for name, there in beside.items() if there):
        yield f"layout.data: zero3_by_parameter runs beside no {what}; fsdp and zero3 do, or leave it out"


_Check = Callable[[Setup], Iterator[str]]
_CHECKS: tuple[_Check, ...] = (
    check_heads,
    check_widths,
    check_routers,
    check_experts,
    check_folded,
    check_dispatcher,
    check_tokens_of_experts,
    check_spread,
    check_loads,
    check_layers,
    check_further,
    check_recomputed,
    check_modules,
    check_batch,
    check_sequence,
    check_adapters,
    check_adapted_experts,
    check_overlap,
    check_shared,
    check_formats,
    check_attention,
    check_blocks,
    check_tokens,
    check_ends,
    check_adapted,
    check_shards,
    check_secondary,
    check_by_parameter,
    _naive,
    check_offload,
    _steps,
    _jitter,
)
