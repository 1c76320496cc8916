"""What does a Megatron-LM command line train, and how?

Arguments have the names and defaults of megatron/training/arguments.py (NVIDIA/Megatron-LM, core_v0.15 and before, and
later ones where names stayed).
What moves no step is left out in silence: data, logs, checkpoints, learning rates, seeds, evaluation. What this program
has no word for is refused where it makes another model or another step, and else named and passed over. Which cluster
it runs on no argument says. A global batch that is left out is one microbatch for each replica.
"""

import re
from collections.abc import Sequence
from typing import Any, Final

from clustersim.common.errors import InputError
from clustersim.interop.import_result import Imported
from clustersim.interop.megatron_arguments import Reading
from clustersim.interop.megatron_model import read_model
from clustersim.interop.shell_script import arguments_of, programs_of, world_of
from clustersim.model.recipe_files import load_recipe
from clustersim.parallel.pipeline_layout_string import parse_pipeline_layout

RECIPES: Final = {
    "delayed": "fp8",
    "tensorwise": "fp8-current",
    "blockwise": "fp8-blockwise",
    "mxfp8": "mxfp8",
}
SHARDED: Final = {
    "no_shard": "ddp",
    "optim": "zero1",
    "optim_grads": "zero2",
    "optim_grads_params": "zero3",
}
"""What a word of Megatron-LM stands for; of words for the same the first is written."""
_GRAPHS: Final = {item: item for item in ("none", "local", "transformer_engine", "full_iteration")}
_OTHERS: Final = re.compile(
    r"pretrain_(bert|t5|ict|mamba|hybrid|retro|vlm|vision\w*)|train_rl|\w*(generat|inference|preprocess|convert)\w*"
)
"""Programs that train no decoder."""
_KEPT: Final = {
    "main-grads-dtype": "gradients",
    "megatron-fsdp-main-grads-dtype": "gradients",
    "main-params-dtype": "master",
    "megatron-fsdp-main-params-dtype": "master",
    "exp-avg-dtype": "moments",
}
"""Flags that say a format, and the key that does; `auto` is what is so without."""
_OPTIMIZERS: Final = ("adam", "sgd")


