"""Which Python program does a command start, on how many GPUs, with which arguments?

Launchers have the defaults of their manuals: torchrun and torch.distributed.launch start one process on one node;
srun, mpirun and the headers of batch scripts say how many tasks; deepspeed and accelerate have their own options.
"""

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

from clustersim.interop.shell.batch import Options, options_of
from clustersim.interop.shell.interpreter import ScriptRun
from clustersim.interop.shell.unknowns import UnknownValue

_TORCH_MODULES: Final = ("torch.distributed.launch", "torch.distributed.run")
_PYTHON: Final = re.compile(r"python[\d.]*")
_MPI_FLAG: Final = "--use-mpi"
_OF_A_LAUNCHER: Final = re.compile(
    r"(OMPI|PMI|PMIX|MPI|SLURM|PALS)_\w+|(LOCAL_|GLOBAL_)?(RANK|WORLD_SIZE)|N?(UM_?)?(NODES|GPUS?)(_PER_NODE)?|GPUS_PER_NODE"
)
"""Names of variables that say that another command starts the script, once for each process."""
_BINDERS: Final = {"bindpcie", "bind.sh"}
"""Programs that bind the process that they start to the cores next to its GPU."""
_BINDING_OPTIONS: Final = {"numa-binding", "bind-cores-to-rank"}
_NUMACTL_OPTIONS: Final = {"cpunodebind", "nodes", "physcpubind", "C"}
"""numactl's options for cores; `options_of` reads -N as Slurm does."""
_SLURM_BINDING: Final = re.compile(r"(?:map|mask)_(?:cpu|ldom):(.+)")
"""Slurm's bindings of tasks one by one; what precedes it says how much is printed (`verbose,`)."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A program that a script starts.

    program: its file's name, or its module's; words: its arguments; processes: how many are started, a number,
    a text with holes, or None where nothing says it; line: where the script starts it; numa_bound: whether the command
    binds each process to cores of its own GPU.
    """

    program: str
    is_module: bool
    shell_words: tuple[str, ...]
    processes: str | None
    line: int
    numa_bound: bool = False


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
    arguments, numa_bound = tuple(shell_words[position + 1 :]), _is_numa_bound(launcher, environment)
    return Launch(program.removesuffix(".py"), is_module, arguments, processes, line, numa_bound)


def _is_numa_bound(launcher: Sequence[str], environment: Mapping[str, object]) -> bool:
    """Whether the commands before a program bind each of its processes to the cores next to its GPU.

    torchrun and DeepSpeed's launcher have an option (docs.pytorch.org/docs/main/elastic/numa.html;
    deepspeed/launcher/runner.py), NVIDIA's bindpcie and bind.sh do nothing else. numactl binds what it starts: each
    process by itself where it is behind the launcher, and its nodes or cores depend on the process. srun binds tasks.
    """
    names = [posixpath.basename(word) for word in launcher]
    if _BINDERS & {*names} or _BINDING_OPTIONS & {name for name, value in options_of(launcher) if value != "none"}:
        return True
    if "srun" in names and _is_bound_by_slurm(launcher[names.index("srun") + 1 :], environment):
        return True
    if "numactl" not in names:
        return False
    bound = launcher[names.index("numactl") + 1 :]
    return _starts_one_process(bound) and any(
        "\0" in value for name, value in options_of(bound) if name in _NUMACTL_OPTIONS
    )


def _is_bound_by_slurm(launcher: Sequence[str], environment: Mapping[str, object]) -> bool:
    """Whether srun, whose words follow it, binds each process to cores that depend on it.

    Only lists of cores or NUMA nodes of single tasks count (map_cpu, mask_cpu, map_ldom, mask_ldom); one entry is that
    of all. What Slurm chooses (cores, sockets, ldoms, rank_ldom) follows the distribution of tasks, by default one
    socket after the other, not the GPU of a task (SchedMD/slurm@284c3b95, doc/man/man1/srun.1).
    """
    options = {"cpu-bind": environment.get("SLURM_CPU_BIND"), **dict(options_of(launcher))}
    binding = _SLURM_BINDING.search(str(options["cpu-bind"]))
    if binding is None or not _starts_one_process(launcher):
        return False
    return "\0" in binding[1] or len({entry.split("*")[0] for entry in binding[1].split(",")}) > 1


def _starts_one_process(launcher: Sequence[str]) -> bool:
    """Whether the commands before a program start no further processes."""
    return not {posixpath.basename(word) for word in launcher} & {*_LAUNCHERS, *_TORCH_MODULES}


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
            options = dict(options_of(launcher[position + 1 :]))
            outer = {**header, **_batch_options(launcher), **_srun_options(launcher[:position])}
            return count(options, outer, run)
    world_size = environment.get("WORLD_SIZE")
    if isinstance(world_size, str) and world_size:
        return world_size
    is_plain = any(_PYTHON.fullmatch(posixpath.basename(word)) for word in launcher)
    return "1" if is_plain and "\0" not in launcher[0] else None


def _batch_options(launcher: Sequence[str]) -> dict[str, str]:
    """The options of the innermost batch script that another one submits."""
    names = [posixpath.basename(word) for word in launcher]
    start = len(names) - names[::-1].index("sbatch") if "sbatch" in names else len(names)
    return dict(options_of([*takewhile(lambda word: word.startswith("--"), launcher[start:])]))


def _srun_options(shell_words: Sequence[str]) -> dict[str, str]:
    names = [posixpath.basename(word) for word in shell_words]
    return dict(options_of(shell_words[names.index("srun") + 1 :])) if "srun" in names else {}


def _times(run: ScriptRun, first: str, second: str) -> str:
    def product(a: str, b: str) -> str:
        a = a.split(":")[-1]
        known_value = a.isdecimal() and b.isdecimal()
        return str(int(a) * int(b)) if known_value else run.unknowns.unknown(f"{a} x {b} processes", 0)

    return run.unknowns.lift(product, first, second)


def _torchrun(options: Options, outer: Options, run: ScriptRun) -> str:
    per_node, nodes = options.get("nproc-per-node", "1"), options.get("nnodes", "1")
    started = outer.get("nodes", "")
    if "nnodes" not in options and started.isdecimal() and int(started) > 1:
        run.notes.append(f"torchrun without --nnodes starts a job of its own on each of the {started} nodes")
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
