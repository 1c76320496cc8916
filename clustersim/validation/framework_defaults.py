"""What does a run's software do that its publication does not say? Defaults of training frameworks.

The `framework` column names the software; its defaults are those of its code at that time, the same for
every run. One is inferred from measurements for lack of another source: the loss of Composer's benchmarks.
"""

import re
from dataclasses import dataclass, field, replace
from typing import Any, Final

from clustersim.model.framework import GraphCapture
from clustersim.validation.cases import CannotPredictError, ValidationCase
from clustersim.validation.training_precision import (
    BRIDGE,
    BY_RECIPE_NAME,
    DELAYED_SCALING,
    MEGATRON,
    MOE_MODEL_ZOO,
    NEMO,
    TORCHAO,
    PrecisionConfigs,
    is_low_precision,
    training_precision,
)

_DENSE_EXPERT_CELLS: Final = ("", "0", "1")  # cells of column `experts` that mean a dense model
_NO_OVERLAP: Final = "TP/PP/DP comm overlap OFF"  # text in the notes
# "compile", "fsdp+compile", "torch.compile on", and AsyncTP, which needs compiled layers (CompileConfig.__post_init__
# in torchtitan/config/configs.py of pytorch/torchtitan); not "torch.compile off" or "WITHOUT torch.compile". Whole
# graphs of torchtitan's graph trainer are no match: without Inductor nothing is fused (experiments/graph_trainer).
_COMPILE_NOTE: Final = re.compile(
    r"(?<!without )(?:torch\.compile|\+ ?compile|(?:^|[;,] )compile)\b(?! off)|\basyncTP\b", re.IGNORECASE
)
_CUDA_GRAPH_NOTE: Final = re.compile(
    r"cuda_graph_impl=(?!none)|full-iteration CUDA graph"
)  # of recipes, of model cards
# MoE models: everything but the experts is captured, or so little that it counts as nothing
_ATTENTION_GRAPH_NOTE: Final = re.compile(r"cuda_graph_scope=\[[^]]*'attn'|CUDA graphs attn\+")
_ROUTER_GRAPH_NOTE: Final = re.compile(r"cuda_graph_scope=\[[^]]*'moe_router'|CUDA graphs router")
_NO_TP_OVERLAP_FORMAT: Final = "nvfp4"
_TP_OVERLAP_NOTE: Final = re.compile(r"tensor-parallel communication overlap (on|off)")
_GRADIENT_NOTE: Final = re.compile(r"\b(bf16|fp32) (?:main )?gradients\b")
_COMMIT_DATE: Final = re.compile(r"commit of (\d{4}-\d\d-\d\d)")
_CHUNKED_LOSS_NOTE: Final = "chunked cross entropy"  # of torchtitan's pull request 996, in which it is torchtune's
_FUSED_ADAM_NOTE: Final = re.compile(r"^fused AdamW; eager")
_FULL_SHARD: Final = 3  # ZeRO stage
_MEGATRON_BUCKET: Final = "megatron"  # DistributedDataParallelConfig.bucket_size


