"""Does anything depend on the iteration order of sets?"""

import os
import subprocess
import sys

SCRIPT = """
import hashlib
from clustersim import Scenario, simulate
from clustersim.cost.collective_cost import CollectiveCost

costed = []
time_comm_op = CollectiveCost.time_comm_op
CollectiveCost.time_comm_op = lambda self, comm_op: costed.append(repr(comm_op)) or time_comm_op(self, comm_op)
scenario = {
    "model": {"preset": "gpt3-1.3b", "layers": 4},
    "cluster": {"name": "dgx-h100", "gpus": 16},
    "layout": {"tp": 4, "pp": 2, "dp": 2, "sequence_parallel": True, "data": "zero1"},
    "training": {"sequence": 1024, "global_batch": 8},
}
other = {**scenario, "layout": {"tp": 2, "dp": 8, "data": "fsdp"}}
halves = [{"order": [f"{8 * node + 4 * half}-{8 * node + 4 * half + 3}" for node in range(4)]} for half in (0, 1)]
scenario["cluster"] |= {"node": {"nic": {"per_node": 1}}, "placement": halves[0]}
scenario["degradations"] = {"jobs": {"scenario": other, "placement": halves[1], "start": "-1 ms"}}
result = simulate(Scenario.from_mapping(scenario))
assert result.step_time > result.isolated_step_time
for trace in (result.trace, *(job.trace_table.trace for job in result.co_scheduled_jobs)):
    columns = (
        trace.rank, trace.task, trace.critical_predecessor, trace.blocking_event, trace.start, trace.end, trace.waited,
        trace.contended,
    )
    print(hashlib.sha256(b"".join(column.tobytes() for column in columns)).hexdigest(), *costed)
"""


def run_with_hash_seed(seed: str) -> str:
    """Output of a process with this hash seed: trace digests and the order in which collectives are costed."""
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    return subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, check=True, capture_output=True, text=True
    ).stdout


def test_traces_and_cost_lookups_do_not_depend_on_the_hash_seed() -> None:
    """What a cost model caches may depend on the order of lookups, so that order is compared, too."""
    assert run_with_hash_seed("1") == run_with_hash_seed("2")
