"""Which processes measure together, and which of them form groups?

torchrun starts the processes and says in their environment how many there are, and how many on each node. A layout's
groups of a size cover the machine and communicate at the same time, so groups are formed alike: as many ranks on each
of so many nodes, neighbours inside a node, as many groups as fit.
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

COLLECTIVE_TIMEOUT: Final = timedelta(
    minutes=10
)  # of one collective, after which its process gives up; torch's own for NCCL


@dataclass(frozen=True, slots=True)
class World:
    """All processes: the number of this one, how many there are, and how many run on each node."""

    rank: int
    world_size: int
    ranks_per_node: int

    @property
    def node_count(self) -> int:
        """How many nodes they run on."""
        return self.world_size // self.ranks_per_node

    def disjoint_groups(self, group_size: int, group_nodes: int) -> tuple[Members, ...]:
        """Disjoint groups of `ranks` ranks on `nodes` nodes, as many on each; empty where not even one fits."""
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
        """Ranks and nodes of all groups that the processes divide into, small ones first."""
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
    """The world that torchrun started; raise InputError that says how to start `command` where there is none."""
    hint = f"start two or more, one for each GPU: torchrun --nproc-per-node 2 -m calibrate {command}"
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        raise InputError(f"a collective needs several processes, and torchrun did not start this one; {hint}")
    rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    if world_size < 2:
        raise InputError(f"a collective needs several processes, and torchrun started 1; {hint}")
    return World(
        rank, world_size, _checked_ranks_per_node(world_size, int(environment.get("LOCAL_WORLD_SIZE", world_size)))
    )


def torchrun_command(world: World, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """How these processes were started on this node, as torchrun says in their environment.

    Where they meet is MASTER_ADDR and MASTER_PORT, whatever rendezvous found it (torch/distributed/run.py).
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


def current_world(environment: Mapping[str, str] = os.environ) -> World:
    """The world of the process group that is already there."""
    world_size = dist.get_world_size()
    return World(
        dist.get_rank(),
        world_size,
        _checked_ranks_per_node(world_size, int(environment.get("LOCAL_WORLD_SIZE", world_size))),
    )


def select_backend(name: str | None) -> str:
    """The backend of that name, or the one for what this machine has."""
    if name is not None:
        return name
    return "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


def local_device(backend: str, world: World, environment: Mapping[str, str] = os.environ) -> TorchDevice:
    """The process's device: a GPU of its own with NCCL, the CPU with gloo; raise InputError where there is none."""
    if backend == "gloo":
        return find_device("cpu")
    find_device("cuda")
    gpu_count = torch.cuda.device_count()
    if world.ranks_per_node > gpu_count:
        raise InputError(
            f"{world.ranks_per_node} processes on a node with {gpu_count} GPUs; NCCL needs a GPU for each: --nproc-per-node {gpu_count}"
        )
    torch.cuda.set_device(int(environment.get("LOCAL_RANK", world.rank % world.ranks_per_node)))
    return find_device("cuda")


def collective_library(device: torch.device) -> str:
    """Which library moves the data, and its version where it has one of its own (gloo is part of PyTorch)."""
    if device.type == "cpu":
        return "gloo"
    name = "nccl" if torch.version.hip is None else "rccl"
    return f"{name} {'.'.join(str(number) for number in torch.cuda.nccl.version())}"  # type: ignore[no-untyped-call]


@contextmanager
def process_group_session(backend: str, device: torch.device) -> Iterator[None]:
    """Join the process group that the environment names, and leave it together.

    Errors of the input are the same on all ranks, so they leave together too. After any other error a rank ends by
    itself, since the others may be waiting for something else; torchrun ends them.
    """
    dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
    try:
        yield
    except InputError:
        _synchronize_and_destroy(device)
        raise
    _synchronize_and_destroy(device)


def _synchronize_and_destroy(device: torch.device) -> None:
    """Wait until nobody needs the others any more: who closes first would break off what they still read."""
    min_over_ranks(0.0, device)
    dist.destroy_process_group()


@contextmanager
def temporary_group(groups: tuple[Members, ...]) -> Iterator[Any]:
    """The process group of this rank among disjoint ones, formed for a while; None if it is in none of them."""
    if len(groups) == 1 and len(groups[0]) == dist.get_world_size():
        yield dist.group.WORLD
        return
    handles = [dist.new_group(list(members)) for members in groups]  # every rank forms every group
    member_handles = [handle for handle, members in zip(handles, groups, strict=True) if dist.get_rank() in members]
    yield member_handles[0] if member_handles else None
    for handle in member_handles:
        dist.destroy_process_group(handle)


def decide_on_rank0(decide: Callable[[], T], device: torch.device) -> T:
    """What the first rank decides, on all ranks; its error, if it is the user's, is raised on all of them."""
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
    """The first rank's bytes, on all ranks."""
    size = torch.tensor([len(payload)], dtype=torch.int64, device=device)
    dist.broadcast(size, 0)
    content = torch.zeros(int(size.item()), dtype=torch.uint8, device=device)
    if payload:
        content.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    dist.broadcast(content, 0)
    return bytes(content.cpu().numpy())


def min_over_ranks(value: float, device: torch.device) -> float:
    """The smallest of all ranks' values."""
    return float(-max_over_ranks(torch.tensor([-value], dtype=torch.float64), device)[0])


def max_over_ranks(values: Tensor, device: torch.device) -> Tensor:
    """Element by element the largest of all ranks' FP64 values, which lie on the host before and after."""
    on_device = values.to(device)
    dist.all_reduce(on_device, dist.ReduceOp.MAX)
    return on_device.cpu()
