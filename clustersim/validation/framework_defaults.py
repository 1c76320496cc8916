"""What does a run's software do that its publication does not say?

The `framework` column names the software; its habits are defaults of its code at that time, the same for every run. One
is inferred from measurements, for want of another source: the loss of Composer's benchmarks.
"""

import re
from dataclasses import dataclass, field, replace
from typing import Any, Final

from clustersim.model.framework import GraphCapture
from clustersim.validation.cases import CannotPredictError, Case
from clustersim.validation.training_precision import (
    BRIDGE,
    DELAYED,
    MEGATRON,
    NAMED,
    NEMO,
    TORCHAO,
    ZOO,
    Words,
    formats_of,
    is_narrow,
)

_DENSE: Final = ("", "0", "1")  # experts
_NO_OVERLAP: Final = "TP/PP/DP comm overlap OFF"  # as a row's notes say it
_COMPILED: Final = re.compile(r"(?:\+|torch\.)compile\b")  # "fsdp+compile", "torch.compile"
_GRAPHS: Final = re.compile(r"cuda_graph_impl=(?!none)|full-iteration CUDA graph")  # recipes' words, and cards'
# of mixtures: all but the experts, or so little that it is taken for nothing
_LAYERS: Final = re.compile(r"cuda_graph_scope=\[[^]]*'attn'|CUDA graphs attn\+")
_PARTS: Final = re.compile(r"cuda_graph_scope=\[[^]]*'moe_router'|CUDA graphs router")
_NOT_PIPELINED: Final = "nvfp4"
_MEGATRON_BUCKET: Final = "megatron"  # DistributedDataParallelConfig.bucket_size


