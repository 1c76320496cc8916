"""How does a scenario file become a resolved scenario?

Three passes, each of which reports all problems it finds: keys and values of the file, names and paths that
it refers to, and consistency of the numbers with each other.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from clustersim.collectives.library import Library
from clustersim.collectives.library_files import load_library
from clustersim.collectives.phase import CollectiveAlgorithm
from clustersim.common import data_files
from clustersim.common.arrays import IntArray
from clustersim.common.errors import InputError, combined_error, problems_of
from clustersim.cost.background_traffic import TrafficPattern
from clustersim.hardware.accelerator import UNBOUND_LAUNCH_RATIOS
from clustersim.hardware.cluster import Cluster
from clustersim.hardware.degradation import Degradations, degrade_fabric
from clustersim.hardware.rank_mapping import RankMappedFabric
from clustersim.model.framework import Framework
from clustersim.model.moe_expert_load import ExpertLoad
from clustersim.model.transformer import TransformerModel, all_projections
from clustersim.parallel.layout import Layout
from clustersim.scenario import loaders
from clustersim.scenario.co_scheduled import CoScheduledSpec, allocation_among, find_conflicts, read_job_mapping
from clustersim.scenario.config.cost import CostConfig
from clustersim.scenario.config.scenario import ScenarioConfig
from clustersim.scenario.degradations import apply_mixed_nodes, read_background_traffic, read_degradations
from clustersim.scenario.file_cache import CachedRead, ReadCache
from clustersim.scenario.model_recipes import recipe_settings
from clustersim.scenario.overrides import apply_changes, apply_overrides
from clustersim.scenario.reliability import ReliabilityModel
from clustersim.scenario.resolved import ResolvedJob, ResolvedScenario
from clustersim.scenario.settings import Contention, CostSettings, EconomicsSettings
from clustersim.scenario.towers import read_towers
from clustersim.scenario.validation_rules import consistency
from clustersim.scenario.validation_rules.precision import effective_recipe
from clustersim.scenario.validation_rules.remedies import STRATEGY_KEY, Remedy, SizeProblem, describe_problems
from clustersim.schedules.schedule import Schedule

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ScenarioSource:
    """Where a mapping comes from. name: of the scenario if the mapping has none; path: its file, if any."""

    name: str
    path: Path | None = None

    @property
    def label(self) -> str:
        """Label of the source in error messages."""
        return str(self.path or self.name)

    def for_co_scheduled_job(self, path: Path | None) -> "ScenarioSource":
        """The source of a co-scheduled job: its own file, or an entry of this one if path is None."""
        return ScenarioSource("job", self.path) if path is None else ScenarioSource(path.stem, path)

    @property
    def base_dir(self) -> Path:
        """Folder that relative paths are resolved against."""
        return Path() if self.path is None else self.path.parent


class _ProblemError(InputError):
    """A problem that prevents the rules from being applied."""

    def __init__(self, label: str, problem: SizeProblem) -> None:
        super().__init__(label, problem)
        self.problem = problem

    def __str__(self) -> str:
        return ": ".join(self.args)


@dataclass(frozen=True, slots=True)
class LoadedScenario:
    """A validated scenario and what it was read from.

    cluster_overrides: keys that replace those of the cluster's file; cached_reads: lookups for reuse by variants.
    """

    resolved: ResolvedScenario
    cluster_overrides: Mapping[str, Any]
    files: tuple[Path, ...]
    cached_reads: tuple[CachedRead, ...]


def resolve_scenario(
    raw_mapping: Mapping[str, Any],
    source: ScenarioSource,
    previous_reads: Iterable[CachedRead],
    *,
    suggest: bool,
) -> LoadedScenario:
    """Resolve and validate the content of a scenario file; raises InputError that lists all problems.

    previous_reads: lookups of the scenario that this one is a variant of; suggest: whether the error names values that
    would repair them, each of which is a variant to read.
    """
    config, read_cache = _parse_config(raw_mapping, source), ReadCache(previous_reads)
    try:
        resolved = _resolve_config(config, source, read_cache)
        problems = consistency.find_problems(resolved)
    except _ProblemError as error:
        problems = [error.problem]
    if problems:
        read_variant = partial(_read_variant, raw_mapping, source, read_cache, None)
        raise combined_error(source.label, describe_problems(problems, read_variant) if suggest else problems)
    files = loaders.referenced_files(config, resolved.cluster, source.base_dir, read_cache)
    files = (*files, *(file for job in resolved.co_scheduled_jobs for file in job.files))
    return LoadedScenario(resolved, config.cluster.overrides, files, read_cache.entries)


def _read_variant(
    raw_mapping: Mapping[str, Any],
    source: ScenarioSource,
    read_cache: ReadCache,
    view: "_ClusterView | None",
    overrides: Sequence[str],
) -> tuple[Sequence[str], ResolvedScenario]:
    """A scenario with overrides, and its problems; raise InputError for what cannot be read."""
    config = _parse_config(apply_overrides(raw_mapping, _name_strategy(raw_mapping, overrides)), source)
    resolved = _resolve_config(config, source, read_cache, view)
    return consistency.find_problems(resolved), resolved


def _name_strategy(raw_mapping: Mapping[str, Any], overrides: Sequence[str]) -> Iterator[str]:
    """Overrides in which the data-parallel strategy has its name in the file."""
    data = raw_mapping.get("layout", {}).get("data")
    name = next(iter(data), "") if isinstance(data, Mapping) else str(data)
    yield from (override.replace(STRATEGY_KEY, f"layout.data.{name}") for override in overrides)


def resolve_unchecked(
    raw_mapping: Mapping[str, Any], source: ScenarioSource, read_cache: ReadCache
) -> ResolvedScenario:
    """Resolve a scenario file's content, not checked for consistency; raises InputError for bad keys, values, names."""
    return _resolve_config(_parse_config(raw_mapping, source), source, read_cache)


