"""What leaves the device is on the host, counted by hand."""

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
from tests.memory.rank_memory import ledger_of, resident

MODEL = resize_model(load_preset("llama3-8b"), layers=8)
LAYER = 1024 * 4096 * 2.0
"""Bytes of the input of a layer, 1024 tokens of 4096 elements, which is all that a layer keeps that is run again."""
GB = 1e9


def plan(offload: Offload, layout: Layout | None = None, **training: object) -> Plan:
    given = Training(1024, 16, recompute=FullRecompute(), offload=offload, **training)  # type: ignore[arg-type]
    return Plan(MODEL, given, layout or Layout(dp=4, data=Zero1()))


def on_host(of: Plan, rank: int = 0, order: str = "gpipe") -> dict[HostCategory, float]:
    return rank_host_bytes(of, rank, build_schedule(order).order(of.layout.pp, of.microbatches)[rank])


def test_activations_of_all_microbatches_in_flight_are_there() -> None:
    """GPipe has all four microbatches of a rank in flight, of eight layers; 1F1B on one rank has one at a time."""
    of = plan(Offload(ActivationOffload()))
    assert on_host(of) == {**dict.fromkeys(HostCategory, 0.0), HostCategory.ACTIVATIONS: 4 * 8 * LAYER}
    assert on_host(of, order="1f1b")[HostCategory.ACTIVATIONS] == 8 * LAYER


@pytest.mark.parametrize(("offload", "layers"), [(ActivationOffload(layers=3), 3), (ActivationOffload(share=0.6), 5)])
def test_only_the_first_layers_go_there(offload: ActivationOffload, layers: int) -> None:
    assert on_host(plan(Offload(offload)))[HostCategory.ACTIVATIONS] == 4 * layers * LAYER


@pytest.mark.parametrize(("prefetch", "buffers"), [(1, 2), (3, 4), (20, 8)])
def test_the_device_keeps_buffers_for_layers_on_their_way(prefetch: int, buffers: int) -> None:
    """As many as there are layers at most; embedding and head stay where they are."""
    of, whole = plan(Offload(ActivationOffload(prefetch=prefetch))), plan(Offload())
    assert resident(of)[MemoryCategory.OFFLOAD] == buffers * LAYER
    assert resident(whole)[MemoryCategory.OFFLOAD] == 0.0
    fewer = (
        ledger_of(whole, order=build_schedule("gpipe")).activations
        - ledger_of(of, order=build_schedule("gpipe")).activations
    )
    assert fewer.max() == 4 * 8 * LAYER


def test_an_optimizer_on_the_host_takes_16_bytes_for_each_parameter_that_a_rank_updates() -> None:
    """4 of the gradient, 4 of master weights, 8 of moments; ZeRO-1 has each of four ranks update a fourth."""
    of, whole, count = plan(Offload(states=OptimizerOffload())), plan(Offload()), parameter_count(MODEL)
    there = on_host(of)
    assert there[HostCategory.OPTIMIZER] == pytest.approx(12 * count / 4)
    assert there[HostCategory.GRADIENTS] == pytest.approx(4 * count / 4)
    assert resident(whole)[MemoryCategory.OPTIMIZER] == pytest.approx(12 * count / 4)
    assert resident(of)[MemoryCategory.OPTIMIZER] == 0.0
    assert resident(of)[MemoryCategory.GRADIENTS] == resident(whole)[MemoryCategory.GRADIENTS]


def test_a_part_of_the_optimizer_takes_its_part() -> None:
    of, whole = plan(Offload(states=OptimizerOffload(0.25))), plan(Offload())
    assert on_host(of)[HostCategory.OPTIMIZER] == pytest.approx(0.25 * resident(whole)[MemoryCategory.OPTIMIZER])
    assert resident(of)[MemoryCategory.OPTIMIZER] == pytest.approx(0.75 * resident(whole)[MemoryCategory.OPTIMIZER])


def test_without_master_weights_the_cpu_has_a_copy_of_the_weights() -> None:
    of = plan(Offload(states=OptimizerOffload()), recipe=mixed_precision(DType.FP32, master=None))
    assert on_host(of)[HostCategory.OPTIMIZER] == pytest.approx((8 + 4) * parameter_count(MODEL) / 4)


