"""Table of out-of-sample errors of published steps.

Two rows per step, predicted with its software stated and without: the logarithm of measured over predicted time, by
constants that were fitted without the step's publisher, and its features (`clustersim.uncertainty.step_features`).
`fit-steps --out-of-sample FOLDER` writes one table for each class of steps, `fit-prediction-interval` reads it. The
packaged ones are in `calibrate/published`, with the class in the file name.
"""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from calibrate.fit.unstated_software import UnstatedSoftware
from clustersim.common.errors import InputError
from clustersim.common.files import write_text_atomically
from clustersim.uncertainty.step_features import Feature, StepFeatures

TABLE_FOLDER: Final = Path(__file__).parents[1] / "published"
QUANTITIES: Final = ("GPUs", "tokens", "tp", "cp", "pp")
_FIXED_COLUMNS: Final = ("case_id", "source", "error", "accelerators", "categories")
_SOFTWARE: Final = "software"
_COLUMNS: Final = (*_FIXED_COLUMNS, *QUANTITIES, *(feature.name.lower() for feature in Feature), _SOFTWARE)
_STATED: Final = {True: "stated", False: "not stated"}
_SEPARATOR: Final = "; "


@dataclass(frozen=True, slots=True)
class OutOfSampleStep:
    """One prediction of a step.

    log_error: natural logarithm of measured over predicted time; group: of the sources that are held out together
    with this one, its publisher's or itself.
    """

    case_id: str
    source: str
    log_error: float
    features: StepFeatures
    group: str

    @classmethod
    def predictions(
        cls,
        case_id: str,
        source: str,
        log_error: float,
        features: StepFeatures,
        unstated: UnstatedSoftware | None,
    ) -> Iterator[Self]:
        """Both predictions of a step, with its software stated and without."""
        yield cls(case_id, source, log_error, features, source)
        if unstated is not None:
            yield cls(case_id, source, log_error - unstated.log_ratio, unstated.features, source)


def write_out_of_sample(steps: Iterable[OutOfSampleStep], path: str | Path) -> None:
    """Write the table atomically; raise OutputError if it cannot be written."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(_to_cells(step) for step in steps)
    write_text_atomically(path, text.getvalue())


def _to_cells(step: OutOfSampleStep) -> dict[str, str]:
    features = step.features
    names = {"accelerators": features.accelerators, "categories": features.categories}
    return {
        "case_id": step.case_id,
        "source": step.source,
        "error": f"{step.log_error:.4f}",
        **{name: _SEPARATOR.join(sorted(values)) for name, values in names.items()},
        **{name: str(features.quantities[name]) for name in QUANTITIES},
        **{feature.name.lower(): f"{share:.4g}" for feature, share in features.feature_shares.items()},
        _SOFTWARE: _STATED[features.states_software],
    }


def out_of_sample_path(model_name: str, folder: Path = TABLE_FOLDER) -> Path:
    """Path of the table of an uncertainty model."""
    return folder / f"out_of_sample_{model_name}.csv"


def read_out_of_sample(path: Path) -> list[OutOfSampleStep]:
    """The steps of a table; raise InputError that names the file and the problem."""
    try:
        with path.open(newline="", encoding="utf-8") as stream:
            return [_from_cells(cells) for cells in csv.DictReader(stream)]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({getattr(error, 'strerror', error)})") from error
    except (KeyError, ValueError) as error:
        raise InputError(f"{path}: is no table of fit-steps --out-of-sample ({error})") from error


def _from_cells(cells: Mapping[str, str]) -> OutOfSampleStep:
    accelerators, categories = (frozenset(cells[name].split(_SEPARATOR)) for name in ("accelerators", "categories"))
    quantities = {name: int(cells[name]) for name in QUANTITIES}
    feature_shares = {feature: float(cells[feature.name.lower()]) for feature in Feature}
    return OutOfSampleStep(
        cells["case_id"],
        cells["source"],
        float(cells["error"]),
        StepFeatures(accelerators, categories, quantities, feature_shares, cells[_SOFTWARE] == _STATED[True]),
        cells["source"],
    )
