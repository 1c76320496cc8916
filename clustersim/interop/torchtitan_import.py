"""What does a torchtitan job file train, and how? Import as a scenario.

TOML files of v0.2.2 (February 2026) and of earlier versions with the same names, what a log prints of them, and the
Python files of later versions (`torchtitan_sources`). Behaviour of torchtitan without a key is added to the scenario:
sequence parallelism over tensor-parallel ranks, PyTorch's loss, pipeline outputs that are not released, eager kernels
unless layers are compiled. A step that cannot be expressed is an error. No key states the cluster, and the number of
GPUs follows from the keys only if no degree is -1.

Reference: pytorch/torchtitan v0.2.2, torchtitan/train.py, config/job_config.py, distributed/{parallel_dims,
pipeline_parallel,activation_checkpoint}.py, models/{llama3,llama4}/infra/parallelize.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from clustersim.common.errors import InputError, suggest_nearest
from clustersim.interop.import_result import NO_CONTEXT, ImportContext, ImportResult
from clustersim.interop.model_equivalence import has_experts
from clustersim.interop.torchtitan_config import TorchtitanConfig
from clustersim.interop.torchtitan_flavors import ModelFlavor, find_flavor, flavor_model
from clustersim.interop.torchtitan_pipeline import import_pipeline
from clustersim.interop.torchtitan_sources import JobContent, read_job
from clustersim.model.training import AttentionBackend, FusedKernel

DDP_BUCKET: Final = "100 MiB"
"""`bucket_cap_mb` of apply_ddp in models/llama3/infra/parallelize.py."""
CP_KIND_BY_METHOD: Final = {"allgather": "all_gather", "alltoall": "ring"}
"""Kinds of context parallelism by `context_parallel_rotate_method`; alltoall sends blocks on, one at a time."""
RESHARD_BY_NAME: Final = {"default": None, "always": True, "never": False}
MX_RECIPE: Final = "mxfp8-torchao"
RECIPE_BY_NAME: Final = {"tensorwise": "fp8-tensorwise", "rowwise": "fp8-rowwise"}
LINEAR_CONVERTERS: Final = {
    "quantize.linear.float8": "float8",
    "float8": "float8",
    "quantize.linear.mx": "mx",
    "mx": "mx",
}
"""Converters of linear layers; the short names are those in torchtitan's own example files."""
_GROUPED_GEMM_CONVERTERS: Final = ("quantize.grouped_mm.float8", "quantize.grouped_mm.mx")
_HIGH_PRECISION_MODULES: Final = ("output", "router.gate", "auto_filter_small_kn")
"""Modules that stay in high precision in any recipe, and torchao's rule for small ones."""
_FLOAT8_GATHER_KEY: Final = "enable_fsdp_float8_all_gather"
_MODELS_WITHOUT_PIPELINE: Final = ("qwen3", "gpt_oss")
_FORMAT_BY_DTYPE: Final = {"bfloat16": "bf16", "float32": "fp32"}


@dataclass(frozen=True, slots=True)
class _ParallelDegrees:
    """Degrees of parallelism, whose product is the number of GPUs."""

    replicate: int
    shard: int
    cp: int
    tp: int
    pp: int

    @property
    def dp(self) -> int:
        """Data-parallel degree."""
        return self.replicate * self.shard

    @property
    def world_size(self) -> int:
        """Number of GPUs."""
        return self.dp * self.cp * self.tp * self.pp


def import_torchtitan(
    text: str,
    source: str,
    cluster: str = "dgx-h100",
    gpu_count: int | None = None,
    context: ImportContext = NO_CONTEXT,
) -> ImportResult:
    """The scenario of a job.

    source: names it in errors; gpu_count: number of GPUs, if a degree is -1. Raises InputError for an invalid
    job, inconsistent degrees, and a step that cannot be expressed.
    """
    return import_job(read_job(text, source, context), source, cluster, gpu_count)


