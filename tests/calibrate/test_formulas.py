"""The formulas of the model kernels against their mathematical definitions."""

import math
from collections.abc import Iterator
from typing import Any

import pytest

from clustersim.model.training import LossImplementation

torch = pytest.importorskip("torch")
formulas = pytest.importorskip("calibrate.kernels.formulas")


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def _random(*sizes: int) -> Any:
    return torch.randn(*sizes, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("fused", [True, False])
def test_rms_norm_has_unit_root_mean_square(fused: bool) -> None:
    x = torch.randn(8, 64)
    normal = formulas.rmsnorm(x, torch.ones(64), fused=fused)
    assert torch.allclose(normal.pow(2).mean(-1), torch.ones(8), atol=1e-4)
    assert torch.allclose(normal / x, (normal / x)[:, :1].expand_as(x), atol=1e-4)


def test_layer_norm_has_mean_zero_and_variance_one() -> None:
    normal = formulas.layernorm(_random(8, 64), torch.ones(64).double(), torch.zeros(64).double())
    assert torch.allclose(normal.mean(-1), torch.zeros(8).double(), atol=1e-6)
    assert torch.allclose(normal.var(-1, unbiased=False), torch.ones(8).double(), atol=1e-3)


def test_gelu_is_x_times_the_normal_cdf() -> None:
    assert formulas.gelu(torch.tensor(1.0)).item() == pytest.approx(0.5 * (1 + math.erf(1 / math.sqrt(2))))


def test_swiglu_gates_the_second_half_by_the_first() -> None:
    gate, up = torch.tensor([0.0, 2.0]), torch.tensor([3.0, 5.0])
    result = formulas.swiglu(torch.cat((gate, up))[None], fused=False)
    assert result[0].tolist() == pytest.approx([0.0, 2.0 / (1 + math.exp(-2.0)) * 5.0])


def test_rotary_rotates_pairs_of_elements() -> None:
    """Elements i and i + half are a complex number, which is multiplied by exp(i angle)."""
    angle = _random(16, 4)
    cos, sin = (torch.cat((values, values), -1) for values in (angle.cos(), angle.sin()))
    x = _random(2, 3, 16, 8)
    rotated = formulas.rotary(x, cos, sin, fused=False)
    expected = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angle), angle)
    assert torch.allclose(rotated, torch.cat((expected.real, expected.imag), -1))


def test_causal_softmax_attends_to_previous_keys() -> None:
    probabilities = formulas.softmax(_random(3, 4, 6), fused=False)
    assert torch.allclose(probabilities.sum(-1), torch.ones(3, 4).double())
    visible_keys = (probabilities > 0).sum(-1)
    assert visible_keys.tolist() == [[3, 4, 5, 6]] * 3  # the last of 4 queries attends to all 6 keys


@pytest.mark.parametrize(("query", "causal"), [(6, False), (6, True), (3, True)])
def test_attention_equals_softmax_of_scores_times_values(query: int, causal: bool) -> None:
    """Grouped-query: two query heads share one head of keys and values."""
    q, k, v = _random(2, 4, query, 8), _random(2, 2, 6, 8), _random(2, 2, 6, 8)
    repeated_k, repeated_v = (tensor.repeat_interleave(2, dim=1) for tensor in (k, v))
    scores = q @ repeated_k.transpose(2, 3) / math.sqrt(8)
    probabilities = formulas.softmax(scores, fused=False) if causal else torch.softmax(scores, -1)
    assert torch.allclose(formulas.attention(q, k, v, causal=causal), probabilities @ repeated_v)


@pytest.mark.parametrize("form", [LossImplementation.TORCH, LossImplementation.VOCAB_PARALLEL])
def test_cross_entropy_and_its_gradient(form: LossImplementation) -> None:
    """Mean of log sum exp - target; its gradient is (softmax - one-hot) / tokens; the graph can be retained."""
    logits, targets = torch.randn(8, 32, requires_grad=True), torch.randint(0, 32, (8,))
    loss = formulas.cross_entropy(logits, targets, form)
    assert torch.allclose(loss, (logits.logsumexp(-1) - logits[range(8), targets]).mean())
    (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
    one_hot_targets = torch.nn.functional.one_hot(targets, 32)
    assert torch.allclose(gradient, (logits.softmax(-1) - one_hot_targets) / 8, atol=1e-6)
    torch.autograd.grad(loss, logits)


def test_vocab_parallel_loss_does_not_modify_its_logits() -> None:
    logits = torch.randn(8, 32)
    original = logits.clone()
    formulas.cross_entropy(logits, torch.zeros(8, dtype=torch.long), LossImplementation.VOCAB_PARALLEL)
    assert torch.equal(logits, original)


def test_dropout_keeps_nine_tenths_and_the_mean() -> None:
    dropped = formulas.residual_dropout(torch.zeros(10_000), torch.ones(10_000), fused=False)
    assert dropped.unique().tolist() == pytest.approx([0.0, 1 / 0.9])
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.05)


def test_fused_formulas_are_unsupported_on_a_cpu() -> None:
    x = torch.randn(4, 8)
    for call in (
        lambda: formulas.swiglu(x, fused=True),
        lambda: formulas.rotary(x, x, x, fused=True),
        lambda: formulas.residual_dropout(x, x, fused=True),
        lambda: formulas.softmax(x, fused=True),
        lambda: formulas.cross_entropy(x, torch.zeros(4, dtype=torch.long), LossImplementation.FUSED),
    ):
        with pytest.raises(formulas.UnsupportedKernel, match="no fused kernel for it on a CPU"):
            call()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_formula_is_equal_and_its_graph_can_be_retained() -> None:
    """As on a GPU, but with the compiler's CPU backend, which needs a C++ compiler."""
    import shutil

    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    from calibrate.kernels.pytorch_ops import compile_settings

    with compile_settings():
        for tokens in (16, 24):
            x = torch.randn(tokens, 64, requires_grad=True)
            eager, fused = formulas._swiglu(x), formulas.compiled(formulas._swiglu)(x)
            assert torch.allclose(eager, fused, atol=1e-5)
            expected = torch.autograd.grad(eager, x, torch.ones_like(eager))[0]
            for _ in range(2):
                gradient = torch.autograd.grad(fused, x, torch.ones_like(fused), retain_graph=True)[0]
                assert torch.allclose(gradient, expected, atol=1e-5)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_formulas_are_compiled_once_per_operand_shape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a counting backend: more shapes than PyTorch compiles of one function, each once, with static sizes."""
    from torch._dynamo import config

    from calibrate.kernels.pytorch_ops import compile_settings

    graphs: list[list[Any]] = []

    def backend(graph: Any, operands: list[Any]) -> Any:
        graphs.append([tuple(operand.shape) if isinstance(operand, torch.Tensor) else operand for operand in operands])
        return graph.forward

    original_compile = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda *arguments, **options: original_compile(*arguments, backend=backend, **options)
    )
    formulas.compiled.cache_clear()
    token_counts = range(8, 8 + config.recompile_limit + 2)
    with compile_settings():
        for tokens in (*token_counts, *token_counts):
            formulas.compiled(formulas._swiglu)(torch.randn(tokens, 64, requires_grad=True))
    formulas.compiled.cache_clear()
    assert graphs == [[(tokens, 64)] for tokens in token_counts]
    assert all(type(size) is int for ((*sizes,),) in graphs for size in sizes)