def _parse_config(raw_mapping: Mapping[str, Any], source: ScenarioSource) -> ScenarioConfig:
    """The sections of a file, with what its framework's recipe sets where the file does not say it."""
    config = _validate_config(raw_mapping, source)
    settings = recipe_settings(config, source.base_dir)
    config = _validate_config(apply_changes(raw_mapping, settings), source) if settings else config
    return _with_sample_tokens(config, source) if config.training.sequence is None else config


def _with_sample_tokens(config: ScenarioConfig, source: ScenarioSource) -> ScenarioConfig:
    """The sections with the sequence that the file leaves out: the tokens of a sample of a model of images."""
    problems: list[str] = []
    model = _collect_error(problems, "model: ", lambda: read_towers(config.model, source.base_dir, 1, ReadCache(())))
    if model is not None and model.patches is None:
        problems = ["training.sequence: is missing; write sequence: 8192"]
    if model is None or model.patches is None:
        raise combined_error(source.label, problems)
    training = config.training.model_copy(update={"sequence": model.sample_tokens})
    return config.model_copy(update={"training": training})


def _validate_config(raw_mapping: Mapping[str, Any], source: ScenarioSource) -> ScenarioConfig:
    try:
        return ScenarioConfig.model_validate(raw_mapping)
    except ValidationError as error:
        from clustersim.scenario.error_messages import translate_validation_error

        raise combined_error(source.label, translate_validation_error(error, ScenarioConfig, raw_mapping)) from None


@dataclass(frozen=True, slots=True)
class _ClusterView:
    """The cluster as seen by a job. co_scheduled: the other jobs, each with the GPU id of each of its ranks."""

    cluster: Cluster
    degradations: Degradations
    co_scheduled: tuple[tuple[CoScheduledSpec, IntArray], ...] = ()


