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
from clustersim.model.linear import LinearLayer
from clustersim.model.recompute_modules import ModuleMembership, RecomputeModule

DENSE = "dense"
"""The group of weights that every token meets."""
EXPERTS = "experts"
"""The group of weights that only the tokens routed to them meet."""
LOW_PRECISION_LAYERS = "narrow"
"""Layers whose matrices are kept or gathered in the format of their products, norms counted with them."""
QUANTIZED = "quantized"
"""Frozen matrices that are kept in fewer bits than they are computed with."""
ADAPTERS = "adapters"
"""Small matrices that are trained beside frozen ones."""


class ParallelRegion(Enum):
    """SHARDED is split over tp by heads, columns or vocabulary; REPLICATED is not, or by sequence.

    ROUTED is on the ranks of the experts that tokens were sent to.
    """

    SHARDED = "sharded"
    EXPERT = "routed"
    REPLICATED = "replicated"


class RegionInput(Enum):
    """What an operator reads of its sharded region's inputs, if it is not the region's first.

    SAME: what the first reads, too; OTHER: another activation, which comes into the region for it.
    """

    SAME = "same"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class LayerShard:
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
    permute_after_dispatch: bool = False
    load_factor: float = 1.0

    @property
    def tokens(self) -> int:
        """Tokens that SHARDED operators see."""
        return self.batch * self.sequence

    def vocab_rows(self, vocab_size: int) -> int:
        """Rows of a vocabulary's table on one rank, rounded up where tp does not divide them."""
        return -(-vocab_size // self.tp)

    @property
    def residual_tokens(self) -> int:
        """Tokens that REPLICATED operators see."""
        return self.tokens // self.tp if self.sequence_parallel else self.tokens


class TpCombine(Enum):
    """What tensor-parallel ranks make of their parts of a small tensor: GATHERED columns, or their SUM."""

    GATHER = "gathered"
    SUM = "summed"


@dataclass(frozen=True, slots=True)
class TpCollective:
    """A tensor of which each tensor-parallel rank has a part, some columns or a term.

    size: bytes of the whole; of: what it is.
    """

    combine: TpCombine
    full_bytes: Bytes
    tensor_name: str = "adapter"


@dataclass(frozen=True, slots=True)
class TpCollectives:
    """What is joined inside a sharded region, of an operator.

    result: behind its forward; entering: before its backward; leaving: behind its input gradient.
    """

    after_forward: tuple[TpCollective, ...] = ()
    before_backward: tuple[TpCollective, ...] = ()
    after_input_gradient: tuple[TpCollective, ...] = ()


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
    region: ParallelRegion
    forward: tuple[Kernel, ...]
    input_gradient: tuple[Kernel, ...] = ()
    weight_gradient: tuple[Kernel, ...] = ()
    parameter_count: int = 0
    parameter_group: str = DENSE
    saved_bytes: Bytes = 0.0
    deferred_wgrad_bytes: Bytes = 0.0
    memberships: tuple[ModuleMembership, ...] = ()
    reads_module: RecomputeModule | None = None
    recompute_override: tuple[Kernel, ...] | None = None
    saved_output_bytes: Bytes = 0.0
    region_input: RegionInput | None = None
    linear: LinearLayer | None = None
    wgrad_input_bytes: Bytes = 0.0
    backward_output_bytes: Bytes = 0.0
    trainable: bool = True
    saves_full_input: bool = False
    tp_collectives: TpCollectives = TpCollectives()
    dequantized_bytes: Bytes = 0.0
    saves_outputs: bool = False
    region_input_bytes: Bytes | None = None
    cached_cast_elements: int = 0

    def is_in_modules(self, modules: Set[RecomputeModule]) -> bool:
        """Whether it is in one of some modules."""
        return any(membership.module in modules for membership in self.memberships)

    def saved_bytes_with_recompute(self, recomputed: Set[RecomputeModule]) -> Bytes:
        """Bytes that stay from forward to backward where some modules are recomputed."""
        input_discarded = self.reads_module in recomputed
        if self.is_in_modules(recomputed):
            return (
                0.0
                if input_discarded
                else min(membership.input_bytes for membership in self.memberships if membership.module in recomputed)
            )
        return self.saved_bytes - self.wgrad_input_bytes if input_discarded else self.saved_bytes

    @property
    def gradient_count(self) -> int:
        """Parameters that have gradients."""
        return self.parameter_count if self.trainable else 0

    @property
    def recompute_kernels(self) -> tuple[Kernel, ...]:
        """What selective recomputation by operations runs again."""
        return self.forward if self.recompute_override is None else self.recompute_override

    @property
    def saves_for_backward(self) -> bool:
        """Whether autograd saves anything for its backward: what it reads, what it makes, or its weights."""
        return bool(self.input_gradient or self.weight_gradient)


def assign_module(operators: Iterable[Operator], module: RecomputeModule, input_bytes: Bytes = 0.0) -> list[Operator]:
    """Operators as those of a module. comes: bytes of the module's inputs that the first of them keeps."""
    sizes = chain((input_bytes,), repeat(0.0))
    return [
        replace(operator, memberships=(*operator.memberships, ModuleMembership(module, size)))
        for operator, size in zip(operators, sizes, strict=False)
    ]


def mark_module_reader(operators: Sequence[Operator], module: RecomputeModule) -> list[Operator]:
    """Operators of which the first reads the result of a module."""
    return [replace(operator, reads_module=module) for operator in operators[:1]] + list(operators[1:])


def early_stop_count(operators: Sequence[Operator]) -> int:
    """How many of the operators run until all that backward needs is saved.

    torch.utils.checkpoint without `use_reentrant` runs a forward again under hooks that count what is saved, and stops
    at the last (`_recomputation_hook` raises `_StopRecomputationError`). Autograd saves inputs before an operator runs
    and what it makes behind it, so a last linear layer is not run again, nor a sum behind it, which saves nothing.
    """
    last_saving = max((index for index, operator in enumerate(operators) if operator.saves_for_backward), default=-1)
    return last_saving + 1 if last_saving < 0 or operators[last_saving].saves_outputs else last_saving


@dataclass(frozen=True, slots=True)
class LayerOperators:
    """Operators in forward order. input_bytes: the input on this rank, which is all that full recomputation keeps."""

    operators: tuple[Operator, ...]
    input_bytes: Bytes

    @property
    def parameter_count(self) -> int:
        """Parameters on this rank."""
        return sum(operator.parameter_count for operator in self.operators)

    @property
    def parameters_by_group(self) -> dict[str, int]:
        """Parameters on this rank by their group."""
        counts: dict[str, int] = {}
        for operator in self.operators:
            counts[operator.parameter_group] = counts.get(operator.parameter_group, 0) + operator.parameter_count
        return counts

    @property
    def saved_bytes(self) -> Bytes:
        """Bytes kept for backward if nothing is recomputed."""
        return sum(operator.saved_bytes for operator in self.operators)

    def saved_bytes_with_recompute(self, recomputed: Set[RecomputeModule]) -> Bytes:
        """Bytes kept for backward where some modules are recomputed."""
        return sum(operator.saved_bytes_with_recompute(recomputed) for operator in self.operators)

    @property
    def deferred_wgrad_bytes(self) -> Bytes:
        """Bytes kept from the gradient of the input to those of the weights."""
        return sum(operator.deferred_wgrad_bytes for operator in self.operators)
