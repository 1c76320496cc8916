"""How are experts chosen on one rank, and what do a token's copies for them cost?

All of it works on the rank's own tokens, which are a part of the sequence under sequence parallelism.

- Router: logits [tokens, experts], whose gradient is added to that of the experts' inputs. They are FP32; their
  operands are the model's, or FP32 copies of them (`Overheads.router_fp32`: Megatron-Core up to 0.12 with
  `moe_router_dtype`).
- Choice: one kernel each way (`moe_router_fusion`) that reads logits and writes probabilities, the map of who is
  chosen, and the scores that backward reads; or one operation after the other, each of which passes [tokens, experts]
  or [tokens, top_k] in FP32. Counted are those passes: 5 of them forward for a softmax of the chosen (top-k, the
  zeros that probabilities and the map are scattered into, and these), 2 more for scores of all experts and 1 for a
  bias, 5 more with groups (their scores, the groups' choice and mask); backward about as many less those of the map.
  Every pass is a launch, and the sort that top-k needs two more.
- Permutation: with a fused kernel (`moe_permute_fusion`) a map of rows is made ([tokens, 2 experts + 1] in INT32,
  which is kept), tokens are read once and every copy is written; backward sums the copies. Without it indices are
  selected from the map ([tokens, top_k] in INT64, kept; six launches), each copy is read and written, and backward
  adds every row to zeros (read, read and written).
- Sum: with a fused kernel each copy is read and the token written, backward the other way round; without it every row
  is added to zeros, backward each copy is read and written.

Where tokens travel once, and are copied at the ranks of their experts (DeepEP, Hybrid-EP, all-gather), the same is done
there with those that came.

- Loss that balances the load (`Overheads.router_loss`; Fedus et al. 2021, arXiv:2101.03961, section 2.2; of each
  sequence in DeepSeek-V3), which Megatron-Core has where a recipe gives it a coefficient. With fused kernels the logits
  are scored once more, for all experts, the map of who is chosen is summed, and the scores by these sums; backward
  makes the gradient of the scores, that of the logits, and adds it to theirs. Without, those are 7 passes forward (9 of
  sigmoids: a softmax, top-k, zeros, the map scattered and converted, two sums) and 3 (5) backward. Numbers of each
  expert and of the loss are made and noted by 2 launches more each way, 3 more forward where nothing is fused.
  Tensor-parallel ranks, which have parts of the sequence, sum how many tokens each expert has (INT64).

The loss of the logits' size (z-loss), which no recipe here has, is left out.

References: NVIDIA/Megatron-LM, megatron/core/transformer/moe/{router,moe_utils}.py (topk_routing_with_score_function,
permute, unpermute, RouterGatingLinearFunction); NVIDIA/TransformerEngine, transformer_engine/pytorch/permutation.py,
transformer_engine/common/triton/permutation.py and common/fused_router; pytorch/torchtitan, torchtitan/models/moe.py.
"""

from dataclasses import dataclass, replace
from typing import Final

from clustersim.common.dtypes import DType
from clustersim.common.units import Bytes
from clustersim.model.kernels import Kernel, KernelKind, Routine, StreamShape
from clustersim.model.layer_stack import RoutedMlp, Router, Scores
from clustersim.model.linear import Linear
from clustersim.model.operators import Joining, Joint, Joints, Operator, Region
from clustersim.model.precision_recipe import Products
from clustersim.model.sharded_layer import OnRank, gradient_sum, linear_operator

_INDEX: Final = 8  # bytes of PyTorch's indices
_ENTRY: Final = 4  # of a map of rows
_SORTS: Final = 2  # launches of a top-k beside its pass
_SELECTIONS: Final = 6  # launches that make indices of who is chosen
_MAPS: Final = 2  # launches that make a map of rows
_NOTED: Final = 2  # launches that note a loss, or begin its gradient
_CHOICE: Final = "mlp.top_k"


def chosen(rank: OnRank, routed: RoutedMlp) -> list[Operator]:
    """The router, the choice of experts, and the loss of their load."""
    balance = [_balance(rank, routed)] if rank.training.overheads.router_loss else []
    return [_router(rank, routed), _choice(rank, routed), *balance]


