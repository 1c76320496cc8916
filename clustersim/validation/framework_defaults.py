"""What does a run's software do that its publication does not say? Defaults of training frameworks.

The `framework` column names the software; its defaults are those of its code at that time, the same for
every run. Which kernels it runs is in its file (topologies/frameworks), so that a scenario says nothing of them;
here is what such a file does not say: how it lays a run out, and of which version the run is. Of software without
a file the scenario says nothing: it is what a user would get who does not know either, the default framework.
"""

import re
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Final

from clustersim.model.framework import GraphCapture
from clustersim.model.overheads import RingAttention
from clustersim.model.training import FusedKernel
from clustersim.scenario.model_recipes import ModelRecipes, load_model_recipes
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
_FUSED_LOSS_NOTE: Final = "fused cross entropy"  # Megatron-LM's --cross-entropy-loss-fusion, whose default is native
_ADDED_NOTE: Final = "no gradient accumulation fusion"  # Megatron-LM's --no-gradient-accumulation-fusion
_DROPOUT_NOTE: Final = "dropout of 0.1"
_UNSCANNED_NOTE: Final = "layers are not scanned"  # USE_REPEATED_LAYER of Praxis is off
_WITH_TRANSFORMER_ENGINE: Final = ("megatron", "nemo")
_TRANSFORMER_ENGINE_2_3: Final = 2025  # which first kept weight gradients
_FUSED_LINEAR_NOTE: Final = "fused linear cross entropy"
_CHUNKED_NLL_NOTE: Final = "chunked_nll"  # TRL's name
# of the notes and of the model: Moonlight and finetuning of MoE models have no performance recipes in Megatron Bridge
_LIBRARY_RECIPE: Final = re.compile(r"^Moonlight|\bSFT\b|library recipe")
_FLASH_NOTE: Final = re.compile(r"\bFlashAttention-([34])\b")
_FLASH_BACKENDS: Final = {"3": "flash3", "4": "flash4"}
_LIGER_NOTE: Final = "Liger kernels"
_LIGER_RELEASE: Final = re.compile(rf"{_LIGER_NOTE} (\d+\.\d+\.\d+)")
_FLA_NOTE: Final = "flash-linear-attention's own trainer"
# Of both: linkedin/Liger-Kernel, apply_liger_kernel_to_llama (transformers/monkey_patch.py), rope, rms_norm, swiglu and
# fused_linear_cross_entropy are True; fla/models: fuse_norm, fuse_swiglu and the rotary embedding of fla/modules are on
# by default, with DeepSpeed's FusedAdam
_KERNEL_LIBRARY_FUSES: Final = ("norm", "rotary", "activation", "optimizer")
_FUSED_ADAM_NOTE: Final = re.compile(r"(?:^|; )fused AdamW; (eager|torch\.compile)")
# the loss is inside what torch.compile gets (KellerJordan/modded-nanogpt and karpathy/nanoGPT, forward of GPT)
_COMPILED_LOSS_NOTE: Final = "compiled loss"
_AUTOCAST_NOTE: Final = "autocast of fp32 weights"
_FOREACH_ADAM_NOTE: Final = "foreach AdamW; eager"
_UNIFORM_NOTE: Final = "weights, gradients and moments in bf16"
# What a row of a container of NVIDIA's performance tables (`25.11 container` in its locator), or whose notes say
# `recipe defaults` (a model card, whose commit follows the newest version), does not state is its recipe's
# (topologies/model_recipes). Rows whose notes list a recipe's settings (`recipe QWEN3_30B_... @ v0.4.1: ...`) state
# all of them.
_CONTAINER: Final = re.compile(r"\b(\d\d\.\d\d(?:\.\d\d)?) container\b")
_DEFAULTS_NOTE: Final = "recipe defaults"
_STATED_RECIPE: Final = re.compile(r"\brecipe \S* ?@ (v[\d.]+)")
_FULL_SHARD: Final = 3  # ZeRO stage
_SIMPLE_FSDP_NOTE: Final = "SimpleFSDP without bucketing"
_SIMPLE_FSDP: Final = {"overlap": False, "copies": False, "single_parameters": True}


