"""What does a shell know while it runs? Variables, positional parameters, functions, files that it wrote."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Union

from clustersim.interop.shell.unknowns import Decision

Value = Union[None, str, tuple[str, ...], dict[str, str], "Variant"]
"""A variable: not set, a text, an array, a mapping, or one of two of which a condition decides."""


@dataclass(frozen=True, slots=True, eq=False)
class Variant:
    """A variable that a condition that is not known sets to one of two values."""

    decision: Decision
    outcomes: tuple[Value, Value]


@dataclass
class ShellState:
    """Everything that a command may change.

    has_arguments: whether the positional parameters are known to be all; is_called: whether they are a function's or
    another script's; shifted: parameters that `shift` removed while they were not known.
    """

    variables: dict[str, Value] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    positional: tuple[str, ...] = ()
    has_arguments: bool = False
    is_called: bool = False
    shifted: int = 0
    script_name: str = "script"
    functions: dict[str, Any] = field(default_factory=dict)

    def copy(self) -> "ShellState":
        """A state of its own with the same values."""
        return replace(
            self, variables=dict(self.variables), exported=set(self.exported), functions=dict(self.functions)
        )

    def restore(self, other: "ShellState") -> None:
        """Become equal to another state."""
        self.__dict__.update(other.__dict__)

    def names(self) -> Iterable[str]:
        """Names of all variables."""
        return self.variables

    def value(self, name: str, assumed: Mapping[int, int]) -> Value:
        """A variable's value under the assumed decisions."""
        value = self.variables.get(name)
        while isinstance(value, Variant) and value.decision.number in assumed:
            value = value.outcomes[assumed[value.decision.number]]
        return value

    def keys(self, name: str) -> list[str]:
        """The indices or keys of an array."""
        value = self.variables.get(name)
        if isinstance(value, dict):
            return list(value)
        return [str(index) for index in range(len(value))] if isinstance(value, tuple) else ["0"] if value else []

    def assign(self, name: str, value: Value, *, index: str | None = None) -> None:
        """Set a variable, or an element of an array."""
        if index is None:
            old = self.variables.get(name)
            if isinstance(value, str) and isinstance(old, tuple):
                value = (value, *old[1:])
            self.variables[name] = value
            return
        old = self.variables.get(name)
        if isinstance(old, dict):
            self.variables[name] = {**old, index: str(value)}
            return
        shell_words = list(old) if isinstance(old, tuple) else [old] if isinstance(old, str) else []
        number = int(index)
        shell_words += [""] * (number + 1 - len(shell_words))
        shell_words[number] = str(value)
        self.variables[name] = tuple(shell_words)
