"""Which settings does a Python file of torchtitan's jobs have? By its literals; nothing runs.

Since February 2026 jobs are functions that return a `Trainer.Config`. Read are calls with literal arguments,
assignments to names and attributes, arithmetic of literals, and calls of the file's other functions. What is anything
else is not known; a statement that may change a setting in another way is refused.
"""

import ast
import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from clustersim.common.errors import InputError, suggest_nearest

_MAX_TEXT: Final = 400_000
_MAX_DEPTH: Final = 8
_MAX_CALLS: Final = 64
_OPERATORS: Final = {
    ast.Mult: operator.mul,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.FloorDiv: operator.floordiv,
}
_MAX_NUMBER: Final = 10**15
_JOB: Final = re.compile(r"(?<!\w)(Trainer\.Config|JobConfig)\b")


@dataclass(frozen=True, slots=True)
class NotRead:
    """A value that is no literal. text: its source; line: where it is."""

    text: str
    line: int


@dataclass
class PythonSection:
    """A call with keyword arguments, whose values may be changed later. label: what is called; line: where."""

    label: str
    values: dict[str, Any] = field(default_factory=dict)
    positional: tuple[Any, ...] = ()
    line: int = 0


@dataclass(frozen=True, slots=True)
class PythonJob:
    """A job. remarks: sentences about what is not read; module: where its models come from, if the file says it."""

    section: PythonSection
    module: str | None
    remarks: tuple[str, ...]


def read_python_job(text: str, source: str, wanted: str | None) -> PythonJob:
    """The job that a function of the file returns. wanted: its name; None: the only one."""
    if len(text) > _MAX_TEXT:
        raise InputError(f"{source}: has {len(text):,} characters; a file of jobs has at most {_MAX_TEXT:,}")
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"{source}: is no Python: {getattr(error, 'msg', error)}") from None
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    jobs = [name for name, node in functions.items() if _returns_job(node)]
    if not jobs:
        others = dict.fromkeys(ast.unparse(node.returns) for node in functions.values() if node.returns is not None)
        shown = f"; they return {', '.join(list(others)[:3])}" if others else ""
        raise InputError(f"{source}: no function of it returns a Trainer.Config, as a job of torchtitan does{shown}")
    if wanted is None and len(jobs) > 1:
        shown = f"{', '.join(jobs[:6])}{' and others' if len(jobs) > 6 else ''}"
        raise InputError(f"{source}: has {len(jobs)} jobs: {shown}; give --define CONFIG=NAME")
    name = jobs[0] if wanted is None else wanted
    if name not in functions:
        raise InputError(f"{source}: has no job {name!r}; {suggest_nearest(name, jobs)}")
    reader = _Reader(source, functions, _constants(tree))
    try:
        section = reader.call(name, 0)
    except RecursionError:
        raise InputError(f"{source}: is nested too deeply") from None
    return PythonJob(section, _registry_module(tree), tuple(reader.remarks))


def _returns_job(node: ast.FunctionDef) -> bool:
    """Whether a function has no parameters to fill in, and returns a job."""
    required = len(node.args.args) - len(node.args.defaults)
    return not required and _states_job(node)


def _states_job(node: ast.FunctionDef) -> bool:
    """Whether a function says that it returns a job, or makes one."""
    returned = ast.unparse(node.returns) if node.returns is not None else ""
    makes_one = re.search(r"(?<!\w)Trainer\.Config\(", ast.unparse(node)) is not None
    return _JOB.search(returned) is not None or makes_one


def _constants(tree: ast.Module) -> dict[str, Any]:
    """Literals that the file's own names stand for."""
    constants = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            try:
                constants[node.targets[0].id] = ast.literal_eval(node.value)
            except (ValueError, TypeError, RecursionError, MemoryError):
                continue
    return constants


