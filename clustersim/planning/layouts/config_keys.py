"""What do layouts differ in? Keys of a scenario file, in the order in which they are chosen."""

from typing import Final

TP, CP, PP, EP, ETP, DP = (f"layout.{axis}" for axis in ("tp", "cp", "pp", "ep", "etp", "dp"))
SCHEDULE: Final = "schedule"
SPLIT: Final = "layout.layers_per_stage"
DATA: Final = "layout.data"
MICROBATCH: Final = "training.microbatch"
RECOMPUTE: Final = "training.recompute"
OFFLOAD: Final = "training.offload"
OVERLAP: Final = "layout.overlap_expert_communication"
SEQUENCE_PARALLEL: Final = "layout.sequence_parallel"
DEGREES: Final = (TP, CP, PP)
ORDER: Final = (*DEGREES, SEQUENCE_PARALLEL, SCHEDULE, EP, ETP, DATA, OVERLAP, MICROBATCH, RECOMPUTE)
PASSING: Final = (OVERLAP, MICROBATCH, RECOMPUTE)
"""Those on which nothing depends that stays in memory for the whole step."""
AS_TP: Final = "tp"
"""A value of layout.etp: whatever layout.tp is."""
