"""Which constants of the kernel model do published measurements support?

For every accelerator with published kernels, the constants of `cost.roofline` are searched on a grid. Accelerators
without take a sibling's; where the best matmul that a search found is known for both, the share of the peak keeps the
sibling's distance from that upper bound. The values found are the ones in `topologies/accelerators`: a test holds the
two together, so that nothing is tuned by hand.

References: the `source` and `locator` columns of `clustersim/validation/published/kernels.csv` and of
`published/bandwidth.csv`.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from calibrate.fit.attention import fit_attention, fit_faster
from calibrate.fit.collective_quality import judge
from calibrate.fit.fit_quality import Fits, Judged, Quality, table, unseen_table
from calibrate.fit.grid_search import Winner
from calibrate.fit.grouped_gemm import fit_grouped, fit_kernel_share, fit_scaled_kernel
from calibrate.fit.low_precision_formats import (
    DIGITS,
    Relative,
    fit_casts,
    fit_formats,
    scaled_kernels,
    with_others_kernels,
)
from calibrate.fit.matmul_constants import fit_matmul, matmul_seconds
from calibrate.fit.published_kernels import (
    AttentionRow,
    GroupedRow,
    MatmulRow,
    attentions,
    bandwidths,
    best_rates,
    grouped_products,
    matmuls,
)
from calibrate.fit.published_records import write_records
from clustersim.collectives.library import load_library
from clustersim.common.dtypes import LOW_PRECISION_DTYPES, DType
from clustersim.common.files import write_text_atomically
from clustersim.common.units import Seconds
from clustersim.hardware.accelerator import Accelerator, load_accelerator
from clustersim.hardware.efficiency import GroupedGemmEfficiency, KernelEfficiency


@dataclass(frozen=True, slots=True)
class Target:
    """An accelerator with published kernels.

    latency_of: whose kernel latency it takes, for want of small kernels of its own; same_chip: accelerators whose rows
    of attention and of formats with scales are added to its own; even: its sources count alike, where one that is
    unlike the others has so many rows that those would not be heard.
    """

    name: str
    latency_of: str | None = None
    same_chip: tuple[str, ...] = ()
    even: bool = False


@dataclass(frozen=True, slots=True)
class Derivation:
    """An accelerator without enough published kernels, and the one whose constants it takes.

    scaled_like: whose formats with scales it takes, if another's.
    """

    name: str
    sibling: str
    scaled_like: str | None = None


TARGETS: Final = (
    Target("a100-sxm-80gb", same_chip=("a100-pcie-80gb",)),
    Target("h100-sxm-80gb", same_chip=("h800-sxm-80gb",)),
    Target("a100-pcie-80gb", latency_of="a100-sxm-80gb", same_chip=("a100-sxm-80gb",)),
    Target("b200-sxm-180gb", latency_of="h100-sxm-80gb", even=True),
)
DERIVATIONS: Final = (
    Derivation("a100-sxm-40gb", "a100-sxm-80gb"),
    Derivation("v100-sxm-32gb", "a100-sxm-80gb"),
    Derivation("h100-pcie-80gb", "h100-sxm-80gb"),
    Derivation("h200-sxm-141gb", "h100-sxm-80gb"),
    Derivation("h100-sxm-96gb", "h100-sxm-80gb"),
    Derivation("h800-sxm-80gb", "h100-sxm-80gb"),
    Derivation("gb200", "b200-sxm-180gb"),
    Derivation("b300-sxm-288gb", "b200-sxm-180gb"),
    Derivation("gb300", "b200-sxm-180gb", scaled_like="b300-sxm-288gb"),
    Derivation("mi300x", "h100-sxm-80gb"),
    Derivation("mi325x", "h100-sxm-80gb", scaled_like="mi300x"),
    Derivation("mi355x", "h100-sxm-80gb"),
)


# Whose products of experts are fitted; the first has some that wait for the host, whose call the others take.
EXPERTS: Final = ("b200-sxm-180gb", "a100-pcie-80gb")
# Whose products of experts an accelerator without own ones is like: the same architecture's, else the next older's.
EXPERTS_OF: Final = {"a100-sxm-80gb": "a100-pcie-80gb", "h100-sxm-80gb": "a100-pcie-80gb"}


# Whose attention in formats with scales an accelerator without own rows has: that of the same chip on another board.
ATTENTION_OF: Final = {"b200-sxm-180gb": "gb200", "b300-sxm-288gb": "gb300"}


def fit() -> Fits:
    """Fit every target and derive the others; deterministic, a few seconds."""
    efficiencies: dict[str, KernelEfficiency] = {}
    judged: list[Judged] = []
    for target in TARGETS:
        sibling = efficiencies[target.latency_of] if target.latency_of else None
        fitted, found = _fit(target, sibling)
        efficiencies[target.name] = fitted.efficiency
        judged.extend(found)
    for derivation in DERIVATIONS:
        derived, found = _fit_few(*_derive(derivation, efficiencies))
        efficiencies[derivation.name] = derived.efficiency
        judged.extend(found)
    return Fits(*_fit_experts(_with_others_attention(efficiencies), judged))


def _fit_experts(
    efficiencies: Mapping[str, KernelEfficiency], judged: Sequence[Judged]
) -> tuple[Mapping[str, KernelEfficiency], Sequence[Judged]]:
    """Fit the products of experts of all accelerators that have rows; those of the others are relative to them.

    Rates keep their distance to those of other products.
    """
    fitted: dict[str, GroupedGemmEfficiency] = {}
    found, call = list(judged), None
    for name in (item for item in EXPERTS if item in efficiencies):
        accelerator = replace(load_accelerator(name), efficiency=efficiencies[name])
        fitted[name], qualities = _fit_products(accelerator, call)
        found.extend(qualities)
        call = fitted[name].call
    siblings = {derivation.name: derivation.sibling for derivation in DERIVATIONS} | EXPERTS_OF
    derived = dict(efficiencies)
    for name, efficiency in efficiencies.items():
        known: str | None = name
        while known is not None and known not in fitted:
            known = siblings.get(known)
        if known is not None:
            derived[name] = replace(efficiency, grouped=_relative(fitted[known], efficiencies[known], efficiency))
    return _fit_scaled_experts(derived, siblings, found)


def _fit_scaled_experts(
    efficiencies: Mapping[str, KernelEfficiency], siblings: Mapping[str, str], judged: Sequence[Judged]
) -> tuple[Mapping[str, KernelEfficiency], Sequence[Judged]]:
    """The same in formats with scales, of products in one kernel; one that is known keeps its distance to others."""
    own, found = dict(efficiencies), list(judged)
    for name, efficiency in efficiencies.items():
        sibling = own.get(siblings.get(name, ""))
        kept = {} if sibling is None else scaled_kernels(efficiency, sibling)
        grouped = None if efficiency.grouped is None else replace(efficiency.grouped, kernel_shares=kept)
        accelerator = replace(load_accelerator(name), efficiency=replace(efficiency, grouped=grouped))
        for rows in _scaled_experts_of(name):
            fitted, winner = fit_scaled_kernel(accelerator, rows)
            accelerator = _with(accelerator, grouped=fitted)
            found.append(Judged(name, f"experts in one kernel {rows[0].dtype.value}", rows, winner))
        own[name] = with_others_kernels(accelerator.efficiency)
    return own, found


def _scaled_experts_of(name: str) -> list[list[GroupedRow]]:
    """An accelerator's products of experts in each format with scales."""
    rows = [row for row in grouped_products() if row.accelerator == name and not row.streamed]
    return [same for same in ([row for row in rows if row.dtype is dtype] for dtype in LOW_PRECISION_DTYPES) if same]


