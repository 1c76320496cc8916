"""Do the optimizer, z-loss and a reference model fit how weights are sharded, adapted and offloaded?"""

from collections.abc import Iterator

from clustersim.model.linear_loss import LOSSES_WITH_MATMUL
from clustersim.model.memory_bound import z_loss_spec
from clustersim.model.optimizers import DISTRIBUTIONS_BY_ZERO_STAGE, Dion, MatrixOptimizer, Muon, Soap
from clustersim.model.training import LossImplementation
from clustersim.parallel.layout import Layout
from clustersim.scenario.resolved import ResolvedScenario
from clustersim.scenario.validation_rules.remedies import Problem, Remedy


def check_optimizer(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that the optimizer has whole matrices of trained weights on the device, or can get them."""
    training, data = scenario.training, scenario.layout.data
    if not isinstance(training.optimizer, MatrixOptimizer):
        return
    name = training.optimizer.name
    yield from _check_distribution(training.optimizer, scenario.layout)
    conflicts = {
        "training.lora, whose adapters it does not orthogonalize": training.lora is not None,
        "training.offload of the optimizer, which updates slices on the host": training.offload.states is not None,
        "layout.data: dp, whose first GPU has all weights": data.is_single_process,
    }
    for setting in (name for name, is_set in conflicts.items() if is_set):
        yield f"training.optimizer: {name} does not run with {setting}; leave it out, or write adam"


def _check_distribution(optimizer: MatrixOptimizer, layout: Layout) -> Iterator[str]:
    """Check that the optimizer works on matrices as the layout shards them."""
    stage = layout.data.zero_stage
    if isinstance(optimizer, Muon):
        allowed, distribution = DISTRIBUTIONS_BY_ZERO_STAGE[stage], optimizer.distribution_for(stage)
        if distribution not in allowed:
            yield (
                f"training.optimizer.distribution: {distribution.value} does not fit how layout.data shards weights "
                f"(ZeRO stage {stage}); {' or '.join(option.value for option in allowed)} does"
            )
    elif isinstance(optimizer, Soap) and stage == 3:
        yield (
            "training.optimizer: soap updates whole matrices, and layout.data shards each (ZeRO stage 3); write "
            "layout.data: ddp or zero1"
        )
    elif isinstance(optimizer, Dion) and stage in (1, 2):
        yield (
            f"training.optimizer: {optimizer.name} updates whole matrices or shards of each, and layout.data cuts a "
            f"flat buffer (ZeRO stage {stage}); write layout.data: ddp or fsdp"
        )
    elif layout.tp > 1 or layout.effective_etp > 1:
        yield (
            f"training.optimizer: how tensor-parallel ranks share {optimizer.name}'s products is not modelled; write "
            "layout.tp: 1"
        )


def check_optimizer_in_backward(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that nothing needs the gradients of several layers or microbatches at once."""
    training, layout = scenario.training, scenario.layout
    if not training.optimizer_in_backward:
        return
    shards = layout.data.shards_parameters or layout.dp * layout.cp == 1
    conflicts = {
        "training.gradient_clipping, whose norm is of all gradients; write false": training.gradient_clipping,
        f"{scenario.microbatch_count} microbatches, whose gradients are added": scenario.microbatch_count > 1,
        f"layout.pp: {layout.pp}, as a stage's backwards follow each other": layout.pp > 1,
        "replicas that reduce buckets of gradients; write layout.data: fsdp": not shards,
        "training.optimizer: an optimizer of whole matrices": isinstance(training.optimizer, MatrixOptimizer),
        "training.offload of the optimizer": training.offload.states is not None,
    }
    for setting in (name for name, is_set in conflicts.items() if is_set):
        yield f"training.optimizer_in_backward: it does not run with {setting}"


def check_z_loss(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that the loss has a z-loss, and that each rank has all logits of a token where it is computed apart."""
    training, tp = scenario.training, scenario.layout.tp
    if not training.z_loss:
        return
    if training.loss is LossImplementation.VOCAB_PARALLEL:
        yield Problem(
            "training.z_loss: loss vocab_parallel, Megatron-LM's, has none",
            Remedy("training.loss", tuple((name,) for name in ("fused", "compiled", "torch"))),
        )
    elif z_loss_spec(training.loss) is not None and tp > 1:
        yield (
            f"training.z_loss: with layout.tp {tp} the logits of a token are on several ranks, whose sums are not "
            f"modelled apart from loss {training.loss.value}; write loss: compiled or fused, or layout.tp: 1"
        )


def check_cross_entropy_metrics(scenario: ResolvedScenario) -> Iterator[Problem]:
    """Check that the logits of which metrics are computed exist."""
    training = scenario.training
    if training.overheads.cross_entropy_metrics and training.loss in LOSSES_WITH_MATMUL:
        yield Problem(
            f"training.overheads.cross_entropy_metrics: {training.overheads.cross_entropy_metrics}: metrics read the "
            f"logits, which never exist at once with training.loss: {training.loss.value}",
            Remedy("training.loss", (("compiled",), ("fused",), ("torch",))),
        )


def check_reference_model(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that both models' forwards run on the same ranks, one after the other."""
    training, layout = scenario.training, scenario.layout
    if not training.reference_model:
        return
    conflicts = {
        f"layout.pp: {layout.pp}": layout.pp > 1,
        "layout.data: dp": layout.data.is_single_process,
        "layout.data: deepspeed_zero3": layout.data.gathers_single_parameters,
        "training.offload of parameters": training.offload.offloads_shards,
    }
    for setting in (name for name, is_set in conflicts.items() if is_set):
        yield f"training.reference_model: a second forward is not modelled with {setting}; change it, or leave it out"
