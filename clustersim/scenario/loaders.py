"""How do config models become model, cluster, layout and schedule? Loaders of all referenced objects.

Names are looked up in the packaged data, paths relative to the scenario file first and to the working
directory second.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from clustersim.collectives.library import ALGORITHMS, Library
from clustersim.collectives.phase import CollectiveAlgorithm
from clustersim.common import data_files
from clustersim.common.arrays import IntArray
from clustersim.common.errors import InputError, suggest_nearest
from clustersim.common.plugins import module_file
from clustersim.common.renamed_keys import reject_renamed_algorithm
from clustersim.hardware.allocation import Allocation
from clustersim.hardware.cluster import Cluster, load_cluster, load_machine
from clustersim.model.flops import encoder_image_flops, layer_token_flops
from clustersim.model.framework import Framework, GraphCapture
from clustersim.model.framework_files import load_framework
from clustersim.model.layer_stack import layer_specs
from clustersim.model.moe_expert_load import ExpertLoad
from clustersim.model.transformer import TransformerModel
from clustersim.parallel.context_parallel import ContextParallelKind
from clustersim.parallel.layer_partition import BalancedFlops, BehindEncoder
from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import DATA, PIPELINE
from clustersim.program.task import CollectiveType
from clustersim.scenario.config.cost import CostRecordConfig, RecordScaleConfig
from clustersim.scenario.config.expert_load import ExpertLoadConfig
from clustersim.scenario.config.layout import EncoderPlacement, LayoutConfig
from clustersim.scenario.config.placement import PlacementConfig
from clustersim.scenario.config.reliability import ReliabilityConfig
from clustersim.scenario.config.scenario import ClusterConfig, FrameworkConfig, ScenarioConfig
from clustersim.scenario.config.schedule import (
    ChunkedScheduleConfig,
    CsvScheduleConfig,
    CustomScheduleConfig,
    InlineScheduleConfig,
    InterleavedScheduleConfig,
    ScheduleConfig,
)
from clustersim.scenario.file_cache import ReadCache
from clustersim.scenario.reliability import ReliabilityModel
from clustersim.schedules.interleaved import Interleaved
from clustersim.schedules.registry import build_schedule
from clustersim.schedules.schedule import Schedule

if TYPE_CHECKING:
    from clustersim.cost.calibration_record import CalibrationRecord

_COPIED_LAYOUT_FIELDS: Final = tuple(
    layout_field.name for layout_field in fields(Layout) if layout_field.name not in ("mirrored", "is_encoder")
)
"""Fields of a layout that are keys of its section."""
FEWEST_PAIRED_RANKS: Final = 4
"""Fewest pipeline ranks of a bidirectional schedule."""


def read_allocation(config: PlacementConfig | None, base_dir: Path) -> Allocation | None:
    """The job's GPU allocation; None if the file has no placement."""
    return None if config is None else config.allocation(base_dir)


def read_expert_load(config: ExpertLoadConfig | None, base_dir: Path) -> ExpertLoad | None:
    """The imbalance of tokens over experts; None where they are balanced."""
    return None if config is None else config.expert_load(base_dir)


def read_cluster(
    config: ClusterConfig, base_dir: Path, gpus: int | None, allocation: Allocation | None = None
) -> Cluster:
    """The cluster that a section names, with `gpus` GPUs (None: as many as its file has).

    With an allocation it is the full cluster, large enough for the job's allocation; see `job_view`.
    """
    if (config.name is None) == (config.path is None):
        raise InputError("needs a name or a path, and not both")
    name_or_path = config.name if config.path is None else str(data_files.resolve_relative(base_dir, config.path))
    overrides = config.overrides
    if config.accelerator is not None:
        overrides["accelerator"] = resolve_accelerator(config.accelerator, base_dir)
    if allocation is None:
        return load_cluster(str(name_or_path), gpu_count=gpus, overrides=overrides or None)
    return load_machine(str(name_or_path), allocation, gpus, overrides or None)


def resolve_accelerator(source: str | dict[str, Any], base_dir: Path) -> str | dict[str, Any]:
    """An accelerator's name, path or mapping, with the path of its file, or of the one it is like, resolved."""
    if isinstance(source, dict):
        like = source.get("like")
        return {**source, "like": resolve_accelerator(like, base_dir)} if isinstance(like, str) else source
    return str(data_files.resolve_relative(base_dir, source)) if data_files.is_path(source) else source


