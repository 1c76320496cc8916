"""What may a scenario file say of training?"""

from dataclasses import replace
from enum import Enum
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from clustersim.common import data_files
from clustersim.common.dtypes import NARROW, DType
from clustersim.common.errors import nearest, shown
from clustersim.model.framework import Framework
from clustersim.model.lora import Projection
from clustersim.model.precision_recipe import Recipe, mixed
from clustersim.model.recipe_files import load_recipe
from clustersim.model.recompute_modules import Module
from clustersim.model.training import (
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
from clustersim.parallel.data_parallel_strategy import DataParallelStrategy
from clustersim.scenario.config.expert_load import ExpertLoadSection, balanced_or
from clustersim.scenario.config.lora import LoraSection
from clustersim.scenario.config.offload import OffloadSection
from clustersim.scenario.config.overheads import OverheadsSection, overheads_of
from clustersim.scenario.config_reader import Ends, Layers, Section, Tokens, member, mistake, or_none, reads

_RECIPES = {
    DType.BF16: mixed(compute=DType.BF16),
    DType.FP16: mixed(compute=DType.FP16),
    DType.TF32: mixed(compute=DType.TF32, master=None),
    DType.FP32: mixed(compute=DType.FP32, master=None),
}
_COMPUTED = (*(d_type.value for d_type in _RECIPES), *data_files.names("recipes"))
_MATRICES = (DType.BF16, *NARROW)
_OF_MATRICES = ("stored", "gathered", "dispatched")
_OF_ATTENTION = (DType.FP8, DType.MXFP8)
_KEPT = (DType.FP32, DType.BF16, DType.FP16)


def _known(value: object) -> object:
    """A format, or a shipped recipe."""
    if not isinstance(value, str) or value not in _COMPUTED:
        raise mistake(f"{shown(value)} is unknown; {nearest(str(value), _COMPUTED)}")
    return value


class PrecisionSection(Section):
    """`training.precision`: formats of what is computed and of what is kept; the first gives the defaults."""

    short: ClassVar[str | None] = "compute"
    compute: Annotated[str, reads(_known, "a format or a recipe", of=Literal[_COMPUTED])] = DType.BF16.value
    """format of products, or a recipe of topologies/recipes"""
    gradients: Annotated[DType, member(DType, *_KEPT)] = DType.FP32
    """format in which gradients are kept and reduced"""
    master: Annotated[DType | None, member(DType, *_KEPT, absent="none")] = DType.FP32
    """format of master weights; left out: fp32, with compute fp32 and tf32 none"""
    moments: Annotated[DType, member(DType, *_KEPT)] = DType.FP32
    """format of the optimizer's moments"""
    stored: Annotated[DType | None, member(DType, *_MATRICES)] = None
    """format of matrices in a recipe: bf16 or its own; left out: that of the other weights"""
    gathered: Annotated[DType | None, member(DType, *_MATRICES)] = None
    """format in which they are gathered; left out: as stored"""
    dispatched: Annotated[DType | None, member(DType, *_MATRICES)] = None
    """format of tokens that travel to experts; left out: that of activations"""
    attention: Annotated[DType | None, member(DType, *_OF_ATTENTION)] = None
    """format of flash attention's products (on Blackwell); left out: that of activations"""
    first_layers: Ends = 0
    """first layers that keep bf16"""
    last_layers: Ends = 0
    """last layers that keep bf16"""

    def recipe(self) -> Recipe:
        """The formats that the file names, and the usual ones for the rest."""
        known = {d_type.value: d_type for d_type in _RECIPES}
        usual = _RECIPES[known[self.compute]] if self.compute in known else load_recipe(self.compute)
        named = {name: getattr(self, name) for name in self.model_fields_set & {"gradients", "master", "moments"}}
        return replace(
            usual,
            weights=replace(usual.weights, **named),
            stored=self.stored,
            gathered=self.gathered or self.stored,
            dispatched=None if self.dispatched is usual.activations else self.dispatched,
            attention=self.attention,
            first=self.first_layers,
            last=self.last_layers,
        )

    @model_validator(mode="after")
    def _only_recipes(self) -> Self:
        said = [name for name in (*_OF_MATRICES, "attention", "first_layers", "last_layers") if getattr(self, name)]
        if said and self.compute in {d_type.value for d_type in _RECIPES}:
            raise mistake(f"{said[0]} is about recipes such as mxfp8, but compute is {self.compute}; leave it out")
        for name in (item for item in said if item in _OF_MATRICES):
            self._require_matrices(name, getattr(self, name))
        return self

    def _require_matrices(self, name: str, dtype: object) -> None:
        """Matrices are kept and gathered as they are computed with, or as all other weights."""
        recipe = load_recipe(self.compute)
        legal = (recipe.activations, recipe.products.narrow)
        if isinstance(dtype, DType) and dtype not in legal:
            names = " or ".join(item.value for item in legal if item is not None)
            raise mistake(f"{name}: {self.compute} has nothing in {dtype.value}; {names} fits")
        if name == "stored" and dtype in NARROW and self.master is None:
            raise mistake("stored: the optimizer cannot update weights in a format with scales; name a master format")


class RecomputeMode(Enum):
    """How activations that backward needs come back."""

    NONE = "none"
    SELECTIVE = "selective"
    SELECTIVE_OP = "selective_op"
    FULL = "full"


_MODULES = tuple(module.value for module in Module)


def _modules(value: object) -> object:
    """A list of names, of which there is at least one."""
    if value is not None and (not isinstance(value, list) or not value):
        raise mistake(f"{shown(value)} is no list of modules; such as [{', '.join(module.value for module in Module)}]")
    return value


_SOME_MODULES = reads(
    _modules,
    f"a list of {', '.join(_MODULES)}",
    of=list[Literal[_MODULES]],  # type: ignore[valid-type]
)


class RecomputeSection(Section):
    """`training.recompute`: none, selective, selective_op, full, or full for so many layers of each stage."""

    short: ClassVar[str | None] = "mode"
    mode: Annotated[RecomputeMode, member(RecomputeMode)] = RecomputeMode.FULL
    """selective: attention; selective_op: torchtitan's, all but every second product and attention; full: whole
    layers; left out: none, full beside layers"""
    layers: Layers | None = None
    """layers of each stage and chunk that are recomputed in full; left out: all"""
    modules: Annotated[list[Annotated[Module, member(Module)]] | None, _SOME_MODULES] = None
    """what is recomputed of each layer, by Megatron-LM's names (selective alone: core_attn); left out: none"""
    early_stop: bool | None = None
    """recomputation ends where backward has what it needs (torch.utils.checkpoint); left out: the framework's"""

    @model_validator(mode="after")
    def _layers_are_full(self) -> Self:
        """So that `--set training.recompute.layers=4` works on a file that says none, too."""
        if self.layers is not None and self.mode in (RecomputeMode.SELECTIVE, RecomputeMode.SELECTIVE_OP):
            raise mistake("layers are recomputed in full, not selectively; write {layers: 4}")
        if self.modules is not None and (self.layers is not None or self._other_mode):
            raise mistake("modules are recomputed selectively, not in full; write {modules: [core_attn]}")
        return self

    @property
    def _other_mode(self) -> bool:
        """Whether the file names another mode than modules have."""
        named = "mode" in self.model_fields_set
        return named and self.mode in (RecomputeMode.SELECTIVE_OP, RecomputeMode.FULL)

    def choice(self) -> Recompute:
        """The kind of recomputation as the inside knows it."""
        if self.modules is not None:
            return SelectiveRecompute(frozenset(self.modules))
        match self.mode:
            case RecomputeMode.NONE if self.layers is None:
                return NoRecompute()
            case RecomputeMode.SELECTIVE:
                return SelectiveRecompute()
            case RecomputeMode.SELECTIVE_OP:
                return SelectiveOperations()
        return FullRecompute(layers=self.layers)


class TrainingSection(Section):
    """`training`: one step."""

    sequence: Tokens = Field(examples=[8192])
    """tokens of a sequence"""
    global_batch: Tokens = Field(examples=[2048])
    """sequences of a step"""
    microbatch: Tokens = 1
    """sequences at a time on each replica"""
    precision: PrecisionSection = PrecisionSection()
    """number formats"""
    recompute: RecomputeSection = RecomputeSection.model_validate("none")
    """activations that are computed again in backward; left out: none"""
    attention: Annotated[Attention, member(Attention)] = Attention.FLASH
    """flash: by the fastest library there is; flash2, flash1: FlashAttention's versions; standard: unfused"""
    loss: Annotated[Loss, member(Loss)] = Loss.VOCAB_PARALLEL
    """cross-entropy as in Megatron, in PyTorch, as one kernel each way, or chunk by chunk"""
    optimizer: Annotated[Optimizer, member(Optimizer)] = Optimizer.ADAM
    """which one"""
    gradient_clipping: bool = True
    """by the norm over all ranks"""
    fused: bool = True
    """norms, activation, rotary, residual and optimizer are fused kernels"""
    offload: OffloadSection = OffloadSection()
    """what lives on the host, see [Offload](scenario.md#offload-to-the-host); left out: none"""
    lora: Annotated[LoraSection | None, BeforeValidator(or_none)] = None
    """adapters beside frozen weights, or none; left out: none"""
    expert_load: Annotated[ExpertLoadSection | None, BeforeValidator(balanced_or)] = None
    """how unevenly tokens choose experts, or balanced; left out: balanced"""
    overheads: Annotated[OverheadsSection | None, BeforeValidator(or_none)] = OverheadsSection()
    """work beside the model that differs from the framework's, or none: nothing of it; left out: the framework's"""

    def step(self, there: frozenset[Projection], framework: Framework, data: DataParallelStrategy) -> Training:
        """The training step as the inside knows it.

        there: the model's projections; framework: what it usually does; data: the strategy of data parallelism.
        """
        plain = {name: getattr(self, name) for name in type(self).model_fields if name != "precision"}
        lora = None if self.lora is None else self.lora.adapters(there)
        overheads = overheads_of(self.overheads, framework.overheads, data)
        load = None if self.expert_load is None else self.expert_load.load()
        chosen = {"recipe": self.precision.recipe(), "recompute": self.recompute.choice(), "lora": lora}
        stated = self.recompute.early_stop
        early_stop = framework.early_stop if stated is None else stated
        usual = {"early_stop": early_stop, "overheads": overheads, "offload": self.offload.choice()}
        return Training(**{**plain, **chosen, **usual, "expert_load": load})
