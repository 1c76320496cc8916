"""What does a report hold? Sections in the order of questions, and what the record does not say."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Final

from calibrate.report.constants import constants_section
from calibrate.report.efficiency import ceiling, efficiency_section
from calibrate.report.format import outcome_words, reason_lines, state_words, steady
from calibrate.report.imbalance import has_uneven, uneven_section
from calibrate.report.section import Section
from calibrate.report.step_effects import beside_section, chain_section, host_section, steps_section
from calibrate.report.telemetry import gpus_section, load_section
from calibrate.report.transfers import collectives_section, copies_section
from clustersim.common.errors import InputError
from clustersim.cost.calibration_record import CalibrationRecord, RecordOrigin
from clustersim.hardware.accelerator import Accelerator

_BY_CALIBRATE: Final = "clustersim calibrate --for SCENARIO"
_BY_COLLECTIVES: Final = "torchrun ... -m calibrate collectives"


@dataclass(frozen=True, slots=True)
class Report:
    """A record, and what can be said of it.

    name: of the file; shipped: the accelerator that it stands for, None: clustersim does not know it; lacks: what it
    does not hold.
    """

    name: str
    record: CalibrationRecord
    shipped: Accelerator | None
    sections: tuple[Section, ...]
    lacks: tuple[str, ...]

    @property
    def facts(self) -> dict[str, str]:
        """The device and the conditions, as far as the record says them."""
        return {name: value for name, value in _facts(self.record).items() if value}

    def to_json(self) -> str:
        """One JSON object, in SI units."""
        content = {
            "record": self.name,
            "origin": self.record.origin.value,
            "device": asdict(self.record.device),
            "conditions": asdict(self.record.conditions),
            **{section.key: section.content for section in self.sections},
            "lacks": list(self.lacks),
        }
        return json.dumps(content, indent=2, allow_nan=False)


def is_empty(record: CalibrationRecord) -> bool:
    """Whether a record holds nothing that was measured."""
    rows = (record.kernels, record.collectives, record.copies, record.beside, record.chain, record.host, record.gpus)
    return not any((*rows, record.moments, record.steps, record.launch_interval))


def report_of(name: str, record: CalibrationRecord, shipped: Accelerator | None) -> Report:
    """What a record says; raise InputError where that is nothing."""
    if is_empty(record):
        raise InputError(f"{name}: holds no measurements; {_BY_CALIBRATE} -o {name} makes some")
    sections = tuple(_sections(record, shipped))
    return Report(name, record, shipped, sections, tuple(_lacks(record, shipped)))


def _sections(record: CalibrationRecord, shipped: Accelerator | None) -> Iterator[Section]:
    """What the record says something of, in the order of questions: is it true, how fast, why, what else."""
    most, under = ceiling(record, shipped), any(row.under is not None for row in record.kernels)
    if record.steps:
        yield steps_section(record)
    if shipped is not None and (record.kernel_fit or record.chain or record.launch_interval):
        yield constants_section(record, shipped)
    if most is not None and any(row.time is not None for row in record.kernels):
        yield efficiency_section(record, most)
    for there, section in (
        (record.moments or under, load_section),
        (record.chain, chain_section),
        (record.host, host_section),
        (record.beside, beside_section),
        (record.collectives, collectives_section),
        (has_uneven(record), uneven_section),
        (record.gpus, gpus_section),
        (record.copies, copies_section),
    ):
        if there:
            yield section(record)


def _contents(record: CalibrationRecord) -> list[tuple[str, bool, str]]:
    """What a record may hold, whether it does, and how it comes there."""
    under, is_cpu = any(row.under is not None for row in record.kernels), record.device.threads > 0
    return [
        ("kernels", bool(record.kernels), _BY_CALIBRATE),
        ("clocks and power under load", bool(record.moments) or under or is_cpu, f"{_BY_CALIBRATE}, on a GPU"),
        ("what a layer does to kernels", bool(record.chain), _BY_CALIBRATE),
        ("the host's time for launches", bool(record.host), _BY_CALIBRATE),
        ("steps that check it", bool(record.steps), _BY_CALIBRATE),
        ("copies", bool(record.copies), _BY_CALIBRATE),
        ("kernels beside other work", bool(record.beside), _BY_CALIBRATE),
        ("collectives", bool(record.collectives), _BY_COLLECTIVES),
        ("other GPUs of the node", bool(record.gpus) or is_cpu, f"{_BY_CALIBRATE}, on a GPU"),
    ]


def _lacks(record: CalibrationRecord, shipped: Accelerator | None) -> Iterator[str]:
    missing: dict[str, list[str]] = {}
    for what, there, command in _contents(record):
        if not there:
            missing.setdefault(command, []).append(what)
    own = record.origin is RecordOrigin.MEASURED
    for command, lost in missing.items():
        yield ", ".join(lost) + f" ({command})" * own
    if shipped is None:
        name = record.device.accelerator
        yield f"a datasheet: clustersim ships no {name}; name a file of your own with --accelerator FILE.yaml"


def _facts(record: CalibrationRecord) -> dict[str, str]:
    device, conditions, state = record.device, record.conditions, steady(record)
    software = {"driver": device.driver, "CUDA": device.cuda, "PyTorch": device.torch, "cuDNN": device.cudnn}
    software |= {"cuBLAS": device.cublas, "": device.collectives, "attention": device.attention}
    states = {True: "on", False: "off", None: ""}
    return {
        "stands for": device.accelerator,
        "host": device.host,
        "software": ", ".join(f"{name} {value}".strip() for name, value in software.items() if value),
        "threads": str(device.threads or ""),
        "power limit": f"{device.power_limit_w:,.0f} W" if device.power_limit_w else "",
        "ECC": states[device.ecc],
        "MIG": states[device.mig],
        "environment": ", ".join(f"{name}={value}" for name, value in device.environment.items()),
        "under load": "" if state is None else state_words(state),
        "kernels": "; ".join(filter(None, (outcome_words(record), *reason_lines(record)))),
        "measured": " ".join(filter(None, (conditions.date, f"by {conditions.command}" * bool(conditions.command)))),
        "derivation": record.derivation,
    }