def job_view(cluster: Cluster, allocation: Allocation | None, gpus: int | None) -> Cluster:
    """The cluster restricted to a job of `gpus` GPUs (None: all allocatable); unchanged without an allocation."""
    return (
        cluster
        if allocation is None
        else cluster.with_rank_mapping(allocation.rank_gpus(cluster.fabric, gpus, cluster.unit_sizes))
    )


def read_framework(config: FrameworkConfig, base_dir: Path) -> Framework:
    """A packaged framework by name or a file, with the section's CUDA graph, compilation and launch-time settings."""
    name = config.name
    path = str(data_files.resolve_relative(base_dir, name)) if data_files.is_path(name) else name
    framework = load_framework(path, config.version or "", config.recipe or "")
    framework = (
        framework.with_cuda_graphs(config.cuda_graph_scope)
        if config.cuda_graph_scope is not GraphCapture.NOTHING
        else framework
    )
    framework = framework.with_compiled() if config.torch_compile else framework
    framework = replace(framework, numa_bound=config.numa_binding or False)
    return framework.with_launch_seconds(config.launch, config.backward_launch)


def read_reliability(config: ReliabilityConfig, base_dir: Path) -> ReliabilityModel:
    """The failure model over its preset; paths are resolved against base_dir."""
    return config.reliability_model(base_dir)


def read_algorithm(
    name: str, collective: CollectiveType, library: Library, base_dir: Path, read_cache: ReadCache
) -> CollectiveAlgorithm | None:
    """The user's algorithm of a name; None for one of the library's. Raises InputError for unknown names."""
    supported = library.algorithms_for(collective)
    if name in supported:
        return None
    from clustersim.collectives.custom_algorithm import installed_algorithms, load_custom_algorithm

    reject_renamed_algorithm(name)
    if name in ALGORITHMS or (":" not in name and name not in installed_algorithms()):
        valid_names = (*supported, *installed_algorithms())
        raise InputError(
            f"library {library.name} does not offer {name!r} for {collective.value}; "
            f"{suggest_nearest(name, valid_names)}"
        )
    if not supported or collective.is_token_routing:
        raise InputError(f"library {library.name} has no constants of {collective.value}, which {name} would take")
    return read_cache.get_or_read(load_custom_algorithm, name, base_dir)


def find_record_file(name: str, base_dir: Path) -> Path:
    """The path of a calibration record: packaged by name, or a path resolved against base_dir."""
    return (
        data_files.resolve_relative(base_dir, name)
        if data_files.is_path(name)
        else data_files.find_file("records", name)
    )


def read_cost_record(
    config: CostRecordConfig, base_dir: Path, cluster: Cluster, read_cache: ReadCache
) -> "CalibrationRecord":
    """The calibration record for the cluster's accelerator; raises InputError for another one without a scale."""
    from clustersim.cost.record_file import read_record

    record = read_cache.get_or_read(read_record, read_cache.get_or_read(find_record_file, config.file, base_dir))
    accelerators = [accelerator.name for accelerator in cluster.accelerator_kinds()[0]]
    measured_accelerator = record.device.accelerator
    if config.scale is not None and len(accelerators) > 1 and measured_accelerator in accelerators:
        raise InputError(
            f"{config.file} was measured on {measured_accelerator}, which the cluster has; leave scale out"
        )
    if config.scale is not None:
        return read_cache.get_or_read(_scale_record, record, config.scale, accelerators[0])
    if measured_accelerator not in accelerators:
        raise InputError(
            f"{config.file} was measured on {measured_accelerator}, but the cluster has "
            f"{' and '.join(accelerators)}; measure "
            f"there, or carry it over: {{file: {config.file}, scale: {{compute: 1.0, bandwidth: 1.0}}}}, with the "
            f"ratios of {accelerators[0]} to {measured_accelerator}"
        )
    return record


def _scale_record(record: "CalibrationRecord", scale: RecordScaleConfig, accelerator: str) -> "CalibrationRecord":
    """A record scaled to another accelerator."""
    from clustersim.cost.record_scaling import scale_record

    scaled_record = scale_record(record, compute=scale.compute, bandwidth=scale.bandwidth)
    return replace(scaled_record, device=replace(scaled_record.device, accelerator=accelerator))


