"""Why are settings illegal?

The messages of `validation_rules.consistency`, each tabulated over the settings it depends on. Remedies are
those of an otherwise plain scenario: for a batch that is too small, always a larger one.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

from clustersim.planning.explorer.settings import ExplorerSpace
from clustersim.results.explorer_tables import LookupTable
from clustersim.scenario import Scenario
from clustersim.scenario.validation_rules import consistency, moe, precision
from clustersim.scenario.validation_rules.recompute import check_mla_recompute

Check = Callable[[Scenario], Iterator[str]]
_DEGREE_RULES: Final = ((("gpus", "tp", "cp", "pp"), "", (consistency.check_degrees,)),)
_HEAD_RULES: Final = ((("model", "tp"), "", (consistency.check_heads, consistency.check_widths)),)
_MOE_RULES: Final = (
    (("folded", "ep", "etp"), "", (moe.check_parallel_folding,)),
    (("tp", "split"), "", (moe.check_sequence_parallel,)),
    (("tp", "ep", "etp"), "", (moe.check_expert_sharding,)),
)
_PIPELINE_RULES: Final = (
    (("model", "pp", "chunks"), "room", (consistency.check_layers,)),
    (("model", "pp", "chunks", "recompute"), "", (consistency.check_recompute_layers,)),
    (("model", "recompute"), "", (check_mla_recompute,)),
    (("dp", "microbatch", "batch"), "", (consistency.check_batch,)),
    (("stages", "microbatches"), "batch", (consistency.check_batch,)),
)
_SEQUENCE_RULES: Final = (
    (("model", "sequence"), "", (consistency.check_sequence,)),
    (("sequence", "cp", "tp", "split"), "", (consistency.check_sequence,)),
    (("model", "tp"), "", (consistency.check_adapters,)),
)
_FORMAT_TOKEN_RULE: Final = (("precision", "microbatch", "sequence", "cp"), "", (precision.check_token_block_size,))
_SHARD_RULES: Final = (
    (("cp", "dp", "zero"), "", (consistency.check_shard_size,)),
    (("pp", "zero"), "", (consistency.check_secondary_shards,)),
)
"""(settings that a rule depends on, one more setting that its message mentions or "", the checks)"""


def legality_tables(space: ExplorerSpace, schedule_rejections: LookupTable) -> tuple[tuple[LookupTable, ...], ...]:
    """Tables of messages, in groups of which the first message is shown. schedule_rejections: of schedules."""
    pipeline_rules = (*_HEAD_RULES, *(_MOE_RULES if space.is_moe else ()), *_PIPELINE_RULES)
    matrix_keys = ("model", "precision", "tp", *(["etp"] if space.is_moe else []))
    final_rules = (
        *_SEQUENCE_RULES,
        (matrix_keys, "", (precision.check_matrix_block_size,)),
        _FORMAT_TOKEN_RULE,
        *_SHARD_RULES,
    )
    degree_tables, pipeline_tables, final_tables = (
        tuple(_rule_table(space, *rule) for rule in rules) for rules in (_DEGREE_RULES, pipeline_rules, final_rules)
    )
    return degree_tables, (*pipeline_tables, schedule_rejections, *final_tables)


def _rule_table(
    space: ExplorerSpace, keys: tuple[str, ...], reported_key: str, rule_checks: tuple[Check, ...]
) -> LookupTable:
    def violations(**settings: Any) -> list[str] | None:
        scenario = space.scenario_with(**settings)
        return [problem for rule_check in rule_checks for problem in rule_check(scenario)] or None

    def reported_violations(**settings: Any) -> list[str] | None:
        has_integer_degrees = settings.get("room", 0) % settings.get("pp", 1) == 0  # else the degrees are wrong
        has_integer_batch = settings.get("batch", 0) % settings.get("microbatches", 1) == 0
        return (
            violations(**settings)
            if has_integer_degrees and has_integer_batch and violation_table.lookup(settings)
            else None
        )

    violation_table = space.build_table(violations, *keys)
    return space.build_table(reported_violations, *keys, reported_key) if reported_key else violation_table
