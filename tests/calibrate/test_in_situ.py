"""In-situ factors of kernels are recovered from CPU and GPU profiles with known factors."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.build import distinct_kernels as all_kernels_of
from clustersim.common.errors import InputError
from clustersim.cost.calibration_record import InSituSample, KernelSample, family_of, signature_of
from clustersim.cost.record_kinds import MeasurementOutcome
from clustersim.cost.roofline import Roofline
from clustersim.hardware.accelerator import load_accelerator
from clustersim.model.attention_spec import LatentAttention
from clustersim.model.kernels import Kernel, KernelKind, MatmulShape, MemoryBoundOp
from clustersim.scenario import Scenario
from tests.calibrate.check_scenarios import GPT, LLAMA, single_thread, small_scenario
from tests.conftest import examples
from tests.cost.records import kernel_sample

torch = pytest.importorskip("torch")

from torch.autograd import DeviceType  # noqa: E402 - torch first
from torch.autograd.profiler_util import FunctionEvent, Interval  # noqa: E402
from torch.autograd.profiler_util import Kernel as Launched  # noqa: E402

from calibrate.check.operator_labels import ATTENTION, MATMUL, OperatorLabel, parse_label  # noqa: E402
from calibrate.check.profile_attribution import DeviceTimer, HostTimer, seconds_by_label  # noqa: E402
from calibrate.check.supported import require_supported  # noqa: E402
from calibrate.devices.cpu import CpuDevice  # noqa: E402
from calibrate.devices.cuda import CudaDevice  # noqa: E402
from calibrate.in_situ import measure, real_layers  # noqa: E402
from calibrate.in_situ.profiler_overhead import ProfilerOverhead, median_kernel_gap  # noqa: E402
from calibrate.in_situ.real_layers import step_kernel_counts  # noqa: E402
from calibrate.in_situ.single_rank import MAX_CHAIN_LAYERS, single_rank_scenario  # noqa: E402
from calibrate.kernels.timing import QUICK  # noqa: E402
from tests.calibrate import fake_tensors  # noqa: E402
from tests.calibrate.fake_cuda import FakeCuda  # noqa: E402
from tests.calibrate.fake_cupti import FakeCupti  # noqa: E402
from tests.calibrate.fake_gpu import FakeChip, FakeKernel  # noqa: E402
from tests.sentences import parts  # noqa: E402

KERNEL_MODEL = Roofline(load_accelerator("h100-sxm-80gb"))
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


@pytest.fixture(autouse=True)
def _single_thread() -> Iterator[None]:
    with single_thread():
        yield


def family_of_kernel(kernel: Kernel) -> str:
    kernel_signature = signature_of(kernel)
    assert kernel_signature is not None
    return family_of(kernel_signature)


def samples_by_family(samples: tuple[InSituSample, ...]) -> dict[str, InSituSample]:
    return {sample.family: sample for sample in samples}


def fail_on_message(text: str) -> None:
    raise AssertionError(text)


@dataclass
class FakeKernelChain:
    """Fake kernels whose in-situ time is a factor per label times the modelled time; every turn is slower."""

    kernel_counts: Mapping[Kernel, int]
    factors: Mapping[OperatorLabel, float]
    slowdown: float = field(default=1.0, init=False)

    def run_steps(self, _seconds: float) -> float:
        self.slowdown *= 1.5
        return 1.0

    def profile_steps(self, _once: float) -> Mapping[OperatorLabel, float]:
        seconds: dict[OperatorLabel, float] = {}
        for kernel, count in self.kernel_counts.items():
            label = OperatorLabel.from_kernel(kernel)
            seconds[label] = (
                seconds.get(label, 0.0)
                + count * self.factors[label] * self.measure_standalone(kernel, 0.0).time.seconds
            )
        return seconds

    def measure_standalone(self, kernel: Kernel, _seconds: float) -> Any:
        return kernel_sample(kernel, self.slowdown * KERNEL_MODEL.time_kernel(kernel).seconds)


@examples(20)
@given(st.data())
def test_in_situ_factors_are_recovered(data: st.DataObject) -> None:
    """By family, and independent of the machine's speed per turn, since both times are measured in every turn."""
    kernels = step_kernel_counts(single_rank_scenario(small_scenario(GPT), 1e12))
    labels = {OperatorLabel.from_kernel(kernel) for kernel in kernels}
    chain = FakeKernelChain(kernels, {label: data.draw(st.floats(0.3, 3.0)) for label in labels})
    samples = samples_by_family(measure.compare_with_isolated(chain, chain.measure_standalone, 1e9, fail_on_message))
    assert samples.keys() == {family_of_kernel(kernel) for kernel in kernels}
    for name in samples:
        family_kernels = {kernel: count for kernel, count in kernels.items() if family_of_kernel(kernel) == name}
        assert samples[name].factor == pytest.approx(
            chain.factors[OperatorLabel.from_kernel(next(iter(family_kernels)))]
        )
        assert samples[name].kernels == sum(family_kernels.values())


