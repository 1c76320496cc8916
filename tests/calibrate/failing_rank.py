"""Two processes that check a scenario, of which the second runs out of memory: started by test_check_agreed.

Argument: where it does so: `building` its model, before anything collective, or in its first `step`, while the first
process waits for it.
"""

import sys
from typing import Any

import torch

from calibrate.check import training_setup
from calibrate.check.trainer import Trainer
from calibrate.command import main


def second() -> bool:
    return torch.distributed.get_rank() == 1


def fail(*_: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def built(*given: Any) -> Trainer:
    """The trainer, whose second rank fails."""
    if second() and sys.argv[1] == "building":
        fail()
    trainer = build(*given)
    if second():
        trainer.weight_update.update_weights = fail  # type: ignore[method-assign]
    return trainer


build = training_setup.build_trainer

if __name__ == "__main__":
    torch.set_num_threads(1)
    training_setup.build_trainer = built
    sys.exit(main(["--check", sys.argv[2], "--device", "cpu", "--set", "cluster.gpus=2", "--set", "layout.data=ddp"]))
