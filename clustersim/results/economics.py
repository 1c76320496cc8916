"""What does a step cost, and what energy does it take?

All GPUs of the job are paid for from the beginning of a step to its end: cost = GPUs x hours x price. Energy is the sum
over what GPUs do of seconds and of what they draw meanwhile (`hardware.power`), and the rest of their nodes all the
time, times what the facility takes on top (PUE). What a rank does is its breakdown: exposed communication
communicates; bubbles, waiting for others, for copies and for launches wait; in all else kernels run, of which products
have the part that they have of all kernels' time on all ranks, hidden or not.

The step alone: failures, restarts, evaluation and checkpoints come on top of a run of many.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import JOULES_PER_KWH, Grams, Joules, Seconds, Watts
from clustersim.hardware.power import GpuActivity, PowerDraw
from clustersim.hardware.prices import Price, PriceQuote
from clustersim.model.kernels import TENSOR_CORE_KINDS, Kernel
from clustersim.parallel.mesh import HOST_AXIS
from clustersim.program.task import CommOverlap
from clustersim.results.provenance import Item
from clustersim.results.time_breakdown import Breakdown
from clustersim.results.time_categories import BUBBLES, EXPOSED, PARTS, Part
from clustersim.results.utilization import TRILLION

_HOUR: Final = 3600.0
_WAITING: Final = (Part.LAUNCH, EXPOSED[HOST_AXIS], *BUBBLES, Part.WAIT)
_COMMUNICATING: Final = tuple(part for axis, part in EXPOSED.items() if axis != HOST_AXIS)


@dataclass(frozen=True, slots=True)
class Gpus:
    """Those of one accelerator. seconds: of each activity in a step, the mean over them; they sum to the step time.

    quote: None where no price is known; draw: None where no power is.
    """

    name: str
    number: int
    seconds: Mapping[GpuActivity, Seconds]
    quote: PriceQuote | None
    draw: PowerDraw | None


@dataclass(frozen=True, slots=True)
class Economics:
    """Money and energy of a step of all GPUs; None where a price, a power or the run's tokens are not known.

    gpus: by accelerator; step_time: seconds; tokens: of a step; pue: power of the facility over that of its computers;
    carbon: grams of CO2 for a joule; run_tokens: of the whole run.
    """

    gpus: Sequence[Gpus]
    step_time: Seconds
    tokens: float
    pue: float = 1.0
    carbon: float | None = None
    run_tokens: float | None = None

    @property
    def number(self) -> int:
        """How many GPUs there are."""
        return sum(gpus.number for gpus in self.gpus)

    @property
    def price_per_gpu_hour(self) -> Price | None:
        """The mean over GPUs; of several currencies there is none."""
        quotes = [gpus.quote for gpus in self.gpus]
        prices = [quote.price for quote in quotes if quote is not None]
        if len(prices) < len(quotes) or len({price.currency for price in prices}) != 1:
            return None
        amount = sum(item.number * price.amount for item, price in zip(self.gpus, prices, strict=True))
        return Price(amount / self.number, prices[0].currency)

    @property
    def price_source(self) -> str:
        """Where prices are from, in words; empty where one is missing."""
        sources = {gpus.quote.source: None for gpus in self.gpus if gpus.quote is not None}
        return "; ".join(sources) if self.price_per_gpu_hour is not None else ""

    @property
    def without_price(self) -> tuple[str, ...]:
        """What prices are missing, in sentences."""
        missing = [gpus.name for gpus in self.gpus if gpus.quote is None]
        words = [f"no list price of {name} is known; economics.price_per_gpu_hour says one" for name in missing]
        mixed = not missing and self.price_per_gpu_hour is None
        return (*words, *(["prices are in several currencies; economics.price_per_gpu_hour says one"] * mixed))

    @property
    def without_power(self) -> tuple[str, ...]:
        """Of which GPUs nobody knows what they draw, in sentences."""
        missing = [gpus.name for gpus in self.gpus if gpus.draw is None]
        return tuple(f"what {name} draws is not known; economics.power.tdp says it" for name in missing)

    @property
    def without_node(self) -> tuple[str, ...]:
        """Beside which GPUs the rest of their nodes is left out, in sentences."""
        missing = [gpus.name for gpus in self.gpus if gpus.draw is not None and gpus.draw.node_rest is None]
        return tuple(f"nodes of {name} count as GPUs alone; economics.power.rest says the rest" for name in missing)

    @property
    def cost_per_step(self) -> float | None:
        """In the currency of the price."""
        price = self.price_per_gpu_hour
        return None if price is None else self.number * self.step_time / _HOUR * price.amount

    @property
    def cost_per_trillion_tokens(self) -> float | None:
        """In the currency of the price."""
        return self._for(self.cost_per_step, TRILLION)

    @property
    def cost_of_run(self) -> float | None:
        """In the currency of the price."""
        return self._for(self.cost_per_step, self.run_tokens)

    @property
    def time_of_run(self) -> Seconds | None:
        """Seconds of all steps of the run, one after the other: what breaks and what is saved comes on top."""
        return self._for(self.step_time, self.run_tokens)

    @property
    def energy_by_activity(self) -> dict[str, Joules] | None:
        """Joules of a step by what GPUs do, then of the rest of their nodes and of the facility around them."""
        if any(gpus.draw is None for gpus in self.gpus):
            return None
        drawn = [(item, item.draw) for item in self.gpus if item.draw is not None]
        found = {
            activity.value: sum(
                element.number * element.seconds[activity] * draw.by_activity[activity] for element, draw in drawn
            )
            for activity in GpuActivity
        }
        found["rest of nodes"] = sum(entry.number * self.step_time * (draw.node_rest or 0.0) for entry, draw in drawn)
        return {**found, "facility": (self.pue - 1.0) * sum(found.values())}

    @property
    def energy_per_step(self) -> Joules | None:
        """Joules of GPUs, the rest of their nodes and the facility."""
        parts = self.energy_by_activity
        return None if parts is None else sum(parts.values())

    @property
    def energy_per_trillion_tokens(self) -> Joules | None:
        """Joules."""
        return self._for(self.energy_per_step, TRILLION)

    @property
    def energy_of_run(self) -> Joules | None:
        """Joules."""
        return self._for(self.energy_per_step, self.run_tokens)

    @property
    def gpu_power(self) -> Watts | None:
        """What a GPU alone draws, the mean over the step and all GPUs."""
        parts = self.energy_by_activity
        return (
            None
            if parts is None
            else sum(parts[gpu_activity.value] for gpu_activity in GpuActivity) / self.step_time / self.number
        )

    @property
    def power_per_gpu(self) -> Watts | None:
        """What a GPU and its part of the rest of the node draw, without the facility."""
        energy = self.energy_per_step
        return None if energy is None else energy / self.pue / self.step_time / self.number

    @property
    def power(self) -> Watts | None:
        """What the job draws, with the facility."""
        energy = self.energy_per_step
        return None if energy is None else energy / self.step_time

    @property
    def idle_power(self) -> Watts | None:
        """What the job draws while it waits, with the facility."""
        if any(gpus.draw is None for gpus in self.gpus):
            return None
        drawn = [(item.number, item.draw) for item in self.gpus if item.draw is not None]
        return self.pue * sum(
            many * (draw.by_activity[GpuActivity.WAITING] + (draw.node_rest or 0.0)) for many, draw in drawn
        )

    @property
    def carbon_per_step(self) -> Grams | None:
        """Grams of CO2, where somebody said how many a kWh makes."""
        energy = self.energy_per_step
        return None if energy is None or self.carbon is None else energy * self.carbon

    @property
    def carbon_per_trillion_tokens(self) -> Grams | None:
        """Grams of CO2."""
        return self._for(self.carbon_per_step, TRILLION)

    @property
    def carbon_of_run(self) -> Grams | None:
        """Grams of CO2."""
        return self._for(self.carbon_per_step, self.run_tokens)

    def _for(self, of_step: float | None, tokens: float | None) -> float | None:
        """What so many tokens take, if steps go on as this one."""
        return None if of_step is None or tokens is None else of_step * tokens / self.tokens

    def to_json(self) -> dict[str, Any]:
        """The numbers as plain data: kWh and tonnes where there are many joules and grams."""
        price, parts = self.price_per_gpu_hour, self.energy_by_activity
        return {
            "currency": None if price is None else price.currency,
            "price_per_gpu_hour": None if price is None else price.amount,
            "price_source": self.price_source,
            "cost_per_step": self.cost_per_step,
            "cost_per_trillion_tokens": self.cost_per_trillion_tokens,
            "time_of_run_s": self.time_of_run,
            "cost_of_run": self.cost_of_run,
            "energy_per_step_kwh": _in(JOULES_PER_KWH, self.energy_per_step),
            "energy_per_step_by_activity_kwh": parts
            and {name: energy / JOULES_PER_KWH for name, energy in parts.items()},
            "energy_per_trillion_tokens_kwh": _in(JOULES_PER_KWH, self.energy_per_trillion_tokens),
            "energy_of_run_kwh": _in(JOULES_PER_KWH, self.energy_of_run),
            "gpu_power_w": self.gpu_power,
            "power_per_gpu_w": self.power_per_gpu,
            "power_w": self.power,
            "pue": self.pue,
            "carbon_per_step_t": _in(1e6, self.carbon_per_step),
            "carbon_per_trillion_tokens_t": _in(1e6, self.carbon_per_trillion_tokens),
            "carbon_of_run_t": _in(1e6, self.carbon_of_run),
            "run_tokens": self.run_tokens,
            "missing": [*self.without_price, *self.without_power, *self.without_node],
        }


def activity_seconds(parts: Breakdown, items: Iterable[Item], ranks: IntArray) -> dict[GpuActivity, Seconds]:
    """Seconds of each activity on some ranks, the mean over them; they sum to the step time."""
    of_rank = parts.seconds[np.searchsorted(parts.ranks, parts.representative[ranks])]
    return _by_activity(of_rank.mean(axis=0), _products_share(items))


def _by_activity(seconds: FloatArray, products: float) -> dict[GpuActivity, Seconds]:
    communicating = float(seconds[[part.place for part in _COMMUNICATING]].sum())
    waiting = float(seconds[[part.place for part in _WAITING]].sum())
    kernels = float(seconds[[part.place for part in PARTS if part not in (*_COMMUNICATING, *_WAITING)]].sum())
    return {
        GpuActivity.MATMUL: kernels * products,
        GpuActivity.MEMORY_BOUND: kernels * (1.0 - products),
        GpuActivity.COMMUNICATING: communicating,
        GpuActivity.WAITING: waiting,
    }


def _products_share(items: Iterable[Item]) -> float:
    """The part of all kernels' time that products take; none of it where nothing runs."""
    whole = products = 0.0
    for item in items:
        kernel = item.does.kernel if isinstance(item.does, CommOverlap) else item.does
        if isinstance(kernel, Kernel):
            whole += item.seconds
            products += item.seconds * (kernel.kind in TENSOR_CORE_KINDS)
    return products / whole if whole > 0.0 else 0.0


def _in(unit: float, amount: float | None) -> float | None:
    return None if amount is None else amount / unit
