"""What does a Megatron-LM command line train, and how?

Arguments have the names and defaults of megatron/training/arguments.py (NVIDIA/Megatron-LM, core_v0.15 and before, and
later ones where names stayed).
What moves no step is left out in silence: data, logs, checkpoints, learning rates, seeds, evaluation. What this program
has no word for is refused where it makes another model or another step, and else named and passed over. Which cluster
it runs on no argument says.

A layer's vocabulary comes from `--vocab-size` or from the tokenizer's kind, padded as Megatron does to a multiple of
128 times tp. A global batch that is left out is one microbatch for each replica.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import groupby
from typing import Any, Final

from clustersim.errors import InputError, nearest
from clustersim.foreign.imported import Imported
from clustersim.foreign.shell import Arguments, arguments_of, world_of
from clustersim.parallel.stage_notation import read_stages
from clustersim.workload.recipes import load_recipe

_VOCABULARIES: Final[Mapping[str, int]] = {
    "GPT2BPETokenizer": 50257,
    "Llama2Tokenizer": 32000,
    "Llama3Tokenizer": 128256,
}
"""Entries of tokenizers whose kind says it: GPT-2's BPE, and those of Llama 2 and 3."""
NORMS: Final = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
POSITIONS: Final = {"learned_absolute": "learned", "rope": "rotary", "yarn": "rotary"}
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
_GRAPHS: Final = {each: each for each in ("none", "local", "transformer_engine", "full_iteration")}
_MISSPELT: Final = 0.9
"""How alike two flags are of which one is a misspelling."""
_REFUSED: Final[Mapping[str, str]] = {
    "spec": "layers of one's own are not known",
    "hybrid-override-pattern": "state-space layers are not modelled",
    "hybrid-layer-pattern": "state-space layers are not modelled",
    "is-hybrid-model": "state-space layers are not modelled",
    "encoder-num-layers": "encoders are not modelled",
    "encoder-seq-length": "encoders are not modelled",
    "decoder-seq-length": "encoders are not modelled",
    "heterogeneous-layers-config-path": "its file is not read; write the layers as model.stack",
    "window-size": "write it as model.window",
    "experimental-attention-variant": "it is not modelled",
    "linear-attention-type": "linear attention is not modelled",
    "hierarchical-context-parallel-sizes": "it is not modelled",
    "cpu-offloading": "write it as training.offload",
    "optimizer-cpu-offload": "write it as training.offload",
}
"""What makes another model or another step and is not read."""
_QUIET: Final = re.compile(
    r"(no-)?(lr|min-lr|decoupled-|train-|adam-|weight-decay|start-weight|end-weight|init-method|seed|data-|train-data|"
    r"valid-|test-|split|mock-data|tokenizer|vocab-file|merge-file|tiktoken|log-|tensorboard|wandb|save|load|ckpt|"
    r"checkpoint|eval|exit-|profile|distributed-(timeout|backend)|nproc|nnodes|nodes|node[-_]rank|master|rdzv|"
    r"use-mcore|transformer-impl|rotary-base|rope|use-rope|norm-epsilon|layernorm-epsilon|apply-layernorm-1p|num-workers|"
    r"rampup|empty-unused|manual-gc|create-attention|mmap|reset-|eod-|timing|pretrained|finetune|async-save|override-|"
    r"use-checkpoint|dist-ckpt|auto-detect|attention-softmax|masked-softmax|barrier|check-for-nan|loss-scale|initial-loss|"
    r"hysteresis|moe-aux-loss|moe-z-loss|moe-router-load-balancing|moe-router-bias-update|moe-router-topk-scaling|"
    r"moe-router-dtype|moe-router-pre|moe-input-jitter|mtp-loss|local-rank|lazy-mpu|make-vocab|max-position-embeddings$|"
    r"yarn|mscale|position-embedding$|logging-level|rotary-scaling|moe-router-force|moe-token-drop|rotary-interleaved|export-|mpi$|container-|fp8-(margin|amax|interval|wgrad)|optimizer$|use-flash|calculate-per-token|bias-|swiglu$|disable-bias|"
    r"per-split|enable-experimental|gpus-per-node|tee|max-restarts|log_dir|redirects)"
)
"""What moves no step, or is a default of what is simulated."""


