"""Which processes measure together, and which of them form groups?

torchrun starts the processes and sets in their environment how many there are, and how many on each node. A
layout's groups of one size cover the machine and communicate at the same time, so equal groups are formed:
all with the same number of nodes and of ranks per node, consecutive ranks within a node, as many groups as fit.
"""

import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from calibrate.devices.device import TorchDevice, find_device
from clustersim.common.errors import ClusterSimError, InputError

Members = tuple[int, ...]
T = TypeVar("T")

COLLECTIVE_TIMEOUT: Final = timedelta(minutes=10)  # timeout of one collective; torch's default for NCCL


@dataclass(frozen=True, slots=True)
class World:
    """All processes: rank of this one, their number (world size), and how many run on each node."""

    rank: int
    world_size: int
    ranks_per_node: int

    @property
    def node_count(self) -> int:
        """Number of nodes."""
        return self.world_size // self.ranks_per_node

    def disjoint_groups(self, group_size: int, group_nodes: int) -> tuple[Members, ...]:
        """Disjoint groups of `group_size` ranks, evenly on `group_nodes` nodes; empty where not even one fits."""
        if group_size < 2 or group_nodes < 1 or group_size % group_nodes:
            return ()
        ranks_per_group_node = group_size // group_nodes
        return tuple(
            tuple(
                (first_node + node) * self.ranks_per_node + first_local_rank + offset
                for node in range(group_nodes)
                for offset in range(ranks_per_group_node)
            )
            for first_node in range(0, self.node_count - group_nodes + 1, group_nodes)
            for first_local_rank in range(0, self.ranks_per_node - ranks_per_group_node + 1, ranks_per_group_node)
        )

    def group_shapes(self) -> tuple[tuple[int, int], ...]:
        """(ranks, nodes) of all groups that the world divides into, ascending."""
        node_counts, local_sizes = _divisors(self.node_count), _divisors(self.ranks_per_node)
        return tuple(
            sorted(
                (local_size * count, count)
                for count in node_counts
                for local_size in local_sizes
                if local_size * count > 1
            )
        )


def _divisors(value: int) -> list[int]:
    return [divisor for divisor in range(1, value + 1) if value % divisor == 0]


def world_from_torchrun(environment: Mapping[str, str] = os.environ, *, command: str) -> World:
    """The world that torchrun started; otherwise raise InputError that says how to start `command`."""
    hint = f"start two or more, one for each GPU: torchrun --nproc-per-node 2 -m calibrate {command}"
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        raise InputError(f"a collective needs several processes, and torchrun did not start this one; {hint}")
    rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    if world_size < 2:
        raise InputError(f"a collective needs several processes, and torchrun started 1; {hint}")
    return World(
        rank, world_size, _checked_ranks_per_node(world_size, int(environment.get("LOCAL_WORLD_SIZE", world_size)))
    )


def torchrun_command(world: World, environment: Mapping[str, str]) -> tuple[str, ...]:
    """The torchrun command line that started these processes on this node, reconstructed from their environment.

    The rendezvous address is MASTER_ADDR and MASTER_PORT, whatever backend found it (torch/distributed/run.py).
    """
    processes = ("torchrun", "--nproc-per-node", str(world.ranks_per_node))
    if world.node_count == 1:
        return processes
    options = {
        "--nnodes": environment.get("GROUP_WORLD_SIZE", str(world.node_count)),
        "--node-rank": environment.get("GROUP_RANK", str(world.rank // world.ranks_per_node)),
        "--master-addr": environment.get("MASTER_ADDR", ""),
        "--master-port": environment.get("MASTER_PORT", ""),
    }
    return (*processes, *(argument for option, value in options.items() if value for argument in (option, value)))


def _checked_ranks_per_node(world_size: int, ranks_per_node: int) -> int:
    if world_size % ranks_per_node:
        raise InputError(f"{world_size} processes with {ranks_per_node} on this node; start as many on each node")
    return ranks_per_node


def current_world() -> World:
    """The world of the process group that is already initialized."""
    world_size = dist.get_world_size()
    return World(
        dist.get_rank(),
        world_size,
        _checked_ranks_per_node(world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size))),
    )


