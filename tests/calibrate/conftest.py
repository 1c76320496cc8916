"""Fits to the published tables: they take many seconds and are computed once per session, for slow tests."""

import pytest

from calibrate.fit.fit_quality import AcceleratorFits
from calibrate.fit.published_fit import fit_published


@pytest.fixture(scope="session")
def fits() -> AcceleratorFits:
    return fit_published()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs the fits as slow, before slow tests are deselected."""
    for item in items:
        if "fits" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
