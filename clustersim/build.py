"""How does a scenario become a plan, a program and its costs?

Builds everything that a simulation runs, without running it: who computes what (`build_plan`), in which order
(`schedule_order`), as which tasks (`build_program`), on which devices and links, and which ranks are
equivalent.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from clustersim.collectives.group_link_loads import AsymmetricLoadsError
from clustersim.collectives.library import Library
from clustersim.collectives.library_files import load_library
from clustersim.collectives.tuner import Tuner
from clustersim.common.arrays import IntArray
from clustersim.common.errors import InputError
from clustersim.common.interning import IdentityKey
from clustersim.common.lru import LruCache, lru_memoize, unit_size
from clustersim.cost.background_traffic import BackgroundFlow, background_flows, loaded_links
from clustersim.cost.bottleneck_links import restrict_to_bottleneck_links
from clustersim.cost.co_scheduled import ContendingJob, joint_equivalence_classes, map_job_contention
from clustersim.cost.collective_cost import CollectiveCost
from clustersim.cost.contention import ContentionMap, UncontendedComm
from clustersim.cost.device_models import DeviceModel, DeviceModels, ThrottledKernels
from clustersim.cost.host_transfers import CommModel, HostTransferCost
from clustersim.cost.imbalanced_comm import ImbalancedComm
from clustersim.cost.interference import Interference
from clustersim.cost.launch_tasks import LaunchCost
from clustersim.cost.measured_host import host_model
from clustersim.cost.p2p_overhead import P2pLaunchOverhead
from clustersim.cost.rank_equivalence import contended_classes, equivalence_classes, unfolded_classes
from clustersim.cost.roofline import Roofline
from clustersim.cost.segment import SegmentCost
from clustersim.cost.sustained_rate import AttentionLibraries, SustainedKernels, job_rate, unmeasured_effects
from clustersim.cost.timing import CommCost
from clustersim.hardware.accelerator import Accelerator
from clustersim.hardware.efficiency import TrainingDerating
from clustersim.hardware.rotation import HasRotation
from clustersim.lowering.host_launches import add_host_launches
from clustersim.lowering.pass_costs import with_pass_costs
from clustersim.lowering.repeat_steps import repeat_steps
from clustersim.lowering.training_step import lower_step
from clustersim.memory.ledger import PassOrder, pass_order
from clustersim.model.kernels import Kernel
from clustersim.model.training import AttentionBackend
from clustersim.model.unattributed import NO_UNATTRIBUTED_WORK, UnattributedWork
from clustersim.parallel.mesh import HOST_GROUP, LAUNCH_GROUP, CommGroup
from clustersim.parallel.plan import Plan
from clustersim.parallel.process_groups import groups_along_axes
from clustersim.program.action import PipelineOrder
from clustersim.program.program import BALANCED_LOADS, ProcessGroups, Program
from clustersim.program.task import CollectiveType, CommOverlap, ComputeTask, HostOp, Segment
from clustersim.scenario import Contention, Scenario, Symmetry
from clustersim.scenario.resolved import ResolvedScenario
from clustersim.scenario.validation_rules.consistency import find_problems
from clustersim.schedules.schedule import Schedule
from clustersim.symmetry.refinement import SymmetryClasses, singleton_classes
from clustersim.symmetry.rotation_orbits import StepOrbits, find_step_orbits

if TYPE_CHECKING:
    from clustersim.cost.calibration_record import CalibrationRecord
    from clustersim.cost.measured_collectives import MeasuredCollectives


@dataclass(frozen=True, slots=True)
class PreparedSimulation:
    """Everything that a simulation runs. contention: which collectives contend for links, None: none do."""

    plan: Plan
    cost: SegmentCost
    classes: SymmetryClasses
    contention: ContentionMap | None

    @property
    def program(self) -> Program:
        """The tasks of every rank."""
        return self.cost.program


@dataclass(frozen=True, slots=True)
class _UncontendedBuild:
    """A simulation before contention is known. comm_cost: cost model of collectives, p2p messages and host copies."""

    scenario: Scenario
    plan: Plan
    program: Program
    devices: DeviceModels
    comm_cost: CommModel
    orbits: StepOrbits | None

    @classmethod
    def from_scenario(cls, scenario: Scenario, *, by_orbit: bool = False) -> "_UncontendedBuild":
        """Build from a legal scenario; raise InputError for one whose fields were replaced inconsistently.

        by_orbit: evaluate the loads of links for one member of each orbit, where the step has a rotation symmetry.
        """
        require_consistent(scenario)
        require_common_step(scenario)
        plan = build_plan(scenario)
        program = repeat_steps(build_program(scenario, plan), scenario.steps)
        require_algorithms(scenario, program)
        devices = _rank_devices(scenario)
        orbits = _step_orbits(scenario, program, devices) if by_orbit else None
        comm_cost: CommModel = _with_imbalance(scenario, program, _comm_cost(scenario, program, orbits))
        if LAUNCH_GROUP.name in program.groups:
            comm_cost = LaunchCost(comm_cost, devices)
        return cls(scenario, plan, program, devices, comm_cost, orbits)

    def segment_cost(self, contention: ContentionMap | None) -> SegmentCost:
        """Cost of the program; contending collectives are left to the network model."""
        comm_cost = self.comm_cost if contention is None else UncontendedComm(self.comm_cost, contention)
        return SegmentCost(self.program, self.devices, comm_cost)


def build_simulation(scenario: Scenario) -> PreparedSimulation:
    """Build a legal scenario; raise InputError for one whose fields were replaced inconsistently."""
    try:
        return _build_simulation(_UncontendedBuild.from_scenario(scenario, by_orbit=True))
    except AsymmetricLoadsError:  # known only when a collective has been routed
        return _build_simulation(_UncontendedBuild.from_scenario(scenario))


def _build_simulation(build: _UncontendedBuild) -> PreparedSimulation:
    is_uncontended = build.scenario.cost.network is Contention.UNCONTENDED
    contention = None if is_uncontended else _contention_maps((build,))[0]
    cost = build.segment_cost(contention)
    return PreparedSimulation(build.plan, cost, _equivalence_classes(build, cost, contention), contention)


def build_co_scheduled(scenarios: Sequence[Scenario]) -> tuple[PreparedSimulation, ...]:
    """Build jobs that share a machine's network; the first is the one whose scenario has the degradations."""
    builds = [_UncontendedBuild.from_scenario(scenario) for scenario in scenarios]
    build_costs = [
        (build, contention, build.segment_cost(contention))
        for build, contention in zip(builds, _contention_maps(builds), strict=True)
    ]
    jobs = [
        ContendingJob(cost.program, build.comm_cost, contention, _rank_labels(build.scenario, cost))
        for build, contention, cost in build_costs
    ]
    equivalence_classes = joint_equivalence_classes(jobs, scenarios[0].cluster.fabric.links)
    return tuple(
        PreparedSimulation(build.plan, cost, classes, contention)
        for (build, contention, cost), classes in zip(build_costs, equivalence_classes, strict=True)
    )


