"""MoE router on one rank: expert selection, token permutation, and load-balancing loss.

All of it works on the rank's own tokens, which are a part of the sequence under sequence parallelism.

- Router: logits [tokens, experts], whose gradient is added to that of the experts' inputs. They are FP32;
  their operands are the model's, or FP32 copies of them (`Overheads.router_fp32`: Megatron-Core up to
  0.12 with `moe_router_dtype`).
- Top-k: one kernel each way (`moe_router_fusion`) that reads logits and writes probabilities, the
  selection mask, and the scores that backward reads; or unfused operations, each of which passes [tokens,
  experts] or [tokens, top_k] in FP32. Counted are those passes: 5 of them forward for a softmax of the
  selected logits (top-k, the zeros that probabilities and the mask are scattered into, and these), 2 more
  for scores of all experts and 1 for a bias, 5 more with groups (their scores, the groups' selection and
  mask); backward about as many except those of the mask. Every pass is a launch, and the sort in top-k
  takes two more.
- Permutation: with a fused kernel (`moe_permute_fusion`) a row map is made ([tokens, 2 experts + 1] in
  INT32, which is saved), tokens are read once and every copy is written; backward sums the copies.
  Without it indices are selected from the mask ([tokens, top_k] in INT64, saved; six launches), each copy
  is read and written, and backward adds every row to zeros (read, read and written).
- Unpermute: with a fused kernel each copy is read and the token written, backward the reverse; without it
  every row is added to zeros, and in backward each copy is read and written.

Where tokens are sent once and copied at the ranks of their experts (DeepEP, Hybrid-EP, all-gather), the
same is done there with the received tokens. DeepEP sends indices of experts; Megatron-Core makes a mask of them with
one kernel where its experimental features are enabled, else with PyTorch operations, whose sizes the host waits for
(`Overheads.indices_unfused`; core 0.13 to 0.19, `_DeepepManager.get_permuted_hidden_states_by_experts`).

- Load-balancing loss (`Overheads.router_loss`; Fedus et al. 2021, arXiv:2101.03961, section 2.2; per
  sequence in DeepSeek-V3), which Megatron-Core has where a recipe gives it a coefficient. With fused
  kernels the logits are scored once more, for all experts, the selection mask is summed, and the scores
  weighted by these sums; backward computes the gradient of the scores, that of the logits, and adds it to
  theirs. Unfused, those are 7 passes forward (9 with sigmoids: a softmax, top-k, zeros, the mask
  scattered and converted, two sums) and 3 (5) backward. Computing per-expert numbers and logging the loss
  take 2 more launches each way, and 3 more forward where nothing is fused. Tensor-parallel ranks, which
  have parts of the sequence, all-reduce the number of tokens per expert (INT64).

The z-loss (of the logits' magnitude), which no recipe here has, is left out.

References: NVIDIA/Megatron-LM, megatron/core/transformer/moe/{router,moe_utils}.py
(topk_routing_with_score_function, permute, unpermute, RouterGatingLinearFunction);
NVIDIA/TransformerEngine, transformer_engine/pytorch/permutation.py,
transformer_engine/common/triton/permutation.py and common/fused_router; pytorch/torchtitan,
torchtitan/models/moe.py.
"""

from dataclasses import dataclass, replace
from typing import Final

from clustersim.common.dtypes import DType
from clustersim.common.units import Bytes
from clustersim.model.kernels import Kernel, KernelKind, MemoryBoundOp, MemoryBoundShape
from clustersim.model.layer_stack import MoeMlp, Router, ScoreFunction
from clustersim.model.linear import LinearLayer
from clustersim.model.operators import Operator, ParallelRegion, TpCollective, TpCollectives, TpCombine
from clustersim.model.precision_recipe import MatmulFormats
from clustersim.model.sharded_layer import RankContext, gradient_sum_kernel, linear_operator

