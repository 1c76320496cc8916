"""Import of Megatron-LM launch scripts, in the form of its examples."""

from typing import Any

import pytest

from clustersim import simulate
from clustersim.common.errors import InputError
from clustersim.interop.megatron_import import import_megatron
from clustersim.interop.model_equivalence import models_equivalent
from clustersim.model.layer_stack import MoeMlp, layer_specs
from clustersim.model.presets import load_preset
from clustersim.model.transformer import parameter_count
from clustersim.scenario import Scenario
from tests.interop.repository_examples import DEEPSEEK_V3, GPT3_175B, LLAMA3_8B, MEGATRON, MIXTRAL_8X7B
from tests.sentences import parts

SCRIPT = """#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NUM_NODES=${SLURM_NNODES:-"4"}
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
CHECKPOINT_PATH=$1 #<a path>
TP=2
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --master_addr ${MASTER_ADDR:-localhost}
)
MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096   # the width
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention --num-query-groups 8
    #--qk-layernorm
    --seq-length 8192 --max-position-embeddings 8192
    --position-embedding-type rope --normalization RMSNorm --swiglu
    --untie-embeddings-and-output-weights --disable-bias-linear
    --attention-dropout 0.0 --hidden-dropout 0.0
)
FORMAT_ARGS=()
FORMAT_ARGS+=(
    "--fp8-format hybrid"
)
TRAINING_ARGS=(
    --micro-batch-size 1 --global-batch-size 128 --lr=3.0e-4 --bf16 --clip-grad 1.0
    --tensor-model-parallel-size ${TP} --pipeline-model-parallel-size 2
    --num-layers-per-virtual-pipeline-stage 4
    --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --vocab-size 128256 --save "$CHECKPOINT_PATH" --split '99,1,0'
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \\
    ${MODEL_ARGS[@]} ${FORMAT_ARGS[@]} \\
    ${TRAINING_ARGS[@]}
"""
MLA = """--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --kv-channels 128
--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64
--v-head-dim 128 --num-experts 256 --moe-layer-freq ([0]*3+[1]*58) --moe-ffn-hidden-size 2048
--moe-shared-expert-intermediate-size 2048 --moe-router-topk 8 --moe-router-num-groups 8 --moe-router-group-topk 4
--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-token-dispatcher-type flex
--moe-enable-deepep --expert-model-parallel-size 8 --swiglu --normalization RMSNorm --disable-bias-linear
--position-embedding-type rope --untie-embeddings-and-output-weights --vocab-size 129280
--make-vocab-size-divisible-by 3232 --hidden-dropout 0 --attention-dropout 0 --seq-length 4096 --micro-batch-size 1
--global-batch-size 64 --bf16 --recompute-granularity selective --recompute-modules mla_up_proj moe_act"""
SMALL = "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
SMALL += "--micro-batch-size 1 --vocab-size 1000 --bf16 "


def import_mapping(text: str, gpus: int | None = None) -> dict[str, Any]:
    return dict(import_megatron(text, "run", gpu_count=gpus).mapping)


def attention_windows(arguments: str) -> list[int | None]:
    """The attention window of each of six layers."""
    layers = layer_specs(Scenario.from_mapping(import_mapping(f"{SMALL} --num-layers 6 {arguments}", 1)).model.stack)
    return [layer.attention.window for layer in layers if layer.attention is not None]


def test_a_launch_script_is_imported_as_its_scenario() -> None:
    imported = import_megatron(SCRIPT, "run")
    scenario = Scenario.from_mapping(imported.mapping)
    assert parameter_count(scenario.model) == parameter_count(load_preset("llama3-8b"))
    layout = scenario.layout
    assert (layout.tp, layout.pp, layout.dp, layout.sequence_parallel) == (2, 2, 8, True)
    assert scenario.cluster.gpu_count == 32
    assert imported.mapping["schedule"] == {"interleaved": {"chunks": 4}}
    assert imported.mapping["training"]["precision"] == {"compute": "fp8"}
    assert (imported.ignored_arguments, imported.assumptions) == ((), ())
    assert simulate(scenario).step_time > 0.0


