"""Parser of Megatron-LM's pipeline layout strings.

`Et*3|(tt|)*29m|L` lists what each virtual stage holds, in model order: E the embedding, t a transformer
layer, m a multi-token prediction (MTP) layer, L the loss (with final norm and logits); `|` ends a stage,
`x*n` and `(...)*n` repeat, commas mean nothing. The stages go round the pipeline ranks, as in interleaving.
All m are on one stage. Reference: Megatron-LM, `--pipeline-model-parallel-layout`,
megatron/core/transformer/pipeline_parallel_layer_layout.py.
"""

import re

from clustersim.common.errors import InputError, format_value
from clustersim.parallel.layer_partition import PipelineLayoutString

_REPEATED_GROUP = re.compile(r"\(([^()]*)\)\*(\d+)")
_REPEATED_LETTER = re.compile(r"([A-Za-z|])\*(\d+)")
_MAX_LETTERS = 100_000  # letters of all stages: ten times the maximum number of layers
_LETTERS_LABEL = "E (embedding), t (layer), m (multi-token prediction) and L (loss)"


def parse_pipeline_layout(text: str) -> PipelineLayoutString:
    """Layers of each virtual stage; raise InputError for what Megatron-LM does not accept.

    >>> parse_pipeline_layout("Et*3|(tt|)*2mL")
    PipelineLayoutString(layer_counts=(3, 2, 2, 0), mtp_layer_counts=(0, 0, 0, 1))
    """
    stages = _expand_repeats(text).split("|")
    letters = "".join(stages)
    for letter in dict.fromkeys(letters):
        if letter not in "EtmL":
            raise InputError(f"{format_value(text)}: {letter!r} stands for nothing; {_LETTERS_LABEL} are known")
    if letters.count("E") != 1 or not letters.startswith("E"):
        raise InputError(f"{format_value(text)}: the embedding, E, comes first and once; such as Et|tt|tL")
    if letters.count("L") != 1 or not letters.endswith("L"):
        raise InputError(f"{format_value(text)}: the loss, L, comes last and once; such as Et|tt|tL")
    if not stages[0].startswith("E") or not stages[-1].endswith("L"):
        raise InputError(f"{format_value(text)}: a stage before the embedding or after the loss holds nothing")
    mtp_counts = tuple(stage.count("m") for stage in stages)
    if "t" in letters.partition("m")[2] or len([*filter(None, mtp_counts)]) > 1:
        raise InputError(f"{format_value(text)}: m comes behind all t, and all m on one stage; such as Et|tt|tm|L")
    return PipelineLayoutString(tuple(stage.count("t") for stage in stages), mtp_counts)


def _expand_repeats(text: str) -> str:
    """The string with its repetitions expanded."""
    expanded = "".join(text.replace(",", "").split())
    for bracket, counterpart in ("()", ")("):
        if expanded.count(bracket) > expanded.count(counterpart):
            raise InputError(f"{format_value(text)}: a {bracket!r} without its {counterpart!r}; write (tt|)*29")
    for pattern in (_REPEATED_GROUP, _REPEATED_LETTER):
        while match := pattern.search(expanded):
            if len(expanded) + len(match[1]) * int(match[2][:7]) > _MAX_LETTERS:
                raise InputError(f"{format_value(text)}: is more than {_MAX_LETTERS:,} letters written out")
            expanded = expanded[: match.start()] + match[1] * int(match[2]) + expanded[match.end() :]
    if leftover := re.search(r"[()*0-9]", expanded):
        raise InputError(f"{format_value(text)}: {leftover[0]!r} repeats nothing; write (tt|)*29 or t*3")
    return expanded