def require_consistent(scenario: object) -> None:
    """Raise TypeError for a value that is no scenario, InputError for one whose fields were replaced inconsistently."""
    errors = find_problems(require_scenario(scenario))
    if errors:
        raise InputError("\n".join(errors))


def require_scenario(value: object) -> Scenario:
    """Return the value if it is a Scenario; else raise TypeError that says how to build one."""
    if not isinstance(value, Scenario):
        raise TypeError(f"{type(value).__name__} is not a Scenario; build one, as in Scenario.load('plan.yaml')")
    return value


def require_common_step(scenario: Scenario) -> None:
    """Raise InputError for replicas that train on their own (DiLoCo)."""
    if scenario.diloco is not None:
        raise InputError(
            f"{scenario.path or scenario.name}: diloco: replicas that train on their own have no common step; "
            "`clustersim diloco` simulates their rounds, or leave diloco out"
        )


def require_algorithms(scenario: Scenario, program: Program) -> None:
    """Raise InputError if the NCCL overrides leave no algorithm for a collective of the step."""
    try:
        _require_algorithms(scenario, program)
    except InputError as error:
        raise InputError(f"{scenario.path or scenario.name}: cost: {error}") from error


def _require_algorithms(scenario: Scenario, program: Program) -> None:
    overrides, library = scenario.cost.nccl_overrides, resolved_library(scenario)
    tuner = Tuner(scenario.cluster.fabric, library)
    comm_ops = (
        comm_op
        for rank_program in program.programs
        for comm_op in rank_program.comm_ops
        if not isinstance(comm_op, HostOp)
    )
    needed = dict.fromkeys(
        (comm_op.collective, comm_op.comm_group)
        for comm_op in comm_ops
        if comm_op.collective in overrides.constrained_collectives
    )
    for kind, comm_group in needed:
        if not library.variants_for(kind):
            raise InputError(_no_algorithm_message(scenario, kind))
        members = program.groups[comm_group].members
        if members.size and members.shape[1] > 1:
            tuner.require_supported(kind, members)


