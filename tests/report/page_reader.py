"""Reads the data that Python wrote into a page, as its JavaScript does."""

import base64
import json
import re
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np


def decode_arrays(arrays: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """Decoded arrays by name."""
    return {
        name: np.frombuffer(zlib.decompress(base64.b64decode(array["z"])), dtype=f"<{array['dtype']}")
        for name, array in arrays.items()
    }


def figures_by_name(text: str) -> dict[str, Any]:
    """The figures of a page by name."""
    match = re.search(r'<script type="application/json" id="figures">(.*?)</script>', text, flags=re.DOTALL)
    assert match is not None
    return {figure["name"]: figure for figure in json.loads(match[1])}
