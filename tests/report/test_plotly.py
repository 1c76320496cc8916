"""plotly.js as it is carried: what its notice says, of the major version of plotly's own, with all that is drawn."""

import hashlib
import re
from pathlib import Path

from plotly.offline import get_plotlyjs_version

from clustersim.report.html_document import PLOTLY_PATH

REPORT = PLOTLY_PATH.parents[2]
CALIBRATE = REPORT.parents[1] / "calibrate"
NOT_TRACES = {
    "category",
    "checkbox",
    "range",
    "line",
    "log",
    "rect",
    "date",
    "linear",
    "button",
    "path",
    "circle",
    "number",
    "text",
}


def notice() -> str:
    return (PLOTLY_PATH.parent / "NOTICE").read_text(encoding="utf-8")


def sources() -> list[Path]:
    python = [path for folder in (REPORT, CALIBRATE) for path in folder.rglob("*.py")]
    return [*python, *REPORT.glob("assets/*.js")]


def drawn() -> set[str]:
    """Types of traces and other things that figures name, in Python and in scripts."""
    found = (
        re.findall(r"""\b["']?type["']?\s*[:=]\s*["']([a-z0-9]+)["']""", path.read_text("utf-8")) for path in sources()
    )
    return {name for names in found for name in names} - NOT_TRACES


def test_the_notice_names_the_file_that_is_there_and_its_licence_is_beside_it() -> None:
    assert hashlib.sha256(PLOTLY_PATH.read_bytes()).hexdigest() in notice()
    (version,) = re.findall(r"version (\d+\.\d+\.\d+)", notice())
    assert f"plotly.js (cartesian - minified) v{version}".encode() in PLOTLY_PATH.read_bytes()[:200]
    assert "MIT License" in (PLOTLY_PATH.parent / "LICENSE").read_text(encoding="utf-8")


def test_its_major_version_is_that_of_plotlys_own() -> None:
    (major,) = re.findall(r"version (\d+)\.", notice())
    assert major == get_plotlyjs_version().split(".")[0]


def test_the_notice_names_every_trace_type_that_figures_have() -> None:
    assert {"bar", "heatmap", "scatter"} <= drawn(), "the search finds what figures draw"
    assert all(re.search(rf"\b{name}\b", notice().split("trace types")[1]) for name in drawn()), drawn()