def test_gradients_that_leave_are_there_for_one_unit_and_on_their_way_for_another() -> None:
    """On one GPU, 4 bytes of each parameter of the largest unit, the logits' matrix with its norm."""
    alone = Layout(dp=1)
    of, whole = (plan(Offload(states=OptimizerOffload(gradients=item)), alone) for item in (True, False))
    assert resident(whole)[MemoryCategory.GRADIENTS] == pytest.approx(4 * parameter_count(MODEL))
    assert resident(of)[MemoryCategory.GRADIENTS] == 0.0
    assert resident(of)[MemoryCategory.OFFLOAD] == pytest.approx(2 * 4 * (128256 * 4096 + 4096))
    assert on_host(of) == on_host(whole)


def test_zero_offload_trains_13_billion_parameters_on_one_v100() -> None:
    """Ren et al. 2021, abstract: over 13 billion on a single GPU, where 1.4 billion fit without."""
    given = {
        "model": {"family": "gpt", "layers": 65, "hidden": 4096, "heads": 32, "ffn": 16384, "vocab": 50304},
        "cluster": {"name": "dgx-v100", "gpus": 1},
        "training": {"sequence": 1024, "global_batch": 2, "recompute": "full", "attention": "standard",
                     "precision": {"compute": "fp16", "gradients": "fp16"}},
    }  # fmt: skip
    of = Scenario.from_mapping(given)
    assert parameter_count(of.model) > 13e9
    assert not check(of).fits
    assert not check(of.with_overrides("training.offload.optimizer=true")).fits
    assert check(of.with_overrides("training.offload={optimizer: true, gradients: true}")).fits


def test_shards_on_the_host_take_parameters_gradients_and_states_along() -> None:
    layout = Layout(dp=4, data=FullyShard())
    of, whole, count = plan(Offload(states=ShardOffload()), layout), plan(Offload(), layout), parameter_count(MODEL)
    there, before, after = on_host(of), resident(whole), resident(of)
    for category, use, size in (
        (MemoryCategory.PARAMETERS, HostCategory.PARAMETERS, 2),
        (MemoryCategory.GRADIENTS, HostCategory.GRADIENTS, 4),
        (MemoryCategory.OPTIMIZER, HostCategory.OPTIMIZER, 12),
    ):
        assert there[use] == pytest.approx(size * count / 4)
        assert before[category] == pytest.approx(there[use])
        assert after[category] == 0.0
    assert after[MemoryCategory.GATHERED] == before[MemoryCategory.GATHERED]
    largest = 128256 * 4096 + 4096  # the logits' matrix and the norm before it
    assert after[MemoryCategory.OFFLOAD] == pytest.approx((2 * 4 + 4) * largest / 4)


