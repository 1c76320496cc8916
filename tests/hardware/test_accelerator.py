"""Packaged accelerator files are complete and sourced, and an invalid file is rejected in one clear sentence."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from clustersim.common import data_files
from clustersim.common.dtypes import DType
from clustersim.common.errors import InputError
from clustersim.hardware.accelerator import load_accelerator
from clustersim.hardware.alignment import KernelAlignment
from clustersim.hardware.efficiency import FLASH_ATTENTION2, TrainingDerating
from tests.sentences import parts

REQUIRED_SOURCES = {
    "peak",
    "memory",
    "memory_bandwidth",
    "compute_units",
    "context",
    "interference",
    "tiles",
    "efficiency",
    "launch_interval",
}
TRAINING_SOURCES = {"sustained_ratio", "gpu_spread"}


@pytest.fixture
def content() -> dict[str, Any]:
    return data_files.read_mapping(data_files.find_file("accelerators", "h100-sxm-80gb"))


def load_error(tmp_path: Path, content: dict[str, Any]) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(InputError) as error:
        load_accelerator(str(path))
    assert str(path) in str(error.value)
    return str(error.value)


def test_of_many_unknown_keys_the_first_are_described(tmp_path: Path, content: dict[str, Any]) -> None:
    """Also one that is a name of Python's."""
    many = {"self": 1, **{f"z{number}": 1 for number in range(2_000)}}
    message = load_error(tmp_path, content | many)
    assert "self: unknown key" in message
    assert "and 1,981 more unknown keys" in message
    assert message.count("unknown key;") == 20


@pytest.mark.parametrize(
    ("unknown", "words"),
    [
        ({"prize": "so"}, ["unknown.prize", "did you mean price?"]),
        ({"power": "so"}, ["unknown.power", "the file has a section power"]),
    ],
)
def test_what_is_unknown_is_power_or_price(
    tmp_path: Path, content: dict[str, Any], unknown: dict[str, str], words: list[str]
) -> None:
    message = load_error(tmp_path, content | {"unknown": unknown})
    assert all(word in message for word in words)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("matmul", "peak_fraction_by_format", {"mxpf8": 0.5}),
        ("matmul", "prologue_by_format", {"bf16": 64}),
        ("matmul", "kernel_latency_by_format", {"fp8": "soon"}),
        ("grouped_gemm", "kernel_peak_fraction_by_format", {"fp8": 1.5}),
    ],
)
def test_format_constants_require_scaled_formats(
    tmp_path: Path, content: dict[str, Any], section: str, key: str, value: dict[str, object]
) -> None:
    content["efficiency"][section][key] = value
    message = load_error(tmp_path, content)
    assert f"efficiency.{section}.{key}.{next(iter(value))}" in message
    assert "mxfp8" in message or next(iter(value)) != "mxpf8"


@pytest.mark.parametrize("name", data_files.list_names("accelerators"))
def test_every_packaged_accelerator_loads_and_is_fully_sourced(name: str) -> None:
    accelerator = load_accelerator(name)
    assert accelerator.name == name
    derating = accelerator.derating
    needed = (
        REQUIRED_SOURCES
        | (set() if derating == TrainingDerating() else TRAINING_SOURCES)
        | ({"attention_libraries"} if accelerator.efficiency.attention_libraries else set())
    )
    needed |= {"sdpa_library"} if accelerator.efficiency.sdpa_library != FLASH_ATTENTION2 else set()
    needed |= set() if accelerator.alignment == KernelAlignment() else {"alignment", "head_dims"}
    needed |= set() if accelerator.efficiency.grouped_gemm is None else {"grouped_gemm"}
    needed |= {"collective_interference"} if accelerator.collective_interference else set()
    needed |= set() if accelerator.host_launch_ratio == 1.0 else {"host_launch_ratio"}
    needed |= {"unbound_launch_ratios"} & set(accelerator.sources)
    least, most = accelerator.unbound_launch_ratios
    assert 1.0 <= least <= most
    needed |= set() if derating.low_precision_ratio is None else {"low_precision_ratio"}
    needed |= set() if derating.attention_ratio is None else {"attention_ratio"}
    needed |= set() if accelerator.power is None else {"power"}
    needed |= {"unknown"} if accelerator.unknown else set()
    needed |= {"tn_only"} if accelerator.efficiency.matmul.tn_only else set()
    needed |= {"scan_shares"} if accelerator.efficiency.scan_shares else set()
    needed |= {"formats"} if accelerator.efficiency.matmul.peak_fraction_by_format else set()
    assert set(accelerator.sources) - {"like", "nvlink"} == needed
    assert not [key for key, text in accelerator.sources.items() if text == "stated without a source"]
    assert accelerator.peak_flops(DType.FP32) > 0
    assert 0 < accelerator.context_bytes < accelerator.memory_bytes


