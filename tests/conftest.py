"""Hypothesis profiles: how many examples every property is tested with, and which; and the garbage collector.

Three profiles, deterministic and without deadline. `full` runs as many examples as each test requests
(`@examples(400)`, else hypothesis's default of 100), `quick` a tenth of them, `thousands` twenty times as many. Quick
is the default; continuous integration runs every property again with `--hypothesis-profile=full`, and `thousands` is
run by hand.

Modules and collected tests live until the end: the garbage collector, which would go through all of them again and
again, is off while they are collected, and passes over them later.
"""

import gc
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

FULL = 100  # percent of the requested examples, and the number of examples by default
QUICK = 10
THOUSANDS = 2000

for name, share in (("full", FULL), ("quick", QUICK), ("thousands", THOUSANDS)):
    settings.register_profile(
        name,
        max_examples=share,
        derandomize=True,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
settings.load_profile("quick")


def examples(max_examples: int, **options: Any) -> settings:
    """Settings with `max_examples` in the full profile, a tenth in the quick one; options: others of `settings`."""
    return settings(max_examples=-(-max_examples * settings.default.max_examples // FULL), **options)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without the garbage collector, and exempt what is there then from it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
