"""Do predicted collectives take as long as published benchmarks say?

A benchmark is a table: one collective at many sizes, on nodes with NVSwitch and one network port per GPU under one
tier of rail switches. What one GPU's ports carry is its own (`MACHINES`), unless the row states another rate or another
network (see `interconnect_notation`). Where one process drives several GPUs (nccl-tests' -g 8, as in
Benchmarks/NCCLBandwidth.py of Azure/AI-benchmarking-guide), its thread launches the collective on one after the other,
so that it takes at least so many launches. Where calls are timed one by one, by events around each (all_reduce_bench.py
of stas00/ml-engineering, which calls this "with host overhead"), the GPU waits for the host in between: for a launch at
least, and for whatever else the framework does.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from clustersim.collectives.collnet import COLLNET_ALGORITHMS
from clustersim.collectives.library import Library, load_library
from clustersim.collectives.nccl_overrides import NcclOverrides
from clustersim.collectives.tuner import Tuner, VariantCosts, select_variants
from clustersim.common.arrays import FloatArray
from clustersim.common.errors import InputError, format_value, suggest_nearest
from clustersim.common.units import BytesPerSecond, Seconds
from clustersim.hardware.accelerator import Accelerator, load_accelerator
from clustersim.hardware.clos_fabric import ClosFabric
from clustersim.hardware.clos_spec import LeafSpec, NetworkSpec, NicSpec, NodeSpec, NvlinkSpec, Port, spread_evenly
from clustersim.hardware.ecmp import SpreadEcmp
from clustersim.hardware.link_technology import LinkTechnology
from clustersim.program.task import CollectiveType
from clustersim.validation.accelerator_lookup import accelerator_of
from clustersim.validation.cases import PUBLISHED, CannotPredictError, Case, read_cases
from clustersim.validation.cluster_lookup import interconnect_of
from clustersim.validation.comparison import Comparison
from clustersim.validation.dispatch_benchmark import KINDS, dispatched
from clustersim.validation.dispatch_benchmark import seconds_of as seconds_sent
from clustersim.validation.error_statistics import grouped
from clustersim.validation.interconnect_notation import Interconnect, Ports

SHIPPED: Final = PUBLISHED / "collectives.csv"
NEEDED: Final = (
    "case_id",
    "source",
    "gpu",
    "n_gpus",
    "gpus_per_node",
    "interconnect",
    "collective",
    "bytes",
    "time_us",
)
MEBIBYTE: Final = 2**20
MOST_GPUS: Final = 2**17
_ALGORITHMS: Final = {
    **{"": "", "ring": "ring", "tree": "tree", "collnet": "collnet"},
    **dict.fromkeys(("nvls", "nvlstree", "in_network"), "in_network"),
}
_PLACE: Final = (
    *("gpu", "n_gpus", "gpus_per_node", "nodes", "interconnect"),
    *("collective", "algo", "gpus_per_process", "timed"),
)
_ALIKE: Final = {"v100-16gb": "v100-sxm-32gb", "gh200": "h100-sxm-96gb"}  # with the same links
_EARLIER: Final = {  # networks that tables call alike, by what they join
    (LinkTechnology.EFA, LinkTechnology.NVLINK2): LinkTechnology.EFA1,
    (LinkTechnology.EFA, LinkTechnology.NVLINK3): LinkTechnology.EFA1,
}
# What torch.distributed does on the host between an event and the launch: 8 H200 timed call by call take 39 us from 32
# KiB to 512 KiB (ml-engineering), 16 to 21 us when 8 H100 are timed in a loop (dgxc-nccl).
_CALL: Final = 23e-6
_LATENCY: Final = 0.5e-6  # of any other port and switch; the library's own constants hold what is beyond


@dataclass(frozen=True, slots=True)
class Machine:
    """Ports of one GPU in bytes/s: NVLink, PCIe, network where a row states none.

    node: GPUs of a whole node, to which the ports of a row belong; domain: GPUs that NVLink joins, if not of a node;
    mesh: whether every pair of a node's GPUs has its own link, so that fewer GPUs use fewer links; host: what a
    launch takes on hosts of such GPUs, None: as the accelerator's file says.
    """

    nvlink: BytesPerSecond
    pcie: BytesPerSecond
    nic: BytesPerSecond
    library: str = "nccl"
    node: int = 8
    domain: int | None = None
    mesh: bool = False
    host: Seconds | None = None


# Launches of A100's hosts: 8 GPUs of one process take 43 us for whatever is small (azure, ml-engineering).
# NVLink and Infinity Fabric of datasheets; PCIe Gen3 to Gen6 x16. By what an accelerator's name begins with.
MACHINES: Final = {
    "v100": Machine(150e9, 16e9, 6.25e9),
    "a100": Machine(300e9, 32e9, 25e9, host=5.4e-6),
    "h100": Machine(450e9, 64e9, 50e9),
    "h200": Machine(450e9, 64e9, 50e9),
    "h800": Machine(200e9, 64e9, 50e9),
    "b200": Machine(900e9, 64e9, 50e9),
    "gb200": Machine(900e9, 64e9, 50e9, node=4, domain=72),
    "b300": Machine(900e9, 128e9, 100e9),
    "gb300": Machine(900e9, 128e9, 100e9, node=4, domain=72),
    "mi300x": Machine(448e9, 64e9, 50e9, library="rccl", mesh=True),
    "mi325x": Machine(448e9, 64e9, 50e9, library="rccl", mesh=True),
    "mi355x": Machine(537.6e9, 64e9, 50e9, library="rccl", mesh=True),
}


@dataclass(frozen=True, slots=True)
class Place:
    """On what a benchmark ran, and how: all that its times depend on, beside the sizes.

    gpu: as tables call it; accelerator: the shipped one that it is; own: its generation of NVLink; per_node: GPUs of a
    node; per_process: GPUs that one process drives; called: whether each call was timed by itself; launch: what the
    host needs for one; joined: what the row states of links; algorithm: "" if the library chose.
    """

    gpu: str
    accelerator: str
    own: LinkTechnology
    launch: Seconds
    gpus: int
    per_node: int
    per_process: int
    called: bool
    joined: Interconnect
    collective: CollectiveType
    algorithm: str

    @property
    def kind(self) -> str:
        """Of GPU: `h100` for any H100."""
        return self.accelerator.split("-")[0]

    @property
    def alike(self) -> bool:
        """Whether the GPU is another one with the same links."""
        return self.gpu in _ALIKE

    @property
    def machine(self) -> Machine:
        """The ports of a GPU."""
        return MACHINES[self.kind]

    @property
    def port(self) -> BytesPerSecond:
        """Of a GPU towards the others of its node."""
        there, whole = min(self.gpus, self.per_node), self.joined.rate or self.machine.nvlink
        return whole * ((there - 1) / (self.machine.node - 1) if self.machine.mesh else 1.0)

    @property
    def network(self) -> LinkTechnology:
        """Of what make the network is; InfiniBand where the row says nothing."""
        stated = self.joined.ports.kind if self.joined.ports else None
        network = stated or LinkTechnology.INFINIBAND
        return _EARLIER.get((network, self.generation), network)

    @property
    def generation(self) -> LinkTechnology:
        """Of NVLink or xGMI."""
        return self.joined.generation or self.own

    @property
    def domain(self) -> int:
        """GPUs that NVLink joins in a whole machine."""
        return self.joined.domain or self.machine.domain or self.per_node

    @property
    def nodes(self) -> int:
        """Nodes that it takes."""
        return -(-self.gpus // self.per_node)

    @property
    def fabric(self) -> ClosFabric:
        """Nodes with NVSwitch and one network port per GPU, under one tier of rail switches."""
        gpus, nic = self.nodes * self.per_node, Port(self._network, _LATENCY)
        node = NodeSpec(
            gpu_count=self.per_node,
            pcie=Port(self.machine.pcie, _LATENCY),
            nvlink=NvlinkSpec(self.domain, Port(self.port, _LATENCY), self.generation),
            nics=NicSpec(self.per_node, nic, self.network),
        )
        network = NetworkSpec(LeafSpec(self.nodes, self.per_node, _LATENCY), SpreadEcmp())
        return ClosFabric(*spread_evenly(node, network, gpus), gpus)

    @property
    def _network(self) -> BytesPerSecond:
        """Of one GPU: its part of the ports that the node has. More ports than GPUs take part are of a whole node."""
        ports = self.joined.ports or Ports()
        if ports.rate is None:
            return self.machine.nic
        if ports.per_gpu:
            return ports.rate
        count = ports.count or 1
        whole = max(self.machine.node, self.per_node)
        return count * ports.rate / (self.per_node if ports.count and count <= self.per_node else whole)

    def survey(self, library: Library) -> VariantCosts:
        """Cost all offers; nccl-tests' send/recv sends from each rank to the next."""
        members = np.arange(self.gpus)[None]
        if self.collective is CollectiveType.SEND_RECV:
            members = np.stack([members[0], np.roll(members[0], -1)], axis=1)
        return Tuner(self.fabric, self._switches.apply_to(library)).evaluate_variants(self.collective, members)

    @property
    def _switches(self) -> NcclOverrides:
        """What the benchmark told the library."""
        match self.algorithm:
            case "":
                return NcclOverrides()
            case "collnet":
                return NcclOverrides(
                    {self.collective: COLLNET_ALGORITHMS}, collnet_enabled=True, description=self.algorithm
                )
        return NcclOverrides(forced={self.collective: self.algorithm}, description=self.algorithm)

    def seen(self, seconds: FloatArray) -> FloatArray:
        """What the benchmark sees of collectives that take so long."""
        return np.maximum(seconds + _CALL * self.called, self.launch * self.per_process)


