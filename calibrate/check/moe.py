"""MoE layer as PyTorch modules.

The operators that `clustersim.model` counts for an MoE layer, one for one, as Megatron-Core's all-to-all
dispatcher runs them (megatron/core/transformer/moe/token_dispatcher.py): router, top-k, permutation map,
permute; ranks exchange the number of tokens for each expert, and the host waits for that; tokens and
probabilities go to the ranks of their experts (`all_to_all_single`, differentiable), are sorted by expert,
pass the experts' matmuls and activation, are scaled by their probabilities, and return the same way.
Operators around the matmuls: `calibrate.kernels.moe_formulas`.

Experts are selected evenly, since that is what is predicted: a bias pattern is added to the logits that
assigns tokens to experts round-robin. Megatron-LM does the same with random logits
(`--moe-router-force-load-balancing`).
"""

from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

from calibrate.check.fused_linear import FusedWgradLinear
from calibrate.check.operator_labels import (
    GROUPED_MATMUL,
    PERMUTATION_MAP,
    PERMUTE,
    UNPERMUTE,
    WEIGHTING,
    OperatorLabel,
    memory_bound_label,
    record_label,
)
from calibrate.collectives.operations import all_gather_tensor
from calibrate.collectives.process_groups import world_group
from calibrate.kernels import formulas, moe_formulas
from calibrate.kernels.pytorch_ops.grouped_gemm import grouped_matmul
from clustersim.model import memory_bound as passes
from clustersim.model.kernels import KernelKind
from clustersim.model.layer_stack import MlpType, MoeMlp, ScoreFunction
from clustersim.model.moe_router import top_k_op
from clustersim.model.overheads import Grouping, Overheads
from clustersim.model.training import FusedKernel
from clustersim.parallel.plan import Plan

_MOE_OVERHEADS: Final = Overheads(permute_unfused=True, router_unfused=True, grouping=Grouping.KERNEL)
BALANCING_BIAS: Final = 64.0  # larger than any logit
_INIT_STD: Final = 0.02  # of initial weights


def trainer_overheads(overheads: Overheads) -> Overheads:
    """What of a framework's overheads trainers of these modules have: how experts run, and how clipping scales."""
    return replace(_MOE_OVERHEADS, scale_clipped_gradients=overheads.scale_clipped_gradients)


@dataclass(frozen=True, slots=True)
class TokenSplits:
    """Token counts of the all-to-all.

    send_counts: tokens that this rank sends to each rank; received_by_expert: [ranks, experts] tokens received
    from each rank.
    """

    send_counts: list[int]
    received_by_expert: Tensor

    @property
    def receive_counts(self) -> list[int]:
        """Tokens received from each rank."""
        counts: list[int] = self.received_by_expert.sum(1).tolist()
        return counts


class GroupedExperts(nn.Module):
    """The experts of one rank: a grouped matmul of tokens with each expert's weights."""

    def __init__(self, moe: MoeMlp, hidden: int, count: int, *, fused: bool) -> None:
        super().__init__()
        self.mlp_type, self.fused = moe.form, fused
        up_width = 2 * moe.ffn if moe.form is MlpType.SWIGLU else moe.ffn
        self.up = nn.Parameter(torch.empty(count, up_width, hidden).normal_(std=_INIT_STD))
        self.down = nn.Parameter(torch.empty(count, hidden, moe.ffn).normal_(std=_INIT_STD))

    def forward(self, tokens: Tensor, weights: Tensor, expert_counts: Tensor) -> Tensor:
        """Tokens [tokens, hidden] in and out, by expert; weights: [tokens]; expert_counts: [experts] tokens."""
        group_ends = expert_counts.cumsum(0).int()
        with record_label(GROUPED_MATMUL):
            hidden = grouped_matmul(tokens, self.up, group_ends)
        with record_label(memory_bound_label(passes.activation_spec(self.mlp_type, fused=self.fused))):
            hidden = (
                formulas.swiglu(hidden, fused=self.fused) if self.mlp_type is MlpType.SWIGLU else formulas.gelu(hidden)
            )
        with record_label(WEIGHTING):
            hidden = formulas.scale_by_probability(hidden, weights.to(hidden.dtype).unsqueeze(1), fused=self.fused)
        with record_label(GROUPED_MATMUL):
            result: Tensor = grouped_matmul(hidden, self.down, group_ends)
        return result


