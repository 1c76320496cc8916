"""How long does each kernel take, and what else does the device alone tell?

First the machine: copies, the launch interval, a matmul beside a copy, the other GPUs of the node. Then the kernels
that were asked for and that the record lacks, the longest first, in what is left of the part's time.
"""

from dataclasses import dataclass, replace
from time import monotonic
from typing import ClassVar, Final

from calibrate.kernels.copy_interference import typical_kernel
from calibrate.kernels.imbalanced_gemm import missing, uneven_rows
from calibrate.kernels.progress import shown
from calibrate.kernels.selection import failing, has_machine, measure_machine, pace
from calibrate.kernels.session import Parts, measured
from calibrate.stages.stage import Bench
from calibrate.stages.stage_telemetry import looked_at
from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import CalibrationRecord
from clustersim.cost.roofline import Roofline
from clustersim.model.kernels import Kernel

_UNEVEN: Final = 0.3  # seconds of samples of a product with uneven groups, and of one with even ones
_MACHINE: Final = 0.1  # of the part's time, after which no more copies are measured


@dataclass(frozen=True, slots=True)
class Kernels:
    """Each kernel that was asked for, by itself."""

    name: ClassVar[str] = "kernels"
    minutes: ClassVar[float] = 8.0
    least: ClassVar[Seconds] = 5.0  # copies, launches, and some kernels

    def obstacle(self, bench: Bench) -> str:  # noqa: ARG002 - every device has kernels
        """None."""
        return ""

    def due(self, bench: Bench) -> bool:
        """Whether one is missing, or failed for want of memory, or the machine was not looked at."""
        known = has_machine(bench.record, bench.device) and not missing(bench.asked, bench.record)
        return bool(bench.session.missing(bench.asked)) or not known

    def words(self, bench: Bench) -> str:
        """How many are new, how many are there, and how many could not be measured before."""
        lacking, asked = len(bench.session.missing(bench.asked)), len(bench.asked)
        there = f", {asked - lacking:,} are there already" if lacking < asked else ""
        tried = lacking - len(bench.new)
        there += f", {tried:,} had no memory or no compiler and are tried again" if tried else ""
        machine = "" if has_machine(bench.record, bench.device) else "; copies, launches"
        return f"{lacking:,} of {asked:,} kernels of {bench.wished}{there}{machine}"

    def measure(self, bench: Bench, seconds: Seconds) -> str:
        """Measure the machine, then kernels while there is time."""
        with looked_at(bench, self.name):
            return self._measure(bench, seconds)

    def _measure(self, bench: Bench, seconds: Seconds) -> str:
        began, session = monotonic(), bench.session
        measure_machine(session, bench.device, bench.method, _MACHINE * seconds)
        lacking = session.missing(bench.asked)
        dtype, failed = typical_kernel(bench.device).dtype, failing(bench.record)
        roofline, rough = Roofline(bench.accelerator), pace(bench.device, dtype, failed)
        known = (
            bench.accelerator.formats
        )  # rows of others say that the device lacks them, or what it does beyond its file

        def predicted(kernel: Kernel) -> Seconds:
            modelled = roofline.time_kernel(kernel).seconds if kernel.dtype in known else 0.0
            return max(modelled, rough.seconds(kernel))

        left = Parts(max(0.0, seconds - (monotonic() - began)), predicted)
        with shown(self.name, len(lacking)) as advance:
            for made in measured(lacking, bench.device, left, bench.method):
                session.add(made)
                advance(made.name)
        _measure_uneven(bench, seconds - (monotonic() - began))
        return _found(len(lacking), len(session.missing(bench.asked)))


def _measure_uneven(bench: Bench, seconds: Seconds) -> None:
    """Uneven groups of experts, while there is time."""
    began, known = monotonic(), bench.session.gathered()
    for asked in missing(bench.asked, known):
        if monotonic() - began > seconds:
            return
        found = tuple(uneven_rows([asked], bench.device, replace(bench.method, seconds=_UNEVEN)))
        bench.session.extend(replace(CalibrationRecord(known.device, known.conditions), uneven=found))
    bench.session.save()


def _found(missing: int, left: int) -> str:
    if not left:
        return f"{missing:,} measured"
    again = "the same command goes on with them, a larger --budget has room for long ones"
    return f"{missing - left:,} measured, {left:,} left that the budget had no time for; {again}"
