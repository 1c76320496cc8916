"""Which trainings does a launch script start, and on what does it depend which?

A script is evaluated (`shell`); a text that begins with `--` is an argument list, and one that holds the table that
Megatron-LM prints is that. Each training is given once for
each outcome of the conditions that are not known and on which its arguments depend.
"""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from clustersim.common.errors import InputError
from clustersim.interop.import_result import ImportContext
from clustersim.interop.megatron_table import is_argument_table, read_table
from clustersim.interop.megatron_yaml import read_yaml_arguments
from clustersim.interop.shell.batch import batch_environment, batch_header
from clustersim.interop.shell.interpreter import ScriptRun, run_script
from clustersim.interop.shell.launches import Launch, find_launch
from clustersim.interop.shell.unknowns import HOLE, Choice, Decision, Unknowns

_MAX_ALTERNATIVES: Final = 256
_UNSUPPORTED: Final = re.compile(
    r"pretrain_(bert|t5|ict|retro|vlm|vision|biencoder|realm|image|multimodal|mimo)\w*|train_rl|main|setup|"
    r"run_(bert|t5|text|mamba)\w*|"
    r"\w*(llava|qwen\d*(_\d+)?_?vl|vlm|omni|clip|multimodal|mimo|vision|reward|dpo|grpo|ppo|orpo|distill|lora)\w*|"
    r"\w*(generat|inference|infer_|preprocess|convert|hf2|2hf|mg2|2mg|eval|export|quanti|prun|checkpoint|ckpt|download|"
    r"tokeniz|server|client|mmlu|dataset|prepare|merge|retriev|filter|report|test_|huggingface|analyz|create_|embeddings)\w*|msdp|arguments|check\w*|ptq|validate"
)
"""Programs, by their file's name, that train no decoder."""
_TRAINING_FLAGS: Final = {"--micro-batch-size", "--num-layers", "--hidden-size", "--tensor-model-parallel-size"}


@dataclass(frozen=True, slots=True)
class LaunchedTraining:
    """A training program's arguments where some decisions have certain outcomes.

    words: holes are values that are not known; processes, numa_bound: as `Launch`; is_complete: whether the
    alternatives are those of all outcomes, or too many to compare.
    """

    shell_words: tuple[str, ...]
    processes: str | None
    line: int
    outcomes: tuple[tuple[Decision, int], ...] = ()
    is_complete: bool = True
    numa_bound: bool = False

    def agrees(self, decision: Decision, outcome: int) -> bool:
        """Whether this training is one where a decision has an outcome."""
        return all(own_outcome == outcome for one, own_outcome in self.outcomes if one == decision)


@dataclass(frozen=True, slots=True)
class ScriptTrainings:
    """The trainings of a script.

    files: contents of files that it writes; notes: sentences; is_table: whether the arguments are all that there are,
    defaults included; model_keys: keys of the `model` section that no flag says; defaulted: flags that the program's
    own files state.
    """

    alternatives: tuple[LaunchedTraining, ...]
    unknowns: Unknowns
    files: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    is_table: bool = False
    model_keys: Mapping[str, Any] = field(default_factory=dict)
    defaulted: frozenset[str] = frozenset()


def find_trainings(
    text: str, source: str, context: ImportContext, node_gpus: int, is_irrelevant: Callable[[str], bool]
) -> ScriptTrainings:
    """The trainings that a script starts.

    node_gpus: GPUs of a node, which a script may count; is_irrelevant: of a flag without its dashes, whether its
    value has no effect. Raises InputError where it starts none, or other programs.
    """
    if is_argument_table(text):
        table = read_table(text, source)
        return ScriptTrainings((LaunchedTraining(table.shell_words, table.world_size, 1),), Unknowns(), is_table=True)
    if re.search(r"(?m)^MODEL_ARGS:\s*(#.*)?$", text):
        return yaml_trainings(text, source, context, "megatron")
    if _is_argument_list(text):
        return ScriptTrainings((LaunchedTraining(_listed_arguments(text, source), None, 1),), Unknowns())
    header = batch_header(text)
    environment = {**batch_environment(header), **context.definitions}
    run = run_script(text, source, context.directory, environment, node_gpus)
    launches = _launches(run, header, source)
    alternatives = [
        training
        for launch, guards in launches
        for training in _alternatives(launch, guards, run.unknowns, is_irrelevant)
    ]
    return ScriptTrainings(tuple(alternatives), run.unknowns, run.files, tuple(run.notes))


def yaml_trainings(text: str, source: str, context: ImportContext, kind: str) -> ScriptTrainings:
    """The training of a YAML file of a kind (`megatron_yaml`)."""
    read = read_yaml_arguments(text, source, context, kind)
    return ScriptTrainings(
        (LaunchedTraining(read.shell_words, read.processes, 1),),
        read.unknowns,
        notes=read.remarks,
        model_keys=read.model_keys,
        defaulted=read.defaulted,
    )


def _is_argument_list(text: str) -> bool:
    """Whether a text has arguments alone, as of a command without its program."""
    stated = [line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#")]
    return bool(stated) and stated[0].startswith("--") and not re.search(r"\w\.py\b|\$[\w({]", "\n".join(stated))


def _listed_arguments(text: str, source: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text.replace("\\\n", " "), comments=True))
    except ValueError as error:
        raise InputError(f"{source}: its arguments cannot be taken apart: {error}") from None


