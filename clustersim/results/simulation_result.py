"""What is the answer? Everything that one simulation found out, and the numbers that people and programs ask for."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from clustersim.build import library_of
from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.dtypes import DType
from clustersim.common.pickling import FieldState
from clustersim.common.units import Bytes, Flop, FlopPerSecond, Seconds, format_step_time
from clustersim.cost.segment import BlockCost
from clustersim.engine.recording.operation_trace import OperationTraceReader
from clustersim.hardware.degradation import Disturbances
from clustersim.memory.footprint import Category
from clustersim.memory.host_memory import HostUse
from clustersim.memory.ledger import Ledger
from clustersim.model.flops import Keys, model_flops
from clustersim.program.program import Program
from clustersim.program.task import ComputeTask
from clustersim.results.co_located_jobs import Neighbour
from clustersim.results.critical_path import critical_path, path_summary
from clustersim.results.economics import Economics, Gpus, activity_seconds
from clustersim.results.expert_imbalance import FullestRank, fullest_rank
from clustersim.results.link_loads import LinkLoads, Sender, link_loads
from clustersim.results.link_volumes import Metered
from clustersim.results.memory_check import capacities_of, host_use_of, suggest_memory_fixes
from clustersim.results.network_utilization import BINS
from clustersim.results.number_formats import Formats, cast_seconds, executed_flops
from clustersim.results.provenance import InStep, Item, expectation, in_step, items, provenance_share
from clustersim.results.selected_algorithms import Taken, taken
from clustersim.results.step_times import step_times
from clustersim.results.stragglers import Stragglers, Waits, find_stragglers, find_waits, moving_seconds
from clustersim.results.time_breakdown import Breakdown, breakdown
from clustersim.results.trace_table import Rows, read_rows
from clustersim.results.utilization import (
    CONVENTION,
    bubble_fraction,
    exposed_fraction,
    gpu_hours,
    hfu,
    mfu,
    model_flops_per_rank,
    recomputed_flops,
    tokens_per_second,
)
from clustersim.scenario import Contention, Scenario
from clustersim.trace.trace import OperationSpans, Trace
from clustersim.uncertainty.describe_interval import experience_words
from clustersim.uncertainty.expected_error import Expectation
from clustersim.uncertainty.holdout import Tried, tried
from clustersim.uncertainty.model_file import kind_of, load_experience
from clustersim.uncertainty.prediction_interval import Expected, Experience, Measured
from clustersim.uncertainty.step_features import facts_of

NOT_SHARED: Final[Mapping[Contention, str]] = {
    Contention.NONE: "contention between collectives of different kinds (each kind shares links among its own groups)",
    Contention.SHARED: "queues and congestion control of the network: links are shared fairly, as fluids",
}
_VISIBLE: Final = 5e-4  # of the busy time
PERCENTILES: Final[Mapping[str, int]] = {"min": 0, "p5": 5, "p50": 50, "p95": 95, "max": 100}
HEALTHY: Final = "stragglers and jitter: all GPUs and links are healthy (`disturbances` says otherwise)"
NOT_MODELLED: Final = (
    "slowing of collectives by kernels beside them, and of kernels by messages between stages",
    "clock throttling, failures",
    "data loaders, logging, checkpoints, Python overhead beyond kernel launches",
    "small reductions of gradients of key and value heads held by several ranks",
)
BALANCED: Final = "uneven loads of experts: each gets as many tokens as any other"
NOT_OF_HOSTS: Final = (
    "contention of copies to and from the host with what NICs send over the same PCIe, and with kernels",
    "rounding up of pinned memory, host memory of the system itself, adding up gradients on the host",
)
NOT_OF_JOBS: Final = "hosts that jobs share: each launches kernels, and copies to its host, as if it were alone there"


@dataclass(frozen=True, slots=True)
class Flops:
    """FLOP of the model's whole step on all ranks, by the convention of `results.utilization`.

    causal: with attention as its causal mask leaves it.
    """

    model: Flop
    causal: Flop


@dataclass(frozen=True, repr=False)
class Answer(FieldState):
    """Simulated training steps. What is said of a step is the mean over them.

    Fields are what only a run tells; all else follows from them, and is worked out when it is first asked for: a search
    of many scenarios asks each of them for little.

    inside: works out single operations; ledgers: memory of each pipeline rank over time; wall: seconds that the
    simulation took; neighbours: the other jobs on the machine; alone: seconds of a step without them, if there are any.
    """

    scenario: Scenario
    program: Program
    trace: Trace
    cost: BlockCost
    inside: OperationTraceReader
    ledgers: tuple[Ledger, ...]
    wall: Seconds
    neighbours: tuple[Neighbour, ...] = ()
    alone: Seconds | None = None

    def __repr__(self) -> str:
        """One line: the answer, not its parts."""
        kind, fits = type(self).__name__, "fits" if self.fits else "does not fit"
        return f"<{kind} {self.scenario.name}: step {format_step_time(self.step_time)}, MFU {self.mfu():.1%}, {fits}>"

    @property
    def step_time(self) -> Seconds:
        """Seconds from the start of a step until every rank is done; of several steps the mean."""
        return self.trace.makespan / self.scenario.steps

    @cached_property
    def step_times(self) -> FloatArray:
        """Seconds of each step."""
        return step_times(self.rows)

    @cached_property
    def breakdown(self) -> Breakdown:
        """Where every second of each rank's step goes."""
        return breakdown(self.rows, self.cost.block)

    @cached_property
    def capacities(self) -> tuple[Bytes, ...]:
        """Bytes of the smallest GPU of each pipeline rank."""
        return capacities_of(self.scenario)

    @cached_property
    def host(self) -> HostUse | None:
        """Memory of the fullest node's host; None where nothing is offloaded."""
        return host_use_of(self.scenario)

    @cached_property
    def suggestions(self) -> tuple[str, ...]:
        """Changes that would make a scenario fit that does not."""
        full = any(ledger.peak > most for ledger, most in zip(self.ledgers, self.capacities, strict=True))
        return suggest_memory_fixes(self.scenario) if full else ()

    @cached_property
    def path(self) -> IntArray:
        """Trace rows of the critical path."""
        return critical_path(self.trace)

    @cached_property
    def path_parts(self) -> Mapping[str, Seconds]:
        """Seconds of the critical path by part."""
        return path_summary(self.rows, self.cost.block)

    @cached_property
    def items(self) -> tuple[Item, ...]:
        """What all ranks spend their busy time on, longest first."""
        return items(self.rows, self.cost.block, self.cost.exchange_timing)

    @cached_property
    def collectives(self) -> tuple[Taken, ...]:
        """By which algorithm each collective and message travels, and what it takes alone."""
        return taken(self.program, self.cost.exchange_timing)

    @cached_property
    def flops(self) -> Flops:
        """The model's FLOP of a step, by the convention and with causal attention."""
        model, training = self.scenario.model, self.scenario.training
        return Flops(model_flops(model, training), model_flops(model, training, Keys.SEEN))

    @cached_property
    def recomputed_flops(self) -> Flop:
        """FLOP of a step that are done again, on all ranks."""
        return recomputed_flops(self.rows) / self.scenario.steps

    @cached_property
    def provenance(self) -> Mapping[str, float]:
        """Share of busy time by where durations come from."""
        return provenance_share(self.items)

    @cached_property
    def expectation(self) -> Expectation:
        """By how much the sources of durations expect the answer to differ."""
        return expectation(self.items)

    @cached_property
    def in_step(self) -> InStep:
        """What was measured on kernels alone and takes longer within the step, by a factor that was not."""
        return in_step(self.items)

    @cached_property
    def expected(self) -> Expected:
        """How far the step time may be from what is predicted, and why: times it."""
        facts, found, steps = facts_of(self.scenario, self.breakdown.launch_share), self.expectation, self.tried
        if steps is None:
            return self._published.expected(facts, Measured(found.error, found.unknown))
        return steps.added_to(self._published).expected(facts, steps.measured(found))

    @cached_property
    def tried(self) -> Tried | None:
        """Real steps that the record predicted; None without, or where no kernel rests on what it measured here."""
        return tried(self.scenario.cost.record) if self.expectation.kernels > 0.0 else None

    @property
    def band(self) -> tuple[Seconds, Seconds]:
        """Between what and what the step time is expected."""
        return self.step_time * self.expected.low, self.step_time * self.expected.high

    @property
    def experience(self) -> str:
        """The band, and on what it rests, in a sentence."""
        return experience_words(self._published, self.expected, self.band, self._known)

    @cached_property
    def _published(self) -> Experience:
        """How far published steps of its kind were from predictions."""
        model, products = self.scenario.model, self.scenario.training.recipe.products
        return load_experience(kind_of(mixture=bool(model.mixtures), narrow=products.narrow is not None))

    @property
    def _known(self) -> str:
        """What was measured on the machine itself, empty where nothing was."""
        known = 1.0 - self.expectation.unknown
        if known < _VISIBLE:
            return ""
        rests = f"{known:.0%} of the busy time rests on {self._measured_on}"
        if self.tried is None:
            return f"{rests}, within {self.expectation.error / known:.1%}{self._paced}"
        return f"{rests}, which {self.tried.words}{self._beyond}{self._paced}"

    @property
    def _beyond(self) -> str:
        """How much worse kernels are known than those of the steps that were tried; nothing where they are not."""
        beyond = 0.0 if self.tried is None else self.tried.beyond(self.expectation)
        return f", and whose kernels are less well known here, by {beyond:.1%}" if beyond >= _VISIBLE else ""

    @property
    def _measured_on(self) -> str:
        record = self.scenario.cost.record
        return "measurements" if record is None else f"the record of {record.device.name} of {record.conditions.date}"

    @property
    def _paced(self) -> str:
        """What a step does to kernels that were measured alone; nothing where it does nothing."""
        found = self.in_step
        if found.share < _VISIBLE:
            return ""
        return f" ({found.share:.0%} as kernels alone, times {found.longer:.3f} for {self._pace})"

    @property
    def _pace(self) -> str:
        """What is not in the times of kernels, and where it is from."""
        record = self.scenario.cost.record
        if record is None or not record.chain:
            return "the pace of a step and of the slowest GPU: from published steps, not measured here"
        known = "as GPUs of its node differ" if len(record.gpus) > 1 else "from published steps, not measured here"
        return f"the pace of the slowest GPU: {known}"

    @property
    def step_time_distribution(self) -> dict[str, Seconds]:
        """Least, median, most and some percentiles of the step times."""
        return {name: float(np.percentile(self.step_times, part)) for name, part in PERCENTILES.items()}

    @property
    def ranks(self) -> int:
        """World size."""
        return self.program.world_size

    @property
    def simulated_ranks(self) -> int:
        """How many ranks were run; each stands for all ranks that provably do the same at the same time."""
        return len(self.trace.simulated_ranks)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the whole batch per second."""
        training = self.scenario.training
        return tokens_per_second(training.global_batch, training.sequence, self.step_time)

    @property
    def gpu_hours(self) -> float:
        """Hours of all GPUs together for a trillion tokens, as papers give them."""
        return gpu_hours(self.tokens_per_second / self.ranks)

    @cached_property
    def economics(self) -> Economics:
        """What the step costs and what energy it takes, as far as prices and powers are known."""
        said, training = self.scenario.economics, self.scenario.training
        tokens = float(training.global_batch * training.sequence)
        gpus = tuple(self.gpus_of(self.breakdown, self.items))
        return Economics(gpus, self.step_time, tokens, said.pue, said.carbon, said.tokens)

    def gpus_of(self, parts: Breakdown, every: Iterable[Item]) -> Iterator[Gpus]:
        """The job's GPUs by accelerator; parts: their seconds; every: items of the same time."""
        said, cluster = self.scenario.economics, self.scenario.cluster
        accelerators, kind = cluster.kinds()
        for number, accelerator in enumerate(accelerators):
            ranks = np.flatnonzero(kind[: self.ranks] == number)
            if len(ranks):
                seconds = activity_seconds(parts, every, ranks)
                priced, drawn = said.quote(accelerator, cluster.name), said.draw(accelerator)
                yield Gpus(accelerator.name, len(ranks), seconds, priced, drawn)

    @cached_property
    def fullest_experts(self) -> FullestRank | None:
        """Whose experts get the most rows; None where all get as many."""
        return fullest_rank(self.program)

    @property
    def flops_per_gpu(self) -> FlopPerSecond:
        """Model FLOP per second that each GPU achieves."""
        return model_flops_per_rank(self.flops.model, seconds=self.step_time, ranks=self.ranks)

    @property
    def peak_flops(self) -> FlopPerSecond:
        """Dense peak of one GPU in the compute format, the mean over GPUs."""
        return self._peak_in(self.scenario.training.recipe.compute)

    def _peak_in(self, dtype: DType) -> FlopPerSecond:
        accelerators, kind = self.scenario.cluster.kinds()
        peaks = [accelerator.peak_of(dtype) for accelerator in accelerators]
        return float(np.array(peaks)[kind[: self.ranks]].mean())

    @cached_property
    def formats(self) -> Formats | None:
        """In which formats FLOP are, and what casts cost; None where nothing is cast."""
        recipe = self.scenario.training.recipe
        if recipe.casts is None:
            return None
        steps, wide = self.scenario.steps, recipe.activations
        casts = cast_seconds(self.items, ranks=self.ranks, steps=steps)
        peaks = recipe.compute, self.peak_flops, wide, self._peak_in(wide)
        return Formats(executed_flops(self.rows, steps), casts, *peaks)

    @property
    def fullest(self) -> int:
        """The pipeline rank that needs most of its memory."""
        return int(np.argmax([ledger.peak / most for ledger, most in zip(self.ledgers, self.capacities, strict=True)]))

    @property
    def peak_memory(self) -> Bytes:
        """Bytes that the fullest GPU needs."""
        return self.ledgers[self.fullest].peak

    @property
    def memory_capacity(self) -> Bytes:
        """Bytes that the fullest GPU has."""
        return self.capacities[self.fullest]

    @property
    def fits(self) -> bool:
        """Whether every GPU's peak is within its capacity, and what is offloaded within the hosts'."""
        return self.peak_memory <= self.memory_capacity and (self.host is None or self.host.fits)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is legal and still likely a mistake, and what would make a scenario fit that does not."""
        host = () if self.host is None else self.host.problems
        return (*self.scenario.warnings, *host, *self._conventions(), *self.suggestions)

    def _conventions(self) -> tuple[str, ...]:
        """A word where the usual way of counting FLOP misleads."""
        if self.hfu() < 1:
            return ()
        return (
            "HFU above 100 %: by convention attention counts as a full matrix, but causal kernels skip half of it, and "
            f"at {self.scenario.training.sequence:,} tokens attention is most of the work; counted so, MFU is "
            f"{self.mfu_causal():.1%} (mfu_causal)",
        )

    @property
    def not_modelled(self) -> tuple[str, ...]:
        """What the answer leaves out."""
        given = self.scenario.disturbances != Disturbances() or self.scenario.cluster.mixed
        disturbed = self.scenario.jitter is not None or given or self.scenario.shares_links
        host = () if self.host is None else NOT_OF_HOSTS
        even = self.scenario.training.expert_load is None
        routed = (BALANCED,) if self.scenario.model.mixtures and even else ()
        healthy = () if disturbed else (HEALTHY,)
        shared = (NOT_SHARED[self.scenario.cost.network], *((NOT_OF_JOBS,) if self.scenario.jobs else ()))
        return (*shared, *self._own_rounds(), *healthy, *routed, *NOT_MODELLED, *host)

    def _own_rounds(self) -> Iterator[str]:
        """Where the user's own algorithms were taken, whose rounds cost what the library's do."""
        for name in self.scenario.cost.switches.custom_algorithms:
            uses = [collective for collective in self.collectives if collective.algorithm.rpartition(" ")[0] == name]
            where = ", ".join(dict.fromkeys(f"{use.collective} of {use.group}" for use in uses)) or "nothing"
            yield f"what rounds and protocols of {name} cost (taken for {where}): constants are the library's own"

    @property
    def spans(self) -> int:
        """Operations (kernels and collectives) on the simulated ranks; those inside blocks are kept as offsets."""
        sizes = [
            sum(len(task.segment.operations) if isinstance(task, ComputeTask) else 1 for task in program.tasks)
            for program in self.program.programs
        ]
        return int(np.array(sizes)[self.program.program_index[self.trace.simulated_ranks]].sum())

    @cached_property
    def rows(self) -> Rows:
        """The trace joined with the program, for further analysis."""
        return read_rows(self.trace, self.program, self.scenario.steps)

    @cached_property
    def stragglers(self) -> Stragglers:
        """The ranks that compute or communicate longest for what they do."""
        return find_stragglers(
            self.breakdown, self.program.program_index, moving_seconds(self.trace, self.scenario.steps)
        )

    @cached_property
    def waits(self) -> Waits:
        """How long the ranks of each program wait for others."""
        return find_waits(self.breakdown, self.program.program_index)

    def operations(self, rank: int, tasks: frozenset[int] | None = None) -> OperationSpans:
        """When each kernel and collective inside the blocks of a rank (or of some of its tasks) ran.

        Worked out when asked for.
        """
        return self.inside.rank_spans(rank, tasks)

    @property
    def volumes(self) -> Metered:
        """What knows how many bytes each collective and message puts on which links."""
        return Metered(self.scenario.cluster.fabric, library_of(self.scenario), self.program.groups)

    def link_loads(self, *links: tuple[str, str], bins: int = BINS) -> LinkLoads:
        """Bytes per second on links over time, in bins of equal length of the whole run.

        links: by the names of their ends, as in the cluster's graph and in `disturbances` (("nic3.0", "leaf0.0")), one
        direction each; none: all that carry anything. What other jobs put on them counts. Raises InputError for links
        that are not there.
        """
        senders = (
            Sender(self.rows, self.volumes, self.operations),
            *(neighbour.sender for neighbour in self.neighbours),
        )
        return link_loads(senders, self.scenario.cluster.fabric, links=links, bins=bins)

    def mfu(self) -> float:
        """Model FLOP utilization (see `analysis.utilization.CONVENTION`)."""
        return mfu(self.flops.model, seconds=self.step_time, ranks=self.ranks, peak=self.peak_flops)

    def mfu_causal(self) -> float:
        """Model FLOP utilization that counts attention as its causal mask leaves it."""
        return mfu(self.flops.causal, seconds=self.step_time, ranks=self.ranks, peak=self.peak_flops)

    def hfu(self) -> float:
        """Hardware FLOP utilization: recomputation counts."""
        again = self.recomputed_flops
        return hfu(self.flops.model, again, seconds=self.step_time, ranks=self.ranks, peak=self.peak_flops)

    def to_json(self) -> dict[str, Any]:
        """The answer as plain data: seconds, bytes, fractions."""
        return {
            "name": self.scenario.name,
            "scenario": self.scenario.to_mapping(),
            "step_time_s": self.step_time,
            "step_times_s": self.step_times.tolist(),
            "step_time_alone_s": self.alone,
            "jobs": [neighbour.to_json() for neighbour in self.neighbours],
            "step_time_distribution_s": self.step_time_distribution,
            "tokens_per_s": self.tokens_per_second,
            "tokens_per_s_per_gpu": self.tokens_per_second / self.ranks,
            "gpu_hours_per_trillion_tokens": self.gpu_hours,
            "economics": self.economics.to_json(),
            "model_tflops_per_gpu": self.flops_per_gpu / 1e12,
            "mfu": self.mfu(),
            "mfu_causal": self.mfu_causal(),
            "hfu": self.hfu(),
            "flop_convention": CONVENTION,
            "bubble_fraction": bubble_fraction(self.breakdown),
            "exposed_communication_fraction": exposed_fraction(self.breakdown),
            "peak_memory_bytes": self.peak_memory,
            "memory_capacity_bytes": self.memory_capacity,
            "fits": self.fits,
            "host_memory": self._host(),
            "expert_loads": self._expert_loads(),
            "formats": self._formats(),
            "breakdown_s": self.breakdown.mean(),
            "critical_path_s": dict(self.path_parts),
            "stages": [self._stage(rank) for rank in range(len(self.ledgers))],
            "stragglers": self._stragglers(),
            "provenance_share": dict(self.provenance),
            "in_step": {"share": self.in_step.share, "times_longer": self.in_step.longer},
            "step_time_band_s": list(self.band),
            "record_steps": self._record_steps(),
            "regimes": list(self.expected.regimes),
            "unmeasured": list(self.expected.unmeasured),
            "experience": self.experience,
            "network": self.scenario.cost.network.value,
            "collectives": [collective.to_json() for collective in self.collectives],
            "ranks": self.ranks,
            "simulated_ranks": self.simulated_ranks,
            "spans": self.spans,
            "simulate_wall_s": self.wall,
            "warnings": list(self.warnings),
            "not_modelled": list(self.not_modelled),
        }

    def _record_steps(self) -> dict[str, Any] | None:
        """Real steps that the record predicted; None where it has none."""
        return None if self.tried is None else self.tried.to_json()

    def _formats(self) -> dict[str, Any] | None:
        """Formats of products, and what casts into them cost; None where nothing is cast."""
        found = self.formats
        if found is None:
            return None
        return {
            "flop_share": {dtype.value: share for dtype, share in found.shares.items()},
            "casts_s": found.casts,
            "mfu_peak": found.peak.value,
            "mfu_peak_tflops": found.peak_flops / 1e12,
            f"mfu_of_{found.wide.value}_peak": found.of_wide(self.mfu()),
        }

    def _expert_loads(self) -> dict[str, Any] | None:
        """How uneven ranks' experts are; None where they are even."""
        fullest, load = self.fullest_experts, self.scenario.training.expert_load
        if fullest is None or load is None:
            return None
        over = {"layer_over_mean": fullest.layer, "rank": fullest.rank, "rank_over_mean": fullest.rows}
        return {"load": load.words, **over}

    def _host(self) -> dict[str, Any] | None:
        """Memory of the fullest node's host; None where nothing is offloaded."""
        if self.host is None:
            return None
        held = {category.value: size for category, size in self.host.held.items()}
        return {"memory_bytes": self.host.memory, "capacity_bytes": self.host.capacity, "by_use_bytes": held}

    def _stage(self, pipeline_rank: int) -> dict[str, Any]:
        """Breakdown and memory of one pipeline rank."""
        rank = int(np.flatnonzero(self.program.program_index == pipeline_rank)[0])
        memory, waits = self.ledgers[pipeline_rank].at_peak(), self.waits
        return {
            "pipeline_rank": pipeline_rank,
            "breakdown_s": self.breakdown.of(rank),
            "waits_s": {
                "least": float(waits.least[pipeline_rank]),
                "mean": float(waits.mean[pipeline_rank]),
                "most": float(waits.most[pipeline_rank]),
            },
            "peak_memory_bytes": self.ledgers[pipeline_rank].peak,
            "memory_bytes": {category.value: memory.get(category, 0.0) for category in Category},
        }

    def _stragglers(self) -> dict[str, Any]:
        """How many ranks are slow, and the slowest."""
        found = self.stragglers
        slowest = [
            {
                "ranks": list(straggler.ranks),
                "pipeline_rank": min(straggler.kind, len(self.ledgers) - 1),
                "kernels_s": straggler.kernels,
                "longer_than_median": straggler.excess,
                "communication_longer_s": straggler.delay,
                "waits_s": straggler.waits,
            }
            for straggler in found.slowest
        ]
        return {"ranks": found.ranks, "slowest": slowest}
