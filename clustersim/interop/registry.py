"""Which programs' arguments can be imported, and which exported?"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from clustersim.interop.export import ArgumentExporter
from clustersim.interop.hugging_face import import_hugging_face
from clustersim.interop.import_result import ImportContext, ImportResult
from clustersim.interop.megatron_export import megatron_script
from clustersim.interop.megatron_hybrid import in_pattern_layers
from clustersim.interop.megatron_import import import_bridge, import_megatron, import_yaml
from clustersim.interop.primus_export import primus_experiment
from clustersim.interop.primus_import import import_primus
from clustersim.interop.torchtitan_export import torchtitan_toml
from clustersim.interop.torchtitan_import import import_torchtitan

IMPORTERS: Final[Mapping[str, Callable[[str, str, str, int | None, ImportContext], ImportResult]]] = {
    "megatron": import_megatron,
    "torchtitan": import_torchtitan,
    "megatron-bridge": import_bridge,
    "primus": import_primus,
    **{kind: partial(import_hugging_face, kind) for kind in ("axolotl", "llama-factory", "transformers")},
    **{kind: partial(import_yaml, kind) for kind in ("nemo", "gpt-neox")},
}
EXPORTERS: Final[Mapping[str, ArgumentExporter]] = {
    "megatron": ArgumentExporter("Megatron-LM", "megatron", megatron_script, import_megatron, in_pattern_layers),
    "primus": ArgumentExporter("Primus", "megatron", primus_experiment, import_primus, in_pattern_layers),
    "torchtitan": ArgumentExporter("torchtitan", "torchtitan", torchtitan_toml, import_torchtitan),
}
