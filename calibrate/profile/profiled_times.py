"""Which times does the record of a profiled step have, and which without a profiler?

What is scaled is in three parts: the kernels and collectives, the host with the waiting for it, and the waiting of
ranks for each other, which is in the collectives' times (`step_fit`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from calibrate.profile.collective_times import CollectiveTime
from calibrate.profile.plan_kernels import PassKind, PlanPass
from calibrate.profile.samples import MatchedSteps
from calibrate.profile.step_fit import fit_factor
from calibrate.profile.unattributed import unattributed_samples
from clustersim.common.errors import InputError
from clustersim.common.units import Seconds, format_seconds
from clustersim.cost.calibration_record import CalibrationRecord
from clustersim.scenario import Scenario
from clustersim.simulation import simulate

_CLOCK_TOLERANCE: Final = 0.05  # of a step: a GPU's clocks differ by some percent from one session to the next


@dataclass(frozen=True)
class ProfiledTimes:
    """The times of a profiled step of a scenario, as its ranks' traces have them.

    base: its record, without collectives and work of no operator; plan: passes of a rank; waiting: for the host beyond
    the host model's, in a step, and for whatever else no operator and no collective has; waiting_share: of the waiting
    for the last member, in the times of collectives.
    """

    base: CalibrationRecord
    scenario: Scenario
    matched: MatchedSteps
    plan: tuple[PlanPass, ...]
    waiting: Mapping[PassKind, Seconds]
    collectives: tuple[CollectiveTime, ...] = ()
    waiting_share: float = 0.0

    def record(self, host: float = 1.0, kernels: float = 1.0) -> CalibrationRecord:
        """The record. host: factor on the host's time and on waiting; kernels: on that of kernels and collectives."""
        launches = tuple(
            replace(sample, forward=sample.forward * host, backward=sample.backward * host)
            for sample in self.base.host_launches
        )
        waiting = {kind: seconds * host / kernels for kind, seconds in self.waiting.items()}
        samples = *self.base.kernels, *unattributed_samples(self.matched, self.plan, waiting)
        return replace(
            self.base,
            kernels=tuple(
                sample if sample.time is None else replace(sample, time=sample.time.scaled(kernels))
                for sample in samples
            ),
            collectives=tuple(time.sample(self.waiting_share * host / kernels, kernels) for time in self.collectives),
            host_launches=launches,
            profile=replace(self.base.profile, host_scale=host, kernel_scale=kernels) if self.base.profile else None,
        )

    def predicted(self, host: float = 1.0, kernels: float = 1.0) -> Seconds:
        """The step that the record predicts."""
        cost = replace(self.scenario.cost, record=self.record(host, kernels))
        return simulate(replace(self.scenario, cost=cost)).step_time

    def with_waiting_of(self, step_time: Seconds) -> "ProfiledTimes":
        """The same with as much waiting of ranks for each other as the step has beyond the simulation's."""

        def predicted(share: float) -> Seconds:
            return replace(self, waiting_share=share).predicted()

        shared = replace(self, waiting_share=fit_factor(predicted, step_time))
        rest = max(0.0, step_time - shared.predicted())
        kind = PassKind.OPTIMIZER
        return replace(shared, waiting={**self.waiting, kind: self.waiting[kind] + rest})

    def record_of(self, step_time: Seconds) -> CalibrationRecord:
        """The record that predicts the time of the step without a profiler.

        Raises InputError where what a profiler does not slow takes longer than that.
        """
        without_host = self.predicted(host=0.0)
        if without_host <= step_time:
            return self.record(fit_factor(self.predicted, step_time))
        if self.scenario.cluster.accelerator.is_cpu:
            factor = fit_factor(lambda scale: self.predicted(scale, scale), step_time)
            return self.record(factor, factor)
        if without_host > (1.0 + _CLOCK_TOLERANCE) * step_time:
            raise InputError(
                f"a step without the profiler in {format_seconds(step_time)}: its kernels and collectives alone take "
                f"{format_seconds(without_host)} in the trace; name the time of the step that was profiled"
            )
        return self.record(host=0.0)
