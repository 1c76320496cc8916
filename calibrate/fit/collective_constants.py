"""Grid search for the constants of a collective library against published benchmark tables.

Three kinds of constants are fitted, each with the others held fixed, so the packaged values are a joint
optimum:

- launch overhead of a collective for each NVLink generation: sizes below 1 MiB of tables on NVLink or RDMA
  networks (what nccl-tests measures beyond NCCL's own latencies differs between generations and their
  hosts);
- pipeline chunking between domains: sizes from 1 MiB of the same tables;
- message latency over any other network beyond the library's step latencies: sizes below 64 KiB of tables
  over it.

The objective is the mean over sources of the mean over a source's tables of |predicted / measured - 1|. A
constant that no remaining table identifies keeps its value (NVLink) or that of technology `any` (networks).
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from calibrate.fit.published_collectives import BenchmarkTable
from clustersim.collectives.library import Library, NetworkConstants, NvlinkConstants, PipelineChunking
from clustersim.collectives.tuner import VariantCosts, variant_seconds
from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import Seconds
from clustersim.hardware.link_technology import LinkTechnology

RDMA_TECHNOLOGIES: Final = (
    LinkTechnology.INFINIBAND,
    LinkTechnology.ROCE,
)  # NCCL's built-in network constants are for these
INTRA_DOMAIN_FRACTION: Final = 0.4  # of a payload; 0.2 fits as well (12.8 % both), so the tables do not identify it
PIPELINE_GRID: Final = tuple(
    PipelineChunking(INTRA_DOMAIN_FRACTION, *values) for values in itertools.product((0.4, 0.6, 0.8, 1.0), (8e6, 12e6))
)
LAUNCH_GRID: Final[Sequence[Seconds]] = tuple(index * 1e-6 for index in range(16))
LATENCY_GRID: Final[Sequence[Seconds]] = tuple(
    microseconds * 1e-6 for microseconds in (0, 1, 2, 3, 5, 8, 12, 17, 25, 37, 55, 80, 120, 200, 300, 450, 650, 1000)
)
SMALL_PAYLOAD: Final = 2**16  # bytes, below which a message is latency-bound


@dataclass(frozen=True)
class CollectiveConstantsFit:
    """Errors of every candidate on every table that identifies the constant: [candidates]."""

    library: Library
    launch_errors: Mapping[BenchmarkTable, FloatArray]
    pipeline_errors: Mapping[BenchmarkTable, FloatArray]
    latency_errors: Mapping[BenchmarkTable, FloatArray]

    def best_library(self, held_out_source: str | None = None) -> Library:
        """The library with the best constants for the tables of all sources but `held_out_source`."""
        nvlink_constants: dict[LinkTechnology | None, NvlinkConstants] = {
            technology: replace(
                constants, launch_seconds=self._best_launch(technology, constants.launch_seconds, held_out_source)
            )
            for technology, constants in self._nvlink_constants
        }
        network_constants: dict[LinkTechnology | None, NetworkConstants] = {
            technology: replace(constants, message_latency=self._best_latency(technology, held_out_source))
            for technology, constants in self._network_constants
        }
        best_pipeline = _best_candidate(self.pipeline_errors, held_out_source)
        return replace(
            self.library,
            nvlink_by_technology={**self.library.nvlink_by_technology, **nvlink_constants},
            network_by_technology={**self.library.network_by_technology, **network_constants},
            pipeline=self.library.pipeline if best_pipeline is None else PIPELINE_GRID[best_pipeline],
        )

    @property
    def _nvlink_constants(self) -> list[tuple[LinkTechnology, NvlinkConstants]]:
        technologies = dict.fromkeys(table.benchmark.scale_up_technology for table in self.launch_errors)
        return [(technology, self.library.nvlink_by_technology[technology]) for technology in technologies]

    @property
    def _network_constants(self) -> list[tuple[LinkTechnology, NetworkConstants]]:
        technologies = dict.fromkeys(table.benchmark.network_technology for table in self.latency_errors)
        return [(technology, self.library.network_by_technology[technology]) for technology in technologies]

    def _best_launch(
        self, technology: LinkTechnology, default: Seconds | None, held_out_source: str | None
    ) -> Seconds | None:
        errors_by_table = {
            table: errors
            for table, errors in self.launch_errors.items()
            if table.benchmark.scale_up_technology is technology
        }
        best = _best_candidate(errors_by_table, held_out_source)
        return default if best is None else LAUNCH_GRID[best]

    def _best_latency(self, technology: LinkTechnology, held_out_source: str | None) -> Seconds:
        errors_by_table = {
            table: errors
            for table, errors in self.latency_errors.items()
            if table.benchmark.network_technology is technology
        }
        best = _best_candidate(errors_by_table, held_out_source)
        return self.library.network_by_technology[None].message_latency if best is None else LATENCY_GRID[best]


def _best_candidate(errors_by_table: Mapping[BenchmarkTable, FloatArray], held_out_source: str | None) -> int | None:
    """Index of the candidate with the least macro-averaged error without one source; None if no table is left."""
    source_errors = [
        (table.source, errors) for table, errors in errors_by_table.items() if table.source != held_out_source
    ]
    if not source_errors:
        return None
    sources = [source for source, _ in source_errors]
    weights = np.array([1.0 / sources.count(source) for source in sources])
    return int(np.tensordot(weights, np.array([errors for _, errors in source_errors]), axes=1).argmin())


def fit_collective_constants(
    costs_by_table: Mapping[BenchmarkTable, VariantCosts], library: Library
) -> CollectiveConstantsFit:
    """Evaluate every candidate on every table that identifies its constant."""
    fitted = [table for table in costs_by_table if table.is_fitted]
    non_rdma = [
        table
        for table in fitted
        if table.crosses_network and table.benchmark.network_technology not in RDMA_TECHNOLOGIES
    ]
    rdma_or_nvlink = [table for table in fitted if table not in non_rdma]
    return CollectiveConstantsFit(
        library,
        {
            table: _launch_errors(table, costs_by_table[table])
            for table in rdma_or_nvlink
            if not table.is_large.all() and table.benchmark.gpus_per_process == 1
        },
        {table: _pipeline_errors(table, costs_by_table[table]) for table in rdma_or_nvlink if table.is_large.any()},
        {table: _latency_errors(table, library) for table in non_rdma if (np.array(table.sizes) < SMALL_PAYLOAD).any()},
    )


def _launch_errors(table: BenchmarkTable, variant_costs: VariantCosts) -> FloatArray:
    launched = np.array([variant.adds_launch for variant in variant_costs.variants])
    packaged_launch = variant_costs.library.launch_seconds_on(variant_costs.technologies)
    extra = np.multiply.outer(np.array(LAUNCH_GRID) - packaged_launch, launched)[:, :, None]
    small = np.flatnonzero(~table.is_large)
    seconds = [
        (extra + variant_seconds(variant_costs, table.sizes[size_index]).seconds).min(axis=1).max(axis=1)
        for size_index in small
    ]
    return _mean_relative_error(table, np.stack(seconds, axis=1), small)


def _pipeline_errors(table: BenchmarkTable, variant_costs: VariantCosts) -> FloatArray:
    large = np.flatnonzero(table.is_large)
    candidate_seconds = [
        _predicted_seconds(
            table, replace(variant_costs, library=replace(variant_costs.library, pipeline=pipeline)), large
        )
        for pipeline in PIPELINE_GRID
    ]
    return _mean_relative_error(table, np.array(candidate_seconds), large)


def _latency_errors(table: BenchmarkTable, library: Library) -> FloatArray:
    small = np.flatnonzero(np.array(table.sizes) < SMALL_PAYLOAD)
    candidate_seconds = [
        _predicted_seconds(table, table.benchmark.evaluate_variants(_with_latency(library, table, latency)), small)
        for latency in LATENCY_GRID
    ]
    return _mean_relative_error(table, np.array(candidate_seconds), small)


def _with_latency(library: Library, table: BenchmarkTable, latency: Seconds) -> Library:
    technology = table.benchmark.network_technology
    return replace(
        library,
        network_by_technology=dict(library.network_by_technology)
        | {technology: replace(library.network_by_technology[technology], message_latency=latency)},
    )


def _predicted_seconds(table: BenchmarkTable, variant_costs: VariantCosts, size_indices: IntArray) -> list[Seconds]:
    return [
        float(variant_seconds(variant_costs, table.sizes[size_index]).seconds.min(axis=0).max())
        for size_index in size_indices
    ]


def _mean_relative_error(table: BenchmarkTable, seconds: FloatArray, size_indices: IntArray) -> FloatArray:
    """Mean |predicted / measured - 1| over the selected sizes: [candidates]; seconds: [candidates, sizes]."""
    mean_error: FloatArray = np.abs(table.ratios(seconds, size_indices) - 1.0).mean(axis=1)
    return mean_error
