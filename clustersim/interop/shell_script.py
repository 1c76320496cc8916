"""Which arguments does a launch script pass to a program? Parser of shell scripts.

The script is parsed, not run. Variables that it assigns are expanded, with defaults (`${NODES:-4}`) and
arithmetic (`$((8*$NODES))`); arguments may be in arrays, on continued lines, in quotes, or in a variable's
value. All branches are read, and the last assignment wins. Unresolved values, such as positional
parameters, are dropped.
"""

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence

from clustersim.common.errors import InputError

Arguments = Mapping[str, tuple[str, ...]]
"""Values that follow each flag, without dashes; of repeated flags the last."""
_ASSIGNMENT = re.compile(
    r"""^\s*(?:export\s+|local\s+|declare\s+\S+\s+)?([A-Za-z_]\w*)=("[^"\n]*"|'[^'\n]*'|\$\(\([^\n]*\)\)|[^\s()#;]*)""",
    re.MULTILINE,
)
_ARITHMETIC = re.compile(r"\$\(\(([^()]*)\)\)")
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?::?-([^{}]*))?\}|\$([A-Za-z_]\w*)")
_ARGUMENT_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=((?:.*\s)?--[a-z].*)", re.DOTALL)
"""A token that assigns arguments to a variable."""
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNRESOLVED = re.compile(r"\$[{(]?[\w@*#]")
_MAX_EXPANSIONS = 8  # depth of nested variables


def parse_arguments(text: str, source: str) -> Arguments:
    """The arguments in a script, or in a bare argument list; raises InputError if there are none."""
    arguments = dict(_group_by_flag(_tokens(_expand(_strip_comments(text), _parse_variables(text)))))
    if not arguments:
        raise InputError(f"{source}: has no arguments; they begin with --, such as --num-layers 32")
    return arguments


def _strip_comments(text: str) -> str:
    """The script without comments and with continued lines joined."""
    uncommented = re.sub(r"(?m)(^|\s)#.*$", r"\1", text)
    return re.sub(r"\\[ \t]*\n", " ", uncommented)


def _parse_variables(text: str) -> dict[str, str]:
    variables: dict[str, str] = {}
    for name, value in _ASSIGNMENT.findall(_strip_comments(text)):
        variables[name] = _expand(value.strip("\"'"), variables)
    return variables


def _expand(text: str, variables: Mapping[str, str]) -> str:
    """The text with known variables and arithmetic expanded."""
    for _ in range(_MAX_EXPANSIONS):
        substituted = _VARIABLE.sub(lambda match: _variable_value(match, variables), text)
        expanded = _ARITHMETIC.sub(lambda match: _arithmetic_value(match, variables), substituted)
        if expanded == text:
            return text
        text = expanded
    return text


def _variable_value(match: re.Match[str], variables: Mapping[str, str]) -> str:
    name, default = match[1] or match[3], match[2]
    if name in variables and not _UNRESOLVED.match(variables[name]):
        return variables[name]
    return match[0] if default is None else default.strip("\"'")


def _arithmetic_value(match: re.Match[str], variables: Mapping[str, str]) -> str:
    """Value of integer arithmetic, with the shell's division; the original text if it cannot be evaluated."""
    expression = re.sub(r"[A-Za-z_]\w*", lambda name: variables.get(name[0], name[0]), match[1])
    try:
        return str(_evaluate(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return match[0]


def _evaluate(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.BinOp(left, operation, right) if type(operation) in _OPERATORS:
            return _OPERATORS[type(operation)](_evaluate(left), _evaluate(right))
    raise ValueError


def _tokens(text: str) -> Iterator[str]:
    """Tokens of a script; a quoted string that holds flags and values is split."""
    for line in text.splitlines():
        try:
            tokens = shlex.split(line, posix=True)
        except ValueError:  # a quote that continues on the next line
            tokens = line.split()
        for token in tokens:
            assignment = _ARGUMENT_ASSIGNMENT.match(token)
            if assignment:
                yield from _split_tokens(assignment[1])
            else:
                yield from token.split() if token.startswith("--") else [token]


def _split_tokens(text: str) -> list[str]:
    """The tokens of a variable's value."""
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _group_by_flag(tokens: Iterator[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    flag, values = "", list[str]()
    for token in tokens:
        if token.startswith("--") and len(token) > 2:
            if flag:
                yield flag, tuple(values)
            flag, _, value = token.removeprefix("--").rstrip(")").partition("=")
            values = [value] if value else []
        elif flag and re.fullmatch(r"\)?;?", token):
            yield flag, tuple(values)
            flag = ""
        elif flag and not _UNRESOLVED.match(token):
            values.append(token.rstrip(")"))
    if flag:
        yield flag, tuple(values)


def python_programs(text: str) -> list[str]:
    """The Python files that a script names, without folders and suffixes."""
    return re.findall(r"(\w+)\.py\b", _strip_comments(text))


def parse_world_size(arguments: Arguments, text: str) -> int | None:
    """The number of processes that torchrun starts, from its arguments or WORLD_SIZE; None if not stated."""
    per_node_counts = [
        _integer_argument(arguments, name) for name in ("nproc_per_node", "nproc-per-node", "gpus-per-node")
    ]
    node_counts = [_integer_argument(arguments, name) for name in ("nnodes", "nodes")]
    per_node, node_count = _first_nonzero(per_node_counts), _first_nonzero(node_counts)
    if per_node and node_count:
        return per_node * node_count
    world_text = _parse_variables(text).get("WORLD_SIZE", "")
    return int(world_text) if world_text.isdecimal() else None


def _first_nonzero(values: Sequence[int | None]) -> int | None:
    return next((value for value in values if value), None)


def _integer_argument(arguments: Arguments, name: str) -> int | None:
    values = arguments.get(name, ())
    return int(values[0]) if values and values[0].isdecimal() else None
