"""Why are settings impossible? The sentences of `validation_rules.consistency`, each over the settings that it depends on.

What a remedy says beside is as in a scenario that is plain otherwise: to a batch that is too small, that is always a
larger one.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

from clustersim.planning.explorer.settings import Space
from clustersim.results.explorer_tables import Table
from clustersim.scenario import Scenario
from clustersim.scenario.validation_rules import consistency, moe, precision
from clustersim.scenario.validation_rules.recompute import check_mla_recompute

Check = Callable[[Scenario], Iterator[str]]
_FIRST: Final = ((("gpus", "tp", "cp", "pp"), "", (consistency.check_degrees,)),)
_HEADS: Final = ((("model", "tp"), "", (consistency.check_heads, consistency.check_widths)),)
_OF_EXPERTS: Final = (
    (("folded", "ep", "etp"), "", (moe.check_parallel_folding,)),
    (("tp", "split"), "", (moe.check_sequence_parallel,)),
    (("tp", "ep", "etp"), "", (moe.check_expert_sharding,)),
)
_PARTS: Final = (
    (("model", "pp", "chunks"), "room", (consistency.check_layers,)),
    (("model", "pp", "chunks", "recompute"), "", (consistency.check_recompute_layers,)),
    (("model", "recompute"), "", (check_mla_recompute,)),
    (("dp", "microbatch", "batch"), "", (consistency.check_batch,)),
    (("stages", "microbatches"), "batch", (consistency.check_batch,)),
)
_LAST: Final = (
    (("model", "sequence"), "", (consistency.check_sequence,)),
    (("sequence", "cp", "tp", "split"), "", (consistency.check_sequence,)),
    (("model", "tp"), "", (consistency.check_adapters,)),
)
_TOKENS: Final = (("precision", "microbatch", "sequence", "cp"), "", (precision.check_token_block_size,))
_SHARDS: Final = (
    (("cp", "dp", "zero"), "", (consistency.check_shard_size,)),
    (("pp", "zero"), "", (consistency.check_secondary_shards,)),
)
"""(settings that a rule depends on, one more that its sentence names, the rule)"""


def rules(space: Space, refused: Table) -> tuple[tuple[Table, ...], ...]:
    """Tables of sentences, in groups, of which the first that says anything is told. refused: those of schedules."""
    middle = (*_HEADS, *(_OF_EXPERTS if space.mixture else ()), *_PARTS)
    matrices = ("model", "precision", "tp", *(["etp"] if space.mixture else []))
    behind = (*_LAST, (matrices, "", (precision.check_matrix_block_size,)), _TOKENS, *_SHARDS)
    first, parts, last = (tuple(_table(space, *rule) for rule in item) for item in (_FIRST, middle, behind))
    return first, (*parts, refused, *last)


def _table(space: Space, keys: tuple[str, ...], named: str, check: tuple[Check, ...]) -> Table:
    def said(**settings: Any) -> list[str] | None:
        there = space.at(**settings)
        return [problem for item in check for problem in item(there)] or None

    def naming(**settings: Any) -> list[str] | None:
        whole = settings.get("room", 0) % settings.get("pp", 1) == 0  # else the degrees are wrong
        reached = settings.get("batch", 0) % settings.get("microbatches", 1) == 0
        return said(**settings) if whole and reached and wrong.answer(settings) else None

    wrong = space.table(said, *keys)
    return space.table(naming, *keys, named) if named else wrong
