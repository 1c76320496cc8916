"""What Megatron-Bridge prints of its configuration is read as the flags that set the same."""

from typing import Any

import pytest
import yaml

from clustersim.common.errors import InputError
from clustersim.interop.detect import detect_program
from clustersim.interop.import_result import ImportContext, ImportResult
from clustersim.interop.megatron_import import import_megatron
from clustersim.interop.registry import IMPORTERS

BF16 = {"_call_": False, "_target_": "torch.bfloat16"}
PRINTED: dict[str, Any] = {
    "_target_": "megatron.bridge.training.config.ConfigContainer",
    "model": {
        "_target_": "megatron.bridge.models.llama.llama_provider.Llama3ModelProvider8B",
        "activation_func": {"_call_": False, "_target_": "torch.nn.functional.silu"}, "gated_linear_unit": True,
        "add_bias_linear": False, "add_qkv_bias": False, "attention_dropout": 0.0, "hidden_dropout": 0.0,
        "num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32,
        "num_query_groups": 8, "kv_channels": 128, "normalization": "RMSNorm", "position_embedding_type": "rope",
        "share_embeddings_and_output_weights": False, "seq_length": 8192, "vocab_size": 128256,
        "make_vocab_size_divisible_by": 128, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 4, "context_parallel_size": 1, "sequence_parallel": True,
        "bf16": True, "fp16": False, "params_dtype": BF16, "pipeline_dtype": BF16, "num_moe_experts": None,
        "recompute_granularity": "selective", "recompute_modules": ["core_attn"], "cpu_offloading": False,
        "attention_backend": {"_args_": [5], "_call_": True, "_name_": "auto", "_target_": "megatron.core.AttnBackend"},
        "moe_layer_freq": 1, "generation_config": None, "window_size": None, "qk_layernorm": False,
    },
    "train": {"_target_": "x.TrainingConfig", "micro_batch_size": 1, "global_batch_size": 128, "train_iters": 100},
    "ddp": {
        "_target_": "x.DistributedDataParallelConfig", "use_distributed_optimizer": True, "overlap_grad_reduce": True,
        "overlap_param_gather": True, "grad_reduce_in_fp32": True, "bucket_size": None,
    },
    "optimizer": {"_target_": "x.OptimizerConfig", "optimizer": "adam", "clip_grad": 1.0, "lr": 0.0003},
    "dataset": {"_target_": "x.GPTDatasetConfig", "sequence_length": 8192},
    "mixed_precision": {"_target_": "x.MixedPrecisionConfig", "bf16": True, "fp8": None, "fp8_recipe": "tensorwise"},
    "peft": None,
}  # fmt: skip
FLAGS = """torchrun --nproc_per_node 8 --nnodes 8 pretrain_gpt.py --swiglu --disable-bias-linear --attention-dropout 0
--hidden-dropout 0 --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
--group-query-attention --num-query-groups 8 --kv-channels 128 --normalization RMSNorm --position-embedding-type rope
--untie-embeddings-and-output-weights --seq-length 8192 --max-position-embeddings 8192 --vocab-size 128256
--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 4
--sequence-parallel --bf16 --recompute-granularity selective --recompute-modules core_attn --micro-batch-size 1
--global-batch-size 128 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
--accumulate-allreduce-grads-in-fp32""".replace("\n", " ")


def _import(content: dict[str, Any], prefix: str = "") -> ImportResult:
    text = yaml.safe_dump(content, default_flow_style=False)
    log = f"loading\n{prefix}{text.rstrip().replace(chr(10), chr(10) + prefix)}\n{prefix}> building model ...\nstep 1\n"
    assert detect_program(log, "train.log") == "megatron-bridge"
    return IMPORTERS["megatron-bridge"](log, "run", "dgx-h100", 64, ImportContext())


@pytest.mark.parametrize("prefix", ["", "0: ", "[rank0]: "])
def test_a_printout_is_the_flags(prefix: str) -> None:
    assert _import(PRINTED, prefix).mapping == import_megatron(FLAGS, "run").mapping
    assert not any(sentence.startswith("0 ") for sentence in _import(PRINTED, prefix).assumptions)


def test_the_precision_of_its_own_section_counts() -> None:
    fp8 = {**PRINTED, "mixed_precision": {**PRINTED["mixed_precision"], "fp8": "hybrid"}}
    assert _import(fp8).mapping["training"]["precision"]["compute"] == "fp8-current"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model": {"_target_": "x", "tensor_model_parallel_size": 8}}, "print all of it"),
        ({"mixed_precision": "bf16_mixed"}, "mixed_precision is a name"),
        ({"peft": {"_target_": "x.LoRA", "dim": 16}}, "peft"),
    ],
)
def test_a_part_of_it_is_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        _import({**PRINTED, **change})
