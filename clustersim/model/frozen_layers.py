"""What runs, and what is saved, in a layer whose weights are frozen, or through which no gradient passes?

Without weight gradients their matmuls disappear, and with them the saved inputs that only they read; norms run the same
kernels. Without any gradient there is no backward: nothing is saved, and nothing is recomputed.

Where one parameter group is trained alone, from inputs that are detached, all others run forward only. Collectives of
tensor-parallel ranks are those of forward. Messages of gradients between pipeline stages are still sent, as training
frameworks have them, whose schedules do not know that nobody needs them.
"""

from dataclasses import replace
from itertools import pairwise

from clustersim.common.units import Bytes
from clustersim.model.gradient_flow import GradientFlow
from clustersim.model.operators import FROZEN, LayerOperators, Operator, TpCollectives
from clustersim.model.recompute_modules import ModuleMembership


def apply_gradient_flow(layer: LayerOperators, flow: GradientFlow) -> LayerOperators:
    """The layer with the gradients that a part of the model has."""
    match flow:
        case GradientFlow.PASSES:
            return _freeze_weights(layer)
        case GradientFlow.NONE:
            operators = tuple(_without_backward(operator) for operator in layer.operators)
            return LayerOperators(operators, 0.0, has_backward=False, forward_bytes=_forward_bytes(layer))
    return layer


def freeze_operator(operator: Operator, backward_result_bytes: Bytes) -> Operator:
    """An operator without weight gradients, which saves only what its input gradient reads.

    backward_result_bytes: bytes of the previous operator's output which that operator's backward reads; this one saves
    them.
    """
    kept_bytes = backward_result_bytes if operator.wgrad_input_bytes else 0.0
    return replace(
        operator,
        weight_gradient=(),
        saved_bytes=operator.saved_bytes - operator.wgrad_input_bytes + kept_bytes,
        deferred_wgrad_bytes=0.0,
        wgrad_input_bytes=0.0,
        trainable=False,
    )


def _freeze_weights(layer: LayerOperators) -> LayerOperators:
    read_again = (0.0, *(operator.backward_output_bytes for operator in layer.operators))
    operators = (
        freeze_operator(operator, kept_bytes) for kept_bytes, operator in zip(read_again, layer.operators, strict=False)
    )
    frozen = tuple(replace(operator, parameter_group=FROZEN, matrices=()) for operator in operators)
    return replace(layer, operators=frozen)


def _forward_bytes(layer: LayerOperators) -> Bytes:
    """Bytes that exist while a layer runs whose activations nobody saves.

    The residual stream, what an operator reads (which it would have saved) and what it writes for the next one.
    """
    inputs = [operator.saved_bytes for operator in layer.operators] + [0.0]
    return layer.input_bytes + max(sum(pair) for pair in pairwise(inputs))


def _without_backward(operator: Operator) -> Operator:
    """An operator of a layer without any backward."""
    memberships = tuple(ModuleMembership(membership.module) for membership in operator.memberships)
    return replace(_forward_only(operator), memberships=memberships, parameter_group=FROZEN, matrices=())


def train_alone(layer: LayerOperators, group: str) -> LayerOperators:
    """The layer with gradients of one parameter group, and of what leads to it from the layer's losses."""
    return replace(
        layer,
        operators=tuple(
            operator if operator.parameter_group == group else _forward_only(operator) for operator in layer.operators
        ),
    )


def _forward_only(operator: Operator) -> Operator:
    """An operator that no gradient passes, so that nothing is saved for it or recomputed."""
    return replace(
        operator,
        input_gradient=(),
        weight_gradient=(),
        saved_bytes=0.0,
        deferred_wgrad_bytes=0.0,
        wgrad_input_bytes=0.0,
        backward_output_bytes=0.0,
        saved_output_bytes=0.0,
        saves_outputs=False,
        temporary_bytes=0.0,
        gradient_bytes=0.0,
        memberships=(),
        reads_module=None,
        recompute_override=(),
        linear=None,
        trainable=False,
        tp_collectives=TpCollectives(after_forward=operator.tp_collectives.after_forward),
        forward_only=True,
    )
