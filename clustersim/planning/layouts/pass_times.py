"""What does a pass of a microbatch through a stage take at least?

Its kernels, each at its isolated duration on the fastest of the job's GPUs, plus the collectives of tensor
parallelism and expert dispatch, uncontended, where they separate its kernels. Other communication, waiting
and slowdown come on top.

Where expert communication may overlap with another microbatch's computation it still slows it: kernels that
take K alone run at a fraction r of their rate during communication, which lasts E seconds. The part of E
that overlaps with nothing, or with exposed collectives of X seconds, lasts by itself. So passes take at
least K + X + (1 - r) max(0, E - X). Collectives whose members get different amounts (imbalance) are not
counted.

Pass times depend on few keys of a layout, so for thousands of layouts they are computed only some hundred
times.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Final, NamedTuple

import numpy as np

from clustersim.build import device_models, uncontended_comm_cost
from clustersim.common.arrays import FloatArray
from clustersim.common.cached_method import cached_by
from clustersim.common.interning import IdentityKey
from clustersim.common.lru import LruCache, unit_size
from clustersim.common.units import Seconds
from clustersim.cost.device_models import DeviceModel
from clustersim.cost.interference import KERNEL_CLASSES
from clustersim.cost.timing import CommCost
from clustersim.lowering.units import Unit, UnitBuilder
from clustersim.model.kernels import TENSOR_CORE_KINDS
from clustersim.parallel.data_parallel_strategy import DdpStrategy
from clustersim.parallel.layer_partition import PipelineStage
from clustersim.parallel.mesh import EP_GROUP, ETP_EP_GROUP, ETP_GROUP, TP_GROUP
from clustersim.parallel.plan import Plan
from clustersim.program.action import ActionKind
from clustersim.program.task import CollectiveType, CommOp
from clustersim.scenario.resolved import ResolvedScenario

_COMM_GROUPS: Final = (TP_GROUP, EP_GROUP, ETP_GROUP, ETP_EP_GROUP)
_COMM_GROUP_NAMES: Final = tuple(comm_group.name for comm_group in _COMM_GROUPS)
_USE_COUNT: Final = 4
MATMUL_INDEX, MEMORY_BOUND_INDEX, _EXPOSED_INDEX, _OVERLAPPED_INDEX = range(_USE_COUNT)
"""Times of a pass: matmuls, other kernels, collectives between them, and dispatch overlapping another pass."""
_MAX_UNIT_CACHES: Final = 512
_MAX_MESH_CACHES: Final = 64


def exclusive_seconds(times: FloatArray) -> FloatArray:
    """[stages] seconds in which a rank does nothing else."""
    sums: FloatArray = times[:, :_OVERLAPPED_INDEX].sum(axis=1)
    return sums


class _UnitTimes(NamedTuple):
    """Times of a pass through a unit, whatever the mesh: kernel seconds by use, and the count of each comm op."""

    matmul_seconds: Seconds
    memory_bound_seconds: Seconds
    comm_ops: Mapping[CommOp, int]


class _UnitTimeCache:
    """Unit times of plans that share everything a unit depends on."""

    def __init__(self, plan: Plan, devices: tuple[DeviceModel, ...]) -> None:
        self._plan, self._devices = plan, devices
        self._units = UnitBuilder(plan)

    @cached_by(lambda _, spec: spec.key)
    def _build_unit(self, spec: "_UnitSpec") -> Unit:
        return spec.build(self._units)

    @cached_by(lambda _, spec, kind: (spec.key, kind))
    def unit_times(self, spec: "_UnitSpec", kind: ActionKind) -> _UnitTimes:
        """The times of one kind of pass through a unit."""
        seconds, comm_ops = [0.0, 0.0], Counter[CommOp]()
        for operation in self._build_unit(spec).operations(kind):
            if (kernel := operation.kernel) is not None:
                use = MATMUL_INDEX if kernel.kind in TENSOR_CORE_KINDS else MEMORY_BOUND_INDEX
                seconds[use] += min(device.kernels.time_kernel(kernel).seconds for device in self._devices)
            elif isinstance(operation.body, CommOp):
                comm_ops[operation.body] += 1
        return _UnitTimes(seconds[MATMUL_INDEX], seconds[MEMORY_BOUND_INDEX], comm_ops)


class _UnitSpec(NamedTuple):
    """A unit of stages. key: distinguishes it within plans of its kind; build: its builder."""

    key: Hashable
    build: Callable[[UnitBuilder], Unit]


_UNIT_TIME_CACHES: Final = LruCache[_UnitTimeCache](_MAX_UNIT_CACHES, size=unit_size)
_COMM_COST_CACHES: Final = LruCache[CommCost](_MAX_MESH_CACHES, size=unit_size)


class PassTimes:
    """Lower bounds of pass times of a microbatch, [stages, uses] in seconds."""

    def __init__(self, plan: Plan, resolved: ResolvedScenario) -> None:
        layout = resolved.layout
        self._overlaps_experts = layout.overlap_moe_expert_parallel_comm or layout.moe_shared_expert_overlap
        self._excludes_collectives = layout.delay_wgrad_compute or resolved.training.expert_load is not None
        self._plan, self._resolved, self._devices = plan, resolved, device_models(resolved)
        self._max_speed = max(1.0, float(resolved.degradations.gpu_speeds(resolved.cluster.machine_gpu_ids).max()))
        self._unit_counts: dict[Hashable, tuple[_UnitSpec, FloatArray]] = {}
        for stage in plan.stages:
            self._count_units(stage)

    def _count_units(self, stage: PipelineStage) -> None:
        plan = self._plan
        for run in plan.layer_runs(stage):
            single_layer = run._replace(layers=replace(run.layers, count=1))
            self._add_unit(
                stage,
                _UnitSpec(single_layer, partial(UnitBuilder.layer_unit, layer_run=single_layer, load_index=None)),
                run.layers.count,
            )
        input_embeddings = [plan.embedding] if stage.has_embedding else []
        for input_embedding in (*input_embeddings, *plan.mtp_embeddings(stage)):
            self._add_unit(
                stage,
                _UnitSpec(
                    ("embedding", input_embedding.parameter_count),
                    partial(UnitBuilder.embedding_unit, layer=input_embedding),
                ),
            )
        if stage.has_head:
            head = plan.stage_head(stage)
            self._add_unit(stage, _UnitSpec(("head", head.parameter_count), partial(UnitBuilder.head_unit, layer=head)))

    def _add_unit(self, stage: PipelineStage, spec: _UnitSpec, count: int = 1) -> None:
        _, counts = self._unit_counts.setdefault(spec.key, (spec, np.zeros(len(self._plan.stages))))
        counts[stage.index] += count

    @cached_property
    def _unit_times(self) -> _UnitTimeCache:
        """Unit times; they do not depend on pipeline and data-parallel degrees or on sharding of states.

        Unless documents are packed, whose work depends on how many ranks and microbatches share it.
        """
        plan, devices = self._plan, self._devices
        layout = replace(plan.layout, pp=1, dp=1, mirrored=False, layers_per_stage=None, data=DdpStrategy())
        kernels = tuple(IdentityKey(device.kernels) for device in devices)
        key = plan.model, plan.training, layout, kernels, plan.layer_shard.packed_batch
        return _UNIT_TIME_CACHES.get_or_compute(key, lambda: _UnitTimeCache(plan, devices))

    @cached_property
    def _comm_cost(self) -> CommCost:
        resolved = self._resolved
        return _COMM_COST_CACHES.get_or_compute(
            _comm_key(resolved), lambda: uncontended_comm_cost(resolved, _COMM_GROUPS)
        )

    @cached_property
    def forward(self) -> FloatArray:
        """[stages, uses] seconds."""
        return self._stage_times(ActionKind.FORWARD)

    @cached_property
    def _full_backward(self) -> FloatArray:
        """[stages, uses] seconds of a full (unsplit) backward."""
        return self._stage_times(ActionKind.BACKWARD)

    @cached_property
    def _input_gradients(self) -> FloatArray:
        """[stages, uses] seconds of the input-gradient half of a backward."""
        return self._stage_times(ActionKind.INPUT_GRADIENT)

    @cached_property
    def backward(self) -> FloatArray:
        """[stages, uses] seconds, full or split, whichever is shorter."""
        full, split = self._full_backward, self._input_gradients + self._stage_times(ActionKind.WEIGHT_GRADIENT)
        times = np.where((exclusive_seconds(full) <= exclusive_seconds(split))[:, None], full, split)
        times[:, _OVERLAPPED_INDEX] = np.minimum(full[:, _OVERLAPPED_INDEX], split[:, _OVERLAPPED_INDEX])
        return times

    @cached_property
    def propagation_seconds(self) -> FloatArray:
        """[stages] seconds until the previous stage can continue backward."""
        times: FloatArray = np.minimum(exclusive_seconds(self._full_backward), exclusive_seconds(self._input_gradients))
        return times

    def slowdown_seconds(self, seconds: FloatArray) -> Seconds:
        """Minimum slowdown in seconds of a rank's kernels by overlapping communication, from [uses] pass seconds."""
        return self._min_slowdown * max(0.0, float(seconds[_OVERLAPPED_INDEX] - seconds[_EXPOSED_INDEX]))

    @cached_property
    def _min_slowdown(self) -> float:
        """Minimum share of overlapped communication time by which the kernels are delayed."""
        slowdowns = (
            device.interference.kernels[kind, kernel_class]
            for device in self._devices
            for kind in CollectiveType
            for kernel_class in KERNEL_CLASSES
        )
        slowdown = min(slowdowns)
        return slowdown / (1.0 + slowdown)

    def _stage_times(self, kind: ActionKind) -> FloatArray:
        times = np.zeros((len(self._plan.stages), _USE_COUNT))
        for spec, counts in self._unit_counts.values():
            unit = self._unit_times.unit_times(spec, kind)
            seconds = np.array(
                [unit.matmul_seconds / self._max_speed, unit.memory_bound_seconds / self._max_speed, 0.0, 0.0]
            )
            for comm_op, count in unit.comm_ops.items():
                use = self._use_index(comm_op)
                if use is not None:
                    seconds[use] += count * float(self._comm_cost.time_comm_op(comm_op).seconds.min())
            times += counts[:, None] * seconds
        return times

    def _use_index(self, comm_op: CommOp) -> int | None:
        """The use index that a collective counts as; None: not counted."""
        if self._excludes_collectives or comm_op.comm_group not in _COMM_GROUP_NAMES:
            return None
        return (
            _EXPOSED_INDEX if comm_op.comm_group == TP_GROUP.name or not self._overlaps_experts else _OVERLAPPED_INDEX
        )


