"""ZeRO-3 of DeepSpeed's first release: when each parameter is gathered and each gradient reduced.

Parameter by parameter, as its modules run (DeepSpeed v0.3.11 to v0.3.16, March to May 2021, commit
599258f97). The hook before a module waits until its parameters are gathered and the GPU is idle
(`fetch_sub_module`, `_synchronize_communication`: `torch.cuda.synchronize()`), then starts to gather the
next ones: one, if it has 50 M elements or more (`prefetch_bucket_size`), as any matrix of a model that
needs ZeRO-3 has. So the gather of one parameter overlaps the matmuls of the previous parameter, and nothing
is prefetched further ahead. Recomputation gathers once more what backward gathers, except for the last
matmul's parameter, which is reused at once (its reuse distance is below `max_reuse_distance`). Biases and
norms (below `param_persistence_threshold`) stay gathered.

The collectives of that time take lists of tensors, one for each rank: the host makes a view of each rank's
shard and copies each between the list and the collective's own buffer (`_allgather_param` and
`_reduce_scatter_gradient` in runtime/zero/partition_parameters.py; `flatten_for_scatter_gather` in
PyTorch's ProcessGroupNCCL.cpp), before it launches the module's kernels. Every gradient is reduced by a
collective of its own, including those of biases and norms. Assumed: one parameter group, no tensor
parallelism inside matmuls; the host's waits take no extra time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from clustersim.common.cached_method import cached_method
from clustersim.lowering.program_builder import RankProgramBuilder, StagePass
from clustersim.lowering.units import Unit, execution_order
from clustersim.model.kernels import Kernel, MatmulLayout, MatmulShape
from clustersim.model.memory_bound import copy_kernel
from clustersim.model.transformer import TransformerModel, norm_parameter_count
from clustersim.parallel.data_parallel_strategy import DeepspeedZero3Strategy
from clustersim.parallel.layer_partition import PipelineStage
from clustersim.program.action import ActionKind
from clustersim.program.task import Operation, WorkType

_CALLS_PER_RANK = 2  # loop iterations per rank: one view and one copy


@dataclass(frozen=True, slots=True)
class ParameterSlice:
    """Operations that use one gathered parameter.

    name: of its linear layer, or of the unit if it has no matmul; element_count: elements of the parameter.
    """

    name: str
    element_count: int
    operations: tuple[Operation, ...]


@dataclass(slots=True)
class _PendingSlice:
    """A slice whose parameter is being gathered."""

    parameter_slice: ParameterSlice
    key: tuple[Unit, int]
    stage_pass: StagePass


@dataclass
class DeepspeedZero3:
    """Gathers, runs and reduces parameter by parameter. _last_gather: tasks of the latest gather."""

    strategy: DeepspeedZero3Strategy
    _last_gather: tuple[int, ...] = ()

    def begin_step(self, builder: RankProgramBuilder, stages: Sequence[PipelineStage]) -> None:
        """Nothing to do: parameters are gathered when they are needed."""

    def lower_pass(self, builder: RankProgramBuilder, stage_pass: StagePass) -> int:
        """Gather each parameter while the matmuls of the previous one run; return the last compute task."""
        units = execution_order(builder.units.stage_units(stage_pass.stage), stage_pass.action.kind)
        pending: _PendingSlice | None = None
        for unit in units:
            for index, parameter_slice in enumerate(self._slices(unit, stage_pass.action.kind)):
                if index == 0 or pending is None or pending.parameter_slice.name != parameter_slice.name:
                    self._add_gather(builder, parameter_slice, stage_pass)
                if pending is not None:
                    self._add_compute(builder, pending)
                pending = _PendingSlice(
                    parameter_slice,
                    (unit, index),
                    stage_pass._replace(depends_on=(*stage_pass.depends_on, *self._last_gather)),
                )
        if pending is not None:
            self._add_compute(builder, pending)
        return builder.last_compute or 0

    def reduce_gradients(self, builder: RankProgramBuilder, stages: Sequence[PipelineStage], last_task: int) -> None:
        """Nothing to do: the backwards have reduced their gradients."""

    def end_step(self, builder: RankProgramBuilder, stages: Sequence[PipelineStage], optimizer_task: int) -> None:
        """Nothing to do: the next step gathers what it needs."""

    @cached_method
    def _slices(self, unit: Unit, kind: ActionKind) -> list[ParameterSlice]:
        return [*split_by_parameter(unit, kind)]

    def _add_gather(self, builder: RankProgramBuilder, parameter_slice: ParameterSlice, stage_pass: StagePass) -> None:
        """Start the gather once all previously issued work is done; the host copies the shards one by one."""
        depends_on = (*self._last_gather, *(() if builder.last_compute is None else (builder.last_compute,)))
        (group, *_) = builder.plan.parameter_groups
        parameter_counts = [(group, parameter_slice.element_count)]
        previous_gather, self._last_gather = (
            self._last_gather,
            builder.gather_parameters(f"gather {parameter_slice.name}", parameter_counts, depends_on),
        )
        self._add_shard_copies(builder, stage_pass, parameter_slice.element_count, previous_gather)

    def _add_shard_copies(
        self, builder: RankProgramBuilder, stage_pass: StagePass, element_count: int, depends_on: tuple[int, ...]
    ) -> None:
        """The host loop over all ranks' shards of a parameter."""
        (group, *_) = builder.plan.parameter_groups
        kernel = copy_kernel("copy of all ranks' parts", builder.plan.training.recipe.activations, element_count)
        work_type = WorkType.FORWARD if stage_pass.action.kind is ActionKind.FORWARD else WorkType.BACKWARD
        operation = Operation(replace(kernel, host_calls=_CALLS_PER_RANK * group.shard_count), work_type)
        builder.add_compute(
            StagePass(stage_pass.stage, stage_pass.action, depends_on),
            ("parts", element_count, work_type),
            (operation,),
        )

    def _add_compute(self, builder: RankProgramBuilder, pending: _PendingSlice) -> None:
        """Run the operations that use one parameter, and reduce its gradients, each by a collective of its own."""
        parameter_slice, run = pending.parameter_slice, pending.stage_pass
        task = builder.add_compute(run, pending.key, parameter_slice.operations)
        (group, *_) = builder.plan.parameter_groups
        for element_count in gradient_sizes(parameter_slice.operations, builder.plan.model):
            self._add_shard_copies(builder, run, element_count, ())
            builder.reduction_tasks += builder.reduce_gradients(
                f"reduce {parameter_slice.name}", group, element_count, (task,)
            )


