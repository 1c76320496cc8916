"""Within which interval is a step's time predicted to lie, and why?

Errors are logarithms of measured over predicted time, of published steps that the fit of all constants has
not seen (leave-one-publisher-out cross-validation). Their variance is a sum of variance components: one for
every step, one for each feature (times its share, where a feature is a share), and for extrapolation one
for each unmeasured accelerator, one for each unmeasured category, one for each doubling beyond the largest
validated quantity. So an interval widens wherever less was measured. It contains 90 % of the errors of held-out
publishers, macro-averaged over publishers, and lies around their median (`ErrorQuantiles`): more runs were slower
than predicted than faster, since not all that software does is known.

A scenario that does not say its software has the interval that contains those of published steps with and without
their software stated.

Where a run of the same job was published, its error and the difference between two runs of a job bound the
step's (`uncertainty.reference_runs`); the narrower of both intervals counts.

Where kernels were measured on this machine, their own errors replace what depends on kernels: the
accelerator's component, and what the first component has beyond `repeat_deviation`, the deviation between
equal steps that were published twice. Where real steps were predicted on it, their errors replace the
kernels' (`uncertainty.holdout`). The contribution of framework, network and layout remains.

`python -m calibrate fit-prediction-interval` fits the constants, in topologies/uncertainty.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from statistics import NormalDist
from typing import Final

from clustersim.uncertainty.reference_runs import ReferenceRun, SameJobErrors
from clustersim.uncertainty.step_features import MIN_VISIBLE_SHARE, Feature, StepFeatures
from clustersim.uncertainty.validated_domain import ValidatedDomain

ALL_STEPS: Final = "all steps"
INTERVAL_COVERAGE: Final = 0.9  # of out-of-sample steps that an interval contains
LIKELY_COVERAGE: Final = 0.5  # the same of the interval of the likely times
UNSTATED_SOFTWARE: Final = "software not stated"
"""Stratum of steps whose scenario names no framework."""
_ONE_NODE: Final = "single-node"


class BaseComponent(Enum):
    """Variance components of every step, and of extrapolation beyond what was measured."""

    ANY = "any step"
    ACCELERATOR = "unvalidated accelerator"
    CATEGORY = "unvalidated category"
    DOUBLING = "extrapolated quantity"


VarianceComponent = BaseComponent | Feature
VARIANCE_COMPONENTS: Final[tuple[VarianceComponent, ...]] = (
    BaseComponent.ANY,
    *Feature,
    BaseComponent.ACCELERATOR,
    BaseComponent.CATEGORY,
    BaseComponent.DOUBLING,
)


def component_loads(features: StepFeatures, domain: ValidatedDomain) -> dict[VarianceComponent, float]:
    """Load of a step on each variance component (the factor on its variance)."""
    feature_loads: dict[VarianceComponent, float] = {feature: features.feature_shares[feature] for feature in Feature}
    extrapolation_loads: dict[VarianceComponent, float] = {
        BaseComponent.ACCELERATOR: float(len(domain.unmeasured_accelerators(features))),
        BaseComponent.CATEGORY: float(len(domain.unmeasured_categories(features))),
        BaseComponent.DOUBLING: sum(domain.extrapolation_doublings(features).values()),
    }
    return {BaseComponent.ANY: 1.0, **feature_loads, **extrapolation_loads}


def strata_of(features: StepFeatures, domain: ValidatedDomain) -> tuple[str, ...]:
    """Labels of a step's strata: single or multi-node, visible features, extrapolations."""
    component_load = component_loads(features, domain)
    strata = tuple(
        component.value for component in VARIANCE_COMPONENTS[1:] if component_load[component] >= MIN_VISIBLE_SHARE
    )
    strata = strata if features.feature_shares[Feature.NODES] else (_ONE_NODE, *strata)
    return strata if features.states_software else (*strata, UNSTATED_SOFTWARE)


@dataclass(frozen=True, slots=True)
class StratumCoverage:
    """Interval coverage of out-of-sample steps of one stratum.

    step_count, group_count: steps and their publishers (or sources, as those are held out); covered_share: fraction
    inside their intervals, macro-averaged over these.
    """

    step_count: int
    group_count: int
    covered_share: float


@dataclass(frozen=True, slots=True)
class LocalEvidence:
    """What local measurements say about a step.

    relative_error: expected error of the busy time that was measured; unmeasured_share: fraction of busy time
    that was not.
    """

    relative_error: float = 0.0
    unmeasured_share: float = 1.0


NO_EVIDENCE: Final = LocalEvidence()


@dataclass(frozen=True, slots=True)
class RelativeInterval:
    """Prediction interval relative to the predicted time.

    low, high: factors on the predicted time; likely: the factors between which half of the times lie; strata: of the
    step; extrapolations: what of it lies outside the validated domain, for display; is_of_same_job: whether it follows
    from a run of the same job.
    """

    low: float
    high: float
    likely: tuple[float, float]
    strata: tuple[str, ...]
    extrapolations: tuple[str, ...]
    is_of_same_job: bool = False


