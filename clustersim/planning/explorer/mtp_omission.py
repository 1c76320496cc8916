"""What does the explorer page leave out of a model with multi-token prediction (MTP) layers?

Its tables know stages by their layers, embedding and head. MTP layers, which add an embedding and logits to the stage
that holds them, are not in them, so that the page needs the scenario without MTP layers, and says what those take.
"""

from dataclasses import replace

from clustersim.common.errors import InputError
from clustersim.common.units import format_bytes
from clustersim.results.memory_check import fits_in_memory, memory_timelines
from clustersim.scenario import Scenario
from clustersim.scenario.validation_rules.consistency import check_layers


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


def describe_mtp_omission(scenario: Scenario, drawn: Scenario) -> str:
    """A sentence on what the page leaves out, with its memory. drawn: the scenario without MTP layers."""
    count = scenario.model.mtp_layers
    with_mtp, without = memory_timelines(scenario), memory_timelines(drawn)
    added = [ledger.peak - drawn_ledger.peak for ledger, drawn_ledger in zip(with_mtp, without, strict=True)]
    rank, needed = added.index(max(added)), max(ledger.peak for ledger in with_mtp)
    layers, them = ("layer", "it") if count == 1 else ("layers", "them")
    return (
        f"Not drawn: the {count} multi-token prediction (MTP) {layers} of {scenario.model.name}, with which pipeline "
        f"rank {rank} of the scenario needs {format_bytes(with_mtp[rank].peak)} at its peak instead of "
        f"{format_bytes(without[rank].peak)}, and the fullest GPU {format_bytes(needed)}, which "
        f"{'fits' if fits_in_memory(scenario) else 'does not fit'}; simulated steps have {them}."
    )
