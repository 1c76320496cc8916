"""Which layouts of a job are there?

A space is one job or several, of which each is a scenario on so many GPUs of some cluster, and for some keys of its
file the values that they take; what is left out stays as the file has it. Keys are those of `--set`. Data parallelism
follows: it is what the other degrees leave of the GPUs. Where sequence parallelism does not vary it goes with tensor
parallelism, and layers are dealt evenly to other numbers of stages, unless these keys are named. Combinations that
break one of `rules` are counted.

>>> from clustersim import Scenario
>>> tiny = Scenario.from_mapping({"model": "llama-tiny", "cluster": {"name": "dgx-h100", "gpus": 8},
...                               "training": {"sequence": 512, "global_batch": 8}})
>>> space = Space.only(tiny, {"layout.tp": ["4", "8"]})
>>> for each in space.candidates({}):
...     print(*each.overrides)
layout.tp=4 layout.sequence_parallel=true layout.dp=2
layout.tp=8 layout.sequence_parallel=true layout.dp=1
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Self

from clustersim.build import require_scenario
from clustersim.common.data_files import is_path
from clustersim.common.errors import InputError
from clustersim.planning.layouts.config_keys import DP, ORDER, PP, SCHEDULE, SEQUENCE_PARALLEL, SPLIT, TP
from clustersim.planning.layouts.pruning_rules import Rule, rules_of
from clustersim.planning.layouts.search_jobs import Job, jobs_of
from clustersim.results.search_result import Pruned
from clustersim.scenario import Scenario
from clustersim.scenario.resolved import ResolvedScenario

_PLAIN: Final = ("1", "1f1b", "none", "ddp", "even", "false")


@dataclass(frozen=True, slots=True)
class Candidate:
    """One layout: what `--set` would be given. job: the place of its job in the space."""

    overrides: tuple[str, ...]
    job: int = 0

    @property
    def plainness(self) -> tuple[int, int, str]:
        """Of layouts that are as fast, the one with the least is preferred: fewest keys that are not plain."""
        told = [override for override in self.overrides if override.partition("=")[2] not in _PLAIN]
        return len(told), len(" ".join(self.overrides)), " ".join(self.overrides)


@dataclass(frozen=True, slots=True)
class Space:
    """Layouts of some jobs. named: keys whose values somebody chose."""

    scenario: Scenario
    jobs: tuple[Job, ...]
    named: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        scenario: Scenario,
        fix: Mapping[str, object] | None = None,
        vary: Mapping[str, Iterable[object]] | None = None,
        *,
        gpus: Iterable[int] = (),
        clusters: Iterable[str] = (),
        batch_per_gpu: bool = False,
    ) -> Self:
        """The default space, with keys that are fixed or that vary otherwise; raise InputError for what is no key.

        gpus, clusters: sizes and clusters to lay the job out on, each with each; none: the file's.
        batch_per_gpu: a step has as many sequences for each GPU as in the file, instead of as many in all.
        """
        require_scenario(scenario)
        fixed, varied = _fixed(fix or {}), _varied(vary or {})
        _require(fixed, varied)
        others = _others(scenario, tuple(gpus), tuple(clusters), batch_per_gpu=batch_per_gpu)
        return cls(scenario, jobs_of(scenario, others, fixed, varied), frozenset((*fixed, *varied)))

    @classmethod
    def only(cls, scenario: Scenario, vary: Mapping[str, Iterable[object]]) -> Self:
        """The space in which nothing varies that is not named; raise InputError for what is no key."""
        varied = _varied(vary)
        _require({}, varied)
        return cls(scenario, jobs_of(scenario, [()], {}, varied, default=False), frozenset(varied))

    @property
    def size(self) -> int:
        """How many combinations of values there are."""
        return sum(job.size for job in self.jobs)

    def candidates(self, aside: dict[str, Pruned]) -> Iterator[Candidate]:
        """The layouts that break no rule, each once. aside: is told how many break which."""
        for place, job in enumerate(self.jobs):
            for setup, values in _Walk(job, rules_of(job, self.named), aside).combinations():
                yield Candidate((*job.overrides, *self._overrides(job, setup, values)), place)

    def _overrides(self, job: Job, setup: ResolvedScenario, values: Mapping[str, str]) -> Iterator[str]:
        """What is chosen, and what follows from it."""
        layout = setup.layout.as_configured
        yield from (f"{key}={job.spelt(key, value, layout)}" for key, value in values.items())
        if TP in values and job.follows:
            yield f"{SEQUENCE_PARALLEL}={'true' if layout.sequence_parallel else 'false'}"
        if values.keys() & {PP, SCHEDULE} and SPLIT not in self.named and setup.layout.layers_per_stage is None:
            yield f"{SPLIT}=even"
        yield f"{DP}={layout.dp}"


class _Walk:
    """All combinations of a job's values, but for those that break a rule."""

    def __init__(self, job: Job, rules: Iterable[Rule], aside: dict[str, Pruned]) -> None:
        self._job, self._aside = job, aside
        self._keys = sorted(job.values, key=lambda key: ORDER.index(key) if key in ORDER else len(ORDER))
        self._rules: list[list[Rule]] = [[] for _ in range(len(self._keys) + 1)]
        for rule in rules:  # asked once all is chosen that it depends on
            last = max((place for place, key in enumerate(self._keys, 1) if key in rule.needs), default=0)
            self._rules[last].append(rule)

    def combinations(self) -> Iterator[tuple[ResolvedScenario, Mapping[str, str]]]:
        """Those that break none: what a scenario of them has, as far as rules ask, and the values of keys."""
        return self._below(0, {})

    def _below(self, depth: int, values: dict[str, str]) -> Iterator[tuple[ResolvedScenario, Mapping[str, str]]]:
        try:
            setup = self._job.at(values)
            broken = next((said for rule in self._rules[depth] for said in rule.broken(setup, values)), "")
        except InputError as error:
            broken = str(error)
        if broken:
            rest = math.prod(len(self._job.values[key]) for key in self._keys[depth:])
            add(self._aside, broken, rest)
        elif depth == len(self._keys):
            yield setup, values
        else:
            key = self._keys[depth]
            for value in self._job.values[key]:
                yield from self._below(depth + 1, {**values, key: value})


