"""How does torchtitan split layers into stages, and which schedules does it have?

torchtitan/distributed/pipeline_parallel.py in v0.2.2: embedding and head count as layers, the first stages
have one more if they do not divide evenly, or every stage lists its modules.
"""

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any, Final

from clustersim.interop.torchtitan_config import TorchtitanConfig

SCHEDULES: Final[Mapping[str, str]] = {
    "1F1B": "1f1b",
    "GPipe": "gpipe",
    "Interleaved1F1B": "interleaved",
    "LoopedBFS": "bfs",
    "ZBVZeroBubble": "zb-v",
    "DualPipeV": "dualpipev",
}
"""Pipeline schedules of torch.distributed.pipelining, and our names."""
SECTION: Final = "parallelism"
MODULES_KEY: Final = "module_fqns_per_model_part"
_LAYERS_PER_STAGE_KEY: Final = "pipeline_parallel_layers_per_stage"
_SCHEDULE_KEY: Final = "pipeline_parallel_schedule"
_SCHEDULE_CSV_KEY: Final = "pipeline_parallel_schedule_csv"
_END_LAYER_KEYS: Final = ("pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers")
_SINGLE_STAGE: Final = ("1f1b", "gpipe")
_MULTI_STAGE: Final = ("interleaved", "bfs")


def import_pipeline(config: TorchtitanConfig, layers: int, pp: int) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Layers of each pipeline stage, and the `schedule` entry; raises InputError for what torchtitan rejects."""
    name = config.choice(SECTION, _SCHEDULE_KEY, SCHEDULES)
    if pp == 1:
        config.mark_irrelevant(
            SECTION,
            _LAYERS_PER_STAGE_KEY,
            _SCHEDULE_CSV_KEY,
            MODULES_KEY,
            *_END_LAYER_KEYS,
            "pipeline_parallel_microbatch_size",
        )
        return (layers,), {}
    counts = (
        _layer_counts_from_modules(config, layers)
        if config.has_key(SECTION, MODULES_KEY)
        else _default_layer_counts(config, layers, pp, name)
    )
    chunks, remainder = divmod(len(counts), pp)
    if remainder:
        raise config.error(SECTION, MODULES_KEY, f"{len(counts)} stages are not a multiple of {pp} pipeline ranks")
    if csv_file := config.string(SECTION, _SCHEDULE_CSV_KEY):
        return counts, {"schedule": csv_file}
    if chunks > 1 if name in _SINGLE_STAGE else chunks != 2 and not (name in _MULTI_STAGE and chunks > 2):
        torch_name = config.string(SECTION, _SCHEDULE_KEY)
        raise config.error(SECTION, _SCHEDULE_KEY, f"{torch_name} does not run {chunks} stages on each pipeline rank")
    if name in _MULTI_STAGE:
        return counts, {"schedule": {name: {"chunks": chunks}}}
    return counts, {} if name == "1f1b" else {"schedule": name}


def is_single_stage(schedule: str) -> bool:
    """Whether a schedule has one stage per rank."""
    return schedule in _SINGLE_STAGE


def torchtitan_layer_split(layers: int, stages: int, first: int = 1, last: int = 1) -> tuple[int, ...] | None:
    """Layers per stage; embedding and head count as `first` and `last` layers; None if torchtitan rejects it.

    >>> torchtitan_layer_split(32, 4), torchtitan_layer_split(126, 4)
    ((8, 9, 8, 7), (31, 32, 32, 31))
    """
    if stages == 1:
        return (layers,)
    base_count, remainder = divmod(layers + first + last, stages)
    if base_count < max(1, first, last):
        return None
    counts = [base_count + (stage < remainder) for stage in range(stages)]
    counts[0] -= first
    counts[-1] -= last
    return tuple(counts)


def _default_layer_counts(config: TorchtitanConfig, layers: int, pp: int, name: str) -> tuple[int, ...]:
    """Layers of each stage by torchtitan's rule."""
    first, last = (config.integer(SECTION, end, 0) for end in _END_LAYER_KEYS)
    max_layers = config.optional_integer(SECTION, _LAYERS_PER_STAGE_KEY)
    stages = (
        pp * (1 if name in _SINGLE_STAGE else 2) if max_layers is None else ceil((layers + first + last) / max_layers)
    )
    if stages % pp:
        raise config.error(
            SECTION,
            _LAYERS_PER_STAGE_KEY,
            f"{max_layers} makes {stages} stages, which are not a multiple of {pp} pipeline ranks",
        )
    layer_counts = torchtitan_layer_split(layers, stages, first, last)
    if layer_counts is None:
        key = "pipeline_parallel_degree" if max_layers is None else _LAYERS_PER_STAGE_KEY
        raise config.error(SECTION, key, f"{layers} layers and the ends are too few for {stages} stages")
    return layer_counts


def _layer_counts_from_modules(config: TorchtitanConfig, layers: int) -> tuple[int, ...]:
    """Layers of each stage from the listed modules."""
    config.mark_irrelevant(SECTION, _LAYERS_PER_STAGE_KEY, *_END_LAYER_KEYS)
    stage_modules: Sequence[Sequence[str]] = config.nested_string_list(SECTION, MODULES_KEY)
    if [module for stage in stage_modules for module in stage] != [
        module for stage in stage_module_names([layers]) for module in stage
    ]:
        raise config.error(
            SECTION, MODULES_KEY, f"is not tok_embeddings, layers.0 to layers.{layers - 1}, norm and output"
        )
    return tuple(sum(module.startswith("layers.") for module in stage) for stage in stage_modules)


def stage_module_names(counts: Sequence[int]) -> list[list[str]]:
    """The module names of each stage with the given layer counts.

    >>> stage_module_names([1, 2])
    [['tok_embeddings', 'layers.0'], ['layers.1', 'layers.2', 'norm', 'output']]
    """
    stages, first_layer = [], 0
    for count in counts:
        stages.append([f"layers.{layer}" for layer in range(first_layer, first_layer + count)])
        first_layer += count
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", "output"]
    return stages
