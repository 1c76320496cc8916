"""What of a scenario's training can one device run?

One pipeline rank's layers of one replica, as a tensor-parallel rank holds them (`check.rank_model`), with
embedding and head and the tokens of one context-parallel rank, in one process without collectives. So the
kernels are those of the scenario's ranks, for which its record was measured, not those of unsharded layers.
What is validated is how well a record predicts in its own domain. (Norms and residuals, which sequence
parallelism splits by tokens, are unsplit.) The framework is eager PyTorch without graphs; nothing is
offloaded, no degradation applies; where fused matmuls save what recomputation produces, recomputation runs
to its end (`check.supported`). The trained and the predicted scenario are the same.
"""

from collections.abc import Iterator
from dataclasses import replace

from calibrate.check.moe import trainer_overheads
from calibrate.check.rank_model import model_of_rank
from clustersim.build import build_plan
from clustersim.hardware.accelerator import Accelerator, load_accelerator
from clustersim.hardware.cluster import Cluster
from clustersim.hardware.degradation import Degradations
from clustersim.model.framework_files import load_framework
from clustersim.model.layer_stack import slice_layers
from clustersim.model.offload import NO_OFFLOAD
from clustersim.model.training import Training
from clustersim.parallel.layout import Layout
from clustersim.scenario import Scenario
from clustersim.scenario.settings import CostSettings
from clustersim.schedules.one_f_one_b import OneFOneB


def one_device_scenario(scenario: Scenario, accelerator: str) -> Scenario:
    """The scenario of one process on the accelerator of that name; raise InputError where it has no such rank."""
    layout, model = scenario.layout, scenario.model
    first_layers = replace(model, stack=slice_layers(model.stack, 0, max(_layers_per_pipeline_rank(scenario))))
    return replace(
        scenario,
        name=f"{scenario.name} on one device",
        model=model_of_rank(first_layers, layout),
        cluster=_single_gpu_cluster(scenario.cluster, accelerator),
        layout=Layout(),
        schedule=OneFOneB(),
        training=_replica_training(scenario.training, cp=layout.cp, dp=layout.dp),
        cost=CostSettings(),
        framework=load_framework(),
        degradations=Degradations(),
        jitter=None,
        steps=1,
    )


def pipeline_depths(scenario: Scenario) -> frozenset[int]:
    """Numbers of layers of the scenario's pipeline ranks: depths whose optimizer kernels the record has."""
    return frozenset(_layers_per_pipeline_rank(scenario))


def _layers_per_pipeline_rank(scenario: Scenario) -> Iterator[int]:
    plan = build_plan(scenario)
    for rank in range(scenario.layout.pp):
        yield sum(stage.layer_count for stage in plan.stages_on_rank(rank))


def _single_gpu_cluster(cluster: Cluster, accelerator: str) -> Cluster:
    """One of the cluster's GPUs, as the measured accelerator."""
    cluster_accelerator: Accelerator = cluster.accelerator
    measured_accelerator = (
        cluster_accelerator if cluster_accelerator.name == accelerator else load_accelerator(accelerator)
    )
    return replace(
        cluster.with_rank_mapping(cluster.machine_gpu_ids[:1]),
        accelerator=measured_accelerator,
        accelerator_overrides=(),
    )


def _replica_training(training: Training, *, cp: int, dp: int) -> Training:
    return replace(
        training,
        sequence=training.sequence // cp,
        global_batch=training.global_batch // dp,
        early_stop=training.early_stop and not training.is_fully_fused,
        offload=NO_OFFLOAD,
        overheads=trainer_overheads(training.overheads),
    )
