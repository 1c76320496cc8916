"""Within which interval is a step's time predicted to lie, and why?

Errors are logarithms of measured over predicted time, of published steps that the fit of all constants has
not seen (leave-one-publisher-out cross-validation). Their variance is a sum of variance components: one for
every step, one for each feature (times its share, where a feature is a share), and for extrapolation one
for each unmeasured accelerator, one for each unmeasured category, one for each doubling beyond the largest
validated quantity. So an interval widens wherever less was measured. It ends where 5 % of the errors of held-out
publishers lie beyond, on each side (`quantiles`, in standard deviations), macro-averaged over publishers. These
errors are not symmetric: more runs were slower than predicted than faster, since what software does besides is not
all known. A quarter on each side lies beyond `likely_quantiles`.

A scenario that does not say its software has a component of its own, from predictions of the same published steps
that do not say it either.

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
from typing import Final

from clustersim.uncertainty.reference_runs import ReferenceRun, SameJobErrors
from clustersim.uncertainty.step_features import MIN_VISIBLE_SHARE, Feature, StepFeatures
from clustersim.uncertainty.validated_domain import ValidatedDomain

ALL_STEPS: Final = "all steps"
INTERVAL_COVERAGE: Final = 0.9  # of out-of-sample steps that an interval contains
LIKELY_COVERAGE: Final = 0.5  # the same of the interval of the likely times
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
    return strata if features.feature_shares[Feature.NODES] else (_ONE_NODE, *strata)


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
class SidedQuantiles:
    """Where an interval ends, in standard deviations from the prediction: towards faster and towards slower steps."""

    fast: float
    slow: float

    @property
    def width(self) -> float:
        """The interval's width."""
        return self.fast + self.slow


@dataclass(frozen=True, slots=True)
class UncertaintyModel:
    """Variance components of the prediction error, fitted to out-of-sample errors.

    step_count, source_count, publisher_count: published steps, their sources and who published these; quantiles: of
    the interval; likely_quantiles: of that which half of the errors are in; repeat_deviation: standard deviation of
    the log error between equal steps; deviations: standard deviation of the log error by component; domain:
    validated domain; coverage_by_stratum: of out-of-sample steps; same_job: how far two runs of one job are apart,
    None: too few were published.
    """

    step_count: int
    source_count: int
    publisher_count: int
    quantiles: SidedQuantiles
    likely_quantiles: SidedQuantiles
    repeat_deviation: float
    deviations: Mapping[VarianceComponent, float]
    domain: ValidatedDomain
    coverage_by_stratum: Mapping[str, StratumCoverage]
    same_job: SameJobErrors | None = None

    @property
    def held_out(self) -> str:
        """What was held out together: a publisher, or a source where too few published such steps."""
        return "publisher" if self.coverage_by_stratum[ALL_STEPS].group_count == self.publisher_count else "source"

    def prediction_interval(
        self, features: StepFeatures, evidence: LocalEvidence = NO_EVIDENCE, reference: ReferenceRun | None = None
    ) -> RelativeInterval:
        """The prediction interval of a step. reference: a published run of its job, whose interval is symmetric."""
        symmetric_half = math.log1p(evidence.relative_error)
        deviation = math.sqrt(self.error_variance(features, evidence.unmeasured_share))
        same_job_half = self._same_job_half_width(reference)
        is_of_same_job = 2.0 * same_job_half < 2.0 * symmetric_half + deviation * self.quantiles.width
        if is_of_same_job:
            symmetric_half, deviation = same_job_half, 0.0
        likely_half = symmetric_half * self.likely_quantiles.width / self.quantiles.width
        return RelativeInterval(
            math.exp(-symmetric_half - deviation * self.quantiles.fast),
            math.exp(symmetric_half + deviation * self.quantiles.slow),
            (
                math.exp(-likely_half - deviation * self.likely_quantiles.fast),
                math.exp(likely_half + deviation * self.likely_quantiles.slow),
            ),
            strata_of(features, self.domain),
            self._extrapolations(features),
            is_of_same_job,
        )

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
