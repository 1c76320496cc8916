"""Which collectives and messages does a scenario's step have?"""

import numpy as np

from clustersim.build import build_plan, build_program, require_consistent
from clustersim.cost.calibration_record import CollectiveCall, reduction_dtype
from clustersim.program.task import HostOp
from clustersim.scenario import Scenario


def distinct_comm_calls(scenario: Scenario) -> tuple[CollectiveCall, ...]:
    """The distinct collectives and p2p messages of the scenario's ranks, with the ranks and nodes that they span.

    Sorted, hence in the same order in every process: all ranks measure them together. Excludes host copies and
    MoE dispatch/combine that run as kernels of their own.
    """
    require_consistent(scenario)
    program = build_program(scenario, build_plan(scenario))
    fabric = scenario.cluster.fabric
    calls: dict[CollectiveCall, None] = {}
    comm_ops = dict.fromkeys(comm_op for rank_program in program.programs for comm_op in rank_program.comm_ops)
    for comm_op in (
        candidate
        for candidate in comm_ops
        if not (isinstance(candidate, HostOp) or candidate.collective.is_token_routing)
    ):
        for members in program.groups[comm_op.comm_group].members:
            nodes = len(np.unique(fabric.node_ids(members)))
            calls[
                CollectiveCall(comm_op.collective, comm_op.payload, len(members), nodes, reduction_dtype(comm_op))
            ] = None
    return tuple(sorted(calls, key=_call_sort_key))


def _call_sort_key(call: CollectiveCall) -> tuple[str, int, int, float, str]:
    return call.collective.value, call.ranks, call.nodes, call.payload, call.dtype.value
