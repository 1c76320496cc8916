"""What was asked? A setup, what it was read from, and how it is read and changed."""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

from clustersim.common.data_files import read_mapping
from clustersim.scenario.config.co_scheduled import CoScheduledJobConfig
from clustersim.scenario.config.degradations import as_list
from clustersim.scenario.config.scenario import ScenarioConfig
from clustersim.scenario.file_cache import CachedRead
from clustersim.scenario.loaders import gpu_ids_to_ranges, inline_schedule
from clustersim.scenario.overrides import apply_overrides
from clustersim.scenario.resolve import ScenarioSource, resolve_scenario, resolve_unchecked
from clustersim.scenario.resolved import ResolvedJob, ResolvedScenario
from clustersim.scenario.validation_rules.cluster_warnings import cluster_warnings
from clustersim.scenario.validation_rules.warnings import find_warnings
from clustersim.schedules.csv_schedule import CsvSchedule


@dataclass(frozen=True, slots=True)
class Scenario(ResolvedScenario):
    """A setup with its source.

    path: the file that it was read from, if any; files: those that the model and the cluster were read from; written:
    the mapping that it was read from, overrides applied; readings: what its names and paths stand for; changes: what
    replaces keys of the cluster's file.
    """

    path: Path | None = None
    files: tuple[Path, ...] = field(default=(), compare=False)
    raw_mapping: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    cached_reads: tuple[CachedRead, ...] = field(default=(), compare=False, repr=False)
    cluster_overrides: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def load(cls, path: str | Path, overrides: Iterable[str] = ()) -> Self:
        """Read a YAML or JSON file, with overrides such as `layout.tp=4`; raise InputError that lists what is wrong."""
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
        """Build from what a file would hold, with overrides as in `load`.

        source: names it where the mapping does not; path: the file that the mapping is taken from, if any. Errors name
        it, and paths in the mapping start beside it.
        """
        return cls._resolve(apply_overrides(mapping, overrides), ScenarioSource(default_name, path))

    @classmethod
    def _resolve(
        cls, raw_mapping: Mapping[str, Any], source: ScenarioSource, previous_reads: Iterable[CachedRead] = ()
    ) -> Self:
        resolved = resolve_scenario(raw_mapping, source, previous_reads)
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
        """What is legal and still likely a mistake."""
        return (*find_warnings(self), *cluster_warnings(self, self.cluster_overrides))

    @property
    def co_scheduled_scenarios(self) -> tuple[Self, ...]:
        """The other jobs on the machine, each as it would be simulated there by itself."""
        return tuple(self._co_scheduled_scenario(co_scheduled_job) for co_scheduled_job in self.co_scheduled_jobs)

    def _co_scheduled_scenario(self, job: ResolvedJob) -> Self:
        """Simulated as this one, beside the same traffic."""
        resolved_fields = {
            dataclass_field.name: getattr(job.resolved, dataclass_field.name)
            for dataclass_field in fields(ResolvedScenario)
        }
        cost = replace(job.resolved.cost, symmetry=self.cost.symmetry, coalesce=self.cost.coalesce)
        return type(self)(
            **{**resolved_fields, "cost": cost, "traffic": self.background_traffic, "steps": 1}, path=job.path
        )

    def to_mapping(self) -> dict[str, Any]:
        """What a file of this scenario holds: `from_mapping` of it gives the same scenario.

        An order (of passes, of GPUs) that was read from a file is written out, and so are other jobs, so that no such
        file is needed again.
        """
        mapping = _inline_files(self.raw_mapping, self)
        if self.co_scheduled_jobs:
            entries = enumerate(as_list(mapping["disturbances"]["jobs"]))
            mapping["disturbances"]["jobs"] = [
                _inline_job_entry(item, self.co_scheduled_jobs[job_index]) for job_index, item in entries
            ]
        return mapping

    def with_overrides(self, *overrides: str | Iterable[str]) -> Self:
        """The same scenario with overrides such as `layout.tp=4`, one by one or in lists; itself without any.

        Files are read again only for what the overrides change.
        """
        groups = [[override] if isinstance(override, str) else list(override) for override in overrides]
        all_overrides = [item for group in groups for item in group]
        if not all_overrides:
            return self
        return self._resolve(
            apply_overrides(self.raw_mapping, all_overrides), ScenarioSource(self.name, self.path), self.cached_reads
        )

    def resolve_unchecked(self, overrides: Iterable[str]) -> ResolvedScenario:
        """What it would be with overrides, whose parts need not agree; raise InputError for unknown keys and values."""
        return resolve_unchecked(
            apply_overrides(self.raw_mapping, overrides), ScenarioSource(self.name, self.path), self.cached_reads
        )


def _inline_files(raw_mapping: Mapping[str, Any], resolved: ResolvedScenario) -> dict[str, Any]:
    """What was written of a setup, with the orders that it named files of."""
    mapping = copy.deepcopy(dict(raw_mapping))
    if isinstance(resolved.schedule, CsvSchedule):
        mapping["schedule"] = inline_schedule(resolved.schedule)
    placement = ScenarioConfig.model_validate(mapping).cluster.placement
    if placement is not None and placement.order is not None:
        mapping["cluster"]["placement"] = {"order": gpu_ids_to_ranges(resolved.cluster.machine_gpu_ids)}
    return mapping


def _inline_job_entry(raw_entry: object, job: ResolvedJob) -> dict[str, Any]:
    """What was written of another job, with what its file holds."""
    entry: Any = CoScheduledJobConfig.expand_shorthand(raw_entry)
    placement = CoScheduledJobConfig.model_validate(entry).placement
    if placement is not None and placement.order is not None:
        entry |= {"placement": {"order": gpu_ids_to_ranges(job.resolved.cluster.machine_gpu_ids)}}
    return {**entry, "scenario": {"name": job.resolved.name, **_inline_files(job.raw_mapping, job.resolved)}}