@dataclass(frozen=True, slots=True)
class _ReferencedInputs:
    """What a scenario's file refers to by name or path, and the settings that need no more than that."""

    model: TransformerModel
    schedule: Schedule
    view: _ClusterView
    framework: Framework
    cost: CostSettings
    expert_load: ExpertLoad | None

    @property
    def effective_framework(self) -> Framework:
        """The framework with its launches of MoE models, if the model is one; a single expert is a plain MLP.

        Eager PyTorch's own pace was measured on an x86 server without binding.
        """
        has_experts = any(moe_mlp.experts > 1 for moe_mlp in self.model.distinct_moes)
        accelerator = self.view.cluster.accelerator
        unbound_ratio = 1.0 if self.framework.numa_bound else max(accelerator.unbound_launch_ratios)
        measured_ratio = max(UNBOUND_LAUNCH_RATIOS) if self.framework.is_eager else 1.0
        launch_ratio = accelerator.host_launch_ratio * unbound_ratio / measured_ratio
        return self.framework.with_moe_launches(launch_ratio) if has_experts else self.framework


@dataclass(frozen=True, slots=True)
class _JobSettings:
    """What shares the cluster with the job, what its run costs, and how it fails."""

    background_traffic: tuple[TrafficPattern, ...]
    co_scheduled_jobs: tuple[ResolvedJob, ...]
    economics: EconomicsSettings
    reliability: ReliabilityModel


def _resolve_config(
    config: ScenarioConfig, source: ScenarioSource, read_cache: ReadCache, given_view: _ClusterView | None = None
) -> ResolvedScenario:
    """Resolve all names and paths of a config.

    given_view: the cluster as a co-scheduled job sees it, None: build it from the config.
    """
    inputs = _read_referenced_inputs(config, source, read_cache, given_view)
    settings = _read_job_settings(config, source, read_cache, inputs, shares_links=given_view is None)
    framework, cluster = inputs.effective_framework, inputs.view.cluster
    layout = _read_layout(config, source, inputs)
    training = config.training.training_step(all_projections(inputs.model), framework, layout.data, inputs.expert_load)
    recipe = effective_recipe(training.recipe, cluster.accelerator, layout.data, framework)
    return ResolvedScenario(
        name=config.name or source.name,
        model=inputs.model,
        cluster=cluster,
        layout=layout,
        schedule=inputs.schedule,
        training=replace(training, recipe=recipe),
        cost=inputs.cost,
        framework=framework,
        names_framework="name" in config.framework.model_fields_set,
        degradations=inputs.view.degradations,
        background_traffic=settings.background_traffic,
        co_scheduled_jobs=settings.co_scheduled_jobs,
        jitter=None if config.degradations.jitter is None else config.degradations.jitter.jitter_model(),
        steps=config.steps,
        economics=settings.economics,
        reliability=settings.reliability,
        diloco=None if config.diloco is None else config.diloco.diloco_settings(),
    )


def _read_referenced_inputs(
    config: ScenarioConfig, source: ScenarioSource, read_cache: ReadCache, given_view: _ClusterView | None
) -> _ReferencedInputs:
    """Read what does not depend on the layout; raise InputError with all problems."""
    problems: list[str] = []
    base_dir = source.base_dir
    model = _collect_error(
        problems, "model: ", lambda: read_towers(config.model, base_dir, config.training.sequence_tokens, read_cache)
    )
    schedule = _collect_error(
        problems, "schedule: ", lambda: loaders.read_schedule(config.schedule, base_dir, read_cache)
    )
    job_specs = [] if given_view is not None else _co_scheduled_specs(problems, config, source, read_cache)
    view = given_view or _cluster_view(problems, config, source, read_cache, job_specs)
    framework = _collect_error(
        problems, "framework: ", lambda: read_cache.get_or_read(loaders.read_framework, config.framework, base_dir)
    )
    expert_load = _collect_error(
        problems,
        "training.expert_load.",
        lambda: read_cache.get_or_read(loaders.read_expert_load, config.training.expert_load, base_dir),
    )
    cost = None if view is None else _cost_settings(problems, config.cost, base_dir, view.cluster, read_cache)
    if problems or model is None or schedule is None or view is None or framework is None or cost is None:
        raise combined_error(source.label, problems)
    return _ReferencedInputs(model, schedule, view, framework, cost, expert_load)