def read_collectives(path: Path = SHIPPED) -> list[Case]:
    """The rows of a table of collectives."""
    return read_cases(path, NEEDED)


def compare_collectives(cases: Sequence[Case]) -> list[Comparison]:
    """Predict every row, in seconds; the slowest group counts. Rows of one place are predicted together."""
    found: dict[int, Comparison] = {}
    numbered = grouped(enumerate(cases), lambda row: tuple(row[1].text(column) for column in _PLACE))
    for rows in numbered.values():
        found |= _compared(rows)
    return [found[number] for number in range(len(cases))]


def place_of(case: Case) -> Place:
    """Where and how a row was measured; raise CannotPredictError where that cannot be said."""
    accelerator = _accelerator(case)
    if accelerator.nvlink is None:
        raise CannotPredictError(f"gpu {case.text('gpu')}: it has no NVLink", owed=False)
    machine = MACHINES[accelerator.name.split("-")[0]]
    return Place(
        gpu=case.text("gpu"),
        accelerator=accelerator.name,
        launch=machine.host or accelerator.efficiency.launch_interval,
        gpus=_count(case, "n_gpus", least=2),
        per_node=_per_node(case, machine),
        per_process=case.whole("gpus_per_process", 1),
        called=_called(case),
        own=accelerator.nvlink,
        collective=_collective(case),
        joined=interconnect_of(case),
        algorithm=_algorithm(case),
    )


