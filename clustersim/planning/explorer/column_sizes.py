"""How many bytes does one rank hold and send of each counted quantity, for every way to shard the model?

Saved bytes are T (a + b k) for T tokens that attend to k keys: two sequence lengths, one twice the other,
determine a and b. They are for one context-parallel rank; with more, T shrinks and k does not. Images have one
length, of which what a sample takes is known.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any, Final

from clustersim.common.units import Bytes
from clustersim.lowering.program_builder import RankProgramBuilder
from clustersim.lowering.task_list import SegmentCache
from clustersim.lowering.units import UnitBuilder
from clustersim.memory.activations import ActivationKind, Activations, layer_saved_bytes
from clustersim.model.layer_stack import LayerSpec
from clustersim.model.operators import ADAPTERS, DENSE, EXPERTS, QUANTIZED
from clustersim.model.training import Recompute
from clustersim.parallel.plan import Plan
from clustersim.planning.explorer.expert_traffic import EP_OPS, ETP_OPS, expert_bytes_sent
from clustersim.planning.explorer.settings import FEATURES, ExplorerSpace, parse_recompute
from clustersim.program.task import TokenDispatcher
from clustersim.results.explorer_tables import LookupTable
from clustersim.scenario.validation_rules.moe import check_expert_sharding, check_sequence_parallel

_LAYER_KINDS: Final = (
    ActivationKind.LAYER_INPUT,
    ActivationKind.LAYER_FULL,
    ActivationKind.LAYER_GRADIENTS,
    ActivationKind.LAYER_WEIGHT_GRADIENT,
)
_END_KINDS: Final = (
    ActivationKind.STAGE_OUTPUT,
    ActivationKind.EMBEDDING_SAVED,
    ActivationKind.HEAD_SAVED,
    ActivationKind.LOSS_GRADIENT,
    ActivationKind.CAST_GRADIENT,
    ActivationKind.EMBEDDING_WEIGHT_GRADIENT,
    ActivationKind.HEAD_WEIGHT_GRADIENT,
)
_CONSTANT_KINDS: Final = (
    ActivationKind.LAYER_WEIGHT_GRADIENT,
    ActivationKind.EMBEDDING_WEIGHT_GRADIENT,
    ActivationKind.HEAD_WEIGHT_GRADIENT,
)
LAYER_PARAMETER_COLUMNS: Final = {
    DENSE: "layer parameters",
    QUANTIZED: "quantized parameters of a layer",
    ADAPTERS: "adapters' parameters of a layer",
    EXPERTS: "experts' parameters of a layer",
}
"""Columns of a layer's parameters, by parameter group."""
REUSED_PARAMETERS: Final = "reused {}"
"""Column of those parameters of earlier layers that a layer uses again, by the column of its own."""
CAST_COLUMN: Final = "weights of a layer that are cast"
"""The weight elements of which there may be copies in the matmul format."""
END_PARAMETER_COLUMNS: Final = ("embedding parameters", "head parameters", "parameters of the only stage's head")
EXPERT_GRADIENT_COLUMN: Final = "gradient of a layer's experts"
"""Gradient of the largest expert weight, where dense weights count with what ZeRO-3 gathers."""
COMM_COLUMNS: Final = (
    "activation to tp",
    "operand to tp",
    "tokens to tp",
    "elements of tokens to tp",
    "elements of operands to tp",
    "keys and values to cp",
    "message",
    "tied gradient",
)
"""Operands are matmul inputs, which may be gathered in the matmul format."""
_TOKENS_PER_TP_RANK: Final = 64  # tokens per tensor-parallel rank; any value works

RowValues = list[float]


def kind_column(name: str, kind: int) -> str:
    """Column name of a quantity of one kind of layer."""
    return name if kind == 0 else f"{name}, kind {kind}"


def saved_column(recompute: str) -> str:
    """Column of what a layer saves under a selective recompute policy."""
    return f"layer kept, {recompute}"


def layer_parameter_columns(space: ExplorerSpace) -> dict[str, str]:
    """Columns of a layer's parameters, by parameter group."""
    return {group: name for group, name in LAYER_PARAMETER_COLUMNS.items() if group != EXPERTS or space.is_moe}


def reused_parameter_columns(space: ExplorerSpace) -> dict[str, str]:
    """Columns of parameters that a layer shares with an earlier one, by parameter group."""
    columns = layer_parameter_columns(space) if space.shares_weights else {}
    return {group: REUSED_PARAMETERS.format(name) for group, name in columns.items()}


