"""The loss of torchtitan's runs, by the date of its code."""

import pytest

from clustersim.validation.cases import ValidationCase
from clustersim.validation.torchtitan_loss import torchtitan_loss


@pytest.mark.parametrize(
    ("year", "notes", "eager", "compiled"),
    [
        ("2024", "commit of 2024-06-11", "torch_fp32", "torch_fp32"),
        ("2024", "FSDP2; commit of 2024-06-12", "torch", "torch"),
        ("2024", "", "torch", "torch"),
        ("2024", "commit of 2024-11-01", "torch", "compiled"),
        ("2024", "commit of 2024-12-26", "torch", "torch"),
        ("2025", "commit of 2025-02-06 (inferred)", "torch", "torch"),
        ("2025", "", "torch", "compiled"),
        ("2026", "commit of 2026-03-13", "torch", "compiled"),
        ("2026", "", "fused_linear", "fused_linear"),
        ("", "", "fused_linear", "fused_linear"),
        ("2025", "chunked cross entropy; commit of 2025-03-24", "chunked", "chunked"),
    ],
)
def test_the_loss_depends_on_the_date_and_on_whether_it_is_compiled(
    year: str, notes: str, eager: str, compiled: str
) -> None:
    case = ValidationCase({"year": year, "notes": notes, "framework": "torchtitan"}, 1)
    assert torchtitan_loss(case, compiled=False) == eager
    assert torchtitan_loss(case, compiled=True) == compiled
