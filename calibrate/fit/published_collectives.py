"""Which published benchmarks of collectives does the project carry, and on what do they run?

`published/collectives.csv` holds one row per message size, with its source and the place in it. A benchmark is a table:
one collective at many sizes, on nodes with NVSwitch and one network port per GPU under one tier of rail switches. Where
one process drives several GPUs (nccl-tests' -g 8, as in Benchmarks/NCCLBandwidth.py of Azure/AI-benchmarking-guide),
its thread launches the collective on one after the other, so that it takes at least so many launches. Where calls are
timed one by one, by events around each (all_reduce_bench.py of stas00/ml-engineering, which calls this "with host
overhead"), the GPU waits for the host in between: for a launch at least, and for whatever else the framework does.
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np

from clustersim.collectives.choose import Choices, Surveyor
from clustersim.collectives.library import Library
from clustersim.collectives.phase import FloatArray, Mask
from clustersim.hardware.accelerator import load_accelerator
from clustersim.hardware.clos_fabric import ClosFabric
from clustersim.hardware.routing import Spread
from clustersim.hardware.shape import Leaf, Network, Nics, Node, NvLink, Port
from clustersim.program.task import Collective
from clustersim.units import Bytes, BytesPerSecond, Seconds

_ACCELERATOR: Final = {"b200": "b200-sxm-180gb"}  # of what tables call a GPU
PUBLISHED: Final = Path(__file__).parents[1] / "published" / "collectives.csv"
_MEBIBYTE: Final = 2**20
_NVLINK: Final = {"a100": 300e9, "h100": 450e9, "h200": 450e9, "b200": 900e9}  # bytes/s of a GPU's port, datasheets
_NIC: Final = {"a100": 25e9, "h100": 50e9, "h200": 50e9, "b200": 50e9}  # bytes/s of network per GPU in these tables
_PCIE: Final = {"a100": 32e9, "h100": 64e9, "h200": 64e9, "b200": 64e9}  # Gen4 x16, Gen5 x16
# Of a port, so that a message takes 20 us to another node: net_lat of p5 in src/tuner/nccl_ofi_model.cpp
# (aws/aws-ofi-nccl@2daf7d30), "2 nodes, 8B RDMA w/imm"; 18 us on p5en.
_EFA: Final = 9e-6


@dataclass(frozen=True)
class Benchmark:
    """One table: a collective at many sizes.

    per_process: GPUs that one process drives; called: whether each call was timed by itself; algorithm: "" if the
    library chose; sizes: bytes; measured: seconds.
    """

    source: str
    locator: str
    gpu: str
    gpus: int
    per_node: int
    per_process: int
    called: bool
    interconnect: str
    collective: Collective
    algorithm: str
    sizes: tuple[Bytes, ...]
    measured: tuple[Seconds, ...]

    @property
    def kind(self) -> str:
        """Of GPU: `h100` for any H100."""
        return self.gpu.split("-")[0]

    @property
    def port(self) -> BytesPerSecond:
        """Of a GPU's NVLink."""
        return _NVLINK[self.kind]

    @property
    def accelerator(self) -> str:
        """The shipped accelerator that the GPU is."""
        return _ACCELERATOR.get(self.gpu, self.gpu)

    @property
    def fitted(self) -> bool:
        """Whether the table takes part in a fit."""
        return not (self.over_efa or self.called)

    def seen(self, seconds: FloatArray) -> FloatArray:
        """What the benchmark sees of collectives that take so long."""
        return np.maximum(seconds + self._launch * self.called, self._launch * self.per_process)

    @cached_property
    def large(self) -> Mask:
        """Which sizes are 1 MiB or more."""
        return np.array(self.sizes) >= _MEBIBYTE

    @cached_property
    def _launch(self) -> Seconds:
        """What the host needs for one."""
        return load_accelerator(self.accelerator).efficiency.launch_interval

    @property
    def over_efa(self) -> bool:
        """Whether the network is AWS's."""
        return "efa" in self.interconnect

    @cached_property
    def fabric(self) -> ClosFabric:
        """Nodes with NVSwitch and one network port per GPU, under one tier of rail switches."""
        kind = self.kind
        node = Node(
            gpus=self.per_node,
            pcie=Port(_PCIE[kind], 0.5e-6),
            nvlink=NvLink(self.per_node, Port(_NVLINK[kind], 0.5e-6)),
            nics=Nics(self.per_node, Port(_NIC[kind], _EFA if self.over_efa else 0.5e-6)),
        )
        nodes = -(-self.gpus // self.per_node)
        return ClosFabric(node, Network(Leaf(nodes, self.per_node, 0.5e-6), Spread()), nodes * self.per_node)

    def survey(self, library: Library) -> Choices:
        """Cost all offers; nccl-tests' send/recv sends from each rank to the next."""
        members = np.arange(self.gpus)[None]
        if self.collective is Collective.SEND_RECV:
            members = np.stack([members[0], np.roll(members[0], -1)], axis=1)
        return Surveyor(self.fabric, library).survey(self.collective, members, self.algorithm or None)


def read_benchmarks(path: Path = PUBLISHED) -> tuple[Benchmark, ...]:
    """Group the rows of the published tables."""
    tables: dict[tuple[str, ...], list[Mapping[str, str]]] = {}
    keys = ("source", "locator", "gpu", "gpus", "gpus_per_node", "interconnect", "library", "collective", "algorithm")
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            tables.setdefault(tuple(row[key] for key in keys), []).append(row)
    return tuple(_benchmark(rows) for rows in tables.values())


def _benchmark(rows: Sequence[Mapping[str, str]]) -> Benchmark:
    first = rows[0]
    return Benchmark(
        source=first["source"],
        locator=first["locator"],
        gpu=first["gpu"],
        gpus=int(first["gpus"]),
        per_node=int(first["gpus_per_node"]),
        per_process=int(first["gpus_per_process"]),
        called=first["timed"] == "call",
        interconnect=first["interconnect"],
        collective=Collective(first["collective"]),
        algorithm=first["algorithm"],
        sizes=tuple(float(row["bytes"]) for row in rows),
        measured=tuple(float(row["time_us"]) * 1e-6 for row in rows),
    )
