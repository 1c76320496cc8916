"""Does the optimizer fit how weights are sharded, adapted and offloaded?"""

from collections.abc import Iterator

from clustersim.model.optimizers import DISTRIBUTIONS_BY_ZERO_STAGE, Muon
from clustersim.scenario.resolved import ResolvedScenario


def check_optimizer(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that Muon has whole matrices of trained weights on the device, or can get them."""
    training, data = scenario.training, scenario.layout.data
    if not isinstance(training.optimizer, Muon):
        return
    allowed = DISTRIBUTIONS_BY_ZERO_STAGE[data.zero_stage]
    distribution = training.optimizer.distribution_for(data.zero_stage)
    if distribution not in allowed:
        yield (
            f"training.optimizer.distribution: {distribution.value} does not fit how layout.data shards weights "
            f"(ZeRO stage {data.zero_stage}); {' or '.join(option.value for option in allowed)} does"
        )
    conflicts = {
        "training.lora, whose adapters it does not orthogonalize": training.lora is not None,
        "training.offload of the optimizer, which updates slices on the host": training.offload.states is not None,
        "layout.data: dp, whose first GPU has all weights": data.is_single_process,
    }
    for setting in (name for name, is_set in conflicts.items() if is_set):
        yield f"training.optimizer: muon does not run with {setting}; leave it out, or write adam"
