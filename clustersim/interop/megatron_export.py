"""How does a Megatron-LM command line say a scenario?

The inverse of `megatron_import`, by the same names; what differs when it is read again is what it cannot say (`exported`).
Arguments whose default is meant are left out.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from math import gcd
from shlex import quote
from typing import Final

from clustersim.common.units import Bytes
from clustersim.interop.megatron_import import RECIPES, SHARDED
from clustersim.interop.megatron_model import NORMS, POSITIONS, skipping
from clustersim.model.framework import GraphCapture
from clustersim.model.layer_stack import FullAttention, LatentAttention, MlpType, MoeMlp, ScoreFunction, layer_specs
from clustersim.model.training import AttentionBackend, FullRecompute, LossImplementation, Optimizer, SelectiveRecompute
from clustersim.model.transformer import PositionEncoding, TransformerModel
from clustersim.parallel.data_parallel_strategy import DdpStrategy, FullyShard, Zero1
from clustersim.parallel.layer_partition import AccountForEnds, EndRankLayers, PipelineLayoutString, partition_layers
from clustersim.program.task import TokenDispatcher
from clustersim.scenario import Scenario
from clustersim.scenario.config.scenario import ScenarioConfig
from clustersim.schedules.interleaved import Interleaved

_PADDED: Final = 128
_WIDTH: Final = 100

Flag = tuple[str, ...]
"""An argument without its dashes, and what follows it."""
_GRAPHS: Final[Mapping[GraphCapture, Sequence[Flag]]] = {
    GraphCapture.NOTHING: (),
    GraphCapture.ALL: (("cuda-graph-impl", "local"),),
    GraphCapture.OUTSIDE_EXPERTS: (
        ("cuda-graph-impl", "transformer_engine"),
        ("cuda-graph-scope", "attn", "moe_router"),
    ),
}


def megatron_text(scenario: Scenario) -> str:
    """A script that launches it with torchrun."""
    groups = (
        _model(scenario.model, scenario),
        _layout(scenario),
        (*_training(scenario), *_GRAPHS[scenario.framework.graph_capture]),
    )
    lines = [line for group in groups for line in _lines(map(_word, group))]
    each = gcd(scenario.layout.world_size, scenario.cluster.gpus_per_node)
    start = f"torchrun --nproc_per_node {each} --nnodes {scenario.layout.world_size // each} pretrain_gpt.py"
    return "#!/bin/bash\n" + " \\\n    ".join([start, *lines]) + "\n"


def _lines(words: Iterable[str]) -> list[str]:
    """Words in lines that are read without scrolling."""
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + len(word) < _WIDTH:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def _word(flag: Flag) -> str:
    return " ".join([f"--{flag[0]}", *map(quote, flag[1:])])


def _model(model: TransformerModel, scenario: Scenario) -> Iterator[Flag]:
    layers = layer_specs(model.stack)
    attention = layers[0].attention
    routed = next((layer.mlp for layer in layers if isinstance(layer.mlp, MoeMlp)), None)
    dense = next(
        (
            layer_spec.mlp
            for layer_spec in layers
            if layer_spec.mlp is not None and not isinstance(layer_spec.mlp, MoeMlp)
        ),
        routed,
    )
    yield "num-layers", str(model.layer_count)
    yield "hidden-size", str(model.hidden)
    if dense is not None:
        yield "ffn-hidden-size", str(dense.ffn)
        yield from [("swiglu",)] if dense.form is MlpType.SWIGLU else []
    match attention:
        case FullAttention() as full:
            yield from _full(full, model)
            yield from [("softmax-type", "learnable")] if full.sinks else []
            yield from _windows(model)
        case LatentAttention() as latent:
            yield from _latent(latent)
    yield from _form(model)
    yield from _vocabulary(model, scenario.layout.tp)
    yield "seq-length", str(scenario.training.sequence)
    positions = model.max_positions if model.positions is PositionEncoding.LEARNED else scenario.training.sequence
    yield "max-position-embeddings", str(positions)
    yield from [("mtp-num-layers", str(model.mtp_layers))] if model.mtp_layers else []
    if routed is not None:
        yield from _experts(routed, [isinstance(item.mlp, MoeMlp) for item in layers])


def _full(full: FullAttention, model: TransformerModel) -> Iterator[Flag]:
    yield "num-attention-heads", str(full.heads)
    if full.kv_heads != full.heads:
        yield ("group-query-attention",)
        yield "num-query-groups", str(full.kv_heads)
    if full.head_dim * full.heads != model.hidden:
        yield "kv-channels", str(full.head_dim)
    if full.qkv_bias and not model.linear_bias:
        yield ("add-qkv-bias",)
    if full.qk_norm is not None:
        yield ("qk-layernorm",)
    if full.rotary != 1.0:
        yield "rotary-percent", str(full.rotary)


def _windows(model: TransformerModel) -> Iterator[Flag]:
    """A window of tokens before each, and in which layers there is none."""
    windows = [
        layer_spec.attention.window for layer_spec in layer_specs(model.stack) if layer_spec.attention is not None
    ]
    size = next((window for window in windows if window is not None), None)
    if size is None:
        return
    yield "window-size", f"{size - 1},0"
    there = "".join(str(int(item is not None)) for item in windows)
    every = there.find("0") + 1
    if every and there == skipping(every, len(there)):
        yield "window-attn-skip-freq", str(every)


def _latent(latent: LatentAttention) -> Iterator[Flag]:
    """Its vectors are normalised, which Megatron-LM does where queries and keys are."""
    yield "num-attention-heads", str(latent.heads)
    yield ("multi-latent-attention",)
    yield ("qk-layernorm",)
    yield from [("q-lora-rank", str(latent.query_rank))] if latent.query_rank else []
    yield "kv-lora-rank", str(latent.kv_rank)
    yield "qk-head-dim", str(latent.nope)
    yield "qk-pos-emb-head-dim", str(latent.rope)
    yield "v-head-dim", str(latent.value_dim)


def _form(model: TransformerModel) -> Iterator[Flag]:
    norm = _word_of(NORMS, model.norm.value)
    positions = _word_of(POSITIONS, model.positions.value)
    yield from [("normalization", norm)] if norm and norm != "LayerNorm" else []
    yield from [("position-embedding-type", positions)] if positions and positions != "learned_absolute" else []
    if not model.tied_embeddings:
        yield ("untie-embeddings-and-output-weights",)
    if not model.linear_bias:
        yield ("disable-bias-linear",)
    if not model.dropout:
        yield "attention-dropout", "0.0"
        yield "hidden-dropout", "0.0"


def _vocabulary(model: TransformerModel, tp: int) -> Iterator[Flag]:
    """Entries, and a multiple of which they are padded so that they stay as many."""
    yield "vocab-size", str(model.vocab)
    if model.vocab % (_PADDED * tp):
        yield "make-vocab-size-divisible-by", str(gcd(_PADDED, model.vocab // tp) or 1)


def _experts(routed: MoeMlp, there: list[bool]) -> Iterator[Flag]:
    router = routed.router
    yield "num-experts", str(routed.experts)
    yield "moe-router-topk", str(routed.top_k)
    yield "moe-ffn-hidden-size", str(routed.ffn)
    yield from [("moe-layer-freq", _frequency(there))] if not all(there) else []
    yield from [("moe-shared-expert-intermediate-size", str(routed.shared))] if routed.shared else []
    yield from [("moe-shared-expert-gate",)] if routed.shared_gate else []
    yield from [("moe-router-score-function", "sigmoid")] if router.scores is ScoreFunction.SIGMOID else []
    yield from [("moe-router-enable-expert-bias",)] if router.bias else []
    yield from [("moe-router-num-groups", str(router.groups))] if router.groups > 1 else []
    yield from [("moe-router-group-topk", str(router.limit))] if router.limit else []
    if routed.capacity is not None:
        yield "moe-expert-capacity-factor", str(routed.capacity)
        yield ("moe-pad-expert-input-to-capacity",)


def _frequency(there: Sequence[bool]) -> str:
    """Which layers have experts, as a list that Megatron-LM evaluates.

    >>> _frequency([False, True, True]), _frequency([False, True] * 24)
    ('[0]*1+[1]*2', '[0,1]*24')
    """
    bits = "".join(str(int(item)) for item in there)
    period = next(size for size in range(1, len(bits) + 1) if bits == bits[:size] * (len(bits) // size))
    if period < len(bits):
        return f"[{','.join(bits[:period])}]*{len(bits) // period}"
    return "+".join(f"[{bit}]*{len(list(run))}" for bit, run in groupby(bits))


def _layout(scenario: Scenario) -> Iterator[Flag]:
    layout = scenario.layout.as_configured
    sizes = {
        "tensor-model-parallel-size": layout.tp,
        "context-parallel-size": layout.cp,
        "pipeline-model-parallel-size": layout.pp,
        "expert-model-parallel-size": layout.ep,
    }
    yield from ((name, str(size)) for name, size in sizes.items() if size > 1)
    if layout.effective_etp != layout.tp:
        yield "expert-tensor-parallel-size", str(layout.effective_etp)
    yield from [("use-tp-pp-dp-mapping",)] if layout.order == ("tp", "cp", "pp", "dp") else []
    flags = {
        "sequence-parallel": layout.sequence_parallel and layout.tp > 1,
        "tp-comm-overlap": layout.tensor_overlap,
        "no-overlap-p2p-communication": not layout.pipeline_overlap,
        "overlap-moe-expert-parallel-comm": layout.overlap_expert_communication,
        "delay-wgrad-compute": layout.delay_wgrad,
        "moe-shared-expert-overlap": layout.overlap_shared_experts,
    }
    yield from ((name,) for name, given in flags.items() if given)
    yield from _data(scenario)
    if any(isinstance(run.spec.mlp, MoeMlp) for run in scenario.model.stack):
        yield from _dispatcher(layout.dispatcher, layout.dispatcher_sms)
    yield from _pipeline(scenario) if layout.pp > 1 else ()


def _data(scenario: Scenario) -> Iterator[Flag]:
    layout = scenario.layout
    match layout.data:
        case DdpStrategy(overlap=overlap):
            yield from [("overlap-grad-reduce",)] if overlap else []
            yield from _bucket(scenario, layout.data.bucket)
        case Zero1(zero_stage=1, overlap=overlap, shard=shard):
            yield ("use-distributed-optimizer",)
            yield from [("overlap-grad-reduce",), ("overlap-param-gather",)] if overlap else []
            if shard is not None:
                yield "num-distributed-optimizer-instances", str(layout.cp * layout.dp // shard)
            yield from _bucket(scenario, layout.data.bucket)
        case FullyShard(copies=True) as sharded:
            yield ("use-torch-fsdp2",)
            yield from [("torch-fsdp2-no-reshard-after-forward",)] if sharded.reshard_after_forward is False else []
        case Zero1() | FullyShard() as strategy:
            yield ("use-megatron-fsdp",)
            yield "data-parallel-sharding-strategy", _word_of(SHARDED, f"zero{strategy.zero_stage}") or "no_shard"


def _bucket(scenario: Scenario, size: Bytes | None) -> Iterator[Flag]:
    """In elements; None is Megatron-LM's rule."""
    if size is not None:
        yield "ddp-bucket-size", str(round(size / scenario.training.recipe.weight_formats.gradients.bytes))


