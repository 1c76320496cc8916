"""How do a file's sections become model, cluster, layout and schedule?

Names are looked up on the shelves, paths beside the scenario file first and in the working directory second.
"""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from clustersim.collectives.custom_algorithm import installed_algorithms
from clustersim.collectives.custom_algorithm import load_custom_algorithm as imported_algorithm
from clustersim.collectives.library import ALGORITHMS, Library
from clustersim.collectives.phase import CollectiveAlgorithm
from clustersim.common import data_files
from clustersim.common.arrays import IntArray
from clustersim.common.errors import InputError, nearest
from clustersim.common.plugins import module_file
from clustersim.cost.calibration_record import Record
from clustersim.cost.record_file import read_record
from clustersim.cost.record_scaling import scaled
from clustersim.hardware.allocation import Allocation
from clustersim.hardware.cluster import Cluster, load_cluster, load_machine
from clustersim.model.framework import Captured, Framework, load_framework
from clustersim.model.hf_config import config_file
from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import DATA, PIPELINE
from clustersim.program.task import CollectiveType
from clustersim.scenario.config.cost import RecordSection, ScaleSection
from clustersim.scenario.config.layout import LayoutSection
from clustersim.scenario.config.placement import PlacementSection
from clustersim.scenario.config.reliability import ReliabilitySection
from clustersim.scenario.config.scenario import ClusterSection, FrameworkSection, ScenarioFile
from clustersim.scenario.config.schedule import Chunked, CsvSection, OrdersSection, PythonSection, ScheduleChoice
from clustersim.scenario.file_cache import Readings
from clustersim.scenario.reliability import Reliability
from clustersim.schedules.csv_format import parse_csv
from clustersim.schedules.csv_schedule import CsvSchedule, csv_schedule
from clustersim.schedules.custom_schedule import load_custom_schedule
from clustersim.schedules.dual_pipe import DualPipe
from clustersim.schedules.dual_pipe_v import DualPipeV
from clustersim.schedules.registry import build_schedule
from clustersim.schedules.schedule import Schedule


def read_allocation(section: PlacementSection | None, base: Path) -> Allocation | None:
    """Which GPUs a job gets, if the file says so."""
    return None if section is None else section.allocation(base)


def read_cluster(
    section: ClusterSection, base: Path, gpus: int | None, allocation: Allocation | None = None
) -> Cluster:
    """The cluster that a section names, with `gpus` GPUs (None: as many as its file has).

    With an allocation it is the whole machine, large enough to give a job so many; see `placed`.
    """
    if (section.name is None) == (section.path is None):
        raise InputError("needs a name or a path, and not both")
    place = section.name if section.path is None else str(data_files.beside(base, section.path))
    changes = section.changes
    if section.accelerator is not None and data_files.is_path(section.accelerator):
        changes["accelerator"] = str(data_files.beside(base, section.accelerator))
    if allocation is None:
        return load_cluster(str(place), gpus=gpus, overrides=changes or None)
    return load_machine(str(place), allocation, gpus, changes or None)


def placed(machine: Cluster, allocation: Allocation | None, gpus: int | None) -> Cluster:
    """The machine as a job of `gpus` sees it (None: of as many as there are for it); itself without an allocation."""
    return machine if allocation is None else machine.placed(allocation.places(machine.fabric, gpus, machine.units))


def read_framework(section: FrameworkSection, base: Path) -> Framework:
    """A shipped framework by name, or a file as seen from the scenario, with what the section says of it."""
    name = section.name
    framework = load_framework(str(data_files.beside(base, name)) if data_files.is_path(name) else name)
    framework = framework.with_graphs(section.captured) if section.captured is not Captured.NOTHING else framework
    framework = framework.with_compiled() if section.compiled else framework
    return framework.launching(section.launch, section.backward_launch)


def read_reliability(section: ReliabilitySection, base: Path) -> Reliability:
    """What is said of failures, over a preset; its files are seen from the scenario."""
    return section.settings(base)


def read_algorithm(
    name: str, kind: CollectiveType, library: Library, base: Path, readings: Readings
) -> CollectiveAlgorithm | None:
    """The user's algorithm of a name; None for one of the library's. Raises InputError."""
    able = library.algorithms_for(kind)
    if name in able:
        return None
    if name in ALGORITHMS or (":" not in name and name not in installed_algorithms()):
        legal = (*able, *installed_algorithms())
        raise InputError(f"library {library.name} does not offer {name!r} for {kind.value}; {nearest(name, legal)}")
    if not able or kind.is_token_routing:
        raise InputError(f"library {library.name} has no constants of {kind.value}, which {name} would take")
    return readings.of(imported_algorithm, name, base)


def record_file(name: str, base: Path) -> Path:
    """The file of a record: a shipped one's by name, or a path as seen from the scenario."""
    return data_files.beside(base, name) if data_files.is_path(name) else data_files.find("records", name)


def read_costs(section: RecordSection, base: Path, cluster: Cluster, readings: Readings) -> Record:
    """The record for the cluster's accelerator; one of another is refused unless it says how to scale it."""
    record = readings.of(read_record, readings.of(record_file, section.file, base))
    accelerators = [accelerator.name for accelerator in cluster.kinds()[0]]
    measured = record.device.accelerator
    if section.scale is not None and len(accelerators) > 1 and measured in accelerators:
        raise InputError(f"{section.file} was measured on {measured}, which the cluster has; leave scale out")
    if section.scale is not None:
        return readings.of(_carried_over, record, section.scale, accelerators[0])
    if measured not in accelerators:
        raise InputError(
            f"{section.file} was measured on {measured}, but the cluster has {' and '.join(accelerators)}; measure "
            f"there, or carry it over: {{file: {section.file}, scale: {{compute: 1.0, bandwidth: 1.0}}}}, with the "
            f"ratios of {accelerators[0]} to {measured}"
        )
    return record