def select_backend(name: str | None) -> str:
    """The backend of that name, or the default for this machine."""
    if name is not None:
        return name
    return "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


def local_device(backend: str, world: World, environment: Mapping[str, str] = os.environ) -> TorchDevice:
    """Device of this process: one GPU with NCCL, the CPU with gloo; raise InputError where there are too few GPUs."""
    if backend == "gloo":
        return find_device("cpu")
    find_device("cuda")
    gpu_count = torch.cuda.device_count()
    if world.ranks_per_node > gpu_count:
        raise InputError(
            f"{world.ranks_per_node} processes on a node with {gpu_count} GPUs; NCCL needs a GPU for each: "
            f"--nproc-per-node {gpu_count}"
        )
    torch.cuda.set_device(int(environment.get("LOCAL_RANK", world.rank % world.ranks_per_node)))
    return find_device("cuda")


def collective_library(device: torch.device) -> str:
    """The collective library and its version (gloo is part of PyTorch and has none)."""
    if device.type == "cpu":
        return "gloo"
    name = "nccl" if torch.version.hip is None else "rccl"
    return f"{name} {'.'.join(str(component) for component in torch.cuda.nccl.version())}"  # type: ignore[no-untyped-call]


@contextmanager
def process_group_session(backend: str, device: torch.device) -> Iterator[None]:
    """Initialize torch.distributed from the environment, and destroy it at the end of the block on all ranks at once.

    An InputError occurs on all ranks, so they leave at once, too. After any other error a rank exits without
    synchronizing, since the others may be waiting elsewhere; torchrun terminates them.
    """
    dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
    try:
        yield
    except InputError:
        _synchronize_and_destroy(device)
        raise
    _synchronize_and_destroy(device)


def _synchronize_and_destroy(device: torch.device) -> None:
    """Synchronize and destroy: a rank that closed first would break connections that others still use."""
    min_over_ranks(0.0, device)
    dist.destroy_process_group()


def world_group() -> Any:
    """The process group of all ranks (PyTorch's types declare it optional: there is none before initialization)."""
    return dist.group.WORLD


@contextmanager
def temporary_group(groups: tuple[Members, ...]) -> Iterator[Any]:
    """Create disjoint process groups for the block; yield the calling rank's, or None if it is in none of them."""
    if len(groups) == 1 and len(groups[0]) == dist.get_world_size():
        yield world_group()
        return
    handles = [
        dist.new_group(list(members)) for members in groups
    ]  # new_group is collective over the world: every rank creates every group
    member_handles = [handle for handle, members in zip(handles, groups, strict=True) if dist.get_rank() in members]
    yield member_handles[0] if member_handles else None
    for handle in member_handles:
        dist.destroy_process_group(handle)


def decide_on_rank0(decide: Callable[[], T], device: torch.device) -> T:
    """Rank 0's decision, on all ranks; a ClusterSimError of it is raised on all of them as InputError."""
    payload = b""
    if dist.get_rank() == 0:
        try:
            payload = pickle.dumps((decide(), None))
        except ClusterSimError as error:
            payload = pickle.dumps((None, str(error)))
    value, message = pickle.loads(_broadcast_bytes(payload, device))
    if message is not None:
        raise InputError(message)
    return value  # type: ignore[no-any-return]


def _broadcast_bytes(payload: bytes, device: torch.device) -> bytes:
    """Rank 0's bytes, on all ranks."""
    size = torch.tensor([len(payload)], dtype=torch.int64, device=device)
    dist.broadcast(size, 0)
    content = torch.zeros(int(size.item()), dtype=torch.uint8, device=device)
    if payload:
        content.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    dist.broadcast(content, 0)
    return bytes(content.cpu().numpy())


def min_over_ranks(value: float, device: torch.device) -> float:
    """Minimum of all ranks' values."""
    return float(-max_over_ranks(torch.tensor([-value], dtype=torch.float64), device)[0])


def max_over_ranks(values: Tensor, device: torch.device) -> Tensor:
    """Element-wise maximum of all ranks' FP64 tensors; input and result are on the host."""
    on_device = values.to(device)
    dist.all_reduce(on_device, dist.ReduceOp.MAX)
    return on_device.cpu()