def referenced_files(
    config: ScenarioConfig, cluster: Cluster, base_dir: Path, read_cache: ReadCache
) -> tuple[Path, ...]:
    """All files that the scenario reads, and those of its cluster."""
    model = () if config.model.path is None else (_model_file(config.model.path, base_dir),)
    record = (
        ()
        if config.cost.record is None
        else (read_cache.get_or_read(find_record_file, config.cost.record.file, base_dir),)
    )
    framework_name = config.framework.name
    framework = (data_files.resolve_relative(base_dir, framework_name),) if data_files.is_path(framework_name) else ()
    placement = config.cluster.placement
    order = () if placement is None else placement.files(base_dir)
    expert_load = config.training.expert_load
    token_counts = () if expert_load is None else expert_load.files(base_dir)
    algorithm_paths = (
        module_file(name, base_dir)
        for name in dict.fromkeys(name for *_, name in config.cost.named_algorithms)
        if ":" in name
    )
    algorithms = tuple(path for path in algorithm_paths if path.is_file())
    return (
        *model,
        *record,
        *algorithms,
        *framework,
        *_schedule_files(config.schedule, base_dir),
        *order,
        *token_counts,
        *cluster.files,
    )


def _model_file(name: str, base_dir: Path) -> Path:
    from clustersim.model.hf_config import config_path

    return config_path(data_files.resolve_relative(base_dir, name))


def _schedule_files(choice: ScheduleConfig, base_dir: Path) -> tuple[Path, ...]:
    match choice.chosen[1]:
        case CsvScheduleConfig(file=name):
            return (data_files.resolve_relative(base_dir, name),)
        case CustomScheduleConfig(class_path=name) if (path := module_file(name, base_dir)).is_file():
            return (path,)
    return ()


