"""Which formulas does a mixture of experts compute around its experts' products?

Plain PyTorch, one operation after the other, as Megatron-Core runs them where its fused kernels are off
(megatron/core/transformer/moe/moe_utils.py: topk_routing_with_score_function, group_limited_topk, permute, unpermute).
All that has a gradient can be differentiated. Copies of tokens lie one behind the other by expert, in each by token.
"""

from typing import Final

import torch
from torch import Tensor

GROUPS: Final = 8  # DeepSeek-V3's, of which a token's experts are in at most four; the numbers change no passes
LIMIT: Final = 4

Choice = tuple[Tensor, Tensor]
"""Of each token and expert [tokens, experts]: its probability (0 of those not chosen), and whether it is chosen."""


def softmax_choice(logits: Tensor, count: int) -> Choice:
    """The `count` largest of each row of logits [tokens, experts], weighted by the softmax of these."""
    best, places = torch.topk(logits, count, dim=1)
    return _scattered(logits, places, torch.softmax(best, dim=-1))


def sigmoid_choice(logits: Tensor, count: int, bias: Tensor | None, *, grouped: bool = False) -> Choice:
    """The same by sigmoids and a bias [experts], weighted by the sigmoids alone; grouped: of the best groups."""
    scores = torch.sigmoid(logits)
    biased = scores if bias is None else scores + bias
    _, places = torch.topk(_limited(biased, count) if grouped else biased, count, dim=1)
    best = scores.gather(1, places)
    return _scattered(logits, places, best / best.sum(dim=-1, keepdim=True))


def row_map(choice: Choice) -> tuple[Tensor, Tensor]:
    """The token of each copy, and its probability: [copies] each."""
    probabilities, marks = choice
    by_expert = marks.t().contiguous()
    tokens = torch.arange(len(marks), device=marks.device).expand(marks.shape[1], -1)
    return tokens.masked_select(by_expert), probabilities.t().contiguous().masked_select(by_expert)


def permuted(x: Tensor, places: Tensor) -> Tensor:
    """Rows of x [tokens, hidden] at places [copies]."""
    return x.index_select(0, places)


def unpermuted(rows: Tensor, places: Tensor, tokens: int) -> Tensor:
    """The sum of each token's rows [copies, hidden]: [tokens, hidden]."""
    wide = places.unsqueeze(1).expand(-1, rows.shape[1])
    return rows.new_zeros(tokens, rows.shape[1]).scatter_add(0, wide, rows)


class Sorted(torch.autograd.Function):
    """Rows in another order, whose gradients are put back into the old one."""

    @staticmethod
    def forward(ctx: "torch.autograd.function.FunctionCtx", rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        """rows: [copies, hidden]; order, back: [copies] a permutation and its inverse."""
        ctx.save_for_backward(back)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: "torch.autograd.function.FunctionCtx", *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Both are one kernel."""
        (back,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return gradients[0].index_select(0, back), None, None


def in_order(rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """Rows in another order; back: the way back."""
    made: Tensor = Sorted.apply(rows, order, back)  # type: ignore[no-untyped-call]
    return made


def _scattered(logits: Tensor, places: Tensor, weights: Tensor) -> Choice:
    probabilities = torch.zeros_like(logits).scatter(1, places, weights)
    return probabilities, torch.zeros_like(logits).int().scatter(1, places, 1).bool()


def _limited(scores: Tensor, count: int) -> Tensor:
    """Scores of experts outside the best groups are below all others."""
    tokens, experts = scores.shape
    groups = GROUPS if experts % GROUPS == 0 else 1
    limit = min(LIMIT, groups)
    by_group = scores.view(tokens, groups, -1)
    best = by_group.topk(min(max(1, count // limit), experts // groups), dim=-1)[0].sum(dim=-1)
    _, kept = best.topk(limit, dim=-1)
    mask = torch.zeros_like(best).scatter_(1, kept, 1.0)
    wide = mask.unsqueeze(-1).expand(by_group.shape).reshape(tokens, -1)
    return scores.masked_fill(~wide.bool(), float("-inf"))
