"""MFU, HFU and rates from numbers, and recomputed FLOPs."""

import pytest

from clustersim.common.dtypes import DType
from clustersim.model.kernels import AttentionShape, Kernel, KernelKind
from clustersim.program.task import ComputeTask, Operation, Segment, Stream, WorkType
from clustersim.results.step_throughput import StepThroughput
from clustersim.results.time_breakdown import compute_breakdown
from clustersim.results.utilization import (
    CONVENTION,
    LeadingMfu,
    achieved_flops_per_gpu,
    bubble_fraction,
    exposed_fraction,
    hfu,
    mfu,
    recomputed_flops_total,
    tokens_per_second,
)
from clustersim.scenario import Scenario
from tests.results.trace_cases import (
    BACKWARD,
    FORWARD,
    KERNEL,
    OPTIMIZER_STEP,
    SpanEvent,
    TraceCase,
    collective_task,
    receive_task,
)
from tests.small_pipeline import simulate_pipeline


def test_mfu_matches_palm() -> None:
    """PaLM (arXiv:2204.02311), appendix B.

    540 B parameters, 118 layers, 48 heads of 256, sequence 2048, on 6144 TPU v4
    of 275 TFLOP/s at 238.3 thousand tokens/s: 46.2 % with attention, 45.7 % without.
    """
    tokens, ranks, peak = 238.3e3, 6144, 275e12
    attention = 12 * 118 * 48 * 256 * 2048
    with_attention = mfu((6 * 540e9 + attention) * tokens, step_time=1.0, gpu_count=ranks, peak=peak)
    without = mfu(6 * 540e9 * tokens, step_time=1.0, gpu_count=ranks, peak=peak)
    assert (round(with_attention, 3), round(without, 3)) == (0.462, 0.457)


def test_causal_mfu_leads_where_the_full_matrix_counts_a_tenth_more() -> None:
    """A million tokens: 56.6 % with attention as a full matrix, 29.1 % as its causal mask leaves it."""
    long, short = LeadingMfu.select(0.566, 0.291), LeadingMfu.select(0.412, 0.395)
    assert (long.value, long.is_causal) == (0.291, True)
    assert (short.value, short.is_causal) == (0.412, False)
    assert "causal" in long.name
    assert "causal" in long.attention_label
    assert "full matrix" in short.attention_label


@pytest.mark.parametrize(
    ("model", "sequence", "is_causal"),
    [("llama3-8b", 1_048_576, True), ("llama3-8b", 131_072, True), ("llama3-405b", 8192, False)],
)
def test_long_sequences_lead_with_causal_mfu(model: str, sequence: int, is_causal: bool) -> None:
    """FLOP of the published models: attention of 8B is most of them at a million tokens, of 405B 8 % at 8,192."""
    scenario = Scenario.from_mapping(
        {"model": model, "cluster": {"name": "dgx-h100", "gpus": 8}, "layout": {"tp": 8},
         "training": {"sequence": sequence, "global_batch": 1}}
    )  # fmt: skip
    flops = StepThroughput(scenario, 1.0, 8).model_flops
    assert LeadingMfu.select(flops.model, flops.causal).is_causal is is_causal


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_causal_utilization_is_physical_where_the_convention_is_not(recompute: str) -> None:
    """Kernels execute what the mask leaves: at the peak they would have an HFU of 1, and no step is faster."""
    result = simulate_pipeline("training.sequence=262144", f"training.recompute={recompute}")
    assert result.leading_mfu.is_causal
    assert result.leading_mfu.value == result.mfu_causal <= result.hfu_causal == result.leading_hfu < 1.0
    assert result.hfu_causal < result.hfu
    assert (result.hfu_causal == pytest.approx(result.mfu_causal)) is (recompute == "none")


def test_full_recomputation_makes_hfu_four_thirds_of_mfu() -> None:
    """Backward is two forwards, so model FLOP are three, and a second forward makes four."""
    arguments = {"step_time": 2.0, "gpu_count": 8, "peak": 1e15}
    assert hfu(3e15, 1e15, **arguments) == pytest.approx(4 / 3 * mfu(3e15, **arguments))  # type: ignore[arg-type]


def test_flops_and_token_rates() -> None:
    assert achieved_flops_per_gpu(8e15, step_time=2.0, gpu_count=4) == 1e15
    assert tokens_per_second(2048, 8192, 4.0) == 2048 * 8192 / 4


def test_fractions_are_of_the_step_time() -> None:
    events = (
        SpanEvent(receive_task(), 1, 2, -1, Stream.RECEIVE),
        SpanEvent(FORWARD, 2, 4, 0),
        SpanEvent(BACKWARD, 4, 7),
        SpanEvent(collective_task("dp"), 7, 9, -1, Stream.DP),
        SpanEvent(OPTIMIZER_STEP, 9, 10, 3),
    )
    case = TraceCase(events, has_pipeline=True)
    breakdown = compute_breakdown(case.trace_table, case.segment_timing)
    assert bubble_fraction(breakdown) == pytest.approx(0.1)
    assert exposed_fraction(breakdown) == pytest.approx(0.3)


def test_an_empty_trace_has_no_exposed_communication() -> None:
    case = TraceCase(())
    assert exposed_fraction(compute_breakdown(case.trace_table, case.segment_timing)) == 0.0


def test_recomputed_flops_are_those_of_matmuls_on_all_ranks() -> None:
    """Two runs on each of three ranks.

    A matmul of 1e9 FLOP, and an attention forward as a full matrix: 4 b q k h d = 4 * 2 * 8 * 8 * 3 * 5 = 7,680
    though the causal kernel does only (8 + 1)/(2 * 8) of it; the norm and what is not recomputed do not count.
    """
    shape = AttentionShape(batch=2, query=8, key=8, heads=3, kv_heads=3, head_dim=5, causal=True)
    attention = Kernel("core", KernelKind.ATTENTION_FORWARD, DType.BF16, 7680 * 9 / 16, 1.0, shape)
    norm = Kernel("norm", KernelKind.NORM, DType.BF16, 5e5, 1.0)
    recompute = WorkType.RECOMPUTE
    operations = (Operation(KERNEL, recompute), Operation(attention, recompute), Operation(norm, recompute))
    task = ComputeTask(Segment("layer", (*operations, Operation(KERNEL, WorkType.BACKWARD))))
    case = TraceCase((SpanEvent(task, 0, 1), SpanEvent(task, 1, 2)), (0, 0, 0))
    assert recomputed_flops_total(case.trace_table) == pytest.approx(2 * 3 * (1e9 + 7680))


def test_the_convention_is_stated() -> None:
    assert all(word in CONVENTION for word in ("PaLM", "logits", "full matrix", "recomputation", "dense peak"))
