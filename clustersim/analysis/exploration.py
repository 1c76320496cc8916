"""What does a page need to know of a model and a machine, so that a reader can lay the one out on the other?

Numbers that the models of memory and communication gave, as small tables, and a few simulated steps. The tables hold
what depends on the model and on how tensor parallelism cuts it; the rest is exact arithmetic, which the page does:
bytes kept are proportional to tokens (and to keys, where scores are kept), parameters are sums over layers, ZeRO
divides by ranks. `planning.explore` fills the tables.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from clustersim.arrays import IntArray
from clustersim.units import Bytes, Seconds

Kept = tuple[float, float]
"""Bytes per token, and per token and key."""


@dataclass(frozen=True, slots=True)
class ShardSizes:
    """One rank's part of a model under tensor parallelism, in one compute format.

    parameters: of a layer, the embedding, the head, and the head where it uses the embedding's matrix;
    largest: elements of the largest weight of the embedding, a layer and the head; rows: of the logits' matrix;
    layer_input: bytes per token; layer: kept by a layer, by what is recomputed; embedding, head: kept by these.
    """

    parameters: tuple[int, int, int, int]
    largest: tuple[int, int, int]
    rows: int
    layer_input: float
    layer: Mapping[str, Kept]
    embedding: float
    head: float


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """A model's dimensions, in words of `workload.transformer.Model`, and its shards.

    positions: the most tokens of a sequence, 0: any number; shards: by compute format, tensor-parallel degree and
    whether sequences are split between its ranks (`shard_key`); degrees that cannot cut the model are missing.
    """

    name: str
    dimensions: Mapping[str, int]
    tied: bool
    positions: int
    parameters: int
    shards: Mapping[str, ShardSizes]


@dataclass(frozen=True, slots=True)
class Format:
    """Number formats in words and bytes per element.

    compute: of weights; activation: of activations; gradients; state: master weights and moments of one parameter;
    key: under which shards are listed.
    """

    name: str
    words: str
    key: str
    compute: float
    activation: float
    gradients: float
    state: int


@dataclass(frozen=True, slots=True)
class RingVolumes:
    """Tensor- and context-parallel collectives of one unit's forward and backward.

    Counted in activations that each rank of a ring sends, but for the factor (n - 1) / n: an all-gather or a
    reduce-scatter is one, an all-reduce two. layer, embedding, head: (forward, backward); small: bytes per token that
    the loss sends in the same way; ring: passes of keys and values around the context-parallel ring.
    """

    layer: tuple[float, float]
    embedding: tuple[float, float]
    head: tuple[float, float]
    small: float
    ring: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Machine:
    """capacity: bytes of the smallest GPU; context, fragmentation, communicator: what the software takes.

    gpus: sizes that the cluster can have; levels: (tier, unit of each GPU), from the narrowest tier up: traffic stays
    in the first tier in whose unit all its GPUs are; top: the tier beyond.
    """

    cluster: str
    accelerator: str
    capacity: Bytes
    context: Bytes
    fragmentation: float
    communicator: Bytes
    gpus: tuple[int, ...]
    per_node: int
    levels: tuple[tuple[str, IntArray], ...]
    top: str


@dataclass(frozen=True, slots=True)
class Strategy:
    """What the data-parallel strategy of a ZeRO stage holds beside its shards.

    bucket: bytes of whole gradients that wait for their reduction, None: by Megatron's rule; ahead: units gathered
    ahead; reshards: whether they are given back after forward.
    """

    stage: int
    bucket: Bytes | None
    ahead: int
    reshards: bool


@dataclass(frozen=True, slots=True)
class Settings:
    """Where the page's controls stand at first: the scenario.

    schedule: 1f1b, gpipe or interleaved; chunks: of the interleaved one; recompute: none, selective, selective_op, full
    or layers:2 ...
    """

    gpus: int
    tp: int
    cp: int
    pp: int
    sequence_parallel: bool
    zero: int
    schedule: str
    chunks: int
    recompute: str
    microbatch: int
    sequence: int
    batch: int


@dataclass(frozen=True, slots=True)
class Point:
    """One simulated step. label: its layout; own: it is the scenario's; missing: why there is none, or empty."""

    label: str
    gpus: int
    step_time: Seconds = 0.0
    tokens_per_gpu: float = 0.0
    mfu: float = 0.0
    bubble: float = 0.0
    exposed: float = 0.0
    peak: Bytes = 0.0
    fits: bool = False
    own: bool = False
    missing: str = ""


@dataclass(frozen=True, slots=True)
class Study:
    """Steps of which one thing differs. name: a key; title and words: what differs and what stays."""

    name: str
    title: str
    words: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Exploration:
    """All that the explorer page knows. order: of the axes; layers_per_stage: of the scenario, where it gives one.

    models: the scenario's first; ring_volumes: by whether sequences are split, then by what is recomputed; loss_width:
    bytes of the logits' gradients beside the kept softmax, 0: that of an activation; notes: what differs from the
    scenario, in sentences.
    """

    name: str
    models: tuple[ModelSizes, ...]
    formats: tuple[Format, ...]
    machine: Machine
    strategies: tuple[Strategy, ...]
    ring_volumes: Mapping[str, Mapping[str, RingVolumes]]
    order: tuple[str, ...]
    layers_per_stage: tuple[int, ...] | None
    loss_width: float
    start: Settings
    studies: tuple[Study, ...]
    notes: tuple[str, ...]


def shard_key(key: str, tp: int, *, sequence_parallel: bool) -> str:
    """Under which name a model lists its shards.

    >>> shard_key("bf16", 8, sequence_parallel=True)
    'bf16 tp8 split'
    """
    return f"{key} tp{tp}{' split' if sequence_parallel else ''}"
