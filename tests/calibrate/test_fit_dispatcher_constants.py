"""Dispatcher constants: the closed form of the fit equals the model, and packaged constants are the fitted ones."""

from functools import cache

import numpy as np
import pytest

from calibrate.fit.dispatch_samples import DispatchSample, dispatcher_constants, read_dispatch_samples
from calibrate.fit.dispatcher_constants import (
    CONSTANT_GRIDS,
    DISPATCHERS,
    macro_error,
    out_of_sample_ratios,
    search_constants,
)
from clustersim.collectives.library_files import load_dispatcher
from clustersim.program.task import TokenDispatcher


@cache
def dispatch_samples(dispatcher: TokenDispatcher) -> list[DispatchSample]:
    return [sample for sample in read_dispatch_samples() if sample.dispatcher is dispatcher]


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_closed_form_of_the_fit_equals_the_dispatch_model(dispatcher: TokenDispatcher) -> None:
    constants = dispatcher_constants(load_dispatcher(dispatcher))
    for sample in dispatch_samples(dispatcher):
        expected = sample.dispatch.predicted_seconds(sample.benchmark.fabric, sample.benchmark.gpu_count)
        assert sample.predicted_seconds(constants) == pytest.approx(expected, rel=1e-9), sample.fold_key


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_packaged_constants_are_the_fitted_ones(dispatcher: TokenDispatcher) -> None:
    packaged = dispatcher_constants(load_dispatcher(dispatcher))
    assert search_constants(
        [sample for sample in dispatch_samples(dispatcher) if sample.fitted], packaged
    ) == pytest.approx(packaged)


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_out_of_sample_benchmarks_are_predicted_within_15_percent(dispatcher: TokenDispatcher) -> None:
    ratios = out_of_sample_ratios(dispatch_samples(dispatcher), dispatcher_constants(load_dispatcher(dispatcher)))
    assert np.mean([abs(ratio - 1.0) for ratio in ratios.values()]) <= 0.15


def test_no_grid_value_fits_better() -> None:
    samples = [sample for sample in dispatch_samples(TokenDispatcher.DEEPEP) if sample.fitted]
    packaged = dispatcher_constants(load_dispatcher(TokenDispatcher.DEEPEP))
    for name, values in CONSTANT_GRIDS.items():
        assert min(macro_error(samples, packaged | {name: value}) for value in values) >= macro_error(
            samples, packaged
        ) * (1 - 1e-6), name
