"""Fits to the published tables: they take some seconds and are computed once per session."""

import pytest

from calibrate.fit.fit_quality import AcceleratorFits
from calibrate.fit.published_fit import fit_published


@pytest.fixture(scope="session")
def fits() -> AcceleratorFits:
    return fit_published()
