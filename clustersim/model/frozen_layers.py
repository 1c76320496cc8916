"""Which operators run where one parameter group is trained alone, from inputs that are detached?

All others run forward only: no gradient passes them, so they have no backward and save nothing for it. Collectives of
tensor-parallel ranks are those of forward. Messages of gradients between pipeline stages are still sent, as training
frameworks have them, whose schedules do not know that nobody needs them.
"""

from dataclasses import replace

from clustersim.model.operators import LayerOperators, Operator, TpCollectives


def train_alone(layer: LayerOperators, group: str) -> LayerOperators:
    """The layer with gradients of one parameter group, and of what leads to it from the layer's losses."""
    return replace(
        layer,
        operators=tuple(
            operator if operator.parameter_group == group else _forward_only(operator) for operator in layer.operators
        ),
    )


def _forward_only(operator: Operator) -> Operator:
    return replace(
        operator,
        input_gradient=(),
        weight_gradient=(),
        trainable=False,
        saved_bytes=0.0,
        deferred_wgrad_bytes=0.0,
        memberships=(),
        reads_module=None,
        recompute_override=(),
        saved_output_bytes=0.0,
        temporary_bytes=0.0,
        linear=None,
        wgrad_input_bytes=0.0,
        backward_output_bytes=0.0,
        saves_outputs=False,
        tp_collectives=TpCollectives(after_forward=operator.tp_collectives.after_forward),
        forward_only=True,
    )