def _no_algorithm_message(scenario: Scenario, kind: CollectiveType) -> str:
    library = load_library(scenario.cluster.library)
    algorithms = ", ".join(dict.fromkeys(variant.name for variant in library.variants_for(kind)))
    return (
        f"with {scenario.cost.nccl_overrides.description} nothing is left of {library.name} for {kind.value}, which "
        "the step "
        f"needs and which it does by {algorithms or 'nothing'}; for one collective alone a list is written "
        "allreduce:tree"
    )


def build_plan(scenario: ResolvedScenario) -> Plan:
    """Which rank computes what."""
    return Plan(scenario.model, scenario.training, scenario.effective_layout, scenario.schedule.placement)


def schedule_order(scenario: ResolvedScenario, plan: Plan) -> PipelineOrder:
    """Order of passes of each pipeline rank; cost-dependent schedules use the cluster's first accelerator."""
    return _profiled_schedule(scenario, plan).order(plan.layout.pp, plan.microbatches)


def pass_orders(scenario: ResolvedScenario, plan: Plan) -> tuple[PassOrder, ...]:
    """Sequence of passes of each pipeline rank; cached, as many layouts of a search share it."""
    return _cached_pass_orders(_profiled_schedule(scenario, plan), plan.layout.pp, plan.microbatches)


def _profiled_schedule(scenario: ResolvedScenario, plan: Plan) -> Schedule:
    """The schedule that orders passes, with their costs if it needs them."""
    kernels = _device_model(scenario, scenario.cluster.accelerator_kinds()[0][0]).kernels
    return with_pass_costs(scenario.effective_schedule, plan, kernels)


@lru_memoize(64)
def _cached_pass_orders(schedule: Schedule, pp: int, microbatches: int) -> tuple[PassOrder, ...]:
    return tuple(map(pass_order, schedule.order(pp, microbatches)))


def device_models(scenario: ResolvedScenario) -> tuple[DeviceModel, ...]:
    """Device models of the job: one per kind of accelerator, at full speed."""
    return tuple(
        _device_model(scenario, accelerator_kind) for accelerator_kind in scenario.cluster.accelerator_kinds()[0]
    )


def uncontended_comm_cost(scenario: ResolvedScenario, comm_groups: Iterable[CommGroup]) -> CommCost:
    """Uncontended cost of collectives in some communication groups, none of which is a pipeline p2p group."""
    return _network_cost(scenario, groups_along_axes(scenario.layout, comm_groups))


def build_program(scenario: Scenario, plan: Plan) -> Program:
    """The program of one step, with the token loads of all steps.

    Cached: scenarios that differ only in cluster or degradations share it.
    """
    order, steps = schedule_order(scenario, plan), scenario.steps
    record = scenario.cost.record
    unattributed = NO_UNATTRIBUTED_WORK if record is None else record.unattributed_work
    hosts = (host_model(source, scenario.framework, scenario.layout) for source in (None, record))
    launches = any(host.launches_ahead for host in hosts)
    plan_key = plan.model, plan.training, plan.layout, plan.placement, plan.expert_token_ratio
    return _PROGRAM_CACHE.get_or_compute(
        (*plan_key, order, steps, unattributed, launches),
        lambda: _lower_step(plan, order, (steps, unattributed), launches=launches),
    )


def _lower_step(plan: Plan, order: PipelineOrder, per_step: tuple[int, UnattributedWork], *, launches: bool) -> Program:
    """The program of one step. launches: the host's, where passes overlap, take time."""
    program = lower_step(plan, order, *per_step)
    return add_host_launches(program) if launches else program


def _task_count(program: Program) -> int:
    return sum(len(rank_program.tasks) for rank_program in program.programs)


_PROGRAM_CACHE: Final = LruCache[Program](100_000, size=_task_count)


def distinct_kernels(scenario: Scenario) -> tuple[Kernel, ...]:
    """The distinct kernels that the scenario's ranks run, as they are timed, in order of first use."""
    require_consistent(scenario)
    kernels: dict[Kernel, None] = {}
    for block in _segments(build_program(scenario, build_plan(scenario))):
        for operation in block.operations:
            match operation.body:
                case Kernel() as kernel:
                    kernels[kernel] = None
                case CommOverlap(kernel=kernel, chunk_count=chunks):
                    kernels[kernel if math.isinf(chunks) else kernel.split_into(int(chunks))] = None
    return tuple(kernels)


def _segments(program: Program) -> Iterator[Segment]:
    tasks = (task for rank_program in program.programs for task in rank_program.tasks)
    yield from dict.fromkeys(task.segment for task in tasks if isinstance(task, ComputeTask))


