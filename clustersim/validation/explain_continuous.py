"""Which single causes make a step longer or shorter, and how strong can each sensibly be?

A cause has a strength, a number of which one value (`Reach.none`) changes nothing. Strengths are such that time grows
about linearly with them: times as long, seconds for one launch, a standard deviation. They end where no healthy or
plausible machine lies: ten times as slow, 300 us to launch a kernel, the whole peak, twice the bandwidth.

One slow GPU: MegaScale (Jiang et al. 2024, arXiv:2402.15627) found machines 10 % slower for the same work.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol

from clustersim.common.units import Seconds, format_seconds
from clustersim.cost.jitter import MAX_NORMAL_STD, Distribution, Jitter
from clustersim.hardware.topology import LinkKind
from clustersim.scenario import Scenario
from clustersim.scenario.changes.kernels import effective_efficiency, with_matmul_slowdown, with_memory_bound_slowdown
from clustersim.scenario.changes.links import network_link_kinds, nvlink_kinds, pcie_link_kinds, with_link_bandwidth
from clustersim.scenario.changes.training import with_slow_gpu

MOST_TIMES: Final = 10.0  # as long: what is slower is broken, not slow
LEAST_TIMES: Final = 0.5  # as long: the wrong generation of links at most
MOST_LAUNCH: Final[Seconds] = 300e-6  # for one kernel: eager Python with autograd takes some tens of microseconds
LEAST_LAUNCH: Final[Seconds] = 1e-6  # for one kernel: below, differences between hosts are not felt
MOST_JITTERED: Final = 256  # ranks that all differ and are simulated in a moment


@dataclass(frozen=True, slots=True)
class Reach:
    """none: the strength that changes nothing; limit: the most that is sensible."""

    none: float
    limit: float


class Continuous(Protocol):
    """A cause of any strength."""

    @property
    def name(self) -> str:
        """What it is called in JSON."""

    def reach(self, scenario: Scenario, *, longer: bool) -> Reach | None:
        """Between what it may make the step longer (or shorter); None where it cannot be a cause."""

    def apply(self, scenario: Scenario, strength: float) -> Scenario:
        """The scenario with this cause."""

    def words(self, strength: float) -> str:
        """The cause at a strength, as the start of a sentence."""

    def effort(self, reach: Reach, strength: float) -> float:
        """How large a change it is: the logarithm of the ratio of after and before."""


@dataclass(frozen=True, slots=True)
class Products:
    """All matrix products and attention take another time, as with other clocks, libraries or shapes."""

    name: str = "matmuls"

    def reach(self, scenario: Scenario, *, longer: bool) -> Reach:
        """Up to the whole peak."""
        efficiency = effective_efficiency(scenario)
        parts = efficiency.matmul, efficiency.attention_forward, efficiency.attention_backward
        return Reach(1.0, MOST_TIMES if longer else min(part.share for part in parts))

    def apply(self, scenario: Scenario, strength: float) -> Scenario:
        """strength: times as long."""
        return with_matmul_slowdown(scenario, strength)

    def words(self, strength: float) -> str:
        """`matmuls and attention 1.31x slower`."""
        return f"matmuls and attention {_times(strength)} everywhere"

    def effort(self, reach: Reach, strength: float) -> float:
        """Logarithm of the times."""
        return _ratio(strength, reach.none)


@dataclass(frozen=True, slots=True)
class Streaming:
    """All kernels that memory bounds take another time: unfused operators, copies, another memory bandwidth."""

    name: str = "memory_bound_kernels"

    def reach(self, scenario: Scenario, *, longer: bool) -> Reach:
        """Up to the whole memory bandwidth."""
        return Reach(1.0, MOST_TIMES if longer else effective_efficiency(scenario).memory)

    def apply(self, scenario: Scenario, strength: float) -> Scenario:
        """strength: times as long."""
        return with_memory_bound_slowdown(scenario, strength)

    def words(self, strength: float) -> str:
        """`memory-bound kernels 1.5x slower`."""
        return f"memory-bound kernels {_times(strength)} everywhere"

    def effort(self, reach: Reach, strength: float) -> float:
        """Logarithm of the times."""
        return _ratio(strength, reach.none)


@dataclass(frozen=True, slots=True)
class Links:
    """Links of some kinds have a part of their bandwidth, everywhere.

    what: they are, as a sentence has them; kinds: those that a scenario's layout uses. What was measured on healthy
    links is not used, as in `simulation` where links are disturbed.
    """

    name: str
    what: str
    kinds: Callable[[Scenario], tuple[LinkKind, ...]]

    def reach(self, scenario: Scenario, *, longer: bool) -> Reach | None:
        """Nothing where the layout uses none of these links."""
        if not self.kinds(scenario):
            return None
        return Reach(1.0, MOST_TIMES if longer else LEAST_TIMES)

    def apply(self, scenario: Scenario, strength: float) -> Scenario:
        """strength: times as long, so one over the part of the bandwidth."""
        return with_link_bandwidth(scenario, self.kinds(scenario), 1.0 / strength)

    def words(self, strength: float) -> str:
        """`NICs and switches at 37 % of the bandwidth`."""
        return f"{self.what} at {100 / strength:.3g} % of the bandwidth"

    def effort(self, reach: Reach, strength: float) -> float:
        """Logarithm of the times."""
        return _ratio(strength, reach.none)


@dataclass(frozen=True, slots=True)
class OneSlowGpu:
    """One GPU's kernels run at a part of their speed, and everyone waits for it."""

    name: str = "one_slow_gpu"

    def reach(self, scenario: Scenario, *, longer: bool) -> Reach | None:
        """No GPU makes a step shorter, and one that is alone has nobody to wait for it."""
        return Reach(1.0, MOST_TIMES) if longer and scenario.layout.world_size > 1 else None

    def apply(self, scenario: Scenario, strength: float) -> Scenario:
        """strength: times as long, so one over the speed."""
        return with_slow_gpu(scenario, 1.0 / strength)

    def words(self, strength: float) -> str:
        """`one GPU at 0.71 of its speed`."""
        return f"one GPU at {1 / strength:.3g} of its speed"

    def effort(self, reach: Reach, strength: float) -> float:
        """Logarithm of the times."""
        return _ratio(strength, reach.none)


