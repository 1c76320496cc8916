"""Which programs' arguments can be imported, and which exported?"""

from collections.abc import Callable, Mapping
from typing import Final

from clustersim.interop.export import ArgumentExporter
from clustersim.interop.import_result import ImportContext, ImportResult
from clustersim.interop.megatron_export import megatron_script
from clustersim.interop.megatron_import import import_megatron
from clustersim.interop.torchtitan_export import torchtitan_toml
from clustersim.interop.torchtitan_import import import_torchtitan

IMPORTERS: Final[Mapping[str, Callable[[str, str, str, int | None, ImportContext], ImportResult]]] = {
    "megatron": import_megatron,
    "torchtitan": import_torchtitan,
}
EXPORTERS: Final[Mapping[str, ArgumentExporter]] = {
    "megatron": ArgumentExporter("Megatron-LM", "megatron", megatron_script, import_megatron),
    "torchtitan": ArgumentExporter("torchtitan", "torchtitan", torchtitan_toml, import_torchtitan),
}
