"""Do predicted collectives take as long as published benchmarks say?

A benchmark is one collective at many sizes, on nodes with NVSwitch and one network port per GPU under one
tier of rail switches. Link rates are those of the GPU's family (`LINK_RATES_BY_GPU`), unless the row states
another rate or network (see `interconnect_notation`). If one process drives several GPUs (nccl-tests' -g 8,
as in Benchmarks/NCCLBandwidth.py of Azure/AI-benchmarking-guide), its thread launches the collective on
each in turn, so the time is at least that many launches. If calls are timed individually with events
(all_reduce_bench.py of stas00/ml-engineering, which calls this "with host overhead"), the GPU waits for the
host in between: at least for a launch, and for the framework's overhead.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from clustersim.collectives.collnet import COLLNET_ALGORITHMS
from clustersim.collectives.library import Library
from clustersim.collectives.library_files import load_library
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
from clustersim.validation.accelerator_lookup import case_accelerator
from clustersim.validation.cases import PUBLISHED_FOLDER, CannotPredictError, ValidationCase, read_cases
from clustersim.validation.cluster_lookup import case_interconnect
from clustersim.validation.comparison import CaseComparison
from clustersim.validation.dispatch_benchmark import COLLECTIVE_BY_NAME, parse_dispatch_benchmark
from clustersim.validation.dispatch_benchmark import measured_dispatch_seconds as seconds_sent
from clustersim.validation.error_statistics import group_by
from clustersim.validation.interconnect_notation import InterconnectSpec, NetworkPorts

PUBLISHED_TABLE: Final = PUBLISHED_FOLDER / "collectives.csv"
REQUIRED_COLUMNS: Final = (
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
MAX_GPUS: Final = 2**17
_ALGORITHMS: Final = {
    **{"": "", "ring": "ring", "tree": "tree", "collnet": "collnet"},
    **dict.fromkeys(("nvls", "nvlstree"), "nvls"),
}
_BENCHMARK_COLUMNS: Final = (
    *("gpu", "n_gpus", "gpus_per_node", "nodes", "interconnect"),
    *("collective", "algo", "gpus_per_process", "timed"),
)
_EQUIVALENT_GPUS: Final = {"v100-16gb": "v100-sxm-32gb", "gh200": "h100-sxm-96gb"}  # GPUs with equal links
_FIRST_GENERATION_NETWORKS: Final = {  # networks for which tables use one name, by scale-up technology
    (LinkTechnology.EFA, LinkTechnology.NVLINK2): LinkTechnology.EFA1,
    (LinkTechnology.EFA, LinkTechnology.NVLINK3): LinkTechnology.EFA1,
}
# Host overhead of torch.distributed between an event and the launch: 8 H200 timed per call take 39 us from 32
# KiB to 512 KiB (ml-engineering), 16 to 21 us when 8 H100 are timed in a loop (dgxc-nccl).
_TORCH_CALL_OVERHEAD: Final = 23e-6
_PORT_LATENCY: Final = 0.5e-6  # latency of any other port and switch; further latency is in the library's constants


@dataclass(frozen=True, slots=True)
class GpuLinkRates:
    """Link rates of one GPU in bytes/s per direction: NVLink, PCIe, NIC if a row states none.

    gpus_per_full_node: GPUs of a full node, to which a row's ports belong; nvlink_domain_size: GPUs, None: a
    node; has_direct_links: each pair of a node's GPUs has its own link, so that fewer GPUs use fewer links;
    launch_seconds: launch time on hosts of such GPUs, None: as in the accelerator's file.
    """

    nvlink: BytesPerSecond
    pcie: BytesPerSecond
    nic: BytesPerSecond
    library: str = "nccl"
    gpus_per_full_node: int = 8
    nvlink_domain_size: int | None = None
    has_direct_links: bool = False
    launch_seconds: Seconds | None = None


# Launch time of A100 hosts: 8 GPUs of one process take 43 us for any small size (azure, ml-engineering).
# NVLink and Infinity Fabric rates of datasheets; PCIe Gen3 to Gen6 x16. Key: prefix of the accelerator's name.
LINK_RATES_BY_GPU: Final = {
    "v100": GpuLinkRates(150e9, 16e9, 6.25e9),
    "a100": GpuLinkRates(300e9, 32e9, 25e9, launch_seconds=5.4e-6),
    "h100": GpuLinkRates(450e9, 64e9, 50e9),
    "h200": GpuLinkRates(450e9, 64e9, 50e9),
    "h800": GpuLinkRates(200e9, 64e9, 50e9),
    "b200": GpuLinkRates(900e9, 64e9, 50e9),
    "gb200": GpuLinkRates(900e9, 64e9, 50e9, gpus_per_full_node=4, nvlink_domain_size=72),
    "b300": GpuLinkRates(900e9, 128e9, 100e9),
    "gb300": GpuLinkRates(900e9, 128e9, 100e9, gpus_per_full_node=4, nvlink_domain_size=72),
    "mi300x": GpuLinkRates(448e9, 64e9, 50e9, library="rccl", has_direct_links=True),
    "mi325x": GpuLinkRates(448e9, 64e9, 50e9, library="rccl", has_direct_links=True),
    "mi355x": GpuLinkRates(537.6e9, 64e9, 50e9, library="rccl", has_direct_links=True),
}


@dataclass(frozen=True, slots=True)
class CollectiveBenchmark:
    """Hardware and settings of one benchmark: everything that its times depend on except the sizes.

    gpu: the table's name; accelerator: the packaged one; nvlink_technology: its own NVLink generation;
    gpus_per_node; gpus_per_process: driven by one process; is_timed_per_call: each call was timed individually;
    launch_seconds: host time per launch; interconnect: links that the row states; algorithm: "" if the library
    selected it.
    """

    gpu: str
    accelerator: str
    nvlink_technology: LinkTechnology
    launch_seconds: Seconds
    gpu_count: int
    gpus_per_node: int
    gpus_per_process: int
    is_timed_per_call: bool
    interconnect: InterconnectSpec
    collective: CollectiveType
    algorithm: str

    @property
    def gpu_family(self) -> str:
        """GPU family: `h100` for any H100."""
        return self.accelerator.split("-")[0]

    @property
    def is_equivalent_gpu(self) -> bool:
        """Whether the link rates are those of another GPU with equal links."""
        return self.gpu in _EQUIVALENT_GPUS

    @property
    def link_rates(self) -> GpuLinkRates:
        """Link rates of the GPU family."""
        return LINK_RATES_BY_GPU[self.gpu_family]

    @property
    def scale_up_bandwidth(self) -> BytesPerSecond:
        """Bytes/s of a GPU to the others of its node."""
        participants, full_rate = (
            min(self.gpu_count, self.gpus_per_node),
            self.interconnect.nvlink_bandwidth or self.link_rates.nvlink,
        )
        return full_rate * (
            (participants - 1) / (self.link_rates.gpus_per_full_node - 1) if self.link_rates.has_direct_links else 1.0
        )

    @property
    def network_technology(self) -> LinkTechnology:
        """Network technology; InfiniBand if the row states none."""
        stated_technology = self.interconnect.ports.technology if self.interconnect.ports else None
        network = stated_technology or LinkTechnology.INFINIBAND
        return _FIRST_GENERATION_NETWORKS.get((network, self.scale_up_technology), network)

    @property
    def scale_up_technology(self) -> LinkTechnology:
        """Scale-up technology: NVLink or xGMI generation."""
        return self.interconnect.technology or self.nvlink_technology

    @property
    def nvlink_domain_size(self) -> int:
        """GPUs of an NVLink domain."""
        return self.interconnect.nvlink_domain_size or self.link_rates.nvlink_domain_size or self.gpus_per_node

    @property
    def node_count(self) -> int:
        """Number of nodes."""
        return -(-self.gpu_count // self.gpus_per_node)

    @property
    def fabric(self) -> ClosFabric:
        """Nodes with NVSwitch and one network port per GPU, under one tier of rail switches."""
        gpus, nic = self.node_count * self.gpus_per_node, Port(self._nic_bandwidth, _PORT_LATENCY)
        node = NodeSpec(
            gpu_count=self.gpus_per_node,
            pcie=Port(self.link_rates.pcie, _PORT_LATENCY),
            nvlink=NvlinkSpec(
                self.nvlink_domain_size, Port(self.scale_up_bandwidth, _PORT_LATENCY), self.scale_up_technology
            ),
            nics=NicSpec(self.gpus_per_node, nic, self.network_technology),
        )
        network = NetworkSpec(LeafSpec(self.node_count, self.gpus_per_node, _PORT_LATENCY), SpreadEcmp())
        return ClosFabric(*spread_evenly(node, network, gpus), gpus)

    @property
    def _nic_bandwidth(self) -> BytesPerSecond:
        """NIC bandwidth per GPU in bytes/s; ports beyond the number of participating GPUs are of a full node."""
        ports = self.interconnect.ports or NetworkPorts()
        if ports.rate is None:
            return self.link_rates.nic
        if ports.per_gpu:
            return ports.rate
        count = ports.count or 1
        full_node = max(self.link_rates.gpus_per_full_node, self.gpus_per_node)
        return count * ports.rate / (self.gpus_per_node if ports.count and count <= self.gpus_per_node else full_node)

    def evaluate_variants(self, library: Library) -> VariantCosts:
        """Cost of all algorithm variants; nccl-tests' send/recv sends from each rank to the next."""
        members = np.arange(self.gpu_count)[None]
        if self.collective is CollectiveType.SEND_RECV:
            members = np.stack([members[0], np.roll(members[0], -1)], axis=1)
        return Tuner(self.fabric, self._nccl_overrides.apply_to(library)).evaluate_variants(self.collective, members)

    @property
    def _nccl_overrides(self) -> NcclOverrides:
        """The library overrides of the benchmark."""
        match self.algorithm:
            case "":
                return NcclOverrides()
            case "collnet":
                return NcclOverrides(
                    {self.collective: COLLNET_ALGORITHMS}, collnet_enabled=True, description=self.algorithm
                )
        return NcclOverrides(forced={self.collective: self.algorithm}, description=self.algorithm)

    def benchmark_seconds(self, seconds: FloatArray) -> FloatArray:
        """The times that the benchmark reports for collectives of these durations."""
        return np.maximum(
            seconds + _TORCH_CALL_OVERHEAD * self.is_timed_per_call, self.launch_seconds * self.gpus_per_process
        )


