"""What does the explorer page leave out of a scenario whose memory it would else change?

Its tables know stages by their layers, embedding and head; rings of keys and values between context-parallel ranks,
which one kernel of attention waits for; one optimizer for all weights, all of which are trained. MTP layers, which add
an embedding and logits to the stage that holds them, other kinds of context parallelism, rings with a kernel for each
block, MLPs on tiles, optimizers of matrices, encoders of images and frozen towers are not in them, so the page draws
the scenario without these, and says what they take.
"""

from collections.abc import Iterator
from dataclasses import replace

from clustersim.common.errors import InputError
from clustersim.common.units import format_bytes
from clustersim.model.gradient_flow import ModelGradients
from clustersim.model.optimizers import MatrixOptimizer
from clustersim.model.overheads import RingAttention
from clustersim.parallel.attention_exchange import ring_blocks
from clustersim.parallel.context_parallel import ContextParallelKind
from clustersim.parallel.layer_partition import BehindEncoder
from clustersim.results.memory_check import fits_in_memory, memory_timelines
from clustersim.scenario import Scenario
from clustersim.scenario.validation_rules.consistency import check_layers


def drawn_scenario(scenario: Scenario) -> Scenario:
    """The scenario as it is drawn: without MTP layers and encoder, with rings in one kernel, one optimizer for all.

    Raise InputError if a pipeline stage holds nothing then.
    """
    drawn, optimizer = _without_encoder(without_mtp_layers(scenario)), scenario.training.optimizer
    if scenario.layout.cp_kind is not ContextParallelKind.RING:
        drawn = replace(drawn, layout=replace(drawn.layout, cp_kind=ContextParallelKind.RING, cp_inner=None))
    if has_block_ring(scenario):
        overheads = replace(drawn.training.overheads, ring_attention=RingAttention.ONE_KERNEL)
        drawn = replace(drawn, training=replace(drawn.training, overheads=overheads))
    if drawn.training.tiled_mlp is not None:
        drawn = replace(drawn, training=replace(drawn.training, tiled_mlp=None))
    if isinstance(optimizer, MatrixOptimizer):
        drawn = replace(drawn, training=replace(drawn.training, optimizer=optimizer.scalar))
    return drawn


def has_block_ring(scenario: Scenario) -> bool:
    """Whether attention runs a kernel for each block of keys of a ring."""
    return ring_blocks(scenario.layout, scenario.training) > 1


def _without_encoder(scenario: Scenario) -> Scenario:
    """The scenario's language model alone, all of which is trained, with a stage on every pipeline rank.

    Without GPUs that only the encoder has.
    """
    if scenario.model.encoder is None:
        return scenario
    layout, cluster = replace(scenario.layout, encoder_tp=None, encoder_dp=None), scenario.cluster
    if scenario.layout.encoder_ranks:
        layout = replace(layout, pp=layout.pp - 1)
        cluster = replace(cluster, gpu_count=layout.world_size)
    if isinstance(layout.layers_per_stage, BehindEncoder):
        layout = replace(layout, layers_per_stage=None)
    model = replace(scenario.model, encoder=None, gradients=ModelGradients())
    return replace(scenario, model=model, layout=layout, cluster=cluster)


def without_mtp_layers(scenario: Scenario) -> Scenario:
    """The scenario without MTP layers; partitioned evenly where its own partition is only for them.

    Raise InputError if a pipeline stage holds nothing else.
    """
    if not scenario.model.mtp_layers:
        return scenario
    own_partition = replace(scenario, model=replace(scenario.model, mtp_layers=0))
    even_partition = replace(own_partition, layout=replace(scenario.layout, layers_per_stage=None))
    for stripped in (own_partition, even_partition):
        if not [*check_layers(stripped)]:
            return stripped
    raise InputError(
        f"model.mtp_layers: {scenario.model.mtp_layers}, without which a pipeline stage holds nothing, and the "
        "explorer's page knows no such layers; run and check do, or set it to 0"
    )


def describe_omissions(scenario: Scenario, drawn: Scenario) -> str | None:
    """A sentence on what the page leaves out, with its memory; None: nothing. drawn: the scenario as it is drawn."""
    omitted = [*_omitted(scenario)]
    if not omitted:
        return None
    with_all, without = memory_timelines(scenario), memory_timelines(drawn)
    with_all = with_all[len(with_all) - len(without) :]  # an encoder with GPUs of its own is the first pipeline rank
    changes = [abs(ledger.peak - drawn_ledger.peak) for ledger, drawn_ledger in zip(with_all, without, strict=True)]
    rank, needed = changes.index(max(changes)), max(ledger.peak for ledger in with_all)
    them = "it" if len(omitted) == 1 and scenario.model.mtp_layers < 2 else "them"
    return (
        f"Not drawn: {' and '.join(omitted)}, with which pipeline "
        f"rank {rank} of the scenario needs {format_bytes(with_all[rank].peak)} at its peak instead of "
        f"{format_bytes(without[rank].peak)}, and the most loaded GPU {format_bytes(needed)}, which "
        f"{'fits' if fits_in_memory(scenario) else 'does not fit'}; simulated steps have {them}."
    )


def _omitted(scenario: Scenario) -> Iterator[str]:
    """What is left out."""
    if count := scenario.model.mtp_layers:
        layers = "layer" if count == 1 else "layers"
        yield f"the {count} multi-token prediction (MTP) {layers} of {scenario.model.name}"
    if (encoder := scenario.model.encoder) is not None:
        yield f"the encoder {encoder.model.name} with its projector"
    if scenario.model.gradients.has_frozen:
        yield f"that {scenario.model.name} is frozen"
    if (kind := scenario.layout.cp_kind) is not ContextParallelKind.RING:
        yield f"layout.cp_kind {kind.value} (drawn as ring)"
    elif has_block_ring(scenario):
        yield "training.overheads.ring_attention blocks (drawn as one_kernel)"
    if scenario.training.tiled_mlp is not None:
        yield "MLPs on tiles (training.tiled_mlp)"
    if isinstance(optimizer := scenario.training.optimizer, MatrixOptimizer):
        yield f"the optimizer {optimizer.name} (drawn as {optimizer.scalar.value} of all weights)"
