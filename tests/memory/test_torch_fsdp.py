"""Memory of PyTorch's FSDP: its shards are the master weights, and backward creates gradients."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.memory.activations import Activations
from clustersim.memory.footprint import Footprint, MemoryCategory
from clustersim.memory.ledger import MemoryLedger
from clustersim.model.framework import Framework
from clustersim.model.framework_files import load_framework
from clustersim.model.offload import Offload, OptimizerOffload
from clustersim.model.presets import load_preset
from clustersim.model.training import (
    FullRecompute,
    NoRecompute,
    Recompute,
    SelectiveOpRecompute,
    SelectiveRecompute,
    Training,
)
from clustersim.parallel.data_parallel_strategy import DataParallelStrategy, DdpStrategy, FullyShard
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan
from tests.memory.rank_memory import BARE, rank_ledger

MODEL = load_preset("llama3-8b")
TORCH = replace(BARE, torch_fsdp=True)
FSDP = FullyShard()


def fsdp_plan(sequence: int, microbatches: int = 1, dp: int = 8, data: DataParallelStrategy = FSDP) -> Plan:
    return Plan(MODEL, Training(sequence, microbatches * dp), Layout(dp=dp, data=data))


def parameters(plan: Plan) -> float:
    return float(sum(plan.parameter_count(stage, "dense") for stage in plan.stages))


def gradients(ledger: MemoryLedger) -> float:
    return ledger.peak_by_category()[MemoryCategory.GRADIENTS]


@given(dp=st.sampled_from([2, 8, 64]))
def test_a_rank_holds_16_bytes_of_each_parameter_of_its_shard(dp: int) -> None:
    """FP32 weights, gradients and two moments; Megatron-FSDP and DeepSpeed have 2 bytes in the compute format, too."""
    plan = fsdp_plan(128, microbatches=2, dp=dp)
    states = MemoryCategory.PARAMETERS, MemoryCategory.GRADIENTS, MemoryCategory.OPTIMIZER
    torch, other = (
        sum(rank_ledger(plan, framework=framework).resident[use] for use in states) for framework in (TORCH, BARE)
    )
    assert torch == pytest.approx(16 * parameters(plan) / dp)
    assert rank_ledger(plan, framework=TORCH).resident[MemoryCategory.PARAMETERS] == pytest.approx(
        4 * parameters(plan) / dp
    )
    assert other == pytest.approx(18 * parameters(plan) / dp)


def test_a_checkpoint_has_12_bytes_of_each_parameter() -> None:
    """FP32 weights and two moments; with separate weights in the compute format 14."""
    plan = fsdp_plan(128)
    torch, other = (Footprint(plan, framework, 0.0).checkpoint_bytes() for framework in (TORCH, BARE))
    assert torch == pytest.approx(12 * parameters(plan))
    assert other == pytest.approx(14 * parameters(plan))


def test_offloaded_master_weights_leave_the_compute_format() -> None:
    plan = fsdp_plan(128)
    offloaded = replace(plan, training=replace(plan.training, offload=Offload(states=OptimizerOffload())))
    resident = Footprint(offloaded, TORCH, 0.0).resident_bytes(0)
    assert resident[MemoryCategory.PARAMETERS] == pytest.approx(2 * parameters(plan) / 8)


@pytest.mark.parametrize("sequence", [64, 8192])
def test_a_step_with_one_backward_needs_gradients_or_activations(sequence: int) -> None:
    """Few tokens: all gradients and the last layer. Many: the activations when backward begins, without gradients."""
    plan = fsdp_plan(sequence)
    activations, stage = Activations(plan), plan.stages[0]
    ledger = rank_ledger(plan, framework=TORCH)
    created = 4 * parameters(plan) / 8
    begin = activations.saved_bytes(stage) + activations.transient_bytes(stage)
    end = created + activations.last_layer_bytes
    at_peak = ledger.peak_by_category()
    assert at_peak[MemoryCategory.ACTIVATIONS] + gradients(ledger) == pytest.approx(max(begin, end))
    assert gradients(ledger) == pytest.approx(created if sequence == 64 else 0.0)
    assert ledger.unreduced_gradients[-1] == pytest.approx(created)
    assert ledger.activations[-1] == pytest.approx(0.0, abs=1.0)


@given(sequence=st.sampled_from([64, 512, 8192]), microbatches=st.integers(2, 4))
def test_gradients_of_several_microbatches_stay_from_the_first_backward(sequence: int, microbatches: int) -> None:
    several = rank_ledger(fsdp_plan(sequence, microbatches), framework=TORCH)
    assert gradients(several) == pytest.approx(4 * parameters(fsdp_plan(sequence)) / 8)
    assert several.peak >= rank_ledger(fsdp_plan(sequence), framework=TORCH).peak


def test_ddp_keeps_gradients_in_its_buckets() -> None:
    plan = fsdp_plan(128, dp=2, data=DdpStrategy())
    assert gradients(rank_ledger(plan, framework=TORCH)) == pytest.approx(4 * parameters(plan))
    alone = rank_ledger(fsdp_plan(8192, dp=1, data=DdpStrategy()), framework=TORCH)
    assert gradients(alone) in (pytest.approx(0.0), pytest.approx(4 * parameters(plan)))
    assert alone.resident[MemoryCategory.GRADIENTS] == 0.0


@pytest.mark.parametrize(
    ("recompute", "expected"),
    [
        (NoRecompute(), 1.1),
        (SelectiveRecompute(), 1.1),
        (SelectiveOpRecompute(), 1.2),
        (FullRecompute(4), 1.2),
        (FullRecompute(), 1.3),
    ],
)
def test_fragmentation_depends_on_recomputation(recompute: Recompute, expected: float) -> None:
    framework = Framework(1.1, 0.0, selective_fragmentation=1.2, full_fragmentation=1.3)
    assert framework.fragmentation_with(recompute) == expected
    assert Framework(1.1, 0.0).fragmentation_with(recompute) == 1.1


def test_fragmentation_of_the_packaged_framework_is_between_what_torchtitan_prints() -> None:
    framework = load_framework("pytorch")
    assert 1.22 <= framework.fragmentation_with(FullRecompute()) <= 1.365
    assert 1.178 <= framework.fragmentation_with(SelectiveOpRecompute()) <= 1.269
    assert 1.03 <= framework.fragmentation_with(NoRecompute()) <= 1.08
