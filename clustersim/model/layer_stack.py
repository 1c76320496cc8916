"""The layer stack of a model: which layers follow each other?

A stack is a tuple of layer groups: consecutive equal layers are one group, so 126 equal layers are one
entry, and work per layer is done once per spec. A new kind of mixer is a file in `mixers`; a new kind of MLP is a
type here, and operators in `layers`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from math import ceil

from clustersim.common.enums import IdentityEnum
from clustersim.model.attention_spec import SoftmaxAttention
from clustersim.model.conditioning import Modulation
from clustersim.model.cross_attention_spec import CrossAttention
from clustersim.model.mixer import Mixer
from clustersim.model.parallel_mixers import ParallelMixers
from clustersim.model.shared_block_spec import SharedBlock


class MlpType(IdentityEnum):
    """GELU has two matrices (so does squared ReLU); SWIGLU has three (gate, up, down; so has gated GELU)."""

    GELU = "gelu"
    SWIGLU = "swiglu"


class BlockForm(IdentityEnum):
    """How a layer's attention and MLP are joined to the residual stream, and where its norms are.

    PRE_NORM: sequential, a norm before each (GPT-2 and after); POST_NORM: a norm after each, before the
    residual add (OLMo 2); SANDWICH: before and after each (Gemma 2, GLM-4); PARALLEL: both read one norm of
    the same input, and one residual add takes both (GPT-J, Falcon 7B); PARALLEL_NORMS: the same with separate
    norms (Falcon 40B); PARALLEL_FUSED: the same with one norm, and one output matrix of both (FLUX.1).
    """

    PRE_NORM = "pre_norm"
    POST_NORM = "post_norm"
    SANDWICH = "sandwich"
    PARALLEL = "parallel"
    PARALLEL_NORMS = "parallel_norms"
    PARALLEL_FUSED = "parallel_fused"

    @property
    def has_pre_norm(self) -> bool:
        """Whether a norm is before attention and MLP."""
        return self is not BlockForm.POST_NORM

    @property
    def has_post_norm(self) -> bool:
        """Whether a norm is between attention or MLP and the residual add."""
        return self in (BlockForm.POST_NORM, BlockForm.SANDWICH)

    @property
    def is_parallel(self) -> bool:
        """Whether attention and MLP read the same input."""
        return self in (BlockForm.PARALLEL, BlockForm.PARALLEL_NORMS, BlockForm.PARALLEL_FUSED)


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """An MLP that every token passes. ffn: its width; token_shift: its input is mixed with the token before (RWKV)."""

    ffn: int
    form: MlpType
    token_shift: bool = False


class ScoreFunction(IdentityEnum):
    """Score function of a router: SOFTMAX over the experts, or each expert's SIGMOID (DeepSeek-V3)."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True)
class Router:
    """How a token's experts are selected.

    num_groups: number of expert groups of equal size, at most `group_topk` of which a token's experts may be in
    (node-limited routing, DeepSeek-V2, arXiv:2405.04434, section 2.2.2; None: any number); bias: a correction
    bias, which is no trained weight, is added to the scores for the selection (DeepSeek-V3, arXiv:2412.19437,
    section 2.1.2).
    """

    scores: ScoreFunction = ScoreFunction.SOFTMAX
    num_groups: int = 1
    group_topk: int | None = None
    bias: bool = False


@dataclass(frozen=True, slots=True)
class MoeMlp:
    """A mixture-of-experts (MoE) layer: a router sends each token to `top_k` experts and all shared ones.

    ffn: width of each expert; shared: total width of the shared experts (0: none); shared_gate: their output is
    weighted by a gate per token (Qwen 2); bias: router and experts have biases (gpt-oss); capacity_factor: each
    expert processes exactly this multiple of its mean share of a rank's tokens, excess tokens are dropped and
    missing ones padded (Lepikhin et al. 2020, arXiv:2006.16668, section 2.2; None: dropless).
    """

    experts: int
    top_k: int
    ffn: int
    form: MlpType
    shared: int = 0
    shared_gate: bool = False
    bias: bool = False
    router: Router = Router()
    capacity_factor: float | None = None

    def routed_tokens(self, tokens: int) -> int:
        """Number of routed tokens that experts process for the tokens of one rank.

        >>> MoeMlp(8, 2, 4, MlpType.GELU).routed_tokens(100)
        200
        >>> MoeMlp(8, 2, 4, MlpType.GELU, capacity_factor=1.25).routed_tokens(100)
        256
        """
        if self.capacity_factor is None:
            return tokens * self.top_k
        return self.experts * ceil(self.capacity_factor * tokens * self.top_k / self.experts)

    @property
    def single_dense_mlp(self) -> DenseMlp | None:
        """The equivalent dense MLP of a single expert without shared experts and capacity, else None."""
        has_more = self.shared or self.capacity_factor is not None
        return DenseMlp(self.ffn, self.form) if self.experts == 1 and not has_more else None


