"""Hybrids against measured ones: ratios to their twins, seconds, and kernels of scans."""

from functools import cache

import pytest

from clustersim.validation.comparison import CaseComparison
from clustersim.validation.kernels import compare_kernels, read_kernels
from clustersim.validation.scan_kernels import SCAN_OPS
from clustersim.validation.steps import compare_step, read_steps


@cache
def _step(case_id: str) -> CaseComparison:
    return compare_step(next(case for case in read_steps() if case.text("case_id") == case_id))


def _ratio(case_id: str) -> float:
    """Predicted by measured seconds."""
    result = _step(case_id)
    assert result.predicted is not None, result.skip_reason
    return result.predicted / result.measured


@pytest.mark.parametrize(
    ("hybrid", "twin"),
    [
        *((f"primus-hyb-{model}300{suffix}", f"primus-hyb-gdn300{suffix}")
          for model in ("kda", "gdnmla", "mambamla") for suffix in ("", "-fla")),
        ("primus-hyb-mambamla300", "primus-hyb-gdnmla300"),
    ],
)  # fmt: skip
def test_hybrids_relative_to_their_twins_of_other_mixers_are_within_8_percent(hybrid: str, twin: str) -> None:
    assert _ratio(hybrid) / _ratio(twin) == pytest.approx(1, abs=0.08)


@pytest.mark.parametrize(
    "case_id",
    [
        *("h200-qwen3next-4l-linear", "h200-qwen3next-4l-hybrid"),
        *("h200-nemotronh-8l-hybrid", "h200-nemotronh-4l-mamba"),
        *("primus-hyb-gdn1b", "primus-hyb-gdn1b-fla", "primus-hyb-gdn1b-fsdp2-overlap"),
    ],
)
def test_seconds_are_within_15_percent(case_id: str) -> None:
    assert _ratio(case_id) == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize("model", ["gdn", "kda", "gdnmla", "mambamla"])
def test_seconds_of_small_hybrids_on_amd_are_within_10_percent(model: str) -> None:
    for suffix in ("", "-fla"):
        assert _ratio(f"primus-hyb-{model}300{suffix}") == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("op", ["gated_delta_rule", "kda", "lightning", "mamba2"])
def test_scans_are_within_25_percent(op: str) -> None:
    assert op in SCAN_OPS
    rows = [row for row in read_kernels() if row.text("op") == op]
    assert rows
    for result in compare_kernels(rows):
        assert result.predicted is not None
        assert result.predicted / result.measured == pytest.approx(1, abs=0.25)