@dataclass(frozen=True, slots=True)
class FrameworkDefaults:
    """Defaults of one framework version.

    name_substring: substring of the lower-case `framework` cell; last_year: last year of this version;
    gpu_prefix: prefix of the GPU's name, where a source ran different versions on different GPUs; moe_only:
    applies to MoE models only.

    p2p_overlap: pipeline sends overlap with compute; p2p_needs_chunks: only those of interleaved pipelines do;
    grad_reduce_overlap: so do gradient reductions, unless the row says otherwise (those of ZeRO-3 always do);
    tp_comm_overlap: tensor-parallel collectives are pipelined with their matmuls (not NVFP4's, nor with LoRA's
    adapters), unless the row says otherwise; backward_tp_overlap: tensor-parallel collectives of backward
    overlap with the weight gradients; deepspeed_zero3: ZeRO-3 is DeepSpeed's of early 2021, with which
    arXiv:2104.04473 ran its three (`lowering.deepspeed_zero3`); fsdp2: ZeRO-3 is PyTorch's `fully_shard`;
    fp32_gradients: bf16 runs keep and reduce gradients in fp32; default_attention: where the row states
    none; flash_version: its flash attention, None: the framework file's; gpt_biases: GPT models have biases
    and dropout; bucket_size: bucket of gradients that are not sharded; framework: file in
    topologies/frameworks; is_described: that file says which kernels it runs; is_dated: its versions are
    dates; is_eager: not compiled, unless the row says so; uniform_precision: weights, gradients and moments
    are in the compute format, without master weights; early_stop: recomputation stops once backward has
    what it needs, as it does for compiled layers in any case; logs_last_rank: memory is logged by the last
    rank.

    unsharded_experts: expert tensor parallelism is 1, unless the row says otherwise; fused_routing: fused
    kernels for routing and permutation, though off by the framework's defaults; has_aux_loss: routers have a
    load-balancing loss where the model's recipes have one; counts_embedding_and_head: they count as one layer
    each in the pipeline split; uses_cuda_graphs: passes are in CUDA graphs, whatever the notes say;
    is_code_verified: its code was read, not just its number formats; precision_configs: meaning of its names of
    scaled formats.
    """

    name_substring: str
    last_year: int = 9999
    gpu_prefix: str = ""
    moe_only: bool = False
    p2p_overlap: bool = True
    p2p_needs_chunks: bool = False
    grad_reduce_overlap: bool = True
    tp_comm_overlap: bool = False
    backward_tp_overlap: bool = True
    deepspeed_zero3: bool = False
    fsdp2: bool = False
    fp32_gradients: bool = True
    default_attention: str = "flash"
    flash_version: str | None = "flash"
    loss: str = "vocab_parallel"
    gpt_biases: bool = False
    bucket_size: str | None = None
    framework: str = "pytorch"
    is_described: bool = False
    is_dated: bool = False
    is_eager: bool = False
    uniform_precision: bool = False
    logs_last_rank: bool = False
    early_stop: bool = False
    unsharded_experts: bool = False
    fused_routing: bool = False
    has_aux_loss: bool = False
    counts_embedding_and_head: bool = False
    uses_cuda_graphs: bool = False
    is_code_verified: bool = True

    @property
    def is_verified(self) -> bool:
        """Whether its behaviour is known (`is_code_verified`), not just its number formats."""
        return bool(self.name_substring) and self.is_code_verified

    precision_configs: PrecisionConfigs = field(default_factory=lambda: BY_RECIPE_NAME)

    def kernel_options(self, case: ValidationCase) -> dict[str, Any]:
        """`training.loss` and `training.fused`: what the row says, else the defaults; a file's own are left to it."""
        stated_loss = {"loss": "chunked"} if _CHUNKED_LOSS_NOTE in case.text("notes") else {}
        if self.is_described:
            return stated_loss | ({"fused": ["optimizer"]} if _FUSED_ADAM_NOTE.search(case.text("notes")) else {})
        return {"loss": self.loss, "fused": not self.is_eager or _is_compiled(case)} | stated_loss

    def early_stop_options(self, case: ValidationCase) -> dict[str, bool]:
        """`training.recompute.early_stop`: whether recomputation stops once backward has what it needs."""
        return {} if self.is_described else {"early_stop": self.early_stop or _is_compiled(case)}

    def attention_options(self, case: ValidationCase) -> dict[str, str]:
        """`training.attention`; `flash` in a row means the framework's flash attention at that time."""
        stated = case.text("attention") or self.default_attention
        backend = self.flash_version if stated == "flash" else stated
        return {} if backend is None else {"attention": backend}

    def model_options(self, case: ValidationCase) -> dict[str, Any]:
        """Layer options of the model: norm, position encoding, biases and dropout."""
        llama = case.text("family") == "llama" or case.text("mlp") == "swiglu"
        gpt = self.gpt_biases and not llama and "squared-ReLU" not in case.text("notes")
        learned = gpt or "learned position" in case.text("notes")
        return {
            "norm": "rmsnorm" if llama else "layernorm",
            "positions": "learned" if learned else "rotary",
            "linear_bias": gpt,
            "qkv_bias": gpt,
            "dropout": gpt,  # 0.1 in Megatron's and NeMo's GPT recipes
        }

    def data_parallel_config(self, case: ValidationCase) -> dict[str, Any]:
        """The data-parallel strategy, as `layout.data`."""
        stage, shard_options = _zero_stage(case), _shard_options(case)
        overlap = case.boolean("overlap_grad_reduce", self.grad_reduce_overlap or stage == _FULL_SHARD)
        if stage == _FULL_SHARD and self.deepspeed_zero3:
            return {"deepspeed_zero3": {}}
        if stage == _FULL_SHARD:
            return {"hsdp" if shard_options else "fsdp": {"overlap": overlap, "copies": self.fsdp2, **shard_options}}
        if stage:
            return {"zero": {"stage": stage, "overlap": overlap, **shard_options}}
        return {"ddp": {"overlap": overlap, **({"bucket": self.bucket_size} if self.bucket_size else {})}}

    def overlaps_tp_comm(self, case: ValidationCase) -> bool:
        """Whether tensor-parallel collectives are pipelined with their matmuls."""
        notes, has_lora = case.text("notes"), case.text("lora_rank") != ""
        by_default = self.tp_comm_overlap and not has_lora and case.text("precision") != _NO_TP_OVERLAP_FORMAT
        stated = _TP_OVERLAP_NOTE.search(notes)
        return "asyncTP" in notes or (stated[1] == "on" if stated else by_default)

    def overlaps_backward_tp(self, case: ValidationCase) -> bool:
        """Whether backward's tensor-parallel collectives overlap with the weight gradients."""
        return self.backward_tp_overlap and _NO_OVERLAP not in case.text("notes")

    def overlaps_p2p(self, case: ValidationCase) -> bool:
        """Whether sends between pipeline stages overlap with compute."""
        can_overlap = not self.p2p_needs_chunks or case.text("schedule") not in ("", "1f1b")
        return self.p2p_overlap and can_overlap and _NO_OVERLAP not in case.text("notes")

    def overheads_config(self, case: ValidationCase) -> dict[str, Any]:
        """`training.overheads`: the tensor parallelism of `framework: pytorch` is DTensor's; here it is another's."""
        is_sharded = self.framework == "pytorch" and case.positive_int("tp", 1) > 1
        return {"tensor_parallel_copies": False} if is_sharded else {}

    def framework_config(self, case: ValidationCase) -> dict[str, Any]:
        """The `framework` section, with the CUDA graphs that the row's notes state."""
        section = {"name": self.framework, "cuda_graphs": self.uses_cuda_graphs or _cuda_graph_scope(case)}
        if not self.is_described:
            return section
        date = _code_date(case) if self.is_dated else None
        return section | {"torch_compile": _is_compiled(case)} | ({} if date is None else {"version": date})

    def precision_config(self, case: ValidationCase) -> dict[str, str | int]:
        """`training.precision`: compute format, and non-default formats of gradients and optimizer states."""
        formats, high_precision = dict(training_precision(case, self.precision_configs)), high_precision_format(case)
        if self.uniform_precision:
            return formats | {"gradients": high_precision, "master": "none", "moments": high_precision}
        stated = _GRADIENT_NOTE.search(case.text("notes"))
        keeps_fp32 = high_precision == "bf16" and (stated[1] == "fp32" if stated else self.fp32_gradients)
        return formats | {"gradients": "fp32" if keeps_fp32 else high_precision}


