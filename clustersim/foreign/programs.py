"""Whose arguments are read?"""

from collections.abc import Callable, Mapping
from typing import Final

from clustersim.foreign.imported import Imported
from clustersim.foreign.megatron import read_megatron
from clustersim.foreign.torchtitan import read_torchtitan

READERS: Final[Mapping[str, Callable[[str, str, str, int | None], Imported]]] = {
    "megatron": read_megatron,
    "torchtitan": read_torchtitan,
}
