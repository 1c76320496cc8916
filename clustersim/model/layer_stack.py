"""Which layers follow each other?

A stack is a tuple of runs: equal layers that follow each other are one run, so 126 equal layers are one entry, and the
work on a layer is found once for each spec. A new kind of attention or MLP is a type here, and operators in `layers`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from itertools import groupby
from math import ceil

from clustersim.common.enums import IdentityEnum


class MlpType(IdentityEnum):
    """GELU has two matrices (so does squared ReLU); SWIGLU has three (gate, up, down; so has gated GELU)."""

    GELU = "gelu"
    SWIGLU = "swiglu"


class QkNorm(Enum):
    """HEADS normalises each query and key head by itself (Qwen 3, Gemma 3), WHOLE all of them as one (OLMo 2)."""

    PER_HEAD = "heads"
    ALL_HEADS = "whole"


class BlockForm(IdentityEnum):
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
    def has_pre_norm(self) -> bool:
        """Whether attention and MLP read what a norm made."""
        return self is not BlockForm.POST_NORM

    @property
    def has_post_norm(self) -> bool:
        """Whether a norm is between attention or MLP and the sum with the residual stream."""
        return self in (BlockForm.POST_NORM, BlockForm.SANDWICH)

    @property
    def is_parallel(self) -> bool:
        """Whether attention and MLP read the same input."""
        return self in (BlockForm.PARALLEL, BlockForm.PARALLEL_NORMS)


@dataclass(frozen=True, slots=True)
class FullAttention:
    """Every token attends to all tokens before it. head_dim is explicit: it is not hidden / heads in every model.

    qkv_bias: queries, keys and values have biases; qk_norm: how queries and keys are normalised, if they are; window:
    how many tokens, itself among them, a token attends to (None: to all before it); rotary: share of each head that is
    turned by position, where the model has rotary positions (0: this layer has none, NoPE); softcap: scores are capped
    by a tanh (Gemma 2); sinks: every head has a learned score that takes part in the softmax and weights no value
    (gpt-oss).
    """

    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    qk_norm: QkNorm | None = None
    window: int | None = None
    rotary: float = 1.0
    softcap: bool = False
    sinks: bool = False


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Keys and values of all heads are made from one latent vector of each token, queries from another (MLA).

    DeepSeek-V2, arXiv:2405.04434, section 2.1.
    query_rank: of the queries' latent vector (None: they are made from the input itself); kv_rank: of that of keys and
    values; nope, rope: dimensions of each head's queries and keys without and with rotary positions, of which the
    second are one key for all heads; value_dim: of each head's values.
    """

    heads: int
    query_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    value_dim: int

    @property
    def kv_heads(self) -> int:
        """Every head has keys and values of its own."""
        return self.heads

    @property
    def head_dim(self) -> int:
        """Dimensions of each head's queries and keys."""
        return self.nope + self.rope

    @property
    def window(self) -> int | None:
        """None: a token attends to all before it."""
        return None

    @property
    def qk_norm(self) -> QkNorm | None:
        """None: the latent vectors are normalised, not the heads."""
        return None

    @property
    def rotary(self) -> float:
        """The share of each head that is turned, in a way of its own: as if it were whole."""
        return 1.0

    @property
    def softcap(self) -> bool:
        """Scores are not capped."""
        return False

    @property
    def query_width(self) -> int:
        """Dimensions of all heads' queries."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Dimensions of what is made of the latent vector: all heads' keys without positions, and values."""
        return self.heads * (self.nope + self.value_dim)


AttentionSpec = FullAttention | LatentAttention


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """An MLP that every token passes. ffn: its width."""

    ffn: int
    form: MlpType


class ScoreFunction(IdentityEnum):
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

    scores: ScoreFunction = ScoreFunction.SOFTMAX
    groups: int = 1
    limit: int | None = None
    bias: bool = False


