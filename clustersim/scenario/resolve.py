"""How does a scenario file become a setup?

Three passes, each of which reports all that it finds: keys and values of the file, names and paths that it refers to,
and numbers that must agree with each other.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from clustersim.collectives.library import Library, load_library
from clustersim.collectives.phase import CollectiveAlgorithm
from clustersim.common import data_files
from clustersim.common.arrays import IntArray
from clustersim.common.errors import InputError
from clustersim.hardware.cluster import Cluster
from clustersim.hardware.degradation import Disturbances, disturbed
from clustersim.hardware.rank_mapping import Placed
from clustersim.model.transformer import every_projection
from clustersim.scenario import loaders
from clustersim.scenario.co_scheduled import Listed, among, disagreements, mapping_of
from clustersim.scenario.config.cost import CostSection
from clustersim.scenario.config.scenario import ScenarioFile
from clustersim.scenario.degradations import read_disturbances, read_mixed, read_traffic
from clustersim.scenario.error_messages import refuse, translate
from clustersim.scenario.file_cache import Reading, Readings
from clustersim.scenario.model import read_model
from clustersim.scenario.resolved import OtherJob, Setup
from clustersim.scenario.settings import Contention, CostSettings, EconomicsSettings
from clustersim.scenario.validation_rules import consistency
from clustersim.scenario.validation_rules.precision import as_run

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a mapping comes from. name: of the scenario if the mapping has none; path: the file, if there is one."""

    name: str
    path: Path | None = None

    @property
    def source(self) -> str:
        """What errors call it."""
        return str(self.path or self.name)

    def of_job(self, path: Path | None) -> "Origin":
        """Of another job, which this one's names: in its own file, or here."""
        return Origin("job", self.path) if path is None else Origin(path.stem, path)

    @property
    def base(self) -> Path:
        """Where paths in it start."""
        return Path() if self.path is None else self.path.parent


@dataclass(frozen=True, slots=True)
class Found:
    """A setup, checked, and what it was read from. changes: what replaces keys of the cluster's file."""

    setup: Setup
    changes: Mapping[str, Any]
    files: tuple[Path, ...]
    readings: tuple[Reading, ...]


def read(written: Mapping[str, Any], origin: Origin, earlier: Iterable[Reading] = ()) -> Found:
    """Look up and check what a file would hold; raise InputError that lists what is wrong.

    earlier: what was read for a scenario that this one is a change of.
    """
    file, readings = _validated(written, origin), Readings(earlier)
    setup = _referred(file, origin, readings)
    found = consistency.problems(setup)
    if found:
        raise refuse(origin.source, found)
    files = loaders.files(file, setup.cluster, origin.base, readings)
    files = (*files, *(path for job in setup.jobs for path in job.files))
    return Found(setup, file.cluster.changes, files, readings.kept)


def refer(written: Mapping[str, Any], origin: Origin, earlier: Iterable[Reading] = ()) -> Setup:
    """Look up what a file would hold, whose parts need not agree; raise InputError for keys, values and names."""
    return _referred(_validated(written, origin), origin, Readings(earlier))


def _validated(written: Mapping[str, Any], origin: Origin) -> ScenarioFile:
    try:
        return ScenarioFile.model_validate(written)
    except ValidationError as error:
        raise refuse(origin.source, translate(error, ScenarioFile, written)) from None


@dataclass(frozen=True, slots=True)
class _Machine:
    """A machine as a job sees it. others: the other jobs that are there, and the GPU of each of their ranks."""

    cluster: Cluster
    disturbances: Disturbances
    others: tuple[tuple[Listed, IntArray], ...] = ()