def _read_job_settings(
    config: ScenarioConfig,
    source: ScenarioSource,
    read_cache: ReadCache,
    inputs: _ReferencedInputs,
    *,
    shares_links: bool,
) -> _JobSettings:
    """Read what needs the cluster, but no layout; raise InputError with all problems.

    shares_links: whether the sharers of links are this job's own to state.
    """
    problems: list[str] = []
    cluster = inputs.view.cluster
    traffic = _collect_error(
        problems, "degradations.", lambda: read_background_traffic(config.degradations.traffic, cluster)
    )
    jobs = tuple(_resolve_co_scheduled_jobs(problems, source, read_cache, inputs.view))
    sharers = {"traffic": traffic, "links.during": inputs.view.degradations.temporary_links, "jobs": jobs}
    active_sharers = [key for key, value in sharers.items() if value and shares_links]
    if active_sharers and inputs.cost.network is Contention.UNCONTENDED:
        problems.append(
            f"degradations.{active_sharers[0]}: links are not shared with cost.network uncontended; write shared"
        )
    economics = _economics_settings(problems, config, cluster)
    reliability = _collect_error(
        problems,
        "reliability.",
        lambda: read_cache.get_or_read(loaders.read_reliability, config.reliability, source.base_dir),
    )
    if problems or reliability is None or traffic is None:
        raise combined_error(source.label, problems)
    return _JobSettings(traffic, jobs, economics, reliability)


def _read_layout(config: ScenarioConfig, source: ScenarioSource, inputs: _ReferencedInputs) -> Layout:
    """The layout of the job on its GPUs; raise InputError where its schedule allows none such."""
    gpu_count = inputs.view.cluster.gpu_count
    try:
        return loaders.read_layout(config, inputs.model, gpu_count, inputs.effective_framework, inputs.schedule)
    except InputError as error:
        pp, rank_counts = config.layout.pp, range(loaders.FEWEST_PAIRED_RANKS, gpu_count + 1, 2)
        problem = SizeProblem(f"layout.{error}", Remedy.nearest("layout.pp", pp, rank_counts))
        raise _ProblemError(source.label, problem) from error


def _cluster_view(
    problems: list[str],
    config: ScenarioConfig,
    source: ScenarioSource,
    read_cache: ReadCache,
    job_specs: Sequence[CoScheduledSpec],
) -> _ClusterView | None:
    """The cluster with mixed accelerators and degradations, as seen by the job. job_specs: the co-scheduled jobs."""
    base_dir, gpus, section = (
        source.base_dir,
        loaders.requested_gpu_count(config.cluster, config.layout),
        config.cluster,
    )
    problem_count = len(problems)
    allocation = _collect_error(
        problems, "cluster.", lambda: read_cache.get_or_read(loaders.read_allocation, section.placement, base_dir)
    )
    if len(problems) > problem_count:
        return None
    allocation = allocation_among(allocation, job_specs)
    full_cluster = _collect_error(
        problems, "cluster: ", lambda: read_cache.get_or_read(loaders.read_cluster, section, base_dir, gpus, allocation)
    )
    if full_cluster is None:
        return None
    mixed = _collect_error(
        problems, "cluster.", lambda: read_cache.get_or_read(apply_mixed_nodes, section.mixed, base_dir, full_cluster)
    )
    degradations = _collect_error(
        problems, "degradations.", lambda: read_degradations(config.degradations, full_cluster)
    )
    job_cluster = _collect_error(problems, "cluster.", lambda: loaders.job_view(full_cluster, allocation, gpus))
    if mixed is None or degradations is None or job_cluster is None:
        return None
    co_scheduled = tuple(_allocate_co_scheduled_jobs(problems, job_specs, full_cluster, job_cluster.machine_gpu_ids))
    for job_gpus in (array for _, array in co_scheduled if not problems):
        _collect_error(problems, "degradations.", partial(degrade_fabric, full_cluster.fabric, degradations, job_gpus))
    fabric = _collect_error(
        problems,
        "degradations.",
        lambda: degrade_fabric(full_cluster.fabric, degradations, job_cluster.machine_gpu_ids),
    )
    return (
        None
        if fabric is None
        else _ClusterView(_restrict_to_job(replace(mixed, fabric=fabric), job_cluster), degradations, co_scheduled)
    )


