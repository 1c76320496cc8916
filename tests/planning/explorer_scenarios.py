"""Scenarios that are explored, and random settings of their pages as scenarios."""

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Final

import pytest

from clustersim.common.errors import InputError
from clustersim.planning.explorer import explorer_data, settings
from clustersim.results.explorer_tables import ExplorerData
from clustersim.scenario import Scenario
from clustersim.schedules.registry import CHUNKED_SCHEDULES

SCENARIOS: Final[dict[str, dict[str, Any]]] = {
    "llama": {
        "model": "llama3-8b",
        "cluster": {"name": "dgx-h100", "gpus": 64},
        "layout": {"tp": 2, "pp": 4, "dp": 8, "data": "zero1", "sequence_parallel": True},
        "schedule": {"interleaved": {"chunks": 2}},
        "training": {"sequence": 4096, "global_batch": 64, "recompute": {"layers": 1}},
    },
    "gpt": {  # stored attention scores, tied embeddings, uneven stages, a loss in FP32, FSDP with options
        "model": "gpt3-1.3b",
        "cluster": {"name": "dgx-a100", "gpus": 16},
        "layout": {
            "tp": 2,
            "pp": 4,
            "dp": 2,
            "layers_per_stage": [7, 6, 6, 5],
            "data": {"fsdp": {"prefetch": 2, "reshard_after_forward": False}},
        },
        "schedule": "gpipe",
        "training": {
            "sequence": 2048,
            "global_batch": 32,
            "attention": "standard",
            "loss": "torch",
            "precision": "fp16",
        },
    },
    "odd": {  # three nodes, pipelines of six, sizes that are no powers of two, a custom bucket size
        "model": {"preset": "llama-tiny", "layers": 12},
        "cluster": {"name": "dgx-h100", "gpus": 24},
        "layout": {
            "tp": 2,
            "pp": 6,
            "dp": 2,
            "data": {"zero": {"stage": 2, "bucket": "20 MB"}},
            "order": ["tp", "pp", "cp", "dp"],
        },
        "training": {"sequence": 768, "global_batch": 36, "microbatch": 3, "recompute": {"layers": 1}},
    },
    "hybrid": {  # weights sharded over eight of their replicas, where there are as many
        "model": {"preset": "llama-tiny", "layers": 12},
        "cluster": {"name": "dgx-h100", "gpus": 64},
        "layout": {"tp": 2, "cp": 2, "dp": 16, "data": {"hsdp": {"shard": 8}}},
        "training": {"sequence": 2048, "global_batch": 64, "recompute": "full"},
    },
    "narrow": {  # a custom precision recipe, on GPUs that support more of them
        "model": {
            "preset": "llama-tiny",
            "layers": 12,
            "ffn": 192,
        },  # divisible into blocks of 32, but not over many ranks
        "cluster": {"name": "hgx-b200", "gpus": 32},
        "layout": {"tp": 2, "pp": 2, "dp": 8, "data": "zero1", "sequence_parallel": True},
        "training": {
            "sequence": 1024,
            "global_batch": 32,
            "precision": {"compute": "mxfp8", "gradients": "bf16"},
            "recompute": {"layers": 1},
        },
    },
}
MIXED_SCENARIOS: Final[dict[str, dict[str, Any]]] = {
    "wide": {  # layers whose MLPs differ
        "model": {
            "preset": "llama-tiny",
            "heads": 6,
            "kv_heads": 2,
            "stack": [{"layers": 2, "ffn": 704}, {"layers": 6}],
        },
        "cluster": {"name": "dgx-h100", "gpus": 16},
        "layout": {"tp": 2, "pp": 2, "cp": 2, "dp": 2, "data": "zero1", "sequence_parallel": True},
        "training": {"sequence": 1024, "global_batch": 32, "recompute": "selective"},
    },
    "mamba": {  # layers that are a mixer or an MLP
        "model": {
            **{"hidden": 512, "heads": 8, "ffn": 1024, "vocab": 2048, "hybrid_layer_pattern": "M-M*-M-M"},
            "mamba": {"num_heads": 6, "head_dim": 64, "state_dim": 64, "num_groups": 2},
        },
        "cluster": {"name": "dgx-h100", "gpus": 16},
        "layout": {"tp": 2, "pp": 2, "dp": 4, "data": "zero1", "sequence_parallel": True},
        "training": {"sequence": 1024, "global_batch": 32, "recompute": {"layers": 1}},
    },
    "delta": {  # gated delta nets between attention, with an MLP in each layer
        "model": {
            **{"preset": "llama-tiny", "linear_attention_freq": 4},
            "gated_delta_net": {"num_key_heads": 6, "num_value_heads": 6, "key_head_dim": 64, "value_head_dim": 64},
        },
        "cluster": {"name": "dgx-h100", "gpus": 16},
        "layout": {"tp": 2, "dp": 8, "data": "zero3"},
        "training": {"sequence": 1024, "global_batch": 16},
    },
    "images": {  # two streams of tokens, then one; modulation by vectors of each image
        "model": "flux.1-dev",
        "cluster": {"name": "dgx-h100", "gpus": 16},
        "layout": {"tp": 2, "pp": 2, "dp": 4, "data": "fsdp"},
        "training": {"global_batch": 32, "recompute": "full"},
    },
    "shared": {  # blocks that several layers share
        "model": {"preset": "zamba2-7b", "layers": 30},
        "cluster": {"name": "dgx-h100", "gpus": 16},
        "layout": {"tp": 2, "dp": 8, "data": "fsdp"},
        "training": {"sequence": 1024, "global_batch": 32},
    },
}
"""Models whose layers differ, or have other mixers than attention, of heads that two ranks divide and four do not."""
MOE_SCENARIOS: Final[dict[str, dict[str, Any]]] = {
    "latent": {  # first layers dense, MLA, shared experts, node-limited routing, recomputation by modules
        "model": {"preset": "deepseek-v3", "layers": 12},
        "cluster": {"name": "dgx-h800", "gpus": 64},
        "layout": {"tp": 1, "pp": 4, "dp": 16, "ep": 8, "data": "zero1", "sequence_parallel": True,
                   "dispatcher": "deepep"},
        "training": {
            "sequence": 1024, "global_batch": 128, "recompute": {"modules": ["mla_up_proj", "moe_act", "layernorm"]},
        },
    },
    "mixed": {  # one kind of layer, experts sharded differently from the rest, FSDP
        "model": {"preset": "mixtral-8x7b", "layers": 8},
        "cluster": {"name": "hgx-b200", "gpus": 32},
        "layout": {"tp": 2, "cp": 2, "pp": 2, "dp": 4, "ep": 4, "etp": 1, "data": "fsdp", "sequence_parallel": True},
        "training": {"sequence": 1024, "global_batch": 32, "recompute": {"modules": ["moe"]}},
    },
}  # fmt: skip
LORA_SCENARIO: Final = {  # frozen 4-bit weights, adapters on some of them, FSDP with a pipeline
    **SCENARIOS["llama"],
    "layout": {"tp": 2, "cp": 2, "pp": 2, "dp": 8, "data": "fsdp", "sequence_parallel": True},
    "schedule": "1f1b",
    "training": {
        **SCENARIOS["llama"]["training"], "recompute": "full",
        "lora": {"rank": 8, "targets": ["q", "v", "o", "down"], "base": "nf4"},
    },
}  # fmt: skip
SECONDARY_SHARD_SCENARIO: Final = {
    **SCENARIOS["hybrid"],
    "layout": {"tp": 2, "cp": 2, "dp": 16, "data": {"fsdp": {"zero_hpz_partition_size": 8}}},
}
"""Backward gathers from a secondary shard, where there is no pipeline."""
SAMPLE_COUNT: Final = 250
FEW_SAMPLES: Final = 60
_PRECISIONS: Final = {
    "mixed precision, BF16": "bf16",
    "BF16 with BF16 gradients": "{compute: bf16, gradients: bf16}",
    "FP32": "fp32",
}
_ZERO_STRATEGIES: Final = ("ddp", "zero1", "zero2", "zero3")