def permuted(rank: OnRank, routed: RoutedMlp) -> Operator:
    """A row for each token and expert, in the order of the experts."""
    return _copies(rank, routed).made("mlp.permute")


def summed(rank: OnRank, routed: RoutedMlp) -> Operator:
    """Each token's rows, summed."""
    return _copies(rank, routed).summed("mlp.unpermute")


def moved(name: str, kind: KernelKind, dtype: DType, shape: StreamShape, size: Bytes, *, launches: int = 1) -> Kernel:
    """A kernel that moves so many bytes."""
    return Kernel(name, kind, dtype, flops=0.0, bytes=float(size), shape=shape, launches=launches)


def _router(rank: OnRank, routed: RoutedMlp) -> Operator:
    """Logits of all experts for each token; backward adds what comes back to the gradient of the experts' inputs."""
    tokens, hidden = rank.shard.residual_tokens, rank.model.hidden
    copied = rank.training.overheads.router_fp32
    formats = Products.all_in(DType.FP32 if copied else rank.dtype)
    linear = Linear("mlp.router", tokens, hidden, routed.experts, formats, tokens if routed.bias else 0)
    made = linear_operator(rank, linear, rank.input_bytes)
    added = (gradient_sum(rank, "mlp.router"),)
    back = (*made.input_gradient, *added)
    if copied:
        shape = StreamShape(Routine.COPY, tokens, hidden, fused=True, formats=(DType.FP32,))
        size = shape.elements * (rank.dtype.bytes + DType.FP32.bytes)
        copy = moved("mlp.router.copy", KernelKind.COPY, rank.dtype, shape, size)
        made = replace(made, forward=(copy, *made.forward))
        back = (made.input_gradient[0], replace(copy, name="mlp.router.copy.input_gradient"), *back[1:])
    return replace(made, region=Region.REPLICATED, linear=None, input_gradient=back)


def _choice(rank: OnRank, routed: RoutedMlp) -> Operator:
    """Probabilities and the map of who is chosen; backward the gradient of the logits."""
    sizes = rank.shard.residual_tokens, routed.experts
    shape = StreamShape(routine_of(routed.router), *sizes, fused=True, table=routed.top_k)
    scores, marks = shape.elements * DType.FP32.bytes, shape.elements
    if not rank.training.overheads.router_unfused:
        return _chosen_by(_CHOICE, shape, (3 * scores + marks, 3 * scores + marks), (1, 1), float(scores + marks))
    unfused, passes = replace(shape, fused=False), _passes(routed)
    back = passes - 2
    moves, launches = (2 * passes * scores, 2 * back * scores), (passes + _SORTS, back)
    return _chosen_by(_CHOICE, unfused, moves, launches, float(2 * scores + marks))


def _chosen_by(
    name: str, shape: StreamShape, sizes: tuple[Bytes, Bytes], launches: tuple[int, int], kept: Bytes
) -> Operator:
    """Kernels over scores that move so many bytes, and are launched so many times, forward and backward."""
    kind = KernelKind.SOFTMAX
    forward = moved(name, kind, DType.FP32, shape, sizes[0], launches=launches[0])
    behind = replace(shape, backward=True)
    back = moved(f"{name}.input_gradient", kind, DType.FP32, behind, sizes[1], launches=launches[1])
    return Operator(name, Region.REPLICATED, (forward,), (back,), kept=kept, saves_late=True)


def routine_of(router: Router) -> Routine:
    """How experts are chosen; what changes is how often logits are passed. Sigmoids are taken to have a bias."""
    if router.groups > 1:
        return Routine.TOP_K_GROUPED
    return Routine.TOP_K_SIGMOID if router.scores is Scores.SIGMOID else Routine.TOP_K


def _passes(routed: RoutedMlp) -> int:
    """How often one operation after the other passes what has an entry for each token and expert."""
    router = routed.router
    scored = 2 if router.scores is Scores.SIGMOID else 0
    return 5 + scored + router.bias + (5 if router.groups > 1 else 0)


