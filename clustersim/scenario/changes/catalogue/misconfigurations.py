"""What is often set up wrongly on a cluster: causes of a longer step, each as large as it is or not at all.

Where a change has several sizes (the speed of an Ethernet port, how many NICs are used), they are its alternatives.

- NCCL on sockets: without InfiniBand's or the cloud's plugin, or with NCCL_IB_DISABLE=1 or NCCL_SOCKET_IFNAME of the
  management network, NCCL sends over one Ethernet port of a node ("NET/Socket" in its log). Rates of ports: IEEE 802.3.
- One NIC: NCCL_IB_HCA, or a container that sees one device, leaves one of a node's NICs.
- PCIe in place of NVLink: NVLink is down (`nvidia-smi nvlink --status`), or NCCL_P2P_DISABLE=1: traffic inside a node
  is as fast as one GPU's PCIe link, or as its part of a link that two or four GPUs share (PCIe switches to the host, as
  `nvidia-smi topo -m` shows them). Links between sockets are left out.
- No peer access: GPUs without NVLink exchange through host memory (NCCL_P2P_DISABLE, PCIe's access control services, a
  virtual machine), so that all behind one link to the host share it (public reports: Lightning-AI/litgpt, issue 1472;
  tatsu-lab/stanford_alpaca, issue 32).
- More accumulation: a script's gradient_accumulation_steps is that of all GPUs, or has a default (public reports:
  karpathy/nanoGPT, issue 110 and pull request 225).
- No autocast: a run without bf16 or fp16 computes in FP32, or in TF32 where that is allowed.
- Sharded further: ZeRO-2 reduces gradients in every microbatch, ZeRO-3 (FSDP over all ranks) gathers weights as well
  (a public report: EleutherAI/gpt-neox, issue 965).
- Natural routing: ranges of `results.natural_routing`.
"""

import math
from collections.abc import Callable, Iterator
from typing import Final

from clustersim.common.dtypes import DType
from clustersim.common.errors import InputError
from clustersim.hardware.topology import LinkKind
from clustersim.model.moe_expert_load import RandomExpertLoad
from clustersim.scenario.changes.expert_parallel import with_expert_load
from clustersim.scenario.changes.links import (
    network_link_kinds,
    pcie_link_kinds,
    pcie_over_nvlink,
    with_link_bandwidth,
)
from clustersim.scenario.changes.scenario_change import (
    Baseline,
    ChangedScenario,
    ChangeSubject,
    ChangeUse,
    InapplicableChangeError,
    Plausibility,
    ScenarioChange,
    UnaffectedScenarioError,
)
from clustersim.scenario.changes.training import with_global_batch_factor
from clustersim.scenario.scenario import Scenario

_ETHERNET_GBIT: Final = (200, 100, 50, 40, 25, 10, 1)
"""Rates of a node's port, in Gbit/s, fastest first (IEEE 802.3)."""
_GPUS_PER_HOST_LINK: Final = (1, 2, 4, 8)
_ACCUMULATION_FACTORS: Final = (2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 40, 48, 64)
_USUAL_ACCUMULATION: Final = 8
"""Scripts' defaults are up to it: 5 of nanoGPT, 8 of Llama-Factory."""
MAX_ROUTED_RANKS: Final = 256
"""Ranks that all differ and are simulated in some tens of seconds."""
_ROUTING_VARIATIONS: Final = (0.05, 0.4)
"""Coefficients of variation of the tokens per rank with natural routing (`results.natural_routing`)."""


def _overridden(scenario: Scenario, *overrides: str, detail: str) -> ChangedScenario | None:
    """The scenario with settings of its cluster; None where the cluster does not allow them."""
    try:
        return ChangedScenario(scenario.with_overrides(*overrides, suggest=False), detail, overrides)
    except InputError:
        return None


def _require_network(scenario: Scenario) -> None:
    if not network_link_kinds(scenario):
        raise UnaffectedScenarioError("all ranks are on one node")


def _sockets(baseline: Baseline) -> Iterator[ChangedScenario]:
    scenario = baseline.scenario
    _require_network(scenario)
    for rate in _ETHERNET_GBIT:
        nic = f"cluster.node.nic={{per_node: 1, bandwidth: {rate} Gbit/s, network: tcp}}"
        changed = _overridden(scenario, nic, detail=f" of {rate} Gbit/s")
        if changed is not None:
            yield changed


def _one_nic(baseline: Baseline) -> Iterator[ChangedScenario]:
    _require_network(baseline.scenario)
    changed = _overridden(baseline.scenario, "cluster.node.nic.per_node=1", detail="")
    if changed is None or changed.scenario.cluster == baseline.scenario.cluster:
        raise InapplicableChangeError("each node has one NIC, or its NICs are not counted")
    yield changed


def _without_nvlink(baseline: Baseline) -> Iterator[ChangedScenario]:
    ratio = pcie_over_nvlink(baseline.scenario)
    if ratio is None or ratio >= 1.0:
        raise UnaffectedScenarioError("NVLink is not used, or PCIe is not known")
    for sharing in _GPUS_PER_HOST_LINK:
        scenario = with_link_bandwidth(baseline.scenario, (LinkKind.NVLINK,), ratio / sharing)
        yield ChangedScenario(scenario, f", {sharing} GPUs share a host link" if sharing > 1 else "")


