"""What does a simulation return? The result object and the metrics that people and programs ask for."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from clustersim.build import resolved_library
from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.dtypes import DType
from clustersim.common.pickling import FieldPickling
from clustersim.common.units import Bytes, Flop, FlopPerSecond, Seconds, format_step_time
from clustersim.cost.segment import SegmentCost
from clustersim.engine.recording.operation_trace import OperationTraceReader
from clustersim.hardware.degradation import Degradations
from clustersim.memory.footprint import MemoryCategory
from clustersim.memory.host_memory import HostMemoryUse
from clustersim.memory.ledger import MemoryLedger
from clustersim.model.flops import AttentionFlopConvention, model_flops
from clustersim.program.program import Program
from clustersim.program.task import ComputeTask
from clustersim.results.co_located_jobs import CoLocatedJob
from clustersim.results.critical_path import find_critical_path, path_category_totals
from clustersim.results.economics import Economics, GpuGroup, mean_activity_seconds
from clustersim.results.expert_imbalance import MostLoadedExpertRank, most_loaded_expert_rank
from clustersim.results.link_loads import LinkLoads, TrafficSource, compute_link_loads
from clustersim.results.link_volumes import MeteredCollectiveCost
from clustersim.results.memory_check import max_host_use, memory_capacities, suggest_memory_fixes
from clustersim.results.network_utilization import DEFAULT_BIN_COUNT
from clustersim.results.number_formats import FormatUsage, executed_flops_by_format, mean_quantization_seconds
from clustersim.results.provenance import (
    BusyTimeItem,
    InSituShare,
    busy_time_items,
    expected_error,
    in_situ_share,
    provenance_shares,
)
from clustersim.results.selected_algorithms import SelectedAlgorithm, selected_algorithms
from clustersim.results.step_times import step_times
from clustersim.results.stragglers import (
    StragglerReport,
    WaitTimes,
    compute_wait_times,
    find_stragglers,
    transfer_seconds,
)
from clustersim.results.time_breakdown import TimeBreakdown, compute_breakdown
from clustersim.results.trace_table import TraceTable, build_trace_table
from clustersim.results.utilization import (
    CONVENTION,
    achieved_flops_per_gpu,
    bubble_fraction,
    exposed_fraction,
    gpu_hours_for_tokens,
    hfu,
    mfu,
    recomputed_flops_total,
    tokens_per_second,
)
from clustersim.scenario import Contention, Scenario
from clustersim.trace.trace import OperationSpans, Trace
from clustersim.uncertainty.describe_interval import describe_interval
from clustersim.uncertainty.expected_error import ExpectedError
from clustersim.uncertainty.holdout import HoldoutResult, holdout_result
from clustersim.uncertainty.model_file import load_uncertainty_model, uncertainty_model_name
from clustersim.uncertainty.prediction_interval import LocalEvidence, RelativeInterval, UncertaintyModel
from clustersim.uncertainty.step_features import extract_step_features

NETWORK_LIMITATIONS: Final[Mapping[Contention, str]] = {
    Contention.UNCONTENDED: "contention between collectives of different kinds (each kind shares links among its own "
    "groups)",
    Contention.SHARED: "queues and congestion control of the network: links are shared fairly, as fluids",
}
_MIN_REPORTED_SHARE: Final = 5e-4  # fraction of the busy time
PERCENTILES: Final[Mapping[str, int]] = {"min": 0, "p5": 5, "p50": 50, "p95": 95, "max": 100}
HEALTHY_CLUSTER_NOTE: Final = "stragglers and jitter: all GPUs and links are healthy (`degradations` says otherwise)"
MODEL_LIMITATIONS: Final = (
    "slowdown of collectives by concurrent kernels, and of kernels by messages between stages",
    "clock throttling, failures",
    "data loaders, logging, checkpoints, Python overhead beyond kernel launches",
    "small reductions of gradients of key and value heads held by several ranks",
)
BALANCED_EXPERTS_NOTE: Final = "uneven loads of experts: each gets as many tokens as any other"
HOST_LIMITATIONS: Final = (
    "contention of copies to and from the host with what NICs send over the same PCIe, and with kernels",
    "rounding up of pinned memory, host memory of the system itself, adding up gradients on the host",
)
CO_LOCATED_JOBS_LIMITATION: Final = (
    "hosts that jobs share: each launches kernels, and copies to its host, as if it had the host to itself"
)


@dataclass(frozen=True, slots=True)
class StepFlops:
    """Model FLOP of a whole step on all ranks, by the convention of `utilization.CONVENTION`.

    model: attention counted as a full matrix; causal: attention counted as its causal mask leaves it.
    """

    model: Flop
    causal: Flop


@dataclass(frozen=True, repr=False)
class SimulationResult(FieldPickling):
    """Result of simulated training steps. Per-step metrics are means over the simulated steps.

    Fields hold only what the simulation itself produces. Everything else is derived from them lazily (cached
    properties), since a search over many scenarios reads only a few metrics of each.

    operation_trace: reconstructs the spans of single operations inside compute segments; ledgers: memory timeline
    of each pipeline rank; wall_seconds: run time of the simulation itself; co_located_jobs: the other jobs on the
    machine; isolated_step_time: seconds of a step without them, None if there are none.
    """

    scenario: Scenario
    program: Program
    trace: Trace
    cost: SegmentCost
    operation_trace: OperationTraceReader
    ledgers: tuple[MemoryLedger, ...]
    wall_seconds: Seconds
    co_located_jobs: tuple[CoLocatedJob, ...] = ()
    isolated_step_time: Seconds | None = None

    def __repr__(self) -> str:
        """A one-line summary: step time, MFU, whether it fits."""
        kind, fits = type(self).__name__, "fits" if self.fits_in_memory else "does not fit"
        return f"<{kind} {self.scenario.name}: step {format_step_time(self.step_time)}, MFU {self.mfu():.1%}, {fits}>"

    @property
    def step_time(self) -> Seconds:
        """Seconds from the start of a step until every rank is done; the mean if several steps are simulated."""
        return self.trace.makespan / self.scenario.steps

    @cached_property
    def step_times(self) -> FloatArray:
        """Seconds of each step."""
        return step_times(self.trace_table)

    @cached_property
    def breakdown(self) -> TimeBreakdown:
        """Seconds of each rank's step by time category."""
        return compute_breakdown(self.trace_table, self.cost.time_segment)

    @cached_property
    def memory_capacities(self) -> tuple[Bytes, ...]:
        """Memory in bytes of the smallest GPU of each pipeline rank."""
        return memory_capacities(self.scenario)

    @cached_property
    def host_memory(self) -> HostMemoryUse | None:
        """Memory use of the most loaded node's host; None where nothing is offloaded."""
        return max_host_use(self.scenario)

    @cached_property
    def oom_suggestions(self) -> tuple[str, ...]:
        """Changes that would make a scenario fit that does not; empty if it fits."""
        exceeds_memory = any(
            ledger.peak > capacity for ledger, capacity in zip(self.ledgers, self.memory_capacities, strict=True)
        )
        return suggest_memory_fixes(self.scenario) if exceeds_memory else ()

    @cached_property
    def critical_path(self) -> IntArray:
        """Event indices of the critical path in the trace."""
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
    def selected_algorithms(self) -> tuple[SelectedAlgorithm, ...]:
        """The algorithm selected for each collective and p2p message, and its uncontended time."""
        return selected_algorithms(self.program, self.cost.comm_timing_by_group)

    @cached_property
    def model_flops(self) -> StepFlops:
        """Model FLOP of a step, by the convention and with causal attention."""
        model, training = self.scenario.model, self.scenario.training
        return StepFlops(model_flops(model, training), model_flops(model, training, AttentionFlopConvention.CAUSAL))

    @cached_property
    def recomputed_flops(self) -> Flop:
        """FLOP per step spent on activation recomputation, on all ranks."""
        return recomputed_flops_total(self.trace_table) / self.scenario.steps

    @cached_property
    def provenance_shares(self) -> Mapping[str, float]:
        """Share of busy time by the source of its durations (measured, interpolated, modelled, ...)."""
        return provenance_shares(self.busy_time_items)

    @cached_property
    def kernel_time_uncertainty(self) -> ExpectedError:
        """Expected error of the step time that follows from the errors of its durations' sources."""
        return expected_error(self.busy_time_items)

    @cached_property
    def in_situ_slowdown(self) -> InSituShare:
        """Share of busy time whose kernels were measured standalone, and the unmeasured factor applied in a step."""
        return in_situ_share(self.busy_time_items)

    @cached_property
    def relative_interval(self) -> RelativeInterval:
        """Prediction interval of the step time, relative to the predicted one, and what widens it."""
        features, uncertainty, holdout = (
            extract_step_features(self.scenario, self.breakdown.launch_share),
            self.kernel_time_uncertainty,
            self.holdout_validation,
        )
        if holdout is None:
            return self._interval_model.prediction_interval(
                features, LocalEvidence(uncertainty.error, uncertainty.unknown_share)
            )
        return holdout.extend(self._interval_model).prediction_interval(features, holdout.local_evidence(uncertainty))

    @cached_property
    def holdout_validation(self) -> HoldoutResult | None:
        """Real steps used to validate the record's predictions.

        None without them, or where no kernel of the step was measured.
        """
        return holdout_result(self.scenario.cost.record) if self.kernel_time_uncertainty.kernel_share > 0.0 else None

    @property
    def step_time_interval(self) -> tuple[Seconds, Seconds]:
        """Prediction interval of the step time: (low, high) in seconds."""
        return self.step_time * self.relative_interval.low, self.step_time * self.relative_interval.high

    @property
    def interval_description(self) -> str:
        """The prediction interval and the evidence behind it, as a sentence."""
        return describe_interval(
            self._interval_model, self.relative_interval, self.step_time_interval, self._measurement_description
        )

    @cached_property
    def _interval_model(self) -> UncertaintyModel:
        """The interval model fitted to published steps of this kind (MoE or dense, low precision or not)."""
        model, matmul_formats = self.scenario.model, self.scenario.training.recipe.matmul_formats
        return load_uncertainty_model(
            uncertainty_model_name(
                moe=bool(model.distinct_moes), low_precision=matmul_formats.low_precision is not None
            )
        )

    @property
    def _measurement_description(self) -> str:
        """What was measured on the machine itself, as a clause; empty where nothing was."""
        measured_share = 1.0 - self.kernel_time_uncertainty.unknown_share
        if measured_share < _MIN_REPORTED_SHARE:
            return ""
        evidence = f"{measured_share:.0%} of the busy time rests on {self._record_description}"
        if self.holdout_validation is None:
            return (
                f"{evidence}, within "
                f"{self.kernel_time_uncertainty.error / measured_share:.1%}{self._in_situ_description}"
            )
        return (
            f"{evidence}, which "
            f"{self.holdout_validation.description}{self._extra_uncertainty_description}{self._in_situ_description}"
        )

    @property
    def _extra_uncertainty_description(self) -> str:
        """Clause that says how much less certain this step's kernels are than the validated steps'; empty if not."""
        extra_uncertainty = (
            0.0
            if self.holdout_validation is None
            else self.holdout_validation.excess_kernel_error(self.kernel_time_uncertainty)
        )
        return (
            f", and whose kernels are less well known here, by {extra_uncertainty:.1%}"
            if extra_uncertainty >= _MIN_REPORTED_SHARE
            else ""
        )

    @property
    def _record_description(self) -> str:
        record = self.scenario.cost.record
        return "measurements" if record is None else f"the record of {record.device.name} of {record.conditions.date}"

    @property
    def _in_situ_description(self) -> str:
        """The in-situ correction of kernels that were measured standalone, as a clause; empty if there is none."""
        slowdown = self.in_situ_slowdown
        if slowdown.share < _MIN_REPORTED_SHARE:
            return ""
        return (
            f" ({slowdown.share:.0%} as standalone kernels, times {slowdown.slowdown:.3f} for {self._in_situ_source})"
        )

    @property
    def _in_situ_source(self) -> str:
        """What the in-situ correction stands for and its source, as a phrase."""
        record = self.scenario.cost.record
        if record is None or not record.in_situ:
            return "the slowdown within a step and the slowest GPU: from published steps, not measured here"
        source = "as GPUs of its node differ" if len(record.gpus) > 1 else "from published steps, not measured here"
        return f"the slowest GPU: {source}"

    @property
    def step_time_percentiles(self) -> dict[str, Seconds]:
        """Minimum, median, maximum and some percentiles of the step times."""
        return {name: float(np.percentile(self.step_times, percentile)) for name, percentile in PERCENTILES.items()}

    @property
    def rank_count(self) -> int:
        """World size."""
        return self.program.world_size

    @property
    def simulated_rank_count(self) -> int:
        """Number of ranks simulated; each represents all ranks provably equivalent to it."""
        return len(self.trace.simulated_ranks)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the global batch per second."""
        training = self.scenario.training
        return tokens_per_second(training.global_batch, training.sequence, self.step_time)

    @property
    def gpu_hours_per_trillion_tokens(self) -> float:
        """GPU hours per trillion tokens, as papers report them."""
        return gpu_hours_for_tokens(self.tokens_per_second / self.rank_count)

    @cached_property
    def economics(self) -> Economics:
        """Cost and energy of a step, as far as prices and power figures are available."""
        settings, training = self.scenario.economics, self.scenario.training
        tokens = float(training.global_batch * training.sequence)
        gpus = tuple(self.gpu_groups(self.breakdown, self.busy_time_items))
        return Economics(
            gpus, self.step_time, tokens, settings.pue, settings.carbon_intensity, settings.training_tokens
        )

    def gpu_groups(self, time_breakdown: TimeBreakdown, time_items: Iterable[BusyTimeItem]) -> Iterator[GpuGroup]:
        """The job's GPUs grouped by accelerator.

        time_breakdown: seconds by time category; time_items: busy-time items of the same period.
        """
        settings, cluster = self.scenario.economics, self.scenario.cluster
        accelerators, kind = cluster.accelerator_kinds()
        for kind_index, accelerator in enumerate(accelerators):
            ranks = np.flatnonzero(kind[: self.rank_count] == kind_index)
            if len(ranks):
                seconds = mean_activity_seconds(time_breakdown, time_items, ranks)
                price, power_draw = settings.gpu_hour_quote(accelerator, cluster.name), settings.power_draw(accelerator)
                yield GpuGroup(accelerator.name, len(ranks), seconds, price, power_draw)

    @cached_property
    def most_loaded_expert_rank(self) -> MostLoadedExpertRank | None:
        """The rank whose experts get the most tokens; None where the load is balanced."""
        return most_loaded_expert_rank(self.program)

    @property
    def achieved_flops_per_gpu(self) -> FlopPerSecond:
        """Achieved model FLOP/s of each GPU."""
        return achieved_flops_per_gpu(self.model_flops.model, step_time=self.step_time, gpu_count=self.rank_count)

    @property
    def peak_flops(self) -> FlopPerSecond:
        """Dense peak FLOP/s of one GPU in the compute format, averaged over GPUs."""
        return self._mean_peak_flops(self.scenario.training.recipe.compute)

    def _mean_peak_flops(self, dtype: DType) -> FlopPerSecond:
        accelerators, kind = self.scenario.cluster.accelerator_kinds()
        peaks = [accelerator.peak_flops(dtype) for accelerator in accelerators]
        return float(np.array(peaks)[kind[: self.rank_count]].mean())

    @cached_property
    def format_usage(self) -> FormatUsage | None:
        """FLOP by number format and the cost of quantization casts; None where nothing is cast."""
        recipe = self.scenario.training.recipe
        if recipe.casts is None:
            return None
        steps, high_precision = self.scenario.steps, recipe.activations
        casts = mean_quantization_seconds(self.busy_time_items, rank_count=self.rank_count, step_count=steps)
        peaks = recipe.compute, self.peak_flops, high_precision, self._mean_peak_flops(high_precision)
        return FormatUsage(executed_flops_by_format(self.trace_table, steps), casts, *peaks)

    @property
    def peak_memory_pipeline_rank(self) -> int:
        """The pipeline rank with the highest ratio of peak memory to capacity."""
        return int(
            np.argmax(
                [ledger.peak / capacity for ledger, capacity in zip(self.ledgers, self.memory_capacities, strict=True)]
            )
        )

    @property
    def peak_memory(self) -> Bytes:
        """Peak memory in bytes of the most loaded GPU."""
        return self.ledgers[self.peak_memory_pipeline_rank].peak

    @property
    def memory_capacity(self) -> Bytes:
        """Memory in bytes of the most loaded GPU."""
        return self.memory_capacities[self.peak_memory_pipeline_rank]

    @property
    def fits_in_memory(self) -> bool:
        """Whether every GPU's peak is within its capacity, and offloaded memory within the hosts'."""
        return self.peak_memory <= self.memory_capacity and (self.host_memory is None or self.host_memory.fits)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Settings that are legal but probably mistakes, and suggestions where the scenario does not fit."""
        host = () if self.host_memory is None else self.host_memory.problems
        return (*self.scenario.warnings, *host, *self._flop_convention_warnings(), *self.oom_suggestions)

    def _flop_convention_warnings(self) -> tuple[str, ...]:
        """A warning where the usual FLOP convention is misleading (HFU above 1)."""
        if self.hfu() < 1:
            return ()
        return (
            "HFU above 100 %: by convention attention counts as a full matrix, but causal kernels skip half of it, and "
            f"at {self.scenario.training.sequence:,} tokens attention is most of the work; counted so, MFU is "
            f"{self.mfu_causal():.1%} (mfu_causal)",
        )

    @property
    def model_limitations(self) -> tuple[str, ...]:
        """Effects that the simulation leaves out, as sentences."""
        has_degradations = self.scenario.degradations != Degradations() or self.scenario.cluster.accelerator_overrides
        models_stragglers = self.scenario.jitter is not None or has_degradations or self.scenario.has_background_load
        host = () if self.host_memory is None else HOST_LIMITATIONS
        is_balanced = self.scenario.training.expert_load is None
        moe_notes = (BALANCED_EXPERTS_NOTE,) if self.scenario.model.distinct_moes and is_balanced else ()
        health_notes = () if models_stragglers else (HEALTHY_CLUSTER_NOTE,)
        shared = (
            NETWORK_LIMITATIONS[self.scenario.cost.network],
            *((CO_LOCATED_JOBS_LIMITATION,) if self.scenario.co_scheduled_jobs else ()),
        )
        return (*shared, *self._custom_algorithm_notes(), *health_notes, *moe_notes, *MODEL_LIMITATIONS, *host)

    def _custom_algorithm_notes(self) -> Iterator[str]:
        """Notes on user-defined algorithms in use, whose latency steps are costed with the library's constants."""
        for name in self.scenario.cost.nccl_overrides.custom_algorithms:
            uses = [
                selected_algorithm
                for selected_algorithm in self.selected_algorithms
                if selected_algorithm.algorithm.rpartition(" ")[0] == name
            ]
            used_for = ", ".join(dict.fromkeys(f"{use.collective} of {use.group}" for use in uses)) or "nothing"
            yield f"what rounds and protocols of {name} cost (taken for {used_for}): constants are the library's own"

    @property
    def operation_count(self) -> int:
        """Number of operations (kernels and collectives) on the simulated ranks, also inside compute segments."""
        operation_counts = [
            sum(len(task.segment.operations) if isinstance(task, ComputeTask) else 1 for task in program.tasks)
            for program in self.program.programs
        ]
        return int(np.array(operation_counts)[self.program.program_index[self.trace.simulated_ranks]].sum())

    @cached_property
    def trace_table(self) -> TraceTable:
        """The trace joined with the program, for analysis."""
        return build_trace_table(self.trace, self.program, self.scenario.steps)

    @cached_property
    def stragglers(self) -> StragglerReport:
        """The ranks whose kernels or communication take longest for the same work."""
        return find_stragglers(
            self.breakdown, self.program.program_index, transfer_seconds(self.trace, self.scenario.steps)
        )

    @cached_property
    def wait_times(self) -> WaitTimes:
        """Seconds that the ranks of each program wait for others."""
        return compute_wait_times(self.breakdown, self.program.program_index)

    def operation_spans(self, rank: int, task_ids: frozenset[int] | None = None) -> OperationSpans:
        """Spans of the kernels and collectives inside the compute segments of a rank (or of some of its tasks).

        Reconstructed on demand.
        """
        return self.operation_trace.rank_spans(rank, task_ids)

    @property
    def network_volumes(self) -> MeteredCollectiveCost:
        """Calculator of the bytes that each collective and p2p message puts on each link."""
        return MeteredCollectiveCost(self.scenario.cluster.fabric, resolved_library(self.scenario), self.program.groups)

    def link_loads(self, *links: tuple[str, str], bins: int = DEFAULT_BIN_COUNT) -> LinkLoads:
        """Bytes per second on links over time, in equal bins over the whole run.

        links: (source, target) names as in the cluster's graph and in `degradations` (("nic3.0", "leaf0.0")), one
        direction each; without any, all links that carry traffic. Traffic of co-located jobs is included. Raises
        InputError for links that do not exist.
        """
        senders = (
            TrafficSource(self.trace_table, self.network_volumes, self.operation_spans),
            *(co_located_job.traffic_source for co_located_job in self.co_located_jobs),
        )
        return compute_link_loads(senders, self.scenario.cluster.fabric, links=links, bin_count=bins)

    def mfu(self) -> float:
        """Model FLOP utilization (see `utilization.CONVENTION`)."""
        return mfu(self.model_flops.model, step_time=self.step_time, gpu_count=self.rank_count, peak=self.peak_flops)

    def mfu_causal(self) -> float:
        """Model FLOP utilization with attention counted as its causal mask leaves it."""
        return mfu(self.model_flops.causal, step_time=self.step_time, gpu_count=self.rank_count, peak=self.peak_flops)

    def hfu(self) -> float:
        """Hardware FLOP utilization: recomputed FLOP count as well."""
        recomputed = self.recomputed_flops
        return hfu(
            self.model_flops.model,
            recomputed,
            step_time=self.step_time,
            gpu_count=self.rank_count,
            peak=self.peak_flops,
        )

    def to_json(self) -> dict[str, Any]:
        """The result as plain data: seconds, bytes, fractions."""
        return {
            "name": self.scenario.name,
            "scenario": self.scenario.to_mapping(),
            "step_time_s": self.step_time,
            "step_times_s": self.step_times.tolist(),
            "step_time_isolated_s": self.isolated_step_time,
            "jobs": [co_located_job.to_json() for co_located_job in self.co_located_jobs],
            "step_time_distribution_s": self.step_time_percentiles,
            "tokens_per_s": self.tokens_per_second,
            "tokens_per_s_per_gpu": self.tokens_per_second / self.rank_count,
            "gpu_hours_per_trillion_tokens": self.gpu_hours_per_trillion_tokens,
            "economics": self.economics.to_json(),
            "model_tflops_per_gpu": self.achieved_flops_per_gpu / 1e12,
            "mfu": self.mfu(),
            "mfu_causal": self.mfu_causal(),
            "hfu": self.hfu(),
            "flop_convention": CONVENTION,
            "bubble_fraction": bubble_fraction(self.breakdown),
            "exposed_communication_fraction": exposed_fraction(self.breakdown),
            "peak_memory_bytes": self.peak_memory,
            "memory_capacity_bytes": self.memory_capacity,
            "fits": self.fits_in_memory,
            "host_memory": self._host_json(),
            "expert_loads": self._expert_load_json(),
            "formats": self._formats_json(),
            "breakdown_s": self.breakdown.mean_seconds(),
            "critical_path_s": dict(self.critical_path_breakdown),
            "stages": [self._stage_json(rank) for rank in range(len(self.ledgers))],
            "stragglers": self._stragglers_json(),
            "provenance_share": dict(self.provenance_shares),
            "in_situ": {"share": self.in_situ_slowdown.share, "slowdown": self.in_situ_slowdown.slowdown},
            "step_time_interval_s": list(self.step_time_interval),
            "holdout_validation": self._holdout_json(),
            "strata": list(self.relative_interval.strata),
            "unmeasured": list(self.relative_interval.extrapolations),
            "interval_basis": self.interval_description,
            "network": self.scenario.cost.network.value,
            "collectives": [selected_algorithm.to_json() for selected_algorithm in self.selected_algorithms],
            "ranks": self.rank_count,
            "simulated_ranks": self.simulated_rank_count,
            "spans": self.operation_count,
            "simulate_wall_s": self.wall_seconds,
            "warnings": list(self.warnings),
            "not_modelled": list(self.model_limitations),
        }

    def _holdout_json(self) -> dict[str, Any] | None:
        """Validation of the record on real steps; None where it has none."""
        return None if self.holdout_validation is None else self.holdout_validation.to_json()

    def _formats_json(self) -> dict[str, Any] | None:
        """Matmul formats and the cost of casts into them; None where nothing is cast."""
        usage = self.format_usage
        if usage is None:
            return None
        return {
            "flop_share": {dtype.value: share for dtype, share in usage.flop_shares.items()},
            "casts_s": usage.quantization_seconds,
            "mfu_peak": usage.peak_format.value,
            "mfu_peak_tflops": usage.peak_flops / 1e12,
            f"mfu_of_{usage.high_precision.value}_peak": usage.high_precision_mfu(self.mfu()),
        }

    def _expert_load_json(self) -> dict[str, Any] | None:
        """Expert load imbalance across ranks; None where it is balanced."""
        most_loaded, load = self.most_loaded_expert_rank, self.scenario.training.expert_load
        if most_loaded is None or load is None:
            return None
        load_ratios = {
            "layer_over_mean": most_loaded.layer_max_ratio,
            "rank": most_loaded.rank,
            "rank_over_mean": most_loaded.rank_ratio,
        }
        return {"load": load.description, **load_ratios}

    def _host_json(self) -> dict[str, Any] | None:
        """Memory of the most loaded node's host; None where nothing is offloaded."""
        if self.host_memory is None:
            return None
        bytes_by_use = {category.value: size for category, size in self.host_memory.bytes_by_category.items()}
        return {
            "memory_bytes": self.host_memory.total_bytes,
            "capacity_bytes": self.host_memory.capacity,
            "by_use_bytes": bytes_by_use,
        }

    def _stage_json(self, pipeline_rank: int) -> dict[str, Any]:
        """Time breakdown and peak memory of one pipeline rank."""
        rank = int(np.flatnonzero(self.program.program_index == pipeline_rank)[0])
        memory, waits = self.ledgers[pipeline_rank].peak_by_category(), self.wait_times
        return {
            "pipeline_rank": pipeline_rank,
            "breakdown_s": self.breakdown.rank_seconds(rank),
            "waits_s": {
                "min": float(waits.minimum[pipeline_rank]),
                "mean": float(waits.mean[pipeline_rank]),
                "max": float(waits.maximum[pipeline_rank]),
            },
            "peak_memory_bytes": self.ledgers[pipeline_rank].peak,
            "memory_bytes": {category.value: memory.get(category, 0.0) for category in MemoryCategory},
        }

    def _stragglers_json(self) -> dict[str, Any]:
        """Number of straggling ranks and details of the slowest."""
        stragglers = self.stragglers
        slowest = [
            {
                "ranks": list(straggler.ranks),
                "pipeline_rank": min(straggler.program_index, len(self.ledgers) - 1),
                "kernels_s": straggler.kernel_seconds,
                "slowdown_vs_median": straggler.kernel_excess,
                "communication_delay_s": straggler.comm_delay,
                "waits_s": straggler.wait_seconds,
            }
            for straggler in stragglers.slowest
        ]
        return {"ranks": stragglers.rank_count, "slowest": slowest}
