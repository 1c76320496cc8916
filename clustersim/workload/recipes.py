"""Which recipes of number formats are shipped, and how is the file of one read?

A recipe is data: the formats of the three products of a linear layer, and how operands come into them. Its file
(`topologies/recipes`) says for each operand how often it is read and how many copies are written, with the place in the
code of the library that does so.
"""

from typing import Final

from clustersim.dtypes import COMPUTED, DType
from clustersim.section import Section
from clustersim.shipped import find, read_mapping
from clustersim.workload.recipe import Cast, Casts, Products, Recipe, WeightCasts, WeightFormats

_MOST: Final = 8  # kernels or copies of one operand
_OPERANDS: Final = ("input", "behind_norm", "output_gradient", "weight")
_AGAIN: Final = ("input_again", "weight_again")


def load_recipe(name_or_path: str) -> Recipe:
    """Read topologies/recipes/NAME.yaml, or a file of the same form."""
    path = find("recipes", name_or_path)
    section = Section(path, read_mapping(path))
    wide = DType(section.choice("activations", DType.BF16.value, DType.FP16.value))
    weights = WeightFormats(wide, wide, DType.FP32, DType.FP32, DType.FP32)
    recipe = Recipe(_products(section.section("products")), wide, weights, _casts(section.section("casts")), name=path.stem)
    section.text("description")
    section.section("sources").texts()
    section.finish()
    return recipe


def _products(section: Section) -> Products:
    formats = [each.value for each in COMPUTED]
    return Products(*(DType(section.choice(key, *formats, required=True)) for key in Products.__slots__))


def _casts(section: Section) -> Casts:
    operands = {name: _cast(section.section(name)) for name in _OPERANDS}
    again = {name: _cast(section.section(name)) for name in _AGAIN if section.has(name)}
    weights = WeightCasts(section.choice("weights", *(each.value for each in WeightCasts), required=True))
    flags = {name: section.flag(name) for name in ("transposed", "gathered")}
    return Casts(**operands, **again, weights=weights, **flags)


def _cast(section: Section) -> Cast:
    return Cast(section.count("reads", most=_MOST, least=0), section.count("copies", most=_MOST, least=0))
