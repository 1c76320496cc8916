"""z-loss: free in one-kernel losses, passes over FP32 logits beside PyTorch's cross-entropy."""

from typing import Any

import pytest

from clustersim import Scenario, simulate
from clustersim.build import build_plan
from clustersim.common.errors import ClusterSimError
from clustersim.memory.activations import Activations
from clustersim.model.kernels import MemoryBoundOp, MemoryBoundShape
from tests.laws.timelines import assert_same_trace

SEQUENCE, VOCAB = 2048, 32000
LOGITS = SEQUENCE * VOCAB


def scenario(loss: str, *, z_loss: bool = True, tp: int = 1) -> Scenario:
    """Two layers and a head."""
    model = {"layers": 2, "hidden": 1024, "heads": 8, "ffn": 4096, "vocab": VOCAB}
    training: dict[str, Any] = {"sequence": SEQUENCE, "global_batch": 1, "loss": loss, "z_loss": z_loss}
    cluster = {"name": "dgx-h100", "gpus": tp}
    return Scenario.from_mapping({"model": model, "cluster": cluster, "layout": {"tp": tp}, "training": training})


def z_bytes(built: Scenario, *, backward: bool) -> float:
    """Bytes that z-loss moves in one pass of the head."""
    operators = build_plan(built).head.operators
    kernels = [
        kernel for operator in operators for kernel in (operator.input_gradient if backward else operator.forward)
    ]
    return sum(
        kernel.bytes
        for kernel in kernels
        if isinstance(kernel.shape, MemoryBoundShape) and kernel.shape.routine is MemoryBoundOp.Z_LOSS
    )


@pytest.mark.parametrize("loss", ["fused", "compiled", "chunked", "fused_linear", "cut_cross_entropy"])
def test_one_kernel_losses_have_it_for_nothing(loss: str) -> None:
    traces = [simulate(scenario(loss, z_loss=flag)).trace for flag in (True, False)]
    assert_same_trace(*traces)


@pytest.mark.parametrize("loss", ["torch", "torch_fp32"])
def test_eager_logsumexp_reads_and_writes_logits_in_fp32(loss: str) -> None:
    """Maximum 1, difference 2, exponential 2, sum 1; backward difference, exponential, product 2 each, a sum of 3."""
    assert z_bytes(scenario(loss), backward=False) == 4 * LOGITS * (1 + 2 + 2 + 1)
    assert z_bytes(scenario(loss), backward=True) == 4 * LOGITS * (2 + 2 + 2 + 3)


def test_chunks_compute_it_twice() -> None:
    """Forward, and in backward again before its gradient."""
    assert z_bytes(scenario("chunked_nll"), backward=False) == 4 * LOGITS * 6
    assert z_bytes(scenario("chunked_nll"), backward=True) == 4 * LOGITS * (6 + 9)


@pytest.mark.parametrize(("loss", "saved"), [("torch", 4.0), ("torch_fp32", 0.0), ("fused", 0.0)])
def test_it_saves_fp32_logits_unless_they_are_kept(loss: str, saved: float) -> None:
    with_it, without = (Activations(build_plan(scenario(loss, z_loss=flag))).loss_saved_bytes for flag in (True, False))
    assert with_it - without == saved


@pytest.mark.parametrize(("loss", "tp", "words"), [("vocab_parallel", 1, "has none"), ("torch", 2, "several ranks")])
def test_losses_without_it_are_refused(loss: str, tp: int, words: str) -> None:
    with pytest.raises(ClusterSimError, match=words):
        scenario(loss, tp=tp)
