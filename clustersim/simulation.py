"""How does a scenario become an answer? Lower it, find its symmetry, run it, fold what happened.

`check` answers what needs no simulation: whether the scenario is legal (it was built, so it is) and fits in memory.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from clustersim.analysis.breakdown import breakdown
from clustersim.analysis.critical_path import critical_path, path_summary
from clustersim.analysis.provenance import items
from clustersim.analysis.rows import read_rows
from clustersim.analysis.steps import step_times
from clustersim.analysis.utilization import recomputed_flops
from clustersim.answer import Flops
from clustersim.collectives.library import load_library
from clustersim.cost.block import BlockCost
from clustersim.cost.communication import CommunicationCost
from clustersim.cost.machines import FLASH1, Machine, Machines, OlderAttention, Slowed, slowest
from clustersim.cost.record import Call
from clustersim.cost.recorded import RecordedKernels
from clustersim.cost.recorded_exchanges import RecordedExchanges
from clustersim.cost.roofline import Roofline
from clustersim.cost.sharing import Alone, Sharing, sharing
from clustersim.cost.symmetry import alike, alike_shared, all_apart
from clustersim.cost.timing import ExchangeCost, KernelCost
from clustersim.engine.engine import run
from clustersim.engine.inside import Inside
from clustersim.errors import InputError
from clustersim.hardware.accelerator import Accelerator
from clustersim.lowering.profile import profiled
from clustersim.lowering.step import lower
from clustersim.lowering.steps import repeat
from clustersim.memory.activations import Activations
from clustersim.memory.footprint import Footprint
from clustersim.memory.ledger import Ledger, Pass, in_order, ledger
from clustersim.memory.remedies import remedies
from clustersim.parallel.mesh import PIPELINE
from clustersim.parallel.plan import Plan
from clustersim.program.action import Order
from clustersim.program.program import Program
from clustersim.program.symmetry import Classes, unfolded
from clustersim.program.task import Block, Compute, Overlap, Stream
from clustersim.result import Result
from clustersim.scenario import Contention, Scenario, Symmetry
from clustersim.scenario.checks import problems
from clustersim.trace.store import Trace
from clustersim.units import Bytes
from clustersim.workload.flops import model_flops
from clustersim.workload.framework import Framework
from clustersim.workload.kernels import Kernel
from clustersim.workload.training import Attention


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Whether a scenario fits, without simulating it. suggestions: what would make it fit if it does not."""

    peak_memory_bytes: Bytes
    memory_capacity_bytes: Bytes
    warnings: tuple[str, ...]
    suggestions: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether every GPU's peak is within its capacity."""
        return self.peak_memory_bytes <= self.memory_capacity_bytes


def simulate(scenario: Scenario) -> Result:
    """Simulate training steps."""
    _require(scenario)
    started = perf_counter()
    plan = _plan(scenario)
    order = _order(scenario, plan)
    program = repeat(lower(plan, order), scenario.steps)
    exchanges = _exchanges(scenario, program)
    shares = _sharing(scenario, program, exchanges)
    cost = BlockCost(program, _machines(scenario), exchanges if shares is None else Alone(exchanges, shares))
    inside = _run(scenario, cost, _classes(scenario, cost, exchanges, shares), shares)
    trace = inside.trace
    rows = read_rows(trace, program, scenario.steps)
    footprint = _footprint(scenario, plan, scenario.framework)
    ledgers = tuple(_timed_ledgers(footprint, program, trace))
    capacities = _capacities(scenario, plan)
    fits = all(each.peak <= capacity for each, capacity in zip(ledgers, capacities, strict=True))
    return Result(
        scenario=scenario,
        program=program,
        trace=trace,
        cost=cost,
        inside=inside,
        step_times=step_times(rows),
        breakdown=breakdown(rows, cost.block),
        ledgers=ledgers,
        capacities=capacities,
        path=critical_path(trace),
        path_parts=path_summary(rows, cost.block),
        items=items(rows, cost.block, cost.exchange_timing),
        flops=Flops(model_flops(scenario.model, scenario.training), recomputed_flops(rows) / scenario.steps),
        suggestions=() if fits else _suggestions(scenario),
        wall=perf_counter() - started,
    )


def check(scenario: Scenario) -> CheckReport:
    """Say whether a scenario fits in memory, and what would make it fit."""
    _require(scenario)
    plan = _plan(scenario)
    peaks = _peaks(scenario, _footprint(scenario, plan, scenario.framework))
    capacities = _capacities(scenario, plan)
    peak, capacity = max(zip(peaks, capacities, strict=True), key=lambda pair: pair[0] / pair[1])
    suggestions = () if peak <= capacity else _suggestions(scenario)
    return CheckReport(peak, capacity, scenario.warnings, suggestions)


def kernels_of(scenario: Scenario) -> tuple[Kernel, ...]:
    """The distinct kernels that the scenario's ranks run, as they are timed, in the order in which they first run."""
    _require(scenario)
    found: dict[Kernel, None] = {}
    for block in _blocks(_lowered(scenario)):
        for operation in block.operations:
            match operation.does:
                case Kernel() as kernel:
                    found[kernel] = None
                case Overlap(kernel=kernel, chunks=chunks):
                    found[kernel if math.isinf(chunks) else kernel.piece(int(chunks))] = None
    return tuple(found)


