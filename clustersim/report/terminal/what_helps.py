"""How is what helps listed on the terminal, by any command? The best changes, with the arguments that make them."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from clustersim.common.units import format_bytes, format_probability
from clustersim.report.terminal.table import plain_text

if TYPE_CHECKING:
    from rich.text import Text

    from clustersim.results.what_if import WhatIf, WhatIfOutcome, WhatIfReport

_MAX_IMPROVEMENTS: Final = 3


def what_helps_lines(what_ifs: "WhatIfReport | None", changed: str = "") -> "Iterator[Text]":
    """The best changes of settings, each with the arguments that make it; what was not tried.

    what_ifs: None: it was not asked for, and one line says how to; changed: of several scenarios, the one that the
    changes are of.
    """
    title = f"what helps {changed}".rstrip()
    if what_ifs is None:
        yield plain_text(f"{title}: run it with --what-if", "dim")
        return
    if changed:
        yield plain_text(title)
    improvements = [(case.description, case, outcome) for case, outcome in what_ifs.improvements[:_MAX_IMPROVEMENTS]]
    if what_ifs.combined is not None and what_ifs.combined.outcome is not None:
        improvements.append(("together", what_ifs.combined, what_ifs.combined.outcome))
    for label, case, outcome in improvements:
        yield from _improvement_lines(label, case, outcome)
    yield from _tried_lines(what_ifs, helped=bool(improvements))


def _improvement_lines(label: str, case: "WhatIf", outcome: "WhatIfOutcome") -> "Iterator[Text]":
    caution = ", other numerics: check convergence" if case.changes_numerics else ""
    memory = f"{format_bytes(outcome.peak_memory)}, fits with {format_probability(outcome.fit_probability)}"
    yield plain_text(f"helps: {outcome.slowdown_ratio:+.1%}  {label} ({memory}{caution})", "green")
    arguments = plain_text(f"  {case.arguments}", "dim")  # on one line, to be copied
    arguments.no_wrap, arguments.overflow = True, "ignore"
    yield arguments


def _tried_lines(what_ifs: "WhatIfReport", *, helped: bool) -> "Iterator[Text]":
    """How many changes were tried in vain, and which were not tried."""
    tried = len(what_ifs.tried_settings)
    if not helped:
        yield plain_text(f"none of the {tried:,} changes of settings that were tried makes the step shorter and fits")
    not_tried = [case.description for case in what_ifs.skipped if case.addresses]
    if not_tried:
        names = "; ".join(not_tried)
        changes = "1 change" if tried == 1 else f"{tried} changes"
        yield plain_text(f"{changes} of settings tried; not tried (reasons: --json or the page): {names}", "dim")
