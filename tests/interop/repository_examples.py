"""The repositories' own example arguments, without those that do not affect a step.

NVIDIA/Megatron-LM: examples/{gpt3/train_gpt3_175b_distributed, llama/train_llama3_8b_h100_fp8,
mixtral/train_mixtral_8x7b_distributed}.sh of core_v0.13.0, examples/megatron_fsdp/sbatch_mfsdp_deepseek_v3.sh
of August 2026 (its variables at their defaults, its tokenizer's entries added), pytorch/torchtitan:
torchtitan/models/*/train_configs/*.toml of v0.2.2.
"""

GPT3_175B = """--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048
--max-position-embeddings 2048 --attention-backend auto --micro-batch-size 1 --global-batch-size 1536
--rampup-batch-size 16 16 5859375 --clip-grad 1.0 --fp16 --tensor-model-parallel-size 8
--pipeline-model-parallel-size 16 --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt"""
LLAMA3_8B = """--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
--group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192 --max-position-embeddings 8192
--position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0
--swiglu --attention-backend fused --apply-layernorm-1p --untie-embeddings-and-output-weights --disable-bias-linear
--micro-batch-size 1 --global-batch-size 128 --clip-grad 1.0 --bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion
--calculate-per-token-loss --manual-gc --fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max
--fp8-param-gather --tensor-model-parallel-size 1 --context-parallel-size 1 --sequence-parallel
--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --mock-data --tokenizer-type NullTokenizer
--vocab-size 128256"""
MIXTRAL_8X7B = """--use-mcore-models --disable-bias-linear --seq-length 4096 --max-position-embeddings 32768
--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --attention-dropout 0.0
--hidden-dropout 0.0 --normalization RMSNorm --position-embedding-type rope --swiglu
--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 8 --no-masked-softmax-fusion
--no-position-embedding --rotary-base 1000000 --num-experts 8 --moe-router-topk 2
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm
--moe-token-dispatcher-type alltoall --overlap-param-gather --overlap-grad-reduce --tokenizer-type Llama2Tokenizer
--micro-batch-size 1 --global-batch-size 256 --clip-grad 1.0 --bf16 --tensor-model-parallel-size 1
--pipeline-model-parallel-size 4 --expert-model-parallel-size 8 --use-distributed-optimizer --sequence-parallel"""
DEEPSEEK_V3 = """--tensor-model-parallel-size 1 --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
--context-parallel-size 1 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --sequence-parallel
--disable-bias-linear --micro-batch-size 4 --global-batch-size 2048 --recompute-granularity selective
--recompute-modules mlp moe mla_up_proj layernorm --seq-length 4096 --vocab-size 129280 --num-layers 61
--hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --kv-channels 128 --max-position-embeddings 4096
--position-embedding-type rope --make-vocab-size-divisible-by 3232 --normalization RMSNorm --swiglu
--untie-embeddings-and-output-weights --multi-latent-attention --attention-dropout 0.0 --hidden-dropout 0.0
--clip-grad 1.0 --qk-layernorm --num-experts 256 --moe-layer-freq [0]*3+[1]*58 --moe-ffn-hidden-size 2048
--moe-shared-expert-intermediate-size 2048 --moe-router-topk 8 --moe-token-dispatcher-type flex
--moe-flex-dispatcher-backend hybridep --moe-grouped-gemm --moe-router-group-topk 4 --moe-router-num-groups 8
--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-force-load-balancing
--q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --mtp-num-layers 1
--bf16 --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"""
MEGATRON = {
    "gpt3-175b": (GPT3_175B, 1024),
    "llama3-8b": (LLAMA3_8B, 8),
    "mixtral-8x7b": (MIXTRAL_8X7B, 32),
    "deepseek-v3": (DEEPSEEK_V3, 256),
}
"""Arguments and number of GPUs, by model."""


def _job_file(
    name: str,
    flavor: str,
    batch: int,
    sequence: int,
    checkpoint: str,
    *,
    sections: str = "",
    parallelism_keys: str = "",
) -> str:
    """A job file; sections: additional sections; parallelism_keys: additional keys of [parallelism]."""
    return f"""
[job]
dump_folder = "./outputs"
[metrics]
log_freq = 10
[model]
name = "{name}"
flavor = "{flavor}"
hf_assets_path = "./assets/hf"
{"converters = ['float8']" if "float8" in sections else ""}
[optimizer]
name = "AdamW"
lr = 3e-4
eps = 1e-8
[lr_scheduler]
warmup_steps = 200
[training]
local_batch_size = {batch}
seq_len = {sequence}
max_norm = 1.0
steps = 1000
dataset = "c4"
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
{parallelism_keys}
[checkpoint]
enable = false
[activation_checkpoint]
{checkpoint}
{sections}
"""


_FLOAT8 = """
[quantize.linear.float8]
enable_fsdp_float8_all_gather = true
precompute_float8_dynamic_scale_for_fsdp = true
filter_fqns = ["output"]
"""
_SELECTIVE_OP = 'mode = "selective"\nselective_ac_option = "op"'
_LLAMA4 = """tensor_parallel_degree = 8
enable_async_tensor_parallel = false
pipeline_parallel_degree = 4
context_parallel_degree = 1
expert_parallel_degree = 1
expert_tensor_parallel_degree = 8"""
TORCHTITAN = {
    "llama3_8b": (_job_file("llama3", "8B", 1, 8192, _SELECTIVE_OP, sections="[compile]\nenable = "
                                                                             "false"), 64, "llama3-8b"),
    "llama3_70b": (
        _job_file("llama3", "70B", 8, 8192, 'mode = "full"', parallelism_keys="tensor_parallel_degree = "
                                                                              "8"), 64, "llama3-70b",
    ),
    "llama3_405b": (
        _job_file(
            "llama3", "405B", 2, 8192, 'mode = "full"', sections=f"[compile]\nenable = true\n{_FLOAT8}",
            parallelism_keys="tensor_parallel_degree = 8\nenable_async_tensor_parallel = true",
        ),
        128, "llama3-405b",
    ),
    "debug_model": (_job_file("llama3", "debugmodel", 8, 2048, 'mode = "selective"\nselective_ac_option = '
                                                               '"2"'), 8, None),
    "deepseek_v3_16b": (
        _job_file(
            "deepseek_v3", "16B", 4, 4096, _SELECTIVE_OP, sections='[compile]\nenable = true\ncomponents = ["loss"]',
            parallelism_keys="expert_parallel_degree = 8\nexpert_tensor_parallel_degree = 1",
        ),
        64, "deepseek-v2-lite",
    ),
    "deepseek_v3_671b": (_job_file("deepseek_v3", "671B", 4, 4096, _SELECTIVE_OP), 256, "deepseek-v3"),
    "qwen3_32b": (_job_file("qwen3", "32B", 2, 4096, 'mode = "full"'), 8, None),
    "llama4_17bx128e": (_job_file("llama4", "17bx128e", 1, 8192, 'mode = "full"', parallelism_keys=_LLAMA4), 256, None),
}  # fmt: skip
"""Job files, GPUs, and the corresponding preset, if there is one."""
