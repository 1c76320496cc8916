"""Do context-parallel degree and kind, and packed documents, fit the mixers, their heads and the sequence?"""

import math
from collections.abc import Iterator

from clustersim.model.attention_spec import SoftmaxAttention
from clustersim.model.documents import MAX_DRAWN_DOCUMENTS
from clustersim.model.mixer import ContextRule
from clustersim.parallel.context_parallel import ContextParallelKind
from clustersim.parallel.layout import Layout
from clustersim.scenario.nearest_values import divisors
from clustersim.scenario.resolved import ResolvedScenario
from clustersim.scenario.validation_rules.remedies import Problem, Remedy


def sequence_chunks(layout: Layout) -> int:
    """Equal chunks that a sequence is cut into: two of each rank where they are balanced (zigzag)."""
    is_zigzag = layout.cp_balanced and layout.cp_kind is not ContextParallelKind.ULYSSES
    return layout.cp * (2 if layout.cp > 1 and is_zigzag else 1)


def check_context_parallel(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that context parallelism has a rule for every mixer, and divides the heads that it exchanges."""
    tp, cp = scenario.layout.tp, scenario.layout.cp
    for mixer in scenario.model.distinct_mixers if cp > 1 else ():
        if mixer.context_rule is ContextRule.NONE:
            yield Problem(
                f"layout.cp: {cp} splits sequences, and how {mixer.label} works on a part of one is not known",
                Remedy("layout.cp", ((1,),)),
            )
        kind = scenario.layout.cp_kind
        if mixer.context_rule is ContextRule.KEY_GATHER and kind is not ContextParallelKind.ALL_GATHER:
            yield Problem(
                f"layout.cp_kind: {kind.value}, but ranks gather the keys that {mixer.label} selects from",
                Remedy("layout.cp_kind", ((ContextParallelKind.ALL_GATHER.value,),)),
            )
        size = mixer.sharded_sizes[0]
        if mixer.context_rule is ContextRule.HEAD_EXCHANGE and size.size % (tp * cp):
            yield Problem(
                f"layout.cp: tp {tp} x cp {cp} do not divide the {size.size} {size.key} of {scenario.model.name}",
                Remedy.nearest("layout.cp", cp, [d for d in divisors(size.size) if size.size % (tp * d) == 0]),
            )


def check_context_groups(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that inner groups are given where the kind has them, and divide the degree."""
    layout = scenario.layout
    inner, has_groups = layout.cp_inner, layout.cp_kind.has_groups
    if inner is not None and not has_groups:
        yield (
            f"layout.cp_inner: {layout.cp_kind.value} has no inner groups; leave it out, or write cp_kind: "
            "two_dimensional or hierarchical"
        )
    elif layout.cp > 1 and has_groups and (inner is None or layout.cp % inner):
        given = "is not given" if inner is None else f"{inner} does not divide cp {layout.cp}"
        yield Problem(
            f"layout.cp_inner: {given}; {layout.cp_kind.value} needs the ranks of its inner groups",
            Remedy.nearest("layout.cp_inner", inner or layout.cp, divisors(layout.cp)),
        )


def check_exchanged_heads(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that ranks which exchange tokens for heads divide these."""
    layout = scenario.layout
    ranks, key = layout.exchanging_ranks, "layout.cp_inner" if layout.cp_kind.has_groups else "layout.cp"
    for mixer in scenario.model.distinct_mixers if ranks > 1 else ():
        if not isinstance(mixer, SoftmaxAttention):
            continue
        heads, kv_heads = mixer.heads // layout.tp, max(1, mixer.kv_heads // layout.tp)
        if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
            fits = [d for d in divisors(heads) if kv_heads % d == 0 or d % kv_heads == 0]
            yield Problem(
                f"{key}: {ranks} ranks exchange heads, and of {scenario.model.name} each tp rank has {heads} "
                f"heads and {kv_heads} kv_heads, which they do not divide evenly",
                Remedy.nearest(key, ranks, fits),
            )
            return


def check_documents(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that a step has no more packed documents than are drawn."""
    training = scenario.training
    if training.documents is None:
        return
    lengths = training.documents.lengths
    mean = sum(lengths) / len(lengths) if lengths else training.documents.mean
    count = training.global_batch * training.sequence / mean
    if count > MAX_DRAWN_DOCUMENTS:
        yield (
            f"training.documents: {count:,.0f} documents of {mean:,.0f} tokens in a step; {MAX_DRAWN_DOCUMENTS:,} are "
            f"the most, of {math.ceil(training.global_batch * training.sequence / MAX_DRAWN_DOCUMENTS):,} tokens"
        )
