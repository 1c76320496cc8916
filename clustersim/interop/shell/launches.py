"""Which Python program does a command start, on how many GPUs, with which arguments?

Launchers have the defaults of their manuals: torchrun and torch.distributed.launch start one process on one node;
srun, mpirun and the headers of batch scripts say how many tasks; deepspeed and accelerate have their own options.
"""

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from clustersim.interop.shell.interpreter import ScriptRun
from clustersim.interop.shell.unknowns import UnknownValue

_SBATCH: Final = re.compile(r"^#SBATCH[ \t]+(.*?)(?:[ \t]+#.*)?$", re.MULTILINE)
_PBS: Final = re.compile(r"^#PBS[ \t]+(.*?)$", re.MULTILINE)
_SHORT_OPTIONS: Final = {"N": "nodes", "n": "ntasks", "G": "gpus", "c": "cpus-per-task"}
_TORCH_MODULES: Final = ("torch.distributed.launch", "torch.distributed.run")
_PYTHON: Final = re.compile(r"python[\d.]*")
_FLAG: Final = re.compile(r"--?[A-Za-z]")
_MPI_FLAG: Final = "--use-mpi"
_OF_A_LAUNCHER: Final = re.compile(
    r"(OMPI|PMI|PMIX|MPI|SLURM|PALS)_\w+|(LOCAL_|GLOBAL_)?(RANK|WORLD_SIZE)|N?(UM_?)?(NODES|GPUS?)(_PER_NODE)?|GPUS_PER_NODE"
)
"""Names of variables that say that another command starts the script, once for each process."""

Options = Mapping[str, str]
"""Values of options, without dashes and with dashes for underscores; flags without a value have an empty one."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A program that a script starts.

    program: its file's name, or its module's; words: its arguments; processes: how many are started, a number,
    a text with holes, or None where nothing says it; line: where the script starts it.
    """

    program: str
    is_module: bool
    shell_words: tuple[str, ...]
    processes: str | None
    line: int


def batch_header(text: str) -> dict[str, str]:
    """The options of `#SBATCH` and `#PBS` lines."""
    shell_words = [word for line in _SBATCH.findall(text) for word in line.split()]
    options = dict(_options(shell_words))
    for line in _PBS.findall(text):
        options |= _pbs_options(line)
    return options


def _pbs_options(line: str) -> dict[str, str]:
    """Nodes and GPUs of `-l select=4:ngpus=8:mpiprocs=8` or `-l nodes=4:ppn=8`."""
    nodes = re.search(r"\b(?:select|nodes)=(\d+)", line)
    tasks = re.search(r"\b(?:mpiprocs|ppn)=(\d+)", line)
    gpus = re.search(r"\b(?:ngpus|gpus)=(\d+)", line)
    named = {"nodes": nodes, "ntasks-per-node": tasks, "gpus-per-node": gpus}
    return {name: match[1] for name, match in named.items() if match}


def batch_environment(header: Options) -> dict[str, str]:
    """The variables that Slurm sets for a batch script with such a header."""
    nodes, tasks_per_node = header.get("nodes", ""), header.get("ntasks-per-node", "").split("(")[0]
    gpus_per_node = _gpus_per_node(header)
    tasks = header.get("ntasks", "") or _product(nodes, tasks_per_node)
    nodes = nodes.split("-")[0]
    variables = {
        "SLURM_NNODES": nodes,
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_GPUS_PER_NODE": header.get("gpus-per-node", "") and gpus_per_node,
        "SLURM_GPUS_ON_NODE": gpus_per_node,
        "SLURM_NTASKS_PER_NODE": tasks_per_node,
        "SLURM_NTASKS": tasks,
        "SLURM_NPROCS": tasks,
        "SLURM_CPUS_PER_TASK": header.get("cpus-per-task", ""),
    }
    return {name: value for name, value in variables.items() if value.isdecimal()}


def _gpus_per_node(options: Options) -> str:
    """GPUs of a node, of --gpus-per-node, --gres=gpu:TYPE:N or --gpus on one node."""
    match = re.search(r"(\d+)$", options.get("gpus-per-node", ""))
    gres = re.search(r"\bgpu(?::[A-Za-z][\w.-]*)?:(\d+)", options.get("gres", ""))
    total = re.search(r"(\d+)$", options.get("gpus", ""))
    if match or gres:
        return (match or gres)[1]  # type: ignore[index]
    return total[1] if total and options.get("nodes") == "1" else ""


def _product(first: str, second: str) -> str:
    return str(int(first) * int(second)) if first.isdecimal() and second.isdecimal() else ""


def find_launch(
    shell_words: Sequence[str], line: int, environment: Mapping[str, object], header: Options, run: ScriptRun
) -> Launch | None:
    """The Python program in a command; None: it starts none."""
    position = _program_position(shell_words)
    if position is None:
        return None
    is_module = shell_words[position - 1] == "-m" if position else False
    program = shell_words[position] if is_module else posixpath.basename(shell_words[position])
    launcher = [*shell_words[:position]]
    processes = _processes(launcher, environment, header, run)
    if processes == "1" and _has_outer_launcher(launcher, shell_words[position + 1 :], run):
        processes = None
    return Launch(program.removesuffix(".py"), is_module, tuple(shell_words[position + 1 :]), processes, line)


