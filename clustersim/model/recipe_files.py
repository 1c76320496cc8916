"""Packaged precision recipes, and the reader of their files.

A recipe file (`topologies/recipes`) has the formats of the three matmuls of a linear layer, and for each
operand the number of read passes and of copies written, with a reference to the code of the library that
does so. Where a library leaves it to a compiler to fuse its casts, `eager_quantization` has those of layers
that are not compiled.
"""

from dataclasses import replace
from typing import Final

from clustersim.common.data_files import find_file, read_mapping
from clustersim.common.dtypes import COMPUTE_DTYPES, DType
from clustersim.common.mapping_reader import MappingReader
from clustersim.model.precision_recipe import (
    MatmulFormats,
    OperandCast,
    OperandCasts,
    PrecisionRecipe,
    WeightCastTiming,
    WeightFormats,
)

_MAX_COUNT: Final = 32  # maximum number of read passes, copies or kernels of one operand
_OPERANDS: Final = ("input", "after_norm", "output_gradient", "weight")
_BACKWARD_OPERANDS: Final = ("input_backward", "weight_backward")


def load_recipe(name_or_path: str) -> PrecisionRecipe:
    """Read topologies/recipes/NAME.yaml, or a file of the same format."""
    path = find_file("recipes", name_or_path)
    section = MappingReader(path, read_mapping(path))
    section.reject_renamed_keys("recipes")
    activations = DType(section.get_choice("activations", DType.BF16.value, DType.FP16.value))
    weights = WeightFormats(activations, activations, DType.FP32, DType.FP32, DType.FP32)
    formats, casts = _read_formats(section.get_section("matmuls")), _read_casts(section.get_section("quantization"))
    eager = "eager_quantization"
    eager_casts = replace(_read_casts(section.get_section(eager)), eager=True) if section.has_key(eager) else None
    recomputes_all = section.get_bool("recomputes_all_matmuls")
    description = section.get_text("description")
    section.get_section("sources").get_text_mapping()
    section.reject_unknown_keys()
    return PrecisionRecipe(
        *(formats, activations, weights, casts, eager_casts, recomputes_all), label=path.stem, description=description
    )


def _read_formats(section: MappingReader) -> MatmulFormats:
    formats = [dtype.value for dtype in COMPUTE_DTYPES]
    return MatmulFormats(*(DType(section.get_choice(key, *formats, required=True)) for key in MatmulFormats.__slots__))


def _read_casts(section: MappingReader) -> OperandCasts:
    operands = [*_OPERANDS, *(name for name in _BACKWARD_OPERANDS if section.has_key(name))]
    casts = {name: _read_cast(section.get_section(name)) for name in operands}
    weights = section.get_member("weight_timing", WeightCastTiming, required=True)
    return OperandCasts(
        input=casts["input"],
        after_norm=casts["after_norm"],
        output_gradient=casts["output_gradient"],
        weight=casts["weight"],
        input_backward=casts.get("input_backward"),
        weight_backward=casts.get("weight_backward"),
        weight_timing=weights,
        uses_transpose=section.get_bool("uses_transpose"),
        gathers_quantized=section.get_bool("quantized_all_gather"),
        scales_gradients=section.get_bool("scales_gradients"),
        saves_quantized_inputs=section.get_bool("saves_quantized_inputs"),
    )


def _read_cast(section: MappingReader) -> OperandCast:
    def count(key: str, *, optional: bool = True) -> int:
        is_absent = optional and not section.has_key(key)
        return 0 if is_absent else section.get_int(key, max_value=_MAX_COUNT, min_value=0)

    return OperandCast(
        *(count("reads", optional=False), count("copies", optional=False), count("uncoalesced_reads")),
        section.get_float("scratch_bytes") if section.has_key("scratch_bytes") else 0.0,
        count("extra_launches"),
        section.get_float("slowdown", min_value=1.0) if section.has_key("slowdown") else 1.0,
    )
