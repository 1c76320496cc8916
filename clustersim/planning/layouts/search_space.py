"""Which layouts of a job are there?

A space has one or several jobs, each a scenario on some GPUs of a cluster, and the values of some keys of
its file; all other keys stay as in the file. Keys are those of `--set`. Data parallelism follows from the
other degrees and the GPUs. Unless these keys are named, sequence parallelism follows tensor parallelism
where it does not vary, and layers are partitioned evenly over other stage counts. Combinations that violate
a rule (`pruning_rules`) are counted.

>>> from clustersim import Scenario
>>> tiny = Scenario.from_mapping({"model": "llama-tiny", "cluster": {"name": "dgx-h100", "gpus": 8},
...                               "training": {"sequence": 512, "global_batch": 8}})
>>> space = SearchSpace.restricted_to(tiny, {"layout.tp": ["4", "8"]})
>>> for candidate in space.candidates({}):
...     print(*candidate.overrides)
layout.tp=4 layout.sequence_parallel=true layout.dp=2
layout.tp=8 layout.sequence_parallel=true layout.dp=1
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Final, Self

from clustersim.build import require_scenario
from clustersim.common.data_files import find_file, is_path
from clustersim.common.errors import InputError
from clustersim.parallel.layer_partition import evened
from clustersim.planning.layouts.config_keys import (
    DP,
    KEY_ORDER,
    LAYERS_PER_STAGE,
    OUTER_KEYS,
    PP,
    SCHEDULE,
    SEQUENCE_PARALLEL,
    TP,
)
from clustersim.planning.layouts.outer_variants import outer_distance
from clustersim.planning.layouts.pruning_rules import PruningRule, pruning_rules
from clustersim.planning.layouts.search_jobs import SearchJob, build_job
from clustersim.results.search_result import PrunedLayouts, SetAsideJob
from clustersim.scenario import Scenario
from clustersim.scenario.resolved import ResolvedScenario

_SIMPLE_VALUES: Final = ("1", "1f1b", "none", "ddp", "even", "false")
_NO_LOCAL_TRAINING: Final = "the scenario trains in step; write such as diloco: {inner_steps: 100} into it"


@dataclass(frozen=True, slots=True)
class LayoutCandidate:
    """One layout, as arguments of `--set`. job_index: index of its job in the space."""

    overrides: tuple[str, ...]
    job_index: int = 0

    @property
    def complexity_key(self) -> tuple[tuple[int, float, int, int], int, int, str]:
        """Sort key among equally good layouts, lowest preferred.

        Closest to synchronous training, then fewest keys with non-default values.
        """
        layout = [override for override in self.overrides if override.partition("=")[0] not in OUTER_KEYS]
        non_default = [override for override in layout if override.partition("=")[2] not in _SIMPLE_VALUES]
        return outer_distance(self.overrides), len(non_default), len(" ".join(layout)), " ".join(self.overrides)


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """Layouts of some jobs. user_keys: keys whose values the user chose; set_aside: jobs that are impossible."""

    scenario: Scenario
    jobs: tuple[SearchJob, ...]
    user_keys: frozenset[str] = frozenset()
    set_aside: tuple[SetAsideJob, ...] = ()

    @classmethod
    def from_scenario(
        cls,
        scenario: Scenario,
        fix: Mapping[str, object] | None = None,
        vary: Mapping[str, Iterable[object]] | None = None,
        *,
        gpus: Iterable[int] = (),
        clusters: Iterable[str] = (),
        batch_per_gpu: bool = False,
    ) -> Self:
        """The default space, with keys fixed or varied as given; raise InputError for unknown keys.

        gpus, clusters: sizes and clusters for the job, in all combinations; empty: the file's. A size that is
        impossible is set aside, if another is possible. batch_per_gpu: scale the global batch with the GPUs instead
        of keeping it.
        """
        fixed, varied = _parse_fixed(fix or {}), _parse_varied(vary or {})
        _require_valid_keys(require_scenario(scenario), fixed, varied)
        cluster_overrides = {name: _cluster_overrides(scenario, name) for name in clusters} or {"": []}
        jobs, set_aside = list[SearchJob](), list[SetAsideJob]()
        for (name, overrides), size in product(cluster_overrides.items(), [*gpus] or [scenario.cluster.gpu_count]):
            try:
                sized = [*overrides, *_size_overrides(scenario, size, name, batch_per_gpu=batch_per_gpu)]
                jobs.append(build_job(scenario, tuple(sized), fixed, varied))
            except InputError as error:
                set_aside.append(SetAsideJob(f"{size:,} GPUs{f' of {name}' if name else ''}", str(error)))
        if not jobs:
            raise InputError("; ".join(dict.fromkeys(job.reason for job in set_aside)))
        return cls(scenario, tuple(jobs), frozenset((*fixed, *varied)), tuple(set_aside))

    @classmethod
    def restricted_to(cls, scenario: Scenario, vary: Mapping[str, Iterable[object]]) -> Self:
        """The space in which only the given keys vary; raise InputError for unknown keys."""
        varied = _parse_varied(vary)
        _require_valid_keys(scenario, {}, varied)
        return cls(scenario, (build_job(scenario, (), {}, varied, use_defaults=False),), frozenset(varied))

    @property
    def combination_count(self) -> int:
        """Number of combinations of values."""
        return sum(job.combination_count for job in self.jobs)

    def candidates(self, pruned: dict[str, PrunedLayouts]) -> Iterator[LayoutCandidate]:
        """The layouts that violate no rule, each once. pruned: collects counts of the others by reason."""
        for job_index, job in enumerate(self.jobs):
            for resolved, values in _CombinationWalk(job, pruning_rules(job, self.user_keys), pruned).combinations():
                yield LayoutCandidate((*job.overrides, *self._candidate_overrides(job, resolved, values)), job_index)

    def _candidate_overrides(
        self, job: SearchJob, resolved: ResolvedScenario, values: Mapping[str, str]
    ) -> Iterator[str]:
        """What is chosen, and what follows from it."""
        layout = resolved.layout.as_configured
        yield from (f"{key}={job.override_value(key, value, layout)}" for key, value in values.items())
        if TP in values and job.couples_sequence_parallel:
            yield f"{SEQUENCE_PARALLEL}={'true' if layout.sequence_parallel else 'false'}"
        if (
            values.keys() & {PP, SCHEDULE}
            and LAYERS_PER_STAGE not in self.user_keys
            and resolved.layout.layers_per_stage == evened(resolved.layout.layers_per_stage)
        ):
            yield f"{LAYERS_PER_STAGE}=even"
        yield f"{DP}={layout.dp}"


class _CombinationWalk:
    """Depth-first walk over all combinations of a job's values, except those that violate a rule."""

    def __init__(self, job: SearchJob, rules: Iterable[PruningRule], pruned: dict[str, PrunedLayouts]) -> None:
        self._job, self._pruned = job, pruned
        self._keys = sorted(job.values, key=lambda key: KEY_ORDER.index(key) if key in KEY_ORDER else len(KEY_ORDER))
        self._rules: list[list[PruningRule]] = [[] for _ in range(len(self._keys) + 1)]
        for rule in rules:  # applied once all keys are chosen that it depends on
            last = max((depth for depth, key in enumerate(self._keys, 1) if key in rule.depends_on), default=0)
            self._rules[last].append(rule)

    def combinations(self) -> Iterator[tuple[ResolvedScenario, Mapping[str, str]]]:
        """(resolved scenario as far as rules need it, values by key) of each legal combination."""
        return self._descend(0, {})

    def _descend(self, depth: int, values: dict[str, str]) -> Iterator[tuple[ResolvedScenario, Mapping[str, str]]]:
        try:
            resolved = self._job.resolved_with(values)
            violation = next(
                (message for rule in self._rules[depth] for message in rule.find_violations(resolved, values)), ""
            )
        except InputError as error:
            violation = str(error)
        if violation:
            remaining_count = math.prod(len(self._job.values[key]) for key in self._keys[depth:])
            count_pruned(self._pruned, violation, remaining_count)
        elif depth == len(self._keys):
            yield resolved, values
        else:
            key = self._keys[depth]
            for value in self._job.values[key]:
                yield from self._descend(depth + 1, {**values, key: value})


