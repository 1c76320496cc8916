"""How much longer do experts' products, and all-to-alls, take where loads are uneven?"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from calibrate.report.section import Section
from calibrate.report.transfers import call_words
from clustersim.common.units import Seconds, format_bytes, format_seconds
from clustersim.cost.calibration_record import CalibrationRecord, TimeStatistics, family_of
from clustersim.model.kernels import MatmulShape


@dataclass(frozen=True, slots=True)
class Uneven:
    """What has uneven parts. hottest: the largest over the mean; even: seconds with even ones, None: not measured."""

    what: str
    size: str
    hottest: float
    even: Seconds | None
    seconds: Seconds

    @property
    def slowing(self) -> float | None:
        """The part by which it takes longer."""
        return None if self.even is None else self.seconds / self.even - 1.0

    @property
    def cells(self) -> tuple[str, ...]:
        """As a row of a table."""
        even, longer = ("-", "-") if self.even is None else (format_seconds(self.even), f"{self.slowing:+.1%}")
        return self.what, self.size, f"{self.hottest:.2f} x", even, format_seconds(self.seconds), longer

    @property
    def content(self) -> Mapping[str, object]:
        """As plain data."""
        times = {"even_seconds": self.even, "seconds": self.seconds, "slowing": self.slowing}
        return {"what": self.what, "size": self.size, "hottest": self.hottest, **times}


def uneven_section(record: CalibrationRecord) -> Section:
    """Products of experts, then all-to-alls."""
    found = [*_products(record), *_calls(record)]
    return Section(
        key="uneven",
        title="Uneven loads",
        heads=("what", "size", "largest part", "even", "uneven", "longer"),
        rows=tuple(uneven.cells for uneven in found),
        content=[item.content for item in found],
        lead="Parts of different sizes, beside as much in equal parts.",
        words=(0, 1),
    )


def has_uneven(record: CalibrationRecord) -> bool:
    """Whether anything with uneven parts was measured."""
    return bool(record.uneven) or any(row.call.shares for row in record.collectives)


def _products(record: CalibrationRecord) -> Iterator[Uneven]:
    for row in record.uneven:
        even, shape = row.kernel.time, row.kernel.shape
        if isinstance(shape, MatmulShape):
            size = f"{shape.batch} x {shape.m} x {shape.n} x {shape.k} {shape.operands.value}"
            words = family_of(row.kernel.signature).replace("_", " ")
            yield Uneven(words, size, row.imbalance, _seconds(even), row.time.seconds)


def _calls(record: CalibrationRecord) -> Iterator[Uneven]:
    times = {row.call: row.time for row in record.collectives}
    for row in record.collectives:
        if row.call.shares:
            even = times.get(replace(row.call, shares=()))
            size = format_bytes(row.call.payload)
            yield Uneven(call_words(row.call), size, row.call.max_share, _seconds(even), row.time.seconds)


def _seconds(time: TimeStatistics | None) -> Seconds | None:
    return None if time is None else time.seconds
