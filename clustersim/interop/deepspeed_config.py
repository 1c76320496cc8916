"""Which ZeRO stage do DeepSpeed's arguments and its JSON define?"""

import json
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from clustersim.common.errors import InputError, suggest_nearest
from clustersim.interop.megatron_arguments import MegatronArguments
from clustersim.interop.shell.unknowns import HOLE

_STRATEGY_BY_STAGE: Final = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}
_MAX_CONFIG: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class ZeroSettings:
    """What DeepSpeed decides. strategy: of the data-parallel ranks."""

    strategy: str


def zero_settings(parsed: MegatronArguments, files: Mapping[str, str]) -> ZeroSettings | None:
    """DeepSpeed's settings; None: the training does not use it.

    files: contents of files by their path, as the script writes them. The JSON's stage counts, then --zero-stage.
    """
    is_used = parsed.has("deepspeed")
    for name in ("deepspeed-activation-checkpointing", "no-pipeline-parallel"):
        parsed.has(name)
    path = parsed.arguments.get("deepspeed_config", parsed.arguments.get("deepspeed-config", ()))
    stage = parsed.text("zero-stage")
    _reject_sequence_parallelism(parsed)
    if not is_used:
        return None
    config = _read_config(parsed, path[0], files) if path else None
    if config is not None:
        stage = str(_stage_of(config))
        _reject_offload(parsed, config)
    if stage is None:
        parsed.assumptions.append("DeepSpeed's ZeRO stage is 0, as its JSON is not beside the script")
    number = stage or "0"
    if not number.replace(".0", "").isdecimal() or int(float(number)) not in _STRATEGY_BY_STAGE:
        raise parsed.error(
            "zero-stage", f"{number!r} is no stage; {suggest_nearest(number, map(str, _STRATEGY_BY_STAGE))}"
        )
    return ZeroSettings(_STRATEGY_BY_STAGE[int(float(number))])


def _reject_sequence_parallelism(parsed: MegatronArguments) -> None:
    if parsed.positive_integer("ds-sequence-parallel-size") > 1:
        raise parsed.error("ds-sequence-parallel-size", "DeepSpeed's Ulysses is not modelled; rings are")


def _read_config(parsed: MegatronArguments, path: str, files: Mapping[str, str]) -> Mapping[str, Any] | None:
    """The JSON that the script writes, or that is beside it."""
    text = files.get(path)
    if text is None and parsed.directory is not None and "\0" not in path:
        text = _text_beside(parsed.directory, path)
    if text is None:
        return None
    try:
        config = json.loads(HOLE.sub("null", text))
    except (ValueError, RecursionError) as error:
        raise parsed.error("deepspeed_config", f"{parsed.shown(path)} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise parsed.error("deepspeed_config", f"{parsed.shown(path)} holds no mapping")
    return config


def _text_beside(directory: Path, path: str) -> str | None:
    for candidate in (directory / path, directory / posixpath.basename(path)):
        try:
            if candidate.is_file() and candidate.stat().st_size <= _MAX_CONFIG:
                return candidate.read_text(encoding="utf-8")
        except (OSError, ValueError):
            continue
    return None


def _stage_of(config: Mapping[str, Any]) -> object:
    zero = config.get("zero_optimization", {})
    return zero.get("stage", 0) if isinstance(zero, dict) else int(bool(zero))


def _reject_offload(parsed: MegatronArguments, config: Mapping[str, Any]) -> None:
    zero = config.get("zero_optimization", {})
    for name in ("offload_optimizer", "offload_param"):
        section = zero.get(name) if isinstance(zero, dict) else None
        if isinstance(section, dict) and section.get("device", "none") != "none":
            raise InputError(
                f"{parsed.source}: --deepspeed_config: its {name} is not read; leave it out, and write it as "
                "training.offload in the scenario"
            )
