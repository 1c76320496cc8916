"""Which single causes make a step longer or shorter, and how strong can each plausibly be?

A cause has a strength, a number whose neutral value (`StrengthRange.neutral`) changes nothing. Strengths
are chosen so that time grows about linearly with them: slowdown factors, seconds per launch, a standard
deviation. They are limited to plausible machines: ten times as slow, 300 us to launch a kernel, 100 % of
peak, twice the bandwidth.

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

MAX_SLOWDOWN: Final = 10.0  # slowdown factor: what is slower is broken, not slow
MIN_LINK_SLOWDOWN: Final = 0.5  # slowdown factor: at best, links of the next generation
MAX_LAUNCH_SECONDS: Final[Seconds] = 300e-6  # per kernel: eager Python with autograd takes some tens of microseconds
MIN_LAUNCH_SECONDS: Final[Seconds] = 1e-6  # per kernel: below, differences between hosts have no effect
MAX_JITTERED_RANKS: Final = 256  # number of distinct ranks that is simulated quickly


@dataclass(frozen=True, slots=True)
class StrengthRange:
    """Range of a strength. neutral: the strength that changes nothing; limit: the largest plausible change."""

    neutral: float
    limit: float


class ContinuousCause(Protocol):
    """A cause with a continuous strength."""

    @property
    def name(self) -> str:
        """Its name in JSON."""

    def strength_range(self, scenario: Scenario, *, slower: bool) -> StrengthRange | None:
        """Range of strengths that make the step longer (or shorter); None if it cannot be a cause."""

    def apply(self, scenario: Scenario, strength: float) -> Scenario:
        """The scenario changed by this cause."""

    def describe(self, strength: float) -> str:
        """Description of the cause at a strength, as the start of a sentence."""

    def effort(self, strength_range: StrengthRange, strength: float) -> float:
        """Size of the change: the absolute logarithm of the ratio after / before."""


@dataclass(frozen=True, slots=True)
class MatmulSlowdown:
    """All matmul and attention kernels are slower or faster, as with other clocks, libraries or shapes."""

    name: str = "matmuls"

    def strength_range(self, scenario: Scenario, *, slower: bool) -> StrengthRange:
        """Up to 100 % of the peak."""
        efficiency = effective_efficiency(scenario)
        kernel_efficiencies = efficiency.matmul, efficiency.attention_forward, efficiency.attention_backward
        return StrengthRange(
            1.0,
            MAX_SLOWDOWN
            if slower
            else min(kernel_efficiency.peak_fraction for kernel_efficiency in kernel_efficiencies),
        )

    def apply(self, scenario: Scenario, strength: float) -> Scenario:
        """strength: slowdown factor of the kernels."""
        return with_matmul_slowdown(scenario, strength)

    def describe(self, strength: float) -> str:
        """`matmuls and attention 1.31x slower`."""
        return f"matmuls and attention {_format_slowdown(strength)} everywhere"

    def effort(self, strength_range: StrengthRange, strength: float) -> float:
        """Logarithm of the slowdown factor."""
        return _absolute_log_ratio(strength, strength_range.neutral)


@dataclass(frozen=True, slots=True)
class MemoryBoundSlowdown:
    """All memory-bound kernels are slower or faster: unfused operators, copies, another memory bandwidth."""

    name: str = "memory_bound_kernels"

    def strength_range(self, scenario: Scenario, *, slower: bool) -> StrengthRange:
        """Up to 100 % of the memory bandwidth."""
        return StrengthRange(1.0, MAX_SLOWDOWN if slower else effective_efficiency(scenario).memory_bandwidth_fraction)

    def apply(self, scenario: Scenario, strength: float) -> Scenario:
        """strength: slowdown factor of the kernels."""
        return with_memory_bound_slowdown(scenario, strength)

    def describe(self, strength: float) -> str:
        """`memory-bound kernels 1.5x slower`."""
        return f"memory-bound kernels {_format_slowdown(strength)} everywhere"

    def effort(self, strength_range: StrengthRange, strength: float) -> float:
        """Logarithm of the slowdown factor."""
        return _absolute_log_ratio(strength, strength_range.neutral)


@dataclass(frozen=True, slots=True)
class LinkBandwidthLoss:
    """All links of some kinds have a fraction (or multiple) of their bandwidth.

    label: names the links in a sentence; link_kinds: the kinds that a scenario's layout uses. Measurements on
    healthy links are not used, as in `simulation` with degraded links.
    """

    name: str
    label: str
    link_kinds: Callable[[Scenario], tuple[LinkKind, ...]]

    def strength_range(self, scenario: Scenario, *, slower: bool) -> StrengthRange | None:
        """None if the layout uses none of these links."""
        if not self.link_kinds(scenario):
            return None
        return StrengthRange(1.0, MAX_SLOWDOWN if slower else MIN_LINK_SLOWDOWN)

    def apply(self, scenario: Scenario, strength: float) -> Scenario:
        """strength: slowdown factor, the inverse of the bandwidth fraction."""
        return with_link_bandwidth(scenario, self.link_kinds(scenario), 1.0 / strength)

    def describe(self, strength: float) -> str:
        """`NICs and switches at 37 % of the bandwidth`."""
        return f"{self.label} at {100 / strength:.3g} % of the bandwidth"

    def effort(self, strength_range: StrengthRange, strength: float) -> float:
        """Logarithm of the slowdown factor."""
        return _absolute_log_ratio(strength, strength_range.neutral)


@dataclass(frozen=True, slots=True)
class SingleSlowGpu:
    """One GPU's kernels run at a fraction of their speed, and all ranks wait for it."""

    name: str = "one_slow_gpu"

    def strength_range(self, scenario: Scenario, *, slower: bool) -> StrengthRange | None:
        """Only for longer steps, and only with more than one rank."""
        return StrengthRange(1.0, MAX_SLOWDOWN) if slower and scenario.layout.world_size > 1 else None

    def apply(self, scenario: Scenario, strength: float) -> Scenario:
        """strength: slowdown factor, the inverse of the speed fraction."""
        return with_slow_gpu(scenario, 1.0 / strength)

    def describe(self, strength: float) -> str:
        """`one GPU at 0.71 of its speed`."""
        return f"one GPU at {1 / strength:.3g} of its speed"

    def effort(self, strength_range: StrengthRange, strength: float) -> float:
        """Logarithm of the slowdown factor."""
        return _absolute_log_ratio(strength, strength_range.neutral)


