"""How does torchtitan split layers into stages, and which schedules does it have?

torchtitan/distributed/pipeline_parallel.py in v0.2.2: embedding and head count as layers, the first stages take one
more where they do not divide, or every stage lists its modules.
"""

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any, Final

from clustersim.interop.torchtitan_config import Job

SCHEDULES: Final[Mapping[str, str]] = {
    "1F1B": "1f1b",
    "GPipe": "gpipe",
    "Interleaved1F1B": "interleaved",
    "LoopedBFS": "bfs",
    "ZBVZeroBubble": "zb-v",
    "DualPipeV": "dualpipev",
}
"""Pipeline schedules of torch.distributed.pipelining, and ours."""
SECTION: Final = "parallelism"
MODULES: Final = "module_fqns_per_model_part"
_LONGEST: Final = "pipeline_parallel_layers_per_stage"
_SCHEDULE: Final = "pipeline_parallel_schedule"
_CSV: Final = "pipeline_parallel_schedule_csv"
_ENDS: Final = ("pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers")
_SINGLE: Final = ("1f1b", "gpipe")
_CHUNKED: Final = ("interleaved", "bfs")


def stages_of(job: Job, layers: int, pp: int) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Layers of each stage of a pipeline, and what `schedule` says; raise InputError for what torchtitan refuses."""
    name = job.word(SECTION, _SCHEDULE, SCHEDULES)
    if pp == 1:
        job.without_effect(SECTION, _LONGEST, _CSV, MODULES, *_ENDS, "pipeline_parallel_microbatch_size")
        return (layers,), {}
    counts = _listed(job, layers) if job.says(SECTION, MODULES) else _counts(job, layers, pp, name)
    chunks, over = divmod(len(counts), pp)
    if over:
        raise job.error(SECTION, MODULES, f"{len(counts)} stages do not go round {pp} pipeline ranks")
    if listed := job.text(SECTION, _CSV):
        return counts, {"schedule": listed}
    if chunks > 1 if name in _SINGLE else chunks != 2 and not (name in _CHUNKED and chunks > 2):
        asked = job.text(SECTION, _SCHEDULE)
        raise job.error(SECTION, _SCHEDULE, f"{asked} does not run {chunks} stages on each pipeline rank")
    if name in _CHUNKED:
        return counts, {"schedule": {name: {"chunks": chunks}}}
    return counts, {} if name == "1f1b" else {"schedule": name}


def single(schedule: str) -> bool:
    """Whether a schedule of ours has one stage on each rank."""
    return schedule in _SINGLE


def dealt(layers: int, stages: int, first: int = 1, last: int = 1) -> tuple[int, ...] | None:
    """Layers of each stage, where embedding and head count as so many; None where torchtitan refuses.

    >>> dealt(32, 4), dealt(126, 4)
    ((8, 9, 8, 7), (31, 32, 32, 31))
    """
    if stages == 1:
        return (layers,)
    each, more = divmod(layers + first + last, stages)
    if each < max(1, first, last):
        return None
    counts = [each + (stage < more) for stage in range(stages)]
    counts[0] -= first
    counts[-1] -= last
    return tuple(counts)


def _counts(job: Job, layers: int, pp: int, name: str) -> tuple[int, ...]:
    """As torchtitan deals them."""
    first, last = (job.whole(SECTION, end, 0) for end in _ENDS)
    most = job.whole_or_none(SECTION, _LONGEST)
    stages = pp * (1 if name in _SINGLE else 2) if most is None else ceil((layers + first + last) / most)
    if stages % pp:
        raise job.error(SECTION, _LONGEST, f"{most} makes {stages} stages, which do not go round {pp} pipeline ranks")
    found = dealt(layers, stages, first, last)
    if found is None:
        where = "pipeline_parallel_degree" if most is None else _LONGEST
        raise job.error(SECTION, where, f"{layers} layers and the ends are too few for {stages} stages")
    return found


def _listed(job: Job, layers: int) -> tuple[int, ...]:
    """As each stage lists its modules."""
    job.without_effect(SECTION, _LONGEST, *_ENDS)
    parts: Sequence[Sequence[str]] = job.lists(SECTION, MODULES)
    if [word for part in parts for word in part] != [word for part in modules([layers]) for word in part]:
        raise job.error(SECTION, MODULES, f"is not tok_embeddings, layers.0 to layers.{layers - 1}, norm and output")
    return tuple(sum(word.startswith("layers.") for word in part) for part in parts)


def modules(counts: Sequence[int]) -> list[list[str]]:
    """The modules of each stage with so many layers.

    >>> modules([1, 2])
    [['tok_embeddings', 'layers.0'], ['layers.1', 'layers.2', 'norm', 'output']]
    """
    found, at = [], 0
    for count in counts:
        found.append([f"layers.{number}" for number in range(at, at + count)])
        at += count
    found[0].insert(0, "tok_embeddings")
    found[-1] += ["norm", "output"]
    return found
