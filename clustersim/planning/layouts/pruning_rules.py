"""Which layouts can be pruned without building them?

Combinations that violate a rule are counted but not enumerated, so that a space of a million combinations
yields some thousand layouts. Most rules are those of `validation_rules.consistency`, each applied as soon as
the keys it depends on are chosen; the survivors are read and checked in full. The others drop legal layouts
that are never wanted: duplicates (the same layout under other keys), and what the framework does not support.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from clustersim.parallel.data_parallel_strategy import FullyShard
from clustersim.parallel.layer_partition import partition_layers
from clustersim.parallel.mesh import PIPELINE
from clustersim.planning.layouts.config_keys import (
    CP,
    CP_KIND,
    DATA_PARALLEL,
    DEGREES,
    ENCODER_DEGREES,
    EP,
    EP_OVERLAP,
    ETP,
    LAYERS_PER_STAGE,
    MICROBATCH,
    ORDER,
    PP,
    RECOMPUTE,
    SCHEDULE,
    SEQUENCE_PARALLEL,
    TP,
)
from clustersim.planning.layouts.search_jobs import SearchJob
from clustersim.scenario.resolved import ResolvedScenario
from clustersim.scenario.validation_rules import consistency, context_parallel, moe, moe_overlap
from clustersim.schedules.one_f_one_b import OneFOneB

Values = Mapping[str, str]
ViolationCheck = Callable[[ResolvedScenario, Values], Iterator[str]]
_MAX_PADDING_RATIO: Final = 1.1
DUPLICATE: Final = "equivalent layout"


@dataclass(frozen=True, slots=True)
class PruningRule:
    """depends_on: keys; find_violations: yields messages `reason: detail` for a resolved scenario with such values."""

    depends_on: tuple[str, ...]
    find_violations: ViolationCheck


def pruning_rules(job: SearchJob, user_keys: frozenset[str]) -> tuple[PruningRule, ...]:
    """The rules of a job. user_keys: keys whose values the user chose.

    Duplicates are dropped only where the equivalent layout is in the space as well.
    """
    resolved = job.resolved
    rules = (
        PruningRule((*ENCODER_DEGREES, *DEGREES), lambda layout_scenario, _: _check_degrees(layout_scenario, job)),
        *_COMMON_RULES,
        *(_MOE_RULES if resolved.model.distinct_routed_moes else ()),
    )
    rules += tuple(rule for (key, value), rule in _DUPLICATE_RULES.items() if value in job.values.get(key, ()))
    if kinds := job.values.get(CP_KIND):
        rules += (
            PruningRule((CP, CP_KIND), lambda layout_scenario, _: _check_context_kind_used(layout_scenario, kinds[0])),
        )
    if orders := job.values.get(ORDER):
        rules += (
            PruningRule(
                (*DEGREES, ORDER), lambda layout_scenario, values: _check_order_used(layout_scenario, values, orders)
            ),
        )
    if resolved.cluster.sites is not None and DATA_PARALLEL not in user_keys:
        rules += (PruningRule((*DEGREES, ORDER, DATA_PARALLEL), _check_site_shards),)
    if LAYERS_PER_STAGE not in user_keys:
        rules += (
            PruningRule((PP, SCHEDULE), lambda layout_scenario, _: _check_stage_balance(layout_scenario, resolved)),
        )
    if DATA_PARALLEL not in user_keys:
        rules += (
            PruningRule(
                (PP, DATA_PARALLEL),
                lambda layout_scenario, values: _check_framework_support(layout_scenario, values, resolved),
            ),
        )
    return rules


def _from_check(check: Callable[[ResolvedScenario], Iterator[str]]) -> ViolationCheck:
    return lambda layout_scenario, _: check(layout_scenario)


def value_name(value: str) -> str:
    """The strategy or schedule that a value names.

    >>> value_name("{hsdp: {shard: 8}}"), value_name("zero1")
    ('hsdp', 'zero1')
    """
    return value.strip('{" ').partition(":")[0].strip('" ')


def _check_degrees(resolved: ResolvedScenario, job: SearchJob) -> Iterator[str]:
    layout = resolved.layout.as_configured
    model_ranks, gpus = max(1, layout.replica_ranks), resolved.cluster.gpu_count - layout.encoder_ranks
    if gpus % model_ranks:
        yield f"degrees do not divide the GPUs: tp x cp x pp {model_ranks} does not divide {gpus}"
    elif job.allowed_dp is not None and gpus // model_ranks not in job.allowed_dp:
        allowed = " or ".join(map(str, sorted(job.allowed_dp)))
        yield f"layout.dp is fixed: it would be {gpus // model_ranks}, not {allowed}"


def _check_schedule_needs_pipeline(resolved: ResolvedScenario, _: Values) -> Iterator[str]:
    if resolved.layout.pp == 1 and resolved.schedule != OneFOneB():
        yield f"schedules are for pipelines: {resolved.schedule.name}, but layout.pp is 1"


def _check_stage_balance(resolved: ResolvedScenario, baseline: ResolvedScenario) -> Iterator[str]:
    """Drop stage counts with more than 10 % idle layer slots; embedding and loss count as layers."""
    if (resolved.layout.pp, resolved.schedule) == (baseline.layout.pp, baseline.schedule):
        return
    layers, stages = resolved.model.layer_count, len(resolved.placement.stage_ranks)
    layer_slots = stages * -(-layers // stages)
    if layer_slots > _MAX_PADDING_RATIO * (layers + 2):
        yield f"layers do not divide into stages: {layers} of {resolved.model.name} into {stages}"


def _check_framework_support(resolved: ResolvedScenario, values: Values, baseline: ResolvedScenario) -> Iterator[str]:
    """The file's own strategy is allowed; others as the framework supports them."""
    if DATA_PARALLEL not in values or resolved.layout.data == baseline.layout.data:
        return
    supported, pipelined, strategy = (
        baseline.framework.supported_layouts,
        resolved.layout.pp > 1,
        value_name(values[DATA_PARALLEL]),
    )
    if strategy == "zero":
        strategy = f"zero{resolved.layout.data.zero_stage}"
    if strategy not in (supported.data_with_pipeline if pipelined else supported.data):
        pipeline_note = " with a pipeline" if pipelined else ""
        yield f"the framework does not run it: {strategy} of {baseline.framework.name}{pipeline_note}"