@dataclass(frozen=True, slots=True)
class Jittered:
    """Every kernel of every rank varies, and those that meet wait for the slowest of the moment."""

    name: str = "jitter"

    def reach(self, scenario: Scenario, *, longer: bool) -> Reach | None:
        """From the scenario's own jitter, of whatever distribution."""
        world, jitter = scenario.layout.world_size, scenario.jitter
        if not 1 < world <= MOST_JITTERED or (jitter is None and not longer):
            return None
        none = 0.0 if jitter is None else jitter.std
        return Reach(none, MAX_NORMAL_STD if longer else 0.0) if none < MAX_NORMAL_STD else None

    def apply(self, scenario: Scenario, strength: float) -> Scenario:
        """strength: standard deviation."""
        own = scenario.jitter or Jitter(strength, Distribution.NORMAL)
        return replace(scenario, jitter=replace(own, std=strength) if strength else None)

    def words(self, strength: float) -> str:
        """`every kernel varying by 3 % (standard deviation)`."""
        return f"every kernel varying by {100 * strength:.3g} % (standard deviation)"

    def effort(self, reach: Reach, strength: float) -> float:
        """Of three standard deviations: the slow kernels, for which others wait."""
        return _ratio(1.0 + 3.0 * strength, 1.0 + 3.0 * reach.none)


@dataclass(frozen=True, slots=True)
class Launches:
    """The host is too slow to launch kernels as fast as the GPU runs them."""

    name: str = "cpu_bound_launch"

    def reach(self, scenario: Scenario, *, longer: bool) -> Reach | None:
        """Down to no time at all, as with CUDA graphs."""
        none = scenario.framework.launch_seconds
        reach = Reach(none, MOST_LAUNCH if longer else 0.0)
        return reach if (none < MOST_LAUNCH if longer else none > 0.0) else None

    def apply(self, scenario: Scenario, strength: float) -> Scenario:
        """strength: seconds that the host needs for one kernel or collective of forward; those of backward go along."""
        framework = scenario.framework
        ratio = framework.backward_launch_seconds / framework.launch_seconds if framework.launch_seconds else 1.0
        slower = replace(framework, launch_seconds=strength, backward_launch_seconds=strength * ratio)
        return replace(scenario, framework=slower)

    def words(self, strength: float) -> str:
        """`the host launching a kernel every 24 us`."""
        if not strength:
            return "launches that cost the host no time (CUDA graphs)"
        return f"the host launching a kernel every {format_seconds(float(f'{strength:.3g}'))}"

    def effort(self, reach: Reach, strength: float) -> float:
        """Logarithm of the ratio of intervals."""
        return _ratio(max(strength, LEAST_LAUNCH), max(reach.none, LEAST_LAUNCH))


CONTINUOUS: Final[tuple[Continuous, ...]] = (
    Products(),
    Streaming(),
    Links("network", "NICs and switches", network_link_kinds),
    Links("nvlink", "NVLink", nvlink_kinds),
    Links("pcie", "PCIe and host links", pcie_link_kinds),
    OneSlowGpu(),
    Jittered(),
    Launches(),
)


def _times(strength: float) -> str:
    return f"{1 / strength:.2f}x faster" if strength < 1.0 else f"{strength:.2f}x slower"


def _ratio(after: float, before: float) -> float:
    return abs(math.log(after / before))