def _comm_key(resolved: ResolvedScenario) -> tuple[Hashable, ...]:
    """What times of collectives between kernels depend on."""
    cluster, layout = resolved.cluster, resolved.layout
    return (
        *map(IdentityKey, (cluster.fabric, resolved.cost, resolved.degradations)), cluster.library,
        cluster.is_measured, *layout.all_degrees.items(), layout.effective_etp, layout.order, layout.mirrored,
    )  # fmt: skip


def cached_pass_times(plan: Plan, resolved: ResolvedScenario) -> PassTimes:
    """Pass times of a plan; cached, as layouts that differ in what is sharded share them."""
    cluster = resolved.cluster
    layout = replace(plan.layout, pp=1, dp=1, mirrored=False, layers_per_stage=None, data=DdpStrategy())
    partition = plan.placement, plan.layout.layers_per_stage, plan.layout.world_size, plan.layer_shard.packed_batch
    devices = map(IdentityKey, (cluster.machine, resolved.framework))
    key = plan.model, plan.training, layout, *partition, *devices, *_comm_key(resolved)
    return _PASS_TIMES.get_or_compute(key, lambda: PassTimes(plan, resolved))


_PASS_TIMES: Final = LruCache[PassTimes](_MAX_UNIT_CACHES, size=unit_size)
