"""Which commands would a shell script run? A safe subset of bash, evaluated without running anything.

Commands of the shell itself are evaluated; all others are recorded with their words. Where a condition is not
known both branches are taken, each under its assumption, and what they leave different becomes a choice.
"""

import posixpath
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from tree_sitter import Node

from clustersim.common.errors import InputError
from clustersim.common.files import read_first_text
from clustersim.interop.shell.batch import batch_environment, batch_header, options_of
from clustersim.interop.shell.conditions import ConditionEvaluator
from clustersim.interop.shell.expansion import MAX_TEXT, Expander
from clustersim.interop.shell.merging import merge_states
from clustersim.interop.shell.patterns import matches_pattern
from clustersim.interop.shell.placeholders import with_placeholders_as_holes
from clustersim.interop.shell.pure_commands import quiet_pattern, run_pure
from clustersim.interop.shell.scanning import raw_words, single_quoted_positions
from clustersim.interop.shell.state import ShellState, Value, Variant
from clustersim.interop.shell.syntax import (
    MAX_SCRIPT,
    assigned_names,
    faulty_nodes,
    first_line,
    node_text,
    parse_script,
)
from clustersim.interop.shell.unknowns import Decision, Truth, Undecided, Unknowns, mark_split, negate, unmarked

_MAX_STEPS: Final = 20_000
_MAX_SECONDS: Final = 5.0
"""CPU time to evaluate a script; launch scripts take a tenth of a second."""
_MAX_DEPTH: Final = 60
_MAX_ITERATIONS: Final = 10_000
_MAX_EARLY_ENDS: Final = 200
"""Ends of loops and functions under conditions that are not known, in a whole script."""
NO_VARIABLES: Final[Mapping[str, str]] = {}
_BATCH: Final = "sbatch"
_SHELLS: Final = ("bash", "sh", "zsh", "dash", "ksh")
_SCRIPTS: Final = (".sh", ".bash", ".slurm", ".sbatch")
_READERS: Final = ("cat", "sed", "head", "tail", "wc", "cut")
"""Commands whose last word may be a file that they read."""
_WRAPPERS: Final = (
    "srun", "mpirun", "mpiexec", "nohup", "env", "sudo", "timeout", "numactl", "nice", "singularity", "apptainer",
    "docker", "podman", "enroot", "sbatch", "salloc",
)  # fmt: skip
"""Programs that run a script which is among their arguments."""
_READ: Final = re.compile(r"\bread\b")
_IGNORED_STATEMENTS: Final = ("comment", "heredoc_body", ";", ";;", "&", "\n", ";&", ";;&")


@dataclass(frozen=True, slots=True)
class RecordedCommand:
    """A command that the script would run.

    words: expanded, holes included; guards: outcomes of decisions that lead to it; environment: exported variables.
    """

    shell_words: tuple[str, ...]
    line: int
    guards: Mapping[int, int]
    environment: Mapping[str, Value]


@dataclass
class ScriptRun:
    """What a script would do.

    node_gpus: GPUs of a node; files: contents of files that it would write; notes: sentences.
    """

    unknowns: Unknowns
    node_gpus: int
    commands: list[RecordedCommand] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class _Exit(Exception):  # noqa: N818 - a jump, not an error
    pass


class _Return(Exception):  # noqa: N818 - a jump, not an error
    pass


class _Returned(_Return):
    """Both branches of a condition that is not known returned."""


class _Ended(Exception):  # noqa: N818 - a jump, not an error
    """Both branches of a condition that is not known left the iteration of their loop."""


class _Loop(Exception):  # noqa: N818 - a jump, not an error
    def __init__(self, *, leaves: bool, levels: int) -> None:
        super().__init__()
        self.leaves, self.levels = leaves, levels


@dataclass(frozen=True, slots=True)
class _EarlyEnd:
    """The state in which branches that may be taken left a loop or a function, and the outcomes that lead there.

    status: of the last command before, which is the function's; assumed: all that holds there, guards included.
    """

    guards: tuple[tuple[Decision, int], ...]
    state: ShellState
    status: Truth
    assumed: Mapping[int, int]


@dataclass
class _Frame:
    """A function call: what was assumed before it, what its local variables hide, and early returns."""

    assumed: dict[int, int]
    hidden: dict[str, Value] = field(default_factory=dict)
    returned: list[_EarlyEnd] = field(default_factory=list)


@dataclass
class _LoopFrame:
    """A loop: what was assumed before it, how branches left it, or an iteration of it, and whether it may go on."""

    assumed: dict[int, int]
    goes_on: bool = True
    left: list[_EarlyEnd] = field(default_factory=list)
    continued: list[_EarlyEnd] = field(default_factory=list)


def run_script(
    text: str, source: str, directory: Path | None, definitions: Mapping[str, str], node_gpus: int = 8
) -> ScriptRun:
    """Evaluate a script.

    directory: where files that it sources are; definitions: environment variables, and positional parameters
    by number; node_gpus: what a command that counts a node's GPUs prints. Raises InputError for a script that
    cannot be evaluated.
    """
    run = ScriptRun(Unknowns(), node_gpus)
    state = ShellState(script_name=source)
    arguments = {int(name): value for name, value in definitions.items() if name.isdecimal() and 0 < int(name) < 100}
    state.variables = {name: value for name, value in definitions.items() if not name.isdecimal()}
    state.exported = set(state.variables)
    if arguments:
        state.positional = tuple(
            arguments[number] if number in arguments else run.unknowns.unset_parameter(number)
            for number in range(1, max(arguments) + 1)
        )
        state.has_arguments = True
    interpreter = _Interpreter(run, state, source, directory)
    try:
        interpreter.run_file(text)
    except (_Exit, _Return, _Loop, _Ended):
        pass
    except RecursionError:
        raise InputError(f"{source}: is nested too deeply to be evaluated") from None
    return run


