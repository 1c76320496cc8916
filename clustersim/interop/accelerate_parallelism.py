"""How does Accelerate's `ParallelismConfig` share the work over ranks?

Section `parallelism_config` of its YAML (accelerate/commands/launch.py and parallelism_config.py). `cp_size` is
PyTorch's `context_parallel`, whose blocks are gathered (`allgather`, the default) or sent on (`alltoall`); `sp_size` is
DeepSpeed's Ulysses.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from clustersim.common.errors import InputError, suggest_nearest

_PREFIX: Final = "parallelism_config_"
_DEGREES: Final = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
_BACKENDS: Final = {"cp_backend": "torch", "sp_backend": "deepspeed"}
_STRATEGY: Final = "cp_comm_strategy"
_KIND_BY_STRATEGY: Final = {"allgather": "all_gather", "alltoall": "ring"}
_WITHOUT_EFFECT: Final = ("sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation")


@dataclass(frozen=True, slots=True)
class AccelerateParallelism:
    """Degrees of parallelism. cp_kind: a key of `layout`, "" without context parallelism."""

    tp: int = 1
    cp: int = 1
    cp_kind: str = ""
    dp_replicate: int = 1
    dp_shard: int = 1


def accelerate_parallelism(content: Mapping[str, Any], source: str) -> AccelerateParallelism:
    """What a configuration says; raises InputError where it says what is not modelled."""
    section = content.get("parallelism_config") or {}
    if not isinstance(section, Mapping):
        raise InputError(f"{source}: parallelism_config: {section!r} is no mapping")
    keys = {key.removeprefix(_PREFIX): value for key, value in section.items()}
    read_keys = (*_DEGREES, *_BACKENDS, _STRATEGY, *_WITHOUT_EFFECT)
    for key in keys:
        if key not in read_keys:
            raise InputError(
                f"{source}: parallelism_config.{_PREFIX}{key}: is not read; {suggest_nearest(key, read_keys)}"
            )
    for key, backend in _BACKENDS.items():
        if keys.get(key, backend) != backend:
            raise _error(source, key, keys[key], (backend,))
    degrees = {key: _degree(keys, key, source) for key in _DEGREES}
    cp, sp = degrees["cp_size"], degrees["sp_size"]
    if cp > 1 and sp > 1:
        raise InputError(f"{source}: parallelism_config: cp_size {cp} and sp_size {sp}; one of them splits sequences")
    strategy = keys.get(_STRATEGY, "allgather")
    if strategy not in _KIND_BY_STRATEGY:
        raise _error(source, _STRATEGY, strategy, tuple(_KIND_BY_STRATEGY))
    kind = "ulysses" if sp > 1 else _KIND_BY_STRATEGY[strategy] if cp > 1 else ""
    return AccelerateParallelism(
        degrees["tp_size"], cp * sp, kind, degrees["dp_replicate_size"], degrees["dp_shard_size"]
    )


def _degree(keys: Mapping[str, Any], key: str, source: str) -> int:
    value = keys.get(key, 1)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{source}: parallelism_config.{_PREFIX}{key}: {value!r} is not a whole number above 0")
    return value


def _error(source: str, key: str, value: object, allowed: tuple[str, ...]) -> InputError:
    return InputError(f"{source}: parallelism_config.{_PREFIX}{key}: {value!r} is not read; {' and '.join(allowed)} is")
