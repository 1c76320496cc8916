"""Which layers does each pipeline stage hold?

Virtual stages are numbered through the model; each is a slice of its stack of layers. Layers are partitioned
evenly; where they do not divide, the stages that also hold the embedding and the logits get fewer layers
first, the last before the first, then their neighbours inwards (Llama 3 removed one layer each from the first
and the last stage, section 3.3.2). Or they are partitioned by one of Megatron-LM's rules
(megatron/core/transformer/transformer_block.py, `get_num_layers_to_build`): the embedding or the logits count
as a layer, or the first or the last pipeline rank has a given number of layers. Megatron's pipeline layout
strings are read by `pipeline_layout_string`. Layers that differ may be balanced by their FLOP (`BalancedFlops`).
An encoder of images in front of the model runs on the first stage, or has that stage, and so ranks, of its own
(`BehindEncoder`; Megatron-LM's encoder_pipeline_model_parallel_size).

Multi-token prediction (MTP) layers are all on one stage behind the stack's last layer: on the last stage, or
where a layout string has them. Every later stage is sent each MTP layer's output in addition to the stack's
own hidden states (Megatron-LM, megatron/core/transformer/multi_token_prediction.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Final

from clustersim.common.errors import InputError
from clustersim.common.units import Flop
from clustersim.model.layer_stack import LayerStack, layer_count, slice_layers
from clustersim.program.placement import Placement, looped_placement

_BISECTIONS: Final = 100  # of a limit of FLOP, until float64 has no number between its bounds
NO_MTP_LAYERS: Final[Mapping[int, LayerStack]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """Contents of one virtual stage. has_encoder: it runs the encoder in front of the model, before its layers."""

    index: int
    stack: LayerStack
    has_embedding: bool
    has_head: bool
    has_encoder: bool = False

    @property
    def layer_count(self) -> int:
        """Number of layers, MTP layers included."""
        return layer_count(self.stack)

    @property
    def stack_and_mtp(self) -> tuple[LayerStack, LayerStack]:
        """Its layers of the model's stack, and its MTP layers, which follow them."""
        return tuple(run for run in self.stack if not run.spec.is_mtp), tuple(
            run for run in self.stack if run.spec.is_mtp
        )

    @property
    def mtp_layer_count(self) -> int:
        """Number of its MTP layers."""
        return layer_count(self.stack_and_mtp[1])


