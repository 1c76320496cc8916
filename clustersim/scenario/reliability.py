"""What is said of failures of a run over weeks, and of what is done about them?"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from clustersim.common.units import Bytes, BytesPerSecond, Seconds
from clustersim.hardware.failures import ZERO_DURATION, DurationDistribution, FailureMode

DEFAULT_PRESET = "typical"
"""The preset of clusters of which nothing is said: the mean of those that published their failures."""


class CheckpointWrite(Enum):
    """Where a checkpoint goes while steps wait.

    SYNC: to storage. ASYNC: to the host's memory, from there to storage beside further steps. PEERS: to the memory of
    another node, and some of them to storage beside further steps.
    """

    SYNC = "sync"
    ASYNC = "async"
    PEERS = "peers"


class CheckpointIntervalRule(Enum):
    """How the time between checkpoints is chosen. BEST: that with the least expected time of the run."""

    OPTIMAL = "best"
    YOUNG = "young"
    DALY = "daly"


class ElasticPolicy(Enum):
    """What a job does that lacks nodes.

    WAIT: for repair. KEEP_BATCH: go on with fewer replicas, which do more microbatches. SHRINK_BATCH: go on with fewer
    replicas and a smaller batch.
    """

    WAIT = "wait"
    KEEP_BATCH = "keep-batch"
    SHRINK_BATCH = "shrink-batch"


@dataclass(frozen=True, slots=True)
class RestartTimes:
    """What a restart takes, one behind the other. init: of communicators, and `init_per_rank` more for each rank.

    load: of the checkpoint, None: its bytes over the storage's bandwidth; only_failed: the other nodes keep their place
    and processes, so that nothing is scheduled or started where a spare is at hand.
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
    """How often the state is kept, and how fast.

    interval: from the end of one to the beginning of the next; size: bytes, None: as the memory model has it;
    bandwidth, read_bandwidth: of the storage, of all nodes together; per_node: of each node's way to it; overhead: of a
    blocking write beside its bytes; snapshot: how long steps wait where the rest is written beside them; interference:
    the part by which steps are slower meanwhile; stored_every: with PEERS, every so manieth goes to storage, too.
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
    """The whole cluster is down for a while, now and then, behind a checkpoint."""

    period: Seconds
    duration: Seconds


@dataclass(frozen=True, slots=True)
class SparePool:
    """Nodes that stand by. nodes: for any place, None: as many as is best; per_rack: in each rack, for that alone."""

    shared_nodes: int | None = None
    nodes_per_rack: int = 0


@dataclass(frozen=True, slots=True)
class ReliabilityModel:
    """All that is said. preset: what is not said otherwise is from there; scale: times all rates.

    spread: geometric standard deviation of the rates of all hardware together, since nobody knows those of the next
    cluster; rack: nodes of one, None: those of an NVLink domain, or four; quarantine: whether a node with a slow part
    is replaced when that is found; crews: how many nodes are repaired at a time, None: all; sources: by dotted key.
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