def test_unmeasured_kernels_and_unprofiled_labels_are_reported_and_skipped() -> None:
    """Attention has no standalone sample, and the profiler recorded no loss; the other families have factors."""
    kernels = step_kernel_counts(single_rank_scenario(small_scenario(LLAMA), 1e12))
    chain = FakeKernelChain(kernels, dict.fromkeys(map(OperatorLabel.from_kernel, kernels), 1.25))
    loss, messages = OperatorLabel(KernelKind.LOSS, MemoryBoundOp.LOSS_TORCH), list[str]()

    def measure_kernel(kernel: Kernel, seconds: float) -> KernelSample:
        sample: KernelSample = chain.measure_standalone(kernel, seconds)
        if kernel.kind is KernelKind.ATTENTION_FORWARD:
            return replace(sample, time=None, outcome=MeasurementOutcome.UNSUPPORTED, source="no such kernel")
        return sample

    class ChainWithoutLoss(FakeKernelChain):
        def profile_steps(self, _once: float) -> Mapping[OperatorLabel, float]:
            return {label: seconds for label, seconds in super().profile_steps(_once).items() if label != loss}

    samples = samples_by_family(
        measure.compare_with_isolated(ChainWithoutLoss(kernels, chain.factors), measure_kernel, 1e9, messages.append)
    )
    assert len(messages) == 2
    assert parts("attention_forward: attention.core ... unsupported, no such kernel").search(" ".join(messages))
    assert "loss_torch: the profiler saw nothing of it" in " ".join(messages)
    assert {"attention_forward fp32", "loss_torch fp32"}.isdisjoint(samples)
    assert {"attention_backward fp32", "loss_torch backward fp32", "matmul fp32"} <= samples.keys()


MATMUL_OPS, LOSS_OPS = ("aten::mm", "aten::addmm"), ("aten::_log_softmax", "aten::nll_loss_forward")


class SlowedGpu:
    """A fake GPU whose kernels are slowed by a factor per launching operator while a step runs."""

    def __init__(self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        self.operator, self.factor, self.is_in_step = "", lambda _operator: 1.0, False
        gpu, original_work, step = cuda.gpu(), fake_tensors._kernel_work, real_layers.training_step
        original_seconds = gpu._seconds

        def work(given_cuda: FakeCuda, func: Any, call: Any) -> FakeKernel:
            self.operator = func._schema.name
            return original_work(given_cuda, func, call)

        def seconds(work: FakeKernel) -> float:
            return original_seconds(work) * (self.factor(self.operator) if self.is_in_step else 1.0)

        def run_step(*operands: Any) -> None:
            self.is_in_step = True
            step(*operands)
            self.is_in_step = False

        monkeypatch.setattr(fake_tensors, "_kernel_work", work)
        monkeypatch.setattr(gpu, "_seconds", seconds)
        monkeypatch.setattr(real_layers, "training_step", run_step)

    factor: Callable[[str], float]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowedGpu]:
    """No cache, constant clock, events of zero duration: kernels take the same time standalone and in situ."""
    supported = ["cuda", "meta"]
    monkeypatch.setattr("torch.utils._foreach_utils._get_foreach_kernels_supported_devices", lambda: supported)
    monkeypatch.setattr(measure, "MeasurementMethod", lambda: replace(QUICK, min_sample_seconds=1e-5))
    monkeypatch.setattr(measure, "MAX_ROUNDS", 1)
    chip = FakeChip(cache=1.0, sustained=1.98e9, event=(0.0, 0.0))
    cuda = FakeCuda(chip).install(monkeypatch)
    with fake_tensors.fake_cuda_tensors(cuda):
        slowed_gpu = SlowedGpu(cuda, monkeypatch)
        FakeCupti(cuda, monkeypatch)
        yield slowed_gpu


EXACT_FAMILIES = ("matmul", "attention_forward", "rmsnorm", "rmsnorm backward", "rotary", "rotary backward", "swiglu",
         "swiglu backward", "residual fused", "loss_torch", "loss_torch backward", "adam", "lookup fused")  # fmt: skip


