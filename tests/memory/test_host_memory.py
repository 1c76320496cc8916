"""Host memory of offloaded state, against counts by hand."""

import numpy as np
import pytest

from clustersim import Scenario, simulate
from clustersim.build import build_plan
from clustersim.common.dtypes import DType
from clustersim.memory.footprint import MemoryCategory
from clustersim.memory.host_memory import HostCategory, HostMemoryUse, rank_host_bytes
from clustersim.model.offload import ActivationOffload, Offload, OptimizerOffload, ShardOffload
from clustersim.model.operators import ADAPTERS, DENSE
from clustersim.model.precision_recipe import mixed_precision
from clustersim.model.presets import load_preset
from clustersim.model.training import FullRecompute, Training
from clustersim.model.transformer import parameter_count, resize_model
from clustersim.parallel.data_parallel_strategy import FullyShard, ReductionFrequency, Zero1
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan
from clustersim.program.task import CollectiveTask, HostOp, HostOpKind
from clustersim.results.memory_check import check, max_host_use
from clustersim.schedules.registry import build_schedule
from tests.memory.rank_memory import rank_ledger, resident_bytes

MODEL = resize_model(load_preset("llama3-8b"), layers=8)
LAYER = 1024 * 4096 * 2.0
"""Bytes of a layer's input, 1024 tokens of 4096 elements, which is all that a fully recomputed layer keeps."""
GB = 1e9


def offload_plan(offload: Offload, layout: Layout | None = None, **training: object) -> Plan:
    settings = Training(1024, 16, recompute=FullRecompute(), offload=offload, **training)  # type: ignore[arg-type]
    return Plan(MODEL, settings, layout or Layout(dp=4, data=Zero1()))


def host_bytes(plan: Plan, rank: int = 0, order: str = "gpipe") -> dict[HostCategory, float]:
    return rank_host_bytes(plan, rank, build_schedule(order).order(plan.layout.pp, plan.microbatches)[rank])


def test_offloaded_activations_of_all_microbatches_in_flight_are_on_the_host() -> None:
    """GPipe has all four microbatches of a rank in flight, of eight layers; 1F1B on one rank has one at a time."""
    plan = offload_plan(Offload(ActivationOffload()))
    assert host_bytes(plan) == {**dict.fromkeys(HostCategory, 0.0), HostCategory.ACTIVATIONS: 4 * 8 * LAYER}
    assert host_bytes(plan, order="1f1b")[HostCategory.ACTIVATIONS] == 8 * LAYER


@pytest.mark.parametrize(("offload", "layers"), [(ActivationOffload(layers=3), 3), (ActivationOffload(share=0.6), 5)])
def test_only_the_first_layers_are_offloaded(offload: ActivationOffload, layers: int) -> None:
    assert host_bytes(offload_plan(Offload(offload)))[HostCategory.ACTIVATIONS] == 4 * layers * LAYER


@pytest.mark.parametrize(("prefetch", "buffers"), [(1, 2), (3, 4), (20, 8)])
def test_the_device_keeps_buffers_for_layers_in_transfer(prefetch: int, buffers: int) -> None:
    """At most as many as there are layers; embedding and head are not offloaded."""
    plan, baseline = offload_plan(Offload(ActivationOffload(prefetch=prefetch))), offload_plan(Offload())
    assert resident_bytes(plan)[MemoryCategory.OFFLOAD] == buffers * LAYER
    assert resident_bytes(baseline)[MemoryCategory.OFFLOAD] == 0.0
    fewer = (
        rank_ledger(baseline, order=build_schedule("gpipe")).activations
        - rank_ledger(plan, order=build_schedule("gpipe")).activations
    )
    assert fewer.max() == 4 * 8 * LAYER


def test_an_offloaded_optimizer_takes_16_bytes_per_updated_parameter() -> None:
    """4 of the gradient, 4 of master weights, 8 of moments; ZeRO-1 has each of four ranks update a fourth."""
    plan, baseline, count = (
        offload_plan(Offload(states=OptimizerOffload())),
        offload_plan(Offload()),
        parameter_count(MODEL),
    )
    on_host = host_bytes(plan)
    assert on_host[HostCategory.OPTIMIZER] == pytest.approx(12 * count / 4)
    assert on_host[HostCategory.GRADIENTS] == pytest.approx(4 * count / 4)
    assert resident_bytes(baseline)[MemoryCategory.OPTIMIZER] == pytest.approx(12 * count / 4)
    assert resident_bytes(plan)[MemoryCategory.OPTIMIZER] == 0.0
    assert resident_bytes(plan)[MemoryCategory.GRADIENTS] == resident_bytes(baseline)[MemoryCategory.GRADIENTS]


def test_a_fraction_of_the_optimizer_can_be_offloaded() -> None:
    plan, baseline = offload_plan(Offload(states=OptimizerOffload(0.25))), offload_plan(Offload())
    assert host_bytes(plan)[HostCategory.OPTIMIZER] == pytest.approx(
        0.25 * resident_bytes(baseline)[MemoryCategory.OPTIMIZER]
    )
    assert resident_bytes(plan)[MemoryCategory.OPTIMIZER] == pytest.approx(
        0.75 * resident_bytes(baseline)[MemoryCategory.OPTIMIZER]
    )


