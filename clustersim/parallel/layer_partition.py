"""Which layers does each pipeline stage hold?

Virtual stages are numbered through the model; each is a slice of its stack of layers. Layers are dealt evenly; where
they do not divide, the stages that also hold the embedding and the logits give up layers first, the last before the
first, then their neighbours inwards (Llama 3 removed one layer each from the first and the last stage, section 3.3.2).
Or they are dealt by one of Megatron-LM's rules (megatron/core/transformer/transformer_block.py,
`get_num_layers_to_build`): the embedding or the logits count as a layer, or the first or the last pipeline rank has
layers of its own number. Megatron's layout strings are read by `pipeline_layout_string`.

Layers that predict further tokens are all on one stage behind the stack's last layer: on the last, or where a layout
string has them. Every stage behind theirs is sent what each of them made beside the stack's own hidden states
(Megatron-LM, megatron/core/transformer/multi_token_prediction.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Final

from clustersim.common.errors import InputError
from clustersim.model.layer_stack import Stack, count, cut
from clustersim.program.placement import Placement

NOWHERE: Final[Mapping[int, Stack]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Stage:
    """Contents of one virtual stage."""

    number: int
    stack: Stack
    embedding: bool
    head: bool

    @property
    def layers(self) -> int:
        """How many layers it holds."""
        return count(self.stack)

    @property
    def parts(self) -> tuple[Stack, Stack]:
        """Its layers of the model's stack, and those that predict further tokens, which come behind them."""
        return tuple(run for run in self.stack if not run.spec.ahead), tuple(
            run for run in self.stack if run.spec.ahead
        )

    @property
    def ahead(self) -> int:
        """How many of its layers predict further tokens."""
        return count(self.parts[1])


@dataclass(frozen=True, slots=True)
class Counted:
    """Embedding or logits count as a layer of their stage, and all stages have as many.

    Megatron-LM's account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split.
    """

    embedding: bool = False
    head: bool = False

    def dealt(self, layers: int, placement: Placement) -> tuple[int, ...]:
        """Layers of each stage; raise InputError where they are not equal."""
        stages = len(placement.stage_ranks)
        slots = layers + self.embedding + self.head
        if slots % stages:
            parts = [f"{layers} layers", *["the embedding"] * self.embedding, *["the head"] * self.head]
            raise InputError(f"{' and '.join(parts)} are {slots} slots, which {stages} stages do not divide")
        counts = [slots // stages] * stages
        counts[0] -= self.embedding
        counts[-1] -= self.head
        return tuple(counts)


@dataclass(frozen=True, slots=True)
class Ends:
    """How many layers the first and the last pipeline rank have, in all their chunks; the others have equal shares.

    Megatron-LM's num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage.
    """

    first: int | None = None
    last: int | None = None

    def dealt(self, layers: int, placement: Placement) -> tuple[int, ...]:
        """Layers of each stage; raise InputError where they do not divide."""
        shares = self._shares(layers, placement.pipeline_size)
        found = [divmod(shares[rank], len(placement.stages_on_rank(rank))) for rank in placement.stage_ranks]
        if any(rest for _, rest in found):
            raise InputError(
                f"{shares} layers of the pipeline ranks do not divide into {placement.max_chunks} chunks each"
            )
        return tuple(item for item, _ in found)

    def _shares(self, layers: int, ranks: int) -> list[int]:
        """Layers of each pipeline rank."""
        own = {rank: many for rank, many in ((0, self.first), (ranks - 1, self.last)) if many is not None}
        left, others = layers - sum(own.values()), ranks - len(own)
        if left < 0 or (left and not others) or (others and left % others):
            said = " and ".join(f"{many} on rank {rank}" for rank, many in own.items())
            raise InputError(f"{said} {_left_over(left, layers, others)}")
        return [own.get(rank, left // others if others else 0) for rank in range(ranks)]


def _left_over(left: int, layers: int, others: int) -> str:
    """Why so many layers are too few, or do not divide among the ranks that are not at the ends."""
    if left < 0:
        return f"are more than the {layers} layers"
    shared = f"which {others} other pipeline ranks do not share" if others else "and there is no other pipeline rank"
    return f"leave {left} of {layers} layers, {shared}"


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a layout string says: the model's layers of each stage, and those that predict further tokens."""

    layers: tuple[int, ...]
    ahead: tuple[int, ...]


Split = tuple[int, ...] | Drawn | Counted | Ends | None
"""Layers of each stage, as they are given or by a rule; None: evenly."""


def dealt(split: Split, layers: int, placement: Placement) -> tuple[int, ...]:
    """Layers of each virtual stage, in model order; raise InputError where a rule has no answer."""
    match split:
        case None:
            return split_layers(layers, len(placement.stage_ranks))
        case tuple():
            return split
        case Drawn(layers=drawn):
            return drawn
    return split.dealt(layers, placement)


def ahead_at(split: Split, stages: int) -> int:
    """The number of the stage, of so many, that layers which predict further tokens are on."""
    match split:
        case Drawn(ahead=drawn):
            return next((stage for stage, many in enumerate(drawn) if many), stages - 1)
    return stages - 1


def split_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each virtual stage, in model order.

    >>> split_layers(126, 16)
    (7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 7)
    """
    most = -(-layers // stages)
    counts = [most] * stages
    for place in range(most * stages - layers):
        counts[-1 - place // 2 if place % 2 == 0 else place // 2] -= 1
    return tuple(counts)


def stages(stack: Stack, counts: Sequence[int], ahead: Mapping[int, Stack] = NOWHERE) -> tuple[Stage, ...]:
    """Virtual stages with the embedding on the first and final norm, logits and loss on the last.

    counts: of layers; ahead: by stage, layers that predict further tokens.
    """
    last, firsts = len(counts) - 1, accumulate(counts, initial=0)
    return tuple(
        Stage(number, (*cut(stack, first, layers), *ahead.get(number, ())), number == 0, number == last)
        for number, (first, layers) in enumerate(zip(firsts, counts, strict=False))
    )
