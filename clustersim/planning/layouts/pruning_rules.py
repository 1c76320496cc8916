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
    DATA,
    DEGREES,
    EP,
    ETP,
    MICROBATCH,
    OVERLAP,
    PP,
    RECOMPUTE,
    SCHEDULE,
    SEQUENCE_PARALLEL,
    SPLIT,
    TP,
)
from clustersim.planning.layouts.search_jobs import Job
from clustersim.scenario.resolved import ResolvedScenario
from clustersim.scenario.validation_rules import consistency, moe, moe_overlap
from clustersim.schedules.one_f_one_b import OneFOneB

Values = Mapping[str, str]
Broken = Callable[[ResolvedScenario, Values], Iterator[str]]
_UNEVEN: Final = 1.1
SAME: Final = "the same in other words"


@dataclass(frozen=True, slots=True)
class Rule:
    """needs: the keys that it depends on; broken: sentences `reason: what it is about` of a setup with such values."""

    needs: tuple[str, ...]
    broken: Broken


def rules_of(job: Job, named: frozenset[str]) -> tuple[Rule, ...]:
    """The rules of a job. named: keys whose values somebody chose.

    What is another layout in other words is left out only where that one is in the space, too.
    """
    own, routed = (
        job.setup,
        any(distinct_moe.single_dense_mlp is None for distinct_moe in job.setup.model.distinct_moes),
    )
    rules = (Rule(DEGREES, lambda setup, _: _divided(setup, job)), *_RULES, *(_OF_EXPERTS if routed else ()))
    rules += tuple(rule for (key, plain), rule in _SAME.items() if plain in job.values.get(key, ()))
    if SPLIT not in named:
        rules += (Rule((PP, SCHEDULE), lambda setup, _: _uneven(setup, own)),)
    if DATA not in named:
        rules += (Rule((PP, DATA), lambda setup, values: _not_run(setup, values, own)),)
    return rules


def _checked(check: Callable[[ResolvedScenario], Iterator[str]]) -> Broken:
    return lambda setup, _: check(setup)


def word_of(value: str) -> str:
    """The strategy or schedule that a value names.

    >>> word_of("{hsdp: {shard: 8}}"), word_of("zero1")
    ('hsdp', 'zero1')
    """
    return value.strip('{" ').partition(":")[0].strip('" ')


def _divided(setup: ResolvedScenario, job: Job) -> Iterator[str]:
    layout, gpus = setup.layout.as_configured, setup.cluster.gpu_count
    each = layout.tp * layout.cp * layout.pp
    if gpus % each:
        yield f"degrees do not divide the GPUs: tp x cp x pp {each} does not divide {gpus}"
    elif job.replicas is not None and gpus // each not in job.replicas:
        legal = " or ".join(map(str, sorted(job.replicas)))
        yield f"layout.dp is fixed: it would be {gpus // each}, not {legal}"


def _no_pipeline(setup: ResolvedScenario, _: Values) -> Iterator[str]:
    if setup.layout.pp == 1 and not isinstance(setup.schedule, OneFOneB):
        yield f"schedules are for pipelines: {setup.schedule.name}, but layout.pp is 1"


