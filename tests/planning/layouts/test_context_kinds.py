"""Searches vary how context-parallel ranks exchange keys, and who orthogonalizes which matrices."""

from collections import Counter

from clustersim import Scenario
from clustersim.planning.layouts.search_space import SearchSpace


def scenario(*overrides: str) -> Scenario:
    """A long sequence over 8 GPUs with context parallelism, as Megatron-LM runs it."""
    training = {"sequence": 65536, "global_batch": 8, "gradient_clipping": False}
    mapping = {"model": "llama3-8b", "cluster": {"name": "dgx-h100", "gpus": 8}, "framework": "megatron"}
    return Scenario.from_mapping({**mapping, "layout": {"cp": 4, "data": "zero1"}, "training": training}, overrides)


FIXED = {"layout.tp": 1, "layout.pp": 1, "layout.data": "zero1", "training.microbatch": 1, "training.recompute": "full"}


def kinds_by_degree(built: Scenario) -> Counter[tuple[int, str]]:
    """How many candidates there are of each degree and kind."""
    space = SearchSpace.from_scenario(built, fix=FIXED)
    overrides = [dict(override.split("=", 1) for override in candidate.overrides) for candidate in space.candidates({})]
    return Counter((int(values["layout.cp"]), values.get("layout.cp_kind", "")) for values in overrides)


def test_a_file_with_context_parallelism_varies_its_kinds() -> None:
    """Each kind of the framework at each degree above one, where the first stands for all."""
    kinds = kinds_by_degree(scenario())
    assert {kind for degree, kind in kinds if degree > 1} == {"ring", "all_gather", "ulysses"}
    assert {kind for degree, kind in kinds if degree == 1} == {"ring"}


def test_heads_that_ranks_cannot_exchange_are_pruned() -> None:
    """Six heads on each of 8 ranks of a group are none."""
    built = scenario("model={name: small, layers: 2, hidden: 768, heads: 6, kv_heads: 6, ffn: 2048, vocab: 32000}")
    assert {kind for degree, kind in kinds_by_degree(built) if degree == 4} == {"ring", "all_gather"}


def test_a_file_without_context_parallelism_keeps_its_kind() -> None:
    kinds = kinds_by_degree(scenario("layout.cp=1"))
    assert {kind for _, kind in kinds} == {""}


def test_distributions_of_matrices_can_be_varied() -> None:
    space = SearchSpace.restricted_to(
        scenario("training.optimizer=muon"), {"training.optimizer.distribution": ["layer_wise", "gather"]}
    )
    (first, second) = [*space.candidates({})]
    assert "training.optimizer.distribution=layer_wise" in first.overrides
    assert "training.optimizer.distribution=gather" in second.overrides
