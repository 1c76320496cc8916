"""How is a class found that a user brings along?

A module is the file of that name beside the scenario, or else one that Python finds. A file's code runs anew for every
scenario that is read, so that one that was edited meanwhile counts as it is. Running somebody's scenario therefore runs
the code that it names; only classes with the methods that are asked for are ever made. Whatever that code raises is a
refusal with its words.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from clustersim.common.errors import InputError, format_value, suggest_nearest

PLUGIN_EXCEPTIONS: Final = (Exception, SystemExit)
"""What somebody's code may raise; where it leaves the program, that is a refusal, too."""


@dataclass(frozen=True, slots=True)
class PluginInterface:
    """What a class has to be. word: for people, with its article; example: of a name; methods: with their arguments."""

    label: str
    example: str
    methods: Mapping[str, str]

    def missing_methods(self, cls: object) -> list[str]:
        """Methods that a class does not have."""
        return [method for method in self.methods if not callable(getattr(cls, method, None))]

    @property
    def method_signatures(self) -> str:
        """The methods as they are called."""
        return " and ".join(f"{method}({arguments})" for method, arguments in self.methods.items())

    def is_implemented_by(self, value: object) -> bool:
        """Whether something is such a class."""
        return isinstance(value, type) and not self.missing_methods(value)


@contextmanager
def as_input_errors(call: str) -> Iterator[None]:
    """Whatever somebody's code raises in a call is a refusal with its words."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{call}: {error}") from error
    except PLUGIN_EXCEPTIONS as error:
        raise InputError(f"{call}: {format_exception(error)}") from error


def format_exception(error: BaseException) -> str:
    """What somebody's code raised, in a line; its class alone where it has no text, or raises for that, too."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def module_file(name: str, folder: Path) -> Path:
    """Where the file of a name such as `my_module:MyClass` would be."""
    return folder.joinpath(*name.partition(":")[0].split(".")).with_suffix(".py")


def load_class(name: str, folder: Path, interface: PluginInterface) -> type[Any]:
    """The class of a name such as `my_module:MyClass`; raise InputError where there is none that is as asked."""
    module_name, colon, class_name = name.partition(":")
    if not colon or not all(component.isidentifier() for component in (*module_name.split("."), class_name)):
        raise InputError(f"{format_value(name)} names no class; write module:Class, such as {interface.example}")
    if module_name.endswith(".py"):
        raise InputError(
            f"{format_value(name)} names a file; write its module, {module_name.removesuffix('.py')}:{class_name}"
        )
    module = _load_module(module_name, module_file(name, folder))
    cls = vars(module).get(class_name)
    if not isinstance(cls, type):
        candidates = [item for item, value in vars(module).items() if interface.is_implemented_by(value)]
        remedy = (
            suggest_nearest(class_name, candidates) if candidates else f"it has none with {interface.method_signatures}"
        )
        raise InputError(f"{name}: module {module_name} has no class {class_name}; {remedy}")
    missing = interface.missing_methods(cls)
    if missing:
        raise InputError(
            f"{name} has no method {' and no method '.join(missing)}; {interface.label} has {interface.method_signatures}"
        )
    return cls


def _load_module(name: str, file: Path) -> ModuleType:
    """The module of a file, run anew, or one that Python finds."""
    try:
        return _execute_file(file) if file.is_file() else import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0] and error.name != name:
            raise InputError(f"module {name} cannot be imported: {format_exception(error)}") from error
        available = [path.stem for path in sorted(file.parent.glob("*.py"))]
        remedy = f"; {suggest_nearest(name, available)}" if available else ""
        raise InputError(f"there is no module {name}, neither {file} nor where Python looks{remedy}") from error
    except PLUGIN_EXCEPTIONS as error:
        raise InputError(f"module {name} cannot be imported: {format_exception(error)}") from error


def _execute_file(file: Path) -> ModuleType:
    """Run a file as a module that is known by its path, so that files of one name in two folders are two modules."""
    module = ModuleType(str(file))
    module.__file__ = str(file)
    sys.modules[module.__name__] = module  # dataclasses look their module up
    sys.path.insert(0, str(file.parent))  # for what it imports from beside it
    try:
        exec(compile(file.read_bytes(), file, "exec"), vars(module))
    finally:
        sys.path.remove(str(file.parent))
    return module
