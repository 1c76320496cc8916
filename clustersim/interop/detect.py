"""Which program is a file of?"""

from collections.abc import Mapping
from typing import Any, Final

from clustersim.common.data_files import parse_yaml
from clustersim.common.errors import InputError
from clustersim.common.input_files import parse_toml
from clustersim.interop.megatron_table import is_argument_table
from clustersim.interop.megatron_yaml import yaml_kind

AUTO: Final = "auto"
"""The program's name that stands for whichever a file is of."""
_OTHERS: Final[Mapping[str, frozenset[str]]] = {
    "axolotl's configuration": frozenset({"base_model", "micro_batch_size"}),
    "Llama-Factory's configuration": frozenset({"model_name_or_path", "finetuning_type"}),
    "Hugging Face's TrainingArguments": frozenset({"per_device_train_batch_size"}),
    "DeepSpeed's JSON": frozenset({"zero_optimization"}),
    "accelerate's configuration": frozenset({"distributed_type", "mixed_precision"}),
}
"""Files that are told apart by keys, and that have no model of their own."""


def detect_program(text: str, source: str) -> str:
    """The program whose arguments a text has; raises InputError for a file that none of them reads.

    >>> detect_program("torchrun pretrain_gpt.py --num-layers 2", "run.sh")
    'megatron'
    >>> detect_program("[model]\\nflavor = '8B'", "job.toml")
    'torchtitan'
    """
    if "\0" in text:
        raise InputError(f"{source}: holds a NUL, so it is no text")
    if is_argument_table(text):
        return "megatron"
    content = _content(text, source)
    kind = yaml_kind(content)
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
