"""How far is a predicted step from a measured one, as a profiler sees both: kind by kind, collective by collective?

A is what was measured, B the prediction as the profiler would have written it, read and folded alike; means are over
the ranks that were measured, in both. What takes how long is compared where both say the same of it: kinds of kernels
by their names, collectives by name, ranks and payload, products by their sizes.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from clustersim.analysis.profiled import SPAN_KINDS, SPAN_PARTS, Moved, ProfiledStep
from clustersim.arrays import FloatArray
from clustersim.units import Bytes, Seconds, format_step_time

_Key = TypeVar("_Key", bound=Hashable)
_RESOLUTION: Final = 1e-6  # of a step: traces have whole nanoseconds, and a step has thousands of kernels


class Pair(NamedTuple):
    """What both take for the same. counts: how many there are; seconds: of all of them; each of A and of B."""

    counts: tuple[float, float]
    seconds: tuple[Seconds, Seconds]

    @property
    def longer(self) -> Seconds:
        """Seconds by which B takes longer."""
        return self.seconds[1] - self.seconds[0]


@dataclass(frozen=True, slots=True)
class ProfileDifference:
    """A measured step and its prediction.

    titles: what each is of; steps: both, with equal ranks; fits: whether the scenario fits in memory; waiting: seconds
    in which A's collectives wait for other ranks, as far as traces tell, the mean over ranks; notes: what must be
    known.
    """

    titles: tuple[str, str]
    steps: tuple[ProfiledStep, ProfiledStep] = field(repr=False)
    fits: bool
    waiting: Seconds
    notes: tuple[str, ...] = ()

    @property
    def step_times(self) -> tuple[Seconds, Seconds]:
        """Seconds, the mean over ranks."""
        first, second = self.steps
        return first.seconds, second.seconds

    @property
    def parts(self) -> FloatArray:
        """Seconds of SPAN_PARTS, the mean over ranks: [2, 4]."""
        return np.stack([each.parts for each in self.steps])

    @property
    def kinds(self) -> list[Pair]:
        """Of SPAN_KINDS."""
        both = [each.kinds for each in self.steps]
        return [_pair(both[0][:, place], both[1][:, place]) for place in range(len(SPAN_KINDS))]

    @property
    def collectives(self) -> dict[Moved, Pair]:
        """Those of either, longest first."""
        return _paired(*(each.collectives() for each in self.steps))

    @property
    def totals(self) -> dict[tuple[str, int], tuple[Pair, tuple[Bytes, Bytes]]]:
        """The same by name and ranks, whatever their payload: pairs, and bytes of all of them."""
        found: dict[tuple[str, int], list[tuple[Moved, Pair]]] = {}
        for moved, pair in self.collectives.items():
            found.setdefault((moved.name, moved.ranks), []).append((moved, pair))
        return {key: (_sum([pair for _, pair in some]), _bytes(some)) for key, some in found.items()}

    @property
    def products(self) -> dict[tuple[int, int, int, int], Pair]:
        """Matrix products by size, longest first."""
        return _paired(*(each.products() for each in self.steps))

    @property
    def rank_parts(self) -> dict[int, FloatArray]:
        """Seconds of SPAN_PARTS of each rank: [2, 4]."""
        pairs = zip(*(each.ranks for each in self.steps), strict=True)
        return {first.rank: np.stack([first.parts, second.parts]) for first, second in pairs}

    def visible(self, seconds: Seconds) -> bool:
        """Whether it is more than the rounding of traces."""
        return abs(seconds) > _RESOLUTION * max(self.step_times)

    def to_json(self) -> dict[str, Any]:
        """Plain data: seconds, bytes; of each number first, second and second minus first."""
        first, second = self.step_times
        return {
            **{name: self._side(place) for place, name in enumerate(("first", "second"))},
            "delta": {"step_time_s": second - first},
            "parts_s": _named([part.value for part in SPAN_PARTS], self.parts),
            "communication_s": _named(
                ["all", "hidden"], np.array([[each.communication, each.hidden] for each in self.steps])
            ),
            "waiting_s": {"first": self.waiting},
            "kinds": [{"kind": kind.value, **_plain(pair)} for kind, pair in zip(SPAN_KINDS, self.kinds, strict=True)],
            "collectives": [
                {"collective": each.name, "ranks": each.ranks, "payload_bytes": each.payload, **_plain(pair)}
                for each, pair in self.collectives.items()
            ],
            "products": [
                {"m": m, "n": n, "k": k, "batch": batch, **_plain(pair)}
                for (m, n, k, batch), pair in self.products.items()
            ],
            "ranks": [
                {"rank": rank, "parts_s": _named([part.value for part in SPAN_PARTS], parts)}
                for rank, parts in self.rank_parts.items()
            ],
            "notes": list(self.notes),
        }

    def _side(self, place: int) -> dict[str, Any]:
        step = self.steps[place]
        streams = [
            {"stream": number, "compute_s": compute, "communication_s": moves, "copies_s": copies, "idle_s": idle}
            for number, (compute, moves, copies, idle) in step.streams().items()
        ]
        return {
            "title": self.titles[place],
            "step_time_s": step.seconds,
            "step_times_s": step.step_times.tolist(),
            "streams": streams,
            **({"fits": self.fits} if place else {"profiler_step": step.number}),
        }


def profile_headline(difference: ProfileDifference) -> str:
    """The answer in a sentence."""
    measured, predicted = difference.step_times
    words = f"measured {format_step_time(measured)}, predicted {format_step_time(predicted)}"
    if not difference.visible(predicted - measured):
        return f"{words}: the same"
    return f"{words}: {predicted / measured - 1.0:+.1%}"


def _paired(first: Mapping[_Key, FloatArray], second: Mapping[_Key, FloatArray]) -> dict[_Key, Pair]:
    none = np.zeros(2)
    pairs = {key: _pair(first.get(key, none), second.get(key, none)) for key in [*first, *(second.keys() - first)]}
    return dict(sorted(pairs.items(), key=lambda each: (-max(each[1].seconds), str(each[0]))))


def _pair(first: FloatArray, second: FloatArray) -> Pair:
    return Pair((float(first[0]), float(second[0])), (float(first[1]), float(second[1])))


def _sum(pairs: Sequence[Pair]) -> Pair:
    counts, seconds = np.sum([pair.counts for pair in pairs], axis=0), np.sum([pair.seconds for pair in pairs], axis=0)
    return Pair((float(counts[0]), float(counts[1])), (float(seconds[0]), float(seconds[1])))


def _bytes(some: Sequence[tuple[Moved, Pair]]) -> tuple[Bytes, Bytes]:
    first, second = (sum(moved.payload * pair.counts[side] for moved, pair in some) for side in range(2))
    return first, second


def _plain(pair: Pair) -> dict[str, Any]:
    return {
        "count": {"first": pair.counts[0], "second": pair.counts[1]},
        "seconds": {"first": pair.seconds[0], "second": pair.seconds[1], "delta": pair.longer},
    }


def _named(names: Sequence[str], parts: FloatArray) -> list[dict[str, Any]]:
    rows = zip(names, *parts.tolist(), strict=True)
    return [{"part": name, "first": first, "second": second, "delta": second - first} for name, first, second in rows]
