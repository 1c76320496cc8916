"""The bundled plotly.js: NOTICE, major version of the Python package, and all trace types that are used."""

import hashlib
import re
from pathlib import Path

from plotly.offline import get_plotlyjs_version

from clustersim.report.html_document import PLOTLY_PATH

REPORT = PLOTLY_PATH.parents[2]
CALIBRATE = REPORT.parents[1] / "calibrate"
NON_TRACE_TYPES = {
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


def notice_text() -> str:
    return (PLOTLY_PATH.parent / "NOTICE").read_text(encoding="utf-8")


def source_files() -> list[Path]:
    python = [path for folder in (REPORT, CALIBRATE) for path in folder.rglob("*.py")]
    return [*python, *REPORT.glob("assets/*.js")]


def drawn_trace_types() -> set[str]:
    """Trace types that figures use, in Python and JavaScript sources."""
    type_names = (
        re.findall(r"""\b["']?type["']?\s*[:=]\s*["']([a-z0-9]+)["']""", path.read_text("utf-8"))
        for path in source_files()
    )
    return {name for names in type_names for name in names} - NON_TRACE_TYPES


def test_notice_has_bundle_hash_and_licence() -> None:
    assert hashlib.sha256(PLOTLY_PATH.read_bytes()).hexdigest() in notice_text()
    (version,) = re.findall(r"version (\d+\.\d+\.\d+)", notice_text())
    assert f"plotly.js (cartesian - minified) v{version}".encode() in PLOTLY_PATH.read_bytes()[:200]
    assert "MIT License" in (PLOTLY_PATH.parent / "LICENSE").read_text(encoding="utf-8")


def test_bundle_major_version_equals_plotlys() -> None:
    (major,) = re.findall(r"version (\d+)\.", notice_text())
    assert major == get_plotlyjs_version().split(".")[0]


def test_notice_lists_all_used_trace_types() -> None:
    assert {"bar", "heatmap", "scatter"} <= drawn_trace_types(), "the search finds what figures draw"
    assert all(re.search(rf"\b{name}\b", notice_text().split("trace types")[1]) for name in drawn_trace_types()), (
        drawn_trace_types()
    )
