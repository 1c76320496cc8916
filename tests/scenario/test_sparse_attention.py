"""`model.dsa`: DeepSeek's sparse attention in a scenario, what is refused next to it, and what a step takes."""

from typing import Any

import pytest

from clustersim import Scenario, simulate
from clustersim.common.errors import InputError
from clustersim.memory.footprint import MemoryCategory
from clustersim.model.attention_spec import LatentAttention
from clustersim.model.presets import load_preset
from clustersim.model.sparse_attention_spec import DeepseekSparseAttention
from clustersim.results.memory_check import memory_timelines

MLA = {"q_lora_rank": 256, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
SMALL: dict[str, Any] = {"layers": 4, "hidden": 1024, "heads": 16, "ffn": 2048, "vocab": 2048, "mla": MLA}
DSA = {"index_n_heads": 16, "index_head_dim": 64, "index_topk": 1024}
WARM_UP = {**DSA, "stage": "dense_warm_up"}
FP8_ATTENTION: dict[str, Any] = {
    "cluster": {"name": "hgx-b200", "gpus": 8},
    "training": {"attention": "flash", "precision": {"compute": "mxfp8", "attention": "mxfp8"}},
}


def _scenario(model: dict[str, Any] | str, sequence: int = 4096, **sections: Any) -> Scenario:
    training = {"sequence": sequence, "global_batch": 8, **sections.pop("training", {})}
    return Scenario.from_mapping(
        {
            **{"model": model, "cluster": {"name": "dgx-h100", "gpus": 8}, "training": training},
            "layout": sections.pop("layout", {"dp": 8}),
            **sections,
        }
    )


def test_latent_attention_becomes_sparse() -> None:
    scenario = _scenario({**SMALL, "dsa": DSA})
    assert scenario.model.distinct_mixers == (
        DeepseekSparseAttention(LatentAttention(16, *MLA.values()), 16, 64, 1024),
    )
    assert Scenario.from_mapping(scenario.to_mapping()) == scenario


def test_deepseek_v3_with_an_indexer_is_deepseek_v3_2() -> None:
    """But for the name and the context length of the released file."""
    made = _scenario({"preset": "deepseek-v3", "dsa": {}}).model
    assert made.stack == load_preset("deepseek-v3.2").stack


def test_sizes_of_a_preset_may_be_changed() -> None:
    model = _scenario(
        {"preset": "deepseek-v3.2", "heads": 64, "mla": {"kv_lora_rank": 256}, "dsa": {"index_topk": 512}}
    )
    (sparse,) = model.model.distinct_mixers
    assert isinstance(sparse, DeepseekSparseAttention)
    assert (sparse.heads, sparse.latent.kv_lora_rank, sparse.index_topk) == (64, 256, 512)


@pytest.mark.parametrize(
    ("model", "sections", "sentence"),
    [
        ({**SMALL, "mla": None, "dsa": DSA}, {}, "dsa.*latent attention.*inline model"),
        ({**SMALL, "dsa": {**DSA, "index_topk": 0}}, {}, "model.dsa.index_topk: 0 is too small"),
        ({**SMALL, "dsa": {"topk": 1}}, {}, "model.dsa.topk: unknown key; choose one of"),
        (
            {**SMALL, "dsa": DSA},
            {"layout": {"cp": 2, "dp": 4, "cp_kind": "ring"}},
            "ring, but ranks gather the keys that sparse",
        ),
        ({**SMALL, "dsa": DSA}, {"training": {"attention": "standard"}}, "standard computes the scores of all keys"),
        ({**SMALL, "dsa": DSA}, FP8_ATTENTION, "in bf16 alone"),
        (
            {**SMALL, "dsa": DSA},
            {"training": {"lora": {"rank": 8, "targets": ["down"]}}},
            "adapters of sparse attention",
        ),
        ({**SMALL, "dsa": WARM_UP}, {"layout": {"cp": 2, "dp": 4}}, "how sparse attention works on a part of one"),
        ({**SMALL, "dsa": WARM_UP}, {"training": {"optimizer": "muon"}}, "muon of an indexer that is trained alone"),
        ({**SMALL, "dsa": {**DSA, "stage": "warm"}}, {}, "model.dsa.stage"),
        ({**SMALL, "dsa": DSA, "window": 512}, {}, "window"),
        ({**SMALL, "dsa": DSA}, {"layout": {"tp": 32}, "cluster": {"name": "dgx-h100", "gpus": 32}}, "heads"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(
    model: dict[str, Any], sections: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence) as error:
        _scenario({key: value for key, value in model.items() if value is not None}, **sections)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 4, "dp": 2, "sequence_parallel": True},
        {"pp": 4, "dp": 2},
        {"dp": 8, "data": {"fsdp": {}}},
        {"cp": 4, "dp": 2, "cp_kind": "all_gather"},
    ],
)
@pytest.mark.parametrize("recompute", ["none", "full", "selective_op"])
def test_sparse_attention_runs_in_every_layout(layout: dict[str, Any], recompute: str) -> None:
    result = simulate(_scenario({**SMALL, "dsa": DSA}, layout=layout, training={"recompute": {"mode": recompute}}))
    assert result.step_time > 0


def test_attention_to_selected_keys_pays_off_where_sequences_are_long() -> None:
    """Of DeepSeek-V3.2's dense layers: the core's time grows with tokens, not their square; the indexer's scores do."""
    times = {
        name: [simulate(_scenario({"preset": name, "layers": 3}, sequence)).step_time for sequence in (16384, 131072)]
        for name in ("deepseek-v3", "deepseek-v3.2")
    }
    dense, sparse = times["deepseek-v3"], times["deepseek-v3.2"]
    assert sparse[1] / sparse[0] < dense[1] / dense[0]
    assert sparse[1] < dense[1]


@pytest.mark.parametrize("layout", [{"dp": 8}, {"tp": 2, "pp": 2, "dp": 2, "sequence_parallel": True, "data": "zero1"}])
def test_the_warm_up_needs_no_states_but_the_indexers_and_sends_no_other_gradients(layout: dict[str, Any]) -> None:
    scenarios = [_scenario({**SMALL, "dsa": dsa}, layout=layout) for dsa in (WARM_UP, DSA)]
    warm_up, sparse = (simulate(scenario) for scenario in scenarios)
    assert warm_up.peak_memory < sparse.peak_memory
    assert warm_up.model_flops.model < sparse.model_flops.model
    states = [memory_timelines(scenario)[0].peak_by_category()[MemoryCategory.OPTIMIZER] for scenario in scenarios]
    shards, stages = (2, 2) if "pp" in layout else (1, 1)
    indexer = 256 * 16 * 64 + 1024 * 64 + 2 * 64 + 1024 * 16
    assert states[0] == 12 * 4 * indexer / stages / shards  # moments and master weights
    assert states[0] < states[1] / 2


def test_the_warm_up_runs_with_experts_and_fully_sharded() -> None:
    experts = {"count": 8, "top_k": 2, "ffn": 512}
    model = {**SMALL, "dsa": WARM_UP, "experts": experts}
    for layout in ({"dp": 8, "ep": 4}, {"dp": 8, "data": "fsdp"}):
        assert simulate(_scenario(model, layout=layout)).step_time > 0