@dataclass(frozen=True, slots=True)
class KernelJitter:
    """Every kernel duration of every rank varies, and ranks that synchronize wait for the slowest."""

    name: str = "jitter"

    def strength_range(self, scenario: Scenario, *, slower: bool) -> StrengthRange | None:
        """Starts at the scenario's own jitter, of any distribution."""
        world, jitter = scenario.layout.world_size, scenario.jitter
        if not 1 < world <= MAX_JITTERED_RANKS or (jitter is None and not slower):
            return None
        neutral = 0.0 if jitter is None else jitter.std
        return StrengthRange(neutral, MAX_NORMAL_STD if slower else 0.0) if neutral < MAX_NORMAL_STD else None

    def apply(self, scenario: Scenario, strength: float) -> Scenario:
        """strength: standard deviation of the duration factor."""
        base_jitter = scenario.jitter or Jitter(strength, Distribution.NORMAL)
        return replace(scenario, jitter=replace(base_jitter, std=strength) if strength else None)

    def describe(self, strength: float) -> str:
        """`every kernel varying by 3 % (standard deviation)`."""
        return f"every kernel varying by {100 * strength:.3g} % (standard deviation)"

    def effort(self, strength_range: StrengthRange, strength: float) -> float:
        """Logarithm of the ratio of 1 + 3 standard deviations: the slow kernels, for which other ranks wait."""
        return _absolute_log_ratio(1.0 + 3.0 * strength, 1.0 + 3.0 * strength_range.neutral)


@dataclass(frozen=True, slots=True)
class SlowHostLaunch:
    """The host launches kernels more slowly than the GPU runs them (CPU launch-bound)."""

    name: str = "cpu_bound_launch"

    def strength_range(self, scenario: Scenario, *, slower: bool) -> StrengthRange | None:
        """Down to zero, as with CUDA graphs."""
        neutral = scenario.framework.launch_seconds
        candidate_range = StrengthRange(neutral, MAX_LAUNCH_SECONDS if slower else 0.0)
        return candidate_range if (neutral < MAX_LAUNCH_SECONDS if slower else neutral > 0.0) else None

    def apply(self, scenario: Scenario, strength: float) -> Scenario:
        """strength: host seconds per kernel or collective of forward; backward's are scaled by the same factor."""
        framework = scenario.framework
        ratio = framework.backward_launch_seconds / framework.launch_seconds if framework.launch_seconds else 1.0
        changed_framework = replace(framework, launch_seconds=strength, backward_launch_seconds=strength * ratio)
        return replace(scenario, framework=changed_framework)

    def describe(self, strength: float) -> str:
        """`the host launching a kernel every 24 us`."""
        if not strength:
            return "launches that cost the host no time (CUDA graphs)"
        return f"the host launching a kernel every {format_seconds(float(f'{strength:.3g}'))}"

    def effort(self, strength_range: StrengthRange, strength: float) -> float:
        """Logarithm of the ratio of launch intervals."""
        return _absolute_log_ratio(max(strength, MIN_LAUNCH_SECONDS), max(strength_range.neutral, MIN_LAUNCH_SECONDS))


CONTINUOUS_CAUSES: Final[tuple[ContinuousCause, ...]] = (
    MatmulSlowdown(),
    MemoryBoundSlowdown(),
    LinkBandwidthLoss("network", "NICs and switches", network_link_kinds),
    LinkBandwidthLoss("nvlink", "NVLink", nvlink_kinds),
    LinkBandwidthLoss("pcie", "PCIe and host links", pcie_link_kinds),
    SingleSlowGpu(),
    KernelJitter(),
    SlowHostLaunch(),
)


def _format_slowdown(strength: float) -> str:
    return f"{1 / strength:.2f}x faster" if strength < 1.0 else f"{strength:.2f}x slower"


def _absolute_log_ratio(after: float, before: float) -> float:
    return abs(math.log(after / before))
