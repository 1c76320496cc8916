"""Why are settings impossible? The sentences of `scenario.checks`, each over the settings that it depends on.

What a remedy says beside is as in a scenario that is plain otherwise: to a batch that is too small, that is always a
larger one.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

from clustersim.analysis.exploration import Table
from clustersim.planning.explore_space import Space
from clustersim.scenario import Scenario, checks

_Rules = tuple[tuple[tuple[str, ...], tuple[Callable[[Scenario], Iterator[str]], ...]], ...]
_FIRST: Final[_Rules] = ((("gpus", "tp", "cp", "pp"), (checks.check_degrees,)),)
_PARTS: Final[_Rules] = (
    (("model", "tp"), (checks.check_heads, checks.check_widths)),
    (("model", "pp", "chunks", "room"), (checks.check_layers,)),
    (("model", "pp", "chunks", "recompute"), (checks.check_recomputed,)),
    (("dp", "microbatch", "batch"), (checks.check_batch,)),
    (("stages", "microbatches", "batch"), (checks.check_batch,)),
)
_LAST: Final[_Rules] = (
    (("model", "sequence"), (checks.check_sequence,)),
    (("sequence", "cp", "tp", "split"), (checks.check_sequence,)),
)


def rules(space: Space, refused: Table) -> tuple[tuple[Table, ...], ...]:
    """Tables of sentences, in groups, of which the first that says anything is told. refused: those of schedules."""
    first, parts, last = (tuple(_table(space, *rule) for rule in each) for each in (_FIRST, _PARTS, _LAST))
    return first, (*parts, refused, *last)


def _table(space: Space, keys: tuple[str, ...], check: tuple[Callable[[Scenario], Iterator[str]], ...]) -> Table:
    def ask(**settings: Any) -> list[str] | None:
        whole = settings.get("room", 0) % settings.get("pp", 1) == 0
        if not whole or settings.get("batch", 0) % settings.get("microbatches", 1):
            return None  # which cannot be, or is said of the degrees
        there = space.at(**settings)
        return [problem for each in check for problem in each(there)] or None

    return space.table(ask, *keys)