def read_megatron(text: str, source: str, cluster: str = "dgx-h100", gpus: int | None = None) -> Imported:
    """A scenario of a script that launches Megatron-LM, or of its arguments alone.

    source: names it in errors, and the scenario. Raises InputError for arguments that are missing, have no number where
    one belongs, or make another model or step than can be said.
    """
    arguments = arguments_of(text, source)
    refused = next((name for name in arguments if name in _REFUSED), None)
    if refused is not None:
        raise InputError(f"{source}: --{refused}: {_REFUSED[refused]}")
    reading = _Reading(arguments, source)
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
        "model": _model(reading, layout["tp"]),
        "cluster": {"name": cluster, "gpus": world},
        "layout": {key: value for key, value in layout.items() if value != _PLAIN.get(key)}
        | {"data": _data(reading, layout["cp"] * (world // each))},
        **_schedule(reading, layout["pp"]),
        "training": training,
        "framework": _framework(reading),
    }
    passed = tuple(reading.meant(name) for name in arguments if name not in reading.read and not _QUIET.match(name))
    return Imported(mapping, passed, tuple(reading.assumed))


_TRAVELLING: Final = ("overlap_expert_communication", "delay_wgrad", "overlap_shared_experts")
"""What has no effect where tokens do not travel."""
_PLAIN: Final = {"tp": 1, "cp": 1, "pp": 1, "ep": 1, "etp": None, "sequence_parallel": False}


@dataclass
class _Reading:
    """Arguments, and which of them were asked for. assumed: sentences."""

    arguments: Arguments
    source: str
    read: set[str] = field(default_factory=set)
    assumed: list[str] = field(default_factory=list)

    def has(self, name: str) -> bool:
        """Whether a flag is given."""
        self.read.add(name)
        return name in self.arguments

    def meant(self, name: str) -> str:
        """A flag that nobody asked for, and the one that it may be a misspelling of."""
        near = get_close_matches(name, self.read - {*self.arguments}, n=1, cutoff=_MISSPELT)
        return f"--{name} (did you mean --{near[0]}?)" if near else f"--{name}"

    def word(self, name: str, default: str | None = None) -> str | None:
        """What follows a flag."""
        if not self.has(name):
            return default
        values = self.arguments[name]
        if not values:
            raise InputError(f"{self.source}: --{name}: its value is not in the script; write it there")
        return values[0]

    def number(self, name: str, default: int | None = None) -> int | None:
        """A whole number that follows a flag."""
        word = self.word(name)
        if word is None:
            return default
        if not re.fullmatch(r"[0-9][0-9_]*", word):
            raise InputError(f"{self.source}: --{name}: {word!r} is not a whole number")
        return int(word)

    def degree(self, name: str, default: int = 1) -> int:
        """A whole number above 0 that follows a flag."""
        number = self.number(name, default)
        if not number:
            raise InputError(f"{self.source}: --{name}: 0 is less than 1")
        return number

    def needed(self, name: str) -> int:
        """A whole number that Megatron-LM needs, too."""
        number = self.number(name)
        if number is None:
            raise InputError(f"{self.source}: --{name} is missing, as Megatron-LM would say, too")
        return number

    def real(self, name: str, default: float) -> float:
        """A number that follows a flag."""
        word = self.word(name)
        try:
            return default if word is None else float(word)
        except ValueError:
            raise InputError(f"{self.source}: --{name}: {word!r} is not a number") from None

    def choice(self, name: str, choices: Mapping[str, str], default: str) -> str:
        """What one of several words stands for."""
        word = self.word(name, default) or default
        if word not in choices:
            raise InputError(f"{self.source}: --{name}: {word!r} is not known; {nearest(word, choices)}")
        return choices[word]


def _layout(reading: _Reading) -> dict[str, Any]:
    tp = reading.degree("tensor-model-parallel-size")
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


def _data(reading: _Reading, ranks: int) -> Any:
    """The strategy of data parallelism. ranks: that hold the same weights."""
    overlap = reading.has("overlap-grad-reduce")
    reading.has("overlap-param-gather")
    if reading.has("use-torch-fsdp2"):
        kept = reading.has("torch-fsdp2-no-reshard-after-forward")
        return {"fsdp": {"reshard_after_forward": False}} if kept else "fsdp"
    if reading.has("use-megatron-fsdp") or reading.has("use-custom-fsdp"):
        reading.has("use-distributed-optimizer")
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


def _width(reading: _Reading) -> int:
    """Bytes of a gradient."""
    return 4 if _precision(reading).get("gradients", "fp32") == "fp32" else 2


def _dispatcher(reading: _Reading) -> dict[str, Any]:
    if not reading.has("num-experts"):
        return {}
    kind = reading.word("moe-token-dispatcher-type", "allgather")
    backend = reading.word("moe-flex-dispatcher-backend", "deepep")
    deepep = reading.has("moe-enable-deepep")
    sms = {name: reading.number(f"moe-{name}-num-sms") for name in ("deepep", "hybridep")}
    if kind == "flex" or deepep:
        own = sms.get(backend or "")
        return {"dispatcher": backend} | ({"dispatcher_sms": own} if own else {})
    return {"dispatcher": {"alltoall_seq": "alltoall"}.get(kind or "", kind)}


def _split(reading: _Reading) -> Any:
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


def _schedule(reading: _Reading, pp: int) -> dict[str, Any]:
    """Interleaved, where pipeline ranks have several stages."""
    many = reading.number("num-virtual-stages-per-pipeline-rank")
    each = reading.number("num-layers-per-virtual-pipeline-stage")
    drawn = reading.word("pipeline-model-parallel-layout")
    if drawn is not None:
        many = len(_stages(reading, drawn)) // pp
    if each:
        many = reading.needed("num-layers") // (pp * each)
    return {"schedule": {"interleaved": {"chunks": many}}} if many and many > 1 else {}


def _stages(reading: _Reading, drawn: str) -> Sequence[int]:
    """Layers of each stage of a layout string."""
    try:
        return read_stages(drawn).layers
    except InputError as error:
        raise InputError(f"{reading.source}: --pipeline-model-parallel-layout: {error}") from None


def _model(reading: _Reading, tp: int) -> dict[str, Any]:
    hidden, heads = reading.needed("hidden-size"), reading.needed("num-attention-heads")
    swiglu = reading.has("swiglu")
    ffn = reading.number("ffn-hidden-size", int(4 * hidden * 2 / 3 / 64) * 64 if swiglu else 4 * hidden)
    biased = not reading.has("disable-bias-linear")
    grouped = reading.has("group-query-attention")
    groups = reading.number("num-query-groups", 1)
    positions = reading.choice("position-embedding-type", POSITIONS, "learned_absolute")
    if reading.has("use-rotary-position-embeddings"):
        positions = "rotary"
    dropout = reading.real("hidden-dropout", 0.1) > 0.0 or reading.real("attention-dropout", 0.1) > 0.0
    model: dict[str, Any] = {
        "name": reading.source,
        "layers": reading.needed("num-layers"),
        "hidden": hidden,
        "ffn": ffn,
        "heads": heads,
        "kv_heads": groups if grouped else heads,
        "head_dim": reading.number("kv-channels"),
        "vocab": _vocabulary(reading, tp),
        "max_positions": reading.needed("max-position-embeddings") if positions == "learned" else None,
        "mlp": "swiglu" if swiglu else "gelu",
        "norm": reading.choice("normalization", NORMS, "LayerNorm"),
        "positions": positions,
        "rotary": reading.real("rotary-percent", 1.0) if positions == "rotary" else None,
        "tied_embeddings": not reading.has("untie-embeddings-and-output-weights"),
        "linear_bias": biased,
        "qkv_bias": biased or reading.has("add-qkv-bias"),
        "qk_norm": reading.has("qk-layernorm"),
        "dropout": dropout,
        "mtp_layers": reading.number("mtp-num-layers"),
        **_mixture(reading, ffn or 0),
        "latent": _latent(reading),
    }
    if model["latent"]:  # has heads, norms and biases of its own
        model |= dict.fromkeys(("kv_heads", "head_dim", "qkv_bias", "qk_norm", "rotary"))
    return {key: value for key, value in model.items() if value is not None}


def _vocabulary(reading: _Reading, tp: int) -> int:
    """Entries of the embedding, padded."""
    padded = reading.number("padded-vocab-size")
    if padded is not None:
        return padded
    size = reading.number("vocab-size")
    if size is None:
        kind = reading.word("tokenizer-type", "none") or "none"
        if kind not in _VOCABULARIES and "vocab-file" in reading.arguments:
            kind = "GPT2BPETokenizer"
        if kind not in _VOCABULARIES:
            raise InputError(
                f"{reading.source}: the vocabulary's size is that of a tokenizer which is not here ({kind}); add "
                "--vocab-size, such as --vocab-size 128256"
            )
        size = _VOCABULARIES[kind]
        reading.assumed.append(f"the vocabulary has {size:,} entries, as {kind} has")
    multiple = reading.degree("make-vocab-size-divisible-by", 128) * tp
    return -(-size // multiple) * multiple


def _mixture(reading: _Reading, ffn: int) -> dict[str, Any]:
    """Experts, and the runs of layers that have them where the first ones alone do not tell."""
    count = reading.number("num-experts")
    if count is None:
        return {}
    for name in ("moe-grouped-gemm", "moe-permute-fusion", "moe-router-fusion", "moe-pad-expert-input-to-capacity"):
        reading.has(name)
    experts: dict[str, Any] = {
        "count": count,
        "top_k": reading.number("moe-router-topk", 2),
        "ffn": reading.number("moe-ffn-hidden-size", ffn),
        "shared": reading.number("moe-shared-expert-intermediate-size"),
        "shared_gate": reading.has("moe-shared-expert-gate") or None,
        "router": "sigmoid" if reading.word("moe-router-score-function") == "sigmoid" else None,
        "router_bias": reading.has("moe-router-enable-expert-bias") or None,
        "groups": reading.number("moe-router-num-groups"),
        "limit": reading.number("moe-router-group-topk"),
        "capacity": reading.real("moe-expert-capacity-factor", 0.0) or None,
    }
    experts = {key: value for key, value in experts.items() if value is not None}
    there = _frequency(reading)
    dense = there.find("1")
    if "0" not in there[dense:]:
        return {"experts": experts | ({"dense_layers": dense} if dense else {})}
    every = dense + 1
    if there == "".join(str(int(at % every == 0)) for at in range(1, len(there) + 1)):
        return {"experts": experts | {"every": every}}
    runs = ((bit, len(list(run))) for bit, run in groupby(there))
    return {
        "experts": experts,
        "stack": [{"layers": many} if bit == "1" else {"layers": many, "experts": 0} for bit, many in runs],
    }


def _frequency(reading: _Reading) -> str:
    """A 1 for each layer that has experts: the first of each so many, or as a list such as ([0]*3+[1]*58) has it."""
    layers, text = reading.needed("num-layers"), reading.word("moe-layer-freq", "1") or "1"
    if text.isdecimal() and int(text):
        return "".join(str(int(at % int(text) == 0)) for at in range(layers))
    plain = text.replace(" ", "").strip("()")
    part = r"\[[01](?:,[01])*\](?:\*\d+)?"
    found = (
        re.findall(r"\[([01](?:,[01])*)\](?:\*(\d+))?", plain) if re.fullmatch(rf"{part}(?:\+{part})*", plain) else []
    )
    flags = "".join(digits.replace(",", "") * min(int(many or 1), layers + 1) for digits, many in found)
    if len(flags) != layers or "1" not in flags:
        raise InputError(
            f"{reading.source}: --moe-layer-freq: {text!r} is not read as {layers} layers; write such as [0]*3+[1]*58"
        )
    return flags


def _latent(reading: _Reading) -> dict[str, int | None] | None:
    if not reading.has("multi-latent-attention"):
        return None
    return {
        "query_rank": reading.number("q-lora-rank", 0),
        "kv_rank": reading.number("kv-lora-rank", 32),
        "nope": reading.number("qk-head-dim", 128),
        "rope": reading.number("qk-pos-emb-head-dim", 64),
        "value_dim": reading.number("v-head-dim", 128),
    }


def _training(reading: _Reading, replicas: int) -> dict[str, Any]:
    microbatch = reading.needed("micro-batch-size")
    batch = reading.number("global-batch-size")
    if batch is None:
        batch = microbatch * replicas
        reading.assumed.append(f"a step has {batch:,} sequences: a microbatch for each replica")
    loss = reading.has("cross-entropy-loss-fusion")
    training: dict[str, Any] = {
        "sequence": reading.needed("seq-length"),
        "global_batch": batch,
        "microbatch": microbatch,
        "precision": _precision(reading),
        "recompute": _recompute(reading),
        "attention": "standard" if reading.word("attention-backend", "auto") in ("unfused", "local") else None,
        "loss": "fused" if loss else None,
        "optimizer": "sgd" if reading.word("optimizer", "adam") == "sgd" else None,
        "gradient_clipping": None if reading.real("clip-grad", 1.0) > 0.0 else False,
    }
    reading.has("cross-entropy-fusion-impl")
    return {key: value for key, value in training.items() if value is not None}


def _precision(reading: _Reading) -> dict[str, Any]:
    narrow = reading.has("fp8-format") or reading.has("fp8")
    recipe = reading.choice("fp8-recipe", RECIPES, "delayed")
    half = "fp16" if reading.has("fp16") else "bf16" if reading.has("bf16") else "fp32"
    compute = recipe if narrow else half
    compute = "nvfp4" if reading.has("fp4-format") or reading.has("fp4") else compute
    wide = reading.has("accumulate-allreduce-grads-in-fp32")
    halved = {"gradients": "fp16"} if half == "fp16" and not wide else {}
    halved = {"gradients": "bf16"} if reading.has("grad-reduce-in-bf16") else halved
    reading.has("use-precision-aware-optimizer")
    formats = {"main-grads-dtype": "gradients", "exp-avg-dtype": "moments", "main-params-dtype": "master"}
    kept = {key: word for name, key in formats.items() if (word := reading.word(name)) is not None}
    reading.has("exp-avg-sq-dtype")
    stored = reading.has("fp8-param-gather")
    if compute == half:
        return {"compute": compute, **halved, **kept}
    return {"compute": compute, **halved, **kept, **(_stored(compute) if stored else {}), **_ends(reading)}


def _stored(recipe: str) -> dict[str, str]:
    """Matrices in the format of their products; those of MXFP8 are gathered wide and then cast."""
    narrow = load_recipe(recipe).products.narrow
    stored = {} if narrow is None else {"stored": narrow.value}
    return stored | ({"gathered": "bf16"} if recipe == "mxfp8" else {})


def _ends(reading: _Reading) -> dict[str, int | None]:
    """First and last layers that keep BF16."""
    names = {"first_layers": "num-layers-at-start-in-bf16", "last_layers": "num-layers-at-end-in-bf16"}
    found = {key: reading.number(name, 1) for key, name in names.items()}
    return found if reading.has("first-last-layers-bf16") else {}


def _framework(reading: _Reading) -> Any:
    """Megatron-LM, and what of passes it has in CUDA graphs; attention alone of a dense model no key says."""
    older = [reading.has(name) for name in ("enable-cuda-graph", "external-cuda-graph")]
    if reading.choice("cuda-graph-impl", _GRAPHS, "none") == "none" and not any(older):
        return "megatron"
    scopes = set(reading.arguments.get("cuda-graph-scope", ("full",)))
    whole = bool(scopes & {"full", "full_iteration"})
    if not whole and not ("attn" in scopes and reading.has("num-experts")):
        return "megatron"
    reading.has("cuda-graph-scope")
    return {"name": "megatron", "cuda_graphs": True if whole else "outside_experts"}


def _recompute(reading: _Reading) -> Any:
    layers, method = reading.number("recompute-num-layers"), reading.word("recompute-method")
    modules = reading.arguments.get("recompute-modules", ("core_attn",)) if reading.has("recompute-modules") else None
    match reading.word("recompute-granularity", "selective" if reading.has("recompute-activations") else "none"):
        case "full":
            return {"layers": layers} if method == "block" and layers else "full"
        case "selective":
            return {"modules": [*(modules or ("core_attn",))]}
    return None
