"""What is one operator of a layer on one rank, and what part of the layer does the rank hold?

An operator has kernels to run forward and backward, parameters, and bytes that it keeps for its backward. Backward is
split as pipeline schedules split it: the gradient of the input (B) and the gradient of the weights (W).
Reference: Narayanan et al. 2021 (arXiv:2104.04473) section 2.3 for tensor parallelism, Korthikanti et al. 2022
(arXiv:2205.05198) section 4.2 for sequence parallelism.
"""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain, repeat

from clustersim.common.units import Bytes
from clustersim.model.kernels import Kernel
from clustersim.model.linear import Linear
from clustersim.model.recompute_modules import Module, Within

DENSE = "dense"
"""The group of weights that every token meets."""
EXPERTS = "experts"
"""The group of weights that only the tokens routed to them meet."""
NARROWED = "narrow"
"""Layers whose matrices are kept or gathered in the format of their products, norms counted with them."""
QUANTIZED = "quantized"
"""Frozen matrices that are kept in fewer bits than they are computed with."""
ADAPTERS = "adapters"
"""Small matrices that are trained beside frozen ones."""


class Region(Enum):
    """SHARDED is split over tp by heads, columns or vocabulary; REPLICATED is not, or by sequence.

    ROUTED is on the ranks of the experts that tokens were sent to.
    """

    SHARDED = "sharded"
    ROUTED = "routed"
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
    sequence / tp tokens; ep, etp: over how many ranks experts are spread, and each of them is cut; copied_there: a
    token travels once to the ranks of its experts and is copied for each there, not before; load: rows that come to
    this rank's experts over their mean.
    """

    batch: int
    sequence: int
    keys: int
    tp: int = 1
    sequence_parallel: bool = False
    ep: int = 1
    etp: int = 1
    copied_there: bool = False
    load: float = 1.0

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


class Joining(Enum):
    """What tensor-parallel ranks make of their parts of a small tensor: GATHERED columns, or their SUM."""

    GATHERED = "gathered"
    SUMMED = "summed"


@dataclass(frozen=True, slots=True)
class Joint:
    """A tensor of which each tensor-parallel rank has a part, some columns or a term.

    size: bytes of the whole; of: what it is.
    """

    how: Joining
    size: Bytes
    of: str = "adapter"


@dataclass(frozen=True, slots=True)
class Joints:
    """What is joined inside a sharded region, of an operator.

    result: behind its forward; entering: before its backward; leaving: behind its input gradient.
    """

    result: tuple[Joint, ...] = ()
    entering: tuple[Joint, ...] = ()
    leaving: tuple[Joint, ...] = ()


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator of a layer on one rank.

    parameters: held by this rank, of the group of weights `group`; kept: bytes that stay in memory from forward to
    backward if nothing is recomputed; waiting: bytes that stay from the input's gradient to the weights' where the two
    are run apart (its input and the gradient of its output); within: modules that it is in, which can be recomputed;
    reads: the module whose result its `read` is; again: what selective recomputation by operations runs again
    (None: all of forward), keeping `results` bytes of the rest; entry: where it reads an input of its region that it is
    not the first operator of (None: it reads what the region made); linear: the linear layer that it is; read: bytes of
    `kept` that its weight gradient alone reads; returned: bytes of its result that its own backward reads, too, where
    the operator that follows keeps them; trained: its parameters have gradients; whole: it keeps its input whole where
    the sequence is split; joints: what it has joined within a sharded region; unpacked: bytes of weights that it has in
    the format of its products at once while it runs; saves_late: something that backward needs is saved only when it
    has run (a mask, statistics, its result), not what it reads alone; entering: bytes of the whole activation that
    comes into its region for it, None: as wide as the residual stream; cast: elements of its weights of which copies in
    the format of its products are made once a step, and kept.
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
    within: tuple[Within, ...] = ()
    reads: Module | None = None
    again: tuple[Kernel, ...] | None = None
    results: Bytes = 0.0
    entry: Entry | None = None
    linear: Linear | None = None
    read: Bytes = 0.0
    returned: Bytes = 0.0
    trained: bool = True
    whole: bool = False
    joints: Joints = Joints()
    unpacked: Bytes = 0.0
    saves_late: bool = False
    entering: Bytes | None = None
    cast: int = 0

    def inside(self, modules: Set[Module]) -> bool:
        """Whether it is in one of some modules."""
        return any(item.module in modules for item in self.within)

    def kept_beside(self, recomputed: Set[Module]) -> Bytes:
        """Bytes that stay from forward to backward where some modules are recomputed."""
        dropped = self.reads in recomputed
        if self.inside(recomputed):
            return 0.0 if dropped else min(item.comes for item in self.within if item.module in recomputed)
        return self.kept - self.read if dropped else self.kept

    @property
    def gradients(self) -> int:
        """Parameters that have gradients."""
        return self.parameters if self.trained else 0

    @property
    def run_again(self) -> tuple[Kernel, ...]:
        """What selective recomputation by operations runs again."""
        return self.forward if self.again is None else self.again

    @property
    def saves(self) -> bool:
        """Whether autograd saves anything for its backward: what it reads, what it makes, or its weights."""
        return bool(self.input_gradient or self.weight_gradient)


def within(made: Iterable[Operator], module: Module, comes: Bytes = 0.0) -> list[Operator]:
    """Operators as those of a module. comes: bytes of the module's inputs that the first of them keeps."""
    sizes = chain((comes,), repeat(0.0))
    return [
        replace(operator, within=(*operator.within, Within(module, size)))
        for operator, size in zip(made, sizes, strict=False)
    ]


def reading(made: Sequence[Operator], module: Module) -> list[Operator]:
    """Operators of which the first reads the result of a module."""
    return [replace(operator, reads=module) for operator in made[:1]] + list(made[1:])


def until_saved(operators: Sequence[Operator]) -> int:
    """How many of the operators run until all that backward needs is saved.

    torch.utils.checkpoint without `use_reentrant` runs a forward again under hooks that count what is saved, and stops
    at the last (`_recomputation_hook` raises `_StopRecomputationError`). Autograd saves inputs before an operator runs
    and what it makes behind it, so a last linear layer is not run again, nor a sum behind it, which saves nothing.
    """
    last = max((place for place, operator in enumerate(operators) if operator.saves), default=-1)
    return last + 1 if last < 0 or operators[last].saves_late else last


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

    def kept_beside(self, recomputed: Set[Module]) -> Bytes:
        """Bytes kept for backward where some modules are recomputed."""
        return sum(operator.kept_beside(recomputed) for operator in self.operators)

    @property
    def waiting(self) -> Bytes:
        """Bytes kept from the gradient of the input to those of the weights."""
        return sum(operator.waiting for operator in self.operators)
