"""Collectives of published tables and of users' own: predicted, or skipped with a reason."""

import math
from pathlib import Path

import pytest

from clustersim.common.errors import InputError
from clustersim.hardware.accelerator import load_accelerator
from clustersim.validation.collectives import compare_collectives, parse_benchmark, read_collectives
from clustersim.validation.comparison import CaseComparison
from clustersim.validation.error_statistics import statistics_by_grouping
from tests.validation.csv_tables import write_table

ROW = {
    "case_id": "mine",
    "source": "me",
    "gpu": "h100-sxm-80gb",
    "n_gpus": "8",
    "gpus_per_node": "8",
    "nodes": "1",
    "interconnect": "nvlink4",
    "collective": "all_reduce",
    "bytes": "1073741824",
    "time_us": "4000",
    "algbw_GBps": "",
    "algo": "",
    "gpus_per_process": "",
    "timed": "",
}


def compared(folder: Path, *changes: dict[str, str]) -> list[CaseComparison]:
    rows = [ROW | change for change in changes] or [ROW]
    return compare_collectives(read_collectives(write_table(folder / "mine.csv", *rows)))


@pytest.fixture(scope="module")
def shipped() -> list[CaseComparison]:
    return compare_collectives(read_collectives())


def test_collectives_that_constants_are_fitted_to_meet_their_bands(shipped: list[CaseComparison]) -> None:
    """16 % from 1 MiB on, 30 % below; the tables of other places judge, and are no part of the band."""
    fitted = {
        read_collective.text("case_id") for read_collective in read_collectives() if read_collective.boolean("in_fit")
    }
    by_size = statistics_by_grouping(
        [case_comparison for case_comparison in shipped if case_comparison.case_id in fitted]
    )["size"]
    large, small = by_size[">= 1 MiB"], by_size["below 1 MiB"]
    assert large.mape is not None
    assert large.mape <= 0.16
    assert small.mape is not None
    assert small.mape <= 0.30
    assert large.n + small.n >= 900


def test_every_shipped_row_is_predicted_or_says_why_not(shipped: list[CaseComparison]) -> None:
    assert len(shipped) == len(read_collectives())
    assert all((case_comparison.predicted is None) == bool(case_comparison.skip_reason) for case_comparison in shipped)
    assert not any(item.skip_reason for item in shipped if item.is_expressible)


def test_a_large_ring_takes_what_its_bandwidth_says(tmp_path: Path) -> None:
    """Asked for a ring, 8 H100 move 2 · 7/8 of the payload through ports of 450 GB/s at NCCL's 0.824: 5.07 ms."""
    (ring,) = compared(tmp_path, {"algo": "Ring"})
    assert ring.predicted == pytest.approx(2 * 7 / 8 * 2**30 / (450e9 * 0.824), rel=0.03)


def test_ports_that_a_row_states_are_its_network(tmp_path: Path) -> None:
    """Half the ports, nearly twice the time: beyond a node the network is what bounds."""
    two = {"n_gpus": "16", "nodes": "2", "collective": "all_gather", "bytes": str(2**33)}
    fast, slow, unstated = compared(
        tmp_path,
        two | {"interconnect": "nvlink4 + 8x400G-ib-ndr"},
        two | {"interconnect": "nvlink4 + 4x400G-ib-ndr"},
        two | {"interconnect": "nvlink4 + unknown"},
    )
    assert fast.predicted == unstated.predicted
    assert slow.predicted is not None
    assert fast.predicted is not None
    assert 1.8 < slow.predicted / fast.predicted <= 2.01


def test_a_process_with_eight_gpus_launches_eight_times(tmp_path: Path) -> None:
    """And a call that is timed by itself waits for what torch.distributed does before it."""
    launch = load_accelerator("h100-sxm-80gb").efficiency.launch_interval
    small = {"bytes": "8"}
    alone, driven, called = compared(tmp_path, small, small | {"gpus_per_process": "1000"}, small | {"timed": "call"})
    assert driven.predicted == pytest.approx(1000 * launch)
    assert alone.predicted is not None
    assert called.predicted == pytest.approx(alone.predicted + 23e-6)


def test_fewer_gpus_of_a_mesh_use_fewer_links(tmp_path: Path) -> None:
    pair, all_eight = read_collectives(
        write_table(tmp_path / "t.csv", ROW | {"gpu": "mi300x", "n_gpus": "2"}, ROW | {"gpu": "mi300x"})
    )
    assert parse_benchmark(all_eight).scale_up_bandwidth == 7 * parse_benchmark(pair).scale_up_bandwidth == 448e9


def test_a_rate_stands_for_a_time_that_is_not_stated(tmp_path: Path) -> None:
    (each,) = compared(tmp_path, {"time_us": "", "algbw_GBps": "250"})
    assert each.measured == pytest.approx(2**30 / 250e9)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"gpu": "unknown"}, "gpu is not stated"),
        ({"gpu": "h101-sxm-80gb"}, "gpu h101-sxm-80gb: there is no such accelerator; did you mean h100-sxm-80gb?"),
        ({"gpu": "h100-pcie-80gb"}, "no machine of it is known"),
        ({"collective": "moe_notify"}, "collective moe_notify: not modelled"),
        ({"collective": "moe_combine_lowlatency"}, "kernels for decoding, which training does not use"),
        ({"collective": "moe_dispatch", "notes": "0 tokens x 7168 hidden"}, "line 2: notes: 0 tokens"),
        ({"collective": "allreduce"}, "collective allreduce: not modelled; did you mean all_reduce?"),
        ({"collective": "p2p:ib_write_bw", "interconnect": "CX-7"}, "collective p2p:ib_write_bw: not modelled"),
        ({"algo": "magic"}, "algo magic: not modelled"),
        ({"bytes": "much"}, "line 2: bytes 'much' is not a number above 0"),
        ({"bytes": ""}, "line 2: bytes is not stated"),
        ({"time_us": ""}, "line 2: time_us is not stated"),
        ({"n_gpus": "7.5"}, "line 2: n_gpus '7.5' is not a whole number"),
        ({"n_gpus": "100000000"}, "line 2: n_gpus 100,000,000 is too large"),
        ({"n_gpus": "1"}, "line 2: n_gpus 1 is too small"),
        ({"nodes": "2"}, "line 2: nodes 2: 8 GPUs, 8 on a node, are on 1"),
        ({"nodes": "two"}, "line 2: nodes 'two' is not a number above 0"),
        ({"timed": "calls"}, "line 2: timed 'calls': write call where each call was timed by itself, else nothing"),
    ],
)
def test_a_row_that_cannot_be_predicted_says_why(tmp_path: Path, change: dict[str, str], reason: str) -> None:
    bad, good = compared(tmp_path, change, {})
    assert reason in (bad.skip_reason or "")
    assert not bad.is_expressible
    assert good.predicted is not None


def test_reasons_name_their_own_line(tmp_path: Path) -> None:
    first, second = compared(tmp_path, {"n_gpus": ""}, {"n_gpus": ""})
    assert [first.skip_reason, second.skip_reason] == ["line 2: n_gpus is not stated", "line 3: n_gpus is not stated"]
    assert math.isnan(first.measured)


def test_a_table_without_a_needed_column_is_refused(tmp_path: Path) -> None:
    path = write_table(tmp_path / "t.csv", {key: text for key, text in ROW.items() if key != "bytes"})
    with pytest.raises(InputError, match="lacks column bytes"):
        read_collectives(path)