_INDEX_BYTES: Final = 8  # bytes of PyTorch's indices
_ROW_MAP_ENTRY_BYTES: Final = 4  # bytes of one entry of a row map
_SORT_LAUNCHES: Final = 2  # extra launches of a top-k for its sort
_SELECTION_LAUNCHES: Final = 6  # launches that make indices from the selection mask
_ROW_MAP_LAUNCHES: Final = 2  # launches that make a row map
# Of `_indices_to_multihot` and of the top-k of probabilities before it: 2 fills, a comparison, 2 selections by a mask
# of 4 each, a range, a sum, 4 of repeat_interleave, 3 of what is written to the mask and the probabilities, a cast, and
# a top-k of 3; backward: what was selected is added to zeros in the order of sorted indices
_MASK_LAUNCHES: Final = 24
_MASK_BACKWARD_LAUNCHES: Final = 15
_LOSS_LAUNCHES: Final = 2  # launches that log a loss, or start its gradient
_TOP_K_NAME: Final = "mlp.top_k"


def router_operators(rank: RankContext, moe: MoeMlp) -> list[Operator]:
    """The router logits, the top-k selection of experts, and the load-balancing loss."""
    balance = [_balance_loss_operator(rank, moe)] if rank.training.overheads.router_loss else []
    return [_logits_operator(rank, moe), _top_k_operator(rank, moe), *balance]


def permute_operator(rank: RankContext, moe: MoeMlp) -> Operator:
    """Permutation of tokens to one row per token and expert, in the order of the experts."""
    return _local_permutation(rank, moe).permute_operator("mlp.permute")


def unpermute_operator(rank: RankContext, moe: MoeMlp) -> Operator:
    """The sum of each token's expert outputs (unpermute)."""
    return _local_permutation(rank, moe).unpermute_operator("mlp.unpermute")


def data_kernel(
    name: str, kind: KernelKind, dtype: DType, shape: MemoryBoundShape, moved_bytes: Bytes, *, launches: int = 1
) -> Kernel:
    """A memory-bound kernel that moves the given number of bytes."""
    return Kernel(name, kind, dtype, flops=0.0, bytes=float(moved_bytes), shape=shape, launches=launches)


def _logits_operator(rank: RankContext, moe: MoeMlp) -> Operator:
    """Logits of all experts for each token; backward adds its input gradient to that of the experts' inputs."""
    tokens, hidden = rank.shard.residual_tokens, rank.model.hidden
    uses_fp32 = rank.training.overheads.router_fp32
    formats = MatmulFormats.uniform(DType.FP32 if uses_fp32 else rank.dtype)
    linear = LinearLayer("mlp.router", tokens, hidden, moe.experts, formats, tokens if moe.bias else 0)
    operator = linear_operator(rank, linear, rank.residual_bytes)
    gradient_sum = (gradient_sum_kernel(rank, "mlp.router"),)
    backward = (*operator.input_gradient, *gradient_sum)
    if uses_fp32:
        shape = MemoryBoundShape(MemoryBoundOp.COPY, tokens, hidden, fused=True, formats=(DType.FP32,))
        copy_bytes = shape.elements * (rank.dtype.bytes + DType.FP32.bytes)
        copy = data_kernel("mlp.router.copy", KernelKind.COPY, rank.dtype, shape, copy_bytes)
        operator = replace(operator, forward=(copy, *operator.forward))
        backward = (operator.input_gradient[0], replace(copy, name="mlp.router.copy.input_gradient"), *backward[1:])
    return replace(operator, region=ParallelRegion.REPLICATED, linear=None, input_gradient=backward)


def _top_k_operator(rank: RankContext, moe: MoeMlp) -> Operator:
    """Probabilities and the selection mask; backward computes the gradient of the logits."""
    sizes = rank.shard.residual_tokens, moe.experts
    shape = MemoryBoundShape(top_k_op(moe.router), *sizes, fused=True, table=moe.top_k)
    score_bytes, mask_bytes = shape.elements * DType.FP32.bytes, shape.elements
    if not rank.training.overheads.router_unfused:
        return _score_operator(
            _TOP_K_NAME,
            shape,
            (3 * score_bytes + mask_bytes, 3 * score_bytes + mask_bytes),
            (1, 1),
            float(score_bytes + mask_bytes),
        )
    unfused, forward_passes = replace(shape, fused=False), _score_passes(moe)
    backward_passes = forward_passes - 2
    moved_bytes, launches = (
        (2 * forward_passes * score_bytes, 2 * backward_passes * score_bytes),
        (forward_passes + _SORT_LAUNCHES, backward_passes),
    )
    return _score_operator(_TOP_K_NAME, unfused, moved_bytes, launches, float(2 * score_bytes + mask_bytes))


