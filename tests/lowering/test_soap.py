"""SOAP: the FLOP of its projections and factors, what it keeps, and who does it."""

import pytest

from clustersim import Scenario, simulate
from clustersim.build import build_plan, build_simulation
from clustersim.common.errors import ClusterSimError
from clustersim.memory.footprint import Footprint
from clustersim.model.kernels import KernelKind
from clustersim.model.optimizers import Soap
from clustersim.model.soap import factor_elements, matrix_kernels, soap_flops
from clustersim.model.weight_matrices import WeightMatrix
from clustersim.program.task import ComputeTask, WorkType
from tests.laws.timelines import assert_same_trace
from tests.lowering.test_muon import small

M, N = 4096, 1024
MATRICES = [(1024, 1024)] * 4 + [(4096, 1024)] * 2 + [(1024, 4096)]  # of each of 8 layers
LAYERS = 8


@pytest.mark.parametrize("frequency", [1, 8])
def test_flops_of_a_mean_step(frequency: int) -> None:
    """Factors, gradient and update: 3 x 2 m n (m + n); every `frequency` steps 2 x 2 m n (m + n) and 20/3 d^3."""
    kernels = matrix_kernels(WeightMatrix(M, N), Soap(precondition_frequency=frequency))
    both_sides = 2 * M * N * (M + N)
    renewal = 2 * both_sides + (4 + 8 / 3) * (M**3 + N**3)
    assert sum(kernel.flops for kernel in kernels) == pytest.approx(3 * both_sides + renewal / frequency)
    products = sum(kernel.flops for kernel in kernels if kernel.kind is KernelKind.MATMUL)
    assert products == pytest.approx(3 * both_sides + (2 * both_sides + 4 * (M**3 + N**3)) / frequency)


def optimizer_flops(scenario: Scenario) -> float:
    """FLOP of the optimizer on rank 0."""
    program = build_simulation(scenario).program.programs[0]
    tasks = [task for task in program.tasks if isinstance(task, ComputeTask)]
    operations = [operation for task in tasks for operation in task.segment.operations]
    return sum(op.kernel.flops for op in operations if op.work_type is WorkType.OPTIMIZER and op.kernel is not None)


def test_every_rank_does_all_or_its_own_matrices() -> None:
    """56 matrices over 8 owners: one of each shape, of 8 layers, for each rank."""
    layer = sum(soap_flops(WeightMatrix(*shape), Soap()) for shape in MATRICES)
    assert optimizer_flops(small("ddp", "soap")) == pytest.approx(LAYERS * layer)
    assert optimizer_flops(small("zero1", "soap")) == pytest.approx(layer)


def test_factors_and_eigenbases_are_kept() -> None:
    """Two moments of every weight, and 2 (m^2 + n^2) FP32 elements of every matrix, on the rank that has all."""
    plans = {name: build_plan(small("ddp", name)) for name in ("soap", "adam")}
    sizes = {
        name: Footprint(plan, small("ddp", name).framework, 0.0).checkpoint_bytes() for name, plan in plans.items()
    }
    factors = LAYERS * sum(factor_elements(WeightMatrix(*shape)) for shape in MATRICES)
    # norms are counted with the matrices, whose mean they take
    assert sizes["soap"] - sizes["adam"] == pytest.approx(4 * factors, rel=1e-3)


def test_rarer_renewals_are_faster() -> None:
    times = [
        simulate(small("zero1", {"name": "soap", "precondition_frequency": steps})).step_time for steps in (1, 10, 100)
    ]
    assert times[0] > times[1] > times[2]


def test_soap_for_no_matrix_is_adam() -> None:
    nothing = small("zero1", {"name": "soap", "dense": False, "experts": False})
    assert_same_trace(simulate(nothing).trace, simulate(small("zero1", "adam")).trace)


@pytest.mark.parametrize(
    ("data", "optimizer", "layout", "words"),
    [
        ("fsdp", "soap", {}, "ddp or zero1"),
        ("zero1", "soap", {"tp": 2}, "tensor-parallel ranks"),
        ("zero1", {"name": "soap", "steps": 3}, {}, "steps is a key of muon"),
    ],
)
def test_bad_settings_are_refused(data: str, optimizer: object, layout: dict[str, int], words: str) -> None:
    with pytest.raises(ClusterSimError, match=words):
        small(data, optimizer, **layout)
