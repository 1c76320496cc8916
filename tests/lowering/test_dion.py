"""Dion: the FLOP of its four products, what shards exchange, and that none of its matrices is Adam."""

from math import ceil

import pytest

from clustersim import Scenario, simulate
from clustersim.build import build_plan, build_simulation
from clustersim.common.dtypes import DType
from clustersim.common.errors import ClusterSimError
from clustersim.model.kernels import KernelKind, MemoryBoundOp, MemoryBoundShape
from clustersim.model.optimizers import Dion
from clustersim.model.power_iteration import power_iteration
from clustersim.model.weight_matrices import WeightMatrix
from clustersim.program.task import CollectiveTask, CollectiveType, ComputeTask, WorkType
from tests.laws.timelines import assert_same_trace
from tests.lowering.test_muon import small

M, N = 1024, 4096  # inputs, outputs


def formats(data: str = "ddp") -> object:
    """Formats of weights and states of the small scenario."""
    return build_plan(small(data, "dion")).trained_groups[0].formats


def optimizer_kernels(scenario: Scenario) -> list:
    """Kernels of the optimizer on rank 0."""
    program = build_simulation(scenario).program.programs[0]
    tasks = [task for task in program.tasks if isinstance(task, ComputeTask)]
    operations = [operation for task in tasks for operation in task.segment.operations]
    return [op.kernel for op in operations if op.work_type is WorkType.OPTIMIZER and op.kernel is not None]


@pytest.mark.parametrize("fraction", [0.25, 1.0])
def test_products_and_factorizations_of_one_matrix(fraction: float) -> None:
    """Four products of 2 m n r; of a tall P a sketch of k rows, a Gram matrix, two triangles and two factorizations."""
    iteration = power_iteration(WeightMatrix(N, M), Dion(rank_fraction=fraction), formats(), ranks=1, whole=1)
    r = fraction * M
    steps = (*iteration.project(), *iteration.update(), *iteration.apply())
    assert sum(kernel.flops for kernel in steps if kernel.kind is KernelKind.MATMUL) == 4 * 2 * M * N * r
    k = 128 * ceil(1.25 * r / 128)
    tall = 2 * k * M * r + 2 * r**2 * (k - r / 3) + 2 * M * r**2 + r**3 / 3 + 2 * M * r**2
    square = 4 * M**2 * (r - M / 3)
    orthonormal = sum(kernel.flops for kernel in iteration.orthonormalize())
    assert orthonormal == pytest.approx(square if fraction == 1.0 else tall)


def test_shards_sum_and_gather_low_rank_products() -> None:
    """Of each batch of 8 equal matrices 8 m r elements are summed and as many gathered, never a whole matrix."""
    (program,) = build_simulation(small("fsdp", "dion")).program.programs
    comm_ops = [task.comm_op for task in program.tasks if isinstance(task, CollectiveTask)]
    products = [op for op in comm_ops if op.name.startswith("products")]
    sums = [op.payload for op in products if op.collective is CollectiveType.REDUCE_SCATTER]
    gathers = [op.payload for op in products if op.collective is CollectiveType.ALL_GATHER]
    element_bytes = formats("fsdp").moments.bytes
    # per layer: queries, keys, values, output 1024 x 1024; gate and up 4096 x 1024; down 1024 x 4096: rank 256 each
    inputs = [1024] * 4 + [1024] * 2 + [4096]
    expected = 8 * sum(inputs) * 256 * element_bytes
    assert sum(sums) == sum(gathers) == pytest.approx(expected)


def test_sharding_divides_products_but_not_factorizations_of_a_batch() -> None:
    """Eight ranks do an eighth of the products each, and orthonormalize one matrix of eight."""

    def flops(data: str) -> float:
        return sum(kernel.flops for kernel in optimizer_kernels(small(data, "dion")))

    assert 8 * flops("fsdp") == pytest.approx(flops("ddp"), rel=1e-9)


def test_dion_for_no_matrix_is_adam() -> None:
    nothing = small("fsdp", {"name": "dion", "dense": False, "experts": False})
    assert_same_trace(simulate(nothing).trace, simulate(small("fsdp", "adam")).trace)


def test_momenta_and_iterates_are_kept() -> None:
    assert Dion(rank_fraction=0.25).moment_bytes(DType.FP32) == 4 * 1.25


def test_a_smaller_rank_is_faster() -> None:
    times = [simulate(small("fsdp", {"name": "dion", "rank_fraction": fraction})).step_time for fraction in (1.0, 0.25)]
    assert times[1] < times[0]


def test_turns_hide_collectives() -> None:
    times = [simulate(small("fsdp", {"name": "dion", "overlap": overlap})).step_time for overlap in (True, False)]
    assert times[0] < times[1]


def test_factorizations_are_far_below_matmuls() -> None:
    kernels = optimizer_kernels(small("ddp", "dion"))
    assert any(
        isinstance(kernel.shape, MemoryBoundShape) and kernel.shape.routine is MemoryBoundOp.FACTORIZATION
        for kernel in kernels
    )


@pytest.mark.parametrize(
    ("data", "optimizer", "layout", "words"),
    [
        ("zero1", "dion", {}, "ddp or fsdp"),
        ("fsdp", "dion", {"tp": 2}, "tensor-parallel ranks"),
        ("fsdp", {"name": "dion", "steps": 3}, {}, "steps is a key of muon"),
        ("fsdp", {"name": "muon", "rank_fraction": 0.5}, {}, "rank_fraction is a key of dion"),
        ("fsdp", {"name": "dion", "rank_fraction": 0.0}, {}, "rank_fraction"),
    ],
)
def test_bad_settings_are_refused(data: str, optimizer: object, layout: dict[str, int], words: str) -> None:
    with pytest.raises(ClusterSimError, match=words):
        small(data, optimizer, **layout)