def test_mla_and_moe_arguments_are_deepseek_v3() -> None:
    """With equal parameters, as the vocabulary is no multiple of 128 and is padded to itself here."""
    scenario = Scenario.from_mapping(import_mapping(MLA, 64))
    assert parameter_count(scenario.model) == parameter_count(load_preset("deepseek-v3"))
    assert (scenario.layout.ep, scenario.layout.dispatcher.value) == (8, "deepep")
    assert scenario.to_mapping()["training"]["recompute"] == {"modules": ["mla_up_proj", "moe_act"]}


@pytest.mark.parametrize(("flags", "indices_unfused"), [("", True), (" --enable-experimental", False)])
def test_experimental_features_fuse_the_mask_of_received_tokens(flags: str, indices_unfused: bool) -> None:
    scenario = Scenario.from_mapping(import_mapping(MLA + flags, 64))
    assert scenario.training.overheads.indices_unfused is indices_unfused


@pytest.mark.parametrize("name", MEGATRON)
def test_the_repository_s_examples_are_read_completely(name: str) -> None:
    text, gpus = MEGATRON[name]
    imported = import_megatron(text, "run", gpu_count=gpus)
    assert imported.ignored_arguments == ()
    assert Scenario.from_mapping(imported.mapping).layout.world_size == gpus


@pytest.mark.parametrize("name", ["gpt3-175b", "llama3-8b", "mixtral-8x7b"])
def test_the_repository_s_examples_are_their_models(name: str) -> None:
    """The Llama example leaves Megatron-LM's LayerNorm, which has biases where RMSNorm has none."""
    model = Scenario.from_mapping(import_mapping(*MEGATRON[name])).model
    biases = (2 * model.layer_count + 1) * model.hidden if name == "llama3-8b" else 0
    assert parameter_count(model) - biases == parameter_count(load_preset(name))


def test_gpt_3_trains_in_fp16_with_fp16_gradients() -> None:
    mapping = import_mapping(GPT3_175B, 1024)
    assert mapping["training"]["precision"] == {"compute": "fp16", "gradients": "fp16"}
    assert (mapping["layout"]["tp"], mapping["layout"]["pp"], "dp" in mapping["layout"]) == (8, 16, False)
    fp32_gradients = import_mapping(f"{GPT3_175B} --accumulate-allreduce-grads-in-fp32", 1024)
    assert fp32_gradients["training"]["precision"] == {"compute": "fp16"}


def test_llama_3_stores_its_matrices_in_fp8_and_mixtral_spreads_its_experts() -> None:
    precision = {"compute": "fp8", "gradients": "bf16", "stored": "fp8"}
    assert import_mapping(LLAMA3_8B, 8)["training"]["precision"] == precision
    layout = Scenario.from_mapping(import_mapping(MIXTRAL_8X7B, 32)).layout
    assert (layout.pp, layout.ep, layout.dp, layout.dispatcher.value) == (4, 8, 8, "alltoall")


def test_deepseek_v3_uses_zero_3_and_mtp() -> None:
    imported = Scenario.from_mapping(import_mapping(DEEPSEEK_V3, 256))
    preset_scenario = Scenario.from_mapping(
        {**import_mapping(DEEPSEEK_V3, 256), "model": {"preset": "deepseek-v3", "mtp_layers": 1}}
    )
    assert parameter_count(imported.model) == parameter_count(preset_scenario.model)
    assert (imported.layout.data.zero_stage, imported.layout.dispatcher.value) == (3, "hybridep")