def _uneven(setup: ResolvedScenario, own: ResolvedScenario) -> Iterator[str]:
    """Where stages with a layer less would be idle for more than a tenth; embedding and loss count as layers."""
    if (setup.layout.pp, setup.schedule) == (own.layout.pp, own.schedule):
        return
    layers, stages = setup.model.layer_count, len(setup.placement.stage_ranks)
    room = stages * -(-layers // stages)
    if room > _UNEVEN * (layers + 2):
        yield f"layers do not divide into stages: {layers} of {setup.model.name} into {stages}"


def _not_run(setup: ResolvedScenario, values: Values, own: ResolvedScenario) -> Iterator[str]:
    """What the file has is run; of the rest what the framework says."""
    if DATA not in values or setup.layout.data == own.layout.data:
        return
    runs, pipelined, word = own.framework.supported_layouts, setup.layout.pp > 1, word_of(values[DATA])
    if word not in (runs.data_beside_pipeline if pipelined else runs.data):
        beside = " beside a pipeline" if pipelined else ""
        yield f"the framework does not run it: {word} of {own.framework.name}{beside}"


def _uncut(setup: ResolvedScenario, _: Values) -> Iterator[str]:
    if setup.layout.tp == 1 and setup.layout.sequence_parallel:
        yield f"{SAME}: sequences are cut among tensor-parallel ranks, and layout.tp is 1"


def _experts_cut(setup: ResolvedScenario, _: Values) -> Iterator[str]:
    if setup.layout.tp == 1 and setup.layout.etp is None:
        yield f"{SAME}: layout.etp is 1 where layout.tp is"


def _travelling(setup: ResolvedScenario, _: Values) -> Iterator[str]:
    if setup.layout.overlap_expert_communication and setup.layout.ep == 1:
        yield f"{SAME}: no tokens travel where layout.ep is 1"


def _alone(setup: ResolvedScenario, _: Values) -> Iterator[str]:
    if setup.layout.cp * setup.layout.dp == 1 and not isinstance(setup.layout.data, DdpStrategy):
        yield f"{SAME}: nothing is sharded over one rank"


def _whole_shards(setup: ResolvedScenario, _: Values) -> Iterator[str]:
    """Hybrid sharding over all is the plain one."""
    data, ranks = setup.layout.data, setup.layout.cp * setup.layout.dp
    if isinstance(data, FullyShard) and data.shard == ranks:
        yield f"{SAME}: shards over {ranks} ranks are over all"


def _all_layers(setup: ResolvedScenario, _: Values) -> Iterator[str]:
    recompute = setup.training.recompute
    if isinstance(recompute, FullRecompute) and recompute.layers is not None:
        most = max(partition_layers(setup.layout.layers_per_stage, setup.model.layer_count, setup.placement))
        if recompute.layers == most:
            yield f"{SAME}: {recompute.layers} layers are all of a stage with {most}"


_RULES: Final[tuple[Rule, ...]] = (
    Rule((TP,), _checked(consistency.check_heads)),
    Rule((TP,), _checked(consistency.check_widths)),
    Rule((TP, CP, SEQUENCE_PARALLEL), _checked(consistency.check_sequence)),
    Rule((PP, SCHEDULE), _checked(consistency.check_placement)),
    Rule((PP, SCHEDULE), _checked(consistency.check_layers)),
    Rule((*DEGREES, SCHEDULE, MICROBATCH), _checked(consistency.check_batch)),
    Rule((*DEGREES, DATA), _checked(consistency.check_shard_size)),
    Rule((PP, SCHEDULE, RECOMPUTE), _checked(consistency.check_recompute_layers)),
)
_OF_EXPERTS: Final[tuple[Rule, ...]] = (
    Rule((*DEGREES, EP, ETP), _checked(moe.check_parallel_folding)),
    Rule((TP, SEQUENCE_PARALLEL, EP, ETP), _checked(moe.check_expert_sharding)),
    Rule((*DEGREES, SCHEDULE, EP, DATA, RECOMPUTE, OVERLAP), _checked(moe_overlap.check_moe_overlap)),
)
_SAME: Final[Mapping[tuple[str, str], Rule]] = {
    (SCHEDULE, "1f1b"): Rule((PP, SCHEDULE), _no_pipeline),
    (DATA, "ddp"): Rule((*DEGREES, DATA), _alone),
    (DATA, "fsdp"): Rule((*DEGREES, DATA), _whole_shards),
    (RECOMPUTE, "full"): Rule((PP, SCHEDULE, RECOMPUTE), _all_layers),
    (SEQUENCE_PARALLEL, "false"): Rule((TP, SEQUENCE_PARALLEL), _uncut),
    (ETP, "1"): Rule((TP, ETP), _experts_cut),
    (OVERLAP, "false"): Rule((EP, OVERLAP), _travelling),
}
"""Rules by the key and the value that the layout has which is the same."""