def test_without_master_weights_the_cpu_has_a_copy_of_the_weights() -> None:
    plan = offload_plan(Offload(states=OptimizerOffload()), recipe=mixed_precision(DType.FP32, master=None))
    assert host_bytes(plan)[HostCategory.OPTIMIZER] == pytest.approx((8 + 4) * parameter_count(MODEL) / 4)


def test_offloaded_gradients_are_double_buffered_per_unit() -> None:
    """On one GPU, 4 bytes of each parameter of the largest unit, the head matrix with its norm."""
    single_gpu = Layout(dp=1)
    plan, baseline = (
        offload_plan(Offload(states=OptimizerOffload(gradients=item)), single_gpu) for item in (True, False)
    )
    assert resident_bytes(baseline)[MemoryCategory.GRADIENTS] == pytest.approx(4 * parameter_count(MODEL))
    assert resident_bytes(plan)[MemoryCategory.GRADIENTS] == 0.0
    assert resident_bytes(plan)[MemoryCategory.OFFLOAD] == pytest.approx(2 * 4 * (128256 * 4096 + 4096))
    assert host_bytes(plan) == host_bytes(baseline)


def test_zero_offload_trains_13_billion_parameters_on_one_v100() -> None:
    """Ren et al. 2021, abstract: over 13 billion on a single GPU, where 1.4 billion fit without."""
    mapping = {
        "model": {"family": "gpt", "layers": 65, "hidden": 4096, "heads": 32, "ffn": 16384, "vocab": 50304},
        "cluster": {"name": "dgx-v100", "gpus": 1},
        "training": {"sequence": 1024, "global_batch": 2, "recompute": "full", "attention": "standard",
                     "precision": {"compute": "fp16", "gradients": "fp16"}},
        "framework": "megatron-deepspeed",
    }  # fmt: skip
    scenario = Scenario.from_mapping(mapping)
    assert parameter_count(scenario.model) > 13e9
    assert not check(scenario).fits
    assert not check(scenario.with_overrides("training.offload.optimizer=true")).fits
    assert check(scenario.with_overrides("training.offload={optimizer: true, gradients: true}")).fits


def test_offloaded_shards_include_parameters_gradients_and_states() -> None:
    layout = Layout(dp=4, data=FullyShard())
    plan, baseline, count = (
        offload_plan(Offload(states=ShardOffload()), layout),
        offload_plan(Offload(), layout),
        parameter_count(MODEL),
    )
    on_host, before, after = host_bytes(plan), resident_bytes(baseline), resident_bytes(plan)
    for category, use, size in (
        (MemoryCategory.PARAMETERS, HostCategory.PARAMETERS, 2),
        (MemoryCategory.GRADIENTS, HostCategory.GRADIENTS, 4),
        (MemoryCategory.OPTIMIZER, HostCategory.OPTIMIZER, 12),
    ):
        assert on_host[use] == pytest.approx(size * count / 4)
        assert before[category] == pytest.approx(on_host[use])
        assert after[category] == 0.0
    assert after[MemoryCategory.GATHERED] == before[MemoryCategory.GATHERED]
    largest = 128256 * 4096 + 4096  # the logits' matrix and the norm before it
    assert after[MemoryCategory.OFFLOAD] == pytest.approx((2 * 4 + 4) * largest / 4)