@dataclass(frozen=True, slots=True)
class FrameworkDefaults:
    """Defaults of one framework version.

    name_substring: substring of the lower-case `framework` cell; last_year: last year of this version;
    gpu_prefix: prefix of the GPU's name, where a source ran different versions on different GPUs; moe_only:
    applies to MoE models only.

    framework: file in topologies/frameworks, None: none describes it; version: of that file; is_dated: the version
    is the date of the row's code; compiles_programs: a compiler of whole programs (XLA) chooses its kernels, so that
    the file says only what is known without a run; recipe: of that file; has_library_runs: some rows ran recipe
    `library` of it.

    tp_comm_overlap: tensor-parallel collectives are pipelined with their matmuls (not NVFP4's, nor with LoRA's
    adapters), unless the row says otherwise; backward_tp_overlap: whether tensor-parallel collectives of backward
    overlap with the weight gradients, None: as the file says; deepspeed_zero3: ZeRO-3 is DeepSpeed's of early 2021,
    with which arXiv:2104.04473 ran its three (`lowering.deepspeed_zero3`); flash_version: what a row calls flash
    attention, None: the file's; ring_attention: None: as the file says; gpt_biases, gpt_dropout: GPT models have
    biases, and if so dropout; uniform_precision: weights, gradients and moments are in the compute format, without
    master weights; reduces_in_fp32: but gradients are reduced in FP32; logs_last_rank: memory is logged by the last
    rank.

    unsharded_experts: expert tensor parallelism is 1, unless the row says otherwise; fused_routing: fused
    kernels for routing and permutation, though off by the framework's defaults; has_aux_loss: routers have a
    load-balancing loss where the model's recipes have one; counts_embedding_and_head: they count as one layer
    each in the pipeline split; uses_cuda_graphs: passes are in CUDA graphs, whatever the notes say;
    numa_binding: ranks are bound to NUMA nodes, though no recipe says so;
    precision_configs: meaning of its names of scaled formats.
    """

    name_substring: str
    last_year: int = 9999
    gpu_prefix: str = ""
    moe_only: bool = False
    tp_comm_overlap: bool = False
    backward_tp_overlap: bool | None = None
    deepspeed_zero3: bool = False
    flash_version: str | None = None
    ring_attention: RingAttention | None = None
    gpt_biases: bool = False
    gpt_dropout: bool = True
    framework: str | None = None
    version: str | None = None
    recipe: str | None = None
    has_library_runs: bool = False
    is_dated: bool = False
    compiles_programs: bool = False
    uniform_precision: bool = False
    reduces_in_fp32: bool = False
    logs_last_rank: bool = False
    unsharded_experts: bool = False
    fused_routing: bool = False
    has_aux_loss: bool = False
    counts_embedding_and_head: bool = False
    uses_cuda_graphs: bool = False
    numa_binding: bool = False
    precision_configs: PrecisionConfigs = field(default_factory=lambda: BY_RECIPE_NAME)

    @property
    def is_verified(self) -> bool:
        """Whether what it runs is known: a file describes it, and no compiler of programs chooses it."""
        return self.framework is not None and not self.compiles_programs

    def without_software(self) -> "FrameworkDefaults":
        """What is left where nobody says which software runs: the layers of the model and the meaning of formats."""
        return replace(FRAMEWORKS[-1], gpt_biases=self.gpt_biases, precision_configs=self.precision_configs)

    def kernel_options(self, case: ValidationCase) -> dict[str, Any]:
        """`training.loss` and `training.fused`, where the row says what is not the software's default."""
        notes = case.text("notes")
        if _LIGER_NOTE in notes:
            return {"loss": _liger_loss(notes), "fused": [*_KERNEL_LIBRARY_FUSES]}
        stated_loss = {"loss": "chunked"} if _CHUNKED_LOSS_NOTE in notes else {}
        stated_loss |= {"loss": "fused_linear"} if _FUSED_LINEAR_NOTE in notes else {}
        stated_loss |= {"loss": "chunked_nll"} if _CHUNKED_NLL_NOTE in notes else {}
        stated_loss |= {"loss": "compiled"} if _COMPILED_LOSS_NOTE in notes else {}
        if _FLA_NOTE in notes:
            return stated_loss | {"fused": [*_KERNEL_LIBRARY_FUSES]}
        if _FOREACH_ADAM_NOTE in notes:
            return stated_loss | {"fused": []}
        return stated_loss | _fused_by_adam_note(notes)

    def kernel_overheads(self, case: ValidationCase) -> dict[str, Any]:
        """`training.overheads`, where the row's kernels differ from the software's."""
        by_note: dict[str, dict[str, bool | str]] = {
            _LIGER_NOTE: {"activation_in_place": True},
            _AUTOCAST_NOTE: {"autocast": True},
            _FUSED_LOSS_NOTE: {"softmax_copy": True},
            _ADDED_NOTE: {"accumulation": "added"},
            _UNSCANNED_NOTE: {"scan_copies": False},
        }
        stated = (values.items() for note, values in by_note.items() if note in case.text("notes"))
        has_old_engine = self.framework in _WITH_TRANSFORMER_ENGINE and _year(case) < _TRANSFORMER_ENGINE_2_3
        return ({"keeps_weight_gradients": False} if has_old_engine else {}) | dict(chain.from_iterable(stated))

    def attention_options(self, case: ValidationCase) -> dict[str, str]:
        """`training.attention`; `flash` in a row means the framework's flash attention at that time."""
        stated, noted = case.text("attention"), _FLASH_NOTE.search(case.text("notes"))
        backend = _FLASH_BACKENDS[noted[1]] if noted else self.flash_version if stated == "flash" else stated
        return {"attention": backend} if backend else {}

    def model_options(self, case: ValidationCase) -> dict[str, Any]:
        """Layer options of the model: norm, position encoding, biases and dropout."""
        llama, notes = case.text("family") == "llama" or case.text("mlp") == "swiglu", case.text("notes")
        gpt = self.gpt_biases and not llama and "squared-ReLU" not in notes
        learned = gpt or "learned position" in notes
        return {
            "norm": "rmsnorm" if llama else "layernorm",
            "positions": "learned" if learned else "rotary",
            "linear_bias": gpt,
            "qkv_bias": gpt,
            # 0.1 in Megatron's and NeMo's GPT recipes
            "dropout": gpt and (self.gpt_dropout or _DROPOUT_NOTE in notes),
        }

    def data_parallel_config(self, case: ValidationCase) -> dict[str, Any]:
        """The data-parallel strategy, as `layout.data`."""
        stage, shard_options = _zero_stage(case), _shard_options(case)
        if stage == _FULL_SHARD and self.deepspeed_zero3:
            return {"deepspeed_zero3": {}}
        overlap = {"overlap": case.boolean("overlap_grad_reduce")} if case.text("overlap_grad_reduce") else {}
        if stage == _FULL_SHARD:
            stated = _SIMPLE_FSDP if _SIMPLE_FSDP_NOTE in case.text("notes") else {}
            return {"hsdp" if shard_options else "fsdp": overlap | stated | shard_options}
        if stage:
            return {"zero": {"stage": stage, **overlap, **_gather_options(case), **shard_options}}
        return {"ddp": overlap}

    def overlaps_tp_comm(self, case: ValidationCase) -> bool:
        """Whether tensor-parallel collectives are pipelined with their matmuls."""
        notes, has_lora = case.text("notes"), case.text("lora_rank") != ""
        by_default = self.tp_comm_overlap and not has_lora and case.text("precision") != _NO_TP_OVERLAP_FORMAT
        stated = _TP_OVERLAP_NOTE.search(notes)
        return "asyncTP" in notes or (stated[1] == "on" if stated else by_default)

    def overlap_options(self, case: ValidationCase) -> dict[str, bool]:
        """Whether backward's tensor-parallel collectives and sends overlap, where it is not as the software has it."""
        if _NO_OVERLAP in case.text("notes"):
            return {"async_tensor_model_parallel_allreduce": False, "overlap_p2p_comm": False}
        stated = self.backward_tp_overlap
        return {} if stated is None else {"async_tensor_model_parallel_allreduce": stated}

    def framework_config(self, case: ValidationCase) -> dict[str, Any]:
        """The `framework` section, with the CUDA graphs and the compiler that the row's notes state."""
        version = self.version or (_code_date(case) if self.is_dated else None)
        stated = {
            "name": self.framework,
            "version": self._release(case) or version,
            "recipe": self._recipe(case),
            "cuda_graphs": self.uses_cuda_graphs or _cuda_graph_scope(case),
            "numa_binding": self.numa_binding,
            "torch_compile": _is_compiled(case),
        }
        section = {key: value for key, value in stated.items() if value}
        states_graphs = self.has_model_recipes and not self.leaves_to_recipe(case)
        return {"cuda_graphs": False} | section if states_graphs else section

    @property
    def _model_recipes(self) -> ModelRecipes | None:
        return load_model_recipes(self.framework) if self.framework and self.moe_only else None

    @property
    def has_model_recipes(self) -> bool:
        """Whether what its recipes set for a model is known."""
        return self._model_recipes is not None

    def leaves_to_recipe(self, case: ValidationCase) -> bool:
        """Whether a row leaves what it does not state to its recipe, of a version that is known."""
        return self._release(case) is not None and not _STATED_RECIPE.search(case.text("notes"))

    def _release(self, case: ValidationCase) -> str | None:
        """The version of its recipes that a row ran; None: unknown."""
        if self._model_recipes is None:
            return None
        versions, notes = self._model_recipes.versions, case.text("notes")
        container, recipe = _CONTAINER.search(case.text("locator")), _STATED_RECIPE.search(notes)
        by_tag = {entry["tag"]: version for version, entry in versions.items()}
        newest = [*versions][-1] if _DEFAULTS_NOTE in notes else None
        release = container[1] if container else by_tag.get(recipe[1]) if recipe else newest
        return release if release in versions else None

    def _recipe(self, case: ValidationCase) -> str | None:
        """The recipe, `library` where the row says so or its model has no other."""
        described = f"{case.text('model')} {case.text('notes')}"
        is_library_recipe = self.has_library_runs and _LIBRARY_RECIPE.search(described)
        return "library" if is_library_recipe else self.recipe

    def precision_config(self, case: ValidationCase) -> dict[str, str | int]:
        """`training.precision`: compute format, and non-default formats of gradients and optimizer states."""
        formats, high_precision = dict(training_precision(case, self.precision_configs)), high_precision_format(case)
        if self.uniform_precision or _UNIFORM_NOTE in case.text("notes"):
            reduced = {} if self.reduces_in_fp32 else {"gradients": high_precision}
            return formats | reduced | {"master": "none", "moments": high_precision}
        stated = _GRADIENT_NOTE.search(case.text("notes"))
        if high_precision != "bf16":
            return formats | {"gradients": high_precision}
        return formats | ({"gradients": stated[1]} if stated else {})


