"""How does a Megatron-LM command line express a scenario? Export.

The inverse of `megatron_import`, with the same names; differences after re-import are what it cannot
express (`export_scenario`). Arguments that equal their defaults are omitted.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from math import gcd
from shlex import quote
from typing import Final

from clustersim.common.units import Bytes
from clustersim.interop.megatron_arguments import CP_KIND_BY_FLAG
from clustersim.interop.megatron_hybrid import has_pattern, hybrid_flags
from clustersim.interop.megatron_import import RECIPE_BY_FLAG, ROUTING_FUSION_FLAGS, STRATEGY_BY_FLAG
from clustersim.interop.megatron_model import NORM_BY_FLAG, POSITIONS_BY_FLAG, window_flags
from clustersim.model.attention_spec import FullAttention, LatentAttention
from clustersim.model.framework import GraphCapture
from clustersim.model.layer_stack import MlpType, MoeMlp, ScoreFunction, layer_specs
from clustersim.model.optimizers import AnyOptimizer, Dion, Muon, Optimizer, Soap
from clustersim.model.sparse_attention_spec import DeepseekSparseAttention
from clustersim.model.training import AttentionBackend, FullRecompute, LossImplementation, SelectiveRecompute
from clustersim.model.transformer import PositionEncoding, TransformerModel
from clustersim.parallel.context_parallel import ContextParallelKind
from clustersim.parallel.data_parallel_strategy import DdpStrategy, FullyShard, Zero1
from clustersim.parallel.layer_partition import AccountForEnds, EndRankLayers, PipelineLayoutString, partition_layers
from clustersim.parallel.layout import Layout
from clustersim.program.task import TokenDispatcher
from clustersim.scenario import Scenario
from clustersim.scenario.config.scenario import ScenarioConfig

_VOCAB_MULTIPLE: Final = 128
_LINE_WIDTH: Final = 100

Flag = tuple[str, ...]
"""An argument without its dashes, and its values."""
_CUDA_GRAPH_FLAGS: Final[Mapping[GraphCapture, Sequence[Flag]]] = {
    GraphCapture.NOTHING: (),
    GraphCapture.ALL: (("cuda-graph-impl", "local"),),
    GraphCapture.OUTSIDE_EXPERTS: (
        ("cuda-graph-impl", "transformer_engine"),
        ("cuda-graph-scope", "attn", "moe_router"),
    ),
}

_LOSS_FLAGS: Final[Mapping[LossImplementation, Sequence[Flag]]] = {
    LossImplementation.FUSED: (("cross-entropy-loss-fusion",),),
    LossImplementation.CUT_CROSS_ENTROPY: (("cross-entropy-loss-fusion",), ("cross-entropy-fusion-impl", "linear")),
}
_UNUSED_HEAD_DIM: Final = 64  # of a number of heads that Megatron-LM requires where no layer has attention


def megatron_script(scenario: Scenario) -> str:
    """A script that launches the run with torchrun."""
    lines = [line for group in flag_groups(scenario) for line in _wrap_lines(map(_format_flag, group))]
    gpus_per_node = gcd(scenario.layout.world_size, scenario.cluster.gpus_per_node)
    command = (
        f"torchrun --nproc_per_node {gpus_per_node} --nnodes {scenario.layout.world_size // gpus_per_node} "
        f"{'pretrain_hybrid.py' if has_pattern(scenario.model) else 'pretrain_gpt.py'}"
    )
    return "#!/bin/bash\n" + " \\\n    ".join([command, *lines]) + "\n"


def flag_groups(scenario: Scenario) -> tuple[Iterable[Flag], ...]:
    """The arguments of the model, of the layout, and of the training."""
    return (
        _model_flags(scenario.model, scenario),
        _layout_flags(scenario),
        (*_training_flags(scenario), *_CUDA_GRAPH_FLAGS[scenario.framework.graph_capture]),
    )


def _wrap_lines(tokens: Iterable[str]) -> list[str]:
    """Tokens wrapped into lines of limited width."""
    lines: list[str] = []
    for token in tokens:
        if lines and len(lines[-1]) + len(token) < _LINE_WIDTH:
            lines[-1] += f" {token}"
        else:
            lines.append(token)
    return lines


def _format_flag(flag: Flag) -> str:
    return " ".join([f"--{flag[0]}", *map(quote, flag[1:])])


def _model_flags(model: TransformerModel, scenario: Scenario) -> Iterator[Flag]:
    layers = layer_specs(model.stack)
    attention = next((layer.attention for layer in layers if layer.attention is not None), None)
    moe_mlp = next((layer.moe for layer in layers if layer.moe is not None), None)
    dense_mlp = next(
        (layer_spec.mlp for layer_spec in layers if layer_spec.mlp is not None and layer_spec.moe is None),
        moe_mlp,
    )
    yield "num-layers", str(model.layer_count)
    yield "hidden-size", str(model.hidden)
    if dense_mlp is not None:
        yield "ffn-hidden-size", str(dense_mlp.ffn)
        yield from [("swiglu",)] if dense_mlp.form is MlpType.SWIGLU else []
    match attention:
        case FullAttention() as full:
            yield from _attention_flags(full, model)
            yield from [("softmax-type", "learnable")] if full.attention_sinks else []
            yield from _window_flags(model)
        case LatentAttention() as latent:
            yield from _mla_flags(latent)
        case DeepseekSparseAttention() as sparse:
            yield from _mla_flags(sparse.latent)
            yield from _dsa_flags(sparse)
        case None:
            yield "num-attention-heads", str(max(1, model.hidden // _UNUSED_HEAD_DIM))
    yield from hybrid_flags(model)
    yield from _layer_option_flags(model)
    yield from _vocab_flags(model, scenario.layout.tp)
    yield "seq-length", str(scenario.training.sequence)
    positions = model.max_positions if model.positions is PositionEncoding.LEARNED else scenario.training.sequence
    yield "max-position-embeddings", str(positions)
    yield from [("mtp-num-layers", str(model.mtp_layers))] if model.mtp_layers else []
    if moe_mlp is not None:
        yield from _moe_flags(moe_mlp, [] if has_pattern(model) else [layer.moe is not None for layer in layers])


def _attention_flags(full: FullAttention, model: TransformerModel) -> Iterator[Flag]:
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
    if full.attention_output_gate:
        yield ("attention-output-gate",)
    if full.rotary_percent not in (0.0, 1.0):
        yield "rotary-percent", str(full.rotary_percent)


def _window_flags(model: TransformerModel) -> Iterator[Flag]:
    """The sliding window, and the layers without one."""
    windows = [spec.attention.window for spec in layer_specs(model.stack) if spec.attention is not None]
    size = next((window for window in windows if window is not None), None)
    if size is None:
        return
    yield "window-size", f"{size - 1},0"
    layer_flags = "".join(str(int(window is not None)) for window in windows)
    period = layer_flags.find("0") + 1
    if period and layer_flags == window_flags(period, len(layer_flags)):
        yield "window-attn-skip-freq", str(period)


def _mla_flags(latent: LatentAttention) -> Iterator[Flag]:
    """MLA; its latent vectors are normalized, which Megatron-LM does with --qk-layernorm."""
    yield "num-attention-heads", str(latent.heads)
    yield ("multi-latent-attention",)
    yield ("qk-layernorm",)
    yield from [("q-lora-rank", str(latent.q_lora_rank))] if latent.q_lora_rank else []
    yield "kv-lora-rank", str(latent.kv_lora_rank)
    yield "qk-head-dim", str(latent.qk_nope_head_dim)
    yield "qk-pos-emb-head-dim", str(latent.qk_rope_head_dim)
    yield "v-head-dim", str(latent.v_head_dim)


def _dsa_flags(sparse: DeepseekSparseAttention) -> Iterator[Flag]:
    """DeepSeek's sparse attention with fused kernels, whose indexer learns from the selected keys."""
    yield "experimental-attention-variant", "dsa"
    yield "dsa-indexer-n-heads", str(sparse.index_heads)
    yield "dsa-indexer-head-dim", str(sparse.index_head_dim)
    yield "dsa-indexer-topk", str(sparse.index_topk)
    yield "dsa-indexer-loss-coeff", "0.01"
    yield ("dsa-indexer-use-sparse-loss",)
    yield "dsa-kernel-backend", "cudnn"


