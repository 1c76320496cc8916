"""Which metrics does a simulated step have? Each is computed on demand, by a module of its own."""

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np

from clustersim.build import build_plan
from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.table import Table
from clustersim.common.units import Bytes, Flop, FlopPerSecond, Seconds
from clustersim.memory.host_memory import HostMemoryUse
from clustersim.model.mixer import AttentionFlopConvention
from clustersim.parallel.mesh import PIPELINE
from clustersim.results.critical_path import find_critical_path, path_category_totals
from clustersim.results.economics import Economics
from clustersim.results.expert_imbalance import MostLoadedExpertRank, most_loaded_expert_rank
from clustersim.results.gpu_groups import step_economics
from clustersim.results.model_limitations import find_limitations
from clustersim.results.natural_routing import NaturalRouting, natural_routing
from clustersim.results.number_formats import FormatUsage, format_usage
from clustersim.results.oom_suggestions import MemorySuggestion
from clustersim.results.provenance import BusyTimeItem, InSituShare, busy_time_items, provenance_shares
from clustersim.results.selected_algorithms import SelectedAlgorithm, collective_table, selected_algorithms
from clustersim.results.simulated_step import SimulatedStep
from clustersim.results.step_memory import StepMemory
from clustersim.results.step_throughput import StepFlops, StepThroughput
from clustersim.results.step_uncertainty import StepUncertainty
from clustersim.results.stragglers import (
    StragglerReport,
    WaitTimes,
    compute_wait_times,
    find_stragglers,
    transfer_seconds,
)
from clustersim.results.time_bins import DEFAULT_BIN_COUNT
from clustersim.results.time_breakdown import TimeBreakdown, compute_breakdown
from clustersim.results.time_losses import StepLosses, matmul_share, split_step
from clustersim.results.timing_sensitivity import TimingSensitivity, timing_sensitivity
from clustersim.results.utilization import LeadingMfu, flop_convention_warnings, recomputed_flops_total
from clustersim.uncertainty.expected_error import ExpectedError
from clustersim.uncertainty.prediction_interval import RelativeInterval

if TYPE_CHECKING:
    from clustersim.results.link_loads import LinkLoads
    from clustersim.uncertainty.holdout import HoldoutResult

PERCENTILES: Final[Mapping[str, int]] = {"min": 0, "p5": 5, "p50": 50, "p95": 95, "max": 100}