_MEGATRON_2021: Final = FrameworkDefaults(
    "megatron",
    last_year=2021,
    p2p_overlap=False,
    grad_reduce_overlap=False,
    backward_tp_overlap=False,
    deepspeed_zero3=True,
    default_attention="standard",
    gpt_biases=True,
    bucket_size=_MEGATRON_BUCKET,
    flash_version="flash2",
    framework="megatron-2021",
    logs_last_rank=True,
)

_MEGATRON_2022: Final = replace(
    _MEGATRON_2021, last_year=2023, backward_tp_overlap=True, deepspeed_zero3=False, framework="megatron-2022"
)

# User buffers: NeMo's recipes of all models with tensor parallelism set tp_comm_overlap (nemo/collections/llm/recipes/
# {llama3_70b,llama31_405b,nemotron4_15b,nemotron4_340b,gpt3_175b}.py, v2.0.0 to v2.3.0; llama3_8b has none), and so do
# NVIDIA/dgxc-benchmarking's configurations since v24.11.1 (ub_tp_comm_overlap; nemotron and grok1 in configure.sh).
# Launcher configurations of 2023 do not (NeMo-Framework-Launcher, launcher_scripts/conf/training), nor LoRA's recipes
_NEMO: Final = FrameworkDefaults(
    "nemo",
    p2p_needs_chunks=True,  # nemo/lightning/pytorch/callbacks/megatron_comm_overlap.py, as Megatron Bridge's
    tp_comm_overlap=True,
    fp32_gradients=False,
    gpt_biases=True,
    bucket_size=_MEGATRON_BUCKET,
    framework="nemo",
    logs_last_rank=True,
    precision_configs=NEMO,
)

