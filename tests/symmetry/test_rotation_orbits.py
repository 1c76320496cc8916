"""A rotation of local ranks maps ranks, groups and links of a step to each other: one of each orbit stands for all."""

import numpy as np
import pytest
from hypothesis import event, given

from clustersim import Scenario, build, simulate
from clustersim.build import PreparedSimulation, build_simulation
from clustersim.hardware.cluster import load_cluster
from clustersim.hardware.rotation import HasRotation
from clustersim.symmetry.rotation_orbits import find_group_orbits
from tests.conftest import examples
from tests.laws.test_shared_network import contended_scenarios
from tests.laws.timelines import assert_same_trace

TENSOR_PARALLEL = {
    "model": "gpt3-6.7b",
    "cluster": {"name": "llama3-roce", "gpus": 256, "fabric": {"spine": {"units": 2, "oversubscription": 7}}},
    "layout": {"tp": 8, "pp": 4, "dp": 8, "data": {"ddp": {"bucket": "100 MB"}}},
    "training": {"sequence": 2048, "global_batch": 64, "microbatch": 1, "precision": "bf16"},
}


def without_orbits(scenario: Scenario) -> PreparedSimulation:
    """The simulation as it is built where no rotation is looked for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "find_step_orbits", lambda *_: None)
        return build_simulation(scenario)


def has_orbits(scenario: Scenario) -> bool:
    return build._UncontendedBuild.from_scenario(scenario, by_orbit=True).orbits is not None


def assert_equal_partitions(left: np.ndarray, right: np.ndarray) -> None:
    """Two colourings are equal up to the names of the colours."""
    pairs = len(np.unique(np.stack([left, right]), axis=1).T)
    assert pairs == len(np.unique(left)) == len(np.unique(right))


def assert_equal_classes(scenario: Scenario) -> None:
    folded, direct = build_simulation(scenario), without_orbits(scenario)
    assert_equal_partitions(folded.classes.rank_colours, direct.classes.rank_colours)
    assert folded.classes.representative.tolist() == direct.classes.representative.tolist()
    assert folded.classes.group_colours.keys() == direct.classes.group_colours.keys()
    for comm_group, colours in direct.classes.group_colours.items():
        assert_equal_partitions(folded.classes.group_colours[comm_group], colours)
    assert folded.contention is not None
    assert direct.contention is not None
    for contended, direct_contended in (
        (folded.contention.contended, direct.contention.contended),
        (folded.contention.self_only, direct.contention.self_only),
    ):
        assert {comm_op: groups.tolist() for comm_op, groups in contended.items()} == {
            comm_op: groups.tolist() for comm_op, groups in direct_contended.items()
        }


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("layout.order=[tp, pp, cp, dp]",),
        ("layout.pp=2", "layout.cp=2", "layout.sequence_parallel=true"),
        ("layout.tp=1", "layout.pp=1", "layout.dp=256", "layout.data=fsdp", "training.global_batch=256"),
        ("layout.tp=1", "layout.cp=16", "layout.pp=1", "layout.dp=16"),  # a ring over nodes: its loads have no orbits
        ("cluster.name=dgx-h100",),
        ("cluster.fabric.spine.oversubscription=1",),
    ],
)
def test_orbits_give_the_classes_of_the_whole_step(overrides: tuple[str, ...]) -> None:
    scenario = Scenario.from_mapping(TENSOR_PARALLEL).with_overrides(*overrides)
    assert has_orbits(scenario)
    assert_equal_classes(scenario)


@given(contended_scenarios())
@examples(200)
def test_orbits_give_the_classes_of_random_steps(scenario: Scenario) -> None:
    event(f"orbits: {has_orbits(scenario)}")
    assert_equal_classes(scenario)


@given(contended_scenarios())
@examples(60)
def test_a_step_folded_by_orbits_equals_the_unfolded_one(scenario: Scenario) -> None:
    assert_same_trace(
        simulate(scenario).trace, simulate(scenario.with_overrides("cost.symmetry=off")).trace, relative=1e-9
    )


def test_a_slow_gpu_or_a_slow_link_leaves_no_orbits() -> None:
    healthy = Scenario.from_mapping(TENSOR_PARALLEL)
    assert not has_orbits(healthy.with_overrides("degradations.slow=[{gpu: 5, speed: 0.9}]"))
    assert has_orbits(healthy.with_overrides("degradations.slow=[{node: 3, speed: 0.9}]"))
    assert not has_orbits(healthy.with_overrides("layout.tp=4", "layout.dp=16"))
    links = "{between: [nic0.0, leaf0.0], bandwidth: 50 %"
    assert not has_orbits(healthy.with_overrides(f"degradations.links=[{links}}}]"))
    assert not has_orbits(healthy.with_overrides(f"degradations.links=[{links}, during: [0 s, 1 s]}}]"))


def test_groups_are_folded_only_if_their_images_are_groups() -> None:
    fabric = load_cluster("dgx-h100", 64).fabric
    assert isinstance(fabric, HasRotation)
    assert fabric.rotation is not None
    rails = np.arange(64).reshape(8, 8).T
    folded = find_group_orbits(rails, fabric.rotation)
    assert folded is not None
    assert (folded.representatives.tolist(), folded.orbit_of_group.tolist()) == ([0], [0] * 8)
    crossed = rails.copy()
    crossed[[0, 1], 3] = crossed[[1, 0], 3]
    assert find_group_orbits(crossed, fabric.rotation) is None
    assert find_group_orbits(rails[:7], fabric.rotation) is None
