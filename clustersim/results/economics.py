"""Cost and energy of a step.

All GPUs of the job are paid for during the step: cost = GPUs x hours x price. Energy is the sum over GPU
activities of seconds times power draw (`hardware.power`), plus the remaining node power during the full
step, times the facility overhead (PUE). The activities of a rank follow from its time breakdown: exposed
communication counts as communicating; bubbles, waiting for others, for host copies and for launches as
waiting; in all other time kernels run, of which matmuls have their share of all kernels' time on all ranks,
hidden or not.

Covers the step only: failures, restarts, evaluation and checkpoints add to a run of many steps.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import JOULES_PER_KWH, Grams, Joules, Seconds, Watts
from clustersim.hardware.power import GpuActivity, PowerDraw
from clustersim.hardware.prices import Price, PriceKind, PriceQuote
from clustersim.model.kernels import TENSOR_CORE_KINDS, Kernel
from clustersim.parallel.mesh import HOST_AXIS
from clustersim.program.task import CommOverlap
from clustersim.results.provenance import BusyTimeItem
from clustersim.results.time_breakdown import TimeBreakdown
from clustersim.results.time_categories import BUBBLE_CATEGORIES, EXPOSED_CATEGORIES, TIME_CATEGORIES, TimeCategory
from clustersim.results.utilization import TRILLION_TOKENS

_SECONDS_PER_HOUR: Final = 3600.0
_WAITING_CATEGORIES: Final = (TimeCategory.LAUNCH, EXPOSED_CATEGORIES[HOST_AXIS], *BUBBLE_CATEGORIES, TimeCategory.WAIT)
_COMM_CATEGORIES: Final = tuple(category for axis, category in EXPOSED_CATEGORIES.items() if axis != HOST_AXIS)


@dataclass(frozen=True, slots=True)
class GpuGroup:
    """GPUs of one accelerator type.

    activity_seconds: of each activity in a step, averaged over the GPUs; they sum to the step time. quote: of the
    price that costs use, None where no price is known; power_draw: None where no power is known; list_quote: the
    list price to compare a contract price with, None: unknown, or costs use a list price; unknown: why the power or
    a list price is not known, as the accelerator's file says.
    """

    name: str
    gpu_count: int
    activity_seconds: Mapping[GpuActivity, Seconds]
    quote: PriceQuote | None
    power_draw: PowerDraw | None
    list_quote: PriceQuote | None = None
    unknown: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Economics:
    """Cost and energy of a step of all GPUs; None where a price, a power or the run's tokens are unknown.

    gpu_groups: by accelerator; step_time: seconds; tokens: per step; pue: power of the facility over that of
    its computers; carbon: grams of CO2 per joule; run_tokens: of the full training run.
    """

    gpu_groups: Sequence[GpuGroup]
    step_time: Seconds
    tokens: float
    pue: float = 1.0
    carbon_intensity: float | None = None
    run_tokens: float | None = None

    @property
    def gpu_count(self) -> int:
        """Number of GPUs."""
        return sum(gpu_group.gpu_count for gpu_group in self.gpu_groups)

    @property
    def price_per_gpu_hour(self) -> Price | None:
        """The price that costs use: mean over GPUs; None with several currencies."""
        return None if (quote := self._mean_quote([group.quote for group in self.gpu_groups])) is None else quote.price

    @property
    def price_quotes(self) -> tuple[PriceQuote, ...]:
        """The price that costs use, then the list price that it compares with, as far as each is known."""
        used = self._mean_quote([group.quote for group in self.gpu_groups])
        compared = self._mean_quote([group.list_quote for group in self.gpu_groups])
        return tuple(quote for quote in (used, compared) if quote is not None)

    def _mean_quote(self, quotes: Sequence[PriceQuote | None]) -> PriceQuote | None:
        """Mean of the GPU groups' prices over GPUs; None if one is missing, or with several currencies."""
        present = [quote for quote in quotes if quote is not None]
        if len(present) < len(quotes) or len({quote.price.currency for quote in present}) != 1:
            return None
        counts = [group.gpu_count for group in self.gpu_groups]
        amount = sum(count * quote.price.amount for count, quote in zip(counts, present, strict=True))
        sources = "; ".join(dict.fromkeys(quote.source for quote in present))
        return PriceQuote(Price(amount / self.gpu_count, present[0].price.currency), sources, present[0].kind)

    @property
    def price_source(self) -> str:
        """Sources of the prices as text; empty if a price is missing."""
        return "" if self.price_per_gpu_hour is None else self.price_quotes[0].source

    @property
    def missing_prices(self) -> tuple[str, ...]:
        """Messages about missing prices."""
        missing = [gpu_group for gpu_group in self.gpu_groups if gpu_group.quote is None]
        messages = [
            f"no list price of {group.name} is known{_because(group.unknown.get('price'))}; "
            "set economics.price_per_gpu_hour"
            for group in missing
        ]
        has_mixed_currencies = not missing and self.price_per_gpu_hour is None
        return (
            *messages,
            *(["prices are in several currencies; set economics.price_per_gpu_hour"] * has_mixed_currencies),
        )

    @property
    def missing_power(self) -> tuple[str, ...]:
        """Messages about accelerators whose power draw is unknown."""
        missing = [gpu_group for gpu_group in self.gpu_groups if gpu_group.power_draw is None]
        return tuple(
            f"no power draw of {group.name} is known{_because(group.unknown.get('power'))}; set economics.power.tdp"
            for group in missing
        )

    @property
    def missing_node_power(self) -> tuple[str, ...]:
        """Messages about accelerators whose remaining node power is left out."""
        missing = [
            gpu_group.name
            for gpu_group in self.gpu_groups
            if gpu_group.power_draw is not None and gpu_group.power_draw.node_rest is None
        ]
        return tuple(f"nodes of {name} count as GPUs alone; economics.power.rest says the rest" for name in missing)

    @property
    def cost_per_step(self) -> float | None:
        """In the currency of the price."""
        price = self.price_per_gpu_hour
        return None if price is None else self.step_cost_at(price)

    def step_cost_at(self, price: Price) -> float:
        """Cost of a step of all GPUs at a price of a GPU hour, in its currency."""
        return self.gpu_count * self.step_time / _SECONDS_PER_HOUR * price.amount

    @property
    def cost_per_trillion_tokens(self) -> float | None:
        """In the currency of the price."""
        return self._scale_to_tokens(self.cost_per_step, TRILLION_TOKENS)

    @property
    def run_cost(self) -> float | None:
        """In the currency of the price."""
        return self._scale_to_tokens(self.cost_per_step, self.run_tokens)

    @property
    def run_seconds(self) -> Seconds | None:
        """Seconds of all steps of the run back to back; failures and checkpoints come on top."""
        return self._scale_to_tokens(self.step_time, self.run_tokens)

    @property
    def energy_by_activity(self) -> dict[str, Joules] | None:
        """Joules of a step by GPU activity, then of the rest of the nodes and of the facility overhead."""
        if any(gpu_group.power_draw is None for gpu_group in self.gpu_groups):
            return None
        with_power = [(group, group.power_draw) for group in self.gpu_groups if group.power_draw is not None]
        energy = {
            activity.value: sum(
                group.gpu_count * group.activity_seconds[activity] * power_draw.by_activity[activity]
                for group, power_draw in with_power
            )
            for activity in GpuActivity
        }
        energy["node_rest"] = sum(
            group.gpu_count * self.step_time * (power_draw.node_rest or 0.0) for group, power_draw in with_power
        )
        return {**energy, "facility": (self.pue - 1.0) * sum(energy.values())}

    @property
    def energy_per_step(self) -> Joules | None:
        """Joules of GPUs, the rest of their nodes and the facility."""
        by_activity = self.energy_by_activity
        return None if by_activity is None else sum(by_activity.values())

    @property
    def energy_per_trillion_tokens(self) -> Joules | None:
        """Joules."""
        return self._scale_to_tokens(self.energy_per_step, TRILLION_TOKENS)

    @property
    def run_energy(self) -> Joules | None:
        """Joules."""
        return self._scale_to_tokens(self.energy_per_step, self.run_tokens)

    @property
    def gpu_power(self) -> Watts | None:
        """Mean power of a GPU by itself over the step, in watts."""
        by_activity = self.energy_by_activity
        return (
            None
            if by_activity is None
            else sum(by_activity[gpu_activity.value] for gpu_activity in GpuActivity) / self.step_time / self.gpu_count
        )

    @property
    def power_per_gpu(self) -> Watts | None:
        """Mean power of a GPU with its share of the rest of the node, without the facility, in watts."""
        energy = self.energy_per_step
        return None if energy is None else energy / self.pue / self.step_time / self.gpu_count

    @property
    def power(self) -> Watts | None:
        """Mean power of the job, including the facility, in watts."""
        energy = self.energy_per_step
        return None if energy is None else energy / self.step_time

    @property
    def idle_power(self) -> Watts | None:
        """Power of the job while it waits, including the facility, in watts."""
        if any(gpu_group.power_draw is None for gpu_group in self.gpu_groups):
            return None
        with_power = [(group.gpu_count, group.power_draw) for group in self.gpu_groups if group.power_draw is not None]
        return self.pue * sum(
            count * (power_draw.by_activity[GpuActivity.WAITING] + (power_draw.node_rest or 0.0))
            for count, power_draw in with_power
        )

    @property
    def carbon_per_step(self) -> Grams | None:
        """Grams of CO2; None without a carbon intensity."""
        energy = self.energy_per_step
        return None if energy is None or self.carbon_intensity is None else energy * self.carbon_intensity

    @property
    def carbon_per_trillion_tokens(self) -> Grams | None:
        """Grams of CO2."""
        return self._scale_to_tokens(self.carbon_per_step, TRILLION_TOKENS)

    @property
    def run_carbon(self) -> Grams | None:
        """Grams of CO2."""
        return self._scale_to_tokens(self.carbon_per_step, self.run_tokens)

    def _scale_to_tokens(self, per_step: float | None, tokens: float | None) -> float | None:
        """A per-step quantity scaled to a number of tokens."""
        return None if per_step is None or tokens is None else per_step * tokens / self.tokens

    def to_json(self) -> dict[str, Any]:
        """The results as plain data; large amounts in kWh and tonnes."""
        price, by_activity = self.price_per_gpu_hour, self.energy_by_activity
        return {
            "currency": None if price is None else price.currency,
            "price_per_gpu_hour": None if price is None else price.amount,
            "price_kind": None if price is None else self.price_quotes[0].kind.value,
            "price_source": self.price_source,
            "list_price": self._list_price_to_json(),
            "cost_per_step": self.cost_per_step,
            "cost_per_trillion_tokens": self.cost_per_trillion_tokens,
            "time_of_run_s": self.run_seconds,
            "cost_of_run": self.run_cost,
            "energy_per_step_kwh": _in_unit(JOULES_PER_KWH, self.energy_per_step),
            "energy_per_step_by_activity_kwh": by_activity
            and {name: energy / JOULES_PER_KWH for name, energy in by_activity.items()},
            "energy_per_trillion_tokens_kwh": _in_unit(JOULES_PER_KWH, self.energy_per_trillion_tokens),
            "energy_of_run_kwh": _in_unit(JOULES_PER_KWH, self.run_energy),
            "gpu_power_w": self.gpu_power,
            "power_per_gpu_w": self.power_per_gpu,
            "power_w": self.power,
            "pue": self.pue,
            "carbon_per_step_t": _in_unit(1e6, self.carbon_per_step),
            "carbon_per_trillion_tokens_t": _in_unit(1e6, self.carbon_per_trillion_tokens),
            "carbon_of_run_t": _in_unit(1e6, self.run_carbon),
            "run_tokens": self.run_tokens,
            "missing": [*self.missing_prices, *self.missing_power, *self.missing_node_power],
        }

    def _list_price_to_json(self) -> dict[str, Any] | None:
        """The list price and the costs at it, also where costs use a contract price; None where it is unknown."""
        quote = next((quote for quote in self.price_quotes if quote.kind is PriceKind.LIST), None)
        if quote is None:
            return None
        step_cost = self.step_cost_at(quote.price)
        return {
            **quote_to_json(quote),
            "cost_per_step": step_cost,
            "cost_per_trillion_tokens": self._scale_to_tokens(step_cost, TRILLION_TOKENS),
            "cost_of_run": self._scale_to_tokens(step_cost, self.run_tokens),
        }


