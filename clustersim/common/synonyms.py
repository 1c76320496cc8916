"""What do other tools and habits call a key, a cluster, an accelerator or a model?

The one table of words that people type and that are no names here. They are no aliases: each is refused, and the
message says what to write instead. Nearest spellings are the business of `errors.suggest_nearest`.
"""

import re
from collections.abc import Collection, Iterable
from difflib import SequenceMatcher
from types import MappingProxyType
from typing import Final

_MIN_MODEL_SIMILARITY: Final = 0.75  # of spellings without punctuation; `Llama-3.1-8B` to `llama3-8b` is 0.93
_MODEL_SIZE: Final = re.compile(r"\d+(?:x\d+)?(?:\.\d+)?[bm]\b")

_WORDS_BY_KEY: Final = {
    "training.microbatch, the sequences of a microbatch on each replica": (
        "mbs micro_batch micro_batch_size microbatch_size local_batch_size batch_size_per_gpu per_device_batch_size "
        "per_device_train_batch_size train_micro_batch_size_per_gpu per_gpu_batch_size"
    ),
    "training.global_batch, in sequences (512) or in tokens (4Mi tokens)": (
        "gbs global_batch_size train_batch_size batch batch_size total_batch_size tokens_per_batch tokens_per_step"
    ),
    "training.global_batch, which is microbatch x dp x accumulation steps: their number follows": (
        "ga grad_accum gradient_accumulation gradient_accumulation_steps accumulation_steps accumulate_grad_batches "
        "num_microbatches num_micro_batches microbatches"
    ),
    "training.sequence": (
        "seq seqlen seq_len seq_length sequence_length max_seq_len max_seq_length context_length block_size"
    ),
    "training.precision": "dtype torch_dtype mixed_precision amp bf16 fp16 fp8 compute_dtype param_dtype",
    "training.recompute": (
        "activation_checkpoint activation_checkpointing gradient_checkpointing checkpointing remat "
        "recompute_activations recompute_granularity"
    ),
    "schedule: {interleaved: {chunks: 2}}, with the model chunks of each pipeline rank": (
        "vp vpp interleave virtual_pipeline virtual_pipeline_size virtual_pipeline_parallel_size "
        "virtual_pipeline_model_parallel_size num_virtual_stages_per_pipeline_rank "
        "num_layers_per_virtual_pipeline_stage pipeline_parallel_schedule"
    ),
    "layout.data: ddp, zero1, zero2, zero3, fsdp or {hsdp: {shard: 64}}": (
        "zero zero1 zero2 zero3 zero_stage zero_optimization fsdp fsdp2 hsdp ddp deepspeed fully_shard sharding "
        "sharding_strategy distributed_optimizer use_distributed_optimizer data_parallel_sharding_strategy"
    ),
    "layout.tp": (
        "mp tp_size tensor_parallel tensor_parallelism tensor_parallel_size tensor_parallel_degree "
        "tensor_model_parallel_size"
    ),
    "layout.pp": "pp_size pipeline_parallel pipeline_parallelism pipeline_parallel_size pipeline_parallel_degree "
    "pipeline_model_parallel_size",
    "layout.dp": (
        "dp_size data_parallel data_parallelism data_parallel_size data_parallel_degree data_parallel_replicate_degree"
    ),
    "layout.cp": "cp_size context_parallel context_parallelism context_parallel_size context_parallel_degree",
    "layout.ep": (
        "ep_size expert_parallel expert_parallelism expert_parallel_size expert_parallel_degree "
        "expert_model_parallel_size"
    ),
    "layout.encoder_dp": "encoder_data_parallel_size encoder_data_parallel_degree vision_dp vit_dp encoder_replicas",
    "layout.encoder_tp": "encoder_tensor_model_parallel_size encoder_tensor_parallel_size vision_tp vit_tp",
    "layout.sequence_parallel": "sp use_sequence_parallel",
    "cluster.gpus, the GPUs of the job: nodes x GPUs per node": (
        "world_size nodes nnodes num_nodes n_nodes node_count num_gpus n_gpus ngpus gpu_count num_devices "
        "nproc_per_node"
    ),
    "cluster.node.gpus": "gpus_per_node num_gpus_per_node",
    "cluster.name, of a packaged cluster": "cluster.preset cluster.topology cluster.type cluster_name",
    "cluster.accelerator": "gpu gpu_type gpu_model device_type chip",
    "framework.torch_compile": "compile",
    "framework.numa_binding": "numa numactl numa_bind numa_affinity bindpcie cpu_bind cpu_binding cpu_affinity",
    "training.attention": "flash flash_attn flash_attention use_flash_attn attn_implementation",
    "economics.tokens, the tokens of the run": (
        "epochs num_train_epochs max_steps num_steps train_iters train_steps train_tokens total_tokens num_tokens"
    ),
    "model.layers": "num_layers n_layers n_layer num_hidden_layers",
    "model.hidden": "hidden_size d_model n_embd dim",
    "model.heads": "num_heads n_heads n_head num_attention_heads",
    "model.kv_heads": "n_kv_heads num_key_value_heads num_query_groups",
    "model.ffn": "ffn_hidden_size intermediate_size",
    "model.vocab": "vocab_size padded_vocab_size",
}
"""Words, in a section where it is named, by what to write instead: a key of a scenario file, and what it means where
that is not plain.
"""
KEY_SYNONYMS: Final = MappingProxyType(
    {word: key for key, synonyms in _WORDS_BY_KEY.items() for word in synonyms.split()}
)
_WITHOUT_EFFECT: Final = frozenset(
    {
        "lr", "learning_rate", "min_lr", "lr_scheduler", "weight_decay", "warmup", "warmup_steps", "warmup_ratio",
        "clip_grad", "max_grad_norm", "beta1", "beta2", "adam_beta1", "adam_beta2", "save_steps", "save_interval",
        "logging_steps", "eval_steps", "eval_interval",
    }
)  # fmt: skip
"""Keys of other tools on which the time of a step does not depend."""
VALUE_SYNONYMS: Final = MappingProxyType(
    {
        "vpp": "interleaved", "zero_bubble": "zb-1p", "zb": "zb-1p", "zb_h1": "zb-1p", "zb_h2": "zb-2p",
        "fa2": "flash2", "fa3": "flash3", "fa4": "flash4", "flash_attention": "flash", "flash_attn": "flash",
        "flash_attention_2": "flash2", "flash_attention_3": "flash3", "flash_attention_4": "flash4",
        "eager": "standard", "float8": "fp8", "mixed": "bf16", "amp": "bf16", "half": "fp16", "float16": "fp16",
        "deepspeed": "zero3", "fully_shard": "fsdp", "checkpoint": "full", "checkpointing": "full",
        "activation_checkpointing": "full", "gradient_checkpointing": "full",
    }
)  # fmt: skip
"""Words that people use for values of keys, with the value that they most likely mean."""
NAME_SYNONYMS: Final = MappingProxyType(
    {
        "clusters": {
            "v100": "dgx-v100", "a100": "dgx-a100", "h100": "dgx-h100", "h800": "dgx-h800", "h200": "hgx-h200",
            "b200": "hgx-b200", "b300": "hgx-b300", "gb200": "gb200-nvl72", "gb300": "gb300-nvl72",
            "a800": "hgx-a800", "h20": "hgx-h20", "gh200": "alps-gh200", "mi250": "mi250x", "l40s": "l40s-node",
            "4090": "rtx-4090-node", "rtx4090": "rtx-4090-node", "rtx-4090": "rtx-4090-node",
            "rubin": "vera-rubin-nvl144", "vr200": "vera-rubin-nvl144", "mi455x": "helios-mi455x",
            "frontier": "mi250x", "lumi": "mi250x", "eos": "dgx-h100", "selene": "dgx-a100",
            "p4d": "aws-p4d", "p4de": "aws-p4de", "p5": "aws-p5", "p5e": "aws-p5e", "p5en": "aws-p5en",
        },
        "frameworks": {
            "torch": "pytorch", "fsdp": "pytorch", "fsdp2": "pytorch", "ddp": "pytorch", "lightning": "pytorch",
            "pytorch-lightning": "pytorch", "hf": "transformers", "huggingface": "transformers",
            "hugging-face": "transformers", "trainer": "transformers", "trl": "transformers",
            "axolotl": "transformers", "llama-factory": "transformers", "megatron-lm": "megatron",
            "megatron-core": "megatron", "mcore": "megatron", "nemo2": "megatron-bridge", "jax": "maxtext",
            "xla": "maxtext", "llm-foundry": "composer", "zero": "deepspeed",
        },
        "accelerators": {
            "v100": "v100-sxm-32gb", "a100": "a100-sxm-80gb", "h100": "h100-sxm-80gb", "h800": "h800-sxm-80gb",
            "a800": "a800-sxm-80gb", "h20": "h20-sxm-96gb", "gh200": "gh200-96gb", "mi250": "mi250x",
            "4090": "rtx-4090", "rtx4090": "rtx-4090", "vr200": "rubin",
            "h200": "h200-sxm-141gb", "b200": "b200-sxm-180gb", "b300": "b300-sxm-288gb",
        },
    }
)  # fmt: skip
"""Names that people use, by category of data files, with the packaged name that they most likely mean."""
_UNSUPPORTED_CHIPS: Final = (
    (re.compile(r"tpu|^v[4-7](?:e|p|lite\w*)?(?:-|$)|trillium|ironwood"), "a TPU"),
    (re.compile(r"trn\d|trainium|inf[12]\b|inferentia|neuron"), "AWS Trainium"),
    (re.compile(r"gaudi|habana|hpu|(?:^|-)dl[12]q?(?:-|$)"), "Intel Gaudi"),
)