def read_megatron(text: str, source: str, cluster: str = "dgx-h100", gpus: int | None = None) -> Imported:
    """A scenario of a script that launches Megatron-LM, or of its arguments alone.

    source: names it in errors, and the scenario. Raises InputError for arguments that are missing, have no number where
    one belongs, or make another model or step than can be said.
    """
    arguments = arguments_of(text, source)
    _require_pretraining(programs_of(text), source)
    reading = Reading(arguments, source)
    layout = _layout(reading)
    each = layout["tp"] * layout["cp"] * layout["pp"]
    world = gpus or world_of(arguments, text)
    if world is None:
        raise InputError(
            f"{source}: does not say how many GPUs; give --gpus, or torchrun's --nproc_per_node and --nnodes"
        )
    if world % each:
        raise InputError(f"{source}: {world} GPUs are no multiple of tp x cp x pp = {each}; give --gpus {each} or so")
    training = _training(reading, world // each)
    mapping = {
        "model": read_model(reading, layout["tp"]),
        "cluster": {"name": cluster, "gpus": world},
        "layout": {key: value for key, value in layout.items() if value != _PLAIN.get(key)}
        | {"data": _data(reading, layout["cp"] * (world // each))},
        **_schedule(reading, layout["pp"]),
        "training": training,
        "framework": _framework(reading),
    }
    return Imported(mapping, reading.passed_over, tuple(reading.assumed))


def _require_pretraining(programs: Sequence[str], source: str) -> None:
    """Raise InputError where a script starts something else than the training of a decoder."""
    other = next((program for program in programs if _OTHERS.fullmatch(program)), None)
    if other is not None and "pretrain_gpt" not in programs:
        raise InputError(f"{source}: starts {other}.py; of Megatron-LM's programs pretrain_gpt.py alone is modelled")


_TRAVELLING: Final = ("overlap_expert_communication", "delay_wgrad", "overlap_shared_experts")
"""What has no effect where tokens do not travel."""
_PLAIN: Final = {"tp": 1, "cp": 1, "pp": 1, "ep": 1, "etp": None, "sequence_parallel": False}


def _layout(reading: Reading) -> dict[str, Any]:
    tp = reading.degree("tensor-model-parallel-size")
    _require_rings(reading)
    layout: dict[str, Any] = {
        "tp": tp,
        "cp": reading.degree("context-parallel-size"),
        "pp": reading.degree("pipeline-model-parallel-size"),
        "ep": reading.degree("expert-model-parallel-size"),
        "etp": reading.number("expert-tensor-parallel-size"),
        "sequence_parallel": reading.has("sequence-parallel") and tp != 1,
        **({"order": ["tp", "cp", "pp", "dp"]} if reading.has("use-tp-pp-dp-mapping") else {}),
        **({"pipeline_overlap": False} if reading.has("no-overlap-p2p-communication") else {}),
    }
    flags = {
        "tp-comm-overlap": "tensor_overlap",
        "overlap-moe-expert-parallel-comm": "overlap_expert_communication",
        "delay-wgrad-compute": "delay_wgrad",
        "moe-shared-expert-overlap": "overlap_shared_experts",
    }
    travels = layout["ep"] != 1
    given = {key for name, key in flags.items() if reading.has(name)}
    layout |= dict.fromkeys(
        (key for key in flags.values() if key in given and (travels or key not in _TRAVELLING)), True
    )
    split = _split(reading)
    return layout | _dispatcher(reading) | ({} if split is None else {"layers_per_stage": split})


def _require_rings(reading: Reading) -> None:
    """Raise InputError for other context parallelism than rings."""
    kinds = reading.arguments.get("cp-comm-type", ()) if reading.has("cp-comm-type") else ()
    other = next((kind for kind in kinds if kind != "p2p"), None)
    if other is not None and reading.degree("context-parallel-size") > 1:
        raise reading.error("cp-comm-type", f"{other!r} is not modelled; rings alone are, p2p")


def _data(reading: Reading, ranks: int) -> Any:
    """The strategy of data parallelism. ranks: that hold the same weights."""
    overlap = reading.has("overlap-grad-reduce")
    reading.has("overlap-param-gather")
    if reading.has("use-torch-fsdp2"):
        kept = reading.has("torch-fsdp2-no-reshard-after-forward")
        return {"fsdp": {"reshard_after_forward": False}} if kept else "fsdp"
    if reading.has("use-megatron-fsdp") or reading.has("use-custom-fsdp"):
        reading.has("use-distributed-optimizer")
        if reading.degree("num-distributed-optimizer-instances") > 1:
            raise reading.error("num-distributed-optimizer-instances", "beside --use-megatron-fsdp it is not modelled")
        return reading.choice("data-parallel-sharding-strategy", SHARDED, "no_shard")
    elements = reading.number("ddp-bucket-size")
    bucket = {} if elements is None else {"bucket": f"{elements * _width(reading)} B"}
    instances = reading.degree("num-distributed-optimizer-instances")
    if ranks % instances:
        raise InputError(
            f"{reading.source}: --num-distributed-optimizer-instances: {instances} do not divide the {ranks} ranks of "
            "cp and dp"
        )
    if reading.has("use-distributed-optimizer"):
        options: dict[str, Any] = {} if overlap else {"overlap": False}
        options |= {"shard": ranks // instances} if instances > 1 else {}
        options |= bucket
        return {"zero": {"stage": 1, **options}} if options else "zero1"
    return {"ddp": {"bucket": "megatron", "overlap": overlap} | bucket}


def _width(reading: Reading) -> int:
    """Bytes of a gradient."""
    return 4 if _precision(reading).get("gradients", "fp32") == "fp32" else 2


def _dispatcher(reading: Reading) -> dict[str, Any]:
    if not reading.has("num-experts"):
        return {}
    kind = reading.word("moe-token-dispatcher-type", "allgather")
    backend = reading.word("moe-flex-dispatcher-backend", "deepep")
    deepep = reading.has("moe-enable-deepep")
    sms = {name: reading.number(f"moe-{name}-num-sms") for name in ("deepep", "hybridep", "flex-dispatcher")}
    if kind == "flex" or deepep:
        own = sms["flex-dispatcher"] or sms.get(backend or "")
        return {"dispatcher": backend} | ({"dispatcher_sms": own} if own else {})
    return {"dispatcher": {"alltoall_seq": "alltoall"}.get(kind or "", kind)}


def _split(reading: Reading) -> Any:
    """How layers are dealt to stages; None: evenly."""
    drawn = reading.word("pipeline-model-parallel-layout")
    if drawn is not None:
        return drawn
    ends = {
        "first": reading.number("decoder-first-pipeline-num-layers"),
        "last": reading.number("decoder-last-pipeline-num-layers"),
    }
    counted = {
        "embedding": reading.has("account-for-embedding-in-pipeline-split"),
        "head": reading.has("account-for-loss-in-pipeline-split"),
    }
    return {key: value for key, value in (*ends.items(), *counted.items()) if value} or None


def _schedule(reading: Reading, pp: int) -> dict[str, Any]:
    """Interleaved, where pipeline ranks have several stages."""
    many = reading.number("num-virtual-stages-per-pipeline-rank")
    each = reading.number("num-layers-per-virtual-pipeline-stage")
    drawn = reading.word("pipeline-model-parallel-layout")
    if drawn is not None:
        many = len(_stages(reading, drawn)) // pp
    if each:
        many = reading.needed("num-layers") // (pp * each)
    together = reading.degree("microbatch-group-size-per-virtual-pipeline-stage", pp)
    if many and many > 1 and together != pp:
        raise reading.error(
            "microbatch-group-size-per-virtual-pipeline-stage", f"rounds of other than pp = {pp} are not modelled"
        )
    return {"schedule": {"interleaved": {"chunks": many}}} if many and many > 1 else {}


def _stages(reading: Reading, drawn: str) -> Sequence[int]:
    """Layers of each stage of a layout string."""
    try:
        return parse_pipeline_layout(drawn).layer_counts
    except InputError as error:
        raise InputError(f"{reading.source}: --pipeline-model-parallel-layout: {error}") from None


def _training(reading: Reading, replicas: int) -> dict[str, Any]:
    microbatch = reading.needed("micro-batch-size")
    batch = reading.number("global-batch-size")
    if batch is None:
        batch = microbatch * replicas
        reading.assumed.append(f"a step has {batch:,} sequences: a microbatch for each replica")
    loss = reading.has("cross-entropy-loss-fusion")
    optimizer = reading.word("optimizer", "adam")
    if optimizer not in _OPTIMIZERS:
        raise reading.error("optimizer", f"{optimizer!r} is not modelled; {' and '.join(_OPTIMIZERS)} are")
    training: dict[str, Any] = {
        "sequence": reading.needed("seq-length"),
        "global_batch": batch,
        "microbatch": microbatch,
        "precision": _precision(reading),
        "recompute": _recompute(reading),
        "attention": "standard" if reading.word("attention-backend", "auto") in ("unfused", "local") else None,
        "loss": "fused" if loss else None,
        "optimizer": None if optimizer == "adam" else optimizer,
        "gradient_clipping": None if reading.real("clip-grad", 1.0) > 0.0 else False,
    }
    reading.has("cross-entropy-fusion-impl")
    return {key: value for key, value in training.items() if value is not None}


def _precision(reading: Reading) -> dict[str, Any]:
    narrow = reading.has("fp8-format") or reading.has("fp8")
    recipe = reading.choice("fp8-recipe", RECIPES, "delayed")
    half = "fp16" if reading.has("fp16") else "bf16" if reading.has("bf16") else "fp32"
    compute = recipe if narrow else half
    compute = "nvfp4" if reading.has("fp4-format") or reading.has("fp4") else compute
    wide = reading.has("accumulate-allreduce-grads-in-fp32")
    halved = {"gradients": "fp16"} if half == "fp16" and not wide else {}
    halved = {"gradients": "bf16"} if reading.has("grad-reduce-in-bf16") else halved
    reading.has("use-precision-aware-optimizer")
    kept = {key: word for name, key in _KEPT.items() if (word := reading.word(name, "auto")) != "auto"}
    reading.has("exp-avg-sq-dtype")
    stored = reading.has("fp8-param-gather")
    if compute == half:
        return {"compute": compute, **halved, **kept}
    return {"compute": compute, **halved, **kept, **(_stored(compute) if stored else {}), **_ends(reading)}


def _stored(recipe: str) -> dict[str, str]:
    """Matrices in the format of their products; those of MXFP8 are gathered wide and then cast."""
    narrow = load_recipe(recipe).matmul_formats.low_precision
    stored = {} if narrow is None else {"stored": narrow.value}
    return stored | ({"gathered": "bf16"} if recipe == "mxfp8" else {})


def _ends(reading: Reading) -> dict[str, int | None]:
    """First and last layers that keep BF16."""
    names = {"first_layers": "num-layers-at-start-in-bf16", "last_layers": "num-layers-at-end-in-bf16"}
    found = {key: reading.number(name, 1) for key, name in names.items()}
    return found if reading.has("first-last-layers-bf16") else {}


def _framework(reading: Reading) -> Any:
    """Megatron-LM, and what of passes it has in CUDA graphs; attention alone of a dense model no key says."""
    older = [reading.has(name) for name in ("enable-cuda-graph", "external-cuda-graph")]
    if reading.choice("cuda-graph-impl", _GRAPHS, "none") == "none" and not any(older):
        return "megatron"
    name = "cuda-graph-modules" if "cuda-graph-modules" in reading.arguments else "cuda-graph-scope"
    scopes = set(reading.arguments.get(name, ("full",)))
    whole = bool(scopes & {"full", "full_iteration"})
    if not whole and not ("attn" in scopes and reading.has("num-experts")):
        return "megatron"
    reading.has(name)
    return {"name": "megatron", "cuda_graphs": True if whole else "outside_experts"}


def _recompute(reading: Reading) -> Any:
    layers, method = reading.number("recompute-num-layers"), reading.word("recompute-method")
    modules = reading.arguments.get("recompute-modules", ()) if reading.has("recompute-modules") else ()
    whole = ("moe",) if reading.has("moe-layer-recompute") and reading.has("num-experts") else ()
    default = "selective" if reading.has("recompute-activations") or whole else "none"
    match reading.word("recompute-granularity", default):
        case "full":
            return {"layers": layers} if method == "block" and layers else "full"
        case "selective":
            return {"modules": [*dict.fromkeys((*(modules or ("core_attn",)), *whole))]}
    return None
