"""What does the training framework cost in addition to the kernels of a step: launches, memory, overheads?

The host (the CPU process that drives one GPU) launches kernels one after the other, ahead of the GPU
where it can: `launch_seconds` is its time per forward kernel, including the Python around it,
`backward_launch_seconds` per backward kernel, including autograd and parameter hooks. Kernels are those
that the simulator counts; some are several in reality. `collective_seconds` is its time per collective:
the library's own launch, the events and waits that order streams, and the work object the caller may wait
for. `moe_launch_seconds` is its time per kernel of a MoE model, in any pass: the kernels of such a model
are short and its host gets ahead less often, so launch time is exposed. With CUDA graphs the kernels and
collectives of a pass are captured once and launched as one graph, in `graph_launch_seconds`: all of a
pass (Megatron-Core's `full_iteration`, or one graph per layer, whose launches are few compared with its
contents), or all that does not run on expert ranks (its scopes `attn`, `moe_router` and
`moe_preprocess`), since the number of received tokens is not known in advance. Assumed: the GPU runs
graph nodes as it runs kernels launched ahead. `cost.host_launch` says when launches are exposed.
`p2p_seconds` is what hosts add to each message between pipeline stages (`cost.p2p_overhead`). Caching
allocator, communicators and matmul workspaces take device memory in addition to tensors; private memory
pools of graphs are not counted.

Host measurements of a measurement record replace these constants where the framework launches in the same
way (`measured_host_use`; `cost.measured_host`). `compiled` says that layers are compiled
(`torch.compile`), whose launch costs come from such a record; without one a compiled layer is launched
like any other, which is somewhat too slow.

Constants belong to a software generation, in `topologies/frameworks`, each with its source.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Final

from clustersim.common.data_files import find_file, read_mapping
from clustersim.common.errors import InputError
from clustersim.common.mapping_reader import MappingReader
from clustersim.common.units import Bytes, Dimension, Seconds
from clustersim.model.overheads import NO_OVERHEADS, Accumulation, BatchTransfer, Grouping, LossReport, Overheads
from clustersim.model.training import FullRecompute, Recompute, SelectiveOpRecompute

OVERHEAD_FLAGS: Final = tuple(
    dataclass_field.name for dataclass_field in fields(Overheads) if dataclass_field.type is bool
)
"""Names of the boolean overheads."""
_MAX_SOFTMAX_KEYS: Final = 2**31


class GraphCapture(Enum):
    """Which kernels of a pass are in CUDA graphs."""

    NOTHING = "nothing"
    OUTSIDE_EXPERTS = "outside_experts"  # everything except expert computation and token dispatch
    ALL = "all"


class MeasuredHostUse(Enum):
    """Which host measurements (`cost.calibration_record.LaunchMode`) replace a framework's launch constants."""

    NOTHING = "nothing"  # none: its Python and autograd differ
    EAGER = "eager"  # eager modules on current autograd, and CUDA graphs; it has its own sharding and model parallelism
    TORCH = "torch"  # also `fully_shard`, DTensor and `torch.compile`


@dataclass(frozen=True, slots=True)
class SupportedLayouts:
    """What a framework supports, by scenario keywords: data-parallel strategies and schedules."""

    data: tuple[str, ...] = ("ddp", "zero1", "zero2", "fsdp", "hsdp")
    data_with_pipeline: tuple[str, ...] = ("ddp", "zero1", "fsdp")
    schedules: tuple[str, ...] = ("1f1b", "interleaved")


