"""Fit of an accelerator's flash attention to its published kernels, in both directions and all formats.

The grid searches are those of `calibrate.fit.attention`. Where heads of keys and values differ in size and that
is another kernel, its rate is fitted by itself.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from calibrate.fit.attention import fit_attention, fit_low_precision_speedup, fit_unequal_heads
from calibrate.fit.fit_quality import KernelFitEvaluation
from calibrate.fit.fit_state import with_constants
from calibrate.fit.published_kernels import AttentionSample
from clustersim.common.dtypes import LOW_PRECISION_DTYPES
from clustersim.hardware.accelerator import Accelerator

UNEQUAL_HEAD_TARGETS: Final = ("mi300x",)
"""Accelerators whose backward is another kernel where heads of keys and values differ in size."""


def fit_attention_constants(
    accelerator: Accelerator, samples: Sequence[AttentionSample], *, equal_source_weights: bool = False
) -> tuple[Accelerator, list[KernelFitEvaluation]]:
    """Fit attention in unscaled formats, of unequal heads by itself where it is another kernel, and in others."""
    unscaled = [sample for sample in samples if sample.dtype not in LOW_PRECISION_DTYPES]
    forward = [sample for sample in unscaled if not sample.backward]
    backward, unequal = _split_by_heads(accelerator.name, [sample for sample in unscaled if sample.backward])
    forward_constants, forward_optimum = fit_attention(
        accelerator, forward, 1.0, equal_source_weights=equal_source_weights
    )
    backward_constants, backward_optimum = fit_attention(
        accelerator, backward, forward_constants.causal_ratio, equal_source_weights=equal_source_weights
    )
    evaluations = [
        KernelFitEvaluation(accelerator.name, "attention forward", forward, forward_optimum),
        KernelFitEvaluation(accelerator.name, "attention backward", backward, backward_optimum),
    ]
    if unequal:
        backward_constants, unequal_optimum = fit_unequal_heads(accelerator, unequal, backward_constants)
        evaluations.append(
            KernelFitEvaluation(accelerator.name, "attention backward, unequal heads", unequal, unequal_optimum)
        )
    else:
        backward_constants = replace(
            backward_constants, unequal_head_ratio=accelerator.efficiency.attention_backward.unequal_head_ratio
        )
    fitted = with_constants(accelerator, attention_forward=forward_constants, attention_backward=backward_constants)
    for dtype in LOW_PRECISION_DTYPES:
        format_samples = [sample for sample in samples if sample.dtype is dtype]
        if format_samples:
            fitted, evaluated = _fit_low_precision_attention(fitted, format_samples)
            evaluations.extend(evaluated)
    return fitted, evaluations


def _split_by_heads(
    name: str, samples: Sequence[AttentionSample]
) -> tuple[list[AttentionSample], list[AttentionSample]]:
    """Samples of backward by equal heads, and by unequal ones where that is another kernel."""
    if name not in UNEQUAL_HEAD_TARGETS:
        return list(samples), []
    unequal = [sample for sample in samples if sample.shape.head_dim != sample.shape.value_head_dim]
    return [sample for sample in samples if sample not in unequal], unequal


def _fit_low_precision_attention(
    accelerator: Accelerator, samples: Sequence[AttentionSample]
) -> tuple[Accelerator, list[KernelFitEvaluation]]:
    """Fit attention in a block-scaled format, in both directions."""
    efficiency, evaluations, constants = accelerator.efficiency, [], {}
    for direction, backward in (("forward", False), ("backward", True)):
        name, direction_samples = (
            f"attention_{direction}",
            [sample for sample in samples if sample.backward is backward],
        )
        constants[name], optimum = fit_low_precision_speedup(accelerator, direction_samples, getattr(efficiency, name))
        evaluations.append(
            KernelFitEvaluation(
                accelerator.name, f"attention {direction} {samples[0].dtype.value}", direction_samples, optimum
            )
        )
    return with_constants(accelerator, **constants), evaluations