def _dispatcher(dispatcher: TokenDispatcher, sms: int | None) -> Iterator[Flag]:
    plain = dispatcher in (TokenDispatcher.ALL_GATHER, TokenDispatcher.ALL_TO_ALL)
    yield "moe-token-dispatcher-type", dispatcher.value if plain else "flex"
    if dispatcher is TokenDispatcher.DEEPEP:
        yield ("moe-enable-deepep",)
        yield from [("moe-deepep-num-sms", str(sms))] if sms else []
    if dispatcher is TokenDispatcher.HYBRIDEP:
        yield "moe-flex-dispatcher-backend", dispatcher.value
        yield from [("moe-hybridep-num-sms", str(sms))] if sms else []


def _pipeline(scenario: Scenario) -> Iterator[Flag]:
    """How layers are split into stages, and how many stages each rank has."""
    layout, layers, placement = scenario.layout.as_configured, scenario.model.layer_count, scenario.placement
    split, counts = layout.layers_per_stage, partition_layers(layout.layers_per_stage, layers, placement)
    even = len(set(counts)) == 1
    match split:
        case EndRankLayers(first=first, last=last):
            yield from [("decoder-first-pipeline-num-layers", str(first))] if first is not None else []
            yield from [("decoder-last-pipeline-num-layers", str(last))] if last is not None else []
        case AccountForEnds(embedding=embedding, head=head):
            yield from [("account-for-embedding-in-pipeline-split",)] if embedding else []
            yield from [("account-for-loss-in-pipeline-split",)] if head else []
        case PipelineLayoutString() as drawn if any(drawn.mtp_layer_counts) or not even:
            yield "pipeline-model-parallel-layout", _drawn(counts, drawn.mtp_layer_counts)
            return
        case _ if not even:
            ahead = (*[0] * (len(counts) - 1), scenario.model.mtp_layers)
            yield "pipeline-model-parallel-layout", _drawn(counts, ahead)
            return
    if isinstance(scenario.schedule, Interleaved):
        yield "num-virtual-stages-per-pipeline-rank", str(scenario.schedule.chunks)