@pytest.mark.parametrize("states", [ShardOffload(), OptimizerOffload(gradients=True)])
@pytest.mark.parametrize(
    ("microbatches", "all_reduce", "width"),
    [
        (2, ReductionFrequency.LAST_MICROBATCH, 4),
        (2, ReductionFrequency.PER_MICROBATCH, 0),
        (1, ReductionFrequency.LAST_MICROBATCH, 0),
    ],
)
def test_gradient_shards_stay_until_they_are_reduced_across_replicas(
    states: ShardOffload | OptimizerOffload, microbatches: int, all_reduce: ReductionFrequency, width: int
) -> None:
    """Offloaded gradients are fully reduced.

    A device keeps its shard of gradients until a later microbatch reduces it.
    """
    layout = Layout(dp=4, data=FullyShard(shard=2, all_reduce=all_reduce))
    plan = offload_plan(Offload(states=states), layout, microbatch=4 // microbatches)
    assert plan.microbatches == microbatches
    assert resident_bytes(plan)[MemoryCategory.GRADIENTS] == pytest.approx(width * parameter_count(MODEL) / 2)


def scenario(*overrides: str) -> Scenario:
    """Llama 3 8B with 8 layers on one node, without offload."""
    mapping = {
        "model": {"preset": "llama3-8b", "layers": 8},
        "cluster": {"name": "dgx-h100", "gpus": 8},
        "layout": {"dp": 8, "data": "zero1"},
        "training": {"sequence": 1024, "global_batch": 8, "recompute": "full"},
    }
    return Scenario.from_mapping(mapping, overrides)


def test_a_node_holds_the_offloaded_bytes_of_all_its_ranks() -> None:
    """Replicas shard the optimizer: 16 bytes per parameter of the model on the node."""
    use = max_host_use(scenario("training.offload={optimizer: true, activations: 4}"))
    assert use is not None
    assert use.bytes_by_category[HostCategory.ACTIVATIONS] == 8 * 4 * LAYER
    assert use.total_bytes == pytest.approx(16 * parameter_count(MODEL) + 8 * 4 * LAYER)
    assert use.capacity == 2e12


def test_the_node_with_the_highest_host_memory_use_counts() -> None:
    """Two stages on a node each: the first has the embedding, the second the head and its norm, which is larger."""
    two_stages = scenario("cluster.gpus=16", "layout={pp: 2, dp: 8, data: zero1}", "training.offload.optimizer=true")
    use = max_host_use(two_stages)
    assert use is not None
    layer_parameters = (parameter_count(MODEL) - 2 * 128256 * 4096 - 4096) / 8
    assert use.total_bytes == pytest.approx(16 * (4 * layer_parameters + 128256 * 4096 + 4096))


def test_a_host_with_too_little_memory_does_not_fit_and_warns() -> None:
    small_host = scenario("training.offload.optimizer=true", "cluster.node.host_memory.capacity=10 GB")
    report, result = check(small_host), simulate(small_host)
    assert report.peak_memory_bytes < report.memory_capacity_bytes
    assert not report.fits
    assert not result.fits_in_memory
    need = 16 * parameter_count(MODEL) / 2**30
    for warnings in (report.warnings, result.warnings):
        (warning,) = (item for item in warnings if item.startswith("host memory"))
        assert f"is {need:.4g} GiB (optimizer state " in warning
        assert "its host has 9.313 GiB" in warning
    assert result.to_json()["host_memory"]["memory_bytes"] == pytest.approx(16 * parameter_count(MODEL))
    assert check(small_host.with_overrides("cluster.node.host_memory.capacity=100 GB")).fits


def test_without_offload_no_host_memory_is_used() -> None:
    assert max_host_use(scenario()) is None
    assert check(scenario()).host is None
    assert simulate(scenario()).to_json()["host_memory"] is None
    assert HostMemoryUse({HostCategory.ACTIVATIONS: 1.0}, 1.0).problems == ()


def test_offload_is_suggested_if_the_host_has_capacity() -> None:
    """With tp 8 nothing else can be sharded: 18 bytes per parameter do not fit on eight GPUs."""
    overrides = ["layout={tp: 8, sequence_parallel: true}", "model.layers=200", "training.global_batch=1"]
    suggestions = check(scenario(*overrides)).suggestions
    assert any(suggestion.overrides == ("training.offload.optimizer=true",) for suggestion in suggestions)
    without = check(scenario(*overrides, "cluster.node.host_memory.capacity=1 GB")).suggestions
    assert not any("offload.optimizer" in setting for suggestion in without for setting in suggestion.overrides)


def test_the_memory_timeline_ends_with_no_activations() -> None:
    result = simulate(scenario("training.offload.activations=all"))
    (ledger,) = result.ledgers
    assert ledger.activations[-1] == pytest.approx(0.0, abs=1.0)
    assert np.all(np.diff(ledger.times) >= 0)
    assert ledger.peak_by_category()[MemoryCategory.OFFLOAD] == 2 * LAYER


def test_frozen_weights_are_offloaded_only_as_shards() -> None:
    """Adapters of rank 8 on q and v: 8 x (4096 + 4096) and 8 x (4096 + 1024) parameters per layer."""
    adapters = 8 * 8 * (4096 + 4096 + 4096 + 1024)
    overrides = ["training.lora={rank: 8, targets: [q, v]}", "layout.data=fsdp"]
    optimizer, shards = (
        max_host_use(scenario(*overrides, f"training.offload.{item}=true")) for item in ("optimizer", "parameters")
    )
    assert optimizer is not None
    assert shards is not None
    assert optimizer.total_bytes == pytest.approx(16 * adapters)
    assert shards.total_bytes == pytest.approx(16 * adapters + 2 * (parameter_count(MODEL) + adapters))


def test_frozen_shards_are_fetched_in_compute_precision() -> None:
    """2 bytes of each frozen parameter for a gather, 4 of an adapter's; forward and, but for the head, backward."""
    result = simulate(scenario("training.lora=8", "layout.data=fsdp", "training.offload.parameters=true"))
    tasks = [task.comm_op for task in result.program.programs[0].tasks if isinstance(task, CollectiveTask)]
    fetched_bytes = sum(
        comm_op.payload for comm_op in tasks if isinstance(comm_op, HostOp) and comm_op.kind is HostOpKind.H2D
    )
    plan = build_plan(result.scenario)
    frozen, adapters = (sum(plan.parameter_count(stage, name) for stage in plan.stages) for name in (DENSE, ADAPTERS))
    head = 128256 * 4096 + 4096
    assert fetched_bytes == pytest.approx((2 * (2 * frozen - head) + 4 * 2 * adapters) / 8)
