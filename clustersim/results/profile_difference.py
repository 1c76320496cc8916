"""Difference between a predicted and a measured step, as a profiler sees both: by kernel kind and by collective.

A is the measurement, B the prediction exported as a profiler trace, parsed and aggregated the same way;
means are over the measured ranks in both. Durations are compared where both sides identify the same item:
kernel kinds by their names, collectives by name, group size and payload, matmuls by their shapes.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.common.units import Seconds, format_signed_seconds
from clustersim.results.profiled_step import GPU_SPAN_KINDS, STEP_CATEGORIES, ProfiledCollective, ProfiledStep
from clustersim.results.time_categories import compare_seconds

_Key = TypeVar("_Key", bound=Hashable)
_RESOLUTION: Final = 1e-6  # fraction of a step: traces are rounded to nanoseconds, and a step has thousands of kernels


@dataclass(frozen=True, slots=True)
class ProfileDifference:
    """A measured step and its prediction.

    titles: of both sides; steps: both, with equal ranks; fits_in_memory: of the scenario; wait_seconds: seconds
    in which A's collectives wait for other ranks, as far as the traces tell, averaged over ranks; notes:
    caveats.
    """

    titles: tuple[str, str]
    steps: tuple[ProfiledStep, ProfiledStep] = field(repr=False)
    fits_in_memory: bool
    wait_seconds: Seconds
    notes: tuple[str, ...] = ()

    @property
    def step_times(self) -> tuple[Seconds, Seconds]:
        """Seconds, averaged over ranks."""
        first, second = self.steps
        return first.step_time, second.step_time

    @property
    def category_seconds(self) -> FloatArray:
        """Seconds by `STEP_CATEGORIES`, averaged over ranks: [2, 4]."""
        return np.stack([step.category_seconds for step in self.steps])

    @property
    def kind_totals(self) -> FloatArray:
        """Count and seconds of each of `GPU_SPAN_KINDS`, in A and in B: [kinds, 2, 2]."""
        return np.stack([step.kind_totals.T for step in self.steps], axis=1)

    @property
    def collective_totals(self) -> dict[ProfiledCollective, FloatArray]:
        """Count and seconds of each collective, in A and in B: [2, 2]; longest first."""
        return _pair_totals(*(step.collective_totals() for step in self.steps))

    @property
    def totals_by_collective(self) -> dict[tuple[str, int], FloatArray]:
        """Count, seconds and total bytes by collective name and group size, whatever the payload: [2, 3]."""
        totals: dict[tuple[str, int], FloatArray] = {}
        for collective, pair in self.collective_totals.items():
            sums = np.column_stack((pair, collective.payload * pair[:, 0]))
            key = collective.name, collective.group_size
            totals[key] = totals.get(key, np.zeros((2, 3))) + sums
        return totals

    @property
    def matmul_totals(self) -> dict[tuple[int, int, int, int], FloatArray]:
        """Count and seconds of matmuls by shape, longest first: [2, 2]."""
        return _pair_totals(*(step.matmul_totals() for step in self.steps))

    @property
    def rank_category_seconds(self) -> dict[int, FloatArray]:
        """Seconds by `STEP_CATEGORIES` of each rank: [2, 4]."""
        pairs = zip(*(step.ranks for step in self.steps), strict=True)
        return {first.rank: np.stack([first.category_seconds, second.category_seconds]) for first, second in pairs}

    def is_significant(self, seconds: Seconds) -> bool:
        """Whether a difference exceeds the rounding of traces."""
        return abs(seconds) > _RESOLUTION * max(self.step_times)

    def format_difference(self, seconds: Seconds) -> str:
        """A difference of times as text; zero if it is only rounding."""
        return format_signed_seconds(seconds) if self.is_significant(seconds) else "0 s"

    def to_json(self) -> dict[str, Any]:
        """Plain data: seconds, bytes; of each value first, second and second minus first."""
        first, second = self.step_times
        names = [category.value for category in STEP_CATEGORIES]
        communication = [[step.comm_seconds, step.hidden_seconds] for step in self.steps]
        return {
            "first": self._side_to_dict(0),
            "second": self._side_to_dict(1),
            "delta": {"step_time_s": second - first},
            "categories_s": compare_seconds(names, self.category_seconds),
            "communication_s": compare_seconds(("all", "hidden"), np.array(communication)),
            "waiting_s": {"first": self.wait_seconds},
            "kinds": [
                {"kind": kind.value, **_pair_to_dict(pair)}
                for kind, pair in zip(GPU_SPAN_KINDS, self.kind_totals, strict=True)
            ],
            "collectives": [
                {
                    "collective": profiled_collective.name,
                    "ranks": profiled_collective.group_size,
                    "payload_bytes": profiled_collective.payload,
                    **_pair_to_dict(pair),
                }
                for profiled_collective, pair in self.collective_totals.items()
            ],
            "matmuls": [
                {"m": m, "n": n, "k": k, "batch": batch, **_pair_to_dict(pair)}
                for (m, n, k, batch), pair in self.matmul_totals.items()
            ],
            "ranks": [
                {"rank": rank, "categories_s": compare_seconds(names, categories)}
                for rank, categories in self.rank_category_seconds.items()
            ],
            "notes": list(self.notes),
        }

    def _side_to_dict(self, side: int) -> dict[str, Any]:
        step = self.steps[side]
        streams = [
            {
                "stream": stream_id,
                "compute_s": compute,
                "communication_s": communication,
                "copies_s": copies,
                "idle_s": idle,
            }
            for stream_id, (compute, communication, copies, idle) in step.stream_seconds().items()
        ]
        return {
            "title": self.titles[side],
            "step_time_s": step.step_time,
            "step_times_s": step.step_times.tolist(),
            "streams": streams,
            **({"fits": self.fits_in_memory} if side else {"profiler_step": step.step_number}),
        }


def _pair_totals(first: Mapping[_Key, FloatArray], second: Mapping[_Key, FloatArray]) -> dict[_Key, FloatArray]:
    zeros = np.zeros(2)
    pairs = {key: np.stack([side.get(key, zeros) for side in (first, second)]) for key in {**first, **second}}
    return dict(sorted(pairs.items(), key=lambda pair_total: (-pair_total[1][:, 1].max(), str(pair_total[0]))))


def _pair_to_dict(pair: FloatArray) -> dict[str, Any]:
    (first, first_seconds), (second, second_seconds) = pair.tolist()
    return {
        "count": {"first": first, "second": second},
        "seconds": {"first": first_seconds, "second": second_seconds, "delta": second_seconds - first_seconds},
    }