@dataclass(frozen=True, slots=True)
class ErrorQuantiles:
    """Where errors lie, in standard deviations.

    center: their median; interval, likely: half widths of the intervals around it that contain 90 % and half of them.
    """

    center: float
    interval: float
    likely: float

    def ends(self, coverage: float) -> tuple[float, float]:
        """Both ends of the interval of a coverage (`INTERVAL_COVERAGE` or `LIKELY_COVERAGE`), around the prediction."""
        half_width = self.interval if coverage == INTERVAL_COVERAGE else self.likely
        return min(0.0, self.center - half_width), max(0.0, self.center + half_width)


@dataclass(frozen=True, slots=True)
class UncertaintyModel:
    """Variance components of the prediction error, fitted to out-of-sample errors.

    step_count, source_count: published steps and sources; held_out: what was held out together, a publisher, or a
    source where too few publish such steps; quantiles: of errors; unstated_quantiles: of the same steps predicted
    without their software; repeat_deviation: standard deviation of the log error between equal steps; deviations:
    standard deviation of the log error by component; domain: validated domain; coverage_by_stratum: of
    out-of-sample steps; same_job: how far two runs of one job are apart, None: too few were published.
    """

    step_count: int
    source_count: int
    held_out: str
    quantiles: ErrorQuantiles
    unstated_quantiles: ErrorQuantiles
    repeat_deviation: float
    deviations: Mapping[VarianceComponent, float]
    domain: ValidatedDomain
    coverage_by_stratum: Mapping[str, StratumCoverage]
    same_job: SameJobErrors | None = None

    def prediction_interval(
        self, features: StepFeatures, evidence: LocalEvidence = NO_EVIDENCE, reference: ReferenceRun | None = None
    ) -> RelativeInterval:
        """The prediction interval of a step. reference: a published run of its job, whose interval is symmetric."""
        deviation = math.sqrt(self.error_variance(features, evidence.unmeasured_share))
        measured_error = math.log1p(evidence.relative_error)
        low, high = (deviation * end for end in self._ends(features, INTERVAL_COVERAGE, evidence.unmeasured_share))
        likely_low, likely_high = (
            deviation * end for end in self._ends(features, LIKELY_COVERAGE, evidence.unmeasured_share)
        )
        likely_share = self.quantiles.likely / self.quantiles.interval
        same_job_half = self._same_job_half_width(reference)
        is_of_same_job = 2.0 * same_job_half < 2.0 * measured_error + high - low
        if is_of_same_job:
            measured_error, low, high, likely_low, likely_high = same_job_half, 0.0, 0.0, 0.0, 0.0
        likely_error = likely_share * measured_error
        return RelativeInterval(
            math.exp(low - measured_error),
            math.exp(high + measured_error),
            (math.exp(likely_low - likely_error), math.exp(likely_high + likely_error)),
            strata_of(features, self.domain),
            self._extrapolations(features),
            is_of_same_job,
        )

    def _ends(self, features: StepFeatures, coverage: float, unmeasured_share: float) -> tuple[float, float]:
        """Ends of the interval of a coverage in standard deviations.

        What is left where everything was measured is how far equal steps deviate, assumed to be normal: the share that
        was reaches as far on both sides.
        """
        choices = (self.quantiles,) if features.states_software else (self.quantiles, self.unstated_quantiles)
        lows, highs = zip(*(quantiles.ends(coverage) for quantiles in choices), strict=True)
        normal = (1.0 - unmeasured_share) * NormalDist().inv_cdf(0.5 + coverage / 2.0)
        return min(*lows, -normal), max(*highs, normal)

    def _same_job_half_width(self, reference: ReferenceRun | None) -> float:
        """Half width from a run of the same job; infinite without one."""
        if reference is None or self.same_job is None:
            return math.inf
        return abs(reference.log_error) + self.same_job.quantile

    def error_variance(self, features: StepFeatures, unmeasured_share: float = 1.0) -> float:
        """Variance of log(measured / predicted). unmeasured_share: fraction of the busy time that was not measured."""
        variances = {
            component: load * self.deviations[component] ** 2
            for component, load in component_loads(features, self.domain).items()
        }
        repeat_variance = min(self.repeat_deviation**2, variances[BaseComponent.ANY])
        variances[BaseComponent.ANY] = repeat_variance + unmeasured_share * (
            variances[BaseComponent.ANY] - repeat_variance
        )
        variances[BaseComponent.ACCELERATOR] *= unmeasured_share
        return sum(variances.values())

    def _extrapolations(self, features: StepFeatures) -> tuple[str, ...]:
        max_quantities, doublings = self.domain.max_quantities, self.domain.extrapolation_doublings(features)
        exceeded = (
            f"{name} {features.quantities[name]:,} (validated up to {max_quantities.get(name, 1):,})"
            for name in doublings
        )
        return (*self.domain.unmeasured_categories(features), *exceeded)
