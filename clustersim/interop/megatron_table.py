"""Which arguments does the table define that Megatron-LM prints when it starts?

The table has every argument by its name in Python, defaults included, between two headings; loggers may prefix its
lines. Values that are off are left out, others become the flags that set them.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from clustersim.common.errors import InputError

_HEADING: Final = re.compile(r"-{8,} (?:updated )?arguments -{8,}")
_END: Final = re.compile(r"-{8,} end of (?:updated )?arguments -{8,}")
_LINE: Final = re.compile(r"(?:^|[\s:\]])([A-Za-z_]\w*) \.{3,}(?: (.*))?$")
_HEADED_LINE: Final = re.compile(r"(?:^|[\s:\]])([A-Za-z_]\w*) (?:\.+(?: (.*))?| (\S.*))$")
"""A line below the heading, where long names have no dots."""
_PADDED: Final = re.compile(r"padded vocab \(size: \d+\) with \d+ dummy tokens \(new size: (\d+)\)")
_ZERO_STAGE: Final = re.compile(r"\bzero_optimization_stage \.{3,} (\d)")
"""DeepSpeed's own printout, behind the table: the stage that its JSON sets."""
_OF_DEEPSPEED: Final = ("zero_stage", "deepspeed_config")
_ESCAPES: Final = re.compile("\x1b\\[[0-9;]*m")
_OFF: Final = ("None", "False", "[]", "", "torch.float32")
"""Values that no flag sets; FP32 is the default of every format."""
FLAG_BY_ARGUMENT: Final[Mapping[str, str]] = {
    "virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank",
    "microbatch_group_size_per_vp_stage": "microbatch-group-size-per-virtual-pipeline-stage",
    "fp8": "fp8-format",
    "fp4": "fp4-format",
    "deepspeed_config": "deepspeed_config",
}
"""Arguments whose flag has another name."""
_SWITCHED_OFF: Final = {"add_bias_linear": "disable-bias-linear"}
"""Arguments that a flag turns off."""
_ONE_VALUE: Final = ("moe_layer_freq", "window_attn_skip_freq")
"""Lists that are one word on the command line."""
_DERIVED: Final[Mapping[str, str]] = {
    "encoder_num_layers": "num_layers",
    "encoder_seq_length": "seq_length",
    "decoder_num_layers": "num_layers",
    "decoder_seq_length": "seq_length",
    "expert_tensor_parallel_size": "tensor_model_parallel_size",
}
"""Arguments that equal another one where nobody sets them."""
_DEFAULTS: Final = {
    "hybrid_attention_ratio": "0.0", "hybrid_mlp_ratio": "0.0", "tensor_parallel_num_weight_shards": "1",
    "expert_tensor_parallel_num_weight_shards": "1", "img_h": "224", "img_w": "224", "patch_dim": "16",
    "bert_embedder_type": "megatron",
}  # fmt: skip
"""Defaults of arguments that define another step where they differ."""
_DTYPES: Final = {
    "torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.uint8": "fp8",
}  # fmt: skip
_MIN_LINES: Final = 20
_MAX_TABLE: Final = 500_000
"""Characters of a table; Megatron-LM's have up to 40,000, without prefixes."""


@dataclass(frozen=True, slots=True)
class ArgumentTable:
    """The arguments of a printed table. words: as of a command line; world_size: None where it is not printed."""

    shell_words: tuple[str, ...]
    world_size: str | None


def is_argument_table(text: str) -> bool:
    """Whether a text holds Megatron-LM's table of arguments."""
    if _HEADING.search(text):
        return True
    return sum(1 for _ in _matches(_LINE, text[:100_000])) >= _MIN_LINES


def _matches(form: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    """The lines of a form, without white space at their ends."""
    return filter(None, (form.search(line.rstrip()) for line in text.split("\n")))


def read_table(text: str, source: str) -> ArgumentTable:
    """The arguments of the first table in a text; raises InputError for one without arguments."""
    start, end = _HEADING.search(text), _END.search(text)
    table = text[
        start.end() if start else 0 : end.start() if end and (not start or end.start() > start.end()) else None
    ]
    values: dict[str, str] = {}
    for match in _matches(_HEADED_LINE if start else _LINE, _ESCAPES.sub("", table[:_MAX_TABLE])):
        values.setdefault(match[1], next((group for group in match.groups()[1:] if group), ""))
    if "num_layers" not in values:
        raise InputError(f"{source}: its table of arguments has no num_layers, so it is not Megatron-LM's")
    shell_words = list(_shell_words(_as_deepspeed_has_it(values, text)))
    padded = _PADDED.search(text)
    if padded:
        shell_words += ["--padded-vocab-size", padded[1]]
    return ArgumentTable(tuple(shell_words), values.get("world_size"))


def _as_deepspeed_has_it(values: Mapping[str, str], text: str) -> Mapping[str, str]:
    """The values without those of DeepSpeed where it is not used, and with the stage that it prints where it is."""
    others = {name: value for name, value in values.items() if name not in _OF_DEEPSPEED}
    if values.get("deepspeed", "False") in _OFF:
        return others
    printed = _ZERO_STAGE.search(text)
    return {**others, "zero_stage": printed[1]} if printed else values


def _shell_words(values: Mapping[str, str]) -> Iterator[str]:
    """The flags that set the values, and these."""
    for name, value in values.items():
        if name in _SWITCHED_OFF and value == "False":
            yield f"--{_SWITCHED_OFF[name]}"
        is_default = _DEFAULTS.get(name) == value or (name in _DERIVED and values.get(_DERIVED[name]) == value)
        if value in _OFF or is_default or name in _SWITCHED_OFF:
            continue
        yield f"--{FLAG_BY_ARGUMENT.get(name, name.replace('_', '-'))}"
        yield from value_words(value, name)
    if (
        values.get("overlap_p2p_comm") == "False"
        and values.get("virtual_pipeline_model_parallel_size", "None") != "None"
    ):
        yield "--no-overlap-p2p-communication"


def value_words(value: str, name: str) -> list[str]:
    """A printed value of an argument as words; True has none."""
    if value == "True":
        return []
    if name in _ONE_VALUE:
        return [value.replace(" ", "")]
    if value[:1] in "[(":
        try:
            items = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return [value]
        is_one = value[0] == "(" or name == "window_size"
        return [",".join(map(str, items))] if is_one else [str(item) for item in items]
    return [_DTYPES.get(value, re.sub(r"^[A-Z]\w*\.(?=[a-z])", "", value))]
