"""The bundled plotly.js has all trace types that figures use."""

from typing import Any

import pytest

from clustersim.report.html_document import PLOTLY_PATH
from tests.report.test_plotly import drawn_trace_types

pytestmark = pytest.mark.browser


def test_bundle_has_all_used_trace_types(chromium: Any) -> None:
    page = chromium.new_page()
    page.add_script_tag(content=PLOTLY_PATH.read_text(encoding="utf-8"))
    available = set(page.evaluate("Object.keys(Plotly.PlotSchema.get().traces)"))
    page.close()
    assert drawn_trace_types() <= available
