"""Two processes that check a scenario, of which the second runs out of memory; started by test_check_failure.

Argument: where it fails: `building` its model, before any collective, or in its first `step`, while the first
process waits for it.
"""

import sys
from typing import Any

import torch

from calibrate.check import training_setup
from calibrate.check.trainer import Trainer
from calibrate.command import main


def is_second_rank() -> bool:
    return torch.distributed.get_rank() == 1


def raise_out_of_memory(*_: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def build_failing_trainer(*arguments: Any) -> Trainer:
    """The trainer, which fails on the second rank."""
    if is_second_rank() and sys.argv[1] == "building":
        raise_out_of_memory()
    trainer = original_build(*arguments)
    if is_second_rank():
        trainer.weight_update.update_weights = raise_out_of_memory  # type: ignore[method-assign]
    return trainer


original_build = training_setup.build_trainer

if __name__ == "__main__":
    torch.set_num_threads(1)
    training_setup.build_trainer = build_failing_trainer
    sys.exit(main(["--check", sys.argv[2], "--device", "cpu", "--set", "cluster.gpus=2", "--set", "layout.data=ddp"]))
