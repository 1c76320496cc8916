"""Are the sections of a scenario consistent with each other?

Each check compares numbers of two sections and reports in one sentence which ones conflict and which nearby
values are allowed. Settings that run, but hardly as intended, are reported by `warnings`.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from clustersim.common.errors import InputError, format_value
from clustersim.cost.jitter import MAX_NORMAL_STD, Distribution
from clustersim.model.layer_stack import MAX_LAYERS
from clustersim.model.lora import LoraTarget
from clustersim.model.mixer import ShardedSize
from clustersim.model.offload import NO_OFFLOAD
from clustersim.model.transformer import PositionEncoding, TransformerModel, projection_sizes
from clustersim.parallel.layer_partition import partition_evenly, partition_layers
from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import DISPLAY_AXES, Axis
from clustersim.scenario.config.offload import check_offload
from clustersim.scenario.config_reader import MAX_TOKENS, MAX_WIDTH
from clustersim.scenario.nearest_values import divisors
from clustersim.scenario.resolved import ResolvedScenario
from clustersim.scenario.validation_rules.autocast import check_autocast
from clustersim.scenario.validation_rules.context_parallel import (
    check_context_groups,
    check_context_parallel,
    check_documents,
    check_exchanged_heads,
    sequence_chunks,
)
from clustersim.scenario.validation_rules.diloco import check_diloco
from clustersim.scenario.validation_rules.first_layer_readers import check_first_layer_readers
from clustersim.scenario.validation_rules.moe import (
    check_dispatcher,
    check_expert_load,
    check_expert_parallelism,
    check_expert_sharding,
    check_framework_dispatcher,
    check_lora_experts,
    check_parallel_folding,
    check_routers,
    check_sequence_parallel,
)
from clustersim.scenario.validation_rules.moe_overlap import check_moe_overlap, check_shared_expert_overlap
from clustersim.scenario.validation_rules.mtp import add_mtp_layers, check_mtp, find_mtp_layout_problem
from clustersim.scenario.validation_rules.optimizer import (
    check_cross_entropy_metrics,
    check_optimizer,
    check_optimizer_in_backward,
    check_reference_model,
    check_z_loss,
)
from clustersim.scenario.validation_rules.precision import (
    check_attention_format,
    check_attention_library,
    check_high_precision_layers,
    check_lora_precision,
    check_matmul_formats,
    check_matrix_block_size,
    check_token_block_size,
)
from clustersim.scenario.validation_rules.recompute import check_mla_recompute
from clustersim.scenario.validation_rules.remedies import STRATEGY_KEY, Problem, Remedy, SizeProblem
from clustersim.scenario.validation_rules.selected_keys import check_selected_keys
from clustersim.scenario.validation_rules.tiled_mlp import check_tiled_mlp
from clustersim.scenario.validation_rules.towers import (
    check_encoder,
    check_encoder_layout,
    check_encoder_placement,
    check_encoder_ranks,
    check_images,
)

MAX_PASSES = 2**17  # stages x microbatches (forward passes) of one step; real runs have some thousands


def find_problems(scenario: ResolvedScenario) -> list[str]:
    """Why the scenario cannot run, one sentence per problem; empty if it can."""
    towers = check_encoder_placement, check_encoder_layout, check_encoder_ranks
    size_checks = (check_degrees, check_placement, *towers)
    problems = (problem for check in size_checks for problem in check(scenario))
    size_problems = [*_check_size_limits(scenario.model), *problems]
    return size_problems or [*dict.fromkeys(problem for check in _CHECKS for problem in check(scenario))]


def _check_size_limits(model: TransformerModel) -> Iterator[str]:
    """Check that a config.json's dimensions are within the limits of the scenario file's own keys."""
    widths = {
        "hidden": [model.hidden],
        "ffn": [mlp.ffn for mlp in model.distinct_dense_mlps],
        **{
            key: [getattr(distinct_attention, key) for distinct_attention in model.distinct_attentions]
            for key in ("heads", "kv_heads", "head_dim")
        },
        "vocab": [model.vocab],
    }
    limits = {key: (max(sizes, default=0), MAX_WIDTH) for key, sizes in widths.items()}
    limits = {"layers": (model.layer_count, MAX_LAYERS), **limits, "max_positions": (model.max_positions, MAX_TOKENS)}
    for key, (size, maximum) in limits.items():
        if size > maximum:
            yield f"model.{key}: {format_value(size)} of {model.name} is too large; {maximum:,} is the most"


def check_degrees(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that the product of the degrees equals the cluster's GPU count; see towers for an encoder's own GPUs."""
    layout, gpus = scenario.layout, scenario.cluster.gpu_count
    if layout.world_size == gpus or layout.encoder_dp is not None:
        return
    product = _format_product(layout.as_configured, DISPLAY_AXES)
    yield SizeProblem(
        f"layout: {product} = {layout.world_size} ranks, but the cluster has {gpus} GPUs", *_degree_remedies(scenario)
    )


