"""How does data travel by a user's own Python algorithm? It is called, and what it returns is validated.

Such an algorithm is a class with the one method of `phase.CollectiveAlgorithm`, constructed without
arguments. A scenario names it as it names a schedule (`my_module:MyAlgorithm`, see `plugins`), or by the name
that an installed package gave it as an entry point of the group `clustersim.collectives`. Its costs other
than flows (latency steps, protocols) are the constants of the library's own algorithm for the same
collective, so both are compared by what they move (`NcclOverrides`).

Assumption, as for all algorithms: what is listed for a group follows from the positions of its members alone,
because equivalent groups are routed once. Validated is what holds for any algorithm: flows stay in their group
and carry something, and each member (if domains differ in size, the mean member of each domain) sends and
receives at least the minimum volume, whoever reduces or copies on the way, switches included. As fractions of
the payload, with n members: an all-reduce sends each member's payload and delivers the sum to each, 1 and 1; an
all-gather sends the own share, 1/n, and receives the others', (n-1)/n; a reduce-scatter vice versa; all-to-all
and shift send and receive (n-1)/n. For rooted collectives only the total over all members is checked, because
several chains or trees have several roots: a broadcast and a reduce n-1; scatter and gather (n-1)/n; a message
1.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final

import numpy as np

from clustersim.collectives.phase import CollectiveAlgorithm, Flows, GroupTopology, Phase
from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.errors import InputError, format_value
from clustersim.common.pickling import FieldPickling
from clustersim.common.plugins import PluginInterface, as_input_errors, load_class, module_file
from clustersim.program.task import CollectiveType

ENTRY_POINT_GROUP: Final = "clustersim.collectives"
"""Entry point group of installed algorithms."""
_INTERFACE: Final = PluginInterface(
    "a collective algorithm", "my_module:MyAlgorithm", {"phases": "collective, topology"}
)
_TOLERANCE: Final = 1e-6


@dataclass(frozen=True)
class CustomAlgorithm(FieldPickling):
    """A user's Python algorithm (a `CollectiveAlgorithm`).

    name: module:Class, or that of an entry point; folder: where the module's file is looked up first; code_hash:
    hash of that file, so that two versions of it compare unequal.
    """

    name: str
    folder: Path
    code_hash: str

    @cached_property
    def instance(self) -> CollectiveAlgorithm:
        """The instance; raise InputError where it cannot be imported or constructed."""
        algorithm_class = (
            load_class(self.name, self.folder, _INTERFACE) if ":" in self.name else _load_entry_point(self.name)
        )
        with as_input_errors(f"{self.name}()"):
            algorithm: CollectiveAlgorithm = algorithm_class()
        return algorithm

    def phases(self, collective: CollectiveType, topology: GroupTopology) -> tuple[Phase, ...]:
        """What the user's method returns.

        Raise InputError where it raises, or returns flows that do not do the collective.
        """
        size, domain_count = topology.size, topology.domain_count
        span_label = "one domain" if domain_count == 1 else f"{domain_count} domains"
        with as_input_errors(f"{self.name}.phases({collective.value}, groups of {size} in {span_label})"):
            phases = _checked_phases(self.instance.phases(collective, _read_only(topology)))
            for listed_phase in phases:
                _require_latency_steps(listed_phase, len(topology.members))
            if phases:
                _require_valid_flows(collective, topology, [flows for phase in phases for flows in phase.flows])
        return phases


def load_custom_algorithm(name: str, folder: Path) -> CustomAlgorithm:
    """The algorithm called `my_module:MyAlgorithm`, or an entry point's; raise InputError without one."""
    file = module_file(name, folder)
    code = file.read_bytes() if ":" in name and file.is_file() else b""
    algorithm = CustomAlgorithm(name, folder.resolve(), hashlib.sha256(code).hexdigest())
    _ = algorithm.instance
    return algorithm


def installed_algorithms() -> tuple[str, ...]:
    """Names of the algorithms that installed packages provide as entry points."""
    return tuple(sorted(entry_points(group=ENTRY_POINT_GROUP).names))


def _load_entry_point(name: str) -> type[CollectiveAlgorithm]:
    """The class of an entry point."""
    (entry_point, *_) = entry_points(group=ENTRY_POINT_GROUP, name=name)
    with as_input_errors(f"entry point {name} of {ENTRY_POINT_GROUP} ({entry_point.value})"):
        return load_class(entry_point.value.replace(" ", ""), None, _INTERFACE)


def _read_only(topology: GroupTopology) -> GroupTopology:
    """A copy with read-only members, so that the user's code cannot modify what other groups share."""
    members = topology.members.view()
    members.flags.writeable = False
    return replace(topology, members=members)


def _checked_phases(answer: object) -> tuple[Phase, ...]:
    phases = tuple(answer) if isinstance(answer, Iterable) else (answer,)
    for phase in phases:
        if not isinstance(phase, Phase):
            raise InputError(
                f"{format_value(phase)} is no phase; clustersim.collectives.phase.build_phase makes one of flows"
            )
    return phases


