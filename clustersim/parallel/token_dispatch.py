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
from clustersim.program.task import Collective, Dispatcher, Exchange, Routing

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

    def there(self, *, again: bool = False) -> tuple[Exchange, ...]:
        """Rows go to the ranks of their experts; again: where they went before is known (backward)."""
        return _WAYS[self.layout.dispatcher].there(self._leaving, again=again) if self._travel else ()

    @property
    def _leaving(self) -> "Dispatch":
        """With rows as wide as they are sent."""
        return self if self.sent is None else replace(self, row=self.row * self.sent.bytes / self.format.bytes)

    def back(self, *, again: bool = False) -> tuple[Exchange, ...]:
        """What experts made of them comes back."""
        return _WAYS[self.layout.dispatcher].back(self, again=again) if self._travel else ()

    @property
    def routing(self) -> Routing:
        """Where rows go."""
        layout, routed, limits = self.layout, self.routed, (self.routed.router.groups, self.routed.router.limit)
        sizes = routed.experts, routed.top_k
        cut, sms = layout.expert_tensor, layout.dispatcher_sms
        return Routing(layout.dispatcher, *sizes, *limits, row=self.row, cut=cut, sms=sms)

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

    def there(self, dispatch: Dispatch, *, again: bool) -> tuple[Exchange, ...]:
        """To the experts."""

    def back(self, dispatch: Dispatch, *, again: bool) -> tuple[Exchange, ...]:
        """From the experts."""


@dataclass(frozen=True, slots=True)
class _AllToAll:
    """A row for each expert, by the library."""

    def there(self, dispatch: Dispatch, *, again: bool) -> tuple[Exchange, ...]:
        known = again or dispatch.routed.capacity is not None
        sent = self._sent("dispatch tokens", dispatch, awaits=not known)
        if not again:
            sent = (*sent, *self._probabilities("dispatch probabilities", dispatch))
        if not known:
            sent = (*self._counts(dispatch), *sent)
        if dispatch.layout.expert_tensor == 1:
            return sent
        size = dispatch.layout.expert_tensor * dispatch.rows
        return (*sent, Exchange("gather rows", Collective.ALL_GATHER, dispatch.cut_over, size, load=dispatch.load))

    def back(self, dispatch: Dispatch, *, again: bool) -> tuple[Exchange, ...]:
        sent = self._sent("combine tokens", dispatch)
        if again:
            sent = (*sent, *self._probabilities("gradients of probabilities", dispatch))
        if dispatch.layout.expert_tensor == 1:
            return sent
        size, role = dispatch.layout.expert_tensor * dispatch.rows, dispatch.cut_over
        kind, form = Collective.REDUCE_SCATTER, dispatch.format
        return (Exchange("sum parts of experts", kind, role, size, format=form, load=dispatch.load), *sent)

    def _counts(self, dispatch: Dispatch) -> tuple[Exchange, ...]:
        """How many rows each expert gets from each rank."""
        size = float(dispatch.ranks * dispatch.routed.experts * _COUNT)
        return (Exchange("count rows", Collective.ALL_GATHER, dispatch.held_by, size),)

    def _sent(self, name: str, dispatch: Dispatch, *, awaits: bool = False) -> tuple[Exchange, ...]:
        if dispatch.layout.ep == 1:
            return ()
        kind, role, size = Collective.ALL_TO_ALL, EXPERT_ROLE.name, dispatch.rows
        return (Exchange(name, kind, role, size, routing=dispatch.routing, awaits=awaits, load=dispatch.load),)

    def _probabilities(self, name: str, dispatch: Dispatch) -> tuple[Exchange, ...]:
        if dispatch.layout.ep == 1:
            return ()
        size = float(dispatch.routed.rows(dispatch.tokens) * _PROBABILITY.bytes)
        kind, role = Collective.ALL_TO_ALL, EXPERT_ROLE.name
        return (Exchange(name, kind, role, size, routing=dispatch.routing, load=dispatch.load),)


@dataclass(frozen=True, slots=True)
class _AllGather:
    """All tokens to all ranks."""

    def there(self, dispatch: Dispatch, *, again: bool) -> tuple[Exchange, ...]:
        tokens = self._gathered("dispatch tokens", dispatch, dispatch.row)
        if again:
            return (tokens,)
        each = dispatch.routed.experts
        chosen = self._gathered("gather routing", dispatch, float(each * _CHOSEN))
        return (chosen, self._gathered("gather probabilities", dispatch, float(each * _PROBABILITY.bytes)), tokens)

    def back(self, dispatch: Dispatch, *, again: bool) -> tuple[Exchange, ...]:
        tokens = self._summed("combine tokens", dispatch, dispatch.row, dispatch.format)
        if not again:
            return (tokens,)
        each = float(dispatch.routed.experts * _PROBABILITY.bytes)
        return (tokens, self._summed("gradients of probabilities", dispatch, each, _PROBABILITY))

    def _gathered(self, name: str, dispatch: Dispatch, each: Bytes) -> Exchange:
        size = dispatch.ranks * dispatch.tokens * each
        return Exchange(name, Collective.ALL_GATHER, dispatch.held_by, size, routing=dispatch.routing)

    def _summed(self, name: str, dispatch: Dispatch, each: Bytes, form: DType) -> Exchange:
        size, kind = dispatch.ranks * dispatch.tokens * each, Collective.REDUCE_SCATTER
        return Exchange(name, kind, dispatch.held_by, size, format=form, routing=dispatch.routing)


@dataclass(frozen=True, slots=True)
class _Kernels:
    """Kernels of their own; probabilities are hundredths of the rows that they go with."""

    def there(self, dispatch: Dispatch, *, again: bool) -> tuple[Exchange, ...]:
        kind, role, size = Collective.DISPATCH, dispatch.held_by, dispatch.rows
        routing, load = dispatch.routing, dispatch.load
        return (Exchange("dispatch tokens", kind, role, size, routing=routing, awaits=not again, load=load),)

    def back(self, dispatch: Dispatch, *, again: bool) -> tuple[Exchange, ...]:  # noqa: ARG002 - the same both ways
        kind, role, size = Collective.COMBINE, dispatch.held_by, dispatch.rows
        routing, load = dispatch.routing, dispatch.load
        return (Exchange("combine tokens", kind, role, size, format=dispatch.format, routing=routing, load=load),)


_WAYS: Final[dict[Dispatcher, _Way]] = {
    Dispatcher.ALL_GATHER: _AllGather(),
    Dispatcher.ALL_TO_ALL: _AllToAll(),
    Dispatcher.DEEPEP: _Kernels(),
    Dispatcher.DEEPEP_V2: _Kernels(),
    Dispatcher.HYBRIDEP: _Kernels(),
}