_ALEPH_ALPHA: Final = FrameworkDefaults(
    "aleph alpha", p2p_overlap=False, grad_reduce_overlap=False, backward_tp_overlap=False, is_eager=True
)

# PyTorch's loss is inferred: small models, whose logits weigh most, are slower by its cost.
_COMPOSER: Final = FrameworkDefaults(
    "composer",
    2023,
    fp32_gradients=False,
    loss="torch",
    is_eager=True,
    flash_version="flash1",
    early_stop=True,
    precision_configs=DELAYED_SCALING,
)
_TORCHTITAN: Final = FrameworkDefaults(
    "torchtitan",
    fsdp2=True,
    backward_tp_overlap=False,
    flash_version=None,
    framework="torchtitan",
    is_described=True,
    is_dated=True,
    precision_configs=TORCHAO,
)
# Hugging Face's Trainer with Accelerate, and what is built on it
_TRANSFORMERS: Final = FrameworkDefaults(
    "transformers",
    backward_tp_overlap=False,
    fp32_gradients=False,
    flash_version="flash2",
    framework="transformers",
    is_described=True,
)

# megatron/training/arguments.py: --overlap-grad-reduce (2d5220a4, 2023-08-16) is off unless given; overlap_p2p_comm is
# the default since 2023-10-12 (4eeff55d), and set to False for pipelines that are not interleaved
_MEGATRON: Final = FrameworkDefaults(
    "megatron",
    grad_reduce_overlap=False,
    p2p_needs_chunks=True,
    gpt_biases=True,
    bucket_size=_MEGATRON_BUCKET,
    framework="megatron",
    logs_last_rank=True,
    precision_configs=MEGATRON,
)
_BRIDGE: Final = replace(
    _NEMO, name_substring="megatron-bridge", gpt_biases=False, tp_comm_overlap=False, precision_configs=BRIDGE
)

