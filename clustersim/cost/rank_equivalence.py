"""Which ranks are equivalent, given the costs of their collectives?

The colour refinement (`symmetry.refinement`) starts from the time of communication ops in each
group; on a shared network, for groups that contend with others, from their link demand.
"""

from dataclasses import replace

import numpy as np

from clustersim.common.arrays import BoolArray, FloatArray, IntArray
from clustersim.cost.background_traffic import loaded_links
from clustersim.cost.contention import ContentionMap
from clustersim.cost.timing import CommCost
from clustersim.hardware.topology import LinkTable
from clustersim.program.program import Program
from clustersim.program.task import CommOp
from clustersim.symmetry.labels import label_values, pair_labels
from clustersim.symmetry.link_load_matrix import LinkColourRefinement, LinkLoadMatrix, LinkTraffic
from clustersim.symmetry.refinement import SymmetryClasses, singleton_classes, symmetry_classes
from clustersim.symmetry.rotation_orbits import StepOrbits, classes_by_orbit


def equivalence_classes(
    program: Program, comm_cost: CommCost, *, model_index: IntArray | None = None
) -> SymmetryClasses:
    """Equivalence classes of ranks where every communication op takes its uncontended time."""
    timings = ((comm_op.comm_group, comm_cost.time_comm_op(comm_op)) for comm_op in program.comm_ops)
    columns = [(group, column) for group, timing in timings for column in (timing.seconds, timing.nvlink_share)]
    return symmetry_classes(program, _feature_matrices(columns), device_model=model_index)


def contended_classes(
    program: Program,
    comm_cost: CommCost,
    contention: ContentionMap,
    links: LinkTable,
    *,
    model_index: IntArray,
    orbits: StepOrbits | None = None,
) -> SymmetryClasses:
    """Equivalence classes of ranks, groups and links where communication ops share the network.

    model_index: [ranks] index of the device model of each rank; orbits: of the step, where the load matrices hold
    representatives only.
    """
    features = group_features(program, comm_cost, contention)
    traffic = simulated_link_loads(program, contention, links)
    if orbits is not None:
        return classes_by_orbit(program, features, traffic, model_index, orbits)
    return symmetry_classes(program, features, traffic, device_model=model_index)


def group_features(program: Program, comm_cost: CommCost, contention: ContentionMap) -> dict[str, FloatArray]:
    """Features of groups by communicator, [groups, features]: seconds of ops, or demands on links that they share."""
    columns: list[tuple[str, FloatArray | None]] = []
    for comm_op in program.comm_ops:
        timing, contended = comm_cost.time_comm_op(comm_op), _simulated_groups(program, contention, comm_op)
        columns.append((comm_op.comm_group, np.where(contended, -1.0, timing.seconds)))
        columns.append((comm_op.comm_group, timing.nvlink_share))
        if contended.any():
            demand = contention.link_demand(comm_op)
            demand_columns = (demand.latency, demand.transfer, demand.flow)
            columns += [(comm_op.comm_group, np.where(contended, column, 0.0)) for column in demand_columns]
    return _feature_matrices(columns)


def unfolded_classes(program: Program, contention: ContentionMap, links: LinkTable) -> SymmetryClasses:
    """Every rank and group in a class of its own; links are equivalent if the same groups load them equally."""
    singletons = singleton_classes(program)
    colours = LinkColourRefinement(
        simulated_link_loads(program, contention, links),
        {comm_group: len(group_labels) for comm_group, group_labels in singletons.group_colours.items()},
    )
    colours.refine(singletons.group_colours)
    return replace(singletons, link_colours=colours.colour)


def _simulated_groups(program: Program, contention: ContentionMap, comm_op: CommOp) -> BoolArray:
    """[groups] whether an op is simulated on the network in each group."""
    group_count = len(program.groups[comm_op.comm_group].members)
    is_standalone = comm_op in program.task_comm_ops
    return (
        np.ones(group_count, dtype=np.bool_)
        if is_standalone
        else contention.contended.get(comm_op, np.zeros(group_count, np.bool_))
    )


def simulated_link_loads(program: Program, contention: ContentionMap, links: LinkTable) -> LinkTraffic:
    """Link loads of the ops that are simulated on the network."""
    loads_by_group: dict[str, dict[tuple[LinkLoadMatrix, bytes], LinkLoadMatrix]] = {}
    for comm_op in program.comm_ops:
        simulated = _simulated_groups(program, contention, comm_op)
        full, group_loads = (
            contention.link_demand(comm_op).link_loads,
            loads_by_group.setdefault(comm_op.comm_group, {}),
        )
        key = full, simulated.tobytes()
        if simulated.any() and key not in group_loads:
            selected = simulated[full.group_index]
            group_loads[key] = (
                full
                if selected.all()
                else LinkLoadMatrix(
                    full.group_index[selected], full.link_index[selected], full.seconds_per_byte[selected]
                )
            )
    return LinkTraffic(
        _initial_link_labels(links, contention),
        {comm_group: tuple(loads.values()) for comm_group, loads in loads_by_group.items()},
    )


def _feature_matrices(columns: list[tuple[str, FloatArray | None]]) -> dict[str, FloatArray]:
    """Columns that distinguish groups of a communicator, stacked to matrices (None: a feature that they lack)."""
    varying: dict[str, list[FloatArray]] = {}
    for comm_group, column in columns:
        if column is not None and column.size and column.min() < column.max():
            varying.setdefault(comm_group, []).append(column)
    return {comm_group: np.stack(group_columns, axis=1) for comm_group, group_columns in varying.items()}


def _initial_link_labels(links: LinkTable, contention: ContentionMap) -> IntArray:
    """Initial labels of links: by kind and bandwidth; links with background traffic are singletons."""
    singleton_labels = np.zeros(len(links.kind), np.int64)
    background_links = loaded_links(contention.background)
    singleton_labels[background_links] = 1 + np.arange(len(background_links))
    return pair_labels(pair_labels(links.kind.astype(np.int64), label_values(links.bandwidth)), singleton_labels)
