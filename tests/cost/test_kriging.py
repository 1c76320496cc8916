"""Kriging predicts weighted means of the samples; its error is the leave-one-out error."""

import numpy as np
import pytest

from calibrate.fit.published_kernels import matmul_samples
from clustersim.common.dtypes import DType
from clustersim.cost.kriging import LEVEL, NOISE, Kriging
from clustersim.cost.roofline import Roofline
from clustersim.hardware.accelerator import load_accelerator
from clustersim.model.kernels import Kernel, KernelKind

GRID = np.stack(np.meshgrid(np.linspace(0.0, 8.0, 9), np.linspace(0.0, 4.0, 5)), axis=-1).reshape(-1, 2)


def test_values_that_are_zero_are_zero_everywhere():
    kriging = Kriging(GRID, np.zeros(len(GRID)))
    assert kriging.predict(np.array([3.3, 1.7])) == 0.0
    assert (kriging.leave_one_out() == 0.0).all()


def test_a_single_point_is_shrunk_by_its_noise():
    """Weight of the only value: its covariance with itself over that plus the noise."""
    kriging = Kriging(np.array([[1.0, 2.0]]), np.array([0.5]))
    assert kriging.predict(np.array([1.0, 2.0])) == pytest.approx(0.5 * (LEVEL + 1.0) / (LEVEL + 1.0 + NOISE))
    assert kriging.leave_one_out().tolist() == [0.0]


def test_a_constant_is_reproduced():
    """The level has so large a variance that a mean of many values is hardly shrunk."""
    kriging = Kriging(GRID, np.full(len(GRID), 0.7))
    assert kriging.predict(np.array([3.3, 1.7])) == pytest.approx(0.7, rel=0.01)
    assert kriging.leave_one_out() == pytest.approx(0.7, rel=0.01)


def test_leave_one_out_equals_the_prediction_from_the_others():
    values = np.sin(GRID[:, 0]) + 0.3 * GRID[:, 1]
    left_out = Kriging(GRID, values).leave_one_out()
    for index in (0, 17, 44):
        others = np.delete(np.arange(len(GRID)), index)
        assert left_out[index] == pytest.approx(Kriging(GRID[others], values[others]).predict(GRID[index]), rel=1e-9)


def test_leave_one_out_in_batches_equals_the_prediction():
    generator = np.random.default_rng(3)
    points, values = generator.normal(size=(600, 3)), generator.normal(size=600)
    left_out = Kriging(points, values).leave_one_out()
    others = np.delete(np.arange(600), 400)
    assert left_out[400] == pytest.approx(Kriging(points[others], values[others]).predict(points[400]), rel=1e-9)


def test_smooth_values_are_predicted_far_better_than_by_the_mean():
    """On a grid of steps of 1, half the range: the noise that is assumed smooths a little."""
    values = 0.1 * GRID[:, 0] - 0.05 * GRID[:, 1]
    errors = np.abs(Kriging(GRID, values).leave_one_out() - values)
    assert errors.mean() < 0.25 * np.abs(values - values.mean()).mean()


@pytest.mark.parametrize("accelerator", ["b200-sxm-180gb", "a100-pcie-80gb", "a100-sxm-80gb", "h100-sxm-80gb"])
def test_kriging_predicts_published_matmuls_better_than_the_roofline(accelerator: str):
    """Leave-one-out errors. The module states by how much; for all four the mean ratio is 0.81."""
    samples = [
        sample for sample in matmul_samples() if sample.accelerator == accelerator and sample.dtype is not DType.FP8
    ]
    model = Roofline(load_accelerator(accelerator))
    kernels = [
        Kernel("", KernelKind.MATMUL, sample.dtype, sample.flops, sample.moved_bytes, sample.shape)
        for sample in samples
    ]
    ratios = np.log(
        [sample.seconds / model.time_kernel(kernel).seconds for sample, kernel in zip(samples, kernels, strict=True)]
    )
    points = np.log([(sample.shape.m, sample.shape.n, sample.shape.k) for sample in samples])
    left_out, roofline_error = (
        np.abs(np.expm1(predicted - ratios)).mean() for predicted in (Kriging(points, ratios).leave_one_out(), 0.0)
    )
    assert left_out < 0.95 * roofline_error