def test_the_documented_accelerators_are_packaged() -> None:
    documented = {
        "v100-sxm-32gb",
        "a100-sxm-40gb",
        "a100-sxm-80gb",
        "a100-pcie-80gb",
        "h100-sxm-80gb",
        "h100-pcie-80gb",
    }
    documented |= {"h200-sxm-141gb", "b200-sxm-180gb", "gb200", "mi300x", "mi325x", "mi355x", "cpu-laptop"}
    assert documented <= set(data_files.list_names("accelerators"))


@pytest.mark.parametrize(
    ("name", "bf16", "memory_bandwidth", "base"),
    [
        ("h20-sxm-96gb", 148e12, 4.0e12, "h100-sxm-80gb"),
        ("a800-sxm-80gb", 312e12, 2.0e12, "a100-sxm-80gb"),
        ("gh200-96gb", 989e12, 4.0e12, "h100-sxm-80gb"),
        ("gh200-96gb-660w", 989e12, 4.0e12, "h100-sxm-96gb"),
        ("l40s", 362e12, 0.86e12, "a100-pcie-80gb"),
        ("rtx-4090", 165.2e12, 1.008e12, "a100-pcie-80gb"),
        ("mi250x", 383e12 / 2, 3.28e12 / 2, "mi300x"),
        ("rubin", 2500e12, 22e12, "gb300"),
        ("mi455x", 2500e12, 19.6e12, "mi355x"),
    ],
)
def test_accelerators_like_others_have_their_own_datasheet_and_are_not_measured(
    name: str, bf16: float, memory_bandwidth: float, base: str
) -> None:
    """Dense rates per direction and GPU as published; a GPU of MI250X is one of two dies.

    Products reach no larger share of the peak than the other's, except on RTX 4090, of which one is published.
    """
    accelerator = load_accelerator(name)
    assert accelerator.peak_flops(DType.BF16) == pytest.approx(bf16)
    assert accelerator.memory_bandwidth == pytest.approx(memory_bandwidth)
    assert accelerator.like == base
    assert not accelerator.efficiency.published
    assert accelerator.is_projection == (name in {"rubin", "mi455x"})
    for dtype in (DType.BF16, DType.FP16):
        fraction = accelerator.efficiency.matmul.peak_fraction_of(dtype)
        limit = (
            155.9 / 165.2 if name == "rtx-4090" else load_accelerator(base).efficiency.matmul.peak_fraction_of(dtype)
        )
        assert fraction <= limit


