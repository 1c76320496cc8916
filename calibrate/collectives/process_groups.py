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

from calibrate.devices.device import TorchDevice, find
from clustersim.common.errors import ClusterSimError, InputError

Members = tuple[int, ...]
T = TypeVar("T")

TIMEOUT: Final = timedelta(minutes=10)  # of one collective, after which its process gives up; torch's own for NCCL


@dataclass(frozen=True, slots=True)
class World:
    """All processes: the number of this one, how many there are, and how many run on each node."""

    rank: int
    ranks: int
    per_node: int

    @property
    def nodes(self) -> int:
        """How many nodes they run on."""
        return self.ranks // self.per_node

    def groups(self, ranks: int, nodes: int) -> tuple[Members, ...]:
        """Disjoint groups of `ranks` ranks on `nodes` nodes, as many on each; empty where not even one fits."""
        if ranks < 2 or nodes < 1 or ranks % nodes:
            return ()
        share = ranks // nodes
        return tuple(
            tuple((block + node) * self.per_node + first + place for node in range(nodes) for place in range(share))
            for block in range(0, self.nodes - nodes + 1, nodes)
            for first in range(0, self.per_node - share + 1, share)
        )

    def layouts(self) -> tuple[tuple[int, int], ...]:
        """Ranks and nodes of all groups that the processes divide into, small ones first."""
        nodes, shares = _divisors(self.nodes), _divisors(self.per_node)
        return tuple(sorted((share * count, count) for count in nodes for share in shares if share * count > 1))


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def started(environment: Mapping[str, str] = os.environ, *, command: str) -> World:
    """The world that torchrun started; raise InputError that says how to start `command` where there is none."""
    start = f"start two or more, one for each GPU: torchrun --nproc-per-node 2 -m calibrate {command}"
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        raise InputError(f"a collective needs several processes, and torchrun did not start this one; {start}")
    rank, ranks = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    if ranks < 2:
        raise InputError(f"a collective needs several processes, and torchrun started 1; {start}")
    return World(rank, ranks, _per_node(ranks, int(environment.get("LOCAL_WORLD_SIZE", ranks))))


def torchrun(world: World, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """How these processes were started on this node, as torchrun says in their environment.

    Where they meet is MASTER_ADDR and MASTER_PORT, whatever rendezvous found it (torch/distributed/run.py).
    """
    processes = ("torchrun", "--nproc-per-node", str(world.per_node))
    if world.nodes == 1:
        return processes
    words = {
        "--nnodes": environment.get("GROUP_WORLD_SIZE", str(world.nodes)),
        "--node-rank": environment.get("GROUP_RANK", str(world.rank // world.per_node)),
        "--master-addr": environment.get("MASTER_ADDR", ""),
        "--master-port": environment.get("MASTER_PORT", ""),
    }
    return (*processes, *(word for option, value in words.items() if value for word in (option, value)))


def _per_node(ranks: int, per_node: int) -> int:
    if ranks % per_node:
        raise InputError(f"{ranks} processes with {per_node} on this node; start as many on each node")
    return per_node


def joined_world(environment: Mapping[str, str] = os.environ) -> World:
    """The world of the process group that is already there."""
    ranks = dist.get_world_size()
    return World(dist.get_rank(), ranks, _per_node(ranks, int(environment.get("LOCAL_WORLD_SIZE", ranks))))


def backend_of(name: str | None) -> str:
    """The backend of that name, or the one for what this machine has."""
    if name is not None:
        return name
    return "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


def local_device(backend: str, world: World, environment: Mapping[str, str] = os.environ) -> TorchDevice:
    """The process's device: a GPU of its own with NCCL, the CPU with gloo; raise InputError where there is none."""
    if backend == "gloo":
        return find("cpu")
    find("cuda")
    here = torch.cuda.device_count()
    if world.per_node > here:
        raise InputError(
            f"{world.per_node} processes on a node with {here} GPUs; NCCL needs a GPU for each: --nproc-per-node {here}"
        )
    torch.cuda.set_device(int(environment.get("LOCAL_RANK", world.rank % world.per_node)))
    return find("cuda")


def library(device: torch.device) -> str:
    """Which library moves the data, and its version where it has one of its own (gloo is part of PyTorch)."""
    if device.type == "cpu":
        return "gloo"
    name = "nccl" if torch.version.hip is None else "rccl"
    return f"{name} {'.'.join(str(part) for part in torch.cuda.nccl.version())}"  # type: ignore[no-untyped-call]


@contextmanager
def joined(backend: str, device: torch.device) -> Iterator[None]:
    """Join the process group that the environment names, and leave it together.

    Errors of the input are the same on all ranks, so they leave together too. After any other error a rank ends by
    itself, since the others may be waiting for something else; torchrun ends them.
    """
    dist.init_process_group(backend, timeout=TIMEOUT)
    try:
        yield
    except InputError:
        _leave(device)
        raise
    _leave(device)


def _leave(device: torch.device) -> None:
    """Wait until nobody needs the others any more: who closes first would break off what they still read."""
    least(0.0, device)
    dist.destroy_process_group()


@contextmanager
def formed(groups: tuple[Members, ...]) -> Iterator[Any]:
    """The process group of this rank among disjoint ones, formed for a while; None if it is in none of them."""
    if len(groups) == 1 and len(groups[0]) == dist.get_world_size():
        yield dist.group.WORLD
        return
    handles = [dist.new_group(list(members)) for members in groups]  # every rank forms every group
    mine = [handle for handle, members in zip(handles, groups, strict=True) if dist.get_rank() in members]
    yield mine[0] if mine else None
    for handle in mine:
        dist.destroy_process_group(handle)


def first_decides(decide: Callable[[], T], device: torch.device) -> T:
    """What the first rank decides, on all ranks; its error, if it is the user's, is raised on all of them."""
    text = b""
    if dist.get_rank() == 0:
        try:
            text = pickle.dumps((decide(), None))
        except ClusterSimError as error:
            text = pickle.dumps((None, str(error)))
    value, refusal = pickle.loads(_spoken(text, device))
    if refusal is not None:
        raise InputError(refusal)
    return value  # type: ignore[no-any-return]


def _spoken(text: bytes, device: torch.device) -> bytes:
    """The first rank's bytes, on all ranks."""
    length = torch.tensor([len(text)], dtype=torch.int64, device=device)
    dist.broadcast(length, 0)
    content = torch.zeros(int(length.item()), dtype=torch.uint8, device=device)
    if text:
        content.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    dist.broadcast(content, 0)
    return bytes(content.cpu().numpy())


def least(value: float, device: torch.device) -> float:
    """The smallest of all ranks' values."""
    return float(-largest(torch.tensor([-value], dtype=torch.float64), device)[0])


def largest(values: Tensor, device: torch.device) -> Tensor:
    """Element by element the largest of all ranks' FP64 values, which lie on the host before and after."""
    there = values.to(device)
    dist.all_reduce(there, dist.ReduceOp.MAX)
    return there.cpu()
