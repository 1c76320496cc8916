"""Does the record predict steps for which it was not measured?

A depth and a microbatch that were not used are predicted from the record as it is now, fits and factors included, and
run (`calibrate.holdout`). How far they are apart is the record's band.
"""

from dataclasses import dataclass
from typing import ClassVar

from calibrate.fit.record_fit import fitted
from calibrate.kernels.progress import lasting
from calibrate.stages.stage import Bench, no_scenario
from calibrate.stages.stage_telemetry import looked_at
from clustersim.common.units import Seconds


@dataclass(frozen=True, slots=True)
class Residual:
    """Real steps beside their prediction."""

    name: ClassVar[str] = "residual"
    minutes: ClassVar[float] = 3.0
    least: ClassVar[Seconds] = 0.0

    def obstacle(self, bench: Bench) -> str:
        """Steps are some scenario's."""
        return no_scenario(bench, "steps")

    def due(self, bench: Bench) -> bool:
        """Whether there are none, as when any row came since."""
        return bool(bench.new) or not bench.record.steps

    def words(self, bench: Bench) -> str:
        """Which steps."""
        return f"steps of {bench.plan.model.name} with other layers and microbatches, beside their prediction"

    def measure(self, bench: Bench, seconds: Seconds) -> str:
        """Predicted and measured steps."""
        from calibrate.holdout.measure import step_rows

        with lasting(self.name, seconds), looked_at(bench, self.name):
            record = bench.session.fit(lambda rows: fitted(rows, bench.accelerator))
            rows = step_rows(bench.plan, bench.device, record, seconds)
        bench.session.predicted(rows)
        return ", ".join(f"{row.what} {row.error:+.1%}" for row in rows) or "no step"
