"""Which keys does a torchtitan job file have, and what are their values?

Sections, keys and defaults of torchtitan/config/job_config.py in v0.2.2 of February 2026, the last release
that reads TOML. As in torchtitan, unknown keys and sections are an error, unless the job is of another version.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeVar

from clustersim.common.errors import InputError, format_value, suggest_nearest
from clustersim.interop.torchtitan_sources import JobContent, UnknownKeys

_IRRELEVANT: Final = object()
"""Stands for the default of a key that does not affect the step."""
_FLOAT8: Final = "quantize.linear.float8"
DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "model": {
        "name": "llama3",
        "flavor": "debugmodel",
        "converters": [],
        **dict.fromkeys(("hf_assets_path", "tokenizer_path", "print_after_conversion"), _IRRELEVANT),
    },
    "optimizer": {
        "name": "AdamW",
        "implementation": "fused",
        "early_step_in_backward": False,
        **dict.fromkeys(("lr", "beta1", "beta2", "eps", "weight_decay"), _IRRELEVANT),
    },
    "training": {
        "local_batch_size": 8,
        "global_batch_size": -1,
        "seq_len": 2048,
        "enable_cpu_offload": False,
        "dtype": "float32",
        "mixed_precision_param": "bfloat16",
        "mixed_precision_reduce": "float32",
        **dict.fromkeys(
            ("dataset", "dataset_path", "max_norm", "steps", "gc_freq", "gc_debug", "dataloader"), _IRRELEVANT
        ),
    },
    "parallelism": {
        "data_parallel_replicate_degree": 1,
        "data_parallel_shard_degree": -1,
        "fsdp_reshard_after_forward": "default",
        "tensor_parallel_degree": 1,
        "disable_loss_parallel": False,
        "enable_async_tensor_parallel": False,
        "pipeline_parallel_degree": 1,
        "module_fqns_per_model_part": None,
        "pipeline_parallel_first_stage_less_layers": 1,
        "pipeline_parallel_last_stage_less_layers": 1,
        "pipeline_parallel_layers_per_stage": None,
        "pipeline_parallel_schedule": "1F1B",
        "pipeline_parallel_schedule_csv": "",
        "pipeline_parallel_microbatch_size": 1,
        "pipeline_parallel_expert_parallel_overlap": True,
        "context_parallel_degree": 1,
        "context_parallel_load_balancer": "headtail",
        "context_parallel_rotate_method": "allgather",
        "expert_parallel_degree": 1,
        "expert_tensor_parallel_degree": 1,
        "expert_parallel_comm_backend": "standard",
    },
    "activation_checkpoint": {
        "mode": "selective",
        "selective_ac_option": "2",
        "early_stop": False,
        "per_op_sac_force_recompute_mm_shapes_by_fqns": ["moe.router.gate"],
        **dict.fromkeys(
            ("memory_budget", "visualize_memory_budget_pareto", "preserve_rng_state", "determinism_check", "debug"),
            _IRRELEVANT,
        ),
    },
    "compile": {"enable": False, "components": ["model", "loss"], "backend": "inductor"},
    _FLOAT8: {
        "enable_fsdp_float8_all_gather": False,
        "recipe_name": None,
        "filter_fqns": [],
        "emulate": False,
        "precompute_float8_dynamic_scale_for_fsdp": _IRRELEVANT,
    },
    "quantize.linear.mx": {
        "recipe_name": "mxfp8_cublas",
        "filter_fqns": ["output"],
        "mxfp8_dim1_cast_kernel_choice": _IRRELEVANT,
    },
    "quantize.grouped_mm.float8": {"fqns": []},
    "quantize.grouped_mm.mx": {"recipe_name": "mxfp8", "fqns": []},
}
_IRRELEVANT_SECTIONS: Final = (
    "job", "profiling", "metrics", "lr_scheduler", "checkpoint", "comm", "memory_estimation", "validation", "debug",
)  # fmt: skip
"""Sections that do not affect the step."""
_UNSUPPORTED_SECTIONS: Final = ("fault_tolerance", "experimental")
"""Sections that scenarios cannot express; reported if present."""
_PARENT_SECTIONS: Final = ("quantize", "quantize.linear", "quantize.grouped_mm")
T = TypeVar("T")


class TorchtitanConfig:
    """The keys of a job file, with torchtitan's defaults; getters raise InputError for a value of the wrong type."""

    def __init__(self, content: JobContent, source: str) -> None:
        """Take a job's sections; raises InputError for a key or section that torchtitan does not have."""
        self.source = source
        self._unknown_keys, self._unknown = content.unknown_keys, list[str]()
        self._stated = dict(self._flatten_sections(content.sections, ""))
        self._queried: set[tuple[str, str]] = set()
        if not self._stated:
            raise InputError(f"{source}: has no sections of a torchtitan job, such as [model] or [parallelism]")

    @property
    def ignored_keys(self) -> tuple[str, ...]:
        """Keys that are stated, differ from the default and were never queried."""
        if self._unknown_keys is UnknownKeys.PASSED_OVER:
            return ()
        sections = (f"[{name}]" for name in _UNSUPPORTED_SECTIONS if name in self._stated)
        keys = (
            f"[{section}] {key}"
            for section, keys in self._stated.items()
            for key, value in keys.items()
            if section in DEFAULTS
            and (section, key) not in self._queried
            and DEFAULTS[section][key] not in (_IRRELEVANT, value)
        )
        return (*keys, *sections, *self._unknown)

    def choice(self, section: str, key: str, choices: Mapping[str, T]) -> T:
        """The entry of `choices` for a key's value."""
        value = self._value(section, key, str, "a word in quotes")
        if value not in choices:
            raise self.error(section, key, f"{format_value(value)} is not known; {suggest_nearest(value, choices)}")
        return choices[value]

    def string(self, section: str, key: str) -> str:
        """A string."""
        value: str = self._value(section, key, str, "a text in quotes")
        return value

    def boolean(self, section: str, key: str) -> bool:
        """A boolean."""
        value: bool = self._value(section, key, bool, "true or false")
        return value

    def integer(self, section: str, key: str, minimum: int = 1) -> int:
        """An integer, at least `minimum`, or the default."""
        value: int = self._value(section, key, int, "a whole number")
        if value < minimum and value != DEFAULTS[section][key]:
            raise self.error(section, key, f"{format_value(value)} is less than {minimum}")
        return value

    def optional_integer(self, section: str, key: str) -> int | None:
        """A positive integer; None if the key is missing."""
        return self.integer(section, key) if self.has_key(section, key) else None

    def string_list(self, section: str, key: str) -> list[str]:
        """A list of strings."""
        value: list[str] = self._value(section, key, list, "a list of words in quotes")
        if not all(isinstance(element, str) for element in value):
            raise self.error(section, key, f"{format_value(value)} is not a list of words in quotes")
        return value

    def nested_string_list(self, section: str, key: str) -> list[list[str]]:
        """A list of lists of strings."""
        value: list[list[str]] = self._value(section, key, list, "a list of lists")
        if not all(
            isinstance(inner_list, list) and all(isinstance(element, str) for element in inner_list)
            for inner_list in value
        ):
            raise self.error(section, key, f"{format_value(value)} is not a list of lists of words in quotes")
        return value

    def has_key(self, section: str, key: str) -> bool:
        """Whether the file states a key."""
        return key in self._stated.get(section, {})

    def mark_irrelevant(self, section: str, *keys: str) -> None:
        """Mark keys that have no effect here as queried, so that they are not reported as ignored."""
        self._queried.update((section, key) for key in keys)

    def error(self, section: str, key: str, message: str) -> InputError:
        """An error about a key's value, as a sentence."""
        return InputError(f"{self.source}: [{section}] {key}: {message}")

    def _value(self, section: str, key: str, value_type: type, type_label: str) -> Any:
        self._queried.add((section, key))
        value = self._stated.get(section, {}).get(key, DEFAULTS[section][key])
        if not isinstance(value, value_type) or (value_type is int and isinstance(value, bool)):
            raise self.error(section, key, f"{format_value(value)} is not {type_label}")
        return value

    def _flatten_sections(self, content: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Sections by their dotted names."""
        for name, value in content.items():
            section = f"{prefix}{name}"
            if not isinstance(value, dict) and section in (
                *DEFAULTS,
                *_PARENT_SECTIONS,
                *_IRRELEVANT_SECTIONS,
                *_UNSUPPORTED_SECTIONS,
            ):
                raise InputError(
                    f"{self.source}: {section} is a section, not a value; write [{section}] above its keys"
                )
            if not isinstance(value, dict):
                raise InputError(
                    f"{self.source}: {section} stands in no section; {suggest_nearest(name, self._dotted_keys())}"
                )
            if section in _PARENT_SECTIONS:
                yield from self._flatten_sections(value, f"{section}.")
                continue
            if section not in (*DEFAULTS, *_IRRELEVANT_SECTIONS, *_UNSUPPORTED_SECTIONS):
                if self._unknown_keys is not UnknownKeys.REFUSED:
                    continue
                raise InputError(
                    f"{self.source}: there is no section [{section}]; {suggest_nearest(section, DEFAULTS)}"
                )
            unknown = [key for key in value if key not in DEFAULTS[section]] if section in DEFAULTS else []
            for key in unknown:
                if self._unknown_keys is UnknownKeys.REFUSED:
                    raise self.error(
                        section, key, f"torchtitan has no such key; {suggest_nearest(key, DEFAULTS[section])}"
                    )
                self._unknown.append(f"[{section}] {key}")
            yield section, {key: one for key, one in value.items() if key not in unknown}

    @staticmethod
    def _dotted_keys() -> list[str]:
        return [f"{section}.{key}" for section, keys in DEFAULTS.items() for key in keys]
