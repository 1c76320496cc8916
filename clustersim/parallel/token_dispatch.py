"""How are tokens dispatched to the ranks of their experts, and combined?

Experts are distributed over the ranks of group `ep`, each of them sharded over those of `etp`. A rank's
tokens are its share of the residual stream: of the sequence, where that is sharded over tensor-parallel
ranks. Forward dispatches tokens before the first operator on the experts' ranks and combines them after the
last; backward dispatches the gradients of the results and combines those of the inputs, so each direction
does both once. The router's probabilities travel with the tokens, and their gradients come back with the
inputs'.

All-to-all (`MoEAlltoAllTokenDispatcher`): the ranks exchange how many tokens each expert gets, and the host
waits for that, since it sizes what follows. Then one copy of a token per expert goes to the expert's rank;
where experts are sharded, all ranks with a shard of one all-gather the tokens that came for it, and the
partial results are reduce-scattered. Where experts have a capacity, all ranks send equally many, known
beforehand (`moe_pad_expert_input_to_capacity`).

All-gather (`MoEAllGatherTokenDispatcher`): all ranks gather all tokens, with their routing and probabilities;
results are reduce-scattered.

DeepEP and Hybrid-EP (`MoEFlexTokenDispatcher`): fused kernels (`collectives.hierarchical_dispatch`) over all
ranks with shards of experts. In forward the host waits there, too, for the number of tokens; in backward it
is known. MORI-EP does the same on AMD's GPUs (ROCm/mori; a backend of Primus-Turbo's dispatcher).

Reference: NVIDIA/Megatron-LM@d98e8a64, megatron/core/transformer/moe/token_dispatcher.py and fused_a2a.py.
"""

from dataclasses import dataclass, replace
from typing import Final, Protocol

from clustersim.common.dtypes import DType
from clustersim.common.units import Bytes
from clustersim.hardware.accelerator import Accelerator
from clustersim.hardware.link_technology import AMD_TECHNOLOGIES
from clustersim.model.layer_stack import MoeMlp
from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import EP_GROUP, ETP_EP_GROUP, ETP_GROUP, TP_GROUP
from clustersim.program.task import CollectiveType, CommOp, TokenDispatcher, TokenRouting

_COUNT_BYTES: Final = 8  # bytes of an expert's token count
_ROUTING_MASK_BYTES: Final = 1  # bytes of the mask entry whether a token goes to an expert
_PROBABILITY_FORMAT: Final = DType.FP32


@dataclass(frozen=True, slots=True)
class TokenDispatch:
    """Communication of a MoE layer.

    token_count: tokens on one rank; token_bytes: bytes of one; format: of activations; load_index: index of its
    load factors; wire_format: format in which tokens are dispatched, if another.
    """

    layout: Layout
    moe: MoeMlp
    token_count: int
    token_bytes: Bytes
    format: DType
    load_index: int | None = None
    wire_format: DType | None = None

    def dispatch_ops(self, *, is_backward: bool = False) -> tuple[CommOp, ...]:
        """Dispatch to the experts' ranks; is_backward: the routing is known from forward."""
        return (
            _DISPATCHERS[self.layout.dispatcher].dispatch_ops(self._in_wire_format, is_backward=is_backward)
            if self._communicates
            else ()
        )

    @property
    def _in_wire_format(self) -> "TokenDispatch":
        """The same dispatch with tokens in their wire format."""
        return (
            self
            if self.wire_format is None
            else replace(self, token_bytes=self.token_bytes * self.wire_format.bytes / self.format.bytes)
        )

    def combine_ops(self, *, is_backward: bool = False) -> tuple[CommOp, ...]:
        """Combine the experts' results."""
        return (
            _DISPATCHERS[self.layout.dispatcher].combine_ops(self, is_backward=is_backward)
            if self._communicates
            else ()
        )

    @property
    def routing(self) -> TokenRouting:
        """Token routing of the layer."""
        layout, moe, group_limits = self.layout, self.moe, (self.moe.router.num_groups, self.moe.router.group_topk)
        sizes = moe.experts, moe.top_k
        shard_size, sm_count = layout.effective_etp, layout.dispatcher_num_sms
        return TokenRouting(
            layout.dispatcher,
            *sizes,
            *group_limits,
            token_bytes=self.token_bytes,
            expert_shard_size=shard_size,
            sm_count=sm_count,
        )

    @property
    def dispatched_bytes(self) -> Bytes:
        """Bytes of one copy of each token per expert."""
        return self.moe.routed_tokens(self.token_count) * self.token_bytes

    @property
    def expert_rank_count(self) -> int:
        """Number of ranks that hold all experts together (EP x ETP)."""
        return self.layout.ep * self.layout.effective_etp

    @property
    def expert_group(self) -> str:
        """Group of those ranks; the tensor-parallel group where experts have no mesh of their own."""
        return ETP_EP_GROUP.name if self.layout.has_expert_mesh else TP_GROUP.name

    @property
    def expert_tensor_group(self) -> str:
        """Group of the ranks that each expert is sharded over."""
        return ETP_GROUP.name if self.layout.has_expert_mesh else TP_GROUP.name

    @property
    def _communicates(self) -> bool:
        return self.expert_rank_count > 1


