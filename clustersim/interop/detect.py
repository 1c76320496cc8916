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
_WITH_MODEL: Final = "write a scenario with the model's config.json as model.path"
_BELONGS_TO_A_FILE: Final = (
    "give the file that it belongs to, and leave this one next to it: Hugging Face's TrainingArguments (a file with "
    "model_name_or_path and per_device_train_batch_size), axolotl's or LLaMA-Factory's YAML, or the launch script"
)
_OTHERS: Final = {
    "Hugging Face's TrainingArguments, which has no model of its own": ("per_device_train_batch_size", _WITH_MODEL),
    "DeepSpeed's JSON, which has no model of its own": ("zero_optimization", _BELONGS_TO_A_FILE),
    "accelerate's configuration, which has no model of its own": ("distributed_type", _BELONGS_TO_A_FILE),
    "a model's configuration, which has no training": ("model_type", "name it as model.path in a scenario"),
}
"""Files that are told apart by a key, and what is to be done with them."""


def _is_nccl_topology(text: str) -> bool:
    return re.match(r"\s*(<\?xml[^>]*>\s*)?(?>(<!--(?>.*?-->)\s*)*)<system\b", text, re.DOTALL) is not None


def _is_slurm_topology(text: str) -> bool:
    return re.search(r"(?mi)^[ \t]*(SwitchName|BlockName)=\S+\s+\w+=", text) is not None


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
    if source.endswith(".py"):
        if is_torchtitan_python(text):
            return "torchtitan"
        raise InputError(f"{source}: is Python, of which torchtitan's files of jobs alone are read (Trainer.Config)")
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
    for name, (key, remedy) in _OTHERS.items():
        if key in content:
            raise InputError(f"{source}: is {name}; {remedy}")
    raise InputError(f"{source}: its keys are those of no program that is read: {', '.join(map(str, [*content][:6]))}")
