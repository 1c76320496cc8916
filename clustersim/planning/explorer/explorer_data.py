"""What would another layout, model or GPU count need? Lookup tables for a page that runs without a server.

The tables are filled by calling the package on scenarios with some settings changed
(`settings.ExplorerSpace`): legality (`legality`), schedules, memory and communication volumes
(`column_sizes`, `stage_counts`, `zero_memory`), stages and process groups. Step times are simulated in
advance (`scaling_studies`), on worker processes. Whatever the page cannot vary is as in the scenario: attention, loss,
optimizer, framework, cluster.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from clustersim.common.arrays import IntArray
from clustersim.common.dtypes import DType
from clustersim.common.errors import InputError
from clustersim.common.processes import TASKS_PER_WORKER, iterate_completed, worker_pool
from clustersim.hardware.clos_fabric import ClosFabric
from clustersim.hardware.clos_spec import even_domain_gpus
from clustersim.hardware.cluster import Cluster
from clustersim.hardware.degradation import Degradations
from clustersim.hardware.rank_mapping import RankMappedFabric
from clustersim.hardware.topology import Fabric
from clustersim.model.attention_spec import FullAttention
from clustersim.model.layer_stack import LayerGroup, LayerSpec, merge_groups
from clustersim.model.mixer import ContextRule
from clustersim.model.offload import NO_OFFLOAD
from clustersim.model.precision_recipe import PrecisionRecipe, mixed_precision
from clustersim.model.presets import code_presets
from clustersim.model.recipe_files import load_recipe
from clustersim.model.training import DotsSaveableRecompute
from clustersim.model.transformer import TransformerModel, change_layer, parameter_count
from clustersim.parallel.mesh import PIPELINE, TENSOR
from clustersim.planning.explorer.column_sizes import column_names, column_sizes
from clustersim.planning.explorer.expert_traffic import dispatch_bytes_table
from clustersim.planning.explorer.legality import legality_tables
from clustersim.planning.explorer.omissions import describe_omissions, drawn_scenario
from clustersim.planning.explorer.scaling_studies import StepVariant, assemble_studies, step_tasks
from clustersim.planning.explorer.schedule_tables import build_schedule_tables
from clustersim.planning.explorer.settings import (
    EXPLORED_SCHEDULES,
    FEATURES,
    ExplorerSpace,
    chunk_count,
    has_own_layers,
    is_explored,
)
from clustersim.planning.explorer.stage_counts import stage_count_tables
from clustersim.planning.explorer.stages_and_groups import comm_group_axes, mesh_axes, peer_table, stage_table
from clustersim.planning.explorer.zero_memory import (
    communicator_tables,
    expert_group_index,
    fragmentation_factors,
    group_columns,
    pending_receives_table,
    reused_columns,
    workspace_bytes,
    zero_table,
)
from clustersim.results.explorer_tables import (
    ExplorerCluster,
    ExplorerData,
    ExplorerTables,
    ModelDescription,
    ScalingPoint,
)
from clustersim.scenario import Scenario
from clustersim.scenario.changes.expert_parallel import with_expert_load
from clustersim.scenario.changes.precision import default_recipe_name
from clustersim.scenario.changes.training import without_offload
from clustersim.scenario.config.scenario import ScenarioConfig
from clustersim.scenario.loaders import job_view, read_allocation, read_cluster
from clustersim.uncertainty.holdout import holdout_result

MODELS: Final = (
    "gpt2-small", "gpt2-xl", "gpt3-1.3b", "gpt3-6.7b", "megatron-7.5b", "llama3-8b", "gpt3-13b", "megatron-22b",
    "llama3-70b", "gpt3-175b", "nemotron4-340b", "llama3-405b", "megatron-530b", "megatron-1t",
)  # fmt: skip
"""Model presets that the page offers, from small to large."""
_LOW_PRECISION_DTYPES: Final = (DType.FP8, DType.MXFP8, DType.NVFP4)
MAX_EXPLORED_GPUS: Final = 2**15
MIN_EXPLORED_GPUS: Final = 1024  # or four times the scenario's GPU count, as far as the cluster allows
_MIXED_RECIPES: Final = (
    ("mixed precision, BF16", mixed_precision()),
    ("BF16 with BF16 gradients", mixed_precision(gradients=DType.BF16)),
    ("FP32", mixed_precision(DType.FP32, master=None)),
)


def build_exploration(
    scenario: Scenario, report_progress: Callable[[int], None] = lambda _done: None, *, workers: int = 1
) -> ExplorerData:
    """All data of the explorer page.

    report_progress: gets the number of simulated steps, out of as many as `step_tasks`; workers: processes.
    """
    tasks: dict[StepVariant | None, Callable[[], ExplorerData | ScalingPoint]] = {}
    tasks[None] = partial(build_exploration_tables, scenario)  # first, as it takes longest
    tasks.update(step_tasks(scenario).items())
    points: dict[StepVariant, ScalingPoint] = {}
    explorations: list[ExplorerData] = []
    next_task = partial(next, iter(tasks.items()), None)
    with worker_pool(workers) as pool:
        for variant, result in iterate_completed(pool, 1 if workers == 1 else TASKS_PER_WORKER * workers, next_task):
            if isinstance(result, ExplorerData):
                explorations.append(result)
            elif variant is not None:
                points[variant] = result
                report_progress(len(points))
    return replace(explorations[0], studies=assemble_studies(scenario, points))


def build_exploration_tables(scenario: Scenario) -> ExplorerData:
    """The data that needs no simulation; studies are empty."""
    formats = dict(_offered_recipes(scenario))
    largest, gpu_counts = _largest_cluster(scenario)
    without_omitted = drawn_scenario(scenario)
    omission = describe_omissions(scenario, without_omitted)
    drawn = with_expert_load(without_offload(without_omitted), None)
    space = ExplorerSpace(drawn, tuple(_offered_models(drawn)), tuple(formats), gpu_counts)
    return ExplorerData(
        name=scenario.name,
        models=tuple(map(_model_summary, space.models)),
        formats=tuple(formats.values()),
        machine=_machine_summary(scenario, largest, gpu_counts[-1]),
        choices=space.offered_values,
        start=space.start,
        tables=_setting_tables(space),
        studies=(),
        warnings=() if omission is None else (omission,),
        notes=(*_omission_notes(scenario), *_partial_domain_notes(scenario, gpu_counts)),
    )


def _setting_tables(space: ExplorerSpace) -> ExplorerTables:
    schedule_table, rejection_table = build_schedule_tables(space)
    return ExplorerTables(
        derived=(*space.derived_counts, *FEATURES),
        chunks=space.build_table(lambda **settings: chunk_count(space.schedule_with(settings)), "schedule", "chunks"),
        flags=space.data_parallel_flags(),
        rules=legality_tables(space, rejection_table),
        stages=stage_table(space),
        columns=column_names(space),
        features=tuple(name for name, *_ in FEATURES),
        sizes=column_sizes(space),
        rows=stage_count_tables(space),
        groups=group_columns(space),
        reused=reused_columns(space),
        experts=expert_group_index(space),
        sharing=zero_table(space),
        sends=dispatch_bytes_table(space),
        buffers=tuple(communicator_tables(space)),
        receives=pending_receives_table(space),
        context=space.scenario.cluster.accelerator.context_bytes,
        workspace=workspace_bytes(space),
        fragmentation=fragmentation_factors(space),
        schedules=schedule_table,
        orders=mesh_axes(space),
        roles=comm_group_axes(space),
        partners=peer_table(space),
    )


def _offered_models(scenario: Scenario) -> Iterator[TransformerModel]:
    model = _simplified_model(scenario)
    yield model
    if model.distinct_moes or has_own_layers(model):  # other models have other legal degrees and columns
        return
    yield from (code_presets()[name].model for name in MODELS if code_presets()[name].model != scenario.model)


def _simplified_model(scenario: Scenario) -> TransformerModel:
    """The model without attention windows and partial rotary embeddings, which change no bytes held or sent.

    Raise InputError for models that the page does not support.
    """
    model = scenario.model
    if model.patches is not None and scenario.layout.cp > 1:
        raise InputError(
            f"layout.cp: {scenario.layout.cp} ranks share the images of {model.name}, which the explorer's page does "
            "not know; run, check, search and what-if do"
        )
    for mixer in model.distinct_mixers:
        if mixer.saves_by_selection:
            raise InputError(
                f"model: {model.name} has layers with {mixer.label}, whose memory is not proportional to tokens or "
                "pairs of them, as all on the explorer's page is; run, check, search and what-if know all"
            )
        if scenario.layout.cp > 1 and mixer.context_rule is not ContextRule.KV_RING:
            raise InputError(
                f"layout.cp: {scenario.layout.cp} ranks share sequences of layers with {mixer.label}, and the "
                "explorer's page knows rings of keys and values alone; run, check, search and what-if know all"
            )
    groups = (LayerGroup(_without_window(group.spec), group.count) for group in model.stack)
    simplified = replace(model, stack=merge_groups(groups))
    if model.distinct_routed_moes:
        _check_moe_supported(scenario)
    return simplified


def _without_window(spec: LayerSpec) -> LayerSpec:
    return change_layer(spec, window=None, rotary_percent=1.0) if isinstance(spec.attention, FullAttention) else spec


def _check_moe_supported(scenario: Scenario) -> None:
    """Raise InputError for settings that the page does not support together with experts."""
    layout, model = scenario.layout, scenario.model
    unsupported = {
        f"layout.data: cuts weights over {layout.data.shard_size} of the ranks that hold them": layout.data.shard_size,
        f"layout.order: {list(layout.order)} does not begin with tp and end with pp": (
            (layout.order[0], layout.order[-1]) != (TENSOR.name, PIPELINE.name)
        ),
        "model.experts: take whole rows, as they have a capacity": any(
            distinct_moe.capacity_factor for distinct_moe in model.distinct_moes
        ),
        "model: has MoE layers that differ": len(set(model.distinct_moes)) > 1,
    }
    for description in (description for description, applies in unsupported.items() if applies):
        raise InputError(
            f"{description}, which the explorer's page does not know with the experts of {model.name}; run, check "
            "and "
            "what-if do"
        )


def _model_summary(model: TransformerModel) -> ModelDescription:
    return ModelDescription(model.name, parameter_count(model), dict(_model_dimensions(model)))


def _model_dimensions(model: TransformerModel) -> Iterator[tuple[str, int]]:
    """The dimensions that limit parallel degrees: of attention, dense MLP and experts, as far as layers have them."""
    yield from {"layers": model.layer_count, "hidden": model.hidden, "vocab": model.vocab}.items()
    for attention in model.distinct_attentions:
        kv_heads = attention.kv_heads
        yield from {"heads": attention.heads, "kv_heads": kv_heads, "head_dim": attention.head_dim}.items()
    for mlp in model.distinct_dense_mlps:
        yield "ffn", mlp.ffn
    for moe in model.distinct_moes:
        yield from {"experts": moe.experts, "top_k": moe.top_k, "expert_ffn": moe.ffn}.items()
        yield "shared", moe.shared


def _offered_recipes(scenario: Scenario) -> Iterator[tuple[PrecisionRecipe, str]]:
    """The scenario's precision recipe and the common ones that its accelerators support, each with a label."""
    configured = _configured_recipe(scenario)
    alternatives = [(precision, name) for name, precision in _MIXED_RECIPES] + [*_low_precision_recipes(scenario)]
    yield configured, dict(alternatives).get(configured, "as in the scenario")
    for precision, name in alternatives:
        if precision != configured and all(_peak_available(scenario, precision)):
            yield precision, name


