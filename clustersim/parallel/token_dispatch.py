"""How do tokens travel to the ranks of their experts, and back?

Experts are spread over the ranks of the role `ep`, each of them cut over those of `etp`. A rank's tokens are its part
of the residual stream: of the sequence, where that is cut over tensor-parallel ranks. Forward sends the rows before the
first operator on the experts' ranks and gets them back behind the last; backward sends the gradients of the results
there and gets those of the inputs back, so each direction does both once. The router's probabilities go with the rows,
and their gradients come back with the inputs'.

All-to-all (`MoEAlltoAllTokenDispatcher`): the ranks tell each other how many rows each expert gets, and the host waits
for that, since it sizes what follows. Then a row for each expert of a token goes to its rank; where experts are cut,
all ranks that have a part of one gather the rows that came for it, and the sums of the parts' results are scattered.
Where experts have a capacity, all ranks send as many, and know it (`moe_pad_expert_input_to_capacity`).

All-gather (`MoEAllGatherTokenDispatcher`): all ranks gather all tokens, with their routing and probabilities; results
are summed and scattered.

DeepEP and Hybrid-EP (`MoEFlexTokenDispatcher`): kernels of their own (`collectives.hierarchical_dispatch`) over all ranks that have
parts of experts. In forward the host waits there, too, for how many rows come; backward knows.

Reference: NVIDIA/Megatron-LM@d98e8a64, megatron/core/transformer/moe/token_dispatcher.py and fused_a2a.py.
"""

from dataclasses import dataclass, replace
from typing import Final, Protocol

from clustersim.common.dtypes import DType
from clustersim.common.units import Bytes
from clustersim.model.layer_stack import RoutedMlp
from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import EXPERT_PARTS, EXPERT_ROLE, EXPERT_TENSOR_ROLE, TENSOR_ROLE
from clustersim.program.task import CollectiveType, CommOp, TokenDispatcher, TokenRouting