def read_collectives(path: Path = PUBLISHED_TABLE) -> list[ValidationCase]:
    """Read the cases of a table of collectives."""
    return read_cases(path, REQUIRED_COLUMNS)


def compare_collectives(cases: Sequence[ValidationCase]) -> list[CaseComparison]:
    """Predict every case, in seconds (slowest group); cases of one benchmark are predicted together."""
    comparisons: dict[int, CaseComparison] = {}
    benchmarks = group_by(enumerate(cases), lambda row: tuple(row[1].text(column) for column in _BENCHMARK_COLUMNS))
    for rows in benchmarks.values():
        comparisons |= _compare_benchmark(rows)
    return [comparisons[case_index] for case_index in range(len(cases))]


def parse_benchmark(case: ValidationCase) -> CollectiveBenchmark:
    """Parse the benchmark of a row; raises CannotPredictError if it cannot be modelled."""
    accelerator = _accelerator(case)
    if accelerator.nvlink is None:
        raise CannotPredictError(f"gpu {case.text('gpu')}: it has no NVLink", is_expressible=False)
    link_rates = LINK_RATES_BY_GPU[accelerator.name.split("-")[0]]
    return CollectiveBenchmark(
        gpu=case.text("gpu"),
        accelerator=accelerator.name,
        launch_seconds=link_rates.launch_seconds or accelerator.efficiency.launch_interval,
        gpu_count=_gpu_count(case, "n_gpus", minimum=2),
        gpus_per_node=_gpus_per_node(case, link_rates),
        gpus_per_process=case.positive_int("gpus_per_process", 1),
        is_timed_per_call=_is_timed_per_call(case),
        nvlink_technology=accelerator.nvlink,
        collective=_collective_type(case),
        interconnect=case_interconnect(case),
        algorithm=_algorithm_name(case),
    )


