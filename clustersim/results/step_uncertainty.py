"""How sure is the step time? Its prediction interval, and the evidence behind it in words."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from clustersim.common.units import Seconds
from clustersim.results.provenance import BusyTimeItem, InSituShare, expected_error, in_situ_share
from clustersim.results.timing_sensitivity import TimingSensitivity
from clustersim.scenario import Scenario
from clustersim.uncertainty.describe_interval import describe_interval, describe_reference
from clustersim.uncertainty.expected_error import ExpectedError
from clustersim.uncertainty.holdout import HoldoutResult, holdout_result
from clustersim.uncertainty.model_file import load_uncertainty_model, uncertainty_model_name
from clustersim.uncertainty.prediction_interval import LocalEvidence, RelativeInterval, UncertaintyModel
from clustersim.uncertainty.reference_runs import ReferenceRun, reference_run
from clustersim.uncertainty.step_features import extract_step_features

_MIN_REPORTED_SHARE: Final = 5e-4  # fraction of the busy time


@dataclass(frozen=True)
class StepUncertainty:
    """Uncertainty of a step time.

    busy_time_items: what all ranks spend their busy time on; launch_share: of the step in which GPUs wait for
    their host; timing_sensitivity: how far a chaotic step moves, None: it is none.
    """

    scenario: Scenario
    busy_time_items: Sequence[BusyTimeItem]
    launch_share: float
    timing_sensitivity: TimingSensitivity | None = None

    @cached_property
    def kernel_time(self) -> ExpectedError:
        """Expected error of the step time that follows from the errors of its durations' sources."""
        return expected_error(self.busy_time_items)

    @cached_property
    def in_situ_slowdown(self) -> InSituShare:
        """Share of busy time whose kernels were measured standalone, and the unmeasured factor applied in a step."""
        return in_situ_share(self.busy_time_items)

    @cached_property
    def holdout(self) -> HoldoutResult | None:
        """Real steps used to validate the record's predictions.

        None without them, or where no kernel of the step was measured.
        """
        return holdout_result(self.scenario.cost.record) if self.kernel_time.kernel_share > 0.0 else None

    @cached_property
    def relative_interval(self) -> RelativeInterval:
        """Prediction interval of the step time, relative to the predicted one, and what widens it."""
        return self._interval(self.reference)

    @property
    def interval_without_reference(self) -> RelativeInterval:
        """The same as if no run of the job had been published: what a published run may be compared with."""
        return self._interval(None)

    @cached_property
    def reference(self) -> ReferenceRun | None:
        """A published run of the same job, None if there is none."""
        return reference_run(self.scenario)

    def _interval(self, reference: ReferenceRun | None) -> RelativeInterval:
        features, error = extract_step_features(self.scenario, self.launch_share), self.kernel_time
        if self.holdout is None:
            evidence = LocalEvidence(error.error, error.unknown_share)
            interval = self._model.prediction_interval(features, evidence, reference)
        else:
            interval = self.holdout.extend(self._model).prediction_interval(
                features, self.holdout.local_evidence(error)
            )
        return interval if self.timing_sensitivity is None else _widen(interval, self.timing_sensitivity)

    @cached_property
    def _model(self) -> UncertaintyModel:
        """The interval model fitted to published steps of this kind (MoE or dense, low precision or not)."""
        model, matmul_formats = self.scenario.model, self.scenario.training.recipe.matmul_formats
        return load_uncertainty_model(
            uncertainty_model_name(
                moe=bool(model.distinct_moes), low_precision=matmul_formats.low_precision is not None
            )
        )

    def describe(self, interval: tuple[Seconds, Seconds]) -> str:
        """The prediction interval, in seconds of the step, and the evidence behind it, as a sentence."""
        sentence = describe_interval(self._model, self.relative_interval, interval, self._describe_measurements())
        return sentence if self.reference is None else f"{describe_reference(self.reference)}. {sentence}"

    def _describe_measurements(self) -> str:
        """What was measured on the machine itself, as a clause; empty where nothing was."""
        measured_share = 1.0 - self.kernel_time.unknown_share
        if measured_share < _MIN_REPORTED_SHARE:
            return ""
        evidence = f"{measured_share:.0%} of the busy time rests on {self._describe_record()}"
        if self.holdout is None:
            return f"{evidence}, within {self.kernel_time.error / measured_share:.1%}{self._describe_in_situ()}"
        excess = _describe_excess_error(self.holdout.excess_kernel_error(self.kernel_time))
        return f"{evidence}, which {self.holdout.description}{excess}{self._describe_in_situ()}"

    def _describe_record(self) -> str:
        record = self.scenario.cost.record
        return "measurements" if record is None else f"the record of {record.device.name} of {record.conditions.date}"

    def _describe_in_situ(self) -> str:
        """The in-situ correction of kernels that were measured standalone, as a clause; empty if there is none."""
        slowdown = self.in_situ_slowdown
        if slowdown.share < _MIN_REPORTED_SHARE:
            return ""
        factor = f"times {slowdown.slowdown:.3f} for {self._describe_in_situ_source()}"
        return f" ({slowdown.share:.0%} as standalone kernels, {factor})"

    def _describe_in_situ_source(self) -> str:
        """What the in-situ correction stands for and its source, as a phrase."""
        record = self.scenario.cost.record
        if record is None or not record.in_situ:
            return "the slowdown within a step and the slowest GPU: from published steps, not measured here"
        source = "as GPUs of its node differ" if len(record.gpus) > 1 else "from published steps, not measured here"
        return f"the slowest GPU: {source}"


def _widen(interval: RelativeInterval, sensitivity: TimingSensitivity) -> RelativeInterval:
    """The interval around every time that a chaotic step may have."""
    likely_low, likely_high = interval.likely
    return replace(
        interval,
        low=interval.low * sensitivity.low,
        high=interval.high * sensitivity.high,
        likely=(likely_low * sensitivity.low, likely_high * sensitivity.high),
    )


def _describe_excess_error(excess: float) -> str:
    """Clause that says how much less certain this step's kernels are than the validated steps'; empty if not."""
    return f", and whose kernels are less well known here, by {excess:.1%}" if excess >= _MIN_REPORTED_SHARE else ""
