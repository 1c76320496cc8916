"""What was asked? A setup, what it was read from, and how it is read and changed."""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

from clustersim.common.data_files import read_mapping
from clustersim.scenario.config.co_scheduled import JobSection
from clustersim.scenario.config.degradations import listed
from clustersim.scenario.config.scenario import ScenarioFile
from clustersim.scenario.file_cache import Reading
from clustersim.scenario.loaders import places_written_out, written_out
from clustersim.scenario.overrides import apply
from clustersim.scenario.resolve import Origin, read, refer
from clustersim.scenario.resolved import OtherJob, Setup
from clustersim.scenario.validation_rules.cluster_warnings import machine_warnings
from clustersim.scenario.validation_rules.warnings import warnings
from clustersim.schedules.csv_schedule import CsvSchedule


@dataclass(frozen=True, slots=True)
class Scenario(Setup):
    """A setup with its source.

    path: the file that it was read from, if any; files: those that the model and the cluster were read from; written:
    the mapping that it was read from, overrides applied; readings: what its names and paths stand for; changes: what
    replaces keys of the cluster's file.
    """

    path: Path | None = None
    files: tuple[Path, ...] = field(default=(), compare=False)
    written: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    readings: tuple[Reading, ...] = field(default=(), compare=False, repr=False)
    changes: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def load(cls, path: str | Path, overrides: Iterable[str] = ()) -> Self:
        """Read a YAML or JSON file, with overrides such as `layout.tp=4`; raise InputError that lists what is wrong."""
        file = Path(path)
        return cls.from_mapping(read_mapping(file), overrides, source=file.stem, path=file)

    @classmethod
    def from_mapping(
        cls,
        mapping: Mapping[str, Any],
        overrides: Iterable[str] = (),
        *,
        source: str = "scenario",
        path: Path | None = None,
    ) -> Self:
        """Build from what a file would hold, with overrides as in `load`.

        source: names it where the mapping does not; path: the file that the mapping is taken from, if any. Errors name
        it, and paths in the mapping start beside it.
        """
        return cls._read(apply(mapping, overrides), Origin(source, path))

    @classmethod
    def _read(cls, written: Mapping[str, Any], origin: Origin, earlier: Iterable[Reading] = ()) -> Self:
        found = read(written, origin, earlier)
        return cls(
            **{dataclass_field.name: getattr(found.setup, dataclass_field.name) for dataclass_field in fields(Setup)},
            path=origin.path,
            files=found.files,
            written=written,
            readings=found.readings,
            changes=found.changes,
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is legal and still likely a mistake."""
        return (*warnings(self), *machine_warnings(self, self.changes))

    @property
    def others(self) -> tuple[Self, ...]:
        """The other jobs on the machine, each as it would be simulated there by itself."""
        return tuple(self._other(job) for job in self.jobs)

    def _other(self, job: OtherJob) -> Self:
        """Simulated as this one, beside the same traffic."""
        said = {dataclass_field.name: getattr(job.setup, dataclass_field.name) for dataclass_field in fields(Setup)}
        cost = replace(job.setup.cost, symmetry=self.cost.symmetry, coalesce=self.cost.coalesce)
        return type(self)(**{**said, "cost": cost, "traffic": self.traffic, "steps": 1}, path=job.path)

    def to_mapping(self) -> dict[str, Any]:
        """What a file of this scenario holds: `from_mapping` of it gives the same scenario.

        An order (of passes, of GPUs) that was read from a file is written out, and so are other jobs, so that no such
        file is needed again.
        """
        mapping = _in_full(self.written, self)
        if self.jobs:
            entries = enumerate(listed(mapping["disturbances"]["jobs"]))
            mapping["disturbances"]["jobs"] = [_entry(item, self.jobs[number]) for number, item in entries]
        return mapping

    def changed(self, *overrides: str | Iterable[str]) -> Self:
        """The same scenario with overrides such as `layout.tp=4`, one by one or in lists; itself without any.

        Files are read again only for what the overrides change.
        """
        groups = [[override] if isinstance(override, str) else list(override) for override in overrides]
        given = [item for group in groups for item in group]
        if not given:
            return self
        return self._read(apply(self.written, given), Origin(self.name, self.path), self.readings)

    def unchecked(self, overrides: Iterable[str]) -> Setup:
        """What it would be with overrides, whose parts need not agree; raise InputError for unknown keys and values."""
        return refer(apply(self.written, overrides), Origin(self.name, self.path), self.readings)


def _in_full(written: Mapping[str, Any], setup: Setup) -> dict[str, Any]:
    """What was written of a setup, with the orders that it named files of."""
    mapping = copy.deepcopy(dict(written))
    if isinstance(setup.schedule, CsvSchedule):
        mapping["schedule"] = written_out(setup.schedule)
    placement = ScenarioFile.model_validate(mapping).cluster.placement
    if placement is not None and placement.order is not None:
        mapping["cluster"]["placement"] = {"order": places_written_out(setup.cluster.places)}
    return mapping


def _entry(written: object, job: OtherJob) -> dict[str, Any]:
    """What was written of another job, with what its file holds."""
    entry: Any = JobSection.written_out(written)
    placement = JobSection.model_validate(entry).placement
    if placement is not None and placement.order is not None:
        entry |= {"placement": {"order": places_written_out(job.setup.cluster.places)}}
    return {**entry, "scenario": {"name": job.setup.name, **_in_full(job.written, job.setup)}}
