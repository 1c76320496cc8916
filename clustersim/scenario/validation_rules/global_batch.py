"""Which global batches are legal and still likely a mistake? Units that were taken for others, one sentence each."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from clustersim.scenario.config.global_batch import parse_token_batch
from clustersim.scenario.resolved import ResolvedScenario

MAX_PLAUSIBLE_TOKENS: Final = 1e9
"""Tokens per step above which a batch is likely in tokens by mistake; published ones have up to some 10^8."""


def global_batch_warnings(scenario: ResolvedScenario, raw_mapping: Mapping[str, Any]) -> Iterator[str]:
    """Warnings about the unit of the global batch. raw_mapping: the scenario file's content."""
    batch, sequence = scenario.training.global_batch, scenario.training.sequence
    stated = raw_mapping.get("training", {}).get("global_batch", batch)
    tokens = parse_token_batch(stated)
    if tokens is None:
        if batch * sequence > MAX_PLAUSIBLE_TOKENS:
            yield (
                f"training.global_batch: {batch:,} sequences of {sequence:,} are {batch * sequence:,} tokens a step; "
                f"were {batch} tokens meant? A batch in tokens has its unit"
            )
    elif tokens.prefix and not tokens.is_binary and tokens.binary_tokens == batch * sequence:
        yield (
            f"training.global_batch: {stated} are taken as {batch * sequence:,}, {batch:,} sequences of {sequence:,}; "
            f"write {batch} where that is meant"
        )