def find_key_synonym(word: str, section: str) -> str | None:
    """What to write instead of a key of other tools; None for any other word. Case, `-` and `_` do not matter.

    >>> find_key_synonym("--Seq-Length", "")
    'training.sequence'
    """
    return KEY_SYNONYMS.get(_folded(word), KEY_SYNONYMS.get(f"{section}.{_folded(word)}"))


def _folded(word: str) -> str:
    return word.strip().lstrip("-").replace("-", "_").replace(" ", "_").casefold()


def has_no_effect(word: str) -> bool:
    """Whether a key of other tools is one on which the time of a step does not depend."""
    return _folded(word) in _WITHOUT_EFFECT


def find_value_synonym(word: str, choices: Collection[str]) -> str | None:
    """The choice that another word for it means; None if that is not known, or none of the choices.

    >>> find_value_synonym("flash_attention_2", ["flash2", "sdpa"])
    'flash2'
    """
    meant = VALUE_SYNONYMS.get(_folded(word))
    return meant if meant is not None and meant in choices else None


def find_name_synonym(category: str, name: str, available: Iterable[str]) -> str | None:
    """What to write instead of a name of a category of data files that has none of this name; None if not known."""
    folded = name.strip().casefold().replace("_", "-").replace(" ", "-")
    chip = next((chip for pattern, chip in _UNSUPPORTED_CHIPS if pattern.search(folded)), None)
    if chip is not None and category in NAME_SYNONYMS:
        return (
            f"{chip} is not supported: a compiler of its own plans kernels and collectives, which no model here "
            "describes; choose GPUs of NVIDIA or AMD (clustersim presets lists them)"
        )
    synonyms = NAME_SYNONYMS.get(category, {})
    word = _machine_word(folded, synonyms) if category == "clusters" else folded
    of_a_provider = next((other for other in sorted(available) if other.endswith(f"-{folded}")), None)
    meant = synonyms.get(folded) or of_a_provider or synonyms.get(word)
    if meant is None:
        return None
    others = ", ".join(sorted(other for other in available if word in other.split("-") and other != meant))
    return f"did you mean {meant}?{f' Others: {others}' if others else ''}"


