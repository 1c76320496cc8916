"""Placeholder by the lead so that imports work; helper H1 replaces this whole file."""

from clustersim.cost.record import Record, signature
from clustersim.cost.roofline import Roofline
from clustersim.cost.timing import Provenance, Timing
from clustersim.hardware.accelerator import Accelerator
from clustersim.workload.kernels import Kernel


class RecordedKernels:
    """Exact hits only."""

    def __init__(self, record: Record, accelerator: Accelerator) -> None:
        self._rows = {row.signature: row for row in record.kernels if row.time is not None}
        self._base = Roofline(accelerator)

    def kernel(self, kernel: Kernel) -> Timing:
        """Time one kernel."""
        base, key = self._base.kernel(kernel), signature(kernel)
        row = None if key is None else self._rows.get(key)
        if row is None or row.time is None:
            return base
        return Timing(row.time.seconds, Provenance.MEASURED, base.bound, row.time.dispersion)
