"""How are a layer's branches joined: with norms, residual adds, modulation and gates, in sequence or in parallel?"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from clustersim.model import memory_bound
from clustersim.model.conditioning_layers import gate_operator, modulate_operator, modulation_operators
from clustersim.model.layer_stack import BlockForm, DenseMlp, LayerSpec, MlpSpec
from clustersim.model.mixers.registry import registered_mixer
from clustersim.model.operators import (
    Operator,
    ParallelRegion,
    RegionInput,
    assign_module,
    mark_module_reader,
)
from clustersim.model.recompute_modules import ModuleMembership, RecomputeModule
from clustersim.model.sharded_layer import (
    RankContext,
    memory_bound_operator,
    norm_operator,
    residual_add_operator,
    residual_fork_operator,
    residual_stream_operator,
)
from clustersim.model.training import FusedKernel
from clustersim.model.transformer import cross_norm_parameters


class LayerBranches(NamedTuple):
    """Operators of a layer's branches: shared block, mixer, attention to another sequence, MLP; empty: none."""

    shared: list[Operator]
    mixer: list[Operator]
    cross: list[Operator]
    mlp: list[Operator]


def block_operators(rank: RankContext, spec: LayerSpec, branches: LayerBranches) -> tuple[Operator, ...]:
    """The operators of a layer: its branches with norms, modulation and residual adds."""
    modulation = [] if spec.modulation is None else modulation_operators(rank, spec.modulation)
    if spec.block.is_parallel and branches.mixer and branches.mlp:
        return *modulation, *_parallel_block(rank, spec, branches.mixer, branches.mlp)
    starts_linear = spec.mixer is not None and registered_mixer(spec.mixer).starts_linear
    name = "mixer" if spec.attention is None or branches.shared else "attention"
    return (
        *modulation,
        *branches.shared,
        *_branch(rank, spec, name, branches.mixer, starts_linear=starts_linear),
        *_cross_branch(rank, branches.cross),
        *_branch(rank, spec, "mlp", branches.mlp, starts_linear=_starts_linear(spec.mlp)),
    )


def _starts_linear(mlp: MlpSpec | None) -> bool:
    """Whether an MLP begins with a linear layer."""
    return isinstance(mlp, DenseMlp) and not mlp.token_shift


def _branch(
    rank: RankContext, spec: LayerSpec, name: str, operators: list[Operator], *, starts_linear: bool
) -> list[Operator]:
    """A residual branch between its norm and its residual add; starts_linear: a norm may be fused into its first."""
    if not operators:
        return []
    is_plain = starts_linear and spec.modulation is None
    branch = operators if spec.modulation is None else _modulated(rank, name, operators)
    return _add_residual(rank, spec.block, name, _add_norm(rank, spec.block, name, branch, starts_linear=is_plain))


def _modulated(rank: RankContext, name: str, operators: list[Operator]) -> list[Operator]:
    """A branch whose input is scaled and shifted, and whose result is multiplied by a gate."""
    return [modulate_operator(rank, f"{name}.modulate"), *operators, gate_operator(rank, f"{name}.gate")]


def _cross_branch(rank: RankContext, operators: list[Operator]) -> list[Operator]:
    """Attention to another sequence, which is not modulated, and whose norm has weights."""
    if not operators:
        return []
    norm, *others = _add_norm(rank, BlockForm.PRE_NORM, "cross_attention", operators, starts_linear=False)
    norm = replace(norm, parameter_count=cross_norm_parameters(rank.model))
    return _add_residual(rank, BlockForm.PRE_NORM, "cross_attention", [norm, *others])


def join_streams(*streams: Sequence[Operator]) -> tuple[Operator, ...]:
    """A double-stream block: the operators of both streams, and the attention core of all tokens.

    streams: the operators of one stream of all tokens, and of each stream with its own ones.
    """
    return tuple(_join_operators(*operators) for operators in zip(*streams, strict=True))


def _join_operators(joint: Operator, first: Operator, second: Operator) -> Operator:
    if joint.is_in_modules({RecomputeModule.CORE_ATTENTION}):
        return joint
    return replace(
        joint,
        forward=first.forward + second.forward,
        input_gradient=first.input_gradient + second.input_gradient,
        weight_gradient=first.weight_gradient + second.weight_gradient,
        parameter_count=first.parameter_count + second.parameter_count,
        recompute_override=None
        if first.recompute_override is None or second.recompute_override is None
        else first.recompute_override + second.recompute_override,
        cached_cast_elements=first.cached_cast_elements + second.cached_cast_elements,
        matrices=first.matrices + second.matrices,
    )


def _add_residual(rank: RankContext, block: BlockForm, name: str, branch: list[Operator]) -> list[Operator]:
    """A residual branch, followed by its post-norm or scale, if any, and the residual add."""
    post_norm = [norm_operator(rank, f"{name}.post_norm", forks=False)] if block.has_post_norm else []
    scale = [_layer_scale_operator(rank, f"{name}.layer_scale")] if rank.model.layer_scale else []
    return [*branch, *post_norm, *scale, residual_add_operator(rank, f"{name}.residual")]


