"""What is said of failures of a run over weeks, and of what is done about them?"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from clustersim.common.units import Bytes, BytesPerSecond, Seconds
from clustersim.hardware.failures import NO_TIME, Failure, Length

TYPICAL = "typical"
"""The preset of clusters of which nothing is said: the mean of those that published their failures."""


class Write(Enum):
    """Where a checkpoint goes while steps wait.

    SYNC: to storage. ASYNC: to the host's memory, from there to storage beside further steps. PEERS: to the memory of
    another node, and some of them to storage beside further steps.
    """

    SYNC = "sync"
    ASYNC = "async"
    PEERS = "peers"


class Interval(Enum):
    """How the time between checkpoints is chosen. BEST: that with the least expected time of the run."""

    BEST = "best"
    YOUNG = "young"
    DALY = "daly"


class Elastic(Enum):
    """What a job does that lacks nodes.

    WAIT: for repair. KEEP_BATCH: go on with fewer replicas, which do more microbatches. SHRINK_BATCH: go on with fewer
    replicas and a smaller batch.
    """

    WAIT = "wait"
    KEEP_BATCH = "keep-batch"
    SHRINK_BATCH = "shrink-batch"


@dataclass(frozen=True, slots=True)
class Restart:
    """What a restart takes, one behind the other. init: of communicators, and `init_per_rank` more for each rank.

    load: of the checkpoint, None: its bytes over the storage's bandwidth; only_failed: the other nodes keep their place
    and processes, so that nothing is scheduled or started where a spare is at hand.
    """

    diagnosis: Length = NO_TIME
    drain: Length = NO_TIME
    schedule: Length = NO_TIME
    image: Length = NO_TIME
    init: Length = NO_TIME
    init_per_rank: Seconds = 0.0
    load: Length | None = None
    warmup: Length = NO_TIME
    only_failed: bool = False


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """How often the state is kept, and how fast.

    interval: from the end of one to the beginning of the next; size: bytes, None: as the memory model has it;
    bandwidth, read_bandwidth: of the storage, of all nodes together; per_node: of each node's way to it; overhead: of a
    blocking write beside its bytes; snapshot: how long steps wait where the rest is written beside them; interference:
    the part by which steps are slower meanwhile; stored_every: with PEERS, every so manieth goes to storage, too.
    """

    write: Write = Write.SYNC
    interval: Interval | Seconds = Interval.BEST
    size: Bytes | None = None
    bandwidth: BytesPerSecond = 0.0
    read_bandwidth: BytesPerSecond = 0.0
    per_node: BytesPerSecond | None = None
    overhead: Seconds = 0.0
    snapshot: Seconds = 0.0
    interference: float = 0.0
    stored_every: int = 1


@dataclass(frozen=True, slots=True)
class Maintenance:
    """The whole cluster is down for a while, now and then, behind a checkpoint."""

    every: Seconds
    lasts: Seconds


@dataclass(frozen=True, slots=True)
class Spares:
    """Nodes that stand by. nodes: for any place, None: as many as is best; per_rack: in each rack, for that alone."""

    nodes: int | None = None
    per_rack: int = 0


@dataclass(frozen=True, slots=True)
class Reliability:
    """All that is said. preset: what is not said otherwise is from there; scale: times all rates.

    spread: geometric standard deviation of the rates of all hardware together, since nobody knows those of the next
    cluster; rack: nodes of one, None: those of an NVLink domain, or four; quarantine: whether a node with a slow part
    is replaced when that is found; crews: how many nodes are repaired at a time, None: all; sources: by dotted key.
    """

    preset: str = TYPICAL
    description: str = ""
    failures: tuple[Failure, ...] = ()
    scale: float = 1.0
    spread: float = 1.0
    restart: Restart = Restart()
    checkpoint: Checkpoints = Checkpoints()
    spares: Spares = Spares()
    elastic: Elastic = Elastic.WAIT
    rack: int | None = None
    quarantine: bool = True
    crews: int | None = None
    maintenance: Maintenance | None = None
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