def _check_sequence_parallel_used(resolved: ResolvedScenario, _: Values) -> Iterator[str]:
    if resolved.layout.tp == 1 and resolved.layout.sequence_parallel:
        yield f"{DUPLICATE}: sequences are cut among tensor-parallel ranks, and layout.tp is 1"


def _check_context_kind_used(resolved: ResolvedScenario, first: str) -> Iterator[str]:
    if resolved.layout.cp == 1 and resolved.layout.cp_kind.value != first:
        yield f"{DUPLICATE}: nothing is exchanged where layout.cp is 1"


def _check_order_used(resolved: ResolvedScenario, values: Values, orders: Sequence[str]) -> Iterator[str]:
    if 1 in (resolved.layout.pp, resolved.layout.dp) and values.get(ORDER) != orders[0]:
        yield f"{DUPLICATE}: there are no pipelines or no replicas to order"


def _check_site_shards(resolved: ResolvedScenario, _: Values) -> Iterator[str]:
    """Optimizer states are sharded over all replicas, or over those of each of equally large sites that they cross."""
    data, ranks, machine = resolved.layout.data, resolved.layout.cp * resolved.layout.dp, resolved.cluster.sites
    if data.zero_stage == 1 and data.shard_size is not None and machine is not None:
        sites = len(machine.sites)
        if data.shard_size * sites != ranks:
            yield f"optimizer states are sharded within each site: {data.shard_size} of {ranks} ranks in {sites} sites"
        elif resolved.layout.pp % sites == 0 and resolved.layout.order[-1] == PIPELINE.name:
            yield f"{DUPLICATE}: replicas do not cross sites, so nothing is gained by shards within each"


def _check_etp_used(resolved: ResolvedScenario, _: Values) -> Iterator[str]:
    if resolved.layout.tp == 1 and resolved.layout.etp is None:
        yield f"{DUPLICATE}: layout.etp is 1 where layout.tp is"


