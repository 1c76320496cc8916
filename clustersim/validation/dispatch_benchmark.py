"""What did a published MoE dispatch or combine move, and how long is it predicted to take?

Dispatcher tables print a bandwidth for one size and describe the benchmark in the notes: tokens x hidden,
top-k, expert groups, format, SM count, and whether only the kernels were timed or the whole call from
torch. The bandwidth is of what tables call the bottleneck: the tokens that a rank sends, each counted once
per node that has one of its experts (its own node included) if the network is crossed, else once per rank.

Defaults are those of the libraries' benchmarks: 4,096 tokens x 7,168, top-8 of about 256 experts in at most
4 groups, of as many groups as nodes; dispatch in FP8 with a scale per 128 elements, combine in BF16
(DeepEP@84d3d6f, tests/test_internode.py; 94a9f8f, tests/test_hybrid_ep.py: bandwidths of both).
"""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from clustersim.collectives.dispatch_fanout import reached_token_fraction
from clustersim.collectives.library import Library
from clustersim.collectives.library_files import load_dispatcher
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
_DEEPEP_V2_PATTERN: Final = re.compile(r"DeepEP V2|DeepEP README HEAD")  # the README's table since version 2
_TUNED_NOTE: Final = "of the best chunk size"  # text in the notes
_TUNED_MESSAGE_TOKENS: Final = 24  # best over EFA: uccl-project/uccl@da914a20, ep/bench/megatron/README.md
_FP8_SCALE_BLOCK: Final = 128  # FP8 elements that share a 4-byte scale
_MAX_SIZE: Final = 10**7


@dataclass(frozen=True)
class DispatchBenchmark:
    """One benchmark row.

    tokens_per_rank: tokens that each rank sends; sm_count: SMs of the dispatcher's kernels, None: its default;
    is_kernel_only: whether only the kernels were timed, not the call; message_tokens: tokens of a message over the
    network, None: the dispatcher's default.
    """

    collective: CollectiveType
    routing: TokenRouting
    tokens_per_rank: int
    sm_count: int | None
    is_kernel_only: bool
    message_tokens: int | None

    @property
    def payload(self) -> Bytes:
        """Bytes that a rank would send with one copy per token and expert."""
        return self.tokens_per_rank * self.routing.top_k * self.routing.token_bytes

    @cached_property
    def library(self) -> Library:
        """The packaged constants of the dispatcher."""
        return load_dispatcher(self.routing.dispatcher)

    def configured_library(self, library: Library, gpu_count: int) -> Library:
        """A dispatcher's constants for the row's SM count, GPU count and sizes of tokens and messages."""
        with_sms = library.with_sm_count(self.sm_count)
        return with_sms.with_token_bytes(self.routing.token_bytes, gpu_count, self.message_tokens)

    def predicted_seconds(self, fabric: Fabric, gpu_count: int, library: Library | None = None) -> Seconds:
        """Predicted time on gpu_count GPUs; library: constants, None: the packaged ones."""
        configured = self.configured_library(library or self.library, gpu_count)
        variant_costs = Tuner(fabric, configured, self.routing).evaluate_variants(
            self.collective, np.arange(gpu_count)[None]
        )
        call_seconds = float(select_variants(variant_costs, self.payload).seconds.max())
        return call_seconds * (configured.kernel_time_fraction if self.is_kernel_only else 1.0)

    def counted_bytes(self, fabric: Fabric, gpu_count: int) -> Bytes:
        """The bytes that published bandwidths refer to."""
        topology = Tuner(fabric, self.library, self.routing).group_topologies(np.arange(gpu_count)[None])[0]
        return self.tokens_per_rank * self.routing.token_bytes * _copies_per_token(topology, self.routing)


def _copies_per_token(topology: GroupTopology, routing: TokenRouting) -> float:
    """How often a token is counted: once per destination domain, or once per destination rank within one domain."""
    destination_count = topology.domain_count if topology.domain_count > 1 else topology.size
    return sum(
        reached_token_fraction(routing, destination / destination_count, (destination + 1) / destination_count)
        for destination in range(destination_count)
    )


def parse_dispatch_benchmark(case: ValidationCase) -> DispatchBenchmark:
    """Parse a row; raises CannotPredictError if its sizes are invalid."""
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
            f"line {case.line_number}: notes: {tokens} tokens x {hidden}, top-{top_k} of {local_experts * ranks} "
            "experts",
            is_expressible=False,
        )
    routing = TokenRouting(
        _dispatcher(case), local_experts * ranks, top_k, groups, group_limit, token_bytes=token_bytes
    )
    sm_count = _parse_integer(_SMS_PATTERN, text, 0) or None
    message_tokens = _TUNED_MESSAGE_TOKENS if _TUNED_NOTE in text else None
    return DispatchBenchmark(collective, routing, tokens, sm_count, "kernel only" in text, message_tokens)


def measured_dispatch_seconds(case: ValidationCase, counted_bytes: Bytes) -> Seconds:
    """The measured time; if only a bandwidth is printed, the time that it implies."""
    if case.text("time_us"):
        return case.positive_float("time_us") * 1e-6
    column = "algbw_GBps" if case.text("algbw_GBps") else "busbw_GBps"
    return counted_bytes / (case.positive_float(column) * 1e9)


def _token_bytes(collective: CollectiveType, text: str, hidden: int) -> Bytes:
    """Bytes of one token: dispatch is FP8 unless the row says otherwise."""
    is_bf16 = collective is CollectiveType.COMBINE or re.search(r"\bbf16\b", text) is not None
    return 2.0 * hidden if is_bf16 else hidden * (1.0 + 4.0 / _FP8_SCALE_BLOCK)


def _dispatcher(case: ValidationCase) -> TokenDispatcher:
    """The dispatcher library; DeepEP means version 1 unless the row says otherwise."""
    if "hybrid" in case.text("library").lower():
        return TokenDispatcher.HYBRIDEP
    if "uccl" in case.text("library").lower():
        return TokenDispatcher.DEEPEP_UCCL
    if "mori" in case.text("library").lower():
        return TokenDispatcher.MORI
    is_deepep_v2 = _DEEPEP_V2_PATTERN.search(f"{case.text('library')}; {case.text('locator')}")
    return TokenDispatcher.DEEPEP_V2 if is_deepep_v2 else TokenDispatcher.DEEPEP


def _parse_integer(pattern: re.Pattern[str], text: str, default: int) -> int:
    match = pattern.search(text)
    return int(match[1]) if match else default
