"""What does a report contain? Sections in the order of a reader's questions, and what the record lacks."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Final

from calibrate.report.constants import constants_section
from calibrate.report.efficiency import efficiency_section, roofline_limits
from calibrate.report.format import describe_outcomes, describe_telemetry, failure_reason_lines, steady_telemetry
from calibrate.report.imbalance import has_imbalanced, imbalance_section
from calibrate.report.profile import profile_section
from calibrate.report.section import ReportSection
from calibrate.report.step_effects import holdout_section, host_section, in_situ_section, interference_section
from calibrate.report.telemetry import gpus_section, telemetry_section
from calibrate.report.transfers import collectives_section, copies_section
from clustersim.common.errors import InputError
from clustersim.cost.calibration_record import CalibrationRecord
from clustersim.cost.record_kinds import RecordOrigin
from clustersim.hardware.accelerator import Accelerator

_CALIBRATE_COMMAND: Final = "clustersim calibrate --for SCENARIO"
_COLLECTIVES_COMMAND: Final = "torchrun ... -m calibrate collectives"


@dataclass(frozen=True, slots=True)
class CalibrationReport:
    """A record and its report.

    name: of the file; reference: the accelerator that the record stands for, None: unknown to clustersim;
    missing_contents: what the record does not hold.
    """

    name: str
    record: CalibrationRecord
    reference: Accelerator | None
    sections: tuple[ReportSection, ...]
    missing_contents: tuple[str, ...]

    @property
    def device_details(self) -> dict[str, str]:
        """The device and the measurement conditions, as far as the record has them."""
        return {name: value for name, value in _device_details(self.record).items() if value}

    def to_json(self) -> str:
        """One JSON object, in SI units."""
        content = {
            "record": self.name,
            "origin": self.record.origin.value,
            "device": asdict(self.record.device),
            "conditions": asdict(self.record.conditions),
            **{section.key: section.content for section in self.sections},
            "missing": list(self.missing_contents),
        }
        return json.dumps(content, indent=2, allow_nan=False)


def is_empty(record: CalibrationRecord) -> bool:
    """Whether a record holds no measurements."""
    sample_lists = (
        record.kernels,
        record.collectives,
        record.copies,
        record.interference,
        record.in_situ,
        record.host_launches,
        record.gpus,
    )
    return not any((*sample_lists, record.telemetry, record.holdout_steps, record.launch_interval))


def build_report(name: str, record: CalibrationRecord, reference: Accelerator | None) -> CalibrationReport:
    """The report of a record; raise InputError where the record is empty."""
    if is_empty(record):
        raise InputError(f"{name}: holds no measurements; {_CALIBRATE_COMMAND} -o {name} makes some")
    sections = tuple(_report_sections(record, reference))
    return CalibrationReport(name, record, reference, sections, tuple(_missing_contents(record, reference)))


def _report_sections(record: CalibrationRecord, reference: Accelerator | None) -> Iterator[ReportSection]:
    """Sections of what the record holds: is it accurate, how fast is the device, why, what else."""
    limits, has_telemetry = (
        roofline_limits(record, reference),
        any(sample.telemetry is not None for sample in record.kernels),
    )
    if record.holdout_steps:
        yield holdout_section(record)
    if record.profile is not None:
        yield profile_section(record.profile)
    if reference is not None and (record.kernel_fit or record.in_situ or record.launch_interval):
        yield constants_section(record, reference)
    if limits is not None and any(sample.time is not None for sample in record.kernels):
        yield efficiency_section(record, limits)
    for is_present, build_section in (
        (record.telemetry or has_telemetry, telemetry_section),
        (record.in_situ, in_situ_section),
        (record.host_launches, host_section),
        (record.interference, interference_section),
        (record.collectives, collectives_section),
        (has_imbalanced(record), imbalance_section),
        (record.gpus, gpus_section),
        (record.copies, copies_section),
    ):
        if is_present:
            yield build_section(record)


def _content_status(record: CalibrationRecord) -> list[tuple[str, bool, str]]:
    """What a record may hold, whether it does, and the command that measures it."""
    has_telemetry, is_cpu = any(sample.telemetry is not None for sample in record.kernels), record.device.threads > 0
    return [
        ("kernels", bool(record.kernels), _CALIBRATE_COMMAND),
        (
            "clocks and power under load",
            bool(record.telemetry) or has_telemetry or is_cpu,
            f"{_CALIBRATE_COMMAND}, on a GPU",
        ),
        ("in-situ factors of kernels", bool(record.in_situ), _CALIBRATE_COMMAND),
        ("host launch times", bool(record.host_launches), _CALIBRATE_COMMAND),
        ("holdout steps", bool(record.holdout_steps), _CALIBRATE_COMMAND),
        ("copies", bool(record.copies), _CALIBRATE_COMMAND),
        ("kernels with concurrent work", bool(record.interference), _CALIBRATE_COMMAND),
        ("collectives", bool(record.collectives), _COLLECTIVES_COMMAND),
        ("other GPUs of the node", bool(record.gpus) or is_cpu, f"{_CALIBRATE_COMMAND}, on a GPU"),
    ]


def _missing_contents(record: CalibrationRecord, reference: Accelerator | None) -> Iterator[str]:
    labels_by_command: dict[str, list[str]] = {}
    for label, is_present, command in _content_status(record):
        if not is_present:
            labels_by_command.setdefault(command, []).append(label)
    is_measured = record.origin is RecordOrigin.MEASURED
    for command, labels in labels_by_command.items():
        yield ", ".join(labels) + f" ({command})" * is_measured
    if reference is None:
        name = record.device.accelerator
        yield f"a datasheet: clustersim has no {name}; name a file of your own with --accelerator FILE.yaml"


def _device_details(record: CalibrationRecord) -> dict[str, str]:
    device, conditions, state = record.device, record.conditions, steady_telemetry(record)
    software = {"driver": device.driver, "CUDA": device.cuda, "PyTorch": device.torch, "cuDNN": device.cudnn}
    software |= {"cuBLAS": device.cublas, "": device.collectives, "attention": device.attention}
    mode_labels = {True: "on", False: "off", None: ""}
    return {
        "stands for": device.accelerator,
        "host": device.host,
        "software": ", ".join(f"{name} {value}".strip() for name, value in software.items() if value),
        "threads": str(device.threads or ""),
        "power limit": f"{device.power_limit_w:,.0f} W" if device.power_limit_w else "",
        "ECC": mode_labels[device.ecc],
        "MIG": mode_labels[device.mig],
        "environment": ", ".join(f"{name}={value}" for name, value in device.environment.items()),
        "under load": "" if state is None else describe_telemetry(state),
        "kernels": "; ".join(filter(None, (describe_outcomes(record), *failure_reason_lines(record)))),
        "measured": " ".join(filter(None, (conditions.date, f"by {conditions.command}" * bool(conditions.command)))),
        "derivation": record.derivation,
    }