@pytest.mark.parametrize("states", [ShardOffload(), OptimizerOffload(gradients=True)])
@pytest.mark.parametrize(("microbatches", "all_reduce", "width"), [
    (2, ReductionFrequency.LAST_MICROBATCH, 4), (2, ReductionFrequency.PER_MICROBATCH, 0), (1, ReductionFrequency.LAST_MICROBATCH, 0),
])  # fmt: skip
def test_parts_of_gradients_stay_until_they_have_crossed_replicas(
    states: ShardOffload | OptimizerOffload, microbatches: int, all_reduce: ReductionFrequency, width: int
) -> None:
    """What goes to the host is done: a device keeps its half of gradients that a later microbatch sums across."""
    layout = Layout(dp=4, data=FullyShard(shard=2, all_reduce=all_reduce))
    of = plan(Offload(states=states), layout, microbatch=4 // microbatches)
    assert of.microbatches == microbatches
    assert resident(of)[MemoryCategory.GRADIENTS] == pytest.approx(width * parameter_count(MODEL) / 2)


def scenario(*overrides: str) -> Scenario:
    """Llama 3 8B with half its layers on one node; nothing is offloaded."""
    given = {
        "model": {"preset": "llama3-8b", "layers": 8},
        "cluster": {"name": "dgx-h100", "gpus": 8},
        "layout": {"dp": 8, "data": "zero1"},
        "training": {"sequence": 1024, "global_batch": 8, "recompute": "full"},
    }
    return Scenario.from_mapping(given, overrides)


def test_a_node_holds_what_all_its_ranks_offload() -> None:
    """Replicas share the optimizer out: 16 bytes for each parameter of the model on the node."""
    use = max_host_use(scenario("training.offload={optimizer: true, activations: 4}"))
    assert use is not None
    assert use.bytes_by_category[HostCategory.ACTIVATIONS] == 8 * 4 * LAYER
    assert use.total_bytes == pytest.approx(16 * parameter_count(MODEL) + 8 * 4 * LAYER)
    assert use.capacity == 2e12


def test_nodes_of_a_pipeline_differ_and_the_fullest_counts() -> None:
    """Two stages on a node each: the first has the embedding, the second the head and its norm, which is larger."""
    of = scenario("cluster.gpus=16", "layout={pp: 2, dp: 8, data: zero1}", "training.offload.optimizer=true")
    use = max_host_use(of)
    assert use is not None
    of_a_layer = (parameter_count(MODEL) - 2 * 128256 * 4096 - 4096) / 8
    assert use.total_bytes == pytest.approx(16 * (4 * of_a_layer + 128256 * 4096 + 4096))


def test_a_host_that_is_too_small_does_not_fit_and_says_so() -> None:
    of = scenario("training.offload.optimizer=true", "cluster.node.host_memory.capacity=10 GB")
    report, answer = check(of), simulate(of)
    assert report.peak_memory_bytes < report.memory_capacity_bytes
    assert not report.fits
    assert not answer.fits_in_memory
    need = 16 * parameter_count(MODEL) / 2**30
    for warnings in (report.warnings, answer.warnings):
        (told,) = (warning for warning in warnings if warning.startswith("host memory"))
        assert f"is {need:.4g} GiB (optimizer state " in told
        assert "its host has 9.313 GiB" in told
    assert answer.to_json()["host_memory"]["memory_bytes"] == pytest.approx(16 * parameter_count(MODEL))
    assert check(of.with_overrides("cluster.node.host_memory.capacity=100 GB")).fits


def test_nothing_offloaded_is_nothing_on_the_host() -> None:
    assert max_host_use(scenario()) is None
    assert check(scenario()).host is None
    assert simulate(scenario()).to_json()["host_memory"] is None
    assert HostMemoryUse({HostCategory.ACTIVATIONS: 1.0}, 1.0).problems == ()


def test_remedies_offload_where_there_is_a_host_and_it_has_room() -> None:
    """Eight GPUs share nothing here but the model's copies: 18 bytes a parameter do not fit beside 16 gigabytes."""
    given = ["layout={tp: 8, sequence_parallel: true}", "model.layers=200", "training.global_batch=1"]
    told = check(scenario(*given)).suggestions
    assert any(item.startswith("training.offload.optimizer=true would fit (") for item in told)
    without = check(scenario(*given, "cluster.node.host_memory.capacity=1 GB")).suggestions
    assert not any("offload.optimizer" in element for element in without)


def test_memory_over_time_ends_with_nothing_in_flight() -> None:
    answer = simulate(scenario("training.offload.activations=all"))
    (ledger,) = answer.ledgers
    assert ledger.activations[-1] == pytest.approx(0.0, abs=1.0)
    assert np.all(np.diff(ledger.times) >= 0)
    assert ledger.peak_by_category()[MemoryCategory.OFFLOAD] == 2 * LAYER


def test_of_frozen_weights_only_shards_are_on_the_host() -> None:
    """Adapters of rank 8 beside q and v: 8 x (4096 + 4096) and 8 x (4096 + 1024) parameters a layer."""
    adapters = 8 * 8 * (4096 + 4096 + 4096 + 1024)
    given = ["training.lora={rank: 8, targets: [q, v]}", "layout.data=fsdp"]
    optimizer, shards = (
        max_host_use(scenario(*given, f"training.offload.{item}=true")) for item in ("optimizer", "parameters")
    )
    assert optimizer is not None
    assert shards is not None
    assert optimizer.total_bytes == pytest.approx(16 * adapters)
    assert shards.total_bytes == pytest.approx(16 * adapters + 2 * (parameter_count(MODEL) + adapters))


def test_frozen_shards_are_copied_as_they_are_computed_with() -> None:
    """2 bytes of each frozen parameter for a gather, 4 of an adapter's; forward and, but for the head, backward."""
    answer = simulate(scenario("training.lora=8", "layout.data=fsdp", "training.offload.parameters=true"))
    tasks = [task.comm_op for task in answer.program.programs[0].tasks if isinstance(task, CollectiveTask)]
    fetched = sum(
        comm_op.payload for comm_op in tasks if isinstance(comm_op, HostOp) and comm_op.kind is HostOpKind.H2D
    )
    plan = build_plan(answer.scenario)
    frozen, adapters = (sum(plan.parameter_count(stage, name) for stage in plan.stages) for name in (DENSE, ADAPTERS))
    head = 128256 * 4096 + 4096
    assert fetched == pytest.approx((2 * (2 * frozen - head) + 4 * 2 * adapters) / 8)
