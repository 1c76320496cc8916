"""How is one layer run by the ranks of a tensor- and context-parallel group?

Tensor parallelism (Megatron-LM, Shoeybi et al. 2019): a sharded region starts with a column-parallel matmul and ends
with a row-parallel one. Forward all-reduces at the end, backward at the start. With sequence parallelism (Korthikanti
et al. 2022, section 4.2.2) the replicated regions hold a part of the sequence: forward all-gathers at the start and
reduce-scatters at the end, backward the reverse, and gathers the saved input once more for the weight gradient.
Backward's collective of the input gradient runs beside the weight gradient's matmul, which does not need it
(Megatron-LM, `LinearWithGradAccumulationAndAsyncCommunication`), unless `backward_overlap` is off. With
`tensor_overlap` the other collectives are cut into tp chunks and pipelined with their matmul (Transformer Engine's user
buffers, which work within one NVLink domain). Where backward is run in halves (zero-bubble schedules), no weight
gradient is beside the input gradient's collective, and the input is gathered again in the weights' half
(sail-sg/zero-bubble-pipeline-parallelism, `WeightGradStore`).

With `overlap_shared_experts` shared experts run while tokens travel: the product before their activation beside the way
to the routed experts, the one behind it beside the way back, in backward the other way round (Megatron-LM,
`SharedExpertMLP` in megatron/core/transformer/moe/shared_experts.py). The longer hides the shorter; other kernels of
shared experts hide nothing.

Context parallelism: keys and values travel a ring while attention works on the block that is already there (Ring
Attention, Liu et al. 2023; Transformer Engine's `p2p`), forward once, backward together with their gradients.
"""

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from clustersim.common.dtypes import DType
from clustersim.common.units import Bytes
from clustersim.model.kernels import Kernel, KernelKind
from clustersim.model.layers import Layer, Operator, Region
from clustersim.model.operators import Entry, Joining, Joint, until_saved
from clustersim.model.recompute_modules import Module
from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import CONTEXT_ROLE, TENSOR_ROLE
from clustersim.parallel.token_dispatch import Dispatch
from clustersim.program.task import CollectiveType, CommOp, CommOverlap, Operation, WorkType


@dataclass(frozen=True, slots=True)
class Operands:
    """Operands that are cast before they are gathered. searched: ranks look for their largest element first."""

    format: DType
    searched: bool = False


