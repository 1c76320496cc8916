"""How much longer does a kernel take inside a real layer than in the isolated benchmark?

`CalibrationRecord.chain` has a factor for each family: caches as the previous kernel leaves them, clocks as
the power of a step's kernel mix allows. A family that was not measured in situ takes the factor of its
kernel kind, or of all kernels where none of its kind was measured: sum of in-situ seconds over sum of
isolated seconds, so that long kernels weigh more. Such a factor was not measured for that kernel, so its
error grows by the relative change.

Assumed: a family has one factor for all shapes, and the kernels of the few measured layers represent the
whole step.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from clustersim.cost.calibration_record import CalibrationRecord, InSituSample, KernelSignature, family_of
from clustersim.cost.timing import KernelTiming
from clustersim.model.kernels import KernelKind


@dataclass(frozen=True, slots=True)
class InSituFactors:
    """In-situ factors by family, by kind of kernel, and overall; without samples every factor is 1."""

    by_family: Mapping[str, float] = field(default_factory=dict)
    by_kind: Mapping[KernelKind, float] = field(default_factory=dict)
    overall: float = 1.0

    @classmethod
    def from_record(cls, record: CalibrationRecord) -> "InSituFactors":
        """Factors of a record, whose kernel samples give the kind of each family."""
        if not record.in_situ:
            return cls()
        kinds = {family_of(sample.signature): sample.kind for sample in record.kernels}
        samples_by_kind = {
            kind: [sample for sample in record.in_situ if kinds.get(sample.family) is kind]
            for kind in set(kinds.values())
        }
        return cls(
            {sample.family: sample.factor for sample in record.in_situ},
            {kind: mean_factor(samples) for kind, samples in samples_by_kind.items() if samples},
            mean_factor(record.in_situ),
        )

    def apply(self, isolated: KernelTiming, kind: KernelKind, signature: KernelSignature | None) -> KernelTiming:
        """Timing of a kernel within a step, from its timing in isolation."""
        family_factor = None if signature is None else self.by_family.get(family_of(signature))
        if family_factor is not None:
            return replace(isolated, seconds=isolated.seconds * family_factor)
        factor = self.by_kind.get(kind, self.overall)
        error = None if isolated.error is None else isolated.error + abs(factor - 1.0)
        return replace(isolated, seconds=isolated.seconds * factor, error=error)


def mean_factor(samples: Iterable[InSituSample]) -> float:
    """In-situ over isolated seconds of several families (at least one) taken as one."""
    measured = tuple(samples)
    return sum(sample.in_situ for sample in measured) / sum(sample.isolated for sample in measured)
