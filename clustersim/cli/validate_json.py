"""How is a validation written as JSON? To a file, wholly or not at all, or to standard output."""

import json
import sys
from collections.abc import Mapping
from typing import Any

from clustersim.cli.outputs import STDOUT
from clustersim.report.files import write_text_atomically


def write_json(content: Mapping[str, Any], path: str) -> None:
    """Write plain data without NaN to `path`; `-` is standard output."""
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    if path == STDOUT:
        sys.stdout.write(text)
    else:
        write_text_atomically(path, text)
