"""What do layouts differ in? Keys of a scenario file, in the order in which they are chosen."""

from typing import Final

TP, CP, PP, EP, ETP, DP = (f"layout.{axis}" for axis in ("tp", "cp", "pp", "ep", "etp", "dp"))
SCHEDULE: Final = "schedule"
LAYERS_PER_STAGE: Final = "layout.layers_per_stage"
DATA_PARALLEL: Final = "layout.data"
MICROBATCH: Final = "training.microbatch"
RECOMPUTE: Final = "training.recompute"
OFFLOAD: Final = "training.offload"
EP_OVERLAP: Final = "layout.overlap_expert_communication"
SEQUENCE_PARALLEL: Final = "layout.sequence_parallel"
DEGREES: Final = (TP, CP, PP)
KEY_ORDER: Final = (*DEGREES, SEQUENCE_PARALLEL, SCHEDULE, EP, ETP, DATA_PARALLEL, EP_OVERLAP, MICROBATCH, RECOMPUTE)
STATE_NEUTRAL_KEYS: Final = (EP_OVERLAP, MICROBATCH, RECOMPUTE)
"""Those on which nothing depends that stays in memory for the whole step."""
SAME_AS_TP: Final = "tp"
"""A value of layout.etp: whatever layout.tp is."""