def _step_orbits(scenario: Scenario, program: Program, devices: DeviceModels) -> StepOrbits | None:
    """Orbits of the step where links are shared and rotating the local ranks of all nodes changes nothing in it."""
    if (
        scenario.cost.network is Contention.UNCONTENDED
        or _symmetry_disabled(scenario)
        or scenario.degradations.affects_network
        or _background_traffic(scenario)
    ):
        return None
    fabric = scenario.cluster.fabric
    rotation = fabric.rotation if isinstance(fabric, HasRotation) else None
    return None if rotation is None else find_step_orbits(program, rotation, devices.index_of_rank)


def _comm_cost(scenario: Scenario, program: Program, orbits: StepOrbits | None) -> CommModel:
    """Cost model of collectives, p2p messages and, where there are any, host copies."""
    cost: CommModel = _network_cost(scenario, program.groups, orbits)
    host, p2p_overhead = scenario.cluster.host_memory, scenario.framework.p2p_seconds
    if p2p_overhead > 0.0:
        cost = P2pLaunchOverhead(cost, p2p_overhead, program.groups)
    if HOST_GROUP.name not in program.groups or host is None:
        return cost
    nodes = _node_ids(scenario)
    return HostTransferCost(cost, host, np.bincount(nodes)[nodes], scenario.training.offload.threads)


def _with_imbalance(scenario: Scenario, program: Program, comm_cost: CommModel) -> CommModel:
    """The cost model extended by imbalanced payloads (uneven expert loads), where there are any."""
    fabric = scenario.cluster.fabric
    return comm_cost if program.expert_loads is BALANCED_LOADS else ImbalancedComm(comm_cost, program, fabric)


def _node_ids(scenario: ResolvedScenario) -> IntArray:
    """[ranks] node of every rank."""
    return scenario.cluster.fabric.node_ids(np.arange(scenario.layout.world_size))


def _network_cost(
    scenario: ResolvedScenario, groups: Mapping[str, ProcessGroups], orbits: StepOrbits | None = None
) -> "CollectiveCost | MeasuredCollectives":
    cluster, settings = scenario.cluster, scenario.cost
    model = CollectiveCost(cluster.fabric, resolved_library(scenario), groups, orbits)
    if settings.record is None or scenario.degradations.affects_network:
        return model  # measurements on a healthy network do not hold on a degraded one
    overridden = settings.nccl_overrides.constrained_collectives  # nor where the user overrides the library's choice
    samples = tuple(sample for sample in settings.record.collectives if sample.call.collective not in overridden)
    record = replace(settings.record, collectives=samples)
    from clustersim.cost.measured_collectives import MeasuredCollectives

    return MeasuredCollectives(model, record, groups, nodes=_node_ids(scenario))


def resolved_library(scenario: ResolvedScenario) -> Library:
    """The cluster's collective library, restricted by the user's NCCL overrides."""
    library = load_library(scenario.cluster.library)
    library = replace(library, published=library.published and scenario.cluster.is_measured)
    return scenario.cost.nccl_overrides.apply_to(library)


def _rank_devices(scenario: Scenario) -> DeviceModels:
    """Device model of each rank: its accelerator, slowed as its degradations say."""
    world, gpu_ids = scenario.layout.world_size, scenario.cluster.machine_gpu_ids
    accelerators, kind = scenario.cluster.accelerator_kinds()
    speeds, speed_index = np.unique(scenario.degradations.gpu_speeds(gpu_ids[:world]), return_inverse=True)
    pairs, device_index = np.unique(kind[:world] * len(speeds) + speed_index.reshape(-1), return_inverse=True)
    devices: list[DeviceModel] = []
    healthy_devices = [_device_model(scenario, accelerator) for accelerator in accelerators]
    for kind_index, speed_value_index in (divmod(pair, len(speeds)) for pair in pairs.tolist()):
        device = healthy_devices[kind_index]
        throttled = (
            device
            if speeds[speed_value_index] == 1.0
            else replace(device, kernels=ThrottledKernels(device.kernels, float(speeds[speed_value_index])))
        )
        devices.append(throttled)
    return DeviceModels(tuple(devices), device_index.reshape(-1))


def _device_model(scenario: ResolvedScenario, accelerator: Accelerator) -> DeviceModel:
    """Device model of an accelerator at full speed, from its measurement record if there is one, with its host."""
    record = scenario.cost.record
    if record is not None and record.device.accelerator != accelerator.name:
        record = None
    kernels = _in_situ_kernels(scenario, accelerator, record)
    interference = _interference(scenario, accelerator, record)
    return DeviceModel(kernels, interference, host_model(record, scenario.framework, scenario.layout))