_COUNT: Final = 8  # bytes of how many rows an expert gets
_CHOSEN: Final = 1  # bytes of whether a token goes to an expert
_PROBABILITY: Final = DType.FP32


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The exchanges of a mixture.

    tokens: on one rank; row: bytes of one; format: of activations; load: its number; sent: in which other format rows
    go to experts.
    """

    layout: Layout
    routed: RoutedMlp
    tokens: int
    row: Bytes
    format: DType
    load: int | None = None
    sent: DType | None = None

    def there(self, *, again: bool = False) -> tuple[CommOp, ...]:
        """Rows go to the ranks of their experts; again: where they went before is known (backward)."""
        return _WAYS[self.layout.dispatcher].there(self._leaving, again=again) if self._travel else ()

    @property
    def _leaving(self) -> "Dispatch":
        """With rows as wide as they are sent."""
        return self if self.sent is None else replace(self, row=self.row * self.sent.bytes / self.format.bytes)

    def back(self, *, again: bool = False) -> tuple[CommOp, ...]:
        """What experts made of them comes back."""
        return _WAYS[self.layout.dispatcher].back(self, again=again) if self._travel else ()

    @property
    def routing(self) -> TokenRouting:
        """Where rows go."""
        layout, routed, limits = self.layout, self.routed, (self.routed.router.groups, self.routed.router.limit)
        sizes = routed.experts, routed.top_k
        cut, sms = layout.expert_tensor, layout.dispatcher_sms
        return TokenRouting(
            layout.dispatcher, *sizes, *limits, token_bytes=self.row, expert_shard_size=cut, sm_count=sms
        )

    @property
    def rows(self) -> Bytes:
        """Bytes of a row for each token and expert."""
        return self.routed.rows(self.tokens) * self.row

    @property
    def ranks(self) -> int:
        """Ranks that have parts of all experts together."""
        return self.layout.ep * self.layout.expert_tensor

    @property
    def held_by(self) -> str:
        """The role of those ranks; those of tensor parallelism where experts are spread like all else."""
        return EXPERT_PARTS.name if self.layout.folded else TENSOR_ROLE.name

    @property
    def cut_over(self) -> str:
        """The role of the ranks that have parts of the same experts."""
        return EXPERT_TENSOR_ROLE.name if self.layout.folded else TENSOR_ROLE.name

    @property
    def _travel(self) -> bool:
        return self.ranks > 1


class _Way(Protocol):
    """What a dispatcher sends."""

    def there(self, dispatch: Dispatch, *, again: bool) -> tuple[CommOp, ...]:
        """To the experts."""

    def back(self, dispatch: Dispatch, *, again: bool) -> tuple[CommOp, ...]:
        """From the experts."""


@dataclass(frozen=True, slots=True)
class _AllToAll:
    """A row for each expert, by the library."""

    def there(self, dispatch: Dispatch, *, again: bool) -> tuple[CommOp, ...]:
        known = again or dispatch.routed.capacity is not None
        sent = self._sent("dispatch tokens", dispatch, awaits=not known)
        if not again:
            sent = (*sent, *self._probabilities("dispatch probabilities", dispatch))
        if not known:
            sent = (*self._counts(dispatch), *sent)
        if dispatch.layout.expert_tensor == 1:
            return sent
        size = dispatch.layout.expert_tensor * dispatch.rows
        return (
            *sent,
            CommOp("gather rows", CollectiveType.ALL_GATHER, dispatch.cut_over, size, load_index=dispatch.load),
        )

    def back(self, dispatch: Dispatch, *, again: bool) -> tuple[CommOp, ...]:
        sent = self._sent("combine tokens", dispatch)
        if again:
            sent = (*sent, *self._probabilities("gradients of probabilities", dispatch))
        if dispatch.layout.expert_tensor == 1:
            return sent
        size, role = dispatch.layout.expert_tensor * dispatch.rows, dispatch.cut_over
        kind, form = CollectiveType.REDUCE_SCATTER, dispatch.format
        return (CommOp("sum parts of experts", kind, role, size, reduce_dtype=form, load_index=dispatch.load), *sent)

    def _counts(self, dispatch: Dispatch) -> tuple[CommOp, ...]:
        """How many rows each expert gets from each rank."""
        size = float(dispatch.ranks * dispatch.routed.experts * _COUNT)
        return (CommOp("count rows", CollectiveType.ALL_GATHER, dispatch.held_by, size),)

    def _sent(self, name: str, dispatch: Dispatch, *, awaits: bool = False) -> tuple[CommOp, ...]:
        if dispatch.layout.ep == 1:
            return ()
        kind, role, size = CollectiveType.ALL_TO_ALL, EXPERT_ROLE.name, dispatch.rows
        return (CommOp(name, kind, role, size, routing=dispatch.routing, host_sync=awaits, load_index=dispatch.load),)

    def _probabilities(self, name: str, dispatch: Dispatch) -> tuple[CommOp, ...]:
        if dispatch.layout.ep == 1:
            return ()
        size = float(dispatch.routed.rows(dispatch.tokens) * _PROBABILITY.bytes)
        kind, role = CollectiveType.ALL_TO_ALL, EXPERT_ROLE.name
        return (CommOp(name, kind, role, size, routing=dispatch.routing, load_index=dispatch.load),)


@dataclass(frozen=True, slots=True)
class _AllGather:
    """All tokens to all ranks."""

    def there(self, dispatch: Dispatch, *, again: bool) -> tuple[CommOp, ...]:
        tokens = self._gathered("dispatch tokens", dispatch, dispatch.row)
        if again:
            return (tokens,)
        each = dispatch.routed.experts
        chosen = self._gathered("gather routing", dispatch, float(each * _CHOSEN))
        return (chosen, self._gathered("gather probabilities", dispatch, float(each * _PROBABILITY.bytes)), tokens)

    def back(self, dispatch: Dispatch, *, again: bool) -> tuple[CommOp, ...]:
        tokens = self._summed("combine tokens", dispatch, dispatch.row, dispatch.format)
        if not again:
            return (tokens,)
        each = float(dispatch.routed.experts * _PROBABILITY.bytes)
        return (tokens, self._summed("gradients of probabilities", dispatch, each, _PROBABILITY))

    def _gathered(self, name: str, dispatch: Dispatch, each: Bytes) -> CommOp:
        size = dispatch.ranks * dispatch.tokens * each
        return CommOp(name, CollectiveType.ALL_GATHER, dispatch.held_by, size, routing=dispatch.routing)

    def _summed(self, name: str, dispatch: Dispatch, each: Bytes, form: DType) -> CommOp:
        size, kind = dispatch.ranks * dispatch.tokens * each, CollectiveType.REDUCE_SCATTER
        return CommOp(name, kind, dispatch.held_by, size, reduce_dtype=form, routing=dispatch.routing)


@dataclass(frozen=True, slots=True)
class _Kernels:
    """Kernels of their own; probabilities are hundredths of the rows that they go with."""

    def there(self, dispatch: Dispatch, *, again: bool) -> tuple[CommOp, ...]:
        kind, role, size = CollectiveType.DISPATCH, dispatch.held_by, dispatch.rows
        routing, load = dispatch.routing, dispatch.load
        return (CommOp("dispatch tokens", kind, role, size, routing=routing, host_sync=not again, load_index=load),)

    def back(self, dispatch: Dispatch, *, again: bool) -> tuple[CommOp, ...]:  # noqa: ARG002 - the same both ways
        kind, role, size = CollectiveType.COMBINE, dispatch.held_by, dispatch.rows
        routing, load = dispatch.routing, dispatch.load
        return (
            CommOp("combine tokens", kind, role, size, reduce_dtype=dispatch.format, routing=routing, load_index=load),
        )


_WAYS: Final[dict[TokenDispatcher, _Way]] = {
    TokenDispatcher.ALL_GATHER: _AllGather(),
    TokenDispatcher.ALL_TO_ALL: _AllToAll(),
    TokenDispatcher.DEEPEP: _Kernels(),
    TokenDispatcher.DEEPEP_V2: _Kernels(),
    TokenDispatcher.HYBRIDEP: _Kernels(),
}