def count_pruned(pruned: dict[str, PrunedLayouts], message: str, count: int = 1) -> None:
    """Count a message `reason: detail` by its reason."""
    reason, _, _ = message.partition(": ")
    previous = pruned.get(reason)
    pruned[reason] = (
        PrunedLayouts(count, message) if previous is None else PrunedLayouts(previous.count + count, previous.example)
    )


def _parse_varied(vary: Mapping[str, Iterable[object]]) -> dict[str, tuple[str, ...]]:
    for key, values in vary.items():
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise InputError(f"vary: {key}: {values!r} is no list of values; write such as {{{key!r}: [1, 2, 4]}}")
    return {key: tuple(dict.fromkeys(map(str, values))) for key, values in vary.items()}


def _parse_fixed(fix: Mapping[str, object]) -> dict[str, str]:
    """Fixed keys; raise TypeError if it is not a mapping."""
    if not isinstance(fix, Mapping):
        raise TypeError(f"fix: {fix!r} is no mapping of keys to values; write such as {{{TP!r}: 8}}")
    return {key: str(value) for key, value in fix.items()}


def _require_valid_keys(scenario: Scenario, fixed: Mapping[str, str], varied: Mapping[str, tuple[str, ...]]) -> None:
    for key in (varied_key for varied_key in varied if not varied[varied_key]):
        raise InputError(f"--vary {key}: has no values; write such as {TP}=1,2,4")
    both = next((key for key in fixed if key in varied), None)
    if both is not None:
        raise InputError(f"{both} is fixed and varied; leave one of them out")
    for key in (given_key for given_key in (*fixed, *varied) if given_key.partition(".")[0] == "cluster"):
        raise InputError(f"{key}: clusters are no layouts; gpus and clusters name sizes and clusters to compare")
    for key in (given_key for given_key in (*fixed, *varied) if given_key.partition(".")[0] == "diloco"):
        if scenario.diloco is None:
            raise InputError(f"{key}: {_NO_LOCAL_TRAINING}")


