"""`--check` refuses unsupported input, and its prediction is close to a real step."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from clustersim.build import distinct_kernels
from clustersim.common.errors import InputError
from tests.calibrate.check_scenarios import LLAMA, TRAINING, single_thread, small_scenario

torch = pytest.importorskip("torch")

from calibrate.check.context import MemoryBudget, fit_layer_count, resolve_world  # noqa: E402
from calibrate.check.supported import require_supported  # noqa: E402
from calibrate.check_command import add_arguments, command  # noqa: E402 - torch first


@pytest.fixture(autouse=True)
def _single_thread() -> Iterator[None]:
    with single_thread():
        yield


def _options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump({"model": LLAMA, "cluster": {"name": "laptop", "gpus": 1}, "training": TRAINING}))
    return str(file)


def test_fewer_processes_than_ranks_are_refused(path: str) -> None:
    with pytest.raises(InputError, match=r"2 ranks.*1 process.*torchrun --nproc-per-node 2 -m calibrate --check"):
        command(_options("--check", path, "--set", "cluster.gpus=2"))


def test_more_processes_than_ranks_are_refused() -> None:
    with pytest.raises(InputError, match="1 ranks, and this is 4 processes; start one"):
        resolve_world(small_scenario(), {"WORLD_SIZE": "4"})


def test_missing_gpu_is_refused(path: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(InputError, match="--device cpu"):
        command(_options("--check", path, "--device", "cuda"))


def test_missing_torch_advises_installation(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("calibrate.torch_requirement.find_spec", lambda _name: None)
    with pytest.raises(InputError, match="pip install"):
        command(_options("--check", path))


def test_fused_kernels_are_refused_on_a_cpu(path: str) -> None:
    with pytest.raises(InputError, match=r"training.fused: rotary: .* set it to false"):
        command(_options("--check", path, "--device", "cpu", "--set", "training.fused=true"))


def test_zero_steps_are_refused(path: str) -> None:
    with pytest.raises(InputError, match="--steps: 0"):
        command(_options("--check", path, "--steps", "0"))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ("cluster={name: dgx-h100, gpus: 8}", "layout.tp=2", "training.global_batch=8"),
            "tp 2 x dp 4 cannot be checked: one of dp",
        ),
        (("cluster.gpus=2", "layout.cp=2"), "cp 2 cannot be checked"),
        (("cluster.gpus=2", "layout.pp=2", "schedule=zb-1p"), "schedule: zb-1p cannot be checked; gpipe, 1f1b"),
        (("cluster.gpus=2", "layout.data=zero1"), "only ddp and fsdp"),
        (("cluster.gpus=2", "layout.tp=2", "training.loss=fused"), "set it to torch"),
        (("cluster.gpus=2", "layout.pp=2", "model.tied_embeddings=true"), "tied_embeddings"),
        (("cluster.gpus=2", "layout.data=ddp", "training.precision=bf16"), "use fsdp"),
        (("training.precision={compute: bf16, gradients: bf16}",), "gradients and moments in the weights' format"),
        (("degradations.jitter=1 %",), "degradations"),
        (("training.attention=flash1",), "training.attention: torch has its own choice, not flash1"),
        (("training.lora=8",), r"training\.lora:.*cannot be checked.*none"),
        (("training.recompute=selective_op",), "training.recompute: selective_op cannot be checked"),
        (("training.recompute=full", "training.fused=true"), "training.recompute: fused matmuls save too late"),
        (("model.window=64",), r"model\.window:.*SDPA.*full"),
        (("model.block=parallel",), "model.block: only pre_norm layers"),
        (("model.rotary_percent=0.5",), "model.rotary_percent: only whole heads"),
        (("model.qk_norm=whole",), "model.qk_norm: only norms of each head"),
        (("model.attn_logit_softcapping=true",), "model.attn_logit_softcapping and model.final_logit_softcapping"),
        (("model.positions=alibi",), "a norm of the embedding, ALiBi, spare positions"),
        (
            (
                "cluster.node.host_memory={capacity: 1 TB, bandwidth: 90 GB/s, device_to_host: 50 GB/s, "
                "host_to_device: 50 GB/s, latency: 0 s, optimizer_fraction: 0.5}",
                "training.offload.optimizer=true",
            ),
            r"training\.offload:.*cannot be checked.*none",
        ),
    ],
)
def test_unsupported_scenarios_are_refused(overrides: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        require_supported(small_scenario(LLAMA, *overrides))


def test_layer_count_is_reduced_to_fit_memory() -> None:
    from calibrate.check.prediction import peak_allocated

    scenario = small_scenario(LLAMA, "model.layers=6")
    budget = MemoryBudget(peak_allocated(small_scenario(LLAMA, "model.layers=4")))
    assert fit_layer_count(scenario, budget, None).model.layer_count == 4
    assert fit_layer_count(scenario, budget, 3).model.layer_count == 3
    assert fit_layer_count(scenario, MemoryBudget(2 * budget.training_bytes), None) is scenario
    with pytest.raises(InputError, match=r"with only 1 layers needs .* make it smaller"):
        fit_layer_count(scenario, MemoryBudget(1.0), None)


def test_training_leaves_memory_to_measure_every_kernel() -> None:
    """Training takes at most half of the memory, and with the largest kernel (an update of many weights) all of it."""
    from calibrate.check.prediction import peak_allocated
    from calibrate.kernels.pytorch_ops import allocated_bytes

    overrides = ("model.layers=6", "model.hidden=128", "model.ffn=512", "model.vocab=512", "training.microbatch=1")
    scenario, cpu = small_scenario(LLAMA, *overrides), torch.device("cpu")
    for ratio, is_full_model in ((1.5, False), (1.9, False), (2.5, True)):
        free = ratio * peak_allocated(scenario)
        truncated = fit_layer_count(scenario, MemoryBudget.shared_with_kernels(free, cpu), None)
        peak, largest = (
            peak_allocated(truncated),
            max(allocated_bytes(kernel, cpu) for kernel in distinct_kernels(truncated)),
        )
        assert peak <= free / 2.0
        assert largest <= 0.8 * (free - peak)
        assert (truncated.model.layer_count == scenario.model.layer_count) is is_full_model


def test_record_of_another_accelerator_is_refused(path: str, tmp_path: Path) -> None:
    from clustersim.cost.calibration_record import CalibrationRecord, DeviceInfo, MeasurementConditions
    from clustersim.cost.record_file import write_record

    other = tmp_path / "other.json"
    write_record(
        CalibrationRecord(DeviceInfo("h100-sxm-80gb", "a GPU"), MeasurementConditions("2026-11-20", "test", "test")),
        other,
    )
    with pytest.raises(InputError, match=r"h100-sxm-80gb is not the scenario's, cpu-laptop"):
        command(_options("--check", path, "--record", str(other)))


@pytest.mark.slow
@pytest.mark.real_time
def test_single_process_step_matches_its_prediction(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A real step against the prediction from kernels that are measured between steps.

    Tolerance: a factor of 1.6, since the machine is shared, and kernels of a model this small are not much
    longer than autograd's overhead. `python -m tests.benchmarks.check` prints the errors of larger models.
    """
    model_overrides = ["model.hidden=256", "model.ffn=704", "model.heads=4", "model.kv_heads=4", "model.head_dim=64"]
    overrides = [*model_overrides, "model.vocab=1024", "model.max_positions=256", "training.sequence=128"]
    arguments = [argument for override in overrides for argument in ("--set", override)]
    command(_options("--check", path, "--steps", "2", "--json", "-", *arguments))
    result = json.loads(capsys.readouterr().out)
    assert result["provenance_share"]["measured"] == pytest.approx(1.0)
    assert 1 / 1.6 < result["predicted_s"] / result["measured_s"] < 1.6
    assert result["predicted_peak_bytes"] == pytest.approx(result["measured_peak_bytes"], rel=0.1)
