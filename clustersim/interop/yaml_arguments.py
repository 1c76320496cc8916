"""How does a YAML file say the arguments of a program on Megatron-LM?

What the readers of all kinds share: the file's content and what surrounds it, and the command line that its keys are.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from clustersim.common.data_files import parse_yaml
from clustersim.common.errors import InputError, suggest_nearest
from clustersim.interop.import_result import ImportContext
from clustersim.interop.megatron_table import FLAG_BY_ARGUMENT, value_words
from clustersim.interop.shell.unknowns import Unknowns

_VARIABLE: Final = re.compile(r"\$\{([A-Za-z_]\w*)(?::-?([^{}]*))?\}")
_LIST: Final = re.compile(r"\[\s*[\w.-]+(?:\s*,\s*[\w.-]+)*\s*\]")
"""A list without quotes, as a text."""
_SWITCHES: Final = frozenset({
    "sequence_parallel", "use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather", "bf16", "fp16",
    "swiglu", "group_query_attention", "untie_embeddings_and_output_weights", "moe_permute_fusion", "tp_comm_overlap",
    "recompute_activations", "use_torch_fsdp2", "use_megatron_fsdp", "multi_latent_attention", "qk_layernorm",
    "cross_entropy_loss_fusion", "checkpoint_activations",
})  # fmt: skip
"""Arguments that are on or off, which YAML may write as 1 and 0."""
_OFF: Final = ("False", "false", "None", "null", "[]", "")


@dataclass(frozen=True, slots=True)
class YamlArguments:
    """The arguments of a file.

    shell_words: as of a command line; processes: as `Launch`; model_keys: keys of the `model` section that no flag
    says; defaulted: flags that the program's own files state, not the user's; remarks: sentences.
    """

    shell_words: tuple[str, ...]
    processes: str | None
    unknowns: Unknowns
    model_keys: Mapping[str, Any] = field(default_factory=dict)
    defaulted: frozenset[str] = frozenset()
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class YamlFile:
    """A file's content, its name, and what surrounds it."""

    content: Mapping[str, Any]
    source: str
    context: ImportContext
    unknowns: Unknowns

    def error(self, key: str, message: str) -> InputError:
        """An error about a key, as a sentence."""
        return InputError(f"{self.source}: {key}: {message}")

    def expanded(self, value: object) -> object:
        """A text with its `${NAME}` and `${NAME:default}` replaced; what nothing defines is a hole."""
        if not isinstance(value, str):
            return value

        def defined(match: re.Match[str]) -> str:
            given = self.context.definitions.get(match[1], match[2])
            return given if given is not None else self.unknowns.unknown(f"${match[1]}", 0, (match[1],), is_unset=True)

        return _VARIABLE.sub(defined, value)

    def flags(self, values: Mapping[str, object]) -> Iterator[str]:
        """The flags that set arguments which have their names in Python."""
        for name, value in values.items():
            text = str(self.expanded(value)).strip("\"'")
            is_switch = name.lstrip("-").replace("-", "_") in _SWITCHES and text in ("0", "1")
            if text in _OFF or (is_switch and text == "0"):
                continue
            yield f"--{FLAG_BY_ARGUMENT.get(name, name.lstrip('-').replace('_', '-'))}"
            if text not in ("True", "true") and not is_switch:
                is_list = _LIST.fullmatch(text) and not re.search(r"\d", text)
                yield from re.findall(r"[\w.-]+", text) if is_list else value_words(text, name)

    def choice(self, key: str, value: object, choices: Mapping[str, str]) -> str:
        """The entry of `choices` for a key's value."""
        text = str(value)
        if text not in choices:
            raise self.error(key, f"{text!r} is not read; {suggest_nearest(text, choices)}")
        return choices[text]


def yaml_mapping(text: str, source: str) -> Mapping[str, Any]:
    """The mapping that a YAML text holds, with texts as keys at every level; raises InputError for another."""
    try:
        content = parse_yaml(text)
    except InputError as error:
        raise InputError(f"{source}: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"{source}: is no mapping of keys to values")
    return _with_text_keys(content)


def _with_text_keys(mapping: Mapping[Any, Any]) -> dict[str, Any]:
    """The mapping with texts as keys, as numbers and switches (`on`) may be keys, too.

    What aliases repeat is converted as often: `parse_yaml` bounds how much that is.
    """
    return {str(key): _converted(value) for key, value in mapping.items()}


def _converted(value: Any) -> Any:
    if isinstance(value, dict):
        return _with_text_keys(value)
    return list(map(_converted, value)) if isinstance(value, list) else value