def runs_on(dispatcher: TokenDispatcher, accelerator: Accelerator) -> bool:
    """Whether a dispatcher's kernels run on an accelerator: MORI-EP's are AMD's."""
    return dispatcher is not TokenDispatcher.MORI or accelerator.nvlink in AMD_TECHNOLOGIES


class _Dispatcher(Protocol):
    """Communication of a token dispatcher."""

    def dispatch_ops(self, dispatch: TokenDispatch, *, is_backward: bool) -> tuple[CommOp, ...]:
        """To the experts."""

    def combine_ops(self, dispatch: TokenDispatch, *, is_backward: bool) -> tuple[CommOp, ...]:
        """From the experts."""


@dataclass(frozen=True, slots=True)
class _AllToAllDispatcher:
    """One copy of each token per expert, by the library's all-to-all."""

    def dispatch_ops(self, dispatch: TokenDispatch, *, is_backward: bool) -> tuple[CommOp, ...]:
        is_size_static = is_backward or dispatch.moe.capacity_factor is not None
        comm_ops = self._all_to_all_ops("dispatch tokens", dispatch, host_sync=not is_size_static)
        if not is_backward:
            comm_ops = (*comm_ops, *self._probability_ops("dispatch probabilities", dispatch))
        if not is_size_static:
            comm_ops = (*self._count_ops(dispatch), *comm_ops)
        if dispatch.layout.effective_etp == 1:
            return comm_ops
        size = dispatch.layout.effective_etp * dispatch.dispatched_bytes
        return (
            *comm_ops,
            CommOp(
                "gather rows",
                CollectiveType.ALL_GATHER,
                dispatch.expert_tensor_group,
                size,
                load_index=dispatch.load_index,
            ),
        )

    def combine_ops(self, dispatch: TokenDispatch, *, is_backward: bool) -> tuple[CommOp, ...]:
        comm_ops = self._all_to_all_ops("combine tokens", dispatch)
        if is_backward:
            comm_ops = (*comm_ops, *self._probability_ops("gradients of probabilities", dispatch))
        if dispatch.layout.effective_etp == 1:
            return comm_ops
        size, comm_group = dispatch.layout.effective_etp * dispatch.dispatched_bytes, dispatch.expert_tensor_group
        collective, sum_format = CollectiveType.REDUCE_SCATTER, dispatch.format
        return (
            CommOp(
                "sum parts of experts",
                collective,
                comm_group,
                size,
                reduce_dtype=sum_format,
                load_index=dispatch.load_index,
            ),
            *comm_ops,
        )

    def _count_ops(self, dispatch: TokenDispatch) -> tuple[CommOp, ...]:
        """Exchange how many tokens each expert gets from each rank."""
        size = float(dispatch.expert_rank_count * dispatch.moe.experts * _COUNT_BYTES)
        return (CommOp("count rows", CollectiveType.ALL_GATHER, dispatch.expert_group, size),)

    def _all_to_all_ops(self, name: str, dispatch: TokenDispatch, *, host_sync: bool = False) -> tuple[CommOp, ...]:
        if dispatch.layout.ep == 1:
            return ()
        collective, comm_group, size = CollectiveType.ALL_TO_ALL, EP_GROUP.name, dispatch.dispatched_bytes
        return (
            CommOp(
                name,
                collective,
                comm_group,
                size,
                routing=dispatch.routing,
                host_sync=host_sync,
                load_index=dispatch.load_index,
            ),
        )

    def _probability_ops(self, name: str, dispatch: TokenDispatch) -> tuple[CommOp, ...]:
        if dispatch.layout.ep == 1:
            return ()
        size = float(dispatch.moe.routed_tokens(dispatch.token_count) * _PROBABILITY_FORMAT.bytes)
        collective, comm_group = CollectiveType.ALL_TO_ALL, EP_GROUP.name
        return (CommOp(name, collective, comm_group, size, routing=dispatch.routing, load_index=dispatch.load_index),)


