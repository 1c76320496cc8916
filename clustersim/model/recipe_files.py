"""Which recipes of number formats are shipped, and how is the file of one read?

A recipe is data: the formats of the three products of a linear layer, and how operands come into them. Its file
(`topologies/recipes`) says for each operand how often it is read and how many copies are written, with the place in the
code of the library that does so.
"""

from typing import Final

from clustersim.common.data_files import find, read_mapping
from clustersim.common.dtypes import COMPUTED, DType
from clustersim.common.mapping_reader import Section
from clustersim.model.precision_recipe import Cast, Casts, Products, Recipe, WeightCasts, WeightFormats

_MOST: Final = 8  # kernels or copies of one operand
_OPERANDS: Final = ("input", "behind_norm", "output_gradient", "weight")
_AGAIN: Final = ("input_again", "weight_again")


def load_recipe(name_or_path: str) -> Recipe:
    """Read topologies/recipes/NAME.yaml, or a file of the same form."""
    path = find("recipes", name_or_path)
    section = Section(path, read_mapping(path))
    wide = DType(section.choice("activations", DType.BF16.value, DType.FP16.value))
    weights = WeightFormats(wide, wide, DType.FP32, DType.FP32, DType.FP32)
    products, casts = _products(section.section("products")), _casts(section.section("casts"))
    description = section.text("description")
    section.section("sources").texts()
    section.finish()
    return Recipe(products, wide, weights, casts, called=path.stem, description=description)


def _products(section: Section) -> Products:
    formats = [item.value for item in COMPUTED]
    return Products(*(DType(section.choice(key, *formats, required=True)) for key in Products.__slots__))


def _casts(section: Section) -> Casts:
    there = [*_OPERANDS, *(name for name in _AGAIN if section.has(name))]
    each = {name: _cast(section.section(name)) for name in there}
    weights = WeightCasts(section.choice("weights", *(WeightCast.value for WeightCast in WeightCasts), required=True))
    return Casts(
        input=each["input"],
        behind_norm=each["behind_norm"],
        output_gradient=each["output_gradient"],
        weight=each["weight"],
        input_again=each.get("input_again"),
        weight_again=each.get("weight_again"),
        weights=weights,
        transposed=section.flag("transposed"),
        gathered=section.flag("gathered"),
    )


def _cast(section: Section) -> Cast:
    return Cast(section.count("reads", most=_MOST, least=0), section.count("copies", most=_MOST, least=0))
