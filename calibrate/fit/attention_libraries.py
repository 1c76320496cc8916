"""Constants of flash attention by libraries that are not an accelerator's fastest.

Each library is fitted by itself to the rows that time it, in both directions, as the fastest one is
(`calibrate.fit.attention`). An accelerator that is derived from a sibling has the sibling's libraries, if the
fastest is the same, with peak fractions scaled as those of the fastest. What PyTorch's
scaled_dot_product_attention takes is fitted like a library to rows that time it under load.
"""

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Final

from calibrate.fit.attention import fit_attention
from calibrate.fit.fit_quality import KernelFitEvaluation
from calibrate.fit.grid_search import linear_grid
from calibrate.fit.low_precision_formats import SHARE_DIGITS
from calibrate.fit.published_kernels import library_attention_samples
from clustersim.hardware.accelerator import Accelerator
from clustersim.hardware.efficiency import (
    MEASURED_ATTENTION,
    SDPA_ATTENTION,
    AttentionEfficiency,
    AttentionLibrary,
    KernelEfficiency,
)

SHARES: Final = linear_grid(0.1, 1.0, 0.01)  # FlashAttention-2 reaches 0.16 of the peak on B200
SAME_CHIP_BOARDS: Final = {("h100-sxm-80gb", SDPA_ATTENTION): ("h200-sxm-141gb",)}
"""Boards of an accelerator's chip on which a library was measured, where it was not on its own."""
DEFAULT_CAUSAL_RATIO: Final = 0.95  # without rows with a mask: as FlashAttention-2 and 3 have on H100


def fit_attention_libraries(
    accelerator: Accelerator, *, equal_source_weights: bool
) -> tuple[Mapping[str, AttentionLibrary], list[KernelFitEvaluation]]:
    """Constants of every library with samples of the accelerator in both directions, by name."""
    libraries, evaluations = {}, []
    for library in MEASURED_ATTENTION:
        boards = (accelerator.name, *SAME_CHIP_BOARDS.get((accelerator.name, library), ()))
        samples = [sample for sample in library_attention_samples(library) if sample.accelerator in boards]
        forward = [sample for sample in samples if not sample.backward]
        backward = [sample for sample in samples if sample.backward]
        if not (forward and backward):
            continue
        fit = partial(fit_attention, accelerator, shares=SHARES, equal_source_weights=equal_source_weights)
        forward_constants, forward_optimum = fit(forward, DEFAULT_CAUSAL_RATIO)
        backward_constants, backward_optimum = fit(backward, forward_constants.causal_ratio)
        libraries[library] = AttentionLibrary(forward_constants, backward_constants)
        evaluations += [
            KernelFitEvaluation(accelerator.name, f"attention forward, {library}", forward, forward_optimum),
            KernelFitEvaluation(accelerator.name, f"attention backward, {library}", backward, backward_optimum),
        ]
    return libraries, evaluations


def derived_attention_libraries(
    efficiency: KernelEfficiency, sibling: KernelEfficiency, ratio: float
) -> Mapping[str, AttentionLibrary]:
    """The sibling's libraries with scaled peak fractions; none where another library is the fastest."""
    if efficiency.attention_library != sibling.attention_library:
        return {}
    return {name: library.scaled(ratio).rounded(SHARE_DIGITS) for name, library in sibling.attention_libraries.items()}


def attention_lines(efficiency: KernelEfficiency) -> list[str]:
    """The constants of all libraries in both directions, one line each."""
    directions = {
        "attention_forward": efficiency.attention_forward,
        "attention_backward": efficiency.attention_backward,
    }
    for name, library in efficiency.attention_libraries.items():
        directions |= {f"{name} forward": library.forward, f"{name} backward": library.backward}
    return [f"{name}: {_constants_text(constants)}" for name, constants in directions.items()]


def _constants_text(attention: AttentionEfficiency) -> str:
    constants = asdict(attention)
    constants |= {f"in {dtype.value}": rate for dtype, rate in constants.pop("speedup_by_format").items()}
    return ", ".join(f"{key} {value:g}" for key, value in constants.items())
