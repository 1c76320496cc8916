"""How are uncertainty models read and written?

Files are topologies/uncertainty/NAME.yaml, which `python -m calibrate fit-prediction-interval` writes.
"""

from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from clustersim.common.data_files import find_file, parse_mapping, read_text
from clustersim.common.mapping_reader import MappingReader
from clustersim.uncertainty.prediction_interval import (
    VARIANCE_COMPONENTS,
    ErrorQuantiles,
    StratumCoverage,
    UncertaintyModel,
    VarianceComponent,
)
from clustersim.uncertainty.reference_runs import SameJobErrors
from clustersim.uncertainty.validated_domain import ValidatedDomain

DENSE_STEPS: Final = "dense"
MOE_STEPS: Final = "moe"
LOW_PRECISION_STEPS: Final = "low_precision"
LOW_PRECISION_MOE_STEPS: Final = "low_precision_moe"
MODEL_NAMES: Final = (DENSE_STEPS, MOE_STEPS, LOW_PRECISION_STEPS, LOW_PRECISION_MOE_STEPS)
"""Classes of steps with an uncertainty model of their own, by file name; the first is dense models in BF16."""
_MAX_COUNT: Final = 10**9  # bound on counts
_MAX_CENTER: Final = 10.0  # standard deviations


def uncertainty_model_name(*, moe: bool, low_precision: bool) -> str:
    """Name of a step's uncertainty model. moe: has experts; low_precision: matmuls in block-scaled formats."""
    return MODEL_NAMES[moe + 2 * low_precision]


def load_uncertainty_model(name_or_path: str = DENSE_STEPS) -> UncertaintyModel:
    """Read topologies/uncertainty/NAME.yaml, or a file of the same form; raise InputError for an invalid one."""
    path = find_file("uncertainty", name_or_path)
    return _parse_model(path, read_text(path))


@lru_cache(maxsize=8)
def _parse_model(path: Path, text: str) -> UncertaintyModel:
    """Parse the text of a file. Cached, since every result needs it: YAML takes a tenth of a step's run time."""
    reader = MappingReader(path, parse_mapping(path, text))
    published, deviations = reader.get_section("published"), reader.get_section("deviations")
    model = UncertaintyModel(
        step_count=published.get_int("cases", max_value=_MAX_COUNT),
        source_count=published.get_int("sources", max_value=_MAX_COUNT),
        held_out=published.get_choice("held_out", "publisher", "source"),
        quantiles=_parse_quantiles(reader.get_section("quantiles")),
        unstated_quantiles=_parse_quantiles(reader.get_section("unstated_quantiles")),
        repeat_deviation=reader.get_float("repeat_deviation"),
        deviations={component: deviations.get_float(component_key(component)) for component in VARIANCE_COMPONENTS},
        domain=_parse_domain(reader.get_section("validated_domain")),
        coverage_by_stratum=_parse_coverage(reader.get_section("coverage_by_stratum")),
        same_job=_parse_same_job(reader.get_section("same_job")) if reader.has_key("same_job") else None,
    )
    reader.get_text("description")
    reader.get_section("sources").get_text_mapping()
    reader.reject_unknown_keys()
    return model


def component_key(component: VarianceComponent) -> str:
    """Key of a variance component in files."""
    return component.name.lower()


def _parse_quantiles(section: MappingReader) -> ErrorQuantiles:
    center = section.get_float("center", min_value=-_MAX_CENTER)
    return ErrorQuantiles(center, section.get_float("interval"), section.get_float("likely"))


def _parse_domain(section: MappingReader) -> ValidatedDomain:
    max_quantities = section.get_section("max_quantities")
    return ValidatedDomain(
        frozenset(section.get_text_list("accelerators")),
        frozenset(section.get_text_list("same_chip_accelerators")),
        frozenset(section.get_text_list("categories")),
        {name: max_quantities.get_int(name, max_value=_MAX_COUNT) for name in max_quantities.key_names()},
    )


def _parse_coverage(section: MappingReader) -> dict[str, StratumCoverage]:
    coverage_by_stratum = {}
    for stratum in section.key_names():
        stratum_section = section.get_section(stratum)
        step_count, group_count = (stratum_section.get_int(key, max_value=_MAX_COUNT) for key in ("cases", "groups"))
        coverage_by_stratum[stratum] = StratumCoverage(step_count, group_count, stratum_section.get_float("coverage"))
    return coverage_by_stratum


def _parse_same_job(section: MappingReader) -> SameJobErrors:
    pair_count, source_count = (section.get_int(key, max_value=_MAX_COUNT) for key in ("pairs", "sources"))
    return SameJobErrors(pair_count, source_count, section.get_float("quantile"), section.get_float("coverage"))


def model_to_dict(model: UncertaintyModel) -> dict[str, Any]:
    """Content of the model's file, without its texts."""
    domain = model.domain
    return {
        "published": {"cases": model.step_count, "sources": model.source_count, "held_out": model.held_out},
        "quantiles": asdict(model.quantiles),
        "unstated_quantiles": asdict(model.unstated_quantiles),
        "repeat_deviation": model.repeat_deviation,
        "deviations": {component_key(component): deviation for component, deviation in model.deviations.items()},
        "validated_domain": {
            "accelerators": sorted(domain.accelerators),
            "same_chip_accelerators": sorted(domain.same_chip_accelerators),
            "categories": sorted(domain.categories),
            "max_quantities": dict(domain.max_quantities),
        },
        "coverage_by_stratum": {
            stratum: _coverage_to_dict(coverage) for stratum, coverage in model.coverage_by_stratum.items()
        },
        **({} if model.same_job is None else {"same_job": _same_job_to_dict(model.same_job)}),
    }


def _same_job_to_dict(errors: SameJobErrors) -> Mapping[str, Any]:
    return {
        "pairs": errors.pair_count,
        "sources": errors.source_count,
        "quantile": errors.quantile,
        "coverage": errors.covered_share,
    }


def _coverage_to_dict(coverage: StratumCoverage) -> Mapping[str, Any]:
    return {"cases": coverage.step_count, "groups": coverage.group_count, "coverage": coverage.covered_share}
