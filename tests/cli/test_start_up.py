"""Start-up: what a run does not need is not imported, as importing is most of what a short run costs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

UNUSED = {
    "clustersim.cost.calibration_record": "the scenario has no record",
    "clustersim.engine.vectorized.engine": "links are shared",
    "clustersim.hardware.degraded_clos": "no link is degraded",
    "clustersim.hardware.graph_fabric": "the cluster is regular",
    "clustersim.model.hf_config": "the model is no config.json",
    "clustersim.model.mixers.mamba2": "all layers have attention",
    "clustersim.model.moe_layer": "the model has no experts",
    "clustersim.model.preset_moe": "the model is dense",
    "clustersim.report.html_document": "no page is written",
    "clustersim.schedules.csv_schedule": "the schedule is a rule",
    "networkx": "the cluster is regular",
    "numpy.random": "nothing is drawn",
    "plotly": "no page is written",
}


@pytest.mark.slow
def test_a_plain_run_imports_no_module_of_what_it_has_not() -> None:
    example = Path(__file__).parents[2] / "examples" / "llama3_405b_16k.yaml"
    code = f"""
import json, sys
from clustersim.cli import main
sys.argv = ["clustersim", "run", {str(example)!r}, "--quiet"]
try:
    main()
finally:
    print(json.dumps(list(sys.modules)))
"""
    imported = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).stdout)
    assert "clustersim.simulation" in imported
    assert {name: reason for name, reason in UNUSED.items() if name in imported} == {}
