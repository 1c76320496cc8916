"""What did a published dispatch or combine move, and how long does the model say that it takes?

Tables of dispatchers print a bandwidth for one size, and say in words what was sent (`notes`): so many tokens of so
many numbers, top-k experts, in how many groups, in which format, by how many multiprocessors, and whether only the
kernels were timed or the call from torch. The bandwidth is of what tables call the bottleneck: the tokens that a rank
sends, each counted once for every node that has one of its experts (its own among them) where the network is crossed,
else once for every rank.

What is not stated is as in the benchmarks of the libraries: 4,096 tokens of 7,168, top-8 experts of about 256 of at
most 4 of as many groups as there are nodes; dispatch in FP8 with a scale for each 128 numbers, combine in BF16
(DeepEP@84d3d6f, tests/test_internode.py; 94a9f8f, tests/test_hybrid_ep.py: bandwidths of both).
"""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from clustersim.collectives.dispatch_fanout import reached_token_fraction
from clustersim.collectives.library import Library, load_dispatcher
from clustersim.collectives.phase import GroupTopology
from clustersim.collectives.tuner import Tuner, select_variants
from clustersim.common.units import Bytes, Seconds
from clustersim.hardware.topology import Fabric
from clustersim.program.task import CollectiveType, TokenDispatcher, TokenRouting
from clustersim.validation.cases import CannotPredictError, ValidationCase

COLLECTIVE_BY_NAME: Final = {"moe_dispatch": CollectiveType.DISPATCH, "moe_combine": CollectiveType.COMBINE}
_DEFAULT_TOKENS, _DEFAULT_HIDDEN, _DEFAULT_TOP_K, _DEFAULT_EXPERTS, _DEFAULT_GROUP_LIMIT = 4096, 7168, 8, 256, 4
_SIZE_PATTERN: Final = re.compile(r"(\d+) tokens x (\d+) hidden")
_SMS_PATTERN: Final = re.compile(r"(\d+) SMs")
_TOP_K_PATTERN: Final = re.compile(r"top-(\d+)(?! groups)")
_GROUPS_PATTERN: Final = re.compile(r"top-(\d+) groups")
_LOCAL_EXPERTS_PATTERN: Final = re.compile(r"(\d+) local experts")
_DEEPEP_V2_PATTERN: Final = re.compile(r"DeepEP V2|DeepEP README HEAD")  # the table of the README since version 2
_FP8_SCALE_BLOCK: Final = 128  # numbers of FP8 with a common scale of 4 bytes
_MAX_SIZE: Final = 10**7


@dataclass(frozen=True)
class DispatchBenchmark:
    """One row.

    tokens: that each rank sends; sms: that the dispatcher's kernels take, None: as usual; kernels: whether only these
    were timed.
    """

    collective: CollectiveType
    routing: TokenRouting
    tokens_per_rank: int
    sm_count: int | None
    is_kernel_only: bool

    @property
    def payload(self) -> Bytes:
        """Bytes of a row for each token and expert."""
        return self.tokens_per_rank * self.routing.top_k * self.routing.token_bytes

    @cached_property
    def library(self) -> Library:
        """The dispatcher, as shipped."""
        return load_dispatcher(self.routing.dispatcher)

    def configured_library(self, library: Library, gpu_count: int) -> Library:
        """Constants of a dispatcher as the row has it: on its SMs and GPUs, with rows of its size."""
        return library.with_sm_count(self.sm_count).with_token_bytes(self.routing.token_bytes, gpu_count)

    def predicted_seconds(self, fabric: Fabric, gpu_count: int, library: Library | None = None) -> Seconds:
        """What it takes on so many GPUs, by shipped constants or others."""
        configured = self.configured_library(library or self.library, gpu_count)
        variant_costs = Tuner(fabric, configured, self.routing).evaluate_variants(
            self.collective, np.arange(gpu_count)[None]
        )
        call_seconds = float(select_variants(variant_costs, self.payload).seconds.max())
        return call_seconds * (configured.kernel_share if self.is_kernel_only else 1.0)

    def counted_bytes(self, fabric: Fabric, gpu_count: int) -> Bytes:
        """The bytes that bandwidths are of."""
        topology = Tuner(fabric, self.library, self.routing).group_topologies(np.arange(gpu_count)[None])[0]
        return self.tokens_per_rank * self.routing.token_bytes * _copies_per_token(topology, self.routing)


