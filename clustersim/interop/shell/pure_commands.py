"""What do commands print that depend on nothing but their arguments and their input?"""

import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from clustersim.common.errors import InputError
from clustersim.interop.shell.arithmetic import evaluate_arithmetic

_ESCAPES: Final = {"n": "\n", "t": "\t", "\\": "\\"}
_MAX_SEQUENCE: Final = 10_000


class NotPureError(Exception):
    """A use of a command whose output is not computed here."""


def run_pure(shell_words: Sequence[str], stdin: str | None) -> str | None:
    """What a command prints; None: it is none of the known ones, or is used in a way that is not known."""
    command = _COMMANDS.get(posixpath.basename(shell_words[0]))
    if command is None:
        return None
    try:
        return command(list(shell_words[1:]), stdin)
    except (NotPureError, InputError, ValueError, IndexError):
        return None


def _echo(shell_words: list[str], _stdin: str | None) -> str:
    end, escapes = "\n", False
    while shell_words and re.fullmatch(r"-[neE]+", shell_words[0]):
        end = "" if "n" in shell_words[0] else end
        escapes = escapes or "e" in shell_words[0]
        shell_words.pop(0)
    text = " ".join(shell_words)
    return (re.sub(r"\\(.)", lambda match: _ESCAPES.get(match[1], match[0]), text) if escapes else text) + end


def _printf(shell_words: list[str], _stdin: str | None) -> str:
    form, values = shell_words[0], shell_words[1:]
    form = re.sub(r"\\(.)", lambda match: _ESCAPES.get(match[1], match[0]), form)
    specifiers = re.findall(r"%[-0-9]*[sd]", form)
    if "%" in re.sub(r"%[-0-9]*[sd]", "", form) or (values and not specifiers):
        raise NotPureError
    printed = []
    for start in range(0, max(len(values), 1), max(len(specifiers), 1)):
        given = [*values[start : start + len(specifiers)], *[""] * len(specifiers)][: len(specifiers)]
        converted = [
            int(value or 0) if name[-1] == "d" else value for name, value in zip(specifiers, given, strict=True)
        ]
        if any(len(name) > 5 for name in specifiers):
            raise NotPureError
        printed.append(form % tuple(converted))
    return "".join(printed)


def _dirname(shell_words: list[str], _stdin: str | None) -> str:
    (path,) = shell_words
    return (posixpath.dirname(path.rstrip("/") or "/") or ".") + "\n"


def _basename(shell_words: list[str], _stdin: str | None) -> str:
    if shell_words[0].startswith("-"):
        raise NotPureError
    name = posixpath.basename(shell_words[0].rstrip("/"))
    suffix = shell_words[1] if len(shell_words) > 1 else ""
    return (name.removesuffix(suffix) if name != suffix else name) + "\n"


def _seq(shell_words: list[str], _stdin: str | None) -> str:
    separator = "\n"
    if shell_words[:1] == ["-s"]:
        separator, shell_words = shell_words[1], shell_words[2:]
    numbers = [int(word) for word in shell_words]
    first, step, last = {1: (1, 1, numbers[0]), 2: (numbers[0], 1, numbers[-1])}.get(len(numbers), tuple(numbers))
    if not step or (last - first) // step > _MAX_SEQUENCE:
        raise NotPureError
    printed = [str(number) for number in range(first, last + (1 if step > 0 else -1), step)]
    return separator.join(printed) + "\n" if printed else ""


def _expr(shell_words: list[str], _stdin: str | None) -> str:
    operators = {"=": "=="}
    return f"{evaluate_arithmetic(' '.join(operators.get(word, word) for word in shell_words))}\n"


def _bc(shell_words: list[str], stdin: str | None) -> str:
    if stdin is None or shell_words not in ([], ["-l"]) or (shell_words and "/" in stdin):
        raise NotPureError
    return "".join(f"{evaluate_arithmetic(line)}\n" for line in re.split(r"[;\n]", stdin) if line.strip())


def _cat(shell_words: list[str], stdin: str | None) -> str:
    if shell_words not in ([], ["-"]) or stdin is None:
        raise NotPureError
    return stdin


def _tr(shell_words: list[str], stdin: str | None) -> str:
    if stdin is None:
        raise NotPureError
    if shell_words[0] == "-d" and len(shell_words) == 2:
        return "".join(character for character in stdin if character not in _tr_set(shell_words[1]))
    if shell_words[0].startswith("-"):
        raise NotPureError
    first, second = _tr_set(shell_words[0]), _tr_set(shell_words[1])
    second += second[-1] * (len(first) - len(second))
    return stdin.translate(str.maketrans(first, second[: len(first)]))


