"""Outages of data centres and of the links between them."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from clustersim.hardware.failures import FailureComponent, FailureDomain, parse_rate
from clustersim.reliability import simulate_goodput
from clustersim.reliability.failure_domains import build_failure_domains
from clustersim.results.goodput import GoodputResult
from clustersim.scenario import Scenario

YEARS_OF_A_WEEK = 52.18


def scenario(folder: Path, failures: dict[str, Any], **reliability: Any) -> Scenario:
    content = {
        "sites": [{"name": name, "cluster": "dgx-h100", "gpus": 16} for name in "abc"],
        "links": [
            {"source": source, "target": target, "bandwidth": "100 Gbit/s", "round_trip": "10 ms"}
            for source, target in ("ab", "bc")
        ],
    }
    path = folder / "sites.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return Scenario.from_mapping(
        {
            "model": {"preset": "llama3-8b", "layers": 4},
            "cluster": {"path": str(path)},
            "layout": {"tp": 8, "dp": 6, "data": "zero1"},
            "training": {"sequence": 4096, "global_batch": 24, "precision": "bf16"},
            "economics": {"tokens": "300B"},
            "reliability": {"preset": "rsc-2", "failures": {"any": None, **failures}, "spares": 0, **reliability},
        }
    )


def test_components_and_domains_are_those_of_the_sites(tmp_path: Path) -> None:
    domains = build_failure_domains(scenario(tmp_path, {}))
    assert domains.counts.count_of(FailureComponent.SITE) == 3
    assert domains.counts.count_of(FailureComponent.WAN) == 2
    assert domains.lost_nodes(FailureDomain.SITE, 3) == (2, 3)


def test_a_single_site_is_lost_as_a_whole() -> None:
    domains = build_failure_domains(
        Scenario.from_mapping(
            {
                "model": "llama3-8b",
                "cluster": {"name": "dgx-h100", "gpus": 16},
                "layout": {"tp": 8, "dp": 2},
                "training": {"sequence": 4096, "global_batch": 8},
            }
        )
    )
    assert domains.counts.count_of(FailureComponent.SITE) == 1
    assert domains.lost_nodes(FailureDomain.SITE, 1) == (0, 1)


def goodput(folder: Path, failures: dict[str, Any], **reliability: Any) -> GoodputResult:
    return simulate_goodput(scenario(folder, failures, **reliability), 8, curves=False)


@pytest.mark.parametrize("component", ["site", "wan"])
def test_a_job_in_step_waits_for_the_site_that_is_cut_off(tmp_path: Path, component: str) -> None:
    outage = {"rate": f"1 per {component}-week", "failure_domain": "site", "detection": "1 min", "repair": "6 h"}
    result = goodput(tmp_path, {"outage": outage})
    outages = sum(run.failures.get("outage", 0) for run in result.runs)
    waited = sum(run.losses["waiting"] for run in result.runs)
    assert outages > 0
    assert waited == pytest.approx(outages * 6 * 3600.0, rel=0.35)  # less the restart that runs meanwhile
    assert parse_rate(f"1 per {component}-week").component.value == component


def test_a_job_that_shrinks_goes_on_with_the_other_sites(tmp_path: Path) -> None:
    outage = {"rate": "1 per site-week", "failure_domain": "site", "detection": "1 min", "repair": "2 d"}
    waits, shrinks = (
        goodput(tmp_path, {"outage": outage}),
        goodput(tmp_path, {"outage": outage}, elastic="shrink-batch"),
    )
    assert shrinks.goodput > waits.goodput
