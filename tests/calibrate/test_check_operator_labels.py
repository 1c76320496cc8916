"""Operator labels of a real step: present in profiles, and free of overhead otherwise."""

from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch")

from calibrate.check.operator_labels import MATMUL, record_label  # noqa: E402 - torch first


def test_labels_are_recorded_only_while_profiling() -> None:
    assert isinstance(record_label(MATMUL), nullcontext)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu) as profile, record_label(MATMUL):
        torch.ones(2).sum()
    assert MATMUL.profiler_name in {event.name for event in profile.events()}
    assert isinstance(record_label(MATMUL), nullcontext)
