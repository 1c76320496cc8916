"""Which Megatron-LM flags define another model or step, which have no effect on it, and what are their values?

Names are those of megatron/training/arguments.py, of the configurations from which it generates arguments,
and of launchers (torchrun, profilers). Flags in neither table that are never queried are reported as
ignored.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Final

from clustersim.common.errors import InputError, suggest_nearest
from clustersim.interop.shell_script import Arguments

_MISSPELLING_CUTOFF: Final = 0.9
"""Similarity above which a flag is taken for a misspelling of another."""
_UNREAD_FILE: Final = "its file is not read; write what it says as arguments"
_STATE_SPACE: Final = "state-space layers are not modelled"
_ENCODERS: Final = "encoders are not modelled"
_OFFLOAD: Final = "leave it out, and write it as training.offload in the scenario"
_UNSUPPORTED_FLAGS: Final[Mapping[str, str]] = {
    "spec": "layers of one's own are not known",
    "yaml-cfg": _UNREAD_FILE,
    "te-precision-config-file": _UNREAD_FILE,
    "kitchen-config-file": _UNREAD_FILE,
    "heterogeneous-layers-config-path": "its file is not read; write the layers as model.stack",
    "heterogeneous-layers-config-encoded-json": "it is not read; write the layers as model.stack",
    **dict.fromkeys(
        ("hybrid-override-pattern", "hybrid-layer-pattern", "hybrid-attention-ratio", "hybrid-mlp-ratio",
         "is-hybrid-model", "mtp-hybrid-override-pattern"),
        _STATE_SPACE,
    ),
    **dict.fromkeys(
        ("encoder-num-layers", "encoder-seq-length", "decoder-num-layers", "decoder-seq-length"), _ENCODERS,
    ),
    "linear-attention-type": "linear attention is not modelled",
    **dict.fromkeys(
        ("experimental-attention-variant", "attention-output-gate", "enable-mhc-connections", "moe-latent-size",
         "mtp-use-repeated-layer", "retro-add-retriever", "vision-pretraining", "freeze-all-layers",
         "fp32-residual-connection", "distribute-saved-activations", "hierarchical-context-parallel-sizes",
         "hybrid-context-parallel", "tensor-parallel-num-weight-shards", "expert-tensor-parallel-num-weight-shards",
         "enable-full-sharding-in-hsdp"),
        "it is not modelled",
    ),
    **dict.fromkeys(("perform-rl-step", "skip-train"), "nothing but training is modelled"),
    **dict.fromkeys(("cpu-offloading", "optimizer-cpu-offload", "fine-grained-activation-offloading"), _OFFLOAD),
    "checkpoint-activations": "Megatron-LM no longer has it; write --recompute-granularity full",
    "moe-extended-tp": "Megatron-LM no longer has it; write --expert-tensor-parallel-size",
}  # fmt: skip
"""Flags that define another model or step and are not supported."""
_IRRELEVANT_FLAGS: Final = re.compile(
    r"(no-)?(lr|min-lr|decoupled-|train-|adam-|weight-decay|start-weight|end-weight|init-method|seed|data-|train-data|"
    r"valid-|test-|split|mock-data|tokenizer|vocab-file|merge-file|tiktoken|log-|tensorboard|wandb|save|load|ckpt|"
    r"checkpoint|eval|exit-|profile|distributed-(timeout|backend)|nproc|nnodes|nodes|node[-_]rank|master|rdzv|"
    r"use-mcore|transformer-impl|rotary-base|rope|use-rope|norm-epsilon|layernorm-epsilon|apply-layernorm-1p|num-workers|"
    r"rampup|step-batch-size|empty-unused|manual-gc|create-attention|mmap|reset-|eod-|timing|pretrained|finetune|async-save|override-|"
    r"use-checkpoint-opt|dist-ckpt|auto-detect|attention-softmax|masked-softmax|barrier|check-for-nan|loss-scale|initial-loss|"
    r"hysteresis|moe-aux-loss|moe-z-loss|moe-router-load-balancing|moe-router-bias-update|moe-router-topk-scaling|"
    r"moe-router-dtype|moe-router-pre|moe-input-jitter|mtp-loss|local-rank|lazy-mpu|make-vocab|max-position-embeddings$|"
    r"yarn|mscale|position-embedding$|logging-level|rotary-scaling|moe-router-force|moe-token-drop|rotary-interleaved|"
    r"export-|mpi$|container-|fp8-(margin|amax|interval|wgrad)|use-flash|calculate-per-token|bias-|trust-remote|"
    r"per-split|gpus-per-node|tee|max-restarts|log_dir|redirects|"
    r"sample$|cpuctxsw|trace$|capture-range|cuda-(graph-trace|memory-usage)|record-memory|memory-snapshot)"
)
"""Flags that do not change the step, or are defaults of what is simulated."""


@dataclass
class MegatronArguments:
    """Megatron-LM arguments. queried: flags that were looked up; assumptions: sentences."""

    arguments: Arguments
    source: str
    queried: set[str] = field(default_factory=set)
    assumptions: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Raise InputError for a flag that cannot be modelled."""
        unsupported = next((name for name in self.arguments if name in _UNSUPPORTED_FLAGS), None)
        if unsupported is not None:
            raise self.error(unsupported, _UNSUPPORTED_FLAGS[unsupported])

    @property
    def ignored_flags(self) -> tuple[str, ...]:
        """Flags that were never queried, except those that do not change the step."""
        return tuple(
            self._with_suggestion(name)
            for name in self.arguments
            if name not in self.queried and not _IRRELEVANT_FLAGS.match(name)
        )

    def error(self, name: str, message: str) -> InputError:
        """An error about a flag, as a sentence."""
        return InputError(f"{self.source}: --{name}: {message}")

    def has(self, name: str) -> bool:
        """Whether a flag is given; marks it as queried."""
        self.queried.add(name)
        return name in self.arguments

    def _with_suggestion(self, name: str) -> str:
        """The flag, with the queried flag of which it may be a misspelling."""
        matches = get_close_matches(name, self.queried - {*self.arguments}, n=1, cutoff=_MISSPELLING_CUTOFF)
        return f"--{name} (did you mean --{matches[0]}?)" if matches else f"--{name}"

    def text(self, name: str, default: str | None = None) -> str | None:
        """The value of a flag."""
        if not self.has(name):
            return default
        values = self.arguments[name]
        if not values:
            raise self.error(name, "its value is not in the script; write it there")
        return values[0]

    def integer(self, name: str, default: int | None = None) -> int | None:
        """A non-negative integer value of a flag."""
        value = self.text(name)
        if value is None:
            return default
        if not re.fullmatch(r"[0-9][0-9_]*", value):
            raise self.error(name, f"{value!r} is not a whole number")
        return int(value)

    def positive_integer(self, name: str, default: int = 1) -> int:
        """A positive integer value of a flag."""
        value = self.integer(name, default)
        if not value:
            raise self.error(name, "0 is less than 1")
        return value

    def required_integer(self, name: str) -> int:
        """An integer value that Megatron-LM requires, too."""
        value = self.integer(name)
        if value is None:
            raise InputError(f"{self.source}: --{name} is missing, as Megatron-LM would say, too")
        return value

    def real_number(self, name: str, default: float) -> float:
        """A real value of a flag."""
        value = self.text(name)
        try:
            return default if value is None else float(value)
        except ValueError:
            raise self.error(name, f"{value!r} is not a number") from None

    def choice(self, name: str, choices: Mapping[str, str], default: str) -> str:
        """The entry of `choices` for a flag's value."""
        value = self.text(name, default) or default
        if value not in choices:
            raise self.error(name, f"{value!r} is not known; {suggest_nearest(value, choices)}")
        return choices[value]