# The first match applies; Megatron-LM keeps fp16 gradients in fp16 runs, fp32 gradients in bf16 runs.
FRAMEWORKS: Final = (
    # llm-foundry's A100 tables are of July 2023 and earlier, those of H100 ran on PyTorch 2.1 (IMAGE in
    # scripts/train/benchmarking/sweep.sh), which stops early without `activation_checkpointing_reentrant`
    replace(_COMPOSER, gpu_prefix="a100", early_stop=False),
    _COMPOSER,
    # FlashAttention-2 before cuDNN until 2025-10-09, except on GPUs of compute capability 10.0 (pull request 1196)
    *(replace(_TORCHTITAN, flash_version="flash", gpu_prefix=gpu) for gpu in ("b200", "gb200", "b300", "gb300")),
    _TORCHTITAN,
    _TRANSFORMERS,
    replace(_TRANSFORMERS, name_substring="accelerate"),
    replace(_TRANSFORMERS, name_substring="ms-swift"),
    # torchtune's recipes (recipes/configs): dtype bf16, torch's AdamW, CEWithChunkedOutputLoss
    FrameworkDefaults(
        "torchtune",
        fsdp2=True,
        loss="chunked",
        is_eager=True,
        flash_version="flash2",
        uniform_precision=True,
        early_stop=True,
    ),
    # Llama 3's: PyTorch's FSDP, which adds each microbatch's gradient to FP32 sums (arXiv:2407.21783, section 3.3.2)
    FrameworkDefaults("in-house (pytorch)", fsdp2=True, is_code_verified=False),
    # foundation-model-stack/fms-fsdp: policy bfSixteen reduces in bf16 (fms_fsdp/policies/mixed_precision.py)
    FrameworkDefaults("fms-fsdp", fp32_gradients=False, loss="torch", is_eager=True, flash_version="flash2"),
    # thunder/benchmarks/benchmark_litgpt.py of lightning-thunder: weights, gradients and moments in bf16, torch's AdamW
    FrameworkDefaults(
        "litgpt", fsdp2=True, loss="torch", is_eager=True, flash_version="flash2", uniform_precision=True
    ),
    # Liger-Kernel's apply_liger_kernel_to_llama: fused_linear_cross_entropy=True
    FrameworkDefaults("liger", loss="fused_linear"),
    # NeMo of 2022 is Megatron-LM's and Apex' code of its time; cuDNN's fast attention of Hopper came with cuDNN 9, 2024
    replace(_MEGATRON_2022, name_substring="nemo", last_year=2022),
    replace(_NEMO, last_year=2023, flash_version="flash2", tp_comm_overlap=False),
    # layers of Grok-1 with padded experts are captured on Blackwell (CUDA_GRAPH in grok1/launch.sh of
    # NVIDIA/dgxc-benchmarking v25.05, false on H100)
    replace(_NEMO, moe_only=True, gpu_prefix="gb200", uses_cuda_graphs=True),
    replace(_NEMO, moe_only=True, gpu_prefix="b200", uses_cuda_graphs=True),
    # NVIDIA/NeMo's performance recipes keep gradients in bf16 (grad_reduce_in_fp32 = False in scripts/performance)
    _NEMO,
    # its MoE recipes set expert_tensor_parallel_size to 1 (src/megatron/bridge/recipes), and all that were
    # timed grad_reduce_in_fp32 to False (scripts/performance/configs, recipes/moonlight)
    replace(_BRIDGE, moe_only=True, unsharded_experts=True, has_aux_loss=True),
    # tp_comm_overlap of scripts/performance/configs/llama, which is False for nvfp4; cross_entropy_fusion_impl is "te",
    # Liger's kernel as Transformer Engine has it (scripts/performance/utils/overrides.py)
    replace(_BRIDGE, tp_comm_overlap=True, loss="fused"),
    # Megatron-LM overlaps backward's all-reduce since December 2021. Megatron-DeepSpeed took over that of before
    # (1ac4a442, 2021-12-10) and, with `async_tensor_model_parallel_allreduce` off, that of July 2023 (f90b8877).
    replace(
        _MEGATRON_2021,
        name_substring="megatron-deepspeed",
        last_year=2023,
        deepspeed_zero3=False,
        framework="megatron-deepspeed",
    ),
    _MEGATRON_2021,
    _MEGATRON_2022,
    # nanotron: tp_linear_async_communication is off in the runs' configuration (huggingface/bench_cluster)
    FrameworkDefaults("nanotron", p2p_overlap=False, backward_tp_overlap=False, is_eager=True),
    # InternEvo reduces gradients in their own format (solver/optimizer/hybrid_zero_optim.py)
    FrameworkDefaults("internevo", fp32_gradients=False),
    # Aleph-Alpha/scaling: all collectives and sends between stages block (core/nn/linear/utils.py, core/optimizer/
    # allreduce.py, core/nn/parallel_module/communicator.py); its runs differ in the kernel of their norms
    replace(_ALEPH_ALPHA, name_substring="aleph alpha scaling, fused norms", is_eager=False),
    _ALEPH_ALPHA,
    # model_configs/benchmarking of yanring/Megatron-MoE-ModelZoo set --expert-tensor-parallel-size 1,
    # --account-for-embedding-in-pipeline-split, --account-for-loss-in-pipeline-split, --moe-permute-fusion,
    # --moe-router-fusion and --moe-aux-loss-coeff
    replace(
        _MEGATRON,
        name_substring="megatron-core dev",
        unsharded_experts=True,
        fused_routing=True,
        has_aux_loss=True,
        counts_embedding_and_head=True,
        precision_configs=MOE_MODEL_ZOO,
    ),
    _MEGATRON,
    # XLA matmuls through Flax or Transformer Engine
    FrameworkDefaults("maxtext", precision_configs=DELAYED_SCALING, is_code_verified=False),
    FrameworkDefaults("paxml", precision_configs=DELAYED_SCALING, is_code_verified=False),
    FrameworkDefaults(""),
)


