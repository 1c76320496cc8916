"""The explorer page as text: whole, offline, escaped, with the scenario among all choices."""

import json
import re
from dataclasses import replace
from functools import cache
from html import unescape

from clustersim import Scenario
from clustersim.planning.explorer.explorer_data import build_exploration_tables
from clustersim.report.explorer_page import explorer_page
from clustersim.results.explorer_tables import ExplorerData, ScalingPoint, ScalingStudy
from tests.planning.explorer_scenarios import MIXTURES, few_choices

MOST_BYTES = 15_000_000
EVIL = "<script>alert(1)</script>&\"'"
POINTS = (
    ScalingPoint("tp 1", 8, step_time=2.0, tokens_per_gpu=100.0, peak_memory=1e9, fits=True, is_baseline=True),
    ScalingPoint("tp 2", 16, step_time=1.0, tokens_per_gpu=90.0, peak_memory=1e12),
    ScalingPoint("tp 4", 32, missing_reason=f"no {EVIL}"),
)


@cache
def exploration() -> ExplorerData:
    scenario = Scenario.from_mapping(
        {
            "name": EVIL,
            "model": {"preset": "llama-tiny", "name": EVIL, "layers": 6},
            "cluster": {"name": "dgx-h100", "gpus": 24},
            "layout": {"tp": 2, "pp": 6, "dp": 2},
            "training": {"sequence": 768, "global_batch": 12, "microbatch": 3, "recompute": {"layers": 1}},
        }
    )
    studies = tuple(ScalingStudy(name, f"{name} {EVIL}", EVIL, POINTS) for name in ("weak", "strong", "layouts"))
    with few_choices():
        return replace(build_exploration_tables(scenario), studies=studies, notes=(EVIL,))


@cache
def page() -> str:
    return explorer_page(exploration())


def test_it_is_one_small_file_without_addresses() -> None:
    assert len(page().encode()) < MOST_BYTES
    assert not re.search(r"<(link|img|iframe)|\ssrc=|@import", page().split("<script>")[0])
    assert "default-src 'none'" in page()


def test_text_of_users_is_escaped() -> None:
    assert EVIL not in page()
    assert page().count("&lt;script&gt;alert(1)") >= 5


def test_every_control_holds_the_scenario() -> None:
    start = exploration().start
    wanted = {
        "gpus": 24, "tp": 2, "pp": 6, "cp": 1, "microbatch": 3, "sequence": 768, "batch": 12, "recompute": "layers:1",
        "schedule": "1f1b", "zero": 0, "model": 0, "precision": 0,
    }  # fmt: skip
    for key, value in wanted.items():
        assert start[key] == value
        (values,) = re.findall(rf'data-key="{key}" data-values="([^"]*)"', page())
        listed = json.loads(unescape(values))
        assert value in listed
        assert len(set(listed)) == len(listed)


def test_every_control_has_a_label() -> None:
    controls = re.findall(r'id="(control-[a-z]+)" data-key', page())
    assert len(controls) == 14
    assert all(f'<label for="{name}"' in page() or f'class="tick" for="{name}"' in page() for name in controls)


def test_what_does_not_fit_or_is_not_simulated_says_so_in_words() -> None:
    text = page().split('id="figures"')[0]
    assert text.count("2 simulated, 1 not</summary>") == 3
    assert text.count("not simulated: no") == 3
    assert text.count("<td>does not fit</td>") == 3
    figures = json.loads(re.search(r'id="figures">(.*?)</script>', page(), re.DOTALL)[1])  # type: ignore[index]
    lines = next(figure for figure in figures if figure["name"] == "explorer-rates")["traces"]
    assert [trace["text"] for trace in lines] == [["", "does not fit"]] * 2
    assert [trace["marker"]["symbol"][1] for trace in lines] == ["x-open"] * 2
    (bars,) = next(item for item in figures if item["name"] == "explorer-layouts")["traces"]
    assert bars["text"] == ["100, the scenario", "90, does not fit"]


def test_without_studies_there_is_no_card_of_them() -> None:
    assert "Step time, simulated" not in explorer_page(replace(exploration(), studies=()))


def test_a_mixture_has_controls_of_its_experts() -> None:
    with few_choices():
        text = explorer_page(build_exploration_tables(Scenario.from_mapping(MIXTURES["latent"])))
    for key in ("ep", "etp", "dispatcher"):
        assert f'<label for="control-{key}"' in text
        assert f'id="control-{key}"' not in page()
    assert ">layernorm, mla_up_proj, moe_act</option>" in text
    assert "What it sends to experts" in text
    assert "What it sends to experts" not in page()


def test_no_figure_is_drawn_in_place_of_something_else() -> None:
    """A study of experts is beside what a rank sends to experts; every name on the page is of one element."""
    known = exploration()
    with few_choices():
        mixture = build_exploration_tables(Scenario.from_mapping(MIXTURES["mixed"]))
    studies = (*known.studies, *(ScalingStudy(name, name, "", POINTS) for name in ("experts", "zero")))
    text = explorer_page(replace(mixture, studies=studies)).split('id="figures"')[0]
    names = re.findall(r'<[^<>]*\sid="([^"]+)"', text)
    assert len(names) == len(set(names))
