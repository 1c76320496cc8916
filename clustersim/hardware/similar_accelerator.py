"""What does an accelerator have that is described as being like another?

Whatever its file or mapping does not state is the other's, number by number: the fractions of peak rates and
bandwidths that kernels reach, overheads, tiles, the rate within a step, interference. That is an assumption, and not a
measurement: so such an accelerator never counts as measured, whatever the other is, and results say so. Formats
without a stated peak are never scaled up: they have the other's rates times the smallest ratio of a stated one, at most
1. A price, a name and a description are not taken over.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from clustersim.common import data_files
from clustersim.common.dtypes import DType
from clustersim.common.mapping_reader import MappingReader
from clustersim.common.units import FlopPerSecond

_OWN_KEYS: Final = ("like", "name", "price_per_gpu_hour", "unknown")
"""Keys whose values are not taken from the other accelerator."""
_NO_SOURCE: Final = "stated without a source"


def complete_from_base(section: MappingReader, seen: tuple[Path, ...] = ()) -> MappingReader:
    """A reader of an accelerator's keys that has the other's values for those that are not stated.

    seen: files that are like this one. Raises InputError for an unknown or circular `like`, and where the section
    claims a provenance.
    """
    if not section.has_key("like"):
        return section
    name = section.get_data_file("like", "accelerators")
    path = data_files.find_file("accelerators", name)
    if path in seen:
        raise section.input_error("like", f"{name} is like this one itself; name another")
    efficiency = section.content.get("efficiency")
    if isinstance(efficiency, Mapping) and "provenance" in efficiency:
        raise section.input_error("efficiency.provenance", f"what is taken from {name} is not measured; leave it out")
    base = complete_from_base(MappingReader(path, data_files.read_mapping(path)), (*seen, path))
    return section.with_defaults(_inherited_content(section.content, base.content, path.stem))


def _inherited_content(stated: Mapping[str, Any], base: Mapping[str, Any], base_name: str) -> dict[str, Any]:
    """The keys that a file or mapping takes from its base; stated peaks replace all of the base's."""
    inherited = {key: value for key, value in base.items() if key not in _OWN_KEYS}
    if "peak" in stated:
        del inherited["peak"]
    sources = {key: _NO_SOURCE if key in stated else f"as {base_name}: {text}" for key, text in base["sources"].items()}
    efficiency = {**base["efficiency"], "provenance": "roofline"}
    description = f"{base['description']}, changed"
    return {**inherited, "description": description, "efficiency": efficiency, "sources": sources}


def scale_missing_peaks(
    stated: Mapping[DType, FlopPerSecond], base: Mapping[DType, FlopPerSecond]
) -> dict[DType, FlopPerSecond]:
    """The stated peaks, and the base's others times the smallest ratio of a stated one to the base's, at most 1.

    So a chip with less arithmetic has less in every format, and one with more is not assumed to have more in others.
    """
    ratios = [rate / base[dtype] for dtype, rate in stated.items() if dtype in base]
    ratio = min([1.0, *ratios])
    return {**{dtype: ratio * rate for dtype, rate in base.items()}, **stated}
