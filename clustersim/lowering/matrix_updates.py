"""Lowering of an optimizer of matrices: the momentum and all other weights element by element, then the matrices."""

from clustersim.lowering.dion import DionLowering
from clustersim.lowering.overheads import optimizer_operations
from clustersim.lowering.program_builder import RankProgramBuilder
from clustersim.lowering.whole_matrices import WholeMatrixLowering
from clustersim.model.kernels import Kernel
from clustersim.model.newton_schulz import momentum_kernel, weight_update_kernel
from clustersim.model.optimizer_kernels import optimizer_step_kernels
from clustersim.model.optimizers import Dion, MatrixOptimizer, Muon, Soap
from clustersim.model.power_iteration import momentum_sum_kernel
from clustersim.model.soap import gradient_kernel, weight_kernel
from clustersim.model.training import Training
from clustersim.parallel.layer_partition import PipelineStage
from clustersim.program.task import Operation


def add_matrix_updates(
    builder: RankProgramBuilder,
    stages: tuple[PipelineStage, ...],
    updates: list[tuple[Training, float]],
    inputs: tuple[list[Operation], tuple[int, ...]],
) -> int:
    """Update weights element by element and the momentum of matrices, then these as wholes.

    inputs: operations that come first, and the tasks that they wait for.
    """
    prepare, depends_on = inputs
    elementwise = [step for training, count in updates for step in _elementwise_kernels(training, count)]
    task = builder.add_standalone("optimizer", [*prepare, *optimizer_operations(elementwise)], depends_on)
    matrix_updates = [
        (of_matrices, training, count)
        for training, count in updates
        if isinstance(of_matrices := training.optimizer, Muon | Dion | Soap) and count
    ]
    if not matrix_updates:
        return task
    (optimizer,) = {of_matrices for of_matrices, _, _ in matrix_updates}
    lowering = (
        DionLowering(builder, optimizer, task)
        if isinstance(optimizer, Dion)
        else WholeMatrixLowering(builder, optimizer, task)
    )
    for group in builder.plan.trained_groups:
        if isinstance(group.optimizer, MatrixOptimizer):
            lowering.add_group(group, stages)
    if isinstance(lowering, DionLowering):
        return builder.add_standalone("optimizer", [], ())
    kernels = [_weight_kernel(training, count) for _, training, count in matrix_updates]
    return builder.add_standalone("update matrices", optimizer_operations(kernels), lowering.sent)


def _elementwise_kernels(training: Training, count: float) -> tuple[Kernel, ...]:
    """The update of weights element by element, or of the momentum of matrices."""
    if not isinstance(training.optimizer, MatrixOptimizer):
        return optimizer_step_kernels(training, count)
    return (_momentum_kernel(training, count),) if count else ()


def _momentum_kernel(training: Training, count: float) -> Kernel:
    """What comes before the matrices' own updates."""
    formats = training.recipe.weight_formats
    match training.optimizer:
        case Dion():
            return momentum_sum_kernel(formats, count)
        case Soap():
            return gradient_kernel(formats, count)
    return momentum_kernel(formats, count, compiled=training.overheads.compiled_muon)


def _weight_kernel(training: Training, count: float) -> Kernel:
    """What comes after them."""
    formats = training.recipe.weight_formats
    if isinstance(training.optimizer, Soap):
        return weight_kernel(formats, count)
    return weight_update_kernel(formats, count, compiled=training.overheads.compiled_muon)