def _layer_scale_operator(rank: RankContext, name: str) -> Operator:
    operator = residual_stream_operator(rank, name, memory_bound.LAYER_SCALE)
    return replace(operator, parameter_count=rank.model.hidden)


def _add_norm(
    rank: RankContext, block: BlockForm, name: str, branch: list[Operator], *, starts_linear: bool
) -> list[Operator]:
    """A residual branch and the norm before it.

    starts_linear: a linear layer is first, which the norm may be fused into.
    """
    if not block.has_pre_norm:
        return [residual_fork_operator(rank, f"{name}.fork"), *branch]
    if not (starts_linear and rank.training.overheads.norm_in_linear):
        return [_module_norm(rank, f"{name}.norm"), *mark_module_reader(branch, RecomputeModule.LAYERNORM)]
    first, *remaining = branch
    memberships = tuple(ModuleMembership(membership.module) for membership in first.memberships)
    norm = replace(norm_operator(rank, f"{name}.norm"), memberships=first.memberships)
    return [norm, replace(first, memberships=memberships), *remaining]


def _module_norm(rank: RankContext, name: str) -> Operator:
    """A norm before a branch, as a recomputable module."""
    (operator,) = assign_module([norm_operator(rank, name)], RecomputeModule.LAYERNORM, rank.residual_bytes)
    return operator


def _parallel_block(
    rank: RankContext, spec: LayerSpec, attention: list[Operator], mlp: list[Operator]
) -> list[Operator]:
    """A parallel block: attention and MLP read the same input; what both save of it is counted once."""
    block = spec.block
    (qkv, *attention_rest), (up, *mlp_rest) = (
        mark_module_reader(branch, RecomputeModule.LAYERNORM) for branch in (attention, mlp)
    )
    total = replace(_branch_sum(rank, "block.sum"), region=ParallelRegion.SHARDED)
    residual = residual_add_operator(rank, "block.residual")
    if block is BlockForm.PARALLEL_NORMS:
        attention_norm, mlp_norm = _module_norm(rank, "attention.norm"), _module_norm(rank, "mlp.norm")
        mlp_norm = replace(
            mlp_norm,
            saved_bytes=mlp_norm.saved_bytes - rank.residual_bytes,
            memberships=(ModuleMembership(RecomputeModule.LAYERNORM),),
        )
        return [
            attention_norm,
            mlp_norm,
            qkv,
            *attention_rest,
            replace(up, region_input=RegionInput.OTHER),
            *mlp_rest,
            total,
            residual,
        ]
    shared_bytes = rank.shared_input_bytes(rank.residual_elements)
    gradient_sum = _branch_sum(rank, "block.gradient_sum").forward
    qkv = replace(qkv, input_gradient=(*qkv.input_gradient, *gradient_sum))
    memberships = tuple(
        ModuleMembership(membership.module) for membership in up.memberships
    )  # which is the input of the MLP's module, too
    up = replace(
        up,
        region_input=RegionInput.SAME,
        saved_bytes=up.saved_bytes - shared_bytes,
        deferred_wgrad_bytes=up.deferred_wgrad_bytes - shared_bytes,
        wgrad_input_bytes=up.wgrad_input_bytes - shared_bytes,
        memberships=memberships,
    )
    norm = [_module_norm(rank, "block.norm")]
    gate: list[Operator] = []
    if spec.modulation is not None:
        norm.append(modulate_operator(rank, "block.modulate"))
        gate = [gate_operator(rank, "block.gate")]
    if block is BlockForm.PARALLEL_FUSED:
        return [*norm, *_fused_output(rank, [qkv, *attention_rest], [up, *mlp_rest]), *gate, residual]
    return [*norm, qkv, *attention_rest, up, *mlp_rest, total, *gate, residual]


def _fused_output(rank: RankContext, attention: list[Operator], mlp: list[Operator]) -> list[Operator]:
    """Both branches before one output matrix of their concatenated results, which has one bias.

    The product is that of two matrices whose results are added in place.
    """
    *attention_inner, out = attention
    *mlp_inner, down = mlp
    widths = sum(operator.linear.inputs for operator in (out, down) if operator.linear is not None)
    kernel = memory_bound.copy_kernel("block.concat", rank.dtype, rank.shard.tokens * widths)
    concat = Operator(kernel.name, ParallelRegion.SHARDED, (kernel,))
    bias = rank.model.hidden if rank.model.linear_bias else 0
    single_bias = replace(out, parameter_count=out.parameter_count - bias)
    return [*attention_inner, *mlp_inner, concat, single_bias, down]


def _branch_sum(rank: RankContext, name: str) -> Operator:
    """The sum of both branches' outputs for all tokens of this rank; the gradient passes unchanged."""
    spec = memory_bound.residual_spec(dropout=False, fused=rank.training.fuses(FusedKernel.RESIDUAL))
    return memory_bound_operator(
        ParallelRegion.REPLICATED, name, rank.dtype, spec, (spec.shape_for(rank.shard.tokens, rank.model.hidden),)
    )
