"""The explorer page as text: self-contained, escaped, with the scenario among all control values."""

import json
import re
from dataclasses import replace
from functools import cache
from html import unescape

from clustersim import Scenario
from clustersim.planning.explorer.explorer_data import build_exploration_tables
from clustersim.report.explorer_page import explorer_page
from clustersim.results.explorer_tables import ExplorerData, ScalingPoint, ScalingStudy
from tests.planning.explorer_scenarios import explore_scenario, few_choices

MAX_PAGE_BYTES = 15_000_000
HTML_INJECTION = "<script>alert(1)</script>&\"'"
POINTS = (
    ScalingPoint("tp 1", 8, step_time=2.0, tokens_per_gpu=100.0, peak_memory=1e9, fits=True, is_baseline=True),
    ScalingPoint("tp 2", 16, step_time=1.0, tokens_per_gpu=90.0, peak_memory=1e12),
    ScalingPoint("tp 4", 32, missing_reason=f"no {HTML_INJECTION}"),
)


@cache
def exploration() -> ExplorerData:
    scenario = Scenario.from_mapping(
        {
            "name": HTML_INJECTION,
            "model": {"preset": "llama-tiny", "name": HTML_INJECTION, "layers": 6},
            "cluster": {"name": "dgx-h100", "gpus": 24},
            "layout": {"tp": 2, "pp": 6, "dp": 2},
            "training": {"sequence": 768, "global_batch": 12, "microbatch": 3, "recompute": {"layers": 1}},
        }
    )
    studies = tuple(
        ScalingStudy(name, f"{name} {HTML_INJECTION}", HTML_INJECTION, POINTS) for name in ("weak", "strong", "layouts")
    )
    with few_choices():
        return replace(build_exploration_tables(scenario), studies=studies, notes=(HTML_INJECTION,))


@cache
def rendered_page() -> str:
    return explorer_page(exploration())


def test_page_is_small_and_self_contained() -> None:
    assert len(rendered_page().encode()) < MAX_PAGE_BYTES
    assert not re.search(r"<(link|img|iframe)|\ssrc=|@import", rendered_page().split("<script>")[0])
    assert "default-src 'none'" in rendered_page()


def test_user_text_is_escaped() -> None:
    assert HTML_INJECTION not in rendered_page()
    assert rendered_page().count("&lt;script&gt;alert(1)") >= 5


def test_all_controls_contain_the_scenario_value() -> None:
    start = exploration().start
    expected = {
        "gpus": 24, "tp": 2, "pp": 6, "cp": 1, "microbatch": 3, "sequence": 768, "batch": 12, "recompute": "layers:1",
        "schedule": "1f1b", "zero": 0, "model": 0, "precision": 0,
    }  # fmt: skip
    for key, value in expected.items():
        assert start[key] == value
        (values,) = re.findall(rf'data-key="{key}" data-values="([^"]*)"', rendered_page())
        options = json.loads(unescape(values))
        assert value in options
        assert len(set(options)) == len(options)


def test_all_controls_have_a_label() -> None:
    controls = re.findall(r'id="(control-[a-z]+)" data-key', rendered_page())
    assert len(controls) == 14
    assert all(
        f'<label for="{name}"' in rendered_page() or f'class="tick" for="{name}"' in rendered_page()
        for name in controls
    )


def test_unfit_and_unsimulated_layouts_are_labelled() -> None:
    text = rendered_page().split('id="figures"')[0]
    assert text.count("2 simulated, 1 not</summary>") == 3
    assert text.count("not simulated: no") == 3
    assert text.count(">does not fit</td>") == 3
    figures = json.loads(re.search(r'id="figures">(.*?)</script>', rendered_page(), re.DOTALL)[1])  # type: ignore[index]
    lines = next(figure for figure in figures if figure["name"] == "explorer-rates")["traces"]
    assert [trace["text"] for trace in lines] == [["", "does not fit"]] * 2
    assert [trace["marker"]["symbol"][1] for trace in lines] == ["x-open"] * 2
    (bars,) = next(figure for figure in figures if figure["name"] == "explorer-layouts")["traces"]
    assert bars["text"] == ["100, the scenario", "90, does not fit"]


def test_no_studies_panel_without_studies() -> None:
    assert "Step time, simulated" not in explorer_page(replace(exploration(), studies=()))


def test_moe_model_has_expert_controls() -> None:
    text = explorer_page(explore_scenario("latent", all_choices=False).exploration)
    for key in ("ep", "etp", "dispatcher"):
        assert f'<label for="control-{key}"' in text
        assert f'id="control-{key}"' not in rendered_page()
    assert ">layernorm, mla_up_proj, moe_act</option>" in text
    assert "What it sends to experts" in text
    assert "What it sends to experts" not in rendered_page()


def test_element_ids_are_unique() -> None:
    """With an expert scaling study and the expert traffic figure, every id on the page belongs to one element."""
    dense, moe = exploration(), explore_scenario("mixed", all_choices=False).exploration
    studies = (*dense.studies, *(ScalingStudy(name, name, "", POINTS) for name in ("experts", "zero")))
    text = explorer_page(replace(moe, studies=studies)).split('id="figures"')[0]
    names = re.findall(r'<[^<>]*\sid="([^"]+)"', text)
    assert len(names) == len(set(names))
