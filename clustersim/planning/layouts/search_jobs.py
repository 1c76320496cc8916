"""What is laid out, and in which values do its layouts differ?

The default values are what planners vary, as far as the model, the cluster and the framework leave it: degrees,
sequence parallelism, schedules and chunks, strategies of data parallelism, microbatches, recomputation, and of mixtures
how experts are spread, and whether their tokens travel beside computation where the file has it so. What the file has
is always among them.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from json import dumps
from typing import Any, Final, TypeVar

from clustersim.common.errors import InputError
from clustersim.model.layer_stack import LatentAttention, MoeMlp
from clustersim.model.training import NoRecompute
from clustersim.parallel.layout import Layout
from clustersim.planning.layouts.config_keys import (
    AS_TP,
    CP,
    DATA,
    DEGREES,
    DP,
    EP,
    ETP,
    MICROBATCH,
    OVERLAP,
    PP,
    RECOMPUTE,
    SCHEDULE,
    SEQUENCE_PARALLEL,
    TP,
)
from clustersim.scenario import Scenario
from clustersim.scenario.loaders import bidirectional_degrees
from clustersim.scenario.nearest_values import divisors
from clustersim.scenario.resolved import ResolvedScenario
from clustersim.schedules.dual_pipe import DualPipe
from clustersim.schedules.one_f_one_b import OneFOneB

T = TypeVar("T")
_POWERS: Final = tuple(2**power for power in range(11))
_CHUNKS: Final = (2, 3, 4, 5, 6, 7, 8)
_CHUNKS_OF_MIXTURES: Final = (2, 4)  # of which there are so many other choices
_MICROBATCHES: Final = (1, 2, 4, 8)
_OF_MIXTURES: Final = (1, 2)  # microbatches, but for the file's own
_MOST_STAGES: Final = 64
_MOST_EXPERTS: Final = 64  # ranks that experts are spread over, but for the file's own
_LAYERS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_LONG: Final = 8192  # tokens of a rank from which on sequences are worth cutting
_SHARDS: Final = 3  # sizes of hybrid sharding: a domain, four, sixteen
_READ: Final = {SCHEDULE: "schedule", DATA: "layout.data", RECOMPUTE: "training.recompute"}


@dataclass(frozen=True, slots=True)
class Job:
    """What is laid out. overrides: how it differs from the file's; setup: the file's own layout of it, unchecked.

    values: of every key that varies, in the order in which they are tried; objects: what those stand for that are no
    numbers; replicas: degrees that layout.dp may come to, None: any.
    """

    overrides: tuple[str, ...]
    setup: ResolvedScenario
    values: Mapping[str, tuple[str, ...]]
    objects: Mapping[tuple[str, str], Any] = field(default_factory=dict, repr=False)
    replicas: frozenset[int] | None = None
    follows: bool = True

    @property
    def size(self) -> int:
        """How many combinations of values there are."""
        return math.prod(len(value) for value in self.values.values())

    def at(self, values: Mapping[str, str]) -> ResolvedScenario:
        """The job with such values of the keys that rules ask for; of keys that vary and have none yet, plain ones.

        Raises InputError for a schedule that so many pipeline ranks cannot have.
        """
        setup, own = self.setup, self.setup.layout.as_configured
        tp, cp, pp = (self._number(key, values) for key in DEGREES)
        dp = max(1, setup.cluster.gpu_count // (tp * cp * pp))
        schedule = self._object(SCHEDULE, values, OneFOneB(), setup.schedule)
        mirrored = isinstance(schedule, DualPipe)
        run_pp, run_dp = bidirectional_degrees(pp, dp) if mirrored else (pp, dp)
        same = (pp, schedule) == (own.pp, setup.schedule)
        etp = values.get(ETP, AS_TP if own.etp is None else str(own.etp))
        layout = replace(
            setup.layout,
            tp=tp,
            cp=cp,
            ep=self._number(EP, values),
            etp=None if etp == AS_TP else int(etp),
            sequence_parallel=self._cuts_sequences(values, tp),
            data=self._object(DATA, values, own.data, own.data),
            overlap_expert_communication=values.get(OVERLAP, str(own.overlap_expert_communication)).lower() == "true",
            layers_per_stage=own.layers_per_stage if same else None,
            pp=run_pp,
            dp=run_dp,
            mirrored=mirrored,
        )
        training = replace(
            setup.training,
            microbatch=int(values.get(MICROBATCH, setup.training.microbatch)),
            recompute=self._object(RECOMPUTE, values, NoRecompute(), setup.training.recompute),
        )
        return replace(setup, layout=layout, schedule=schedule, training=training)

    def _cuts_sequences(self, values: Mapping[str, str], tp: int) -> bool:
        """Whether sequences are cut among tensor-parallel ranks: they are where nobody chooses."""
        own: bool = self.setup.layout.sequence_parallel
        if SEQUENCE_PARALLEL in values:
            return values[SEQUENCE_PARALLEL].lower() == "true"
        return tp > 1 if TP in values and self.follows else own

    def _number(self, key: str, values: Mapping[str, str]) -> int:
        """A degree."""
        if key in self.values:
            return int(values.get(key, 1))
        degree: int = getattr(self.setup.layout.as_configured, key.partition(".")[2])
        return degree

    def _object(self, key: str, values: Mapping[str, str], plain: T, own: T) -> T:
        """What a value that is no number stands for."""
        if key not in self.values:
            return own
        found: T = self.objects[key, values[key]] if key in values else plain
        return found

    def spelt(self, key: str, value: str, layout: Layout) -> str:
        """A value as `--set` takes it."""
        return str(layout.tp) if key == ETP and value == AS_TP else value


def jobs_of(
    scenario: Scenario,
    others: Iterable[tuple[str, ...]],
    fixed: Mapping[str, str],
    varied: Mapping[str, tuple[str, ...]],
    *,
    default: bool = True,
) -> tuple[Job, ...]:
    """A job for each of the others, which differ so from the file; raise InputError for what is no key."""
    return tuple(_job(scenario, other, fixed, varied, default=default) for other in others)


def _job(
    scenario: Scenario,
    other: tuple[str, ...],
    fixed: Mapping[str, str],
    varied: Mapping[str, tuple[str, ...]],
    *,
    default: bool,
) -> Job:
    given = {**{key: (value,) for key, value in fixed.items()}, **varied}
    replicas = frozenset(map(_number, given[DP])) if DP in given else None
    overrides = (*other, *(f"{key}={value}" for key, value in fixed.items() if key != DP))
    setup = scenario.resolve_unchecked(overrides)
    usual = _usual(setup) if default else {}
    values = {key: item for key, item in usual.items() if key not in fixed} | {
        key: element for key, element in varied.items() if key != DP
    }
    objects = {}
    for key, entry in values.items():
        for value in entry:
            beside = (f"{PP}=4",) if key == SCHEDULE else ()  # a pipeline of which every schedule can be read
            read = scenario.resolve_unchecked((*overrides, *beside, f"{key}={value}")) if value != AS_TP else setup
            if key in _READ:
                objects[key, value] = _part(read, key)
    for key in usual.keys() & _READ.keys() & values.keys() - varied.keys():
        if _part(setup, key) not in (objects[key, value] for value in values[key]):
            own = _written(scenario, key)
            objects[key, own] = _part(setup, key)
            values[key] = (own, *values[key])
    follows = SEQUENCE_PARALLEL not in {**given, **values}
    return Job(overrides, setup, values, objects, replicas, follows)


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InputError(f"{DP}: {text!r} is not a number; write such as {DP}=64") from None


def _part(setup: ResolvedScenario, key: str) -> Any:
    """What a setup has for a key whose values are no numbers."""
    return {SCHEDULE: setup.schedule, DATA: setup.layout.data, RECOMPUTE: setup.training.recompute}[key]


def _written(scenario: Scenario, key: str) -> str:
    """What the file has for a key, as a text of YAML."""
    value: Any = scenario.raw_mapping
    for part in key.split("."):
        value = value[part]
    return value if isinstance(value, str) else dumps(value)


def _usual(setup: ResolvedScenario) -> dict[str, tuple[str, ...]]:
    """The default values of keys that vary."""
    layout, training, model = setup.layout.as_configured, setup.training, setup.model
    gpus, domain = setup.cluster.gpu_count, setup.cluster.unit_sizes.domain_gpus
    heads = math.gcd(*(distinct_attention.heads for distinct_attention in model.distinct_attentions))
    routed = _routed(setup)
    stages = [divisor for divisor in divisors(gpus) if divisor <= min(_MOST_STAGES, model.layer_count)]
    microbatches = _OF_MIXTURES if routed else _MICROBATCHES
    cp = [item for item in _POWERS if item == 1 or training.sequence // item >= _LONG]
    found = {
        TP: _with([element for element in _POWERS if element <= domain and heads % element == 0], layout.tp),
        CP: _with(cp, layout.cp),
        PP: _with(stages, layout.pp),
        SCHEDULE: tuple(_schedules(setup)),
        DATA: tuple(_strategies(setup)),
        MICROBATCH: _with(
            [microbatch for microbatch in microbatches if training.global_batch % microbatch == 0], training.microbatch
        ),
        RECOMPUTE: tuple(_recomputes(setup)),
    }
    if not routed:  # or all tensor-parallel ranks would send the same tokens to experts
        found[SEQUENCE_PARALLEL] = ("true", "false")
    else:
        experts = math.gcd(*(moe_mlp.experts for moe_mlp in routed))
        found[EP] = _with(
            [entry for entry in _POWERS if experts % entry == 0 and entry <= min(gpus, _MOST_EXPERTS)], layout.ep
        )
        found[ETP] = tuple(dict.fromkeys(("1", AS_TP if layout.etp is None else str(layout.etp))))
        if layout.overlap_expert_communication:
            found[OVERLAP] = ("false", "true")
    return {key: each for key, each in found.items() if len(each) > 1}


def _routed(setup: ResolvedScenario) -> list[MoeMlp]:
    """The model's mixtures in which there is something to choose."""
    return [distinct_moe for distinct_moe in setup.model.distinct_moes if distinct_moe.single_dense_mlp is None]


