"""What is one operator of a layer on one rank, and what part of the layer does the rank hold?

An operator has kernels to run forward and backward, parameters, and bytes that it keeps for its backward. Backward is
split as pipeline schedules split it: the gradient of the input (B) and the gradient of the weights (W).
Reference: Narayanan et al. 2021 (arXiv:2104.04473) section 2.3 for tensor parallelism, Korthikanti et al. 2022
(arXiv:2205.05198) section 4.2 for sequence parallelism.
"""

from dataclasses import dataclass
from enum import Enum

from clustersim.units import Bytes
from clustersim.workload.kernels import Kernel

DENSE = "dense"
"""The group of weights that every token meets."""


class Region(Enum):
    """SHARDED is split over tp by heads, columns or vocabulary; REPLICATED is not, or by sequence."""

    SHARDED = "sharded"
    REPLICATED = "replicated"


class Entry(Enum):
    """What an operator reads of its sharded region's inputs, if it is not the region's first.

    SAME: what the first reads, too; OTHER: another activation, which comes into the region for it.
    """

    SAME = "same"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank holds of a microbatch and of a layer.

    batch: sequences in the microbatch; sequence: tokens of each on this rank (global sequence / cp); keys: tokens that
    queries of this rank attend over (global sequence); sequence_parallel: norms, residuals and dropout run on
    sequence / tp tokens.
    """

    batch: int
    sequence: int
    keys: int
    tp: int = 1
    sequence_parallel: bool = False

    @property
    def tokens(self) -> int:
        """Tokens that SHARDED operators see."""
        return self.batch * self.sequence

    def rows(self, vocab: int) -> int:
        """Rows of a vocabulary's table on one rank, rounded up where tp does not divide them."""
        return -(-vocab // self.tp)

    @property
    def residual_tokens(self) -> int:
        """Tokens that REPLICATED operators see."""
        return self.tokens // self.tp if self.sequence_parallel else self.tokens


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator of a layer on one rank.

    parameters: held by this rank, of the group of weights `group`; kept: bytes that stay in memory from forward to
    backward if nothing is recomputed; waiting: bytes that stay from the input's gradient to the weights' where the two
    are run apart (its input and the gradient of its output); core: part of the attention core, which selective
    recomputation runs again instead of keeping its `kept`; again: what selective recomputation by operations runs again
    (None: all of forward), keeping `results` bytes of the rest; entry: where it reads an input of its region that it is
    not the first operator of (None: it reads what the region made).
    """

    name: str
    region: Region
    forward: tuple[Kernel, ...]
    input_gradient: tuple[Kernel, ...] = ()
    weight_gradient: tuple[Kernel, ...] = ()
    parameters: int = 0
    group: str = DENSE
    kept: Bytes = 0.0
    waiting: Bytes = 0.0
    core: bool = False
    again: tuple[Kernel, ...] | None = None
    results: Bytes = 0.0
    entry: Entry | None = None

    @property
    def run_again(self) -> tuple[Kernel, ...]:
        """What selective recomputation by operations runs again."""
        return self.forward if self.again is None else self.again


@dataclass(frozen=True, slots=True)
class Layer:
    """Operators in forward order. input_bytes: the input on this rank, which is all that full recomputation keeps."""

    operators: tuple[Operator, ...]
    input_bytes: Bytes

    @property
    def parameters(self) -> int:
        """Parameters on this rank."""
        return sum(operator.parameters for operator in self.operators)

    @property
    def counts(self) -> dict[str, int]:
        """Parameters on this rank by their group."""
        found: dict[str, int] = {}
        for operator in self.operators:
            found[operator.group] = found.get(operator.group, 0) + operator.parameters
        return found

    @property
    def kept(self) -> Bytes:
        """Bytes kept for backward if nothing is recomputed."""
        return sum(operator.kept for operator in self.operators)

    @property
    def waiting(self) -> Bytes:
        """Bytes kept from the gradient of the input to those of the weights."""
        return sum(operator.waiting for operator in self.operators)
