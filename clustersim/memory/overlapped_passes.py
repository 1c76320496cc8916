"""What do a forward and a backward that are interleaved layer by layer need together?

Forward layer i runs concurrently with backward layer L-1-i, which is freed before the next two run; the
embedding's forward is first, with the head's backward, and the head's forward is last, with the embedding's
backward. Layers that only one of the two has follow. So what the forward saves takes the place of what the
backward frees.
Reference: Megatron-LM, `TransformerModelChunkSchedulePlan.run` and `TransformerLayerSchedulePlan.release_state`
in megatron/core/models/common/model_chunk_schedule_plan.py.
"""

from collections.abc import Iterator
from itertools import zip_longest

from clustersim.common.units import Bytes
from clustersim.memory.activations import ActivationKind, Activations, saved_key
from clustersim.parallel.layer_partition import PipelineStage


def overlapped_peak(activations: Activations, forward: PipelineStage, backward: PipelineStage) -> Bytes:
    """Peak bytes of the two, beyond what is held before they begin (the backward's activations included)."""
    embedding, *forward_layers, head = _saved_sizes(activations, forward)
    backward_embedding, *backward_layers, backward_head = _saved_sizes(activations, backward)
    *layer_transients, embedding_transient, head_transient = _transient_sizes(activations, backward)
    layers = zip_longest(forward_layers, reversed(backward_layers), reversed(layer_transients), fillvalue=0.0)
    steps = (
        (embedding, backward_head, head_transient),
        *layers,
        (head, backward_embedding, embedding_transient),
    )
    peak = held = 0.0
    for saved, freed, transient in steps:
        peak = max(peak, held + saved + transient)
        held += saved - freed
    return peak


def _saved_sizes(activations: Activations, stage: PipelineStage) -> Iterator[Bytes]:
    """Bytes that a microbatch saves of the embeddings, of each layer in order, and of the head and the output."""
    embedding_count = stage.has_embedding + stage.mtp_layer_count
    yield embedding_count * activations.bytes_of(ActivationKind.EMBEDDING_SAVED)
    for run in activations.plan.layer_runs(stage):
        size = 0.0 if run.offloaded else activations.layer_bytes_of(run)
        yield from [size] * run.layers.count
    if stage.has_head:
        yield activations.bytes_of(ActivationKind.HEAD_SAVED)
    else:
        sent_count = activations.plan.sent_activation_count(stage.index)
        yield sent_count * activations.bytes_of(ActivationKind.STAGE_OUTPUT)


def _transient_sizes(activations: Activations, stage: PipelineStage) -> Iterator[Bytes]:
    """Temporary bytes of a backward: of each layer in order, of the embeddings and of the head."""
    for run in activations.plan.layer_runs(stage):
        spec = run.layers.spec
        restored = activations.bytes_of(ActivationKind.LAYER_FULL, spec) - activations.bytes_of(*saved_key(run))
        gradients = (ActivationKind.LAYER_GRADIENTS, ActivationKind.LAYER_WEIGHT_GRADIENT)
        size = restored + sum(activations.bytes_of(kind, spec) for kind in gradients)
        yield from [size] * run.layers.count
    has_embedding = stage.has_embedding or stage.mtp_layer_count
    yield activations.bytes_of(ActivationKind.EMBEDDING_WEIGHT_GRADIENT) if has_embedding else 0.0
    if not stage.has_head:
        yield 0.0
        return
    loss, cast, weight = map(
        activations.bytes_of,
        (ActivationKind.LOSS_GRADIENT, ActivationKind.CAST_GRADIENT, ActivationKind.HEAD_WEIGHT_GRADIENT),
    )
    yield max(0.0, loss, cast + weight)
