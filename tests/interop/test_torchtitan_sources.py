"""torchtitan's jobs in a log and in Python are the jobs of TOML files."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from clustersim.common.errors import InputError
from clustersim.interop.detect import detect_program
from clustersim.interop.import_result import ImportContext, ImportResult
from clustersim.interop.torchtitan_import import import_torchtitan
from tests.sentences import parts

TOML = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
seq_len = 8192
[parallelism]
tensor_parallel_degree = 2
data_parallel_shard_degree = 8
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[compile]
enable = true
"""
PYTHON = """
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

BATCH = 2

def small() -> Trainer.Config:
    '''A job.'''
    return Trainer.Config(
        model_spec=model_registry("8B"),
        training=TrainingConfig(local_batch_size=BATCH, seq_len=4 * 2048, steps=10),
        parallelism=ParallelismConfig(tensor_parallel_degree=2, data_parallel_shard_degree=8),
        activation_checkpoint=ActivationCheckpointConfig(mode="selective", selective_ac_option="op"),
        compile=CompileConfig(enable=True),
        optimizer=OptimizersContainer.Config(lr=3e-4),
    )
"""


def _import(text: str, source: str = "jobs.py", config: str | None = None, gpus: int | None = None) -> ImportResult:
    definitions = {} if config is None else {"CONFIG": config}
    return import_torchtitan(text, source, gpu_count=gpus, context=ImportContext(Path(), definitions))


def test_python_is_the_job_of_toml() -> None:
    assert _import(PYTHON).mapping == _import(TOML, "job.toml").mapping
    assert detect_program(PYTHON, "config_registry.py") == "torchtitan"


@pytest.mark.parametrize(
    "lines",
    [
        "[titan] 2026-01-01 - root - INFO - Running with configs: {dump}\n[titan] - INFO - next",
        "[rank0]:[titan] 2025-07-01 12:00:00,000 - root - INFO - Running with args: {dump}",
        "0: [titan] - INFO - Running with args: {dump}",
    ],
)
@pytest.mark.parametrize("is_literal", [False, True])
def test_a_log_is_the_job_of_toml(lines: str, is_literal: bool) -> None:
    sections: dict[str, Any] = tomllib.loads(TOML)
    sections |= {"experimental": {"custom_import": ""}, "profiling": {"enable_profiling": False}, "metrics": {}}
    sections["training"]["a_key_of_tomorrow"] = None
    dump = repr(sections) if is_literal else json.dumps(sections, indent=2)
    prefix = "[rank0]:" if lines.startswith("[rank0]") else "0: " if lines.startswith("0:") else ""
    log = lines.replace("{dump}", dump).replace("\n", f"\n{prefix}")
    result = _import(log, "train.log")
    assert result.mapping == _import(TOML, "job.toml").mapping
    assert result.ignored_arguments == ()
    assert detect_program(log, "train.log") == "torchtitan"


@pytest.mark.parametrize(
    "mesh",
    [
        "Building 2-D device mesh with ['dp_shard', 'tp'], [8, 2]",
        "Building 2-D device mesh with ('dp', 'tp'), [8, 2]",
        "Building device mesh with parallelism: pp=1, dp_replicate=1, dp_shard=8, cp=1, tp=2, ep=4, etp=1",
    ],
)
def test_a_log_says_how_many_ranks_there_are(mesh: str) -> None:
    sections: dict[str, Any] = tomllib.loads(TOML)
    sections["parallelism"]["data_parallel_shard_degree"] = -1
    result = _import(f"[titan] - INFO - Running with args: {sections}\n[rank0]:[titan] - INFO - {mesh}\n", "train.log")
    assert result.mapping == _import(TOML, "job.toml").mapping


def test_a_job_s_model_is_the_folder_that_it_is_from(tmp_path: Path) -> None:
    text = PYTHON.replace("from torchtitan.models.llama3 import", "from . import")
    assert _import(text, str(tmp_path / "llama3" / "jobs.py")).mapping == _import(PYTHON).mapping
    with pytest.raises(InputError, match=parts("none is read ... folder with the model's name")):
        _import(text, str(tmp_path / "jobs.py"))


def test_a_log_of_an_earlier_release_has_the_names_of_that() -> None:
    """As releases before August 2025 print all keys, those of formats that are off, too."""
    older: dict[str, Any] = tomllib.loads(TOML)
    older["training"] |= {"batch_size": older["training"].pop("local_batch_size"), "warmup_steps": 200}
    older["training"]["compile"] = older.pop("compile")["enable"]
    older["experimental"] = {"context_parallel_degree": 1, "pipeline_parallel_split_points": []}
    older["float8"] = {"enable_fsdp_float8_all_gather": False, "recipe_name": None}
    result = _import(f"[titan] - root - INFO - Running with args: {older}", "train.log")
    assert result.mapping == _import(TOML, "job.toml").mapping
    assert result.mapping["framework"]["torch_compile"] is True
    assert any("earlier torchtitan" in sentence for sentence in result.assumptions)