def _balance(rank: OnRank, routed: RoutedMlp) -> Operator:
    """The loss of the load; its gradient is added to that of the logits."""
    shape = StreamShape(Routine.BALANCE, rank.shard.residual_tokens, routed.experts, fused=True)
    scores, marks = shape.elements * DType.FP32.bytes, shape.elements
    sizes, launches = (3 * scores + 2 * marks, 7 * scores), (3 + _NOTED, 3 + _NOTED)
    if rank.training.overheads.router_unfused:
        shape, scored = replace(shape, fused=False), 2 if routed.router.scores is Scores.SIGMOID else 0
        ahead, back = 7 + scored, 3 + scored
        sizes, launches = (2 * ahead * scores, 2 * back * scores), (ahead + _SORTS + 3 + _NOTED, back + _NOTED)
    made = _chosen_by("mlp.balance", shape, sizes, launches, float(scores))
    counts = (Joint(Joining.SUMMED, float(routed.experts * _INDEX), "experts' load"),) if rank.shard.tp > 1 else ()
    return replace(made, joints=Joints(result=counts))


def _copies(rank: OnRank, routed: RoutedMlp) -> "Copies":
    tokens = rank.shard.residual_tokens
    return Copies(rank, tokens, routed.rows(tokens), routed.experts, Region.REPLICATED)


@dataclass(frozen=True, slots=True)
class Copies:
    """Tokens on one rank, and a row for each of them and of each of its experts, of so many that it may have."""

    rank: OnRank
    tokens: int
    rows: int
    experts: int
    region: Region

    def made(self, name: str) -> Operator:
        """A row for each token and expert, in the order of the experts; backward sums a token's rows."""
        kept = self.rows * _INDEX if self._unfused else self._entries
        made = self._operator(name, Routine.PERMUTE, (self._made, self._summed))
        forward = (self._map(f"{name}.map"), *made.forward)
        return replace(made, forward=forward, kept=float(kept), saves_late=True)

    def summed(self, name: str) -> Operator:
        """Each token's rows, summed; backward copies the gradient for each."""
        return self._operator(name, Routine.UNPERMUTE, (self._summed, self._made))

    def _map(self, name: str) -> Kernel:
        """Where each row comes from, of who is chosen."""
        shape = StreamShape(Routine.ROW_MAP, self.tokens, self.experts, fused=not self._unfused, table=self.rows)
        launches = _SELECTIONS if self._unfused else _MAPS
        return moved(name, KernelKind.COPY, DType.FP32, shape, self._mapped, launches=launches)

    def _operator(self, name: str, routine: Routine, sizes: tuple[Bytes, Bytes]) -> Operator:
        """Forward and backward move so many bytes."""
        dtype, kind = self.rank.dtype, KernelKind.COPY
        shape = StreamShape(routine, self.tokens, self.rank.model.hidden, fused=not self._unfused, table=self.rows)
        behind = replace(shape, backward=True)
        forward = moved(name, kind, dtype, shape, sizes[0])
        back = moved(f"{name}.input_gradient", kind, dtype, behind, sizes[1])
        return Operator(name, self.region, (forward,), (back,))

    @property
    def _unfused(self) -> bool:
        return self.rank.training.overheads.permute_unfused

    @property
    def _entries(self) -> Bytes:
        """The map of rows."""
        return self.tokens * (2 * self.experts + 1) * _ENTRY

    @property
    def _mapped(self) -> Bytes:
        """The map is made; or indices are selected by who is chosen."""
        if not self._unfused:
            return 2 * self._entries
        return 2 * self.tokens * self.experts * (1 + DType.FP32.bytes) + self.rows * _INDEX

    @property
    def _made(self) -> Bytes:
        """Every token is read and its rows are written; or each row is read and written."""
        form = self.rank.training.recipe.dispatched or self.rank.dtype
        return (
            self._wide(2 * self.rows if self._unfused else self.tokens + self.rows) * form.bytes / self.rank.dtype.bytes
        )

    @property
    def _summed(self) -> Bytes:
        """Rows are read and tokens written; or rows are added to zeros, whose sums are read and written."""
        return self._wide(self.tokens + (3 if self._unfused else 1) * self.rows)

    def _wide(self, rows: int) -> Bytes:
        return float(rows * self.rank.model.hidden * self.rank.dtype.bytes)