def test_gpu_in_situ_factors_are_recovered(gpu: SlowedGpu) -> None:
    """Real layers, torch's profiler and kernel durations: factors of 1.5 for matmuls, 3 for losses, 2 for others.

    Excluded: AccumulateGrad, gradient norm and clipping, which launch additional small kernels in a real step
    (weights of norms, a square root), and gradients of lookups.
    """
    gpu.factor = lambda operator: 1.5 if operator in MATMUL_OPS else 3.0 if operator in LOSS_OPS else 2.0
    samples = samples_by_family(
        measure.measure_in_situ(small_scenario(LLAMA, "model.layers=1"), CudaDevice(0), 1e-3, notify=fail_on_message)
    )
    expected = dict.fromkeys(EXACT_FAMILIES, 2.0) | {"matmul": 1.5, "loss_torch": 3.0}
    factors = {name: samples[f"{name} fp32"].factor for name in expected}
    assert factors == {name: pytest.approx(factor) for name, factor in expected.items()}


def test_unsupported_layers_give_no_factors_and_one_message() -> None:
    messages: list[str] = []
    assert (
        measure.measure_in_situ(small_scenario(LLAMA, "training.fused=true"), CpuDevice(), 1.0, notify=messages.append)
        == ()
    )
    assert len(messages) == 1
    assert messages[0].startswith("no in-situ kernels: ")