def test_tokens_of_august_2026_are_sequences() -> None:
    text = PYTHON.replace(
        "local_batch_size=BATCH, seq_len=4 * 2048",
        "num_tokens_per_microbatch_per_dp_rank=2 * 8192, max_context_length=8192",
    ).replace('model_registry("8B")', 'model_registry("8B", attn_backend="sdpa")')
    assert _import(text).mapping == _import(TOML, "job.toml").mapping
    total = _import(
        text.replace("max_context_length=8192", "max_context_length=8192, num_tokens_per_train_step=524288")
    )
    assert total.mapping["training"]["global_batch"] == 64
    with pytest.raises(InputError, match="no multiple of max_context_length"):
        _import(text.replace("2 * 8192", "12000"))


def test_a_pipeline_s_microbatches_are_counted() -> None:
    """8 microbatches of 1 sequence feed each of the 4 replicas."""
    text = PYTHON.replace(
        "local_batch_size=BATCH, seq_len=4 * 2048",
        "num_tokens_per_microbatch_per_dp_rank=8192, max_context_length=8192",
    ).replace(
        "tensor_parallel_degree=2, data_parallel_shard_degree=8",
        "pipeline_parallel_degree=4, data_parallel_shard_degree=4, num_pp_microbatches=8",
    )
    training = _import(text).mapping["training"]
    assert (training["microbatch"], training["global_batch"]) == (1, 32)


DERIVED = f"""{PYTHON}
def larger() -> Trainer.Config:
    config = small()
    config.training.local_batch_size = 4
    config.parallelism = ParallelismConfig(tensor_parallel_degree=4, data_parallel_shard_degree=8)
    enabled = config.compile.enable and True
    config.model_spec = model_registry("8B", converters=[Float8LinearConverter.Config(filter_fqns=["lm_head"])])
    return config
"""


def test_jobs_are_made_of_jobs() -> None:
    with pytest.raises(InputError, match=r"2 jobs: small, larger; give --define CONFIG"):
        _import(DERIVED)
    result = _import(DERIVED, config="larger").mapping
    assert (result["layout"]["tp"], result["training"]["microbatch"]) == (4, 4)
    assert result["training"]["precision"]["compute"] == "fp8-rowwise"
    assert _import(DERIVED, config="small").mapping == _import(PYTHON).mapping


def test_recomputation_by_class() -> None:
    def recompute(job: str) -> Any:
        return _import(
            PYTHON.replace('ActivationCheckpointConfig(mode="selective", selective_ac_option="op")', job)
        ).mapping["training"]["recompute"]

    assert recompute("FullAC.Config()")["mode"] == "full"
    assert recompute("SelectiveAC.Config()")["mode"] == "selective_op"
    assert recompute("None") == "none"


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("BATCH, seq", "compute_batch(), seq", "training.local_batch_size"),
        ("seq_len=4", "seq_len=LENGTH", "training.seq_len is 'LENGTH"),
        ('model_registry("8B")', "make()", "model_registry"),
        ("return Trainer.Config(", "for x in (1, 2):\n        pass\n    return Trainer.Config(", "line 9"),
        ("    return Trainer", "    if os.environ['X']:\n        pass\n    return Trainer", "whether it holds"),
        ('"8B"', '"9B"', "8B"),
        ("ActivationCheckpointConfig", "OtherAC.Config2", "activation_checkpoint"),
        ("tensor_parallel_degree=2,", "tensor_parallel_degree=2, enable_sequence_parallel=False,", "sequence_parallel"),
        ("def small", "def small(:", "no Python"),
    ],
)
def test_what_is_no_literal_is_named(old: str, new: str, sentence: str) -> None:
    text = PYTHON.replace('mode="selective", selective_ac_option="op"', "") if "OtherAC" in new else PYTHON
    with pytest.raises(InputError, match=sentence) as refused:
        _import(text.replace(old, new))
    assert "\n" not in str(refused.value)


def test_nothing_runs(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    _import(f"open({str(touched)!r}, 'w')\n{PYTHON}")
    assert not touched.exists()


@pytest.mark.parametrize("depth", [3_000, 100_000])
def test_deep_python_is_one_sentence(depth: int) -> None:
    text = PYTHON.replace("BATCH,", f"{'(' * depth}2{')' * depth},")
    with pytest.raises(InputError) as refused:
        _import(text.replace("seq_len=4 * 2048", f"seq_len={'-' * depth}8192"))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("calls", [1, 4])
def test_jobs_of_jobs_of_themselves_end(calls: int) -> None:
    """Each of thirty jobs is made of the next, one or four times: 4^30 calls."""
    inner = "".join(
        f"def f{index}() -> Trainer.Config:\n" + f"    config = f{index + 1}()\n" * calls + "    return config\n"
        for index in range(30)
    )
    with pytest.raises(InputError, match="too many other jobs"):
        _import(f"{PYTHON}\n{inner}\ndef f30() -> Trainer.Config:\n    return f0()\n", config="f0")
