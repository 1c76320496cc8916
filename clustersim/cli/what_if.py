"""What does `--what-if` do? Simulate which changes help a result, the same for every command that has it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clustersim.results.simulation_result import SimulationResult
    from clustersim.results.what_if import WhatIfReport


def simulate_what_ifs(result: "SimulationResult", *, requested: bool) -> "WhatIfReport | None":
    """The changes, each simulated; None where they are not requested."""
    if not requested:
        return None
    from clustersim.planning.what_if import run_what_ifs

    return run_what_ifs(result)


def what_ifs_to_json(what_ifs: "WhatIfReport | None") -> dict[str, Any]:
    """What `--json` has in addition; empty where they were not requested."""
    return {} if what_ifs is None else {"what_ifs": what_ifs.to_json()}