def _allocate_co_scheduled_jobs(
    problems: list[str], job_specs: Iterable[CoScheduledSpec], cluster: Cluster, main_job_gpus: IntArray
) -> Iterator[tuple[CoScheduledSpec, IntArray]]:
    """GPU ids of the co-scheduled jobs, all disjoint. main_job_gpus: those of the first job."""
    gpus_by_owner = {"this job's": main_job_gpus}
    for job_spec in job_specs:
        gpu_ids = _collect_error(problems, f"{job_spec.key}.", partial(job_spec.gpu_ids, cluster, gpus_by_owner))
        if gpu_ids is not None:
            gpus_by_owner[f"{job_spec.key}'s"] = gpu_ids
            yield job_spec, gpu_ids


def _restrict_to_job(cluster: Cluster, job_cluster: Cluster) -> Cluster:
    """The cluster restricted to the GPUs of a job."""
    return (
        cluster.with_rank_mapping(job_cluster.machine_gpu_ids)
        if isinstance(job_cluster.fabric, RankMappedFabric)
        else cluster
    )


def _co_scheduled_specs(
    problems: list[str], config: ScenarioConfig, source: ScenarioSource, read_cache: ReadCache
) -> list[CoScheduledSpec]:
    """Specs of the co-scheduled jobs that a config names; jobs with errors are dropped and reported."""
    loaders = (
        partial(_co_scheduled_spec, job_index, config, source, read_cache)
        for job_index in range(len(config.degradations.jobs))
    )
    job_specs = [
        _collect_error(problems, f"degradations.jobs.{entry}.", loader) for entry, loader in enumerate(loaders)
    ]
    return [job_spec for job_spec in job_specs if job_spec is not None]


def _co_scheduled_spec(
    entry_index: int, config: ScenarioConfig, source: ScenarioSource, read_cache: ReadCache
) -> CoScheduledSpec:
    section, base_dir = config.degradations.jobs[entry_index], source.base_dir
    assigned_allocation = read_cache.get_or_read(loaders.read_allocation, section.placement, base_dir)
    path_or_mapping = section.scenario
    path = data_files.resolve_relative(base_dir, path_or_mapping) if isinstance(path_or_mapping, str) else None
    with _prefix_errors("scenario: "):
        raw_mapping = (
            read_cache.get_or_read(read_job_mapping, data_files.resolve_relative(base_dir, path_or_mapping))
            if isinstance(path_or_mapping, str)
            else path_or_mapping
        )
        job_source = source.for_co_scheduled_job(path)
        job_config = _parse_config(raw_mapping, job_source)
        if problems := [*find_conflicts((config.cluster, base_dir), job_config, job_source.base_dir)]:
            raise combined_error(job_source.label, problems)
        requested_allocation = read_cache.get_or_read(
            loaders.read_allocation, job_config.cluster.placement, job_source.base_dir
        )
    return CoScheduledSpec(
        f"degradations.jobs.{entry_index}",
        path,
        raw_mapping,
        job_config,
        assigned_allocation,
        requested_allocation,
        section.start,
    )


def _resolve_co_scheduled_jobs(
    problems: list[str], source: ScenarioSource, read_cache: ReadCache, view: _ClusterView
) -> Iterator[ResolvedJob]:
    """The resolved co-scheduled jobs on the cluster of one job."""
    for co_scheduled_spec, gpu_ids in view.co_scheduled:
        job_view = _ClusterView(view.cluster.with_rank_mapping(gpu_ids), view.degradations)
        job = _collect_error(
            problems,
            f"{co_scheduled_spec.key}.scenario: ",
            partial(
                _resolve_co_scheduled_job,
                co_scheduled_spec,
                source.for_co_scheduled_job(co_scheduled_spec.path),
                read_cache,
                job_view,
            ),
        )
        yield from () if job is None else (job,)