def check_placement(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that the schedule supports this number of pipeline ranks."""
    try:
        scenario.schedule.placement(scenario.layout.pp)
    except InputError as error:
        layout = scenario.layout.as_configured
        allowed = divisors(max(1, scenario.cluster.gpu_count // (layout.tp * layout.cp)))
        yield SizeProblem(f"schedule: {error}", Remedy.nearest("layout.pp", layout.pp, allowed))


def _degree_remedies(scenario: ResolvedScenario) -> Iterator[Remedy]:
    """A change of one degree, of one degree together with dp, or of the GPU count."""
    layout, gpus = scenario.layout.as_configured, scenario.cluster.gpu_count
    degrees, replica = layout.degrees, layout.world_size // layout.dp
    for axis in reversed(DISPLAY_AXES):
        other_degrees = layout.world_size // degrees[axis.name]
        if gpus % other_degrees == 0:
            yield Remedy(f"layout.{axis.name}", ((gpus // other_degrees,),))
    for axis in reversed(DISPLAY_AXES[:-1]):
        degree = degrees[axis.name]
        if gpus % (replica // degree) == 0:
            yield Remedy.nearest(f"layout.{axis.name}", degree, divisors(gpus // (replica // degree)))
    yield Remedy.multiples("cluster.gpus", gpus, replica)


def _format_product(layout: Layout, axes: Iterable[Axis]) -> str:
    return " x ".join(f"{axis.name} {layout.degrees[axis.name]}" for axis in axes)


def check_heads(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that tensor parallelism divides the heads and other sizes of the layers' mixers."""
    uneven = [attention for attention in scenario.model.distinct_attentions if attention.heads % attention.kv_heads]
    for heads, kv_heads in dict.fromkeys((attention.heads, attention.kv_heads) for attention in uneven):
        yield Problem(
            f"model: heads {heads} is not a multiple of kv_heads {kv_heads}",
            Remedy.nearest("model.kv_heads", kv_heads, divisors(heads)),
        )
    for sizes in dict.fromkeys(mixer.sharded_sizes for mixer in scenario.model.distinct_mixers if mixer not in uneven):
        yield from islice(_check_sharded_sizes(scenario, sizes), 1)


def _check_sharded_sizes(scenario: ResolvedScenario, sizes: tuple[ShardedSize, ...]) -> Iterator[str]:
    """Problems of the sizes of one mixer that tensor parallelism splits."""
    name, tp = scenario.model.name, scenario.layout.tp
    for size in sizes:
        if size.size % tp == 0:
            continue
        if not size.replicable:
            yield Problem(
                f"layout.tp: {tp} does not divide the {size.size} {size.key} of {name}",
                Remedy.nearest("layout.tp", tp, divisors(size.size)),
            )
        elif tp % size.size:
            common = math.gcd(*(other.size for other in sizes if not other.replicable))
            allowed = [d for d in divisors(common) if size.size % d == 0 or d % size.size == 0]
            yield Problem(
                f"layout.tp: {tp} neither divides the {size.size} {size.key} of {name} nor is a multiple of them "
                "(each then held by several ranks)",
                Remedy.nearest("layout.tp", tp, allowed),
            )


def check_widths(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that tensor parallelism divides the MLP and the vocabulary."""
    model, tp = scenario.model, scenario.layout.tp
    for ffn in dict.fromkeys(mlp.ffn for mlp in model.distinct_dense_mlps):
        if ffn % tp:
            yield Problem(
                f"layout.tp: {tp} does not divide ffn {ffn} of {model.name}",
                Remedy.nearest("layout.tp", tp, divisors(ffn)),
            )
    if model.vocab % tp:
        padded = math.ceil(model.vocab / (128 * tp)) * 128 * tp  # Megatron-LM: make-vocab-size-divisible-by 128, x tp
        yield Problem(
            f"layout.tp: {tp} does not divide vocab {model.vocab} of {model.name}; Megatron-LM pads it",
            Remedy("model.vocab", ((padded,),)),
            Remedy.nearest("layout.tp", tp, divisors(model.vocab)),
        )


def check_layers(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that the layer split matches the stages, and that no inner stage is empty."""
    layers, stages = scenario.model.layer_count, len(scenario.placement.stage_ranks)
    stages_text = _describe_stages(scenario)
    try:
        counts = partition_layers(scenario.layout.layers_per_stage, layers, scenario.placement)
    except InputError as error:
        yield Problem(f"layout.layers_per_stage: {error}", _even_split(layers, stages))
        return
    if len(counts) != stages or sum(counts) != layers:
        yield Problem(
            f"layout.layers_per_stage: {len(counts)} stage{'s' * (len(counts) > 1)} with {sum(counts)} layers, "
            f"but {stages_text} and {scenario.model.name} has {layers} layers",
            _even_split(layers, stages),
        )
    elif mtp_problem := find_mtp_layout_problem(scenario):
        yield mtp_problem
    elif _has_empty_stage(counts := add_mtp_layers(scenario, counts)) and layers >= stages:
        empty_stage = counts[1:-1].index(0) + 1 if 0 in counts[1:-1] else 0
        yield Problem(
            f"layout.layers_per_stage: stage {empty_stage} of {stages_text} holds nothing", _even_split(layers, stages)
        )
    elif _has_empty_stage(counts):
        yield Problem(
            f"layout.pp: {stages_text}, but {scenario.model.name} has only {layers} layers", _fewer_stages(scenario)
        )


def _even_split(layers: int, stages: int) -> Remedy:
    """An even partition of layers, as a list if one is expected to be edited, else by its name."""
    return Remedy("layout.layers_per_stage", (([*partition_evenly(layers, stages)], "even"),))


def _describe_stages(scenario: ResolvedScenario) -> str:
    """The number of stages and how it follows from pp and the schedule, as text."""
    pp, stages = scenario.layout.as_configured.pp, len(scenario.placement.stage_ranks)
    chunks = 1 if scenario.layout.mirrored else scenario.placement.max_chunks
    if stages == pp * chunks:
        return f"pp {pp} x {chunks} chunks = {stages} stages"
    return f"schedule {scenario.schedule.name} has {stages} stages on pp {pp}"


def _has_empty_stage(counts: tuple[int, ...]) -> bool:
    """Whether a stage is empty: only the first (embedding) and the last (logits) may have no layers."""
    return 0 in counts[1:-1] or not any(counts)


def check_recompute_layers(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that some stage has as many layers as are to be recomputed."""
    recompute, split = scenario.training.recompute, scenario.layout.layers_per_stage
    if recompute.layers is None or [*check_layers(scenario)]:
        return
    max_layers = max(partition_layers(split, scenario.model.layer_count, scenario.placement))
    if recompute.layers > max_layers:
        yield Problem(
            f"training.recompute.layers: {recompute.layers}, but no stage holds more than {max_layers} layers",
            Remedy("training.recompute.layers", ((max_layers,),)),
        )


def _fewer_stages(scenario: ResolvedScenario) -> Remedy:
    layers, layout = scenario.model.layer_count, scenario.layout.as_configured
    chunks = max(1, len(scenario.placement.stage_ranks) // layout.pp)
    allowed = (pp for pp in divisors(scenario.cluster.gpu_count // (layout.tp * layout.cp)) if pp * chunks <= layers)
    return Remedy.nearest("layout.pp", layout.pp, allowed)


def check_batch(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that the batch divides over replicas and microbatches, and that the schedule accepts the count."""
    batch, microbatch, dp = scenario.training.global_batch, scenario.training.microbatch, scenario.layout.dp
    bidirectional_text = f"dp {scenario.layout.as_configured.dp} x 2 ways of {scenario.schedule.name}"
    dp_text = bidirectional_text if scenario.layout.mirrored else f"dp {dp}"
    if batch < dp * microbatch:
        fed_ranks = batch // microbatch
        configured = scenario.layout.as_configured
        yield Problem(
            f"training.global_batch: {batch} sequences feed at most {fed_ranks} data-parallel ranks with microbatches "
            f"of {microbatch}, but {dp_text.replace('dp ', 'dp is ', 1)}",
            Remedy.nearest("layout.tp", configured.tp, (configured.tp * factor for factor in divisors(configured.dp))),
            _nearest_batches(scenario),
        )
    elif batch % (dp * microbatch):
        product = f"{dp_text} x microbatch {microbatch} = {dp * microbatch}"
        yield Problem(f"training.global_batch: {batch} is not a multiple of {product}", _nearest_batches(scenario))
    elif len(scenario.placement.stage_ranks) * scenario.microbatch_count > MAX_PASSES:
        yield (
            f"training.global_batch: {batch} sequences are {scenario.microbatch_count:,} microbatches on each of "
            f"{len(scenario.placement.stage_ranks)} stages; {MAX_PASSES:,} passes a step are the most "
            f"(tokens have their unit: {batch} tokens)"
        )
    else:
        yield from _check_pipeline_order(scenario)


def _nearest_batches(scenario: ResolvedScenario) -> Remedy:
    """Batches that divide over replicas and microbatches."""
    training = scenario.training
    return Remedy.multiples("training.global_batch", training.global_batch, scenario.layout.dp * training.microbatch)


def _check_pipeline_order(scenario: ResolvedScenario) -> Iterator[str]:
    if scenario.layout.pp == 1 and scenario.placement.max_chunks > 1:
        yield f"schedule: {scenario.schedule.name} needs a pipeline, but layout.pp is 1; write 1f1b"
        return
    try:
        scenario.effective_schedule.require_supported(scenario.layout.pp, scenario.microbatch_count)
    except InputError as error:
        yield Problem(f"schedule: {error}", _nearest_batches(scenario))


def check_sequence(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that the model has enough positions, and that cp and tp divide the sequence."""
    model, layout, sequence = scenario.model, scenario.layout, scenario.training.sequence
    cp_chunks = sequence_chunks(layout)
    if model.patches is not None and sequence != model.sample_tokens:
        yield (
            f"training.sequence: {sequence} tokens are no sample of {model.name}, which is {model.sample_tokens} "
            "tokens; leave it out, or give model.input_size"
        )
        return
    divisor = cp_chunks * layout.tp if layout.sequence_parallel else cp_chunks
    if model.positions is PositionEncoding.LEARNED and sequence > model.max_positions:
        yield Problem(
            f"training.sequence: {sequence} is longer than the {model.max_positions} learned positions of {model.name}",
            Remedy.multiples("training.sequence", model.max_positions + 1, divisor, at_most=model.max_positions),
        )
    if sequence % divisor:
        chunks = f"2 x cp {layout.cp}" if cp_chunks > layout.cp else f"cp {layout.cp}"
        factors = [chunks] * (layout.cp > 1) + [f"tp {layout.tp}"] * layout.sequence_parallel
        yield Problem(
            f"training.sequence: {sequence} is not a multiple of {' x '.join(factors)} = {divisor}",
            Remedy.multiples("training.sequence", sequence, divisor),
        )


def _check_step_count(scenario: ResolvedScenario) -> Iterator[str]:
    passes = len(scenario.placement.stage_ranks) * scenario.microbatch_count
    if scenario.steps > 1 and scenario.steps * passes > MAX_PASSES:
        yield Problem(
            f"steps: {scenario.steps:,} of {passes:,} passes each are {scenario.steps * passes:,} passes; "
            f"{MAX_PASSES:,} are the most",
            Remedy("steps", ((MAX_PASSES // passes,),)),
        )


def _check_jitter(scenario: ResolvedScenario) -> Iterator[str]:
    jitter = scenario.jitter
    if jitter and jitter.distribution is Distribution.NORMAL and jitter.std > MAX_NORMAL_STD:
        yield (
            f"degradations.jitter: normal jitter of {jitter.std:.6g} would make a duration negative; "
            f"at most {MAX_NORMAL_STD:.0%} fits, or {{std: {jitter.std:.6g}, distribution: lognormal}}"
        )


def check_adapters(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that the LoRA targets exist in the model, and that their rank fits the matrices and tp."""
    lora, model, tp = scenario.training.lora, scenario.model, scenario.layout.tp
    if lora is None or [*check_lora_experts(scenario)]:
        return
    layers = [projection_sizes(model, spec) for spec in model.distinct_specs]
    sizes_by_projection = {projection: sizes for layer in layers for projection, sizes in layer.items()}
    for target in lora.targets:
        if not sizes_by_projection.keys() & set(target.projections):
            available = (
                lora_target.value
                for lora_target in LoraTarget
                if sizes_by_projection.keys() & set(lora_target.projections)
            )
            yield f"training.lora.targets: {model.name} has no {target.value}; it has {', '.join(available)}"
    if not lora.targets:
        yield f"training.lora.targets: {model.name} has none of these matrices"
    min_sizes = [
        min(layer[projection])
        for layer in layers
        for target in lora.targets
        for projection in target.projections
        if projection in layer
    ]
    if min_sizes and lora.rank > min(min_sizes):
        largest = min(min_sizes)
        yield Problem(
            f"training.lora.rank: {lora.rank} is more than the {largest} inputs or outputs of a matrix of {model.name}",
            Remedy.multiples("training.lora.rank", largest + 1, tp, at_most=largest),
        )
    elif lora.rank % tp:
        yield Problem(
            f"training.lora.rank: {lora.rank} is not a multiple of tp {tp}, which splits the adapters' columns",
            Remedy.multiples("training.lora.rank", lora.rank, tp),
        )


def _check_torch_data_parallel(scenario: ResolvedScenario) -> Iterator[str]:
    layout, node_gpus = scenario.layout, scenario.cluster.gpus_per_node
    if not layout.data.is_single_process:
        return
    if layout.world_size > layout.dp or scenario.cluster.node_count > 1:
        yield (
            f"layout.data: data_parallel is one process on one node of {node_gpus} GPUs, but the layout is "
            f"{_format_product(layout, DISPLAY_AXES)}; use ddp"
        )


def check_shard_size(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that the shard group size divides the ranks that hold the same weights (dp x cp)."""
    layout = scenario.layout.as_configured
    shard_size, dp_cp_ranks = layout.data.shard_size, layout.cp * layout.dp
    allowed = [layout.cp * divisor for divisor in divisors(layout.dp)]
    if shard_size is not None and shard_size not in allowed:
        key = "zero_hpz_partition_size" if layout.data.zero_hpz_partition_size else "shard"
        degrees_text = f"dp {layout.dp}" if layout.cp == 1 else f"cp {layout.cp} x dp {layout.dp}"
        yield Problem(
            f"layout.data: {key} {shard_size} does not divide the {dp_cp_ranks} ranks ({degrees_text}) that hold the "
            f"same weights{'' if layout.cp == 1 else f' into groups of whole cp {layout.cp}'}",
            Remedy.nearest(f"{STRATEGY_KEY}.{key}", shard_size, allowed),
        )


def check_secondary_shards(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that backward gathers parameters at all where secondary shards (hpZ) are set."""
    data, pipelined = scenario.layout.data, scenario.layout.is_pipelined
    if data.zero_hpz_partition_size and not data.reshards_parameters(is_pipelined=pipelined):
        reason = (
            "with a pipeline the parameters that forward gathers stay"
            if pipelined
            else "reshard_after_forward is false"
        )
        yield (
            f"layout.data: zero_hpz_partition_size {data.zero_hpz_partition_size} is for backward's gathers, and "
            f"there are none ({reason}); "
            "leave it "
            "out, or write reshard_after_forward: true"
        )


def check_deepspeed_zero3(scenario: ResolvedScenario) -> Iterator[str]:
    """Check for features that DeepSpeed's ZeRO-3 of 2021 does not support."""
    layout, training = scenario.layout, scenario.training
    if not layout.data.gathers_single_parameters:
        return
    conflicts = {
        "model.experts": bool(scenario.model.distinct_moes),
        f"layout.pp {layout.as_configured.pp}": layout.pp > 1,
        "training.lora": training.lora is not None,
        "training.offload": training.offload != NO_OFFLOAD,
    }
    for setting in (name for name, is_set in conflicts.items() if is_set):
        yield f"layout.data: deepspeed_zero3 does not run with {setting}; fsdp and zero3 do, or leave it out"


_CheckRule = Callable[[ResolvedScenario], Iterator[str]]
_CHECKS: tuple[_CheckRule, ...] = (
    check_diloco,
    check_heads,
    check_context_parallel,
    check_context_groups,
    check_exchanged_heads,
    check_documents,
    check_widths,
    check_routers,
    check_expert_parallelism,
    check_parallel_folding,
    check_dispatcher,
    check_framework_dispatcher,
    check_sequence_parallel,
    check_expert_sharding,
    check_expert_load,
    check_layers,
    check_mtp,
    check_recompute_layers,
    check_mla_recompute,
    check_selected_keys,
    check_first_layer_readers,
    check_batch,
    check_sequence,
    check_images,
    check_encoder,
    check_adapters,
    check_lora_experts,
    check_moe_overlap,
    check_shared_expert_overlap,
    check_matmul_formats,
    check_attention_format,
    check_autocast,
    check_attention_library,
    check_matrix_block_size,
    check_token_block_size,
    check_high_precision_layers,
    check_lora_precision,
    check_shard_size,
    check_secondary_shards,
    check_deepspeed_zero3,
    _check_torch_data_parallel,
    check_offload,
    check_optimizer,
    check_optimizer_in_backward,
    check_reference_model,
    check_cross_entropy_metrics,
    check_tiled_mlp,
    check_z_loss,
    _check_step_count,
    _check_jitter,
)