def _registry_module(tree: ast.Module) -> str | None:
    """The module from which `model_registry` is imported; an empty text for the file's own folder."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(alias.name == "model_registry" for alias in node.names):
            return node.module or ""
    return None


class _Reader:
    """Reads functions, statement by statement."""

    def __init__(self, source: str, functions: Mapping[str, ast.FunctionDef], constants: Mapping[str, Any]) -> None:
        self._source, self._functions, self._constants = source, functions, constants
        self.remarks: list[str] = []
        self._calls = 0

    def call(self, name: str, depth: int, given: Mapping[str, Any] | None = None) -> PythonSection:
        """The section that a function returns. given: values of its parameters."""
        self._calls += 1
        if depth > _MAX_DEPTH or self._calls > _MAX_CALLS:
            raise InputError(f"{self._source}: {name} is made of too many other jobs, or of itself")
        names = {**self._constants, **self._parameters(name, given or {})}
        for statement in self._functions[name].body:
            if isinstance(statement, ast.Return):
                value = self._value(statement.value, names, depth)
                if not isinstance(value, PythonSection):
                    raise self._refusal(statement, "returns no Trainer.Config that is written here")
                return value
            self._run(statement, names, depth)
        raise InputError(f"{self._source}: {name} returns nothing")

    def _is_read(self, name: str, *, takes_values: bool) -> bool:
        """Whether a call is of a function of the file that makes a job, or that takes nothing."""
        function = self._functions.get(name)
        return function is not None and (not takes_values or _states_job(function))

    def _parameters(self, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Values of a function's parameters, defaults included."""
        arguments = self._functions[name].args
        positional, values = [*arguments.posonlyargs, *arguments.args], dict(given)
        defaults = dict(zip(positional[len(positional) - len(arguments.defaults) :], arguments.defaults, strict=True))
        defaults |= {
            one: default for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default
        }
        for parameter, default in defaults.items():
            if parameter.arg not in values:
                values[parameter.arg] = self._value(default, self._constants, _MAX_DEPTH)
        return values

    def _run(self, statement: ast.stmt, names: dict[str, Any], depth: int) -> None:
        match statement:
            case ast.Assign(targets=[target], value=value):
                self._assign(target, self._value(value, names, depth), names)
            case ast.AnnAssign(target=target, value=value) if value is not None:
                self._assign(target, self._value(value, names, depth), names)
            case (
                ast.Expr(value=ast.Constant())
                | ast.Assert()
                | ast.Import()
                | ast.ImportFrom()
                | ast.Pass()
                | ast.FunctionDef()
            ):
                pass
            case ast.Expr(value=ast.Call() as called):
                self.remarks.append(f"line {statement.lineno}: {ast.unparse(called)[:60]} is not read")
            case ast.If(test=test):
                self._branch(statement, self._value(test, names, depth), names, depth)
            case _:
                raise self._refusal(statement, "is not read; write the settings as literals")

    def _branch(self, statement: ast.If, condition: Any, names: dict[str, Any], depth: int) -> None:
        if isinstance(condition, NotRead):
            raise self._refusal(statement, "whether it holds is not known")
        for inner in statement.body if condition else statement.orelse:
            self._run(inner, names, depth)

    def _assign(self, target: ast.expr, value: Any, names: dict[str, Any]) -> None:
        match target:
            case ast.Name(id=name):
                names[name] = value
            case ast.Attribute(value=owner, attr=attribute):
                section = self._section(owner, names)
                if section is None:
                    raise self._refusal(target, "is not read; write the settings as literals")
                section.values[attribute] = value
            case _:
                raise self._refusal(target, "is not read; write the settings as literals")

    def _section(self, node: ast.expr, names: Mapping[str, Any]) -> PythonSection | None:
        """The section that an expression names; one without values where none is stated."""
        match node:
            case ast.Name(id=name):
                value = names.get(name)
            case ast.Attribute(value=owner, attr=attribute):
                section = self._section(owner, names)
                value = None if section is None else section.values.setdefault(attribute, PythonSection(""))
            case _:
                value = None
        return value if isinstance(value, PythonSection) else None

    def _value(self, node: ast.expr | None, names: Mapping[str, Any], depth: int) -> Any:
        """The value of an expression; `NotRead` for what is no literal."""
        read_value: Any
        match node:
            case ast.Constant(value=value):
                read_value = value
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                read_value = [self._value(element, names, depth) for element in elements]
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                value = self._value(operand, names, depth)
                read_value = -value if isinstance(value, int | float) else NotRead(ast.unparse(node), node.lineno)
            case ast.BinOp(left=left, op=kind, right=right):
                read_value = self._arithmetic(
                    node, kind, self._value(left, names, depth), self._value(right, names, depth)
                )
            case ast.Call():
                read_value = self._call_value(node, names, depth)
            case None:
                read_value = None
            case _:
                read_value = self._named(node, names)
        return read_value

    def _named(self, node: ast.expr, names: Mapping[str, Any]) -> Any:
        match node:
            case ast.Name(id=name):
                return names.get(name, NotRead(name, node.lineno))
            case ast.Attribute():
                return self._attribute(node, names)
        return NotRead(ast.unparse(node)[:80], node.lineno)

    def _call_value(self, node: ast.Call, names: Mapping[str, Any], depth: int) -> Any:
        values = {word.arg: self._value(word.value, names, depth) for word in node.keywords if word.arg}
        positional = tuple(self._value(one, names, depth) for one in node.args)
        match node.func:
            case ast.Name(id=name) if self._is_read(name, takes_values=bool(values or positional)):
                parameters = self._functions[name].args.args
                if len(positional) <= len(parameters):
                    bound = {parameter.arg: value for parameter, value in zip(parameters, positional, strict=False)}
                    return self.call(name, depth + 1, {**bound, **values})
        return PythonSection(ast.unparse(node.func), values, positional, node.lineno)

    def _attribute(self, node: ast.Attribute, names: Mapping[str, Any]) -> Any:
        section = self._section(node.value, names)
        unread = NotRead(ast.unparse(node), node.lineno)
        return unread if section is None else section.values.get(node.attr, unread)

    @staticmethod
    def _arithmetic(node: ast.BinOp, kind: ast.operator, left: Any, right: Any) -> Any:
        function, are_numbers = _OPERATORS.get(type(kind)), all(type(value) is int for value in (left, right))
        if (
            function is None
            or not are_numbers
            or max(abs(left), abs(right)) > _MAX_NUMBER
            or (isinstance(kind, ast.FloorDiv) and not right)
        ):
            return NotRead(ast.unparse(node)[:80], node.lineno)
        return function(left, right)

    def _refusal(self, node: ast.stmt | ast.expr, message: str) -> InputError:
        return InputError(f"{self._source}: line {node.lineno}: {ast.unparse(node).splitlines()[0][:60]!r} {message}")


def unread_values(section: PythonSection) -> Iterator[tuple[str, NotRead]]:
    """The settings of a section that are no literals, with their names."""
    for name, value in section.values.items():
        if isinstance(value, PythonSection):
            yield name, NotRead(f"{value.label}(...)", value.line)
        elif isinstance(value, NotRead):
            yield name, value