def _drawn(counts: tuple[int, ...], ahead: tuple[int, ...]) -> str:
    """A layout string."""
    stages = [_letters("t", many) + _letters("m", further) for many, further in zip(counts, ahead, strict=True)]
    return f"E{'|'.join(stages)}L"


def _letters(letter: str, many: int) -> str:
    return f"{letter}*{many}" if many > 2 else letter * many


def _training(scenario: Scenario) -> Iterator[Flag]:
    training = scenario.training
    yield "micro-batch-size", str(training.microbatch)
    yield "global-batch-size", str(training.global_batch)
    yield from _precision(scenario)
    match training.recompute:
        case FullRecompute(layers=None):
            yield from (("recompute-granularity", "full"), ("recompute-method", "uniform"))
            yield "recompute-num-layers", "1"
        case FullRecompute(layers=layers):
            yield from (("recompute-granularity", "full"), ("recompute-method", "block"))
            yield "recompute-num-layers", str(layers)
        case SelectiveRecompute(modules=modules):
            yield "recompute-granularity", "selective"
            yield "recompute-modules", *sorted(module.value for module in modules)
    yield from [("attention-backend", "unfused")] if training.attention is AttentionBackend.STANDARD else []
    yield from [("cross-entropy-loss-fusion",)] if training.loss is LossImplementation.FUSED else []
    yield from [("optimizer", "sgd")] if training.optimizer is Optimizer.SGD else []
    yield from [("clip-grad", "0.0")] if not training.gradient_clipping else []


