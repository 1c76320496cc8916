"""Model of failures of a run over weeks, and of checkpointing, restart and spares."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from clustersim.common.units import Bytes, BytesPerSecond, Seconds
from clustersim.hardware.failures import ZERO_DURATION, DurationDistribution, FailureMode

DEFAULT_PRESET = "typical"
"""The preset of clusters without their own data: the mean of clusters with published failure rates."""


class CheckpointWrite(Enum):
    """Where a checkpoint is written while training is blocked.

    SYNC: to storage. ASYNC: to host memory, and from there to storage while training continues. PEERS: to another
    node's memory, and some checkpoints to storage while training continues.
    """

    SYNC = "sync"
    ASYNC = "async"
    PEERS = "peers"


class CheckpointIntervalRule(Enum):
    """How the checkpoint interval is chosen. OPTIMAL: minimizes the expected run time."""

    OPTIMAL = "best"
    YOUNG = "young"
    DALY = "daly"


class ElasticPolicy(Enum):
    """What a job does when it lacks nodes and spares.

    WAIT: wait for repair. KEEP_BATCH: continue with fewer replicas and more microbatches each. SHRINK_BATCH:
    continue with fewer replicas and a smaller batch.
    """

    WAIT = "wait"
    KEEP_BATCH = "keep-batch"
    SHRINK_BATCH = "shrink-batch"


@dataclass(frozen=True, slots=True)
class RestartTimes:
    """Durations of the sequential phases of a restart.

    init: of communicators, plus `init_per_rank` seconds per rank; load: of the checkpoint, None: its bytes over
    the storage's read bandwidth; only_failed: healthy nodes keep their allocation and processes, so that with a
    spare nothing is scheduled or started again.
    """

    diagnosis: DurationDistribution = ZERO_DURATION
    drain: DurationDistribution = ZERO_DURATION
    schedule: DurationDistribution = ZERO_DURATION
    image: DurationDistribution = ZERO_DURATION
    init: DurationDistribution = ZERO_DURATION
    init_per_rank: Seconds = 0.0
    load: DurationDistribution | None = None
    warmup: DurationDistribution = ZERO_DURATION
    only_failed: bool = False


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """Checkpoint interval and cost.

    interval: from the end of one checkpoint to the start of the next; size: bytes, None: from the memory model;
    bandwidth, read_bandwidth: of the storage, all nodes combined; bandwidth_per_node: of each node to the storage;
    overhead: seconds per blocking write in addition to the transfer; snapshot: seconds that training is blocked
    by an asynchronous write; interference: fractional slowdown of steps during the write; stored_every: with
    PEERS, every n-th checkpoint goes to storage, too.
    """

    write: CheckpointWrite = CheckpointWrite.SYNC
    interval: CheckpointIntervalRule | Seconds = CheckpointIntervalRule.OPTIMAL
    size: Bytes | None = None
    bandwidth: BytesPerSecond = 0.0
    read_bandwidth: BytesPerSecond = 0.0
    bandwidth_per_node: BytesPerSecond | None = None
    overhead: Seconds = 0.0
    snapshot: Seconds = 0.0
    interference: float = 0.0
    stored_every: int = 1


@dataclass(frozen=True, slots=True)
class MaintenanceWindow:
    """Planned downtime of the full cluster, after a checkpoint. period, duration: seconds."""

    period: Seconds
    duration: Seconds


@dataclass(frozen=True, slots=True)
class SparePool:
    """Spare nodes.

    shared_nodes: usable anywhere, None: the optimal number; nodes_per_rack: in each rack, usable only there.
    """

    shared_nodes: int | None = None
    nodes_per_rack: int = 0


@dataclass(frozen=True, slots=True)
class ReliabilityModel:
    """Failure rates, recovery and spares of a run.

    preset: source of all values not stated otherwise; rate_factor: multiplies all failure rates;
    rate_geometric_std: geometric standard deviation of the hardware's overall failure rate across clusters;
    rack_nodes: nodes per rack, None: those of an NVLink domain, or four; replaces_slow_nodes: replace a node with
    a slow component on detection; repair_slots: nodes repaired concurrently, None: unlimited; sources: provenance
    by dotted key.
    """

    preset: str = DEFAULT_PRESET
    description: str = ""
    failures: tuple[FailureMode, ...] = ()
    rate_factor: float = 1.0
    rate_geometric_std: float = 1.0
    restart: RestartTimes = RestartTimes()
    checkpoint: CheckpointPolicy = CheckpointPolicy()
    spares: SparePool = SparePool()
    elastic: ElasticPolicy = ElasticPolicy.WAIT
    rack_nodes: int | None = None
    replaces_slow_nodes: bool = True
    repair_slots: int | None = None
    maintenance: MaintenanceWindow | None = None
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