def test_a_format_may_be_absent(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("like: h100-sxm-80gb\npeak: {fp8: null, bf16: 500 TFLOP/s}\n")
    mine = load_accelerator(str(path))
    assert DType.FP8 not in mine.formats
    assert mine.peak_flops(DType.FP32) == pytest.approx(67e12 * 500 / 989)


def test_datasheet_numbers_are_read_in_si_units() -> None:
    h100 = load_accelerator("h100-sxm-80gb")
    assert h100.peak_flops(DType.BF16) == 989e12  # NVIDIA H100 datasheet, dense
    assert h100.memory_bandwidth == 3.35e12
    assert h100.compute_units == 132
    assert h100.memory_bytes == 81559 * 2**20


def test_a_path_works_like_a_name_and_names_the_accelerator_after_the_file(
    tmp_path: Path, content: dict[str, Any]
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(content))
    from_file, packaged = load_accelerator(str(path)), load_accelerator("h100-sxm-80gb")
    assert from_file.name == "mine"
    assert from_file.efficiency == packaged.efficiency


def test_without_training_constants_kernels_take_standalone_times(tmp_path: Path, content: dict[str, Any]) -> None:
    path = tmp_path / "mine.yaml"
    del content["training_derating"]
    path.write_text(yaml.safe_dump(content))
    assert load_accelerator(str(path)).derating == TrainingDerating(sustained_ratio=1.0, gpu_spread=0.0)


def test_flash_attention_is_that_of_the_named_library() -> None:
    """H100's fastest is cuDNN's; FlashAttention runs at half the rate of FlashAttention-2, on A100 the fastest."""
    hopper, ampere = (load_accelerator(name).efficiency for name in ("h100-sxm-80gb", "a100-sxm-80gb"))
    for backward in (False, True):
        fastest = hopper.attention_constants("flash", backward=backward)
        assert hopper.attention_constants("cudnn", backward=backward) == fastest
        flash2, flash1 = (hopper.attention_constants(name, backward=backward) for name in ("flash2", "flash1"))
        assert flash2.peak_fraction < fastest.peak_fraction
        assert flash1 == replace(flash2, peak_fraction=flash2.peak_fraction / 2)
        assert ampere.attention_constants("flash2", backward=backward) == ampere.attention_constants(
            "flash", backward=backward
        )
    assert ampere.known_attention == ("flash", "sdpa", "flash2", "flash1")
    with pytest.raises(InputError, match=r"attention flash3.*flash, sdpa, flash2, flash1"):
        ampere.attention_constants("flash3", backward=False)


@pytest.mark.parametrize("backward", [False, True])
def test_pytorch_takes_cudnn_on_compute_capability_9_0_and_10_0(backward: bool) -> None:
    """CuDNN needs compute capability 9.0 or 10.0: Hopper and B200, not A100 (8.0), Ada (8.9), B300 (10.3), AMD's."""
    for name in data_files.list_names("accelerators"):
        efficiency = load_accelerator(name).efficiency
        is_preferred = name.startswith(("h100", "h200", "h800", "h20-", "gh200", "b200", "gb200"))
        library = "cudnn" if is_preferred else "flash2"
        if library in efficiency.known_attention:
            measured = efficiency.attention_libraries.get("sdpa")
            constants = efficiency.attention_constants(library, backward=backward)
            if measured is not None:  # as PyTorch calls it
                assert efficiency.sdpa_library == library, name
                constants = measured.backward if backward else measured.forward
            assert efficiency.attention_constants("sdpa", backward=backward) == constants, name


@pytest.mark.parametrize("value", [0, 0.0, 0.2, 10])
def test_interference_is_read_as_it_is_written(tmp_path: Path, content: dict[str, Any], value: float) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(content | {"interference": value}))
    assert load_accelerator(str(path)).interference == value


def test_interference_is_within_published_bounds() -> None:
    """NCCL launches no fewer (NVIDIA/nccl issue 689); arXiv:2507.03114 saw at most 40.0 %. A CPU has no SMs to lose."""
    for name in {*data_files.list_names("accelerators")} - {"cpu-laptop"}:
        accelerator = load_accelerator(name)
        assert 2 / accelerator.compute_units < accelerator.interference <= 0.4


def test_an_unsupported_dtype_is_rejected_with_the_supported_ones() -> None:
    with pytest.raises(InputError, match=r"v100-sxm-32gb has no bf16 peak; it computes in fp32, fp16"):
        load_accelerator("v100-sxm-32gb").peak_flops(DType.BF16)


def test_a_misspelt_name_gets_a_suggestion() -> None:
    with pytest.raises(InputError, match=r"'h100-sxm-80'; did you mean h100-sxm-80gb\?"):
        load_accelerator("h100-sxm-80")


