"""What the explorer page computes with its tables, in as few words: look-ups, products, sums and maxima, no physics.

The page's script does the same (`explorer_model.js`; tests/browser holds it to this).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import mul
from typing import Any

import numpy as np

from clustersim.results.explorer_tables import ExplorerData

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

    exploration: ExplorerData

    def settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings with those that follow."""
        tables = self.exploration.tables
        found = {**settings, "chunks": tables.chunks.lookup(settings)}
        for name, factors, divisors in tables.derived:
            over, under = (math.prod(found[key] for key in keys) for keys in (factors, divisors))
            found[name] = over // under if over % under == 0 else over / under
        return found | {name: table.lookup(found) for name, table in tables.flags.items()}

    def problems(self, settings: Mapping[str, Any]) -> list[str]:
        """Why settings are impossible."""
        found = self.settings(settings)
        groups = (
            [line for table in group for line in table.lookup(found) or []] for group in self.exploration.tables.rules
        )
        return next(filter(None, groups), [])

    def ranks(self, found: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
        """Settings and contents of each stage of each pipeline rank."""
        names = ("first", "layers", "embedding", "head", "content")
        placed = self.exploration.tables.stages.lookup(found)
        return [[{**found, **dict(zip(names, item, strict=True))} for item in rank] for rank in placed]

    def row(self, name: str, stage: Mapping[str, Any]) -> Any:
        """Numbers of parts of a stage."""
        return along(self.exploration.tables.rows[name].lookup(stage), stage["content"])

    def sharing(self, found: Mapping[str, Any]) -> tuple[Any, Any]:
        """What ZeRO makes of parameters: of all, and of those of experts, which other ranks hold."""
        tables = self.exploration.tables
        own = tables.sharing.lookup(found)
        return own, own if tables.experts is None else tables.sharing.lookup({**found, "replicas": found["edp"]})

    def per_group(self, own: Sequence[Any], of_experts: Sequence[Any]) -> list[Any]:
        """What is said of each group of parameters."""
        experts = self.exploration.tables.experts
        return [
            other if group == experts else one for group, (one, other) in enumerate(zip(own, of_experts, strict=True))
        ]

    def sizes(self, found: Mapping[str, Any]) -> Any:
        """Bytes of every part."""
        features = [found[name] for name in self.exploration.tables.features]
        return np.array(self.exploration.tables.sizes.lookup(found)) @ features

    def memory(self, settings: Mapping[str, Any]) -> Iterator[dict[str, float]]:
        """Bytes by use of each pipeline rank at its fullest moment."""
        tables, found = self.exploration.tables, self.settings(settings)
        (sharing, of_experts), sizes = self.sharing(found), self.sizes(found)
        held = tables.schedules.lookup(found)["held"]
        for stages, moments in zip(self.ranks(found), held, strict=True):
            rows = [self.row("parameters", stage) * sizes for stage in stages]
            counts = np.array([[row[list(columns)].sum() for columns in tables.groups] for row in rows])
            resident = {
                use: self.per_group(item, of_experts["resident"][use]) for use, item in sharing["resident"].items()
            }
            uses = {use: float(counts.sum(axis=0) @ size) for use, size in resident.items()}
            uses["parameters in narrow formats"] = sharing["copied"] * sum(
                float(self.row("cast", stage) @ sizes) for stage in stages
            )
            uses["gathered parameters"] = self.gathered(stages, sharing, sizes)
            messages = tables.receives.lookup(found) * sizes[tables.columns.index("message")]
            uses["messages and buckets"] = messages + sum(
                max(
                    min(limit, element * own)
                    for limit, own in zip(_limits(stages, first, others), counts[:, group], strict=True)
                )
                for group, (first, others, element) in enumerate(sharing["bucket"])
            )
            uses["workspaces"] = max(float(along(tables.workspace, stage["content"])) for stage in stages)
            uses["communication buffers"] = sum(table.lookup(found) for table in tables.buffers)
            uses["driver context"] = tables.context
            uses["activations"] = self.activations(stages, moments, sizes * sharing["there"])
            uses["fragmentation"] = sum(tables.fragmentation[use] * size for use, size in uses.items())
            yield uses

    def gathered(self, stages: Sequence[Mapping[str, Any]], sharing: Mapping[str, Any], sizes: Any) -> float:
        """Bytes of parameters that are gathered at once, and of the gradients of one unit."""

        def most(name: str, weights: Any) -> list[float]:
            rows = ([row @ weights for row in self.row(name, {**stage, **sharing})] for stage in stages)
            return [max([0.0, *map(float, item)]) for item in rows]

        gathered, reduced = (self.by_column(sharing[name]) * sizes for name in ("gathered", "reduced"))
        whole = most("gathered", gathered)
        return (max(whole) if sharing["dropped"] else sum(whole)) + max(most("units", reduced))

    def by_column(self, by_group: Sequence[float]) -> Any:
        """What is said of groups of parameters, for each of their columns."""
        tables = self.exploration.tables
        found = np.zeros(len(tables.columns))
        for columns, item in zip(tables.groups, by_group, strict=True):
            found[list(columns)] = item
        return found

    def activations(self, stages: Sequence[Mapping[str, Any]], moments: Sequence[Sequence[int]], sizes: Any) -> float:
        """Bytes at the fullest of a pipeline rank's moments."""
        kept = [float(self.row("kept", stage) @ sizes) for stage in stages]
        passing = [max([0.0, *(row @ sizes for row in self.row("moments", stage))]) for stage in stages]
        return max(passing[place] + sum(map(mul, numbers, kept)) for place, *numbers in moments)

    def traffic(self, settings: Mapping[str, Any], rank: int) -> dict[str, float]:
        """Bytes that a GPU of a pipeline rank sends in a step, by role."""
        found = self.settings(settings)
        stages, sizes, many = self.ranks(found)[rank], self.sizes(found), found["microbatches"]
        tables, (sharing, of_experts) = self.exploration.tables, self.sharing(found)
        inside = tuple(role for role in ("tp", "cp", "pp", "ep", "etp") if role in tables.rows)
        counts = {name: sum(self.row(name, stage) for stage in stages) for name in ("parameters", *inside, "tied")}
        sent = {role: float(counts[role] @ sizes) * many for role in inside}
        groups = {"dp": [group != tables.experts for group in range(len(tables.groups))]}
        if tables.experts is not None:
            groups["edp"] = [group == tables.experts for group in range(len(tables.groups))]
        for role, chosen in groups.items():
            each = along((of_experts if role == "edp" else sharing)["dp"], many)
            sent[role] = float((counts["parameters"] * each * self.by_column(chosen)) @ sizes)
        return sent | {"embedding": float(counts["tied"] @ sizes) * sharing["tied"]}