# --use-flash-attn since 285068c8 (2023-01-11), by flash_attn_unpadded_func, FlashAttention-1's, alone until 2023-07-19
# (1a03e5d0: megatron/model/transformer.py of NVIDIA/Megatron-LM)
_MEGATRON_2021: Final = FrameworkDefaults(
    "megatron",
    last_year=2021,
    framework="megatron-2021",
    deepspeed_zero3=True,
    gpt_biases=True,
    flash_version="flash1",
    logs_last_rank=True,
)
_MEGATRON_2022: Final = replace(_MEGATRON_2021, last_year=2023, deepspeed_zero3=False, framework="megatron-2022")

# User buffers: NeMo's recipes of all models with tensor parallelism set tp_comm_overlap (nemo/collections/llm/recipes/
# {llama3_70b,llama31_405b,nemotron4_15b,nemotron4_340b,gpt3_175b}.py, v2.0.0 to v2.3.0; llama3_8b has none), and so do
# NVIDIA/dgxc-benchmarking's configurations since v24.11.1 (ub_tp_comm_overlap; nemotron and grok1 in configure.sh).
# Launcher configurations of 2023 do not (NeMo-Framework-Launcher, launcher_scripts/conf/training), nor LoRA's recipes
_NEMO: Final = FrameworkDefaults(
    "nemo",
    framework="nemo",
    recipe="performance",
    tp_comm_overlap=True,
    gpt_biases=True,
    logs_last_rank=True,
    precision_configs=NEMO,
)
_ALEPH_ALPHA: Final = FrameworkDefaults(
    "aleph alpha",
    framework="aleph-alpha-scaling",
)
_COMPOSER: Final = FrameworkDefaults("composer", framework="composer", is_dated=True, precision_configs=DELAYED_SCALING)
_TORCHTITAN: Final = FrameworkDefaults(
    "torchtitan",
    framework="torchtitan",
    is_dated=True,
    precision_configs=TORCHAO,
)
_TRANSFORMERS: Final = FrameworkDefaults("transformers", framework="transformers")
# runs of until 2025 had PyTorch 2.10 or older
_TRANSFORMERS_2025: Final = replace(_TRANSFORMERS, last_year=2025, version="4.57")
_DEEPSPEED: Final = FrameworkDefaults(
    "deepspeed",
    framework="deepspeed",
)
_DEEPSPEED_2025: Final = replace(_DEEPSPEED, last_year=2025, version="0.18")
_MEGATRON: Final = FrameworkDefaults(
    "megatron",
    framework="megatron",
    gpt_biases=True,
    logs_last_rank=True,
    precision_configs=MEGATRON,
)
_BRIDGE: Final = replace(
    _NEMO,
    name_substring="megatron-bridge",
    framework="megatron-bridge",
    gpt_biases=False,
    tp_comm_overlap=False,
    precision_configs=BRIDGE,
)