def test_a_missing_file_is_rejected() -> None:
    with pytest.raises(InputError, match=r"nowhere\.yaml: cannot be read"):
        load_accelerator("nowhere.yaml")


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        (("memory",), "much", "memory: 'much' is not a size"),
        (("memory",), 80e9, "memory: 80000000000.0 has no unit"),
        (("memory",), "-1 GB", "memory: '-1 GB' is not above zero"),
        (("memory_bandwidth",), "3.35 TB", "memory_bandwidth: '3.35 TB' has unit 'TB'"),
        (("compute_units",), 0, "compute_units: 0 is not a whole number from 1"),
        (("compute_units",), True, "compute_units: true is not a whole number from 1"),
        (("interference",), -0.1, "interference: -0.1 is not a number from 0 up"),
        (("interference",), "20 %", "interference: '20 %' is not a number"),
        (("interference",), True, "interference: true is not a number"),
        (("interference",), float("nan"), "interference: nan is not a number"),
        (("collective_interference",), 19, "collective_interference: 19.0 is above 10; 0.2 means 20 % longer"),
        (("interference",), 19, "interference: 19.0 is above 10; 0.2 means 20 % longer"),
        (("memori",), "80 GB", "memori: unknown key; did you mean memory?"),
        (("peak", "bf17"), "1 TFLOP/s", "peak.bf17: unknown number format; did you mean bf16?"),
        (("peak",), "989 TFLOP/s", "peak: '989 TFLOP/s' is not a mapping"),
        (("efficiency", "provenance"), "guess", "efficiency.provenance: 'guess' is unknown"),
        (("efficiency", "matmul", "peak_fraction"), 1.1, "efficiency.matmul.peak_fraction: 1.1 ... share of a peak"),
        (("efficiency", "matmul", "peak_fraction"), 0, "efficiency.matmul.peak_fraction: 0.0 is not a share"),
        (("efficiency", "matmul", "peak_fraction"), "high", "efficiency.matmul.peak_fraction: 'high' is not a number"),
        (("efficiency", "matmul", "edges"), 1, "matmul.edges: ... efficiency.matmul.edge?"),
        (("efficiency", "matmul", "tiles"), [[128]], "efficiency.matmul.tiles: [128] is not a pair"),
        (("efficiency", "matmul", "tiles"), [], "efficiency.matmul.tiles: [] is not a list"),
        (
            ("efficiency", "attention_forward", "query_block"),
            1.5,
            "attention_forward.query_block: 1.5 is not a whole number",
        ),
        (("efficiency", "kernel_latency"), "5 GB", "efficiency.kernel_latency: '5 GB' has unit 'GB'"),
        (("training_derating", "sustained_ratio"), 0, "training_derating.sustained_ratio: 0 is not a number above 0"),
        (
            ("training_derating", "sustained_ratio"),
            94,
            "training_derating.sustained_ratio: 94 ... above 0 ... up to 1.25",
        ),
        (("training_derating", "gpu_spread"), -0.01, "training_derating.gpu_spread: -0.01 ... from 0 up"),
        (("efficiency", "attention_library"), "flash5", "efficiency.attention_library: 'flash5'"),
        (
            ("efficiency", "attention_libraries", "flash5"),
            {},
            "efficiency.attention_libraries.flash5: no library",
        ),
        (
            ("efficiency", "attention_libraries", "cudnn"),
            {},
            "efficiency.attention_libraries.cudnn: ... attention_library ... attention_forward",
        ),
        (
            ("efficiency", "attention_libraries", "flash2", "backward", "peak_fraction"),
            2,
            "attention_libraries.flash2.backward.peak_fraction: 2",
        ),
        (("training_derating", "sustain"), 1, "training_derating.sustain: ... training_derating.sustained_ratio?"),
        (("description",), "", "description: '' is not a text"),
    ],
)
def test_an_invalid_value_is_rejected_with_file_key_and_value(
    tmp_path: Path, content: dict[str, Any], path: tuple[str, ...], value: object, sentence: str
) -> None:
    section = content
    for key in path[:-1]:
        section = section[key]
    section[path[-1]] = value
    assert parts(sentence).search(load_error(tmp_path, content))


@pytest.mark.parametrize(
    "key", ["peak", "memory", "compute_units", "interference", "efficiency", "sources", "description"]
)
def test_a_missing_key_is_named(tmp_path: Path, content: dict[str, Any], key: str) -> None:
    del content[key]
    assert f"{key}: is missing" in load_error(tmp_path, content)