def _carried_over(record: Record, scale: ScaleSection, accelerator: str) -> Record:
    """A record as another accelerator would have it."""
    there = scaled(record, compute=scale.compute, bandwidth=scale.bandwidth)
    return replace(there, device=replace(there.device, accelerator=accelerator))


def files(file: ScenarioFile, cluster: Cluster, base: Path, readings: Readings) -> tuple[Path, ...]:
    """The files of model, record, algorithms, framework, schedule and placement that are named, and the cluster's."""
    model = () if file.model.path is None else (config_file(data_files.beside(base, file.model.path)),)
    record = () if file.cost.record is None else (readings.of(record_file, file.cost.record.file, base),)
    software = file.framework.name
    framework = (data_files.beside(base, software),) if data_files.is_path(software) else ()
    placement = file.cluster.placement
    order = () if placement is None else placement.files(base)
    classes = (module_file(name, base) for name in dict.fromkeys(name for *_, name in file.cost.named) if ":" in name)
    algorithms = tuple(path for path in classes if path.is_file())
    return (*model, *record, *algorithms, *framework, *_schedule_files(file.schedule, base), *order, *cluster.files)


def _schedule_files(choice: ScheduleChoice, base: Path) -> tuple[Path, ...]:
    match choice.chosen[1]:
        case CsvSection(file=name):
            return (data_files.beside(base, name),)
        case PythonSection(rule=name) if (path := module_file(name, base)).is_file():
            return (path,)
    return ()


def read_layout(section: LayoutSection, gpus: int, framework: Framework, schedule: Schedule) -> Layout:
    """The layout; where dp is left out, it is what the other degrees leave of the GPUs (at least 1).

    What a stage does with outputs that are sent is the framework's habit unless it is said; tokens travel beside
    computation where the schedule is made for that. Raises InputError for a pipeline that has no middle to run
    towards.
    """
    releases, overlaps = section.release_outputs, section.overlap_expert_communication
    mirrored = isinstance(schedule, DualPipe)
    made_for = (mirrored or isinstance(schedule, DualPipeV)) and section.ep > 1
    same = {field.name: getattr(section, field.name) for field in fields(Layout) if field.name != "mirrored"}
    pp, dp = section.pp, section.dp or max(1, gpus // section.replica)
    if mirrored:
        pp, dp = mirrored_degrees(pp, dp)
    return Layout(
        **{
            **same,
            PIPELINE.name: pp,
            DATA.name: dp,
            "mirrored": mirrored,
            "order": tuple(section.order),
            "data": section.data.strategy(),
            "layers_per_stage": section.layers_per_stage.split(),
            "overlap_expert_communication": made_for if overlaps is None else overlaps,
            "release_outputs": framework.release_outputs if releases is None else releases,
        }
    )


def mirrored_degrees(pp: int, dp: int) -> tuple[int, int]:
    """Degrees pp and dp of pipelines of so many ranks as pairs of half as long ones that run towards each other.

    Raises InputError for a pipeline that has no middle to run towards.
    """
    if pp % 2 or pp < 4:
        legal = "4 is the fewest" if pp < 4 else f"{pp - 1} or {pp + 1} fits"
        raise InputError(f"pp: {pp}, but dualpipe's ranks are pairs, each with stages that the other has, too; {legal}")
    return pp // 2, 2 * dp


def wanted_gpus(cluster: ClusterSection, layout: LayoutSection) -> int | None:
    """How many GPUs the file asks for: the cluster's, or else as many as the layout needs if it says so."""
    if cluster.gpus is not None or layout.dp is None:
        return cluster.gpus
    return layout.replica * layout.dp


def read_schedule(choice: ScheduleChoice, base: Path, readings: Readings) -> Schedule:
    """The schedule from its shelf, or from a file, a list or a class of the user's."""
    name, options = choice.chosen
    match options:
        case CsvSection():
            return readings.of(_read_csv, options, base)
        case OrdersSection():
            return csv_schedule(options.name, parse_csv("\n".join(options.rows), options.name), options.placement)
        case PythonSection():
            return readings.of(load_custom_schedule, options.rule, options.arguments, base)
        case Chunked():
            return build_schedule(name, options.chunks)
    return build_schedule(name)


def _read_csv(section: CsvSection, base: Path) -> CsvSchedule:
    """The schedule of a CSV file as seen from the scenario."""
    path = data_files.beside(base, section.file)
    there = sorted(item.stem for item in base.glob("*.csv"))
    try:
        text = data_files.read_text(path)
    except InputError as error:
        if path.exists() or not there:
            raise
        raise InputError(f"{error}; {nearest(path.stem, there)} (of the CSV files beside the scenario)") from error
    return csv_schedule(section.file, parse_csv(text, section.file), section.placement)


def places_written_out(places: IntArray) -> list[int | str]:
    """What a scenario says of a job's GPUs, wherever they were read from: numbers, and ranges of those in a row."""
    runs = np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)
    return [int(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]


def written_out(schedule: CsvSchedule) -> dict[str, Any]:
    """What a scenario says of a listed schedule, wherever it was read from."""
    return {
        "orders": {
            "name": schedule.name,
            "placement": list(schedule.stage_placement.stage_ranks),
            "rows": list(schedule.csv_lines),
        },
    }
