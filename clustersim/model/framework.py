"""What does the software of a training run cost beside the kernels that it runs?

A framework's host (the CPU process that drives one GPU) launches kernels one after the other, ahead of the GPU where it
can: `launch` is what it needs for one kernel of forward, with the Python around it, `backward_launch` of backward, with
autograd and the hooks of parameters. Kernels are those that the simulator counts, of which some are several in reality.
`collective` is what it needs for one collective: the library's own launch, the events and waits by which streams follow
each other, and the object that the caller may wait for. `moe_launch_seconds` is what a kernel of a model with experts
needs, whichever pass it is of: such a model's kernels are short, and its host gets ahead of them less often, so that
what a launch costs is seen. With CUDA graphs the kernels and collectives of a pass are captured once and launched
together, which takes `graph`: of the whole of a pass (Megatron-Core's `full_iteration`, or a graph for each layer,
whose launches are few beside what is in them), or of what is not on the ranks of experts (its scopes `attn`,
`moe_router` and `moe_preprocess`), since nobody knows beforehand how many rows come there. Assumed: the GPU runs the
nodes of a graph as it runs kernels that are launched ahead of it. `cost.host_launch` says when launching shows. `message`
is what hosts add to each message between pipeline stages (`cost.p2p_overhead`). The caching allocator, the communicators and
the workspaces of matrix products take device memory beside tensors; what graphs keep in pools of their own is not
counted.

What was measured of the host that a record is of stands for such constants where the framework launches in the same way
(`recorded`; `cost.measured_host`). `compiled` says that layers are compiled (`torch.compile`), whose launches cost what
such a record says; without one a compiled layer is launched like any other, which is rather too slow.

Constants belong to a generation of software, in `topologies/frameworks`, each with its source.
"""

from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Final

from clustersim.common.data_files import find_file, read_mapping
from clustersim.common.errors import InputError
from clustersim.common.mapping_reader import MappingReader
from clustersim.common.units import Bytes, Dimension, Seconds
from clustersim.model.overheads import NO_OVERHEADS, Accumulation, BatchTransfer, Grouping, LossReport, Overheads

OVERHEAD_FLAGS: Final = tuple(
    dataclass_field.name for dataclass_field in fields(Overheads) if dataclass_field.type is bool
)
"""Overheads that are either there or not."""
_MAX_SOFTMAX_KEYS: Final = 2**31


class GraphCapture(Enum):
    """What of a pass is in CUDA graphs."""

    NOTHING = "nothing"
    OUTSIDE_EXPERTS = "outside_experts"  # all but what is done with rows on the ranks of experts, and sent there
    ALL = "all"


class MeasuredHostUse(Enum):
    """Which of a record's rows of a host (`cost.record.HostState`) stand for a framework's own launches."""

    NOTHING = "nothing"  # its Python and autograd are others
    EAGER = "eager"  # modules on today's autograd, and CUDA graphs; it shards and splits models in its own way
    TORCH = "torch"  # also those of `fully_shard`, DTensor and `torch.compile`


@dataclass(frozen=True, slots=True)
class SupportedLayouts:
    """What a framework runs, in the words of scenario files: strategies of data parallelism, and schedules."""

    data: tuple[str, ...] = ("ddp", "zero1", "zero2", "fsdp", "hsdp")
    data_beside_pipeline: tuple[str, ...] = ("ddp", "zero1", "fsdp")
    schedules: tuple[str, ...] = ("1f1b", "interleaved")


@dataclass(frozen=True, slots=True)
class Framework:
    """fragmentation: reserved over allocated bytes at the peak; communicator: bytes of one process group's buffers.

    workspace: bytes that libraries take from the allocator for good; grouped_workspace: and for grouped products, if
    there are some; release_outputs: whether pipeline stages free
    what they have sent, where a scenario does not say it; launch, backward_launch: host seconds for one kernel of
    forward (and the optimizer), and of backward; collective: for one collective, None: as for a kernel; call: for a
    tensor operation without autograd and modules around it; graph: for a CUDA graph, None: there are none; message: of
    hosts, for one message between pipeline stages; experts_launch: for one kernel of a model with experts, None: as
    for others; captured: what of passes is in graphs; compiled: whether layers are; recorded: what of a record's host
    stands for this one's; early_stop: its activation checkpoints stop once all is there that backward needs; overheads:
    what it does in a step beside the model; runs: which layouts it has, where somebody looks for the best.
    """

    fragmentation: float
    communicator_bytes: Bytes
    workspace_bytes: Bytes = 0.0
    grouped_workspace_bytes: Bytes = 0.0
    release_outputs: bool = True
    launch_seconds: Seconds = 0.0
    backward_launch_seconds: Seconds = 0.0
    p2p_seconds: Seconds = 0.0
    collective_seconds: Seconds | None = None
    eager_call_seconds: Seconds = 0.0
    graph_launch_seconds: Seconds | None = None
    moe_launch_seconds: Seconds | None = None
    graph_capture: GraphCapture = GraphCapture.NOTHING
    compiled: bool = False
    measured_host_use: MeasuredHostUse = MeasuredHostUse.NOTHING
    early_stop: bool = False
    name: str = "framework"
    overheads: Overheads = NO_OVERHEADS
    supported_layouts: SupportedLayouts = SupportedLayouts()

    @property
    def uses_cuda_graphs(self) -> bool:
        """Whether anything is captured."""
        return self.graph_capture is not GraphCapture.NOTHING

    def with_moe_launches(self, host_slowdown: float = 1.0) -> "Framework":
        """The same, as it launches a model with experts on a host that takes `pace` times as long as an x86 server."""
        if self.moe_launch_seconds is None:
            return self
        launch_seconds = host_slowdown * self.moe_launch_seconds
        return replace(
            self, launch_seconds=launch_seconds, backward_launch_seconds=launch_seconds, moe_launch_seconds=None
        )

    def with_cuda_graphs(self, graph_capture: GraphCapture = GraphCapture.ALL) -> "Framework":
        """The same, its passes captured in CUDA graphs; raise InputError where it has none."""
        if self.graph_launch_seconds is None:
            raise InputError(f"cuda_graphs: {self.name} captures none; leave it out, or name a framework that does")
        return replace(self, graph_capture=graph_capture)

    def with_compiled(self) -> "Framework":
        """The same, its layers compiled; raise InputError where it compiles none."""
        if self.measured_host_use is not MeasuredHostUse.TORCH:
            raise InputError(
                f"compiled: {self.name} compiles no layers; leave it out, or name a framework that does: pytorch"
            )
        return replace(self, compiled=True)

    def with_launch_seconds(self, forward_seconds: Seconds | None, backward_seconds: Seconds | None) -> "Framework":
        """The same, with what somebody says of its launches, for which no record stands any more; None: nothing said.

        Backward's take as long as forward's unless that is said.
        """
        if forward_seconds is None and backward_seconds is None:
            return self
        launch_seconds = self.launch_seconds if forward_seconds is None else forward_seconds
        backward_launch_seconds = launch_seconds if backward_seconds is None else backward_seconds
        changed = replace(
            self,
            launch_seconds=launch_seconds,
            backward_launch_seconds=backward_launch_seconds,
            measured_host_use=MeasuredHostUse.NOTHING,
        )
        return replace(changed, moe_launch_seconds=None)


