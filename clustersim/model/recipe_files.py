"""Packaged precision recipes, and the reader of their files.

A recipe file (`topologies/recipes`) has the formats of the three matmuls of a linear layer, and for each
operand the number of read passes and of copies written, with a reference to the code of the library that
does so.
"""

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

_MAX_COUNT: Final = 8  # maximum number of read passes or copies of one operand
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
    description = section.get_text("description")
    section.get_section("sources").get_text_mapping()
    section.reject_unknown_keys()
    return PrecisionRecipe(formats, activations, weights, casts, label=path.stem, description=description)


def _read_formats(section: MappingReader) -> MatmulFormats:
    formats = [dtype.value for dtype in COMPUTE_DTYPES]
    return MatmulFormats(*(DType(section.get_choice(key, *formats, required=True)) for key in MatmulFormats.__slots__))


def _read_casts(section: MappingReader) -> OperandCasts:
    operands = [*_OPERANDS, *(name for name in _BACKWARD_OPERANDS if section.has_key(name))]
    casts = {name: _read_cast(section.get_section(name)) for name in operands}
    weights = WeightCastTiming(
        section.get_choice("weight_timing", *(casts.value for casts in WeightCastTiming), required=True)
    )
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
    )


def _read_cast(section: MappingReader) -> OperandCast:
    return OperandCast(
        section.get_int("reads", max_value=_MAX_COUNT, min_value=0),
        section.get_int("copies", max_value=_MAX_COUNT, min_value=0),
        section.get_int("uncoalesced_reads", max_value=_MAX_COUNT, min_value=0)
        if section.has_key("uncoalesced_reads")
        else 0,
    )
