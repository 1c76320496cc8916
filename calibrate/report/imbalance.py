"""By how much are grouped GEMMs, and all-to-alls, slower with imbalanced loads?"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from calibrate.report.section import ReportSection
from calibrate.report.transfers import call_label
from clustersim.common.units import Seconds, format_bytes, format_seconds
from clustersim.cost.calibration_record import CalibrationRecord, TimeStatistics, family_of
from clustersim.model.kernels import MatmulShape


@dataclass(frozen=True, slots=True)
class ImbalanceComparison:
    """A measurement with imbalanced loads.

    max_share: the largest load over the mean; balanced_seconds: time with equal loads, None: not measured.
    """

    label: str
    size: str
    max_share: float
    balanced_seconds: Seconds | None
    seconds: Seconds

    @property
    def slowdown(self) -> float | None:
        """Slowdown relative to balanced loads, minus one."""
        return None if self.balanced_seconds is None else self.seconds / self.balanced_seconds - 1.0

    @property
    def table_cells(self) -> tuple[str, ...]:
        """The cells of a table row."""
        balanced_text, slowdown_text = (
            ("-", "-")
            if self.balanced_seconds is None
            else (format_seconds(self.balanced_seconds), f"{self.slowdown:+.1%}")
        )
        return (
            self.label,
            self.size,
            f"{self.max_share:.2f} x",
            balanced_text,
            format_seconds(self.seconds),
            slowdown_text,
        )

    @property
    def json_content(self) -> Mapping[str, object]:
        """The comparison as plain data."""
        times = {"balanced_seconds": self.balanced_seconds, "seconds": self.seconds, "slowdown": self.slowdown}
        return {"description": self.label, "size": self.size, "max_share": self.max_share, **times}


def imbalance_section(record: CalibrationRecord) -> ReportSection:
    """Grouped GEMMs of experts, then all-to-alls."""
    comparisons = [*_grouped_gemm_comparisons(record), *_all_to_all_comparisons(record)]
    return ReportSection(
        key="imbalance",
        title="Imbalanced loads",
        heads=("what", "size", "maximum over mean", "balanced", "imbalanced", "slowdown"),
        rows=tuple(comparison.table_cells for comparison in comparisons),
        content=[comparison.json_content for comparison in comparisons],
        lead="Groups of different sizes, compared with the same total in equal groups.",
        text_columns=(0, 1),
    )


def has_imbalanced(record: CalibrationRecord) -> bool:
    """Whether anything with imbalanced loads was measured."""
    return bool(record.imbalanced_gemms) or any(sample.call.shares for sample in record.collectives)


def _grouped_gemm_comparisons(record: CalibrationRecord) -> Iterator[ImbalanceComparison]:
    for sample in record.imbalanced_gemms:
        balanced, shape = sample.kernel.time, sample.kernel.shape
        if isinstance(shape, MatmulShape):
            size = f"{shape.batch} x {shape.m} x {shape.n} x {shape.k} {shape.operands.value}"
            label = family_of(sample.kernel.signature).replace("_", " ")
            yield ImbalanceComparison(label, size, sample.imbalance, _seconds_or_none(balanced), sample.time.seconds)


def _all_to_all_comparisons(record: CalibrationRecord) -> Iterator[ImbalanceComparison]:
    times = {sample.call: sample.time for sample in record.collectives}
    for sample in record.collectives:
        if sample.call.shares:
            balanced = times.get(replace(sample.call, shares=()))
            size = format_bytes(sample.call.payload)
            yield ImbalanceComparison(
                call_label(sample.call), size, sample.call.max_share, _seconds_or_none(balanced), sample.time.seconds
            )


def _seconds_or_none(time: TimeStatistics | None) -> Seconds | None:
    return None if time is None else time.seconds