def _fit_products(accelerator: Accelerator, call: Seconds | None) -> tuple[GroupedGemmEfficiency, list[Judged]]:
    rows = [
        row
        for row in grouped_products()
        if row.accelerator == accelerator.name and row.dtype not in LOW_PRECISION_DTYPES
    ]
    streamed, kernel = [row for row in rows if row.streamed], [row for row in rows if not row.streamed]
    constants, winner = fit_grouped(accelerator, streamed, call)
    judged = [Judged(accelerator.name, "experts on streams", streamed, winner)]
    if not kernel:
        return constants, judged
    own, winner = fit_kernel_share(_with(accelerator, grouped=constants), kernel)
    return own, [*judged, Judged(accelerator.name, "experts in one kernel", kernel, winner)]


def _relative(grouped: GroupedGemmEfficiency, known: KernelEfficiency, own: KernelEfficiency) -> GroupedGemmEfficiency:
    ratio = own.matmul.share / known.matmul.share
    share, kernel_share = (round(item * ratio, DIGITS) for item in (grouped.share, grouped.kernel_share))
    return replace(grouped, share=share, kernel_share=kernel_share)


def _with(accelerator: Accelerator, **constants: Any) -> Accelerator:
    return replace(accelerator, efficiency=replace(accelerator.efficiency, **constants))


