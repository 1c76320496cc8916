"""Which attention does a layer have? Softmax attention of queries to keys: its sizes and what follows from them.

Its operators are in `mixers.full_attention` and `mixers.latent_attention`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Final

from clustersim.common.errors import InputError
from clustersim.common.units import Flop
from clustersim.model.lora import Projection
from clustersim.model.mixer import AttentionFlopConvention, ContextRule, Mixer, ShardedSize


class QkNorm(Enum):
    """PER_HEAD normalizes each query and key head (Qwen 3, Gemma 3), ALL_HEADS all of them as one (OLMo 2)."""

    PER_HEAD = "heads"
    ALL_HEADS = "whole"


def mean_attended_keys(keys: int, window: int | None) -> float:
    """Mean number of keys that a causal query attends to, over as many queries as keys: (keys + 1) / 2.

    With a window of w, w (2 keys - w + 1) / (2 keys): the first w queries attend to 1 to w keys, all others
    to w.
    """
    max_keys = max_attended_keys(keys, window)
    return max_keys * (2 * keys - max_keys + 1) / (2 * keys)


def max_attended_keys(keys: int, window: int | None) -> int:
    """Maximum number of keys that a causal query attends to."""
    return keys if window is None else min(window, keys)


class SoftmaxAttention(Mixer):
    """Attention of `heads` queries to `kv_heads` keys and values by a softmax over the scores."""

    __slots__ = ()
    context_rule: ClassVar[ContextRule] = ContextRule.KV_RING
    is_attention: ClassVar[bool] = True

    if TYPE_CHECKING:  # at run time a dataclass would take an inherited property for a field's default

        @property
        def heads(self) -> int:
            """Number of query heads."""

        @property
        def kv_heads(self) -> int:
            """Number of heads of keys and values."""

        @property
        def head_dim(self) -> int:
            """Dimensions of each head's queries and keys."""

        @property
        def v_head_dim(self) -> int:
            """Dimensions of each head's values."""

        @property
        def window(self) -> int | None:
            """Tokens, itself among them, that a token attends to; None: all before it."""

        @property
        def rotary_percent(self) -> float:
            """Fraction of each head with rotary positions."""

        @property
        def attn_logit_softcapping(self) -> bool:
            """Whether scores are capped by a tanh."""

        @property
        def causal(self) -> bool:
            """Whether a token attends only to those before it."""

        @property
        def qk_norm(self) -> QkNorm | None:
            """How queries and keys are normalized, if they are."""

    def mixing_flops(self, sequence: int, convention: AttentionFlopConvention) -> Flop:
        """Twelve per query width (mean of query and value width) and key that counts for each query."""
        is_full = convention is AttentionFlopConvention.FULL or not self.causal
        key_count = max_attended_keys if is_full else mean_attended_keys
        return 12.0 * (self.heads * (self.head_dim + self.v_head_dim) / 2 * key_count(sequence, self.window))

    def kv_width(self, tp: int) -> int:
        """Elements per token of keys and values on one of tp ranks: at least one head's."""
        return max(1, self.kv_heads // tp) * (self.head_dim + self.v_head_dim)

    def repeated_kv_width(self, tp: int) -> int:
        """Elements per token of keys and values on one of tp ranks, copied for every query head."""
        return self.heads // tp * (self.head_dim + self.v_head_dim)

    def attends_to_all(self, keys: int) -> bool:
        """Whether queries attend to all of `keys` keys before them."""
        return self.causal and (self.window is None or self.window >= keys)

    def exchanged_widths(self, tp: int, ranks: int) -> tuple[int, int]:
        """Elements per token of queries, keys and values, one head of these for each rank at least; and of outputs."""
        heads, kv_heads = self.heads // tp, max(1, self.kv_heads // tp, ranks)
        return heads * self.head_dim + kv_heads * (self.head_dim + self.v_head_dim), heads * self.v_head_dim

    @property
    def sharded_sizes(self) -> tuple[ShardedSize, ...]:
        """Heads, and key-value heads, of which each rank has at least one."""
        return ShardedSize("heads", self.heads), ShardedSize("kv_heads", self.kv_heads, replicable=True)


class SelectedKeysAttention(SoftmaxAttention):
    """Attention whose queries attend to some keys before them, wherever these are; else as `unselected`."""

    __slots__ = ()
    saves_by_selection: ClassVar[bool] = True

    if TYPE_CHECKING:

        @property
        def unselected(self) -> SoftmaxAttention:
            """The same heads' attention to all keys."""

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.unselected.heads

    @property
    def kv_heads(self) -> int:
        """Number of heads of keys and values."""
        return self.unselected.kv_heads

    @property
    def head_dim(self) -> int:
        """Dimensions of each head's queries and keys."""
        return self.unselected.head_dim

    @property
    def v_head_dim(self) -> int:
        """Dimensions of each head's values."""
        return self.unselected.v_head_dim

    @property
    def window(self) -> int | None:
        """None: keys may be anywhere."""
        return None

    @property
    def rotary_percent(self) -> float:
        """Fraction of each head with rotary positions."""
        return self.unselected.rotary_percent

    @property
    def attn_logit_softcapping(self) -> bool:
        """Scores are not capped."""
        return False

    @property
    def causal(self) -> bool:
        """True: keys are selected from those before a token."""
        return True

    @property
    def qk_norm(self) -> QkNorm | None:
        """How queries and keys are normalized, if they are."""
        return self.unselected.qk_norm


@dataclass(frozen=True, slots=True)
class FullAttention(SoftmaxAttention):
    """Multi-head or grouped-query attention.

    head_dim is explicit: it is not hidden / heads in every model. qkv_bias: queries, keys and values have
    biases; qk_norm: how queries and keys are normalized, if they are; window: how many tokens, itself among
    them, a token attends to (None: all before it); rotary_percent: fraction of each head with rotary positions,
    where the model has these (0: none in this layer, NoPE); attn_logit_softcapping: scores are capped by a tanh
    (Gemma 2); attention_sinks: every head has a learned score that takes part in the softmax and weights no
    value (gpt-oss); causal: a token attends to those before it, else to all (encoders, diffusion transformers);
    attention_output_gate: the core's output is multiplied by the sigmoid of a gate, which is projected with the
    queries and as wide as they (Qwen3-Next).
    """

    label: ClassVar[str] = "attention"

    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    qk_norm: QkNorm | None = None
    window: int | None = None
    rotary_percent: float = 1.0
    attn_logit_softcapping: bool = False
    attention_sinks: bool = False
    causal: bool = True
    attention_output_gate: bool = False

    @property
    def v_head_dim(self) -> int:
        """Dimensions of each head's values: those of its queries and keys."""
        return self.head_dim

    @property
    def query_width(self) -> int:
        """Dimensions of all heads' queries."""
        return self.heads * self.head_dim

    @property
    def gate_width(self) -> int:
        """Dimensions of the output gate; 0 without one."""
        return self.query_width if self.attention_output_gate else 0

    @property
    def key_width(self) -> int:
        """Dimensions of all heads' keys, or values."""
        return self.kv_heads * self.head_dim

    def matrix_elements(self, hidden: int) -> int:
        """Queries, keys, values and output, and the output gate."""
        return 2 * hidden * (self.query_width + self.key_width) + hidden * self.gate_width

    def parameter_count(self, hidden: int, *, linear_bias: bool) -> int:
        """Matrices, biases, sinks and the norms of queries and keys."""
        biases = (self.query_width + 2 * self.key_width if self.qkv_bias else 0) + (hidden if linear_bias else 0)
        biases += self.heads if self.attention_sinks else 0
        weights = self.matrix_elements(hidden) + biases
        match self.qk_norm:
            case QkNorm.PER_HEAD:
                return weights + 2 * self.head_dim
            case QkNorm.ALL_HEADS:
                return weights + self.query_width + self.key_width
        return weights

    def projection_sizes(self, hidden: int) -> Mapping[Projection, tuple[int, int]]:
        """Queries, keys, values and output."""
        return {
            Projection.Q: (hidden, self.query_width + self.gate_width),
            Projection.K: (hidden, self.key_width),
            Projection.V: (hidden, self.key_width),
            Projection.O: (self.query_width, hidden),
        }

    def with_changes(self, changes: Mapping[str, Any]) -> "FullAttention":
        """The attention with other values of its fields."""
        return replace(self, **changes)


@dataclass(frozen=True, slots=True)
class LatentAttention(SoftmaxAttention):
    """Multi-head latent attention (MLA): keys and values of all heads come from one latent vector per token.

    DeepSeek-V2, arXiv:2405.04434, section 2.1. q_lora_rank: size of the queries' latent vector (None: queries
    come directly from the input); kv_lora_rank: size of the keys' and values' latent vector; qk_nope_head_dim,
    qk_rope_head_dim: dimensions of each head's queries and keys without and with rotary positions; the second
    are one key shared by all heads; v_head_dim: of each head's values.
    """

    label: ClassVar[str] = "latent attention"

    heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def kv_heads(self) -> int:
        """Every head has its own keys and values."""
        return self.heads

    @property
    def head_dim(self) -> int:
        """Dimensions of each head's queries and keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def window(self) -> int | None:
        """None: a token attends to all before it."""
        return None

    @property
    def qk_norm(self) -> QkNorm | None:
        """None: the latent vectors are normalized, not the heads."""
        return None

    @property
    def causal(self) -> bool:
        """True: a token attends to those before it."""
        return True

    @property
    def rotary_percent(self) -> float:
        """1.0: MLA's rotary split (`qk_rope_head_dim`) takes the place of a fraction of partial rotary positions."""
        return 1.0

    @property
    def attn_logit_softcapping(self) -> bool:
        """Scores are not capped."""
        return False

    @property
    def query_width(self) -> int:
        """Dimensions of all heads' queries."""
        return self.heads * self.head_dim

    @property
    def up_width(self) -> int:
        """Output width of the key/value up projection: all heads' keys without positions, and values."""
        return self.heads * (self.qk_nope_head_dim + self.v_head_dim)

    def matrix_elements(self, hidden: int) -> int:
        """Projections of queries, keys and values, and the output projection."""
        rank = self.q_lora_rank
        queries = hidden * self.query_width if rank is None else rank * (hidden + self.query_width)
        keys_values = hidden * (self.kv_lora_rank + self.qk_rope_head_dim) + self.kv_lora_rank * self.up_width
        return queries + keys_values + self.heads * self.v_head_dim * hidden

    def parameter_count(self, hidden: int, *, linear_bias: bool) -> int:  # noqa: ARG002 - of the protocol
        """Matrices and the norms of the latent vectors; MLA has no biases."""
        return self.matrix_elements(hidden) + (self.q_lora_rank or 0) + self.kv_lora_rank

    def with_changes(self, changes: Mapping[str, Any]) -> "LatentAttention":
        """The attention with another number of heads; raise InputError for dimensions that only full attention has."""
        if unsupported := [key for key in changes if key in _FULL_ATTENTION_ONLY]:
            raise InputError(f"{unsupported[0]}: latent attention has heads of its own dimensions; leave it out")
        return replace(self, **changes)


FULL_ATTENTION_FIELDS: Final = tuple(field.name for field in fields(FullAttention))
_FULL_ATTENTION_ONLY: Final = tuple(name for name in FULL_ATTENTION_FIELDS if name != "heads")
