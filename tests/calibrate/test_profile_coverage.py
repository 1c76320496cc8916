"""A profiled step is refused for another plan, even where each of its kernels would find a place in it."""

import gzip
import json
from pathlib import Path

import pytest

from calibrate.profile.record import record_from_profile
from clustersim.common.errors import InputError
from clustersim.interop.kineto import ProfilerTraces, read_traces
from tests.calibrate.profiled_steps import TRACES, llama

FEWER = {
    "deeper": (("model.layers=5",), r"mlp\.up \(22016 x 8192 x 4096\) 5 times and not 4"),
    "more microbatches": (("training.global_batch=4",), r"attention\.core\.input_gradient 8 times and not [34]"),
    "recomputed": (("training.recompute=full",), r"attention\.core 8 times and not 4"),
    "wider MLP": (("model.ffn=14336",), r"\(8192 x 4096 x 14336\) 4 times and not 0.*; it has .*8192 x 4096 x 11008"),
    "more words": (("model.vocab=128256",), r"head\.logits \(128256 x 8192 x 4096\) 1 times and not 0"),
}
MORE = {
    "shallower": (("model.layers=3",), r"in 25 of a step .* \(8 of 8192 x 4096 x 4096, 4 of 8192 x 4096 x 11008"),
    "fewer groups of keys": (("model.kv_heads=8",), r"24 of 8192 x 4096 x 4096"),
}


@pytest.fixture(scope="module", name="traces")
def traces_fixture() -> ProfilerTraces:
    return read_traces(TRACES / "h200_llama2_7b_4_layers.json.gz")


@pytest.mark.parametrize("case", FEWER)
def test_a_plan_that_runs_more_is_refused(traces: ProfilerTraces, case: str) -> None:
    changes, message = FEWER[case]
    with pytest.raises(InputError, match=f"is of another model or layout: .* run nowhere in a step of it.*{message}"):
        record_from_profile(traces, llama(*changes))


@pytest.mark.parametrize("case", MORE)
def test_a_plan_that_runs_less_is_refused(traces: ProfilerTraces, case: str) -> None:
    changes, message = MORE[case]
    with pytest.raises(InputError, match=f"is of another model or layout: .*{message}"):
        record_from_profile(traces, llama(*changes))


def test_without_sizes_a_larger_plan_would_be_too_fast(tmp_path: Path) -> None:
    """As many matmuls and attention as in the trace, each 16 times as large."""
    content = json.loads(gzip.decompress((TRACES / "h200_llama2_7b_4_layers.json.gz").read_bytes()))
    for event in content["traceEvents"]:
        event.get("args", {}).pop("Input Dims", None)
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps(content))
    wider = "model.hidden=16384", "model.ffn=44032", "model.heads=128", "model.kv_heads=128"
    with pytest.raises(InputError, match=r"would compute \d+\.\d times as fast as h200-sxm-141gb can at its peak"):
        record_from_profile(read_traces(trace), llama(*wider))