def _referred(file: ScenarioFile, origin: Origin, readings: Readings, place: _Machine | None = None) -> Setup:
    """Look up what the file refers to by name or path. place: of a job that is on another's machine."""
    found: list[str] = []
    base = origin.base
    model = _try(found, "model: ", lambda: read_model(file.model, base, file.training.sequence, readings))
    schedule = _try(found, "schedule: ", lambda: loaders.read_schedule(file.schedule, base, readings))
    listed = [] if place is not None else _listed(found, file, origin, readings)
    machine = place or _machine(found, file, origin, readings, listed)
    framework = _try(found, "framework: ", lambda: readings.of(loaders.read_framework, file.framework, base))
    cost = None if machine is None else _cost(found, file.cost, base, machine.cluster, readings)
    if found or model is None or schedule is None or machine is None or framework is None or cost is None:
        raise refuse(origin.source, found)
    cluster, disturbances = machine.cluster, machine.disturbances
    traffic = _try(found, "disturbances.", lambda: read_traffic(file.disturbances.traffic, cluster))
    jobs = tuple(_jobs(found, origin, readings, machine))
    sharing = ("traffic", traffic), ("links.during", disturbances.passing), ("jobs", jobs)
    beside = [key for key, given in sharing if given and place is None]
    if beside and cost.network is Contention.NONE:
        found.append(f"disturbances.{beside[0]}: links are not shared with cost.network uncontended; write shared")
    economics = _economics(found, file, cluster)
    reliability = _try(found, "reliability.", lambda: readings.of(loaders.read_reliability, file.reliability, base))
    if found or reliability is None or traffic is None:
        raise refuse(origin.source, found)
    if any(mixture.experts > 1 for mixture in model.mixtures):  # one expert is an MLP
        framework = framework.with_experts(cluster.accelerator.host_pace)
    layout = _try(found, "layout.", partial(loaders.read_layout, file.layout, cluster.gpus, framework, schedule))
    if layout is None:
        raise refuse(origin.source, found)
    training = file.training.step(every_projection(model), framework, layout.data)
    training = replace(training, recipe=as_run(training.recipe, cluster.accelerator, layout.data))
    return Setup(
        name=file.name or origin.name,
        model=model,
        cluster=cluster,
        layout=layout,
        schedule=schedule,
        training=training,
        cost=cost,
        framework=framework,
        disturbances=disturbances,
        traffic=traffic,
        jobs=jobs,
        jitter=None if file.disturbances.jitter is None else file.disturbances.jitter.jitter(),
        steps=file.steps,
        economics=economics,
        reliability=reliability,
    )


def _machine(
    found: list[str], file: ScenarioFile, origin: Origin, readings: Readings, jobs: Sequence[Listed]
) -> _Machine | None:
    """The cluster with its other accelerators and its disturbances, as the job sees it. jobs: the others."""
    base, gpus, section = origin.base, loaders.wanted_gpus(file.cluster, file.layout), file.cluster
    many = len(found)
    allocation = _try(found, "cluster.", lambda: readings.of(loaders.read_allocation, section.placement, base))
    if len(found) > many:
        return None
    allocation = among(allocation, jobs)
    plain = _try(found, "cluster: ", lambda: readings.of(loaders.read_cluster, section, base, gpus, allocation))
    if plain is None:
        return None
    mixed = _try(found, "cluster.", lambda: readings.of(read_mixed, section.mixed, base, plain))
    disturbances = _try(found, "disturbances.", lambda: read_disturbances(file.disturbances, plain))
    job = _try(found, "cluster.", lambda: loaders.placed(plain, allocation, gpus))
    if mixed is None or disturbances is None or job is None:
        return None
    others = tuple(_others(found, jobs, plain, job.places))
    for used in (array for _, array in others if not found):
        _try(found, "disturbances.", partial(disturbed, plain.fabric, disturbances, used))
    fabric = _try(found, "disturbances.", lambda: disturbed(plain.fabric, disturbances, job.places))
    return None if fabric is None else _Machine(_placed(replace(mixed, fabric=fabric), job), disturbances, others)


def _others(
    found: list[str], jobs: Iterable[Listed], machine: Cluster, mine: IntArray
) -> Iterator[tuple[Listed, IntArray]]:
    """Where other jobs are, each on GPUs of its own. mine: those of the first."""
    used = {"this job's": mine}
    for job in jobs:
        places = _try(found, f"{job.key}.", partial(job.places, machine, used))
        if places is not None:
            used[f"{job.key}'s"] = places
            yield job, places


def _placed(machine: Cluster, job: Cluster) -> Cluster:
    """A machine as the job sees it that has these places of it."""
    return machine.placed(job.places) if isinstance(job.fabric, Placed) else machine


def _listed(found: list[str], file: ScenarioFile, origin: Origin, readings: Readings) -> list[Listed]:
    """The other jobs that a file names, as far as their own files say."""
    read = (partial(_one_listed, entry, file, origin, readings) for entry in range(len(file.disturbances.jobs)))
    jobs = [_try(found, f"disturbances.jobs.{entry}.", item) for entry, item in enumerate(read)]
    return [job for job in jobs if job is not None]


