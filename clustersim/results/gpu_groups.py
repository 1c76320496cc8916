"""Which GPUs does a job have, at what price and power, and what do they do during a step?"""

from collections.abc import Iterable, Iterator

import numpy as np

from clustersim.common.units import Seconds
from clustersim.results.economics import Economics, GpuGroup, mean_activity_seconds
from clustersim.results.provenance import BusyTimeItem
from clustersim.results.time_breakdown import TimeBreakdown
from clustersim.scenario import Scenario


def step_economics(
    scenario: Scenario, step_time: Seconds, breakdown: TimeBreakdown, items: Iterable[BusyTimeItem]
) -> Economics:
    """Cost and energy of a step, as far as prices and power figures are available."""
    settings, training = scenario.economics, scenario.training
    tokens = float(training.global_batch * training.sequence)
    gpus = tuple(gpu_groups(scenario, breakdown, items))
    return Economics(gpus, step_time, tokens, settings.pue, settings.carbon_intensity, settings.training_tokens)


def gpu_groups(scenario: Scenario, breakdown: TimeBreakdown, items: Iterable[BusyTimeItem]) -> Iterator[GpuGroup]:
    """The job's GPUs grouped by accelerator.

    breakdown: seconds by time category; items: busy-time items of the same period.
    """
    settings, cluster = scenario.economics, scenario.cluster
    accelerators, kind = cluster.accelerator_kinds()
    for kind_index, accelerator in enumerate(accelerators):
        ranks = np.flatnonzero(kind[: scenario.layout.world_size] == kind_index)
        if len(ranks):
            seconds = mean_activity_seconds(breakdown, items, ranks)
            price, power_draw = settings.gpu_hour_quote(accelerator, cluster.name), settings.power_draw(accelerator)
            list_price = settings.compared_list_quote(accelerator, cluster.name)
            yield GpuGroup(accelerator.name, len(ranks), seconds, price, power_draw, list_price, accelerator.unknown)