def _has_outer_launcher(launcher: Sequence[str], shell_words: Sequence[str], run: ScriptRun) -> bool:
    """Whether a plain python is likely to be one of many processes, which a launcher outside the script starts."""
    if any(posixpath.basename(word) in (*_LAUNCHERS, *_TORCH_MODULES) for word in launcher):
        return False
    unset = (
        name for hole in run.unknowns.holes if isinstance(hole, UnknownValue) and hole.is_unset for name in hole.names
    )
    return _MPI_FLAG in shell_words or any(_OF_A_LAUNCHER.fullmatch(name) for name in unset)


def _program_position(shell_words: Sequence[str]) -> int | None:
    """Where the program is: a Python file, or a module that python runs."""
    for position, word in enumerate(shell_words):
        if word.endswith(".py"):
            return position
        if word == "-m" and position + 1 < len(shell_words) and shell_words[position + 1] not in _TORCH_MODULES:
            before = posixpath.basename(shell_words[position - 1]) if position else ""
            is_run = (
                _PYTHON.match(before)
                or "torchrun" in shell_words[:position]
                or set(_TORCH_MODULES) & {*shell_words[:position]}
            )
            if is_run:
                return position + 1
    return None


def _processes(
    launcher: Sequence[str], environment: Mapping[str, object], header: Options, run: ScriptRun
) -> str | None:
    """How many processes the innermost launcher starts."""
    for position in range(len(launcher) - 1, -1, -1):
        name = posixpath.basename(launcher[position])
        if name in _TORCH_MODULES:
            name = "torchrun"
        count = _LAUNCHERS.get(name)
        if count is not None:
            options = dict(_options(launcher[position + 1 :]))
            outer = {**header, **_srun_options(launcher[:position])}
            return count(options, outer, run)
    world_size = environment.get("WORLD_SIZE")
    if isinstance(world_size, str) and world_size:
        return world_size
    is_plain = any(_PYTHON.fullmatch(posixpath.basename(word)) for word in launcher)
    return "1" if is_plain and "\0" not in launcher[0] else None


def _srun_options(shell_words: Sequence[str]) -> dict[str, str]:
    names = [posixpath.basename(word) for word in shell_words]
    return dict(_options(shell_words[names.index("srun") + 1 :])) if "srun" in names else {}


def _options(shell_words: Sequence[str]) -> list[tuple[str, str]]:
    """Options and the word after each, `-N4` and `--nodes=4` taken apart."""
    parsed_options = []
    for word, after in pairwise((*shell_words, "")):
        value = "" if _FLAG.match(after) else after
        if word.startswith("--"):
            name, separator, attached = word[2:].partition("=")
            parsed_options.append((name.replace("_", "-"), attached if separator else value))
        elif re.fullmatch(r"-[A-Za-z].*", word):
            short = word[1:]
            name = short if len(short) > 1 and short in ("np", "ppn", "npernode") else short[0]
            attached = short[len(name) :].lstrip("=")
            parsed_options.append((_SHORT_OPTIONS.get(name, name), attached or value))
    return parsed_options


def _times(run: ScriptRun, first: str, second: str) -> str:
    def product(a: str, b: str) -> str:
        a = a.split(":")[-1]
        known_value = a.isdecimal() and b.isdecimal()
        return str(int(a) * int(b)) if known_value else run.unknowns.unknown(f"{a} x {b} processes", 0)

    return run.unknowns.lift(product, first, second)


def _torchrun(options: Options, _outer: Options, run: ScriptRun) -> str:
    per_node, nodes = options.get("nproc-per-node", "1"), options.get("nnodes", "1")
    if re.fullmatch(r"\d+:\d+", nodes):
        run.notes.append(f"of {nodes} nodes that torchrun may have it has the most")
    return _times(run, nodes, _all_gpus(run) if per_node in ("gpu", "auto") else per_node)


def _all_gpus(run: ScriptRun) -> str:
    """The GPUs of a node, where a launcher starts one process for each."""
    run.notes.append(f"a process for each GPU of a node: {run.node_gpus}, as the cluster's have")
    return str(run.node_gpus)


def _srun(options: Options, header: Options, run: ScriptRun) -> str | None:
    merged = {**header, **options}
    if "ntasks" in options or ("ntasks" in merged and not {"nodes", "ntasks-per-node"} & {*options}):
        return merged["ntasks"]
    per_node = merged.get("ntasks-per-node", "").split("(")[0]
    if not merged.get("nodes") and not per_node:
        return None
    return _times(run, merged.get("nodes", "1"), per_node or "1")


def _mpirun(options: Options, header: Options, run: ScriptRun) -> str | None:
    count = options.get("np") or options.get("ntasks")
    if count:
        return count
    per_node = options.get("ppn") or options.get("npernode") or header.get("ntasks-per-node")
    nodes = header.get("nodes")
    return _times(run, nodes, per_node) if nodes and per_node else None


def _deepspeed(options: Options, _header: Options, run: ScriptRun) -> str | None:
    nodes, gpus = options.get("num-nodes"), options.get("num-gpus")
    included = re.fullmatch(r"[\w.-]+:(\d+(?:,\d+)*)", options.get("include", ""))
    if included:
        return str(len(included[1].split(",")))
    if nodes is None and ("hostfile" in options or "H" in options):
        return None
    return _times(run, nodes or "1", gpus or _all_gpus(run))


def _accelerate(options: Options, _header: Options, _run: ScriptRun) -> str | None:
    return options.get("num-processes")


_LAUNCHERS: Final = {
    "torchrun": _torchrun,
    "srun": _srun,
    "mpirun": _mpirun,
    "mpiexec": _mpirun,
    "mpirun_rsh": _mpirun,
    "deepspeed": _deepspeed,
    "accelerate": _accelerate,
}
