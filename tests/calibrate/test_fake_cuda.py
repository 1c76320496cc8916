"""The stand-in for a GPU does what it says, since proofs rest on it."""

import math

import pytest

torch = pytest.importorskip("torch")
fakes = pytest.importorskip("tests.calibrate.fake_cuda")
from tests.calibrate import fake_tensors  # noqa: E402 - after torch is known to be there
from tests.calibrate.fake_gpu import Chip  # noqa: E402

EXACT = Chip(event=(2e-6, 2e-6))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> "fakes.FakeCuda":
    return fakes.FakeCuda(EXACT).install(monkeypatch)


def test_an_event_pair_says_the_kernel_and_what_an_event_takes(cuda: "fakes.FakeCuda") -> None:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1_000_000)  # the host gets ahead
    start.record()
    cuda.kernel(1e-5, clocked=False)()
    end.record()
    with pytest.raises(RuntimeError, match="device not ready"):
        start.elapsed_time(end)
    torch.cuda.synchronize()
    assert 1e-3 * start.elapsed_time(end) == pytest.approx(1e-5 + 2e-6)


def test_the_clock_falls_with_the_time_constant_and_comes_back(cuda: "fakes.FakeCuda") -> None:
    cuda.kernel(EXACT.heat, clocked=False)()
    torch.cuda.synchronize()
    gpu = cuda.gpu()
    assert gpu.state(cuda.clock.now).heat == pytest.approx(1.0 - math.exp(-1.0), rel=1e-3)
    cuda.clock.advance(20.0 * EXACT.heat)
    assert gpu.state(cuda.clock.now).clock == pytest.approx(EXACT.boost, rel=1e-6)


def test_a_kernel_takes_its_cycles_at_the_clock_of_the_moment(cuda: "fakes.FakeCuda") -> None:
    cuda.kernel(20.0 * EXACT.heat, clocked=False)()
    before = cuda.gpu().done
    cuda.kernel(1e-4)()
    assert cuda.gpu().done - before == pytest.approx(1e-4 * EXACT.boost / EXACT.sustained, rel=1e-4)


def test_memory_that_was_written_is_written_back_when_it_is_driven_out(cuda: "fakes.FakeCuda") -> None:
    cache = cuda.gpu().cache
    half = 0.5 * EXACT.cache
    assert cache.passes(1, half, dirty=True) == (0.0, 0.0)
    assert cache.passes(2, half, dirty=False) == (half, 0.0)
    assert cache.passes(2, half, dirty=False) == (0.0, half)
    assert cache.passes(3, half, dirty=False) == (2 * half, 0.0)  # read, and 1 written back
    assert cache.passes(4, half, dirty=False) == (half, 0.0)  # 2 was clean


def test_threads_of_the_host_work_at_their_moments(cuda: "fakes.FakeCuda") -> None:
    moments: list[float] = []
    end = cuda.clock.every(0.1, lambda: moments.append(cuda.clock.now))
    cuda.clock.advance(0.35)
    end()
    cuda.clock.advance(1.0)
    assert moments == pytest.approx([0.1, 0.2, 0.3])


def test_what_is_to_fail_fails_at_its_call_and_ever_after_if_it_sticks(cuda: "fakes.FakeCuda") -> None:
    cuda.fail("launch", RuntimeError("once"), call=2)
    run = cuda.kernel(1e-6)
    run()
    with pytest.raises(RuntimeError, match="once"):
        run()
    run()
    cuda.fail("launch", torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), sticky=True)
    for asked in (run, torch.cuda.synchronize, run):
        with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
            asked()


def test_a_graph_is_launched_as_a_whole(cuda: "fakes.FakeCuda") -> None:
    graph = torch.cuda.CUDAGraph()
    run = cuda.kernel(1e-6, clocked=False)
    with torch.cuda.graph(graph):
        for _ in range(10):
            run()
    before = cuda.clock.now
    graph.replay()
    assert cuda.clock.now - before == pytest.approx(EXACT.launch)
    assert cuda.gpu().done - cuda.clock.now == pytest.approx(1e-5)


def test_tensors_are_kernels_and_take_memory(cuda: "fakes.FakeCuda") -> None:
    with fake_tensors.on(cuda):
        a = torch.ones(8192, 8192, dtype=torch.bfloat16, device="cuda")
        assert (a.is_cuda, a.device.type) == (True, "cuda")
        torch.cuda.synchronize()
        before, held = cuda.clock.now, torch.cuda.memory_allocated()
        b = a @ a
        torch.cuda.synchronize()
        cycles = 2.0 * 8192**3 / EXACT.flop_per_cycle
        assert cuda.clock.now - before == pytest.approx(EXACT.launch + cycles / EXACT.boost, rel=0.01)
        assert torch.cuda.memory_allocated() == 2 * held == 2 * 8192 * 8192 * 2
        del a, b
        assert torch.cuda.memory_allocated() == 0
        with pytest.raises(torch.cuda.OutOfMemoryError, match="out of memory"):
            torch.empty(int(EXACT.memory), dtype=torch.int16, device="cuda")
