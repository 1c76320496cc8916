"""A chain of kernels with known factors gives them back, on a CPU's profile and on a GPU's."""

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
from clustersim.cost.calibration_record import InSituSample, KernelSample, MeasurementOutcome, family_of, signature_of
from clustersim.cost.roofline import Roofline
from clustersim.hardware.accelerator import load_accelerator
from clustersim.model.kernels import Kernel, KernelKind, MatmulShape, MemoryBoundOp
from clustersim.model.layer_stack import LatentAttention
from clustersim.scenario import Scenario
from tests.calibrate.check_scenarios import GPT, LLAMA, one_thread, scenario
from tests.conftest import examples
from tests.cost.records import row

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
from tests.calibrate.fake_gpu import Chip, Work  # noqa: E402

MODEL = Roofline(load_accelerator("h100-sxm-80gb"))
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    with one_thread():
        yield


def of_family(kernel: Kernel) -> str:
    known = signature_of(kernel)
    assert known is not None
    return family_of(known)


def by_family(rows: tuple[InSituSample, ...]) -> dict[str, InSituSample]:
    return {row.family: row for row in rows}


def never(text: str) -> None:
    raise AssertionError(text)


@dataclass
class Pretended:
    """A chain in which kernels of a label take some times what the model says of them alone; each turn is slower."""

    kernel_counts: Mapping[Kernel, int]
    factors: Mapping[OperatorLabel, float]
    pace: float = field(default=1.0, init=False)

    def run_steps(self, _seconds: float) -> float:
        self.pace *= 1.5
        return 1.0

    def profile_steps(self, _once: float) -> Mapping[OperatorLabel, float]:
        found: dict[OperatorLabel, float] = {}
        for kernel, count in self.kernel_counts.items():
            label = OperatorLabel.from_kernel(kernel)
            found[label] = found.get(label, 0.0) + count * self.factors[label] * self.alone(kernel, 0.0).time.seconds
        return found

    def alone(self, kernel: Kernel, _seconds: float) -> Any:
        return row(kernel, self.pace * MODEL.time_kernel(kernel).seconds)


@examples(20)
@given(st.data())
def test_a_chain_with_known_factors_gives_them_back(data: st.DataObject) -> None:
    """By family, whatever the machine's pace does from turn to turn, since both are measured in each."""
    kernels = step_kernel_counts(single_rank_scenario(scenario(GPT), 1e12))
    labels = {OperatorLabel.from_kernel(kernel) for kernel in kernels}
    chain = Pretended(kernels, {label: data.draw(st.floats(0.3, 3.0)) for label in labels})
    found = by_family(measure.compare_with_isolated(chain, chain.alone, 1e9, never))
    assert found.keys() == {of_family(kernel) for kernel in kernels}
    for name in found:
        same = {kernel: count for kernel, count in kernels.items() if of_family(kernel) == name}
        assert found[name].factor == pytest.approx(chain.factors[OperatorLabel.from_kernel(next(iter(same)))])
        assert found[name].kernels == sum(same.values())


def test_what_cannot_be_compared_is_left_out_and_said() -> None:
    """Attention has no kernel alone, and the profiler saw nothing of the loss; the rest has its factors."""
    kernels = step_kernel_counts(single_rank_scenario(scenario(LLAMA), 1e12))
    chain = Pretended(kernels, dict.fromkeys(map(OperatorLabel.from_kernel, kernels), 1.25))
    loss, said = OperatorLabel(KernelKind.LOSS, MemoryBoundOp.LOSS_TORCH), list[str]()

    def measured(kernel: Kernel, seconds: float) -> KernelSample:
        made: KernelSample = chain.alone(kernel, seconds)
        if kernel.kind is KernelKind.ATTENTION_FORWARD:
            return replace(made, time=None, outcome=MeasurementOutcome.UNSUPPORTED, source="no such kernel")
        return made

    class Blind(Pretended):
        def profile(self, _once: float) -> Mapping[OperatorLabel, float]:
            return {label: seconds for label, seconds in super().profile_steps(_once).items() if label != loss}

    found = by_family(measure.compare_with_isolated(Blind(kernels, chain.factors), measured, 1e9, said.append))
    assert len(said) == 2
    assert "attention_forward: attention.core alone: unsupported, no such kernel" in " ".join(said)
    assert "loss_torch: the profiler saw nothing of it" in " ".join(said)
    assert {"attention_forward fp32", "loss_torch fp32"}.isdisjoint(found)
    assert {"attention_backward fp32", "loss_torch backward fp32", "matmul fp32"} <= found.keys()


PRODUCTS, LOSSES = ("aten::mm", "aten::addmm"), ("aten::_log_softmax", "aten::nll_loss_forward")


