"""Which colour and pattern does a category have, in every view and in the traces that we export?

Colours are the palette of Okabe and Ito, which people with any colour blindness can tell apart, and lighter or darker
shades of its hues where it runs out; what is not work is grey and hatched, so that nothing rests on colour alone.
Forward is blue and backward green, as in the pipeline figures of Megatron-LM and of the zero-bubble paper.

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
    """What a piece of time or memory is for: words, colour (hex) and pattern (plotly's name, empty for plain)."""

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
    COPIES = ("parameters in narrow formats", "#0072B2", "x")
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
"""Colours of what has none of its own, in turn."""
CATEGORY_STYLES: tuple[CategoryStyle, ...] = tuple(CategoryStyle)
AXIS_STYLES: Final[Mapping[Axis, CategoryStyle]] = {axis: CategoryStyle[axis.category.upper()] for axis in COMM_AXES}
"""The category of each axis's communication."""
COMM_STYLES: Final[Mapping[str, tuple[str, CategoryStyle]]] = {
    **{axis.name: (axis.name, look) for axis, look in AXIS_STYLES.items()},
    **{role.report_name: (role.label, AXIS_STYLES[role.accounted_axis]) for role in COMM_GROUPS.values()},
}
"""Axes and roles as they are listed: in words, and their categories."""
TIME_CATEGORY_STYLES: Final[Mapping[TimeCategory, CategoryStyle]] = {
    TimeCategory.COMPUTE: CategoryStyle.COMPUTE,
    TimeCategory.RECOMPUTE: CategoryStyle.RECOMPUTE,
    TimeCategory.OPTIMIZER: CategoryStyle.OPTIMIZER,
    TimeCategory.LAUNCH: CategoryStyle.LAUNCH,
    TimeCategory.SLOWED: CategoryStyle.SLOWED,
    **{part: AXIS_STYLES[axis] for axis, part in EXPOSED_CATEGORIES.items()},
    TimeCategory.BUBBLE_WARMUP: CategoryStyle.BUBBLE_WARM_UP,
    TimeCategory.BUBBLE_STEADY: CategoryStyle.BUBBLE_STEADY,
    TimeCategory.BUBBLE_COOLDOWN: CategoryStyle.BUBBLE_COOL_DOWN,
    TimeCategory.WAIT: CategoryStyle.WAIT,
}
"""The category of each part of the breakdown."""
MEMORY_CATEGORY_STYLES: Final[Mapping[Use, CategoryStyle]] = {
    **{use: CategoryStyle[use.name] for use in Use if use.name in CategoryStyle.__members__},
    Use.OPTIMIZER: CategoryStyle.OPTIMIZER_STATE,
    Use.COMMUNICATION: CategoryStyle.BUFFERS,
    Use.CONTEXT: CategoryStyle.CUDA_CONTEXT,
}
"""The category of each use of memory."""


def chunk_shade(colour: str, chunk: int, chunk_count: int) -> str:
    """The shade of a model chunk: the first chunk has the colour itself, later ones are lighter.

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

    Equal contrast lies at a luminance of 0.18; saturated fills read better in white up to 0.3.

    >>> text_colour("#0072B2"), text_colour("#F0E442")
    ('#FFFFFF', '#000000')
    """
    linear = [_linear_rgb(int(fill[i : i + 2], 16) / _CHANNEL_MAX) for i in (1, 3, 5)]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#FFFFFF" if luminance < 0.3 else "#000000"


def _linear_rgb(channel: float) -> float:
    return channel / 12.92 if channel <= 0.04045 else float(((channel + 0.055) / 1.055) ** 2.4)
