"""Memory snapshots: nothing in a pickle runs; the peak is that of the allocator."""

import gzip
import json
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from calibrate.profile.memory import compare_memory
from calibrate.profile.snapshot import read_snapshot
from clustersim.common.errors import InputError
from clustersim.cost.calibration_record import MemoryAnchor
from clustersim.results.memory_check import peak_memory
from tests.calibrate.profiled_steps import TRACES, record_with_memory, scenario_of

MIB = 2**20


def event(action: str, address: int, size: int, name: str = "") -> dict[str, Any]:
    frames = [{"filename": "/home/u/model.py", "line": 7, "name": name}] if name else []
    return {"action": action, "addr": address, "size": size, "stream": 0, "time_us": 0, "frames": frames}


def snapshot() -> dict[str, Any]:
    """1 MiB of weights; a step holds 5 MiB of an activation and then 3 MiB of its gradient, in 8 MiB."""
    return {
        "segments": [
            {
                "device": 0, "address": 1000, "total_size": 8 * MIB, "stream": 0,
                "blocks": [
                    {"size": MIB, "state": "active_allocated", "frames": []},
                    {"size": 7 * MIB, "state": "inactive"},
                ],
            }
        ],
        "device_traces": [
            [
                event("segment_alloc", 1000, 8 * MIB),
                event("alloc", 5000, 5 * MIB, "forward"),
                event("free_requested", 5000, 5 * MIB),
                event("free_completed", 5000, 5 * MIB),
                event("alloc", 6000, 3 * MIB, "backward"),
                event("free_requested", 6000, 3 * MIB),
            ]
        ],
    }  # fmt: skip


@pytest.mark.parametrize("form", ["pickle", "gzip", "json"])
def test_the_peak_is_found_by_going_back(tmp_path: Path, form: str) -> None:
    file = tmp_path / "memory"
    data = json.dumps(snapshot()).encode() if form == "json" else pickle.dumps(snapshot())
    file.write_bytes(gzip.compress(data) if form == "gzip" else data)
    peak = read_snapshot(file)
    assert (peak.allocated, peak.reserved, peak.doubt) == (6 * MIB, 8 * MIB, None)
    assert dict(peak.origins) == {"model.py:7 forward": 5 * MIB, "before the history began": MIB}


def test_what_backward_allocates_is_named_by_its_node(tmp_path: Path) -> None:
    """A thread of autograd has C++ frames only, where they were recorded; libraries' own functions are passed over."""
    content = snapshot()
    library = {"filename": "/x/site-packages/torch/functional.py", "line": 1, "name": "einsum"}
    own = {"filename": "/home/u/model.py", "line": 9, "name": "scores"}
    names = (
        "torch::unwind::unwind()",
        "at::_ops::mm::call(",
        "torch::autograd::generated::MmBackward0::apply(std::vector",
    )
    unwound = [{"filename": "??", "line": 0, "name": name} for name in names]
    stacks = [library, own], unwound, unwound[:2], []
    content["device_traces"][0] = [
        event("alloc", 5000 + number, 2 ** (20 + number)) | {"frames": frames} for number, frames in enumerate(stacks)
    ]
    content["segments"][0]["blocks"] = [
        {"size": 2 ** (20 + number), "address": 5000 + number, "state": "active_allocated"} for number in range(4)
    ]
    file = tmp_path / "memory.json"
    file.write_text(json.dumps(content))
    assert dict(read_snapshot(file).origins) == {
        "model.py:9 scores": MIB, "backward, MmBackward0": 2 * MIB, "aten::mm": 4 * MIB,
        "before the history began": 8 * MIB,
    }  # fmt: skip


def test_a_snapshot_without_history_has_its_end(tmp_path: Path) -> None:
    file = tmp_path / "memory.pickle"
    file.write_bytes(pickle.dumps(snapshot() | {"device_traces": [[]]}))
    peak = read_snapshot(file)
    assert peak.allocated == MIB
    assert peak.doubt is not None and "no history" in peak.doubt


