"""Which keys do layouts differ in? Keys of a scenario file, in the order in which the search chooses them."""

from typing import Final

TP, CP, PP, EP, ETP, DP = (f"layout.{axis}" for axis in ("tp", "cp", "pp", "ep", "etp", "dp"))
SCHEDULE: Final = "schedule"
LAYERS_PER_STAGE: Final = "layout.layers_per_stage"
DATA_PARALLEL: Final = "layout.data"
MICROBATCH: Final = "training.microbatch"
RECOMPUTE: Final = "training.recompute"
OFFLOAD: Final = "training.offload"
EP_OVERLAP: Final = "layout.overlap_moe_expert_parallel_comm"
SEQUENCE_PARALLEL: Final = "layout.sequence_parallel"
CP_KIND: Final = "layout.cp_kind"
ORDER: Final = "layout.order"
INNER_STEPS, FRAGMENTS, OVERLAP, OUTER_GRADIENTS = (
    f"diloco.{name}" for name in ("inner_steps", "fragments", "overlap", "outer_gradients")
)
OUTER_KEYS: Final = (INNER_STEPS, FRAGMENTS, OVERLAP, OUTER_GRADIENTS)
"""Keys of local training of which all values are evaluated for a layout at once: its inner steps stay the same."""
DEGREES: Final = (TP, CP, PP)
ENCODER_TP, ENCODER_DP = "layout.encoder_tp", "layout.encoder_dp"
ENCODER_DEGREES: Final = (ENCODER_TP, ENCODER_DP)
"""Degrees of an encoder; with GPUs of its own they decide how many the model has."""
KEY_ORDER: Final = (
    *ENCODER_DEGREES,
    *(*DEGREES, CP_KIND, ORDER, SEQUENCE_PARALLEL, SCHEDULE, EP, ETP, DATA_PARALLEL, EP_OVERLAP, MICROBATCH, RECOMPUTE),
)
STATE_NEUTRAL_KEYS: Final = (EP_OVERLAP, MICROBATCH, RECOMPUTE)
"""Keys that do not change what stays in memory for the whole step (weights, gradients, optimizer states)."""
SAME_AS_TP: Final = "tp"
"""A value of layout.etp: equal to layout.tp."""