def import_job(content: JobContent, source: str, cluster: str, gpu_count: int | None) -> ImportResult:
    """The scenario of a job's sections; else as `import_torchtitan`."""
    config = TorchtitanConfig(content, source)
    flavor = find_flavor(config.string("model", "name"), config.string("model", "flavor"), source)
    degrees = _parallel_degrees(config, gpu_count or content.world_size)
    model = flavor_model(flavor)
    if degrees.pp > 1 and flavor.name in _MODELS_WITHOUT_PIPELINE:
        raise config.error(
            "parallelism", "pipeline_parallel_degree", f"torchtitan has no pipeline of {flavor.name}; write 1"
        )
    layer_counts, schedule = import_pipeline(config, model.layer_count, degrees.pp)
    compile_enabled, components = config.boolean("compile", "enable"), config.string_list("compile", "components")
    is_compiled = compile_enabled and "model" in components
    assumptions = [*_model_assumptions(config, flavor), *_recompute_assumptions(config, layer_counts)]
    mapping = {
        "model": _model_section(flavor),
        "cluster": {"name": cluster, "gpus": degrees.world_size},
        "layout": _layout_config(config, flavor, degrees, is_compiled=is_compiled)
        | ({"layers_per_stage": list(layer_counts)} if degrees.pp > 1 else {}),
        **schedule,
        "training": _training_config(config, degrees, layer_counts, is_compiled=is_compiled)
        | ({} if flavor.attention is AttentionBackend.FLASH else {"attention": flavor.attention.value}),
        "framework": {"name": "torchtitan", "torch_compile": True} if is_compiled else "torchtitan",
    }
    return ImportResult(mapping, config.ignored_keys, (*assumptions, *content.remarks))


def _model_section(flavor: ModelFlavor) -> Any:
    """The preset's name if the flavor is a preset without changes, else the `model` section."""
    section = flavor.model_section
    if list(section) == ["preset"]:
        return section["preset"]
    return {"name": f"{flavor.name} {flavor.flavor}", **section}


def _model_assumptions(config: TorchtitanConfig, flavor: ModelFlavor) -> list[str]:
    assumptions = []
    if flavor.has_document_mask:
        assumptions.append("documents fill their sequences, so masks between them change nothing")
    if has_experts(flavor_model(flavor)) and _linear_converter(config) and not _converts_grouped_gemm(config):
        assumptions.append("matmuls of experts are in the format of linear layers, too")
    return assumptions