def _copies_per_token(topology: GroupTopology, routing: TokenRouting) -> float:
    """How often a token is counted: once for each domain, or for each rank of one."""
    destination_count = topology.domain_count if topology.domain_count > 1 else topology.size
    return sum(
        reached_token_fraction(routing, destination / destination_count, (destination + 1) / destination_count)
        for destination in range(destination_count)
    )


def parse_dispatch_benchmark(case: ValidationCase) -> DispatchBenchmark:
    """What a row says; raise CannotPredictError where it says something else."""
    text = f"{case.text('library')}; {case.text('notes')}; {case.text('locator')}"
    tokens, hidden = (
        map(int, match.groups()) if (match := _SIZE_PATTERN.search(text)) else (_DEFAULT_TOKENS, _DEFAULT_HIDDEN)
    )
    ranks, nodes = case.positive_int("n_gpus"), case.positive_int("nodes", 1)
    collective = COLLECTIVE_BY_NAME[case.text("collective")]
    local_experts = _parse_integer(_LOCAL_EXPERTS_PATTERN, text, 0) or max(1, _DEFAULT_EXPERTS // ranks)
    is_group_limited = nodes > 1 and "random uniform" not in text
    groups, group_limit = (
        (nodes, min(_parse_integer(_GROUPS_PATTERN, text, _DEFAULT_GROUP_LIMIT), nodes))
        if is_group_limited
        else (1, None)
    )
    top_k, token_bytes = _parse_integer(_TOP_K_PATTERN, text, _DEFAULT_TOP_K), _token_bytes(collective, text, hidden)
    if (
        not 0 < top_k <= local_experts * ranks
        or not 0 < tokens * hidden <= _MAX_SIZE**2
        or local_experts * ranks > _MAX_SIZE
    ):
        raise CannotPredictError(
            f"line {case.line_number}: notes: {tokens} tokens x {hidden}, top-{top_k} of {local_experts * ranks} experts",
            is_expressible=False,
        )
    routing = TokenRouting(
        _dispatcher(case), local_experts * ranks, top_k, groups, group_limit, token_bytes=token_bytes
    )
    return DispatchBenchmark(
        collective, routing, tokens, _parse_integer(_SMS_PATTERN, text, 0) or None, "kernel only" in text
    )


def measured_dispatch_seconds(case: ValidationCase, counted_bytes: Bytes) -> Seconds:
    """The measured time, or what the printed bandwidth says that it was."""
    if case.text("time_us"):
        return case.positive_float("time_us") * 1e-6
    column = "algbw_GBps" if case.text("algbw_GBps") else "busbw_GBps"
    return counted_bytes / (case.positive_float(column) * 1e9)


def _token_bytes(collective: CollectiveType, text: str, hidden: int) -> Bytes:
    """Bytes of one token: dispatch is in FP8 unless the row says otherwise."""
    is_bf16 = collective is CollectiveType.COMBINE or re.search(r"\bbf16\b", text) is not None
    return 2.0 * hidden if is_bf16 else hidden * (1.0 + 4.0 / _FP8_SCALE_BLOCK)


def _dispatcher(case: ValidationCase) -> TokenDispatcher:
    """Whose kernels: DeepEP's are of version 1 unless the row says otherwise."""
    if "hybrid" in case.text("library").lower():
        return TokenDispatcher.HYBRIDEP
    is_deepep_v2 = _DEEPEP_V2_PATTERN.search(f"{case.text('library')}; {case.text('locator')}")
    return TokenDispatcher.DEEPEP_V2 if is_deepep_v2 else TokenDispatcher.DEEPEP


def _parse_integer(pattern: re.Pattern[str], text: str, default: int) -> int:
    match = pattern.search(text)
    return int(match[1]) if match else default
