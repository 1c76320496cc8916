"""The table of arguments that Megatron-LM prints is read as the command line that made it."""

import pytest

from clustersim.common.errors import InputError
from clustersim.interop.megatron_import import import_megatron
from clustersim.scenario import Scenario
from tests.sentences import parts

LINE = "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 256 --max-position-embeddings 256 "
LINE += "--micro-batch-size 2 --global-batch-size 64 --vocab-size 50000 --bf16 "
DEFAULTS = {
    "accumulate_allreduce_grads_in_fp32": True, "adam_beta1": 0.9, "add_bias_linear": True, "add_qkv_bias": False,
    "attention_backend": "AttnBackend.auto", "attention_dropout": 0.1, "bf16": False, "clip_grad": 1.0,
    "context_parallel_size": 1, "cp_comm_type": ["p2p"], "cross_entropy_loss_fusion": False, "data_parallel_size": 1,
    "decoder_seq_length": None, "deterministic_mode": False, "exp_avg_dtype": "torch.float32",
    "expert_model_parallel_size": 1, "fp16": False, "fp8": None, "group_query_attention": False, "hidden_dropout": 0.1,
    "bert_embedder_type": "megatron", "deepspeed": False, "zero_stage": 1.0, "img_h": 224, "img_w": 224,
    "patch_dim": 16, "hybrid_attention_ratio": 0.0, "hybrid_override_pattern": None, "kv_lora_rank": 32, "lr": 0.0001,
    "main_params_dtype": "torch.float32", "moe_router_topk": 2, "moe_token_dispatcher_type": "allgather",
    "multi_latent_attention": False, "normalization": "LayerNorm", "num_distributed_optimizer_instances": 1,
    "num_experts": None, "num_query_groups": 1, "optimizer": "adam", "overlap_grad_reduce": False,
    "overlap_p2p_comm": False, "pipeline_model_parallel_size": 1, "position_embedding_type": "learned_absolute",
    "recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None, "sequence_parallel": False,
    "spec": None, "swiglu": False, "tensor_model_parallel_size": 1, "tokenizer_type": None,
    "untie_embeddings_and_output_weights": False, "use_distributed_optimizer": False,
    "virtual_pipeline_model_parallel_size": None, "window_size": None, "yaml_cfg": None,
}  # fmt: skip
BASE = {
    "num_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "kv_channels": 64, "ffn_hidden_size": 2048,
    "seq_length": 256, "max_position_embeddings": 256, "encoder_num_layers": 8, "encoder_seq_length": 256,
    "micro_batch_size": 2, "global_batch_size": 64, "vocab_size": 50000, "bf16": True, "world_size": 8,
}  # fmt: skip


def table(values: dict[str, object], prefix: str = "  ") -> str:
    """As megatron/training/arguments.py prints its arguments."""
    printed = {**DEFAULTS, **BASE, **values}
    lines = [f"{prefix}{name} {'.' * (48 - len(name))} {value}" for name, value in sorted(printed.items())]
    heading = "------------------------ arguments ------------------------"
    return "\n".join(
        ["loading", heading, *lines, "-------------------- end of arguments ---------------------", "done"]
    )


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        ("", {}),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel",
            {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 2},
        ),
        ("--disable-bias-linear --add-qkv-bias", {"add_bias_linear": False, "add_qkv_bias": True}),
        (
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
            {
                "pipeline_model_parallel_size": 2,
                "virtual_pipeline_model_parallel_size": 2,
                "overlap_p2p_comm": True,
            },
        ),
        (
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 --no-overlap-p2p-communication",
            {
                "pipeline_model_parallel_size": 2,
                "num_layers_per_virtual_pipeline_stage": 2,
                "virtual_pipeline_model_parallel_size": 2,
            },
        ),
        (
            "--recompute-granularity selective --recompute-modules mlp layernorm",
            {"recompute_granularity": "selective", "recompute_modules": ["mlp", "layernorm"]},
        ),
        ("--fp8-format hybrid --fp8-recipe blockwise", {"fp8": "hybrid", "fp8_recipe": "Fp8Recipe.blockwise"}),
        ("--exp-avg-dtype bf16 --use-precision-aware-optimizer", {"exp_avg_dtype": "torch.bfloat16"}),
        ("--window-size 127,0", {"window_size": (127, 0)}),
        ("--attention-backend unfused", {"attention_backend": "AttnBackend.unfused"}),
        (
            "--num-experts 8 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-layer-freq [0]*1+[1]*7",
            {"num_experts": 8, "moe_token_dispatcher_type": "alltoall", "moe_layer_freq": [0, 1, 1, 1, 1, 1, 1, 1]},
        ),
        ("--checkpoint-activations", {"checkpoint_activations": True}),
        ("--use-distributed-optimizer --swiglu --ffn-hidden-size 1024", {
            "use_distributed_optimizer": True, "swiglu": True, "ffn_hidden_size": 1024}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("prefix", ["  ", "[default0]:  ", "\x1b[32m[rank0]: \x1b[0m", "2025-11-13 16:25:49 INFO : "])
def test_a_table_is_its_command_line(arguments: str, values: dict[str, object], prefix: str) -> None:
    expected = import_megatron(LINE + arguments, "run", gpu_count=8).mapping
    read = Scenario.from_mapping(import_megatron(table(values, prefix), "run").mapping)
    typed = Scenario.from_mapping(expected)
    assert (read.model, read.layout, read.training) == (typed.model, typed.layout, typed.training)
    assert (read.schedule, read.cluster.gpu_count) == (typed.schedule, 8)


def test_the_log_after_the_table_has_the_padded_vocabulary() -> None:
    text = table({"vocab_size": None, "tokenizer_type": "HuggingFaceTokenizer"})
    with pytest.raises(InputError, match=r"vocabulary's size.*tokenizer"):
        import_megatron(text, "run")
    padded = f"{text}\n > padded vocab (size: 50257) with 431 dummy tokens (new size: 50688)\n"
    assert import_megatron(padded, "run").mapping["model"]["vocab"] == 50688


def test_the_stage_is_what_deepspeed_prints() -> None:
    """Its JSON is elsewhere, and the argument is a default."""
    text = table({"deepspeed": True, "deepspeed_config": "./ds.json", "fp16": True, "bf16": False})
    printed = f"{text}\n[config.py:904:print]   zero_optimization_stage ...... 2\n"
    assert import_megatron(printed, "run").mapping["layout"]["data"] == "zero2"


def test_long_names_have_no_dots() -> None:
    text = table({}).replace("swiglu .", "deepspeed_activation_checkpointing_of_all_of_its_layers  True\n  swiglu .")
    assert import_megatron(text, "run").mapping == import_megatron(table({}), "run").mapping


def test_other_tables_and_other_steps_are_refused() -> None:
    for text, message in [
        (table({}).replace("num_layers .", "layers ."), "has no num_layers"),
        (table({"decoder_seq_length": 64}), "encoders"),
        (table({"img_h": 336}), "models of images"),
        (table({"world_size": 6, "tensor_model_parallel_size": 4}), "no multiple of tp x cp x pp = 4"),
    ]:
        with pytest.raises(InputError, match=parts(message)):
            import_megatron(text, "run")
