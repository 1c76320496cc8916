"""How does a scenario become a plan, a program and what its pieces cost?

Everything that a simulation runs is put together here, and nothing is run: who does which part (`plan_of`), in which
order (`order_of`), as which tasks (`lowered`), on which machines and links, and which ranks provably do the same.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from clustersim.collectives.library import Library, load_library
from clustersim.collectives.tuner import Tuner
from clustersim.common.arrays import IntArray
from clustersim.common.errors import InputError
from clustersim.common.lru import Recent, each_one, lately
from clustersim.cost.background_traffic import Other, loaded_by, others
from clustersim.cost.bottleneck_links import binding_demands
from clustersim.cost.calibration_record import Call, Record, summed_in
from clustersim.cost.co_scheduled import Job, alike_together, sharings
from clustersim.cost.collective_cost import CommunicationCost
from clustersim.cost.contention import Alone, Sharing
from clustersim.cost.device_models import Machine, Machines, Slowed
from clustersim.cost.host_transfers import HostedExchanges, Others
from clustersim.cost.imbalanced_comm import UnevenExchanges
from clustersim.cost.interference import Interference
from clustersim.cost.measured_collectives import RecordedExchanges
from clustersim.cost.measured_host import host_of
from clustersim.cost.measured_kernels import RecordedKernels
from clustersim.cost.p2p_overhead import HandedMessages
from clustersim.cost.rank_equivalence import alike, alike_shared, unfolded_classes
from clustersim.cost.roofline import Roofline
from clustersim.cost.segment import BlockCost
from clustersim.cost.sustained_rate import InStep, job_rate, older_attention, pace_of
from clustersim.cost.timing import ExchangeCost
from clustersim.hardware.accelerator import Accelerator
from clustersim.hardware.efficiency import InTraining
from clustersim.lowering.pass_costs import profiled
from clustersim.lowering.repeat_steps import repeat
from clustersim.lowering.training_step import lower
from clustersim.memory.ledger import Turns, in_turns
from clustersim.model.kernels import Kernel
from clustersim.model.training import Attention
from clustersim.parallel.mesh import HOST_GROUP, CommGroup
from clustersim.parallel.plan import Plan
from clustersim.parallel.process_groups import groups_along_axes
from clustersim.program.action import PipelineOrder
from clustersim.program.program import BALANCED_LOADS, ProcessGroups, Program
from clustersim.program.task import CollectiveType, CommOverlap, ComputeTask, HostOp, Segment
from clustersim.scenario import Contention, Scenario, Symmetry
from clustersim.scenario.resolved import Setup
from clustersim.scenario.validation_rules.consistency import problems
from clustersim.schedules.schedule import Schedule
from clustersim.symmetry.refinement import SymmetryClasses, singleton_classes


@dataclass(frozen=True, slots=True)
class Assembly:
    """What a simulation runs. shares: which exchanges share the network, None: none do."""

    plan: Plan
    cost: BlockCost
    classes: SymmetryClasses
    shares: Sharing | None

    @property
    def program(self) -> Program:
        """The tasks of every rank."""
        return self.cost.program


@dataclass(frozen=True, slots=True)
class _Draft:
    """What is known of a simulation before anything is known of links. exchanges: what times them."""

    scenario: Scenario
    plan: Plan
    program: Program
    exchanges: Others

    @classmethod
    def of(cls, scenario: Scenario) -> "_Draft":
        """A legal scenario's; raise InputError for one whose parts no longer agree."""
        require(scenario)
        plan = plan_of(scenario)
        program = repeat(lowered(scenario, plan), scenario.steps)
        require_offers(scenario, program)
        return cls(scenario, plan, program, _uneven(scenario, program, _exchanges(scenario, program)))

    def cost(self, shares: Sharing | None) -> BlockCost:
        """What the program takes where some exchanges share links."""
        alone = self.exchanges if shares is None else Alone(self.exchanges, shares)
        return BlockCost(self.program, _machines(self.scenario), alone)


def assemble(scenario: Scenario) -> Assembly:
    """Put a legal scenario's parts together; raise InputError for one whose parts no longer agree."""
    draft = _Draft.of(scenario)
    shares = None if scenario.cost.network is Contention.NONE else _sharing((draft,))[0]
    cost = draft.cost(shares)
    return Assembly(draft.plan, cost, _classes(scenario, cost, draft.exchanges, shares), shares)


