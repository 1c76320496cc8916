"""What may a scenario file say?

One pydantic section for each part; each gives the frozen dataclass that the inside works with, where it can do so
alone. What needs two sections or another file is put together in `build`.
"""

import math
from dataclasses import fields, replace
from enum import Enum
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, model_validator

from clustersim.cost.record import Record
from clustersim.dtypes import DType
from clustersim.errors import InputError, nearest, shown
from clustersim.parallel.data import (
    BY_STAGE,
    DDP_BUCKET,
    DataParallelism,
    FullyShard,
    Microbatches,
    NaiveDataParallel,
    Replicated,
)
from clustersim.parallel.mesh import DATA, DENSE, MESHES
from clustersim.parallel.pipeline import Counted, Ends, Split
from clustersim.parallel.stage_notation import read_stages
from clustersim.program.task import Collective
from clustersim.scenario.disturbances import DisturbancesSection, MixedSection, listed
from clustersim.scenario.lora import LoraSection
from clustersim.scenario.offload import OffloadSection
from clustersim.scenario.section import (
    MOST_TOKENS,
    Choice,
    Degree,
    Layers,
    Name,
    Section,
    Shipped,
    Tokens,
    Width,
    member,
    mistake,
    share,
    size_or,
)
from clustersim.scenario.settings import Contention, CostSettings, Symmetry
from clustersim.schedules.shelf import NAMES
from clustersim.workload.lora import Projection
from clustersim.workload.recipe import Recipe, mixed
from clustersim.workload.stack import MOST_LAYERS, BlockForm, Mlp, QkNorm
from clustersim.workload.training import (
    Attention,
    FullRecompute,
    Loss,
    NoRecompute,
    Optimizer,
    Recompute,
    SelectiveOperations,
    SelectiveRecompute,
    Training,
)
from clustersim.workload.transformer import Norm, Positions

MOST_INTERFERENCE = 10.0
MOST_STEPS = 10_000
MOST_SCALE = 1_000.0


def _qk_norm(value: object) -> object:
    """True is the usual kind, of each head by itself."""
    named = {kind.value: kind for kind in QkNorm}
    if isinstance(value, bool):
        return QkNorm.HEADS if value else value
    if isinstance(value, str) and value in named:
        return named[value]
    raise mistake(f"{shown(value)} is unknown; write true, false, {' or '.join(named)}")


def _window(value: object) -> object:
    """Full is false: YAML reads `off` so, too."""
    if value == "full" or value is False:
        return False
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_TOKENS:
        raise mistake(f"{shown(value)} is no window; write a number of tokens from 1 to {MOST_TOKENS:,}, or full")
    return value


class LayerSection(Section):
    """Dimensions of a layer."""

    ffn: Width | None = None
    heads: Width | None = None
    kv_heads: Width | None = None
    head_dim: Width | None = None
    mlp: Annotated[Mlp | None, member(Mlp)] = None
    block: Annotated[BlockForm | None, member(BlockForm)] = None
    qkv_bias: bool | None = None
    qk_norm: Annotated[QkNorm | bool | None, BeforeValidator(_qk_norm)] = None
    window: Annotated[int | bool | None, BeforeValidator(_window)] = None
    rotary: Annotated[float | None, share(0.0, 1.0)] = None
    softcap: bool | None = None

    @property
    def of_layer(self) -> dict[str, Any]:
        """What the file gives of a layer's own dimensions; false is none."""
        given = self.model_dump(include=set(LayerSection.model_fields), exclude_none=True)
        return {key: None if key in _NONE and value is False else value for key, value in given.items()}


_NONE = ("window", "qk_norm")


class RunSection(LayerSection):
    """An entry of `model.stack`: so many layers that follow each other, and what they have of their own."""

    layers: Layers = Field(examples=[1])