def _layer_option_flags(model: TransformerModel) -> Iterator[Flag]:
    norm = _flag_for(NORM_BY_FLAG, model.norm.value)
    positions = _flag_for(POSITIONS_BY_FLAG, model.positions.value)
    attentions = model.distinct_attentions
    if model.positions is PositionEncoding.ROTARY and not any(one.rotary_percent for one in attentions):
        positions = "none"
    yield from [("normalization", norm)] if norm and norm != "LayerNorm" else []
    yield from [("position-embedding-type", positions)] if positions and positions != "learned_absolute" else []
    if not model.tied_embeddings:
        yield ("untie-embeddings-and-output-weights",)
    if not model.linear_bias:
        yield ("disable-bias-linear",)
    if not model.dropout:
        yield "attention-dropout", "0.0"
        yield "hidden-dropout", "0.0"


def _vocab_flags(model: TransformerModel, tp: int) -> Iterator[Flag]:
    """The vocabulary size, and a multiple for padding that leaves it unchanged."""
    yield "vocab-size", str(model.vocab)
    if model.vocab % (_VOCAB_MULTIPLE * tp):
        yield "make-vocab-size-divisible-by", str(gcd(_VOCAB_MULTIPLE, model.vocab // tp) or 1)


def _moe_flags(moe_mlp: MoeMlp, is_moe_layer: list[bool]) -> Iterator[Flag]:
    router = moe_mlp.router
    yield "num-experts", str(moe_mlp.experts)
    yield "moe-router-topk", str(moe_mlp.top_k)
    yield "moe-ffn-hidden-size", str(moe_mlp.ffn)
    yield from [("moe-layer-freq", _format_layer_list(is_moe_layer))] if not all(is_moe_layer) else []
    yield from [("moe-shared-expert-intermediate-size", str(moe_mlp.shared))] if moe_mlp.shared else []
    yield from [("moe-shared-expert-gate",)] if moe_mlp.shared_gate else []
    yield from [("moe-router-score-function", "sigmoid")] if router.scores is ScoreFunction.SIGMOID else []
    yield from [("moe-router-enable-expert-bias",)] if router.bias else []
    yield from [("moe-router-num-groups", str(router.num_groups))] if router.num_groups > 1 else []
    yield from [("moe-router-group-topk", str(router.group_topk))] if router.group_topk else []
    if moe_mlp.capacity_factor is not None:
        yield "moe-expert-capacity-factor", str(moe_mlp.capacity_factor)
        yield ("moe-pad-expert-input-to-capacity",)


def _format_layer_list(is_moe_layer: Sequence[bool]) -> str:
    """The MoE layers as a list expression that Megatron-LM evaluates.

    >>> _format_layer_list([False, True, True]), _format_layer_list([False, True] * 24)
    ('[0]*1+[1]*2', '[0,1]*24')
    """
    bits = "".join(str(int(is_moe)) for is_moe in is_moe_layer)
    period = next(size for size in range(1, len(bits) + 1) if bits == bits[:size] * (len(bits) // size))
    if period < len(bits):
        return f"[{','.join(bits[:period])}]*{len(bits) // period}"
    return "+".join(f"[{bit}]*{len(list(group))}" for bit, group in groupby(bits))


def _layout_flags(scenario: Scenario) -> Iterator[Flag]:
    layout = scenario.layout.as_configured
    sizes = {
        "tensor-model-parallel-size": layout.tp,
        "context-parallel-size": layout.cp,
        "pipeline-model-parallel-size": layout.pp,
        "expert-model-parallel-size": layout.ep,
    }
    yield from ((name, str(size)) for name, size in sizes.items() if size > 1)
    yield from _context_flags(layout)
    if layout.effective_etp != layout.tp:
        yield "expert-tensor-parallel-size", str(layout.effective_etp)
    yield from [("use-tp-pp-dp-mapping",)] if layout.order == ("tp", "cp", "pp", "dp") else []
    flags = {
        "sequence-parallel": layout.sequence_parallel and layout.tp > 1,
        "tp-comm-overlap": layout.tp_comm_overlap,
        "no-overlap-p2p-communication": not layout.overlap_p2p_comm and scenario.placement.max_chunks > 1,
        "overlap-moe-expert-parallel-comm": layout.overlap_moe_expert_parallel_comm,
        "delay-wgrad-compute": layout.delay_wgrad_compute,
        "moe-shared-expert-overlap": layout.moe_shared_expert_overlap,
    }
    yield from ((name,) for name, is_set in flags.items() if is_set)
    yield from _data_parallel_flags(scenario)
    if any(run.spec.moe is not None for run in scenario.model.stack):
        yield from _dispatcher_flags(layout.dispatcher, layout.dispatcher_num_sms)
        overheads = scenario.training.overheads
        yield from ((flag,) for flag, key in ROUTING_FUSION_FLAGS.items() if not getattr(overheads, key))
    yield from _pipeline_flags(scenario) if layout.pp > 1 else ()


def _context_flags(layout: Layout) -> Iterator[Flag]:
    """How context-parallel ranks exchange what attention needs, where it is not the default, a ring."""
    flag = _flag_for(CP_KIND_BY_FLAG, layout.cp_kind.value)
    if layout.cp == 1 or layout.cp_kind is ContextParallelKind.RING or flag is None:
        return
    yield "cp-comm-type", flag
    if layout.inner_ranks > 1:
        yield "hierarchical-context-parallel-sizes", str(layout.inner_ranks), str(layout.cp // layout.inner_ranks)


def _data_parallel_flags(scenario: Scenario) -> Iterator[Flag]:
    layout = scenario.layout
    match layout.data:
        case DdpStrategy(overlap=overlap):
            yield from [("overlap-grad-reduce",)] if overlap else []
            yield from _bucket_flags(scenario, layout.data.bucket)
        case Zero1(zero_stage=1, overlap=overlap, shard=shard) as strategy:
            yield ("use-distributed-optimizer",)
            yield from [("overlap-grad-reduce",)] if overlap else []
            yield from [("overlap-param-gather",)] if strategy.gathers_in_forward else []
            if shard is not None:
                yield "num-distributed-optimizer-instances", str(layout.cp * layout.dp // shard)
            yield from _bucket_flags(scenario, layout.data.bucket)
        case FullyShard(copies=True) as sharded:
            yield ("use-torch-fsdp2",)
            yield from [("torch-fsdp2-no-reshard-after-forward",)] if sharded.reshard_after_forward is False else []
        case Zero1() | FullyShard() as strategy:
            yield ("use-megatron-fsdp",)
            yield (
                "data-parallel-sharding-strategy",
                _flag_for(STRATEGY_BY_FLAG, "fsdp" if strategy.shards_parameters else f"zero{strategy.zero_stage}")
                or "no_shard",
            )


def _bucket_flags(scenario: Scenario, size: Bytes | None) -> Iterator[Flag]:
    """The bucket size in elements; None is Megatron-LM's default."""
    if size is not None:
        yield "ddp-bucket-size", str(round(size / scenario.training.recipe.weight_formats.gradients.bytes))


def _dispatcher_flags(dispatcher: TokenDispatcher, sm_count: int | None) -> Iterator[Flag]:
    is_plain = dispatcher in (TokenDispatcher.ALL_GATHER, TokenDispatcher.ALL_TO_ALL)
    yield "moe-token-dispatcher-type", dispatcher.value if is_plain else "flex"
    if dispatcher in (TokenDispatcher.DEEPEP, TokenDispatcher.DEEPEP_UCCL):  # UCCL's module takes DeepEP's name
        yield ("moe-enable-deepep",)
        yield from [("moe-deepep-num-sms", str(sm_count))] if sm_count else []
    if dispatcher is TokenDispatcher.HYBRIDEP:
        yield "moe-flex-dispatcher-backend", dispatcher.value
        yield from [("moe-hybridep-num-sms", str(sm_count))] if sm_count else []


def _pipeline_flags(scenario: Scenario) -> Iterator[Flag]:
    """The split of layers into stages, and the stages per rank."""
    layout, layers, placement = scenario.layout.as_configured, scenario.model.layer_count, scenario.placement
    layer_split, counts = layout.layers_per_stage, partition_layers(layout.layers_per_stage, layers, placement)
    is_even = len(set(counts)) == 1
    match layer_split:
        case EndRankLayers(first=first, last=last):
            yield from [("decoder-first-pipeline-num-layers", str(first))] if first is not None else []
            yield from [("decoder-last-pipeline-num-layers", str(last))] if last is not None else []
        case AccountForEnds(embedding=embedding, head=head):
            yield from [("account-for-embedding-in-pipeline-split",)] if embedding else []
            yield from [("account-for-loss-in-pipeline-split",)] if head else []
        case PipelineLayoutString() as layout_string if any(layout_string.mtp_layer_counts) or not is_even:
            yield "pipeline-model-parallel-layout", _layout_string(counts, layout_string.mtp_layer_counts)
            return
        case _ if not is_even:
            mtp_counts = (*[0] * (len(counts) - 1), scenario.model.mtp_layers)
            yield "pipeline-model-parallel-layout", _layout_string(counts, mtp_counts)
            return
    if scenario.schedule.round_size(layout.pp) > 1:
        yield "num-virtual-stages-per-pipeline-rank", str(scenario.placement.max_chunks)
    if scenario.schedule.round_size(layout.pp) not in (1, layout.pp):
        yield "microbatch-group-size-per-virtual-pipeline-stage", str(scenario.schedule.round_size(layout.pp))


def _layout_string(counts: tuple[int, ...], mtp_counts: tuple[int, ...]) -> str:
    """A pipeline layout string."""
    stages = [
        _repeat_letter("t", layer_count) + _repeat_letter("m", mtp_count)
        for layer_count, mtp_count in zip(counts, mtp_counts, strict=True)
    ]
    return f"E{'|'.join(stages)}L"


def _repeat_letter(letter: str, count: int) -> str:
    return f"{letter}*{count}" if count > 2 else letter * count


def _training_flags(scenario: Scenario) -> Iterator[Flag]:
    training = scenario.training
    yield "micro-batch-size", str(training.microbatch)
    yield "global-batch-size", str(training.global_batch)
    yield from _precision_flags(scenario)
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
    yield from _LOSS_FLAGS.get(training.loss, ())
    yield from _optimizer_flags(training.optimizer)
    yield from [("clip-grad", "0.0")] if not training.gradient_clipping else []


def _optimizer_flags(optimizer: AnyOptimizer) -> Iterator[Flag]:
    if isinstance(optimizer, Dion | Soap):
        return
    if not isinstance(optimizer, Muon):
        yield from [("optimizer", optimizer.value)] if optimizer in (Optimizer.SGD, Optimizer.LION) else []
        return
    defaults = Muon()
    yield "optimizer", "muon"
    yield from [("muon-num-ns-steps", str(optimizer.steps))] if optimizer.steps != defaults.steps else []
    yield "muon-tp-mode", optimizer.tensor_parallel.value
    yield from [("muon-use-syrk",)] if optimizer.symmetric else []
    yield from [("muon-scalar-optimizer", optimizer.scalar.value)] if optimizer.scalar is not defaults.scalar else []


def _precision_flags(scenario: Scenario) -> Iterator[Flag]:
    config = ScenarioConfig.model_validate(scenario.to_mapping()).training.precision
    recipe = _flag_for(RECIPE_BY_FLAG, config.compute)
    base_format = "fp16" if config.compute == "fp16" else "bf16"
    yield from [(base_format,)] if config.compute not in ("fp32", "tf32") else []
    if recipe is not None:
        yield "fp8-format", "hybrid"
        yield "fp8-recipe", recipe
    if config.compute == "nvfp4":
        yield "fp4-format", "e2m1"
    yield from [("fp8-param-gather",)] if config.stored is not None else []
    if config.num_layers_at_start_in_bf16 or config.num_layers_at_end_in_bf16:
        yield ("first-last-layers-bf16",)
        yield "num-layers-at-start-in-bf16", str(config.num_layers_at_start_in_bf16)
        yield "num-layers-at-end-in-bf16", str(config.num_layers_at_end_in_bf16)
    formats = scenario.training.recipe.weight_formats
    if base_format == "bf16" and formats.gradients.value == "bf16":
        yield ("grad-reduce-in-bf16",)
    if base_format == "fp16" and formats.gradients.value == "fp32":
        yield ("accumulate-allreduce-grads-in-fp32",)
    state_formats = {"exp-avg-dtype": formats.moments, "exp-avg-sq-dtype": formats.moments}
    state_formats |= {} if formats.master is None else {"main-params-dtype": formats.master}
    reduced_formats = {name: dtype.value for name, dtype in state_formats.items() if dtype.value != "fp32"}
    yield from [("use-precision-aware-optimizer",)] if reduced_formats else []
    yield from reduced_formats.items()


def _flag_for(value_by_flag: Mapping[str, str], value: str) -> str | None:
    """The first flag value that stands for a value; None if there is none."""
    return next((flag for flag, flag_value in value_by_flag.items() if flag_value == value), None)