def _tr_set(text: str) -> str:
    text = text.replace("[:upper:]", "A-Z").replace("[:lower:]", "a-z").replace("[:space:]", " \t\n")
    text = re.sub(r"\\(.)", lambda match: _ESCAPES.get(match[1], match[1]), text)
    return re.sub(
        r"(\w)-(\w)", lambda match: "".join(chr(code) for code in range(ord(match[1]), ord(match[2]) + 1)), text
    )


def _wc(shell_words: list[str], stdin: str | None) -> str:
    if stdin is None:
        raise NotPureError
    match shell_words:
        case ["-w"]:
            return f"{len(stdin.split())}\n"
        case ["-l"]:
            return f"{stdin.count(chr(10))}\n"
        case ["-c"]:
            return f"{len(stdin)}\n"
    raise NotPureError


def _cut(shell_words: list[str], stdin: str | None) -> str:
    joined = " ".join(shell_words)
    match = re.fullmatch(r"-d ?(.) ?-f ?(\d+)|-f ?(\d+) -d ?(.)", joined)
    if stdin is None or match is None:
        raise NotPureError
    delimiter, number = match[1] or match[4], int(match[2] or match[3])
    lines = [line.split(delimiter) for line in stdin.splitlines()]
    return "".join(f"{segments[number - 1] if len(segments) >= number else ''}\n" for segments in lines)


def _sed(shell_words: list[str], stdin: str | None) -> str:
    """Substitutions alone, of patterns without special characters."""
    scripts = [word for word in shell_words if word not in ("-e", "-r", "-E")]
    if stdin is None:
        raise NotPureError
    for script in scripts:
        match = re.fullmatch(r"s(.)((?:(?!\1).)*)\1((?:(?!\1).)*)\1(g?)", script, re.DOTALL)
        if match is None or re.search(r"[\\.*\[\]^$&+?(){}|]", match[2]) or re.search(r"[\\&]", match[3]):
            raise NotPureError
        count = -1 if match[4] else 1
        stdin = "".join(line.replace(match[2], match[3], count) for line in stdin.splitlines(keepends=True))
    return stdin


def _head(shell_words: list[str], stdin: str | None, *, last: bool = False) -> str:
    match = re.fullmatch(r"-n ?(\d+)|-(\d+)|", " ".join(shell_words))
    if stdin is None or match is None:
        raise NotPureError
    count = int(match[1] or match[2] or 10)
    lines = stdin.splitlines(keepends=True)
    return "".join((lines[-count:] if count else []) if last else lines[:count])


def _tail(shell_words: list[str], stdin: str | None) -> str:
    return _head(shell_words, stdin, last=True)


def _realpath(shell_words: list[str], _stdin: str | None) -> str:
    paths = [word for word in shell_words if not word.startswith("-")]
    return f"{posixpath.normpath(paths[0])}\n" if len(paths) == 1 else _refuse()


def quiet_pattern(shell_words: Sequence[str]) -> re.Pattern[str] | None:
    """The pattern of `grep -q` on its input; None: it does more, or its pattern is not read.

    >>> quiet_pattern(["grep", "-qi", "--", "--bf16"]).search("a --BF16 b") is not None
    True
    >>> quiet_pattern(["grep", "-q", "x", "file"]) is None
    True
    """
    rest, options = list(shell_words[1:]), ""
    while rest and re.fullmatch(r"-[a-zA-Z]+", rest[0]):
        options += rest.pop(0)[1:]
    rest = rest[1:] if rest[:1] == ["--"] else rest
    if "q" not in options or set(options) - set("qsEFiw") or len(rest) != 1 or "\0" in rest[0]:
        return None
    pattern = rest[0]
    if "F" in options:
        pattern = re.escape(pattern)
    elif re.search(r"[\\\[\]*{}]", pattern):
        return None
    elif "E" not in options:  # these are plain in a basic expression
        pattern = re.sub(r"([+?()|])", r"\\\1", pattern)
    try:
        return re.compile(rf"\b(?:{pattern})\b" if "w" in options else pattern, re.IGNORECASE if "i" in options else 0)
    except re.error:
        return None


def _refuse() -> str:
    raise NotPureError


_COMMANDS: Final[Mapping[str, Callable[[list[str], str | None], str]]] = {
    "echo": _echo,
    "printf": _printf,
    "dirname": _dirname,
    "basename": _basename,
    "seq": _seq,
    "expr": _expr,
    "bc": _bc,
    "cat": _cat,
    "tr": _tr,
    "wc": _wc,
    "cut": _cut,
    "sed": _sed,
    "head": _head,
    "tail": _tail,
    "realpath": _realpath,
    "readlink": _realpath,
}