class Slowed:
    """A fake GPU whose kernels take some times as long while a step runs, by the operator that launches them."""

    def __init__(self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        self.operator, self.factor, self.stepping = "", lambda _operator: 1.0, False
        gpu, work_of, step = cuda.gpu(), fake_tensors._work, real_layers.training_step
        seconds_of = gpu._seconds

        def work(given: FakeCuda, func: Any, call: Any) -> Work:
            self.operator = func._schema.name
            return work_of(given, func, call)

        def seconds(work: Work) -> float:
            return seconds_of(work) * (self.factor(self.operator) if self.stepping else 1.0)

        def stepped(*operands: Any) -> None:
            self.stepping = True
            step(*operands)
            self.stepping = False

        monkeypatch.setattr(fake_tensors, "_work", work)
        monkeypatch.setattr(gpu, "_seconds", seconds)
        monkeypatch.setattr(real_layers, "training_step", stepped)

    factor: Callable[[str], float]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slowed]:
    """No cache, one clock, events that take no time: kernels alone take what they take in a chain."""
    supported = ["cuda", "meta"]
    monkeypatch.setattr("torch.utils._foreach_utils._get_foreach_kernels_supported_devices", lambda: supported)
    monkeypatch.setattr(measure, "MeasurementMethod", lambda: replace(QUICK, min_sample_seconds=1e-5))
    monkeypatch.setattr(measure, "MAX_ROUNDS", 1)
    chip = Chip(cache=1.0, sustained=1.98e9, event=(0.0, 0.0))
    cuda = FakeCuda(chip).install(monkeypatch)
    with fake_tensors.on(cuda):
        slowed = Slowed(cuda, monkeypatch)
        FakeCupti(cuda, monkeypatch)
        yield slowed


EXACT = ("matmul", "attention_forward", "rmsnorm", "rmsnorm backward", "rotary", "rotary backward", "swiglu",
         "swiglu backward", "residual fused", "loss_torch", "loss_torch backward", "adam", "lookup fused")  # fmt: skip


def test_a_gpu_s_chain_gives_its_factors_back(gpu: Slowed) -> None:
    """Real layers, torch's profiler and the durations of its kernels: products 1.5 times, losses 3 times, others 2.

    Not held to it: AccumulateGrad, norm and clipping of gradients, which are some small kernels more in a step than in
    the plan (weights of norms, a root), and lookups' gradients.
    """
    gpu.factor = lambda operator: 1.5 if operator in PRODUCTS else 3.0 if operator in LOSSES else 2.0
    rows = by_family(measure.measure_in_situ(scenario(LLAMA, "model.layers=1"), CudaDevice(0), 1e-3, notify=never))
    expected = dict.fromkeys(EXACT, 2.0) | {"matmul": 1.5, "loss_torch": 3.0}
    found = {name: rows[f"{name} fp32"].factor for name in expected}
    assert found == {name: pytest.approx(factor) for name, factor in expected.items()}


def test_layers_that_do_not_run_here_give_no_factors_and_a_sentence() -> None:
    said: list[str] = []
    assert measure.measure_in_situ(scenario(LLAMA, "training.fused=true"), CpuDevice(), 1.0, notify=said.append) == ()
    assert len(said) == 1
    assert said[0].startswith("no chain of kernels: ")


