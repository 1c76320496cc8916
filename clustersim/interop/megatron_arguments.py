"""Which Megatron-LM flags define another model or step, which have no effect on it, and what are their values?

Names are those of megatron/training/arguments.py, of the configurations from which it generates arguments,
and of launchers (torchrun, profilers). Flags in neither table that are never queried are reported as
ignored.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Final

from clustersim.common.errors import InputError, format_value, suggest_nearest
from clustersim.interop.import_result import ImportContext
from clustersim.interop.shell.interpreter import definition_hint
from clustersim.interop.shell.unknowns import Unknowns

Arguments = Mapping[str, tuple[str, ...]]
"""Values that follow each flag, without dashes; of repeated flags the last."""
_MISSPELLING_CUTOFF: Final = 0.9
"""Similarity above which a flag is taken for a misspelling of another."""
_LIKE_OTHERS: Final = frozenset({
    "fp4-param-gather", "mamba2-head-dim", "mamba2-n-groups", "num-attention-heads-kv", "pad-vocab-size", "fp4-recipe",
    "moe-expert-rank-capacity-factor", "tp-comm-overlap-ag", "tp-comm-overlap-rs",
})  # fmt: skip
"""Flags of Megatron-LM and its forks that are not read, and resemble others that are."""
_UNREAD_FILE: Final = "its file is not read; write what it says as arguments"
_ENCODERS: Final = "encoders are not modelled"
_HYBRID_SPECS: Final = ("mamba_stack_spec", "hybrid_stack_spec")
"""Layers of `--spec` that the arguments of hybrid models describe."""
_OFFLOAD: Final = "leave it out, and write it as training.offload in the scenario"
_UNSUPPORTED_FLAGS: Final[Mapping[str, str]] = {
    "yaml-cfg": _UNREAD_FILE,
    "te-precision-config-file": _UNREAD_FILE,
    "kitchen-config-file": _UNREAD_FILE,
    "heterogeneous-layers-config-path": "its file is not read; write the layers as model.stack",
    "heterogeneous-layers-config-encoded-json": "it is not read; write the layers as model.stack",
    **dict.fromkeys(
        ("encoder-num-layers", "encoder-seq-length", "decoder-num-layers", "decoder-seq-length"), _ENCODERS,
    ),
    **dict.fromkeys(("bert-no-binary-head", "bert-load", "bert-embedder-type"), _ENCODERS),
    **dict.fromkeys(("img-h", "img-w", "patch-dim"), "models of images are not modelled"),
    **dict.fromkeys(
        ("enable-mhc-connections", "moe-latent-size",
         "mtp-use-repeated-layer", "retro-add-retriever", "vision-pretraining", "freeze-all-layers",
         "fp32-residual-connection", "distribute-saved-activations",
         "hybrid-context-parallel", "tensor-parallel-num-weight-shards", "expert-tensor-parallel-num-weight-shards",
         "enable-full-sharding-in-hsdp"),
        "it is not modelled",
    ),
    "parallel-attn": "leave it out, and write model.block: parallel in the scenario",
    "bitfit": "training of biases alone is not modelled",
    **dict.fromkeys(
        ("enable-zbh1-pipeline", "enable-zbh1-exact-semantics", "enable-zb-runtime", "enable-zero-bubble"),
        "leave it out, and write schedule: zb-1p in the scenario",
    ),
    **dict.fromkeys(("perform-rl-step", "skip-train"), "nothing but training is modelled"),
    **dict.fromkeys(("cpu-offloading", "optimizer-cpu-offload", "fine-grained-activation-offloading"), _OFFLOAD),
    "moe-extended-tp": "Megatron-LM no longer has it; write --expert-tensor-parallel-size",
}  # fmt: skip
"""Flags that define another model or step and are not supported."""
_IRRELEVANT_FLAGS: Final = re.compile(
    r"(no-)?(lr|min-lr|decoupled-|train-|adam-|weight-decay|start-weight|end-weight|init-method|seed|data-|train-data|"
    r"valid-|test-|split|mock-data|tokenizer|vocab-file|merge-file|tiktoken|log-|tensorboard|wandb|save|load|ckpt|"
    r"checkpoint|eval|exit-|profile|distributed-(timeout|backend)|nproc|nnodes|nodes|node[-_]rank|master|rdzv|"
    r"muon-(momentum|nesterov|scale|extra|coefficient)|use-mcore|transformer-impl|rotary-base|rope|use-rope|norm-epsilon|layernorm-epsilon|apply-layernorm-1p|num-workers|"
    r"rampup|step-batch-size|empty-unused|manual-gc|create-attention|mmap|reset-|eod-|timing|pretrained|finetune|async-save|override-|"
    r"use-checkpoint-opt|dist-ckpt|auto-detect|attention-softmax|masked-softmax|barrier|check-for-nan|loss-scale|initial-loss|"
    r"hysteresis|moe-aux-loss|moe-loss|moe-eval|patch-tokenizer|max-padding|dataset$|moe-min-cap|abort-on|kill-switch|dataloader-type|norm-target-loss|mup|loss-on-targets|codecarbon|skip-train-|repeated-dataloader|nvtx|sync-tp-dup|moe-per-layer-log|universal-checkpoint|eval-|no-query-key-layer|moe-z-loss|moe-router-load-balancing|moe-router-bias-update|moe-router-topk-scaling|"
    r"moe-router-dtype|moe-router-pre|moe-input-jitter|mtp-loss|local-rank|lazy-mpu|make-vocab|"
    r"yarn|mscale|position-embedding$|logging-level|rotary-scaling|moe-router-force|moe-token-drop|rotary-interleaved|"
    r"export-|mpi$|container-|fp8-(margin|amax|interval|wgrad)|use-flash|calculate-per-token|bias-|trust-remote|"
    r"per-split|gpus-per-node|tee|max-restarts|log_dir|redirects|"
    r"(file-|stderr-)?sink-level|disable-(last-saving|tensorboard|wandb|mlflow)|mlflow|structured-logs|fim-|model-type$|"
    r"original-max-position|sample$|cpuctxsw|trace$|capture-range|cuda-(graph-trace|memory-usage)|record-memory|memory-snapshot)"
)
"""Flags that do not change the step, or are defaults of what is simulated."""


CP_KIND_BY_FLAG: Final[Mapping[str, str]] = {
    "p2p": "ring", "all_gather": "all_gather", "a2a": "ulysses", "a2a+p2p": "two_dimensional",
}  # fmt: skip
"""Kinds of context parallelism, by --cp-comm-type."""
LEGAL_VALUES: Final[Mapping[str, Sequence[str]]] = {
    "attention-backend": ("auto", "flash", "fused", "unfused", "local"),
    "transformer-impl": ("local", "transformer_engine", "inference_optimized"),
    "recompute-granularity": ("full", "selective"),
    "recompute-method": ("uniform", "block"),
    "activations-checkpoint-method": ("uniform", "block"),
    "activations-checkpoint-granularity": ("full", "selective"),
    "moe-token-dispatcher-type": ("allgather", "alltoall", "flex", "alltoall_seq"),
    "moe-flex-dispatcher-backend": ("deepep", "hybridep"),
    "moe-router-score-function": ("softmax", "sigmoid", "sqrtsoftplus"),
    "moe-router-dtype": ("fp32", "fp64"),
    "cross-entropy-fusion-impl": ("native", "te", "linear"),
    "fp8-format": ("e4m3", "hybrid"),
    "fp8": ("e4m3", "hybrid"),
    "fp4-format": ("e2m1",),
    "lr-decay-style": ("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    "dataloader-type": ("single", "cyclic", "external", "full_validation"),
    "distributed-backend": ("nccl", "gloo"),
}
"""The values of flags that take one of a few; a flag that is read by `choice` says them there."""
_HOLDS_ARGUMENTS: Final = re.compile(r"(?i)arg|opt|flag|extra|@")
"""Names of variables that may hold further arguments."""


def is_irrelevant_flag(name: str) -> bool:
    """Whether a flag changes no step, or says what is simulated anyway."""
    return _IRRELEVANT_FLAGS.match(name) is not None


def has_no_effect(name: str) -> bool:
    """Whether a flag's value has no effect, whatever it is; a tokenizer's says how many entries the vocabulary has."""
    return is_irrelevant_flag(name) and not name.startswith(_OF_THE_VOCABULARY)


_OF_THE_VOCABULARY: Final = ("tokenizer-", "patch-tokenizer", "vocab-file", "merge-file")
_OLD_NAMES: Final = {
    "batch-size": "micro-batch-size",
    "model-parallel-size": "tensor-model-parallel-size",
    "pipe-parallel-size": "pipeline-model-parallel-size",
}
"""Names of flags before 2021."""


def group_by_flag(shell_words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The words after each flag, by its present name; of a flag that is given several times the last.

    Forks write underscores for dashes (epfLLM/Megatron-LLM); DeepSpeed's own flags have them.

    >>> group_by_flag(["--lr=1", "--bf16", "--recompute-modules", "moe", "mlp"])
    {'lr': ('1',), 'bf16': (), 'recompute-modules': ('moe', 'mlp')}
    """
    grouped: dict[str, tuple[str, ...]] = {}
    flag = ""
    for word in shell_words:
        if re.match(r"--?[A-Za-z]", word):
            flag, separator, value = word.lstrip("-").partition("=")
            flag = flag if flag.startswith("deepspeed") else flag.replace("_", "-")
            flag = _OLD_NAMES.get(flag, flag)
            grouped.pop(flag, None)
            grouped[flag] = (value,) if separator else ()
        elif flag:
            grouped[flag] = (*grouped[flag], word)
    is_epfl = any(word.partition("=")[0] == "--num_layers" for word in shell_words)
    return _as_megatron(grouped) if is_epfl else grouped


