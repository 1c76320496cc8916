"""Which GPUs a job gets, counted by hand, and invariants of every allocation."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from clustersim.common.errors import InputError
from clustersim.hardware.allocation import (
    BlockAllocation,
    ExplicitAllocation,
    PerDomain,
    PerNode,
    Scatter,
    UnitSizes,
    first_duplicate,
    shuffle,
)
from clustersim.hardware.clos_fabric import ClosFabric
from clustersim.hardware.clos_spec import LeafSpec, NetworkSpec, NicSpec, NodeSpec, NvlinkSpec
from clustersim.hardware.ecmp import SpreadEcmp
from tests.conftest import examples
from tests.hardware.conftest import NIC, NVLINK, PCIE
from tests.sentences import parts

RACK = UnitSizes(node_gpus=2, domain_gpus=6)


def rack_cluster(gpus: int, units: UnitSizes = RACK) -> ClosFabric:
    """Nodes of two GPUs, three of which are an NVLink domain."""
    node = NodeSpec(
        units.node_gpus, pcie=PCIE, nvlink=NvlinkSpec(units.domain_gpus, NVLINK), nics=NicSpec(units.node_gpus, NIC)
    )
    return ClosFabric(node, NetworkSpec(LeafSpec(1000, 1, 0.0), SpreadEcmp()), gpus)


@pytest.mark.parametrize(
    ("allocation", "gpus", "gpu_ids"),
    [
        (BlockAllocation(), 4, [0, 1, 2, 3]),
        (BlockAllocation(PerNode(1)), 4, [0, 2, 4, 6]),
        (BlockAllocation(PerDomain(4)), 8, [0, 1, 2, 3, 6, 7, 8, 9]),
        (BlockAllocation(PerDomain(3)), 6, [0, 1, 2, 6, 7, 8]),
        (BlockAllocation(node_ids=(3, 0)), 4, [6, 7, 0, 1]),
        (BlockAllocation(PerNode(1), node_ids=(3, 0)), 2, [6, 0]),
        (BlockAllocation(PerDomain(4), node_ids=(4, 2, 3)), 4, [8, 9, 6, 7]),
        (BlockAllocation(spare_nodes=2), 4, [0, 1, 2, 3]),
        (BlockAllocation(), 8, [0, 1, 2, 3, 6, 7, 8, 9]),  # spread evenly over two domains
        (ExplicitAllocation((5, 0, 3)), 3, [5, 0, 3]),
    ],
)
def test_a_job_gets_the_first_gpus_of_its_allocation(
    allocation: BlockAllocation | ExplicitAllocation, gpus: int, gpu_ids: list[int]
) -> None:
    """Node n is GPUs 2n and 2n + 1, domain d is GPUs 6d to 6d + 5; node 2 of a domain of which 4 are used is idle."""
    machine = rack_cluster(max(allocation.machine_gpus(gpus, RACK), 12))
    assert allocation.rank_gpus(machine, gpus, RACK).tolist() == gpu_ids


@pytest.mark.parametrize(
    ("allocation", "gpus", "machine"),
    [
        (BlockAllocation(), 5, 6),
        (BlockAllocation(), 8, 12),
        (BlockAllocation(spare_nodes=3), 4, 4 + 3 * 2),
        (BlockAllocation(PerNode(1)), 4, 8),
        (BlockAllocation(PerDomain(4)), 8, 12),
        (BlockAllocation(PerDomain(4)), 9, 18),
        (BlockAllocation(PerDomain(4), spare_nodes=1), 8, 14),
        (BlockAllocation(node_ids=(0, 7)), 4, 16),
        (ExplicitAllocation((0, 9)), 2, 10),
    ],
)
def test_the_cluster_size_follows_from_the_job(
    allocation: BlockAllocation | ExplicitAllocation, gpus: int, machine: int
) -> None:
    assert allocation.machine_gpus(gpus, RACK) == machine


def test_without_a_gpu_count_a_job_gets_all_but_the_spare_nodes() -> None:
    """A machine of four nodes: three of them with one GPU each, or two whole domains less a node."""
    assert BlockAllocation(PerNode(1), spare_nodes=1).rank_gpus(rack_cluster(8), None, RACK).tolist() == [0, 2, 4]
    assert BlockAllocation(PerDomain(4)).rank_gpus(rack_cluster(12), None, RACK).tolist() == [0, 1, 2, 3, 6, 7, 8, 9]
    assert ExplicitAllocation((3, 1)).rank_gpus(rack_cluster(4), None, RACK).tolist() == [3, 1]


ALLOCATIONS = st.builds(
    BlockAllocation,
    per_unit=st.none() | st.builds(PerNode, st.integers(1, 4)) | st.builds(PerDomain, st.integers(1, 8)),
    spare_nodes=st.integers(0, 3),
    scatter=st.none() | st.sampled_from(Scatter),
    seed=st.integers(0, 2**63 - 1),
)


@given(ALLOCATIONS, st.integers(1, 40))
@examples(200)
def test_a_valid_job_fits_the_cluster_derived_from_it(allocation: BlockAllocation, nodes: int) -> None:
    """Its GPUs exist, are all different, and use no more of a unit than allowed."""
    units = UnitSizes(node_gpus=4, domain_gpus=8)
    gpus = nodes * allocation.job_size_multiple(units)
    machine = rack_cluster(allocation.machine_gpus(gpus, units), units)
    gpu_ids = allocation.rank_gpus(machine, gpus, units)
    assert len(np.unique(gpu_ids)) == len(gpu_ids) == gpus
    assert gpu_ids.min() >= 0
    assert gpu_ids.max() < machine.gpu_count
    if allocation.per_unit is not None:
        assert (gpu_ids % allocation.per_unit.unit_gpus(units) < allocation.per_unit.gpu_count).all()


@given(st.integers(1, 30), st.integers(0, 5), st.integers(0, 2**63 - 1))
@example(nodes=4, spare=0, seed=0)  # three of one domain and one of the next: two of each are too few
@examples(100)
def test_scatter_keeps_nodes_intact_or_permutes_all_gpus(nodes: int, spare: int, seed: int) -> None:
    machine = rack_cluster(2 * (nodes + spare))
    by_node = (
        BlockAllocation(spare_nodes=spare, scatter=Scatter.NODES, seed=seed)
        .rank_gpus(machine, 2 * nodes, RACK)
        .reshape(-1, 2)
    )
    assert (by_node[:, 0] % 2 == 0).all()
    assert (np.diff(by_node, axis=1) == 1).all()
    all_gpus = BlockAllocation(scatter=Scatter.GPUS, seed=seed).rank_gpus(machine, None, RACK)
    assert np.sort(all_gpus).tolist() == list(range(machine.gpu_count))


def test_shuffles_are_reproducible_and_depend_on_the_seed() -> None:
    gpu_ids = np.arange(64)
    orders = [shuffle(gpu_ids, seed).tolist() for seed in range(50)]
    assert orders == [shuffle(gpu_ids, seed).tolist() for seed in range(50)]
    assert len({tuple(order) for order in orders}) == 50
    assert all(sorted(order) == gpu_ids.tolist() for order in orders)


def test_shuffles_are_uniform_in_the_first_position() -> None:
    """Of 4,000 orders of 8 each number leads 500 times, give or take five standard deviations of 21."""
    counts = np.bincount([shuffle(np.arange(8), seed)[0] for seed in range(4000)], minlength=8)
    assert np.abs(counts - 500).max() < 5 * 21


@pytest.mark.parametrize(
    ("allocation", "gpus", "sentence"),
    [
        (BlockAllocation(PerNode(3)), 6, "placement.per_node: 3 ... node has 2 GPUs ..."),
        (BlockAllocation(PerDomain(7)), 7, "placement.per_domain: 7 ... NVLink domain has 6 GPUs ..."),
        (BlockAllocation(node_ids=(1, 9)), 4, "placement.nodes: there is no node 9; nodes are 0 to 5"),
        (BlockAllocation(node_ids=(1, 0)), 6, "gpus: a job of 6 does not fit; placement leaves it 4 GPUs"),
        (BlockAllocation(), 5, "gpus: 5 GPUs ... multiple of the 2 ... 4 or 6 ..."),
        (BlockAllocation(spare_nodes=5), 4, "placement.spare: 5 ... 4 nodes to spare"),
        (BlockAllocation(spare_nodes=6), None, "placement.spare: 6 leaves none of the 6 nodes for the job"),
        (ExplicitAllocation((0, 12)), 2, "placement.order: there is no GPU 12; GPUs are 0 to 11"),
        (ExplicitAllocation((0, 1, 2)), 2, "placement.order: ... 3 GPUs ... 2 ranks ..."),
    ],
)
def test_invalid_allocations_are_rejected(
    allocation: BlockAllocation | ExplicitAllocation, gpus: int | None, sentence: str
) -> None:
    with pytest.raises(InputError) as caught:
        allocation.rank_gpus(rack_cluster(12), gpus, RACK)
    assert parts(sentence).fullmatch(str(caught.value))


def test_the_first_duplicate_is_found() -> None:
    assert first_duplicate([3, 1, 2, 1, 3]) == 1
    assert first_duplicate([3, 1, 2]) is None
