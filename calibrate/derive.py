"""What does a record of one accelerator imply for another one with the same compute die?

Where two accelerators differ only in memory, compute-bound and launch-bound kernels take the same time, and
memory-bound ones are scaled by the ratio of the memory bandwidths that both reach (`cost.record_scaling`, whose
kernel model decides what bounds each kernel). Clocks under load, which a power limit sets, are assumed to keep the
ratio of the boards' rates below. Pairs with different dies are refused: a record can be scaled in the scenario
instead, by ratios that the user gives.

    python -m calibrate derive RECORD --to h100-sxm-80gb -o OUT
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from clustersim.common.errors import InputError, suggest_nearest
from clustersim.cost.calibration_record import CalibrationRecord, DeviceInfo
from clustersim.cost.record_file import read_record, require_same_origin, write_record
from clustersim.cost.record_kinds import RecordOrigin
from clustersim.cost.record_scaling import scale_record
from clustersim.hardware.accelerator import Accelerator, load_accelerator


@dataclass(frozen=True, slots=True)
class ComputeDie:
    """A compute die and the accelerators that use it.

    relative_rates: arithmetic rates of the accelerators relative to each other; source: reference for them.
    """

    relative_rates: Mapping[str, float]
    source: str


DIES: Final = (
    ComputeDie(
        MappingProxyType({"h100-sxm-80gb": 1.0, "h200-sxm-141gb": 1.0}),
        "NVIDIA H200 datasheet: the H100 SXM's Tensor Core rates and 700 W, with 141 GB of HBM3e at 4.8 TB/s",
    ),
    ComputeDie(
        MappingProxyType({"a100-sxm-40gb": 1.0, "a100-sxm-80gb": 1.0}),
        "NVIDIA A100 datasheet: one table of rates and 400 W for both SXM boards, with HBM2 or HBM2e",
    ),
    ComputeDie(
        MappingProxyType({"b200-sxm-180gb": 1745.0, "gb200": 1822.0}),
        "best BF16 matmul of a search, 1745.0 and 1822.0 TFLOP/s: stas00/ml-engineering, compute/accelerator README",
    ),
)
_DIE_BY_ACCELERATOR: Final[Mapping[str, ComputeDie]] = MappingProxyType(
    {name: die for die in DIES for name in die.relative_rates}
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `command`."""
    parser.add_argument("record", type=Path, metavar="RECORD", help="record to derive from")
    parser.add_argument("--to", required=True, metavar="ACCELERATOR", help="packaged accelerator with the same die")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="OUT", help="record to write")


def command(options: argparse.Namespace) -> None:
    """Read a record, derive the record of the other accelerator and write it."""
    record = derive_record(read_record(options.record), options.to)
    require_same_origin(options.output, RecordOrigin.DERIVED)
    write_record(record, options.output)
    print(f"wrote {options.output}")


def derive_record(record: CalibrationRecord, target: str) -> CalibrationRecord:
    """The record of an accelerator with the same compute die; raise InputError where the dies differ."""
    source = record.device.accelerator
    die = _shared_die(source, target)
    source_accelerator, target_accelerator = load_accelerator(source), load_accelerator(target)
    source_bandwidth, target_bandwidth = (
        accelerator.efficiency.reached_bandwidth(accelerator.memory_bandwidth)
        for accelerator in (source_accelerator, target_accelerator)
    )
    scaled_record = scale_record(
        record,
        compute=die.relative_rates[target] / die.relative_rates[source],
        bandwidth=target_bandwidth / source_bandwidth,
    )
    return replace(
        scaled_record,
        device=_target_device(record.device, target_accelerator),
        origin=RecordOrigin.DERIVED,
        derivation=f"{scaled_record.derivation}; of one compute die: {die.source}",
    )


def _shared_die(source: str, target: str) -> ComputeDie:
    """The die that both accelerators use; raise InputError where there is none."""
    if target not in _DIE_BY_ACCELERATOR:
        raise InputError(
            f"--to: no accelerator {target!r} with a die that others share is known; "
            f"{suggest_nearest(target, _DIE_BY_ACCELERATOR)}"
        )
    die = _DIE_BY_ACCELERATOR[target]
    sources = [name for name in die.relative_rates if name != target]
    if source not in sources:
        problem = "is of it already" if source == target else "has another compute die"
        raise InputError(
            f"--to {target}: the record's accelerator {source} {problem}; records of {' or '.join(sources)} carry "
            "over to it"
        )
    return die


def _target_device(measured: DeviceInfo, accelerator: Accelerator) -> DeviceInfo:
    """The derived device: the measured one's software, the target's memory, and no device name."""
    return replace(measured, accelerator=accelerator.name, name="", memory_bytes=accelerator.memory_bytes)