@dataclass(frozen=True, slots=True)
class MoeMlp:
    """A mixture of experts: every token passes `top_k` of so many MLPs, chosen by a router, and the shared ones.

    ffn: width of each expert; shared: width of the shared experts together (0: there are none); shared_gate: what these
    make is weighted by a gate of each token (Qwen 2); bias: router and experts have biases (gpt-oss); capacity: each
    expert takes exactly so many times its even share of a rank's tokens, the rest dropped, what lacks padded (Lepikhin
    et al. 2020, arXiv:2006.16668, section 2.2; None: it takes what comes).
    """

    experts: int
    top_k: int
    ffn: int
    form: MlpType
    shared: int = 0
    shared_gate: bool = False
    bias: bool = False
    router: Router = Router()
    capacity: float | None = None

    def routed_tokens(self, tokens: int) -> int:
        """Rows that experts take of so many tokens of one rank.

        >>> RoutedMlp(8, 2, 4, Mlp.GELU).rows(100), RoutedMlp(8, 2, 4, Mlp.GELU, capacity=1.25).rows(100)
        (200, 256)
        """
        if self.capacity is None:
            return tokens * self.top_k
        return self.experts * ceil(self.capacity * tokens * self.top_k / self.experts)

    @property
    def single_dense_mlp(self) -> DenseMlp | None:
        """The dense MLP that a single expert without others is; None: there is something to choose, or to add."""
        has_more = self.shared or self.capacity is not None
        return DenseMlp(self.ffn, self.form) if self.experts == 1 and not has_more else None


MlpSpec = DenseMlp | MoeMlp


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one layer is made of; None: the layer has no such part (and is not parallel).

    ahead: it predicts a token further on: what it reads are hidden states beside the embedding of the next token
    (multi-token prediction, `model.mtp`); wide: its products are in the format of activations, whatever the
    recipe says of others.
    """

    attention: AttentionSpec | None
    mlp: MlpSpec | None
    block: BlockForm = BlockForm.PRE_NORM
    is_mtp: bool = False
    high_precision: bool = False


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Equal layers that follow each other."""

    spec: LayerSpec
    count: int


LayerStack = tuple[LayerGroup, ...]
MAX_LAYERS = 10_000  # of a model
MAX_MTP_LAYERS = 64  # of these that predict further tokens


def layer_count(stack: LayerStack) -> int:
    """How many layers a stack has."""
    return sum(group.count for group in stack)


def merge_groups(groups: Iterable[LayerGroup]) -> LayerStack:
    """The stack of some runs, of which equal neighbours become one.

    >>> wide, narrow = LayerSpec(None, DenseMlp(4, Mlp.GELU)), LayerSpec(None, DenseMlp(2, Mlp.GELU))
    >>> [run.count for run in joined([LayerRun(wide, 1), LayerRun(wide, 2), LayerRun(narrow, 1)])]
    [3, 1]
    """
    grouped = groupby(groups, key=lambda group: group.spec)
    return tuple(LayerGroup(spec, sum(group.count for group in equal_groups)) for spec, equal_groups in grouped)


def stack_layers(specs: Iterable[LayerSpec]) -> LayerStack:
    """The stack of some layers, one by one in their order."""
    return merge_groups(LayerGroup(layer, 1) for layer in specs)


def layer_specs(stack: LayerStack) -> tuple[LayerSpec, ...]:
    """The layers of a stack, one by one."""
    return tuple(group.spec for group in stack for _ in range(group.count))


def slice_layers(stack: LayerStack, first: int, slice_count: int) -> LayerStack:
    """Some layers of a stack, from the layer `first` on.

    >>> wide, narrow = LayerSpec(None, DenseMlp(4, Mlp.GELU)), LayerSpec(None, DenseMlp(2, Mlp.GELU))
    >>> [run.count for run in cut((LayerRun(wide, 3), LayerRun(narrow, 5)), 2, 4)]
    [1, 3]
    """
    return tuple(_slice_groups(stack, first, first + slice_count))


def high_precision_ends(stack: LayerStack, first_count: int, last_count: int) -> LayerStack:
    """A stack whose first and last layers, so many, have products in the format of activations.

    >>> narrow = LayerSpec(None, DenseMlp(4, Mlp.GELU))
    >>> [(run.spec.wide, run.count) for run in wide_ends((LayerRun(narrow, 8),), 1, 2)]
    [(True, 1), (False, 5), (True, 2)]
    """
    total = layer_count(stack)
    inner_begin = max(first_count, total - last_count)
    ends = (
        slice_layers(stack, 0, min(first_count, inner_begin)),
        slice_layers(stack, inner_begin, total - inner_begin),
    )
    before, after = (
        (LayerGroup(replace(group.spec, high_precision=True), group.count) for group in end) for end in ends
    )
    return merge_groups((*before, *slice_layers(stack, first_count, inner_begin - first_count), *after))


def _slice_groups(stack: LayerStack, begin: int, end: int) -> Iterator[LayerGroup]:
    offset = 0
    for group in stack:
        overlap = min(end, offset + group.count) - max(begin, offset)
        if overlap > 0:
            yield LayerGroup(group.spec, overlap)
        offset += group.count
