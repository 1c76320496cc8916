"""Does a real training step take the predicted time? The command `--check`: `check.command` plus host launches.

Host launches are measured with the real model of `check`, so the two packages are combined here.
"""

import argparse
from typing import Final

from calibrate.check.command import add_arguments as add_arguments
from calibrate.check.command import run_check
from calibrate.torch_requirement import require_torch

_HOST_SECONDS: Final = 0.15  # seconds of host measurements after each round of kernels


def command(options: argparse.Namespace) -> None:
    """Check one scenario."""
    require_torch()
    from calibrate.host.measure import measure_host_launches
    from clustersim.cost.measured_host import host_states

    run_check(
        options,
        lambda given, here: measure_host_launches(
            given, here, _HOST_SECONDS, host_states(given.framework, given.layout)
        ),
    )