def _fit(target: Target, sibling: KernelEfficiency | None) -> tuple[Accelerator, list[Judged]]:
    accelerator = _with(load_accelerator(target.name), published=True, memory=_memory_share(target.name, sibling))
    accelerator, qualities = _fit_matmuls(accelerator, sibling, target)
    rows = [row for row in attentions() if row.accelerator in (target.name, *target.same_chip)]
    accelerator, judged = _fit_attention(accelerator, rows, even=target.even)
    return accelerator, [*qualities, *judged]


def _fit_attention(
    accelerator: Accelerator, rows: Sequence[AttentionRow], *, even: bool = False
) -> tuple[Accelerator, list[Judged]]:
    wide = [row for row in rows if row.dtype not in LOW_PRECISION_DTYPES]
    forward = [row for row in wide if not row.backward]
    backward = [row for row in wide if row.backward]
    ahead, winner_ahead = fit_attention(accelerator, forward, 1.0, even=even)
    back, winner_back = fit_attention(accelerator, backward, ahead.causal, even=even)
    judged = [
        Judged(accelerator.name, "attention forward", forward, winner_ahead),
        Judged(accelerator.name, "attention backward", backward, winner_back),
    ]
    fitted = _with(accelerator, attention_forward=ahead, attention_backward=back)
    for dtype in LOW_PRECISION_DTYPES:
        same = [row for row in rows if row.dtype is dtype]
        if same:
            fitted, found = _fit_faster(fitted, same)
            judged.extend(found)
    return fitted, judged


def _fit_faster(accelerator: Accelerator, rows: Sequence[AttentionRow]) -> tuple[Accelerator, list[Judged]]:
    """Attention in a format with scales, both ways."""
    own, judged, constants = accelerator.efficiency, [], {}
    for word, backward in (("forward", False), ("backward", True)):
        name, same = f"attention_{word}", [row for row in rows if row.backward is backward]
        constants[name], winner = fit_faster(accelerator, same, getattr(own, name))
        judged.append(Judged(accelerator.name, f"attention {word} {rows[0].dtype.value}", same, winner))
    return _with(accelerator, **constants), judged


def _with_others_attention(efficiencies: Mapping[str, KernelEfficiency]) -> dict[str, KernelEfficiency]:
    """Accelerators without rows of attention in formats with scales are as fast in them as those with the same chip."""
    found = dict(efficiencies)
    for name, other in ATTENTION_OF.items():
        if not {name, other} <= found.keys():
            continue  # not all accelerators are fitted
        found[name] = replace(
            found[name],
            **{
                direction: replace(getattr(found[name], direction), formats=getattr(found[other], direction).formats)
                for direction in ("attention_forward", "attention_backward")
            },
        )
    return found


