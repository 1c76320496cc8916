"""Does anything depend on the order in which a process happens to iterate over sets?"""

import os
import subprocess
import sys

SCRIPT = """
import hashlib
from clustersim import Scenario, simulate
from clustersim.cost.collective_cost import CommunicationCost

asked = []
once = CommunicationCost._time
CommunicationCost._time = lambda self, exchange: asked.append(repr(exchange)) or once(self, exchange)
scenario = {
    "model": {"preset": "gpt3-1.3b", "layers": 4},
    "cluster": {"name": "dgx-h100", "gpus": 16},
    "layout": {"tp": 4, "pp": 2, "dp": 2, "sequence_parallel": True, "data": "zero1"},
    "training": {"sequence": 1024, "global_batch": 8},
}
other = {**scenario, "layout": {"tp": 2, "dp": 8, "data": "fsdp"}}
halves = [{"order": [f"{8 * node + 4 * half}-{8 * node + 4 * half + 3}" for node in range(4)]} for half in (0, 1)]
scenario["cluster"] |= {"node": {"nic": {"per_node": 1}}, "placement": halves[0]}
scenario["disturbances"] = {"jobs": {"scenario": other, "placement": halves[1], "start": "-1 ms"}}
result = simulate(Scenario.from_mapping(scenario))
assert result.step_time > result.alone
for trace in (result.trace, *(job.rows.trace for job in result.neighbours)):
    columns = (trace.rank, trace.task, trace.cause, trace.leader, trace.start, trace.end, trace.waited, trace.contended)
    print(hashlib.sha256(b"".join(column.tobytes() for column in columns)).hexdigest(), *asked)
"""


def run_with_hash_seed(seed: str) -> str:
    """What a process with this hash seed finds, and in which order it asks what exchanges cost."""
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    return subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, check=True, capture_output=True, text=True
    ).stdout


def test_traces_and_cost_lookups_do_not_depend_on_the_hash_seed() -> None:
    """What a cost source remembers may depend on what it is asked first, so the order of questions counts, too."""
    assert run_with_hash_seed("1") == run_with_hash_seed("2")