class MoeLayer(nn.Module):
    """Routes every token through some of the experts, which are sharded over the ranks."""

    even: Tensor

    def __init__(self, plan: Plan, moe: MoeMlp) -> None:
        super().__init__()
        hidden, training = plan.model.hidden, plan.training
        self.moe, self.ep_size = moe, plan.layout.ep
        self.label = OperatorLabel(KernelKind.SOFTMAX, top_k_op(moe.router))
        self.router = FusedWgradLinear(hidden, moe.experts, bias=False, fused=training.is_fully_fused)
        is_fused = training.fuses(FusedKernel.ACTIVATION)
        self.experts = GroupedExperts(moe, hidden, moe.experts // self.ep_size, fused=is_fused)
        self.register_buffer("even", _balancing_logits(plan.layer_shard.tokens, moe), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] in and out."""
        flat = x.flatten(0, -2)
        logits = self.router(flat).float()
        with record_label(self.label):
            routing_map = self._route(logits)
        with record_label(PERMUTATION_MAP):
            token_indices, weights = moe_formulas.permutation_map(routing_map)
        with record_label(PERMUTE):
            tokens = moe_formulas.permute_tokens(flat, token_indices)
        expert_counts = routing_map[1].sum(0)
        output = (
            self.experts(tokens, weights, expert_counts)
            if self.ep_size == 1
            else self._dispatch_and_combine(tokens, weights, expert_counts)
        )
        with record_label(UNPERMUTE):
            return moe_formulas.unpermute_tokens(output, token_indices, len(flat)).view_as(x)

    def _route(self, logits: Tensor) -> moe_formulas.RoutingMap:
        router, count = self.moe.router, self.moe.top_k
        if router.num_groups == 1 and router.scores is ScoreFunction.SOFTMAX:
            return moe_formulas.top_k_softmax(logits + self.even, count)
        return moe_formulas.top_k_sigmoid(logits, count, self.even, grouped=router.num_groups > 1)

    def _dispatch_and_combine(self, tokens: Tensor, weights: Tensor, expert_counts: Tensor) -> Tensor:
        """Send tokens to the ranks of their experts, and back."""
        splits = self._exchange_counts(expert_counts)
        tokens, weights = (
            _all_to_all(tensor, splits.send_counts, splits.receive_counts) for tensor in (tokens, weights)
        )
        order, inverse = _expert_order(splits.received_by_expert)
        with record_label(PERMUTE):
            tokens, weights = (moe_formulas.reorder_tokens(tensor, order, inverse) for tensor in (tokens, weights))
        output = self.experts(tokens, weights, splits.received_by_expert.sum(0))
        with record_label(PERMUTE):
            output = moe_formulas.reorder_tokens(output, inverse, order)
        return _all_to_all(output, splits.receive_counts, splits.send_counts)

    def _exchange_counts(self, expert_counts: Tensor) -> TokenSplits:
        """All-gather the token counts of all ranks."""
        all_counts = expert_counts.new_empty(self.ep_size * len(expert_counts))
        all_gather_tensor(all_counts, expert_counts)
        by_rank = all_counts.view(self.ep_size, self.ep_size, -1)
        local_counts = by_rank[dist.get_rank()]
        return TokenSplits(local_counts.sum(1).tolist(), by_rank[:, dist.get_rank()])


def _all_to_all(tokens: Tensor, send_counts: list[int], receive_counts: list[int]) -> Tensor:
    received: Tensor = all_to_all_single_autograd(tokens, receive_counts, send_counts, world_group())
    return received


def _expert_order(received_by_expert: Tensor) -> tuple[Tensor, Tensor]:
    """Permutation that sorts received tokens by expert, and its inverse; received_by_expert: [ranks, experts]."""
    ranks, experts = received_by_expert.shape
    expert_ids = (
        torch.arange(experts, device=received_by_expert.device)
        .repeat(ranks)
        .repeat_interleave(received_by_expert.flatten())
    )
    order = torch.argsort(expert_ids, stable=True)
    return order, torch.argsort(order)


def _balancing_logits(token_count: int, moe: MoeMlp) -> Tensor:
    """FP32 logits [tokens, experts] that select experts round-robin."""
    pattern = torch.zeros(token_count, moe.experts, dtype=torch.float32)
    first = torch.arange(token_count).unsqueeze(1) * moe.top_k
    experts = (first + torch.arange(moe.top_k)) % moe.experts
    return pattern.scatter_(1, experts, BALANCING_BIAS)
