"""What does a pass of a microbatch through a stage take at least?

Its kernels, each as long as it takes alone on the fastest of the job's GPUs, and the collectives of tensor
parallelism and the travel of tokens to experts, alone on their links, where they stand between its kernels. What else
is communicated, waited for or slowed comes on top.

Where tokens may travel beside another microbatch's computation they still slow it: kernels that take K alone go on at
r of their pace while tokens travel, for E seconds. What of E is beside nothing, or beside collectives that kernels wait
for, X seconds, lasts by itself. So passes take K + X + (1 - r) max(0, E - X) at least. Collectives are not counted
where members get unlike parts.

What passes take follows from few keys of a layout, so of thousands of layouts it is worked out some hundred times.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Final, NamedTuple

import numpy as np

from clustersim.build import device_models, uncontended_comm_cost
from clustersim.common.arrays import FloatArray
from clustersim.common.lru import LruCache, unit_size
from clustersim.common.units import Seconds
from clustersim.cost.device_models import DeviceModel
from clustersim.cost.interference import KERNEL_CLASSES
from clustersim.cost.timing import CommCost
from clustersim.lowering.units import Unit, Units
from clustersim.model.kernels import TENSOR_CORE_KINDS
from clustersim.parallel.data_parallel_strategy import DdpStrategy
from clustersim.parallel.layer_partition import PipelineStage
from clustersim.parallel.mesh import EP_GROUP, ETP_EP_GROUP, ETP_GROUP, TP_GROUP
from clustersim.parallel.plan import Plan
from clustersim.program.action import ActionKind
from clustersim.program.task import CollectiveType, CommOp
from clustersim.scenario.resolved import ResolvedScenario

_ROLES: Final = (TP_GROUP, EP_GROUP, ETP_GROUP, ETP_EP_GROUP)
_NAMES: Final = tuple(role.name for role in _ROLES)
_USES: Final = 4
PRODUCTS_OF, STREAMING_OF, _BETWEEN, _BESIDE = range(_USES)
"""What a pass takes: products, other kernels, collectives between them, and tokens' travel beside another pass."""
_MOST_UNITS: Final = 512
_MOST_MESHES: Final = 64


def own(times: FloatArray) -> FloatArray:
    """[stages] seconds in which a rank does nothing else."""
    sums: FloatArray = times[:, :_BESIDE].sum(axis=1)
    return sums


class _Taken(NamedTuple):
    """What a pass through a unit takes, whatever the mesh: seconds of kernels by use, and how often it does which."""

    products: Seconds
    streaming: Seconds
    exchanges: Mapping[CommOp, int]


class _Pieces:
    """What passes take through the units that plans of one kind have."""

    def __init__(self, plan: Plan, machines: tuple[DeviceModel, ...]) -> None:
        self._plan, self._machines = plan, machines
        self._units = Units(plan)
        self._built: dict[Hashable, Unit] = {}
        self._taken: dict[tuple[Hashable, ActionKind], _Taken] = {}

    def of(self, piece: "_Piece", kind: ActionKind) -> _Taken:
        """What a pass takes."""
        key = piece.key, kind
        if key not in self._taken:
            self._taken[key] = self._work_out(self._unit(piece), kind)
        return self._taken[key]

    def _unit(self, piece: "_Piece") -> Unit:
        if piece.key not in self._built:
            self._built[piece.key] = piece.build(self._units)
        return self._built[piece.key]

    def _work_out(self, unit: Unit, kind: ActionKind) -> _Taken:
        seconds, exchanges = [0.0, 0.0], Counter[CommOp]()
        for operation in unit.operations(kind):
            if (kernel := operation.kernel) is not None:
                use = PRODUCTS_OF if kernel.kind in TENSOR_CORE_KINDS else STREAMING_OF
                seconds[use] += min(machine.kernels.time_kernel(kernel).seconds for machine in self._machines)
            elif isinstance(operation.body, CommOp):
                exchanges[operation.body] += 1
        return _Taken(seconds[PRODUCTS_OF], seconds[STREAMING_OF], exchanges)


class _Piece(NamedTuple):
    """A unit of stages. key: what tells it from others of plans of its kind."""

    key: Hashable
    build: Callable[[Units], Unit]


_PIECES: Final = LruCache[tuple[_Pieces, Any]](_MOST_UNITS, size=unit_size)
_EXCHANGES: Final = LruCache[tuple[CommCost, Any]](_MOST_MESHES, size=unit_size)
"""Results, with the objects that their keys tell by identity, so that nothing else takes their place."""


