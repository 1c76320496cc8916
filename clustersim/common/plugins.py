"""Loading of user-defined plugin classes (`module:Class`).

The module is the file of that name in the scenario's folder, else an importable one. A file is executed anew
for every scenario that is read, so that edits take effect. Only classes with the required methods are instantiated.
Exceptions of that code are reported as InputError.

A scenario may be a stranger's. So its class is looked for in the source (`plugin_source`) before anything is executed,
and nothing is where code is forbidden: the command line forbids it unless a user types `--allow-code`. From Python it
is allowed.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from clustersim.common.errors import InputError, format_value, suggest_nearest

PLUGIN_EXCEPTIONS: Final = (Exception, SystemExit)
"""What user code may raise; an exit of the program is reported as InputError, too."""
_REFUSAL: Final[ContextVar[str]] = ContextVar("code_refusal", default="")  # empty: code may run


@contextmanager
def code_permission(refusal: str) -> Iterator[None]:
    """Forbid the code that scenarios name while the block runs, or allow it again.

    refusal: the end of the message where code is named, after "... is Python code, which"; empty: code may run.
    """
    token = forbid_code(refusal)
    try:
        yield
    finally:
        _REFUSAL.reset(token)


def forbid_code(refusal: str) -> Token[str]:
    """The same from now on; returns what undoes it."""
    return _REFUSAL.set(refusal)


def code_refusal() -> str:
    """Why code is forbidden here, for worker processes, which inherit it; empty where it may run."""
    return _REFUSAL.get()


def require_code_permission(name: str) -> None:
    """Raise InputError where the code of a name must not run."""
    refusal = _REFUSAL.get()
    if refusal:
        raise InputError(f"{name} is Python code, which {refusal}")


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


def load_class(name: str, folder: Path | None, interface: PluginInterface) -> type[Any]:
    """Load the class of a name such as `my_module:MyClass`; raise InputError if there is none with the interface.

    folder: where the module's file is looked for first. Nothing is executed unless the source has the class.
    """
    module_name, colon, class_name = name.partition(":")
    if not colon or not all(component.isidentifier() for component in (*module_name.split("."), class_name)):
        raise InputError(f"{format_value(name)} names no class; write module:Class, such as {interface.example}")
    if module_name.endswith(".py"):
        raise InputError(
            f"{format_value(name)} names a file; write its module, {module_name.removesuffix('.py')}:{class_name}"
        )
    file = None if folder is None else module_file(name, folder)
    local = file if file is not None and file.is_file() else None
    _require_class_in_source(name, local or _importable_source(module_name, file), interface)
    require_code_permission(name)
    module = _load_module(module_name, local)
    cls = vars(module).get(class_name)
    if not isinstance(cls, type):
        candidates = [name for name, value in vars(module).items() if interface.is_implemented_by(value)]
        raise InputError(_no_class_message(name, candidates, interface))
    _raise_missing(name, interface.missing_methods(cls), interface)
    return cls


def _require_class_in_source(name: str, source: Path, interface: PluginInterface) -> None:
    """Raise InputError unless the source binds the class, with its methods where the source shows them."""
    module_name, _, class_name = name.partition(":")
    from clustersim.common.plugin_source import read_names

    names = read_names(module_name, source)
    if not names.may_have_class(class_name):
        raise InputError(_no_class_message(name, names.classes_with(interface.methods), interface))
    _raise_missing(name, names.missing_methods(class_name, interface.methods), interface)


def _no_class_message(name: str, candidates: list[str], interface: PluginInterface) -> str:
    module_name, _, class_name = name.partition(":")
    remedy = (
        suggest_nearest(class_name, candidates) if candidates else f"it has none with {interface.method_signatures}"
    )
    return f"{name}: module {module_name} has no class {class_name}; {remedy}"


def _raise_missing(name: str, missing: list[str], interface: PluginInterface) -> None:
    if missing:
        raise InputError(
            f"{name} has no method {' and no method '.join(missing)}; {interface.label} has "
            f"{interface.method_signatures}"
        )


def _importable_source(name: str, file: Path | None) -> Path:
    """The source of an importable module; raise InputError where there is none. file: that was looked for first."""
    from clustersim.common.plugin_source import find_source

    source = find_source(name)
    if source is None:
        available = [] if file is None else [path.stem for path in sorted(file.parent.glob("*.py"))]
        remedy = f"; {suggest_nearest(name, available)}" if available else ""
        where = "where Python looks" if file is None else f"neither {file} nor where Python looks"
        raise InputError(f"there is no module {name}, {where}{remedy}")
    return source


def _load_module(name: str, file: Path | None) -> ModuleType:
    """The module of a file, executed anew; None: the importable one."""
    try:
        return import_module(name) if file is None else _execute_file(file)
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
