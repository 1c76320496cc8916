"""Which weights are stored, sharded and reduced in the same way?

The weights of a model fall into parameter groups. Dense weights are one: ranks that differ only along
replicating axes hold the same of them. A data-parallel strategy shards a group over one `CommGroup`, or
replicates it over another, or both: gradients are reduce-scattered over the first, then averaged over the
second, and parameters are gathered over the first. DDP, ZeRO and FSDP differ only in these groups, in what is
sharded and in when it moves. Hybrid sharding has both (FSDP2's two-dimensional mesh, Megatron-LM's optimizer
instances, MiCS). Secondary shards (ZeRO++'s hpZ) are a second copy of the weights, sharded over fewer ranks,
from which backward gathers. Frozen weights and their LoRA adapters are separate groups: the first are
gathered where they are sharded, and nothing else. So are matrices that are stored or gathered in the format
of their matmuls, and the matrices that an optimizer orthogonalizes (`model.optimizers`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from clustersim.common.dtypes import DType
from clustersim.common.units import Bytes
from clustersim.model import operators
from clustersim.model.operators import (
    ADAPTERS,
    DENSE,
    ENCODER,
    EXPERTS,
    FROZEN,
    FROZEN_ENCODER,
    INDEXER,
    LOW_PRECISION_LAYERS,
    MATRICES,
    QUANTIZED,
)
from clustersim.model.optimizers import AnyOptimizer, Optimizer
from clustersim.model.precision_recipe import WeightFormats
from clustersim.model.training import Training
from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import (
    DP_GROUP,
    DP_REPLICATE_GROUP,
    DP_SHARD_GROUP,
    EDP_GROUP,
    EDP_REPLICATE_GROUP,
    EDP_SHARD_GROUP,
    ENCODER_DP_GROUP,
    EXPERT_MODEL_PARALLEL_GROUP,
    MODEL_PARALLEL_GROUP,
    SHARDED_REPLICA_GROUP,
    WORLD_GROUP,
    CommGroup,
)


@dataclass(frozen=True, slots=True)
class DataParallelGroups:
    """Data-parallel groups of a parameter group.

    full: all ranks that hold the same weights; shard: those over which hybrid sharding shards the weights;
    replicate: those that hold the same shard then.
    """

    full: CommGroup
    shard: CommGroup
    replicate: CommGroup


_DENSE_GROUPS: Final = DataParallelGroups(DP_GROUP, DP_SHARD_GROUP, DP_REPLICATE_GROUP)
_GROUPS_BY_NAME: Final[Mapping[str, DataParallelGroups]] = MappingProxyType(
    {
        **dict.fromkeys((DENSE, MATRICES, LOW_PRECISION_LAYERS, QUANTIZED, ADAPTERS, FROZEN, INDEXER), _DENSE_GROUPS),
        EXPERTS: DataParallelGroups(EDP_GROUP, EDP_SHARD_GROUP, EDP_REPLICATE_GROUP),
        **dict.fromkeys((ENCODER, FROZEN_ENCODER), DataParallelGroups(*3 * (ENCODER_DP_GROUP,))),
    }
)
"""The ranks over which a strategy shards or replicates a group's weights; hybrid sharding knows no encoder's."""


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Weights that are stored, sharded and reduced in the same way.

    shard_group: ranks over which they are sharded, None: unsharded; replicate_group: ranks that hold equal ones,
    None: one rank only; shard_count, replica_count: sizes of these groups; secondary_group: ranks over which a
    second copy is sharded (hpZ), None: there is none; secondary_shard_count: its size; formats: of weights,
    gradients and optimizer states; is_trained: they have gradients and optimizer states; optimizer: what updates
    them; factor_ratio: FP32 elements that it keeps of matrices for each of their elements, on average.
    """

    name: str
    formats: WeightFormats
    shard_group: CommGroup | None = None
    replicate_group: CommGroup | None = None
    shard_count: int = 1
    replica_count: int = 1
    secondary_group: CommGroup | None = None
    secondary_shard_count: int = 1
    is_trained: bool = True
    optimizer: AnyOptimizer = Optimizer.ADAM
    factor_ratio: float = 0.0

    @property
    def state_bytes(self) -> Bytes:
        """Bytes of moments, and of factors of matrices, for each parameter."""
        if not self.is_trained:
            return 0.0
        return self.optimizer.moment_bytes(self.formats.moments) + self.factor_ratio * DType.FP32.bytes

    @property
    def dp_size(self) -> int:
        """Number of ranks that reduce gradients with each other."""
        return self.shard_count * self.replica_count

    @property
    def host_format(self) -> DType:
        """Format on the host: master weights of the optimizer; frozen weights as they are stored for compute."""
        return self.formats.updated if self.is_trained else self.formats.stored