class Passes:
    """What passes of a microbatch take at least, by stage and use."""

    def __init__(self, plan: Plan, setup: ResolvedScenario) -> None:
        layout = setup.layout
        self._beside = layout.overlap_expert_communication or layout.overlap_shared_experts
        self._uneven = layout.delay_wgrad or setup.training.expert_load is not None
        self._plan, self._setup, self._machines = plan, setup, device_models(setup)
        self._fastest = max(1.0, float(setup.degradations.gpu_speeds(setup.cluster.machine_gpu_ids).max()))
        self._counts: dict[Hashable, tuple[_Piece, FloatArray]] = {}
        for stage in plan.stages:
            self._count(stage)

    def _count(self, stage: PipelineStage) -> None:
        plan = self._plan
        for run in plan.layer_runs(stage):
            one = run._replace(layers=replace(run.layers, count=1))
            self._add(stage, _Piece(one, partial(Units.layer, run=one, load=None)), run.layers.count)
        first = [plan.embedding] if stage.has_embedding else []
        for layer_operators in (*first, *plan.mtp_embeddings(stage)):
            self._add(
                stage,
                _Piece(("embedding", layer_operators.parameter_count), partial(Units.embedding, first=layer_operators)),
            )
        if stage.has_head:
            head = plan.stage_head(stage)
            self._add(stage, _Piece(("head", head.parameter_count), partial(Units.head, last=head)))

    def _add(self, stage: PipelineStage, piece: _Piece, many: int = 1) -> None:
        _, counts = self._counts.setdefault(piece.key, (piece, np.zeros(len(self._plan.stages))))
        counts[stage.index] += many

    @cached_property
    def _pieces(self) -> _Pieces:
        """Nothing of a unit depends on how many ranks are behind each other or hold the same, or how they keep it."""
        plan, machines = self._plan, self._machines
        layout = replace(plan.layout, pp=1, dp=1, mirrored=False, layers_per_stage=None, data=DdpStrategy())
        kernels = tuple(id(machine.kernels) for machine in machines)
        key = plan.model, plan.training, layout, kernels
        found, _ = _PIECES.get_or_compute(key, lambda: (_Pieces(plan, machines), machines))
        return found

    @cached_property
    def _exchanges(self) -> CommCost:
        setup, layout = self._setup, self._setup.layout
        cluster, cost, wrong = setup.cluster, setup.cost, setup.degradations
        mesh = *layout.all_degrees.items(), layout.effective_etp, layout.order, layout.mirrored
        key = id(cluster.fabric), cluster.library, cluster.is_measured, id(cost), id(wrong), mesh
        found, _ = _EXCHANGES.get_or_compute(
            key, lambda: (uncontended_comm_cost(setup, _ROLES), (cluster, cost, wrong))
        )
        return found

    @cached_property
    def forward(self) -> FloatArray:
        """[stages, uses] seconds."""
        return self._of(ActionKind.FORWARD)

    @cached_property
    def _whole(self) -> FloatArray:
        """[stages, uses] seconds of a backward in one."""
        return self._of(ActionKind.BACKWARD)

    @cached_property
    def _inputs(self) -> FloatArray:
        """[stages, uses] seconds of a backward's half of inputs."""
        return self._of(ActionKind.INPUT_GRADIENT)

    @cached_property
    def backward(self) -> FloatArray:
        """[stages, uses] seconds, whole or in halves, whichever is shorter."""
        whole, halves = self._whole, self._inputs + self._of(ActionKind.WEIGHT_GRADIENT)
        times = np.where((own(whole) <= own(halves))[:, None], whole, halves)
        times[:, _BESIDE] = np.minimum(whole[:, _BESIDE], halves[:, _BESIDE])
        return times

    @cached_property
    def going_back(self) -> FloatArray:
        """[stages] seconds until the stage before can go on."""
        times: FloatArray = np.minimum(own(self._whole), own(self._inputs))
        return times

    def slowed(self, taken: FloatArray) -> Seconds:
        """By how much a rank's kernels are longer, at least, of passes that take so long: [uses]."""
        return self._slowing * max(0.0, float(taken[_BESIDE] - taken[_BETWEEN]))

    @cached_property
    def _slowing(self) -> float:
        """The part of tokens' travel that kernels beside them do not make up for, at least."""
        every = (
            machine.interference.kernels[kind, of]
            for machine in self._machines
            for kind in CollectiveType
            for of in KERNEL_CLASSES
        )
        part = min(every)
        return part / (1.0 + part)

    def _of(self, kind: ActionKind) -> FloatArray:
        times = np.zeros((len(self._plan.stages), _USES))
        for piece, counts in self._counts.values():
            taken = self._pieces.of(piece, kind)
            row = np.array([taken.products / self._fastest, taken.streaming / self._fastest, 0.0, 0.0])
            for exchange, many in taken.exchanges.items():
                use = self._use(exchange)
                if use is not None:
                    row[use] += many * float(self._exchanges.time_comm_op(exchange).seconds.min())
            times += counts[:, None] * row
        return times

    def _use(self, exchange: CommOp) -> int | None:
        """What a collective counts as; None: as nothing."""
        if self._uneven or exchange.comm_group not in _NAMES:
            return None
        return _BETWEEN if exchange.comm_group == TP_GROUP.name or not self._beside else _BESIDE