def _because(reason: str | None) -> str:
    return "" if reason is None else f" ({reason})"


def quote_to_json(quote: PriceQuote) -> dict[str, Any]:
    """A price of a GPU hour and its source as plain data."""
    return {"price_per_gpu_hour": quote.price.amount, "currency": quote.price.currency, "source": quote.source}


def mean_activity_seconds(
    breakdown: TimeBreakdown, items: Iterable[BusyTimeItem], ranks: IntArray
) -> dict[GpuActivity, Seconds]:
    """Seconds of each activity, averaged over some ranks; they sum to the step time."""
    rank_seconds = breakdown.seconds[np.searchsorted(breakdown.ranks, breakdown.representative[ranks])]
    return _seconds_by_activity(rank_seconds.mean(axis=0), _matmul_share(items))


def _seconds_by_activity(seconds: FloatArray, matmul_share: float) -> dict[GpuActivity, Seconds]:
    communicating = float(seconds[[category.index for category in _COMM_CATEGORIES]].sum())
    waiting = float(seconds[[category.index for category in _WAITING_CATEGORIES]].sum())
    kernels = float(
        seconds[
            [
                category.index
                for category in TIME_CATEGORIES
                if category not in (*_COMM_CATEGORIES, *_WAITING_CATEGORIES)
            ]
        ].sum()
    )
    return {
        GpuActivity.MATMUL: kernels * matmul_share,
        GpuActivity.MEMORY_BOUND: kernels * (1.0 - matmul_share),
        GpuActivity.COMMUNICATING: communicating,
        GpuActivity.WAITING: waiting,
    }


def _matmul_share(items: Iterable[BusyTimeItem]) -> float:
    """Fraction of all kernel time that is matmuls; 0 where nothing runs."""
    total = matmul_seconds = 0.0
    for item in items:
        kernel = item.body.kernel if isinstance(item.body, CommOverlap) else item.body
        if isinstance(kernel, Kernel):
            total += item.seconds
            matmul_seconds += item.seconds * (kernel.kind in TENSOR_CORE_KINDS)
    return matmul_seconds / total if total > 0.0 else 0.0


def _in_unit(unit: float, amount: float | None) -> float | None:
    return None if amount is None else amount / unit
