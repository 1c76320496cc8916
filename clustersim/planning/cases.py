"""Which single changes are worth a look, before anybody changes anything?

Links, kernels, batch, microbatch, recomputation and one slow rank: what a planner buys, tunes, or has to live with. The
strengths are round ones around a tenth, small enough to read as a slope and large enough to see. A change gives the
changed scenario, or the reason why it cannot be.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from clustersim.hardware.topology import LinkKind
from clustersim.scenario import Scenario
from clustersim.scenario.changes.kernels import efficiency_of, with_products
from clustersim.scenario.changes.links import network_links, nvlink, pcie_links, with_links
from clustersim.scenario.changes.work import with_batch, with_microbatch, with_recompute, with_slow_gpu
from clustersim.workload.training import FullRecompute, NoRecompute, Recompute

_NO_NETWORK: Final = "all ranks are on one node"
_NO_NODE_LINKS: Final = "no NVLink or PCIe is used"
LESS, MORE, TWICE, SLOW = 0.9, 1.1, 2.0, 0.9
SPLITS: Final = 4.0  # times the classes of ranks with a slow one: 16 and 64 for Llama 3 405B on 16,384 GPUs


@dataclass(frozen=True, slots=True)
class Untried:
    """Why a change cannot be tried."""

    reason: str


Change = Callable[[Scenario], Scenario | Untried]


@dataclass(frozen=True, slots=True)
class Case:
    """One change.

    modelled: whether collectives are modelled with it, even where some were measured; effort: how many times as long as
    without it a simulation takes.
    """

    name: str
    words: str
    change: Change
    modelled: bool = False
    effort: float = 1.0


def _links(kinds: Callable[[Scenario], tuple[LinkKind, ...]], bandwidth: float, nowhere: str) -> Change:
    def change(scenario: Scenario) -> Scenario | Untried:
        there = kinds(scenario)
        return with_links(scenario, there, bandwidth) if there else Untried(nowhere)

    return change


def _node_links(scenario: Scenario) -> tuple[LinkKind, ...]:
    return nvlink(scenario) or pcie_links(scenario)


def _faster_products(scenario: Scenario) -> Scenario | Untried:
    """Not where a share of the peak would be above all of it: then less than the change was made."""
    efficiency = efficiency_of(scenario)
    parts = efficiency.matmul, efficiency.attention_forward, efficiency.attention_backward
    most = max(part.share for part in parts)
    if most * MORE > 1.0:
        return Untried(f"kernels reach {most:.0%} of the peak already")
    return with_products(scenario, 1.0 / MORE)


def _larger_batch(scenario: Scenario) -> Scenario | Untried:
    return with_batch(scenario, 2)


def _smaller_microbatches(scenario: Scenario) -> Scenario | Untried:
    sequences = scenario.training.microbatch
    if sequences % 2:
        return Untried(f"a microbatch of {sequences} sequence{'s' * (sequences > 1)} has no half")
    return with_microbatch(scenario, sequences // 2)


def _slow_rank(scenario: Scenario) -> Scenario | Untried:
    return with_slow_gpu(scenario, SLOW) if scenario.layout.world > 1 else Untried("there is one rank")


def _recompute(policy: Recompute, already: str) -> Change:
    def change(scenario: Scenario) -> Scenario | Untried:
        return Untried(already) if scenario.training.recompute == policy else with_recompute(scenario, policy)

    return change


CASES: Final = (
    Case("network_less", "network links at 0.9x bandwidth", _links(network_links, LESS, _NO_NETWORK), modelled=True),
    Case("network_twice", "network links at 2x bandwidth", _links(network_links, TWICE, _NO_NETWORK), modelled=True),
    Case(
        "node_links_less",
        "NVLink (else PCIe) at 0.9x bandwidth",
        _links(_node_links, LESS, _NO_NODE_LINKS),
        modelled=True,
    ),
    Case("products_faster", "matmuls and attention 1.1x as fast", _faster_products),
    Case("twice_the_microbatches", "twice the microbatches (global batch 2x)", _larger_batch, effort=2.0),
    Case("half_the_microbatch", "microbatches of half the size (same batch)", _smaller_microbatches, effort=2.0),
    Case("slow_rank", "one slow rank, at 0.9x speed", _slow_rank, effort=SPLITS),
    Case("no_recompute", "nothing recomputed", _recompute(NoRecompute(), "nothing is recomputed now")),
    Case("full_recompute", "all layers recomputed", _recompute(FullRecompute(), "all layers are recomputed now")),
)
