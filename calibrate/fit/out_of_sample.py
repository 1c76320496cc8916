"""How far were published steps from what was predicted without having seen them?

A table with one row for each step: the logarithm of measured over predicted time, by constants that were fitted without
the step's source, and what the step is like (`clustersim.uncertainty.step_features`). `fit-steps --left-out FOLDER` writes
one for each kind of steps, `fit-band` reads it. The shipped ones are in `calibrate/published`: `left_out.csv` is of
dense steps in BF16, others have their kind in their name.
"""

import csv
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from clustersim.common.errors import InputError
from clustersim.common.files import write_text_atomically
from clustersim.uncertainty.model_file import DENSE_STEPS
from clustersim.uncertainty.step_features import Feature, StepFeatures

FOLDER: Final = Path(__file__).parents[1] / "published"
AMOUNTS: Final = ("GPUs", "tokens", "tp", "cp", "pp")
_WORDS: Final = ("case_id", "source", "error", "accelerators", "kinds")
_COLUMNS: Final = (*_WORDS, *AMOUNTS, *(trait.name.lower() for trait in Feature))
_BETWEEN: Final = "; "


@dataclass(frozen=True, slots=True)
class LeftOut:
    """One step. error: logarithm of measured over predicted."""

    case_id: str
    source: str
    error: float
    facts: StepFeatures


def write_left_out(rows: Iterable[LeftOut], path: str | Path) -> None:
    """Write the table, wholly or not at all; raise OutputError if it cannot be written."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(_cells(row) for row in rows)
    write_text_atomically(path, text.getvalue())


def _cells(row: LeftOut) -> dict[str, str]:
    facts = row.facts
    names = {"accelerators": facts.accelerators, "kinds": facts.categories}
    return {
        "case_id": row.case_id,
        "source": row.source,
        "error": f"{row.error:.4f}",
        **{name: _BETWEEN.join(sorted(values)) for name, values in names.items()},
        **{name: str(facts.quantities[name]) for name in AMOUNTS},
        **{trait.name.lower(): f"{share:.4g}" for trait, share in facts.feature_shares.items()},
    }


def left_out_file(kind: str, folder: Path = FOLDER) -> Path:
    """The table of a kind of steps."""
    return folder / ("left_out.csv" if kind == DENSE_STEPS else f"left_out_{kind}.csv")


def read_left_out(path: Path) -> list[LeftOut]:
    """The rows of a table; raise InputError that names the file and what is wrong."""
    try:
        with path.open(newline="", encoding="utf-8") as lines:
            return [_row(cells) for cells in csv.DictReader(lines)]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({getattr(error, 'strerror', error)})") from error
    except (KeyError, ValueError) as error:
        raise InputError(f"{path}: is no table of fit-steps --left-out ({error})") from error


def _row(cells: Mapping[str, str]) -> LeftOut:
    accelerators, kinds = (frozenset(cells[name].split(_BETWEEN)) for name in ("accelerators", "kinds"))
    amounts = {name: int(cells[name]) for name in AMOUNTS}
    traits = {trait: float(cells[trait.name.lower()]) for trait in Feature}
    return LeftOut(
        cells["case_id"], cells["source"], float(cells["error"]), StepFeatures(accelerators, kinds, amounts, traits)
    )
