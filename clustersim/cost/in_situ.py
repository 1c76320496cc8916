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

from clustersim.cost.calibration_record import ChainRow, Record, Signature, family
from clustersim.cost.timing import Timing
from clustersim.model.kernels import KernelKind


@dataclass(frozen=True, slots=True)
class InChain:
    """Factors by family, by kind of kernel, and of all; without rows every factor is 1."""

    families: Mapping[str, float] = field(default_factory=dict)
    kinds: Mapping[KernelKind, float] = field(default_factory=dict)
    every: float = 1.0

    @classmethod
    def of(cls, record: Record) -> "InChain":
        """Those of a record, whose kernels say which kind a family is of."""
        if not record.chain:
            return cls()
        kinds = {family(row.signature): row.kind for row in record.kernels}
        known = {kind: [row for row in record.chain if kinds.get(row.family) is kind] for kind in set(kinds.values())}
        return cls(
            {row.family: row.factor for row in record.chain},
            {kind: mean_factor(rows) for kind, rows in known.items() if rows},
            mean_factor(record.chain),
        )

    def timing(self, alone: Timing, kind: KernelKind, sought: Signature | None) -> Timing:
        """What a kernel takes in a step, from what it takes alone."""
        measured = None if sought is None else self.families.get(family(sought))
        if measured is not None:
            return replace(alone, seconds=alone.seconds * measured)
        factor = self.kinds.get(kind, self.every)
        error = None if alone.error is None else alone.error + abs(factor - 1.0)
        return replace(alone, seconds=alone.seconds * factor, error=error)


def mean_factor(rows: Iterable[ChainRow]) -> float:
    """The factor of some families together, of which there is one at least."""
    known = tuple(rows)
    return sum(row.in_chain for row in known) / sum(row.isolated for row in known)