class ModelSection(LayerSection, Shipped):
    """`model`: a preset, a Hugging Face config.json, or dimensions; dimensions beside a preset or path change it.

    global_every: every so-manieth layer has no window; nope_every: no rotary positions; stack: layers in runs that
    differ from what the model's other keys say.
    """

    short: ClassVar[str | None] = "preset"
    preset: Name | None = None
    family: Name | None = None
    name: Name | None = None
    layers: Layers | None = None
    hidden: Width | None = None
    vocab: Width | None = None
    max_positions: Tokens | None = None
    norm: Annotated[Norm | None, member(Norm)] = None
    positions: Annotated[Positions | None, member(Positions)] = None
    tied_embeddings: bool | None = None
    linear_bias: bool | None = None
    dropout: bool | None = None
    embedding_norm: bool | None = None
    logit_softcap: bool | None = None
    global_every: Annotated[int | None, Field(ge=2, le=MOST_LAYERS)] = None
    nope_every: Annotated[int | None, Field(ge=2, le=MOST_LAYERS)] = None
    stack: Annotated[list[RunSection], Field(max_length=MOST_LAYERS)] | None = None

    @property
    def dimensions(self) -> dict[str, Any]:
        """What the file gives of `Model`'s own fields, and of all its layers."""
        own = {"preset", "path", "family", "global_every", "nope_every", "stack"}
        return {**self.model_dump(exclude=own, exclude_none=True), **self.of_layer}


class ClusterSection(Shipped):
    """`cluster`: a shipped cluster or a file, its size, and changes to sections of that file."""

    short: ClassVar[str | None] = "name"
    name: Name | None = None
    gpus: Degree | None = None
    accelerator: Name | None = None
    node: dict[str, Any] | None = None
    fabric: dict[str, Any] | None = None
    mixed: Annotated[list[MixedSection], BeforeValidator(listed)] = Field([])

    @property
    def changes(self) -> dict[str, Any]:
        """What replaces keys of the cluster's own file."""
        return self.model_dump(include={"accelerator", "node", "fabric"}, exclude_none=True)


Bucket = Annotated[float | None, size_or("megatron")]


class Ddp(Section):
    """Bucketed all-reduce of gradients."""

    bucket: Bucket = DDP_BUCKET
    overlap: bool = True

    def strategy(self) -> DataParallelism:
        """The strategy as the inside knows it."""
        return Replicated(bucket=self.bucket, overlap=self.overlap)


class Fsdp(Section):
    """ZeRO stage 3 as PyTorch's FSDP2 (`fully_shard`) does it, or FSDP1, without `copies`."""

    overlap: bool = True
    prefetch: Annotated[int, Field(ge=0, le=MOST_LAYERS)] = 1
    reshard_after_forward: bool | None = None
    copies: bool = True
    secondary: Degree | None = None
    reduce: Annotated[Microbatches | None, member(Microbatches)] = None

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        if self.secondary is not None and getattr(self, "shard", None) is not None:
            raise mistake("has both shard and secondary, which cut the ranks in two ways; keep one")
        return self

    def strategy(self) -> DataParallelism:
        """The strategy as the inside knows it."""
        return FullyShard(**self.model_dump())


class Hsdp(Fsdp):
    """FSDP2 on a mesh of replicas of shards: sharded over `shard` ranks, replicated over the rest."""

    shard: Degree = Field(examples=[8])
    all_reduce: Annotated[Microbatches, member(Microbatches)] = Microbatches.EVERY


class ZeroStage(Fsdp):
    """ZeRO with its stage; a stage takes no notice of what only others have.

    shard: Megatron-LM's optimizer instances (stage 1), DeepSpeed's MiCS (stage 3), which reduces across replicas once.
    """

    stage: Annotated[int, Field(ge=1, le=3)] = Field(examples=[1])
    bucket: Bucket = None
    copies: bool = False
    shard: Degree | None = None
    all_reduce: Annotated[Microbatches, member(Microbatches)] = Microbatches.LAST

    @model_validator(mode="after")
    def _of_its_stage(self) -> Self:
        for key, least in (("reduce", 2), ("secondary", 3), ("all_reduce", 3)):
            if key in self.model_fields_set and self.stage < least:
                raise mistake(f"{key} is of ZeRO stage {' and '.join(map(str, range(least, 4)))}; this is {self.stage}")
        return self

    def strategy(self) -> DataParallelism:
        """The strategy as the inside knows it."""
        chosen = BY_STAGE[self.stage]
        return chosen(**{field.name: getattr(self, field.name) for field in fields(chosen)})


