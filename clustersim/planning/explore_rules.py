"""Why are settings impossible? The sentences of `scenario.checks`, each over the settings that it depends on.

What a remedy says beside is as in a scenario that is plain otherwise: to a batch that is too small, that is always a
larger one.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

from clustersim.analysis.exploration import Table
from clustersim.planning.explore_space import Space
from clustersim.scenario import Scenario, checks

Check = Callable[[Scenario], Iterator[str]]
_FIRST: Final = ((("gpus", "tp", "cp", "pp"), "", (checks.check_degrees,)),)
_PARTS: Final = (
    (("model", "tp"), "", (checks.check_heads, checks.check_widths)),
    (("model", "pp", "chunks"), "room", (checks.check_layers,)),
    (("model", "pp", "chunks", "recompute"), "", (checks.check_recomputed,)),
    (("dp", "microbatch", "batch"), "", (checks.check_batch,)),
    (("stages", "microbatches"), "batch", (checks.check_batch,)),
)
_LAST: Final = (
    (("model", "sequence"), "", (checks.check_sequence,)),
    (("sequence", "cp", "tp", "split"), "", (checks.check_sequence,)),
    (("model", "tp"), "", (checks.check_adapters,)),
    (("cp", "dp", "zero"), "", (checks.check_shards,)),
    (("pp", "zero"), "", (checks.check_secondary,)),
)
"""(settings that a rule depends on, one more that its sentence names, the rule)"""


def rules(space: Space, refused: Table) -> tuple[tuple[Table, ...], ...]:
    """Tables of sentences, in groups, of which the first that says anything is told. refused: those of schedules."""
    first, parts, last = (tuple(_table(space, *rule) for rule in each) for each in (_FIRST, _PARTS, _LAST))
    return first, (*parts, refused, *last)


def _table(space: Space, keys: tuple[str, ...], named: str, check: tuple[Check, ...]) -> Table:
    def said(**settings: Any) -> list[str] | None:
        there = space.at(**settings)
        return [problem for each in check for problem in each(there)] or None

    def naming(**settings: Any) -> list[str] | None:
        whole = settings.get("room", 0) % settings.get("pp", 1) == 0  # else the degrees are wrong
        reached = settings.get("batch", 0) % settings.get("microbatches", 1) == 0
        return said(**settings) if whole and reached and wrong.answer(settings) else None

    wrong = space.table(said, *keys)
    return space.table(naming, *keys, named) if named else wrong
