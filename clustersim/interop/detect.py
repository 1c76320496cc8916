"""Which program is a file of?"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from clustersim.common.data_files import parse_yaml
from clustersim.common.errors import InputError
from clustersim.common.input_files import parse_toml
from clustersim.interop.hugging_face import hugging_face_kind
from clustersim.interop.megatron_bridge import is_bridge_printout
from clustersim.interop.megatron_table import is_argument_table
from clustersim.interop.megatron_yaml import yaml_kind
from clustersim.interop.torchtitan_sources import is_torchtitan_log, is_torchtitan_python

AUTO: Final = "auto"
"""The program's name that stands for whichever a file is of."""
_OTHERS: Final[Mapping[str, frozenset[str]]] = {
    "Hugging Face's TrainingArguments": frozenset({"per_device_train_batch_size"}),
    "DeepSpeed's JSON": frozenset({"zero_optimization"}),
    "accelerate's configuration": frozenset({"distributed_type", "mixed_precision"}),
}
"""Files that are told apart by keys, and that have no model of their own."""


def _is_nccl_topology(text: str) -> bool:
    return re.match(r"\s*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)*<system\b", text, re.DOTALL) is not None


def _is_slurm_topology(text: str) -> bool:
    return re.search(r"(?mi)^\s*(SwitchName|BlockName)=\S+\s+\w+=", text) is not None


def _is_gpu_matrix(text: str) -> bool:
    return re.search(r"(?m)^.{0,40}\bGPU0\s+X\s", text) is not None


_PRINTED: Final[tuple[tuple[Callable[[str], bool], str], ...]] = (
    (is_argument_table, "megatron"),
    (is_bridge_printout, "megatron-bridge"),
    (is_torchtitan_log, "torchtitan"),
    (_is_nccl_topology, "nccl-topology"),
    (_is_slurm_topology, "slurm"),
    (_is_gpu_matrix, "nvidia-smi"),
)
"""What is told by its text alone, whatever the file's name."""


def detect_program(text: str, source: str) -> str:
    """The program whose arguments a text has; raises InputError for a file that none of them reads.

    >>> detect_program("torchrun pretrain_gpt.py --num-layers 2", "run.sh")
    'megatron'
    >>> detect_program("[model]\\nflavor = '8B'", "job.toml")
    'torchtitan'
    """
    if "\0" in text:
        raise InputError(f"{source}: holds a NUL, so it is no text")
    printed = next((name for is_printed, name in _PRINTED if is_printed(text)), None)
    if printed is not None:
        return printed
    if source.endswith(".py") and is_torchtitan_python(text):
        return "torchtitan"
    content = _content(text, source)
    kind = yaml_kind(content) or hugging_face_kind(content)
    if kind is not None:
        return kind
    if isinstance(content, Mapping):
        return _toml_program(content, source)
    return "megatron"


def _content(text: str, source: str) -> Any:
    """What a TOML, JSON or YAML file holds; a text for any other."""
    if source.endswith(".toml"):
        try:
            return parse_toml(text)
        except InputError:
            return text
    if source.endswith((".yaml", ".yml", ".json")) or text.lstrip()[:1] == "{":
        try:
            return parse_yaml(text)
        except InputError as error:
            raise InputError(f"{source}: {error}") from None
    return text


def _toml_program(content: Mapping[str, Any], source: str) -> str:
    """Name torchtitan for its job files; else raise InputError that names what the file is."""
    if isinstance(content.get("model"), Mapping) and "flavor" in content["model"]:
        return "torchtitan"
    for name, keys in _OTHERS.items():
        if keys <= {*content}:
            raise InputError(
                f"{source}: is {name}, which has no model of its own; write a scenario with the model's config.json "
                "as model.path"
            )
    raise InputError(f"{source}: its keys are those of no program that is read: {', '.join(map(str, [*content][:6]))}")