def split_by_parameter(unit: Unit, kind: ActionKind) -> Iterator[ParameterSlice]:
    """A unit's pass, split before each matmul that needs another parameter than the previous one."""
    begin, name, element_count = 0, unit.name, 0
    operations = unit.operations(kind)
    for index, operation in enumerate(operations):
        matrix = _weight_matrix(operation.kernel)
        if matrix is None or (matrix[0] == name and operation.work_type is operations[begin].work_type):
            continue
        if element_count:
            yield ParameterSlice(name, element_count, operations[begin:index])
            begin = index
        name, element_count = matrix
    yield ParameterSlice(name, element_count or unit.parameter_count, operations[begin:])


def _weight_matrix(kernel: Kernel | None) -> tuple[str, int] | None:
    """Name and elements of the linear layer's parameter that a kernel reads; None for other kernels."""
    match kernel:
        case Kernel(shape=MatmulShape(n=n, k=k, batch=1, operands=MatmulLayout.NT | MatmulLayout.NN)):
            return kernel.name.removesuffix(".input_gradient"), n * k
    return None


def gradient_sizes(operations: Sequence[Operation], model: TransformerModel) -> Iterator[int]:
    """Elements of each gradient that operations complete.

    These are matrices and biases, both vectors of LayerNorms, and embedding tables.
    """
    matrix_elements = 0
    for operation in operations:
        match operation.kernel:
            case Kernel(shape=MatmulShape(m=m, n=n, batch=1, operands=MatmulLayout.TN)):
                matrix_elements = m * n
        if operation.gradient_count:
            half_count = operation.gradient_count // 2
            first_size = matrix_elements or (
                half_count if operation.gradient_count == norm_parameter_count(model) == 2 * model.hidden else 0
            )
            yield from (size for size in (first_size, operation.gradient_count - first_size) if size)
            matrix_elements = 0