def _check_ep_overlap_used(resolved: ResolvedScenario, _: Values) -> Iterator[str]:
    if resolved.layout.overlap_moe_expert_parallel_comm and resolved.layout.ep == 1:
        yield f"{DUPLICATE}: no tokens travel where layout.ep is 1"


def _check_sharding_used(resolved: ResolvedScenario, _: Values) -> Iterator[str]:
    data = resolved.layout.data
    if resolved.layout.cp * resolved.layout.dp == 1 and (data.zero_stage > 0 or data.is_single_process):
        yield f"{DUPLICATE}: nothing is sharded over one rank"


def _check_hybrid_shards(resolved: ResolvedScenario, _: Values) -> Iterator[str]:
    """Hybrid sharding over all ranks equals full sharding."""
    data, ranks = resolved.layout.data, resolved.layout.cp * resolved.layout.dp
    if isinstance(data, FullyShard) and data.shard == ranks:
        yield f"{DUPLICATE}: shards over {ranks} ranks are over all"


def _check_partial_recompute(resolved: ResolvedScenario, _: Values) -> Iterator[str]:
    recompute = resolved.training.recompute
    if recompute.layers is not None:
        max_layers = max(
            partition_layers(resolved.layout.layers_per_stage, resolved.model.layer_count, resolved.placement)
        )
        if recompute.layers == max_layers:
            yield f"{DUPLICATE}: {recompute.layers} layers are all of a stage with {max_layers}"


_COMMON_RULES: Final[tuple[PruningRule, ...]] = (
    PruningRule((TP,), _from_check(consistency.check_heads)),
    PruningRule((TP,), _from_check(consistency.check_widths)),
    PruningRule((TP, CP, CP_KIND, SEQUENCE_PARALLEL), _from_check(consistency.check_sequence)),
    PruningRule((CP, CP_KIND), _from_check(context_parallel.check_context_groups)),
    PruningRule((TP, CP, CP_KIND), _from_check(context_parallel.check_exchanged_heads)),
    PruningRule((PP, SCHEDULE), _from_check(consistency.check_placement)),
    PruningRule((PP, SCHEDULE), _from_check(consistency.check_layers)),
    PruningRule((*DEGREES, SCHEDULE, MICROBATCH), _from_check(consistency.check_batch)),
    PruningRule((*DEGREES, DATA_PARALLEL), _from_check(consistency.check_shard_size)),
    PruningRule((PP, SCHEDULE, RECOMPUTE), _from_check(consistency.check_recompute_layers)),
)
_MOE_RULES: Final[tuple[PruningRule, ...]] = (
    PruningRule((*DEGREES, EP, ETP), _from_check(moe.check_parallel_folding)),
    PruningRule((TP, SEQUENCE_PARALLEL, EP, ETP), _from_check(moe.check_expert_sharding)),
    PruningRule(
        (*DEGREES, SCHEDULE, EP, DATA_PARALLEL, RECOMPUTE, EP_OVERLAP), _from_check(moe_overlap.check_moe_overlap)
    ),
)
_DUPLICATE_RULES: Final[Mapping[tuple[str, str], PruningRule]] = {
    (SCHEDULE, "1f1b"): PruningRule((PP, SCHEDULE), _check_schedule_needs_pipeline),
    (DATA_PARALLEL, "ddp"): PruningRule((*DEGREES, DATA_PARALLEL), _check_sharding_used),
    (DATA_PARALLEL, "fsdp"): PruningRule((*DEGREES, DATA_PARALLEL), _check_hybrid_shards),
    (RECOMPUTE, "full"): PruningRule((PP, SCHEDULE, RECOMPUTE), _check_partial_recompute),
    (SEQUENCE_PARALLEL, "false"): PruningRule((TP, SEQUENCE_PARALLEL), _check_sequence_parallel_used),
    (ETP, "1"): PruningRule((TP, ETP), _check_etp_used),
    (EP_OVERLAP, "false"): PruningRule((EP, EP_OVERLAP), _check_ep_overlap_used),
}
"""Duplicate rules by the (key, value) of the equivalent layout."""
