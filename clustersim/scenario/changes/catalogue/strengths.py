"""Which single causes make a step longer or shorter, and how strong can each plausibly be?

Strengths are chosen so that time grows about linearly with them: slowdown factors, seconds per launch, a standard
deviation. They are limited to plausible machines: ten times as slow, 300 us to launch a kernel, 100 % of peak,
twice the bandwidth.

One slow GPU: MegaScale (Jiang et al. 2024, arXiv:2402.15627) found machines 10 % slower for the same work.
"""

from collections.abc import Callable
from typing import Final

from clustersim.common.units import Seconds, format_seconds
from clustersim.cost.jitter import MAX_NORMAL_STD
from clustersim.hardware.topology import LinkKind
from clustersim.scenario.changes.health import with_jitter, with_slow_gpu, with_slow_node
from clustersim.scenario.changes.host import with_launch_seconds
from clustersim.scenario.changes.kernels import (
    effective_efficiency,
    tensor_core_shares,
    with_matmul_slowdown,
    with_memory_bound_slowdown,
)
from clustersim.scenario.changes.links import (
    network_link_kinds,
    nic_path_kinds,
    nvlink_kinds,
    pcie_link_kinds,
    with_link_bandwidth,
)
from clustersim.scenario.changes.scenario_change import (
    ChangeSubject,
    ChangeUse,
    ContinuousChange,
    Plausibility,
    StrengthRange,
)
from clustersim.scenario.scenario import Scenario

MAX_SLOWDOWN: Final = 10.0  # slowdown factor: what is slower is broken, not slow
MIN_LINK_SLOWDOWN: Final = 0.5  # slowdown factor: at best, links of the next generation
MAX_LAUNCH_SECONDS: Final[Seconds] = 300e-6  # per kernel: eager Python with autograd takes some tens of microseconds
MIN_LAUNCH_SECONDS: Final[Seconds] = 1e-6  # per kernel: below, differences between hosts have no effect
MAX_JITTERED_RANKS: Final = 256  # number of distinct ranks that is simulated quickly


def _slowdown_range(min_slowdown: Callable[[Scenario], float]) -> Callable[[Scenario, ChangeUse], StrengthRange]:
    """Slowdown factors from 1: up to MAX_SLOWDOWN, or down to the one at which a limit is reached."""
    return lambda scenario, use: StrengthRange(
        1.0, MAX_SLOWDOWN if use is ChangeUse.LONGER_STEP else min_slowdown(scenario)
    )


def _kernel_slowdown(
    name: str,
    label: str,
    min_slowdown: Callable[[Scenario], float],
    slow_down: Callable[[Scenario, float], Scenario],
) -> ContinuousChange:
    """Slower or faster kernels, as with other clocks, libraries or shapes; not faster than the peak.

    min_slowdown: the slowdown factor at which they reach it.
    """
    return ContinuousChange(
        name,
        ChangeSubject.KERNELS,
        _slowdown_range(min_slowdown),
        slow_down,
        lambda slowdown: f"{label} {_format_slowdown(slowdown)} everywhere",
    )


def _format_slowdown(slowdown: float) -> str:
    return f"{1 / slowdown:.2f}x faster" if slowdown < 1.0 else f"{slowdown:.2f}x slower"


def _link_slowdown(
    name: str, label: str, link_kinds: Callable[[Scenario], tuple[LinkKind, ...]], checks: str = ""
) -> ContinuousChange:
    """All links of some kinds at a fraction (or multiple) of their bandwidth.

    label: names the links in a sentence; link_kinds: the kinds that a scenario's layout uses; checks: as of
    `ContinuousChange`. Measurements on healthy links are not used, as in `simulation` with degraded links.
    """
    slowdowns = _slowdown_range(lambda _: MIN_LINK_SLOWDOWN)
    return ContinuousChange(
        name,
        ChangeSubject.LINKS,
        lambda scenario, use: slowdowns(scenario, use) if link_kinds(scenario) else None,
        lambda scenario, slowdown: with_link_bandwidth(scenario, link_kinds(scenario), 1.0 / slowdown),
        lambda slowdown: f"{label} at {100 / slowdown:.3g} % of the bandwidth",
        checks=checks,
    )