def _require_latency_steps(listed_phase: Phase, group_count: int) -> None:
    """Raise InputError unless latency steps are non-negative integers and fill stages a non-negative number."""
    for field_name in ("local", "network", "posts"):
        value = getattr(listed_phase.latency_steps, field_name)
        steps = np.asarray(value)
        is_valid = steps.dtype.kind in "iu" and (steps >= 0).all()
        if not is_valid or steps.shape not in ((), (group_count,)):
            raise InputError(
                f"latency_steps: {field_name}: {format_value(value)} is no whole number from 0 on, nor one for each of "
                f"{group_count} groups"
            )
    if not 0.0 <= listed_phase.fill_stages < np.inf:
        raise InputError(f"fill_stages: {format_value(listed_phase.fill_stages)} is no number from 0 on")


def _require_valid_flows(collective: CollectiveType, topology: GroupTopology, flow_list: list[Flows]) -> None:
    """Raise InputError for flows that leave their group or carry too little."""
    members = topology.members
    group_of_gpu = np.full(int(members.max()) + 1, -1)
    group_of_gpu[members] = np.arange(len(members))[:, None]
    sent, received = np.zeros((2, len(group_of_gpu)))
    for flows in flow_list:
        sources, targets = np.asarray(flows.sources), np.asarray(flows.targets)
        _require_flow_shape(sources, targets, flows.share, len(members))
        for ends in (sources, targets):
            gpus_by_group = ends.reshape(len(members), -1)
            is_member = (
                group_of_gpu[np.clip(gpus_by_group, 0, len(group_of_gpu) - 1)] == np.arange(len(members))[:, None]
            )
            outsiders = gpus_by_group[~is_member | (gpus_by_group < 0) | (gpus_by_group >= len(group_of_gpu))]
            if len(outsiders):
                raise InputError(f"a flow has an end at GPU {outsiders[0]}, which is not in its group")
        volume = (sources != targets).reshape(-1) * float(flows.share)
        sent += np.bincount(sources.reshape(-1), volume, len(group_of_gpu))
        received += np.bincount(targets.reshape(-1), volume, len(group_of_gpu))
    _require_volume(collective, *(_mean_in_uneven_domains(volume[members], topology) for volume in (sent, received)))


def _mean_in_uneven_domains(volume: FloatArray, topology: GroupTopology) -> FloatArray:
    """Volumes [groups, size] of members; if domains differ in size, each has the mean of its domain.

    Fewer rings than a domain has members pass it then, and flows may be listed as spread over its members, as those
    of the library's rings are (`ring`).
    """
    if len(set(topology.domain_sizes)) == 1:
        return volume
    sizes = np.array(topology.domain_sizes)
    means: FloatArray = np.repeat(np.add.reduceat(volume, topology.domain_starts, axis=1) / sizes, sizes, axis=1)
    return means


def _require_flow_shape(sources: IntArray, targets: IntArray, share: float, group_count: int) -> None:
    if sources.shape != targets.shape or sources.ndim < 2 or len(sources) != group_count:
        raise InputError(
            f"flows from {sources.shape} to {targets.shape} GPUs; both ends have one shape, [{group_count} groups, ...]"
        )
    if not all(ends.dtype.kind == "i" for ends in (sources, targets)):
        raise InputError("ends of flows are GPU numbers, in arrays of whole numbers")
    if not 0.0 < share < np.inf:
        raise InputError(f"a flow carries {share} of the payload; it must carry more than 0")


def _require_volume(collective: CollectiveType, sent: FloatArray, received: FloatArray) -> None:
    """Raise InputError where a member sends or receives too little; sent, received: [groups, size] payloads."""
    min_sent, min_received, min_total = _min_volumes(collective, sent.shape[1])
    for verb, volume, min_volume in (("sends", sent, min_sent), ("receives", received, min_received)):
        group, member = np.unravel_index(int(volume.argmin()), volume.shape)
        if volume[group, member] < min_volume * (1.0 - _TOLERANCE):
            raise InputError(
                f"member {member} of a group {verb} {volume[group, member]:.4g} payloads in all; "
                f"no {collective.value} does with less than {min_volume:.4g}"
            )
    total = float(sent.sum(axis=1).min())
    if total < min_total * (1.0 - _TOLERANCE):
        raise InputError(
            f"members of a group send {total:.4g} payloads together; no {collective.value} does with less than "
            f"{min_total:.4g}"
        )


def _min_volumes(collective: CollectiveType, size: int) -> tuple[float, float, float]:
    """Minimum payloads that each member sends, that each receives, and that all send in total."""
    share, other_shares = 1.0 / size, (size - 1.0) / size
    return {
        CollectiveType.ALL_REDUCE: (1.0, 1.0, 0.0),
        CollectiveType.ALL_GATHER: (share, other_shares, 0.0),
        CollectiveType.REDUCE_SCATTER: (other_shares, share, 0.0),
        CollectiveType.ALL_TO_ALL: (other_shares, other_shares, 0.0),
        CollectiveType.SHIFT: (other_shares, other_shares, 0.0),
        CollectiveType.BROADCAST: (0.0, 0.0, size - 1.0),
        CollectiveType.REDUCE: (0.0, 0.0, size - 1.0),
        CollectiveType.SCATTER: (0.0, 0.0, other_shares),
        CollectiveType.GATHER: (0.0, 0.0, other_shares),
        CollectiveType.SEND_RECV: (0.0, 0.0, 1.0),
    }[collective]
