"""How is experience read and written? topologies/experience/NAME.yaml, which `python -m calibrate fit-band` writes."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from clustersim.common.data_files import find, mapping_of, read_text
from clustersim.common.mapping_reader import Section
from clustersim.uncertainty.prediction_interval import TERMS, Coverage, Experience, Term
from clustersim.uncertainty.validated_domain import Known

STEPS: Final = "steps"
MIXTURES: Final = "mixtures"
NARROW: Final = "narrow"
NARROW_MIXTURES: Final = "narrow_mixtures"
KINDS: Final = (STEPS, MIXTURES, NARROW, NARROW_MIXTURES)
"""Kinds of steps with an experience of their own, as files name them: of dense models in BF16 first."""
_MOST: Final = 10**9  # of any count


def kind_of(*, mixture: bool, narrow: bool) -> str:
    """The kind of a step. mixture: of a model with experts; narrow: with products in formats with scales."""
    return KINDS[mixture + 2 * narrow]


def load_experience(name_or_path: str = STEPS) -> Experience:
    """Read topologies/experience/NAME.yaml, or a file of the same form; raise InputError for a bad one."""
    path = find("experience", name_or_path)
    return _parsed(path, read_text(path))


@lru_cache(maxsize=8)
def _parsed(path: Path, text: str) -> Experience:
    """Of the text of a file: every answer asks for it, and reading YAML takes as long as a tenth of a step."""
    file = Section(path, mapping_of(path, text))
    published, deviations = file.section("published"), file.section("deviations")
    experience = Experience(
        cases=published.count("cases", most=_MOST),
        sources=published.count("sources", most=_MOST),
        quantile=file.number("quantile"),
        repeat=file.number("repeat"),
        deviations={term: deviations.number(key_of(term)) for term in TERMS},
        known=_known(file.section("measured")),
        unseen=_unseen(file.section("unseen")),
    )
    file.text("description")
    file.section("sources").texts()
    file.finish()
    return experience


def key_of(term: Term) -> str:
    """What files call a term."""
    return term.name.lower()


def _known(section: Section) -> Known:
    most = section.section("most")
    return Known(
        frozenset(section.words("accelerators")),
        frozenset(section.words("siblings")),
        frozenset(section.words("kinds")),
        {name: most.count(name, most=_MOST) for name in most.names()},
    )


def _unseen(section: Section) -> dict[str, Coverage]:
    found = {}
    for regime in section.names():
        each = section.section(regime)
        cases, sources = (each.count(key, most=_MOST) for key in ("cases", "sources"))
        found[regime] = Coverage(cases, sources, each.number("inside"))
    return found


def as_mapping(experience: Experience) -> dict[str, Any]:
    """What a file of it holds, but for its texts."""
    known = experience.known
    return {
        "published": {"cases": experience.cases, "sources": experience.sources},
        "quantile": experience.quantile,
        "repeat": experience.repeat,
        "deviations": {key_of(term): deviation for term, deviation in experience.deviations.items()},
        "measured": {
            "accelerators": sorted(known.accelerators),
            "siblings": sorted(known.siblings),
            "kinds": sorted(known.kinds),
            "most": dict(known.most),
        },
        "unseen": {regime: _coverage(coverage) for regime, coverage in experience.unseen.items()},
    }


def _coverage(coverage: Coverage) -> Mapping[str, Any]:
    return {"cases": coverage.cases, "sources": coverage.sources, "inside": coverage.inside}