def _as_megatron(grouped: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Flags of epfLLM/Megatron-LLM by Megatron-LM's names; its layers have no biases unless a flag adds them."""
    renamed = dict(grouped)
    if renamed.pop("use-bias", None) is None:
        renamed["disable-bias-linear"] = ()
    if renamed.pop("use-rms-norm", None) is not None:
        renamed["normalization"] = ("RMSNorm",)
    if renamed.pop("no-tie-embed-logits", None) is not None:
        renamed["untie-embeddings-and-output-weights"] = ()
    heads = renamed.pop("num-attention-heads-kv", None)
    return renamed if heads is None else {**renamed, "group-query-attention": (), "num-query-groups": heads}


@dataclass
class MegatronArguments:
    """Megatron-LM arguments. queried: flags that were looked up; assumptions: sentences.

    unknowns: what the holes in values stand for; context: where files that they name are, and what the
    user sets.
    """

    arguments: Arguments
    source: str
    unknowns: Unknowns = field(default_factory=Unknowns)
    context: ImportContext = field(default_factory=ImportContext)
    queried: set[str] = field(default_factory=set)
    assumptions: list[str] = field(default_factory=list)
    _read_values: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise InputError for a flag that cannot be modelled, or has a value that it does not take."""
        unsupported = next((name for name in self.arguments if name in _UNSUPPORTED_FLAGS), None)
        if unsupported is not None:
            raise self.error(unsupported, _UNSUPPORTED_FLAGS[unsupported])
        spec = self.arguments.get("spec", ())
        if spec and not any(name in word for word in spec[-1:] for name in _HYBRID_SPECS):
            raise self.error("spec", "custom layer specs are not known")
        for name, legal_values in LEGAL_VALUES.items():
            for value in self.arguments.get(name, ())[:1]:
                if "\0" not in value and value not in legal_values:
                    raise self.error(
                        name, f"{format_value(value)} is not known; {suggest_nearest(value, legal_values)}"
                    )

    @property
    def ignored_flags(self) -> tuple[str, ...]:
        """Flags that were never queried, except those that do not change the step, and words that no flag takes."""
        flags = (f"--{name}" for name in self.arguments if name not in self.queried and not is_irrelevant_flag(name))
        return (*flags, *(f"{word!r} after --{name}" for name, word in self._loose_words() if "\0" not in word))

    @property
    def absent_arguments(self) -> tuple[str, ...]:
        """Sentences about variables that may hold further arguments, and that nothing sets."""
        loose = [word for _name, word in self._loose_words() if "\0" in word]
        values = dict.fromkeys(value for word in loose for value in self.unknowns.unknowns(word))
        computed = next((value for value in values if not value.is_unset), None)
        if computed is not None:
            raise InputError(
                f"{self.source}: line {computed.line}: its arguments include {computed.label}, which is not known"
            )
        return tuple(f"{value.label} (line {value.line}) holds no arguments, as nothing sets it" for value in values)

    def _loose_words(self) -> list[tuple[str, str]]:
        """Words after flags that do not take them, or not so many."""
        read = {name: self._read_values.get(name, 0) for name in self.queried}
        shell_words = [
            (name, word)
            for name, count in read.items()
            if not is_irrelevant_flag(name)
            for word in self.arguments.get(name, ())[count:]
        ]
        others = [name for name in self.arguments if name not in self.queried]
        named = [
            (name, word)
            for name in others
            for word in self.arguments[name]
            if _HOLDS_ARGUMENTS.search(self.shown(word))
        ]
        return shell_words + [(name, word) for name, word in named if "\0" in word]

    def shown(self, text: str) -> str:
        """A text with its holes as the script writes them."""
        return self.unknowns.described(text)

    def error(self, name: str, message: str) -> InputError:
        """An error about a flag, as a sentence."""
        return InputError(f"{self.source}: --{name}: {message}")

    def has(self, name: str) -> bool:
        """Whether a flag is given; marks it as queried."""
        self.queried.add(name)
        return name in self.arguments

    def require_no_misspelling(self) -> None:
        """Raise InputError for a flag that is not known, and resembles one that is and is not given."""
        absent = self.queried - {*self.arguments}
        for name in self.arguments:
            if name in self.queried or name in _LIKE_OTHERS or is_irrelevant_flag(name):
                continue
            matches = get_close_matches(name, absent, n=1, cutoff=_MISSPELLING_CUTOFF)
            if matches and matches[0].removeprefix("no-") != name:
                raise self.error(name, f"is not known; did you mean --{matches[0]}? If not, leave it out")

    def text(self, name: str, default: str | None = None) -> str | None:
        """The value of a flag."""
        if not self.has(name):
            return default
        values = self.arguments[name]
        self._read_values[name] = 1
        if not values:
            raise self.error(name, "its value is not in the script; write it there")
        return self._known_value(name, values[0])

    def unchecked(self, name: str) -> str | None:
        """The value of a flag, of which parts may not be known."""
        self.queried.add(name)
        self._read_values[name] = 1
        return next(iter(self.arguments.get(name, ())), None)

    def values(self, name: str) -> Sequence[str]:
        """All values of a flag; none where it is not given."""
        if not self.has(name):
            return ()
        values = self.arguments[name]
        self._read_values[name] = len(values)
        return [self._known_value(name, value) for value in values]

    def _known_value(self, name: str, value: str) -> str:
        """A value without holes; else raise InputError that says what would decide it."""
        if "\0" not in value:
            return value
        unknown = self.unknowns.unknowns(value)
        labels = " and ".join(one.label for one in unknown)
        names = [variable for one in unknown for variable in one.names]
        line = unknown[0].line if unknown else 0
        others = "".join(
            f", --define {other}=VALUE (--{flag})"
            for other, flag in self._undefined_names().items()
            if other not in names
        )
        raise self.error(
            name, f"its value is not in the script: {labels} (line {line}) is not known{definition_hint(names)}{others}"
        )

    def _undefined_names(self) -> dict[str, str]:
        """Variables and parameters that nothing sets, and on which values with an effect depend, and a flag of each."""
        undefined: dict[str, str] = {}
        for flag, given in self.arguments.items():
            for word in given if not is_irrelevant_flag(flag) else ():
                for one in self.unknowns.unknowns(word):
                    for name in one.names if one.is_unset else ():
                        undefined.setdefault(name, flag)
        return undefined

    def integer(self, name: str, default: int | None = None) -> int | None:
        """A non-negative integer value of a flag."""
        value = self.text(name)
        if value is None:
            return default
        if not re.fullmatch(r"[0-9][0-9_]*", value):
            raise self.error(name, f"{format_value(value)} is not a whole number")
        return int(value)

    def positive_integer(self, name: str, default: int = 1) -> int:
        """A positive integer value of a flag."""
        value = self.integer(name, default)
        if not value:
            raise self.error(name, "0 is less than 1")
        return value

    def required_integer(self, name: str) -> int:
        """A positive integer value that Megatron-LM requires, too."""
        if self.integer(name) is None:
            similar = get_close_matches(name, self.arguments, n=1, cutoff=_MISSPELLING_CUTOFF)
            hint = f"; is --{similar[0]} meant to be it?" if similar else ""
            raise InputError(f"{self.source}: --{name} is missing, as Megatron-LM would say, too{hint}")
        return self.positive_integer(name)

    def real_number(self, name: str, default: float) -> float:
        """A real value of a flag."""
        value = self.text(name)
        try:
            return default if value is None else float(value)
        except ValueError:
            raise self.error(name, f"{format_value(value)} is not a number") from None

    def choice(self, name: str, choices: Mapping[str, str], default: str) -> str:
        """The entry of `choices` for a flag's value."""
        value = self.text(name, default) or default
        if value not in choices:
            raise self.error(name, f"{format_value(value)} is not known; {suggest_nearest(value, choices)}")
        return choices[value]
