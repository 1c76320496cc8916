"""Was the same job measured, and how far was its prediction off?

Runs of one *job* agree in model, machine, software, strategies, number formats, degrees of parallelism and sequence
length. They differ in microbatches, global batch, recomputation, model chunks, versions and options. What a
prediction has wrong is mostly common to the runs of a job: its kernels, collectives and software. So with a run of
the job that was measured, |e| <= |e'| + |e - e'| for the logarithms e of measured over predicted time, where only the
difference is unknown; `SameJobErrors` says how large it is. Of several such runs the one that was predicted worst
counts: to choose the best would lean to the hopeful side.

Settings that a source leaves open (quality C) are inferred, and where they are wrong, e' is the larger. Such runs
are in the table if no constant has seen their source.

`python -m calibrate reference-runs` writes the table, reference_runs.csv.
"""

import csv
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from clustersim.common.units import Seconds
from clustersim.hardware.cluster import describe_tiers
from clustersim.hardware.degradation import Degradations
from clustersim.model.transformer import parameter_count
from clustersim.scenario import Scenario
from clustersim.scenario.settings import CostSettings
from clustersim.uncertainty.step_features import accelerator_names, step_categories, step_quantities

REFERENCE_RUNS: Final = Path(__file__).with_name("reference_runs.csv")
QUANTITIES: Final = ("GPUs", "tokens", "tp", "cp", "pp")
COLUMNS: Final = (
    *("case_id", "source", "locator", "quality", "log_error", "step_time_s", "model_tflops_per_gpu"),
    *("layers", "parameters", *QUANTITIES, "accelerators", "categories", "machine"),
)
"""Columns of the table."""
_SEPARATOR: Final = "; "


@dataclass(frozen=True, slots=True)
class Job:
    """What the runs of a job agree in.

    layers, parameters: of the model; quantities: GPUs, tokens, tp, cp and pp; machine: bandwidth and
    oversubscription of each tier of its network.
    """

    accelerators: frozenset[str]
    categories: frozenset[str]
    machine: str
    layers: int
    parameters: int
    quantities: tuple[int, ...]

    @classmethod
    def from_scenario(cls, scenario: Scenario) -> "Job":
        """The job of a scenario."""
        quantities = step_quantities(scenario)
        return cls(
            accelerator_names(scenario),
            step_categories(scenario),
            _describe_machine(scenario),
            scenario.model.layer_count,
            parameter_count(scenario.model),
            tuple(quantities[name] for name in QUANTITIES),
        )

    def to_cells(self) -> dict[str, str]:
        """The job as cells of the table."""
        return {
            "layers": str(self.layers),
            "parameters": str(self.parameters),
            **{name: str(value) for name, value in zip(QUANTITIES, self.quantities, strict=True)},
            "accelerators": _SEPARATOR.join(sorted(self.accelerators)),
            "categories": _SEPARATOR.join(sorted(self.categories)),
            "machine": self.machine,
        }

    @classmethod
    def from_cells(cls, cells: Mapping[str, str]) -> "Job":
        """The job of a row of the table."""
        accelerators, categories = (frozenset(cells[name].split(_SEPARATOR)) for name in ("accelerators", "categories"))
        quantities = tuple(int(cells[name]) for name in QUANTITIES)
        return cls(
            accelerators, categories, cells["machine"], int(cells["layers"]), int(cells["parameters"]), quantities
        )


@dataclass(frozen=True, slots=True)
class ReferenceRun:
    """A published run of a job.

    log_error: logarithm of measured over predicted time, by constants that have not seen the source; tflops_per_gpu: as
    printed, None: not stated; quality: A and B: all that matters is stated, C: something is not.
    """

    case_id: str
    source: str
    locator: str
    quality: str
    log_error: float
    measured: Seconds
    tflops_per_gpu: float | None
    job: Job

    def to_json(self) -> dict[str, Any]:
        """The run as JSON data, without its job."""
        return {
            "case_id": self.case_id,
            "source": self.source,
            "locator": self.locator,
            "quality": self.quality,
            "measured_s": self.measured,
            "predicted_s": self.predicted,
            "model_tflops_per_gpu": self.tflops_per_gpu,
        }

    @property
    def predicted(self) -> Seconds:
        """Its predicted step time."""
        return self.measured * math.exp(-self.log_error)

    @property
    def relative_error(self) -> float:
        """Predicted over measured, minus one."""
        return math.expm1(-self.log_error)


