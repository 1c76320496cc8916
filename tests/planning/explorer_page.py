"""What the explorer page computes with its tables, in as few words: look-ups, products, sums and maxima, no physics.

The page's script does the same (`explorer_model.js`; tests/browser holds it to this).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import mul
from typing import Any

import numpy as np

from clustersim.analysis.exploration import Exploration

ZERO = range(4)


def along(entries: Sequence[Any], number: int) -> Any:
    """The entry of a number, of the last ones' kind beyond the end."""
    if number < len(entries):
        return np.array(entries[number], dtype=float)
    last, before = np.array(entries[-1], dtype=float), np.array(entries[-2], dtype=float)
    return last + (number - len(entries) + 1) * (last - before)


def _limits(stages: Sequence[Mapping[str, Any]], first: float | None, others: float | None) -> list[float]:
    """Of each stage how much may wait; None: all of it."""
    limits = (first if stage["embedding"] else others for stage in stages)
    return [math.inf if limit is None else limit for limit in limits]


@dataclass(frozen=True)
class Page:
    """The tables, and what a reader sees of them."""

    exploration: Exploration

    def settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings with those that follow."""
        tables = self.exploration.tables
        found = {**settings, "chunks": tables.chunks.answer(settings)}
        for name, factors, divisors in tables.derived:
            over, under = (math.prod(found[key] for key in keys) for keys in (factors, divisors))
            found[name] = over // under if over % under == 0 else over / under
        return found | {name: table.answer(found) for name, table in tables.flags.items()}

    def problems(self, settings: Mapping[str, Any]) -> list[str]:
        """Why settings are impossible."""
        found = self.settings(settings)
        groups = (
            [line for table in group for line in table.answer(found) or []] for group in self.exploration.tables.rules
        )
        return next(filter(None, groups), [])

    def ranks(self, found: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
        """Settings and contents of each stage of each pipeline rank."""
        names = ("first", "layers", "embedding", "head")
        placed = self.exploration.tables.stages.answer(found)
        return [[{**found, **dict(zip(names, each, strict=True))} for each in rank] for rank in placed]

    def row(self, name: str, stage: Mapping[str, Any]) -> Any:
        """Numbers of parts of a stage."""
        return along(self.exploration.tables.rows[name].answer(stage), stage["layers"])

    def sizes(self, found: Mapping[str, Any]) -> Any:
        """Bytes of every part."""
        features = [found[name] for name in self.exploration.tables.features]
        return np.array(self.exploration.tables.sizes.answer(found)) @ features

    def memory(self, settings: Mapping[str, Any]) -> Iterator[dict[str, float]]:
        """Bytes by use of each pipeline rank at its fullest moment."""
        tables, found = self.exploration.tables, self.settings(settings)
        sharing, sizes = tables.sharing.answer(found), self.sizes(found)
        held = tables.schedules.answer(found)["held"]
        for stages, moments in zip(self.ranks(found), held, strict=True):
            rows = [self.row("parameters", stage) * sizes for stage in stages]
            counts = np.array([[row[list(columns)].sum() for columns in tables.groups] for row in rows])
            whole = {**found, "gathers": sharing["gathers"]}
            whole |= {end: any(stage[end] for stage in stages) for end in ("embedding", "head")}
            uses = {use: float(counts.sum(axis=0) @ size) for use, size in sharing["resident"].items()}
            uses["gathered parameters"] = float(
                along(tables.gathered.answer(whole), sum(each["layers"] for each in stages))
            )
            messages = tables.receives.answer(found) * sizes[tables.columns.index("message")]
            uses["messages and buckets"] = messages + sum(
                max(
                    min(limit, each * own)
                    for limit, own in zip(_limits(stages, first, others), counts[:, group], strict=True)
                )
                for group, (first, others, each) in enumerate(sharing["bucket"])
            )
            uses["workspaces"] = tables.workspace
            uses["communication buffers"] = sum(table.answer(found) for table in tables.buffers)
            uses["driver context"] = tables.context
            uses["activations"] = self.activations(stages, moments, sizes * sharing["there"])
            uses["fragmentation"] = sum(tables.fragmentation[use] * size for use, size in uses.items())
            yield uses

    def activations(self, stages: Sequence[Mapping[str, Any]], moments: Sequence[Sequence[int]], sizes: Any) -> float:
        """Bytes at the fullest of a pipeline rank's moments."""
        kept = [float(self.row("kept", stage) @ sizes) for stage in stages]
        passing = [max([0.0, *(row @ sizes for row in self.row("moments", stage))]) for stage in stages]
        return max(passing[place] + sum(map(mul, numbers, kept)) for place, *numbers in moments)

    def traffic(self, settings: Mapping[str, Any], rank: int) -> dict[str, float]:
        """Bytes that a GPU of a pipeline rank sends in a step, by role."""
        found = self.settings(settings)
        stages, sizes, many = self.ranks(found)[rank], self.sizes(found), found["microbatches"]
        sharing = self.exploration.tables.sharing.answer(found)
        counts = {
            name: sum(self.row(name, stage) for stage in stages) for name in ("parameters", "tp", "cp", "pp", "tied")
        }
        sent = {role: float(counts[role] @ sizes) * many for role in ("tp", "cp", "pp")}
        sent["dp"] = float((counts["parameters"] * along(sharing["dp"], many)) @ sizes)
        return sent | {"embedding": float(counts["tied"] @ sizes) * sharing["tied"]}
