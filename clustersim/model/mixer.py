"""What must a layer's mixer say of itself? The mixer is what exchanges information between the tokens of a sequence.

Attention of any kind, linear attention, a state space: each is a type here, whose operators on one rank are
registered in `mixers.registry`. Everything else that a model, a layout or a page needs to know of it, it says
itself: parameters, model FLOP, sizes that tensor parallelism divides, how a sequence is split over
context-parallel ranks.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from clustersim.common.enums import IdentityEnum
from clustersim.common.units import Flop
from clustersim.model.lora import Projection


class AttentionFlopConvention(Enum):
    """Which keys count for a query of attention."""

    FULL = "all"  # the model-FLOP convention: the full matrix, limited to the window
    CAUSAL = "seen"  # keys that the causal mask leaves, averaged over a sequence


class ContextRule(IdentityEnum):
    """How a mixer's sequence is split over context-parallel ranks.

    KV_RING: keys and values travel a ring (or are gathered); HEAD_EXCHANGE: an all-to-all before the mixing gives
    each rank all tokens of a part of the heads, and another one behind it reverses that (Megatron-Core,
    megatron/core/ssm/mamba_context_parallel.py); STATE_GATHER: every rank scans its own tokens, from the states of all
    ranks before it, which are gathered (LASP-2, arXiv:2502.07563; flash-linear-attention, fla/ops/cp); ALL_KEYS: every
    rank has all keys and values, which are those of another sequence; KEY_GATHER: each rank has queries of its own
    tokens and gathers the keys of all (Megatron-Core's DSA, `cp_comm_type` allgather); NONE: no rule is known.
    """

    KV_RING = "ring"
    HEAD_EXCHANGE = "all_to_all"
    STATE_GATHER = "state_gather"
    ALL_KEYS = "all_keys"
    KEY_GATHER = "key_gather"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class ShardedSize:
    """A size that tensor parallelism splits.

    key: of the scenario file; replicable: a multiple of it may split it, too: each is then held by several ranks
    (key-value heads).
    """

    key: str
    size: int
    replicable: bool = False


class Mixer(ABC):
    """A kind of token mixing with its sizes; subclasses are frozen dataclasses, compared by value."""

    __slots__ = ()
    label: ClassVar[str]
    """what it is called on pages and in traces"""
    context_rule: ClassVar[ContextRule] = ContextRule.NONE
    saves_by_selection: ClassVar[bool] = False
    """whether what it saves depends on how many keys are selected: not proportional to tokens, or pairs of them"""
    reads_first_layer: ClassVar[bool] = False
    """whether it reads what the embedding or the first layer made, besides the residual stream"""
    is_attention: ClassVar[bool] = False
    """whether it is attention, by softmax, within the sequence or to another one, alone"""
    has_indexer: ClassVar[bool] = False
    """whether an indexer, which learns by itself, selects the keys that it attends to"""

    @abstractmethod
    def parameter_count(self, hidden: int, *, linear_bias: bool) -> int:
        """Parameters of one layer's mixer; linear_bias: the output projection has a bias."""

    @abstractmethod
    def matrix_elements(self, hidden: int) -> int:
        """Weights that multiply a token's activations: matrices, without biases, norms and gates' constants."""

    @abstractmethod
    def mixing_flops(self, sequence: int, convention: AttentionFlopConvention) -> Flop:
        """Model FLOP of one token, forward and backward, beyond those of `matrix_elements`."""

    @property
    @abstractmethod
    def sharded_sizes(self) -> tuple[ShardedSize, ...]:
        """Sizes that tensor parallelism splits, which its degree has to divide."""

    def projection_sizes(self, hidden: int) -> Mapping[Projection, tuple[int, int]]:  # noqa: ARG002 - of the protocol
        """The matrices that LoRA adapters know by name, with (inputs, outputs) of each."""
        return {}

    def with_changes(self, changes: Mapping[str, Any]) -> "Mixer":  # noqa: ARG002 - of the protocol
        """The mixer with other dimensions of attention (keys of a scenario's layers); others have none of these."""
        return self
