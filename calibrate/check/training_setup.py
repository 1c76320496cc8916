"""What is trained here, and why can it not be, in a sentence?"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from calibrate.check.context import Here
from calibrate.check.supported import trainer_of
from calibrate.check.torch_dtypes import allow_tf32
from calibrate.check.trainer import Batch, Trainer, random_batch
from calibrate.kernels.training_errors import refusal
from clustersim.build import build_plan
from clustersim.scenario import Scenario


@contextmanager
def training(scenario: Scenario, here: Here) -> Iterator[tuple[Trainer, Batch]]:
    """The scenario's model, strategy and batch on this device; raise InputError where they cannot be run here.

    That may show only in the first step, so whoever trains does it inside.
    """
    before = torch.get_float32_matmul_precision()
    allow_tf32(scenario.training.recipe)
    torch.manual_seed(here.world.rank if scenario.layout.dp > 1 else 0)
    try:
        batch = random_batch(build_plan(scenario), here.device.torch)
        yield trainer_of(scenario, here.device.torch), batch
    except Exception as error:
        layers = "layer does" if scenario.model.layer_count == 1 else "layers do"
        too_large = (
            f"{scenario.model.layer_count} {layers} not fit on {here.device.name} beside what is there; use fewer --layers, "
            "or a smaller training.microbatch"
        )
        said = refusal(error, here.device, too_large)
        if said is None:
            raise
        raise said from error
    finally:
        torch.set_float32_matmul_precision(before)
