"""What does an experiment of AMD's Primus train? Import of those on Megatron-LM and on torchtitan.

Arguments of the first are Megatron-LM's; overrides of the second are the sections of torchtitan's job. Primus-Turbo's
kernels have no published times here, so they are taken as the framework's.
"""

from collections.abc import Mapping
from typing import Any, Final

from clustersim.interop.import_result import NO_CONTEXT, ImportContext, ImportResult
from clustersim.interop.megatron_import import import_yaml
from clustersim.interop.primus_yaml import primus_job
from clustersim.interop.torchtitan_import import import_job
from clustersim.interop.torchtitan_sources import JobContent, UnknownKeys

_TURBO: Final = "primus_turbo"


def import_primus(
    text: str,
    source: str,
    cluster: str = "dgx-h100",
    gpu_count: int | None = None,
    context: ImportContext = NO_CONTEXT,
) -> ImportResult:
    """The scenario of an experiment; arguments as those of `import_megatron`."""
    sections = primus_job(text, source, context)
    if sections is None:
        return import_yaml("primus", text, source, cluster, gpu_count, context)
    content, remarks = _without_turbo(sections)
    return import_job(JobContent(content, UnknownKeys.LISTED, remarks), source, cluster, gpu_count)


def _without_turbo(sections: Mapping[str, Any]) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """The sections without Primus-Turbo's converter, and a remark where there is one."""
    model = sections.get("model", {})
    converters = model.get("converters")
    if not isinstance(converters, list) or _TURBO not in converters:
        return sections, ()
    kept = [converter for converter in converters if converter != _TURBO]
    remark = "kernels are torchtitan's, where the experiment has those of Primus-Turbo"
    return {**sections, "model": {**model, "converters": kept}}, (remark,)