def _score_operator(
    name: str, shape: MemoryBoundShape, moved_bytes: tuple[Bytes, Bytes], launches: tuple[int, int], saved_bytes: Bytes
) -> Operator:
    """An operator over scores, with bytes moved and launches of (forward, backward)."""
    kind = KernelKind.SOFTMAX
    forward = data_kernel(name, kind, DType.FP32, shape, moved_bytes[0], launches=launches[0])
    backward_shape = replace(shape, backward=True)
    backward = data_kernel(
        f"{name}.input_gradient", kind, DType.FP32, backward_shape, moved_bytes[1], launches=launches[1]
    )
    return Operator(
        name, ParallelRegion.REPLICATED, (forward,), (backward,), saved_bytes=saved_bytes, saves_outputs=True
    )


def top_k_op(router: Router) -> MemoryBoundOp:
    """The top-k operation of a router. Sigmoid routers are assumed to have a correction bias."""
    if router.num_groups > 1:
        return MemoryBoundOp.TOP_K_GROUPED
    return MemoryBoundOp.TOP_K_SIGMOID if router.scores is ScoreFunction.SIGMOID else MemoryBoundOp.TOP_K


def _score_passes(moe: MoeMlp) -> int:
    """Number of unfused passes over [tokens, experts] in forward."""
    router = moe.router
    sigmoid_passes = 2 if router.scores is ScoreFunction.SIGMOID else 0
    return 5 + sigmoid_passes + router.bias + (5 if router.num_groups > 1 else 0)


def _balance_loss_operator(rank: RankContext, moe: MoeMlp) -> Operator:
    """The load-balancing loss; its gradient is added to that of the logits."""
    shape = MemoryBoundShape(MemoryBoundOp.BALANCE, rank.shard.residual_tokens, moe.experts, fused=True)
    score_bytes, mask_bytes = shape.elements * DType.FP32.bytes, shape.elements
    moved_bytes, launches = (
        (3 * score_bytes + 2 * mask_bytes, 7 * score_bytes),
        (3 + _LOSS_LAUNCHES, 3 + _LOSS_LAUNCHES),
    )
    if rank.training.overheads.router_unfused:
        shape, sigmoid_passes = replace(shape, fused=False), 2 if moe.router.scores is ScoreFunction.SIGMOID else 0
        forward_passes, backward_passes = 7 + sigmoid_passes, 3 + sigmoid_passes
        moved_bytes, launches = (
            (2 * forward_passes * score_bytes, 2 * backward_passes * score_bytes),
            (forward_passes + _SORT_LAUNCHES + 3 + _LOSS_LAUNCHES, backward_passes + _LOSS_LAUNCHES),
        )
    operator = _score_operator("mlp.balance", shape, moved_bytes, launches, float(score_bytes))
    count_reduction = (
        (TpCollective(TpCombine.SUM, float(moe.experts * _INDEX_BYTES), "experts' load"),) if rank.shard.tp > 1 else ()
    )
    return replace(operator, tp_collectives=TpCollectives(after_forward=count_reduction))


def _local_permutation(rank: RankContext, moe: MoeMlp) -> "TokenPermutation":
    tokens = rank.shard.residual_tokens
    return TokenPermutation(rank, tokens, moe.routed_tokens(tokens), moe.experts, ParallelRegion.REPLICATED)