class _Interpreter:
    """Runs statements in a state."""

    def __init__(self, run: ScriptRun, state: ShellState, source: str, directory: Path | None) -> None:
        self._run = run
        self._source = source
        self._directory = directory
        self._state = state
        self._unknowns = run.unknowns
        self._expander = Expander(run.unknowns, state, self._substitute)
        self._steps = 0
        self._started = time.thread_time()
        self._depth = 0
        self._line_offset: int | None = None
        self._frames: list[_Frame] = []
        self._loops: list[_LoopFrame] = []
        self._early_ends = 0
        self._launcher: tuple[str, ...] = ()
        self._sink: list[str] | None = None
        self._stdin: str | None = None
        self._status: Truth = True

    def run_file(self, text: str) -> None:
        """Evaluate the statements of a file, in which values may be left to be filled in."""
        visible, names = _with_variables(with_placeholders_as_holes(text, self._unknowns))
        self._state.variables.update(names)
        self.run_text(visible)

    def run_text(self, text: str) -> None:
        """Evaluate all statements of a text."""
        root = parse_script(text, self._source)
        fault = next(faulty_nodes(root), None)
        if fault is not None:
            lines = text.replace("\r\n", "\n").split("\n")
            number = first_line(fault)
            line = lines[min(number, len(lines)) - 1].strip()
            raise InputError(f"{self._source}: line {self._line(number)} is not bash: {line[:80]!r}")
        self._block(root.children)

    def _line(self, number: int) -> int:
        return number if self._line_offset is None else self._line_offset

    # statements

    def _block(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            if node.type not in _IGNORED_STATEMENTS:
                self._statement(node)

    def _statement(self, node: Node) -> Truth:
        """Evaluate a statement; its status."""
        self._steps += 1
        if self._steps > _MAX_STEPS:
            raise InputError(f"{self._source}: runs more than {_MAX_STEPS:,} commands; a launch script has fewer")
        if time.thread_time() - self._started > _MAX_SECONDS:
            raise InputError(
                f"{self._source}: takes more than {_MAX_SECONDS:.0f} s to evaluate, as too much of it is not known; "
                "give its variables with --define, or the arguments alone"
            )
        self._expander.line = self._line(first_line(node))
        handler = self._HANDLERS.get(node.type)
        if handler is None:
            raise InputError(
                f"{self._source}: line {self._expander.line}: {node_text(node)[:60]!r} is not evaluated ({node.type})"
            )
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise InputError(
                f"{self._source}: line {self._expander.line}: calls are nested more than {_MAX_DEPTH} deep"
            )
        try:
            self._status = handler(self, node)
        finally:
            self._depth -= 1
        return self._status

    def _group(self, node: Node) -> Truth:
        """`{ ...; }` and the bodies of loops, or `(( ... ))`."""
        text = node_text(node)
        if text.startswith("(("):
            return self._arithmetic_truth(text[2:-2])
        return self._statements(node.named_children)

    def _statements(self, nodes: Sequence[Node], status: Truth = True) -> Truth:
        """The status of the last of some statements; status: of what ran before them."""
        self._status = status
        self._block(nodes)
        return self._status

    def _arithmetic_truth(self, text: str) -> Truth:
        value = self._expander.arithmetic(text)
        line = self._expander.line
        shown = re.sub(r"[{}]", "", self._unknowns.described(text.strip()))
        names = self._unknowns.names([value])
        settled = self._unknowns.settle(value)
        if "\0" in settled and self._unknowns.open_decision([settled]) is None:
            return self._unknowns.undecided(f"(( {shown} ))", line, names)
        return self._unknowns.lift_truth(lambda number: number != "0", [value], f"(( {shown} ))", line)

    def _subshell(self, node: Node) -> Truth:
        with self._own_state():
            try:
                return self._statements(node.named_children)
            except _Exit:
                return self._status

    def _list(self, node: Node) -> Truth:
        left, operator, right = node.children[0], node.children[1].type, node.children[-1]
        status = self._statement(left)
        truth = status if operator == "&&" else negate(status)
        if operator not in ("&&", "||"):
            return self._statement(right)

        def right_side() -> Truth:
            self._status = operator == "&&"
            return self._statement(right)

        return self._branch(truth, right_side, lambda: operator == "||")

    def _negated(self, node: Node) -> Truth:
        return negate(self._statement(node.named_children[0]))

    def _pipeline(self, node: Node) -> Truth:
        """Each command in a state of its own; the output of one is the input of the next, as far as it is known."""
        stages = node.named_children
        piped, saved = None, self._stdin
        status: Truth = True
        try:
            for number, stage in enumerate(stages):
                self._stdin = piped
                with self._own_state():
                    if number < len(stages) - 1:
                        piped = self._captured(lambda stage=stage: self._statement(stage))  # type: ignore[misc]
                    else:
                        status = self._statement(stage)
        finally:
            self._stdin = saved
        return status

    def _test(self, node: Node) -> Truth:
        text = node_text(node)
        line = self._expander.line
        if text.startswith("(("):
            return self._arithmetic_truth(text[2:-2])
        width = 2 if text.startswith("[[") else 1
        shell_words = list(raw_words(text[width:-width].replace("\\\n", " ")))
        evaluator = ConditionEvaluator(self._expander, shell_words, line, is_extended=width == 2)
        return evaluator.truth()

    def _if(self, node: Node) -> Truth:
        clauses: list[tuple[list[Node], list[Node]]] = []
        condition, body, is_condition = list[Node](), list[Node](), True
        for child in node.children:
            if child.type == "then":
                is_condition = False
            elif child.type in ("elif_clause", "else_clause"):
                break
            elif child.type not in ("if", "fi"):
                (condition if is_condition else body).append(child)
        clauses.append((condition, body))
        for clause in node.children:
            if clause.type == "elif_clause":
                segments = [child for child in clause.children if child.type != "elif"]
                split = next(index for index, child in enumerate(segments) if child.type == "then")
                clauses.append((segments[:split], segments[split + 1 :]))
            elif clause.type == "else_clause":
                clauses.append(([], [child for child in clause.children if child.type != "else"]))
        return self._clauses(clauses)

    def _clauses(self, clauses: Sequence[tuple[Sequence[Node], Sequence[Node]]]) -> Truth:
        if not clauses:
            return True
        condition, body = clauses[0]
        if not condition:
            return self._statements(body, False)
        self._depth += 1
        if self._depth > _MAX_DEPTH * 2:
            raise InputError(f"{self._source}: line {self._expander.line}: has too many branches")
        try:
            truth = self._condition(condition)
            return self._branch(truth, lambda: self._statements(body), lambda: self._clauses(clauses[1:]))
        finally:
            self._depth -= 1

    def _condition(self, nodes: Sequence[Node]) -> Truth:
        """Whether commands succeed; for a command that is not the shell's it is not known."""
        recorded = len(self._run.commands)
        status: Truth = True
        for node in nodes:
            if node.type not in _IGNORED_STATEMENTS:
                status = self._statement(node)
        if status is True and len(self._run.commands) > recorded:
            command = self._run.commands[-1]
            shown = " ".join(command.shell_words)
            return self._unknowns.undecided(shown[:200], command.line, self._unknowns.names(command.shell_words))
        return status

    def _branch(self, truth: Truth, then: Callable[[], Truth], otherwise: Callable[[], Truth]) -> Truth:
        """Take a branch, or both under their assumptions; the status of what was taken."""
        if isinstance(truth, bool):
            return (then if truth else otherwise)()
        decision = truth.decision
        if decision.number in self._unknowns.assumed:
            return self._branch(truth.outcomes[self._unknowns.assumed[decision.number]], then, otherwise)
        before, stdin = self._state.copy(), self._stdin
        rests: set[str | None] = set()
        ends: list[ShellState | None] = []
        statuses: list[Truth] = []
        jumps: list[Exception] = []
        for outcome in (0, 1):
            self._state.restore(before.copy())
            self._stdin = stdin
            with self._unknowns.assuming({decision.number: outcome}):
                try:
                    statuses.append(self._branch(truth.outcomes[outcome], then, otherwise))
                    ends.append(self._state.copy())
                except (_Exit, _Return, _Loop, _Ended) as jump:
                    self._note_jump(decision, jump)
                    jumps.append(jump)
                    statuses.append(False)
                    ends.append(None)
            rests.add(self._stdin)
        self._stdin = rests.pop() if len(rests) == 1 else None
        if len(jumps) == len(ends):
            raise self._joint_jump(jumps)
        self._merge(decision, ends[0], ends[1])
        if ends[0] is None or ends[1] is None:
            return statuses[1 if ends[0] is None else 0]
        return statuses[0] if statuses[0] == statuses[1] else Undecided(decision, (statuses[0], statuses[1]))

    def _note_jump(self, decision: Decision, jump: Exception) -> None:
        """Keep the state in which a branch leaves its function or its loop; a script that it ends has none."""
        if isinstance(jump, _Return) and self._frames:
            self._frames[-1].returned.append(self._early_end(self._frames[-1].assumed))
        if isinstance(jump, _Loop):
            if not self._loops or jump.levels > 1:
                raise InputError(
                    f"{self._source}: line {decision.line}: whether a loop ends is not known: {decision.condition}"
                    + definition_hint(decision.names)
                ) from None
            frame = self._loops[-1]
            (frame.left if jump.leaves else frame.continued).append(self._early_end(frame.assumed))

    def _early_end(self, assumed_before: Mapping[int, int]) -> _EarlyEnd:
        """The present state, where what is assumed now but was not before holds."""
        self._early_ends += 1
        if self._early_ends > _MAX_EARLY_ENDS:
            raise InputError(
                f"{self._source}: line {self._expander.line}: loops and functions may end in more than "
                f"{_MAX_EARLY_ENDS} places, as their conditions are not known; give its variables with --define"
            )
        assumed = self._unknowns.assumed
        guards = [
            (decision, assumed[decision.number])
            for decision in self._unknowns.decisions
            if decision.number in assumed and decision.number not in assumed_before
        ]
        return _EarlyEnd(tuple(guards), self._state.copy(), self._status, assumed)

    @staticmethod
    def _joint_jump(jumps: Sequence[Exception]) -> Exception:
        """The jump where both branches have one: out of the loop or the function that either leaves, else the end."""
        if any(isinstance(jump, _Loop | _Ended) for jump in jumps):
            return _Ended()
        return _Returned() if any(isinstance(jump, _Return) for jump in jumps) else _Exit()

    def _merge(self, decision: Decision, first: ShellState | None, second: ShellState | None) -> None:
        if first is None or second is None:
            self._state.restore((first or second).copy())  # type: ignore[union-attr]
            self._unknowns.assumed = {**self._unknowns.assumed, decision.number: 1 if first is None else 0}
            return
        self._state.restore(merge_states(self._unknowns, decision, first, second))

    def _case(self, node: Node) -> Truth:
        word = self._expander.scalar(node_text(node.children_by_field_name("value")[0]))
        items = [child for child in node.named_children if child.type == "case_item"]
        return self._case_items(word, items)

    def _case_items(self, word: str, items: Sequence[Node]) -> Truth:
        if not items:
            return True
        item, line = items[0], self._line(first_line(items[0]))
        patterns = [self._expander.pattern(node_text(child)) for child in item.children_by_field_name("value")]
        closing = next(index for index, child in enumerate(item.children) if child.type == ")")
        body = item.children[closing + 1 :]
        if "*" in patterns:
            return self._statements(body)
        shown = "[ {0} = " + " | ".join(f"{{{number + 1}}}" for number in range(len(patterns))) + " ]"
        truth = self._unknowns.lift_truth(
            lambda text, *forms: any(matches_pattern(text, form) for form in forms),
            [word, *patterns],
            shown,
            line,
        )
        return self._branch(truth, lambda: self._statements(body), lambda: self._case_items(word, items[1:]))

    def _for(self, node: Node) -> Truth:
        variable = node_text(node.children_by_field_name("variable")[0])
        body = node.children_by_field_name("body")[0]
        values = node.children_by_field_name("value")
        has_list = any(child.type == "in" for child in node.children)
        texts = [node_text(value) for value in values] if has_list else ['"$@"']
        shell_words = [word for text in texts for word in self._expander.shell_words(text)]

        def run(known_words: Sequence[str]) -> Truth:
            with self._loop():
                for word in self._iterations(known_words):
                    self._state.assign(variable, word)
                    if not self._iteration(body):
                        break
            return True

        return self._for_each_outcome(shell_words, run)

    def _for_each_outcome(self, shell_words: Sequence[str], action: Callable[[Sequence[str]], Truth]) -> Truth:
        """Do something with words of which conditions decide how many they are: once for each outcome."""
        settled = self._unknowns.settle_words(shell_words)
        decision = self._unknowns.counting_decision(settled)
        if decision is None:
            return action(settled)
        again = partial(self._for_each_outcome, settled, action)
        return self._branch(Undecided(decision, (True, False)), again, again)

    def _iterations(self, shell_words: Sequence[str]) -> Sequence[str]:
        if len(shell_words) > _MAX_ITERATIONS:
            raise InputError(f"{self._source}: line {self._expander.line}: a loop over {len(shell_words):,} words")
        return shell_words

    @contextmanager
    def _loop(self) -> Iterator[None]:
        """A loop inside, at whose end the states are joined in which branches that may be taken left it."""
        frame = _LoopFrame(self._unknowns.assumed)
        self._loops.append(frame)
        try:
            yield
        finally:
            self._loops.pop()
        self._join(frame.left, is_open=frame.goes_on)

    def _join(self, ends: Sequence[_EarlyEnd], *, is_open: bool) -> None:
        """Join states of early ends with the present one, the last first. is_open: whether that is reached, too."""
        for end in reversed(ends):
            here, joined = self._state.copy(), end.state
            for decision, outcome in reversed(end.guards):
                pair = (joined, here) if outcome == 0 else (here, joined)
                joined = merge_states(self._unknowns, decision, *pair)
            self._state.restore(joined.copy())
        if ends:
            self._unknowns.assumed = _shared(
                [end.assumed for end in ends] + ([self._unknowns.assumed] if is_open else [])
            )

    def _iteration(self, body: Node) -> bool:
        """Evaluate the body of a loop; False: the loop ends."""
        frame = self._loops[-1]
        frame.continued = []
        is_open = goes_on = True
        try:
            self._statements(body.named_children)
        except _Ended:
            is_open, goes_on = False, bool(frame.continued)
            frame.goes_on = goes_on
        except _Loop as jump:
            if jump.levels > 1:
                raise _Loop(leaves=jump.leaves, levels=jump.levels - 1) from None
            goes_on = not jump.leaves
        self._join(frame.continued, is_open=is_open)
        return goes_on

    def _c_for(self, node: Node) -> Truth:
        header = node_text(node)
        header = header[header.index("((") + 2 :]
        header = header[: header.index("))")]
        initial, condition, update = [*header.split(";"), "", ""][:3]
        body = node.children_by_field_name("body")[0]
        self._expander.arithmetic(initial)
        with self._loop():
            for _ in range(_MAX_ITERATIONS):
                if condition.strip() and self._arithmetic_truth(condition) is not True:
                    break
                if not self._iteration(body):
                    break
                self._expander.arithmetic(update)
        return True

    def _while(self, node: Node) -> Truth:
        """A loop whose condition is not known is not entered, as nothing was given that it would read."""
        body = node.children_by_field_name("body")[0]
        condition = [child for child in node.children[1:] if child.type != "do_group"]
        expected = node.children[0].type == "while"
        with self._loop():
            for _ in range(_MAX_ITERATIONS):
                truth = self._condition(condition)
                if truth is not expected:
                    self._forget_what_it_assigns(node, condition, truth)
                    return True
                if not self._iteration(body):
                    return True
        raise InputError(f"{self._source}: line {self._line(first_line(node))}: a loop does not end")

    def _forget_what_it_assigns(self, node: Node, condition: Sequence[Node], truth: Truth) -> None:
        """Where a loop reads lines that are not known, neither are the variables that its iterations set."""
        if isinstance(truth, bool) or not any(_READ.search(node_text(one)) for one in condition):
            return
        for name in assigned_names(node):
            self._state.variables[name] = self._unknowns.unknown(f"${name}", self._line(first_line(node)))

    def _function(self, node: Node) -> Truth:
        self._state.functions[node_text(node.children_by_field_name("name")[0])] = (node, self._line_offset)
        return True

    # assignments

    def _assignments(self, node: Node) -> Truth:
        for child in node.named_children:
            self._assignment(child)
        return True

    def _assignment(self, node: Node) -> Truth:
        name, index, appends, value = self._assigned(node)
        self._assign(name, index, value, appends=appends)
        return True

    def _assigned(self, node: Node) -> tuple[str, str | None, bool, Value]:
        """Name, index, whether it is appended, and value of an assignment."""
        text = node_text(node)
        match = re.compile(r"([A-Za-z_]\w*)(?:\[((?:[^]\[]|\[[^]]*\])*)\])?(\+?)=").match(text)
        if match is None:
            raise InputError(f"{self._source}: line {self._line(first_line(node))}: {text[:60]!r} is no assignment")
        self._expander.line = self._line(first_line(node))
        value = next(iter(node.children_by_field_name("value")), None)
        if value is not None and value.type == "array":
            return match[1], match[2], match[3] == "+", self._array(value, self._state.variables.get(match[1]))
        return match[1], match[2], match[3] == "+", self._expander.scalar(text[match.end() :])

    def _array(self, node: Node, old: Value) -> Value:
        shell_words: list[str] = []
        mapping: dict[str, str] = {}
        for child in node.named_children:
            if child.type == "comment":
                continue
            self._expander.line = self._line(first_line(child))
            text = node_text(child)
            keyed = re.match(r"\[((?:[^]\[]|\[[^]]*\])*)\]=", text)
            if keyed:
                key = self._expander.scalar(keyed[1])
                mapping[key] = self._expander.scalar(text[keyed.end() :])
            else:
                shell_words += self._expander.shell_words(text)
        if isinstance(old, dict) or (mapping and not all(key.isdecimal() for key in mapping)):
            return mapping
        for key, value in mapping.items():
            shell_words += [""] * (min(int(key), _MAX_ITERATIONS) + 1 - len(shell_words))
            shell_words[int(key)] = value
        return tuple(shell_words)

    def _assign(self, name: str, index: str | None, value: Value, *, appends: bool) -> None:
        old = self._state.value(name, self._unknowns.assumed)
        if index is not None:
            self._assign_element(name, index, value, old, appends=appends)
            return
        self._state.assign(name, self._appended(name, old, value) if appends else value)

    def _assign_element(self, name: str, index: str, value: Value, old: Value, *, appends: bool) -> None:
        text = value if isinstance(value, str) else ""
        key = self._expander.scalar(index) if isinstance(old, dict) else self._expander.arithmetic(index)
        if "\0" in key or isinstance(old, Variant) or (not isinstance(old, dict) and not key.isdecimal()):
            unknown = self._unknowns.unknown(f"${{{name}[{index}]}}", self._expander.line, self._unknowns.names([key]))
            self._state.assign(name, unknown)
            return
        if not isinstance(old, dict) and int(key) > _MAX_ITERATIONS:
            raise InputError(f"{self._source}: line {self._expander.line}: {name} has an element {key}")
        if appends and isinstance(old, dict):
            text = old.get(key, "") + text
        self._state.assign(name, text, index=key)

    def _appended(self, name: str, old: Value, value: Value) -> Value:
        if isinstance(old, Variant):
            outcomes = [self._appended(name, outcome, value) for outcome in old.outcomes]
            return Variant(old.decision, (outcomes[0], outcomes[1]))
        if isinstance(value, tuple):
            first = () if old is None or old == "" else (old,) if isinstance(old, str) else old
            return (*first, *value)
        if isinstance(value, dict) and isinstance(old, dict):
            return {**old, **value}
        if isinstance(old, tuple):
            return (old[0] + str(value), *old[1:]) if old else (str(value),)
        text = ("" if old is None else str(old)) + str(value)
        if len(text) > MAX_TEXT:
            raise InputError(
                f"{self._source}: line {self._expander.line}: {name} has more than {MAX_TEXT:,} characters"
            )
        return text

    def _declaration(self, node: Node) -> Truth:
        """`export`, `declare`, `local`, `readonly`, `typeset`."""
        keyword = node.children[0].type
        flags = [node_text(child) for child in node.named_children if node_text(child)[:1] in "-+"]
        is_mapping = any("A" in flag for flag in flags)
        is_integer = any("i" in flag for flag in flags) and keyword != "export"
        is_local = keyword == "local" or (keyword in ("declare", "typeset") and bool(self._frames))
        is_exported = keyword == "export" or any("x" in flag for flag in flags)
        for child in node.named_children:
            text = node_text(child)
            if text[:1] in "-+" or child.type == "comment":
                continue
            name = re.split(r"\W", text, maxsplit=1)[0]
            self._declared(child, name, is_local=is_local, is_mapping=is_mapping, is_integer=is_integer)
            if is_exported and name:
                self._state.exported.add(name)
        return True

    def _declared(self, node: Node, name: str, *, is_local: bool, is_mapping: bool, is_integer: bool) -> None:
        if is_local and self._frames and name:
            self._frames[-1].hidden.setdefault(name, self._state.variables.get(name))
        if node.type == "variable_assignment":
            if is_mapping:
                self._state.variables[name] = {}
            self._assignment(node)
            value = self._state.variables.get(name)
            if is_integer and isinstance(value, str):
                self._state.variables[name] = self._expander.arithmetic(value)
            return
        if node.type not in ("variable_name", "word"):
            for word in self._expander.shell_words(node_text(node)):
                self._assign_word(word)
        elif is_mapping:
            self._state.variables[name] = {}
        elif is_local:
            self._state.variables[name] = ""

    def _assign_word(self, word: str) -> None:
        """An assignment that an expansion made, as in `export "$NAME=1"`."""
        name, separator, value = word.partition("=")
        if separator and re.fullmatch(r"[A-Za-z_]\w*", name):
            self._state.assign(name, value)

    def _unset(self, node: Node) -> Truth:
        for child in node.named_children:
            name = node_text(child)
            if re.fullmatch(r"[A-Za-z_]\w*", name):
                self._state.variables[name] = ""
        return True

    # commands

    def _redirected(self, node: Node) -> Truth:
        body = next(iter(node.children_by_field_name("body")), None)
        redirects = [child for child in node.children if child.type.endswith("_redirect")]
        stdin = self._redirected_input(redirects)
        target = self._target(redirects)
        if body is None:
            return True
        saved = self._stdin
        self._stdin = saved if stdin is None else stdin
        try:
            if target is None:
                return self._statement(body)
            recorded = len(self._run.commands)
            output = self._captured(lambda: self._statement(body))
            path, appends = target
            if path != "/dev/null" and len(self._run.commands) == recorded:
                old = self._run.files.get(path, "") if appends else ""
                self._run.files[path] = (old + output)[:MAX_SCRIPT]
            return self._status
        finally:
            self._stdin = saved

    def _redirected_input(self, redirects: Sequence[Node]) -> str | None:
        for redirect in redirects:
            text = node_text(redirect)
            if redirect.type == "heredoc_redirect":
                return self._heredoc(redirect)
            if redirect.type == "herestring_redirect":
                return self._expander.scalar(text.removeprefix("<<<").strip()) + "\n"
            if redirect.type == "file_redirect" and re.match(r"0?<[^&]", text):
                return self._file_input(text.partition("<")[2].strip())
        return None

    def _file_input(self, source: str) -> str:
        """The text of a file, or the output of `<( ... )`."""
        if source.startswith("<("):
            return self._substitute(source[2:-1], self._expander.line) + "\n"
        content = self._read(self._expander.scalar(source))
        return self._unknowns.unknown(f"<{source}", self._expander.line) if content is None else content

    def _heredoc(self, node: Node) -> str:
        body = next((child for child in node.children if child.type == "heredoc_body"), None)
        start = next(child for child in node.children if child.type == "heredoc_start")
        text = "" if body is None else node_text(body)
        if node_text(node).startswith("<<-"):
            text = re.sub(r"(?m)^\t+", "", text)
        if node_text(start)[:1] in ("'", '"', "\\"):
            return text
        return self._expander.scalar(text, quoted=True)

    def _target(self, redirects: Sequence[Node]) -> tuple[str, bool] | None:
        """The file that output goes to, and whether it is appended."""
        nested = [child for redirect in redirects if redirect.type == "heredoc_redirect" for child in redirect.children]
        for redirect in (*redirects, *nested):
            text = node_text(redirect)
            if redirect.type == "file_redirect" and text[:1] == ">" and not text.startswith(">&"):
                destination = text.lstrip(">|&").strip()
                return unmarked(" ".join(self._expander.shell_words(destination))), text.startswith(">>")
        return None

    def _command(self, node: Node) -> Truth:
        """A simple command: assignments for it alone, its words, here-strings."""
        shell_words: list[str] = []
        assigned: list[tuple[str, str | None, bool, Value]] = []
        redirects = [child for child in node.children if child.type.endswith("redirect")]
        self._expander.line = self._line(first_line(node))
        line = self._expander.line
        end = node.start_byte
        for child in node.named_children:
            if assigned and not shell_words and self._is_next_line(node, end, child):
                self._simple([], assigned, line)
                assigned = []
            end = child.end_byte
            if child.type == "variable_assignment" and not shell_words:
                assigned.append(self._assigned(child))
            elif child.type == "command_name":
                self._expander.line = line = self._line(first_line(child))
                shell_words += self._expander.shell_words(node_text(child))
            elif not child.type.endswith("redirect") and child.type != "comment":
                self._expander.line = self._line(first_line(child))
                shell_words += self._expander.shell_words(node_text(child))
        self._expander.line = line
        stdin = self._redirected_input(redirects)
        if stdin is None:
            return self._simple(shell_words, assigned, line)
        saved, self._stdin = self._stdin, stdin
        try:
            return self._simple(shell_words, assigned, line)
        finally:
            self._stdin = saved

    @staticmethod
    def _is_next_line(node: Node, end: int, child: Node) -> bool:
        """Whether a line ends between assignments and what the grammar takes for their command."""
        gap = (node.text or b"")[end - node.start_byte : child.start_byte - node.start_byte]
        return b"\n" in gap.replace(b"\\\n", b"")

    def _simple(
        self, shell_words: list[str], assigned: Sequence[tuple[str, str | None, bool, Value]], line: int
    ) -> Truth:
        if not shell_words:
            for name, index, appends, value in assigned:
                self._assign(name, index, value, appends=appends)
            return True
        hidden = {name: self._state.variables.get(name) for name, *_ in assigned}
        added = {*hidden} - self._state.exported
        for name, index, appends, value in assigned:
            self._assign(name, index, value, appends=appends)
        self._state.exported |= added
        try:
            return self._called(shell_words, line)
        finally:
            for name, old in hidden.items():
                self._state.variables[name] = old
            self._state.exported -= added

    def _called(self, shell_words: list[str], line: int) -> Truth:
        name = shell_words[0]
        if (
            name in ("command", "builtin", "exec", "time")
            and len(shell_words) > 1
            and not shell_words[1].startswith("-")
        ):
            return self._called(shell_words[1:], line)
        if name in self._state.functions:
            return self._for_each_outcome(shell_words[1:], lambda known_words: self._call_function(name, known_words))
        decision = self._unknowns.open_decision([name])
        if decision is not None:
            again = partial(self._settled_call, shell_words, line)
            return self._branch(Undecided(decision, (True, False)), again, again)
        builtin = self._BUILTINS.get(name)
        if builtin is not None:
            return builtin(self, shell_words)
        output = self._pure_output(shell_words)
        if output is not None:
            if self._sink is not None:
                self._sink.append(output)
            return True
        return self._external(shell_words, line)

    def _settled_call(self, shell_words: Sequence[str], line: int) -> Truth:
        settled = self._unknowns.settle_words(shell_words)
        return self._called(settled, line) if settled else True

    def _pure_output(self, shell_words: list[str]) -> str | None:
        """The output of a command that is computed here, if it is one."""
        stdin = self._stdin
        if shell_words[0] in _READERS and len(shell_words) > 1 and not shell_words[-1].startswith("-"):
            text = self._read(shell_words[-1])
            shell_words, stdin = (shell_words, stdin) if text is None else (shell_words[:-1], text)
        if shell_words[0] in ("echo", "cat", "printf"):
            return run_pure(shell_words, stdin)
        texts = [*shell_words, *([] if stdin is None else [stdin])]
        if not any("\0" in text for text in texts):
            return run_pure(shell_words, stdin)
        if run_pure([shell_words[0], *(["1"] * (len(shell_words) - 1))], stdin and "1") is None and shell_words[
            0
        ] not in ("tr", "cut"):
            return None
        failed: list[bool] = []

        def compute(*known_words: str) -> str:
            output = run_pure(known_words[: len(shell_words)], known_words[-1] if stdin is not None else None)
            failed.append(output is None)
            return output or ""

        lifted = self._unknowns.lift(compute, *texts)
        return None if any(failed) else lifted

    def _external(self, shell_words: list[str], line: int) -> Truth:
        """A program: recorded, unless it is a shell that runs text or a file which is here."""
        nested = self._nested(shell_words)
        if nested is not None:
            return nested
        if shell_words[0].startswith("--"):
            self._run.notes.append(
                f"line {line} is a command of its own, {shell_words[0]}, as the line before it does not end in a "
                "backslash"
            )
        environment = {name: self._state.value(name, self._unknowns.assumed) for name in self._state.exported}
        self._run.commands.append(
            RecordedCommand((*self._launcher, *shell_words), line, dict(self._unknowns.assumed), environment)
        )
        if self._sink is not None:
            shown = self._unknowns.described(" ".join(shell_words))
            counted = self._counted_gpus(shell_words, shown)
            if counted is not None:
                self._sink.append(counted)
                return True
            self._sink.append(self._unknowns.unknown(f"$({shown[:80]})", line, self._unknowns.names(shell_words)))
        return True

    def _counted_gpus(self, shell_words: Sequence[str], shown: str) -> str | None:
        """What a command prints from which a script counts the GPUs of its node; None: it is another."""
        is_list = posixpath.basename(shell_words[0]) in ("nvidia-smi", "rocm-smi") and "-L" in shell_words
        if not is_list and not re.search(r"torch\.cuda\.device_count\(\)", shown):
            return None
        count = self._run.node_gpus
        self._run.notes.append(f"line {self._expander.line} counts the GPUs of a node: {count}, as the cluster's have")
        return "GPU\n" * count if is_list else f"{count}\n"

    def _nested(self, shell_words: list[str]) -> Truth | None:
        """Commands inside a command: `bash -c TEXT`, `bash FILE`, `ssh HOST TEXT`; None: there are none."""
        for index, word in enumerate(shell_words):
            if word.endswith(".py"):
                return None
            if posixpath.basename(word) in _SHELLS:
                return self._shell(shell_words[:index], shell_words[index + 1 :])
            if re.search(r"\.py\b", word) and re.search(r"\s", word):
                return self._nested_text(shell_words[:index], word, ())
            if index and word.endswith(_SCRIPTS) and posixpath.basename(shell_words[0]) in _WRAPPERS:
                text = self._read(word)
                return None if text is None else self._wrapped(shell_words, index, text)
        if shell_words[0].endswith(_SCRIPTS):
            text = self._read(shell_words[0])
            return None if text is None else self._nested_text([], text, tuple(shell_words[1:]), shell_words[0])
        return None

    def _wrapped(self, shell_words: Sequence[str], index: int, text: str) -> Truth:
        """Run the script at an index of a command; a batch script has the options of its header."""
        launcher, variables = shell_words[:index], dict[str, str]()
        if posixpath.basename(shell_words[0]) == _BATCH:
            options = {**batch_header(text), **dict(options_of(shell_words[1:index]))}
            launcher = [_BATCH, *(f"--{name}={value}" for name, value in options.items())]
            variables = batch_environment(options)
        arguments = tuple(shell_words[index + 1 :])
        return self._nested_text(launcher, text, arguments, shell_words[index], variables)

    def _shell(self, launcher: Sequence[str], shell_words: Sequence[str]) -> Truth | None:
        rest = list(shell_words)
        while rest and rest[0].startswith("-"):
            option = rest.pop(0)
            if option in ("-o", "+o", "-O"):
                rest = rest[1:]
            elif not option.startswith("--") and "c" in option:
                name = rest[1] if len(rest) > 1 else "bash"
                return self._nested_text(launcher, rest[0], tuple(rest[2:]), name) if rest else None
        text = self._read(rest[0]) if rest else self._stdin
        if text is None:
            return None
        return self._nested_text(launcher, text, tuple(rest[1:]), rest[0] if rest else "")

    def _nested_text(
        self,
        launcher: Sequence[str],
        text: str,
        arguments: tuple[str, ...],
        name: str = "",
        variables: Mapping[str, str] = NO_VARIABLES,
    ) -> Truth:
        """Run text in a shell of its own, which has the exported variables and those that its launcher sets."""
        saved, source = self._launcher, self._source
        self._launcher = (*saved, *launcher)
        try:
            with self._own_state():
                self._state.variables = {
                    key: value for key, value in self._state.variables.items() if key in self._state.exported
                }
                self._state.variables |= variables
                self._state.exported |= {*variables}
                self._state.functions = {}
                self._state.positional, self._state.has_arguments = arguments, True
                self._state.is_called = True
                self._state.script_name = name or self._state.script_name
                self._run_inner(text)
        except _Exit:
            pass
        finally:
            self._launcher, self._source = saved, source
        return True

    def _run_inner(self, text: str) -> None:
        """Run text whose holes are those of this script; its lines count as the line of its command."""
        self._depth += 4
        if self._depth > _MAX_DEPTH:
            raise InputError(f"{self._source}: line {self._expander.line}: scripts call each other too deeply")
        offset = self._line_offset
        self._line_offset = self._expander.line
        visible, names = _with_variables(with_placeholders_as_holes(text, self._unknowns))
        self._state.variables.update(names)
        try:
            self.run_text(visible)
        finally:
            self._line_offset = offset
            self._depth -= 4
            for name in names:
                self._state.variables.pop(name, None)

    def _call_function(self, name: str, arguments: Sequence[str]) -> Truth:
        node, offset = self._state.functions[name]
        saved = (self._state.positional, self._state.has_arguments, self._state.is_called, self._state.shifted)
        saved_offset, self._line_offset = self._line_offset, offset
        self._state.positional, self._state.has_arguments = tuple(arguments), True
        self._state.is_called, self._state.shifted = True, 0
        self._frames.append(_Frame(self._unknowns.assumed))
        loops, self._loops = self._loops, []
        try:
            status, is_open = self._function_body(node)
        finally:
            frame, self._loops = self._frames.pop(), loops
            self._line_offset = saved_offset
        status = self._leave(frame, status, is_open=is_open)
        self._state.positional, self._state.has_arguments, self._state.is_called, self._state.shifted = saved
        return status

    def _function_body(self, node: Node) -> tuple[Truth, bool]:
        """The status of a function's body, and whether its end is reached in addition to early returns."""
        try:
            return self._statement(node.children_by_field_name("body")[0]), True
        except _Returned:
            return self._status, False
        except _Return:
            return self._status, True

    def _leave(self, frame: _Frame, status: Truth, *, is_open: bool) -> Truth:
        """Join the states and the statuses of early returns, and show what local variables hid."""
        self._join(frame.returned, is_open=is_open)
        for end in reversed(frame.returned):
            status = _status_after(end, status)
        for name, value in frame.hidden.items():
            self._state.variables[name] = value
        return status

    @contextmanager
    def _own_state(self) -> Iterator[None]:
        """Changes of the state inside are lost after it."""
        saved, assumed = self._state.copy(), self._unknowns.assumed
        try:
            yield
        finally:
            self._state.restore(saved)
            self._unknowns.assumed = assumed

    def _captured(self, action: Callable[[], object]) -> str:
        saved, self._sink = self._sink, []
        try:
            action()
        finally:
            sink, self._sink = self._sink, saved
        output = "".join(sink or [])
        if len(output) > MAX_TEXT:
            raise InputError(f"{self._source}: line {self._expander.line}: prints more than {MAX_TEXT:,} characters")
        return output

    def _substitute(self, text: str, line: int) -> str:
        """The output of `$(text)`; programs that it runs are not the script's."""
        read = re.fullmatch(r"\s*<\s*(\S+)\s*", text)
        recorded = len(self._run.commands)
        here = re.fullmatch(r"""\s*cd\s.*(?:\$0|BASH_SOURCE).*&&\s*pwd(\s+-P)?\s*""", text, re.DOTALL)
        if here and ".." not in text:
            return self._script_directory()
        if read:
            content = self._run.files.get(self._expander.scalar(read[1]))
            return self._unknowns.unknown(f"$({text})", line) if content is None else content.rstrip("\n")
        offset, stdin = self._line_offset, self._stdin
        self._line_offset, self._stdin = line, None
        try:
            with self._own_state():
                output = self._captured(lambda: self._substituted(text))
        finally:
            self._line_offset, self._expander.line, self._stdin = offset, line, stdin
            del self._run.commands[recorded:]
        return output.rstrip("\n")

    def _substituted(self, text: str) -> None:
        self._depth += 2
        if self._depth > _MAX_DEPTH:
            raise InputError(f"{self._source}: line {self._expander.line}: substitutions are nested too deeply")
        try:
            self.run_text(text)
        except (_Exit, _Return):
            pass
        finally:
            self._depth -= 2

    def _script_directory(self) -> str:
        return posixpath.dirname(self._state.script_name) or "."

    def _read(self, path: str) -> str | None:
        """The text of a file that the script wrote, or that is next to it; None: there is none."""
        if unmarked(path) in self._run.files:
            return self._run.files[unmarked(path)]
        return read_first_text(self._candidates(path), MAX_SCRIPT)

    def _candidates(self, path: str) -> Iterator[Path]:
        """Where a file may be: as it is written, or, where its directory is not known, by its last parts."""
        if self._directory is None:
            return
        inside = re.split(r"\0\d+\*?\0/", path)[-1]
        if "\0" in inside or not inside:
            return
        directory = posixpath.dirname(self._source)
        relative = inside[len(directory) + 1 :] if directory and inside.startswith(f"{directory}/") else inside
        segments = [segment for segment in relative.split("/") if segment not in ("", ".")]
        for base in (self._directory,) if relative.startswith("/") else (self._directory, self._directory.parent):
            yield base / "/".join(segments)
        yield self._directory / segments[-1]

    # builtins

    def _nothing(self, _shell_words: list[str]) -> Truth:
        return True

    def _true(self, _shell_words: list[str]) -> Truth:
        return True

    def _grep(self, shell_words: list[str]) -> Truth:
        """Whether `grep -q` finds a pattern in an input that is known; any other use is a program's."""
        pattern, stdin = quiet_pattern(shell_words), self._stdin
        if pattern is None or stdin is None:
            return self._external(shell_words, self._expander.line)
        shown = self._unknowns.described(" ".join(shell_words)).replace("{", "{{").replace("}", "}}")
        return self._unknowns.lift_truth(
            lambda text: any(map(pattern.search, text.splitlines())), [stdin], shown[:200], self._expander.line
        )

    def _false(self, _shell_words: list[str]) -> Truth:
        return False

    def _exit(self, _shell_words: list[str]) -> Truth:
        raise _Exit

    def _return(self, shell_words: list[str]) -> Truth:
        if len(shell_words) > 1:
            self._status = self._unknowns.lift_truth(
                lambda code: code == "0", [shell_words[1]], "{0} = 0", self._expander.line
            )
        raise _Return

    def _break(self, shell_words: list[str]) -> Truth:
        raise _Loop(
            leaves=True, levels=int(shell_words[1]) if len(shell_words) > 1 and shell_words[1].isdecimal() else 1
        )

    def _continue(self, shell_words: list[str]) -> Truth:
        raise _Loop(
            leaves=False, levels=int(shell_words[1]) if len(shell_words) > 1 and shell_words[1].isdecimal() else 1
        )

    def _shift(self, shell_words: list[str]) -> Truth:
        count = int(shell_words[1]) if len(shell_words) > 1 and shell_words[1].isdecimal() else 1
        if not self._state.has_arguments:
            self._state.shifted += count
            return True
        if count > len(self._state.positional):
            return False
        self._state.positional = self._state.positional[count:]
        self._state.is_called = True
        return True

    def _set(self, shell_words: list[str]) -> Truth:
        if "--" not in shell_words:
            return True

        def assign(known_words: Sequence[str]) -> Truth:
            self._state.positional = tuple(known_words)
            self._state.has_arguments = self._state.is_called = True
            return True

        return self._for_each_outcome(shell_words[shell_words.index("--") + 1 :], assign)

    def _let(self, shell_words: list[str]) -> Truth:
        value = "0"
        for word in shell_words[1:]:
            value = self._expander.arithmetic(word)
        return self._unknowns.lift_truth(lambda number: number != "0", [value], "let {0}", self._expander.line)

    def _eval(self, shell_words: list[str]) -> Truth:
        self._run_inner(self._unknowns.mapped(_without_quotes, " ".join(shell_words[1:])))
        return self._status

    def _test_command(self, shell_words: list[str]) -> Truth:
        tested = shell_words[1:-1] if shell_words[0] == "[" else shell_words[1:]
        quoted = [word if "\0" in word else f"'{word}'" if "'" not in word else word for word in tested]
        return ConditionEvaluator(self._expander, quoted, self._expander.line, is_extended=False).truth()

    def _source_file(self, shell_words: list[str]) -> Truth:
        text = self._read(shell_words[1]) if len(shell_words) > 1 else None
        if text is None:
            path = self._unknowns.described(" ".join(shell_words[1:2]))
            self._run.notes.append(f"{path}, which line {self._expander.line} sources, is not next to the script")
            return True
        state, saved = self._state, (self._state.positional, self._state.has_arguments, self._state.is_called)
        if len(shell_words) > 2:
            state.positional, state.has_arguments, state.is_called = tuple(shell_words[2:]), True, True
        with suppress(_Return):
            self._run_inner(text)
        if len(shell_words) > 2:
            state.positional, state.has_arguments, state.is_called = saved
        return True

    def _pwd(self, _shell_words: list[str]) -> Truth:
        if self._sink is not None:
            self._sink.append(self._unknowns.unknown("$(pwd)", self._expander.line))
        return True

    def _read_variables(self, shell_words: list[str]) -> Truth:
        """`read`: the next line of its input; whether there is one is not known where its text is not."""
        names = [word for word in shell_words[1:] if re.fullmatch(r"[A-Za-z_]\w*", word)]
        options = " ".join(word for word in shell_words[1:] if word.startswith("-"))
        line, status = self._next_line(is_whole="-d" in options, shown=" ".join(shell_words))
        if "a" in options.replace("-d", "") and names:
            self._state.assign(names[-1], tuple(line.split()) if "\0" not in line else (mark_split(line),))
            return status
        segments = line.split(None, max(len(names) - 1, 0)) if "-d" not in options else [line]
        for index, name in enumerate(names):
            self._state.assign(name, segments[index].strip() if index < len(segments) else "")
        return status

    def _next_line(self, *, is_whole: bool, shown: str) -> tuple[str, Truth]:
        """The next line of the input, or all of it, and whether there is one."""
        number = self._expander.line
        if self._stdin is None or "\0" in self._stdin:
            text = self._unknowns.unknown(f"$({shown})", number) if self._stdin is None else self._stdin
            line = text if is_whole else text.partition("\n")[0]
            return line, self._unknowns.undecided(shown, number, self._unknowns.names([text]))
        line, end, rest = (self._stdin, "", "") if is_whole else self._stdin.partition("\n")
        self._stdin = rest
        return line, bool(end)

    def _read_lines(self, shell_words: list[str]) -> Truth:
        """`mapfile`: an array of the input's lines."""
        name = shell_words[-1] if re.fullmatch(r"[A-Za-z_]\w*", shell_words[-1]) else "MAPFILE"
        if self._stdin is None or "\0" in self._stdin:
            text = f"$({' '.join(shell_words)})"
            hole = self._unknowns.unknown(text, self._expander.line, self._unknowns.names([self._stdin or ""]))
            self._state.assign(name, (mark_split(hole),))
        else:
            self._state.assign(name, tuple(self._stdin.splitlines()))
        return True

    _HANDLERS: Final[Mapping[str, Callable[["_Interpreter", Node], Truth]]] = {
        "program": _group,
        "compound_statement": _group,
        "do_group": _group,
        "subshell": _subshell,
        "list": _list,
        "negated_command": _negated,
        "pipeline": _pipeline,
        "test_command": _test,
        "if_statement": _if,
        "case_statement": _case,
        "for_statement": _for,
        "c_style_for_statement": _c_for,
        "while_statement": _while,
        "function_definition": _function,
        "variable_assignment": _assignment,
        "variable_assignments": _assignments,
        "declaration_command": _declaration,
        "unset_command": _unset,
        "redirected_statement": _redirected,
        "command": _command,
    }
    _BUILTINS: Final[Mapping[str, Callable[["_Interpreter", list[str]], Truth]]] = {
        **dict.fromkeys(
            (":", "set_", "trap", "wait", "ulimit", "umask", "cd", "pushd", "popd", "shopt", "alias", "hash", "jobs",
             "disown", "bind", "history", "type", "mkdir", "rm", "cp", "mv", "ln", "touch", "chmod", "sleep", "module",
             "conda", "pip", "pip3", "git", "tee", "kill", "date_", "ml", "spack"),
            _nothing,
        ),
        "true": _true,
        "false": _false,
        "grep": _grep,
        "exit": _exit,
        "return": _return,
        "break": _break,
        "continue": _continue,
        "shift": _shift,
        "set": _set,
        "let": _let,
        "eval": _eval,
        "test": _test_command,
        "[": _test_command,
        "source": _source_file,
        ".": _source_file,
        "pwd": _pwd,
        "read": _read_variables,
        "mapfile": _read_lines,
        "readarray": _read_lines,
    }  # fmt: skip


def _status_after(end: _EarlyEnd, status: Truth) -> Truth:
    """A function's status, of an early return where its outcomes hold."""
    joined = end.status
    for decision, outcome in reversed(end.guards):
        first, second = (joined, status) if outcome == 0 else (status, joined)
        joined = first if first == second else Undecided(decision, (first, second))
    return joined


def _shared(paths: Sequence[Mapping[int, int]]) -> dict[int, int]:
    """What is assumed on all paths."""
    return {
        number: outcome for number, outcome in paths[0].items() if all(path.get(number) == outcome for path in paths)
    }


def _with_variables(text: str) -> tuple[str, dict[str, str]]:
    """A text with its holes as expansions of variables, and the values of these."""
    names: dict[str, str] = {}
    quoted = set(single_quoted_positions(text)) if "\0" in text else set()

    def named(match: re.Match[str]) -> str:
        name = f"_hole_{match[1]}"
        names[name] = match[0]
        return f"'\"${{{name}}}\"'" if match.start() in quoted else f"${{{name}}}"

    return re.sub("\0(\\d+)\\*?\0", named, text), names


def _without_quotes(text: str) -> str:
    """A text without its quotes, which `eval` takes off; with them where they hold spaces."""
    return re.sub(r"'([^'\s]*)'|\"([^\"\s\\]*)\"", lambda match: match[1] if match[1] is not None else match[2], text)


def definition_hint(names: Sequence[str]) -> str:
    """How a user decides what is not known; empty where nothing can."""
    if not names:
        return ""
    return f"; give --define {names[0]}=VALUE" + (f" (or {', '.join(names[1:4])})" if len(names) > 1 else "")