@dataclass(frozen=True, slots=True)
class SameJobErrors:
    """How far log errors of two runs of one job are apart.

    pair_count, source_count: published pairs and their sources; quantile: 90 % of the differences are smaller,
    macro-averaged over sources; covered_share: of those of sources that the quantile has not seen.
    """

    pair_count: int
    source_count: int
    quantile: float
    covered_share: float


def reference_run(scenario: Scenario) -> ReferenceRun | None:
    """The published run of a scenario's job whose prediction was farthest off; None if there is none.

    What was measured says nothing about a degraded or shared machine, nor about other costs than the packaged ones.
    """
    if not _has_published_conditions(scenario):
        return None
    runs = _runs_by_job().get(Job.from_scenario(scenario), ())
    return max(runs, key=lambda run: abs(run.log_error), default=None)


def read_reference_runs() -> tuple[ReferenceRun, ...]:
    """The runs of the table."""
    with REFERENCE_RUNS.open(newline="", encoding="utf-8") as stream:
        return tuple(_from_cells(cells) for cells in csv.DictReader(stream))


def to_cells(run: ReferenceRun) -> dict[str, str]:
    """A run as cells of the table."""
    return {
        "case_id": run.case_id,
        "source": run.source,
        "locator": run.locator,
        "quality": run.quality,
        "log_error": f"{run.log_error:.4f}",
        "step_time_s": f"{run.measured:g}",
        "model_tflops_per_gpu": "" if run.tflops_per_gpu is None else f"{run.tflops_per_gpu:g}",
        **run.job.to_cells(),
    }


def _from_cells(cells: Mapping[str, str]) -> ReferenceRun:
    rate = cells["model_tflops_per_gpu"]
    return ReferenceRun(
        case_id=cells["case_id"],
        source=cells["source"],
        locator=cells["locator"],
        quality=cells["quality"],
        log_error=float(cells["log_error"]),
        measured=float(cells["step_time_s"]),
        tflops_per_gpu=float(rate) if rate else None,
        job=Job.from_cells(cells),
    )


@lru_cache(maxsize=1)
def _runs_by_job() -> Mapping[Job, tuple[ReferenceRun, ...]]:
    return group_by_job(read_reference_runs())


def group_by_job(runs: Iterable[ReferenceRun]) -> dict[Job, tuple[ReferenceRun, ...]]:
    """Runs by their job."""
    by_job: dict[Job, tuple[ReferenceRun, ...]] = {}
    for run in runs:
        by_job[run.job] = (*by_job.get(run.job, ()), run)
    return by_job


def _has_published_conditions(scenario: Scenario) -> bool:
    """Whether nothing but the job decides the step: no degradation, jitter or neighbour, and the packaged costs."""
    is_alone = not (scenario.has_background_load or scenario.jitter)
    return is_alone and scenario.degradations == Degradations() and _cost_rules(scenario) == CostSettings()


def _cost_rules(scenario: Scenario) -> CostSettings:
    """Cost settings, without those that change only how fast the simulation is."""
    default = CostSettings()
    return replace(scenario.cost, symmetry=default.symmetry, coalesce=default.coalesce)


def _describe_machine(scenario: Scenario) -> str:
    """The tiers of the cluster's fabric: `nic 50 GB/s, leaf 1:1`."""
    return ", ".join(
        f"{tier.kind} {tier.bandwidth / 1e9:g} GB/s"
        + ("" if tier.oversubscription is None else f" 1:{tier.oversubscription:g}")
        for tier in describe_tiers(scenario.cluster)
    )
