"""What does a Megatron-LM command line train, and how? Import as a scenario.

Arguments have the names and defaults of megatron/training/arguments.py (NVIDIA/Megatron-LM, core_v0.15 and
before, and later versions where names are unchanged). Arguments that do not affect the step are ignored
silently: data, logging, checkpoints, learning rates, seeds, evaluation. Unsupported arguments raise an
error if they define another model or step, else they are reported. The cluster is not stated by any
argument. The default global batch is one microbatch per replica.
"""

import re
from collections.abc import Sequence
from typing import Any, Final

from clustersim.common.errors import InputError
from clustersim.interop.import_result import ImportResult
from clustersim.interop.megatron_arguments import MegatronArguments
from clustersim.interop.megatron_model import import_model
from clustersim.interop.shell_script import parse_arguments, parse_world_size, python_programs
from clustersim.model.recipe_files import load_recipe
from clustersim.parallel.pipeline_layout_string import parse_pipeline_layout

RECIPE_BY_FLAG: Final = {
    "delayed": "fp8",
    "tensorwise": "fp8-current",
    "blockwise": "fp8-blockwise",
    "mxfp8": "mxfp8",
}
ROUTING_FUSION_FLAGS: Final = {
    "moe-permute-fusion": "permute_unfused",
    "moe-router-fusion": "router_unfused",
    "enable-experimental": "indices_unfused",
}
"""Flags that fuse kernels around experts, and the key of `training.overheads` that they turn off."""
STRATEGY_BY_FLAG: Final = {
    "no_shard": "ddp",
    "optim": "zero1",
    "optim_grads": "zero2",
    "optim_grads_params": "zero3",
}
"""Data-parallel strategy by `--data-parallel-sharding-strategy`; exporters use the first flag of a strategy."""
_CUDA_GRAPH_IMPLS: Final = {name: name for name in ("none", "local", "transformer_engine", "full_iteration")}
_UNSUPPORTED_PROGRAMS: Final = re.compile(
    r"pretrain_(bert|t5|ict|mamba|hybrid|retro|vlm|vision\w*)|train_rl|\w*(generat|inference|preprocess|convert)\w*"
)
"""Programs that do not train a decoder."""
_STATE_FORMAT_FLAGS: Final = {
    "main-grads-dtype": "gradients",
    "megatron-fsdp-main-grads-dtype": "gradients",
    "main-params-dtype": "master",
    "megatron-fsdp-main-params-dtype": "master",
    "exp-avg-dtype": "moments",
}
"""Flags that state a format, and the key of `training.precision`; `auto` is the default."""
_OPTIMIZERS: Final = ("adam", "sgd")