@pytest.mark.parametrize(
    ("events", "doubt"),
    [
        ([event("free_requested", 5000, 5 * MIB), event("alloc", 6000, MIB)], "begins at its peak"),
        ([event("alloc", 5000, MIB), event("free_requested", 5000, MIB)] * 10_000, "20,000 events"),
        ([event("alloc", 5000, MIB), event("free_requested", 5000, MIB)], None),
    ],
)
def test_a_history_that_may_begin_too_late_is_said(
    tmp_path: Path, events: list[dict[str, Any]], doubt: str | None
) -> None:
    file = tmp_path / "memory.pickle"
    file.write_bytes(pickle.dumps(snapshot() | {"device_traces": [events]}))
    found = read_snapshot(file).doubt
    assert found is None if doubt is None else found is not None and doubt in found


class RunsOnLoad:
    """A value whose pickle runs a command."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, ("ran",)


MALICIOUS = {
    "reduce": pickle.dumps({"segments": [RunsOnLoad()]}),
    "old protocol": pickle.dumps({"segments": [RunsOnLoad()]}, protocol=0),
    "inst": b"(S'ran'\nios\nmkdir\n.",
    "a class": pickle.dumps({"segments": [Path("ran")]}),
    "persistent": b"\x80\x02U\x03ranQ.",
    "extension": b"\x80\x02\x82\x01.",
    "truncated": pickle.dumps(snapshot())[:-40],
    "nothing": b"",
    "text": b"hello",
    "a list": pickle.dumps([1, 2]),
    "no segments": pickle.dumps({"segments": []}),
    "other segments": pickle.dumps({"segments": [{"device": 0, "total_size": "x", "address": 1, "blocks": 3}]}),
    "not JSON": b'{"segments": ',
    "truncated gzip": gzip.compress(pickle.dumps(snapshot()))[:40],
}


@pytest.mark.parametrize("case", MALICIOUS)
def test_nothing_runs_and_what_is_no_snapshot_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "memory.pickle"
    file.write_bytes(MALICIOUS[case])
    with pytest.raises(InputError, match=r"memory\.pickle: (is|cannot)"):
        read_snapshot(file)
    assert [path.name for path in tmp_path.iterdir()] == ["memory.pickle"]


def test_a_compressed_bomb_and_a_device_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "memory.pickle.gz"
    file.write_bytes(gzip.compress(b"\x80\x04" + bytes(3 * 10**7), 9))
    with pytest.raises(InputError, match="expands to more than"):
        read_snapshot(file)
    with pytest.raises(InputError, match="is a device"):
        read_snapshot(Path("/dev/zero"))


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_snapshot(tmp_path / "nothing")


def test_real_snapshot_has_the_peak_that_the_allocator_counted() -> None:
    """As torch.cuda.max_memory_allocated and max_memory_reserved said of the same step."""
    peak = read_snapshot(TRACES / "h200_llama2_7b_4_layers_memory.pickle.gz")
    assert peak.allocated == pytest.approx(16_024_946_176, rel=1e-4)
    assert peak.reserved == pytest.approx(17_332_961_280, rel=1e-4)
    assert any("modeling_llama" in origin for origin, _ in peak.origins)


@pytest.mark.parametrize("trace", ["h200_llama2_7b_4_layers", "h200_llama2_7b_4_layers_fake_fsdp2"])
def test_the_anchor_gives_the_measured_memory(trace: str) -> None:
    """Of the allocator; and never less than the model had."""
    scenario = scenario_of(trace)
    anchor = compare_memory(TRACES / f"{trace}_memory.pickle.gz", scenario, 0).anchor
    assert anchor.modelled == pytest.approx(anchor.allocated, rel=0.05)
    anchored = replace(scenario, cost=replace(scenario.cost, record=record_with_memory(scenario, anchor)))
    outside = peak_memory(scenario) - anchor.modelled * scenario.framework.fragmentation
    assert peak_memory(anchored) - outside == pytest.approx(max(anchor.reserved, anchor.modelled), rel=1e-6)


def test_the_residual_grows_with_layers_and_tokens() -> None:
    anchor = MemoryAnchor(allocated=12.0, reserved=15.0, modelled=10.0, layers=2, tokens=100)
    assert anchor.residual == 2.0
    assert anchor.fragmentation == 1.25
    assert [anchor.residual_of(*sizes) for sizes in ((2, 100), (1, 50), (4, 100), (4, 300))] == [2.0, 2.0, 4.0, 12.0]
    overestimated = replace(anchor, modelled=20.0)
    assert (overestimated.residual, overestimated.fragmentation) == (0.0, 1.0)
