"""Rows aligned to 16 bytes have the full rate, and a head dimension is padded to the next one with a kernel."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.common import data_files
from clustersim.common.errors import InputError
from clustersim.hardware.accelerator import load_accelerator
from clustersim.hardware.alignment import ALIGNMENT_BYTES, KernelAlignment

A100 = load_accelerator("a100-sxm-80gb").alignment


def test_one_unaligned_dimension_lowers_the_rate() -> None:
    assert A100.relative_rate([4096, 4096, 4096 + ALIGNMENT_BYTES]) == 1.0
    assert A100.relative_rate([4096, 4096, 4096 + ALIGNMENT_BYTES // 2]) == A100.unaligned_rate < 1.0
    assert A100.relative_rate([300, 300, 4096], batched=True) == A100.batched_unaligned_rate < A100.unaligned_rate


@given(st.sampled_from(data_files.list_names("accelerators")), st.integers(1, 600))
def test_head_dimension_padding_is_idempotent_and_monotonic(name: str, head_dim: int) -> None:
    alignment = load_accelerator(name).alignment
    padded = alignment.padded_head_dim(head_dim)
    assert padded >= head_dim
    assert alignment.padded_head_dim(padded) == padded
    assert padded <= alignment.padded_head_dim(head_dim + 1)


def test_flash_attention_2_has_kernels_at_steps_of_32_up_to_256() -> None:
    assert [A100.padded_head_dim(size) for size in (1, 32, 33, 80, 125, 160, 225, 256)] == [
        32,
        32,
        64,
        96,
        128,
        160,
        256,
        256,
    ]
    assert KernelAlignment().padded_head_dim(125) == 125


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("unaligned: 0.39", "unaligned: 1.5", "unaligned"),
        ("batched: 0.06", "batched: 0.5", "0.5 is above unaligned 0.39"),
        ("head_dims: [32, 64", "head_dims: [64, 32", "does not ascend"),
        ("head_dims: [32, 64", "head_dims: [0, 64", "is not a list of positive whole numbers"),
    ],
)
def test_an_invalid_alignment_is_rejected(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = data_files.find_file("accelerators", "a100-sxm-80gb").read_text(encoding="utf-8")
    assert old in text
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(InputError, match=message):
        load_accelerator(str(path))