@dataclass(frozen=True, slots=True)
class AccountForEnds:
    """Embedding or logits count as a layer of their stage, and all stages have equally many.

    Megatron-LM's account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split.
    """

    embedding: bool = False
    head: bool = False

    def layer_counts(self, layers: int, placement: Placement) -> tuple[int, ...]:
        """Layers of each stage; raise InputError where they do not divide evenly."""
        stages = len(placement.stage_ranks)
        slots = layers + self.embedding + self.head
        if slots % stages:
            slot_labels = [f"{layers} layers", *["the embedding"] * self.embedding, *["the head"] * self.head]
            raise InputError(f"{' and '.join(slot_labels)} are {slots} slots, which {stages} stages do not divide")
        counts = [slots // stages] * stages
        counts[0] -= self.embedding
        counts[-1] -= self.head
        return tuple(counts)


@dataclass(frozen=True, slots=True)
class EndRankLayers:
    """Number of layers of the first and the last pipeline rank, over all their chunks.

    The others share the rest equally.

    Megatron-LM's num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage.
    """

    first: int | None = None
    last: int | None = None

    def layer_counts(self, layers: int, placement: Placement) -> tuple[int, ...]:
        """Layers of each stage; raise InputError where they do not divide."""
        rank_layers = self._rank_layer_counts(layers, placement.pipeline_size)
        chunk_layers = [
            divmod(rank_layers[rank], len(placement.stages_on_rank(rank))) for rank in placement.stage_ranks
        ]
        if any(remainder for _, remainder in chunk_layers):
            raise InputError(
                f"{rank_layers} layers of the pipeline ranks do not divide into {placement.max_chunks} chunks each"
            )
        return tuple(stage_layers for stage_layers, _ in chunk_layers)

    def _rank_layer_counts(self, layers: int, ranks: int) -> list[int]:
        """Layers of each pipeline rank."""
        end_layers = {
            rank: rank_layers
            for rank, rank_layers in ((0, self.first), (ranks - 1, self.last))
            if rank_layers is not None
        }
        remaining, other_ranks = layers - sum(end_layers.values()), ranks - len(end_layers)
        if remaining < 0 or (remaining and not other_ranks) or (other_ranks and remaining % other_ranks):
            end_labels = " and ".join(f"{rank_layers} on rank {rank}" for rank, rank_layers in end_layers.items())
            raise InputError(f"{end_labels} {_describe_remainder(remaining, layers, other_ranks)}")
        return [end_layers.get(rank, remaining // other_ranks if other_ranks else 0) for rank in range(ranks)]


def _describe_remainder(remaining: int, layers: int, other_ranks: int) -> str:
    """Reason why these layers are too few, or do not divide among the ranks that are not at the ends."""
    if remaining < 0:
        return f"are more than the {layers} layers"
    reason = (
        f"which {other_ranks} other pipeline ranks do not share"
        if other_ranks
        else "and there is no other pipeline rank"
    )
    return f"leave {remaining} of {layers} layers, {reason}"


@dataclass(frozen=True, slots=True)
class BalancedFlops:
    """Stages whose largest model FLOP are as few as possible, for layers that differ (hybrids).

    layer_flops: of one token in each layer, in model order; head_flops: in the logits; encoder_flops: of an encoder,
    on the first stage. Of all such partitions the one whose first stages, which hold the most microbatches, have the
    fewest layers.
    """

    layer_flops: tuple[Flop, ...]
    head_flops: Flop
    encoder_flops: Flop = 0.0

    def layer_counts(self, layers: int, placement: Placement) -> tuple[int, ...]:
        """Layers of each stage, at least one each; raise InputError for more stages than layers."""
        stages = len(placement.stage_ranks)
        if stages > layers:
            raise InputError(f"{layers} layers are too few for {stages} stages")
        low, high = 0.0, sum(self.layer_flops) + self.head_flops + self.encoder_flops
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (low, middle) if self._pack(stages, middle) else (middle, high)
        counts = self._pack(stages, high)
        return counts or partition_evenly(layers, stages)

    def _pack(self, stages: int, limit: Flop) -> tuple[int, ...] | None:
        """Layers of each stage, as many as the limit allows from the last stage on; None if they do not fit."""
        remaining, counts, extra = list(self.layer_flops), list[int](), self.head_flops
        for earlier_stages in range(stages - 1, -1, -1):
            first_flops = self.encoder_flops if earlier_stages == 0 else 0.0
            count, flops, extra = 0, extra + first_flops, 0.0
            while len(remaining) > earlier_stages and flops + remaining[-1] <= limit:
                flops, count = flops + remaining.pop(), count + 1
            if count == 0:
                return None
            counts.append(count)
        return None if remaining else tuple(reversed(counts))


@dataclass(frozen=True, slots=True)
class PipelineLayoutString:
    """A parsed Megatron pipeline layout string: layers and MTP layers of each stage."""

    layer_counts: tuple[int, ...]
    mtp_layer_counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BehindEncoder:
    """An encoder alone has the first stage; partition: of the layers over all others, one on each pipeline rank."""

    partition: "LayerPartition"

    def layer_counts(self, layers: int, placement: Placement) -> tuple[int, ...]:
        """Layers of each stage."""
        return 0, *partition_layers(self.partition, layers, looped_placement(placement.pipeline_size - 1))


LayerPartition = (
    tuple[int, ...] | PipelineLayoutString | AccountForEnds | EndRankLayers | BalancedFlops | BehindEncoder | None
)
"""Layers of each stage, explicit or by a rule; None: evenly."""


def evened(partition: LayerPartition) -> LayerPartition:
    """An even partition, behind an encoder if the partition is."""
    return BehindEncoder(None) if isinstance(partition, BehindEncoder) else None


def first_model_stage(partition: LayerPartition) -> int:
    """Index of the stage of the embedding: the first one, or that behind an encoder's own."""
    return 1 if isinstance(partition, BehindEncoder) else 0


def partition_layers(partition: LayerPartition, layers: int, placement: Placement) -> tuple[int, ...]:
    """Layers of each virtual stage, in model order; raise InputError where a rule does not fit."""
    match partition:
        case None:
            return partition_evenly(layers, len(placement.stage_ranks))
        case tuple():
            return partition
        case PipelineLayoutString(layer_counts=layer_counts):
            return layer_counts
    return partition.layer_counts(layers, placement)


def mtp_stage_index(partition: LayerPartition, stages: int) -> int:
    """Index of the stage, out of `build_stages`, that holds the MTP layers."""
    match partition:
        case PipelineLayoutString(mtp_layer_counts=mtp_layer_counts):
            return next((stage for stage, mtp_count in enumerate(mtp_layer_counts) if mtp_count), stages - 1)
        case BehindEncoder(inner):
            return 1 + mtp_stage_index(inner, stages - 1)
    return stages - 1


def partition_evenly(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each virtual stage in model order, partitioned evenly.

    >>> partition_evenly(126, 16)
    (7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 7)
    """
    max_layers = -(-layers // stages)
    counts = [max_layers] * stages
    for excess in range(max_layers * stages - layers):
        counts[-1 - excess // 2 if excess % 2 == 0 else excess // 2] -= 1
    return tuple(counts)


def build_stages(
    stack: LayerStack,
    counts: Sequence[int],
    mtp_layers: Mapping[int, LayerStack] = NO_MTP_LAYERS,
    first_stage: int = 0,
) -> tuple[PipelineStage, ...]:
    """Virtual stages with the embedding on the first and final norm, logits and loss on the last.

    counts: layers of each stage; mtp_layers: MTP layers by stage; first_stage: index of the embedding's.
    """
    last, first_layers = len(counts) - 1, accumulate(counts, initial=0)
    return tuple(
        PipelineStage(
            index,
            (*slice_layers(stack, first, layers), *mtp_layers.get(index, ())),
            index == first_stage,
            index == last,
        )
        for index, (first, layers) in enumerate(zip(first_layers, counts, strict=False))
    )