def measured_seconds(case: ValidationCase) -> Seconds:
    """The measured time; if only a bandwidth is printed, the time that it implies."""
    if case.text("time_us") or not case.text("algbw_GBps"):
        return case.positive_float("time_us") * 1e-6
    return case.positive_float("bytes") / (case.positive_float("algbw_GBps") * 1e9)


def _compare_benchmark(indexed_cases: Sequence[tuple[int, ValidationCase]]) -> dict[int, CaseComparison]:
    """Comparisons of one benchmark by case index."""
    first_case = indexed_cases[0][1]
    try:
        benchmark = parse_benchmark(first_case)
        if benchmark.collective.is_token_routing:
            return {case_index: _compare_dispatch(case, benchmark) for case_index, case in indexed_cases}
        variant_costs = _benchmark_costs(benchmark)
    except CannotPredictError as error:
        return {
            case_index: _skipped_comparison(case, str(error).replace(*_line_prefixes(first_case, case), 1), error)
            for case_index, case in indexed_cases
        }
    return {case_index: _compare_case(case, benchmark, variant_costs) for case_index, case in indexed_cases}


def _line_prefixes(first: ValidationCase, case: ValidationCase) -> tuple[str, str]:
    """The line prefixes of a benchmark's first row, in which its errors are raised, and of this row."""
    return f"line {first.line_number}: ", f"line {case.line_number}: "


