"""What may a scenario file say about training?"""

from dataclasses import replace
from enum import Enum
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, ValidationInfo, WithJsonSchema, field_validator, model_validator

from clustersim.common import data_files
from clustersim.common.dtypes import LOW_PRECISION_DTYPES, DType
from clustersim.common.errors import format_value, suggest_nearest
from clustersim.model.framework import KERNEL_KEYS, Framework
from clustersim.model.lora import Projection
from clustersim.model.moe_expert_load import ExpertLoad
from clustersim.model.precision_recipe import PrecisionRecipe, mixed_precision
from clustersim.model.recipe_files import load_recipe
from clustersim.model.recompute_modules import RecomputeModule
from clustersim.model.training import (
    ALL_FUSED,
    NONE_FUSED,
    AttentionBackend,
    DotsSaveableRecompute,
    FullRecompute,
    FusedKernel,
    LossImplementation,
    NoRecompute,
    Recompute,
    SelectiveOpRecompute,
    SelectiveRecompute,
    Training,
)
from clustersim.parallel.data_parallel_strategy import DataParallelStrategy
from clustersim.scenario.config.documents import DocumentsConfig
from clustersim.scenario.config.expert_load import ExpertLoadConfig, none_from_balanced
from clustersim.scenario.config.global_batch import parse_global_batch
from clustersim.scenario.config.lora import LoraConfig
from clustersim.scenario.config.offload import OffloadConfig
from clustersim.scenario.config.optimizer import OptimizerConfig
from clustersim.scenario.config.overheads import OverheadsConfig, resolve_overheads
from clustersim.scenario.config.tiled_mlp import TiledMlpConfig, tiling_from_switch
from clustersim.scenario.config_reader import (
    ConfigModel,
    LayerCount,
    LayerCountOrZero,
    TokenCount,
    config_error,
    enum_parser,
    none_from_word,
    suggest_value,
    value_parser,
)

_MIXED_PRECISION_RECIPES = {
    DType.BF16: mixed_precision(compute=DType.BF16),
    DType.FP16: mixed_precision(compute=DType.FP16),
    DType.TF32: mixed_precision(compute=DType.TF32, master=None),
    DType.FP32: mixed_precision(compute=DType.FP32, master=None),
}
_UNMIXED = (DType.TF32.value, DType.FP32.value)  # nothing is stored in fewer bits
_COMPUTE_NAMES = (*(dtype.value for dtype in _MIXED_PRECISION_RECIPES), *data_files.list_names("recipes"))
_MATRIX_FORMATS = (DType.BF16, *LOW_PRECISION_DTYPES)
_MATRIX_KEYS = ("stored", "gathered", "dispatched")
_ATTENTION_FORMATS = (DType.FP8, DType.MXFP8)
_STATE_FORMATS = (DType.FP32, DType.BF16, DType.FP16)


def _parse_compute(value: object) -> object:
    """The name of a format or of a packaged recipe."""
    if not isinstance(value, str) or value not in _COMPUTE_NAMES:
        raise config_error(f"{format_value(value)} is unknown; {suggest_value(str(value), _COMPUTE_NAMES)}")
    return value


