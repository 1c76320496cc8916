"""How fast is the simulated step? Tokens per second, and FLOP/s relative to the peak."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from clustersim.common.dtypes import DType
from clustersim.common.units import Flop, FlopPerSecond, Seconds
from clustersim.model.flops import model_flops
from clustersim.model.mixer import AttentionFlopConvention
from clustersim.results.utilization import (
    achieved_flops_per_gpu,
    gpu_hours_for_tokens,
    hfu,
    mfu,
    tokens_per_second,
)
from clustersim.scenario import Scenario


@dataclass(frozen=True, slots=True)
class StepFlops:
    """Model FLOP of a whole step on all ranks, by the convention of `utilization.CONVENTION`.

    model: attention counted as a full matrix; causal: attention counted as its causal mask leaves it.
    """

    model: Flop
    causal: Flop


@dataclass(frozen=True)
class StepThroughput:
    """Rates of a step of all ranks."""

    scenario: Scenario
    step_time: Seconds
    rank_count: int

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the global batch per second."""
        training = self.scenario.training
        return tokens_per_second(training.global_batch, training.sequence, self.step_time)

    @property
    def gpu_hours_per_trillion_tokens(self) -> float:
        """GPU hours per trillion tokens, as papers report them."""
        return gpu_hours_for_tokens(self.tokens_per_second / self.rank_count)

    @cached_property
    def model_flops(self) -> StepFlops:
        """Model FLOP of a step, by the convention and with causal attention."""
        model, training = self.scenario.model, self.scenario.training
        return StepFlops(model_flops(model, training), model_flops(model, training, AttentionFlopConvention.CAUSAL))

    @property
    def achieved_flops_per_gpu(self) -> FlopPerSecond:
        """Achieved model FLOP/s of each GPU."""
        return achieved_flops_per_gpu(self.model_flops.model, step_time=self.step_time, gpu_count=self.rank_count)

    @property
    def peak_flops(self) -> FlopPerSecond:
        """Dense peak FLOP/s of one GPU in the compute format, averaged over GPUs."""
        return self.mean_peak_flops(self.scenario.training.recipe.compute)

    def mean_peak_flops(self, dtype: DType) -> FlopPerSecond:
        """Dense peak FLOP/s of one GPU in a format, averaged over GPUs."""
        accelerators, kind = self.scenario.cluster.accelerator_kinds()
        peaks = [accelerator.peak_flops(dtype) for accelerator in accelerators]
        return float(np.array(peaks)[kind[: self.rank_count]].mean())

    @property
    def mfu(self) -> float:
        """Model FLOP utilization (see `utilization.CONVENTION`)."""
        return self._mfu(self.model_flops.model)

    @property
    def mfu_causal(self) -> float:
        """Model FLOP utilization with attention counted as its causal mask leaves it."""
        return self._mfu(self.model_flops.causal)

    def _mfu(self, flops: Flop) -> float:
        return mfu(flops, step_time=self.step_time, gpu_count=self.rank_count, peak=self.peak_flops)

    def hfu(self, recomputed: Flop) -> float:
        """Hardware FLOP utilization: recomputed FLOP count as well."""
        return self._hfu(self.model_flops.model, recomputed)

    def hfu_causal(self, recomputed: Flop) -> float:
        """The same with attention counted as its causal mask leaves it, in the recomputed FLOP as well."""
        return self._hfu(self.model_flops.causal, recomputed)

    def _hfu(self, flops: Flop, recomputed: Flop) -> float:
        return hfu(
            flops,
            recomputed,
            step_time=self.step_time,
            gpu_count=self.rank_count,
            peak=self.peak_flops,
        )