def _benchmark_costs(benchmark: CollectiveBenchmark) -> VariantCosts:
    try:
        return benchmark.evaluate_variants(load_library(benchmark.link_rates.library))
    except InputError as error:
        raise CannotPredictError("; ".join(str(error).splitlines()), is_expressible=False) from error


def _compare_case(case: ValidationCase, benchmark: CollectiveBenchmark, variant_costs: VariantCosts) -> CaseComparison:
    measured, predicted, skip_reason, is_expressible = math.nan, None, None, True
    try:
        size, measured = case.positive_float("bytes"), measured_seconds(case)
        predicted = float(benchmark.benchmark_seconds(select_variants(variant_costs, size).seconds.max()))
    except CannotPredictError as error:
        skip_reason, is_expressible = str(error), error.is_expressible
    groupings = _groupings(case, str(benchmark.node_count))
    return CaseComparison(
        case.text("case_id"), case.text("source"), measured, predicted, skip_reason, is_expressible, groupings
    )


def _compare_dispatch(case: ValidationCase, benchmark: CollectiveBenchmark) -> CaseComparison:
    """Comparison of a dispatcher kernel's row."""
    measured, predicted, skip_reason, is_expressible = math.nan, None, None, True
    try:
        dispatch = parse_dispatch_benchmark(case)
        measured = seconds_sent(case, dispatch.counted_bytes(benchmark.fabric, benchmark.gpu_count))
        predicted = dispatch.predicted_seconds(benchmark.fabric, benchmark.gpu_count)
    except CannotPredictError as error:
        skip_reason, is_expressible = str(error), error.is_expressible
    groupings = _groupings(case, str(benchmark.node_count))
    return CaseComparison(
        case.text("case_id"), case.text("source"), measured, predicted, skip_reason, is_expressible, groupings
    )