class PrecisionConfig(ConfigModel):
    """`training.precision`: formats of matmuls, weights and optimizer states; compute determines the defaults."""

    shorthand_key: ClassVar[str | None] = "compute"
    compute: Annotated[
        str, value_parser(_parse_compute, "a format or a recipe", schema_type=Literal[_COMPUTE_NAMES])
    ] = DType.BF16.value
    """format of matmuls, or a recipe of topologies/recipes"""
    gradients: Annotated[DType | None, enum_parser(DType, *_STATE_FORMATS)] = None
    """format in which gradients are accumulated and reduced; left out: the framework's (most: fp32)"""
    master: Annotated[DType | None, enum_parser(DType, *_STATE_FORMATS, none_word="none")] = DType.FP32
    """format of master weights; left out: fp32, with compute fp32 and tf32 none"""
    moments: Annotated[DType, enum_parser(DType, *_STATE_FORMATS)] = DType.FP32
    """format of the optimizer's moments"""
    stored: Annotated[DType | None, enum_parser(DType, *_MATRIX_FORMATS)] = None
    """storage format of weight matrices with a recipe: bf16 or its own; left out: that of the other weights"""
    gathered: Annotated[DType | None, enum_parser(DType, *_MATRIX_FORMATS)] = None
    """format in which they are all-gathered; left out: as stored"""
    dispatched: Annotated[DType | None, enum_parser(DType, *_MATRIX_FORMATS)] = None
    """format of tokens dispatched to experts; left out: that of activations"""
    attention: Annotated[DType | None, enum_parser(DType, *_ATTENTION_FORMATS)] = None
    """format of flash attention's matmuls (on Blackwell); left out: that of activations"""
    num_layers_at_start_in_bf16: LayerCountOrZero = 0
    """leading layers that stay in bf16"""
    num_layers_at_end_in_bf16: LayerCountOrZero = 0
    """trailing layers that stay in bf16"""

    def recipe(self, gradients: DType = DType.FP32) -> PrecisionRecipe:
        """The precision recipe: the formats stated in the file, defaults for the others.

        gradients: their format in 16-bit runs where the file states none.
        """
        dtype_by_name = {dtype.value: dtype for dtype in _MIXED_PRECISION_RECIPES}
        base_recipe = (
            _MIXED_PRECISION_RECIPES[dtype_by_name[self.compute]]
            if self.compute in dtype_by_name
            else load_recipe(self.compute)
        )
        default_gradients = DType.FP32 if self.compute in _UNMIXED else gradients
        weight_formats = {
            "gradients": self.gradients or default_gradients,
            **{name: getattr(self, name) for name in self.model_fields_set & {"master", "moments"}},
        }
        return replace(
            base_recipe,
            weight_formats=replace(base_recipe.weight_formats, **weight_formats),
            stored=self.stored,
            gathered=self.gathered or self.stored,
            dispatch_format=None if self.dispatched is base_recipe.activations else self.dispatched,
            attention=self.attention,
            num_layers_at_start_in_bf16=self.num_layers_at_start_in_bf16,
            num_layers_at_end_in_bf16=self.num_layers_at_end_in_bf16,
        )

    @model_validator(mode="after")
    def _check_recipe_keys(self) -> Self:
        stated_keys = [
            name
            for name in (*_MATRIX_KEYS, "attention", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
            if getattr(self, name)
        ]
        if stated_keys and self.compute in {dtype.value for dtype in _MIXED_PRECISION_RECIPES}:
            raise config_error(
                f"{stated_keys[0]} is about recipes such as mxfp8, but compute is {self.compute}; leave it out"
            )
        for name in (stated_key for stated_key in stated_keys if stated_key in _MATRIX_KEYS):
            self._check_matrix_format(name, getattr(self, name))
        return self

    def _check_matrix_format(self, name: str, dtype: object) -> None:
        """Check that a storage or gather format is the recipe's matmul format or that of activations."""
        recipe = load_recipe(self.compute)
        allowed = (recipe.activations, recipe.matmul_formats.low_precision)
        if isinstance(dtype, DType) and dtype not in allowed:
            names = " or ".join(dtype.value for dtype in allowed if dtype is not None)
            raise config_error(f"{name}: {self.compute} has nothing in {dtype.value}; {names} fits")
        if name == "stored" and dtype in LOW_PRECISION_DTYPES and self.master is None:
            raise config_error(
                "stored: the optimizer cannot update weights in a format with scales; name a master format"
            )


class RecomputeMode(Enum):
    """Which activations backward recomputes."""

    NONE = "none"
    SELECTIVE = "selective"
    SELECTIVE_OP = "selective_op"
    DOTS_SAVEABLE = "dots_with_no_batch_dims_saveable"
    FULL = "full"


_MODULE_NAMES = tuple(recompute_module.value for recompute_module in RecomputeModule)


def _parse_modules(value: object) -> object:
    """A non-empty list of module names."""
    if value is not None and (not isinstance(value, list) or not value):
        raise config_error(
            f"{format_value(value)} is no list of modules; such as "
            f"[{', '.join(recompute_module.value for recompute_module in RecomputeModule)}]"
        )
    return value


_MODULES_PARSER = value_parser(
    _parse_modules,
    f"a list of {', '.join(_MODULE_NAMES)}",
    schema_type=list[Literal[_MODULE_NAMES]],  # type: ignore[valid-type]
)


class RecomputeConfig(ConfigModel):
    """`training.recompute`: none, selective, selective_op, full, or full for some layers of each stage."""

    example: ClassVar[str] = "none, selective, full or {layers: 4}"
    shorthand_key: ClassVar[str | None] = "mode"
    mode: Annotated[RecomputeMode, enum_parser(RecomputeMode)] = RecomputeMode.FULL
    """selective: core attention; selective_op: torchtitan's, every second matmul and all but attention.

    dots_with_no_batch_dims_saveable: JAX's, all but products with weights;
    full: entire layers; left out: none, full if layers is given
    """
    layers: LayerCount | None = None
    """number of layers of each stage and chunk that are recomputed in full; left out: all"""
    modules: Annotated[list[Annotated[RecomputeModule, enum_parser(RecomputeModule)]] | None, _MODULES_PARSER] = None
    """recomputed modules of each layer, by Megatron-LM's names (selective alone: core_attn); left out: none"""
    early_stop: bool | None = None
    """recomputation stops once backward has what it needs (torch.utils.checkpoint); left out: the framework's"""

    @model_validator(mode="after")
    def _check_mode(self) -> Self:
        """Check that mode, layers and modules agree.

        `--set training.recompute.layers=4` works on a file with `recompute: none`, too.
        """
        if self.layers is not None and self.mode not in (RecomputeMode.NONE, RecomputeMode.FULL):
            raise config_error("layers are recomputed in full, not selectively; write {layers: 4}")
        if self.modules is not None and (self.layers is not None or self._has_conflicting_mode):
            raise config_error("modules are recomputed selectively, not in full; write {modules: [core_attn]}")
        return self

    @property
    def _has_conflicting_mode(self) -> bool:
        """Whether the file states a mode that excludes modules."""
        is_stated = "mode" in self.model_fields_set
        return is_stated and self.mode not in (RecomputeMode.NONE, RecomputeMode.SELECTIVE)

    def recompute_policy(self) -> Recompute:
        """The recomputation policy as the simulator represents it."""
        if self.modules is not None:
            return SelectiveRecompute(frozenset(self.modules))
        match self.mode:
            case RecomputeMode.NONE if self.layers is None:
                return NoRecompute()
            case RecomputeMode.SELECTIVE:
                return SelectiveRecompute()
            case RecomputeMode.SELECTIVE_OP:
                return SelectiveOpRecompute()
            case RecomputeMode.DOTS_SAVEABLE:
                return DotsSaveableRecompute()
        return FullRecompute(layers=self.layers)


_GlobalBatchInput = Annotated[
    int | str,
    WithJsonSchema(
        {
            "type": ["integer", "string"],
            "minimum": 1,
            "$comment": "sequences, or tokens with their unit",
        }
    ),
]


_FUSED_NAMES = tuple(kind.value for kind in FusedKernel)


def _parse_fused(value: object) -> object:
    """Kinds of fused kernels of `true`, `false`, or a list of their names."""
    if isinstance(value, bool):
        return ALL_FUSED if value else NONE_FUSED
    if not isinstance(value, list | tuple | frozenset):
        raise config_error(f"{format_value(value)} is neither true, false nor a list of {', '.join(_FUSED_NAMES)}")
    unknown = [name for name in value if name not in _FUSED_NAMES and not isinstance(name, FusedKernel)]
    if unknown:
        raise config_error(f"{format_value(unknown[0])} is unknown; {suggest_nearest(str(unknown[0]), _FUSED_NAMES)}")
    return frozenset(map(FusedKernel, value))


_FUSED_PARSER = value_parser(
    _parse_fused,
    f"true, false, or a list of {', '.join(_FUSED_NAMES)}",
    "[norm, optimizer]",
    schema_type=bool | list[Literal[_FUSED_NAMES]],  # type: ignore[valid-type]
)


class TrainingConfig(ConfigModel):
    """`training`: one training step."""

    sequence: TokenCount | None = Field(None, examples=[8192])
    """sequence length in tokens; left out: of a model of images the tokens of one, others need it"""
    global_batch: TokenCount = Field(examples=[2048, "16Mi tokens", "4194304 tokens"])
    """sequences per step, or tokens with their unit, see [Batches](scenario.md#batches)"""
    microbatch: TokenCount = 1
    """sequences per microbatch on each replica"""
    precision: PrecisionConfig = PrecisionConfig()
    """number formats"""
    recompute: RecomputeConfig = RecomputeConfig.model_validate("none")
    """activation recomputation in backward; left out: none"""
    attention: Annotated[AttentionBackend | None, enum_parser(AttentionBackend)] = None
    """flash: the fastest library; sdpa: what PyTorch's scaled_dot_product_attention takes; cudnn; flash4, flash3,
    flash2, flash1: FlashAttention's versions; standard: unfused; left out: the framework's"""
    loss: Annotated[LossImplementation | None, enum_parser(LossImplementation)] = None
    """cross-entropy as in Megatron, in PyTorch (of logits kept in fp32: torch_fp32), as one kernel each for forward and
    backward (fused, compiled), in chunks, in chunks with its matmul (fused_linear; Liger's: liger, up to release 0.8.0
    liger_fp32_sum), or with its matmul so that backward computes logits again (chunked_nll, cut_cross_entropy); left
    out: the framework's"""
    z_loss: bool = False
    """the squared logarithm of each token's sum of exponentials is part of the loss"""
    optimizer: OptimizerConfig = OptimizerConfig()
    """what updates the weights, see [Optimizers](scenario.md#optimizers)"""
    optimizer_in_backward: bool = False
    """weights are updated, and gradients freed, while backward runs: with one microbatch and no gradient_clipping"""
    gradient_clipping: bool = True
    """by the global gradient norm"""
    fused: Annotated[frozenset[FusedKernel] | None, _FUSED_PARSER] = None
    """operations that run as one kernel each: true: all, false: none, or a list of kinds; left out: the framework's"""
    offload: OffloadConfig = OffloadConfig()
    """CPU offload, see [Offload](scenario.md#offload-to-the-host); left out: none"""
    lora: Annotated[LoraConfig | None, BeforeValidator(none_from_word)] = None
    """LoRA adapters on frozen weights, or none; left out: none"""
    expert_load: Annotated[ExpertLoadConfig | None, BeforeValidator(none_from_balanced)] = None
    """imbalance of tokens over experts, or balanced; left out: balanced"""
    reference_model: bool = False
    """a frozen copy of the model runs forward, too (DPO): twice the sequences of a preference pair are the batch's;
    with lora it is the model without adapters"""
    documents: Annotated[DocumentsConfig | None, BeforeValidator(none_from_word)] = None
    """lengths of documents packed into sequences, see [Packed documents](scenario.md#packed-documents), or none; left
    out: none"""
    tiled_mlp: Annotated[TiledMlpConfig | None, BeforeValidator(tiling_from_switch)] = None
    """dense MLPs run on tiles of the sequence, see [Losses](scenario.md#mlps-on-tiles), or false;
    left out: false
    """
    overheads: Annotated[OverheadsConfig | None, BeforeValidator(none_from_word)] = OverheadsConfig()
    """differences from the framework's per-step overheads, or none: no overheads; left out: the framework's"""

    @field_validator("global_batch", mode="before", json_schema_input_type=_GlobalBatchInput)
    @classmethod
    def _parse_global_batch(cls, value: object, info: ValidationInfo) -> object:
        """Sequences of a batch in tokens; where the sequence length is wrong, that problem alone is reported."""
        if "sequence" not in info.data:
            return 1
        return parse_global_batch(value, info.data["sequence"])

    @property
    def sequence_tokens(self) -> int:
        """Tokens of a sequence, once `resolve` has added what the file leaves out."""
        return self.sequence or 0

    def training_step(
        self,
        model_projections: frozenset[Projection],
        framework: Framework,
        data: DataParallelStrategy,
        expert_load: ExpertLoad | None,
    ) -> Training:
        """The training step as the simulator represents it.

        model_projections: the model's weight matrices; framework: source of defaults; data: the data-parallel
        strategy; expert_load: that of the section, with the content of its file.
        """
        copied_fields = {name: getattr(self, name) for name in type(self).model_fields if name != "precision"}
        lora = None if self.lora is None else self.lora.lora_settings(model_projections)
        overheads = resolve_overheads(self.overheads, framework.overheads, data)
        parsed_fields = {
            "recipe": self.precision.recipe(framework.kernels.gradients),
            "recompute": self.recompute.recompute_policy(),
            "lora": lora,
            "optimizer": self.optimizer.optimizer(),
            "documents": None if self.documents is None else self.documents.packed_documents(),
            "tiled_mlp": None if self.tiled_mlp is None else self.tiled_mlp.tiling(),
        }
        stated_early_stop = self.recompute.early_stop
        early_stop = framework.early_stop if stated_early_stop is None else stated_early_stop
        kernel_fields = {name: getattr(framework.kernels, name) for name in KERNEL_KEYS if copied_fields[name] is None}
        default_fields = {"early_stop": early_stop, "overheads": overheads, "offload": self.offload.offload_policy()}
        return Training(
            **{**copied_fields, **parsed_fields, **kernel_fields, **default_fields, "expert_load": expert_load}
        )
