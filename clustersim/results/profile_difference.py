"""How far is a predicted step from a measured one, as a profiler sees both: kind by kind, collective by collective?

A is what was measured, B the prediction as the profiler would have written it, read and folded alike; means are over
the ranks that were measured, in both. What takes how long is compared where both say the same of it: kinds of kernels
by their names, collectives by name, ranks and payload, products by their sizes.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.common.units import Seconds, format_signed_seconds
from clustersim.results.profiled_step import SPAN_KINDS, SPAN_PARTS, Moved, ProfiledStep
from clustersim.results.time_categories import named_parts

_Key = TypeVar("_Key", bound=Hashable)
_RESOLUTION: Final = 1e-6  # of a step: traces have whole nanoseconds, and a step has thousands of kernels


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
        return np.stack([step.parts for step in self.steps])

    @property
    def kinds(self) -> FloatArray:
        """How many there are of each of SPAN_KINDS, and their seconds, in A and in B: [kinds, 2, 2]."""
        return np.stack([step.kinds.T for step in self.steps], axis=1)

    @property
    def collectives(self) -> dict[Moved, FloatArray]:
        """How many there are of each, and their seconds, in A and in B: [2, 2]; longest first."""
        return _paired(*(step.collectives() for step in self.steps))

    @property
    def totals(self) -> dict[tuple[str, int], FloatArray]:
        """The same by name and ranks, whatever their payload, and bytes of all of them: [2, 3]."""
        found: dict[tuple[str, int], FloatArray] = {}
        for moved, pair in self.collectives.items():
            sums = np.column_stack((pair, moved.payload * pair[:, 0]))
            key = moved.name, moved.ranks
            found[key] = found.get(key, np.zeros((2, 3))) + sums
        return found

    @property
    def products(self) -> dict[tuple[int, int, int, int], FloatArray]:
        """The same of matrix products by size, longest first: [2, 2]."""
        return _paired(*(step.products() for step in self.steps))

    @property
    def rank_parts(self) -> dict[int, FloatArray]:
        """Seconds of SPAN_PARTS of each rank: [2, 4]."""
        pairs = zip(*(step.ranks for step in self.steps), strict=True)
        return {first.rank: np.stack([first.parts, second.parts]) for first, second in pairs}

    def visible(self, seconds: Seconds) -> bool:
        """Whether it is more than the rounding of traces."""
        return abs(seconds) > _RESOLUTION * max(self.step_times)

    def words(self, seconds: Seconds) -> str:
        """A difference of times; none where it is only rounding."""
        return format_signed_seconds(seconds) if self.visible(seconds) else "0 s"

    def to_json(self) -> dict[str, Any]:
        """Plain data: seconds, bytes; of each number first, second and second minus first."""
        first, second = self.step_times
        names = [part.value for part in SPAN_PARTS]
        communication = [[step.communication, step.hidden] for step in self.steps]
        return {
            "first": self._side(0),
            "second": self._side(1),
            "delta": {"step_time_s": second - first},
            "parts_s": named_parts(names, self.parts),
            "communication_s": named_parts(("all", "hidden"), np.array(communication)),
            "waiting_s": {"first": self.waiting},
            "kinds": [{"kind": kind.value, **_plain(pair)} for kind, pair in zip(SPAN_KINDS, self.kinds, strict=True)],
            "collectives": [
                {"collective": moved.name, "ranks": moved.ranks, "payload_bytes": moved.payload, **_plain(pair)}
                for moved, pair in self.collectives.items()
            ],
            "products": [
                {"m": m, "n": n, "k": k, "batch": batch, **_plain(pair)}
                for (m, n, k, batch), pair in self.products.items()
            ],
            "ranks": [{"rank": rank, "parts_s": named_parts(names, parts)} for rank, parts in self.rank_parts.items()],
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


def _paired(first: Mapping[_Key, FloatArray], second: Mapping[_Key, FloatArray]) -> dict[_Key, FloatArray]:
    none = np.zeros(2)
    pairs = {key: np.stack([side.get(key, none) for side in (first, second)]) for key in {**first, **second}}
    return dict(sorted(pairs.items(), key=lambda each: (-each[1][:, 1].max(), str(each[0]))))


def _plain(pair: FloatArray) -> dict[str, Any]:
    (first, took), (second, takes) = pair.tolist()
    return {
        "count": {"first": first, "second": second},
        "seconds": {"first": took, "second": takes, "delta": takes - took},
    }
