"""Which operators is a mixture of experts made of on one rank?

Experts are chosen and tokens copied for them (`routing`). The rows are sent to the ranks of their experts; there they
are sorted by expert, pass its MLP as grouped products (`grouped`), and are sent back, where a token's rows are
summed. The probabilities are multiplied with what the activation makes, in its kernel, so that experts' outputs are
not kept. Shared experts are a dense MLP of every token. Collectives are put in by whoever lowers the layer
(`parallel.token_dispatch`). Tokens are spread evenly over experts.

What is kept: the inputs of the experts' products and activation, the probability of each row (FP32), and the
activation's result where it is weighted in kernels of its own: Megatron-LM fuses the two for SwiGLU
(`weighted_bias_swiglu_impl`), not for GELU; where activations are not fused nothing is.
Reference: NVIDIA/Megatron-LM, megatron/core/transformer/moe/{token_dispatcher,experts,moe_layer}.py.
"""

from dataclasses import dataclass, replace
from math import comb
from typing import Final

from clustersim.common.dtypes import DType
from clustersim.model import memory_bound
from clustersim.model.grouped_linear import GroupedLinear
from clustersim.model.kernels import Kernel, KernelKind, Routine, StreamShape
from clustersim.model.layer_stack import DenseMlp, Mlp, RoutedMlp
from clustersim.model.linear import Linear
from clustersim.model.mlp import dense
from clustersim.model.moe_expert_bias import biased, clamped
from clustersim.model.moe_router import Copies, chosen, moved, permuted, summed
from clustersim.model.operators import EXPERTS, Operator, Region, reading, within
from clustersim.model.overheads import Grouping
from clustersim.model.precision_recipe import Products
from clustersim.model.quantization import Operands, linear_casts
from clustersim.model.recompute_modules import Module
from clustersim.model.sharded_layer import OnRank, gradient_sum, linear_operator, residual_wide, streamed

_WEIGHTED: Final = 2.0  # times the elements: read and written
_WEIGHTED_BACK: Final = 3.0  # the gradient, what was weighted, and its gradient, in one pass
_APART_BACK: Final = 6.0  # a product of the gradient for each operand; one of them is summed, in 3 launches


def mixture(rank: OnRank, routed: RoutedMlp) -> list[Operator]:
    """The operators of a mixture between its norm and the sum with the residual stream."""
    experts = _Experts(rank, routed)
    shared = _shared(rank, routed) if routed.shared else []
    copied = [] if experts.copied_there else [permuted(rank, routed)]
    back = [] if experts.copied_there else [summed(rank, routed)]
    return [*chosen(rank, routed), *copied, *experts.operators(), *back, *shared]


def _shared(rank: OnRank, routed: RoutedMlp) -> list[Operator]:
    """The shared experts, and the sum of what they make with the routed ones'."""
    up, *others = dense(rank, DenseMlp(routed.shared, routed.form), "shared")
    others += _gate(rank) if routed.shared_gate else []
    read = rank.shared(rank.residual)  # the router keeps it, too
    up = replace(up, kept=up.kept - read, waiting=up.waiting - read, read=up.read - read)
    up = replace(up, input_gradient=(*up.input_gradient, gradient_sum(rank, "shared.up")))
    return [
        *within((up, *others), Module.SHARED_EXPERTS),
        residual_wide(rank, "mlp.sum", memory_bound.residual(dropout=False, fused=rank.training.fused)),
    ]


def _gate(rank: OnRank) -> list[Operator]:
    """A weight for each token, and what the shared experts made times it; both are kept."""
    tokens, hidden = rank.shard.residual_tokens, rank.model.hidden
    linear = Linear("shared.gate", tokens, hidden, 1, Products.all_in(rank.dtype))
    made = replace(linear_operator(rank, linear, 0.0), region=Region.REPLICATED, linear=None)  # the router keeps it
    shape = StreamShape(Routine.WEIGHTING, tokens, hidden, fused=rank.training.fused)
    forward, back = _weighting("shared.scale", rank.dtype, shape)
    kept = float(shape.elements * rank.dtype.bytes)
    return [made, Operator("shared.scale", Region.REPLICATED, (forward,), (back,), kept=kept)]


def _weighting(name: str, dtype: DType, shape: StreamShape) -> tuple[Kernel, Kernel]:
    """Rows times a number each, and the gradients of both."""
    size, kind, behind = shape.elements * dtype.bytes, KernelKind.RESIDUAL, replace(shape, backward=True)
    back, launches = (_WEIGHTED_BACK, 1) if shape.fused else (_APART_BACK, 3)
    return (
        moved(name, kind, dtype, shape, _WEIGHTED * size),
        moved(f"{name}.input_gradient", kind, dtype, behind, back * size, launches=launches),
    )


