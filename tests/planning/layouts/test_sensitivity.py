"""Sensitivity: perturbations are the catalogue's, and one of what a layout lacks leaves its score as it is."""

from clustersim.planning.layouts.executors import PackedScenario
from clustersim.planning.layouts.objective import parse_objective
from clustersim.planning.layouts.search_space import LayoutCandidate
from clustersim.planning.layouts.sensitivity import PERTURBATIONS, label_scores, perturbed_score
from clustersim.scenario import Scenario
from clustersim.simulation import simulate

MAPPING = {
    "model": {"preset": "llama3-8b", "layers": 4},
    "cluster": {"name": "dgx-h100", "gpus": 8},
    "layout": {"tp": 2, "pp": 2, "dp": 2},
    "training": {"sequence": 1024, "global_batch": 12, "microbatch": 3},
}


def scores_by_label() -> dict[str, float | None]:
    scenario = Scenario.from_mapping(MAPPING, default_name="one node")
    packed, objective = PackedScenario.pack(scenario), parse_objective("step-time")
    candidate = LayoutCandidate(())
    scores = [[perturbed_score(packed, objective, candidate, index)] for index in range(len(PERTURBATIONS))]
    return {case.description: case.scores[0] for case in label_scores(scores)}


def test_a_layout_on_one_node_does_not_depend_on_the_network() -> None:
    step_time = simulate(Scenario.from_mapping(MAPPING, default_name="one node")).step_time
    scores = scores_by_label()
    assert scores["network links at 0.9x bandwidth"] == step_time
    assert scores["microbatches of half the size"] is None  # three sequences have no half
    slower = ("NVLink (else PCIe) at 0.9x bandwidth", "matmuls and attention at 0.9x speed", "one node at 0.9x speed")
    for score in map(scores.get, slower):
        assert score is not None
        assert score > step_time
