"""Where is the class that a name such as `my_module:MyClass` means? Its source is found and read; nothing is executed.

Python's own look-up of `package.module` imports the package first, and with it any code of an installed one. Here
each package is only located. What a module binds at its top level is read from its syntax tree: classes with their
methods, and names that are imported or assigned, whose class only the running code knows.
"""

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path

from clustersim.common.errors import InputError
from clustersim.common.input_files import read_bytes


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """What a module binds at its top level.

    classes: by name, the methods of a class, or None where it may inherit or be given others; others: names of anything
    else; is_open: a star import may bind more.
    """

    classes: Mapping[str, frozenset[str] | None]
    others: frozenset[str]
    is_open: bool

    def may_have_class(self, name: str) -> bool:
        """Whether a name may be a class: it is one, or was imported or assigned."""
        return self.is_open or name in self.classes or name in self.others

    def missing_methods(self, name: str, required: Iterable[str]) -> list[str]:
        """Required methods that a class lacks for certain."""
        methods = self.classes.get(name)
        return [] if methods is None else [method for method in required if method not in methods]

    def classes_with(self, required: Iterable[str]) -> list[str]:
        """Classes that may have the required methods."""
        return [name for name in self.classes if not self.missing_methods(name, required)]


def find_source(name: str) -> Path | None:
    """The source file of an importable module, found without importing anything; None: there is no such module.

    Raises InputError where it has no Python source, as modules compiled from C have none.
    """
    spec, folders = None, None
    components = name.split(".")
    for end in range(1, len(components) + 1):
        spec = _find_spec(".".join(components[:end]), folders)
        if spec is None or (end < len(components) and spec.submodule_search_locations is None):
            return None
        folders = spec.submodule_search_locations
    origin = spec.origin if spec is not None and spec.has_location else None
    if origin is None or not origin.endswith(".py"):
        raise InputError(f"module {name} has no Python source, so no class of it can be named")
    return Path(origin)


def _find_spec(name: str, folders: Iterable[str] | None) -> ModuleSpec | None:
    specs = (finder.find_spec(name, folders) for finder in sys.meta_path)  # type: ignore[arg-type]
    return next((spec for spec in specs if spec is not None), None)


def read_names(module: str, file: Path) -> ModuleNames:
    """What a source file binds; raise InputError where it is no Python."""
    try:
        tree = ast.parse(read_bytes(file))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = getattr(error, "msg", None) or str(error) or type(error).__name__
        raise InputError(f"module {module} cannot be imported: {file} is no Python ({reason})") from error
    classes: dict[str, frozenset[str] | None] = {}
    others: set[str] = set()
    for statement in _top_level(tree.body):
        match statement:
            case ast.ClassDef(name=class_name):
                classes[class_name] = _known_methods(statement)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                others.update(alias.asname or alias.name for alias in aliases)
            case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
                others.update(_assigned_names(statement))
    return ModuleNames(classes, frozenset(others - {"*"}), "*" in others)


def _top_level(statements: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements outside functions and classes, those inside conditions, loops and the like included."""
    pending = list(statements)
    while pending:
        statement = pending.pop(0)
        yield statement
        if not isinstance(statement, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            blocks = [child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.stmt)]
            handlers = getattr(statement, "handlers", [])
            pending[:0] = [*blocks, *(inner for handler in handlers for inner in handler.body)]


def _assigned_names(statement: ast.stmt) -> Iterator[str]:
    """Names that an assignment binds whose value may be a class: not a literal."""
    if isinstance(getattr(statement, "value", None), (ast.Constant, ast.List, ast.Dict, ast.Tuple, ast.Set)):
        return
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _known_methods(definition: ast.ClassDef) -> frozenset[str] | None:
    """Methods of a class without bases, metaclass and decorators; None for others, which may get more."""
    if definition.bases or definition.keywords or definition.decorator_list:
        return None
    methods: set[str] = set()
    for statement in _top_level(definition.body):
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                methods.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                methods.update(alias.asname or alias.name for alias in aliases)
            case _:
                methods.update(_assigned_names(statement))
    return frozenset(methods)