def test_defaults_are_megatron_s() -> None:
    """A GPT-2 of its time: learned positions, GeLU, biases, tied embeddings, dropout, a padded vocabulary."""
    mapping = import_mapping(SMALL, 4)
    assert mapping["model"] == {
        "name": "run", "layers": 2, "hidden": 256, "ffn": 1024, "heads": 4, "kv_heads": 4, "vocab": 1024,
        "max_positions": 128, "mlp": "gelu", "norm": "layernorm", "positions": "learned", "tied_embeddings": True,
        "linear_bias": True, "qkv_bias": True, "qk_norm": False, "dropout": True,
    }  # fmt: skip
    assert mapping["layout"] == {"data": {"ddp": {"bucket": "megatron", "overlap": False}}}
    assert mapping["training"]["global_batch"] == 4
    assert "schedule" not in mapping


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 1", "recompute", {"layers": 1}),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", "recompute", "full"),
        ("--recompute-activations", "recompute", {"modules": ["core_attn"]}),
        ("--fp8-format e4m3 --fp8-recipe blockwise", "precision", {"compute": "fp8-blockwise"}),
        ("--grad-reduce-in-bf16", "precision", {"compute": "bf16", "gradients": "bf16"}),
        ("--exp-avg-dtype bf16 --use-precision-aware-optimizer", "precision", {"compute": "bf16", "moments": "bf16"}),
        (
            "--fp8-format hybrid --fp8-recipe mxfp8 --fp8-param-gather",
            "precision",
            {"compute": "mxfp8", "stored": "mxfp8", "gathered": "bf16"},
        ),
        (
            "--fp8-format hybrid --first-last-layers-bf16 --num-layers-at-end-in-bf16 0",
            "precision",
            {"compute": "fp8", "num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 0},
        ),
        (
            "--use-megatron-fsdp --megatron-fsdp-main-grads-dtype bf16 --megatron-fsdp-main-params-dtype auto",
            "precision",
            {"compute": "bf16", "gradients": "bf16"},
        ),
        ("--clip-grad 0.0", "gradient_clipping", False),
        ("--cross-entropy-loss-fusion", "loss", "fused"),
        ("--attention-backend unfused", "attention", "standard"),
    ],
)
def test_arguments_of_training(arguments: str, key: str, value: object) -> None:
    mapping = import_mapping(SMALL + arguments, 2)
    assert mapping["training"][key] == value
    Scenario.from_mapping(mapping, ["cluster.name=hgx-b200"] if "mxfp8" in arguments else [])


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        ("--use-distributed-optimizer", "data", {"zero": {"stage": 1, "overlap": False}}),
        (
            "--use-distributed-optimizer --overlap-grad-reduce",
            "data",
            {"zero": {"stage": 1, "overlap": True, "overlap_param_gather": False}},
        ),
        (
            "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
            "data",
            {"zero": {"stage": 1, "overlap": True, "overlap_param_gather": True}},
        ),
        ("--use-torch-fsdp2", "data", {"fsdp": {"copies": True}}),
        (
            "--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward",
            "data",
            {"fsdp": {"copies": True, "reshard_after_forward": False}},
        ),
        (
            "--use-distributed-optimizer --overlap-grad-reduce --num-distributed-optimizer-instances 2",
            "data",
            {"zero": {"stage": 1, "overlap": True, "overlap_param_gather": False, "shard": 2}},
        ),
        ("--overlap-grad-reduce --ddp-bucket-size 1000", "data", {"ddp": {"bucket": "4000 B", "overlap": True}}),
        ("--ddp-bucket-size 8 --grad-reduce-in-bf16", "data", {"ddp": {"bucket": "16 B", "overlap": False}}),
        ("--use-tp-pp-dp-mapping", "order", ["tp", "cp", "pp", "dp"]),
        ("--no-overlap-p2p-communication", "overlap_p2p_comm", False),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params", "data", "fsdp"),
        ("--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1", "layers_per_stage", {"first": 1}),
        ("--num-experts 4 --moe-token-dispatcher-type alltoall", "dispatcher", "alltoall"),
        (
            "--num-experts 4 --tensor-model-parallel-size 2 --sequence-parallel --moe-token-dispatcher-type alltoall "
            "--moe-ffn-hidden-size 64",
            "etp",
            2,
        ),
        (
            "--num-experts 4 --tensor-model-parallel-size 2 --sequence-parallel --moe-token-dispatcher-type alltoall "
            "--moe-ffn-hidden-size 64 --expert-tensor-parallel-size 1",
            "etp",
            1,
        ),
        ("--context-parallel-size 2", "cp", 2),
    ],
)
def test_arguments_of_the_layout(arguments: str, key: str, value: object) -> None:
    mapping = import_mapping(SMALL + arguments, 4)
    assert mapping["layout"][key] == value
    Scenario.from_mapping(mapping)


@pytest.mark.parametrize(
    ("frequency", "is_moe_layer"),
    [
        ("1", "111111"),
        ("2", "101010"),
        ("[0]*2+[1]*4", "001111"),
        ("([0,1]*3)", "010101"),
        ("[1]*1+[0]*1+[1]*4", "101111"),
        ("[0,1,1,0,0,1]", "011001"),
    ],
)
def test_moe_layer_freq(frequency: str, is_moe_layer: str) -> None:
    """An integer frequency counts from the first layer on, a list has one entry per layer."""
    text = SMALL + f"--num-layers 6 --num-experts 4 --moe-layer-freq {frequency}"
    layers = layer_specs(Scenario.from_mapping(import_mapping(text, 1)).model.stack)
    assert "".join(str(int(isinstance(layer.mlp, MoeMlp))) for layer in layers) == is_moe_layer


