"""How far is predicted peak memory from that of published runs, and which headroom does that ask for?

The runs are those of clustersim/validation/published/memory.csv that state a peak (of allocated, reserved or
device memory). No constant of the memory model is fitted to them. The rules that turn their errors into a
probability are those of `clustersim.uncertainty.memory_error`; the coverage of its default headroom is
checked on sources that it has not seen (leave-one-source-out).
"""

import argparse
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from clustersim.common.data_files import find_file, read_mapping
from clustersim.common.errors import InputError
from clustersim.common.files import write_text_atomically
from clustersim.uncertainty.memory_error import (
    MEMORY_ERRORS,
    MemoryErrorFamily,
    MemoryErrorModel,
    memory_errors_to_dict,
)
from clustersim.validation.memory import PeakError, peak_errors, read_memory

FAMILIES: Final = {
    "megatron": frozenset(
        {
            *("megatron", "megatron-2021", "megatron-2022", "megatron-bridge", "megatron-deepspeed", "megatron-llama"),
            *("nemo", "primus"),
        }
    ),
    "pytorch": frozenset(
        {
            *(
                "accelerate",
                "aleph-alpha-scaling",
                "automodel",
                "composer",
                "deepspeed",
                "fast-llm",
                "fms-fsdp",
                "ideal",
            ),
            *("internevo", "kempnerforge", "litgpt", "nanotron", "olmo-core", "open-lm", "pytorch", "tinyllama"),
            *("torchtitan", "torchtune", "transformers", "vectorlm"),
        }
    ),
}
"""Frameworks with the same memory management, by family: Megatron-LM and its descendants; all others on PyTorch."""
UNMEASURED: Final = frozenset({"llm.c", "maxtext", "paddle", "paxml"})
"""Frameworks with an allocator of their own, of which no peak of memory is published."""


def memory_error_model(errors: Iterable[PeakError]) -> MemoryErrorModel:
    """The model of some errors; raise InputError if there are too few sources."""
    ratios: dict[str, dict[str, list[float]]] = {name: {} for name in FAMILIES}
    for error in errors:
        ratios[_family_of(error)].setdefault(error.source, []).append(round(error.ratio, 3))
    return MemoryErrorModel(
        tuple(
            MemoryErrorFamily(name, FAMILIES[name], {source: tuple(sorted(runs)) for source, runs in by_source.items()})
            for name, by_source in ratios.items()
        )
    )


def _family_of(error: PeakError) -> str:
    for name, frameworks in FAMILIES.items():
        if error.framework in frameworks:
            return name
    raise InputError(f"{error.case_id}: framework {error.framework} is of no family of {Path(__file__).name}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `command`."""
    parser.add_argument(
        "--write", metavar="FILE", help="write the errors (a file as topologies/uncertainty/memory.yaml)"
    )


def command(options: argparse.Namespace) -> None:
    """Print each family's headroom and its out-of-sample coverage, and write the errors if asked."""
    model = memory_error_model(peak_errors(read_memory()))
    print("\n".join(line for family in model.families for line in _family_lines(model, family)))
    if options.write is not None:
        write_memory_errors(model, options.write)


def _family_lines(model: MemoryErrorModel, family: MemoryErrorFamily) -> Iterator[str]:
    framework = min(family.frameworks)
    yield (
        f"{family.name}: headroom {model.default_headroom(framework):.1%}, from {len(family.ratios)} runs of "
        f"{len(family.ratios_by_source)} sources; out of sample it covers {model.out_of_sample_coverage(family):.0%}"
    )
    for source, ratios in family.ratios_by_source.items():
        yield (
            f"  {source:20s} {len(ratios):4d} runs, measured over predicted {ratios[0]:.2f} to "
            f"{ratios[-1]:.2f}, median {ratios[len(ratios) // 2]:.2f}"
        )


def write_memory_errors(model: MemoryErrorModel, path: str) -> None:
    """Write the errors, keeping description and sources of the packaged file.

    Raise OutputError if it cannot be written.
    """
    texts: Mapping[str, Any] = read_mapping(find_file("uncertainty", MEMORY_ERRORS))
    content = {"description": texts["description"], **memory_errors_to_dict(model), "sources": texts["sources"]}
    write_text_atomically(path, yaml.safe_dump(content, sort_keys=False, width=120, allow_unicode=True))
