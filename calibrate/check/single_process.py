"""How does one process train the whole model?"""

import torch

from calibrate.check.torch_model import build
from calibrate.check.trainer import Loop, building
from calibrate.check.weight_update import Update
from clustersim.parallel.plan import Plan


def single(plan: Plan, device: torch.device) -> Loop:
    """Nothing is shared with anyone."""
    with building(plan, device):
        model = build(plan, plan.stages[0])
    update = Update(list(model.parameters()), plan.training)
    update.accumulate_in_epilogues(model)
    return Loop(model, update)