class StepMetrics(SimulatedStep):
    """A simulated step with its metrics, means over the simulated steps.

    Groups of metrics are `memory`, `throughput` and `uncertainty`; the most used of each are attributes here, too.
    """

    @cached_property
    def memory(self) -> StepMemory:
        """Use of the GPUs' and hosts' memory."""
        return StepMemory(self.scenario, self.ledgers)

    @cached_property
    def throughput(self) -> StepThroughput:
        """Tokens and FLOP per second."""
        return StepThroughput(self.scenario, self.step_time, self.rank_count)

    @property
    def image_imbalance(self) -> float | None:
        """Work of the encoder on the ranks that others wait for, over the mean of all; None where images are equal."""
        return build_plan(self.scenario).image_imbalance

    @cached_property
    def uncertainty(self) -> StepUncertainty:
        """Uncertainty of the step time."""
        return StepUncertainty(
            self.scenario, self.busy_time_items, self.breakdown.launch_share, self.timing_sensitivity
        )

    # Time

    @property
    def step_time_percentiles(self) -> dict[str, Seconds]:
        """Minimum, median, maximum and some percentiles of the step times, in seconds."""
        return _percentiles(self.step_times)

    @property
    def drawn_step_time_percentiles(self) -> dict[str, Seconds]:
        """The same of steps with different documents; empty if none were drawn."""
        return _percentiles(np.array(self.drawn_step_times)) if self.drawn_step_times else {}

    @cached_property
    def breakdown(self) -> TimeBreakdown:
        """Seconds of each rank's step by time category."""
        return compute_breakdown(self.trace_table, self.cost.time_segment)

    @cached_property
    def losses(self) -> StepLosses:
        """What the step loses time to, beyond the model's FLOP at the peak, with causal attention."""
        return split_step(
            self.breakdown,
            ideal=self.mfu_causal * self.step_time,
            matmul_share=matmul_share(self.trace_table, self.cost.time_segment),
            pipeline_ranks=self.scenario.layout.rank_coordinates(PIPELINE),
        )

    @cached_property
    def critical_path(self) -> IntArray:
        """[n] event indices of the critical path in the trace."""
        return find_critical_path(self.trace)

    @cached_property
    def critical_path_breakdown(self) -> Mapping[str, Seconds]:
        """Seconds of the critical path by time category."""
        return path_category_totals(self.trace_table, self.cost.time_segment)

    @cached_property
    def busy_time_items(self) -> tuple[BusyTimeItem, ...]:
        """What all ranks spend their busy time on (kernels, collectives, ...), longest first."""
        return busy_time_items(self.trace_table, self.cost.time_segment, self.cost.comm_timing_by_group)

    @cached_property
    def kernels(self) -> Table:
        """A row for every distinct kernel and provenance of its duration, by the time of all ranks, longest first.

        Columns, with units: `kernels.schema`.
        """
        from clustersim.results.kernel_table import kernel_table

        return kernel_table(self.busy_time_items)

    @cached_property
    def stragglers(self) -> StragglerReport:
        """The ranks whose kernels or communication take longest for the same work."""
        transfers = transfer_seconds(self.trace, self.scenario.steps)
        return find_stragglers(self.breakdown, self.program.program_index, transfers)

    @cached_property
    def wait_times(self) -> WaitTimes:
        """Seconds that the ranks of each program wait for others."""
        return compute_wait_times(self.breakdown, self.program.program_index)

    @cached_property
    def most_loaded_expert_rank(self) -> MostLoadedExpertRank | None:
        """The rank whose experts get the most tokens; None where the load is balanced."""
        return most_loaded_expert_rank(self.program)

    @cached_property
    def natural_routing(self) -> NaturalRouting | None:
        """The range of the step if tokens chose their experts freely; None where that changes nothing or is given."""
        return natural_routing(self.scenario, self.trace_table, self.cost.time_segment, self.breakdown)

    # Communication

    @cached_property
    def selected_algorithms(self) -> tuple[SelectedAlgorithm, ...]:
        """The algorithm selected for each collective and p2p message, and its uncontended time."""
        return selected_algorithms(self.program, self.cost.comm_timing_by_group)

    @property
    def collectives(self) -> Table:
        """A row for every distinct collective and p2p message; columns are the keys of `collectives` in the JSON."""
        return collective_table(self.selected_algorithms)

    def link_loads(self, *links: tuple[str, str], bins: int = DEFAULT_BIN_COUNT) -> "LinkLoads":
        """Bytes per second on links over time, in equal bins over the whole run.

        links: (source, target) names as in the cluster's graph and in `degradations` (("nic3.0", "leaf0.0")), one
        direction each; without any, all links that carry traffic. Traffic of co-scheduled jobs is included. The result
        has [links, bins] arrays, and its `table` the same as columns. Raises InputError for links that do not exist.
        """
        from clustersim.results.link_loads import TrafficSource, compute_link_loads

        senders = (
            TrafficSource(self.trace_table, self.network_volumes, self.operation_spans),
            *(co_scheduled_job.traffic_source for co_scheduled_job in self.co_scheduled_jobs),
        )
        return compute_link_loads(senders, self.scenario.cluster.fabric, links=links, bin_count=bins)

    # Throughput

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the global batch per second."""
        return self.throughput.tokens_per_second

    @property
    def gpu_hours_per_trillion_tokens(self) -> float:
        """GPU hours per trillion tokens, as papers report them."""
        return self.throughput.gpu_hours_per_trillion_tokens

    @property
    def model_flops(self) -> StepFlops:
        """Model FLOP of a step, by the convention and with causal attention."""
        return self.throughput.model_flops

    @cached_property
    def recomputed_flops(self) -> Flop:
        """FLOP per step spent on activation recomputation, on all ranks."""
        return recomputed_flops_total(self.trace_table) / self.scenario.steps

    @property
    def achieved_flops_per_gpu(self) -> FlopPerSecond:
        """Achieved model FLOP/s of each GPU."""
        return self.throughput.achieved_flops_per_gpu

    @property
    def peak_flops(self) -> FlopPerSecond:
        """Dense peak FLOP/s of one GPU in the compute format, averaged over GPUs."""
        return self.throughput.peak_flops

    @cached_property
    def format_usage(self) -> FormatUsage | None:
        """FLOP by number format and the cost of quantization casts; None where nothing is cast."""
        return format_usage(self.scenario, self.trace_table, self.busy_time_items, self.throughput.mean_peak_flops)

    @property
    def mfu(self) -> float:
        """Model FLOP utilization, a fraction of `peak_flops` (see `utilization.CONVENTION`)."""
        return self.throughput.mfu

    @property
    def mfu_causal(self) -> float:
        """Model FLOP utilization as a fraction, with attention counted as its causal mask leaves it."""
        return self.throughput.mfu_causal

    @property
    def leading_mfu(self) -> LeadingMfu:
        """The one of both that is shown first."""
        return LeadingMfu.select(self.mfu, self.mfu_causal)

    @property
    def hfu(self) -> float:
        """Hardware FLOP utilization, a fraction of `peak_flops`: recomputed FLOP count as well."""
        return self.throughput.hfu(self.recomputed_flops)

    @cached_property
    def hfu_causal(self) -> float:
        """Hardware FLOP utilization as a fraction, with attention counted as its causal mask leaves it."""
        recomputed = recomputed_flops_total(self.trace_table, AttentionFlopConvention.CAUSAL)
        return self.throughput.hfu_causal(recomputed / self.scenario.steps)

    @property
    def leading_hfu(self) -> float:
        """The hardware FLOP utilization that counts attention as the leading MFU does."""
        return self.hfu_causal if self.leading_mfu.is_causal else self.hfu

    @cached_property
    def economics(self) -> Economics:
        """Cost and energy of a step, as far as prices and power figures are available."""
        return step_economics(self.scenario, self.step_time, self.breakdown, self.busy_time_items)

    # Memory

    @property
    def peak_memory(self) -> Bytes:
        """Peak memory in bytes of the most loaded GPU."""
        return self.memory.peak

    @property
    def memory_capacity(self) -> Bytes:
        """Memory in bytes of the most loaded GPU."""
        return self.memory.capacity

    @property
    def fits_in_memory(self) -> bool:
        """Whether every GPU's peak is within its capacity, and offloaded memory within the hosts'."""
        return self.memory.fits

    @property
    def fit_probability(self) -> float:
        """Probability that the step fits in memory, by the errors of published predictions."""
        return self.memory.fit_probability

    @property
    def host_memory(self) -> HostMemoryUse | None:
        """Memory use of the most loaded node's host; None where nothing is offloaded."""
        return self.memory.host

    @property
    def oom_suggestions(self) -> tuple[MemorySuggestion, ...]:
        """Changes that would make a scenario fit that does not, or not surely; empty if it surely fits."""
        return self.memory.suggestions

    # Uncertainty and notes

    @cached_property
    def provenance_shares(self) -> Mapping[str, float]:
        """Share of busy time by the source of its durations (measured, interpolated, modelled, ...)."""
        return provenance_shares(self.busy_time_items)

    @property
    def kernel_time_uncertainty(self) -> ExpectedError:
        """Expected error of the step time that follows from the errors of its durations' sources."""
        return self.uncertainty.kernel_time

    @property
    def in_situ_slowdown(self) -> InSituShare:
        """Share of busy time whose kernels were measured standalone, and the unmeasured factor applied in a step."""
        return self.uncertainty.in_situ_slowdown

    @property
    def timing_sensitivity(self) -> TimingSensitivity | None:
        """How far the step moves if kernels are slower by a hair; None where it does not."""
        return timing_sensitivity(self.step_time, self.perturbed_step_times)

    @property
    def relative_interval(self) -> RelativeInterval:
        """Prediction interval of the step time, relative to the predicted one, and what widens it."""
        return self.uncertainty.relative_interval

    @property
    def step_time_interval(self) -> tuple[Seconds, Seconds]:
        """Prediction interval of the step time: (low, high) in seconds."""
        return self.step_time * self.relative_interval.low, self.step_time * self.relative_interval.high

    @property
    def likely_step_time_interval(self) -> tuple[Seconds, Seconds]:
        """The interval that contains the step time of half of such steps: (low, high) in seconds."""
        low, high = self.relative_interval.likely
        return self.step_time * low, self.step_time * high

    @property
    def interval_description(self) -> str:
        """The prediction interval and the evidence behind it, as a sentence."""
        return self.uncertainty.describe(self.step_time_interval)

    @property
    def holdout_validation(self) -> "HoldoutResult | None":
        """Real steps used to validate the record's predictions; None without them, or without measured kernels."""
        return self.uncertainty.holdout

    @property
    def warnings(self) -> tuple[str, ...]:
        """Settings that are legal but probably mistakes, and suggestions where the scenario may not fit."""
        host = () if self.host_memory is None else self.host_memory.problems
        conventions = flop_convention_warnings(self.hfu, self.mfu_causal, self.scenario.training.sequence)
        suggestions = (suggestion.description for suggestion in self.oom_suggestions)
        return (*self.scenario.warnings, *host, *conventions, *suggestions)

    @property
    def model_limitations(self) -> tuple[str, ...]:
        """Effects that the simulation leaves out, as sentences."""
        uses_host_memory = self.host_memory is not None
        return find_limitations(self.scenario, self.selected_algorithms, uses_host_memory=uses_host_memory)


def _percentiles(times: FloatArray) -> dict[str, Seconds]:
    return {name: float(np.percentile(times, percentile)) for name, percentile in PERCENTILES.items()}
