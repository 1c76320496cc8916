"""Fits to the published tables, which take some seconds and are made once."""

import pytest

from calibrate.fit.fit_quality import Fits
from calibrate.fit.published_fit import fit


@pytest.fixture(scope="session")
def fits() -> Fits:
    return fit()
