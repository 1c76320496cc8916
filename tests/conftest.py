"""How many examples does a property have to survive, and which? The only place that says so.

Two profiles, the same cases every time and no limit of time in either. `full` tries as many examples as each test asks
for (`@examples(400)`, else hypothesis's own 100), `quick` a quarter of them. Quick is the default; continuous
integration runs every property again with `--hypothesis-profile=full`.
"""

from typing import Any

from hypothesis import HealthCheck, settings

FULL = 100  # percent of the examples that a test asks for, and what a test that asks for nothing gets
QUICK = 25

for name, share in (("full", FULL), ("quick", QUICK)):
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
    """As many examples of a property in the full profile, a quarter in the quick one; others: what `settings` takes."""
    return settings(max_examples=-(-max_examples * settings.default.max_examples // FULL), **options)