def _configured_recipe(scenario: Scenario) -> PrecisionRecipe:
    """The recipe of the scenario file, without what the page does not support (`_unsupported_format_notes`)."""
    precision = ScenarioConfig.model_validate(scenario.to_mapping()).training.precision
    recipe = precision.recipe(scenario.framework.kernels.gradients)
    return replace(
        recipe,
        stored=None,
        gathered=None,
        dispatch_format=None,
        num_layers_at_start_in_bf16=0,
        num_layers_at_end_in_bf16=0,
    )


def _low_precision_recipes(scenario: Scenario) -> Iterator[tuple[PrecisionRecipe, str]]:
    """The default recipe of each scaled low-precision format; none with LoRA."""
    names = (
        ()
        if scenario.training.lora is not None
        else (default_recipe_name(scenario, dtype) for dtype in _LOW_PRECISION_DTYPES)
    )
    yield from ((load_recipe(name), f"recipe {name}") for name in names)


def _peak_available(scenario: Scenario, precision: PrecisionRecipe) -> Iterator[bool]:
    for accelerator in scenario.cluster.accelerator_kinds()[0]:
        try:
            accelerator.peak_flops(precision.compute)
        except InputError:
            yield False


def _machine_summary(scenario: Scenario, largest: Cluster, gpus: int) -> ExplorerCluster:
    cluster = scenario.cluster
    levels, top = _tier_units(largest.machine, largest.machine_gpu_ids[:gpus])
    return ExplorerCluster(
        cluster=cluster.name,
        accelerator=" and ".join(accelerator.name for accelerator in cluster.accelerator_kinds()[0]),
        capacity=min(accelerator.memory_bytes for accelerator in cluster.accelerator_kinds()[0]),
        per_node=cluster.gpus_per_node,
        levels=levels,
        top=top,
    )