def _one_listed(entry: int, file: ScenarioFile, origin: Origin, readings: Readings) -> Listed:
    section, base = file.disturbances.jobs[entry], origin.base
    given = readings.of(loaders.read_allocation, section.placement, base)
    said = section.scenario
    path = data_files.beside(base, said) if isinstance(said, str) else None
    with _naming("scenario: "):
        written = readings.of(mapping_of, data_files.beside(base, said)) if isinstance(said, str) else said
        source = origin.of_job(path)
        theirs = _validated(written, source)
        if wrong := [*disagreements((file.cluster, base), theirs, source.base)]:
            raise refuse(source.source, wrong)
        own = readings.of(loaders.read_allocation, theirs.cluster.placement, source.base)
    return Listed(f"disturbances.jobs.{entry}", path, written, theirs, given, own, section.start)


def _jobs(found: list[str], origin: Origin, readings: Readings, machine: _Machine) -> Iterator[OtherJob]:
    """The other jobs on the machine of one."""
    for listed, places in machine.others:
        place = _Machine(machine.cluster.placed(places), machine.disturbances)
        job = _try(
            found, f"{listed.key}.scenario: ", partial(_job, listed, origin.of_job(listed.path), readings, place)
        )
        yield from () if job is None else (job,)


def _job(listed: Listed, origin: Origin, readings: Readings, place: _Machine) -> OtherJob:
    """Another job, at its place."""
    setup = _referred(listed.file, origin, readings, place)
    if wrong := consistency.problems(setup):
        raise refuse(origin.source, wrong)
    files = loaders.files(listed.file, setup.cluster, origin.base, readings)
    own = () if listed.path is None else (listed.path,)
    return OtherJob(setup, listed.start, listed.path, listed.written, (*own, *files))


@contextmanager
def _naming(key: str) -> Iterator[None]:
    """Whose value errors are about."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{key}{error}") from error


def _economics(found: list[str], file: ScenarioFile, cluster: Cluster) -> EconomicsSettings:
    """The settings; a price list that is named must have all accelerators, and what is said of power must fit them."""
    settings = file.economics.settings()
    if settings == EconomicsSettings():
        return settings
    for accelerator in cluster.kinds()[0]:
        _try(found, "economics.price_per_gpu_hour: ", partial(settings.quote, accelerator, cluster.name))
        _try(found, "economics.power: ", partial(settings.draw, accelerator))
    return settings


def _cost(
    found: list[str], section: CostSection, base: Path, cluster: Cluster, readings: Readings
) -> CostSettings | None:
    """The settings, whose algorithms the cluster's library must have, with their record."""
    own: dict[str, CollectiveAlgorithm] = {}
    for key, collective, name in section.named:
        library = readings.of(load_library, cluster.library)
        read_own = partial(loaders.read_algorithm, name, collective, library, base, readings)
        algorithm = _try(found, f"cost.{key}.{collective.value}: ", read_own)
        own |= {} if algorithm is None else {name: algorithm}
    if section.nccl.model_fields_set:
        _try(found, "cost.nccl: ", lambda: _require_nccl(section, readings.of(load_library, cluster.library)))
    if section.record is None:
        return section.settings(None, own)
    named = section.record
    record = _try(found, "cost.record: ", lambda: loaders.read_costs(named, base, cluster, readings))
    return None if record is None else section.settings(record, own)


def _require_nccl(section: CostSection, library: Library) -> None:
    """Whether the library follows NCCL's variables, and has channels if any are limited."""
    if not library.follows_nccl_env:
        raise InputError(f"the cluster's library is {library.name}, which does not read NCCL's variables; leave it out")
    twice = [kind for kind in section.collectives if kind in section.nccl.switches().constrained_collectives]
    if twice:
        raise InputError(f"speaks of {twice[0].value}, for which cost.collectives names an algorithm; keep one of them")
    limits = [name for name in section.nccl.names() if "NCHANNELS" in name]
    if limits and library.p2p_channels is None:
        raise InputError(f"{limits[0]}: channels of {library.name} are not modelled; leave it out")


def _try(found: list[str], prefix: str, read: Callable[[], T]) -> T | None:
    """What `read` returns; None if it refuses, for which the sentence joins those that were found."""
    try:
        return read()
    except InputError as error:
        found.append(f"{prefix}{error}")
        return None
