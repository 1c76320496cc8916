"""Training of the full model in one process."""

import torch

from calibrate.check.torch_model import build_stage
from calibrate.check.trainer import MicrobatchTrainer, construction_settings
from calibrate.check.weight_update import WeightUpdate
from clustersim.parallel.plan import Plan


def build_single_trainer(plan: Plan, device: torch.device) -> MicrobatchTrainer:
    """A trainer without any parallelism."""
    with construction_settings(plan, device):
        model = build_stage(plan, plan.stages[0])
    update = WeightUpdate(list(model.parameters()), plan.training)
    update.accumulate_in_epilogues(model)
    return MicrobatchTrainer(model, update)
