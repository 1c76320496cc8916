"""Does a real training step take what is predicted? The command `--check`: `check.command`, and the host's part in it.

What measures the host builds on the real model of `check`, so the two are put together here.
"""

import argparse
from typing import Final

from calibrate.check.command import add_arguments as add_arguments
from calibrate.check.command import run_check
from calibrate.torch_requirement import require_torch

_HOST_SECONDS: Final = 0.15  # seconds for the host's rounds, beside each round of kernels


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
