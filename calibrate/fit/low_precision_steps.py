"""At which rate do products in formats with scales run within a step?

`in_training.narrow` is found with all other constants as an accelerator's file has them, from dense published steps in
FP8 and narrower formats, so that nothing of BF16 moves: of accelerators whose rate of other products no step has said
(it is carried over from another chip). Where steps in BF16 have (`ACCELERATORS`), cases that were published in both say
that the rate is the same: of 34 pairs the speed-up is met within 5 % so, within 11 % with the rate that fits steps in
FP8 best, which only makes up for what steps in BF16 are off by. A step is predicted at three rates; between them it is
linear in the time per FLOP. The rate with the least error is taken, sources counted alike.

Leave one source out: the rates are found again without it. An accelerator with fewer than `LEAST` cases keeps the rate
of its other products.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, replace
from typing import Final

import numpy as np

from calibrate.fit.step_table import ACCELERATORS, SIBLINGS, SUSTAINED
from clustersim.common.arrays import FloatArray
from clustersim.common.units import Seconds
from clustersim.hardware.accelerator import load_accelerator
from clustersim.scenario import Scenario
from clustersim.simulation import simulate
from clustersim.uncertainty.model_file import LOW_PRECISION_MOE_STEPS, LOW_PRECISION_STEPS
from clustersim.validation.case_scenario import experience_of
from clustersim.validation.cases import CannotPredictError, Case
from clustersim.validation.framework_defaults import has_experts
from clustersim.validation.steps import predicted_seconds, scenario_of

RATES: Final = np.round(np.arange(0.6, 1.2501, 0.01), 2)
LEAST: Final = 10
"""Cases that a rate needs: of fewer, those that were left out were met worse with it than without."""
_NODES: Final = 1.0 / np.array(SUSTAINED)


@dataclass(frozen=True, slots=True)
class Narrow:
    """One step. seconds: [SUSTAINED] what is predicted at each rate; mixture: it has experts, and is not fitted to."""

    case_id: str
    source: str
    accelerator: str
    measured: Seconds
    seconds: FloatArray
    mixture: bool

    def errors(self, rates: FloatArray) -> FloatArray:
        """Logarithm of predicted over measured at some rates: [rates]."""
        logarithms: FloatArray = np.log(np.interp(1.0 / rates, _NODES, self.seconds) / self.measured)
        return logarithms


def tabulated(cases: Iterable[Case], pool: Executor) -> list[Narrow]:
    """The measured steps in narrow formats of quality A and B that can be predicted."""
    found = pool.map(
        _tabulate, [case for case in cases if experience_of(case) in (LOW_PRECISION_STEPS, LOW_PRECISION_MOE_STEPS)]
    )
    return [item for item in found if item is not None]


def _tabulate(case: Case) -> Narrow | None:
    try:
        scenario, measured = scenario_of(case), case.number("step_time_s")
    except CannotPredictError:
        return None
    own = scenario.cluster.accelerator.name
    seconds = np.array([_seconds(scenario, rate) for rate in SUSTAINED])
    name, source = SIBLINGS.get(own, own), case.text("source")
    return Narrow(case.text("case_id"), source, name, measured, seconds, has_experts(case))


def _seconds(scenario: Scenario, rate: float) -> Seconds:
    accelerator = scenario.cluster.accelerator
    changed = replace(accelerator, derating=replace(accelerator.derating, low_precision_ratio=rate))
    return predicted_seconds(simulate(replace(scenario, cluster=replace(scenario.cluster, accelerator=changed))))


def fit_narrow(table: Sequence[Narrow]) -> dict[str, float]:
    """The rate of each accelerator that has enough dense cases."""
    dense = [narrow for narrow in table if not narrow.mixture]
    names = sorted({item.accelerator for item in dense} - set(ACCELERATORS))
    groups = {name: [element for element in dense if element.accelerator == name] for name in names}
    return {name: _best(own) for name, own in groups.items() if len(own) >= LEAST}


def _best(own: Sequence[Narrow]) -> float:
    """The rate with the least mean error, sources counted alike."""
    sources = [narrow.source for narrow in own]
    loss = sum(np.abs(item.errors(RATES)) / sources.count(item.source) for item in own)
    return float(RATES[int(np.argmin(loss))])


@dataclass(frozen=True, slots=True)
class NarrowQuality:
    """Steps of one source: mean error and bias, with the rates of all, and with rates that have not seen the source."""

    source: str
    mixtures: bool
    n: int
    mape: float
    bias: float
    loo_mape: float
    loo_bias: float


def judged_narrow(table: Sequence[Narrow]) -> list[NarrowQuality]:
    """Each source, its dense steps and its mixtures apart."""
    found = fit_narrow(table)
    keys = dict.fromkeys((narrow.source, narrow.mixture) for narrow in table)
    judged = []
    for source, mixture in keys:
        own = [item for item in table if (item.source, item.mixture) == (source, mixture)]
        others = fit_narrow([element for element in table if element.source != source])
        seen, unseen = (np.array([_error(entry, rates) for entry in own]) for rates in (found, others))
        means = (np.abs(seen).mean(), seen.mean(), np.abs(unseen).mean(), unseen.mean())
        judged.append(NarrowQuality(source, mixture, len(own), *map(float, means)))
    return judged


def _error(each: Narrow, rates: Mapping[str, float]) -> float:
    own = load_accelerator(each.accelerator).derating.sustained_ratio
    return float(np.expm1(each.errors(np.array([rates.get(each.accelerator, own)]))[0]))


def narrow_lines(table: Sequence[Narrow]) -> list[str]:
    """What was found, and how it holds, in words."""
    found = fit_narrow(table)
    lines = [f"{name:20s} narrow {rate:.2f}" for name, rate in found.items()]
    judged = judged_narrow(table)
    for mixtures in (False, True):
        some = [narrow_quality for narrow_quality in judged if narrow_quality.mixtures is mixtures]
        if not some:
            continue
        lines += ["", f"{'mixtures' if mixtures else 'dense':24s} cases    MAPE    bias  left out    bias"]
        lines += [_line(item.source, item.n, (item.mape, item.bias, item.loo_mape, item.loo_bias)) for item in some]
        columns = zip(
            *((element.mape, element.bias, element.loo_mape, element.loo_bias) for element in some), strict=True
        )
        lines.append(_line("macro mean", None, tuple(float(np.mean(column)) for column in columns)))
    return lines


def _line(name: str, n: int | None, values: tuple[float, ...]) -> str:
    mape, bias, loo, loo_bias = values
    return f"{name:24s} {n or '':5}  {mape:6.1%}  {bias:+6.1%}    {loo:6.1%}  {loo_bias:+6.1%}"


def narrow_json(table: Sequence[Narrow]) -> str:
    """The same as JSON."""
    by_source = [asdict(narrow_quality) for narrow_quality in judged_narrow(table)]
    return json.dumps({"narrow": fit_narrow(table), "by_source": by_source}, indent=2) + "\n"
