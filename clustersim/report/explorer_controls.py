"""Which choices does the explorer page offer? Sliders over lists of values, the scenario's among them."""

from collections.abc import Iterable
from html import escape
from json import dumps
from typing import Final

from clustersim.analysis.exploration import Exploration, ModelSizes

_TENSOR: Final = (1, 2, 4, 8, 16, 32, 64)
_CONTEXT: Final = (1, 2, 4, 8, 16)
_PIPELINE: Final = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
_CHUNKS: Final = (2, 3, 4, 5, 6, 8)
_MICROBATCHES: Final = (1, 2, 4, 8, 16, 32)
_SEQUENCES: Final = tuple(2**power for power in range(8, 18))
_BATCHES: Final = tuple(2**power for power in range(15))
_RECOMPUTES: Final = {
    "none": "nothing",
    "selective": "attention core",
    "selective_op": "all but every second product",
    "full": "whole layers",
}
_LAYERS: Final = (1, 2, 4)
_SCHEDULES: Final = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "interleaved 1F1B"}
_COUNTS: Final = (1e12, "T"), (1e9, "G"), (1e6, "M")
_ZERO: Final = ("0 (DDP)", "1: optimizer", "2: + gradients", "3: + parameters")


def controls(exploration: Exploration) -> str:
    """A labelled control for each setting."""
    start = exploration.start
    parts = [
        _select("model", "model", enumerate(map(_model_words, exploration.models))),
        _slider("gpus", "GPUs", exploration.machine.gpus),
        _slider("tp", "tp, tensor", (*_TENSOR, start.tp)),
        _slider("pp", "pp, pipeline", (*_PIPELINE, start.pp)),
        _slider("cp", "cp, context", (*_CONTEXT, start.cp)),
        _select("zero", "ZeRO shards", enumerate(_ZERO)),
        _select("recompute", "recompute", _recomputes(start.recompute).items()),
        _slider("microbatch", "microbatch", (*_MICROBATCHES, start.microbatch)),
        _slider("sequence", "sequence", (*_SEQUENCES, start.sequence)),
        _slider("batch", "batch", (*_BATCHES, *(start.batch * factor for factor in (1, 2, 4)))),
        _select("schedule", "schedule", _SCHEDULES.items()),
        _slider("chunks", "chunks of a rank", (*_CHUNKS, max(2, start.chunks))),
        _select("format", "number formats", enumerate(each.name for each in exploration.formats)),
        _tick("split", "sequence parallel"),
    ]
    return f'<fieldset class="controls" aria-label="what to look at">{"".join(parts)}</fieldset>'


def _model_words(model: ModelSizes) -> str:
    size, unit = next((each for each in _COUNTS if model.parameters >= each[0]), _COUNTS[-1])
    return f"{model.name} ({model.parameters / size:.3g} {unit})"


def _recomputes(own: str) -> dict[str, str]:
    """Ways to recompute by name; so many layers of each stage, the scenario's number among them."""
    numbers = {*_LAYERS, *([int(own.removeprefix("layers:"))] if own.startswith("layers:") else [])}
    some = {f"layers:{layers}": f"{layers} layer{'s' if layers > 1 else ''} a stage" for layers in sorted(numbers)}
    return {**_RECOMPUTES, **some}


def _slider(key: str, label: str, values: Iterable[int]) -> str:
    listed = sorted(set(values))
    return (
        f'<div><label for="control-{key}">{escape(label)}<output for="control-{key}"></output></label>'
        f'<input type="range" id="control-{key}" data-key="{key}" data-values="{dumps(listed)}" '
        f'min="0" max="{len(listed) - 1}" step="1"></div>'
    )


def _select(key: str, label: str, options: Iterable[tuple[int | str, str]]) -> str:
    listed = list(options)
    inner = "".join(f'<option value="{escape(str(value))}">{escape(words)}</option>' for value, words in listed)
    values = escape(dumps([value for value, _ in listed]))
    return (
        f'<div><label for="control-{key}">{escape(label)}</label>'
        f'<select id="control-{key}" data-key="{key}" data-values="{values}">{inner}</select></div>'
    )


def _tick(key: str, label: str) -> str:
    return (
        f'<div><label class="tick" for="control-{key}">{escape(label)}'
        f'<input type="checkbox" id="control-{key}" data-key="{key}"></label></div>'
    )
