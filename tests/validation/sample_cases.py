"""Synthetic rows of a table of steps: two stages of a small model on eight A100."""

from pathlib import Path

from clustersim.validation.cases import ValidationCase
from clustersim.validation.comparison import CaseComparison

BASE_ROW = {
    "case_id": "made-up",
    "source": "nobody",
    "gpu": "a100-sxm-80gb",
    "n_gpus": "8",
    "gpus_per_node": "8",
    "layers": "4",
    "hidden": "1024",
    "ffn_hidden": "4096",
    "heads": "16",
    "vocab": "51200",
    "mlp": "gelu",
    "seq": "1024",
    "global_batch": "16",
    "micro_batch": "2",
    "tp": "2",
    "pp": "2",
    "vpp": "1",
    "dp": "2",
    "zero_stage": "0",
    "recompute": "none",
    "schedule": "1f1b",
    "precision": "bf16",
    "framework": "megatron-lm",
    "step_time_s": "0.1",
    "quality": "A",
    "notes": "",
}


def step_row(**cells: str) -> dict[str, str]:
    """The row with changed cells."""
    return BASE_ROW | cells


def write_rows(path: Path, *rows: dict[str, str]) -> Path:
    """A table of rows with equal columns."""
    lines = [list(rows[0]), *(list(item.values()) for item in rows)]
    path.write_text("".join(",".join(line) + "\n" for line in lines))
    return path


def step_case(**cells: str) -> ValidationCase:
    """The row as a validation case."""
    return ValidationCase(step_row(**cells), 2)


def make_comparison(case: ValidationCase, predicted: float | None, skipped: str | None = None) -> CaseComparison:
    """A synthetic prediction of a case."""
    measured = float(case.text("step_time_s"))
    return CaseComparison(case.text("case_id"), case.text("source"), measured, predicted, skipped)
