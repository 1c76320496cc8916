"""Which arguments does the configuration define that Megatron-Bridge prints when a training starts?

`ConfigContainer.print_yaml` prints every key of every section, defaults included, with the classes as `_target_`; the
names of its keys are those of Megatron Core's configurations, so they become the flags of Megatron-LM. Where only keys
are printed that differ from their classes' defaults, these are not known, and it is refused. Reference:
NVIDIA-NeMo/Megatron-Bridge, src/megatron/bridge/training/config.py and mixed_precision.py.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from clustersim.common.errors import InputError
from clustersim.interop.megatron_table import value_words
from clustersim.interop.yaml_arguments import yaml_mapping

_TARGET: Final = "_target_"
_START: Final = re.compile(r"(?m)^(?P<prefix>[^\n]*?)_target_: megatron\.[\w.]*ConfigContainer\s*$")
_LINE: Final = re.compile(r"\s*(-|[\w.'\"/-]+:)|\s")
_MAX_TEXT: Final = 2_000_000
_SECTIONS: Final = ("model", "train", "ddp", "optimizer", "comm_overlap", "mixed_precision")
"""Sections with keys that Megatron-LM has as flags; of keys in several the last counts, as Bridge sets them."""
_REQUIRED: Final = ("num_layers", "hidden_size", "num_attention_heads", "normalization", "add_bias_linear", "bf16")
"""Keys of the model that every full printout has."""
_NAMES: Final = {
    "num_moe_experts": "num-experts",
    "virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank",
    "fp8": "fp8-format",
    "fp4": "fp4-format",
    "grad_reduce_in_fp32": "accumulate-allreduce-grads-in-fp32",
    "sequence_length": "seq-length",
}
_TURNED_OFF: Final = {
    "add_bias_linear": "disable-bias-linear",
    "share_embeddings_and_output_weights": "untie-embeddings-and-output-weights",
    "gradient_accumulation_fusion": "no-gradient-accumulation-fusion",
    "masked_softmax_fusion": "no-masked-softmax-fusion",
    "bias_dropout_fusion": "no-bias-dropout-fusion",
    "apply_rope_fusion": "no-rope-fusion",
    "overlap_p2p_comm": "no-overlap-p2p-communication",
    "persist_layer_norm": "no-persist-layer-norm",
}
"""Keys that a flag turns off."""
_PASSED_OVER: Final = frozenset({"activation_func", "gated_linear_unit", "num_query_groups"})
"""Keys that other flags say."""
_GATED: Final = {"silu": "--swiglu", "gelu": "--quick-geglu", "quick_gelu": "--quick-geglu"}


def is_bridge_printout(text: str) -> bool:
    """Whether a text holds what Megatron-Bridge prints of its configuration."""
    return _START.search(text) is not None


def read_bridge_printout(text: str, source: str) -> tuple[str, ...]:
    """The words of the command line that sets the same; raises InputError for a printout of a part."""
    content = _content(text, source)
    sections = {name: _section(content, name) for name in (*_SECTIONS, "dataset")}
    model = sections["model"]
    missing = [key for key in _REQUIRED if key not in model]
    if missing:
        raise InputError(
            f"{source}: its model has no {missing[0]}, so it prints only what differs from its classes' defaults, "
            "which are not known here; print all of it (print_yaml)"
        )
    if sections["mixed_precision"] == {} and isinstance(content.get("mixed_precision"), str):
        raise InputError(f"{source}: mixed_precision is a name; print the configuration after it is set up")
    if _section(content, "peft"):
        raise InputError(f"{source}: peft: adapters are not read; write training.lora in the scenario")
    values: dict[str, Any] = {}
    for name in _SECTIONS:
        values |= {key: value for key, value in sections[name].items() if key != _TARGET and value is not None}
    lengths = [sections["dataset"][key] for key in ("sequence_length", "seq_length") if sections["dataset"].get(key)]
    values |= {"seq_length": lengths[0]} if lengths else {}
    return tuple(_shell_words(values))


def _content(text: str, source: str) -> Mapping[str, Any]:
    """The printed YAML, whose lines may have the prefix of its first one."""
    start = _START.search(text)
    if start is None:
        raise InputError(f"{source}: holds no configuration that Megatron-Bridge prints")
    prefix = start["prefix"]
    printed = []
    for line in text[start.start() : start.start() + _MAX_TEXT].split("\n"):
        shown = line.removeprefix(prefix)
        if shown.strip() and not _LINE.match(shown):
            break
        printed.append(shown)
    return yaml_mapping("\n".join(printed), source)


def _section(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = content.get(name)
    return section if isinstance(section, Mapping) else {}


def _shell_words(values: Mapping[str, Any]) -> Iterator[str]:
    """The flags that set the values, and these."""
    yield from _activation(values)
    if values.get("num_query_groups") not in (None, values["num_attention_heads"]):
        yield from ("--group-query-attention", "--num-query-groups", str(values["num_query_groups"]))
    for key, value in values.items():
        if key in _TURNED_OFF and value is False:
            yield f"--{_TURNED_OFF[key]}"
        if key in _TURNED_OFF or key in _PASSED_OVER or _is_off(value):
            continue
        yield f"--{_NAMES.get(key, key.replace('_', '-'))}"
        yield from value_words(_shown(value), key)


def _is_off(value: Any) -> bool:
    """Whether a value is one that no flag sets; 0.0 is not."""
    return value is None or value is False or (isinstance(value, str | list | dict) and value in ("", "None", [], {}))


def _shown(value: Any) -> str:
    """A value as Megatron-LM's table prints it."""
    if isinstance(value, Mapping):
        target = str(value.get(_TARGET, ""))
        name = target if re.fullmatch(r"torch\.\w+", target) else target.rpartition(".")[2]
        return str(value.get("_name_", name))
    return str(value)


def _activation(values: Mapping[str, Any]) -> Iterator[str]:
    name = _shown(values.get("activation_func", "")).rpartition(".")[2]
    if values.get("gated_linear_unit"):
        yield _GATED.get(name, "--swiglu")
    elif name in ("squared_relu", "relu2"):
        yield "--squared-relu"