@dataclass(frozen=True, slots=True)
class Sharding:
    """What the collectives of a layer need to know.

    activation: bytes of the whole activation [batch, sequence / cp, hidden]; keys_values: bytes of the keys and values
    of the whole sequence on this tensor-parallel rank; format: of both; enters, leaves: whether activations come into
    and go out of the layer's sharded regions (tokens come into the embedding, and the loss goes nowhere); dispatch: how
    tokens travel to experts, where the layer has some; operands: in which other format operands are gathered.
    """

    layout: Layout
    activation: Bytes
    keys_values: Bytes
    format: DType
    enters: bool = True
    leaves: bool = True
    dispatch: Dispatch | None = None
    operands: Operands | None = None

    @property
    def sequence_parallel(self) -> bool:
        """Whether replicated regions hold a part of the sequence."""
        return self.layout.sequence_parallel and self.layout.tp > 1

    def enter(self, size: Bytes | None = None) -> CommOp | None:
        """The collective before a column-parallel matmul, forward; size: of what comes in, None: an activation."""
        gathers = self.sequence_parallel and self.enters
        return self._exchange("gather input", CollectiveType.ALL_GATHER, size) if gathers else None

    def leave(self) -> CommOp | None:
        """The collective after a row-parallel matmul, forward."""
        if self.layout.tp == 1 or not self.leaves:
            return None
        return self._exchange("reduce output", self._reduction)

    def enter_gradient(self) -> CommOp | None:
        """The collective before the backward of a row-parallel matmul."""
        gathers = self.sequence_parallel and self.leaves
        return self._exchange("gather output gradient", CollectiveType.ALL_GATHER) if gathers else None

    def input_again(self, size: Bytes | None = None) -> CommOp | None:
        """The collective beside the input gradient of a column-parallel matmul."""
        gathers = self.sequence_parallel and self.enters
        return self._exchange("gather input again", CollectiveType.ALL_GATHER, size) if gathers else None

    def input_gradient(self, size: Bytes | None = None) -> CommOp | None:
        """The collective beside the weight gradient of a column-parallel matmul."""
        if self.layout.tp == 1 or not self.enters:
            return None
        return self._exchange("reduce input gradient", self._reduction, size)

    def compared(self, gathered: CommOp | None, work: WorkType) -> list[Operation]:
        """The largest element of a tensor over the ranks whose parts are gathered, where it is sought."""
        if gathered is None or self.operands is None or not self.operands.searched:
            return []
        size, kind = float(DType.FP32.bytes), CollectiveType.ALL_REDUCE
        return [Operation(CommOp("largest element", kind, TENSOR_ROLE.name, size, reduce_dtype=DType.FP32), work)]

    def ring(self, factor: float) -> "_Ring | None":
        """Keys and values (`factor` times their bytes) around the context-parallel ring."""
        if self.layout.cp == 1:
            return None
        exchange = CommOp("ring of keys and values", CollectiveType.SHIFT, CONTEXT_ROLE.name, factor * self.keys_values)
        return _Ring(exchange, self.layout.cp)

    def over_vocabulary(self, tokens: int) -> list[Operation]:
        """Maximum, target logit and sum of a loss over a split vocabulary: three FP32 numbers a token."""
        if self.layout.tp == 1:
            return []
        names = ("largest logit", "target logit", "sum of exponentials")
        payload = float(tokens * DType.FP32.bytes)
        return [
            Operation(
                CommOp(name, CollectiveType.ALL_REDUCE, TENSOR_ROLE.name, payload, reduce_dtype=DType.FP32),
                WorkType.FORWARD,
            )
            for name in names
        ]

    @property
    def _reduction(self) -> CollectiveType:
        return CollectiveType.REDUCE_SCATTER if self.sequence_parallel else CollectiveType.ALL_REDUCE

    def _exchange(self, name: str, kind: CollectiveType, size: Bytes | None = None) -> CommOp:
        payload = self.activation if size is None else size
        if kind is CollectiveType.ALL_GATHER and self.operands is not None:
            payload *= self.operands.format.bytes / self.format.bytes
        return CommOp(name, kind, TENSOR_ROLE.name, payload, reduce_dtype=self.format if kind.is_reduction else None)


@dataclass(frozen=True, slots=True)
class _Ring:
    """An exchange that attention hides block by block."""

    exchange: CommOp
    blocks: int


_JOINING: Final[Mapping[Joining, tuple[str, CollectiveType]]] = MappingProxyType(
    {
        Joining.GATHERED: ("gather", CollectiveType.ALL_GATHER),
        Joining.SUMMED: ("sum", CollectiveType.ALL_REDUCE),
    }
)


def _joints(joints: Iterable[Joint], work: WorkType) -> list[Operation]:
    """The collectives that join tensors of which each rank has a part."""
    return [Operation(_joint(joint), work) for joint in joints]


def _joint(joint: Joint) -> CommOp:
    verb, kind = _JOINING[joint.how]
    return CommOp(f"{verb} {joint.of}", kind, TENSOR_ROLE.name, joint.size)


def forward(layer: Layer, sharding: Sharding) -> list[Operation]:
    """Operations of a layer's forward, with its collectives."""
    return _forward(_places(layer.operators, sharding), sharding, WorkType.FORWARD)


def forward_again(layer: Layer, sharding: Sharding, *, early_stop: bool) -> list[Operation]:
    """Operations that full recomputation runs again before a layer's backward."""
    return _forward(_again(_places(layer.operators, sharding), early_stop=early_stop), sharding, WorkType.RECOMPUTE)