def _fit_matmuls(
    accelerator: Accelerator, sibling: KernelEfficiency | None, target: Target
) -> tuple[Accelerator, list[Judged]]:
    dense = _matmuls_of(target.name)
    known = sibling.kernel_latency if sibling else None
    constants, latency, winner = fit_matmul(accelerator, dense, known, even=target.even)
    fitted = _with(accelerator, matmul=constants, kernel_latency=latency)
    ratio = _ratio(_best_share(accelerator, DType.FP8), _best_share(accelerator, DType.BF16), 1.0)
    scaled, found = fit_formats(fitted, Relative(None, ratio), target.same_chip)
    share, cast = fit_casts(scaled, sibling)
    return _with(scaled, casts=share), [Judged(target.name, "matmul", dense, winner), *found, *cast]


def _derive(derivation: Derivation, known: Mapping[str, KernelEfficiency]) -> tuple[Accelerator, Relative]:
    """The sibling's constants, with this accelerator's tiles, bandwidth and distance from its best matmul.

    And what its formats with scales are relative to.
    """
    accelerator = load_accelerator(derivation.name)
    sibling, reference = known[derivation.sibling], load_accelerator(derivation.sibling)
    dense = _ratio(_best_share(accelerator, DType.BF16), _best_share(reference, DType.BF16), 1.0)
    own = accelerator.efficiency.matmul
    share = round(sibling.matmul.share * dense, DIGITS)
    matmul = replace(sibling.matmul, share=share, tiles=own.tiles, by_rows=own.by_rows)
    forward, backward = (  # clocks under load limit both kinds alike
        replace(constants, share=round(constants.share * dense, DIGITS))
        for constants in (sibling.attention_forward, sibling.attention_backward)
    )
    derived = _with(
        accelerator,
        published=False,
        matmul=matmul,
        attention_forward=forward,
        attention_backward=backward,
        memory=_memory_share(derivation.name, sibling),
        kernel_latency=sibling.kernel_latency,
    )
    return derived, _relative_to(derived, derivation.scaled_like or derivation.sibling, known)


def _relative_to(accelerator: Accelerator, name: str, known: Mapping[str, KernelEfficiency]) -> Relative:
    """FP8's distance from a sibling's is that of their best matmuls in it, or in BF16."""
    reference = load_accelerator(name)
    dense = _ratio(_best_share(accelerator, DType.BF16), _best_share(reference, DType.BF16), 1.0)
    return Relative(known[name], _ratio(_best_share(accelerator, DType.FP8), _best_share(reference, DType.FP8), dense))


def _fit_few(accelerator: Accelerator, relative: Relative) -> tuple[Accelerator, list[Judged]]:
    """What a derived accelerator's own rows support: matmuls in formats with scales their shares, and its attention.

    Its other matmuls judge constants they have not seen.
    """
    dense = _matmuls_of(accelerator.name)
    attention = [row for row in attentions() if row.accelerator == accelerator.name]
    qualities: list[Judged] = []
    if dense:
        predicted = matmul_seconds(accelerator, dense)
        winner = Winner((), predicted, predicted, predicted)
        qualities.append(Judged(accelerator.name, "matmul, not fitted", dense, winner))
    accelerator, found = fit_formats(accelerator, relative)
    share, cast = fit_casts(accelerator, relative.sibling)
    accelerator = _with(accelerator, casts=share)
    qualities.extend((*found, *cast))
    if attention:
        accelerator, judged = _fit_attention(accelerator, attention)
        qualities.extend(judged)
    return accelerator, qualities


def _matmuls_of(name: str) -> list[MatmulRow]:
    """An accelerator's rows in formats without scales."""
    return [row for row in matmuls() if row.accelerator == name and row.dtype not in LOW_PRECISION_DTYPES]


def _best_share(accelerator: Accelerator, dtype: DType) -> float | None:
    """Part of the peak that the best matmul of a search reached, where one is known."""
    rate = best_rates().get((accelerator.name, dtype))
    return None if rate is None else rate / accelerator.peak_flops(dtype)


def _ratio(share: float | None, reference: float | None, unknown: float) -> float:
    return unknown if share is None or reference is None else share / reference