def _skipped_comparison(case: ValidationCase, reason: str, error: CannotPredictError) -> CaseComparison:
    """Comparison of a row whose benchmark cannot be modelled."""
    groupings = _groupings(case, case.text("nodes"))
    identity = (case.text("case_id"), case.text("source"), math.nan)
    return CaseComparison(*identity, skip_reason=reason, is_expressible=error.is_expressible, groupings=groupings)


def _groupings(case: ValidationCase, nodes: str) -> dict[str, str]:
    """Labels by which errors are grouped."""
    try:
        size = ">= 1 MiB" if case.positive_float("bytes") >= MEBIBYTE else "below 1 MiB"
    except CannotPredictError:
        size = ""
    labels = {"gpu": case.text("gpu"), "collective": case.text("collective"), "size": size, "nodes": nodes}
    return {name: value or "not stated" for name, value in labels.items()}


def _accelerator(case: ValidationCase) -> Accelerator:
    """The accelerator, whose link rates must be known."""
    equivalent = _EQUIVALENT_GPUS.get(case.text("gpu"))
    accelerator = load_accelerator(equivalent) if equivalent else case_accelerator(case)
    name = accelerator.name
    if name.split("-")[0] not in LINK_RATES_BY_GPU or "-pcie-" in name:
        supported = ", ".join(LINK_RATES_BY_GPU)
        raise CannotPredictError(
            f"gpu {case.text('gpu')}: no machine of it is known; of {supported} one is", is_expressible=False
        )
    return accelerator


def _gpu_count(case: ValidationCase, column: str, default: int | None = None, minimum: int = 1) -> int:
    """A GPU count within the valid range."""
    count = case.positive_int(column, default)
    if not minimum <= count <= MAX_GPUS:
        problem = f"too small; {minimum} is the least" if count < minimum else f"too large; {MAX_GPUS:,} is the most"
        raise CannotPredictError(f"line {case.line_number}: {column} {count:,} is {problem}", is_expressible=False)
    return count


def _gpus_per_node(case: ValidationCase, link_rates: GpuLinkRates) -> int:
    """GPUs per node; must be consistent with the number of nodes, if stated."""
    gpus, per_node = case.positive_int("n_gpus"), _gpu_count(case, "gpus_per_node", link_rates.gpus_per_full_node)
    nodes = -(-gpus // per_node)
    if case.positive_int("nodes", nodes) != nodes:
        raise CannotPredictError(
            f"line {case.line_number}: nodes {case.text('nodes')}: {gpus:,} GPUs, {per_node:,} on a node, are on "
            f"{nodes:,}",
            is_expressible=False,
        )
    return per_node


def _is_timed_per_call(case: ValidationCase) -> bool:
    """Whether each call was timed individually."""
    timed = case.text("timed")
    if timed not in ("", "call"):
        raise CannotPredictError(
            f"line {case.line_number}: timed {format_value(timed)}: write call where each call was timed by itself, "
            "else nothing",
            is_expressible=False,
        )
    return timed == "call"


def _collective_type(case: ValidationCase) -> CollectiveType:
    name, supported = (
        case.text("collective"),
        {collective_type.value for collective_type in CollectiveType if not collective_type.is_token_routing},
    )
    if name in COLLECTIVE_BY_NAME:
        return COLLECTIVE_BY_NAME[name]
    if name.endswith("_lowlatency"):
        raise CannotPredictError(
            f"collective {name}: kernels for decoding, which training does not use", is_expressible=False
        )
    if name not in supported:
        raise CannotPredictError(
            f"collective {name or 'is not stated'}: not modelled; "
            f"{suggest_nearest(name, {*supported, *COLLECTIVE_BY_NAME})}",
            is_expressible=False,
        )
    return CollectiveType(name)


def _algorithm_name(case: ValidationCase) -> str:
    name = case.text("algo").lower()
    if name not in _ALGORITHMS:
        raise CannotPredictError(
            f"algo {case.text('algo')}: not modelled; {suggest_nearest(name, _ALGORITHMS)}", is_expressible=False
        )
    return _ALGORITHMS[name]
