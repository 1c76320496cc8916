"""Process groups of a mesh of axes.

With order [a, b, c, ...] and degrees d_a, d_b, ..., rank = i_a + d_a (i_b + d_b (i_c + ...)): the first is fastest.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.parallel.context_parallel import ContextParallelKind
from clustersim.parallel.data_parallel_strategy import FullyShard
from clustersim.parallel.layer_partition import BehindEncoder
from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import (
    COMM_AXES,
    COMM_GROUPS,
    CONTEXT,
    DATA,
    DENSE_AXIS_NAMES,
    DENSE_MESH,
    EXPERT_MESH,
    MESHES,
    PIPELINE,
    TENSOR,
    Axis,
)
from clustersim.parallel.process_groups import encoder_group_sizes, process_groups
from clustersim.program.placement import Placement, looped_placement
from clustersim.schedules.dual_pipe import DualPipe

LAYOUTS = st.builds(
    lambda degrees, order: Layout(**degrees, order=tuple(order)),
    st.fixed_dictionaries({name: st.integers(1, 4) for name in DENSE_AXIS_NAMES}),
    st.permutations(DENSE_AXIS_NAMES),
)


@given(LAYOUTS)
def test_a_rank_is_its_coordinates_in_mixed_radix(layout: Layout) -> None:
    rank, stride = np.zeros(layout.world_size, dtype=int), 1
    for axis in sorted(MESHES[DENSE_MESH], key=lambda axis: layout.order.index(axis.name)):
        rank += stride * layout.mesh.rank_coordinates(axis)
        stride *= layout.degrees[axis.name]
    assert rank.tolist() == list(range(layout.world_size))


@given(LAYOUTS, st.sets(st.sampled_from(MESHES[DENSE_MESH]), min_size=1))
def test_group_members_differ_only_along_the_groups_axes(layout: Layout, axes: set[Axis]) -> None:
    groups = layout.mesh.groups_along(*axes)
    assert groups.shape[1] == np.prod([layout.degrees[axis.name] for axis in axes])
    for axis in MESHES[DENSE_MESH]:
        member_coordinates = layout.mesh.rank_coordinates(axis)[groups]
        if axis not in axes:
            assert (member_coordinates == member_coordinates[:, :1]).all()


@given(LAYOUTS)
def test_each_rank_is_in_one_group_of_a_symmetric_kind(layout: Layout) -> None:
    for name, groups in process_groups(layout, looped_placement(layout.pp)).items():
        if not groups.ordered and name != "embedding":
            assert sorted(groups.members.reshape(-1)) == list(range(layout.world_size)), name


@given(LAYOUTS)
def test_group_members_are_in_ascending_order(layout: Layout) -> None:
    for groups in process_groups(layout, looped_placement(layout.pp)).values():
        if not groups.ordered and groups.members.shape[1] > 1:
            assert (np.diff(groups.members, axis=1) > 0).all()


@given(LAYOUTS)
def test_group_sizes(layout: Layout) -> None:
    """Each weight is replicated on dp x cp ranks; a replica of the model is on tp x pp ranks."""
    sizes = {
        name: groups.members.shape[1] for name, groups in process_groups(layout, looped_placement(layout.pp)).items()
    }
    assert sizes["tp"] == layout.tp
    assert sizes["cp"] == layout.cp
    assert sizes["dp"] == layout.dp * layout.cp
    assert sizes["model"] == layout.tp * layout.pp
    assert sizes["world"] == layout.world_size
    assert ("pp_next" in sizes) == ("embedding" in sizes) == (layout.pp > 1)


def test_megatrons_default_order_makes_tensor_parallel_ranks_adjacent() -> None:
    """Megatron-LM's `tp-cp-ep-dp-pp`; the example of its parallel_state docstring (16 GPUs, tp 2, pp 4).

    8 tensor groups [g0, g1] [g2, g3] ...; 4 pipeline groups [g0, g4, g8, g12] ...; 8 data groups [g0, g2] [g1, g3] ...
    """
    layout = Layout(tp=2, pp=4, dp=2)
    assert layout.mesh.groups_along(TENSOR).tolist() == [[rank, rank + 1] for rank in range(0, 16, 2)]
    assert layout.mesh.groups_along(PIPELINE).tolist() == [[rank, rank + 4, rank + 8, rank + 12] for rank in range(4)]
    expected = [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]
    assert sorted(layout.mesh.groups_along(DATA).tolist()) == expected


def test_llama_3s_order_puts_data_parallel_ranks_farthest_apart() -> None:
    """Llama 3 (arXiv:2407.21783) section 3.3.2: [TP, CP, PP, DP]; with tp 8 and pp 16 a replica is 128 neighbours."""
    layout = Layout(tp=8, cp=1, pp=16, dp=128, order=("tp", "cp", "pp", "dp"))
    groups = process_groups(layout, looped_placement(layout.pp))
    assert groups["model"].members[0].tolist() == list(range(128))
    assert groups["dp"].members[0].tolist() == list(range(0, 16384, 128))
    assert groups["pp_next"].members[0].tolist() == [0, 8]


def test_the_mesh_has_the_slowest_axis_first() -> None:
    assert Layout(tp=2, dp=3, pp=5).mesh.rank_grid.shape == (5, 3, 1, 2)


def group_pairs(layout: Layout, placement: Placement, name: str) -> list[list[int]]:
    groups = process_groups(layout, placement).get(name)
    return [] if groups is None else groups.members.tolist()


def test_p2p_pairs_of_one_chunk_do_not_wrap_around() -> None:
    assert group_pairs(Layout(pp=4), looped_placement(4), "pp_next") == [[0, 1], [1, 2], [2, 3]]
    assert group_pairs(Layout(pp=4), looped_placement(4), "pp_previous") == [[1, 0], [2, 1], [3, 2]]


@pytest.mark.parametrize(("comm_group", "step"), [("pp_next", 1), ("pp_previous", -1)])
@given(layout=LAYOUTS)
def test_p2p_pairs_of_several_chunks_have_one_send_and_one_receive_per_rank(
    comm_group: str, step: int, layout: Layout
) -> None:
    pairs = np.array(group_pairs(layout, looped_placement(layout.pp, 2), comm_group)).reshape(-1, 2)
    if layout.pp == 1:
        assert not len(pairs)
        return
    assert sorted(pairs[:, 0]) == sorted(pairs[:, 1]) == list(range(layout.world_size))
    stage = layout.mesh.rank_coordinates(PIPELINE)
    assert ((stage[pairs[:, 1]] - stage[pairs[:, 0]] - step) % layout.pp == 0).all()


@given(LAYOUTS)
def test_p2p_pairs_differ_only_in_the_pipeline_coordinate(layout: Layout) -> None:
    for name, step in (("pp_next", 1), ("pp_previous", -1)):
        pairs = np.array(group_pairs(layout, looped_placement(layout.pp), name), dtype=int).reshape(-1, 2)
        for axis in (TENSOR, CONTEXT, DATA):
            assert (np.diff(layout.mesh.rank_coordinates(axis)[pairs], axis=1) == 0).all()
        assert (np.diff(layout.mesh.rank_coordinates(PIPELINE)[pairs], axis=1) == step).all()


def test_a_v_placement_sends_both_ways_without_wrapping_around() -> None:
    """Stages 0 1 2 3 4 5 on ranks 0 1 2 2 1 0: activations are sent down and come back, and so do gradients."""
    v_shape = Placement((0, 1, 2, 2, 1, 0))
    assert group_pairs(Layout(pp=3), v_shape, "pp_next") == [[0, 1], [1, 2]]
    assert group_pairs(Layout(pp=3), v_shape, "pp_previous") == [[1, 0], [2, 1]]
    assert group_pairs(Layout(pp=3), v_shape, "embedding") == []


def test_model_chunks_connect_the_ends_of_the_pipeline() -> None:
    """With virtual stages, stage p on rank 0 follows stage p - 1 on rank p - 1."""
    flat, chunked = (
        process_groups(Layout(pp=4), looped_placement(4, chunks))["pp_next"].members.tolist() for chunks in (1, 2)
    )
    assert [3, 0] not in flat
    assert [3, 0] in chunked


def test_the_embedding_group_joins_first_and_last_stage() -> None:
    assert process_groups(Layout(tp=2, pp=3), looped_placement(3))["embedding"].members.tolist() == [[0, 4], [1, 5]]


def test_dense_and_expert_meshes_share_the_pipeline() -> None:
    """Parallel folding (Liu et al. 2025, arXiv:2504.14960, figure 2): attention tp x dp, experts etp x ep x edp.

    16 ranks, pp 2: attention tp 4 x dp 2, experts etp 1 x ep 4 x edp 2. Experts are dispatched within the groups whose
    attention is tensor-parallel, and stages are the same ranks in both.
    """
    layout = Layout(tp=4, dp=2, pp=2, ep=4, etp=1)
    groups = process_groups(layout, looped_placement(2))
    assert layout.world_size == 16
    assert layout.group_size(COMM_GROUPS["ep"]) == 4
    assert groups["ep"].members.tolist() == groups["tp"].members.tolist()
    assert groups["edp"].members.tolist() == groups["dp"].members.tolist()
    assert (layout.meshes[EXPERT_MESH].rank_coordinates(PIPELINE) == layout.mesh.rank_coordinates(PIPELINE)).all()


def test_without_expert_parallelism_there_are_no_expert_groups() -> None:
    groups = process_groups(Layout(tp=4, dp=2, pp=2), looped_placement(2))
    assert not {"ep", "etp", "edp"} & set(groups)


def test_hybrid_sharding_shards_experts_within_replicas() -> None:
    """8 ranks in 2 replicas of 4; experts on 2 ranks each, sharded over the 2 of a replica that hold the same ones."""
    layout = Layout(dp=8, ep=2, data=FullyShard(shard=4))
    groups = process_groups(layout, looped_placement(1))
    assert groups["edp_shard"].members.tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups["edp_replicate"].members.tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_an_encoder_on_ranks_of_its_own_hands_over_in_the_smallest_groups() -> None:
    """Three replicas of two for six of the model, two shards each for two: two replicas of the model to each."""
    partition = BehindEncoder(None)
    layout = Layout(tp=2, dp=6, pp=3, encoder_tp=2, encoder_dp=3, layers_per_stage=partition)
    assert layout.world_size == 6 + 24
    assert [layout.ranks_at(rank) for rank in range(3)] == [6, 12, 12]
    groups = process_groups(layout, looped_placement(3), (1, 2))
    expected = [[0, 6, 8], [1, 7, 9], [2, 10, 12], [3, 11, 13], [4, 14, 16], [5, 15, 17]]
    assert groups["from_encoder"].members.tolist() == expected
    assert groups["to_encoder"].members.tolist() == [[*group[1:], group[0]] for group in expected]
    assert encoder_group_sizes(layout) == (1, 2)
    assert groups["encoder_tp"].members.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert groups["encoder_dp"].members.tolist() == [[0, 2, 4], [1, 3, 5]]
    assert groups["world"].members.tolist() == [[*range(30)]]
    assert groups["pp_next"].members.tolist() == [[rank, rank + 12] for rank in range(6, 18)]
    assert groups["dp"].members.min() == 6


def test_every_axis_has_a_comm_group_and_every_comm_group_a_mesh() -> None:
    kind = ContextParallelKind.TWO_DIMENSIONAL
    meshes = Layout(2, 4, kind, cp_inner=2, dp=4, ep=2, encoder_tp=1, data=FullyShard(shard=8)).meshes
    assert {comm_group.accounted_axis for comm_group in COMM_GROUPS.values()} == set(COMM_AXES)
    for comm_group in COMM_GROUPS.values():
        assert {axis.name for axis in comm_group.axes} <= set(meshes[comm_group.mesh].degrees), comm_group


@given(st.integers(2, 4), st.integers(1, 3), st.integers(1, 2), st.permutations(DENSE_AXIS_NAMES))
def test_mirrored_pipelines_match_dual_pipe(half: int, dp: int, tp: int, order: list[str]) -> None:
    """On a line of pp = 2 half ranks in rank order: rank r has a copy of the stages r and pp - 1 - r.

    One pipeline sends activations from r to r + 1, the other from r + 1 to r, and gradients the other way: all
    pairs of neighbors in both directions, and no others. The ranks r and pp - 1 - r of all dp hold the same
    stages.
    """
    layout = Layout(tp=tp, pp=half, dp=2 * dp, order=tuple(order), mirrored=True)
    groups = process_groups(layout, DualPipe().placement(half))
    pipelines = layout.as_configured.mesh.groups_along(PIPELINE)
    pairs = {
        (a, b)
        for pipeline_ranks in pipelines.tolist()
        for index in range(2 * half - 1)
        for a, b in both_directions(pipeline_ranks[index : index + 2])
    }
    sent = [tuple(pair) for name in ("pp_next", "pp_previous", "pp_across") for pair in groups[name].members.tolist()]
    assert set(sent) == pairs
    pp_coordinate = layout.as_configured.mesh.rank_coordinates(PIPELINE)
    assert (
        np.minimum(pp_coordinate, 2 * half - 1 - pp_coordinate).tolist() == layout.rank_coordinates(PIPELINE).tolist()
    )
    dp_groups = {frozenset(group) for group in groups["dp"].members.tolist()}
    tp_coordinate = layout.as_configured.mesh.rank_coordinates(TENSOR)
    expected = [
        [
            rank
            for rank in range(layout.world_size)
            if (pp_coordinate[rank] in (pp_index, 2 * half - 1 - pp_index)) and tp_coordinate[rank] == tp_index
        ]
        for pp_index in range(half)
        for tp_index in range(tp)
    ]
    assert dp_groups == {frozenset(group) for group in expected}


def both_directions(pair: list[int]) -> list[tuple[int, int]]:
    """A pair in both directions."""
    source, target = pair
    return [(source, target), (target, source)]


def test_inner_groups_of_context_parallelism_are_neighbours() -> None:
    """Two tensor-parallel ranks are adjacent; of four context-parallel ones two are next to each other in a group."""
    layout = Layout(tp=2, cp=4, cp_kind=ContextParallelKind.HIERARCHICAL, cp_inner=2)
    groups = process_groups(layout, looped_placement(1))
    assert groups["cp"].members.tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert groups["cp_inner"].members.tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups["cp_outer"].members.tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
