"""Which communication does a framework overlap, and in which pieces, where a scenario does not say?

`layout` of a file in topologies/frameworks, which holds for what a user leaves out and for what a published run does
not state.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final

from clustersim.common.mapping_reader import MappingReader
from clustersim.common.units import Bytes, Dimension

MEGATRON_BUCKETS: Final = "megatron"
"""Word for Megatron-LM's rule of bucket sizes."""
_GATHERING_STAGES: Final = ("zero1", "zero2")


class GatherOverlap(Enum):
    """Whether updated parameters of a ZeRO stage are gathered while the next forward runs."""

    NEVER = "never"
    POSSIBLE = "possible"  # if asked to
    DEFAULT = "default"


class SendOverlap(Enum):
    """In which pipelines a stage computes while its output is sent."""

    NEVER = "never"
    CHUNKS = "chunks"  # of several chunks a rank
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class LayoutDefaults:
    """How a framework communicates.

    overlap_grad_reduce: gradients are reduced during backward, where parameters are not sharded; overlapped_gathers:
    ZeRO stages (`zero1`, `zero2`) whose updated parameters are gathered while the next forward runs; optional_gathers:
    those of which it can do so; overlap_p2p_comm: where stages compute while they send;
    async_tensor_model_parallel_allreduce: backward's tensor-parallel collectives overlap with weight gradients; copies:
    data gathered from shards of parameters is copied into each parameter; no_sync: FSDP reduces gradients with the last
    microbatch only (FSDP1's `no_sync`, FSDP2's `set_requires_gradient_sync(False)`); bucket: bytes of a bucket of
    gradients, or the word `megatron`, None: as the strategy has it.
    """

    overlap_grad_reduce: bool = True
    overlapped_gathers: tuple[str, ...] = ()
    optional_gathers: tuple[str, ...] = ()
    overlap_p2p_comm: SendOverlap = SendOverlap.ALWAYS
    async_tensor_model_parallel_allreduce: bool = True
    copies: bool = True
    no_sync: bool = False
    bucket: Bytes | str | None = None

    def overlaps_sends(self, *, has_chunks: bool) -> bool:
        """Whether a pipeline's stages compute while they send. has_chunks: ranks have several stages."""
        by_pipeline = {SendOverlap.NEVER: False, SendOverlap.CHUNKS: has_chunks, SendOverlap.ALWAYS: True}
        return by_pipeline[self.overlap_p2p_comm]


ALL_OVERLAPPED: Final = LayoutDefaults()
"""Of no framework."""


def read_layout_defaults(section: MappingReader) -> LayoutDefaults:
    """Read `layout` of a framework's file."""
    gathers = section.get_section("overlap_param_gather")
    overlaps = {name: gathers.get_member(name, GatherOverlap) for name in _GATHERING_STAGES if gathers.has_key(name)}
    return LayoutDefaults(
        overlap_grad_reduce=section.get_bool("overlap_grad_reduce", required=True),
        overlapped_gathers=tuple(name for name, overlap in overlaps.items() if overlap is GatherOverlap.DEFAULT),
        optional_gathers=tuple(name for name, overlap in overlaps.items() if overlap is not GatherOverlap.NEVER),
        overlap_p2p_comm=section.get_member("overlap_p2p_comm", SendOverlap, required=True),
        async_tensor_model_parallel_allreduce=section.get_bool("async_tensor_model_parallel_allreduce", required=True),
        copies=section.get_bool("copies", required=True),
        no_sync=section.get_bool("no_sync"),
        bucket=_read_bucket(section) if section.has_key("bucket") else None,
    )


def _read_bucket(section: MappingReader) -> Bytes | str:
    is_rule = section.get_value("bucket") == MEGATRON_BUCKETS
    return MEGATRON_BUCKETS if is_rule else section.get_quantity("bucket", Dimension.SIZE)