def seconds_of(case: Case) -> Seconds:
    """The measured time, or what the printed rate says that it was."""
    if case.text("time_us") or not case.text("algbw_GBps"):
        return case.number("time_us") * 1e-6
    return case.number("bytes") / (case.number("algbw_GBps") * 1e9)


def _compared(rows: Sequence[tuple[int, Case]]) -> dict[int, Comparison]:
    """Rows of one place, by their numbers."""
    first = rows[0][1]
    try:
        place = place_of(first)
        if place.collective.is_token_routing:
            return {number: _dispatched(case, place) for number, case in rows}
        choices = _surveyed(place)
    except CannotPredictError as refusal:
        return {number: _refused(case, str(refusal).replace(*_lines(first, case), 1), refusal) for number, case in rows}
    return {number: _comparison(case, place, choices) for number, case in rows}


def _lines(first: Case, case: Case) -> tuple[str, str]:
    """What a reason says of the first row of a place, and what it says of this one."""
    return f"line {first.line}: ", f"line {case.line}: "


def _surveyed(place: Place) -> VariantCosts:
    try:
        return place.survey(load_library(place.machine.library))
    except InputError as error:
        raise CannotPredictError("; ".join(str(error).splitlines()), owed=False) from error


def _comparison(case: Case, place: Place, choices: VariantCosts) -> Comparison:
    measured, predicted, skipped, owed = math.nan, None, None, True
    try:
        size, measured = case.number("bytes"), seconds_of(case)
        predicted = float(place.seen(select_variants(choices, size).seconds.max()))
    except CannotPredictError as refusal:
        skipped, owed = str(refusal), refusal.owed
    factors = _factors(case, str(place.nodes))
    return Comparison(case.text("case_id"), case.text("source"), measured, predicted, skipped, owed, factors)