@pytest.mark.parametrize(
    ("arguments", "windows"),
    [
        ("--window-size 127,0", [128] * 6),
        ("--window-size (127,0) --window-attn-skip-freq 2", [128, None] * 3),
        ("--window-size 63,0 --window-attn-skip-freq 4", [64, 64, 64, None, 64, 64]),
        ("--window-size 63,0 --window-attn-skip-freq [1,1,0]*2", [64, 64, None] * 2),
        ("--window-size 63,0 --window-attn-skip-freq [1]*6", [64] * 6),
        ("--window-size 63,0 --window-attn-skip-freq 1", [None] * 6),
        ("--window-attn-skip-freq 2", [None] * 6),
    ],
)
def test_attention_windows(arguments: str, windows: list[int | None]) -> None:
    """A window includes the token itself. Of N layers the last one has none: (N-1):1, counted from the first layer."""
    assert attention_windows(arguments) == windows


def test_gpt_oss_arguments_are_the_preset() -> None:
    """Except the positions, which its script leaves to a flag of its own that is reported."""
    text = """--num-layers 24 --hidden-size 2880 --ffn-hidden-size 2880 --num-attention-heads 64 --kv-channels 64
    --group-query-attention --num-query-groups 8 --num-experts 32 --moe-ffn-hidden-size 2880 --moe-router-topk 4
    --padded-vocab-size 201088 --quick-geglu --softmax-type learnable --window-size 127,0 --window-attn-skip-freq 2
    --normalization RMSNorm --untie-embeddings-and-output-weights --position-embedding-type rope --enable-gpt-oss
    --moe-token-dispatcher-type alltoall --micro-batch-size 1 --seq-length 4096 --bf16 --hidden-dropout 0
    --attention-dropout 0"""
    imported = import_megatron(text, "run", gpu_count=8)
    assert models_equivalent(Scenario.from_mapping(imported.mapping).model, load_preset("gpt-oss-20b"))
    assert imported.ignored_arguments == ("--enable-gpt-oss",)


@pytest.mark.parametrize(
    ("program", "is_accepted"),
    [
        ("pretrain_gpt.py", True),
        ("tools/preprocess_data.py --input a.json; python pretrain_gpt.py", True),
        ("# pretrain_bert.py is another one", True),
        ("my_own_llama.py", True),
        ("pretrain_bert.py", False),
        ("${MEGATRON}/pretrain_t5.py", False),
        ("pretrain_vision_classify.py", False),
        ("tools/run_text_generation_server.py", False),
        ("train_rl.py", False),
    ],
)
def test_scripts_that_train_no_decoder_are_rejected(program: str, is_accepted: bool) -> None:
    script = f"python {program} {SMALL}" if not program.startswith("#") else f"{program}\n{SMALL}"
    if is_accepted:
        assert import_mapping(script, 1)["model"]["layers"] == 2
        return
    with pytest.raises(InputError, match=r"run: starts.*\.py.*pretrain_gpt\.py"):
        import_mapping(script, 1)


def test_moe_layer_recompute_is_added_to_the_modules() -> None:
    """Megatron-LM adds it to its modules, which are the attention scores where none are named."""
    moe_arguments = SMALL + "--num-experts 4 --moe-token-dispatcher-type alltoall --moe-layer-recompute "
    assert import_mapping(moe_arguments, 1)["training"]["recompute"] == {"modules": ["core_attn", "moe"]}
    named = f"{moe_arguments} --recompute-granularity selective --recompute-modules layernorm moe"
    assert import_mapping(named, 1)["training"]["recompute"] == {"modules": ["layernorm", "moe"]}
    assert "recompute" not in import_mapping(SMALL + "--moe-layer-recompute", 1)["training"]


def test_shared_expert_overlap_needs_expert_parallelism() -> None:
    text = SMALL + "--num-experts 4 --moe-shared-expert-overlap --moe-shared-expert-intermediate-size 64 "
    text += "--moe-token-dispatcher-type alltoall"
    assert "moe_shared_expert_overlap" not in import_mapping(text, 2)["layout"]
    assert import_mapping(f"{text} --expert-model-parallel-size 2", 2)["layout"]["moe_shared_expert_overlap"] is True