def test_real_layers_have_a_factor_for_every_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "MeasurementMethod", lambda: replace(QUICK, cold_cache=False))
    monkeypatch.setattr(measure, "MAX_ROUNDS", 1)
    scenario = small_scenario(LLAMA, "model.layers=1")
    samples = measure.measure_in_situ(scenario, CpuDevice(), 0.1, notify=fail_on_message)
    expected = Counter[str]()
    for kernel, count in step_kernel_counts(single_rank_scenario(scenario, 1e12)).items():
        expected[family_of_kernel(kernel)] += count
    assert {sample.family: sample.kernels for sample in samples} == expected


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_single_rank_model_has_the_matmul_shapes_of_the_scenario(tp: int) -> None:
    """Layers and logits, forward and both gradients; norms cover the same tokens without sequence parallelism."""
    scenario = Scenario.from_mapping(
        {
            "model": "llama3-8b",
            "cluster": {"name": "dgx-h100", "gpus": 8},
            "layout": {"tp": tp, "dp": 8 // tp},
            "training": {"sequence": 2048, "global_batch": 8},
        }
    )
    expected = {kernel.shape for kernel in all_kernels_of(scenario) if isinstance(kernel.shape, MatmulShape)}
    single_rank = single_rank_scenario(scenario, 1e15)
    assert {
        kernel.shape for kernel in step_kernel_counts(single_rank) if isinstance(kernel.shape, MatmulShape)
    } == expected
    assert (single_rank.model.layer_count, single_rank.layout.world_size, single_rank.microbatch_count) == (
        MAX_CHAIN_LAYERS,
        1,
        1,
    )


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_layers_of_every_example_are_supported(path: Path) -> None:
    """Except models with only MLA layers, which have no PyTorch module here; eager, as real layers are."""
    scenario = Scenario.load(path, ["framework.torch_compile=false", "framework.cuda_graphs=false"])
    if all(isinstance(attention, LatentAttention) for attention in scenario.model.distinct_attentions):
        with pytest.raises(InputError, match="name another model"):
            single_rank_scenario(scenario, 1e18)
    else:
        require_supported(single_rank_scenario(scenario, 1e18))


def test_experts_of_a_single_rank_have_the_tokens_of_the_full_layout() -> None:
    """Eight experts on four ranks: every rank has two experts with as many tokens each.

    A token is routed to two of them.
    """
    full = small_scenario(
        LLAMA, "model.experts={count: 8, top_k: 2, ffn: 48}", "cluster={name: dgx-h100, gpus: 4}",
        "layout={ep: 4, data: ddp}", "training.microbatch=1",
    )  # fmt: skip
    expected, single_rank = (
        {kernel.shape for kernel in kernels if kernel.kind is KernelKind.GROUPED_MATMUL}
        for kernels in (all_kernels_of(full), step_kernel_counts(single_rank_scenario(full, 1e12)))
    )
    assert single_rank == expected != set()


def test_parse_label_inverts_profiler_name() -> None:
    for kernel in step_kernel_counts(single_rank_scenario(small_scenario(GPT), 1e12)):
        label = OperatorLabel.from_kernel(kernel)
        assert parse_label(label.profiler_name) == replace(label, backward=False)
    assert parse_label("aten::mm") is None


def _event(name: str, span: tuple[float, float], **fields: Any) -> Any:
    options = {"thread": 1, "fwd_thread": 1, "sequence_nr": -1, **fields}
    return FunctionEvent(id=0, name=name, start_us=span[0], end_us=span[1], **options)


def test_recomputed_forward_on_the_backward_thread_is_attributed() -> None:
    """Sequence numbers start at 7 on both threads: attention on the first, a recomputed matmul on the second."""
    outer = _event(ATTENTION.profiler_name, (0, 10))
    core = _event("aten::sdpa", (1, 9), sequence_nr=7)
    recomputed = _event(MATMUL.profiler_name, (20, 30), thread=2)
    product = _event("aten::mm", (21, 29), thread=2, sequence_nr=7)
    node = _event("autograd::engine::evaluate_function: SdpaBackward0", (40, 50), thread=2, sequence_nr=7)
    for parent, child in ((outer, core), (recomputed, product)):
        parent.append_cpu_child(child)
        child.set_cpu_parent(parent)
    for event, seconds in ((core, 1.0), (product, 2.0), (node, 4.0)):
        event.kernels.append(Launched("kernel", 0, 1e6 * seconds))
    label_seconds = seconds_by_label([outer, core, recomputed, product, node], DeviceTimer())
    assert label_seconds == {ATTENTION: 1.0, MATMUL: 2.0, OperatorLabel(KernelKind.ATTENTION_BACKWARD): 4.0}


def test_a_call_of_the_runtime_has_no_kernels_of_an_operator_with_its_number() -> None:
    """Nor has the profiler's mark of a step a time of its own: what is in it is found in it."""
    mark, outer = _event("ProfilerStep*", (0, 20)), _event(MATMUL.profiler_name, (1, 10))
    product, call = _event("aten::mm", (2, 9)), _event("cudaLaunchKernel", (3, 4))
    for parent, child in ((mark, outer), (outer, product), (product, call)):
        parent.append_cpu_child(child)
        child.set_cpu_parent(parent)
    for event in (product, call):
        event.kernels.append(Launched("kernel", 0, 1e6))
    assert seconds_by_label([mark, outer, product, call], DeviceTimer()) == {MATMUL: 1.0}


def test_profiler_overhead_is_subtracted() -> None:
    """A label of 30 us with three operators, one of them nested: 2 us of overhead each, and 5 us of the label."""
    label = _event(MATMUL.profiler_name, (0, 30))
    outer, inner, other = (_event("aten::linear", (1, 9)), _event("aten::mm", (2, 8)), _event("aten::add", (10, 15)))
    for parent, child in ((label, outer), (outer, inner), (label, other)):
        parent.append_cpu_child(child)
        child.set_cpu_parent(parent)
    label_seconds = seconds_by_label([label, outer, inner, other], HostTimer(event_overhead=2e-6, label_overhead=5e-6))
    assert label_seconds[MATMUL] == pytest.approx(30e-6 - 3 * 2e-6 - 5e-6)
    assert ProfilerOverhead(2e-6, 5e-6, 9e-6).total_overhead([label, outer, inner, other]) == pytest.approx(
        3 * 2e-6 + 9e-6
    )


def _kernel_events(correlation_id: int, launch_time: float, span: tuple[float, float]) -> list[Any]:
    """A kernel and the call that launched it."""
    spans = (("cudaLaunchKernel", DeviceType.CPU, (launch_time, launch_time)), ("kernel", DeviceType.CUDA, span))
    return [
        SimpleNamespace(
            id=correlation_id, name=name, is_user_annotation=False, device_type=kind, time_range=Interval(*times)
        )
        for name, kind, times in spans
    ]


def test_kernel_gap_is_measured_between_queued_kernels() -> None:
    """Gaps of 1, 2 and 1 us after kernels that still ran when the next was launched; one launch was late."""
    spans = ((0.0, 10.0), (11.0, 20.0), (22.0, 30.0), (90.0, 95.0), (96.0, 99.0))
    launches = (0.0, 2.0, 4.0, 85.0, 92.0)
    events = [event for index in range(5) for event in _kernel_events(index, launches[index], spans[index])]
    assert median_kernel_gap(events) == pytest.approx(1e-6)
    unqueued = [event for index in (0, 3) for event in _kernel_events(index, launches[index], spans[index])]
    assert median_kernel_gap(unqueued) == 0.0
