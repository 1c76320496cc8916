"""Whose arguments are read, and whose are written?"""

from collections.abc import Callable, Mapping
from typing import Final

from clustersim.interop.export import Writer
from clustersim.interop.import_result import Imported
from clustersim.interop.megatron_export import megatron_text
from clustersim.interop.megatron_import import read_megatron
from clustersim.interop.torchtitan_export import torchtitan_text
from clustersim.interop.torchtitan_import import read_torchtitan

READERS: Final[Mapping[str, Callable[[str, str, str, int | None], Imported]]] = {
    "megatron": read_megatron,
    "torchtitan": read_torchtitan,
}
WRITERS: Final[Mapping[str, Writer]] = {
    "megatron": Writer("Megatron-LM", "megatron", megatron_text, read_megatron),
    "torchtitan": Writer("torchtitan", "pytorch", torchtitan_text, read_torchtitan),
}