@dataclass(frozen=True, slots=True)
class Software:
    """One framework at one time.

    wanted: part of the `framework` cell; until: last year of this generation; gpu: how the GPU's name begins, where a
    source ran another version on each; mixtures: it is how models with experts are run, and no others.
    pipeline_overlap: sends between stages run beside compute; data_overlap: so do gradient reductions, where a row does
    not say; tensor_overlap: tensor-parallel collectives are pipelined with their matmuls, but for NVFP4's, where a row
    does not say; backward_overlap: so do tensor-parallel collectives of backward; by_parameter: ZeRO-3 is DeepSpeed's
    of early 2021, by which arXiv:2104.04473 ran its three (`lowering.deepspeed_zero3`); fsdp2: ZeRO-3 is PyTorch's
    `fully_shard`; wide_gradients: bf16 runs keep and reduce gradients in fp32; attention: where a row states none;
    flash: the flash attention of its time; biased: GPT models have biases and dropout; bucket: of gradients that are
    not sharded; framework: in topologies/frameworks; eager: not compiled, unless a row says that it is; one_format:
    weights, gradients and moments are all in the compute format, without master weights; early_stop: recomputation runs
    until backward has what it needs, as that of compiled layers does in any case; logs_last_rank: what it logs of
    memory is its last rank's; release_outputs: of pipeline stages, where it is not as `framework` has it.

    whole_experts: no expert is cut, unless a row says so; fused_routing: experts are chosen and tokens copied by fused
    kernels, though the framework's defaults are others; balances: routers have a loss of their load, where the model's
    recipes have one; ends_count: embedding and logits count as a layer each where layers are split; captures: passes
    are in CUDA graphs, whatever notes say; words: what it means by words for formats with scales.
    """

    wanted: str
    until: int = 9999
    gpu: str = ""
    mixtures: bool = False
    pipeline_overlap: bool = True
    data_overlap: bool = True
    tensor_overlap: bool = False
    backward_overlap: bool = True
    by_parameter: bool = False
    fsdp2: bool = False
    wide_gradients: bool = True
    attention: str = "flash"
    flash: str = "flash"
    loss: str = "vocab_parallel"
    biased: bool = False
    bucket: str | None = None
    framework: str = "pytorch"
    eager: bool = False
    one_format: bool = False
    logs_last_rank: bool = False
    release_outputs: bool | None = None
    early_stop: bool = False
    whole_experts: bool = False
    fused_routing: bool = False
    balances: bool = False
    ends_count: bool = False
    captures: bool = False
    read: bool = True

    @property
    def known(self) -> bool:
        """Whether it is known what it does (`read`: its code was, not just what its words mean)."""
        return bool(self.wanted) and self.read

    words: Words = field(default_factory=lambda: NAMED)

    def fused(self, case: Case) -> bool:
        """Whether norms, activation, rotary, residual and optimizer are fused kernels: compiled, or written so."""
        return not self.eager or _compiled(case)

    def stops_early(self, case: Case) -> bool:
        """Whether recomputation runs only until backward has what it needs."""
        return self.early_stop or _compiled(case)

    def core(self, case: Case) -> str:
        """The attention core; `flash` in a row is the flash attention that the software had."""
        stated = case.text("attention") or self.attention
        return self.flash if stated == "flash" else stated

    def model(self, case: Case) -> dict[str, Any]:
        """What the model's layers are made of."""
        llama = case.text("family") == "llama" or case.text("mlp") == "swiglu"
        gpt = self.biased and not llama and "squared-ReLU" not in case.text("notes")
        learned = gpt or "learned position" in case.text("notes")
        return {
            "norm": "rmsnorm" if llama else "layernorm",
            "positions": "learned" if learned else "rotary",
            "linear_bias": gpt,
            "qkv_bias": gpt,
            "dropout": gpt,  # 0.1 in Megatron's and NeMo's GPT recipes
        }

    def data(self, case: Case) -> dict[str, Any]:
        """The strategy of data parallelism."""
        stage, hybrid = _zero_stage(case), _shards(case)
        overlap = case.is_yes("overlap_grad_reduce", self.data_overlap)
        if stage == 3 and self.by_parameter:
            return {"zero3_by_parameter": {}}
        if stage == 3:
            return {"hsdp" if hybrid else "fsdp": {"overlap": overlap, "copies": self.fsdp2, **hybrid}}
        if stage:
            return {"zero": {"stage": stage, "overlap": overlap, **hybrid}}
        return {"ddp": {"overlap": overlap, **({"bucket": self.bucket} if self.bucket else {})}}

    def overlaps_tensors(self, case: Case) -> bool:
        """Whether tensor-parallel collectives are pipelined with their matmuls."""
        notes, usual = case.text("notes"), self.tensor_overlap and case.text("precision") != _NOT_PIPELINED
        return usual or "tensor-parallel communication overlap on" in notes or "asyncTP" in notes

    def overlaps_backward(self, case: Case) -> bool:
        """Whether backward's tensor-parallel collectives run beside the gradients that do not need them."""
        return self.backward_overlap and _NO_OVERLAP not in case.text("notes")

    def overlaps_pipeline(self, case: Case) -> bool:
        """Whether sends between stages run beside compute."""
        return self.pipeline_overlap and _NO_OVERLAP not in case.text("notes")

    def releases(self) -> dict[str, bool]:
        """Whether stages free what they have sent, where the framework's file does not say it."""
        return {} if self.release_outputs is None else {"release_outputs": self.release_outputs}

    def host(self, case: Case) -> dict[str, Any]:
        """The framework, and whether a row's notes say that it captures CUDA graphs."""
        return {"name": self.framework, "cuda_graphs": self.captures or _captured(case)}

    def formats(self, case: Case) -> dict[str, str]:
        """What is computed in, and in what gradients and optimizer states are kept where they are not the usual."""
        said, wide = dict(formats_of(case, self.words)), wide_format(case)
        if self.one_format:
            return said | {"gradients": wide, "master": "none", "moments": wide}
        return said | {"gradients": "fp32" if wide == "bf16" and self.wide_gradients else wide}


_MEGATRON_2021: Final = Software(
    "megatron",
    until=2021,
    pipeline_overlap=False,
    data_overlap=False,
    backward_overlap=False,
    by_parameter=True,
    attention="standard",
    biased=True,
    bucket=_MEGATRON_BUCKET,
    flash="flash2",
    framework="megatron-2021",
    logs_last_rank=True,
)