def _recompute_assumptions(config: TorchtitanConfig, layer_counts: Sequence[int]) -> list[str]:
    """An assumption if recomputing every N-th layer gives different counts per stage."""
    option = config.string("activation_checkpoint", "selective_ac_option")
    is_per_layer = (
        config.string("activation_checkpoint", "mode") == "selective" and option.isdecimal() and option != "0"
    )
    recomputed_counts = sorted({count // int(option) for count in layer_counts}) if is_per_layer else [0]
    return (
        [f"{recomputed_counts[-1]} layers of each stage are computed again, though some have {recomputed_counts[0]}"]
        if recomputed_counts[1:]
        else []
    )


def _parallel_degrees(config: TorchtitanConfig, gpu_count: int | None) -> _ParallelDegrees:
    names = ("data_parallel_replicate", "context_parallel", "tensor_parallel", "pipeline_parallel")
    replicate, cp, tp, pp = (config.integer("parallelism", f"{name}_degree") for name in names)
    shard, other_degrees = config.integer("parallelism", "data_parallel_shard_degree"), replicate * cp * tp * pp
    product_text = f"replicate {replicate} x cp {cp} x tp {tp} x pp {pp} = {other_degrees}"
    if shard == -1 and gpu_count is None:
        raise InputError(
            f"{config.source}: does not say how many GPUs, as data_parallel_shard_degree is -1; give --gpus, a "
            "multiple "
            f"of {product_text}"
        )
    if shard == -1 and gpu_count is not None and (gpu_count % other_degrees or gpu_count < other_degrees):
        nearest_multiple = max(1, round(gpu_count / other_degrees)) * other_degrees
        raise InputError(
            f"{config.source}: {gpu_count} GPUs are no multiple of {product_text}; give --gpus {nearest_multiple} or so"
        )
    shard = (gpu_count or 0) // other_degrees if shard == -1 else shard
    degrees = _ParallelDegrees(replicate, shard, cp, tp, pp)
    if gpu_count not in (None, degrees.world_size):
        raise InputError(
            f"{config.source}: {gpu_count} GPUs, but shard {shard} x {product_text} makes {degrees.world_size}; "
            "leave --gpus out, or write "
            "data_parallel_shard_degree = -1"
        )
    return degrees


def _layout_config(
    config: TorchtitanConfig, flavor: ModelFlavor, degrees: _ParallelDegrees, *, is_compiled: bool
) -> dict[str, Any]:
    layout: dict[str, Any] = {
        "tp": degrees.tp,
        "cp": degrees.cp,
        "pp": degrees.pp,
        "sequence_parallel": degrees.tp > 1,
        "tp_comm_overlap": _overlaps_tp_comm(config, is_compiled=is_compiled) and degrees.tp > 1,
        "deallocate_pipeline_outputs": False,
        "data": _data_parallel_config(config, degrees),
    }
    defaults = {"tp": 1, "cp": 1, "pp": 1, "sequence_parallel": False, "tp_comm_overlap": False, "data": None}
    if degrees.cp == 1:
        config.mark_irrelevant("parallelism", "context_parallel_load_balancer", "context_parallel_rotate_method")
    else:
        layout["cp_kind"] = config.choice("parallelism", "context_parallel_rotate_method", CP_KIND_BY_METHOD)
    changed = {key: value for key, value in layout.items() if value != defaults.get(key, "")}
    experts = _moe_layout(config, degrees, is_moe=has_experts(flavor_model(flavor)))
    return changed | ({"async_tensor_model_parallel_allreduce": False} if degrees.tp > 1 else {}) | experts


def _overlaps_tp_comm(config: TorchtitanConfig, *, is_compiled: bool) -> bool:
    """Whether tensor-parallel collectives are pipelined with their matmuls."""
    is_enabled = config.boolean("parallelism", "enable_async_tensor_parallel")
    if is_enabled and not is_compiled:
        raise config.error(
            "parallelism", "enable_async_tensor_parallel", 'needs [compile] enable = true with "model" in components'
        )
    return is_enabled


def _data_parallel_config(config: TorchtitanConfig, degrees: _ParallelDegrees) -> Any:
    """The data-parallel strategy; None without data parallelism."""
    reshard = config.choice("parallelism", "fsdp_reshard_after_forward", RESHARD_BY_NAME)
    options: dict[str, Any] = {} if reshard is None else {"reshard_after_forward": reshard}
    shard_size = degrees.shard * degrees.cp
    if shard_size > 1:
        shard_options = {"shard": shard_size} if degrees.replicate > 1 else {}
        name = "hsdp" if shard_options else "fsdp"
        return {name: shard_options | options} if shard_options or options else name
    if degrees.replicate > 1 and degrees.tp * degrees.pp > 1:
        raise config.error(
            "parallelism",
            "data_parallel_replicate_degree",
            "torchtitan has DDP alone; write data_parallel_shard_degree = -1 with other parallelism",
        )
    return {"ddp": {"bucket": DDP_BUCKET}} if degrees.replicate > 1 else None


def _moe_layout(config: TorchtitanConfig, degrees: _ParallelDegrees, *, is_moe: bool) -> dict[str, Any]:
    """`layout` entries of the experts; without expert parallelism they are sharded like other layers."""
    ep, etp = (
        config.integer("parallelism", f"{name}_degree") for name in ("expert_parallel", "expert_tensor_parallel")
    )
    backend = config.choice("parallelism", "expert_parallel_comm_backend", {"standard": "alltoall", "deepep": "deepep"})
    overlaps = config.boolean("parallelism", "pipeline_parallel_expert_parallel_overlap")
    if ep == 1 or not is_moe:
        return {"etp": degrees.tp} if is_moe and degrees.tp > 1 else {}
    if etp not in (1, degrees.tp):
        raise config.error("parallelism", "expert_tensor_parallel_degree", f"{etp} is neither 1 nor tp {degrees.tp}")
    if backend == "deepep" and etp > 1:
        raise config.error(
            "parallelism", "expert_parallel_comm_backend", "deepep needs expert_tensor_parallel_degree = 1"
        )
    layout: dict[str, Any] = {"ep": ep, "etp": etp}
    layout |= {"dispatcher": backend} if backend != "alltoall" else {}
    schedule = config.string("parallelism", "pipeline_parallel_schedule")
    return layout | ({"overlap_moe_expert_parallel_comm": False} if schedule == "DualPipeV" and not overlaps else {})


def _training_config(
    config: TorchtitanConfig, degrees: _ParallelDegrees, layer_counts: Sequence[int], *, is_compiled: bool
) -> dict[str, Any]:
    local = config.integer("training", "local_batch_size")
    microbatch = config.integer("parallelism", "pipeline_parallel_microbatch_size") if degrees.pp > 1 else local
    if local % microbatch:
        raise config.error("training", "local_batch_size", f"{local} is no multiple of microbatches of {microbatch}")
    batch = config.integer("training", "global_batch_size")
    batch = local * degrees.dp if batch == -1 else batch
    accumulation_steps, remainder = divmod(batch, local * degrees.dp)
    if remainder or not accumulation_steps:
        raise config.error(
            "training", "global_batch_size", f"{batch} is no multiple of {local} sequences x {degrees.dp} replicas"
        )
    if accumulation_steps > 1 and degrees.pp > 1:
        raise config.error(
            "training",
            "global_batch_size",
            f"a pipeline that is filled and drained {accumulation_steps} times a step is not modelled; write "
            "local_batch_size = "
            f"{local * accumulation_steps}",
        )
    components = config.string_list("compile", "components")
    early_stop = config.boolean("activation_checkpoint", "early_stop") or is_compiled
    training: dict[str, Any] = {
        "sequence": config.integer("training", "seq_len"),
        "global_batch": batch,
        "microbatch": microbatch,
        "precision": _precision_config(config),
        "recompute": _recompute_config(config, layer_counts, early_stop=early_stop),
        "loss": "compiled" if config.boolean("compile", "enable") and "loss" in components else "torch",
        "fused": _fused_kernels(config, is_compiled=is_compiled),
    }
    training |= _optimizer_config(config)
    offloads = config.boolean("training", "enable_cpu_offload")
    return training | ({"offload": {"parameters": True}} if offloads else {})


def _fused_kernels(config: TorchtitanConfig, *, is_compiled: bool) -> list[str]:
    """What runs as one kernel each: the optimizer as its implementation says, layers if they are compiled."""
    implementations = {"fused": (FusedKernel.OPTIMIZER,), "foreach": (), "for-loop": ()}
    optimizer = config.choice("optimizer", "implementation", implementations)
    layers = [kind for kind in FusedKernel if is_compiled and kind is not FusedKernel.OPTIMIZER]
    return [kind.value for kind in (*layers, *optimizer)]


def _optimizer_config(config: TorchtitanConfig) -> dict[str, bool]:
    """Adam's updates in backward, where no gradients are left to be clipped (`OptimizersInBackwardContainer`)."""
    config.choice("optimizer", "name", dict.fromkeys(("Adam", "AdamW"), ""))
    in_backward = config.boolean("optimizer", "early_step_in_backward")
    return {"optimizer_in_backward": True, "gradient_clipping": False} if in_backward else {}


def _precision_config(config: TorchtitanConfig) -> dict[str, str]:
    parameter_format = config.choice("training", "dtype", _FORMAT_BY_DTYPE)
    compute_format = config.choice("training", "mixed_precision_param", _FORMAT_BY_DTYPE)
    config.choice("training", "mixed_precision_reduce", {"float32": ""})
    states = {"master": "none", "moments": "bf16"} if parameter_format == "bf16" else {}
    linear = _linear_converter(config)
    for converter in ("float8", "mx"):
        if converter != linear:
            config.mark_irrelevant(
                f"quantize.linear.{converter}", "recipe_name", "filter_fqns", "emulate", _FLOAT8_GATHER_KEY
            )
        config.mark_irrelevant(f"quantize.grouped_mm.{converter}", "recipe_name", "fqns")
    if not linear:
        return {"compute": "bf16" if parameter_format == "bf16" else compute_format, **states}
    section = f"quantize.linear.{linear}"
    if not {"output"} <= set(config.string_list(section, "filter_fqns")) <= set(_HIGH_PRECISION_MODULES):
        raise config.error(
            section,
            "filter_fqns",
            f'other layers than ["output"] and {" and ".join(_HIGH_PRECISION_MODULES[1:])} cannot be left wide',
        )
    if linear == "mx":
        config.choice(section, "recipe_name", dict.fromkeys(("mxfp8", "mxfp8_cublas"), ""))
        return {"compute": MX_RECIPE, **states}
    has_recipe = config.has_key(section, "recipe_name")
    recipe = config.choice(section, "recipe_name", RECIPE_BY_NAME) if has_recipe else RECIPE_BY_NAME["tensorwise"]
    gathers = config.boolean(section, _FLOAT8_GATHER_KEY)
    if has_recipe and gathers:
        raise config.error(
            section, _FLOAT8_GATHER_KEY, "goes without recipe_name, as the scaling of whole tensors alone has it"
        )
    return {"compute": recipe, **({"gathered": "fp8"} if gathers else {}), **states}


def _linear_converter(config: TorchtitanConfig) -> str | None:
    """The converter of linear layers, `float8` or `mx`; None without."""
    requested = config.string_list("model", "converters")
    for converter in requested:
        if converter not in (*LINEAR_CONVERTERS, *_GROUPED_GEMM_CONVERTERS):
            raise config.error(
                "model",
                "converters",
                f"{converter!r} is not known; "
                f"{suggest_nearest(converter, (*LINEAR_CONVERTERS, *_GROUPED_GEMM_CONVERTERS))}",
            )
    linear = {LINEAR_CONVERTERS[converter] for converter in requested if converter in LINEAR_CONVERTERS}
    grouped = {converter.rpartition(".")[2] for converter in requested if converter in _GROUPED_GEMM_CONVERTERS}
    if len(linear | grouped) > 1 or (grouped and not linear):
        raise config.error(
            "model", "converters", "linear layers and experts are in one format; write quantize.linear's"
        )
    return next(iter(linear), None)


def _converts_grouped_gemm(config: TorchtitanConfig) -> bool:
    return any(converter in _GROUPED_GEMM_CONVERTERS for converter in config.string_list("model", "converters"))


def _recompute_config(config: TorchtitanConfig, layer_counts: Sequence[int], *, early_stop: bool) -> Any:
    """Option N recomputes every N-th layer of a stage; the scenario has the number of layers."""
    modes = {mode_name: mode_name for mode_name in ("none", "full", "selective", "memory_budget")}
    mode = config.choice("activation_checkpoint", "mode", modes)
    option = config.string("activation_checkpoint", "selective_ac_option")
    match mode:
        case "none":
            return "none"
        case "full":
            return {"mode": "full", "early_stop": early_stop}
        case "memory_budget":
            raise config.error(
                "activation_checkpoint", "mode", "what a compiler drops is not modelled; write selective"
            )
    if option == "op":
        return {"mode": "selective_op", "early_stop": early_stop}
    if not option.isdecimal():
        raise config.error(
            "activation_checkpoint", "selective_ac_option", f'{option!r} is neither "op" nor such as "2"'
        )
    interval = max(1, int(option))
    if interval == 1:
        return {"mode": "full", "early_stop": early_stop}
    recomputed_layers = max(layer_counts) // interval
    return {"layers": recomputed_layers, "early_stop": early_stop} if recomputed_layers else "none"
