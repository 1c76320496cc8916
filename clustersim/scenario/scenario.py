"""What was requested? A resolved scenario together with its source: loading, overrides and serialization."""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

from clustersim.common.data_files import read_mapping
from clustersim.common.errors import InputError
from clustersim.model.moe_expert_load import MeasuredExpertLoad
from clustersim.scenario.config.co_scheduled import CoScheduledJobConfig
from clustersim.scenario.config.degradations import as_list
from clustersim.scenario.config.scenario import ScenarioConfig
from clustersim.scenario.file_cache import CachedRead, ReadCache
from clustersim.scenario.loaders import gpu_ids_to_ranges, inline_schedule
from clustersim.scenario.overrides import apply_changes, apply_overrides
from clustersim.scenario.resolve import ScenarioSource, resolve_scenario, resolve_unchecked
from clustersim.scenario.resolved import ResolvedJob, ResolvedScenario
from clustersim.scenario.validation_rules.cluster_warnings import cluster_warnings
from clustersim.scenario.validation_rules.global_batch import global_batch_warnings
from clustersim.scenario.validation_rules.warnings import find_warnings


@dataclass(frozen=True, slots=True)
class Scenario(ResolvedScenario):
    """A resolved scenario and where it came from.

    path: the file it was loaded from, if any; files: the files that model and cluster were loaded from;
    raw_mapping: the parsed file content with overrides applied; cached_reads: results of the lookups of names and
    paths, reused by `with_overrides`; cluster_overrides: keys that replace those of the cluster's file.
    """

    path: Path | None = None
    files: tuple[Path, ...] = field(default=(), compare=False)
    raw_mapping: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    cached_reads: tuple[CachedRead, ...] = field(default=(), compare=False, repr=False)
    cluster_overrides: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def load(cls, path: str | Path, overrides: Iterable[str] = ()) -> Self:
        """Load a YAML or JSON file, with overrides such as `layout.tp=4`; raises InputError that lists all problems."""
        file = Path(path)
        return cls.from_mapping(read_mapping(file), overrides, default_name=file.stem, path=file)

    @classmethod
    def from_mapping(
        cls,
        mapping: Mapping[str, Any],
        overrides: Iterable[str] = (),
        *,
        default_name: str = "scenario",
        path: Path | None = None,
    ) -> Self:
        """Build from a mapping of a scenario file's form, with overrides as in `load`.

        default_name: name of the scenario if the mapping has none; path: the file that the mapping was read from, if
        any. Errors name that file, and relative paths in the mapping are resolved against its folder.
        """
        return cls._resolve(apply_overrides(mapping, overrides), ScenarioSource(default_name, path))

    @classmethod
    def _resolve(
        cls,
        raw_mapping: Mapping[str, Any],
        source: ScenarioSource,
        previous_reads: Iterable[CachedRead] = (),
        *,
        suggest: bool = True,
    ) -> Self:
        resolved = resolve_scenario(raw_mapping, source, previous_reads, suggest=suggest)
        return cls(
            **{
                dataclass_field.name: getattr(resolved.resolved, dataclass_field.name)
                for dataclass_field in fields(ResolvedScenario)
            },
            path=source.path,
            files=resolved.files,
            raw_mapping=raw_mapping,
            cached_reads=resolved.cached_reads,
            cluster_overrides=resolved.cluster_overrides,
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """Descriptions of settings that are legal but likely a mistake."""
        return (
            *find_warnings(self),
            *global_batch_warnings(self, self.raw_mapping),
            *cluster_warnings(self, self.cluster_overrides),
        )

    @property
    def co_scheduled_scenarios(self) -> tuple[Self, ...]:
        """The co-scheduled jobs on the cluster, each as the scenario that simulates it in isolation."""
        return tuple(self._co_scheduled_scenario(co_scheduled_job) for co_scheduled_job in self.co_scheduled_jobs)

    def _co_scheduled_scenario(self, job: ResolvedJob) -> Self:
        """The scenario of a co-scheduled job, with this scenario's background traffic and simulation settings."""
        resolved_fields = {
            dataclass_field.name: getattr(job.resolved, dataclass_field.name)
            for dataclass_field in fields(ResolvedScenario)
        }
        cost = replace(job.resolved.cost, symmetry=self.cost.symmetry, coalesce=self.cost.coalesce)
        return type(self)(
            **{**resolved_fields, "cost": cost, "background_traffic": self.background_traffic, "steps": 1},
            path=job.path,
        )

    def to_mapping(self) -> dict[str, Any]:
        """The content of a scenario file that is equivalent to this scenario: `from_mapping` round-trips.

        Pipeline orders and GPU orders that were read from files are written inline, and so are co-scheduled jobs, so
        that the result does not depend on those files.
        """
        mapping = _inline_files(self.raw_mapping, self)
        if self.co_scheduled_jobs:
            entries = enumerate(as_list(mapping["degradations"]["jobs"]))
            mapping["degradations"]["jobs"] = [
                _inline_job_entry(raw_entry, self.co_scheduled_jobs[job_index]) for job_index, raw_entry in entries
            ]
        return mapping

    def with_overrides(self, *overrides: str | Iterable[str], suggest: bool = True) -> Self:
        """A copy with overrides such as `layout.tp=4`, given one by one or in lists; self without any.

        Files are read again only for what the overrides change. Raises InputError; suggest: whether that names values
        that would fit, which takes many times as long.
        """
        groups = [[override] if isinstance(override, str) else list(override) for override in overrides]
        all_overrides = [override for group in groups for override in group]
        if not all_overrides:
            return self
        mapping, source = apply_overrides(self.raw_mapping, all_overrides), ScenarioSource(self.name, self.path)
        return self._resolve(mapping, source, self.cached_reads, suggest=suggest)

    def changed(self, mapping: Mapping[str, Any] | None = None, /, **keywords: Any) -> Self:
        """A copy with changed keys, in place of `with_overrides` where values come from Python; self without any.

        mapping: values by dotted key, `{"layout.tp": 4}`; keywords: sections, `training={"microbatch": 2}`, or keys of
        the top level, `steps=3`, applied after the mapping. A mapping as value changes the keys that it names and
        leaves the others; all other values replace. Texts stay as they are; NumPy numbers and arrays become plain
        ones. Raises InputError that lists all problems.
        """
        if mapping is not None and not isinstance(mapping, Mapping):
            raise InputError(f"changed({mapping!r}): give a mapping, such as {{'layout.tp': 4}}, or keywords")
        if not mapping and not keywords:
            return self
        changed_mapping = apply_changes(apply_changes(self.raw_mapping, mapping or {}), keywords)
        return self._resolve(changed_mapping, ScenarioSource(self.name, self.path), self.cached_reads)

    def resolve_unchecked(self, overrides: Iterable[str], read_cache: ReadCache | None = None) -> ResolvedScenario:
        """The resolved scenario with overrides, not checked for consistency.

        read_cache: shared by many variants, so that what overrides name (a size of the cluster) is read once; None:
        what this scenario has read. Raises InputError for bad keys or values.
        """
        mapping, source = apply_overrides(self.raw_mapping, overrides), ScenarioSource(self.name, self.path)
        return resolve_unchecked(mapping, source, read_cache or ReadCache(self.cached_reads))


def _inline_files(raw_mapping: Mapping[str, Any], resolved: ResolvedScenario) -> dict[str, Any]:
    """A copy of a scenario's mapping with the orders and token counts of its files written inline."""
    mapping = copy.deepcopy(dict(raw_mapping))
    if resolved.schedule.csv_lines:
        mapping["schedule"] = inline_schedule(resolved.schedule, resolved.layout.pp)
    config, load = ScenarioConfig.model_validate(mapping), resolved.training.expert_load
    placement, load_config = config.cluster.placement, config.training.expert_load
    has_counts_file = load_config is not None and isinstance(load_config.tokens_per_expert, str)
    if placement is not None and placement.order is not None:
        mapping["cluster"]["placement"] = {"order": gpu_ids_to_ranges(resolved.cluster.machine_gpu_ids)}
    if isinstance(load, MeasuredExpertLoad) and has_counts_file:
        counts = [list(layer_counts) for layer_counts in load.token_counts]
        mapping["training"]["expert_load"] = {"tokens_per_expert": counts}
    return mapping


def _inline_job_entry(raw_entry: object, job: ResolvedJob) -> dict[str, Any]:
    """An entry of `degradations.jobs` with the content of the job's own file written inline."""
    entry: Any = CoScheduledJobConfig.expand_shorthand(raw_entry)
    placement = CoScheduledJobConfig.model_validate(entry).placement
    if placement is not None and placement.order is not None:
        entry |= {"placement": {"order": gpu_ids_to_ranges(job.resolved.cluster.machine_gpu_ids)}}
    return {**entry, "scenario": {"name": job.resolved.name, **_inline_files(job.raw_mapping, job.resolved)}}