@dataclass(frozen=True)
class ExploredScenario:
    """A scenario and the data of its explorer page; sample_count: how many random settings tests take of it."""

    scenario: Scenario
    exploration: ExplorerData
    sample_count: int = SAMPLE_COUNT

    def random_settings(self, count: int, seed: int = 0) -> Iterator[dict[str, Any]]:
        """Random settings of the page's controls; some keep the scenario's values."""
        rng, start = random.Random(seed), self.exploration.start
        for _ in range(count):
            keep_probability = rng.random()
            yield {
                key: start[key] if rng.random() < keep_probability else rng.choice(values)
                for key, values in self.exploration.choices.items()
            }

    @cached_property
    def legal_settings(self) -> list[tuple[dict[str, Any], Scenario]]:
        """The legal ones of the random settings, with their scenarios."""
        legal = []
        for page_settings in self.random_settings(self.sample_count, seed=1):
            with suppress(InputError):
                legal.append((page_settings, self.with_settings(page_settings)))
        return legal

    def with_settings(self, settings: dict[str, Any], zero_stage: int | None = None) -> Scenario:
        """The scenario with these settings, built by its public interface, with rings in one kernel as pages draw."""
        return self.scenario.with_overrides(
            self._overrides(settings, settings["zero"] if zero_stage is None else zero_stage), suggest=False
        )

    def with_zero_stage(self, settings: dict[str, Any], zero_stage: int) -> Scenario:
        """The scenario that the page draws for another ZeRO stage; weights are fully sharded where a rule needs it."""
        try:
            return self.with_settings(settings, zero_stage)
        except InputError:
            return self.scenario.with_overrides(
                [*self._overrides(settings, zero_stage), "layout.data=fsdp"], suggest=False
            )

    def _overrides(self, settings: dict[str, Any], zero_stage: int) -> Iterator[str]:
        if settings["model"] != 0:
            yield f"model={self.exploration.models[settings['model']].name}"
        if settings["precision"] != 0:
            name = self.exploration.formats[settings["precision"]]
            yield f"training.precision={_PRECISIONS.get(name, name.removeprefix('recipe '))}"
        chunks = settings["chunks"] if settings["schedule"] in CHUNKED_SCHEDULES else 1
        yield f"cluster.gpus={settings['gpus']}"
        experts = ("ep", "etp", "dispatcher") if "ep" in settings else ()
        yield from (f"layout.{axis}={settings[axis]}" for axis in ("tp", "cp", "pp", *experts))
        yield f"layout.dp={max(1, settings['gpus'] // (settings['tp'] * settings['cp'] * settings['pp']))}"
        yield from ("layout.cp_kind=ring", "training.overheads.ring_attention=one_kernel")
        yield f"layout.sequence_parallel={'true' if settings['split'] else 'false'}"
        if zero_stage != self.scenario.layout.data.zero_stage:
            yield f"layout.data={_ZERO_STRATEGIES[zero_stage]}"
        layers_per_stage = self.scenario.layout.layers_per_stage
        if layers_per_stage is not None and (
            settings["model"] != 0
            or (isinstance(layers_per_stage, tuple) and len(layers_per_stage) != settings["pp"] * chunks)
        ):
            yield "layout.layers_per_stage=even"
        yield (
            f"schedule={{{settings['schedule']}: {{chunks: {chunks}}}}}"
            if chunks > 1
            else f"schedule={settings['schedule']}"
        )
        mode, _, layers = settings["recompute"].partition(":")
        chosen = f"{{layers: {layers}}}" if mode == "layers" else f"{{modules: [{layers}]}}"
        yield f"training.recompute={chosen if layers else mode}"
        yield f"training.microbatch={settings['microbatch']}"
        if len(self.exploration.choices["sequence"]) > 1:
            yield f"training.sequence={settings['sequence']}"
        yield f"training.global_batch={settings['batch']}"