def load_framework(name_or_path: str = "pytorch") -> Framework:
    """Read topologies/frameworks/NAME.yaml, or a file of the same form."""
    path = find_file("frameworks", name_or_path)
    section = MappingReader(path, read_mapping(path))
    memory, host, checkpoint = (section.get_section(name) for name in ("memory", "host", "checkpoint"))
    framework = Framework(
        fragmentation=memory.get_float("fragmentation", min_value=1.0),
        communicator_bytes=memory.get_quantity("communicator", Dimension.SIZE, allow_zero=True),
        workspace_bytes=memory.get_quantity("workspace", Dimension.SIZE, allow_zero=True),
        grouped_workspace_bytes=_read_bytes(memory, "grouped_workspace"),
        release_outputs=memory.get_bool("release_outputs"),
        launch_seconds=host.get_quantity("launch", Dimension.TIME, allow_zero=True),
        backward_launch_seconds=host.get_quantity("backward_launch", Dimension.TIME, allow_zero=True),
        p2p_seconds=host.get_quantity("message", Dimension.TIME, allow_zero=True),
        collective_seconds=_read_seconds(host, "collective"),
        eager_call_seconds=host.get_quantity("call", Dimension.TIME, allow_zero=True),
        graph_launch_seconds=_read_seconds(host, "graph"),
        moe_launch_seconds=_read_seconds(host, "experts_launch"),
        measured_host_use=MeasuredHostUse(host.get_choice("recorded", *(member.value for member in MeasuredHostUse))),
        early_stop=checkpoint.get_bool("early_stop"),
        name=path.stem,
        overheads=_read_overheads(section.get_section("overheads")) if section.has_key("overheads") else NO_OVERHEADS,
        supported_layouts=_read_supported_layouts(section.get_section("runs"))
        if section.has_key("runs")
        else SupportedLayouts(),
    )
    section.get_text("description")
    section.get_section("sources").get_text_mapping()
    section.reject_unknself_keys()
    return framework


def _read_supported_layouts(section: MappingReader) -> SupportedLayouts:
    return SupportedLayouts(
        **{
            layout_field.name: tuple(section.get_text_list(layout_field.name))
            for layout_field in fields(SupportedLayouts)
        }
    )


def _read_overheads(section: MappingReader) -> Overheads:
    """What a framework does; nothing of what the file does not name."""
    accumulation = (
        section.get_choice("accumulation", *(member.value for member in Accumulation))
        if section.has_key("accumulation")
        else None
    )
    grouping = (
        section.get_choice("grouping", *(member.value for member in Grouping)) if section.has_key("grouping") else None
    )
    flags = {name: section.get_bool(name) for name in OVERHEAD_FLAGS}
    return Overheads(
        **flags,
        accumulation=None if accumulation is None else Accumulation(accumulation),
        grouping=None if grouping is None else Grouping(grouping),
        softmax_keys=section.get_int("softmax_keys", max_value=_MAX_SOFTMAX_KEYS)
        if section.has_key("softmax_keys")
        else None,
        loss=LossReport(section.get_choice("loss", *(member.value for member in LossReport))),
        batches=BatchTransfer(section.get_choice("batches", *(member.value for member in BatchTransfer))),
    )


def _read_bytes(section: MappingReader, key: str) -> Bytes:
    """Bytes; none where the file does not name them."""
    return section.get_quantity(key, Dimension.SIZE, allow_zero=True) if section.has_key(key) else 0.0


def _read_seconds(host: MappingReader, key: str) -> Seconds | None:
    """What the host needs for something, if the file says so."""
    return host.get_quantity(key, Dimension.TIME, allow_zero=True) if host.has_key(key) else None