@dataclass(frozen=True, slots=True)
class TokenPermutation:
    """Permutation of the tokens of one rank to one row per token and expert, `routed_tokens` in all."""

    rank: RankContext
    tokens: int
    routed_tokens: int
    expert_count: int
    region: ParallelRegion

    def permute_operator(self, name: str) -> Operator:
        """One row per token and expert, in the order of the experts; backward sums a token's rows."""
        saved_bytes = self.routed_tokens * _INDEX_BYTES if self._is_unfused else self._row_map_bytes
        operator = self._movement_operator(name, MemoryBoundOp.PERMUTE, (self._permute_bytes, self._unpermute_bytes))
        forward = (self._row_map_kernel(f"{name}.map"), *operator.forward)
        return replace(operator, forward=forward, saved_bytes=float(saved_bytes), saves_outputs=True)

    def unpermute_operator(self, name: str) -> Operator:
        """The sum of each token's rows; backward copies the gradient to each."""
        return self._movement_operator(name, MemoryBoundOp.UNPERMUTE, (self._unpermute_bytes, self._permute_bytes))

    def mask_operator(self, top_k: int) -> Operator:
        """The mask [tokens, experts] of received indices, and their probabilities there; the host waits for sizes."""
        name, shape = "experts.mask", MemoryBoundShape(MemoryBoundOp.ROW_MAP, self.tokens, self.expert_count)
        index_bytes, mask_bytes = self.tokens * top_k * _INDEX_BYTES, self.tokens * self.expert_count * _INDEX_BYTES
        kind, dtype, moved_bytes = KernelKind.COPY, DType.FP32, 3 * (index_bytes + mask_bytes)
        forward = data_kernel(name, kind, dtype, shape, moved_bytes, launches=_MASK_LAUNCHES)
        backward_shape, backward_name = replace(shape, backward=True), f"{name}.input_gradient"
        backward = data_kernel(
            backward_name, kind, dtype, backward_shape, moved_bytes, launches=_MASK_BACKWARD_LAUNCHES
        )
        return Operator(name, self.region, (replace(forward, host_sync=True),), (backward,))

    def _row_map_kernel(self, name: str) -> Kernel:
        """The source row of each routed token, from the selection mask."""
        shape = MemoryBoundShape(
            MemoryBoundOp.ROW_MAP, self.tokens, self.expert_count, fused=not self._is_unfused, table=self.routed_tokens
        )
        launches = _SELECTION_LAUNCHES if self._is_unfused else _ROW_MAP_LAUNCHES
        return data_kernel(name, KernelKind.COPY, DType.FP32, shape, self._row_map_traffic, launches=launches)

    def _movement_operator(self, name: str, op: MemoryBoundOp, moved_bytes: tuple[Bytes, Bytes]) -> Operator:
        """An operator that moves the given bytes in (forward, backward)."""
        dtype, kind = self.rank.dtype, KernelKind.COPY
        shape = MemoryBoundShape(
            op, self.tokens, self.rank.model.hidden, fused=not self._is_unfused, table=self.routed_tokens
        )
        backward_shape = replace(shape, backward=True)
        forward = data_kernel(name, kind, dtype, shape, moved_bytes[0])
        backward = data_kernel(f"{name}.input_gradient", kind, dtype, backward_shape, moved_bytes[1])
        return Operator(name, self.region, (forward,), (backward,))

    @property
    def _is_unfused(self) -> bool:
        return self.rank.training.overheads.permute_unfused

    @property
    def _row_map_bytes(self) -> Bytes:
        """Bytes of the row map."""
        return self.tokens * (2 * self.expert_count + 1) * _ROW_MAP_ENTRY_BYTES

    @property
    def _row_map_traffic(self) -> Bytes:
        """Bytes moved to make the row map, or to select indices by the mask (unfused)."""
        if not self._is_unfused:
            return 2 * self._row_map_bytes
        return 2 * self.tokens * self.expert_count * (1 + DType.FP32.bytes) + self.routed_tokens * _INDEX_BYTES

    @property
    def _permute_bytes(self) -> Bytes:
        """Bytes of the permutation: tokens read and rows written; unfused: each row read and written."""
        dispatch_dtype = self.rank.training.recipe.dispatch_format or self.rank.dtype
        return (
            self._hidden_bytes(2 * self.routed_tokens if self._is_unfused else self.tokens + self.routed_tokens)
            * dispatch_dtype.bytes
            / self.rank.dtype.bytes
        )

    @property
    def _unpermute_bytes(self) -> Bytes:
        """Bytes of the unpermutation: rows read and tokens written; unfused: rows read and added to zeros."""
        return self._hidden_bytes(self.tokens + (3 if self._is_unfused else 1) * self.routed_tokens)

    def _hidden_bytes(self, rows: int) -> Bytes:
        return float(rows * self.rank.model.hidden * self.rank.dtype.bytes)