@dataclass(frozen=True, slots=True)
class Framework:
    """Host launch times, memory and overheads of a training framework.

    fragmentation: reserved over allocated bytes at the peak; selective_fragmentation, full_fragmentation: the same
    where single operations or some layers are recomputed, or all (None: the same); communicator_bytes: buffers of
    one process
    group; workspace_bytes: permanent allocations of libraries; grouped_workspace_bytes: the same for grouped
    matmuls, if any; deallocate_pipeline_outputs: whether pipeline stages free sent outputs, where a scenario does not
    say; torch_fsdp: FSDP is PyTorch's, whose shards are the master weights, and gradients exist from backward
    until the optimizer has run (`Footprint`); launch_seconds, backward_launch_seconds: host seconds per
    forward (and optimizer) and backward kernel; collective_seconds: per collective, None: as per kernel;
    eager_call_seconds: per tensor operation without autograd and modules; graph_launch_seconds: per CUDA graph,
    None: not supported; p2p_seconds: of hosts, per message between pipeline stages; moe_launch_seconds: per
    kernel of a MoE model, None: as for dense models; graph_capture: what CUDA graphs contain; compiled: whether
    layers are compiled;
    measured_host_use: which host measurements of a record replace these constants; early_stop: activation
    checkpoints stop recomputing once all that backward needs is available; overheads: extra work per step;
    supported_layouts: which layouts it has, for the layout search.
    """

    fragmentation: float
    communicator_bytes: Bytes
    workspace_bytes: Bytes = 0.0
    grouped_workspace_bytes: Bytes = 0.0
    deallocate_pipeline_outputs: bool = True
    torch_fsdp: bool = False
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
    selective_fragmentation: float | None = None
    full_fragmentation: float | None = None

    def fragmentation_with(self, recompute: Recompute) -> float:
        """Reserved over allocated bytes at the peak with this recomputation; single modules of layers count as none."""
        match recompute:
            case FullRecompute(None):
                return self.full_fragmentation or self.fragmentation
            case FullRecompute() | SelectiveOpRecompute():
                return self.selective_fragmentation or self.fragmentation
        return self.fragmentation

    @property
    def uses_cuda_graphs(self) -> bool:
        """Whether anything is captured in CUDA graphs."""
        return self.graph_capture is not GraphCapture.NOTHING

    def with_moe_launches(self, host_slowdown: float = 1.0) -> "Framework":
        """The framework as it launches a MoE model; host_slowdown: of this host relative to an x86 server."""
        if self.moe_launch_seconds is None:
            return self
        launch_seconds = host_slowdown * self.moe_launch_seconds
        return replace(
            self, launch_seconds=launch_seconds, backward_launch_seconds=launch_seconds, moe_launch_seconds=None
        )

    def with_cuda_graphs(self, graph_capture: GraphCapture = GraphCapture.ALL) -> "Framework":
        """The framework with passes captured in CUDA graphs; raise InputError where it does not support them."""
        if self.graph_launch_seconds is None:
            raise InputError(f"cuda_graphs: {self.name} captures none; leave it out, or name a framework that does")
        return replace(self, graph_capture=graph_capture)

    def with_compiled(self) -> "Framework":
        """The framework with compiled layers; raise InputError where it does not compile layers."""
        if self.measured_host_use is not MeasuredHostUse.TORCH:
            raise InputError(
                f"torch_compile: {self.name} compiles no layers; leave it out, or name a framework that does: pytorch"
            )
        return replace(self, compiled=True)

    def with_launch_seconds(self, forward_seconds: Seconds | None, backward_seconds: Seconds | None) -> "Framework":
        """The framework with user-given launch times, which no measurement record overrides; None: not given.

        Backward launches take as long as forward ones unless given.
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
    """Read topologies/frameworks/NAME.yaml, or a file of the same format."""
    path = find_file("frameworks", name_or_path)
    section = MappingReader(path, read_mapping(path))
    section.reject_renamed_keys("frameworks")
    memory, host, checkpoint = (section.get_section(name) for name in ("memory", "host", "checkpoint"))
    fragmentation, selective_fragmentation, full_fragmentation = _read_fragmentation(memory)
    framework = Framework(
        fragmentation=fragmentation,
        selective_fragmentation=selective_fragmentation,
        full_fragmentation=full_fragmentation,
        communicator_bytes=memory.get_quantity("communicator", Dimension.SIZE, allow_zero=True),
        workspace_bytes=memory.get_quantity("workspace", Dimension.SIZE, allow_zero=True),
        grouped_workspace_bytes=_read_bytes(memory, "grouped_workspace"),
        deallocate_pipeline_outputs=memory.get_bool("deallocate_pipeline_outputs"),
        torch_fsdp=memory.get_bool("torch_fsdp"),
        launch_seconds=host.get_quantity("launch", Dimension.TIME, allow_zero=True),
        backward_launch_seconds=host.get_quantity("backward_launch", Dimension.TIME, allow_zero=True),
        p2p_seconds=host.get_quantity("p2p", Dimension.TIME, allow_zero=True),
        collective_seconds=_read_seconds(host, "collective"),
        eager_call_seconds=host.get_quantity("eager_call", Dimension.TIME, allow_zero=True),
        graph_launch_seconds=_read_seconds(host, "graph_launch"),
        moe_launch_seconds=_read_seconds(host, "moe_launch"),
        measured_host_use=MeasuredHostUse(
            host.get_choice("measured_host_use", *(member.value for member in MeasuredHostUse))
        ),
        early_stop=checkpoint.get_bool("early_stop"),
        name=path.stem,
        overheads=_read_overheads(section.get_section("overheads")) if section.has_key("overheads") else NO_OVERHEADS,
        supported_layouts=_read_supported_layouts(section.get_section("supported_layouts"))
        if section.has_key("supported_layouts")
        else SupportedLayouts(),
    )
    section.get_text("description")
    section.get_section("sources").get_text_mapping()
    section.reject_unknown_keys()
    return framework


def _read_supported_layouts(section: MappingReader) -> SupportedLayouts:
    return SupportedLayouts(
        **{layout_field.name: section.get_text_list(layout_field.name) for layout_field in fields(SupportedLayouts)}
    )


def _read_overheads(section: MappingReader) -> Overheads:
    """Read the overheads of a framework file; what the file does not name is off."""
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
        loss_averaging=LossReport(section.get_choice("loss_averaging", *(member.value for member in LossReport))),
        batch_transfer=BatchTransfer(section.get_choice("batch_transfer", *(member.value for member in BatchTransfer))),
    )


def _read_fragmentation(memory: MappingReader) -> tuple[float, float, float]:
    """Fragmentation with no, selective and full recomputation: one number, or one for each."""
    if not isinstance(memory.get_value("fragmentation"), Mapping):
        factor = memory.get_float("fragmentation", min_value=1.0)
        return factor, factor, factor
    by_recompute = memory.get_section("fragmentation")
    none, selective, full = (by_recompute.get_float(name, min_value=1.0) for name in ("none", "selective", "full"))
    return none, selective, full


def _read_bytes(section: MappingReader, key: str) -> Bytes:
    """Bytes; 0 where the file does not name them."""
    return section.get_quantity(key, Dimension.SIZE, allow_zero=True) if section.has_key(key) else 0.0


def _read_seconds(host: MappingReader, key: str) -> Seconds | None:
    """Host seconds of one operation; None if the file does not name them."""
    return host.get_quantity(key, Dimension.TIME, allow_zero=True) if host.has_key(key) else None