def framework_defaults(case: ValidationCase) -> FrameworkDefaults:
    """The defaults of a run's software."""
    name = case.text("framework").lower()
    year = min(9999.0, float(case.text("year"))) if case.text("year").isdecimal() else 9999.0
    gpu, is_moe = case.text("gpu"), has_experts(case)
    candidates = (
        defaults
        for defaults in FRAMEWORKS
        if defaults.name_substring in name and year <= defaults.last_year and gpu.startswith(defaults.gpu_prefix)
    )
    return next(defaults for defaults in candidates if is_moe or not defaults.moe_only)


def high_precision_format(case: ValidationCase) -> str:
    """The format of tensors that are not quantized."""
    return "bf16" if is_low_precision(case) else case.text("precision")


def has_experts(case: ValidationCase) -> bool:
    """Whether a run trained an MoE model."""
    return case.text("experts") not in _DENSE_EXPERT_CELLS


def _cuda_graph_scope(case: ValidationCase) -> bool | str:
    """What is captured in CUDA graphs: everything (True), nothing (False), or a scope."""
    notes = case.text("notes")
    if has_experts(case) and _ATTENTION_GRAPH_NOTE.search(notes):
        return GraphCapture.OUTSIDE_EXPERTS.value
    return _CUDA_GRAPH_NOTE.search(notes) is not None and not (has_experts(case) and _ROUTER_GRAPH_NOTE.search(notes))


def _code_date(case: ValidationCase) -> str | None:
    """Date of the code: that of the commit in the notes, else the middle of the row's year; None: not stated."""
    stated, year = _COMMIT_DATE.search(case.text("notes")), case.text("year")
    return stated[1] if stated else f"{year}-07-01" if year else None


def _is_compiled(case: ValidationCase) -> bool:
    """Whether the row says that layers are compiled."""
    return _COMPILE_NOTE.search(case.text("notes")) is not None


def _shard_options(case: ValidationCase) -> dict[str, int]:
    """The shard group size of HSDP, where the row states replicas."""
    replicas, ranks = case.positive_int("hsdp_replicas", 1), case.positive_int("dp", 1) * case.positive_int("cp", 1)
    if replicas == 1:
        return {}
    if ranks % replicas:
        raise CannotPredictError(f"hsdp_replicas {replicas} does not divide dp x cp {ranks}")
    return {"shard": ranks // replicas}


def _zero_stage(case: ValidationCase) -> int:
    return 0 if case.text("zero_stage") == "0" else case.positive_int("zero_stage", 0)
