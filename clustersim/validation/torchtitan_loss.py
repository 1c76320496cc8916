"""Which cross-entropy did torchtitan run? It changed five times, which weighs more than anything else in its memory.

The date is that of the commit, where the notes state one (`commit of 2025-02-06`), else the middle of the row's
year.
"""

import re
from bisect import bisect_right
from typing import Final

from clustersim.validation.cases import ValidationCase

_COMMIT_DATE: Final = re.compile(r"commit of (\d{4}-\d\d-\d\d)")
_CHUNKED_NOTE: Final = "chunked cross entropy"  # of its pull request 996, in which the loss is torchtune's
# From when on, in pytorch/torchtitan: the loss without, and with, compiled layers.
_LOSSES: Final = (
    ("", "torch_fp32", "torch_fp32"),  # the model ends in .float(), and train.py keeps its result
    ("2024-06-12", "torch", "torch"),  # del pred before backward (e29b6b4d4)
    ("2024-10-22", "torch", "compiled"),  # .float() in the loss, which is compiled (e10cb9494)
    ("2024-12-18", "torch", "torch"),  # "compiling loss function causes CUDA errors" (e8977b007)
    ("2025-04-02", "torch", "compiled"),  # build_cross_entropy_loss (bbb1b616e)
    ("2026-04-27", "fused_linear", "fused_linear"),  # ChunkedCELoss in all models' configurations (786e26f8e)
)


def torchtitan_loss(case: ValidationCase, *, compiled: bool) -> str:
    """`training.loss` of a run. compiled: whether its layers are compiled."""
    if _CHUNKED_NOTE in case.text("notes"):
        return "chunked"
    stated = _COMMIT_DATE.search(case.text("notes"))
    date = stated[1] if stated else f"{case.text('year') or 9999}-07-01"
    _, eager_loss, compiled_loss = _LOSSES[bisect_right(_LOSSES, date, key=lambda entry: entry[0]) - 1]
    return compiled_loss if compiled else eager_loss