@dataclass(frozen=True, slots=True)
class _Experts:
    """What one rank does with the tokens that were sent to its experts."""

    rank: OnRank
    routed: RoutedMlp

    @property
    def experts(self) -> int:
        """Experts on this rank."""
        return self.routed.experts // self.rank.shard.ep

    @property
    def tokens(self) -> int:
        """Rows that come to this rank, of all ranks that send to it."""
        even = self.routed.rows(self.rank.shard.residual_tokens) * self.rank.shard.etp
        return even if self.rank.shard.load == 1.0 else max(1, round(even * self.rank.shard.load))

    @property
    def ffn(self) -> int:
        """Width of an expert on this rank."""
        return self.routed.ffn // self.rank.shard.etp

    @property
    def _fused(self) -> bool:
        """Whether the products' kernels do what is between them."""
        return self.rank.training.grouping is Grouping.FUSED

    @property
    def copied_there(self) -> bool:
        """Whether tokens are copied for each expert here."""
        return self.rank.shard.copied_there and self.rank.shard.ep * self.rank.shard.etp > 1

    @property
    def _copies(self) -> Copies:
        """The tokens that came, each once, and a row for each of them and of these experts."""
        routed, every = self.routed, self.rank.shard.residual_tokens * self.rank.shard.etp * self.rank.shard.ep
        missed = comb(routed.experts - self.experts, routed.top_k) / comb(routed.experts, routed.top_k)
        came = min(every, every * (1.0 - missed) * self.rank.shard.load)
        return Copies(self.rank, round(came), self.tokens, self.experts, Region.ROUTED)

    def operators(self) -> list[Operator]:
        """Sorted by expert, through the MLP, and back in the order in which they came."""
        rank, form = self.rank, self.routed.form
        over = memory_bound.activation(form, fused=rank.training.fused)
        made = streamed(Region.ROUTED, "experts.activation", rank.dtype, over, (over.over(self.tokens, self.ffn),))
        made = replace(made, kept=made.kept + self.tokens * DType.FP32.bytes)  # the probability of each row
        if form is Mlp.GELU or not rank.training.fused:
            made = self._weighted(made)
        gated = 2 if form is Mlp.SWIGLU else 1
        if self._fused:
            made = replace(made, forward=(), input_gradient=())
        comes = float(self.tokens * (gated * self.ffn * rank.dtype.bytes + DType.FP32.bytes))
        down = self._grouped("experts.down", self.ffn, rank.model.hidden, first=False)
        if self.routed.bias:
            made = clamped(made, rank.dtype, self.tokens, gated * self.ffn)
            down = biased(down, rank.dtype, self.experts, (self.tokens, rank.model.hidden))
        products = [
            self._grouped("experts.up", rank.model.hidden, gated * self.ffn, first=True),
            *within([made], Module.EXPERTS_ACTIVATION, comes),
            *reading([down], Module.EXPERTS_ACTIVATION),
        ]
        if self.copied_there:
            return [self._copies.made("experts.sort"), *products, self._copies.summed("experts.unsort")]
        if self.experts == 1 or rank.shard.ep == 1:
            return products
        return [self._sorted("experts.sort"), *products, self._sorted("experts.unsort")]

    def _weighted(self, activation: Operator) -> Operator:
        """The activation, whose result is multiplied by the tokens' scores in kernels that are not fused with it."""
        shape = StreamShape(Routine.WEIGHTING, self.tokens, self.ffn)
        forward, both = _weighting("experts.weighting", self.rank.dtype, shape)
        return replace(
            activation,
            forward=(*activation.forward, forward),
            input_gradient=(both, *activation.input_gradient),
            kept=activation.kept + shape.elements * self.rank.dtype.bytes,
        )

    def _operands(self, name: str, inputs: int, outputs: int, *, first: bool) -> Operands:
        """Of the first product the input comes from the tokens' ranks, of the last its output's gradient."""
        sent = self.rank.training.recipe.dispatched is not None
        own = self.rank.shard.residual_tokens
        came, came_back = (own if sent and first else self.tokens), (own if sent and not first else self.tokens)
        whole = Operands(name, self.tokens, inputs, outputs, came, came_back, matrices=self.experts)
        return replace(whole, sent=sent and first, sent_back=sent and not first)

    def _grouped(self, name: str, inputs: int, outputs: int, *, first: bool) -> Operator:
        rank, recipe = self.rank, self.rank.training.recipe
        sizes = self.experts, self.tokens, inputs, outputs
        linear = GroupedLinear(name, *sizes, rank.products, self.routed.bias, rank.training.grouping)
        read = rank.saved(self.tokens * inputs)
        casts = linear_casts(recipe, rank.products, self._operands(name, inputs, outputs, first=first))
        before, behind = casts.forward, casts.backward
        if self._fused:  # what is between the two products
            before, behind = (before, ()) if first else ((), behind)
        return Operator(
            name,
            Region.ROUTED,
            (*before, *linear.forward(recipe)),
            (*behind, *linear.input_gradient(recipe)),
            (*casts.weight_gradient, *linear.weight_gradient(recipe, rank.training.accumulation)),
            parameters=linear.parameters,
            group=EXPERTS,
            kept=read,
            waiting=read + self.tokens * outputs * rank.waits(rank.products).bytes,
            read=read,
            cast=casts.weights,
        )

    def _sorted(self, name: str) -> Operator:
        """Rows in another order, both ways; without a fused kernel chunks are joined, which moves as much."""
        rank, hidden = self.rank, self.rank.model.hidden
        shape = StreamShape(Routine.PERMUTE, self.tokens, hidden, fused=True, table=self.tokens)
        size = 2.0 * shape.elements * rank.dtype.bytes
        back = moved(f"{name}.input_gradient", KernelKind.COPY, rank.dtype, shape, size)
        return Operator(name, Region.ROUTED, (moved(name, KernelKind.COPY, rank.dtype, shape, size),), (back,))