def column_names(space: ExplorerSpace) -> tuple[str, ...]:
    """Names of all columns."""
    layer_columns = (
        *(activation_kind.value for activation_kind in _LAYER_KINDS),
        *map(saved_column, space.selective_policies),
        *layer_parameter_columns(space).values(),
        *reused_parameter_columns(space).values(),
        CAST_COLUMN,
    )
    kind_columns = (*layer_columns, EXPERT_GRADIENT_COLUMN) if space.is_moe else layer_columns
    kinds = (kind_column(name, kind) for kind in range(space.layer_kind_count) for name in kind_columns)
    expert_columns = (*EP_OPS, *ETP_OPS) if space.is_moe else ()
    return (
        *(activation_kind.value for activation_kind in _END_KINDS),
        *kinds,
        *END_PARAMETER_COLUMNS,
        *COMM_COLUMNS,
        *expert_columns,
    )


def column_sizes(space: ExplorerSpace) -> LookupTable:
    """Bytes of every column, and parameter counts, [columns][features]; illegal tensor-parallel degrees are missing."""
    size_cache: dict[tuple[Any, ...], dict[str, RowValues]] = {}
    activation_classes = space.first_equivalent_recipes(lambda recipe: recipe.activations)
    weight_classes = space.first_equivalent_recipes(
        lambda recipe: replace(recipe, weight_formats=space.precisions[0].weight_formats)
    )
    expert_rows = cache(
        lambda *key: [
            *_expert_comm_rows(space, **dict(zip(("precision", "ep", "etp", "dispatcher"), key, strict=True)))
        ]
    )

    def expert_columns(precision: int, tp: int, *experts: Any) -> Iterator[tuple[str, RowValues]]:
        """What a rank sends to expert ranks: its tokens are a share of those of all TP ranks."""
        comm_rows = expert_rows(activation_classes[precision], *experts)  # tokens are sent in the activations' format
        yield from ((name, _row(one=constant, tokens=per_token / tp)) for name, constant, per_token in comm_rows)

    names = column_names(space)

    def size_rows(model: int, precision: int, tp: int, split: bool, **experts: Any) -> list[RowValues] | None:
        settings = {"model": model, "tp": tp, "split": split, **experts}
        if (model, tp) not in space.legal_tp_degrees or (space.is_moe and not _is_legal_expert_split(space, settings)):
            return None
        dispatcher = experts.get("dispatcher")
        permutes_before_dispatch = (
            None if dispatcher is None else TokenDispatcher(dispatcher) is not TokenDispatcher.ALL_TO_ALL
        )
        key = (weight_classes[precision], model, tp, split, *[*experts.values()][:2], permutes_before_dispatch)
        if key not in size_cache:
            size_cache[key] = dict(_layer_and_end_columns(space, precision=precision, **settings))
        rows = size_cache[key] | (dict(expert_columns(precision, tp, *experts.values())) if space.is_moe else {})
        head, single_head = (rows[name][0] for name in END_PARAMETER_COLUMNS[1:])
        tied = _constant_row((head - single_head) * space.precisions[precision].weight_formats.gradients.bytes)
        return [tied if name == COMM_COLUMNS[-1] else rows[name] for name in names]

    experts = ("ep", "etp", "dispatcher") if space.is_moe else ()
    return space.build_table(size_rows, "model", "precision", "tp", "split", *experts)


def _is_legal_expert_split(space: ExplorerSpace, settings: dict[str, Any]) -> bool:
    scenario = space.scenario_with(**settings)
    return not [*check_expert_sharding(scenario), *check_sequence_parallel(scenario)]


def _layer_and_end_columns(space: ExplorerSpace, **settings: Any) -> Iterator[tuple[str, RowValues]]:
    """All columns except the tied gradient, which depends on the gradient format."""
    short, long = _two_lengths(space, **settings)
    for activation_kind in _END_KINDS:
        yield activation_kind.value, _activation_row(activation_kind, None, short, long)
    for kind in range(space.layer_kind_count):
        spec = space.layer_kind(settings["model"], kind)
        yield from ((kind_column(name, kind), row) for name, row in _layer_columns(space, spec, short, long))
    units = short.embedding, short.head, short.stage_head(short.stages[0])
    yield from (
        (name, _constant_row(unit.parameter_count)) for name, unit in zip(END_PARAMETER_COLUMNS, units, strict=True)
    )
    yield from zip(COMM_COLUMNS, _comm_rows(short), strict=False)


def _two_lengths(space: ExplorerSpace, **settings: Any) -> tuple[Plan, Plan]:
    """Plans of two sequence lengths, the second twice the first; twice the same one where sequences are images."""
    if space.reads_images:
        return (space.plan_with(**settings),) * 2
    length = _TOKENS_PER_TP_RANK * settings["tp"]
    return space.plan_with(**settings, sequence=length), space.plan_with(**settings, sequence=2 * length)


