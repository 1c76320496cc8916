"""What does a result say as plain data? Seconds, bytes, fractions; the keys are part of the interface."""

from typing import Any, Final

import numpy as np

from clustersim.memory.footprint import MemoryCategory
from clustersim.results.natural_routing import NATURAL_VARIATIONS
from clustersim.results.site_traffic import site_traffic
from clustersim.results.software import software_of
from clustersim.results.step_metrics import StepMetrics
from clustersim.results.utilization import CONVENTION, bubble_fraction, exposed_fraction

IDEAL_KEY: Final = "ideal"
"""Key of what is no loss in `losses_s`."""


def result_to_json(result: StepMetrics) -> dict[str, Any]:
    """The result as JSON data."""
    return {
        "name": result.scenario.name,
        "scenario": result.scenario.to_mapping(),
        "software": software_of(result.scenario).to_json(),
        **_step_times_json(result),
        **_throughput_json(result),
        **_memory_json(result),
        "expert_loads": _expert_load_json(result),
        "natural_routing": _natural_routing_json(result),
        "formats": _formats_json(result),
        **_breakdown_json(result),
        **_uncertainty_json(result),
        "network": result.scenario.cost.network.value,
        "collectives": [selected_algorithm.to_json() for selected_algorithm in result.selected_algorithms],
        **_site_json(result),
        **_drawn_json(result),
        **_images_json(result),
        "ranks": result.rank_count,
        "simulated_ranks": result.simulated_rank_count,
        "spans": result.operation_count,
        "simulate_wall_s": result.wall_seconds,
        "warnings": list(result.warnings),
        "not_modelled": list(result.model_limitations),
    }


def _site_json(result: StepMetrics) -> dict[str, Any]:
    """Traffic of the links between sites, where there are some."""
    traffic = site_traffic(result)
    links = [
        {
            "source": link.source,
            "target": link.target,
            "bytes_per_step": link.sent_bytes,
            "busy": link.busy,
            "egress_usd_per_step": link.cost,
        }
        for link in traffic
    ]
    return {"site_links": links} if links else {}


def _drawn_json(result: StepMetrics) -> dict[str, Any]:
    """Times of steps with different documents, where some were drawn."""
    if not result.drawn_step_times:
        return {}
    drawn = {"step_times_s": list(result.drawn_step_times), "distribution_s": result.drawn_step_time_percentiles}
    return {"drawn_documents": drawn}


def _images_json(result: StepMetrics) -> dict[str, Any]:
    """What ranks wait for where images are unequal."""
    return {} if result.image_imbalance is None else {"encoder_work_waited_for_over_mean": result.image_imbalance}


def _step_times_json(result: StepMetrics) -> dict[str, Any]:
    return {
        "step_time_s": result.step_time,
        "step_times_s": result.step_times.tolist(),
        "step_time_isolated_s": result.isolated_step_time,
        "jobs": [co_scheduled_job.to_json() for co_scheduled_job in result.co_scheduled_jobs],
        "step_time_distribution_s": result.step_time_percentiles,
    }


def _throughput_json(result: StepMetrics) -> dict[str, Any]:
    return {
        "tokens_per_s": result.tokens_per_second,
        "tokens_per_s_per_gpu": result.tokens_per_second / result.rank_count,
        "gpu_hours_per_trillion_tokens": result.gpu_hours_per_trillion_tokens,
        "economics": result.economics.to_json(),
        "model_tflops_per_gpu": result.achieved_flops_per_gpu / 1e12,
        "mfu": result.mfu,
        "mfu_causal": result.mfu_causal,
        "hfu": result.hfu,
        "hfu_causal": result.hfu_causal,
        "leading_mfu": result.leading_mfu.value,
        "leading_mfu_attention": result.leading_mfu.attention_label,
        "flop_convention": CONVENTION,
        "bubble_fraction": bubble_fraction(result.breakdown),
        "exposed_communication_fraction": exposed_fraction(result.breakdown),
    }


def _memory_json(result: StepMetrics) -> dict[str, Any]:
    return {
        "peak_memory_bytes": result.peak_memory,
        "memory_capacity_bytes": result.memory_capacity,
        "fits": result.fits_in_memory,
        "fit_probability": result.fit_probability,
        "host_memory": _host_json(result),
        "memory_suggestions": [suggestion.to_json() for suggestion in result.oom_suggestions],
    }


