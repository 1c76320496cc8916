"""What would a scenario be with faster or slower kernels?

Constants of the kernel model change on every accelerator of the cluster, and in the calibration record where there is
one: its fitted constants and its measured rows. So a change of the model and of what was measured are one change.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from clustersim.cost.calibration_record import KernelRow, Record, Spread
from clustersim.hardware.accelerator import Accelerator
from clustersim.hardware.efficiency import AttentionEfficiency, Efficiency
from clustersim.model.kernels import PRODUCTS
from clustersim.scenario.scenario import Scenario


def efficiency_of(scenario: Scenario) -> Efficiency:
    """The constants of the cluster's main accelerator that are in force: the record's fit, or its own."""
    record, accelerator = scenario.cost.record, scenario.cluster.accelerator
    fitted = None if record is None or record.device.accelerator != accelerator.name else record.kernel_fit
    return accelerator.efficiency if fitted is None else fitted.efficiency


def with_products(scenario: Scenario, longer: float) -> Scenario:
    """Matrix products and attention take so many times as long where compute bounds them; at most at the peak."""

    def change(efficiency: Efficiency) -> Efficiency:
        matmul = efficiency.matmul
        shares = {dtype: _share(share, longer) for dtype, share in matmul.shares.items()}
        return replace(
            efficiency,
            matmul=replace(matmul, share=_share(matmul.share, longer), shares=shares),
            attention_forward=_attention(efficiency.attention_forward, longer),
            attention_backward=_attention(efficiency.attention_backward, longer),
        )

    return _changed(scenario, _Change(change, lambda row: longer if row.kind in PRODUCTS else 1.0))


def with_streaming(scenario: Scenario, longer: float) -> Scenario:
    """Kernels that memory bounds take so many times as long; at most at the memory's bandwidth."""

    def change(efficiency: Efficiency) -> Efficiency:
        return replace(efficiency, memory=_share(efficiency.memory, longer))

    return _changed(scenario, _Change(change, lambda row: 1.0 if row.kind in PRODUCTS else longer))


@dataclass(frozen=True, slots=True)
class _Change:
    """constants: of a kernel model; longer: how many times as long a measured row takes."""

    constants: Callable[[Efficiency], Efficiency]
    longer: Callable[[KernelRow], float]

    def accelerator(self, accelerator: Accelerator) -> Accelerator:
        """An accelerator with changed constants."""
        return replace(accelerator, efficiency=self.constants(accelerator.efficiency))

    def record(self, record: Record) -> Record:
        """A record with changed rows and changed fit."""
        fit = record.kernel_fit
        return replace(
            record,
            kernels=tuple(_row(row, self.longer(row)) for row in record.kernels),
            kernel_fit=None if fit is None else replace(fit, efficiency=self.constants(fit.efficiency)),
        )


def _changed(scenario: Scenario, change: _Change) -> Scenario:
    cluster, record = scenario.cluster, scenario.cost.record
    mixed = tuple(replace(part, accelerator=change.accelerator(part.accelerator)) for part in cluster.mixed)
    machine = replace(cluster, accelerator=change.accelerator(cluster.accelerator), mixed=mixed)
    cost = scenario.cost if record is None else replace(scenario.cost, record=change.record(record))
    return replace(scenario, cluster=machine, cost=cost)


def _row(row: KernelRow, longer: float) -> KernelRow:
    return row if row.time is None or longer == 1.0 else replace(row, time=_longer(row.time, longer))


def _longer(time: Spread, longer: float) -> Spread:
    return replace(time, seconds=time.seconds * longer, p5=time.p5 * longer, p95=time.p95 * longer)


def _share(share: float, longer: float) -> float:
    return min(1.0, share / longer) if longer < 1.0 else share / longer


def _attention(efficiency: AttentionEfficiency, longer: float) -> AttentionEfficiency:
    return replace(efficiency, share=_share(efficiency.share, longer))
