"""How are stragglers and waits described, on pages and in the terminal?"""

from collections.abc import Iterator
from typing import Final

import numpy as np

from clustersim.common.units import format_seconds
from clustersim.hardware.degradation import format_id_ranges
from clustersim.report.labels import PipelineRowLabels, describe_degradations, pipeline_row_labels
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.stragglers import MIN_EXCESS, Straggler

_MIN_SPREAD: Final = 1e-3  # relative to the step: minimum difference of waits that is shown
_THRESHOLD_LABEL: Final = f"{100 * MIN_EXCESS:g} %"


def has_straggler_content(result: SimulationResult) -> bool:
    """Whether the panel has content: the cluster is degraded, or waits differ within a pipeline rank."""
    waits_differ = result.wait_times.max_range >= _MIN_SPREAD * result.step_time
    return bool(describe_degradations(result.scenario) or result.stragglers.rank_count or waits_differ)


def describe_no_stragglers(result: SimulationResult) -> str:
    """Explanation if no rank is a straggler."""
    degradations = describe_degradations(result.scenario)
    if not degradations:
        return (
            f"No rank's kernels take {_THRESHOLD_LABEL} longer than the median of its stage, so none is called a "
            "straggler; "
            "where GPUs differ, the faster ones wait."
        )
    has_jitter = result.scenario.jitter is not None
    jitter_note = " Jitter evens out over a rank's kernels: the ranks wait for whoever comes last each time."
    return (
        f"The degradation, {degradations}, is not visible as kernel or communication time of single ranks: no rank's "
        f"kernels take {_THRESHOLD_LABEL} longer than the median of its stage, no rank's communication "
        f"{_THRESHOLD_LABEL} of the step." + jitter_note * has_jitter
    )


def wait_row_labels(result: SimulationResult) -> PipelineRowLabels:
    """Row labels of the figure."""
    return pipeline_row_labels(result.scenario, len(result.wait_times.mean))


def describe_straggler(names: PipelineRowLabels, straggler: Straggler) -> str:
    """A straggler's ranks and stage, as the beginning of a sentence."""
    return f"{format_id_ranges(np.array(straggler.ranks), 'rank')} ({names.labels[straggler.program_index]})"


def describe_slowness(straggler: Straggler) -> str:
    """What is slower on a straggler, and by how much, as text."""
    return " and ".join(f"{work} take{'s' * (work != 'kernels')} {amount}" for work, amount in slow_work(straggler))


def slow_work(straggler: Straggler) -> Iterator[tuple[str, str]]:
    """Each kind of work that is slower, and by how much."""
    if straggler.has_slow_kernels:
        yield "kernels", f"{straggler.kernel_excess:.1%}"
    if straggler.comm_delay:
        yield "communication", format_seconds(straggler.comm_delay)
