"""What may a scenario file say of adapters that are trained beside frozen weights?

`training.lora`: their rank, and beside which matrices of the layers they stand, in the words of Hugging Face peft
(`q_proj`), of Megatron-Bridge (`linear_qkv`, one adapter for the fused matrix) or plain ones (`q`, `attention`, `all`).
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, ClassVar, Final

from pydantic import AfterValidator, Field

from clustersim.common.dtypes import DType
from clustersim.common.errors import nearest, shown
from clustersim.model.lora import Lora, Projection, Target
from clustersim.scenario.config_reader import Name, Section, Width, member, mistake, reads, share

MOST_DROPOUT: Final = 0.99
_ATTENTION: Final = (Target.Q, Target.K, Target.V, Target.O)
_MLP: Final = (Target.GATE, Target.UP, Target.DOWN)
_GROUPS: Final[Mapping[str, tuple[Target, ...]]] = MappingProxyType(
    {"all": (*_ATTENTION, *_MLP), "attention": _ATTENTION, "mlp": _MLP}
)
_OTHER_WORDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        **{f"{target.value}_proj": target.value for target in (*_ATTENTION, *_MLP)},  # Hugging Face
        **{"output_proj": "o", "linear_proj": "o", "linear_fc2": "down"},  # torchtune; Megatron
    }
)
WORDS: Final = (*_GROUPS, *(target.value for target in Target))


def _words(value: object) -> object:
    """A list of known words, each in its plainest spelling, once."""
    listed = value if isinstance(value, list) else [value]
    words = [_OTHER_WORDS.get(str(word), word) for word in listed]
    for word in words:
        if word not in WORDS:
            raise mistake(f"{shown(word)} is unknown; {nearest(str(word), (*WORDS, *_OTHER_WORDS))}")
    if not words:
        raise mistake(f"is empty; write some of {', '.join(WORDS)}")
    return list(dict.fromkeys(words))


def _apart(words: list[str]) -> list[str]:
    """One adapter at most beside each matrix."""
    beside: dict[Projection, Target] = {}
    for target in _targets(words):
        for projection in target.covers:
            other = beside.setdefault(projection, target)
            if other is not target:
                raise mistake(f"{other.value} and {target.value} are both beside {projection.value}; keep one of them")
    return words


def _targets(words: list[str]) -> tuple[Target, ...]:
    chosen = (target for word in words for target in (_GROUPS[word] if word in _GROUPS else (Target(word),)))
    return tuple(dict.fromkeys(chosen))


def _positive(value: float) -> float:
    if not 0.0 < value < float("inf"):
        raise mistake(f"{shown(value)} is not above zero; the scale is alpha / rank, such as 32 / 16")
    return value


class LoraSection(Section):
    """`training.lora`: adapters of so many ranks beside frozen weights; a bare number is the rank."""

    short: ClassVar[str | None] = "rank"
    example: ClassVar[str] = "{rank: 16, targets: all}, or none"
    rank: Width = Field(examples=[16])
    """inner size of the adapters"""
    alpha: Annotated[float, AfterValidator(_positive)] = 32.0
    """adapters are scaled by alpha over rank"""
    targets: Annotated[
        list[Name],
        reads(_words, f"a word or a list of words: {', '.join((*WORDS, *_OTHER_WORDS))}"),
        AfterValidator(_apart),
    ] = Field(["all"])
    """matrices that have one: all, attention, mlp, names of peft (q_proj) or of Megatron (linear_qkv, one adapter
    for the fused matrix); left out: [all]"""
    dropout: Annotated[float, share(0.0, MOST_DROPOUT)] = 0.0
    """before an adapter"""
    base: Annotated[DType | None, member(DType, DType.NF4, absent="none")] = None
    """nf4: the layers' frozen matrices are kept in 4 bits (QLoRA); left out: none"""

    def adapters(self, there: frozenset[Projection]) -> Lora:
        """The adapters as the inside knows them; there: the model's projections, of which groups mean those it has."""
        named = {Target(word) for word in self.targets if word not in _GROUPS}
        targets = (target for target in _targets(self.targets) if target in named or there.intersection(target.covers))
        return Lora(self.rank, tuple(targets), self.alpha, self.dropout, self.base)