def _slow_gpu_range(scenario: Scenario, use: ChangeUse) -> StrengthRange | None:
    """Only for longer steps, and only with more than one rank, which wait for it."""
    is_cause = use is ChangeUse.LONGER_STEP and scenario.layout.world_size > 1
    return StrengthRange(1.0, MAX_SLOWDOWN) if is_cause else None


def _slow_node_range(scenario: Scenario, use: ChangeUse) -> StrengthRange | None:
    """As one slow GPU, where there are several nodes."""
    return _slow_gpu_range(scenario, use) if network_link_kinds(scenario) else None


def _jitter_range(scenario: Scenario, use: ChangeUse) -> StrengthRange | None:
    """Standard deviations from the scenario's own jitter, of any distribution."""
    jitter, is_longer = scenario.jitter, use is ChangeUse.LONGER_STEP
    if not 1 < scenario.layout.world_size <= MAX_JITTERED_RANKS or (jitter is None and not is_longer):
        return None
    neutral = 0.0 if jitter is None else jitter.std
    return StrengthRange(neutral, MAX_NORMAL_STD if is_longer else 0.0) if neutral < MAX_NORMAL_STD else None


def _launch_range(scenario: Scenario, use: ChangeUse) -> StrengthRange | None:
    """Host seconds per launch, down to zero, as with CUDA graphs."""
    neutral = scenario.framework.launch_seconds
    if use is ChangeUse.LONGER_STEP:
        return StrengthRange(neutral, MAX_LAUNCH_SECONDS) if neutral < MAX_LAUNCH_SECONDS else None
    return StrengthRange(neutral, 0.0) if neutral > 0.0 else None


def _describe_launch(seconds: Seconds) -> str:
    if not seconds:
        return "launches that cost the host no time (CUDA graphs)"
    return f"the host launching a kernel every {format_seconds(float(f'{seconds:.3g}'))}"


STRENGTHS: Final[tuple[ContinuousChange, ...]] = (
    _kernel_slowdown(
        "matmuls", "matmuls and attention", lambda scenario: min(tensor_core_shares(scenario)), with_matmul_slowdown
    ),
    _kernel_slowdown(
        "memory_bound_kernels",
        "memory-bound kernels",
        lambda scenario: effective_efficiency(scenario).memory_bandwidth_fraction,
        with_memory_bound_slowdown,
    ),
    _link_slowdown(
        "network",
        "NICs and switches",
        network_link_kinds,
        "GPUDirect RDMA off, other jobs on the switches, NICs that fell back to a lower rate",
    ),
    _link_slowdown("nvlink", "NVLink", nvlink_kinds),
    _link_slowdown("pcie", "PCIe and host links", pcie_link_kinds, "processes on the other NUMA node, narrower links"),
    _link_slowdown(
        "nic_path",
        "PCIe and host links to the NICs",
        nic_path_kinds,
        "GPUDirect RDMA off, NICs of the other NUMA node, narrower links",
    ),
    ContinuousChange(
        "one_slow_gpu",
        ChangeSubject.GPUS,
        _slow_gpu_range,
        lambda scenario, slowdown: with_slow_gpu(scenario, 1.0 / slowdown),
        lambda slowdown: f"one GPU at {1 / slowdown:.3g} of its speed",
        plausibility=Plausibility.COMMON,
        checks="clocks, temperature, ECC errors",
    ),
    ContinuousChange(
        "one_slow_node",
        ChangeSubject.GPUS,
        _slow_node_range,
        lambda scenario, slowdown: with_slow_node(scenario, 1.0 / slowdown),
        lambda slowdown: f"one node at {1 / slowdown:.3g} of its speed",
        checks="throttled by heat or power",
    ),
    ContinuousChange(
        "jitter",
        ChangeSubject.GPUS,
        _jitter_range,
        with_jitter,
        lambda std: f"every kernel varying by {100 * std:.3g} % (standard deviation)",
        lambda std: 1.0 + 3.0 * std,  # the slow kernels, for which other ranks wait
    ),
    ContinuousChange(
        "cpu_bound_launch",
        ChangeSubject.HOST,
        _launch_range,
        with_launch_seconds,
        _describe_launch,
        lambda seconds: max(seconds, MIN_LAUNCH_SECONDS),
        checks="data loading on the same cores, no core binding (NUMA), a CPU governor",
    ),
)
