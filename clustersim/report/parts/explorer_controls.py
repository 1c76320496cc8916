"""Which choices does the explorer page offer? Sliders over lists of values, the scenario's among them."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from clustersim.analysis.exploration import Exploration, ModelWords, Setting

_RECOMPUTES: Final = {
    "none": "nothing",
    "selective": "attention core",
    "selective_op": "all but every second product",
    "full": "whole layers",
}
_SCHEDULES: Final = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "interleaved 1F1B", "bfs": "breadth-first"}
_DISPATCHERS: Final = {
    "allgather": "all-gather",
    "alltoall": "all-to-all",
    "deepep": "DeepEP",
    "deepep_v2": "DeepEP V2",
    "hybridep": "Hybrid-EP",
}
_COUNTS: Final = (1e12, "T"), (1e9, "G"), (1e6, "M")
_LABELS: Final = {
    "model": "model", "gpus": "GPUs", "tp": "tp, tensor", "pp": "pp, pipeline", "cp": "cp, context",
    "ep": "ep, experts", "etp": "etp, expert parts", "dispatcher": "dispatcher",
    "zero": "ZeRO shards", "recompute": "recompute", "microbatch": "microbatch", "sequence": "sequence",
    "batch": "batch", "schedule": "schedule", "chunks": "chunks of a rank", "precision": "number formats",
}  # fmt: skip
_ZERO: Final = ("0 (DDP)", "1: optimizer", "2: + gradients", "3: + parameters")


def controls(exploration: Exploration) -> Iterator[tuple[str, str, Sequence[Setting], list[tuple[Setting, str]]]]:
    """Key, label and values of each setting; of those that are chosen by words, each value with its words."""
    choices = exploration.choices
    words: dict[str, Iterable[str]] = {
        "model": map(_model_words, exploration.models), "zero": _ZERO, "precision": exploration.formats,
        "recompute": (_recompute_words(str(way)) for way in choices["recompute"]),
        "schedule": (_SCHEDULES[str(name)] for name in choices["schedule"]),
        "dispatcher": (_DISPATCHERS[str(name)] for name in choices.get("dispatcher", ())),
    }  # fmt: skip
    for key, label in _LABELS.items():
        if key in choices:
            yield key, label, choices[key], list(zip(choices[key], words.get(key, ()), strict=key in words))


def _model_words(model: ModelWords) -> str:
    size, unit = next((each for each in _COUNTS if model.parameters >= each[0]), _COUNTS[-1])
    return f"{model.name} ({model.parameters / size:.3g} {unit})"


def _recompute_words(way: str) -> str:
    """What is recomputed, in words.

    >>> _recompute_words("layers:2")
    '2 layers a stage'
    """
    if way.startswith("modules:"):
        return way.removeprefix("modules:").replace(",", ", ")
    layers = way.removeprefix("layers:")
    return _RECOMPUTES.get(way) or f"{layers} layer{'s' if layers != '1' else ''} a stage"