def _dispatched(case: Case, place: Place) -> Comparison:
    """Tokens that a dispatcher's kernels sent."""
    measured, predicted, skipped, owed = math.nan, None, None, True
    try:
        sent = dispatched(case)
        measured = seconds_sent(case, sent.counted(place.fabric, place.gpus))
        predicted = sent.seconds(place.fabric, place.gpus)
    except CannotPredictError as refusal:
        skipped, owed = str(refusal), refusal.owed
    factors = _factors(case, str(place.nodes))
    return Comparison(case.text("case_id"), case.text("source"), measured, predicted, skipped, owed, factors)


def _refused(case: Case, reason: str, refusal: CannotPredictError) -> Comparison:
    """A row without a place."""
    factors = _factors(case, case.text("nodes"))
    known = (case.text("case_id"), case.text("source"), math.nan)
    return Comparison(*known, skipped=reason, expressible=refusal.owed, factors=factors)


def _factors(case: Case, nodes: str) -> dict[str, str]:
    """By what errors are grouped."""
    try:
        size = ">= 1 MiB" if case.number("bytes") >= MEBIBYTE else "below 1 MiB"
    except CannotPredictError:
        size = ""
    known = {"gpu": case.text("gpu"), "collective": case.text("collective"), "size": size, "nodes": nodes}
    return {name: value or "not stated" for name, value in known.items()}


def _accelerator(case: Case) -> Accelerator:
    """The accelerator, of which a machine must be known."""
    alike = _ALIKE.get(case.text("gpu"))
    accelerator = load_accelerator(alike) if alike else accelerator_of(case)
    name = accelerator.name
    if name.split("-")[0] not in MACHINES or "-pcie-" in name:
        known = ", ".join(MACHINES)
        raise CannotPredictError(f"gpu {case.text('gpu')}: no machine of it is known; of {known} one is", owed=False)
    return accelerator


def _count(case: Case, column: str, default: int | None = None, least: int = 1) -> int:
    """A number of GPUs that a cluster may have."""
    count = case.whole(column, default)
    if not least <= count <= MOST_GPUS:
        wrong = f"too small; {least} is the least" if count < least else f"too large; {MOST_GPUS:,} is the most"
        raise CannotPredictError(f"line {case.line}: {column} {count:,} is {wrong}", owed=False)
    return count


def _per_node(case: Case, machine: Machine) -> int:
    """GPUs of a node, which must make as many nodes as the row states, if it does."""
    gpus, per_node = case.whole("n_gpus"), _count(case, "gpus_per_node", machine.node)
    nodes = -(-gpus // per_node)
    if case.whole("nodes", nodes) != nodes:
        raise CannotPredictError(
            f"line {case.line}: nodes {case.text('nodes')}: {gpus:,} GPUs, {per_node:,} on a node, are on {nodes:,}",
            owed=False,
        )
    return per_node


def _called(case: Case) -> bool:
    """Whether each call was timed by itself."""
    timed = case.text("timed")
    if timed not in ("", "call"):
        raise CannotPredictError(
            f"line {case.line}: timed {format_value(timed)}: write call where each call was timed by itself, else nothing",
            owed=False,
        )
    return timed == "call"


def _collective(case: Case) -> CollectiveType:
    name, known = (
        case.text("collective"),
        {collective_type.value for collective_type in CollectiveType if not collective_type.is_token_routing},
    )
    if name in KINDS:
        return KINDS[name]
    if name.endswith("_lowlatency"):
        raise CannotPredictError(f"collective {name}: kernels for decoding, which training does not use", owed=False)
    if name not in known:
        raise CannotPredictError(
            f"collective {name or 'is not stated'}: not modelled; {suggest_nearest(name, {*known, *KINDS})}", owed=False
        )
    return CollectiveType(name)


def _algorithm(case: Case) -> str:
    name = case.text("algo").lower()
    if name not in _ALGORITHMS:
        raise CannotPredictError(
            f"algo {case.text('algo')}: not modelled; {suggest_nearest(name, _ALGORITHMS)}", owed=False
        )
    return _ALGORITHMS[name]