def _forward(places: Sequence["_Place"], sharding: Sharding, work: WorkType) -> list[Operation]:
    chunks = _chunks(sharding.layout)
    made: list[_Made] = []
    for place in places:
        kernels = _attended(place, place.operator.forward, sharding.ring(1.0), work)
        if place.enters:
            gathered = sharding.enter(place.operator.entering)
            kernels = sharding.compared(gathered, work) + _joined(gathered, kernels, 0, chunks)
        if place.leaves:
            kernels = _joined(sharding.leave(), kernels, len(kernels), chunks)
        sent, returned = _routed(sharding, work, out=place.arrives, back=place.returns)
        made.append((place, sent + kernels + _joints(place.operator.joints.result, work) + returned))
    return _together(made, sharding)


def backward(layer: Layer, sharding: Sharding) -> list[Operation]:
    """Operations of a layer's backward, with its collectives, in reverse order of the operators."""
    beside = math.inf if sharding.layout.backward_overlap else _chunks(sharding.layout)
    made: list[_Made] = []
    for place in reversed(_places(layer.operators, sharding)):
        inputs, weights = _inputs(place, sharding), _weights(place)
        if place.gathers:
            inputs = _joined(_input_again(place, sharding), inputs, 0, beside)
        if place.enters:
            weights = _joined(sharding.input_gradient(place.operator.entering), weights, 0, beside)
        made.append((place, _completed(inputs + weights, place.operator.gradients, place.operator.group)))
    return _together(made, sharding, backward=True)


def input_gradients(layer: Layer, sharding: Sharding) -> list[Operation]:
    """Operations of the half of a backward that the stage before waits for; no weight gradient hides its sums."""
    made: list[_Made] = []
    for place in reversed(_places(layer.operators, sharding)):
        inputs = _inputs(place, sharding)
        if place.enters:
            summed = sharding.input_gradient(place.operator.entering)
            inputs = _joined(summed, inputs, len(inputs), _chunks(sharding.layout))
        made.append((place, inputs))
    return _together(made, sharding, backward=True)


def weight_gradients(layer: Layer, sharding: Sharding) -> list[Operation]:
    """Operations of the other half; nothing hides that inputs are gathered again.

    Gradients of norms are there already; they count with the next weight's, or with the last one's.
    """
    operations: list[Operation] = []
    early: dict[str, int] = {}
    last: dict[str, int] = {}
    for place in reversed(_places(layer.operators, sharding)):
        weights, group = _weights(place), place.operator.group
        if place.gathers:
            weights = _joined(_input_again(place, sharding), weights, 0, 1)
        complete = early.pop(group, 0) + place.operator.gradients
        operations += _completed(weights, complete, group)
        if weights:
            last[group] = len(operations) - 1
        else:
            early[group] = complete
    for group, complete in early.items():
        if complete and group not in last:
            raise ValueError(f"a layer has {complete} parameters of {group} and no weight gradient that completes them")
        if complete:
            at = last[group]
            operations[at : at + 1] = _completed([operations[at]], complete + operations[at].gradient_count, group)
    return operations


def _inputs(place: "_Place", sharding: Sharding) -> list[Operation]:
    """An operator's input gradient; the ring carries keys, values and the gradients of both."""
    inputs = _attended(place, place.operator.input_gradient, sharding.ring(2.0), WorkType.BACKWARD)
    if place.leaves:
        gathered = sharding.enter_gradient()
        inputs = sharding.compared(gathered, WorkType.BACKWARD) + _joined(gathered, inputs, 0, _chunks(sharding.layout))
    sent, returned = _routed(sharding, WorkType.BACKWARD, out=place.returns, back=place.arrives)
    inputs = sent + inputs + returned
    joints = place.operator.joints
    return [*_joints(joints.entering, WorkType.BACKWARD), *inputs, *_joints(joints.leaving, WorkType.BACKWARD)]


def _routed(sharding: Sharding, work: WorkType, *, out: bool, back: bool) -> tuple[list[Operation], list[Operation]]:
    """The exchanges by which tokens come to the ranks of experts before an operator, and leave behind it."""
    if sharding.dispatch is None:
        return [], []
    again = work is WorkType.BACKWARD
    sent = sharding.dispatch.there(again=again) if out else ()
    returned = sharding.dispatch.back(again=again) if back else ()
    return [Operation(comm_op, work) for comm_op in sent], [Operation(item, work) for item in returned]


