"""What may a scenario file say about LoRA adapters?

`training.lora`: their rank and target matrices, by the names of Hugging Face peft (`q_proj`), of
Megatron-Bridge (`linear_qkv`, one adapter for the fused matrix) or plain ones (`q`, `attention`, `all`).
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, ClassVar, Final

from pydantic import AfterValidator, Field

from clustersim.common.dtypes import STORED_WEIGHT_DTYPES, DType
from clustersim.common.errors import format_value, suggest_nearest
from clustersim.model.lora import Lora, LoraTarget, Projection
from clustersim.scenario.config_reader import (
    ConfigModel,
    NonEmptyText,
    Width,
    config_error,
    enum_parser,
    fraction_parser,
    value_parser,
)

MAX_DROPOUT: Final = 0.99
_ATTENTION_TARGETS: Final = (LoraTarget.Q, LoraTarget.K, LoraTarget.V, LoraTarget.O)
_MLP_TARGETS: Final = (LoraTarget.GATE, LoraTarget.UP, LoraTarget.DOWN)
_TARGET_GROUPS: Final[Mapping[str, tuple[LoraTarget, ...]]] = MappingProxyType(
    {"all": (*_ATTENTION_TARGETS, *_MLP_TARGETS), "attention": _ATTENTION_TARGETS, "mlp": _MLP_TARGETS}
)
_TARGET_ALIASES: Final[Mapping[str, str]] = MappingProxyType(
    {
        **{f"{target.value}_proj": target.value for target in (*_ATTENTION_TARGETS, *_MLP_TARGETS)},  # Hugging Face
        **{"output_proj": "o", "linear_proj": "o", "linear_fc2": "down"},  # torchtune; Megatron
    }
)
TARGET_NAMES: Final = (*_TARGET_GROUPS, *(target.value for target in LoraTarget))


def _parse_targets(value: object) -> object:
    """Canonical names of targets, without duplicates."""
    names = value if isinstance(value, list) else [value]
    canonical_names = [_TARGET_ALIASES.get(str(name), name) for name in names]
    for name in canonical_names:
        if name not in TARGET_NAMES:
            raise config_error(
                f"{format_value(name)} is unknown; {suggest_nearest(str(name), (*TARGET_NAMES, *_TARGET_ALIASES))}"
            )
    if not canonical_names:
        raise config_error(f"is empty; write some of {', '.join(TARGET_NAMES)}")
    return list(dict.fromkeys(canonical_names))


def _check_disjoint_targets(names: list[str]) -> list[str]:
    """Check that each matrix has at most one adapter."""
    target_by_projection: dict[Projection, LoraTarget] = {}
    for target in _expand_targets(names):
        for projection in target.projections:
            other = target_by_projection.setdefault(projection, target)
            if other is not target:
                raise config_error(
                    f"{other.value} and {target.value} are both adapters of {projection.value}; keep one of them"
                )
    return names


def _expand_targets(names: list[str]) -> tuple[LoraTarget, ...]:
    targets = (
        target for name in names for target in (_TARGET_GROUPS[name] if name in _TARGET_GROUPS else (LoraTarget(name),))
    )
    return tuple(dict.fromkeys(targets))


def _require_positive(value: float) -> float:
    if not 0.0 < value < float("inf"):
        raise config_error(f"{format_value(value)} is not above zero; the scale is alpha / rank, such as 32 / 16")
    return value


class LoraConfig(ConfigModel):
    """`training.lora`: low-rank adapters on frozen weights; a bare number is the rank."""

    shorthand_key: ClassVar[str | None] = "rank"
    example: ClassVar[str] = "{rank: 16, targets: all}, or none"
    rank: Width = Field(examples=[16])
    """rank of the adapters"""
    alpha: Annotated[float, AfterValidator(_require_positive)] = 32.0
    """adapter outputs are scaled by alpha over rank"""
    targets: Annotated[
        list[NonEmptyText],
        value_parser(_parse_targets, f"a word or a list of words: {', '.join((*TARGET_NAMES, *_TARGET_ALIASES))}"),
        AfterValidator(_check_disjoint_targets),
    ] = Field(["all"])
    """target matrices: all, attention, mlp, names of peft (q_proj) or of Megatron (linear_qkv, one adapter for the
    fused matrix); left out: [all]
    """
    dropout: Annotated[float, fraction_parser(0.0, MAX_DROPOUT)] = 0.0
    """dropout probability of the adapter's input"""
    base: Annotated[DType | None, enum_parser(DType, *STORED_WEIGHT_DTYPES, none_word="none")] = None
    """frozen weight matrices of the layers are stored in 4 bits (nf4, QLoRA) or 8 (int8); left out: none"""

    def lora_settings(self, model_projections: frozenset[Projection]) -> Lora:
        """The LoRA settings as the simulator represents them; target groups are restricted to the model's matrices."""
        explicit_targets = {LoraTarget(name) for name in self.targets if name not in _TARGET_GROUPS}
        targets = (
            expand_target
            for expand_target in _expand_targets(self.targets)
            if expand_target in explicit_targets or model_projections.intersection(expand_target.projections)
        )
        return Lora(self.rank, tuple(targets), self.alpha, self.dropout, self.base)