def _memory_share(name: str, sibling: KernelEfficiency | None) -> float:
    """Mean of the measured bandwidths over the datasheet's; the sibling's where none is known."""
    measured = bandwidths().get(name, [])
    if sibling is not None and not measured:
        return sibling.memory
    return round(float(np.mean(measured)) / load_accelerator(name).memory_bandwidth, DIGITS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `command`."""
    parser.add_argument("--json", metavar="FILE", help="write the fits as JSON to FILE, or to standard output for -")
    parser.add_argument("--records", metavar="DIR", type=Path, help="write a calibration record of each accelerator")


def command(options: argparse.Namespace) -> None:
    """Fit, and print tables (or write JSON to a file, or to standard output for `-`), and write records if asked."""
    fits, collectives = fit(), judge(load_library("nccl"))
    if options.records is not None:
        write_records(fits, options.records)
    if options.json is None:
        tables = [table([*fits.qualities, *collectives]), "", unseen_table(fits.unseen), ""]
        print("\n".join([*tables, *_constants(fits)]))
        return
    _write_json(fits, collectives, options.json)


def _write_json(fits: Fits, collectives: Sequence[Quality], target: str) -> None:
    qualities = [asdict(quality) for quality in (*fits.qualities, *collectives)]
    efficiency = {name: _named(asdict(kernel_efficiency)) for name, kernel_efficiency in fits.efficiencies.items()}
    unseen = [asdict(item) for item in fits.unseen]
    text = json.dumps({"qualities": qualities, "unseen": unseen, "efficiency": efficiency}, indent=2) + "\n"
    if target == "-":
        sys.stdout.write(text)
        return
    write_text_atomically(target, text)


def _named(constants: Mapping[Any, Any]) -> dict[str, Any]:
    """The same with formats by their names."""
    return {
        key.value if isinstance(key, DType) else key: _named(value) if isinstance(value, Mapping) else value
        for key, value in constants.items()
    }


def _constants(fits: Fits) -> list[str]:
    lines = []
    for name, efficiency in fits.efficiencies.items():
        lines.append(f"{name}: {'published' if efficiency.published else 'derived'}")
        lines.extend(f"  {line}" for line in _listed(efficiency))
    return lines


def _listed(efficiency: KernelEfficiency) -> list[str]:
    matmul = efficiency.matmul
    sizes = f"prologue {matmul.prologue:g}, edge {matmul.edge:g}"
    shares = "".join(f", {_scaled(efficiency, dtype)}" for dtype in matmul.shares)
    lines = [f"matmul: share {matmul.share:g}{shares}, {sizes}"]
    if efficiency.grouped is not None:
        constants = asdict(efficiency.grouped)
        scaled = constants.pop("kernel_shares")
        constants |= {f"kernel_share {dtype.value}": share for dtype, share in scaled.items()}
        lines.append("grouped: " + ", ".join(f"{key} {value:g}" for key, value in constants.items()))
    for name in ("attention_forward", "attention_backward"):
        constants = asdict(getattr(efficiency, name))
        constants |= {f"in {dtype.value}": rate for dtype, rate in constants.pop("formats").items()}
        lines.append(f"{name}: " + ", ".join(f"{key} {value:g}" for key, value in constants.items()))
    casts = f", casts {efficiency.casts:g}" if efficiency.casts != 1.0 else ""
    return [*lines, f"memory {efficiency.memory:g}{casts}, kernel_latency {efficiency.kernel_latency * 1e6:g} us"]


def _scaled(efficiency: KernelEfficiency, dtype: DType) -> str:
    """What is a format's own."""
    matmul = efficiency.matmul
    prologue = f" (prologue {matmul.prologues[dtype]:g})" if dtype in matmul.prologues else ""
    start = f" (start {matmul.starts[dtype] * 1e6:g} us)" if dtype in matmul.starts else ""
    return f"{dtype.value} {matmul.shares[dtype]:g}{prologue}{start}"