def _precision(scenario: Scenario) -> Iterator[Flag]:
    said = ScenarioConfig.model_validate(scenario.to_mapping()).training.precision
    recipe = _word_of(RECIPES, said.compute)
    half = "fp16" if said.compute == "fp16" else "bf16"
    yield from [(half,)] if said.compute not in ("fp32", "tf32") else []
    if recipe is not None:
        yield "fp8-format", "hybrid"
        yield "fp8-recipe", recipe
    if said.compute == "nvfp4":
        yield "fp4-format", "e2m1"
    yield from [("fp8-param-gather",)] if said.stored is not None else []
    if said.first_layers or said.last_layers:
        yield ("first-last-layers-bf16",)
        yield "num-layers-at-start-in-bf16", str(said.first_layers)
        yield "num-layers-at-end-in-bf16", str(said.last_layers)
    formats = scenario.training.recipe.weight_formats
    if half == "bf16" and formats.gradients.value == "bf16":
        yield ("grad-reduce-in-bf16",)
    if half == "fp16" and formats.gradients.value == "fp32":
        yield ("accumulate-allreduce-grads-in-fp32",)
    kept = {"exp-avg-dtype": formats.moments, "exp-avg-sq-dtype": formats.moments}
    kept |= {} if formats.master is None else {"main-params-dtype": formats.master}
    narrow = {name: dtype.value for name, dtype in kept.items() if dtype.value != "fp32"}
    yield from [("use-precision-aware-optimizer",)] if narrow else []
    yield from narrow.items()


def _word_of(words: Mapping[str, str], meant: str) -> str | None:
    """The first word that stands for something; None: there is none."""
    return next((word for word, stands in words.items() if stands == meant), None)