class Naive(Section):
    """torch.nn.DataParallel, which has no options."""

    def strategy(self) -> DataParallelism:
        """The strategy as the inside knows it."""
        return NaiveDataParallel()


class DataChoice(Choice):
    """`layout.data`: one strategy of data parallelism."""

    words: ClassVar[dict[str, Any]] = {
        "ddp": {"ddp": {}},
        "fsdp": {"fsdp": {}},
        "hsdp": {"hsdp": {}},
        "zero1": {"zero": {"stage": 1}},
        "zero2": {"zero": {"stage": 2}},
        "zero3": {"zero": {"stage": 3}},
        "data_parallel": {"data_parallel": {}},
    }
    ddp: Ddp | None = None
    fsdp: Fsdp | None = None
    hsdp: Hsdp | None = None
    zero: ZeroStage | None = None
    data_parallel: Naive | None = None

    def strategy(self) -> DataParallelism:
        """The chosen strategy as the inside knows it."""
        _, options = self.chosen
        return options.strategy()  # type: ignore[no-any-return]


_ORDER = tuple(axis.name for axis in MESHES[DENSE])


def _axes(value: object) -> object:
    if not isinstance(value, list) or sorted(map(str, value)) != sorted(_ORDER):
        raise mistake(f"{shown(value)} must name every axis once, such as [{', '.join(_ORDER)}]")
    return value


def _notation(value: object) -> object:
    """Read a layout string; the word even is none."""
    if value == "even" or not isinstance(value, str):
        return None if value == "even" else value
    try:
        return list(read_stages(value))
    except InputError as error:
        raise mistake(f"{error}; or write {StagesSection.example}") from error


class StagesSection(Section):
    """`layout.layers_per_stage`: even, a list, one of Megatron-LM's layout strings, or one of its rules.

    embedding, head: count as a layer; first, last: layers of the first and of the last pipeline rank.
    """

    example: ClassVar[str] = "even, [8, 8], 'Et*8|t*8L', {embedding: true, head: true} or {first: 7, last: 7}"
    counts: list[Annotated[int, Field(ge=0, le=MOST_LAYERS)]] | None = None
    layout: Annotated[list[int] | None, BeforeValidator(_notation)] = None
    embedding: bool = False
    head: bool = False
    first: Layers | None = None
    last: Layers | None = None

    @classmethod
    def written_out(cls, value: object) -> object:
        """A list gives the counts, a string is a layout string, nothing is even."""
        if value is None:
            return {}
        if isinstance(value, list):
            return {"counts": value}
        return {"layout": value} if isinstance(value, str) else super().written_out(value)

    @model_validator(mode="after")
    def _one_rule(self) -> Self:
        ends = (self.first, self.last) != (None, None)
        rules = (self.counts is not None, self.layout is not None, self.embedding or self.head, ends)
        if sum(rules) > 1:
            raise mistake(f"says more than one of counts, layout, embedding or head, and first or last; {self.example}")
        return self

    def split(self) -> Split:
        """The rule as the inside knows it."""
        given = self.counts if self.layout is None else self.layout
        if given is not None:
            return tuple(given)
        if self.embedding or self.head:
            return Counted(self.embedding, self.head)
        return Ends(self.first, self.last) if (self.first, self.last) != (None, None) else None


class LayoutSection(Section):
    """`layout`: degrees of parallelism. `dp` left out is what the other degrees leave of the cluster's GPUs."""

    tp: Degree = 1
    cp: Degree = 1
    pp: Degree = 1
    dp: Degree | None = None
    order: Annotated[list[str], BeforeValidator(_axes)] = Field(list(_ORDER))
    sequence_parallel: bool = False
    tensor_overlap: bool = False
    backward_overlap: bool = True
    pipeline_overlap: bool = True
    data: DataChoice = DataChoice(ddp=Ddp())
    layers_per_stage: StagesSection = StagesSection()

    @property
    def replica(self) -> int:
        """Ranks of one data-parallel replica: the product of the other degrees."""
        return math.prod(getattr(self, axis.name) for axis in MESHES[DENSE] if axis is not DATA)


class Flat(Section):
    """A schedule that has no options."""


