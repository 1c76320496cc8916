"""Bytes per parameter of an optimizer step, counted state by state."""

from dataclasses import replace

import pytest

from clustersim.common.dtypes import DType
from clustersim.cost.roofline import Roofline
from clustersim.hardware.accelerator import load_accelerator
from clustersim.model.optimizer_kernels import gradient_norm_kernels, optimizer_step_kernels
from clustersim.model.optimizers import Optimizer
from clustersim.model.overheads import Overheads
from clustersim.model.precision_recipe import mixed_precision
from clustersim.model.training import NONE_FUSED, Training

MIXED = Training(sequence=1, global_batch=1)
FP32_TRAINING = replace(
    MIXED, recipe=mixed_precision(DType.FP32, gradients=DType.FP32, master=None, moments=DType.FP32)
)


def _bytes_per_parameter(training: Training) -> float:
    return sum(kernel.bytes for kernel in optimizer_step_kernels(training, 1e6)) / 1e6


def test_fused_adam_passes_each_state_once() -> None:
    """Gradient 4, master 4 + 4, two moments 2 x (4 + 4), BF16 weights 2."""
    assert _bytes_per_parameter(MIXED) == 30


def test_without_master_weights_the_weights_are_updated_in_place() -> None:
    """Gradient 4, weights 4 + 4, two moments 16."""
    assert _bytes_per_parameter(FP32_TRAINING) == 28


def test_sgd_has_one_moment() -> None:
    assert _bytes_per_parameter(replace(MIXED, optimizer=Optimizer.SGD)) == 30 - 8


@pytest.mark.parametrize("optimizer", [Optimizer.ADAM, Optimizer.SGD, Optimizer.LION])
def test_unfused_steps_move_more_in_more_launches(optimizer: Optimizer) -> None:
    fused = replace(MIXED, optimizer=optimizer)
    unfused = replace(fused, fused=NONE_FUSED)
    assert _bytes_per_parameter(unfused) > _bytes_per_parameter(fused)
    assert optimizer_step_kernels(unfused, 10)[0].launches > optimizer_step_kernels(fused, 10)[0].launches == 1


def test_a_shard_may_be_a_fraction_of_a_parameter() -> None:
    assert optimizer_step_kernels(MIXED, 2.5)[0].bytes == 75


def test_the_gradient_norm_reads_gradients_once_and_pytorch_scales_them() -> None:
    """In FP32: a read of 4 bytes each, and of PyTorch a read and a write."""
    pytorch = replace(MIXED, overheads=Overheads(scale_clipped_gradients=True))
    assert [kernel.bytes for kernel in gradient_norm_kernels(MIXED, 10)] == [40]
    assert [kernel.bytes for kernel in gradient_norm_kernels(pytorch, 10)] == [40, 80]


def test_eight_bit_adam_moves_a_byte_of_each_moment() -> None:
    """Gradient 4, master 4 + 4, two moments 2 x (1 + 1) with a scale of 4 bytes for 256, BF16 weights 2."""
    eight_bit = replace(MIXED, optimizer=Optimizer.ADAM_8BIT)
    assert _bytes_per_parameter(eight_bit) == 14 + 4 * (1 + 4 / 256)


def test_adafactor_takes_what_pytorch_takes() -> None:
    """202 M parameters in FP32 on an H200: 4,531 us of torch.optim.Adafactor, within 10 % (published kernels)."""
    kernel = optimizer_step_kernels(replace(FP32_TRAINING, optimizer=Optimizer.ADAFACTOR), 202375168)[0]
    roofline = Roofline(load_accelerator("h200-sxm-141gb"))
    assert roofline.time_kernel(kernel).seconds == pytest.approx(4530.7e-6, rel=0.1)
