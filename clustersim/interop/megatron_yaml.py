"""Which arguments do YAML files of programs on Megatron-LM define?

Each kind of file becomes the command line that sets the same: `MODEL_ARGS` of Megatron-LM's own tests, Primus'
experiments, gpt-neox's and NeMo's configurations. Keys that none of them reads are listed; keys that define another
step are refused.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from clustersim.common.errors import InputError
from clustersim.interop.import_result import ImportContext
from clustersim.interop.nemo_yaml import is_nemo, read_nemo
from clustersim.interop.neox_yaml import is_neox, read_neox
from clustersim.interop.primus_yaml import is_primus, read_primus
from clustersim.interop.shell.unknowns import Unknowns
from clustersim.interop.yaml_arguments import YamlArguments, YamlFile, yaml_mapping


def yaml_kind(content: object) -> str | None:
    """The kind of a YAML file's content; None: none that is read here."""
    if not isinstance(content, Mapping):
        return None
    return next((name for name, (is_kind, _read) in _KINDS.items() if is_kind(content)), None)


def read_yaml_arguments(text: str, source: str, context: ImportContext, kind: str) -> YamlArguments:
    """The arguments of a file of a kind; raises InputError for another one."""
    content = yaml_mapping(text, source)
    is_kind, read = _KINDS[kind]
    if not is_kind(content):
        other = yaml_kind(content)
        hint = f"; it is {other}'s" if other else ""
        raise InputError(f"{source}: is no file of {kind}{hint}")
    return read(YamlFile(content, source, context, Unknowns()))


def _is_model_args(content: Mapping[str, Any]) -> bool:
    return isinstance(content.get("MODEL_ARGS"), Mapping)


def _read_model_args(file: YamlFile) -> YamlArguments:
    return YamlArguments(tuple(file.flags(file.content["MODEL_ARGS"])), None, file.unknowns)


_KINDS: Final[Mapping[str, tuple[Callable[[Mapping[str, Any]], bool], Callable[[YamlFile], YamlArguments]]]] = {
    "megatron": (_is_model_args, _read_model_args),
    "primus": (is_primus, read_primus),
    "nemo": (is_nemo, read_nemo),
    "gpt-neox": (is_neox, read_neox),
}
"""Whether a content is of a kind, and its reader."""
