"""Changes of kernel launches by the host."""

from dataclasses import replace

from clustersim.common.units import Seconds
from clustersim.scenario.scenario import Scenario


def with_launch_seconds(scenario: Scenario, seconds: Seconds) -> Scenario:
    """The scenario with other host seconds per kernel or collective of forward; backward's keep their ratio."""
    framework = scenario.framework
    ratio = framework.backward_launch_seconds / framework.launch_seconds if framework.launch_seconds else 1.0
    changed_framework = replace(framework, launch_seconds=seconds, backward_launch_seconds=seconds * ratio)
    return replace(scenario, framework=changed_framework)