def _launches(run: ScriptRun, header: Mapping[str, str], source: str) -> list[tuple[Launch, Mapping[int, int]]]:
    """The programs that may be trainings, with the outcomes of decisions that lead to them."""
    guarded_launches = []
    for command in run.commands:
        launch = find_launch(command.shell_words, command.line, command.environment, header, run)
        if launch is not None:
            guarded_launches.append((launch, command.guards))
    trainings = [
        (launch, guards)
        for launch, guards in guarded_launches
        if not _UNSUPPORTED.fullmatch(_program_name(launch)) and _has_model(launch)
    ]
    if not trainings:
        raise InputError(f"{source}: {_no_training([launch for launch, _guards in guarded_launches], run)}")
    return trainings


def _program_name(launch: Launch) -> str:
    """The program's name without its package; a file's name may have dots, too."""
    return launch.program.rpartition(".")[2] if launch.is_module else launch.program.replace(".", "_")


def _has_model(launch: Launch) -> bool:
    return launch.program.startswith("pretrain_") or bool(
        _TRAINING_FLAGS & {word.partition("=")[0] for word in launch.shell_words}
    )


def _no_training(launches: Sequence[Launch], run: ScriptRun) -> str:
    if launches:
        launch = launches[-1]
        name = f"the module {launch.program}" if launch.is_module else f"{launch.program}.py"
        return f"starts {name}; of Megatron-LM's programs pretrain_gpt.py alone is modelled"
    if run.commands:
        shown = run.unknowns.described(" ".join(run.commands[-1].shell_words))
        return f"starts no program of Python; the last command that it runs is {shown[:60]!r}"
    return "starts no program, so it has no arguments; name the script that starts pretrain_gpt.py"


def _alternatives(
    launch: Launch,
    guards: Mapping[int, int],
    unknowns: Unknowns,
    is_irrelevant: Callable[[str], bool],
) -> Iterator[LaunchedTraining]:
    """A training for each outcome of the decisions on which its arguments depend."""
    shell_words = tuple(_without_harmless_choices(launch.shell_words, unknowns, is_irrelevant))
    is_complete = True
    path = tuple((decision, guards[decision.number]) for decision in unknowns.decisions if decision.number in guards)
    with unknowns.assuming(guards):
        leaves = list(_leaves(shell_words, launch.processes or "", unknowns, _MAX_ALTERNATIVES))
        if len(leaves) > _MAX_ALTERNATIVES:  # all agree or not: two of them that differ are enough to refuse
            decision = leaves[0][2][0][0]
            with unknowns.assuming({decision.number: 1}):
                other = next(_leaves(shell_words, launch.processes or "", unknowns, 1))
            leaves = [leaves[0], (other[0], other[1], ((decision, 1), *other[2]))]
            is_complete = False
    for leaf_words, processes, outcomes in leaves:
        decided = (*path, *outcomes)
        yield LaunchedTraining(
            tuple(leaf_words), processes or None, launch.line, decided, is_complete, launch.numa_bound
        )


Leaf = tuple[Sequence[str], str, tuple[tuple[Decision, int], ...]]


def _leaves(shell_words: Sequence[str], processes: str, unknowns: Unknowns, limit: int) -> Iterator[Leaf]:
    settled, count = unknowns.settle_words(shell_words), unknowns.settle(processes)
    decision = unknowns.open_decision([*settled, count])
    if decision is None:
        yield settled, count, ()
        return
    given = 0
    for outcome in (0, 1):
        with unknowns.assuming({decision.number: outcome}):
            for leaf_words, leaf_count, outcomes in _leaves(settled, count, unknowns, limit):
                yield leaf_words, leaf_count, ((decision, outcome), *outcomes)
                given += 1
                if given > limit:
                    return


def _without_harmless_choices(
    shell_words: Sequence[str], unknowns: Unknowns, is_irrelevant: Callable[[str], bool]
) -> Iterator[str]:
    """The words without choices that concern nothing but flags without effect."""
    flag = ""
    for word in shell_words:
        if word.startswith("--"):
            flag = word[2:].partition("=")[0]
        hole = unknowns.hole_at(word)
        if isinstance(hole, Choice) and all(_are_harmless(outcome, is_irrelevant) for outcome in hole.outcomes):
            continue
        is_value = "\0" in word and bool(flag) and is_irrelevant(flag) and not _may_have_flags(word, unknowns)
        yield unknowns.unknown("a value without effect", 0) if is_value and not word.startswith("--") else word


def _are_harmless(outcome: Sequence[str] | None, is_irrelevant: Callable[[str], bool]) -> bool:
    """Whether the words of an outcome are nothing but flags without effect and their values."""
    shell_words = [word for text in outcome or () for word in text.split()]
    flags = [word[2:].partition("=")[0] for word in shell_words if word.startswith("--")]
    is_led = not shell_words or shell_words[0].startswith("--")
    return is_led and all(map(is_irrelevant, flags)) and not any("\0" in word for word in shell_words)


def _may_have_flags(word: str, unknowns: Unknowns) -> bool:
    """Whether a choice in a word may add flags."""
    for match in HOLE.finditer(word):
        hole = unknowns.holes[int(match[1])]
        if isinstance(hole, Choice) and any(
            "--" in text or "\0" in text for outcome in hole.outcomes for text in outcome or ()
        ):
            return True
    return False
