"""The notebook runs from top to bottom in a fresh interpreter without Jupyter, and is stored without outputs."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"
TOUR_NOTEBOOK = json.loads((EXAMPLES / "tour.ipynb").read_text(encoding="utf-8"))

RUNNER_SCRIPT = """
import ast, json, sys

names = {"__name__": "__main__"}
for source in json.load(sys.stdin):
    *body, last = ast.parse(source).body
    shown = last if isinstance(last, ast.Expr) else None
    exec(compile(ast.Module([*body] if shown else [*body, last], []), "cell", "exec"), names)
    value = eval(compile(ast.Expression(shown.value), "cell", "eval"), names) if shown else None
    if value is not None:
        print("shown:", value._repr_html_()[:7] if hasattr(value, "_repr_html_") else value)
"""


def notebook_cells(cell_type: str) -> list[dict[str, Any]]:
    return [cell for cell in TOUR_NOTEBOOK["cells"] if cell["cell_type"] == cell_type]


def test_notebook_is_stored_without_outputs() -> None:
    assert (TOUR_NOTEBOOK["nbformat"], TOUR_NOTEBOOK["nbformat_minor"]) == (4, 5)
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in notebook_cells("code"))
    assert len({cell["id"] for cell in TOUR_NOTEBOOK["cells"]}) == len(TOUR_NOTEBOOK["cells"])
    assert len(notebook_cells("markdown")) > len(notebook_cells("code")) / 2


def test_notebook_cells_run_in_order() -> None:
    sources = ["".join(cell["source"]) for cell in notebook_cells("code")]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUNNER_SCRIPT],
        input=json.dumps(sources), cwd=EXAMPLES, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    text = done.stdout
    kernel_shares = [float(share) for share in re.findall(r"([\d.]+)% of all kernels' time: ", text)]
    assert len(kernel_shares) == 5
    assert sorted(kernel_shares, reverse=True) == kernel_shares
    assert sum(kernel_shares) < 100
    assert re.match(r"fits: True, \d+ of 80 GiB\n", text)
    assert "shown: <iframe" in text  # the result, with its timeline
    step = re.search(r"([\d.]+) s a step", text)
    category_seconds = re.findall(r"^[a-z -]+ ([\d.]+) s +[\d.]+%$", text, re.MULTILINE)
    assert step is not None
    assert abs(sum(map(float, category_seconds)) - float(step[1])) < 0.01  # rounded to milliseconds
    searched = re.search(r"(\d+) layouts, (\d+) simulated\n +([\d.]+) s", text)
    assert searched is not None
    assert 0 < int(searched[2]) <= int(searched[1])
    assert float(searched[3]) <= float(step[1])
    days = re.search(r"shown: \{'days': \{'p5': ([\d.]+), 'p10'.*'days_with_step_error': \{'p5': ([\d.]+)", text)
    assert days is not None
    assert float(days[2]) < float(days[1])
    assert 15e12 / (512 * 8192) * float(step[1]) / 86400 < float(days[1])  # no run is faster than its steps
