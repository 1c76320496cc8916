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
from clustersim.validation.cases import CannotPredictError, Case

KINDS: Final = {"moe_dispatch": CollectiveType.DISPATCH, "moe_combine": CollectiveType.COMBINE}
_TOKENS, _HIDDEN, _TOP_K, _EXPERTS, _LIMIT = 4096, 7168, 8, 256, 4
_SIZE: Final = re.compile(r"(\d+) tokens x (\d+) hidden")
_SMS: Final = re.compile(r"(\d+) SMs")
_TOP: Final = re.compile(r"top-(\d+)(?! groups)")
_GROUPS: Final = re.compile(r"top-(\d+) groups")
_LOCAL: Final = re.compile(r"(\d+) local experts")
_SECOND: Final = re.compile(r"DeepEP V2|DeepEP README HEAD")  # the table of the README since version 2
_SCALED: Final = 128  # numbers of FP8 with a common scale of 4 bytes
_MOST: Final = 10**7


@dataclass(frozen=True)
class Dispatched:
    """One row.

    tokens: that each rank sends; sms: that the dispatcher's kernels take, None: as usual; kernels: whether only these
    were timed.
    """

    collective: CollectiveType
    routing: TokenRouting
    tokens: int
    sms: int | None
    kernels: bool

    @property
    def payload(self) -> Bytes:
        """Bytes of a row for each token and expert."""
        return self.tokens * self.routing.top_k * self.routing.token_bytes

    @cached_property
    def library(self) -> Library:
        """The dispatcher, as shipped."""
        return load_dispatcher(self.routing.dispatcher)

    def used(self, library: Library, gpus: int) -> Library:
        """Constants of a dispatcher as the row has it: on its SMs and GPUs, with rows of its size."""
        return library.with_sm_count(self.sms).with_token_bytes(self.routing.token_bytes, gpus)

    def seconds(self, fabric: Fabric, gpus: int, library: Library | None = None) -> Seconds:
        """What it takes on so many GPUs, by shipped constants or others."""
        used = self.used(library or self.library, gpus)
        choices = Tuner(fabric, used, self.routing).evaluate_variants(self.collective, np.arange(gpus)[None])
        called = float(select_variants(choices, self.payload).seconds.max())
        return called * (used.kernel_share if self.kernels else 1.0)

    def counted(self, fabric: Fabric, gpus: int) -> Bytes:
        """The bytes that bandwidths are of."""
        arranged = Tuner(fabric, self.library, self.routing).group_topologies(np.arange(gpus)[None])[0]
        return self.tokens * self.routing.token_bytes * _copies(arranged, self.routing)


def _copies(arranged: GroupTopology, routing: TokenRouting) -> float:
    """How often a token is counted: once for each domain, or for each rank of one."""
    parts = arranged.domain_count if arranged.domain_count > 1 else arranged.size
    return sum(reached_token_fraction(routing, part / parts, (part + 1) / parts) for part in range(parts))


def dispatched(case: Case) -> Dispatched:
    """What a row says; raise CannotPredictError where it says something else."""
    words = f"{case.text('library')}; {case.text('notes')}; {case.text('locator')}"
    tokens, hidden = map(int, found.groups()) if (found := _SIZE.search(words)) else (_TOKENS, _HIDDEN)
    ranks, nodes = case.whole("n_gpus"), case.whole("nodes", 1)
    kind = KINDS[case.text("collective")]
    local = _number(_LOCAL, words, 0) or max(1, _EXPERTS // ranks)
    limited = nodes > 1 and "random uniform" not in words
    groups, limit = (nodes, min(_number(_GROUPS, words, _LIMIT), nodes)) if limited else (1, None)
    top_k, row = _number(_TOP, words, _TOP_K), _row(kind, words, hidden)
    if not 0 < top_k <= local * ranks or not 0 < tokens * hidden <= _MOST**2 or local * ranks > _MOST:
        raise CannotPredictError(
            f"line {case.line}: notes: {tokens} tokens x {hidden}, top-{top_k} of {local * ranks} experts", owed=False
        )
    routing = TokenRouting(_dispatcher(case), local * ranks, top_k, groups, limit, token_bytes=row)
    return Dispatched(kind, routing, tokens, _number(_SMS, words, 0) or None, "kernel only" in words)


def seconds_of(case: Case, counted: Bytes) -> Seconds:
    """The measured time, or what the printed bandwidth says that it was."""
    if case.text("time_us"):
        return case.number("time_us") * 1e-6
    column = "algbw_GBps" if case.text("algbw_GBps") else "busbw_GBps"
    return counted / (case.number(column) * 1e9)


def _row(kind: CollectiveType, words: str, hidden: int) -> Bytes:
    """Bytes of one token: dispatch is in FP8 unless the row says otherwise."""
    wide = kind is CollectiveType.COMBINE or re.search(r"\bbf16\b", words) is not None
    return 2.0 * hidden if wide else hidden * (1.0 + 4.0 / _SCALED)


def _dispatcher(case: Case) -> TokenDispatcher:
    """Whose kernels: DeepEP's are of version 1 unless the row says otherwise."""
    if "hybrid" in case.text("library").lower():
        return TokenDispatcher.HYBRIDEP
    second = _SECOND.search(f"{case.text('library')}; {case.text('locator')}")
    return TokenDispatcher.DEEPEP_V2 if second else TokenDispatcher.DEEPEP


def _number(pattern: re.Pattern[str], words: str, otherwise: int) -> int:
    found = pattern.search(words)
    return int(found[1]) if found else otherwise
