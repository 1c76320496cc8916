"""Laws are tried on the same cases every time, unless a hypothesis profile is asked for."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "laws", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
if settings.get_current_profile_name() == "default":
    settings.load_profile("laws")
