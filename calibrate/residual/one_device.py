"""What of a scenario's training can one device run?

One pipeline rank's layers of one replica, each as a tensor-parallel rank holds it: its heads, its columns of the MLP,
its part of the vocabulary, the tokens of one context-parallel rank, the whole in one process without collectives. So
the kernels are those of the scenario's ranks, for which its record was measured; those of whole layers are not. What is
tried is how far a record carries in what it was made for. (Norms and residuals, which sequence parallelism splits by
tokens, are whole.) The framework is PyTorch as it is, without graphs; nothing goes to the host, nothing is disturbed;
where fused products save what recomputation makes, it runs to its end (`check.support`). All of that is what is trained
here, and so what is predicted.
"""

from collections.abc import Iterator
from dataclasses import replace

from clustersim.assembly import plan_of
from clustersim.hardware.accelerator import Accelerator, load_accelerator
from clustersim.hardware.cluster import Cluster
from clustersim.hardware.disturbance import Disturbances
from clustersim.parallel.layout import Layout
from clustersim.scenario import Scenario
from clustersim.scenario.settings import CostSettings
from clustersim.schedules.one_f_one_b import OneFOneB
from clustersim.workload.framework import load_framework
from clustersim.workload.layers import Shard
from clustersim.workload.offload import NOTHING
from clustersim.workload.overheads import NONE
from clustersim.workload.stack import LayerRun, LayerSpec, cut, joined
from clustersim.workload.training import Training
from clustersim.workload.transformer import Model, changed


def one_device(scenario: Scenario, accelerator: str) -> Scenario:
    """The scenario of one process on the accelerator of that name; raise InputError where there is none of it."""
    layout = scenario.layout
    return replace(
        scenario,
        name=f"{scenario.name} on one device",
        model=_of_rank(scenario),
        cluster=_of_one(scenario.cluster, accelerator),
        layout=Layout(),
        schedule=OneFOneB(),
        training=_of_replica(scenario.training, cp=layout.cp, dp=layout.dp),
        cost=CostSettings(),
        framework=load_framework(),
        disturbances=Disturbances(),
        jitter=None,
        steps=1,
    )


def depths(scenario: Scenario) -> frozenset[int]:
    """How many layers the scenario's pipeline ranks have: those whose optimizer steps it runs."""
    return frozenset(_depths(scenario))


def _depths(scenario: Scenario) -> Iterator[int]:
    plan = plan_of(scenario)
    for rank in range(scenario.layout.pp):
        yield sum(stage.layers for stage in plan.stages_of(rank))


def _of_rank(scenario: Scenario) -> Model:
    """As many of the model's first layers as a pipeline rank has at most, cut to what a tensor-parallel rank holds."""
    model, tp = scenario.model, scenario.layout.tp
    first = cut(model.stack, 0, max(_depths(scenario)))
    runs = (LayerRun(_of_tensor_rank(run.spec, tp), run.count) for run in first)
    return replace(model, stack=joined(runs), vocab=Shard(1, 1, 1, tp=tp).rows(model.vocab))


def _of_tensor_rank(spec: LayerSpec, tp: int) -> LayerSpec:
    attention, mlp = spec.attention, spec.mlp
    heads = {} if attention is None else {"heads": attention.heads // tp, "kv_heads": max(1, attention.kv_heads // tp)}
    columns = {} if mlp is None else {"ffn": mlp.ffn // tp}
    return changed(spec, **heads, **columns)


def _of_one(cluster: Cluster, accelerator: str) -> Cluster:
    """One of the cluster's GPUs, which is the accelerator that was measured."""
    there: Accelerator = cluster.accelerator
    kind = there if there.name == accelerator else load_accelerator(accelerator)
    return replace(cluster.placed(cluster.places[:1]), accelerator=kind, mixed=())


def _of_replica(training: Training, *, cp: int, dp: int) -> Training:
    return replace(
        training,
        sequence=training.sequence // cp,
        global_batch=training.global_batch // dp,
        early_stop=training.early_stop and not training.fused,
        offload=NOTHING,
        overheads=NONE,
    )