def _interference(
    scenario: ResolvedScenario, accelerator: Accelerator, record: "CalibrationRecord | None"
) -> Interference:
    """Interference levels: from the scenario, else measured, else from the accelerator's file."""
    configured, measured = scenario.cost.interference, None if record is None else record.measured_interference
    if configured is not None:
        return _uniform_interference(configured)
    return measured or _uniform_interference(accelerator.interference, accelerator.collective_interference)


_uniform_interference = lru_memoize(64)(Interference.uniform)


def _in_situ_kernels(
    scenario: ResolvedScenario, accelerator: Accelerator, record: "CalibrationRecord | None"
) -> SustainedKernels:
    """Kernel times within a training step, derived from standalone times (record or model).

    Independent of the layout, of which a search tries many: so the last ones are cached.
    """
    derating, attention = unmeasured_effects(accelerator.derating, record), scenario.training.attention
    rate = job_rate(derating, scenario.layout.world_size)
    if record is not None and record.profile is not None:  # kernels of a job have its slowest GPU in them
        rate /= job_rate(derating, record.profile.ranks)
    key = IdentityKey(accelerator), IdentityKey(record), rate, attention
    return _IN_SITU_CACHE.get_or_compute(
        key, lambda: _build_in_situ_kernels(accelerator, record, derating, rate, attention)
    )


_IN_SITU_CACHE: Final = LruCache[SustainedKernels](8, size=unit_size)


def _build_in_situ_kernels(
    accelerator: Accelerator,
    record: "CalibrationRecord | None",
    derating: TrainingDerating,
    rate: float,
    attention: AttentionBackend,
) -> SustainedKernels:
    in_step = partial(
        SustainedKernels.from_rate,
        rate=rate,
        low_precision_factor=derating.low_precision_speedup,
        attention_factor=derating.attention_speedup,
    )
    if record is None:
        model = Roofline(accelerator, attention=attention)
        return in_step(model, model)
    from clustersim.cost.measured_kernels import MeasuredKernels

    timed = record.attention_library
    if attention is AttentionBackend.SDPA and timed is not AttentionBackend.FLASH:
        attention = timed  # PyTorch's choice is what it took when it was measured
    libraries = AttentionLibraries(accelerator, attention, timed, derating.attention_speedup)
    measured = MeasuredKernels(record, accelerator)
    return in_step(measured, measured.model, attention=libraries)


def _contention_maps(builds: Sequence[_UncontendedBuild]) -> tuple[ContentionMap, ...]:
    """Which collectives of each job contend for links."""
    background, fabrics = _background_traffic(builds[0].scenario), [build.scenario.cluster.fabric for build in builds]
    programs = [(uncontended_build.program, uncontended_build.comm_cost) for uncontended_build in builds]
    demands = restrict_to_bottleneck_links(programs, fabrics[0], loaded_links(background).tolist())
    owners = [fabric.link_endpoints.port_owner(fabric.gpu_count) for fabric in fabrics]
    return map_job_contention(
        [(build.program, job_demands) for build, job_demands in zip(builds, demands, strict=True)],
        owners,
        background,
        builds[0].orbits,
    )


def _background_traffic(scenario: Scenario) -> tuple[BackgroundFlow, ...]:
    """Background flows on the links."""
    cluster = scenario.cluster
    try:
        return background_flows(
            scenario.background_traffic, scenario.degradations, cluster.machine, load_library(cluster.library)
        )
    except InputError as error:
        raise InputError(f"{scenario.path or scenario.name}: degradations.{error}") from error


def _equivalence_classes(
    build: _UncontendedBuild, cost: SegmentCost, contention: ContentionMap | None
) -> SymmetryClasses:
    """Equivalence classes of ranks; singletons where every kernel varies independently."""
    scenario, comm_cost = build.scenario, build.comm_cost
    links, program, device_class = scenario.cluster.fabric.links, cost.program, cost.rank_features
    if _symmetry_disabled(scenario):
        return singleton_classes(program) if contention is None else unfolded_classes(program, contention, links)
    if contention is not None:
        return contended_classes(program, comm_cost, contention, links, model_index=device_class, orbits=build.orbits)
    return equivalence_classes(program, comm_cost, model_index=device_class)


def _rank_labels(scenario: Scenario, cost: SegmentCost) -> IntArray:
    """[ranks] ranks with different labels are never equivalent."""
    return np.arange(cost.program.world_size) if _symmetry_disabled(scenario) else cost.rank_features


def _symmetry_disabled(scenario: Scenario) -> bool:
    """Whether ranks must not be merged into equivalence classes."""
    return scenario.cost.symmetry is Symmetry.OFF or scenario.jitter is not None
