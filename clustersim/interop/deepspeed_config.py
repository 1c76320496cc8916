"""Which ZeRO stage do DeepSpeed's arguments and its JSON define?"""

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from clustersim.common.errors import InputError, suggest_nearest
from clustersim.common.files import read_first_text
from clustersim.common.input_files import parse_json
from clustersim.interop.megatron_arguments import MegatronArguments
from clustersim.interop.shell.unknowns import HOLE, unmarked

STRATEGY_BY_STAGE: Final = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}
_MAX_CONFIG: Final = 1_000_000


_FORK_FLAGS: Final = frozenset({
    "deepspeed", "zero-stage", "no-pipeline-parallel", "deepspeed-activation-checkpointing", "moe-expert-parallel-size",
    "ds-sequence-parallel-size", "mlp-type", "create-moe-param-group",
})  # fmt: skip
"""Flags that deepspeedai/Megatron-DeepSpeed and its forks have, and Megatron-LM has not."""
_MLP_TYPES: Final = {"standard": "standard", "residual": "residual"}


@dataclass(frozen=True, slots=True)
class ZeroSettings:
    """What DeepSpeed decides. data: the scenario's `layout.data`."""

    data: Any


def data_parallel_of_stage(stage: int, *, overlap_comm: object) -> Any:
    """`layout.data` of a ZeRO stage from 0 to 3. overlap_comm: as the JSON has it, None: not at all.

    Gradients of stages 1 and 2 are overlapped only where it is true (deepspeed/runtime/zero/config.py).
    """
    is_asked_for = overlap_comm is True and stage in (1, 2)
    return {"zero": {"stage": stage, "overlap": True}} if is_asked_for else STRATEGY_BY_STAGE[stage]


def zero_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """`zero_optimization`, which was once a bool: stage 1."""
    zero = config.get("zero_optimization", {})
    return zero if isinstance(zero, Mapping) else {"stage": int(bool(zero))}


def offload_device(zero: Mapping[str, Any], name: str) -> object:
    """The device that a section of `zero_optimization` offloads to, or that stands in its place; "none" without it."""
    section = zero.get(name) or "none"
    return section.get("device", "none") if isinstance(section, Mapping) else section


def is_deepspeed_fork(parsed: MegatronArguments) -> bool:
    """Whether arguments are Megatron-DeepSpeed's, whose names and defaults of experts are its own."""
    return not _FORK_FLAGS.isdisjoint(parsed.arguments)


def fork_experts(parsed: MegatronArguments, ffn: int) -> dict[str, Any]:
    """The `experts` section of Megatron-DeepSpeed's arguments: every second layer has experts, one for a token."""
    for name in ("mos", "kd"):
        if parsed.has(name):
            raise parsed.error(name, "a teacher that is distilled is not modelled")
    counts = parsed.values("num-experts")
    layer_step = parsed.positive_integer("expert-interval", 2)
    top_k = parsed.positive_integer("topk", 1)
    capacity = parsed.real_number("moe-train-capacity-factor", 1.0)
    keeps_tokens = parsed.has("disable-moe-token-dropping")
    is_residual = parsed.choice("mlp-type", _MLP_TYPES, "standard") == "residual"
    if not counts or set(counts) == {"1"}:
        return {}
    if len(set(counts)) > 1:
        raise parsed.error("num-experts", f"{' '.join(counts)}: layers with different numbers are not modelled")
    if is_residual:
        raise parsed.error("mlp-type", "residual: experts with a dense layer of their own weights are not modelled")
    experts: dict[str, Any] = {
        "count": parsed.required_integer("num-experts"), "top_k": top_k, "ffn": ffn,
        "bias": not parsed.has("disable-bias-linear") or None,
        "capacity_factor": None if keeps_tokens else capacity,
        "interleave_moe_layer_step": layer_step if layer_step > 1 else None,
    }  # fmt: skip
    return {"experts": {key: value for key, value in experts.items() if value is not None}}


def zero_settings(parsed: MegatronArguments, files: Mapping[str, str]) -> ZeroSettings | None:
    """DeepSpeed's settings; None: the training does not use it.

    files: contents of files by their path, as the script writes them. The JSON's stage counts, then --zero-stage.
    """
    is_used = parsed.has("deepspeed")
    has_pipeline_module = not parsed.has("no-pipeline-parallel")
    for name in ("deepspeed-activation-checkpointing", "create-moe-param-group"):
        parsed.has(name)
    path = parsed.unchecked("deepspeed_config")
    stage = parsed.text("zero-stage")
    if not is_used:
        given = [name for name in ("zero-stage", "deepspeed_config") if parsed.has(name)]
        parsed.assumptions += [f"--{name} has no effect, as --deepspeed is not given" for name in given]
        return None
    config = {} if path is None else _read_config(parsed, path, files)
    overlap_comm = None
    if config:
        stage = str(zero_section(config).get("stage", 0))
        overlap_comm = zero_section(config).get("overlap_comm")
        _reject_offload(parsed, config)
        if config.get("compression_training"):
            raise parsed.error("deepspeed_config", "its compression_training is not modelled")
    if stage is None and config is None:
        raise parsed.error(
            "deepspeed_config",
            f"{parsed.shown(path or '')} is not next to the script, so its ZeRO stage is not known; add --zero-stage",
        )
    number = (stage or "0").removesuffix(".0")
    if number == "0" and parsed.has("bf16"):
        number = "1"  # DeepSpeed's BF16_Optimizer shards its states whatever the stage
    if not number.isdecimal() or int(number) not in STRATEGY_BY_STAGE:
        raise parsed.error(
            "zero-stage", f"{number!r} is no stage; {suggest_nearest(number, map(str, STRATEGY_BY_STAGE))}"
        )
    # Engines refuse to overlap for a PipelineModule, and did in stage 1 for years (deepspeed/runtime/engine.py)
    is_heeded = number == "2" and not has_pipeline_module
    return ZeroSettings(data_parallel_of_stage(int(number), overlap_comm=overlap_comm if is_heeded else None))


def _read_config(parsed: MegatronArguments, path: str, files: Mapping[str, str]) -> Mapping[str, Any] | None:
    """The JSON that the script writes, or that is next to it."""
    text = files.get(unmarked(path))
    if text is None and parsed.context.directory is not None and "\0" not in path:
        directory = parsed.context.directory
        text = read_first_text((directory / path, directory / posixpath.basename(path)), _MAX_CONFIG)
    if text is None:
        return None
    try:
        config = parse_json(HOLE.sub("null", text))
    except InputError as error:
        raise parsed.error("deepspeed_config", f"{parsed.shown(path)} {error}") from None
    if not isinstance(config, dict):
        raise parsed.error("deepspeed_config", f"{parsed.shown(path)} holds no mapping")
    return config


def _reject_offload(parsed: MegatronArguments, config: Mapping[str, Any]) -> None:
    for name in ("offload_optimizer", "offload_param"):
        if offload_device(zero_section(config), name) != "none":
            raise InputError(
                f"{parsed.source}: --deepspeed_config: its {name} is not read; leave it out, and write it as "
                "training.offload in the scenario"
            )
