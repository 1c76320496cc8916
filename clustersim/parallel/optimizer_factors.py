"""How much does an optimizer keep of matrices, beyond moments, for each of their elements?"""

from collections import Counter
from collections.abc import Mapping

from clustersim.model.layer_stack import LayerSpec, LayerStack
from clustersim.model.layers import LayerOperators
from clustersim.model.optimizers import Soap
from clustersim.model.soap import factor_elements
from clustersim.model.weight_matrices import WeightMatrix
from clustersim.parallel.parameter_groups import ParameterGroup


def keeps_factors(group: ParameterGroup) -> bool:
    """Whether a group's optimizer keeps factors of matrices, whose sizes those of the layers tell."""
    return isinstance(group.optimizer, Soap)


def factor_ratio(group: ParameterGroup, stack: LayerStack, layers: Mapping[LayerSpec, LayerOperators]) -> float:
    """FP32 elements of SOAP's factors for each element of a group's matrices, the mean of all layers; of others 0."""
    if not keeps_factors(group):
        return 0.0
    counts = Counter[WeightMatrix]()
    for run in stack:
        for operator in layers[run.spec].operators:
            for matrix in operator.matrices if operator.parameter_group == group.name else ():
                counts[matrix.single] += run.count * matrix.count
    elements = sum(count * matrix.elements for matrix, count in counts.items())
    return sum(count * factor_elements(matrix) for matrix, count in counts.items()) / elements if elements else 0.0