def test_stages_of_a_layout_string_are_interleaved() -> None:
    text = SMALL + "--num-layers 6 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et|tt|tt|tL'"
    imported = Scenario.from_mapping(import_mapping(text, 2))
    assert (imported.schedule.name, imported.placement.max_chunks) == ("interleaved", 2)
    one_stage_per_rank = text.replace("Et|tt|tt|tL", "Ettt|tttL")
    assert Scenario.from_mapping(import_mapping(one_stage_per_rank, 2)).schedule.name == "1f1b"


def test_rounds_of_other_sizes_than_the_pipeline_are_kept() -> None:
    text = SMALL + "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
    for group_size, expected in ((2, {"chunks": 2}), (4, {"chunks": 2, "microbatch_group_size": 4})):
        script = f"{text} --microbatch-group-size-per-virtual-pipeline-stage {group_size}"
        assert import_mapping(script, 2)["schedule"] == {"interleaved": expected}


def test_the_last_occurrence_of_an_argument_counts() -> None:
    assert import_mapping(SMALL + "--num-layers 6 --num-layers 8", 1)["model"]["layers"] == 8


@pytest.mark.parametrize(
    "script",
    [
        "LAYERS=8\nMORE=$(($LAYERS-2))\npython pretrain_gpt.py {small} --num-layers $MORE",
        "LAYERS=8\npython pretrain_gpt.py {small} --num-layers $((LAYERS*3/4))",
        "LAYERS=8\nMODEL_ARGS=' {small} '\nMODEL_ARGS+=\" \\\n  --num-layers $((1+LAYERS-3)) \\\n\"\n"
        "python pretrain_gpt.py $MODEL_ARGS",
        'MODEL_ARGS="\n  --num-layers 6\n"\npython pretrain_gpt.py {small} $MODEL_ARGS',
        "if true; then\n  options=\" ${{options}} \\\n --num-layers 6 --moe-layer-freq '[1]*6'\"\nfi\n"
        "torchrun pretrain_gpt.py {small} ${{options}}",
        "torchrun pretrain_gpt.py {small} --num-layers $((6/0)) --num-layers 6",
    ],
)
def test_arguments_of_variables_and_arithmetic(script: str) -> None:
    """As scripts of DeepSeek-V2-Lite (examples/post_training/modelopt/conf) and of Pai-Megatron-Patch have them."""
    assert import_mapping(script.format(small=SMALL), 1)["model"]["layers"] == 6


def test_unsupported_arguments_are_named() -> None:
    imported = import_megatron(SMALL + "--use-something-new 3 --log-interval 5", "run", gpu_count=1)
    assert imported.ignored_arguments == ("--use-something-new",)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (f"{SMALL} --tensor-model-paralel-size 2", "did you mean --tensor-model-parallel-size? If not, leave it out"),
        (SMALL.replace("--hidden-size", "--hiden-size"), "is missing ... is --hiden-size meant to be it?"),
    ],
)
def test_a_misspelt_argument_is_refused(arguments: str, message: str) -> None:
    with pytest.raises(InputError, match=parts(message)):
        import_megatron(arguments, "run", gpu_count=8)


def test_arguments_that_resemble_others_are_no_misspellings() -> None:
    result = import_megatron(f"{SMALL} --pad-vocab-size 2 --overlap-p2p-communication", "run", gpu_count=8)
    assert result.ignored_arguments == ("--pad-vocab-size", "--overlap-p2p-communication")


@pytest.mark.parametrize(
    ("arguments", "captured"),
    [
        ("", "nothing"),
        ("--enable-cuda-graph", "all"),
        ("--cuda-graph-impl none --cuda-graph-scope full", "nothing"),
        ("--cuda-graph-impl local --cuda-graph-scope full_iteration", "all"),
        ("--cuda-graph-impl transformer_engine --cuda-graph-scope attn moe_router --num-experts 4", "outside_experts"),
        ("--external-cuda-graph --cuda-graph-scope attn", "nothing"),
    ],
)
def test_cuda_graphs(arguments: str, captured: str) -> None:
    imported = import_megatron(SMALL + arguments, "run", gpu_count=1)
    assert Scenario.from_mapping(imported.mapping).framework.graph_capture.value == captured
    named = captured == "nothing" and "scope" in arguments
    assert imported.ignored_arguments == (("--cuda-graph-scope",) if named else ())


