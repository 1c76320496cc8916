"""Between what and what is a step expected, and why?

Errors are logarithms of measured over predicted time, of published steps that the fit of all constants has not seen
(sources are left out one after the other). Their variance is taken as a sum of terms (variance components): one that
every step has, one for each trait (a share of it, where a trait is a share), and for what was not measured one for each
accelerator, one for each kind of anything, one for each doubling beyond the largest. So a band is wider wherever
less was measured, and never narrower. A step is expected within `quantile` standard deviations, within which nine of
ten errors of unseen sources are, sources counted alike.

Where kernels were measured on the machine itself, their own errors take the place of what rests on kernels: of the
accelerator's term, and of what the first term has beyond `repeat`, the deviation of equal steps that were published
twice. Where real steps on it were predicted, their errors take that of the kernels' (`uncertainty.holdout`). What a
framework, a network and a layout add remains.

`python -m calibrate fit-band` finds the constants, in topologies/experience.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from clustersim.uncertainty.step_features import MIN_VISIBLE_SHARE, Feature, StepFeatures
from clustersim.uncertainty.validated_domain import ValidatedDomain

ALL_STEPS: Final = "all steps"
INTERVAL_COVERAGE: Final = 0.9  # of unseen steps that a band holds
_ONE_NODE: Final = "one node"


class BaseComponent(Enum):
    """What adds to the variance of every step, and of steps of which not all was measured."""

    ANY = "any step"
    ACCELERATOR = "an accelerator that was not measured"
    KIND = "a kind that was not measured"
    DOUBLING = "a doubling beyond what was measured"


VarianceComponent = BaseComponent | Feature
VARIANCE_COMPONENTS: Final[tuple[VarianceComponent, ...]] = (
    BaseComponent.ANY,
    *Feature,
    BaseComponent.ACCELERATOR,
    BaseComponent.KIND,
    BaseComponent.DOUBLING,
)


def component_loads(features: StepFeatures, domain: ValidatedDomain) -> dict[VarianceComponent, float]:
    """How much of each term a step has."""
    feature_loads: dict[VarianceComponent, float] = {feature: features.feature_shares[feature] for feature in Feature}
    extrapolation_loads: dict[VarianceComponent, float] = {
        BaseComponent.ACCELERATOR: float(len(domain.unmeasured_accelerators(features))),
        BaseComponent.KIND: float(len(domain.unmeasured_categories(features))),
        BaseComponent.DOUBLING: sum(domain.extrapolation_doublings(features).values()),
    }
    return {BaseComponent.ANY: 1.0, **feature_loads, **extrapolation_loads}


def strata_of(features: StepFeatures, domain: ValidatedDomain) -> tuple[str, ...]:
    """The regimes that a step belongs to, in words: whether it has a network, its traits, and its gaps."""
    component_load = component_loads(features, domain)
    strata = tuple(
        component.value for component in VARIANCE_COMPONENTS[1:] if component_load[component] >= MIN_VISIBLE_SHARE
    )
    return strata if features.feature_shares[Feature.NODES] else (_ONE_NODE, *strata)


@dataclass(frozen=True, slots=True)
class StratumCoverage:
    """Of unseen steps of one regime: cases of so many sources, and the share inside, sources counted alike."""

    step_count: int
    source_count: int
    covered_share: float


@dataclass(frozen=True, slots=True)
class LocalEvidence:
    """What was measured of a step itself. error: part by which what is known differs; unknown: part of busy time."""

    relative_error: float = 0.0
    unmeasured_share: float = 1.0


NO_EVIDENCE: Final = LocalEvidence()


@dataclass(frozen=True, slots=True)
class RelativeInterval:
    """A band. low, high: times the predicted time; regimes: of the step; unmeasured: what of it was not measured."""

    low: float
    high: float
    strata: tuple[str, ...]
    extrapolations: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UncertaintyModel:
    """What unseen steps tell: `cases` of so many sources; unseen: how many of each regime were inside their bands.

    deviations: standard deviation of the logarithm by term; repeat: the same of equal steps.
    """

    step_count: int
    source_count: int
    quantile: float
    repeat_deviation: float
    deviations: Mapping[VarianceComponent, float]
    domain: ValidatedDomain
    coverage_by_stratum: Mapping[str, StratumCoverage]

    def prediction_interval(self, features: StepFeatures, evidence: LocalEvidence = NO_EVIDENCE) -> RelativeInterval:
        """The band of a step, symmetric in the logarithm."""
        half_width = math.log1p(evidence.relative_error) + self.quantile * math.sqrt(
            self.error_variance(features, evidence.unmeasured_share)
        )
        return RelativeInterval(
            math.exp(-half_width),
            math.exp(half_width),
            strata_of(features, self.domain),
            self._extrapolations(features),
        )

    def error_variance(self, features: StepFeatures, unmeasured_share: float = 1.0) -> float:
        """Of the logarithm of measured over predicted time; unknown: part of the busy time that nobody measured."""
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
            f"{name} {features.quantities[name]:,} (at most {max_quantities.get(name, 1):,})" for name in doublings
        )
        return (*self.domain.unmeasured_categories(features), *exceeded)
