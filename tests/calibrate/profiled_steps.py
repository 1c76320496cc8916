"""Scenarios of the profiled steps in `tests/interop/traces`, and records of them.

Measured on H200 SXM (700 W, driver 580.159.04, PyTorch 2.11, cuDNN 9.19, Transformers 5.17): LlamaForCausalLM and
Qwen3MoeForCausalLM, loss with labels, backward, clip_grad_norm_, fused AdamW; weights, gradients and moments in bf16.
"""

from functools import cache
from pathlib import Path
from typing import Any

from calibrate.profile.record import ProfileRecord, record_from_profile
from clustersim.cost.calibration_record import (
    CalibrationRecord,
    DeviceInfo,
    MeasurementConditions,
    MemoryAnchor,
    ProfileAnchor,
)
from clustersim.interop.kineto import read_traces
from clustersim.model.training import AttentionBackend
from clustersim.scenario import Scenario

TRACES = Path(__file__).parents[1] / "interop" / "traces"
PURE_BF16 = {"compute": "bf16", "gradients": "bf16", "master": "bf16", "moments": "bf16"}
LLAMA: dict[str, Any] = {
    "model": {
        "name": "llama2-7b", "layers": 4, "hidden": 4096, "ffn": 11008, "heads": 32, "kv_heads": 32, "head_dim": 128,
        "vocab": 32000, "max_positions": 4096, "mlp": "swiglu", "norm": "rmsnorm", "positions": "rotary",
        "tied_embeddings": False, "linear_bias": False, "qkv_bias": False,
    },
    "cluster": {"name": "hgx-h200", "gpus": 1},
    "framework": "transformers",
    "training": {"sequence": 4096, "global_batch": 2, "microbatch": 2, "precision": PURE_BF16},
}  # fmt: skip
QWEN = {**LLAMA, "model": {"preset": "qwen3-30b-a3b", "layers": 2, "vocab": 32000}}
COMPILED = ("framework={name: transformers, torch_compile: true}",)
FSDP = ("cluster.gpus=8", "layout.dp=8", "layout.data=fsdp", "training.global_batch=16")
LIGER = ("training.fused=[norm, rotary, activation, optimizer]", "training.loss=fused")
FP8 = (*COMPILED, "training.precision.compute=fp8-rowwise")
CHANGES: dict[str, tuple[str, ...]] = {
    "h200_llama2_7b_4_layers": (),
    "h200_llama2_7b_4_layers_checkpointed": ("training.recompute=full",),
    "h200_llama2_7b_4_layers_compiled": COMPILED,
    "h200_llama2_7b_4_layers_liger": LIGER,
    "h200_llama2_7b_4_layers_fp8_rowwise": FP8,
    "h200_llama2_7b_4_layers_fake_fsdp2": FSDP,
    "h200_qwen3_30b_2_layers": (),
}


def llama(*changes: str) -> Scenario:
    """The dense model with changes."""
    return Scenario.from_mapping(LLAMA, default_name="llama", overrides=list(changes))


def scenario_of(trace: str) -> Scenario:
    """The scenario of a trace."""
    mapping = QWEN if "qwen" in trace else LLAMA
    return Scenario.from_mapping(mapping, default_name=trace, overrides=list(CHANGES[trace]))


@cache
def profile_of(trace: str) -> ProfileRecord:
    """The record of a trace."""
    return record_from_profile(read_traces(TRACES / f"{trace}.json.gz"), scenario_of(trace))


def record_with_memory(scenario: Scenario, memory: MemoryAnchor) -> CalibrationRecord:
    """A record that has nothing but memory."""
    device = DeviceInfo(scenario.cluster.accelerator.name, "")
    anchor = ProfileAnchor("traces", 1, 1, 1.0, 1.0, 1.0, AttentionBackend.SDPA, memory=memory)
    return CalibrationRecord(device, MeasurementConditions("", "", ""), profile=anchor)