class Chunked(Section):
    """Options of a schedule with a choice of model chunks on each rank."""

    chunks: Annotated[int, Field(ge=2, le=MOST_LAYERS)] = 2


StageRanks = list[Annotated[int, Field(ge=0, le=MOST_LAYERS)]] | None


class CsvSection(Section):
    """`schedule.csv`: a file of an order in the notation of torch.distributed.pipelining, a row for each pipeline rank.

    placement: [stages] the row of each stage, from 0; None: where its actions are.
    """

    short: ClassVar[str | None] = "file"
    file: Name = Field(examples=["my.csv"])
    placement: StageRanks = None


class OrdersSection(Section):
    """`schedule.orders`: such an order written out, with the name of what it was read from."""

    name: Name = "written order"
    rows: list[str] = Field(examples=['["0F0,0B0", "1F0,1B0"]'])
    placement: StageRanks = None


class PythonSection(Section):
    """`schedule.python`: a class that gives placement and order, and the arguments of its constructor."""

    short: ClassVar[str | None] = "rule"
    rule: Name = Field(examples=["my_module:MySchedule"])
    arguments: dict[str, Any] = Field({})


class ScheduleChoice(Choice):
    """`schedule`: one pipeline schedule, of the shelf or from outside; `my.csv` and `my_module:MySchedule` will do."""

    words: ClassVar[dict[str, Any]] = {name: {name: {}} for name in NAMES}
    one_f_one_b: Flat | None = Field(None, alias="1f1b")
    gpipe: Flat | None = None
    interleaved: Chunked | None = None
    bfs: Chunked | None = None
    zero_bubble_1p: Flat | None = Field(None, alias="zb-1p")
    zero_bubble_2p: Flat | None = Field(None, alias="zb-2p")
    zero_bubble_v: Flat | None = Field(None, alias="zb-v")
    csv: CsvSection | None = None
    orders: OrdersSection | None = None
    python: PythonSection | None = None

    @classmethod
    def written_out(cls, value: object) -> object:
        """A file's name is `csv`, a class's is `python`."""
        match value:
            case str() if value.endswith(".csv"):
                return {"csv": value}
            case str() if ":" in value:
                return {"python": value}
        return super().written_out(value)


_RECIPES = {
    DType.BF16: mixed(compute=DType.BF16),
    DType.FP16: mixed(compute=DType.FP16),
    DType.TF32: mixed(compute=DType.TF32, master=None),
    DType.FP32: mixed(compute=DType.FP32, master=None),
}
_KEPT = (DType.FP32, DType.BF16, DType.FP16)


class PrecisionSection(Section):
    """`training.precision`: formats of what is computed and of what is kept; the compute format gives the defaults."""

    short: ClassVar[str | None] = "compute"
    compute: Annotated[DType, member(DType, *_RECIPES)] = DType.BF16
    gradients: Annotated[DType, member(DType, *_KEPT)] = DType.FP32
    master: Annotated[DType | None, member(DType, *_KEPT, absent="none")] = DType.FP32
    moments: Annotated[DType, member(DType, *_KEPT)] = DType.FP32

    def recipe(self) -> Recipe:
        """The formats that the file names, and the compute format's usual ones for the rest."""
        usual = _RECIPES[self.compute]
        named = {name: getattr(self, name) for name in self.model_fields_set - {"compute"}}
        return replace(usual, weights=replace(usual.weights, **named))


class RecomputeMode(Enum):
    """How activations that backward needs come back."""

    NONE = "none"
    SELECTIVE = "selective"
    SELECTIVE_OP = "selective_op"
    FULL = "full"


class RecomputeSection(Section):
    """`training.recompute`: none, selective, selective_op, full, or full for so many layers of each stage."""

    short: ClassVar[str | None] = "mode"
    mode: Annotated[RecomputeMode, member(RecomputeMode)] = RecomputeMode.FULL
    layers: Layers | None = None

    @model_validator(mode="after")
    def _layers_are_full(self) -> Self:
        """So that `--set training.recompute.layers=4` works on a file that says none, too."""
        if self.layers is not None and self.mode in (RecomputeMode.SELECTIVE, RecomputeMode.SELECTIVE_OP):
            raise mistake("layers are recomputed in full, not selectively; write {layers: 4}")
        return self

    def choice(self) -> Recompute:
        """The kind of recomputation as the inside knows it."""
        match self.mode:
            case RecomputeMode.NONE if self.layers is None:
                return NoRecompute()
            case RecomputeMode.SELECTIVE:
                return SelectiveRecompute()
            case RecomputeMode.SELECTIVE_OP:
                return SelectiveOperations()
        return FullRecompute(layers=self.layers)


