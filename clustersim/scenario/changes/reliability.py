"""Changes of failures, restarts and checkpoints of a run over weeks; they leave the step as it is."""

from dataclasses import replace

from clustersim.common.units import Seconds
from clustersim.hardware.failures import ZERO_DURATION, DurationDistribution
from clustersim.scenario.reliability import RestartTimes
from clustersim.scenario.scenario import Scenario


def with_failure_rate_factor(scenario: Scenario, factor: float) -> Scenario:
    """The scenario with all failure rates multiplied by a factor."""
    reliability = scenario.reliability
    return replace(scenario, reliability=replace(reliability, rate_factor=factor * reliability.rate_factor))


def with_storage_bandwidth_factor(scenario: Scenario, factor: float) -> Scenario:
    """The scenario with faster or slower checkpoint storage, for writes and reads."""
    reliability, policy = scenario.reliability, scenario.reliability.checkpoint
    checkpoint = replace(
        policy,
        bandwidth=factor * policy.bandwidth,
        read_bandwidth=factor * policy.read_bandwidth,
        bandwidth_per_node=None if policy.bandwidth_per_node is None else factor * policy.bandwidth_per_node,
    )
    return replace(scenario, reliability=replace(reliability, checkpoint=checkpoint))


def with_restart_seconds(scenario: Scenario, seconds: Seconds) -> Scenario:
    """The scenario in which every restart takes the same time."""
    restart = RestartTimes(schedule=DurationDistribution.constant(seconds), load=ZERO_DURATION)
    return replace(scenario, reliability=replace(scenario.reliability, restart=restart))


def with_immediate_detection(scenario: Scenario) -> Scenario:
    """The scenario in which every failure is noticed at once."""
    reliability = scenario.reliability
    failures = tuple(replace(failure, detection_time=ZERO_DURATION) for failure in reliability.failures)
    return replace(scenario, reliability=replace(reliability, failures=failures))