def _schedules(setup: ResolvedScenario) -> Iterator[str]:
    for name in setup.framework.supported_layouts.schedules:
        if name == "interleaved":
            several = _CHUNKS_OF_MIXTURES if _routed(setup) else _CHUNKS
            yield from (f"{{interleaved: {{chunks: {chunks}}}}}" for chunks in several)
        else:
            yield name


def _strategies(setup: ResolvedScenario) -> Iterator[str]:
    runs, domain, gpus = (
        setup.framework.supported_layouts,
        setup.cluster.unit_sizes.domain_gpus,
        setup.cluster.gpu_count,
    )
    for name in dict.fromkeys((*runs.data, *runs.data_beside_pipeline)):
        if name == "ddp" and _routed(setup) and "zero1" in runs.data:
            continue  # the same communication, and more memory, where memory is short
        if name == "hsdp":
            shards = [domain * 4**power for power in range(_SHARDS) if 1 < domain * 4**power < gpus]
            yield from (f"{{hsdp: {{shard: {shard}}}}}" for shard in shards)
        else:
            yield name


def _recomputes(setup: ResolvedScenario) -> Iterator[str]:
    """Nothing, all, and between them some layers of each stage, or what recipes of mixtures and of MLA name."""
    model = setup.model
    yield "none"
    if setup.training.attention.value == "standard":
        yield "selective"
    latent = any(isinstance(distinct_attention, LatentAttention) for distinct_attention in model.distinct_attentions)
    if _routed(setup):
        yield f"{{modules: [layernorm, moe_act{', mla_up_proj' if latent else ''}]}}"
    else:
        yield from (f"{{layers: {layers}}}" for layers in _LAYERS if layers < model.layer_count)
    yield "full"


def _with(values: Iterable[int], own: int) -> tuple[str, ...]:
    return tuple(map(str, sorted({*values, own})))