_MEGATRON_2022: Final = replace(
    _MEGATRON_2021, until=2023, backward_overlap=True, by_parameter=False, framework="megatron-2022"
)

_NEMO: Final = Software(
    "nemo",
    wide_gradients=False,
    biased=True,
    bucket=_MEGATRON_BUCKET,
    framework="nemo",
    logs_last_rank=True,
    words=NEMO,
)

_BLOCKING: Final = Software(
    "aleph alpha", pipeline_overlap=False, data_overlap=False, backward_overlap=False, eager=True
)

# Its rows are inferred to use PyTorch's loss: small models, whose logits weigh most, take as much longer.
_COMPOSER: Final = Software(
    "composer", 2023, wide_gradients=False, loss="torch", eager=True, flash="flash1", early_stop=True, words=DELAYED
)
_TORCHTITAN: Final = Software(
    "torchtitan",
    fsdp2=True,
    backward_overlap=False,
    loss="torch",
    eager=True,
    flash="flash2",
    release_outputs=False,  # torch.distributed.pipelining keeps outputs in fwd_cache until their backward
    words=TORCHAO,
)

_MEGATRON: Final = Software(
    "megatron", biased=True, bucket=_MEGATRON_BUCKET, framework="megatron", logs_last_rank=True, words=MEGATRON
)
_BRIDGE: Final = replace(_NEMO, wanted="megatron-bridge", biased=False, words=BRIDGE)

# The first that matches; Megatron-LM keeps fp16 gradients of fp16 runs, fp32 of bf16 runs.
SOFTWARE: Final = (
    # llm-foundry's A100 tables are of July 2023 and earlier, those of H100 ran on PyTorch 2.1 (IMAGE in
    # scripts/train/benchmarking/sweep.sh), which stops early without `activation_checkpointing_reentrant`
    replace(_COMPOSER, gpu="a100", early_stop=False),
    _COMPOSER,
    # torchtitan turned it off for layers that are not compiled in August 2025 (its pull request 1580)
    replace(_TORCHTITAN, until=2025, early_stop=True),
    _TORCHTITAN,
    # torchtune's recipes (recipes/configs): dtype bf16, torch's AdamW, CEWithChunkedOutputLoss
    Software("torchtune", fsdp2=True, loss="chunked", eager=True, flash="flash2", one_format=True, early_stop=True),
    # foundation-model-stack/fms-fsdp: policy bfSixteen reduces in bf16 (fms_fsdp/policies/mixed_precision.py)
    Software("fms-fsdp", wide_gradients=False, loss="torch", eager=True, flash="flash2"),
    # thunder/benchmarks/benchmark_litgpt.py of lightning-thunder: weights, gradients and moments in bf16, torch's AdamW
    Software("litgpt", fsdp2=True, loss="torch", eager=True, flash="flash2", one_format=True),
    # Liger-Kernel's cross-entropy: one kernel each way (that it keeps no logits at all cannot be said yet)
    Software("liger", loss="fused"),
    # NeMo of 2022 is Megatron-LM's and Apex' code of its time; cuDNN's fast attention of Hopper came with cuDNN 9, 2024
    replace(_MEGATRON_2022, wanted="nemo", until=2022),
    replace(_NEMO, until=2023, flash="flash2"),
    # layers of Grok-1 with padded experts are captured on Blackwell (CUDA_GRAPH in grok1/launch.sh of
    # NVIDIA/dgxc-benchmarking v25.05, false on H100)
    replace(_NEMO, mixtures=True, gpu="gb200", captures=True),
    replace(_NEMO, mixtures=True, gpu="b200", captures=True),
    # NVIDIA/NeMo's performance recipes keep gradients in bf16 (grad_reduce_in_fp32 = False in scripts/performance)
    _NEMO,
    # its recipes of mixtures set expert_tensor_parallel_size to 1 (src/megatron/bridge/recipes), and all that were
    # timed grad_reduce_in_fp32 to False (scripts/performance/configs, recipes/moonlight)
    replace(_BRIDGE, mixtures=True, whole_experts=True, balances=True),
    # tp_comm_overlap of scripts/performance/configs/llama, which is False for nvfp4; cross_entropy_fusion_impl is "te",
    # Liger's kernel as Transformer Engine has it (scripts/performance/utils/overrides.py)
    replace(_BRIDGE, tensor_overlap=True, loss="fused"),
    # Megatron-LM overlaps backward's all-reduce since December 2021. Megatron-DeepSpeed took over that of before
    # (1ac4a442, 2021-12-10) and, with `async_tensor_model_parallel_allreduce` off, that of July 2023 (f90b8877).
    replace(
        _MEGATRON_2021, wanted="megatron-deepspeed", until=2023, by_parameter=False, framework="megatron-deepspeed"
    ),
    _MEGATRON_2021,
    _MEGATRON_2022,
    # nanotron: tp_linear_async_communication is off in the runs' configuration (huggingface/bench_cluster)
    Software("nanotron", pipeline_overlap=False, backward_overlap=False, eager=True),
    # InternEvo reduces gradients in their own format (solver/optimizer/hybrid_zero_optim.py)
    Software("internevo", wide_gradients=False),
    # Aleph-Alpha/scaling: all collectives and sends between stages block (core/nn/linear/utils.py, core/optimizer/
    # allreduce.py, core/nn/parallel_module/communicator.py); its runs differ in the kernel of their norms
    replace(_BLOCKING, wanted="aleph alpha scaling, fused norms", eager=False),
    _BLOCKING,
    # model_configs/benchmarking of yanring/Megatron-MoE-ModelZoo set --expert-tensor-parallel-size 1,
    # --account-for-embedding-in-pipeline-split, --account-for-loss-in-pipeline-split, --moe-permute-fusion,
    # --moe-router-fusion and --moe-aux-loss-coeff
    replace(
        _MEGATRON,
        wanted="megatron-core dev",
        whole_experts=True,
        fused_routing=True,
        balances=True,
        ends_count=True,
        words=ZOO,
    ),
    _MEGATRON,
    # XLA's products by Flax or Transformer Engine
    Software("maxtext", words=DELAYED, read=False),
    Software("paxml", words=DELAYED, read=False),
    Software(""),
)


