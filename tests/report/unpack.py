"""What Python packed for a behaviour, read back as JavaScript does."""

import base64
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np


def unpacked(arrays: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """Arrays by name."""
    return {
        name: np.frombuffer(zlib.decompress(base64.b64decode(array["z"])), dtype=f"<{array['dtype']}")
        for name, array in arrays.items()
    }
