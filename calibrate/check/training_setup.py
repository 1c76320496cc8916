"""Set-up of the scenario's training on this device, with explained errors."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from calibrate.check.context import CheckContext
from calibrate.check.supported import build_trainer
from calibrate.check.torch_dtypes import set_tf32
from calibrate.check.trainer import Trainer, TrainingBatch, random_batch
from calibrate.kernels.training_errors import explain_training_error
from clustersim.build import build_plan
from clustersim.scenario import Scenario


@contextmanager
def training_setup(scenario: Scenario, context: CheckContext) -> Iterator[tuple[Trainer, TrainingBatch]]:
    """The scenario's trainer and batch on this device; raise InputError if they cannot be run here.

    That may show only in the first step, so training must happen inside the context.
    """
    previous = torch.get_float32_matmul_precision()
    set_tf32(scenario.training.recipe)
    torch.manual_seed(context.world.rank if scenario.layout.dp > 1 else 0)
    try:
        batch = random_batch(build_plan(scenario), context.device.torch)
        yield build_trainer(scenario, context.device.torch), batch
    except Exception as error:
        layers = "layer does" if scenario.model.layer_count == 1 else "layers do"
        out_of_memory_text = (
            f"{scenario.model.layer_count} {layers} not fit into the free memory of {context.device.name}; use fewer "
            "--layers, "
            "or a smaller training.microbatch"
        )
        explained = explain_training_error(error, context.device, out_of_memory_text)
        if explained is None:
            raise
        raise explained from error
    finally:
        torch.set_float32_matmul_precision(previous)