def add(aside: dict[str, Pruned], said: str, count: int = 1) -> None:
    """Count what a sentence `reason: what it is about` is said of."""
    reason, _, _ = said.partition(": ")
    known = aside.get(reason)
    aside[reason] = Pruned(count, said) if known is None else Pruned(known.count + count, known.example)


def _varied(vary: Mapping[str, Iterable[object]]) -> dict[str, tuple[str, ...]]:
    for key, values in vary.items():
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise InputError(f"vary: {key}: {values!r} is no list of values; write such as {{{key!r}: [1, 2, 4]}}")
    return {key: tuple(dict.fromkeys(map(str, values))) for key, values in vary.items()}


def _fixed(fix: Mapping[str, object]) -> dict[str, str]:
    """Keys that are fixed; raise TypeError for what is no mapping."""
    if not isinstance(fix, Mapping):
        raise TypeError(f"fix: {fix!r} is no mapping of keys to values; write such as {{{TP!r}: 8}}")
    return {key: str(value) for key, value in fix.items()}


def _require(fixed: Mapping[str, str], varied: Mapping[str, tuple[str, ...]]) -> None:
    for key in (item for item in varied if not varied[item]):
        raise InputError(f"--vary {key}: has no values; write such as {TP}=1,2,4")
    both = next((key for key in fixed if key in varied), None)
    if both is not None:
        raise InputError(f"{both} is fixed and varied; leave one of them out")
    for key in (element for element in (*fixed, *varied) if element.partition(".")[0] == "cluster"):
        raise InputError(f"{key}: clusters are no layouts; gpus and clusters name sizes and clusters to compare")


def _others(
    scenario: Scenario, gpus: tuple[int, ...], clusters: tuple[str, ...], *, batch_per_gpu: bool
) -> list[tuple[str, ...]]:
    """What makes the file's job each of the jobs."""
    own = scenario.cluster.gpu_count
    found = []
    for name in clusters or (None,):
        for size in gpus or (own,):
            if size < 1:
                raise InputError(f"gpus: {size} is not a number of GPUs; 1 is the fewest")
            batch = scenario.training.global_batch * size
            if batch_per_gpu and batch % own:
                raise InputError(
                    f"gpus: {size} GPUs with as many sequences each as {own} have would need {batch / own:g}; "
                    "name multiples"
                )
            other = [] if name is None else _cluster(scenario, name)
            other += [f"cluster.gpus={size}"] if name is not None or size != own else []
            other += [f"training.global_batch={batch // own}"] if batch_per_gpu and size != own else []
            found.append(tuple(other))
    return found


def _cluster(scenario: Scenario, name: str) -> list[str]:
    """What puts a scenario on another cluster, a shipped one or one of a file."""
    key, other = ("path", "name") if is_path(name) else ("name", "path")
    return [*([f"cluster.{other}=null"] if other in scenario.raw_mapping["cluster"] else []), f"cluster.{key}={name}"]