def parameter_groups(
    layout: Layout, training: Training, *, experts: bool = False, frozen: bool = False, indexer: bool = False
) -> tuple[ParameterGroup, ...]:
    """Parameter groups of a model, as the layout's strategy shards them.

    experts: whether the model has MoE layers; frozen: whether some parts of it are not trained; indexer: whether
    indexers of sparse attention are trained alone.
    """
    formats = _group_formats(training) | ({EXPERTS: training.recipe.matrix_formats} if experts else {})
    own_encoder = layout.has_encoder_mesh
    others = {FROZEN: frozen, INDEXER: indexer, ENCODER: own_encoder, FROZEN_ENCODER: own_encoder and frozen}
    formats |= {name: training.recipe.weight_formats for name, is_present in others.items() if is_present}
    all_frozen = {FROZEN, FROZEN_ENCODER}
    trained = {INDEXER} if indexer else {ADAPTERS} if training.lora is not None else formats.keys() - all_frozen
    groups = (_parameter_group(layout, name, weight_formats) for name, weight_formats in formats.items())
    return tuple(
        replace(
            group,
            is_trained=group.name in trained,
            optimizer=_group_optimizer(training, group.name),
        )
        for group in groups
    )


def _group_optimizer(training: Training, name: str) -> AnyOptimizer:
    """What updates a parameter group: no optimizer orthogonalizes the weights of the ends."""
    match name:
        case operators.EXPERTS:
            return training.expert_optimizer
        case operators.MATRICES | operators.LOW_PRECISION_LAYERS:
            return training.dense_optimizer
    return training.scalar_optimizer


def _group_formats(training: Training) -> dict[str, WeightFormats]:
    """Parameter groups of a training run by name, with their formats."""
    formats, lora = training.recipe.weight_formats, training.lora
    if lora is None:
        return {
            DENSE: formats,
            **({LOW_PRECISION_LAYERS: training.recipe.matrix_formats} if training.recipe.has_matrix_formats else {}),
            **({MATRICES: formats} if training.orthogonalizes_dense and not training.recipe.has_matrix_formats else {}),
        }
    quantized = {} if lora.base is None else {QUANTIZED: replace(formats, stored=lora.base, gathered=lora.base)}
    return {DENSE: formats, **quantized, ADAPTERS: formats}


def _parameter_group(layout: Layout, name: str, formats: WeightFormats) -> ParameterGroup:
    dp_groups = _DENSE_GROUPS if name == EXPERTS and not layout.has_expert_mesh else _GROUPS_BY_NAME[name]
    dp_size = layout.group_size(dp_groups.full)
    if not layout.data.zero_stage:
        return ParameterGroup(name, formats, replicate_group=dp_groups.full, replica_count=dp_size)
    if not layout.is_hybrid_sharded:
        return ParameterGroup(name, formats, shard_group=dp_groups.full, shard_count=dp_size)
    shard_count, replica_count = layout.group_size(dp_groups.shard), layout.group_size(dp_groups.replicate)
    if layout.data.zero_hpz_partition_size:
        return ParameterGroup(
            name,
            formats,
            shard_group=dp_groups.full,
            shard_count=dp_size,
            secondary_group=dp_groups.shard,
            secondary_shard_count=shard_count,
        )
    return ParameterGroup(
        name,
        formats,
        shard_group=dp_groups.shard,
        shard_count=shard_count,
        replicate_group=dp_groups.replicate,
        replica_count=replica_count,
    )


def single_copy_groups(layout: Layout, groups: Iterable[ParameterGroup]) -> tuple[CommGroup, ...]:
    """For each group, the ranks that hold all its reduced gradients exactly once together (for the gradient norm).

    Where experts have a mesh of their own and nothing is sharded, those differ from the dense weights'. A sharded
    copy of all groups lies on the same ranks, so one collective suffices for all (Megatron-LM's ChainedOptimizer,
    `grads_states_parallel_group_is_shared` in megatron/core/optimizer/optimizer.py). Nor do an encoder on ranks of its
    own and the model form groups of equal size: all ranks sum.
    """
    if layout.encoder_ranks:
        return (WORLD_GROUP,)
    if not layout.data.zero_stage:
        expert_group = EXPERT_MODEL_PARALLEL_GROUP if layout.has_expert_mesh else MODEL_PARALLEL_GROUP
        return tuple(dict.fromkeys(expert_group if group.name == EXPERTS else MODEL_PARALLEL_GROUP for group in groups))
    return (
        (SHARDED_REPLICA_GROUP,)
        if layout.is_hybrid_sharded and not layout.data.zero_hpz_partition_size
        else (WORLD_GROUP,)
    )