FEW_VALUES: Final[dict[str, tuple[int, ...]]] = {
    "tp": (1, 2, 4), "cp": (1, 2), "pp": (1, 2, 3, 4), "chunks": (2, 3), "microbatch": (1, 2),
    "sequence": (512, 1024, 2048), "batch": (8, 16, 32, 64),
}  # fmt: skip


@contextmanager
def few_choices() -> Iterator[None]:
    """Offer fewer values and models in pages: all that the page offers takes some seconds per scenario."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "OFFERED_VALUES", FEW_VALUES)
        patch.setattr(settings, "MOE_OFFERED_VALUES", {"tp": FEW_VALUES["tp"], "ep": (1, 2, 8), "etp": (1, 2)})
        patch.setattr(explorer_data, "MODELS", ("gpt2-small", "llama3-8b", "llama3-70b"))
        yield


@cache
def explore_scenario(name: str, *, all_choices: bool = True) -> ExploredScenario:
    """One of the scenarios, explored. all_choices: with all values that the page offers."""
    scenario = Scenario.from_mapping(
        {
            **SCENARIOS,
            **MOE_SCENARIOS,
            **MIXED_SCENARIOS,
            "secondary": SECONDARY_SHARD_SCENARIO,
            "adapters": LORA_SCENARIO,
        }[name]
    )
    samples = SAMPLE_COUNT if all_choices else FEW_SAMPLES
    with nullcontext() if all_choices else few_choices():
        return ExploredScenario(scenario, explorer_data.build_exploration_tables(scenario), samples)
