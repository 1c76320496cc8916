"""Fits to the published tables, which take some seconds and are made once."""

import pytest

from calibrate.fit.published import fit
from calibrate.fit.quality import Fits


@pytest.fixture(scope="session")
def fits() -> Fits:
    return fit()
