"""How much memory do the gradients of activations need in a layer's backward?

Backward goes through the layer from its end. An operator reads its output's gradient and writes its input's;
then what it had saved, and the gradient it has read, are freed. Between two linear layers, as in an MLP's
activation or the attention core, these are the gradients of the second one's input and of the first one's
output. So a gated MLP has 3 f elements of gradients for each token (f its width) once it has freed f of the 3 f
that it had saved, or f where the activation writes its gradients in place of what it saved (Liger). The
gradient of the residual stream exists with them, as does what an operator between the two holds only for a
while (gathered keys and values), and the output that its backward reads again (flash attention's), though the
linear layer behind it is done with it. Operators without a linear layer of their own (latent attention, routed
experts) count as if they freed what they need, but for what experts return times its probability: where that is a
PyTorch product its backward holds the gradient of the rows, and both products with it (`MulBackward0`), before the
second one is summed over the rows.
"""

from clustersim.common.units import Bytes
from clustersim.model.operators import LayerOperators


def activation_gradient_bytes(layer: LayerOperators, element_bytes: Bytes, gathered_copies: int = 1) -> Bytes:
    """Peak bytes of activations' gradients in a layer's backward, beyond what it has freed of the layer by then.

    gathered_copies: full gradients of the input of column-parallel layers that exist at once.
    """
    peak = freed = next_input = freed_by_next = temporary = overwritten = 0.0
    for operator in reversed(layer.operators):
        peak = max(peak, operator.gradient_bytes - freed)
        temporary = max(temporary, operator.temporary_bytes + operator.backward_output_bytes)
        overwritten += operator.overwritten_bytes
        if operator.linear is not None:
            linear = operator.linear
            output, single_input = (linear.tokens * width * element_bytes for width in (linear.outputs, linear.inputs))
            copies = 1 if linear.row_parallel else gathered_copies
            between_linears = next_input + temporary + output - freed_by_next - overwritten
            in_linear = output + copies * single_input - freed
            peak = max(peak, between_linears, in_linear)
            next_input, freed_by_next, temporary, overwritten = single_input, freed + operator.saved_bytes, 0.0, 0.0
        freed += operator.saved_bytes
    if temporary:  # of operators before the first linear layer
        peak = max(peak, next_input + temporary - freed_by_next)
    return peak + layer.input_bytes if peak else 0.0
