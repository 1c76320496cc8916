"""Loading of user-defined plugin classes (`module:Class`).

The module is the file of that name in the scenario's folder, else an importable one. A file is executed anew
for every scenario that is read, so that edits take effect. Running somebody's scenario therefore executes the
code that it names; only classes with the required methods are instantiated. Exceptions of that code are
reported as InputError.
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
"""What user code may raise; an exit of the program is reported as InputError, too."""


@dataclass(frozen=True, slots=True)
class PluginInterface:
    """Interface that a plugin class must have.

    label: for messages, with its article; example: of a name; methods: with their parameters.
    """

    label: str
    example: str
    methods: Mapping[str, str]

    def missing_methods(self, cls: object) -> list[str]:
        """Required methods that a class lacks."""
        return [method for method in self.methods if not callable(getattr(cls, method, None))]

    @property
    def method_signatures(self) -> str:
        """The methods with their parameters, for messages."""
        return " and ".join(f"{method}({arguments})" for method, arguments in self.methods.items())

    def is_implemented_by(self, value: object) -> bool:
        """Whether a value is a class with the required methods."""
        return isinstance(value, type) and not self.missing_methods(value)


@contextmanager
def as_input_errors(call: str) -> Iterator[None]:
    """Convert whatever user code raises in the block into an InputError that names the call."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{call}: {error}") from error
    except PLUGIN_EXCEPTIONS as error:
        raise InputError(f"{call}: {format_exception(error)}") from error


def format_exception(error: BaseException) -> str:
    """One-line description of an exception of user code.

    Its class only where it has no text or raises when formatted.
    """
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def module_file(name: str, folder: Path) -> Path:
    """Path of the file that would define a name such as `my_module:MyClass`."""
    return folder.joinpath(*name.partition(":")[0].split(".")).with_suffix(".py")


def load_class(name: str, folder: Path, interface: PluginInterface) -> type[Any]:
    """Load the class of a name such as `my_module:MyClass`; raise InputError if there is none with the interface."""
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
        candidates = [name for name, value in vars(module).items() if interface.is_implemented_by(value)]
        remedy = (
            suggest_nearest(class_name, candidates) if candidates else f"it has none with {interface.method_signatures}"
        )
        raise InputError(f"{name}: module {module_name} has no class {class_name}; {remedy}")
    missing = interface.missing_methods(cls)
    if missing:
        raise InputError(
            f"{name} has no method {' and no method '.join(missing)}; {interface.label} has "
            f"{interface.method_signatures}"
        )
    return cls


def _load_module(name: str, file: Path) -> ModuleType:
    """The module of a file, executed anew, or an importable one."""
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
    """Execute a file as a module named by its path, so that files of one name in two folders are two modules."""
    module = ModuleType(str(file))
    module.__file__ = str(file)
    sys.modules[module.__name__] = module  # dataclasses look their module up
    sys.path.insert(0, str(file.parent))  # for its imports from the same folder
    try:
        exec(compile(file.read_bytes(), file, "exec"), vars(module))
    finally:
        sys.path.remove(str(file.parent))
    return module
