"""Which layers follow each other?

A stack is a tuple of runs: equal layers that follow each other are one run, so 126 equal layers are one entry, and the
work on a layer is found once for each spec. A new kind of attention or MLP is a type here, and operators in `layers`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import groupby


class Mlp(Enum):
    """GELU has two matrices (so does squared ReLU); SWIGLU has three (gate, up, down; so has gated GELU)."""

    GELU = "gelu"
    SWIGLU = "swiglu"


class QkNorm(Enum):
    """HEADS normalises each query and key head by itself (Qwen 3, Gemma 3), WHOLE all of them as one (OLMo 2)."""

    HEADS = "heads"
    WHOLE = "whole"


class BlockForm(Enum):
    """How a layer's attention and MLP are joined to the residual stream, and where its norms are.

    PRE_NORM: one after the other, a norm before each (GPT-2 and after); POST_NORM: a norm after each, before the sum
    (OLMo 2); SANDWICH: before and after each (Gemma 2, GLM-4); PARALLEL: both read one norm of the same input, and one
    sum takes both (GPT-J, Falcon 7B); PARALLEL_NORMS: each has a norm of its own (Falcon 40B).
    """

    PRE_NORM = "pre_norm"
    POST_NORM = "post_norm"
    SANDWICH = "sandwich"
    PARALLEL = "parallel"
    PARALLEL_NORMS = "parallel_norms"

    @property
    def before(self) -> bool:
        """Whether attention and MLP read what a norm made."""
        return self is not BlockForm.POST_NORM

    @property
    def after(self) -> bool:
        """Whether a norm is between attention or MLP and the sum with the residual stream."""
        return self in (BlockForm.POST_NORM, BlockForm.SANDWICH)

    @property
    def parallel(self) -> bool:
        """Whether attention and MLP read the same input."""
        return self in (BlockForm.PARALLEL, BlockForm.PARALLEL_NORMS)


@dataclass(frozen=True, slots=True)
class FullAttention:
    """Every token attends to all tokens before it. head_dim is explicit: it is not hidden / heads in every model.

    qkv_bias: queries, keys and values have biases; qk_norm: how queries and keys are normalised, if they are; window:
    how many tokens, itself among them, a token attends to (None: to all before it); rotary: share of each head that is
    turned by position, where the model has rotary positions (0: this layer has none, NoPE); softcap: scores are capped
    by a tanh (Gemma 2).
    """

    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    qk_norm: QkNorm | None = None
    window: int | None = None
    rotary: float = 1.0
    softcap: bool = False


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """An MLP that every token passes. ffn: its width."""

    ffn: int
    form: Mlp


class Scores(Enum):
    """What a router makes of its logits: SOFTMAX over the experts, or each expert's SIGMOID (DeepSeek-V3)."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True)
class Router:
    """How a token's experts are chosen.

    groups: experts are in so many groups of equal size, of which those of one token are in at most `limit`
    (node-limited routing, DeepSeek-V2, arXiv:2405.04434, section 2.2.2; None: in any); bias: a correction that is no
    weight selects the experts beside their scores (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).
    """

    scores: Scores = Scores.SOFTMAX
    groups: int = 1
    limit: int | None = None
    bias: bool = False


@dataclass(frozen=True, slots=True)
class RoutedMlp:
    """A mixture of experts: every token passes `top_k` of so many MLPs, chosen by a router, and the shared ones.

    ffn: width of each expert; shared: width of the shared experts together (0: there are none); shared_gate: what these
    make is weighted by a gate of each token (Qwen 2); bias: router and experts have biases (gpt-oss).
    """

    experts: int
    top_k: int
    ffn: int
    form: Mlp
    shared: int = 0
    shared_gate: bool = False
    bias: bool = False
    router: Router = Router()

    @property
    def alone(self) -> DenseMlp | None:
        """The dense MLP that a single expert without others is; None: there is something to choose, or to add."""
        return DenseMlp(self.ffn, self.form) if self.experts == 1 and not self.shared else None


AnyMlp = DenseMlp | RoutedMlp


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one layer is made of; None: the layer has no such part (and is not parallel)."""

    attention: FullAttention | None
    mlp: AnyMlp | None
    block: BlockForm = BlockForm.PRE_NORM


@dataclass(frozen=True, slots=True)
class LayerRun:
    """Equal layers that follow each other."""

    spec: LayerSpec
    count: int


Stack = tuple[LayerRun, ...]
MOST_LAYERS = 10_000  # of a model


def count(stack: Stack) -> int:
    """How many layers a stack has."""
    return sum(run.count for run in stack)


def joined(runs: Iterable[LayerRun]) -> Stack:
    """The stack of some runs, of which equal neighbours become one.

    >>> wide, narrow = LayerSpec(None, DenseMlp(4, Mlp.GELU)), LayerSpec(None, DenseMlp(2, Mlp.GELU))
    >>> [run.count for run in joined([LayerRun(wide, 1), LayerRun(wide, 2), LayerRun(narrow, 1)])]
    [3, 1]
    """
    equal = groupby(runs, key=lambda run: run.spec)
    return tuple(LayerRun(spec, sum(run.count for run in same)) for spec, same in equal)


def stacked(specs: Iterable[LayerSpec]) -> Stack:
    """The stack of some layers, one by one in their order."""
    return joined(LayerRun(spec, 1) for spec in specs)


def specs(stack: Stack) -> tuple[LayerSpec, ...]:
    """The layers of a stack, one by one."""
    return tuple(run.spec for run in stack for _ in range(run.count))


def cut(stack: Stack, first: int, layers: int) -> Stack:
    """Some layers of a stack, from the layer `first` on.

    >>> wide, narrow = LayerSpec(None, DenseMlp(4, Mlp.GELU)), LayerSpec(None, DenseMlp(2, Mlp.GELU))
    >>> [run.count for run in cut((LayerRun(wide, 3), LayerRun(narrow, 5)), 2, 4)]
    [1, 3]
    """
    return tuple(_cut(stack, first, first + layers))


def _cut(stack: Stack, begin: int, end: int) -> Iterator[LayerRun]:
    at = 0
    for run in stack:
        inside = min(end, at + run.count) - max(begin, at)
        if inside > 0:
            yield LayerRun(run.spec, inside)
        at += run.count
