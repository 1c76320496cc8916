"""An accelerator of one's own: like a packaged one, with what differs; never taken for measured."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from clustersim.common import data_files
from clustersim.common.dtypes import DType
from clustersim.common.errors import CombinedInputError, InputError
from clustersim.hardware.accelerator import load_accelerator
from clustersim.hardware.cluster import load_cluster
from clustersim.hardware.prices import Price, PriceKind
from clustersim.scenario import Scenario
from clustersim.simulation import simulate
from tests.sentences import parts

H20_LIKE = {
    "like": "h100-sxm-80gb", "name": "mine", "peak": {"bf16": "148 TFLOP/s"}, "memory": "96 GB",
    "memory_bandwidth": "4.0 TB/s", "power": {"tdp": "400 W"}, "price_per_gpu_hour": "1.50 USD",
}  # fmt: skip
SMALL_MODEL = {"layers": 4, "hidden": 1024, "heads": 16, "ffn": 4096, "vocab": 32000}


@pytest.fixture
def small_mapping() -> dict[str, Any]:
    return {
        "model": SMALL_MODEL, "cluster": {"name": "dgx-h100", "gpus": 8}, "layout": {"tp": 2},
        "training": {"sequence": 2048, "global_batch": 32},
    }  # fmt: skip


def test_what_is_not_stated_is_the_others() -> None:
    mine, h100 = load_accelerator(H20_LIKE), load_accelerator("h100-sxm-80gb")
    assert (mine.name, mine.like) == ("mine", "h100-sxm-80gb")
    assert mine.peak_flops(DType.BF16) == 148e12
    assert (mine.memory_bytes, mine.memory_bandwidth) == (96e9, 4e12)
    assert (mine.power.tdp, mine.power.idle) == (400.0, h100.power.idle)
    assert mine.price == Price(1.5, "USD")
    assert (mine.compute_units, mine.nvlink, mine.derating) == (h100.compute_units, h100.nvlink, h100.derating)
    assert mine.efficiency.matmul == h100.efficiency.matmul


def test_it_never_counts_as_measured() -> None:
    """The constants of H100 are fitted to its own kernels; on another chip they are an assumption."""
    assert load_accelerator("h100-sxm-80gb").efficiency.published
    assert not load_accelerator({"like": "h100-sxm-80gb"}).efficiency.published
    with pytest.raises(InputError, match=r"efficiency\.provenance: .*not measured"):
        load_accelerator({"like": "h100-sxm-80gb", "efficiency": {"provenance": "published"}})
    with pytest.raises(InputError, match="name: h200-sxm-141gb is packaged"):
        load_accelerator({"like": "h100-sxm-80gb", "name": "h200-sxm-141gb"})


@given(st.floats(0.01, 10.0))
def test_formats_without_a_stated_peak_scale_down_only(ratio: float) -> None:
    h100 = load_accelerator("h100-sxm-80gb")
    mine = load_accelerator({"like": "h100-sxm-80gb", "peak": {"bf16": f"{989 * ratio} TFLOP/s"}})
    for dtype in (DType.FP8, DType.FP32, DType.TF32):
        assert mine.peak[dtype] == pytest.approx(h100.peak[dtype] * min(1.0, ratio))


def test_all_problems_are_reported_at_once(refusal: Callable[..., str]) -> None:
    wrong = {
        "like": "h100-sxm-80gb", "memory": "much", "peak": {"bf17": "3 TFLOP/s", "bf16": 3},
        "memory_bandwith": "3 TB/s",
        "power": {"tdp": "900 W", "idel": "3 W"}, "efficiency": {"matmul": {"peak_fraction": 3, "tiles": 4}},
        "training_derating": {"gpu_spread": -1},
    }  # fmt: skip
    message = refusal(f"cluster.accelerator={json.dumps(wrong)}")
    keys = [
        "accelerator.memory: ", "accelerator.peak.bf17: ", "accelerator.peak.bf16: ", "accelerator.power.idel: ",
        "accelerator.memory_bandwith: unknown key; did you mean accelerator.memory_bandwidth?",
        "accelerator.efficiency.matmul.peak_fraction: ", "accelerator.efficiency.matmul.tiles: ",
        "accelerator.training_derating.gpu_spread: ",
    ]  # fmt: skip
    assert message.startswith("plan.yaml: 8 problems")
    assert all(key in message for key in keys)


def test_a_file_with_several_problems_lists_them(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("like: h100-sxm-80gb\nmemory: 5\ninterference: 19\n")
    with pytest.raises(CombinedInputError) as error:
        load_accelerator(str(path))
    assert error.value.source == str(path)
    assert [problem.partition(":")[0] for problem in error.value.problems] == ["memory", "interference"]


@pytest.mark.parametrize(
    ("accelerator", "part"),
    [
        ("{memory: 96 GB}", "accelerator.like: is missing"),
        ("{like: h1000}", "accelerator.like: there is no accelerator 'h1000'"),
        ("{like: gaudi3}", "Intel Gaudi is not supported"),
        ("[3]", "cluster.accelerator: [3] is neither a name nor a mapping"),
        ("{like: h100-sxm-80gb, price_per_gpu_hour: 3}", "price_per_gpu_hour: 3 has no currency"),
    ],
)
def test_one_problem_is_one_sentence(refusal: Callable[..., str], accelerator: str, part: str) -> None:
    message = refusal(f"cluster.accelerator={accelerator}")
    assert part in message
    assert "\n" not in message


def test_an_accelerator_like_itself_is_refused(tmp_path: Path) -> None:
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("like: b.yaml\n")
    second.write_text("like: a.yaml\n")
    with pytest.raises(InputError, match="like this one itself"):
        load_accelerator(str(first))


def test_results_say_that_nothing_was_measured(small_mapping: dict[str, Any]) -> None:
    scenario = Scenario.from_mapping(small_mapping)
    base = simulate(scenario)
    same = simulate(scenario.with_overrides("cluster.accelerator={like: h100-sxm-80gb}"))
    assert same.step_time == pytest.approx(base.step_time, rel=1e-3)
    assert base.provenance_shares["published"] > 0.5 > same.provenance_shares["published"]
    assert same.provenance_shares["roofline"] > 0.5
    (note,) = (text for text in same.model_limitations if "like-h100-sxm-80gb" in text)
    assert "not measured" in note
    assert "h100-sxm-80gb" in note
    width, base_width = (result.uncertainty.relative_interval.high for result in (same, base))
    assert width > base_width


def test_projections_are_marked_in_results(small_mapping: dict[str, Any]) -> None:
    small_mapping["cluster"] = {"name": "vera-rubin-nvl144", "gpus": 8}
    scenario = Scenario.from_mapping(small_mapping)
    assert any("rubin is a projection" in warning for warning in scenario.warnings)
    assert any("rates are a projection" in text for text in simulate(scenario).model_limitations)


def test_less_of_everything_is_never_faster(small_mapping: dict[str, Any]) -> None:
    scenario = Scenario.from_mapping(small_mapping)
    base = simulate(scenario.with_overrides("cluster.accelerator={like: h100-sxm-80gb}")).step_time
    for changes in ("peak: {bf16: 148 TFLOP/s}", "memory_bandwidth: 1 TB/s"):
        changed = scenario.with_overrides(f"cluster.accelerator={{like: h100-sxm-80gb, {changes}}}")
        assert simulate(changed).step_time > 1.05 * base


def test_price_and_power_are_its_own(small_mapping: dict[str, Any]) -> None:
    small_mapping["cluster"]["accelerator"] = H20_LIKE
    scenario = Scenario.from_mapping(small_mapping)
    quote = scenario.economics.gpu_hour_quote(scenario.cluster.accelerator, scenario.cluster.name)
    assert quote is not None
    assert (quote.price, quote.kind) == (Price(1.5, "USD"), PriceKind.CONTRACT)
    stated = scenario.with_overrides("economics.price_per_gpu_hour=3 USD")
    assert stated.economics.gpu_hour_quote(stated.cluster.accelerator, "dgx-h100").price.amount == 3.0


def test_mixed_nodes_and_paths(tmp_path: Path, small_mapping: dict[str, Any]) -> None:
    (tmp_path / "chip.yaml").write_text(yaml.safe_dump({"like": "h100-sxm-80gb", "memory": "96 GB"}))
    small_mapping["cluster"] |= {"gpus": 16, "mixed": {"nodes": 1, "accelerator": {"like": "chip.yaml", "name": "b"}}}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(small_mapping))
    scenario = Scenario.load(tmp_path / "plan.yaml")
    kinds, _ = scenario.cluster.accelerator_kinds()
    assert [kind.name for kind in kinds] == ["h100-sxm-80gb", "b"]
    assert kinds[1].memory_bytes == 96e9
    assert kinds[1].like == "chip"
    assert tmp_path / "chip.yaml" in scenario.files


def test_a_mapping_in_a_cluster_file_and_its_graph(tmp_path: Path) -> None:
    content = data_files.read_mapping(data_files.find_file("clusters", "dgx-h100")) | {"accelerator": H20_LIKE}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(content))
    cluster = load_cluster(str(path), 16)
    assert cluster.accelerator == load_accelerator(H20_LIKE)
    assert load_cluster(str(path), 16, {"accelerator": "h100-sxm-80gb"}).accelerator.name == "h100-sxm-80gb"
    graph = tmp_path / "graph.json"
    graph.write_text(json.dumps(nx.node_link_data(cluster.to_graph(), edges="edges")))
    assert load_cluster(str(graph)).accelerator == cluster.accelerator
    assert load_cluster(str(graph), overrides={"accelerator": {"like": "mi300x"}}).accelerator.like == "mi300x"


def test_the_result_s_scenario_round_trips(small_mapping: dict[str, Any]) -> None:
    small_mapping["cluster"]["accelerator"] = H20_LIKE
    result = simulate(Scenario.from_mapping(small_mapping))
    reread = Scenario.from_mapping(json.loads(json.dumps(result.to_json()["scenario"])))
    assert simulate(reread).step_time == result.step_time


def test_all_keys_are_documented() -> None:
    """Every key of the packaged files, and those of descriptions in place."""
    page = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text(encoding="utf-8")
    section = page[page.index("## An accelerator of your own") : page.index("## A graph file")]
    keys = {"like", "name", "price_per_gpu_hour", "projection"}
    for name in data_files.list_names("accelerators"):
        content = data_files.read_mapping(data_files.find_file("accelerators", name))
        for key, value in content.items():
            keys |= {key} | (set() if key == "sources" else nested_keys(value))
    formats = {dtype.value for dtype in DType}
    missing = [key for key in keys - formats if f"`{key}`" not in section]
    assert missing == []


def nested_keys(value: object) -> set[str]:
    if not isinstance(value, dict):
        return set()
    return set(value).union(*map(nested_keys, value.values()))


def test_peaks_with_sparsity_are_questioned(small_mapping: dict[str, Any]) -> None:
    """1,979 TFLOP/s of data sheets is with 2:4 sparsity; twice the rate with twice the bandwidth is another chip."""

    def warnings(**keys: Any) -> str:
        accelerator = {"like": "h100-sxm-80gb", "name": "mine", **keys}
        mapping = {**small_mapping, "cluster": {**small_mapping["cluster"], "accelerator": accelerator}}
        return "\n".join(Scenario.from_mapping(mapping).warnings)

    doubled = {"peak": {"bf16": "1979 TFLOP/s"}}
    assert parts("peak.bf16 of mine, 1.979 PFLOP/s ... twice ... h100-sxm-80gb").search(warnings(**doubled))
    assert "sparsity" not in warnings(**doubled, memory_bandwidth="7 TB/s")
    assert "sparsity" not in warnings(peak={"bf16": "1300 TFLOP/s"})