def test_a_tokenizer_type_sets_the_vocabulary() -> None:
    imported = import_megatron(
        SMALL.replace("--vocab-size 1000", "--tokenizer-type Llama2Tokenizer"), "run", gpu_count=1
    )
    assert imported.mapping["model"]["vocab"] == 32000
    assert any("32,000" in assumption for assumption in imported.assumptions)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo hello", "has no arguments"),
        (SMALL, "does not say how many GPUs"),
        (
            "torchrun --nproc_per_node 8 pretrain_gpt.py " + SMALL + "--tensor-model-parallel-size 3",
            "no multiple of tp x cp x pp = 3",
        ),
        (
            "torchrun --nproc_per_node 8 pretrain_gpt.py " + SMALL.replace("--num-layers 2", ""),
            "--num-layers is missing",
        ),
        ("torchrun --nproc_per_node 8 pretrain_gpt.py " + SMALL + "--num-layers two", "'two' is not a whole number"),
        (
            f"torchrun --nproc_per_node 8 pretrain_gpt.py {SMALL} --num-layers $LAYERS",
            "--num-layers: ... $LAYERS (line 1) is not known ... --define LAYERS=VALUE",
        ),
        ("torchrun --nproc_per_node 8 pretrain_gpt.py " + SMALL + "--normalization rmsnorm", "RMSNorm"),
        (SMALL + "--spec my.layers my_stack_spec", "--spec: custom layer specs"),
        (
            "torchrun --nproc_per_node 8 pretrain_gpt.py " + SMALL + "--experimental-attention-variant dsa",
            "--dsa-kernel-backend: none computes all scores unfused",
        ),
        (SMALL + "--yaml-cfg model.yaml", "--yaml-cfg: its file is not read"),
        (SMALL + "--moe-latent-size 64 --num-experts 4", "--moe-latent-size: it is not modelled"),
        (
            "torchrun --nproc_per_node 8 pretrain_gpt.py " + SMALL + "--optimizer soap",
            "'soap' is not modelled; adam",
        ),
        (
            "torchrun --nproc_per_node 8 pretrain_gpt.py " + SMALL + "--context-parallel-size 2 --cp-comm-type p2p a2a",
            "kinds that differ by layer are not modelled",
        ),
        (
            "torchrun --nproc_per_node 8 pretrain_gpt.py "
            + SMALL
            + "--use-megatron-fsdp --num-distributed-optimizer-instances 2",
            "with --use-megatron-fsdp it is not modelled",
        ),
        (
            "torchrun --nproc_per_node 8 pretrain_gpt.py " + SMALL + "--window-size 64,64",
            "--window-size: '64,64' is no window",
        ),
        (
            "torchrun --nproc_per_node 8 pretrain_gpt.py " + SMALL + "--window-size 9,0 --window-attn-skip-freq [0,1]",
            "is not every so-manieth layer",
        ),
        ("torchrun --nproc_per_node 8 pretrain_gpt.py " + SMALL.replace("--vocab-size 1000", ""), "add --vocab-size"),
        (
            "torchrun --nproc_per_node 8 pretrain_gpt.py " + SMALL + "--num-distributed-optimizer-instances 3",
            "3 do not divide the 8 ranks",
        ),
        (
            "torchrun --nproc_per_node 8 pretrain_gpt.py " + SMALL + "--tensor-model-parallel-size 0",
            "--tensor-model-parallel-size: 0 is less",
        ),
        (
            "torchrun --nproc_per_node 8 pretrain_gpt.py " + SMALL + "--pipeline-model-parallel-size 0",
            "0 is less than 1",
        ),
        ("torchrun --nproc_per_node 8 pretrain_gpt.py " + SMALL + "--cuda-graph-impl loca", "did you mean local?"),
        (
            "torchrun --nproc_per_node 8 pretrain_gpt.py " + SMALL + "--pipeline-model-parallel-layout Ett",
            "the loss, L, comes last",
        ),
        (
            "torchrun --nproc_per_node 8 pretrain_gpt.py " + SMALL + "--num-experts 4 --moe-layer-freq [1]*1+[0]*2",
            "--moe-layer-freq",
        ),
    ],
)
def test_unsupported_scripts_are_rejected(text: str, message: str) -> None:
    with pytest.raises(InputError, match=parts(message)) as refused:
        import_megatron(text, "run")
    assert str(refused.value).startswith("run: ")