@dataclass(frozen=True, slots=True)
class _AllGatherDispatcher:
    """All tokens to all ranks."""

    def dispatch_ops(self, dispatch: TokenDispatch, *, is_backward: bool) -> tuple[CommOp, ...]:
        tokens = self._all_gather_op("dispatch tokens", dispatch, dispatch.token_bytes)
        if is_backward:
            return (tokens,)
        expert_count = dispatch.moe.experts
        routing_mask = self._all_gather_op("gather routing", dispatch, float(expert_count * _ROUTING_MASK_BYTES))
        return (
            routing_mask,
            self._all_gather_op("gather probabilities", dispatch, float(expert_count * _PROBABILITY_FORMAT.bytes)),
            tokens,
        )

    def combine_ops(self, dispatch: TokenDispatch, *, is_backward: bool) -> tuple[CommOp, ...]:
        tokens = self._reduce_scatter_op("combine tokens", dispatch, dispatch.token_bytes, dispatch.format)
        if not is_backward:
            return (tokens,)
        probability_bytes = float(dispatch.moe.experts * _PROBABILITY_FORMAT.bytes)
        return (
            tokens,
            self._reduce_scatter_op("gradients of probabilities", dispatch, probability_bytes, _PROBABILITY_FORMAT),
        )

    def _all_gather_op(self, name: str, dispatch: TokenDispatch, bytes_per_token: Bytes) -> CommOp:
        size = dispatch.expert_rank_count * dispatch.token_count * bytes_per_token
        return CommOp(name, CollectiveType.ALL_GATHER, dispatch.expert_group, size, routing=dispatch.routing)

    def _reduce_scatter_op(
        self, name: str, dispatch: TokenDispatch, bytes_per_token: Bytes, sum_format: DType
    ) -> CommOp:
        size, collective = (
            dispatch.expert_rank_count * dispatch.token_count * bytes_per_token,
            CollectiveType.REDUCE_SCATTER,
        )
        return CommOp(name, collective, dispatch.expert_group, size, reduce_dtype=sum_format, routing=dispatch.routing)


@dataclass(frozen=True, slots=True)
class _FusedDispatcher:
    """Fused dispatch and combine kernels; probabilities are neglected (about 1% of the tokens' bytes)."""

    def dispatch_ops(self, dispatch: TokenDispatch, *, is_backward: bool) -> tuple[CommOp, ...]:
        collective, comm_group, size = CollectiveType.DISPATCH, dispatch.expert_group, dispatch.dispatched_bytes
        routing, load = dispatch.routing, dispatch.load_index
        return (
            CommOp(
                "dispatch tokens",
                collective,
                comm_group,
                size,
                routing=routing,
                host_sync=not is_backward,
                load_index=load,
            ),
        )

    def combine_ops(self, dispatch: TokenDispatch, *, is_backward: bool) -> tuple[CommOp, ...]:  # noqa: ARG002 - the same both ways
        collective, comm_group, size = CollectiveType.COMBINE, dispatch.expert_group, dispatch.dispatched_bytes
        routing, load = dispatch.routing, dispatch.load_index
        return (
            CommOp(
                "combine tokens",
                collective,
                comm_group,
                size,
                reduce_dtype=dispatch.format,
                routing=routing,
                load_index=load,
            ),
        )


_DISPATCHERS: Final[dict[TokenDispatcher, _Dispatcher]] = {
    TokenDispatcher.ALL_GATHER: _AllGatherDispatcher(),
    TokenDispatcher.ALL_TO_ALL: _AllToAllDispatcher(),
    TokenDispatcher.DEEPEP: _FusedDispatcher(),
    TokenDispatcher.DEEPEP_V2: _FusedDispatcher(),
    TokenDispatcher.DEEPEP_UCCL: _FusedDispatcher(),
    TokenDispatcher.HYBRIDEP: _FusedDispatcher(),
    TokenDispatcher.MORI: _FusedDispatcher(),
}