def exchanges_of(scenario: Scenario) -> tuple[Call, ...]:
    """The distinct collectives and messages that the scenario's ranks run, with the ranks and nodes that they span.

    In one order, whatever process asks: all ranks of a world measure them together.
    """
    _require(scenario)
    program = _lowered(scenario)
    per_node = scenario.cluster.gpus_per_node
    found: dict[Call, None] = {}
    for exchange in dict.fromkeys(exchange for each in program.programs for exchange in each.exchanges):
        for members in program.groups[exchange.group].members:
            nodes = len(np.unique(members // per_node))
            found[Call(exchange.collective, exchange.payload, len(members), nodes)] = None
    return tuple(sorted(found, key=lambda call: (call.collective.value, call.ranks, call.nodes, call.payload)))


def _blocks(program: Program) -> Iterator[Block]:
    tasks = (task for each in program.programs for task in each.tasks)
    yield from dict.fromkeys(task.block for task in tasks if isinstance(task, Compute))


def peak_memory(scenario: Scenario) -> Bytes:
    """Bytes that the fullest GPU needs; no simulation, since the peak depends on the order of passes alone."""
    return max(_peaks(scenario, _footprint(scenario, _plan(scenario), scenario.framework)))


def ledgers_of(scenario: Scenario) -> tuple[Ledger, ...]:
    """Memory of the fullest GPU of every pipeline rank, over the number of its pass; no simulation."""
    _require(scenario)
    return tuple(_ledgers(scenario, _footprint(scenario, _plan(scenario), scenario.framework)))


def _require(scenario: object) -> None:
    """Refuse what is no scenario, and one whose parts were replaced so that they no longer agree."""
    if not isinstance(scenario, Scenario):
        raise TypeError(f"{type(scenario).__name__} is not a Scenario; build one, as in Scenario.load('plan.yaml')")
    found = problems(scenario)
    if found:
        raise InputError("\n".join(found))


def _plan(scenario: Scenario) -> Plan:
    return Plan(scenario.model, scenario.training, scenario.layout, scenario.schedule.placement)


def _order(scenario: Scenario, plan: Plan) -> Order:
    """The order in which pipeline ranks work, as it is with the costs of the cluster's first kind of accelerator."""
    kernels = _machine(scenario, scenario.cluster.kinds()[0][0]).kernels
    return profiled(scenario.schedule, plan, kernels).order(plan.layout.pp, plan.microbatches)


def _lowered(scenario: Scenario) -> Program:
    plan = _plan(scenario)
    return lower(plan, _order(scenario, plan))


def _exchanges(scenario: Scenario, program: Program) -> CommunicationCost | RecordedExchanges:
    cluster, settings = scenario.cluster, scenario.cost
    library = load_library(cluster.library)
    library = replace(library, published=library.published and cluster.measured)
    model = CommunicationCost(cluster.fabric, library, program.groups, settings.collectives)
    if settings.record is None or scenario.disturbances.network:
        return model  # what was measured on a healthy network does not say what a disturbed one does
    chosen = settings.collectives  # nor what an algorithm does that the user has chosen instead
    rows = tuple(row for row in settings.record.collectives if row.call.collective not in chosen)
    record = replace(settings.record, collectives=rows)
    return RecordedExchanges(model, record, program.groups, gpus_per_node=cluster.gpus_per_node)


def _machines(scenario: Scenario) -> Machines:
    """What each rank's kernels run on: its accelerator, at the speed to which it is disturbed."""
    world = scenario.layout.world
    accelerators, kind = scenario.cluster.kinds()
    speeds, speed = np.unique(scenario.disturbances.speeds(world), return_inverse=True)
    pairs, of = np.unique(kind[:world] * len(speeds) + speed.reshape(-1), return_inverse=True)
    machines: list[Machine] = []
    own = [_machine(scenario, accelerator) for accelerator in accelerators]
    for number, at in (divmod(pair, len(speeds)) for pair in pairs.tolist()):
        machine = own[number]
        slow = machine if speeds[at] == 1.0 else replace(machine, kernels=Slowed(machine.kernels, float(speeds[at])))
        machines.append(slow)
    return Machines(tuple(machines), of.reshape(-1))


def _machine(scenario: Scenario, accelerator: Accelerator) -> Machine:
    """An accelerator at its full speed, as it was measured if there is a record of it, and its host.

    A record's attention is the one that was measured, whatever its version.
    """
    settings, record = scenario.cost, scenario.cost.record
    if record is None or record.device.accelerator != accelerator.name:
        pace = accelerator.in_training
        rate = pace.sustained / (1.0 + pace.spread * slowest(scenario.layout.world))
        older = _older_attention(scenario.training.attention, accelerator)
        kernels: KernelCost = OlderAttention(Roofline(accelerator, rate), older)
        interference = accelerator.interference
    else:
        kernels = RecordedKernels(record, accelerator)
        measured = record.interference
        interference = accelerator.interference if measured is None else measured
    part = interference if settings.interference is None else settings.interference
    return Machine(kernels, part, scenario.framework.launch)


def _older_attention(attention: Attention, accelerator: Accelerator) -> float:
    """How many times longer the flash attention of a training takes than the fastest there is for the accelerator."""
    match attention:
        case Attention.FLASH2:
            return accelerator.in_training.flash2
        case Attention.FLASH1:
            return FLASH1 * accelerator.in_training.flash2
    return 1.0


def _sharing(scenario: Scenario, program: Program, exchanges: CommunicationCost | RecordedExchanges) -> Sharing | None:
    """Which exchanges share the network, if they are to."""
    if scenario.cost.network is Contention.NONE:
        return None
    return sharing(program, exchanges, len(scenario.cluster.fabric.links.kind))


def _classes(scenario: Scenario, cost: BlockCost, exchanges: ExchangeCost, shares: Sharing | None) -> Classes:
    """Which ranks provably do the same; where every kernel varies by itself, none do."""
    links, program, machine = scenario.cluster.fabric.links, cost.program, cost.machines.of
    if scenario.cost.symmetry is Symmetry.OFF or scenario.jitter is not None:
        return unfolded(program) if shares is None else all_apart(program, shares, links)
    if shares is not None:
        return alike_shared(program, exchanges, shares, links, machine=machine)
    return alike(program, exchanges, machine=machine)


def _run(scenario: Scenario, cost: BlockCost, classes: Classes, shares: Sharing | None) -> Inside:
    """Run one rank of each class."""
    program, coalesce, jitter = cost.program, scenario.cost.coalesce, scenario.jitter
    trace, written = run(program, classes, cost, coalesce=coalesce, sharing=shares, jitter=jitter)
    return Inside(program, classes, cost, jitter, trace, written)


def _timed_ledgers(footprint: Footprint, program: Program, trace: Trace) -> Iterator[Ledger]:
    """Memory over time of every pipeline rank (the first GPU, where torch.nn.DataParallel runs)."""
    activations = Activations(footprint.plan)
    for pipeline_rank in range(footprint.plan.layout.pp):
        rank = int(trace.representative[np.flatnonzero(program.kind == pipeline_rank)[0]])
        passes = _passes(program, trace, rank, footprint.plan.microbatches)
        yield ledger(footprint, activations, pipeline_rank, passes)


def _passes(program: Program, trace: Trace, rank: int, microbatches: int) -> list[Pass]:
    """The actions of a simulated rank in the first step, of so many microbatches, with their times.

    An action in pieces lasts from the first to the last.
    """
    tasks = program.programs[int(program.kind[rank])].tasks
    passes: list[Pass] = []
    for row in trace.rows(rank, Stream.COMPUTE).tolist():
        task = tasks[int(trace.task[row])]
        if not isinstance(task, Compute) or task.action is None or task.action.microbatch >= microbatches:
            continue
        start, end = float(trace.start[row]), float(trace.end[row])
        if passes and passes[-1].action == task.action:
            start = passes.pop().start
        passes.append(Pass(task.action, start, end))
    return passes


def _footprint(scenario: Scenario, plan: Plan, framework: Framework) -> Footprint:
    return Footprint(plan, framework, scenario.cluster.accelerator.context_bytes)


def _peaks(scenario: Scenario, footprint: Footprint) -> list[Bytes]:
    """What the fullest GPU of each pipeline rank needs."""
    return [each.peak for each in _ledgers(scenario, footprint)]


def _ledgers(scenario: Scenario, footprint: Footprint) -> Iterator[Ledger]:
    """The ledger of the fullest GPU of each pipeline rank, over the number of its pass."""
    plan, activations = footprint.plan, Activations(footprint.plan)
    for rank, actions in enumerate(_order(scenario, plan)):
        yield ledger(footprint, activations, rank, in_order(actions))


def _capacities(scenario: Scenario, plan: Plan) -> tuple[Bytes, ...]:
    """Memory of the smallest GPU of each pipeline rank."""
    accelerators, kind = scenario.cluster.kinds()
    memory = np.array([accelerator.memory_bytes for accelerator in accelerators])[kind[: plan.layout.world]]
    stage = plan.layout.mesh.coordinate(PIPELINE)
    return tuple(float(memory[stage == rank].min()) for rank in range(plan.layout.pp))


def _suggestions(scenario: Scenario) -> tuple[str, ...]:
    """Single changes (and the few sensible pairs of them) after which the scenario fits."""
    capacity, framework = min(_capacities(scenario, _plan(scenario))), scenario.framework
    domains = scenario.cluster.fabric.domains(np.arange(scenario.cluster.gpus))
    domain = int(np.count_nonzero(domains == domains[0]))

    def peak_of(plan: Plan) -> Bytes:
        """The peak of the scenario with another plan; raise InputError where its parts would not agree."""
        found = problems(replace(scenario, training=plan.training, layout=plan.layout))
        if found:
            raise InputError(found[0])
        return max(_peaks(scenario, _footprint(scenario, plan, framework)))

    return tuple(remedies(_plan(scenario), capacity, peak_of, domain=domain))