MlpSpec = DenseMlp | MoeMlp


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one layer is made of: a mixer of tokens and an MLP; None: the layer has none (and is not parallel).

    is_mtp: a multi-token prediction layer, which reads hidden states and the embedding of the next token
    (`model.mtp`); high_precision: its matmuls are in the activation format, whatever the recipe; cross: attention to
    another sequence between mixer and MLP, with a norm and a residual connection of its own; modulation: shifts, scales
    and gates of mixer and MLP; stream_tokens: how many tokens of a sequence pass weights of their own (those of a text
    in a double-stream block, which attention joins with the others); shared: a use of a block that several layers
    share, before the mixer.
    """

    mixer: Mixer | None
    mlp: MlpSpec | None
    block: BlockForm = BlockForm.PRE_NORM
    is_mtp: bool = False
    high_precision: bool = False
    cross: CrossAttention | None = None
    modulation: Modulation | None = None
    stream_tokens: int = 0
    shared: SharedBlock | None = None

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """Its mixers: of a shared block, of its own sequence, and of another."""
        return tuple(mixer for mixer in (self.shared, self.mixer, self.cross) if mixer is not None)

    @property
    def attention(self) -> SoftmaxAttention | None:
        """The attention, if the mixer is one, or has one next to it or before it."""
        if self.shared is not None:
            return self.shared.attention
        match self.mixer:
            case SoftmaxAttention() as attention:
                return attention
            case ParallelMixers(attention=attention):
                return attention
        return None

    @property
    def moe(self) -> MoeMlp | None:
        """The mixture of experts, if the layer has one."""
        return self.mlp if isinstance(self.mlp, MoeMlp) else None


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Consecutive equal layers."""

    spec: LayerSpec
    count: int


LayerStack = tuple[LayerGroup, ...]
MAX_LAYERS = 10_000  # maximum number of layers of a model
MAX_MTP_LAYERS = 64  # maximum number of multi-token prediction layers


def layer_count(stack: LayerStack) -> int:
    """Number of layers of a stack."""
    return sum(group.count for group in stack)


def merge_groups(groups: Iterable[LayerGroup]) -> LayerStack:
    """The stack of some groups, with equal neighbours merged.

    >>> wide, narrow = LayerSpec(None, DenseMlp(4, MlpType.GELU)), LayerSpec(None, DenseMlp(2, MlpType.GELU))
    >>> [group.count for group in merge_groups([LayerGroup(wide, 1), LayerGroup(wide, 2), LayerGroup(narrow, 1)])]
    [3, 1]
    """
    grouped = groupby(groups, key=lambda group: group.spec)
    return tuple(LayerGroup(spec, sum(group.count for group in equal_groups)) for spec, equal_groups in grouped)


def stack_layers(specs: Iterable[LayerSpec]) -> LayerStack:
    """The stack of the given layers, in order."""
    return merge_groups(LayerGroup(layer, 1) for layer in specs)


def layer_specs(stack: LayerStack) -> tuple[LayerSpec, ...]:
    """The spec of every layer of a stack, in order."""
    return tuple(group.spec for group in stack for _ in range(group.count))


def slice_layers(stack: LayerStack, first: int, slice_count: int) -> LayerStack:
    """`slice_count` layers of a stack, starting with layer `first`.

    >>> wide, narrow = LayerSpec(None, DenseMlp(4, MlpType.GELU)), LayerSpec(None, DenseMlp(2, MlpType.GELU))
    >>> [group.count for group in slice_layers((LayerGroup(wide, 3), LayerGroup(narrow, 5)), 2, 4)]
    [1, 3]
    """
    return tuple(_slice_groups(stack, first, first + slice_count))


def high_precision_ends(stack: LayerStack, first_count: int, last_count: int) -> LayerStack:
    """A stack whose first and last layers have matmuls in the activation format.

    >>> spec = LayerSpec(None, DenseMlp(4, MlpType.GELU))
    >>> ends = high_precision_ends((LayerGroup(spec, 8),), 1, 2)
    >>> [(group.spec.high_precision, group.count) for group in ends]
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