def assemble_together(scenarios: Sequence[Scenario]) -> tuple[Assembly, ...]:
    """The parts of jobs that share a machine's network, the first of which is the one with its disturbances."""
    drafts = [_Draft.of(scenario) for scenario in scenarios]
    every = [(draft, shares, draft.cost(shares)) for draft, shares in zip(drafts, _sharing(drafts), strict=True)]
    jobs = [Job(cost.program, draft.exchanges, shares, _apart(draft.scenario, cost)) for draft, shares, cost in every]
    found = alike_together(jobs, scenarios[0].cluster.fabric.links)
    return tuple(
        Assembly(draft.plan, cost, own, shares) for (draft, shares, cost), own in zip(every, found, strict=True)
    )


def require(scenario: object) -> None:
    """Refuse what is no scenario, and one whose parts were replaced so that they no longer agree."""
    found = problems(a_scenario(scenario))
    if found:
        raise InputError("\n".join(found))


def a_scenario(given: object) -> Scenario:
    """What was given, if it is a scenario; else raise TypeError that says how to build one."""
    if not isinstance(given, Scenario):
        raise TypeError(f"{type(given).__name__} is not a Scenario; build one, as in Scenario.load('plan.yaml')")
    return given


def require_offers(scenario: Scenario, program: Program) -> None:
    """Refuse switches that leave the library nothing for a collective that the step needs, in one of its groups."""
    try:
        _require_offers(scenario, program)
    except InputError as error:
        raise InputError(f"{scenario.path or scenario.name}: cost: {error}") from error


def _require_offers(scenario: Scenario, program: Program) -> None:
    switches, left = scenario.cost.switches, library_of(scenario)
    surveyor = Tuner(scenario.cluster.fabric, left)
    every = (comm_op for one in program.programs for comm_op in one.comm_ops if not isinstance(comm_op, HostOp))
    asked = dict.fromkeys(
        (item.collective, item.comm_group) for item in every if item.collective in switches.constrained_collectives
    )
    for kind, role in asked:
        if not left.variants_for(kind):
            raise InputError(_nothing_left(scenario, kind))
        members = program.groups[role].members
        if members.size and members.shape[1] > 1:
            surveyor.require_supported(kind, members)


def _nothing_left(scenario: Scenario, kind: CollectiveType) -> str:
    library = load_library(scenario.cluster.library)
    own = ", ".join(dict.fromkeys(offer.name for offer in library.variants_for(kind)))
    return (
        f"with {scenario.cost.switches.description} nothing is left of {library.name} for {kind.value}, which the step "
        f"needs and which it does by {own or 'nothing'}; for one collective alone a list is written allreduce:tree"
    )


def plan_of(scenario: Setup) -> Plan:
    """Who computes what."""
    return Plan(scenario.model, scenario.training, scenario.run_layout, scenario.schedule.placement)


def order_of(scenario: Setup, plan: Plan) -> PipelineOrder:
    """The order in which pipeline ranks work, as it is with the costs of the cluster's first kind of accelerator."""
    return _ordering(scenario, plan).order(plan.layout.pp, plan.microbatches)


def turns_of(scenario: Setup, plan: Plan) -> tuple[Turns, ...]:
    """Passes of each pipeline rank, one after the other; remembered, as many layouts of a search have the same."""
    return _turns(_ordering(scenario, plan), plan.layout.pp, plan.microbatches)


def _ordering(scenario: Setup, plan: Plan) -> Schedule:
    """The schedule that orders passes, with their costs if it asks for them."""
    kernels = _machine(scenario, scenario.cluster.kinds()[0][0]).kernels
    return profiled(scenario.run_schedule, plan, kernels)


@lately(64)
def _turns(schedule: Schedule, pp: int, microbatches: int) -> tuple[Turns, ...]:
    return tuple(map(in_turns, schedule.order(pp, microbatches)))


def machines_of(scenario: Setup) -> tuple[Machine, ...]:
    """What the job's kernels run on: each kind of its accelerators at full speed."""
    return tuple(_machine(scenario, kind) for kind in scenario.cluster.kinds()[0])


def exchanges_within(scenario: Setup, roles: Iterable[CommGroup]) -> ExchangeCost:
    """What collectives of some roles take, alone on their links; of roles whose groups are on no pipeline's ways."""
    return _between(scenario, groups_along_axes(scenario.layout, roles))


def lowered(scenario: Scenario, plan: Plan) -> Program:
    """The program of one step, with the loads of all.

    The last ones are remembered: much that scenarios are compared by, such as clusters and disturbances, changes none.
    """
    order, steps = order_of(scenario, plan), scenario.steps
    key = plan.model, plan.training, plan.layout, plan.placement, plan.expert_token_ratio, order, steps
    return _PROGRAMS.of(key, lambda: lower(plan, order, steps))