def _none(value: object) -> object:
    return None if value == "none" else value


class TrainingSection(Section):
    """`training`: one step."""

    sequence: Tokens = Field(examples=[8192])
    global_batch: Tokens = Field(examples=[2048])
    microbatch: Tokens = 1
    precision: PrecisionSection = PrecisionSection()
    recompute: RecomputeSection = RecomputeSection.model_validate("none")
    attention: Annotated[Attention, member(Attention)] = Attention.FLASH
    loss: Annotated[Loss, member(Loss)] = Loss.VOCAB_PARALLEL
    optimizer: Annotated[Optimizer, member(Optimizer)] = Optimizer.ADAM
    gradient_clipping: bool = True
    fused: bool = True
    offload: OffloadSection = OffloadSection()
    lora: Annotated[LoraSection | None, BeforeValidator(_none)] = None

    def step(self, there: frozenset[Projection]) -> Training:
        """The training step as the inside knows it; there: the model's projections."""
        plain = {name: getattr(self, name) for name in type(self).model_fields if name != "precision"}
        lora = None if self.lora is None else self.lora.adapters(there)
        chosen = {"recipe": self.precision.recipe(), "recompute": self.recompute.choice(), "lora": lora}
        return Training(**{**plain, **chosen, "offload": self.offload.choice()})


class ScaleSection(Section):
    """`cost.record.scale`: the cluster's accelerator relative to the one that was measured."""

    compute: Annotated[float, Field(gt=0.0, le=MOST_SCALE)] = 1.0
    bandwidth: Annotated[float, Field(gt=0.0, le=MOST_SCALE)] = 1.0


class RecordSection(Section):
    """`cost.record`: a calibration record, and how it is carried over to another accelerator."""

    short: ClassVar[str | None] = "file"
    file: Name = Field(examples=["my-gpu.json"])
    scale: ScaleSection | None = None


def _yaml_off(value: object) -> object:
    """YAML 1.1 reads `off` as false."""
    return "off" if value is False else value


def _algorithms(value: object) -> object:
    if not isinstance(value, dict):
        return value
    names = [collective.value for collective in Collective]
    for name in value:
        if name not in names:
            raise mistake(f"{shown(name)} is no collective; {nearest(str(name), names)}")
    return {Collective(name): algorithm for name, algorithm in value.items()}


class CostSection(Section):
    """`cost`: where durations come from, and how many ranks are simulated one by one."""

    record: Annotated[RecordSection | None, BeforeValidator(_none)] = None
    collectives: Annotated[dict[Collective, str], BeforeValidator(_algorithms)] = Field({})
    symmetry: Annotated[Symmetry, member(Symmetry), BeforeValidator(_yaml_off)] = Symmetry.AUTO
    coalesce: bool = True
    network: Annotated[Contention, member(Contention)] = Contention.NONE
    interference: Annotated[float | None, share(0.0, MOST_INTERFERENCE)] = None

    def settings(self, record: Record | None) -> CostSettings:
        """The settings as the inside knows them, with the record that was read."""
        return CostSettings(self.symmetry, self.coalesce, self.network, self.collectives, self.interference, record)


class ScenarioFile(Section):
    """The whole file."""

    name: Name | None = None
    model: ModelSection = Field(examples=["llama3-8b"])
    cluster: ClusterSection = Field(examples=["dgx-h100"])
    layout: LayoutSection = LayoutSection()
    schedule: ScheduleChoice = ScheduleChoice.model_validate("1f1b")
    training: TrainingSection = Field(examples=["{sequence: 8192, global_batch: 2048}"])
    framework: Name = "pytorch"
    cost: CostSection = CostSection()
    disturbances: DisturbancesSection = DisturbancesSection()
    steps: Annotated[int, Field(ge=1, le=MOST_STEPS)] = 1
