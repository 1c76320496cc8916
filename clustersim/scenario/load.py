"""How does a scenario file become a scenario?

Three passes, each of which reports all that it finds: keys and values of the file, names and paths that it refers to,
and numbers that must agree with each other.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import ValidationError

from clustersim.errors import InputError
from clustersim.hardware.cluster import Cluster
from clustersim.hardware.disturbance import Disturbances, disturbed
from clustersim.scenario import build, checks, overrides
from clustersim.scenario.disturbed import read_disturbances, read_mixed
from clustersim.scenario.file import ScenarioFile
from clustersim.scenario.problems import refuse, translate
from clustersim.scenario.scenario import Scenario
from clustersim.scenario.warnings import warnings
from clustersim.shipped import read_mapping

T = TypeVar("T")


def load(path: Path, changes: Iterable[str] = ()) -> Scenario:
    """Read a YAML or JSON file; raise InputError that names the file and lists what is wrong."""
    origin = Origin(source=str(path), name=path.stem, base=path.parent)
    return replace(from_mapping(read_mapping(path), origin, changes), path=path)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a mapping comes from.

    source: what errors call it; name: of the scenario if the mapping has none; base: where paths in it start.
    """

    source: str
    name: str
    base: Path


def from_mapping(mapping: Mapping[str, Any], origin: Origin, changes: Iterable[str] = ()) -> Scenario:
    """Build a scenario from the mapping that a file would hold."""
    written = overrides.apply(mapping, changes)
    scenario = _referred(_validated(written, origin), origin)
    found = checks.problems(scenario)
    if found:
        raise refuse(origin.source, found)
    return replace(scenario, warnings=tuple(warnings(scenario)), written=MappingProxyType(written))


def _validated(written: Mapping[str, Any], origin: Origin) -> ScenarioFile:
    try:
        return ScenarioFile.model_validate(written)
    except ValidationError as error:
        raise refuse(origin.source, translate(error, ScenarioFile, written)) from None


def _referred(file: ScenarioFile, origin: Origin) -> Scenario:
    """Look up what the file refers to by name or path."""
    found: list[str] = []
    gpus = build.wanted_gpus(file.cluster, file.layout)
    model = _try(found, "model: ", lambda: build.read_model(file.model, origin.base, file.training.sequence))
    cluster = _try(found, "cluster: ", lambda: build.read_cluster(file.cluster, origin.base, gpus))
    schedule = _try(found, "schedule: ", lambda: build.read_schedule(file.schedule))
    machine = None if cluster is None else _machine(found, file, cluster, origin.base)
    framework = _try(found, "framework: ", lambda: build.read_framework(file.framework, origin.base))
    if model is None or schedule is None or machine is None or framework is None:
        raise refuse(origin.source, found)
    cluster, disturbances = machine
    record = None
    if file.cost.record is not None:
        section = file.cost.record
        record = _try(found, "cost.record: ", lambda: build.read_costs(section, origin.base, cluster))
        if record is None:
            raise refuse(origin.source, found)
    return Scenario(
        name=file.name or origin.name,
        model=model,
        cluster=cluster,
        layout=build.read_layout(file.layout, cluster.gpus),
        schedule=schedule,
        training=file.training.step(),
        cost=file.cost.settings(record),
        framework=framework,
        disturbances=disturbances,
        jitter=None if file.disturbances.jitter is None else file.disturbances.jitter.jitter(),
        steps=file.steps,
        files=build.files(file, cluster, origin.base),
    )


def _machine(found: list[str], file: ScenarioFile, plain: Cluster, base: Path) -> tuple[Cluster, Disturbances] | None:
    """The cluster with its other accelerators and its disturbances, and these."""
    cluster = _try(found, "cluster.", lambda: read_mixed(file.cluster.mixed, base, plain))
    disturbances = _try(found, "disturbances.", lambda: read_disturbances(file.disturbances, plain))
    if cluster is None or disturbances is None:
        return None
    fabric = _try(found, "disturbances.", lambda: disturbed(plain.fabric, disturbances, plain.gpus))
    return None if fabric is None else (replace(cluster, fabric=fabric), disturbances)


def _try(found: list[str], prefix: str, read: Callable[[], T]) -> T | None:
    """What `read` returns; None if it refuses, for which the sentence joins those that were found."""
    try:
        return read()
    except InputError as error:
        found.append(f"{prefix}{error}")
        return None