def _without_peer_access(baseline: Baseline) -> Iterator[ChangedScenario]:
    kinds = pcie_link_kinds(baseline.scenario)
    if not kinds:
        raise UnaffectedScenarioError("GPUs have NVLink, or there is one")
    for sharing in _GPUS_PER_HOST_LINK[1:]:
        scenario = with_link_bandwidth(baseline.scenario, kinds, 1.0 / sharing)
        yield ChangedScenario(scenario, f", {sharing} GPUs share a host link")


def _more_accumulation(baseline: Baseline) -> Iterator[ChangedScenario]:
    for factor in _ACCUMULATION_FACTORS:
        effort = math.log(max(1.0, factor / _USUAL_ACCUMULATION))
        scenario = with_global_batch_factor(baseline.scenario, factor)
        yield ChangedScenario(scenario, f": {factor} times as many", effort=effort)


def _without_autocast(baseline: Baseline) -> Iterator[ChangedScenario]:
    scenario = baseline.scenario
    if scenario.training.recipe.matmul_formats.forward in (DType.FP32, DType.TF32):
        raise InapplicableChangeError("matmuls are in FP32 or TF32")
    for dtype in (DType.TF32, DType.FP32):
        changed = _overridden(scenario, f"training.precision.compute={dtype.value}", detail=f": {dtype.value.upper()}")
        if changed is not None:
            yield changed


def _sharded_further(baseline: Baseline) -> Iterator[ChangedScenario]:
    layout = baseline.scenario.layout
    if layout.is_pipelined or layout.as_configured.dp == 1:
        raise InapplicableChangeError("gradients are reduced once a step, with a pipeline; or there are no replicas")
    has_replicas = layout.data.shard_size not in (None, layout.cp * layout.dp)
    stage = layout.data.zero_stage - 1 if has_replicas else layout.data.zero_stage
    for higher in range(max(stage + 1, 2), 4):
        detail = f": ZeRO-{higher} over all ranks"
        changed = _overridden(baseline.scenario, f"layout.data=zero{higher}", detail=detail)
        if changed is not None:
            yield changed


def _natural_routing(baseline: Baseline) -> Iterator[ChangedScenario]:
    scenario = baseline.scenario
    moes = scenario.model.distinct_routed_moes
    if scenario.layout.ep == 1 or scenario.training.expert_load or any(moe.capacity_factor is not None for moe in moes):
        raise InapplicableChangeError("each rank gets as many tokens whoever is chosen, or loads are stated")
    if scenario.layout.world_size > MAX_ROUTED_RANKS:
        raise InapplicableChangeError("ranks that all differ take long to simulate")
    experts_per_rank = max(moe.experts for moe in moes) // scenario.layout.ep
    for variation in _ROUTING_VARIATIONS:
        load = RandomExpertLoad(variation * math.sqrt(experts_per_rank))
        yield ChangedScenario(with_expert_load(scenario, load), f": tokens of a rank vary by {variation:.0%}")


def _misconfiguration(
    name: str,
    label: str,
    subject: ChangeSubject,
    apply: Callable[[Baseline], Iterator[ChangedScenario]],
    plausibility: Plausibility = Plausibility.COMMON,
) -> ScenarioChange:
    """A cause of a longer step; those of links and loads may have any size between their alternatives."""
    is_graded = subject in (ChangeSubject.LINKS, ChangeSubject.EXPERT_LOAD)
    return ScenarioChange(
        name, label, subject, ChangeUse.LONGER_STEP, apply, plausibility=plausibility, is_graded=is_graded
    )


MISCONFIGURATIONS: Final = (
    _misconfiguration(
        "nccl_on_sockets", "NCCL on sockets, over one Ethernet port a node", ChangeSubject.LINKS, _sockets
    ),
    _misconfiguration("one_nic", "one NIC of each node in use (NCCL_IB_HCA)", ChangeSubject.LINKS, _one_nic),
    _misconfiguration(
        "no_nvlink", "PCIe in place of NVLink (NVLink down, NCCL_P2P_DISABLE)", ChangeSubject.LINKS, _without_nvlink
    ),
    _misconfiguration(
        "no_peer_access",
        "GPUs exchange through host memory (no peer access)",
        ChangeSubject.LINKS,
        _without_peer_access,
    ),
    _misconfiguration(
        "more_accumulation",
        "a step accumulates more microbatches than stated",
        ChangeSubject.BATCH,
        _more_accumulation,
        Plausibility.POSSIBLE,
    ),
    _misconfiguration(
        "no_autocast",
        "matmuls not in 16 bits (no autocast)",
        ChangeSubject.PRECISION,
        _without_autocast,
        Plausibility.UNUSUAL,
    ),
    _misconfiguration(
        "sharded_further",
        "states sharded further than stated",
        ChangeSubject.LAYOUT,
        _sharded_further,
        Plausibility.POSSIBLE,
    ),
    _misconfiguration(
        "natural_routing",
        "experts chosen freely, not evenly",
        ChangeSubject.EXPERT_LOAD,
        _natural_routing,
    ),
)