def _largest_cluster(scenario: Scenario) -> tuple[Cluster, tuple[int, ...]]:
    """The largest healthy cluster of this kind that is offered, and the GPU counts offered up to its size."""
    section = ScenarioConfig.model_validate(scenario.to_mapping()).cluster
    base = Path() if scenario.path is None else scenario.path.parent
    allocation = read_allocation(section.placement, base)
    gpu_count, node = scenario.cluster.gpu_count, scenario.cluster.gpus_per_node
    if allocation is not None:
        node = allocation.job_size_multiple(scenario.cluster.unit_sizes)
    max_gpus = max(gpu_count, min(MAX_EXPLORED_GPUS, max(MIN_EXPLORED_GPUS, 4 * gpu_count)))
    doubled = {2**power for power in range(max_gpus.bit_length())} | {
        node * 2**power for power in range(max_gpus.bit_length())
    }
    gpu_counts = sorted(
        {gpu_count} | {gpus for gpus in doubled if gpus <= max_gpus and (gpus <= node or gpus % node == 0)}
    )
    can_grow = allocation is None or allocation.is_prefix_stable
    for gpus in reversed([gpus for gpus in gpu_counts if gpus > gpu_count and can_grow]):
        try:
            machine = read_cluster(section, base, gpus, allocation)
            return job_view(machine, allocation, gpus), tuple(count for count in gpu_counts if count <= gpus)
        except InputError:  # the fabric supports fewer GPUs
            continue
    return scenario.cluster, tuple(count for count in gpu_counts if count <= gpu_count)


