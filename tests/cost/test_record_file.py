"""Validation of record files: mistakes are reported by file, key and value, in one sentence."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clustersim.common.dtypes import DType
from clustersim.common.errors import InputError, OutputError
from clustersim.cost.calibration_record import (
    CalibrationRecord,
    CollectiveCall,
    CopySample,
    DeviceTelemetry,
    GpuSample,
    HoldoutStep,
    HostLaunchSample,
    InSituSample,
    InterferenceSample,
    KernelSample,
    MemoryAnchor,
    ProfileAnchor,
    TelemetrySample,
    TimeStatistics,
    UnmatchedCall,
)
from clustersim.cost.record_file import read_record, record_text, write_record
from clustersim.cost.record_kinds import LaunchMode, MeasurementOutcome
from clustersim.model.kernels import (
    AttentionShape,
    Kernel,
    KernelKind,
    MatmulLayout,
    MatmulShape,
    MemoryBoundOp,
    MemoryBoundShape,
)
from clustersim.model.training import AttentionBackend
from clustersim.program.task import CollectiveType
from tests.cost.records import (
    CONDITIONS,
    DEVICE,
    attention_kernel,
    collective_fit,
    collective_samples,
    kernel_fit_of,
    kernel_sample,
    matmul_kernel,
    spread,
)
from tests.sentences import parts

PRODUCT = matmul_kernel(MatmulShape(128, 256, 512, operands=MatmulLayout.TN, accumulated=DType.FP32))
FLASH = attention_kernel(AttentionShape(1, 8, 8, 2, 1, 8, True))
ADAM = Kernel(
    "optimizer.step",
    KernelKind.OPTIMIZER,
    DType.FP32,
    0.0,
    1e9,
    MemoryBoundShape(MemoryBoundOp.ADAM, 1, 1000, fused=True, formats=(DType.FP32, DType.BF16)),
    8,
)
HOT = DeviceTelemetry(1410.0, 2619.0, 690.0, 71.0, ("sw_power_cap",))
REDUCE = CollectiveCall(CollectiveType.ALL_REDUCE, 1e8, 8, 1)
LARGE = matmul_kernel(MatmulShape(1 << 20, 1 << 20, 1 << 20))
RECORD = CalibrationRecord(
    replace(DEVICE, cudnn="9.10", power_limit_w=700.0, ecc=False, environment={"NCCL_ALGO": "Ring"}),
    CONDITIONS,
    (
        replace(kernel_sample(PRODUCT, 1e-4, 0.02), telemetry=HOT),
        kernel_sample(FLASH, 2e-4),
        kernel_sample(ADAM, 3e-4),
        KernelSample(
            "large",
            LARGE.kind,
            LARGE.dtype,
            LARGE.shape or MatmulShape(1, 1, 1),
            1.0,
            1.0,
            1,
            None,
            MeasurementOutcome.OUT_OF_MEMORY,
        ),
    ),
    collective_samples({1e6: 1e-3, 2e6: 2e-3}),
    (CopySample("device", 1e9, spread(1e-3)),),
    (
        InterferenceSample(kernel_sample(PRODUCT, 1e-4), "copy", TimeStatistics(2e-4, 1e-4, 3e-4, 10, 1)),
        InterferenceSample(
            kernel_sample(PRODUCT, 1e-4), "all_reduce", spread(2e-4), REDUCE, spread(1e-3), spread(1.2e-3)
        ),
    ),
    launch_interval=2e-6,
    kernel_fit=kernel_fit_of(matmul_bf16=0.1),
    collective_fits=(collective_fit(1e-5, 1e9, 0.1),),
    telemetry=(TelemetrySample(0.5, "burn_in", HOT),),
    in_situ=(InSituSample("matmul bf16", 12, 1.0e-3, 1.1e-3),),
    host_launches=(HostLaunchSample(LaunchMode.EAGER, 7e-6, 9e-6, (120, 240)),),
    gpus=(GpuSample("0", spread(1e-3), HOT), GpuSample("1", spread(1.02e-3))),
    holdout_steps=(HoldoutStep("4 layers", 0.10, 0.11),),
    profile=ProfileAnchor(
        "trace.json.gz",
        1,
        2,
        0.1,
        0.09,
        0.08,
        AttentionBackend.SDPA,
        (UnmatchedCall("aten::cos", "forward", 1.0, 1e-6),),
        MemoryAnchor(2e9, 3e9, 1e9, 4, 8192),
        0.5,
    ),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "record.json"


def changed(path: Path, keys: list[Any], value: Any) -> Path:
    """A file of the record with one value changed, or dropped (Ellipsis)."""
    content = json.loads(record_text(RECORD))
    node = content
    for key in keys[:-1]:
        node = node[key]
    if value is ...:
        del node[keys[-1]]
    else:
        node[keys[-1]] = value
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def read_error(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        read_record(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert "\n" not in text
    return text.removeprefix(f"{path}: ")


def test_a_full_record_round_trips(path: Path):
    write_record(RECORD, path)
    assert read_record(path) == RECORD


def test_missing_keys_take_the_records_defaults(path: Path):
    device = {"accelerator": DEVICE.accelerator, "name": DEVICE.name}
    conditions = {"date": "2025-01-01", "command": "clustersim calibrate", "method": "median"}
    path.write_text(json.dumps({"version": 3, "device": device, "conditions": conditions}), encoding="utf-8")
    assert read_record(path) == CalibrationRecord(DEVICE, CONDITIONS)


def test_a_sample_is_one_line():
    lines = record_text(RECORD).splitlines()
    assert sum('"shape"' in line for line in lines) == len(RECORD.kernels) + len(RECORD.interference)


def test_integers_are_read_as_floats(path: Path):
    record = read_record(changed(path, ["kernels", 0, "flops"], 7))
    assert record.kernels[0].flops == 7.0
    assert isinstance(record.kernels[0].flops, float)


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (["version"], 1, "version: is 1 ... reads 3 ... measure again ..."),
        (["version"], 2, "version: is 2 ... reads 3 ... measure again ..."),
        (["version"], 4, "version: is 4 ... reads 3 ... measure again ..."),
        (["in_situ", 0, "in_situ"], 0.0, "in_situ[0].in_situ: 0.0 is not above zero"),
        (["host_launches", 0, "mode"], "eagre", "host_launches[0].mode: 'eagre' ... eager?"),
        (["telemetry", 0, "state", "power_w"], -1.0, "telemetry[0].state.power_w: -1.0 is below zero"),
        (["gpus", 1, "device"], "0", "gpus[1] is the same measurement as gpus[0]; keep one of them"),
        (["holdout_steps", 0, "measured"], -0.1, "holdout_steps[0].measured: -0.1 is not above zero"),
        (["profile", "busy"], 0.0, "profile.busy: 0.0 is not above zero"),
        (["profile", "memory", "modelled"], 0.0, "profile.memory.modelled: 0.0 is not above zero"),
        (["profile", "memory", "tokens"], 0, "profile.memory.tokens: 0 is not above zero"),
        (["profile", "host_scale"], -1.0, "profile.host_scale: -1.0 is below zero"),
        (["profile", "unmatched", 0, "seconds"], -1.0, "profile.unmatched[0].seconds: -1.0 is below zero"),
        (["profile", "attention"], "flush2", "profile.attention: 'flush2' is unknown; did you mean flash2?"),
        (["version"], ..., "is no calibration record: version is missing"),
        (["device"], ..., "is no calibration record: device is missing"),
        (["kernel"], [], "kernel: unknown key; did you mean kernel_fit or kernels?"),
        (["device", "tourch"], "2.9", "device.tourch: unknown key; did you mean torch?"),
        (["kernels", 0, "time", "second"], 1.0, "kernels[0].time.second: unknown key; did you mean seconds?"),
        (["kernels", 0, "time", "seconds"], ..., "kernels[0].time.seconds: is missing"),
        (["kernels", 1, "shape", "query"], ..., "kernels[1].shape.query: is missing"),
        (["kernels", 0, "shape", "nn"], 3, "kernels[0].shape.nn: unknown key; did you mean n?"),
        (["kernels", 0, "shape", "m"], 1.5, "kernels[0].shape.m: 1.5 is not a whole number"),
        (["kernels", 0, "shape", "m"], True, "kernels[0].shape.m: true is not a whole number"),
        (
            ["kernels", 0, "shape", "m"],
            10**30,
            "kernels[0].shape.m: 1,000,000,000,000,000,000,000,000,000,000 is too large",
        ),
        (["kernels", 0, "shape", "m"], 0, "kernels[0].shape.m: 0 is not above zero"),
        (["kernels", 0, "shape"], None, "kernels[0].shape: nothing is not a mapping of keys to values"),
        (["kernels", 0, "shape", "operands"], "TT", "kernels[0].shape.operands: 'TT' ... NN, NT, TN"),
        (["kernels", 0, "dtype"], "bf61", "kernels[0].dtype: 'bf61' is unknown; did you mean bf16?"),
        (["kernels", 0, "dtype"], 16, "kernels[0].dtype: 16 is unknown; did you mean fp16?"),
        (["kernels", 0, "time", "seconds"], "1e-4", "kernels[0].time.seconds: '1e-4' is not a finite number"),
        (["kernels", 0, "time", "seconds"], float("nan"), "kernels[0].time.seconds: nan is not a finite number"),
        (["kernels", 0, "time", "seconds"], float("inf"), "kernels[0].time.seconds: inf is not a finite number"),
        (["kernels", 0, "time", "seconds"], -1.0, "kernels[0].time.seconds: -1.0 is not above zero"),
        (["kernels", 0, "time", "p5"], 0.0, "kernels[0].time.p5: 0.0 is not above zero"),
        (["kernels", 0, "time", "repetitions"], 0, "kernels[0].time.repetitions: 0 is not above zero"),
        (["kernels", 0, "time", "dropped"], -1, "kernels[0].time.dropped: -1 is below zero"),
        (["kernels", 0, "bytes"], -1.0, "kernels[0].bytes: -1.0 is below zero"),
        (["kernels", 0, "launches"], 0, "kernels[0].launches: 0 is not above zero"),
        (["kernels", 0, "time"], None, "kernels[0].outcome: measured has no time ..."),
        (["kernels", 0, "time"], 1e-4, "kernels[0].time: 0.0001 is not a mapping of keys to values"),
        (["kernels", 0, "outcome"], "unsupported", "kernels[0].outcome: unsupported has a time ... measured ..."),
        (["kernels"], {}, "kernels: {} is not a list"),
        (["kernels"], [7], "kernels[0]: 7 is not a mapping of keys to values"),
        (["collectives", 1, "call", "payload"], 1e6, "collectives[1] ... collectives[0]; keep one ..."),
        (["collectives", 1, "call", "payload"], 0, "collectives[1].call.payload: 0.0 is not above zero"),
        (["collectives", 0, "call", "nodes"], 3, "collectives[0].call.nodes: 8 ranks ... 3 nodes ..."),
        (
            ["collectives", 0, "call", "collective"],
            "allreduce",
            "collectives[0].call.collective: 'allreduce' ... all_reduce?",
        ),
        (["collective_fits", 0, "beta"], 0.0, "collective_fits[0].beta: 0.0 is not above zero"),
        (["collective_fits", 0, "alpha"], -1e-6, "collective_fits[0].alpha: -1e-06 is below zero"),
        (["kernel_fit", "peak", "bf16"], 0.0, "kernel_fit.peak.bf16: 0.0 is not above zero"),
        (
            ["kernel_fit", "efficiency", "operator_bandwidth_ratio"],
            0.0,
            "kernel_fit.efficiency.operator_bandwidth_ratio: 0.0 is not above zero",
        ),
        (
            ["kernel_fit", "peak", "int3"],
            1.0,
            "kernel_fit.peak: 'int3' is unknown; did you mean int8?",
        ),
        (
            ["kernel_fit", "efficiency", "matmul", "tiles"],
            [[1]],
            "kernel_fit.efficiency.matmul.tiles[0]: [1] has not 2 values",
        ),
        (["conditions", "processes"], 0, "conditions.processes: 0 is not above zero"),
        (["copies", 0, "time", "p95"], 1e-4, "copies[0].time: ... median 0.001 ... p5 0.001 and p95 0.0001"),
        (["interference", 0, "overlapped_with"], 3, "interference[0].overlapped_with: 3 is not a text"),
        (
            ["interference", 0, "overlapped_with"],
            "allreduce",
            "interference[0].overlapped_with: 'allreduce' ... all_reduce?",
        ),
        (
            ["interference", 1, "call"],
            {"collective": "all_gather", "payload": 1e6, "ranks": 8, "nodes": 1},
            "interference[1].overlapped_with: all_reduce ... all_gather",
        ),
        (
            ["interference", 1, "call"],
            {"collective": "all_reduce", "payload": 1e6, "ranks": 8, "nodes": 3},
            "interference[1].call.nodes: 8 ranks ... 3 nodes ...",
        ),
        (
            ["interference", 1, "call"],
            {"collective": "all_reduce", "payload": 0.0, "ranks": 8, "nodes": 1},
            "interference[1].call.payload: 0.0 is not above zero",
        ),
        (["launch_interval"], -1.0, "launch_interval: -1.0 is below zero"),
    ],
)
def test_mistakes_are_named(path: Path, keys: list[Any], value: Any, message: str):
    assert parts(message).fullmatch(read_error(changed(path, keys, value)))


def test_duplicate_kernels_are_rejected_despite_different_names(path: Path):
    content = json.loads(record_text(RECORD))
    content["kernels"].append({**content["kernels"][1], "name": "other"})
    path.write_text(json.dumps(content), encoding="utf-8")
    assert parts("kernels[4] ... kernels[1]; keep one ...").fullmatch(read_error(path))


def test_a_truncated_file_is_refused(path: Path):
    path.write_text(record_text(RECORD)[:-20], encoding="utf-8")
    assert read_error(path).startswith("is not valid JSON")


@pytest.mark.parametrize("text", ["", "[]", "7", "\x00", '{"version": 1, "version": 1}'])
def test_files_that_are_no_record_are_rejected(path: Path, text: str):
    path.write_text(text, encoding="utf-8")
    assert read_error(path)


def test_a_file_that_is_not_there_is_refused(path: Path):
    assert "cannot be read" in read_error(path)


def test_writing_is_atomic(path: Path):
    write_record(RECORD, path)
    write_record(CalibrationRecord(DEVICE, CONDITIONS), path)
    assert read_record(path) == CalibrationRecord(DEVICE, CONDITIONS)
    with pytest.raises(OutputError, match="there is no directory"):
        write_record(RECORD, path / "beneath.json")
    assert [item.name for item in path.parent.iterdir()] == ["record.json"]


def test_writing_through_a_symlink_keeps_it(tmp_path: Path):
    target, link = tmp_path / "there.json", tmp_path / "here.json"
    write_record(CalibrationRecord(DEVICE, CONDITIONS), target)
    link.symlink_to(target)
    write_record(CalibrationRecord(DEVICE, CONDITIONS, launch_interval=2e-6), link)
    assert link.is_symlink()
    assert read_record(target).launch_interval == 2e-6


def test_a_number_that_is_not_finite_is_not_written(tmp_path: Path):
    with pytest.raises(OutputError, match="not finite"):
        write_record(CalibrationRecord(DEVICE, CONDITIONS, launch_interval=math.nan), tmp_path / "r.json")
    assert not list(tmp_path.iterdir())
