"""DualPipe: two pipelines of opposite direction over the same ranks.

Rank r of P holds stage r of the one and stage P - 1 - r of the other, and does with them what rank min(r, P -
1 - r) of DualPipeV does on P/2 ranks with its two stages; each pipeline has half of the microbatches. So it
is modelled as two pipelines of p = P/2 ranks (`Layout.mirrored`), which hold each other's second half of the
stages. What DualPipeV passes on within the last rank, at its turn, crosses over to the counterpart. Every
weight exists twice, and its gradients are summed over both copies.
Reference: deepseek-ai/DualPipe, dualpipe/dualpipe.py@bb214e82 (whose eight steps are those of dualpipev.py).
"""

from dataclasses import dataclass
from typing import ClassVar

from clustersim.common.errors import InputError
from clustersim.program.action import PipelineOrder
from clustersim.program.placement import Placement
from clustersim.schedules.dual_pipe_v import DualPipeV
from clustersim.schedules.schedule import ScheduleTraits, require_positive


@dataclass(frozen=True, slots=True)
class DualPipe(ScheduleTraits):
    """DualPipe; `ranks` are those of one of the two pipelines, half of all, and so are microbatches."""

    is_periodic: ClassVar[bool] = True
    is_bidirectional: ClassVar[bool] = True
    overlaps_passes: ClassVar[bool] = True
    may_pair_passes: ClassVar[bool] = True
    name: ClassVar[str] = "dualpipe"

    def placement(self, ranks: int) -> Placement:
        """Down the ranks, across to the other pipeline, and back."""
        return Placement(DualPipeV().placement(ranks).stage_ranks, bidirectional=True)

    def require_supported(self, ranks: int, microbatches: int) -> None:
        """Raise InputError where a pipeline has fewer microbatches than stages."""
        require_positive(ranks, microbatches)
        if microbatches < 2 * ranks:
            raise InputError(
                f"dualpipe on {2 * ranks} pipeline ranks needs as many microbatches each way, {4 * ranks} in all, "
                f"not {2 * microbatches}"
            )

    def order(self, ranks: int, microbatches: int) -> PipelineOrder:
        """The entries of every rank of a pipeline, which are DualPipeV's.

        Raise InputError as `require_supported` does.
        """
        self.require_supported(ranks, microbatches)
        return DualPipeV().order(ranks, microbatches)
