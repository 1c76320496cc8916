"""What does a Megatron-LM layout string say?

`Et*3|(tt|)*29m|L` lists what each virtual stage holds, in model order: E the embedding, t a transformer layer, m one
that predicts a further token, L the loss (with final norm and logits); `|` ends a stage, `x*n` and `(...)*n` repeat,
commas mean nothing. The stages go round the pipeline ranks, as interleaving has them. All m are on one stage.
Reference: Megatron-LM, `--pipeline-model-parallel-layout`, megatron/core/transformer/pipeline_parallel_layer_layout.py.
"""

import re

from clustersim.common.errors import InputError, shown
from clustersim.parallel.layer_partition import Drawn

_GROUP = re.compile(r"\(([^()]*)\)\*(\d+)")
_LETTER = re.compile(r"([A-Za-z|])\*(\d+)")
_MOST = 100_000  # letters of all stages: ten times the most layers
_LETTERS = "E (embedding), t (layer), m (multi-token prediction) and L (loss)"


def read_stages(text: str) -> Drawn:
    """Layers of each virtual stage; raise InputError for what Megatron-LM does not have.

    >>> read_stages("Et*3|(tt|)*2mL")
    Drawn(layers=(3, 2, 2, 0), ahead=(0, 0, 0, 1))
    """
    stages = _written_out(text).split("|")
    whole = "".join(stages)
    for letter in dict.fromkeys(whole):
        if letter not in "EtmL":
            raise InputError(f"{shown(text)}: {letter!r} stands for nothing; {_LETTERS} are known")
    if whole.count("E") != 1 or not whole.startswith("E"):
        raise InputError(f"{shown(text)}: the embedding, E, comes first and once; such as Et|tt|tL")
    if whole.count("L") != 1 or not whole.endswith("L"):
        raise InputError(f"{shown(text)}: the loss, L, comes last and once; such as Et|tt|tL")
    if not stages[0].startswith("E") or not stages[-1].endswith("L"):
        raise InputError(f"{shown(text)}: a stage before the embedding or after the loss holds nothing")
    ahead = tuple(stage.count("m") for stage in stages)
    if "t" in whole.partition("m")[2] or len([*filter(None, ahead)]) > 1:
        raise InputError(f"{shown(text)}: m comes behind all t, and all m on one stage; such as Et|tt|tm|L")
    return Drawn(tuple(stage.count("t") for stage in stages), ahead)


def _written_out(text: str) -> str:
    """The string without repetitions."""
    plain = "".join(text.replace(",", "").split())
    for bracket, other in ("()", ")("):
        if plain.count(bracket) > plain.count(other):
            raise InputError(f"{shown(text)}: a {bracket!r} without its {other!r}; write (tt|)*29")
    for pattern in (_GROUP, _LETTER):
        while match := pattern.search(plain):
            if len(plain) + len(match[1]) * int(match[2][:7]) > _MOST:
                raise InputError(f"{shown(text)}: is more than {_MOST:,} letters written out")
            plain = plain[: match.start()] + match[1] * int(match[2]) + plain[match.end() :]
    if left := re.search(r"[()*0-9]", plain):
        raise InputError(f"{shown(text)}: {left[0]!r} repeats nothing; write (tt|)*29 or t*3")
    return plain
