"""Which options does a batch script have, and which variables does its batch system set?"""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final

_SBATCH: Final = re.compile(r"^#SBATCH[ \t]+(.*?)(?:[ \t]+#.*)?$", re.MULTILINE)
_PBS: Final = re.compile(r"^#PBS[ \t]+(.*?)$", re.MULTILINE)
_SHORT_OPTIONS: Final = {"N": "nodes", "n": "ntasks", "G": "gpus", "c": "cpus-per-task"}
_FLAG: Final = re.compile(r"--?[A-Za-z]")

Options = Mapping[str, str]
"""Values of options, without dashes and with dashes for underscores; flags without a value have an empty one."""


def batch_header(text: str) -> dict[str, str]:
    """The options of `#SBATCH` and `#PBS` lines."""
    shell_words = [word for line in _SBATCH.findall(text) for word in line.split()]
    options = dict(options_of(shell_words))
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


def options_of(shell_words: Sequence[str]) -> list[tuple[str, str]]:
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