# USE_BIAS and TRAINABLE_POSITION_EMB of GPT126MBase in google/paxml, paxml/contrib/gpu/scripts_gpu/configs.py
_PAXML: Final = FrameworkDefaults(
    "paxml",
    framework="paxml",
    version="24.04",
    compiles_programs=True,
    gpt_biases=True,
    gpt_dropout=False,
    precision_configs=DELAYED_SCALING,
)

# The first match applies; Megatron-LM keeps fp16 gradients in fp16 runs, fp32 gradients in bf16 runs.
FRAMEWORKS: Final = (
    _COMPOSER,
    # FlashAttention-2 before cuDNN until 2025-10-09, except on GPUs of compute capability 10.0 (pull request 1196)
    *(replace(_TORCHTITAN, flash_version="flash", gpu_prefix=gpu) for gpu in ("b200", "gb200", "b300", "gb300")),
    _TORCHTITAN,
    replace(_DEEPSPEED_2025, name_substring="transformers + deepspeed"),
    replace(_DEEPSPEED, name_substring="transformers + deepspeed"),
    # weights are converted to bf16 (profiling/benchmark.py), in which FSDP reduces (vectorlm/utils/model_utils.py)
    FrameworkDefaults("vectorlm", framework="vectorlm", uniform_precision=True),
    _TRANSFORMERS_2025,
    replace(_TRANSFORMERS, name_substring="transformers 5.17", version="5.17"),
    _TRANSFORMERS,
    replace(_TRANSFORMERS_2025, name_substring="accelerate", framework="accelerate", version="1.12"),
    replace(_TRANSFORMERS, name_substring="accelerate", framework="accelerate"),
    replace(_TRANSFORMERS_2025, name_substring="ms-swift"),
    replace(_TRANSFORMERS, name_substring="ms-swift"),
    # dtype is bf16 in its recipes (recipes/configs)
    FrameworkDefaults("torchtune", framework="torchtune", uniform_precision=True),
    FrameworkDefaults("fms-fsdp", framework="fms-fsdp"),
    # thunder/benchmarks/benchmark_litgpt.py of lightning-thunder: weights, gradients and moments in bf16
    FrameworkDefaults("litgpt", framework="litgpt", uniform_precision=True),
    FrameworkDefaults("olmo-core", framework="olmo-core"),
    FrameworkDefaults("open_lm", framework="open-lm"),
    FrameworkDefaults("tinyllama", framework="tinyllama"),
    FrameworkDefaults("fast-llm", framework="fast-llm"),
    # weights are converted to bf16, gradients reduced in FP32: build_parallel_model and default_mp_policy of its
    # distributed/parallel.py
    FrameworkDefaults("kempnerforge", framework="kempnerforge", uniform_precision=True, reduces_in_fp32=True),
    FrameworkDefaults("paddle", framework="paddle"),
    # one all-reduce or reduce-scatter of each layer on a stream of its own (multi_gpu_async_reduce_gradient in
    # llmc/zero.cuh)
    FrameworkDefaults("llm.c", framework="llm.c", gpt_biases=True, gpt_dropout=False),
    # its MoE recipes set expert_tensor_parallel_size to 1 (src/megatron/bridge/recipes)
    replace(_BRIDGE, moe_only=True, has_library_runs=True, unsharded_experts=True),
    # tp_comm_overlap of scripts/performance/configs/llama, which is False for nvfp4
    replace(_BRIDGE, tp_comm_overlap=True),
    # NeMo of 2022 is Megatron-LM's and Apex' code of its time; cuDNN's fast attention of Hopper came with cuDNN 9, 2024
    replace(_MEGATRON_2022, name_substring="nemo", last_year=2022),
    replace(_NEMO, last_year=2023, version="23.11", tp_comm_overlap=False),
    replace(_NEMO, name_substring="nemo 25.02", version="25.02"),
    replace(_NEMO, name_substring="nemo 25.04", version="25.04"),
    # layers of Grok-1 with padded experts are captured on Blackwell (CUDA_GRAPH in grok1/launch.sh of
    # NVIDIA/dgxc-benchmarking v25.05, false on H100)
    replace(_NEMO, moe_only=True, gpu_prefix="gb200", uses_cuda_graphs=True),
    replace(_NEMO, moe_only=True, gpu_prefix="b200", uses_cuda_graphs=True),
    _NEMO,
    # Megatron-LM overlaps backward's all-reduce since December 2021. Megatron-DeepSpeed took over that of before
    # (1ac4a442, 2021-12-10) and, with `async_tensor_model_parallel_allreduce` off, that of July 2023 (f90b8877).
    replace(
        _MEGATRON_2021,
        name_substring="megatron-deepspeed",
        last_year=2023,
        deepspeed_zero3=False,
        framework="megatron-deepspeed",
    ),
    replace(_MEGATRON_2022, name_substring="megatron-llama", framework="megatron-llama"),
    _MEGATRON_2021,
    _MEGATRON_2022,
    # tp_linear_async_communication is off in the runs' configuration (huggingface/bench_cluster)
    FrameworkDefaults("nanotron", framework="nanotron", version="bench-cluster"),
    # its rows say that norms are recomputed where layers are not: dropout_selective_checkpoint of
    # internlm/model/modeling_internlm.py
    FrameworkDefaults("internevo", framework="internevo", is_dated=True),
    # Aleph-Alpha/scaling: all collectives and sends between stages block (core/nn/linear/utils.py, core/optimizer/
    # allreduce.py, core/nn/parallel_module/communicator.py); its runs differ in the kernel of their norms
    replace(_ALEPH_ALPHA, name_substring="aleph alpha scaling, fused norms", version="fused-norms"),
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
        numa_binding=True,  # its scripts recommend bindpcie (best_practice/deepseek-v3/readme.md)
        precision_configs=MOE_MODEL_ZOO,
    ),
    replace(_MEGATRON, name_substring="primus", framework="primus"),
    _MEGATRON,
    _DEEPSPEED_2025,
    _DEEPSPEED,
    # XLA matmuls through Flax or Transformer Engine
    FrameworkDefaults("maxtext", framework="maxtext", compiles_programs=True, precision_configs=DELAYED_SCALING),
    replace(_PAXML, last_year=2023, version="23.10"),
    replace(_PAXML, name_substring="paxml (xla)", version="23.10"),
    _PAXML,
    # which kernels it runs is not stated; its flash attention is assumed to be the fastest, as in the example of it.
    # Keys and values are gathered before attention (Llama 3, arXiv:2407.21783, section 3.3.2)
    FrameworkDefaults(
        "in-house (pytorch)",
        backward_tp_overlap=True,  # assumed, as in the example
        flash_version="flash",
        ring_attention=RingAttention.ONE_KERNEL,
    ),
    # hand-written scripts; of its releases up to 2.10 only 2.5.0 takes cuDNN's attention first, as later ones do
    FrameworkDefaults("pytorch 2.5.0", framework="pytorch"),
    FrameworkDefaults("pytorch 2.0", framework="pytorch", version="2.0"),
    FrameworkDefaults("pytorch", last_year=2025, framework="pytorch", version="2.10"),
    FrameworkDefaults("pytorch", framework="pytorch"),
    FrameworkDefaults(""),
)


