"""What the explorer page computes from its tables: only look-ups, products, sums and maxima, no physics.

The page's script does the same (`explorer_model.js`; tests/browser compares it with this).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import mul
from typing import Any

import numpy as np

from clustersim.results.explorer_tables import ExplorerData

ZERO_STAGES = range(4)


def extrapolated_entry(entries: Sequence[Any], index: int) -> Any:
    """The entry at an index, linearly extrapolated from the last two beyond the end."""
    if index < len(entries):
        return np.array(entries[index], dtype=float)
    last, second_last = np.array(entries[-1], dtype=float), np.array(entries[-2], dtype=float)
    return last + (index - len(entries) + 1) * (last - second_last)


def _bucket_limits(stages: Sequence[Mapping[str, Any]], first: float | None, other: float | None) -> list[float]:
    """The bucket limit of each stage; None: unlimited."""
    limits = (first if stage["embedding"] else other for stage in stages)
    return [math.inf if limit is None else limit for limit in limits]


@dataclass(frozen=True)
class ExplorerPage:
    """The tables, and the values that the page derives from them."""

    exploration: ExplorerData

    def complete_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings with the derived ones."""
        tables = self.exploration.tables
        complete = {**settings, "chunks": tables.chunks.lookup(settings)}
        for name, factors, divisors in tables.derived:
            numerator, denominator = (math.prod(complete[key] for key in keys) for keys in (factors, divisors))
            complete[name] = numerator // denominator if numerator % denominator == 0 else numerator / denominator
        return complete | {name: table.lookup(complete) for name, table in tables.flags.items()}

    def problems(self, settings: Mapping[str, Any]) -> list[str]:
        """Violations that make the settings illegal."""
        complete = self.complete_settings(settings)
        groups = (
            [line for table in group for line in table.lookup(complete) or []]
            for group in self.exploration.tables.rules
        )
        return next(filter(None, groups), [])

    def rank_stages(self, complete: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
        """Settings and contents of each stage of each pipeline rank."""
        names = ("first", "layers", "embedding", "head", "content")
        stages_by_rank = self.exploration.tables.stages.lookup(complete)
        return [[{**complete, **dict(zip(names, item, strict=True))} for item in rank] for rank in stages_by_rank]

    def stage_counts(self, name: str, stage: Mapping[str, Any]) -> Any:
        """Counts of the columns of a stage."""
        return extrapolated_entry(self.exploration.tables.rows[name].lookup(stage), stage["content"])

    def zero_sharing(self, complete: Mapping[str, Any]) -> tuple[Any, Any]:
        """ZeRO sharding of parameters: of the dense ones, and of experts, which are replicated on other ranks."""
        tables = self.exploration.tables
        dense_sharing = tables.sharing.lookup(complete)
        return dense_sharing, dense_sharing if tables.experts is None else tables.sharing.lookup(
            {**complete, "replicas": complete["edp"]}
        )

    def per_group(self, dense_values: Sequence[Any], expert_values: Sequence[Any]) -> list[Any]:
        """Values of each parameter group, from those of dense parameters and of experts."""
        experts = self.exploration.tables.experts
        return [
            other if group == experts else one
            for group, (one, other) in enumerate(zip(dense_values, expert_values, strict=True))
        ]

    def column_sizes(self, complete: Mapping[str, Any]) -> Any:
        """Bytes of every column."""
        features = [complete[name] for name in self.exploration.tables.features]
        return np.array(self.exploration.tables.sizes.lookup(complete)) @ features

    def rank_memory(self, settings: Mapping[str, Any]) -> Iterator[dict[str, float]]:
        """Peak bytes by category of each pipeline rank."""
        tables, complete = self.exploration.tables, self.complete_settings(settings)
        (sharing, expert_sharing), sizes = self.zero_sharing(complete), self.column_sizes(complete)
        held = tables.schedules.lookup(complete)["held"]
        for stages, rank_moments in zip(self.rank_stages(complete), held, strict=True):
            stage_bytes = [self.stage_counts("parameters", stage) * sizes for stage in stages]
            counts = np.array(
                [[column_bytes[list(columns)].sum() for columns in tables.groups] for column_bytes in stage_bytes]
            )
            resident = {
                use: self.per_group(item, expert_sharing["resident"][use]) for use, item in sharing["resident"].items()
            }
            uses = {use: float(counts.sum(axis=0) @ size) for use, size in resident.items()}
            uses["low-precision parameter copies"] = sharing["copied"] * sum(
                float(self.stage_counts("cast", stage) @ sizes) for stage in stages
            )
            uses["gathered parameters"] = self.gathered_bytes(stages, sharing, sizes)
            messages = tables.receives.lookup(complete) * sizes[tables.columns.index("message")]
            waiting = counts * self.per_group(sharing["waiting"], expert_sharing["waiting"])
            uses["messages and buckets"] = messages + sum(
                max(map(min, _bucket_limits(stages, first, others), waiting[:, group]))
                for group, (first, others) in enumerate(sharing["bucket"])
            )
            uses["workspaces"] = max(float(extrapolated_entry(tables.workspace, stage["content"])) for stage in stages)
            uses["communication buffers"] = sum(table.lookup(complete) for table in tables.buffers)
            uses["driver context"] = tables.context
            unreduced = counts @ self.per_group(sharing["unreduced"], expert_sharing["unreduced"])
            buffer = max(self.max_per_stage("units", stages, self.expand_to_columns(sharing["buffered"]) * sizes))
            there = sizes * sharing["there"]
            created = float(counts.sum(axis=0) @ self.per_group(sharing["created"], expert_sharing["created"]))
            moments = [self.fullest_moment(stages, rank_moments, there, [*unreduced, buffer])]
            moments += [(self.largest_layer(there), created)] if created else []
            peak = max(moments, key=sum)
            uses["activations"], more_gradients = peak
            uses["gradients"] += more_gradients
            uses["fragmentation"] = sum(
                tables.fragmentation[complete["recompute"]][use] * size for use, size in uses.items()
            )
            yield uses

    def gathered_bytes(self, stages: Sequence[Mapping[str, Any]], sharing: Mapping[str, Any], sizes: Any) -> float:
        """Bytes of parameters that are gathered at once, and of the gradients of one unit."""
        gathered, reduced = (self.expand_to_columns(sharing[name]) * sizes for name in ("gathered", "reduced"))
        chosen = [{**stage, **sharing} for stage in stages]
        stage_maxima = self.max_per_stage("gathered", chosen, gathered)
        gradient_bytes = max(self.max_per_stage("units", chosen, reduced))
        return (max(stage_maxima) if sharing["dropped"] else sum(stage_maxima)) + gradient_bytes

    def max_per_stage(self, name: str, stages: Sequence[Mapping[str, Any]], weights: Any) -> list[float]:
        """The largest of the weighted counts of each stage."""
        unit_bytes = ([counts @ weights for counts in self.stage_counts(name, stage)] for stage in stages)
        return [max([0.0, *map(float, item)]) for item in unit_bytes]

    def expand_to_columns(self, by_group: Sequence[float]) -> Any:
        """Values of parameter groups, for each of their columns."""
        tables = self.exploration.tables
        values = np.zeros(len(tables.columns))
        for columns, reused, item in zip(tables.groups, tables.reused, by_group, strict=True):
            values[[*columns, *reused]] = item
        return values

    def fullest_moment(
        self,
        stages: Sequence[Mapping[str, Any]],
        moments: Sequence[Sequence[int]],
        sizes: Any,
        gradient_sizes: Sequence[float],
    ) -> tuple[float, float]:
        """Bytes of activations and of unreduced gradients at the fullest of the moments of a pipeline rank."""
        kept_bytes = [float(self.stage_counts("kept", stage) @ sizes) for stage in stages]
        transient_bytes = [
            max([0.0, *(row @ sizes for row in self.stage_counts("moments", stage))]) for stage in stages
        ]
        held = [
            (
                transient_bytes[index] + sum(map(mul, counts, kept_bytes)),
                sum(map(mul, counts[len(stages) :], gradient_sizes)),
            )
            for index, *counts in moments
        ]
        return max(held, key=sum)

    def largest_layer(self, sizes: Any) -> float:
        """Bytes of all activations of the largest kind of layer and of their gradients."""
        columns = self.exploration.tables.columns
        whole = [name for name in columns if name.startswith("whole layer")]
        gradients = [name.replace("whole layer", "layer gradients") for name in whole]
        sizes_of_kinds = (
            float(sizes[columns.index(name)] + sizes[columns.index(gradient)])
            for name, gradient in zip(whole, gradients, strict=True)
        )
        return max(sizes_of_kinds)

    def sent_bytes(self, settings: Mapping[str, Any], rank: int) -> dict[str, float]:
        """Bytes that a GPU of a pipeline rank sends in a step, by process group."""
        complete = self.complete_settings(settings)
        stages, sizes, microbatches = (
            self.rank_stages(complete)[rank],
            self.column_sizes(complete),
            complete["microbatches"],
        )
        tables, (sharing, expert_sharing) = self.exploration.tables, self.zero_sharing(complete)
        within_replica = tuple(
            comm_group for comm_group in ("tp", "cp", "pp", "ep", "etp") if comm_group in tables.rows
        )
        counts = {
            name: sum(self.stage_counts(name, stage) for stage in stages)
            for name in ("parameters", *within_replica, "tied")
        }
        sent = {comm_group: float(counts[comm_group] @ sizes) * microbatches for comm_group in within_replica}
        groups = {"dp": [group != tables.experts for group in range(len(tables.groups))]}
        if tables.experts is not None:
            groups["edp"] = [group == tables.experts for group in range(len(tables.groups))]
        for comm_group, chosen in groups.items():
            entry = extrapolated_entry((expert_sharing if comm_group == "edp" else sharing)["dp"], microbatches)
            sent[comm_group] = float((counts["parameters"] * entry * self.expand_to_columns(chosen)) @ sizes)
        return sent | {"embedding": float(counts["tied"] @ sizes) * sharing["tied"]}
