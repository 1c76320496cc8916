"""How does data travel by an algorithm that somebody's own Python gives? It is asked, and its answer is checked.

Such an algorithm is a class with the one method of `phase.Algorithm`, made without arguments. A scenario names it as it
names a schedule (`my_module:MyAlgorithm`, see `plugins`), or by the name that an installed package gave it as an entry
point of the group `clustersim.collectives`. What it costs beside its flows (rounds, protocols) are the constants of the
library's own algorithm for the same collective, so both are compared by what they move (`Switches`).

Assumed, as of all algorithms: what is listed for a group follows from the places of its members alone, for groups that
are alike are routed once. Checked is what can be said of any algorithm: flows stay in their group and carry something,
and each member sends and receives no less than it must whoever adds or copies on the way, switches among them. In parts
of the payload, of n members: an all-reduce takes each one's payload and gives each the sum, 1 and 1; an all-gather
takes the own part, 1/n, and gives the others', (n-1)/n; a reduce-scatter the other way round; all-to-all and shifts
take and give (n-1)/n. Of collectives with a root only all members together are looked at, because several chains or
trees have several roots: a broadcast gives, and a reduce takes, n-1; scatter and gather (n-1)/n; a message 1.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final

import numpy as np

from clustersim.collectives.phase import Algorithm, Arrangement, Flows, Phase
from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.errors import InputError, shown
from clustersim.common.pickling import FieldState
from clustersim.common.plugins import Asked, class_of, module_file, refusing
from clustersim.program.task import CollectiveType

GROUP: Final = "clustersim.collectives"
"""Of entry points."""
_ASKED: Final = Asked("a collective algorithm", "my_module:MyAlgorithm", {"phases": "kind, arrangement"})
_ROUNDING: Final = 1e-6


@dataclass(frozen=True)
class Imported(FieldState):
    """An algorithm in somebody's Python (an `Algorithm`).

    name: module:Class, or that of an entry point; folder: where the module's file is looked for first; code: tells two
    versions of that file apart.
    """

    name: str
    folder: Path
    code: str

    @cached_property
    def algorithm(self) -> Algorithm:
        """The algorithm itself; raise InputError where it cannot be imported or made."""
        kind = class_of(self.name, self.folder, _ASKED) if ":" in self.name else _installed(self.name)
        with refusing(f"{self.name}()"):
            made: Algorithm = kind()
        return made

    def phases(self, kind: CollectiveType, arrangement: Arrangement) -> tuple[Phase, ...]:
        """What it answers; raise InputError where it raises, or answers what does not do the collective."""
        size, spans = arrangement.size, arrangement.spans
        where = "one domain" if spans == 1 else f"{spans} domains"
        with refusing(f"{self.name}.phases({kind.value}, groups of {size} in {where})"):
            found = _phases(self.algorithm.phases(kind, _kept(arrangement)))
            for item in found:
                _require_rounds(item, len(arrangement.members))
            if found:
                _require(kind, arrangement, [part for phase in found for part in phase.parts])
        return found


def imported(name: str, folder: Path) -> Imported:
    """The algorithm of a name such as `my_module:MyAlgorithm`, or of an entry point; raise InputError without one."""
    file = module_file(name, folder)
    code = file.read_bytes() if ":" in name and file.is_file() else b""
    found = Imported(name, folder.resolve(), hashlib.sha256(code).hexdigest())
    _ = found.algorithm
    return found


def installed() -> tuple[str, ...]:
    """The names that installed packages offer algorithms by."""
    return tuple(sorted(entry_points(group=GROUP).names))


def _installed(name: str) -> type[Algorithm]:
    """The class of an entry point."""
    (found, *_) = entry_points(group=GROUP, name=name)
    with refusing(f"entry point {name} of {GROUP} ({found.value})"):
        kind: type[Algorithm] = found.load()
        if not _ASKED.fits(kind):
            raise InputError(f"is no class with {_ASKED.calls}")
    return kind


def _kept(arrangement: Arrangement) -> Arrangement:
    """The same, whose groups nobody changes by accident: others are made of them, too."""
    members = arrangement.members.view()
    members.flags.writeable = False
    return replace(arrangement, members=members)


def _phases(found: object) -> tuple[Phase, ...]:
    phases = tuple(found) if isinstance(found, Iterable) else (found,)
    for phase in phases:
        if not isinstance(phase, Phase):
            raise InputError(f"{shown(phase)} is no phase; clustersim.collectives.phase.phase makes one of flows")
    return phases


def _require_rounds(found: Phase, groups: int) -> None:
    """Refuse rounds that are no whole numbers from 0 on; raise InputError."""
    for word in ("local", "network", "posts"):
        given = getattr(found.rounds, word)
        rounds = np.asarray(given)
        whole = rounds.dtype.kind in "iu" and (rounds >= 0).all()
        if not whole or rounds.shape not in ((), (groups,)):
            raise InputError(
                f"rounds: {word}: {shown(given)} is no whole number from 0 on, nor one for each of {groups} groups"
            )
    if not 0.0 <= found.stages < np.inf:
        raise InputError(f"stages: {shown(found.stages)} is no number from 0 on")


def _require(kind: CollectiveType, arrangement: Arrangement, parts: list[Flows]) -> None:
    """Refuse flows that leave their group or carry too little; raise InputError."""
    members = arrangement.members
    owner = np.full(int(members.max()) + 1, -1)
    owner[members] = np.arange(len(members))[:, None]
    sent, received = np.zeros((2, len(owner)))
    for part in parts:
        sources, targets = np.asarray(part.sources), np.asarray(part.targets)
        _require_flows(sources, targets, part.share, len(members))
        for ends in (sources, targets):
            rows = ends.reshape(len(members), -1)
            own = owner[np.clip(rows, 0, len(owner) - 1)] == np.arange(len(members))[:, None]
            stray = rows[~own | (rows < 0) | (rows >= len(owner))]
            if len(stray):
                raise InputError(f"a flow has an end at GPU {stray[0]}, which is not in its group")
        moves = (sources != targets).reshape(-1) * float(part.share)
        sent += np.bincount(sources.reshape(-1), moves, len(owner))
        received += np.bincount(targets.reshape(-1), moves, len(owner))
    _require_volume(kind, sent[members], received[members])


def _require_flows(sources: IntArray, targets: IntArray, share: float, groups: int) -> None:
    if sources.shape != targets.shape or sources.ndim < 2 or len(sources) != groups:
        raise InputError(
            f"flows from {sources.shape} to {targets.shape} GPUs; both ends have one shape, [{groups} groups, ...]"
        )
    if not all(ends.dtype.kind == "i" for ends in (sources, targets)):
        raise InputError("ends of flows are GPU numbers, in arrays of whole numbers")
    if not 0.0 < share < np.inf:
        raise InputError(f"a flow carries {share} of the payload; it must carry more than 0")


def _require_volume(kind: CollectiveType, sent: FloatArray, received: FloatArray) -> None:
    """Refuse where a member sends or receives less than it must; sent, received: [groups, size] payloads."""
    sends, receives, together = _least(kind, sent.shape[1])
    for word, moved, least in (("sends", sent, sends), ("receives", received, receives)):
        group, place = np.unravel_index(int(moved.argmin()), moved.shape)
        if moved[group, place] < least * (1.0 - _ROUNDING):
            raise InputError(
                f"member {place} of a group {word} {moved[group, place]:.4g} payloads in all; "
                f"no {kind.value} does with less than {least:.4g}"
            )
    total = float(sent.sum(axis=1).min())
    if total < together * (1.0 - _ROUNDING):
        raise InputError(
            f"members of a group send {total:.4g} payloads together; no {kind.value} does with less than {together:.4g}"
        )


def _least(kind: CollectiveType, size: int) -> tuple[float, float, float]:
    """Payloads that each member sends and receives at least, and that all send together."""
    part, rest = 1.0 / size, (size - 1.0) / size
    return {
        CollectiveType.ALL_REDUCE: (1.0, 1.0, 0.0),
        CollectiveType.ALL_GATHER: (part, rest, 0.0),
        CollectiveType.REDUCE_SCATTER: (rest, part, 0.0),
        CollectiveType.ALL_TO_ALL: (rest, rest, 0.0),
        CollectiveType.SHIFT: (rest, rest, 0.0),
        CollectiveType.BROADCAST: (0.0, 0.0, size - 1.0),
        CollectiveType.REDUCE: (0.0, 0.0, size - 1.0),
        CollectiveType.SCATTER: (0.0, 0.0, rest),
        CollectiveType.GATHER: (0.0, 0.0, rest),
        CollectiveType.SEND_RECV: (0.0, 0.0, 1.0),
    }[kind]