def _machine_word(folded: str, synonyms: Collection[str]) -> str:
    """The word of a machine's name that has a cluster, such as its GPU; the whole name without one.

    >>> _machine_word("h100-sxm-80gb", ["h100"])
    'h100'
    """
    candidates = (folded, *re.split(r"[-.]", folded))
    return next((word for word in candidates if word in synonyms), folded)


def describe_model_name(name: str, presets: Iterable[str]) -> str | None:
    """What to write instead of a repository or an address of Hugging Face; None for a name without a slash."""
    if "/" not in name:
        return None
    preset = similar_preset(name, presets)
    return (
        "a repository is not downloaded: save its config.json and write model: {path: config.json}"
        f"{f', or take the preset {preset}' if preset else ''}"
    )


def presets_beginning(name: str, presets: Iterable[str]) -> list[str]:
    """The presets whose names begin with a name of no size, punctuation left out.

    >>> presets_beginning("gpt-3", ["gpt2-xl", "gpt3-175b"]), presets_beginning("gpt-3-7b", ["gpt3-175b"])
    (['gpt3-175b'], [])
    """
    beginning = _letters(name.casefold())
    return (
        [] if _model_size(name.casefold()) else [preset for preset in presets if _letters(preset).startswith(beginning)]
    )


def similar_preset(name: str, presets: Iterable[str]) -> str | None:
    """The preset of the same size whose name is the most similar, punctuation left out; None without one.

    >>> similar_preset("meta-llama/Llama-3.1-8B", ["llama3-8b", "llama3-70b"])
    'llama3-8b'
    """
    word = re.sub(r"/(?:tree|blob|resolve)/.*|/$", "", name).rpartition("/")[2].casefold()
    same_size = [preset for preset in presets if _model_size(preset) == _model_size(word)]
    similarity = {preset: SequenceMatcher(None, _letters(word), _letters(preset)).ratio() for preset in same_size}
    best = max(similarity, key=similarity.__getitem__, default=None)
    return best if best is not None and similarity[best] >= _MIN_MODEL_SIMILARITY else None


def _model_size(name: str) -> str:
    """The number of parameters that a name states; empty without one."""
    match = _MODEL_SIZE.search(name)
    return match[0] if match else ""


def _letters(name: str) -> str:
    """Letters and digits of a name."""
    return re.sub(r"[^a-z0-9]", "", name)
