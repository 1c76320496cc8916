"""Constants of dispatchers: the closed form of the fit is the model's, and shipped constants are the fitted ones."""

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
from clustersim.collectives.library import load_dispatcher
from clustersim.program.task import TokenDispatcher


@cache
def rows(dispatcher: TokenDispatcher) -> list[DispatchSample]:
    return [row for row in read_dispatch_samples() if row.dispatcher is dispatcher]


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_what_the_fit_predicts_is_what_the_model_does(dispatcher: TokenDispatcher) -> None:
    constants = dispatcher_constants(load_dispatcher(dispatcher))
    for row in rows(dispatcher):
        expected = row.dispatch.predicted_seconds(row.benchmark.fabric, row.benchmark.gpu_count)
        assert row.predicted_seconds(constants) == pytest.approx(expected, rel=1e-9), row.fold_key


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_the_shipped_constants_are_the_fitted_ones(dispatcher: TokenDispatcher) -> None:
    shipped = dispatcher_constants(load_dispatcher(dispatcher))
    assert search_constants([row for row in rows(dispatcher) if row.fitted], shipped) == pytest.approx(shipped)


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_places_that_no_constant_was_fitted_to_are_predicted_within_15_percent(dispatcher: TokenDispatcher) -> None:
    unseen = out_of_sample_ratios(rows(dispatcher), dispatcher_constants(load_dispatcher(dispatcher)))
    assert np.mean([abs(ratio - 1.0) for ratio in unseen.values()]) <= 0.15


def test_no_constant_makes_its_rows_fit_better() -> None:
    own = [row for row in rows(TokenDispatcher.DEEPEP) if row.fitted]
    shipped = dispatcher_constants(load_dispatcher(TokenDispatcher.DEEPEP))
    for name, values in CONSTANT_GRIDS.items():
        assert min(macro_error(own, shipped | {name: value}) for value in values) >= macro_error(own, shipped) * (
            1 - 1e-6
        ), name
