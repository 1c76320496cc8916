"""Which colour and pattern does a category have, on every page and in exported traces?

Colours are the colour-blind-safe palette of Okabe and Ito, and lighter or darker shades of its hues where
it runs out. Idle time is grey and hatched, so that no distinction rests on colour alone. Forward is blue
and backward green, as in the pipeline figures of Megatron-LM and of the zero-bubble paper.

Source: M. Okabe, K. Ito, "Color Universal Design", https://jfly.uni-koeln.de/color/
"""

from collections.abc import Mapping
from enum import Enum
from typing import Final

from clustersim.memory.footprint import MemoryCategory as Use
from clustersim.parallel.mesh import COMM_AXES, COMM_GROUPS, Axis
from clustersim.results.time_categories import EXPOSED_CATEGORIES, TimeCategory

_CHANNEL_MAX = 255


class CategoryStyle(Enum):
    """Style of a category of time or memory: label, colour (hex) and pattern (plotly's name, empty for solid fill)."""

    COMPUTE = ("compute", "#0072B2", "")
    FORWARD = ("forward", "#0072B2", "")
    BACKWARD = ("backward", "#009E73", "")
    INPUT_GRADIENT = ("backward: input gradient", "#44BB99", "")
    WEIGHT_GRADIENT = ("backward: weight gradient", "#B8CF5A", "")
    RECOMPUTE = ("recompute", "#56B4E9", "/")
    OPTIMIZER = ("optimizer", "#CC79A7", "")
    LAUNCH = ("kernel launch", "#D0A2C0", "/")
    SLOWED = ("slowed by communication", "#4477AA", "x")
    TENSOR = ("tensor parallel communication", "#E69F00", "")
    CONTEXT = ("context parallel communication", "#B8860B", "")
    EXPERT = ("expert parallel communication", "#AA3377", "")
    DATA = ("data parallel communication", "#D55E00", "")
    PIPELINE = ("pipeline communication", "#F0E442", "")
    HOST = ("host: copies and optimizer", "#882255", "")
    BUBBLE_WARM_UP = ("bubble: warm-up", "#A9B1BA", "/")
    BUBBLE_STEADY = ("bubble: steady", "#8D96A0", "x")
    BUBBLE_COOL_DOWN = ("bubble: cool-down", "#BFC6CD", "\\")
    WAIT = ("wait", "#6B7280", ".")
    PARAMETERS = ("parameters", "#0072B2", "")
    GRADIENTS = ("gradients", "#D55E00", "")
    OPTIMIZER_STATE = ("optimizer state", "#CC79A7", "")
    ACTIVATIONS = ("activations", "#009E73", "")
    COPIES = ("low-precision parameter copies", "#0072B2", "x")
    GATHERED = ("gathered parameters", "#56B4E9", "/")
    MESSAGES = ("messages and buckets", "#F0E442", "/")
    WORKSPACE = ("workspaces", "#999933", "")
    BUFFERS = ("communication buffers", "#E69F00", "")
    CUDA_CONTEXT = ("CUDA context", "#8D96A0", "")
    OFFLOAD = ("offload buffers", "#882255", "/")
    FRAGMENTATION = ("fragmentation", "#BFC6CD", "x")

    def __init__(self, label: str, colour: str, pattern: str) -> None:
        self.label, self.colour, self.pattern = label, colour, pattern


SERIES_COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8D96A0")
"""Colours of series without a category, assigned cyclically."""
CATEGORY_STYLES: tuple[CategoryStyle, ...] = tuple(CategoryStyle)
AXIS_STYLES: Final[Mapping[Axis, CategoryStyle]] = {axis: CategoryStyle[axis.category.upper()] for axis in COMM_AXES}
"""Style of each mesh axis's communication."""
COMM_STYLES: Final[Mapping[str, tuple[str, CategoryStyle]]] = {
    **{axis.name: (axis.name, style) for axis, style in AXIS_STYLES.items()},
    **{
        comm_group.report_name: (comm_group.label, AXIS_STYLES[comm_group.accounted_axis])
        for comm_group in COMM_GROUPS.values()
    },
}
"""Label and style of each mesh axis and process group, by its name in reports."""
TIME_CATEGORY_STYLES: Final[Mapping[TimeCategory, CategoryStyle]] = {
    TimeCategory.COMPUTE: CategoryStyle.COMPUTE,
    TimeCategory.RECOMPUTE: CategoryStyle.RECOMPUTE,
    TimeCategory.OPTIMIZER: CategoryStyle.OPTIMIZER,
    TimeCategory.LAUNCH: CategoryStyle.LAUNCH,
    TimeCategory.SLOWED: CategoryStyle.SLOWED,
    **{category: AXIS_STYLES[axis] for axis, category in EXPOSED_CATEGORIES.items()},
    TimeCategory.BUBBLE_WARMUP: CategoryStyle.BUBBLE_WARM_UP,
    TimeCategory.BUBBLE_STEADY: CategoryStyle.BUBBLE_STEADY,
    TimeCategory.BUBBLE_COOLDOWN: CategoryStyle.BUBBLE_COOL_DOWN,
    TimeCategory.WAIT: CategoryStyle.WAIT,
}
"""Style of each time category of the breakdown."""
MEMORY_CATEGORY_STYLES: Final[Mapping[Use, CategoryStyle]] = {
    **{use: CategoryStyle[use.name] for use in Use if use.name in CategoryStyle.__members__},
    Use.OPTIMIZER: CategoryStyle.OPTIMIZER_STATE,
    Use.COMMUNICATION: CategoryStyle.BUFFERS,
    Use.CONTEXT: CategoryStyle.CUDA_CONTEXT,
}
"""Style of each memory category."""


def chunk_shade(colour: str, chunk: int, chunk_count: int) -> str:
    """Colour of a model chunk: the first chunk has the base colour, later chunks are lighter.

    >>> chunk_shade("#0072B2", 0, 2), chunk_shade("#000000", 1, 2)
    ('#0072B2', '#8C8C8C')
    """
    if chunk <= 0 or chunk_count <= 1:
        return colour
    lightness = 0.55 * min(1.0, chunk / (chunk_count - 1))
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(channel + (_CHANNEL_MAX - channel) * lightness):02X}" for channel in channels)


def contrasting_text_colour(fill: str) -> str:
    """White on dark fills, black on light ones, by the relative luminance of WCAG 2.1.

    Both have equal contrast at a luminance of 0.18; on saturated fills white reads better up to 0.3.

    >>> contrasting_text_colour("#0072B2"), contrasting_text_colour("#F0E442")
    ('#FFFFFF', '#000000')
    """
    linear = [_linear_rgb(int(fill[i : i + 2], 16) / _CHANNEL_MAX) for i in (1, 3, 5)]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#FFFFFF" if luminance < 0.3 else "#000000"


def _linear_rgb(channel: float) -> float:
    return channel / 12.92 if channel <= 0.04045 else float(((channel + 0.055) / 1.055) ** 2.4)
