"""How much longer does a kernel take in a real layer than by itself, as it was measured?

`Record.chain` has a factor for each family: caches as the kernel before leaves them, clocks as the power of a step's
mix of kernels allows. A family that was not in the chain takes the factor of its kind, or of all kernels where none of
its kind was: sums of seconds in the chain over sums of seconds alone, so that long kernels count for more. Such a
factor was not measured for that kernel, so its error grows by the part by which it is changed.

Assumed: a family has one factor, whatever its shapes; and kernels of a chain of some layers are those of the whole
step.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from clustersim.cost.calibration_record import CalibrationRecord, InSituSample, KernelSignature, family_of
from clustersim.cost.timing import KernelTiming
from clustersim.model.kernels import KernelKind


@dataclass(frozen=True, slots=True)
class InSituFactors:
    """Factors by family, by kind of kernel, and of all; without rows every factor is 1."""

    by_family: Mapping[str, float] = field(default_factory=dict)
    by_kind: Mapping[KernelKind, float] = field(default_factory=dict)
    overall: float = 1.0

    @classmethod
    def from_record(cls, record: CalibrationRecord) -> "InSituFactors":
        """Those of a record, whose kernels say which kind a family is of."""
        if not record.chain:
            return cls()
        kinds = {family_of(sample.signature): sample.kind for sample in record.kernels}
        samples_by_kind = {
            kind: [sample for sample in record.chain if kinds.get(sample.family) is kind]
            for kind in set(kinds.values())
        }
        return cls(
            {sample.family: sample.factor for sample in record.chain},
            {kind: mean_factor(samples) for kind, samples in samples_by_kind.items() if samples},
            mean_factor(record.chain),
        )

    def apply(self, isolated: KernelTiming, kind: KernelKind, signature: KernelSignature | None) -> KernelTiming:
        """What a kernel takes in a step, from what it takes alone."""
        family_factor = None if signature is None else self.by_family.get(family_of(signature))
        if family_factor is not None:
            return replace(isolated, seconds=isolated.seconds * family_factor)
        factor = self.by_kind.get(kind, self.overall)
        error = None if isolated.error is None else isolated.error + abs(factor - 1.0)
        return replace(isolated, seconds=isolated.seconds * factor, error=error)


def mean_factor(samples: Iterable[InSituSample]) -> float:
    """The factor of some families together, of which there is one at least."""
    measured = tuple(samples)
    return sum(sample.in_chain for sample in measured) / sum(sample.isolated for sample in measured)