def _resolve_co_scheduled_job(
    spec: CoScheduledSpec, source: ScenarioSource, read_cache: ReadCache, view: _ClusterView
) -> ResolvedJob:
    """One co-scheduled job, resolved on its view of the cluster. Raises InputError."""
    resolved = _resolve_config(spec.config, source, read_cache, view)
    if problems := consistency.find_problems(resolved):
        read_variant = partial(_read_variant, spec.raw_mapping, source, read_cache, view)
        raise combined_error(source.label, describe_problems(problems, read_variant))
    files = loaders.referenced_files(spec.config, resolved.cluster, source.base_dir, read_cache)
    job_file = () if spec.path is None else (spec.path,)
    return ResolvedJob(resolved, spec.start_offset, spec.path, spec.raw_mapping, (*job_file, *files))


@contextmanager
def _prefix_errors(key: str) -> Iterator[None]:
    """Prefix errors raised inside with a key."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{key}{error}") from error


def _economics_settings(problems: list[str], config: ScenarioConfig, cluster: Cluster) -> EconomicsSettings:
    """Economics settings; checks that the price list and power settings cover all accelerators of the cluster."""
    settings = config.economics.economics_settings()
    if settings == EconomicsSettings():
        return settings
    for accelerator in cluster.accelerator_kinds()[0]:
        _collect_error(
            problems, "economics.price_per_gpu_hour: ", partial(settings.gpu_hour_quote, accelerator, cluster.name)
        )
        _collect_error(problems, "economics.power: ", partial(settings.power_draw, accelerator))
    return settings


def _cost_settings(
    problems: list[str], section: CostConfig, base_dir: Path, cluster: Cluster, read_cache: ReadCache
) -> CostSettings | None:
    """Cost settings with record and user algorithms; checks that the cluster's library offers the named algorithms."""
    user_algorithms: dict[str, CollectiveAlgorithm] = {}
    for key, collective, name in section.named_algorithms:
        library = read_cache.get_or_read(load_library, cluster.library)
        read_algorithm = partial(loaders.read_algorithm, name, collective, library, base_dir, read_cache)
        algorithm = _collect_error(problems, f"cost.{key}.{collective.value}: ", read_algorithm)
        user_algorithms |= {} if algorithm is None else {name: algorithm}
    if section.nccl.model_fields_set:
        _collect_error(
            problems,
            "cost.nccl: ",
            lambda: _require_nccl(section, read_cache.get_or_read(load_library, cluster.library)),
        )
    if section.record is None:
        return section.cost_settings(None, user_algorithms)
    record_config = section.record
    record = _collect_error(
        problems, "cost.record: ", lambda: loaders.read_cost_record(record_config, base_dir, cluster, read_cache)
    )
    return None if record is None else section.cost_settings(record, user_algorithms)


def _require_nccl(section: CostConfig, library: Library) -> None:
    """Raise InputError if the library ignores NCCL's variables, or channels are limited and not modelled."""
    if not library.follows_nccl_env:
        raise InputError(f"the cluster's library is {library.name}, which does not read NCCL's variables; leave it out")
    conflicting = [
        kind for kind in section.collectives if kind in section.nccl.nccl_overrides().constrained_collectives
    ]
    if conflicting:
        raise InputError(
            f"speaks of {conflicting[0].value}, for which cost.collectives names an algorithm; keep one of them"
        )
    limits = [name for name in section.nccl.set_variables() if "NCHANNELS" in name]
    if limits and library.p2p_channels is None:
        raise InputError(f"{limits[0]}: channels of {library.name} are not modelled; leave it out")


def _collect_error(problems: list[str], prefix: str, read: Callable[[], T]) -> T | None:
    """The result of `read`; None if it raises InputError, whose problems are appended to `problems`."""
    try:
        return read()
    except InputError as error:
        problems.extend(f"{prefix}{problem}" for problem in problems_of(error))
        return None
