"""Which weight gradients stay allocated for autograd, though nobody reads them?

A matmul that adds to the sum in its epilogue has no gradient to return, but hooks behind it want one. Transformer
Engine returns a tensor of the weight's shape that nothing fills. Since 2.3 there is one of each shape for good
(`get_dummy_wgrad` in transformer_engine/pytorch/module/base.py, NVIDIA/TransformerEngine@ba5dc5dd; of grouped matmuls,
one expert's, since 2.10, @d2945c6a); before, one was allocated for each weight and freed behind its hook.
Embeddings and the output matrix are Megatron-LM's own and allocate theirs each time; so does a router, whose small
weight counts with the others.
"""

from collections.abc import Iterable

from clustersim.model.operators import LayerOperators, Operator


def kept_gradient_elements(layers: Iterable[LayerOperators]) -> int:
    """Elements of one gradient of each shape among the trained weights of some layers."""
    operators = (operator for layer in layers for operator in layer.operators)
    shapes = {_weight_shape(operator) for operator in operators if operator.weight_gradient and operator.matrices}
    return sum(outputs * inputs for outputs, inputs in shapes)


def _weight_shape(operator: Operator) -> tuple[int, int]:
    """Outputs and inputs of an operator's weight; of experts, of one's."""
    return sum(matrix.outputs for matrix in operator.matrices), operator.matrices[0].inputs