def _tasks(program: Program) -> int:
    return sum(len(rank_program.tasks) for rank_program in program.programs)


_PROGRAMS: Final = Recent[Program](100_000, size=_tasks)


def kernels_of(scenario: Scenario) -> tuple[Kernel, ...]:
    """The distinct kernels that the scenario's ranks run, as they are timed, in the order in which they first run."""
    require(scenario)
    found: dict[Kernel, None] = {}
    for block in _blocks(lowered(scenario, plan_of(scenario))):
        for operation in block.operations:
            match operation.body:
                case Kernel() as kernel:
                    found[kernel] = None
                case CommOverlap(kernel=kernel, chunk_count=chunks):
                    found[kernel if math.isinf(chunks) else kernel.piece(int(chunks))] = None
    return tuple(found)


def exchanges_of(scenario: Scenario) -> tuple[Call, ...]:
    """The distinct collectives and messages that the scenario's ranks run, with the ranks and nodes that they span.

    In one order, whatever process asks: all ranks of a world measure them together. What ranks do with their hosts is
    not among them, nor tokens that kernels of their own send to experts.
    """
    require(scenario)
    program = lowered(scenario, plan_of(scenario))
    fabric = scenario.cluster.fabric
    found: dict[Call, None] = {}
    every = dict.fromkeys(exchange for rank_program in program.programs for exchange in rank_program.comm_ops)
    for exchange in (
        comm_op for comm_op in every if not (isinstance(comm_op, HostOp) or comm_op.collective.is_token_routing)
    ):
        for members in program.groups[exchange.comm_group].members:
            nodes = len(np.unique(fabric.nodes(members)))
            found[Call(exchange.collective, exchange.payload, len(members), nodes, summed_in(exchange))] = None
    return tuple(sorted(found, key=_place))


def _place(call: Call) -> tuple[str, int, int, float, str]:
    return call.collective.value, call.ranks, call.nodes, call.payload, call.format.value


def _blocks(program: Program) -> Iterator[Segment]:
    tasks = (task for rank_program in program.programs for task in rank_program.tasks)
    yield from dict.fromkeys(task.segment for task in tasks if isinstance(task, ComputeTask))


def _exchanges(scenario: Scenario, program: Program) -> Others:
    """What times collectives, messages and, if there is anything for them, hosts."""
    between: Others = _between(scenario, program.groups)
    host, message = scenario.cluster.host, scenario.framework.message
    if message > 0.0:
        between = HandedMessages(between, message, program.groups)
    if HOST_GROUP.name not in program.groups or host is None:
        return between
    nodes = _nodes(scenario)
    return HostedExchanges(between, host, np.bincount(nodes)[nodes])


def _uneven(scenario: Scenario, program: Program, exchanges: Others) -> Others:
    """The same where members get unlike parts."""
    fabric = scenario.cluster.fabric
    return exchanges if program.expert_loads is BALANCED_LOADS else UnevenExchanges(exchanges, program, fabric)


def _nodes(scenario: Setup) -> IntArray:
    """The node of every rank: [ranks]."""
    return scenario.cluster.fabric.nodes(np.arange(scenario.layout.world_size))


def _between(scenario: Setup, groups: Mapping[str, ProcessGroups]) -> CommunicationCost | RecordedExchanges:
    cluster, settings = scenario.cluster, scenario.cost
    model = CommunicationCost(cluster.fabric, library_of(scenario), groups)
    if settings.record is None or scenario.disturbances.network:
        return model  # what was measured on a healthy network does not say what a disturbed one does
    bound = settings.switches.constrained_collectives  # nor what the library does where the user has told it otherwise
    rows = tuple(row for row in settings.record.collectives if row.call.collective not in bound)
    record = replace(settings.record, collectives=rows)
    return RecordedExchanges(model, record, groups, nodes=_nodes(scenario))


def library_of(scenario: Setup) -> Library:
    """The cluster's library, with what the user has left of its offers."""
    library = load_library(scenario.cluster.library)
    library = replace(library, published=library.published and scenario.cluster.measured)
    return scenario.cost.switches.apply_to(library)


