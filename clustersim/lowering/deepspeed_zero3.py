"""ZeRO-3 of DeepSpeed's first release: when is each parameter gathered and each gradient reduced?

Parameter by parameter, as its modules run (DeepSpeed v0.3.11 to v0.3.16, March to May 2021, commit 599258f97). The hook
before a module waits until its parameters are there and all the GPU has to do is done (`fetch_sub_module`,
`_synchronize_communication`: `torch.cuda.synchronize()`), then begins to gather those that come next: one, if it has
50 M elements or more (`prefetch_bucket_size`), as any matrix of a model that needs ZeRO-3 has. So the gather of one
parameter runs beside the products of the parameter before it, and no further ahead. Recomputation gathers what
backward gathers once more, but for the last product's parameter, which is used again at once (its reuse distance is
below `max_reuse_distance`). Biases and norms (below `param_persistence_threshold`) stay gathered.

The collectives of that time take lists of tensors, one for each rank: the host makes a view of each rank's part and
copies each between the list and the collective's own buffer (`_allgather_param` and `_reduce_scatter_gradient` in
runtime/zero/partition_parameters.py; `flatten_for_scatter_gather` in PyTorch's ProcessGroupNCCL.cpp), before it
launches the module's kernels. Every gradient is reduced by a collective of its own, those of biases and norms, too.
Assumed: one group of parameters, no tensor parallelism inside products; the host's waits take no time of their own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from clustersim.lowering.program_builder import Lowering, Pass
from clustersim.lowering.units import Unit, in_order
from clustersim.model.kernels import Kernel, MatmulLayout, MatmulShape
from clustersim.model.memory_bound import copy_kernel
from clustersim.model.transformer import TransformerModel, norm_parameter_count
from clustersim.parallel.data_parallel_strategy import DeepspeedZero3Strategy
from clustersim.parallel.layer_partition import PipelineStage
from clustersim.program.action import ActionKind
from clustersim.program.task import Operation, WorkType

_CALLS = 2  # of a loop for each rank: a view, and a copy


@dataclass(frozen=True, slots=True)
class Piece:
    """Operations that use one gathered parameter. name: of its linear layer, or of the unit that has no product."""

    name: str
    elements: int
    operations: tuple[Operation, ...]


@dataclass(slots=True)
class _Waiting:
    """A piece whose parameter is on its way."""

    piece: Piece
    key: tuple[int, int]
    run: Pass


@dataclass
class OneByOne:
    """Gathers, runs and reduces parameter by parameter. _gathered: the last gather of all."""

    strategy: DeepspeedZero3Strategy
    _gathered: tuple[int, ...] = ()
    _pieces: dict[tuple[int, ActionKind], list[Piece]] = field(default_factory=dict)

    def begin(self, low: Lowering, stages: Sequence[PipelineStage]) -> None:
        """Nothing to do: parameters are gathered when they are needed."""

    def run(self, low: Lowering, run: Pass) -> int:
        """Gather each parameter beside the products of the one before it; return the last compute task."""
        units = in_order(low.units.of(run.stage), run.action.kind)
        waiting: _Waiting | None = None
        for unit in units:
            for place, piece in enumerate(self._of(unit, run.action.kind)):
                if place == 0 or waiting is None or waiting.piece.name != piece.name:
                    self._gather(low, piece, run)
                if waiting is not None:
                    self._compute(low, waiting)
                waiting = _Waiting(piece, (id(unit), place), run._replace(after=(*run.after, *self._gathered)))
        if waiting is not None:
            self._compute(low, waiting)
        return low.computed or 0

    def reduce(self, low: Lowering, stages: Sequence[PipelineStage], after: int) -> None:
        """Nothing to do: the backwards have reduced their gradients."""

    def end(self, low: Lowering, stages: Sequence[PipelineStage], after: int) -> None:
        """Nothing to do: the next step gathers what it needs."""

    def _of(self, unit: Unit, kind: ActionKind) -> list[Piece]:
        if (id(unit), kind) not in self._pieces:
            self._pieces[id(unit), kind] = [*pieces(unit, kind)]
        return self._pieces[id(unit), kind]

    def _gather(self, low: Lowering, piece: Piece, run: Pass) -> None:
        """Begin to gather once all that was begun before is done; the host copies the parts one by one."""
        after = (*self._gathered, *(() if low.computed is None else (low.computed,)))
        (group, *_) = low.plan.parameter_groups
        held = [(group, piece.elements)]
        before, self._gathered = self._gathered, low.gather(f"gather {piece.name}", held, after)
        self._copy(low, run, piece.elements, before)

    def _copy(self, low: Lowering, run: Pass, elements: int, after: tuple[int, ...]) -> None:
        """The loop over all ranks' parts of a parameter."""
        (group, *_) = low.plan.parameter_groups
        kernel = copy_kernel("copy of all ranks' parts", low.plan.training.recipe.activations, elements)
        work = WorkType.FORWARD if run.action.kind is ActionKind.FORWARD else WorkType.BACKWARD
        operation = Operation(replace(kernel, host_calls=_CALLS * group.shard_count), work)
        low.compute(Pass(run.stage, run.action, after), ("parts", elements, work), (operation,))

    def _compute(self, low: Lowering, waiting: _Waiting) -> None:
        """Run what uses one parameter, and reduce its gradients, each by itself."""
        piece, run = waiting.piece, waiting.run
        task = low.compute(run, waiting.key, piece.operations)
        (group, *_) = low.plan.parameter_groups
        for elements in gradients(piece.operations, low.plan.model):
            self._copy(low, run, elements, ())
            low.reducing += low.reduce(f"reduce {piece.name}", group, elements, (task,))


def pieces(unit: Unit, kind: ActionKind) -> Iterator[Piece]:
    """A unit's pass, cut before each product that needs another parameter than the one before it."""
    begin, name, elements = 0, unit.name, 0
    operations = unit.operations(kind)
    for place, operation in enumerate(operations):
        found = _matrix(operation.kernel)
        if found is None or (found[0] == name and operation.work_type is operations[begin].work_type):
            continue
        if elements:
            yield Piece(name, elements, operations[begin:place])
            begin = place
        name, elements = found
    yield Piece(name, elements or unit.parameters, operations[begin:])


def _matrix(kernel: Kernel | None) -> tuple[str, int] | None:
    """The linear layer whose parameter a kernel reads, and its elements."""
    match kernel:
        case Kernel(shape=MatmulShape(n=n, k=k, batch=1, operands=MatmulLayout.NT | MatmulLayout.NN)):
            return kernel.name.removesuffix(".input_gradient"), n * k
    return None


def gradients(operations: Sequence[Operation], model: TransformerModel) -> Iterator[int]:
    """Elements of each gradient that operations complete: matrices and biases, both vectors of layer norms, tables."""
    matrix = 0
    for operation in operations:
        match operation.kernel:
            case Kernel(shape=MatmulShape(m=m, n=n, batch=1, operands=MatmulLayout.TN)):
                matrix = m * n
        if operation.gradient_count:
            half = operation.gradient_count // 2
            first = matrix or (
                half if operation.gradient_count == norm_parameter_count(model) == 2 * model.hidden else 0
            )
            yield from (item for item in (first, operation.gradient_count - first) if item)
            matrix = 0
