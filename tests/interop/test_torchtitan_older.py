"""Job files of torchtitan's earlier releases say what those of v0.2.2 say."""

import re
from pathlib import Path

import pytest

from clustersim.common.errors import InputError
from clustersim.interop.import_result import ImportContext, ImportResult
from clustersim.interop.torchtitan_import import import_torchtitan

NOW = """
[model]
name = "llama3"
flavor = "8B"
converters = ["float8"]
[training]
local_batch_size = 1
seq_len = 4096
[parallelism]
data_parallel_replicate_degree = 2
tensor_parallel_degree = 2
enable_async_tensor_parallel = true
[compile]
enable = true
[optimizer]
implementation = "foreach"
[quantize.linear.float8]
filter_fqns = ["output"]
enable_fsdp_float8_all_gather = true
"""
IN_2025 = """
[model]
name = "llama3"
flavor = "8B"
converters = ["float8"]
[training]
local_batch_size = 1
seq_len = 4096
compile = true
seed = 3
[parallelism]
data_parallel_replicate_degree = 2
tensor_parallel_degree = 2
enable_async_tensor_parallel = true
[optimizer]
implementation = "foreach"
[float8]
filter_fqns = ["output"]
enable_fsdp_float8_all_gather = true
"""
IN_2024 = """
[model]
name = "llama3"
flavor = "8B"
norm_type = "fused_rmsnorm"
[optimizer]
fused = false
[training]
batch_size = 1
seq_len = 4096
warmup_steps = 200
data_parallel_replicate_degree = 2
tensor_parallel_degree = 2
compile = true
[experimental]
pipeline_parallel_degree = 1
enable_async_tensor_parallel = true
[float8]
enable_float8_linear = true
enable_fsdp_float8_all_gather = true
"""


def imported(text: str) -> ImportResult:
    return import_torchtitan(text, "job.toml", "dgx-h100", 8, ImportContext(Path()))


@pytest.mark.parametrize("text", [IN_2024, IN_2025])
def test_older_names_mean_the_same(text: str) -> None:
    result = imported(text)
    assert result.mapping == imported(NOW).mapping
    assert result.ignored_arguments == ()
    assert any("earlier torchtitan" in sentence for sentence in result.assumptions)


def test_a_format_that_is_not_turned_on_has_no_effect() -> None:
    off = IN_2024.replace("enable_float8_linear = true", "enable_float8_linear = false")
    assert imported(off).mapping["training"]["precision"] == {"compute": "bf16"}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("fused_rmsnorm", "layernorm", "[model] norm_type: 'layernorm' has no counterpart"),
        (
            "pipeline_parallel_degree = 1",
            "pipeline_parallel_microbatches = 4",
            "pipeline_parallel_microbatches: 4 has no",
        ),
        ("batch_size = 1", "batch_size = 1\nlocal_batch_size = 2", "is [training] local_batch_size now, which is also"),
    ],
)
def test_what_has_no_counterpart_is_refused(old: str, new: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        imported(IN_2024.replace(old, new))


JOBS = """
from . import model_registry

def _job(flavor: str = "8B", batch: int = 2) -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_registry(flavor),
        training=TrainingConfig(local_batch_size=batch, seq_len=4096),
    )

def small() -> Trainer.Config:
    return _job("debugmodel", batch=4)

def plain() -> Trainer.Config:
    return _job()

def reward() -> RLTrainer.Config:
    return RLTrainer.Config(trainer=PolicyTrainer.Config(model_spec=model_registry("8B")))
"""


@pytest.mark.parametrize(("name", "batch"), [("small", 4), ("plain", 2)])
def test_functions_with_parameters_make_jobs(name: str, batch: int, tmp_path: Path) -> None:
    folder = tmp_path / "llama3"
    folder.mkdir()
    context = ImportContext(folder, {"CONFIG": name})
    mapping = import_torchtitan(JOBS, str(folder / "config_registry.py"), "dgx-h100", 8, context).mapping
    assert mapping["training"]["microbatch"] == batch


def test_other_trainers_are_no_jobs(tmp_path: Path) -> None:
    context = ImportContext(tmp_path, {})
    with pytest.raises(InputError, match="has 3 jobs: _job, small, plain; give"):
        import_torchtitan(JOBS, "config_registry.py", "dgx-h100", 8, context)