def read_layout(
    config: ScenarioConfig, model: TransformerModel, gpus: int, framework: Framework, schedule: Schedule
) -> Layout:
    """The layout; a dp that is left out is the GPU count over the product of the other degrees (at least 1).

    Experts are whole by default, as recipes have them (Megatron-LM's own default is tp: its importer writes it).
    Communication, released outputs and cp_kind are the framework's where the section leaves them out; MoE communication
    is overlapped by default where the schedule is designed for it (DualPipe, DualPipeV). Raises InputError for DualPipe
    on an odd number of ranks.
    """
    section, sequence = config.layout, config.training.sequence_tokens
    has_own_stage = section.encoder_placement is EncoderPlacement.OWN_STAGE
    balanced = partial(_balanced_flops, model, sequence, encoder=not has_own_stage)
    partition = section.layers_per_stage.layer_partition(balanced)
    overlap_setting, defaults = section.overlap_moe_expert_parallel_comm, framework.layout_defaults
    is_bidirectional = schedule.is_bidirectional
    overlaps_by_default = schedule.overlaps_passes and section.ep > 1
    copied_fields = {name: getattr(section, name) for name in _COPIED_LAYOUT_FIELDS}
    pp, dp = section.pp, section.dp or max(1, (gpus - section.encoder_ranks) // section.ranks_per_replica)
    if is_bidirectional:
        pp, dp = bidirectional_degrees(pp, dp)
    return Layout(
        **{
            **copied_fields,
            "cp_kind": section.cp_kind or _context_kind(section.cp, framework),
            "etp": 1 if section.etp is None and model.distinct_routed_moes else section.etp,
            PIPELINE.name: pp,
            DATA.name: dp,
            "mirrored": is_bidirectional,
            "order": tuple(section.order),
            "data": section.data.strategy(defaults),
            "layers_per_stage": BehindEncoder(partition) if has_own_stage else partition,
            "overlap_moe_expert_parallel_comm": overlaps_by_default if overlap_setting is None else overlap_setting,
            **_framework_ways(section, framework, schedule),
        }
    )


def _framework_ways(section: LayoutConfig, framework: Framework, schedule: Schedule) -> dict[str, bool]:
    """What the framework does in its way unless the section says otherwise."""
    defaults = framework.layout_defaults
    by_default = {
        "deallocate_pipeline_outputs": framework.deallocate_pipeline_outputs,
        "overlap_p2p_comm": defaults.overlaps_sends(has_chunks=_has_chunks(schedule, section.pp)),
        "async_tensor_model_parallel_allreduce": defaults.async_tensor_model_parallel_allreduce,
    }
    stated = {name: getattr(section, name) for name in by_default}
    return {name: default if stated[name] is None else stated[name] for name, default in by_default.items()}


def _has_chunks(schedule: Schedule, ranks: int) -> bool:
    """Whether ranks have several stages; what a schedule does not support is found when the scenario is checked."""
    try:
        return schedule.placement(ranks).max_chunks > 1
    except InputError:
        return False


def _context_kind(degree: int, framework: Framework) -> ContextParallelKind:
    """The framework's kind of context parallelism; one rank has none, and exchanges nothing of any."""
    kinds = framework.supported_layouts.context_parallel
    return ContextParallelKind(kinds[0]) if degree > 1 else ContextParallelKind.RING


def _balanced_flops(model: TransformerModel, sequence: int, *, encoder: bool) -> BalancedFlops:
    """Model FLOP of each layer, of which a causal mask's half is counted, of the logits and of an encoder.

    encoder: it runs on the first of these stages.
    """
    tower = model.encoder if encoder else None
    encoder_flops = 0.0 if tower is None else encoder_image_flops(tower) * tower.samples / sequence
    by_spec = {spec: layer_token_flops(model, spec, sequence) for spec in model.distinct_specs}
    layer_flops = tuple(by_spec[spec] for spec in layer_specs(model.stack))
    return BalancedFlops(layer_flops, 6.0 * model.vocab * model.hidden, encoder_flops)


def bidirectional_degrees(pp: int, dp: int) -> tuple[int, int]:
    """The pp and dp degrees of a bidirectional pipeline, as two half-length pipelines in opposite directions.

    Raises InputError for an odd number of ranks, or fewer than `FEWEST_PAIRED_RANKS`.
    """
    if pp % 2 or pp < FEWEST_PAIRED_RANKS:
        raise InputError(
            f"pp: {pp}, but dualpipe's ranks are pairs, each with stages that the other has, too: an even number, at "
            f"least {FEWEST_PAIRED_RANKS}"
        )
    return pp // 2, 2 * dp


def requested_gpu_count(cluster: ClusterConfig, layout: LayoutConfig) -> int | None:
    """GPUs that the file requests: the cluster's, else the layout's product of degrees, None if dp is left out."""
    if cluster.gpus is not None or layout.dp is None:
        return cluster.gpus
    return layout.encoder_ranks + layout.ranks_per_replica * layout.dp


def read_schedule(choice: ScheduleConfig, base_dir: Path, read_cache: ReadCache) -> Schedule:
    """The schedule: a built-in one, or from the user's CSV file, inline rows or Python class."""
    name, options = choice.chosen
    match options:
        case CsvScheduleConfig():
            return read_cache.get_or_read(_read_csv_schedule, options, base_dir)
        case InlineScheduleConfig():
            return _parse_rows(options.name, "\n".join(options.rows), options.placement)
        case CustomScheduleConfig():
            from clustersim.schedules.custom_schedule import load_custom_schedule

            return read_cache.get_or_read(load_custom_schedule, options.class_path, options.arguments, base_dir)
        case InterleavedScheduleConfig(microbatch_group_size=int() as group_size):
            return Interleaved(options.chunks, group_size)
        case ChunkedScheduleConfig():
            return build_schedule(name, options.chunks)
    return build_schedule(name)


def _read_csv_schedule(config: CsvScheduleConfig, base_dir: Path) -> Schedule:
    """The schedule of a CSV file, resolved against base_dir."""
    path = data_files.resolve_relative(base_dir, config.file)
    csv_names = sorted(path.stem for path in base_dir.glob("*.csv"))
    try:
        text = data_files.read_text(path)
    except InputError as error:
        if path.exists() or not csv_names:
            raise
        raise InputError(
            f"{error}; {suggest_nearest(path.stem, csv_names)} (of the CSV files next to the scenario)"
        ) from error
    return _parse_rows(config.file, text, config.placement)


def _parse_rows(name: str, text: str, placement: Sequence[int] | None) -> Schedule:
    """The schedule of rows of actions; placement: rank of each stage."""
    from clustersim.schedules.csv_format import parse_csv
    from clustersim.schedules.csv_schedule import csv_schedule

    return csv_schedule(name, parse_csv(text, name), placement)


def gpu_ids_to_ranges(gpu_ids: IntArray) -> list[int | str]:
    """GPU ids as a scenario file lists them: single ids, and ranges of consecutive ones."""
    id_runs = np.split(gpu_ids, np.flatnonzero(np.diff(gpu_ids) != 1) + 1)
    return [int(id_run[0]) if len(id_run) == 1 else f"{id_run[0]}-{id_run[-1]}" for id_run in id_runs]


def inline_schedule(schedule: Schedule, ranks: int) -> dict[str, Any]:
    """The `schedule` section that reproduces a schedule that was read from a CSV file or inline rows."""
    return {
        "orders": {
            "name": schedule.name,
            "placement": list(schedule.placement(ranks).stage_ranks),
            "rows": list(schedule.csv_lines),
        },
    }