def framework_defaults(case: ValidationCase) -> FrameworkDefaults:
    """The defaults of a run's software."""
    name = case.text("framework").lower()
    year, gpu, is_moe = _year(case), case.text("gpu"), has_experts(case)
    candidates = (
        defaults
        for defaults in FRAMEWORKS
        if defaults.name_substring in name and year <= defaults.last_year and gpu.startswith(defaults.gpu_prefix)
    )
    return next(defaults for defaults in candidates if is_moe or not defaults.moe_only)


def _year(case: ValidationCase) -> float:
    """The year of a run's software; far ahead if it is not stated."""
    return min(9999.0, float(case.text("year"))) if case.text("year").isdecimal() else 9999.0


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


def _fused_by_adam_note(notes: str) -> dict[str, list[str]]:
    """`training.fused` of a row whose optimizer is one kernel: a compiler fuses all the rest, eager code nothing."""
    stated = _FUSED_ADAM_NOTE.search(notes)
    if stated is None:
        return {}
    return {"fused": ["optimizer"] if stated[1] == "eager" else [kind.value for kind in FusedKernel]}


def _liger_loss(notes: str) -> str:
    """Liger's loss of the release in the notes; if none is stated: of the releases up to 0.8.0."""
    stated = _LIGER_RELEASE.search(notes)
    is_old = stated is None or tuple(map(int, stated[1].split("."))) <= (0, 8, 0)
    return "liger_fp32_sum" if is_old else "liger"


def _code_date(case: ValidationCase) -> str | None:
    """Date of the code: that of the commit in the notes, else the middle of the row's year; None: not stated."""
    stated, year = _COMMIT_DATE.search(case.text("notes")), case.text("year")
    return stated[1] if stated else f"{year}-07-01" if year else None


def _is_compiled(case: ValidationCase) -> bool:
    """Whether the row says that layers are compiled."""
    return _COMPILE_NOTE.search(case.text("notes")) is not None


def _gather_options(case: ValidationCase) -> dict[str, bool]:
    """Whether gathers of updated parameters overlap, where the row says so; they do where gradients' reductions do."""
    if not case.text("overlap_param_gather"):
        return {}
    return {"overlap_param_gather": case.boolean("overlap_param_gather") and case.boolean("overlap_grad_reduce", True)}


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
