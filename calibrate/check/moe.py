"""What is a mixture of experts, as PyTorch modules?

The operators that `clustersim.model.moe_layer` counts, one for one, as Megatron-Core's all-to-all dispatcher runs them
(megatron/core/transformer/moe/token_dispatcher.py): router, choice, map, a row for each token and expert; ranks tell
each other how many rows each expert gets, and the host waits for that; rows and probabilities go to the ranks of their
experts (`all_to_all_single`, which autograd runs back), are sorted by expert, pass the experts' products and their
activation, are weighted, and come back the same way. Operators around the products: `calibrate.kernels.moe_formulas`.

Experts are chosen evenly, since that is what is predicted: a pattern is added that spreads tokens over experts in turn.
Megatron-LM does the same with random numbers (`--moe-router-force-load-balancing`).
"""

from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

from calibrate.check.fused_linear import Linear
from calibrate.check.operator_labels import PERMUTE, PRODUCTS, ROW_MAP, UNPERMUTE, WEIGHTING, Label, labelled, streaming
from calibrate.collectives.operations import gather_parts
from calibrate.kernels import formulas, moe_formulas
from calibrate.kernels.pytorch_ops.grouped_gemm import multiply
from clustersim.model import memory_bound as passes
from clustersim.model.kernels import KernelKind
from clustersim.model.layer_stack import MlpType, MoeMlp, ScoreFunction
from clustersim.model.moe_router import top_k_op
from clustersim.model.overheads import Grouping, Overheads
from clustersim.parallel.plan import Plan

HABITS: Final = Overheads(permute_unfused=True, router_unfused=True, grouping=Grouping.KERNEL)
"""How these modules run experts; nothing beside the model."""
FAR: Final = 64.0  # above all logits
_SPREAD: Final = 0.02  # of first weights


@dataclass(frozen=True, slots=True)
class Sent:
    """Who gets how many rows: of this rank, those sent to each rank; [ranks, experts] those that come from each."""

    to: list[int]
    come: Tensor

    @property
    def taken(self) -> list[int]:
        """Rows from each rank."""
        rows: list[int] = self.come.sum(1).tolist()
        return rows


class Experts(nn.Module):
    """The experts of one rank: products of each one's rows with its own matrices."""

    def __init__(self, routed: MoeMlp, hidden: int, count: int, *, fused: bool) -> None:
        super().__init__()
        self.form, self.fused = routed.form, fused
        wide = 2 * routed.ffn if routed.form is MlpType.SWIGLU else routed.ffn
        self.up = nn.Parameter(torch.empty(count, wide, hidden).normal_(std=_SPREAD))
        self.down = nn.Parameter(torch.empty(count, hidden, routed.ffn).normal_(std=_SPREAD))

    def forward(self, rows: Tensor, weights: Tensor, sizes: Tensor) -> Tensor:
        """Rows [rows, hidden] both ways, expert by expert; weights: [rows]; sizes: [experts] rows of each."""
        ends = sizes.cumsum(0).int()
        with labelled(PRODUCTS):
            made = multiply(rows, self.up, ends)
        with labelled(streaming(passes.activation_spec(self.form, fused=self.fused))):
            made = formulas.swiglu(made, fused=self.fused) if self.form is MlpType.SWIGLU else formulas.gelu(made)
        with labelled(WEIGHTING):
            made = formulas.weighted(made, weights.to(made.dtype).unsqueeze(1), fused=self.fused)
        with labelled(PRODUCTS):
            result: Tensor = multiply(made, self.down, ends)
        return result


class Mixture(nn.Module):
    """Every token through some of the experts, which the ranks share out."""

    even: Tensor

    def __init__(self, plan: Plan, routed: MoeMlp) -> None:
        super().__init__()
        hidden, fused = plan.model.hidden, plan.training.fused
        self.routed, self.ranks = routed, plan.layout.ep
        self.label = Label(KernelKind.SOFTMAX, top_k_op(routed.router))
        self.router = Linear(hidden, routed.experts, bias=False, fused=fused)
        self.experts = Experts(routed, hidden, routed.experts // self.ranks, fused=fused)
        self.register_buffer("even", _even(plan.layer_shard.tokens, routed), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] both ways."""
        flat = x.flatten(0, -2)
        logits = self.router(flat).float()
        with labelled(self.label):
            choice = self._chosen(logits)
        with labelled(ROW_MAP):
            places, weights = moe_formulas.row_map(choice)
        with labelled(PERMUTE):
            rows = moe_formulas.permuted(flat, places)
        sizes = choice[1].sum(0)
        made = self.experts(rows, weights, sizes) if self.ranks == 1 else self._elsewhere(rows, weights, sizes)
        with labelled(UNPERMUTE):
            return moe_formulas.unpermuted(made, places, len(flat)).view_as(x)

    def _chosen(self, logits: Tensor) -> moe_formulas.Choice:
        router, count = self.routed.router, self.routed.top_k
        if router.groups == 1 and router.scores is ScoreFunction.SOFTMAX:
            return moe_formulas.softmax_choice(logits + self.even, count)
        return moe_formulas.sigmoid_choice(logits, count, self.even, grouped=router.groups > 1)

    def _elsewhere(self, rows: Tensor, weights: Tensor, sizes: Tensor) -> Tensor:
        """Rows to the ranks of their experts, and back."""
        sent = self._counted(sizes)
        rows, weights = (_exchanged(item, sent.to, sent.taken) for item in (rows, weights))
        order, back = _by_expert(sent.come)
        with labelled(PERMUTE):
            rows, weights = (moe_formulas.in_order(element, order, back) for element in (rows, weights))
        made = self.experts(rows, weights, sent.come.sum(0))
        with labelled(PERMUTE):
            made = moe_formulas.in_order(made, back, order)
        return _exchanged(made, sent.taken, sent.to)

    def _counted(self, sizes: Tensor) -> Sent:
        """What the ranks tell each other."""
        every = sizes.new_empty(self.ranks * len(sizes))
        gather_parts(every, sizes)
        by_rank = every.view(self.ranks, self.ranks, -1)
        mine = by_rank[dist.get_rank()]
        return Sent(mine.sum(1).tolist(), by_rank[:, dist.get_rank()])


def _exchanged(rows: Tensor, sent: list[int], taken: list[int]) -> Tensor:
    made: Tensor = all_to_all_single_autograd(rows, taken, sent, dist.group.WORLD)
    return made


def _by_expert(come: Tensor) -> tuple[Tensor, Tensor]:
    """The order of rows by expert, and the way back, of rows that come [rank, expert] by rank."""
    ranks, experts = come.shape
    numbers = torch.arange(experts, device=come.device).repeat(ranks).repeat_interleave(come.flatten())
    order = torch.argsort(numbers, stable=True)
    return order, torch.argsort(order)


def _even(tokens: int, routed: MoeMlp) -> Tensor:
    """[tokens, experts] in FP32: each token's experts are behind those of the token before it."""
    pattern = torch.zeros(tokens, routed.experts, dtype=torch.float32)
    first = torch.arange(tokens).unsqueeze(1) * routed.top_k
    experts = (first + torch.arange(routed.top_k)) % routed.experts
    return pattern.scatter_(1, experts, FAR)
