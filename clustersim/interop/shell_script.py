"""Which arguments does a launch script give a program?

A script is read, not run. Variables that it assigns are put in, with defaults (`${NODES:-4}`) and arithmetic
(`$((8*$NODES))`); arguments may stand in arrays, on continued lines, in quotes, or in what a variable is assigned. Of
branches all are read, the last one winning. What is not known, a positional parameter say, is left out.
"""

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence

from clustersim.common.errors import InputError

Arguments = Mapping[str, tuple[str, ...]]
"""What follows each flag, without its dashes; the last time that it is given."""
_ASSIGNED = re.compile(
    r"""^\s*(?:export\s+|local\s+|declare\s+\S+\s+)?([A-Za-z_]\w*)=("[^"\n]*"|'[^'\n]*'|\$\(\([^\n]*\)\)|[^\s()#;]*)""",
    re.MULTILINE,
)
_ARITHMETIC = re.compile(r"\$\(\(([^()]*)\)\)")
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?::?-([^{}]*))?\}|\$([A-Za-z_]\w*)")
_OF_VARIABLE = re.compile(r"[A-Za-z_]\w*\+?=((?:.*\s)?--[a-z].*)", re.DOTALL)
"""A word that assigns arguments to a variable."""
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNKNOWN = re.compile(r"\$[{(]?[\w@*#]")
_MOST_ROUNDS = 8  # variables within variables


def arguments_of(text: str, source: str) -> Arguments:
    """The arguments in a script, or in a line of arguments alone; raise InputError where there are none."""
    found = dict(_given(_words(_filled(_plain(text), _variables(text)))))
    if not found:
        raise InputError(f"{source}: has no arguments; they begin with --, such as --num-layers 32")
    return found


def _plain(text: str) -> str:
    """Without comments, and with continued lines in one."""
    uncommented = re.sub(r"(?m)(^|\s)#.*$", r"\1", text)
    return re.sub(r"\\[ \t]*\n", " ", uncommented)


def _variables(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in _ASSIGNED.findall(_plain(text)):
        found[name] = _filled(value.strip("\"'"), found)
    return found


def _filled(text: str, known: Mapping[str, str]) -> str:
    """With variables and arithmetic put in, as far as they are known."""
    for _ in range(_MOST_ROUNDS):
        plain = _VARIABLE.sub(lambda found: _value(found, known), text)
        filled = _ARITHMETIC.sub(lambda found: _result(found, known), plain)
        if filled == text:
            return text
        text = filled
    return text


def _value(found: re.Match[str], known: Mapping[str, str]) -> str:
    name, default = found[1] or found[3], found[2]
    if name in known and not _UNKNOWN.match(known[name]):
        return known[name]
    return found[0] if default is None else default.strip("\"'")


def _result(found: re.Match[str], known: Mapping[str, str]) -> str:
    """What arithmetic on whole numbers comes to, as shells divide; itself where it has something else."""
    numbers = re.sub(r"[A-Za-z_]\w*", lambda name: known.get(name[0], name[0]), found[1])
    try:
        return str(_calculated(ast.parse(numbers.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return found[0]


def _calculated(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.BinOp(left, sign, right) if type(sign) in _OPERATORS:
            return _OPERATORS[type(sign)](_calculated(left), _calculated(right))
    raise ValueError


def _words(text: str) -> Iterator[str]:
    """Words of a script; a quoted one that holds a flag and its values is several."""
    for line in text.splitlines():
        try:
            words = shlex.split(line, posix=True)
        except ValueError:  # a quote that goes on in another line
            words = line.split()
        for word in words:
            assigned = _OF_VARIABLE.match(word)
            if assigned:
                yield from _apart(assigned[1])
            else:
                yield from word.split() if word.startswith("--") else [word]


def _apart(text: str) -> list[str]:
    """The words of what a variable holds."""
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _given(words: Iterator[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    flag, values = "", list[str]()
    for word in words:
        if word.startswith("--") and len(word) > 2:
            if flag:
                yield flag, tuple(values)
            flag, _, value = word.removeprefix("--").rstrip(")").partition("=")
            values = [value] if value else []
        elif flag and re.fullmatch(r"\)?;?", word):
            yield flag, tuple(values)
            flag = ""
        elif flag and not _UNKNOWN.match(word):
            values.append(word.rstrip(")"))
    if flag:
        yield flag, tuple(values)


def programs_of(text: str) -> list[str]:
    """The Python files that a script names, without their directories and endings."""
    return re.findall(r"(\w+)\.py\b", _plain(text))


def world_of(arguments: Arguments, text: str) -> int | None:
    """How many processes torchrun starts, by its arguments or by WORLD_SIZE; None where the script does not say."""
    each = [_number(arguments, name) for name in ("nproc_per_node", "nproc-per-node", "gpus-per-node")]
    nodes = [_number(arguments, name) for name in ("nnodes", "nodes")]
    per_node, many = _first(each), _first(nodes)
    if per_node and many:
        return per_node * many
    said = _variables(text).get("WORLD_SIZE", "")
    return int(said) if said.isdecimal() else None


def _first(numbers: Sequence[int | None]) -> int | None:
    return next((item for item in numbers if item), None)


def _number(arguments: Arguments, name: str) -> int | None:
    values = arguments.get(name, ())
    return int(values[0]) if values and values[0].isdecimal() else None
