"""Does a real training step take what is predicted? The command `--check`: `check.command`, and the host's part in it.

What measures the host builds on the real model of `check`, so the two are put together here.
"""

import argparse
from typing import Final

from calibrate.check.command import add_arguments as add_arguments
from calibrate.check.command import check
from calibrate.torch_requirement import require_torch

_PATIENCE: Final = 0.15  # seconds for the host's rounds, beside each round of kernels


def command(options: argparse.Namespace) -> None:
    """Check one scenario."""
    require_torch()
    from calibrate.host.measure import host_rows
    from clustersim.cost.measured_host import host_states

    check(options, lambda given, here: host_rows(given, here, _PATIENCE, host_states(given.framework, given.layout)))
