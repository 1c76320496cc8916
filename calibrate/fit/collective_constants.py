"""Which constants of a library predict published tables of collectives best?

Three kinds are fitted, each while the others stay as they are, so that the shipped ones are a common optimum:

- what a collective's launch adds, for each generation of GPUs, to sizes below 1 MiB of tables on NVLink alone or over
  RDMA networks (what nccl-tests measures beyond NCCL's own latencies differs between generations, and their hosts);
- how pipelines between domains cut payloads, to sizes from 1 MiB on of the same tables;
- what a message over any other network takes beyond the library's rounds, to sizes below 64 KiB of tables over it.

They are of grids, those with the least mean over sources of the mean over a source's tables of |predicted /
measured - 1|. A constant that no table is left for is that of `any` make (networks) or stays (generations).
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from calibrate.fit.published_collectives import Benchmark
from clustersim.collectives.library import Library, NetworkConstants, NvlinkConstants, PipelineChunking
from clustersim.collectives.tuner import VariantCosts, variant_seconds
from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import Seconds
from clustersim.hardware.link_technology import LinkTechnology

VERBS: Final = (LinkTechnology.INFINIBAND, LinkTechnology.ROCE)  # whose messages NCCL's own constants are about
INSIDE: Final = 0.4  # of a payload; 0.2 fits as well (12.8 % both), so the tables do not tell
PIPELINES: Final = tuple(
    PipelineChunking(INSIDE, *item) for item in itertools.product((0.4, 0.6, 0.8, 1.0), (8e6, 12e6))
)
LAUNCHES: Final[Sequence[Seconds]] = tuple(index * 1e-6 for index in range(16))
LATENCIES: Final[Sequence[Seconds]] = tuple(
    element * 1e-6 for element in (0, 1, 2, 3, 5, 8, 12, 17, 25, 37, 55, 80, 120, 200, 300, 450, 650, 1000)
)
SMALL: Final = 2**16  # bytes, below which a message's latency is most of its time


@dataclass(frozen=True)
class Fit:
    """Misfits of each table with each candidate: [candidates]; only of tables that tell about a constant."""

    library: Library
    launches: Mapping[Benchmark, FloatArray]
    pipelines: Mapping[Benchmark, FloatArray]
    latencies: Mapping[Benchmark, FloatArray]

    def best(self, without: str | None = None) -> Library:
        """The library with the constants that fit the tables of all sources but one best."""
        kept: dict[LinkTechnology | None, NvlinkConstants] = {
            make: replace(nvlink_constants, launch_seconds=self._launch(make, nvlink_constants.launch_seconds, without))
            for make, nvlink_constants in self._generations
        }
        networks: dict[LinkTechnology | None, NetworkConstants] = {
            make: replace(network_constants, message_latency=self._latency(make, without))
            for make, network_constants in self._networks
        }
        best = _least(self.pipelines, without)
        return replace(
            self.library,
            nvlink_by_technology={**self.library.nvlink_by_technology, **kept},
            network_by_technology={**self.library.network_by_technology, **networks},
            pipeline=self.library.pipeline if best is None else PIPELINES[best],
        )

    @property
    def _generations(self) -> list[tuple[LinkTechnology, NvlinkConstants]]:
        makes = dict.fromkeys(table.place.generation for table in self.launches)
        return [(make, self.library.nvlink_by_technology[make]) for make in makes]

    @property
    def _networks(self) -> list[tuple[LinkTechnology, NetworkConstants]]:
        makes = dict.fromkeys(table.place.network for table in self.latencies)
        return [(make, self.library.network_by_technology[make]) for make in makes]

    def _launch(self, make: LinkTechnology, own: Seconds | None, without: str | None) -> Seconds | None:
        mine = {table: launch for table, launch in self.launches.items() if table.place.generation is make}
        best = _least(mine, without)
        return own if best is None else LAUNCHES[best]

    def _latency(self, make: LinkTechnology, without: str | None) -> Seconds:
        mine = {table: latency for table, latency in self.latencies.items() if table.place.network is make}
        best = _least(mine, without)
        return self.library.network_by_technology[None].message_latency if best is None else LATENCIES[best]


def _least(misfits: Mapping[Benchmark, FloatArray], without: str | None) -> int | None:
    """The number of the best candidate by the tables of other sources; None if there are none."""
    kept = [(table.source, misfit) for table, misfit in misfits.items() if table.source != without]
    if not kept:
        return None
    sources = [source for source, _ in kept]
    weights = np.array([1.0 / sources.count(source) for source in sources])
    return int(np.tensordot(weights, np.array([array for _, array in kept]), axes=1).argmin())


def fit(surveys: Mapping[Benchmark, VariantCosts], library: Library) -> Fit:
    """Judge every candidate by every table that tells about it."""
    fitted = [table for table in surveys if table.fitted]
    other = [table for table in fitted if table.between and table.place.network not in VERBS]
    plain = [table for table in fitted if table not in other]
    return Fit(
        library,
        {
            table: _by_launch(table, surveys[table])
            for table in plain
            if not table.large.all() and table.place.per_process == 1
        },
        {table: _by_pipeline(table, surveys[table]) for table in plain if table.large.any()},
        {table: _by_latency(table, library) for table in other if (np.array(table.sizes) < SMALL).any()},
    )


def _by_launch(table: Benchmark, choices: VariantCosts) -> FloatArray:
    launched = np.array([offer.adds_launch for offer in choices.variants])
    shipped = choices.library.launch_seconds_on(choices.technologies)
    extra = np.multiply.outer(np.array(LAUNCHES) - shipped, launched)[:, :, None]
    small = np.flatnonzero(~table.large)
    seconds = [
        (extra + variant_seconds(choices, table.sizes[place]).seconds).min(axis=1).max(axis=1) for place in small
    ]
    return _misfit(table, np.stack(seconds, axis=1), small)


def _by_pipeline(table: Benchmark, choices: VariantCosts) -> FloatArray:
    large = np.flatnonzero(table.large)
    found = [
        _seconds(table, replace(choices, library=replace(choices.library, pipeline=pipeline_chunking)), large)
        for pipeline_chunking in PIPELINES
    ]
    return _misfit(table, np.array(found), large)


def _by_latency(table: Benchmark, library: Library) -> FloatArray:
    small = np.flatnonzero(np.array(table.sizes) < SMALL)
    found = [_seconds(table, table.place.survey(_with_latency(library, table, item)), small) for item in LATENCIES]
    return _misfit(table, np.array(found), small)


def _with_latency(library: Library, table: Benchmark, latency: Seconds) -> Library:
    make = table.place.network
    return replace(
        library,
        network_by_technology=dict(library.network_by_technology)
        | {make: replace(library.network_by_technology[make], message_latency=latency)},
    )


def _seconds(table: Benchmark, choices: VariantCosts, places: IntArray) -> list[Seconds]:
    return [float(variant_seconds(choices, table.sizes[place]).seconds.min(axis=0).max()) for place in places]


def _misfit(table: Benchmark, seconds: FloatArray, places: IntArray) -> FloatArray:
    """Mean |predicted / measured - 1| over some sizes; seconds: [candidates, sizes]."""
    misfit: FloatArray = np.abs(table.ratios(seconds, places) - 1.0).mean(axis=1)
    return misfit