def import_megatron(text: str, source: str, cluster: str = "dgx-h100", gpu_count: int | None = None) -> ImportResult:
    """The scenario of a script that launches Megatron-LM, or of its arguments alone.

    source: names it in errors and names the scenario; gpu_count: number of GPUs, None: as the script says.
    Raises InputError for arguments that are missing or invalid, or define a model or step that cannot be
    expressed.
    """
    arguments = parse_arguments(text, source)
    _require_pretraining(python_programs(text), source)
    parsed = MegatronArguments(arguments, source)
    layout = _layout_config(parsed)
    ranks_per_replica = layout["tp"] * layout["cp"] * layout["pp"]
    world_size = gpu_count or parse_world_size(arguments, text)
    if world_size is None:
        raise InputError(
            f"{source}: does not say how many GPUs; give --gpus, or torchrun's --nproc_per_node and --nnodes"
        )
    if world_size % ranks_per_replica:
        raise InputError(
            f"{source}: {world_size} GPUs are no multiple of tp x cp x pp = {ranks_per_replica}; give --gpus "
            f"{ranks_per_replica} or so"
        )
    training = _training_config(parsed, world_size // ranks_per_replica)
    mapping = {
        "model": import_model(parsed, layout["tp"]),
        "cluster": {"name": cluster, "gpus": world_size},
        "layout": {key: value for key, value in layout.items() if value != _LAYOUT_DEFAULTS.get(key)}
        | {"data": _data_parallel_config(parsed, layout["cp"] * (world_size // ranks_per_replica))},
        **_schedule_config(parsed, layout["pp"]),
        "training": training,
        "framework": _framework_config(parsed),
    }
    return ImportResult(mapping, parsed.ignored_flags, tuple(parsed.assumptions))


def _require_pretraining(programs: Sequence[str], source: str) -> None:
    """Raise InputError if a script starts something other than decoder pretraining."""
    unsupported = next((program for program in programs if _UNSUPPORTED_PROGRAMS.fullmatch(program)), None)
    if unsupported is not None and "pretrain_gpt" not in programs:
        raise InputError(
            f"{source}: starts {unsupported}.py; of Megatron-LM's programs pretrain_gpt.py alone is modelled"
        )


_TOKEN_DISPATCH_KEYS: Final = ("overlap_moe_expert_parallel_comm", "delay_wgrad_compute", "moe_shared_expert_overlap")
"""Keys that have no effect without expert parallelism."""
_LAYOUT_DEFAULTS: Final = {"tp": 1, "cp": 1, "pp": 1, "ep": 1, "etp": None, "sequence_parallel": False}


def _layout_config(parsed: MegatronArguments) -> dict[str, Any]:
    tp = parsed.positive_integer("tensor-model-parallel-size")
    _require_ring_attention(parsed)
    layout: dict[str, Any] = {
        "tp": tp,
        "cp": parsed.positive_integer("context-parallel-size"),
        "pp": parsed.positive_integer("pipeline-model-parallel-size"),
        "ep": parsed.positive_integer("expert-model-parallel-size"),
        "etp": parsed.integer("expert-tensor-parallel-size") or (tp if tp > 1 and parsed.has("num-experts") else None),
        "sequence_parallel": parsed.has("sequence-parallel") and tp != 1,
        **({"order": ["tp", "cp", "pp", "dp"]} if parsed.has("use-tp-pp-dp-mapping") else {}),
        **({"overlap_p2p_comm": False} if parsed.has("no-overlap-p2p-communication") else {}),
    }
    flags = {
        "tp-comm-overlap": "tp_comm_overlap",
        "overlap-moe-expert-parallel-comm": "overlap_moe_expert_parallel_comm",
        "delay-wgrad-compute": "delay_wgrad_compute",
        "moe-shared-expert-overlap": "moe_shared_expert_overlap",
    }
    has_ep = layout["ep"] != 1
    given = {key for name, key in flags.items() if parsed.has(name)}
    layout |= dict.fromkeys(
        (key for key in flags.values() if key in given and (has_ep or key not in _TOKEN_DISPATCH_KEYS)), True
    )
    layer_split = _layer_split(parsed)
    return layout | _dispatcher_config(parsed) | ({} if layer_split is None else {"layers_per_stage": layer_split})


def _require_ring_attention(parsed: MegatronArguments) -> None:
    """Raise InputError for context parallelism other than ring attention."""
    kinds = parsed.arguments.get("cp-comm-type", ()) if parsed.has("cp-comm-type") else ()
    unsupported = next((kind for kind in kinds if kind != "p2p"), None)
    if unsupported is not None and parsed.positive_integer("context-parallel-size") > 1:
        raise parsed.error("cp-comm-type", f"{unsupported!r} is not modelled; rings alone are, p2p")


def _data_parallel_config(parsed: MegatronArguments, replica_ranks: int) -> Any:
    """The data-parallel strategy. replica_ranks: number of ranks with the same weights."""
    overlap = parsed.has("overlap-grad-reduce")
    parsed.has("overlap-param-gather")
    if parsed.has("use-torch-fsdp2"):
        keeps_unsharded = parsed.has("torch-fsdp2-no-reshard-after-forward")
        return {"fsdp": {"reshard_after_forward": False}} if keeps_unsharded else "fsdp"
    if parsed.has("use-megatron-fsdp") or parsed.has("use-custom-fsdp"):
        parsed.has("use-distributed-optimizer")
        if parsed.positive_integer("num-distributed-optimizer-instances") > 1:
            raise parsed.error("num-distributed-optimizer-instances", "with --use-megatron-fsdp it is not modelled")
        return parsed.choice("data-parallel-sharding-strategy", STRATEGY_BY_FLAG, "no_shard")
    elements = parsed.integer("ddp-bucket-size")
    bucket = {} if elements is None else {"bucket": f"{elements * _gradient_bytes(parsed)} B"}
    instances = parsed.positive_integer("num-distributed-optimizer-instances")
    if replica_ranks % instances:
        raise InputError(
            f"{parsed.source}: --num-distributed-optimizer-instances: {instances} do not divide the {replica_ranks} "
            "ranks of "
            "cp and dp"
        )
    if parsed.has("use-distributed-optimizer"):
        options: dict[str, Any] = {} if overlap else {"overlap": False}
        options |= {"shard": replica_ranks // instances} if instances > 1 else {}
        options |= bucket
        return {"zero": {"stage": 1, **options}} if options else "zero1"
    return {"ddp": {"bucket": "megatron", "overlap": overlap} | bucket}


def _gradient_bytes(parsed: MegatronArguments) -> int:
    """Bytes of a gradient element."""
    return 4 if _precision_config(parsed).get("gradients", "fp32") == "fp32" else 2


def _dispatcher_config(parsed: MegatronArguments) -> dict[str, Any]:
    if not parsed.has("num-experts"):
        return {}
    dispatcher_type = parsed.text("moe-token-dispatcher-type", "allgather")
    backend = parsed.text("moe-flex-dispatcher-backend", "deepep")
    deepep = parsed.has("moe-enable-deepep")
    sm_counts = {name: parsed.integer(f"moe-{name}-num-sms") for name in ("deepep", "hybridep", "flex-dispatcher")}
    if dispatcher_type == "flex" or deepep:
        sm_count = sm_counts["flex-dispatcher"] or sm_counts.get(backend or "")
        return {"dispatcher": backend} | ({"dispatcher_num_sms": sm_count} if sm_count else {})
    return {"dispatcher": {"alltoall_seq": "alltoall"}.get(dispatcher_type or "", dispatcher_type)}


def _layer_split(parsed: MegatronArguments) -> Any:
    """The split of layers over stages; None: even."""
    layout_string = parsed.text("pipeline-model-parallel-layout")
    if layout_string is not None:
        return layout_string
    end_layers = {
        "first": parsed.integer("decoder-first-pipeline-num-layers"),
        "last": parsed.integer("decoder-last-pipeline-num-layers"),
    }
    counts_as_layer = {
        "embedding": parsed.has("account-for-embedding-in-pipeline-split"),
        "head": parsed.has("account-for-loss-in-pipeline-split"),
    }
    return {key: value for key, value in (*end_layers.items(), *counts_as_layer.items()) if value} or None


def _schedule_config(parsed: MegatronArguments, pp: int) -> dict[str, Any]:
    """Interleaved, if pipeline ranks have several stages."""
    stage_count = parsed.integer("num-virtual-stages-per-pipeline-rank")
    layers_per_stage = parsed.integer("num-layers-per-virtual-pipeline-stage")
    layout_string = parsed.text("pipeline-model-parallel-layout")
    if layout_string is not None:
        stage_count = len(_parse_layout_string(parsed, layout_string)) // pp
    if layers_per_stage:
        stage_count = parsed.required_integer("num-layers") // (pp * layers_per_stage)
    group_size = parsed.positive_integer("microbatch-group-size-per-virtual-pipeline-stage", pp)
    if not stage_count or stage_count == 1:
        return {}
    rounds = {} if group_size == pp else {"microbatch_group_size": group_size}
    return {"schedule": {"interleaved": {"chunks": stage_count, **rounds}}}


def _parse_layout_string(parsed: MegatronArguments, layout_string: str) -> Sequence[int]:
    """Layers of each stage of a pipeline layout string."""
    try:
        return parse_pipeline_layout(layout_string).layer_counts
    except InputError as error:
        raise InputError(f"{parsed.source}: --pipeline-model-parallel-layout: {error}") from None


def _training_config(parsed: MegatronArguments, replicas: int) -> dict[str, Any]:
    microbatch = parsed.required_integer("micro-batch-size")
    batch = parsed.integer("global-batch-size")
    if batch is None:
        batch = microbatch * replicas
        parsed.assumptions.append(f"a step has {batch:,} sequences: a microbatch for each replica")
    loss = parsed.has("cross-entropy-loss-fusion")
    optimizer = parsed.text("optimizer", "adam")
    if optimizer not in _OPTIMIZERS:
        raise parsed.error("optimizer", f"{optimizer!r} is not modelled; {' and '.join(_OPTIMIZERS)} are")
    training: dict[str, Any] = {
        "sequence": parsed.required_integer("seq-length"),
        "global_batch": batch,
        "microbatch": microbatch,
        "precision": _precision_config(parsed),
        "recompute": _recompute_config(parsed),
        "attention": "standard" if parsed.text("attention-backend", "auto") in ("unfused", "local") else None,
        "loss": "fused" if loss else None,
        "optimizer": None if optimizer == "adam" else optimizer,
        "gradient_clipping": None if parsed.real_number("clip-grad", 1.0) > 0.0 else False,
        "overheads": _fused_routing(parsed) or None,
    }
    parsed.has("cross-entropy-fusion-impl")
    return {key: value for key, value in training.items() if value is not None}


def _fused_routing(parsed: MegatronArguments) -> dict[str, bool]:
    """Overheads that fused kernels of the router and of the permutation of tokens remove."""
    is_fused = {key: parsed.has(flag) for flag, key in ROUTING_FUSION_FLAGS.items()}
    return {key: False for key, fused in is_fused.items() if fused and parsed.integer("num-experts")}


def _precision_config(parsed: MegatronArguments) -> dict[str, Any]:
    is_fp8 = parsed.has("fp8-format") or parsed.has("fp8")
    recipe = parsed.choice("fp8-recipe", RECIPE_BY_FLAG, "delayed")
    base_format = "fp16" if parsed.has("fp16") else "bf16" if parsed.has("bf16") else "fp32"
    compute = recipe if is_fp8 else base_format
    compute = "nvfp4" if parsed.has("fp4-format") or parsed.has("fp4") else compute
    reduces_in_fp32 = parsed.has("accumulate-allreduce-grads-in-fp32")
    gradient_formats = {"gradients": "fp16"} if base_format == "fp16" and not reduces_in_fp32 else {}
    gradient_formats = {"gradients": "bf16"} if parsed.has("grad-reduce-in-bf16") else gradient_formats
    parsed.has("use-precision-aware-optimizer")
    state_formats = {
        key: format_name
        for name, key in _STATE_FORMAT_FLAGS.items()
        if (format_name := parsed.text(name, "auto")) != "auto"
    }
    parsed.has("exp-avg-sq-dtype")
    gathers_fp8 = parsed.has("fp8-param-gather")
    if compute == base_format:
        return {"compute": compute, **gradient_formats, **state_formats}
    return {
        "compute": compute,
        **gradient_formats,
        **state_formats,
        **(_stored_formats(compute) if gathers_fp8 else {}),
        **_high_precision_layers(parsed),
    }


def _stored_formats(recipe: str) -> dict[str, str]:
    """Weights in their matmuls' format; MXFP8 weights are gathered in bf16 and then cast."""
    low_precision = load_recipe(recipe).matmul_formats.low_precision
    stored = {} if low_precision is None else {"stored": low_precision.value}
    return stored | ({"gathered": "bf16"} if recipe == "mxfp8" else {})


def _high_precision_layers(parsed: MegatronArguments) -> dict[str, int | None]:
    """Numbers of first and last layers that stay in BF16."""
    names = {
        "num_layers_at_start_in_bf16": "num-layers-at-start-in-bf16",
        "num_layers_at_end_in_bf16": "num-layers-at-end-in-bf16",
    }
    layer_counts = {key: parsed.integer(name, 1) for key, name in names.items()}
    return layer_counts if parsed.has("first-last-layers-bf16") else {}


def _framework_config(parsed: MegatronArguments) -> Any:
    """Megatron-LM and its CUDA graphs; capturing only the attention of dense models cannot be expressed."""
    old_flags = [parsed.has(name) for name in ("enable-cuda-graph", "external-cuda-graph")]
    if parsed.choice("cuda-graph-impl", _CUDA_GRAPH_IMPLS, "none") == "none" and not any(old_flags):
        return "megatron"
    name = "cuda-graph-modules" if "cuda-graph-modules" in parsed.arguments else "cuda-graph-scope"
    scopes = set(parsed.arguments.get(name, ("full",)))
    captures_all = bool(scopes & {"full", "full_iteration"})
    if not captures_all and not ("attn" in scopes and parsed.has("num-experts")):
        return "megatron"
    parsed.has(name)
    return {"name": "megatron", "cuda_graphs": True if captures_all else "outside_experts"}


def _recompute_config(parsed: MegatronArguments) -> Any:
    layers, method = parsed.integer("recompute-num-layers"), parsed.text("recompute-method")
    modules = parsed.arguments.get("recompute-modules", ()) if parsed.has("recompute-modules") else ()
    moe_modules = ("moe",) if parsed.has("moe-layer-recompute") and parsed.has("num-experts") else ()
    default = "selective" if parsed.has("recompute-activations") or moe_modules else "none"
    match parsed.text("recompute-granularity", default):
        case "full":
            return {"layers": layers} if method == "block" and layers else "full"
        case "selective":
            return {"modules": [*dict.fromkeys((*(modules or ("core_attn",)), *moe_modules))]}
    return None