def _machines(scenario: Scenario) -> Machines:
    """What each rank's kernels run on: its accelerator, at the speed to which it is disturbed."""
    world, places = scenario.layout.world_size, scenario.cluster.places
    accelerators, kind = scenario.cluster.kinds()
    speeds, speed = np.unique(scenario.disturbances.speeds(places[:world]), return_inverse=True)
    pairs, of = np.unique(kind[:world] * len(speeds) + speed.reshape(-1), return_inverse=True)
    machines: list[Machine] = []
    own = [_machine(scenario, accelerator) for accelerator in accelerators]
    for number, at in (divmod(pair, len(speeds)) for pair in pairs.tolist()):
        machine = own[number]
        slow = machine if speeds[at] == 1.0 else replace(machine, kernels=Slowed(machine.kernels, float(speeds[at])))
        machines.append(slow)
    return Machines(tuple(machines), of.reshape(-1))


def _machine(scenario: Setup, accelerator: Accelerator) -> Machine:
    """An accelerator at its full speed, as it was measured if there is a record of it, and its host."""
    record = scenario.cost.record
    if record is not None and record.device.accelerator != accelerator.name:
        record = None
    kernels = _in_step(scenario, accelerator, record)
    interference = _interference(scenario, accelerator, record)
    return Machine(kernels, interference, host_of(record, scenario.framework, scenario.layout))


def _interference(scenario: Setup, accelerator: Accelerator, record: Record | None) -> Interference:
    """What the scenario says, or else what was measured, or else what the accelerator's file says."""
    given, measured = scenario.cost.interference, None if record is None else record.interference
    if given is None and measured is not None:
        return measured
    return Interference.equal(accelerator.interference if given is None else given)


def _in_step(scenario: Setup, accelerator: Accelerator, record: Record | None) -> InStep:
    """What the kernels of a step take, from what they take alone by a record or by the model.

    The same for all layouts of a job, of which a search tries many: so the last ones are remembered, with what they
    were made from, since these are compared by identity.
    """
    pace, asked = pace_of(accelerator.in_training, record), scenario.training.attention
    rate = job_rate(pace, scenario.layout.world_size)
    key = id(accelerator), id(record), rate, asked
    made, _ = _IN_STEP.of(key, lambda: (_paced(accelerator, record, pace, rate, asked), (accelerator, record)))
    return made


_IN_STEP: Final = Recent[tuple[InStep, tuple[Accelerator, Record | None]]](8, size=each_one)


def _paced(accelerator: Accelerator, record: Record | None, pace: InTraining, rate: float, asked: Attention) -> InStep:
    if record is None:
        model = Roofline(accelerator)
        return InStep.of(model, model, rate=rate, attention=older_attention(pace, asked), narrow=pace.faster)
    recorded = RecordedKernels(record, accelerator)
    times = older_attention(pace, asked, record.attention)
    return InStep.of(recorded, recorded.model, rate=rate, attention=times, narrow=pace.faster)


def _sharing(drafts: Sequence[_Draft]) -> tuple[Sharing, ...]:
    """Which exchanges of each job share the network."""
    beside, fabrics = _others(drafts[0].scenario), [draft.scenario.cluster.fabric for draft in drafts]
    asked = [(item.program, item.exchanges) for item in drafts]
    demands = binding_demands(asked, fabrics[0], loaded_by(beside).tolist())
    owners = [fabric.ends.owner(fabric.gpus) for fabric in fabrics]
    return sharings([(element.program, own) for element, own in zip(drafts, demands, strict=True)], owners, beside)


def _others(scenario: Scenario) -> tuple[Other, ...]:
    """What is on links beside the step."""
    cluster = scenario.cluster
    try:
        return others(scenario.traffic, scenario.disturbances, cluster.machine, load_library(cluster.library))
    except InputError as error:
        raise InputError(f"{scenario.path or scenario.name}: disturbances.{error}") from error


def _classes(scenario: Scenario, cost: BlockCost, exchanges: ExchangeCost, shares: Sharing | None) -> SymmetryClasses:
    """Which ranks provably do the same; where every kernel varies by itself, none do."""
    links, program, machine = scenario.cluster.fabric.links, cost.program, cost.apart
    if _unlike(scenario):
        return singleton_classes(program) if shares is None else unfolded_classes(program, shares, links)
    if shares is not None:
        return alike_shared(program, exchanges, shares, links, machine=machine)
    return alike(program, exchanges, machine=machine)


def _apart(scenario: Scenario, cost: BlockCost) -> IntArray:
    """[ranks] equal numbers may be of ranks that do the same."""
    return np.arange(cost.program.world_size) if _unlike(scenario) else cost.apart


def _unlike(scenario: Scenario) -> bool:
    """Whether no two ranks are to be taken for alike."""
    return scenario.cost.symmetry is Symmetry.OFF or scenario.jitter is not None