def _size_overrides(scenario: Scenario, size: int, cluster: str, *, batch_per_gpu: bool) -> Iterator[str]:
    """The overrides that give the file's job another size, on a cluster (empty: the file's)."""
    file_gpus = scenario.cluster.gpu_count
    if size < 1:
        raise InputError(f"gpus: {size} is not a number of GPUs; 1 is the fewest")
    batch = scenario.training.global_batch * size
    if batch_per_gpu and batch % file_gpus:
        raise InputError(
            f"gpus: {size} GPUs with as many sequences each as {file_gpus} have would need {batch / file_gpus:g}; "
            "name multiples"
        )
    if cluster or size != file_gpus or scenario.cluster.sites is not None:  # sites have fixed sizes
        yield f"cluster.gpus={size}"
    if batch_per_gpu and size != file_gpus:
        yield f"training.global_batch={batch // file_gpus}"


def _cluster_overrides(scenario: Scenario, name: str) -> list[str]:
    """The overrides that put a scenario on another cluster, a preset or a file; raise InputError for an unknown one."""
    if not is_path(name):
        find_file("clusters", name)
    key, unused_key = ("path", "name") if is_path(name) else ("name", "path")
    return [
        *([f"cluster.{unused_key}=null"] if unused_key in scenario.raw_mapping["cluster"] else []),
        f"cluster.{key}={name}",
    ]
