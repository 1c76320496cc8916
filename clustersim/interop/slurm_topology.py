"""Which fabric does Slurm's topology.conf describe?

A tree: leaf switches have nodes, others have switches; the levels become leaf, spine and core, and what is above the
third is part of the core. Where switches of a level differ in size, the largest counts. Blocks: nodes that share an
NVLink domain, or a leaf where the cluster has no domains of several nodes. Reference:
slurm.schedmd.com/topology.conf.html.
"""

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, Final

from clustersim.common.errors import InputError
from clustersim.interop.machine_changes import MachineChanges

_MAX_NAMES: Final = 200_000
_MAX_SWITCHES: Final = 100_000
_KEY: Final = re.compile(r"(\w+)=(\S+)")


def read_slurm_topology(text: str, source: str, base: Mapping[str, Any]) -> MachineChanges:
    """The changes of a topology.conf. base: the content of the cluster that it changes."""
    lines = [line for line in (raw.split("#")[0].strip() for raw in _joined(text)) if line]
    entries = [{key.casefold(): value for key, value in _KEY.findall(line)} for line in lines[:_MAX_SWITCHES]]
    per_node = _gpus_per_node(base)
    if any("blockname" in entry for entry in entries):
        return _blocks(entries, source, base, per_node)
    switches = {entry["switchname"]: entry for entry in entries if "switchname" in entry}
    if not switches:
        raise InputError(f"{source}: has neither SwitchName nor BlockName, so it is no topology.conf of Slurm")
    return _tree(switches, source, base, per_node)


def _joined(text: str) -> list[str]:
    """Lines, those that a backslash continues joined."""
    return text.replace("\\\n", " ").splitlines()


def _gpus_per_node(base: Mapping[str, Any]) -> int:
    return int(base["node"]["gpus"])


def _tree(
    switches: Mapping[str, Mapping[str, str]], source: str, base: Mapping[str, Any], per_node: int
) -> MachineChanges:
    sizes: dict[str, int] = {}
    total = 0
    for name, entry in switches.items():
        if "nodes" in entry and total <= _MAX_NAMES:
            sizes[name] = count_names(entry["nodes"], source)
            total += sizes[name]
    if not sizes:
        raise InputError(f"{source}: no switch has Nodes")
    if total > _MAX_NAMES:
        raise InputError(f"{source}: has more than {_MAX_NAMES:,} nodes")
    if "fabric" not in base:
        raise InputError(f"{source}: the cluster has no fabric to change; give --cluster another, such as dgx-h100")
    remarks: list[str] = []
    fabric: dict[str, Any] = {"leaf": {"nodes": _largest(sizes.values(), "leaf switches", "nodes", remarks)}}
    parents = _children(switches, {*sizes}, source)
    if parents:
        fabric["spine"] = {"units": _largest(map(len, parents.values()), "spines", "leaf switches", remarks)}
        fabric["core"] = _core(len(parents), base)
        above = _children(switches, {*parents}, source)
        if len(parents) > 1 and len(above) != 1:
            remarks.append("what is above the second level of switches is taken as one core")
    elif len(sizes) > 1:
        units = max(len(sizes), (base["fabric"].get("spine") or {}).get("units", 0))
        fabric["spine"] = {"units": units, "latency": _latency(base)}
        remarks.append(f"nothing joins its {len(sizes)} switches; they are taken as joined by one level")
    return MachineChanges({"fabric": fabric}, total * per_node, tuple(remarks))


def _children(switches: Mapping[str, Mapping[str, str]], below: Set[str], source: str) -> dict[str, list[str]]:
    """The switches that have some of those below, with these."""
    listed = {name: expand_names(entry["switches"], source) for name, entry in switches.items() if "switches" in entry}
    parents = {name: [child for child in children if child in below] for name, children in listed.items()}
    return {name: children for name, children in parents.items() if children}


def _core(pods: int, base: Mapping[str, Any]) -> dict[str, Any] | None:
    """The core, with the latency of the cluster's own, or of its spine; None for one pod."""
    return {"pods": pods, "latency": _latency(base)} if pods > 1 else None


def _latency(base: Mapping[str, Any]) -> Any:
    """Of the cluster's highest switches."""
    fabric = base["fabric"]
    highest = next(fabric[name] for name in ("core", "spine", "leaf") if fabric.get(name))
    return highest.get("latency", "0.3 us")


def _largest(sizes: Any, label: str, what: str, remarks: list[str]) -> int:
    counts = sorted(sizes)
    if counts[0] != counts[-1]:
        remarks.append(f"{label} have {counts[0]} to {counts[-1]} {what}; all are taken to have room for {counts[-1]}")
    return int(counts[-1])


def _blocks(
    entries: Sequence[Mapping[str, str]], source: str, base: Mapping[str, Any], per_node: int
) -> MachineChanges:
    sizes = [count_names(entry["nodes"], source) for entry in entries if "blockname" in entry and "nodes" in entry]
    stated = next((entry["blocksizes"] for entry in entries if "blocksizes" in entry), "")
    first = stated.split(",")[0]
    if not sizes:
        raise InputError(f"{source}: no block has Nodes")
    remarks: list[str] = []
    size = int(first) if first.isdecimal() and int(first) else _largest(sizes, "blocks", "nodes", remarks)
    domain = base["node"].get("nvlink", {}).get("gpus", 0)
    if domain > per_node:
        values: dict[str, Any] = {"node": {"nvlink": {"gpus": size * per_node}}}
    else:
        values = {"fabric": {"leaf": {"nodes": size}}}
        remarks.append("a block is a leaf switch, as NVLink domains are single nodes")
    return MachineChanges(values, sum(sizes) * per_node, tuple(remarks))


def count_names(text: str, source: str) -> int:
    """How many names a list of Slurm has, `n[0-3,8],m1`.

    >>> count_names("tux[0-3,12,18-20],login1", "topology.conf")
    9
    """
    return sum(1 for _ in expand_names(text, source))


def expand_names(text: str, source: str) -> Iterator[str]:
    """The names of a list of Slurm.

    >>> list(expand_names("s[0-2],t", "topology.conf"))
    ['s0', 's1', 's2', 't']
    """
    given = 0
    for listed in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        match = re.fullmatch(r"([^\[\]]*)(?:\[([\d,-]+)\])?([^\[\]]*)", listed)
        if match is None:
            raise InputError(f"{source}: {listed[:60]!r} is no list of names that is read; write such as node[0-15]")
        for number in _numbers(match[2], source) if match[2] else ("",):
            given += 1
            if given > _MAX_NAMES:
                raise InputError(f"{source}: {text[:40]!r} has more than {_MAX_NAMES:,} names")
            yield f"{match[1]}{number}{match[3]}"


def _numbers(text: str, source: str) -> Iterator[str]:
    for listed in text.split(","):
        first, _, last = listed.partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()):
            raise InputError(f"{source}: {listed[:60]!r} is no range of numbers")
        for number in range(int(first), int(last or first) + 1):
            yield str(number).zfill(len(first))