def _layer_columns(space: ExplorerSpace, spec: LayerSpec, short: Plan, long: Plan) -> Iterator[tuple[str, RowValues]]:
    """Columns of one kind of layer."""
    for activation_kind in _LAYER_KINDS:
        yield activation_kind.value, _activation_row(activation_kind, spec, short, long)
    for mode in space.selective_policies:
        saved_bytes = partial(_layer_saved_bytes, spec, parse_recompute(mode))
        yield saved_column(mode), _size_row(short, long, saved_bytes)
    layer = short.layer_by_spec[spec]
    for group, name in layer_parameter_columns(space).items():
        yield name, _constant_row(layer.parameters_by_group.get(group, 0))
    used, held = layer.used_parameters_by_group, layer.parameters_by_group
    for group, name in reused_parameter_columns(space).items():
        yield name, _constant_row(used.get(group, 0) - held.get(group, 0))
    yield CAST_COLUMN, _constant_row(sum(operator.cached_cast_elements for operator in layer.operators))
    expert_layer = replace(
        layer, operators=tuple(operator for operator in layer.operators if operator.parameter_group == EXPERTS)
    )
    yield EXPERT_GRADIENT_COLUMN, _constant_row(Activations(short).weight_gradient_bytes(expert_layer))


def _layer_saved_bytes(spec: LayerSpec, policy: Recompute, plan: Plan) -> Bytes:
    return layer_saved_bytes(plan.layer_by_spec[spec], policy)


def _activation_row(activation_kind: ActivationKind, spec: LayerSpec | None, short: Plan, long: Plan) -> RowValues:
    if activation_kind in _CONSTANT_KINDS:
        return _constant_row(Activations(short).bytes_of(activation_kind, spec))
    return _size_row(short, long, lambda plan: Activations(plan).bytes_of(activation_kind, spec))


def _expert_comm_rows(space: ExplorerSpace, **settings: Any) -> Iterator[tuple[str, float, float]]:
    """For each expert collective (name, constant bytes, bytes per token) that a rank sends."""
    short_plan, long_plan = _two_lengths(space, model=0, tp=1, split=False, **settings)
    short, long = (dict(expert_bytes_sent(plan)) for plan in (short_plan, long_plan))
    tokens = short_plan.training.sequence
    for name in (*EP_OPS, *ETP_OPS):
        one, two = short.get(name, 0.0), long.get(name, 0.0)
        yield name, 2 * one - two, (two - one) / tokens


def _row(**by_feature: float) -> RowValues:
    """A row of bytes by feature, 0 where none are given."""
    return [by_feature.get(name, 0) for name, *_ in FEATURES]


def _constant_row(size: float) -> RowValues:
    return _row(one=size)


def _token_row(tokens: int, short: float, long: float) -> RowValues:
    """A row of bytes per token, and per token and key, from the bytes of `tokens` tokens and of twice as many."""
    one, two = short / tokens, long / (2 * tokens)
    return _row(tokens=2 * one - two, scores=(two - one) / tokens)


def _size_row(short: Plan, long: Plan, size: Callable[[Plan], Bytes]) -> RowValues:
    """A row of what a plan of one sequence has; both plans are the same where sequences are images."""
    tokens = short.training.sequence
    if long.training.sequence == tokens:
        return _row(samples=size(short))
    return _token_row(tokens, size(short), size(long))


def _comm_rows(plan: Plan) -> Iterator[RowValues]:
    """Rows of what each rank of a ring sends, in the order of `COMM_COLUMNS` without the tied gradient.

    Then keys and values of context parallelism; last a pipeline message.
    """
    tokens, remote_share = plan.training.sequence, (plan.layout.tp - 1) / plan.layout.tp
    sharding, token_bytes = (
        plan.layer_sharding(plan.model.distinct_specs[0]),
        plan.activation_bytes / tokens * remote_share,
    )
    element_bytes = sharding.format.bytes
    operand_bytes = element_bytes if sharding.operands is None else sharding.operands.format.bytes
    yield _row(tokens=token_bytes)
    yield _row(tokens=token_bytes * operand_bytes / element_bytes)
    yield _row(tokens=remote_share)
    yield _row(tokens=remote_share * element_bytes)
    yield _row(tokens=remote_share * operand_bytes)
    kv_bytes = sharding.kv_bytes / tokens
    yield _row(tokens=-kv_bytes, keys=kv_bytes)  # keys of all other ranks
    message = RankProgramBuilder(
        replace(plan, layout=replace(plan.layout, pp=2)), UnitBuilder(plan), SegmentCache()
    ).p2p_message(0, 1)
    yield _row(tokens=0.0 if message is None else message.payload / tokens)