def _tier_units(fabric: Fabric, gpus: IntArray) -> tuple[tuple[tuple[str, IntArray], ...], str]:
    """The unit of each GPU on every tier, innermost first, and the tier above (names as in `Fabric.highest_tier`).

    Fabrics that are general graphs only have NVLink domains and nodes, since tiers would need routes.
    """
    domain, node = fabric.domain_ids(gpus), fabric.node_ids(gpus)
    if not isinstance(fabric, ClosFabric):
        return (("nvlink", domain), ("node", node)), "network"
    leaves = fabric.leaf_ids(fabric.node.nic_ids(gpus)) if fabric.node.nics_per_node else node
    pods = fabric.pod_ids(leaves) if fabric.node.nics_per_node else node
    nvlink_tier = [("nvlink", domain)] if fabric.node.nvlink else []
    return (*nvlink_tier, ("host", gpus // fabric.node.scale_up_gpus), ("leaf", leaves), ("spine", pods)), "core"


def _partial_domain_notes(scenario: Scenario, gpu_counts: Sequence[int]) -> Iterator[str]:
    """A note if some job sizes use other GPUs of each NVLink domain than the largest, as which all are drawn."""
    fabric = scenario.cluster.fabric
    if not isinstance(fabric, ClosFabric) or fabric.node.nvlink is None:
        return
    node, domain = fabric.node.gpu_count, fabric.node.nvlink.full_domain_gpus or fabric.node.nvlink.gpu_count
    drawn_gpus = even_domain_gpus(gpu_counts[-1], node, domain)
    if any(even_domain_gpus(gpus, node, domain) != drawn_gpus for gpus in gpu_counts if gpus > drawn_gpus):
        yield (
            f"NVLink domains are drawn with the {drawn_gpus} GPUs of each that the largest size offered, "
            f"{gpu_counts[-1]:,}, "
            "uses; other sizes may use more or fewer of each, as simulated steps do."
        )


def record_notes(scenario: Scenario) -> Iterator[str]:
    """What hold-out steps say of the calibration record, if it was measured on the scenario's accelerator."""
    record = scenario.cost.record
    holdout = holdout_result(record)
    if record is not None and holdout is not None and holdout.accelerator == scenario.cluster.accelerator.name:
        yield f"Simulated steps rest on the record of {record.device.name}, which {holdout.description}."


def _unsupported_format_notes(recipe: PrecisionRecipe) -> Iterator[str]:
    """A note about features of the recipe that the page does not support."""
    features = {
        f"layers at the ends in {recipe.activations.value}": recipe.num_layers_at_start_in_bf16
        or recipe.num_layers_at_end_in_bf16,
        "matrices that are kept or gathered in other formats": recipe.has_matrix_formats,
        "tokens that travel to experts in other formats": recipe.dispatch_format,
    }
    left_out = [description for description, is_used in features.items() if is_used]
    if left_out:
        yield f"Not drawn of training.precision: {', '.join(left_out)}; simulated steps are the scenario's."


def _sequence_notes(scenario: Scenario) -> Iterator[str]:
    """Notes on recomputation, packed documents, and layers that one rank can have or whose sequences no rings split."""
    if scenario.training.recompute == DotsSaveableRecompute():
        yield "In fewer bits, gathers that casts repeat in recomputation are not drawn; simulated steps have them."
    if scenario.training.documents is not None:
        yield "Packed documents change no memory and no traffic drawn here; simulated steps have them."
    if any(mixer.context_rule is not ContextRule.KV_RING for mixer in scenario.model.distinct_mixers):
        yield (
            f"cp is offered with attention alone: other layers of {scenario.model.name} exchange tokens for heads, or "
            "states, which the page does not know."
        )
    if any(mixer.reads_first_layer for mixer in scenario.model.distinct_mixers):
        yield f"pp is 1: layers of {scenario.model.name} read what is before the first one, so that one rank has all."
    if scenario.model.patches is not None:
        tokens = f"{scenario.model.sample_tokens:,}"
        yield f"Sequences are the images of {scenario.model.name}, of {tokens} tokens, uncut (cp 1)."


def _omission_notes(scenario: Scenario) -> Iterator[str]:
    """Notes about everything in the scenario that the page leaves out."""
    yield from record_notes(scenario)
    yield from _unsupported_format_notes(scenario.training.recipe)
    if scenario.training.offload != NO_OFFLOAD:
        yield "Offload is left out of memory: all is drawn as on the device; simulated steps are the scenario's."
    if scenario.framework.zero3_bucket_bytes or scenario.framework.zero3_live_bytes:
        yield (
            f"ZeRO-3's bucket of gradients and the parameters that {scenario.framework.name} keeps for their next use "
            "are left out of memory; simulated steps have them."
        )
    yield from _sequence_notes(scenario)
    if scenario.training.expert_load is not None:
        yield "Tokens are drawn as spread evenly over experts; simulated steps have the scenario's loads."
    if not is_explored(scenario.schedule):
        yield (
            f"The scenario's schedule {scenario.schedule.name} is none that the page can play; memory and bubble are "
            f"drawn for {EXPLORED_SCHEDULES[0]} instead, simulated steps are the scenario's."
        )
    if scenario.layout.data.is_single_process:
        yield "The scenario's data_parallel (one process) is drawn as ddp; simulated steps are the scenario's."
    if scenario.training.lora is not None:
        yield "All models are drawn with the scenario's adapters of frozen weights."
    if scenario.degradations != Degradations() or scenario.jitter is not None or scenario.has_background_load:
        yield "Degradations and jitter of the scenario are left out: all GPUs and links are healthy."
    if isinstance(scenario.cluster.fabric, RankMappedFabric):
        yield (
            "Ranks are placed as in the scenario (cluster.placement); of fewer GPUs its first ranks are drawn, and "
            "more are offered where its placement says which they would be."
        )
    if scenario.cluster.accelerator_overrides:
        yield "GPUs are of several kinds: memory is compared with the smallest, and simulated steps need all the nodes."
