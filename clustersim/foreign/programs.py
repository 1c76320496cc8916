"""Whose arguments are read, and whose are written?"""

from collections.abc import Callable, Mapping
from typing import Final

from clustersim.foreign.exported import Writer
from clustersim.foreign.imported import Imported
from clustersim.foreign.megatron import read_megatron
from clustersim.foreign.megatron_written import megatron_text
from clustersim.foreign.torchtitan import read_torchtitan
from clustersim.foreign.torchtitan_written import torchtitan_text

READERS: Final[Mapping[str, Callable[[str, str, str, int | None], Imported]]] = {
    "megatron": read_megatron,
    "torchtitan": read_torchtitan,
}
WRITERS: Final[Mapping[str, Writer]] = {
    "megatron": Writer("Megatron-LM", "megatron", megatron_text, read_megatron),
    "torchtitan": Writer("torchtitan", "pytorch", torchtitan_text, read_torchtitan),
}