def _host_json(result: StepMetrics) -> dict[str, Any] | None:
    """Memory of the most loaded node's host; None where nothing is offloaded."""
    host = result.host_memory
    if host is None:
        return None
    return {
        "memory_bytes": host.total_bytes,
        "capacity_bytes": host.capacity,
        "by_use_bytes": {category.value: size for category, size in host.bytes_by_category.items()},
    }


def _expert_load_json(result: StepMetrics) -> dict[str, Any] | None:
    """Expert load imbalance across ranks; None where it is balanced."""
    most_loaded, load = result.most_loaded_expert_rank, result.scenario.training.expert_load
    if most_loaded is None or load is None:
        return None
    return {
        "load": load.description,
        "layer_over_mean": most_loaded.layer_max_ratio,
        "rank": most_loaded.rank,
        "rank_over_mean": most_loaded.rank_ratio,
    }


def _natural_routing_json(result: StepMetrics) -> dict[str, Any] | None:
    """The range of the step if tokens chose their experts freely; None where that changes nothing or is given."""
    natural = result.natural_routing
    if natural is None:
        return None
    return {
        "step_time_s": list(natural.step_times),
        "ratios": list(natural.ratios),
        "rank_variations": list(NATURAL_VARIATIONS),
    }


def _formats_json(result: StepMetrics) -> dict[str, Any] | None:
    """Matmul formats and the cost of casts into them; None where nothing is cast."""
    usage = result.format_usage
    if usage is None:
        return None
    return {
        "flop_share": {dtype.value: share for dtype, share in usage.flop_shares.items()},
        "casts_s": usage.quantization_seconds,
        "mfu_peak": usage.peak_format.value,
        "mfu_peak_tflops": usage.peak_flops / 1e12,
        f"flops_over_{usage.high_precision.value}_peak": usage.high_precision_ratio(result.mfu),
    }


def _breakdown_json(result: StepMetrics) -> dict[str, Any]:
    return {
        "breakdown_s": result.breakdown.mean_seconds(),
        "losses_s": {
            IDEAL_KEY: result.losses.ideal,
            **{loss.value: seconds for loss, seconds in result.losses.seconds.items()},
        },
        "critical_path_s": dict(result.critical_path_breakdown),
        "stages": [_stage_json(result, rank) for rank in range(len(result.ledgers))],
        "stragglers": _stragglers_json(result),
    }


def _stage_json(result: StepMetrics, pipeline_rank: int) -> dict[str, Any]:
    """Time breakdown and peak memory of one pipeline rank."""
    rank = int(np.flatnonzero(result.program.program_index == pipeline_rank)[0])
    memory, waits = result.ledgers[pipeline_rank].peak_by_category(), result.wait_times
    return {
        "pipeline_rank": pipeline_rank,
        "breakdown_s": result.breakdown.rank_seconds(rank),
        "waits_s": {
            "min": float(waits.minimum[pipeline_rank]),
            "mean": float(waits.mean[pipeline_rank]),
            "max": float(waits.maximum[pipeline_rank]),
        },
        "peak_memory_bytes": result.ledgers[pipeline_rank].peak,
        "memory_bytes": {category.value: memory.get(category, 0.0) for category in MemoryCategory},
    }


def _stragglers_json(result: StepMetrics) -> dict[str, Any]:
    """Number of straggling ranks and details of the slowest."""
    slowest = [
        {
            "ranks": list(straggler.ranks),
            "pipeline_rank": min(straggler.program_index, len(result.ledgers) - 1),
            "kernels_s": straggler.kernel_seconds,
            "slowdown_vs_median": straggler.kernel_excess,
            "communication_delay_s": straggler.comm_delay,
            "waits_s": straggler.wait_seconds,
        }
        for straggler in result.stragglers.slowest
    ]
    return {"ranks": result.stragglers.rank_count, "slowest": slowest}


def _uncertainty_json(result: StepMetrics) -> dict[str, Any]:
    holdout, reference = result.holdout_validation, result.uncertainty.reference
    sensitivity = result.timing_sensitivity
    return {
        "provenance_share": dict(result.provenance_shares),
        "in_situ": {"share": result.in_situ_slowdown.share, "slowdown": result.in_situ_slowdown.slowdown},
        "step_time_interval_s": list(result.step_time_interval),
        "likely_step_time_interval_s": list(result.likely_step_time_interval),
        "holdout_validation": None if holdout is None else holdout.to_json(),
        "strata": list(result.relative_interval.strata),
        "unmeasured": list(result.relative_interval.extrapolations),
        "interval_basis": result.interval_description,
        "timing_sensitivity": None if sensitivity is None else [sensitivity.low, sensitivity.high],
        "published_run": None if reference is None else reference.to_json(),
    }
