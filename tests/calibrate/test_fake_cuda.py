"""The fake GPU behaves as documented, since other tests rely on it."""

import math

import pytest

torch = pytest.importorskip("torch")
fake_cuda_module = pytest.importorskip("tests.calibrate.fake_cuda")
from tests.calibrate import fake_tensors  # noqa: E402 - after torch is known to be there
from tests.calibrate.fake_gpu import FakeChip  # noqa: E402

EXACT_CHIP = FakeChip(event=(2e-6, 2e-6))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> "fake_cuda_module.FakeCuda":
    return fake_cuda_module.FakeCuda(EXACT_CHIP).install(monkeypatch)


def test_event_pair_contains_the_kernel_and_one_event(cuda: "fake_cuda_module.FakeCuda") -> None:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1_000_000)  # so that the host launches ahead
    start.record()
    cuda.kernel(1e-5, clocked=False)()
    end.record()
    with pytest.raises(RuntimeError, match="device not ready"):
        start.elapsed_time(end)
    torch.cuda.synchronize()
    assert 1e-3 * start.elapsed_time(end) == pytest.approx(1e-5 + 2e-6)


def test_clock_falls_with_the_time_constant_and_recovers(cuda: "fake_cuda_module.FakeCuda") -> None:
    cuda.kernel(EXACT_CHIP.heat, clocked=False)()
    torch.cuda.synchronize()
    gpu = cuda.gpu()
    assert gpu.state_at(cuda.clock.now).heat == pytest.approx(1.0 - math.exp(-1.0), rel=1e-3)
    cuda.clock.advance(20.0 * EXACT_CHIP.heat)
    assert gpu.state_at(cuda.clock.now).clock == pytest.approx(EXACT_CHIP.boost, rel=1e-6)


def test_kernel_takes_its_cycles_at_the_current_clock(cuda: "fake_cuda_module.FakeCuda") -> None:
    cuda.kernel(20.0 * EXACT_CHIP.heat, clocked=False)()
    start_time = cuda.gpu().finish_time
    cuda.kernel(1e-4)()
    assert cuda.gpu().finish_time - start_time == pytest.approx(
        1e-4 * EXACT_CHIP.boost / EXACT_CHIP.sustained, rel=1e-4
    )


def test_dirty_cache_entries_are_written_back_when_evicted(cuda: "fake_cuda_module.FakeCuda") -> None:
    cache = cuda.gpu().cache
    half = 0.5 * EXACT_CHIP.cache
    assert cache.access(1, half, dirty=True) == (0.0, 0.0)
    assert cache.access(2, half, dirty=False) == (half, 0.0)
    assert cache.access(2, half, dirty=False) == (0.0, half)
    assert cache.access(3, half, dirty=False) == (2 * half, 0.0)  # read, and 1 written back
    assert cache.access(4, half, dirty=False) == (half, 0.0)  # 2 was clean


def test_timers_of_the_host_clock_run_at_their_times(cuda: "fake_cuda_module.FakeCuda") -> None:
    times: list[float] = []
    stop = cuda.clock.run_periodically(0.1, lambda: times.append(cuda.clock.now))
    cuda.clock.advance(0.35)
    stop()
    cuda.clock.advance(1.0)
    assert times == pytest.approx([0.1, 0.2, 0.3])


def test_injected_failure_is_raised_at_its_call_and_later_if_sticky(cuda: "fake_cuda_module.FakeCuda") -> None:
    cuda.fail("launch", RuntimeError("once"), call=2)
    run = cuda.kernel(1e-6)
    run()
    with pytest.raises(RuntimeError, match="once"):
        run()
    run()
    cuda.fail("launch", torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), sticky=True)
    for call in (run, torch.cuda.synchronize, run):
        with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
            call()


def test_graph_replay_is_one_launch(cuda: "fake_cuda_module.FakeCuda") -> None:
    graph = torch.cuda.CUDAGraph()
    run = cuda.kernel(1e-6, clocked=False)
    with torch.cuda.graph(graph):
        for _ in range(10):
            run()
    start_time = cuda.clock.now
    graph.replay()
    assert cuda.clock.now - start_time == pytest.approx(EXACT_CHIP.launch)
    assert cuda.gpu().finish_time - cuda.clock.now == pytest.approx(1e-5)


def test_fake_tensor_operations_are_kernels_and_occupy_memory(cuda: "fake_cuda_module.FakeCuda") -> None:
    with fake_tensors.fake_cuda_tensors(cuda):
        a = torch.ones(8192, 8192, dtype=torch.bfloat16, device="cuda")
        assert (a.is_cuda, a.device.type) == (True, "cuda")
        torch.cuda.synchronize()
        start_time, tensor_bytes = cuda.clock.now, torch.cuda.memory_allocated()
        b = a @ a
        torch.cuda.synchronize()
        cycles = 2.0 * 8192**3 / EXACT_CHIP.flop_per_cycle
        assert cuda.clock.now - start_time == pytest.approx(EXACT_CHIP.launch + cycles / EXACT_CHIP.boost, rel=0.01)
        assert torch.cuda.memory_allocated() == 2 * tensor_bytes == 2 * 8192 * 8192 * 2
        del a, b
        assert torch.cuda.memory_allocated() == 0
        with pytest.raises(torch.cuda.OutOfMemoryError, match="out of memory"):
            torch.empty(int(EXACT_CHIP.memory), dtype=torch.int16, device="cuda")
