"""Changes of kernel speed.

Constants of the kernel model change on every accelerator of the cluster, and so do fitted constants and
measured samples of the calibration record, if there is one: modelled and measured kernels are scaled by the
same factor.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from clustersim.hardware.accelerator import Accelerator
from clustersim.hardware.efficiency import AttentionEfficiency, AttentionLibrary, KernelEfficiency
from clustersim.model.kernels import TENSOR_CORE_KINDS
from clustersim.scenario.scenario import Scenario

if TYPE_CHECKING:
    from clustersim.cost.calibration_record import CalibrationRecord, KernelSample


def effective_efficiency(scenario: Scenario) -> KernelEfficiency:
    """The kernel-model constants in effect for the main accelerator: the record's fit, or the accelerator's own."""
    record, accelerator = scenario.cost.record, scenario.cluster.accelerator
    fitted = None if record is None or record.device.accelerator != accelerator.name else record.kernel_fit
    return accelerator.efficiency if fitted is None else fitted.efficiency


def tensor_core_shares(scenario: Scenario) -> tuple[float, ...]:
    """The fractions of the peak that matmuls, and attention in forward and backward, reach at most."""
    efficiency = effective_efficiency(scenario)
    return tuple(
        curve.peak_fraction
        for curve in (efficiency.matmul, efficiency.attention_forward, efficiency.attention_backward)
    )


def with_matmul_slowdown(scenario: Scenario, slowdown: float) -> Scenario:
    """The scenario with compute-bound matmuls and attention slowed by a factor; never faster than the peak rate."""

    def scale_constants(efficiency: KernelEfficiency) -> KernelEfficiency:
        matmul = efficiency.matmul
        peak_fractions = {
            dtype: _scale_fraction(fraction, slowdown) for dtype, fraction in matmul.peak_fraction_by_format.items()
        }
        return replace(
            efficiency,
            matmul=replace(
                matmul,
                peak_fraction=_scale_fraction(matmul.peak_fraction, slowdown),
                peak_fraction_by_format=peak_fractions,
            ),
            attention_forward=_scale_attention(efficiency.attention_forward, slowdown),
            attention_backward=_scale_attention(efficiency.attention_backward, slowdown),
            attention_libraries={
                name: AttentionLibrary(
                    _scale_attention(library.forward, slowdown), _scale_attention(library.backward, slowdown)
                )
                for name, library in efficiency.attention_libraries.items()
            },
        )

    return _with_kernel_change(
        scenario, _KernelChange(scale_constants, lambda sample: slowdown if sample.kind in TENSOR_CORE_KINDS else 1.0)
    )


def with_memory_bound_slowdown(scenario: Scenario, slowdown: float) -> Scenario:
    """The scenario with memory-bound kernels slowed by a factor; never faster than the memory bandwidth."""

    def scale_constants(efficiency: KernelEfficiency) -> KernelEfficiency:
        return replace(
            efficiency, memory_bandwidth_fraction=_scale_fraction(efficiency.memory_bandwidth_fraction, slowdown)
        )

    return _with_kernel_change(
        scenario, _KernelChange(scale_constants, lambda sample: 1.0 if sample.kind in TENSOR_CORE_KINDS else slowdown)
    )


@dataclass(frozen=True, slots=True)
class _KernelChange:
    """A change of kernel speed. scale_constants: of a kernel model; sample_slowdown: factor of a measured time."""

    scale_constants: Callable[[KernelEfficiency], KernelEfficiency]
    sample_slowdown: "Callable[[KernelSample], float]"

    def apply_to_accelerator(self, accelerator: Accelerator) -> Accelerator:
        """The accelerator with scaled constants."""
        return replace(accelerator, efficiency=self.scale_constants(accelerator.efficiency))

    def apply_to_record(self, record: "CalibrationRecord") -> "CalibrationRecord":
        """The record with scaled samples and fit."""
        fit = record.kernel_fit
        return replace(
            record,
            kernels=tuple(_scale_sample(sample, self.sample_slowdown(sample)) for sample in record.kernels),
            kernel_fit=None if fit is None else replace(fit, efficiency=self.scale_constants(fit.efficiency)),
        )


def _with_kernel_change(scenario: Scenario, change: _KernelChange) -> Scenario:
    cluster, record = scenario.cluster, scenario.cost.record
    mixed = tuple(
        replace(mixed_nodes, accelerator=change.apply_to_accelerator(mixed_nodes.accelerator))
        for mixed_nodes in cluster.accelerator_overrides
    )
    changed_cluster = replace(
        cluster, accelerator=change.apply_to_accelerator(cluster.accelerator), accelerator_overrides=mixed
    )
    cost = scenario.cost if record is None else replace(scenario.cost, record=change.apply_to_record(record))
    return replace(scenario, cluster=changed_cluster, cost=cost)


def _scale_sample(sample: "KernelSample", slowdown: float) -> "KernelSample":
    return sample if sample.time is None or slowdown == 1.0 else replace(sample, time=sample.time.scaled(slowdown))


def _scale_fraction(fraction: float, slowdown: float) -> float:
    return min(1.0, fraction / slowdown) if slowdown < 1.0 else fraction / slowdown


def _scale_attention(efficiency: AttentionEfficiency, slowdown: float) -> AttentionEfficiency:
    return replace(efficiency, peak_fraction=_scale_fraction(efficiency.peak_fraction, slowdown))