def software_of(case: Case) -> Software:
    """The software of a run."""
    name = case.text("framework").lower()
    year = min(9999.0, float(case.text("year"))) if case.text("year").isdecimal() else 9999.0
    gpu, mixture = case.text("gpu"), has_experts(case)
    fitting = (
        software
        for software in SOFTWARE
        if software.wanted in name and year <= software.until and gpu.startswith(software.gpu)
    )
    return next(item for item in fitting if mixture or not item.mixtures)


def wide_format(case: Case) -> str:
    """The format of what has no scales."""
    return "bf16" if is_narrow(case) else case.text("precision")


def has_experts(case: Case) -> bool:
    """Whether a run trained a mixture of experts."""
    return case.text("experts") not in _DENSE


def _captured(case: Case) -> bool | str:
    """What of passes is in CUDA graphs."""
    notes = case.text("notes")
    if has_experts(case) and _LAYERS.search(notes):
        return GraphCapture.OUTSIDE_EXPERTS.value
    return _GRAPHS.search(notes) is not None and not (has_experts(case) and _PARTS.search(notes))


def _compiled(case: Case) -> bool:
    """Whether a row says that layers are compiled."""
    return _COMPILED.search(case.text("notes")) is not None


def _shards(case: Case) -> dict[str, int]:
    """Over how many ranks what is sharded is cut, where the rest are replicas of these."""
    replicas, ranks = case.whole("hsdp_replicas", 1), case.whole("dp", 1) * case.whole("cp", 1)
    if replicas == 1:
        return {}
    if ranks % replicas:
        raise CannotPredictError(f"hsdp_replicas {replicas} does not divide dp x cp {ranks}")
    return {"shard": ranks // replicas}


def _zero_stage(case: Case) -> int:
    return 0 if case.text("zero_stage") == "0" else case.whole("zero_stage", 0)