def _input_again(place: "_Place", sharding: Sharding) -> CommOp | None:
    """The collective that gathers a column-parallel matmul's input for its weight gradient, if that is still to do."""
    reads = place.operator.weight_gradient and not place.operator.whole
    return sharding.input_again(place.operator.entering) if reads else None


def _weights(place: "_Place") -> list[Operation]:
    kernels, routed = place.operator.weight_gradient, place.operator.region is Region.ROUTED
    return [Operation(kernel, WorkType.BACKWARD, load_index=place.load, on_expert_rank=routed) for kernel in kernels]


def modules_again(layer: Layer, sharding: Sharding, modules: Set[Module], *, early_stop: bool) -> list[Operation]:
    """Operations that selective recomputation runs again before a layer's backward, one module after the other.

    A module whose result is dropped, too, is run to its end.
    """
    places, again = _places(layer.operators, sharding), list[Operation]()
    for module in (item for item in Module if item in modules):
        inside = [place for place in places if place.operator.inside({module})]
        inside = [*_again(inside, early_stop=early_stop and not module.drops_result)]
        again += _forward(inside, sharding, WorkType.RECOMPUTE)
    return again


def operations_again(layer: Layer, sharding: Sharding, *, early_stop: bool) -> list[Operation]:
    """Operations that selective recomputation by operations runs again: gathers too; sums are among what is kept."""
    again: list[Operation] = []
    for place in _again(_places(layer.operators, sharding), early_stop=early_stop):
        kernels = _attended(place, place.operator.run_again, sharding.ring(1.0), WorkType.RECOMPUTE)
        gathered = sharding.enter(place.operator.entering) if place.enters else None
        again += _joined(gathered, kernels, 0, _chunks(sharding.layout)) if kernels else []
        again += _joints(place.operator.joints.result if kernels else (), WorkType.RECOMPUTE)
    return again


def _again(places: Sequence["_Place"], *, early_stop: bool) -> Sequence["_Place"]:
    """Of what is recomputed, what is run."""
    return places[: until_saved([place.operator for place in places])] if early_stop else places


@dataclass(frozen=True, slots=True)
class _Place:
    """An operator, whether something comes into a sharded region for it, it is the region's last, or a core's first.

    gathers: it is the first in backward that reads what came in; arrives, returns: it is the first, or the last, on the
    ranks of experts; load: number of the load by which these have more rows than others.
    """

    operator: Operator
    enters: bool
    leaves: bool
    attends: bool
    gathers: bool
    arrives: bool = False
    returns: bool = False
    load: int | None = None


def _places(operators: Sequence[Operator], sharding: Sharding) -> list[_Place]:
    load = None if sharding.dispatch is None else sharding.dispatch.load
    sharded = [False, *(operator.region is Region.SHARDED for operator in operators), False]
    routed = [False, *(operator.region is Region.ROUTED for operator in operators), False]
    cores = [False, *(operator.inside({Module.CORE}) for operator in operators)]
    again = any(operator.entry is Entry.SAME for operator in operators)  # a parallel block, which is one region
    return [
        _Place(
            operator,
            enters=(enters := (sharded[number] and not sharded[number - 1]) or operator.entry is Entry.OTHER),
            leaves=sharded[number] and not sharded[number + 1],
            attends=cores[number] and not cores[number - 1],
            gathers=operator.entry is not None if again else enters,
            arrives=routed[number] and not routed[number - 1],
            returns=routed[number] and not routed[number + 1],
            load=load if routed[number] else None,
        )
        for number, operator in enumerate(operators, start=1)
    ]


_Made = tuple[_Place, list[Operation]]
"""An operator, and what is run for it."""


