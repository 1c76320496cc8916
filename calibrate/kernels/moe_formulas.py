"""PyTorch formulas of MoE routing and token permutation, around the experts' matmuls.

Plain PyTorch, one operation after the other, as Megatron-Core runs them without its fused kernels
(megatron/core/transformer/moe/moe_utils.py: topk_routing_with_score_function, group_limited_topk, permute,
unpermute). All that has a gradient is differentiable. Permuted tokens are ordered by expert, and within an
expert by token.
"""

from typing import Final

import torch
from torch import Tensor

EXPERT_GROUPS: Final = (
    8  # DeepSeek-V3: a token's experts lie in at most four groups; the values change no memory passes
)
MAX_GROUPS_PER_TOKEN: Final = 4

RoutingMap = tuple[Tensor, Tensor]
"""[tokens, experts]: routing probability (0 if not selected), and whether the expert is selected."""


def top_k_softmax(logits: Tensor, count: int) -> RoutingMap:
    """The `count` largest of each row of logits [tokens, experts], weighted by the softmax of these."""
    top_logits, experts = torch.topk(logits, count, dim=1)
    return _to_routing_map(logits, experts, torch.softmax(top_logits, dim=-1))


def top_k_sigmoid(logits: Tensor, count: int, bias: Tensor | None, *, grouped: bool = False) -> RoutingMap:
    """The same by sigmoid scores plus a bias [experts], weighted by the scores; grouped: in the best groups."""
    scores = torch.sigmoid(logits)
    biased = scores if bias is None else scores + bias
    _, experts = torch.topk(_mask_groups(biased, count) if grouped else biased, count, dim=1)
    top_scores = scores.gather(1, experts)
    return _to_routing_map(logits, experts, top_scores / top_scores.sum(dim=-1, keepdim=True))


def permutation_map(routing_map: RoutingMap) -> tuple[Tensor, Tensor]:
    """Token index and routing probability of each routed token: [routed tokens] both."""
    probabilities, is_routed = routing_map
    by_expert = is_routed.t().contiguous()
    tokens = torch.arange(len(is_routed), device=is_routed.device).expand(is_routed.shape[1], -1)
    return tokens.masked_select(by_expert), probabilities.t().contiguous().masked_select(by_expert)


def permute_tokens(x: Tensor, token_indices: Tensor) -> Tensor:
    """Tokens of x [tokens, hidden] gathered at token_indices [routed tokens]."""
    return x.index_select(0, token_indices)


def unpermute_tokens(routed_tokens: Tensor, token_indices: Tensor, token_count: int) -> Tensor:
    """Sum of each token's routed copies [routed tokens, hidden]: [tokens, hidden]."""
    expanded_indices = token_indices.unsqueeze(1).expand(-1, routed_tokens.shape[1])
    return routed_tokens.new_zeros(token_count, routed_tokens.shape[1]).scatter_add(0, expanded_indices, routed_tokens)


class _ReorderTokens(torch.autograd.Function):
    """Reorders tokens; the gradient is reordered by the inverse permutation."""

    @staticmethod
    def forward(ctx: "torch.autograd.function.FunctionCtx", tokens: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        """tokens: [routed tokens, hidden]; order, inverse: [routed tokens], a permutation and its inverse."""
        ctx.save_for_backward(inverse)
        return tokens.index_select(0, order)

    @staticmethod
    def backward(ctx: "torch.autograd.function.FunctionCtx", *gradients: Tensor) -> tuple[Tensor, None, None]:
        """One kernel in each direction."""
        (inverse,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return gradients[0].index_select(0, inverse), None, None


def reorder_tokens(tokens: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Tokens in another order; inverse: the inverse permutation, for the gradient."""
    reordered: Tensor = _ReorderTokens.apply(tokens, order, inverse)  # type: ignore[no-untyped-call]
    return reordered


def _to_routing_map(logits: Tensor, experts: Tensor, weights: Tensor) -> RoutingMap:
    probabilities = torch.zeros_like(logits).scatter(1, experts, weights)
    return probabilities, torch.zeros_like(logits).int().scatter(1, experts, 1).bool()


def _mask_groups(scores: Tensor, count: int) -> Tensor:
    """Scores with experts outside the best groups masked to -inf."""
    tokens, experts = scores.shape
    groups = EXPERT_GROUPS if experts % EXPERT_GROUPS == 0 else 1
    limit = min(MAX_GROUPS_PER_TOKEN, groups)
    by_group = scores.view(tokens, groups, -1)
    group_scores = by_group.topk(min(max(1, count // limit), experts // groups), dim=-1)[0].sum(dim=-1)
    _, top_groups = group_scores.topk(limit, dim=-1)
    mask = torch.zeros_like(group_scores).scatter_(1, top_groups, 1.0)
    expert_mask = mask.unsqueeze(-1).expand(by_group.shape).reshape(tokens, -1)
    return scores.masked_fill(~expert_mask.bool(), float("-inf"))
