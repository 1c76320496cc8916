"""Small scenarios for `calibrate --check` tests, on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from clustersim.scenario import Scenario

LLAMA = {
    "name": "small-llama", "layers": 2, "hidden": 64, "ffn": 96, "heads": 4, "kv_heads": 2, "head_dim": 16,
    "vocab": 128, "max_positions": 64, "mlp": "swiglu", "norm": "rmsnorm", "positions": "rotary",
    "tied_embeddings": False, "linear_bias": False, "qkv_bias": False,
}  # fmt: skip
GPT = {
    "name": "small-gpt", "layers": 2, "hidden": 64, "ffn": 96, "heads": 4, "kv_heads": 4, "head_dim": 16,
    "vocab": 128, "max_positions": 64, "mlp": "gelu", "norm": "layernorm", "positions": "learned",
    "tied_embeddings": True, "linear_bias": True, "qkv_bias": True,
}  # fmt: skip
TRAINING = {
    "sequence": 32, "global_batch": 4, "microbatch": 2, "precision": "fp32", "loss": "torch", "fused": False,
}  # fmt: skip


def small_scenario(model: dict[str, Any] = LLAMA, *overrides: str) -> Scenario:
    """A scenario of a small model in one process, with overrides."""
    cluster = {"name": "laptop", "gpus": 1}
    mapping = {"name": "small", "model": model, "cluster": cluster, "training": TRAINING}
    return Scenario.from_mapping(mapping, overrides)


@contextmanager
def single_thread() -> Iterator[None]:
    """Let PyTorch compute with one thread: several threads wait for each other on a loaded machine."""
    import torch

    thread_count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(thread_count)