def _together(made: Sequence[_Made], sharding: Sharding, *, backward: bool = False) -> list[Operation]:
    """What is run for operators, in turn, or shared experts beside what travels if they are to be."""
    shared = [(place, own) for place, own in made if place.operator.inside({Module.SHARED_EXPERTS})]
    rest = [operation for place, own in made if not place.operator.inside({Module.SHARED_EXPERTS}) for operation in own]
    sent = [number for number, item in enumerate(rest) if item.moe_comm is not None]
    if not (sharding.layout.overlap_shared_experts and shared and sent):
        return [element for _, own in made for element in own]
    down = (number for number, (place, _) in enumerate(shared) if place.leaves)
    cut = next(down, len(shared)) + backward  # recomputation that stops early does without it
    halves = [[entry for _, own in half for entry in own] for half in (shared[:cut], shared[cut:])]
    there = next(number for number in range(sent[0], len(rest)) if rest[number].moe_comm is None)
    back = next(number for number in sent if number > there)
    end = sent[-1] + 1
    first, second = _beside(halves[0], rest[sent[0] : there]), _beside(halves[1], rest[back:end])
    return [*rest[: sent[0]], *first, *rest[there:back], *second, *rest[end:]]


def _beside(operations: list[Operation], travel: list[Operation]) -> list[Operation]:
    """The longest exchange that travels beside the largest kernel, the others before and behind."""
    kernels = {
        number: operation.body for number, operation in enumerate(operations) if isinstance(operation.body, Kernel)
    }
    exchanges = [item.moe_comm for item in travel if item.moe_comm is not None]
    if not kernels:
        return [*operations, *travel]
    at = max(kernels, key=lambda number: kernels[number].flops)
    longest = max(range(len(exchanges)), key=lambda number: exchanges[number].payload)
    both = replace(operations[at], body=CommOverlap(exchanges[longest], kernels[at], math.inf))
    return [*operations[:at], *travel[:longest], both, *travel[longest + 1 :], *operations[at + 1 :]]


def _attended(place: _Place, kernels: Sequence[Kernel], ring: _Ring | None, work: WorkType) -> list[Operation]:
    """Kernels of an operator; the attention core's first kernel hides the ring, one block of keys at a time."""
    routed = place.operator.region is Region.ROUTED
    operations = [Operation(kernel, work, load_index=place.load, on_expert_rank=routed) for kernel in kernels]
    if ring is None or not place.attends or not operations:
        return operations
    first, *others = operations
    if not isinstance(kernel := first.body, Kernel):
        return operations
    return [Operation(CommOverlap(ring.exchange, kernel, ring.blocks, is_ring=True), work), *others]


def _joined(exchange: CommOp | None, operations: list[Operation], place: int, chunks: float) -> list[Operation]:
    """Put an exchange before (place 0) or after the operations, pipelined with the nearest kernel if chunks > 1.

    What an operand is cast by comes before its gather.
    """
    if exchange is None:
        return operations
    work, gathers = operations[0].work_type if operations else WorkType.BACKWARD, place == 0
    place = next((at for at, operation in enumerate(operations) if not _casts(operation)), place) if gathers else place
    nearest = min(place, len(operations) - 1)
    if chunks > 1 and operations and isinstance(kernel := operations[nearest].body, Kernel):
        local = gathers and not math.isinf(chunks)  # its first chunk is this rank's own
        overlap = Operation(CommOverlap(exchange, kernel, chunks, local), work)
        return [*operations[:nearest], overlap, *operations[nearest + 1 :]]
    return [*operations[:place], Operation(exchange, work), *operations[place:]]


def _casts(operation: Operation) -> bool:
    return operation.kernel is not None and operation.kernel.kind is KernelKind.CAST


def _completed(operations: list[Operation], parameters: int, group: str) -> list[Operation]:
    """Mark the last operation as the one after which the operator's gradients are complete."""
    if not operations or parameters == 0:
        return operations
    last = operations[-1]
    return [*operations[:-1], replace(last, gradient_count=parameters, parameter_group=group)]


def _chunks(layout: Layout) -> float:
    return layout.tp if layout.tensor_overlap else 1