def test_real_layers_have_a_factor_for_every_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "MeasurementMethod", lambda: replace(QUICK, cold_cache=False))
    monkeypatch.setattr(measure, "MAX_ROUNDS", 1)
    given = scenario(LLAMA, "model.layers=1")
    rows = measure.measure_in_situ(given, CpuDevice(), 0.1, notify=never)
    expected = Counter[str]()
    for kernel, count in step_kernel_counts(single_rank_scenario(given, 1e12)).items():
        expected[of_family(kernel)] += count
    assert {in_situ_sample.family: in_situ_sample.kernels for in_situ_sample in rows} == expected


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_one_rank_alone_multiplies_the_matrices_of_the_scenario_s_ranks(tp: int) -> None:
    """Layers and logits, forward and both gradients; norms are over the same tokens without sequence parallelism."""
    given = Scenario.from_mapping(
        {
            "model": "llama3-8b",
            "cluster": {"name": "dgx-h100", "gpus": 8},
            "layout": {"tp": tp, "dp": 8 // tp},
            "training": {"sequence": 2048, "global_batch": 8},
        }
    )
    own = {kernel.shape for kernel in all_kernels_of(given) if isinstance(kernel.shape, MatmulShape)}
    cut = single_rank_scenario(given, 1e15)
    assert {
        step_kernel_count.shape
        for step_kernel_count in step_kernel_counts(cut)
        if isinstance(step_kernel_count.shape, MatmulShape)
    } == own
    assert (cut.model.layer_count, cut.layout.world_size, cut.microbatch_count) == (MAX_CHAIN_LAYERS, 1, 1)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_layers_of_every_example_can_be_run(path: Path) -> None:
    """But for those whose layers all have latent attention, of which the real model has no module."""
    given = Scenario.load(path)
    if all(isinstance(distinct_attention, LatentAttention) for distinct_attention in given.model.distinct_attentions):
        with pytest.raises(InputError, match="name another model"):
            single_rank_scenario(given, 1e18)
    else:
        require_supported(single_rank_scenario(given, 1e18))


def test_a_ranks_experts_have_the_rows_that_they_have_in_the_whole() -> None:
    """Of eight experts on four ranks each has two, and as many rows; a token chooses two of those."""
    whole = scenario(
        LLAMA, "model.experts={count: 8, top_k: 2, ffn: 48}", "cluster={name: dgx-h100, gpus: 4}",
        "layout={ep: 4, data: ddp}", "training.microbatch=1",
    )  # fmt: skip
    own, cut = (
        {kernel.shape for kernel in kernels if kernel.kind is KernelKind.GROUPED_MATMUL}
        for kernels in (all_kernels_of(whole), step_kernel_counts(single_rank_scenario(whole, 1e12)))
    )
    assert cut == own != set()


def test_a_label_is_read_as_it_is_written() -> None:
    for kernel in step_kernel_counts(single_rank_scenario(scenario(GPT), 1e12)):
        label = OperatorLabel.from_kernel(kernel)
        assert parse_label(label.profiler_name) == replace(label, backward=False)
    assert parse_label("aten::mm") is None


def _event(name: str, span: tuple[float, float], **others: Any) -> Any:
    given = {"thread": 1, "fwd_thread": 1, "sequence_nr": -1, **others}
    return FunctionEvent(id=0, name=name, start_us=span[0], end_us=span[1], **given)


def test_a_forward_that_is_run_again_in_backward_s_own_thread_keeps_its_numbers() -> None:
    """Both threads count from 7: attention in the first, and in the second, where a product is run again."""
    outer = _event(ATTENTION.profiler_name, (0, 10))
    core = _event("aten::sdpa", (1, 9), sequence_nr=7)
    again = _event(MATMUL.profiler_name, (20, 30), thread=2)
    product = _event("aten::mm", (21, 29), thread=2, sequence_nr=7)
    node = _event("autograd::engine::evaluate_function: SdpaBackward0", (40, 50), thread=2, sequence_nr=7)
    for parent, child in ((outer, core), (again, product)):
        parent.append_cpu_child(child)
        child.set_cpu_parent(parent)
    for event, seconds in ((core, 1.0), (product, 2.0), (node, 4.0)):
        event.kernels.append(Launched("kernel", 0, 1e6 * seconds))
    found = seconds_by_label([outer, core, again, product, node], DeviceTimer())
    assert found == {ATTENTION: 1.0, MATMUL: 2.0, OperatorLabel(KernelKind.ATTENTION_BACKWARD): 4.0}


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


def test_what_the_profiler_takes_is_taken_off() -> None:
    """A label of 30 us with two operators, the first of which has one of its own: 2 us each, and 5 us for itself."""
    label = _event(MATMUL.profiler_name, (0, 30))
    outer, inner, other = (_event("aten::linear", (1, 9)), _event("aten::mm", (2, 8)), _event("aten::add", (10, 15)))
    for parent, child in ((label, outer), (outer, inner), (label, other)):
        parent.append_cpu_child(child)
        child.set_cpu_parent(parent)
    found = seconds_by_label([label, outer, inner, other], HostTimer(event_overhead=2e-6, label_overhead=5e-6))
    assert found[MATMUL] == pytest.approx(30e-6 - 3 * 2e-6 - 5e-6)
    assert ProfilerOverhead(2e-6, 5e-6, 9e-6).total_overhead([label, outer, inner, other]) == pytest.approx(
        3 * 2e-6 + 9e-6
    )


def _on_gpu(number: int, launched: float, span: tuple[float, float]) -> list[Any]:
    """A kernel and the call that launched it."""
    made = (("cudaLaunchKernel", DeviceType.CPU, (launched, launched)), ("kernel", DeviceType.CUDA, span))
    return [
        SimpleNamespace(id=number, name=name, is_user_annotation=False, device_type=kind, time_range=Interval(*times))
        for name, kind, times in made
    ]


def test_turnover_is_between_kernels_that_were_in_the_queue() -> None:
    """Gaps of 1, 2 and 1 us behind kernels that still ran when the next was launched; the host was late for one."""
    spans = ((0.0, 10.0), (11.0, 20.0), (22.0, 30.0), (90.0, 95.0), (96.0, 99.0))
    launches = (0.0, 2.0, 4.0, 85.0, 92.0)
    events = [item for place in range(5) for item in _on_gpu(place, launches[place], spans[place])]
    assert median_kernel_gap(events) == pytest.approx(1e-6)
    late = [element for place in (0, 3) for element in _on_gpu(place, launches[place], spans[place])]
    assert median_kernel_gap(late) == 0.0
