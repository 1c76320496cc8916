"""Which layouts need not be built to know that they are none?

What breaks a rule is counted and not walked through, so that a space of a million combinations has some thousand
layouts. Most rules are those of `validation_rules.consistency`, each asked as soon as the keys are chosen that it depends on; what
passes is read and checked in full, as any scenario is. The others leave out what is legal and never wanted: the same
layout in other words, and what the framework does not run.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from clustersim.model.training import FullRecompute
from clustersim.parallel.data_parallel_strategy import DdpStrategy, FullyShard
from clustersim.parallel.layer_partition import partition_layers
from clustersim.planning.layouts.config_keys import (
    CP,
    DATA_PARALLEL,
    DEGREES,
    EP,
    EP_OVERLAP,
    ETP,
    LAYERS_PER_STAGE,
    MICROBATCH,
    PP,
    RECOMPUTE,
    SCHEDULE,
    SEQUENCE_PARALLEL,
    TP,
)
from clustersim.planning.layouts.search_jobs import SearchJob
from clustersim.scenario.resolved import ResolvedScenario
from clustersim.scenario.validation_rules import consistency, moe, moe_overlap
from clustersim.schedules.one_f_one_b import OneFOneB

Values = Mapping[str, str]
ViolationCheck = Callable[[ResolvedScenario, Values], Iterator[str]]
_MAX_PADDING_RATIO: Final = 1.1
DUPLICATE: Final = "the same in other words"


@dataclass(frozen=True, slots=True)
class PruningRule:
    """needs: the keys that it depends on; broken: sentences `reason: what it is about` of a setup with such values."""

    depends_on: tuple[str, ...]
    find_violations: ViolationCheck


def pruning_rules(job: SearchJob, user_keys: frozenset[str]) -> tuple[PruningRule, ...]:
    """The rules of a job. named: keys whose values somebody chose.

    What is another layout in other words is left out only where that one is in the space, too.
    """
    resolved, has_moe = (
        job.resolved,
        any(distinct_moe.single_dense_mlp is None for distinct_moe in job.resolved.model.distinct_moes),
    )
    rules = (
        PruningRule(DEGREES, lambda setup, _: _check_degrees(setup, job)),
        *_COMMON_RULES,
        *(_MOE_RULES if has_moe else ()),
    )
    rules += tuple(rule for (key, value), rule in _DUPLICATE_RULES.items() if value in job.values.get(key, ()))
    if LAYERS_PER_STAGE not in user_keys:
        rules += (PruningRule((PP, SCHEDULE), lambda setup, _: _check_stage_balance(setup, resolved)),)
    if DATA_PARALLEL not in user_keys:
        rules += (
            PruningRule((PP, DATA_PARALLEL), lambda setup, values: _check_framework_support(setup, values, resolved)),
        )
    return rules


def _from_check(check: Callable[[ResolvedScenario], Iterator[str]]) -> ViolationCheck:
    return lambda setup, _: check(setup)


def value_name(value: str) -> str:
    """The strategy or schedule that a value names.

    >>> word_of("{hsdp: {shard: 8}}"), word_of("zero1")
    ('hsdp', 'zero1')
    """
    return value.strip('{" ').partition(":")[0].strip('" ')


def _check_degrees(resolved: ResolvedScenario, job: SearchJob) -> Iterator[str]:
    layout, gpus = resolved.layout.as_configured, resolved.cluster.gpu_count
    model_ranks = layout.tp * layout.cp * layout.pp
    if gpus % model_ranks:
        yield f"degrees do not divide the GPUs: tp x cp x pp {model_ranks} does not divide {gpus}"
    elif job.allowed_dp is not None and gpus // model_ranks not in job.allowed_dp:
        allowed = " or ".join(map(str, sorted(job.allowed_dp)))
        yield f"layout.dp is fixed: it would be {gpus // model_ranks}, not {allowed}"


def _check_schedule_needs_pipeline(resolved: ResolvedScenario, _: Values) -> Iterator[str]:
    if resolved.layout.pp == 1 and not isinstance(resolved.schedule, OneFOneB):
        yield f"schedules are for pipelines: {resolved.schedule.name}, but layout.pp is 1"


def _check_stage_balance(resolved: ResolvedScenario, baseline: ResolvedScenario) -> Iterator[str]:
    """Where stages with a layer less would be idle for more than a tenth; embedding and loss count as layers."""
    if (resolved.layout.pp, resolved.schedule) == (baseline.layout.pp, baseline.schedule):
        return
    layers, stages = resolved.model.layer_count, len(resolved.placement.stage_ranks)
    layer_slots = stages * -(-layers // stages)
    if layer_slots > _MAX_PADDING_RATIO * (layers + 2):
        yield f"layers do not divide into stages: {layers} of {resolved.model.name} into {stages}"


def _check_framework_support(resolved: ResolvedScenario, values: Values, baseline: ResolvedScenario) -> Iterator[str]:
    """What the file has is run; of the rest what the framework says."""
    if DATA_PARALLEL not in values or resolved.layout.data == baseline.layout.data:
        return
    supported, pipelined, strategy = (
        baseline.framework.supported_layouts,
        resolved.layout.pp > 1,
        value_name(values[DATA_PARALLEL]),
    )
    if strategy not in (supported.data_beside_pipeline if pipelined else supported.data):
        pipeline_note = " beside a pipeline" if pipelined else ""
        yield f"the framework does not run it: {strategy} of {baseline.framework.name}{pipeline_note}"


def _check_sequence_parallel_used(resolved: ResolvedScenario, _: Values) -> Iterator[str]:
    if resolved.layout.tp == 1 and resolved.layout.sequence_parallel:
        yield f"{DUPLICATE}: sequences are cut among tensor-parallel ranks, and layout.tp is 1"


def _check_etp_used(resolved: ResolvedScenario, _: Values) -> Iterator[str]:
    if resolved.layout.tp == 1 and resolved.layout.etp is None:
        yield f"{DUPLICATE}: layout.etp is 1 where layout.tp is"


def _check_ep_overlap_used(resolved: ResolvedScenario, _: Values) -> Iterator[str]:
    if resolved.layout.overlap_expert_communication and resolved.layout.ep == 1:
        yield f"{DUPLICATE}: no tokens travel where layout.ep is 1"


def _check_sharding_used(resolved: ResolvedScenario, _: Values) -> Iterator[str]:
    if resolved.layout.cp * resolved.layout.dp == 1 and not isinstance(resolved.layout.data, DdpStrategy):
        yield f"{DUPLICATE}: nothing is sharded over one rank"


def _check_hybrid_shards(resolved: ResolvedScenario, _: Values) -> Iterator[str]:
    """Hybrid sharding over all is the plain one."""
    data, ranks = resolved.layout.data, resolved.layout.cp * resolved.layout.dp
    if isinstance(data, FullyShard) and data.shard == ranks:
        yield f"{DUPLICATE}: shards over {ranks} ranks are over all"


def _check_partial_recompute(resolved: ResolvedScenario, _: Values) -> Iterator[str]:
    recompute = resolved.training.recompute
    if isinstance(recompute, FullRecompute) and recompute.layers is not None:
        max_layers = max(
            partition_layers(resolved.layout.layers_per_stage, resolved.model.layer_count, resolved.placement)
        )
        if recompute.layers == max_layers:
            yield f"{DUPLICATE}: {recompute.layers} layers are all of a stage with {max_layers}"


_COMMON_RULES: Final[tuple[PruningRule, ...]] = (
    PruningRule((TP,), _from_check(consistency.check_heads)),
    PruningRule((TP,), _from_check(consistency.check_widths)),
    PruningRule((TP, CP, SEQUENCE_PARALLEL), _from_check(consistency.check_sequence)),
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
"""Rules by the key and the value that the layout has which is the same."""
