"""The doors: each kind of file that a user gives to a command, with a small valid one."""

import gzip
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

from clustersim.common.data_files import category_folder
from clustersim.validation.cases import PUBLISHED_FOLDER
from tests.interop.test_hugging_face import AXOLOTL, FACTORY
from tests.interop.test_machines import gpu, matrix, system
from tests.interop.test_megatron_bridge import PRINTED
from tests.interop.test_megatron_table import table
from tests.interop.test_megatron_yaml import NEMO, PRIMUS, PRIMUS_BASE, PRIMUS_MODEL
from tests.interop.test_torchtitan_sources import PYTHON

EXAMPLE: Final = Path(__file__).parent.parent.parent / "examples" / "deepseek_v3.yaml"
NCCL_FOLDER: Final = Path(__file__).parent.parent / "calibrate" / "nccl"
PLAN: Final[Mapping[str, Any]] = {
    "model": "llama-tiny",
    "cluster": {"name": "dgx-h100", "gpus": 8},
    "layout": {"tp": 2, "pp": 2, "dp": 2},
    "training": {"sequence": 256, "global_batch": 8},
}
MEGATRON_SCRIPT: Final = """#!/bin/bash
#SBATCH --nodes=2
GPUS=8
ARGS="--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024"
if [ "$GPUS" -gt 4 ]; then TP=$((GPUS / 4)); else TP=1; fi
torchrun --nproc_per_node $GPUS --nnodes 2 pretrain_gpt.py $ARGS --micro-batch-size 1 --global-batch-size 32 \\
  --tensor-model-parallel-size ${TP:-2} --pipeline-model-parallel-size 2 --bf16 --vocab-size 32000
"""
TORCHTITAN_JOB: Final = """[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 8192
[parallelism]
tensor_parallel_degree = 8
"""
NEOX: Final = {
    "num_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "seq_length": 1024, "max_position_embeddings": 1024,
    "model_parallel_size": 2, "pipe_parallel_size": 2, "train_micro_batch_size_per_gpu": 4, "norm": "layernorm",
    "pos_emb": "rotary", "precision": "bfloat16", "zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 8,
}  # fmt: skip
TRAINING_ARGUMENTS: Final = {
    "model_name_or_path": "meta-llama/Llama-3.1-8B", "per_device_train_batch_size": 2, "max_seq_length": 4096,
    "gradient_accumulation_steps": 4, "bf16": True, "gradient_checkpointing": True, "output_dir": "out",
}  # fmt: skip
DEEPSPEED: Final = {
    "zero_optimization": {"stage": 2, "overlap_comm": True, "offload_optimizer": {"device": "none"}},
    "bf16": {"enabled": True}, "gradient_clipping": 1.0,
}  # fmt: skip
ACCELERATE: Final = {
    "distributed_type": "FSDP", "num_machines": 1, "num_processes": 8, "mixed_precision": "bf16",
    "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True},
}  # fmt: skip
SLURM_TREE: Final = """SwitchName=leaf0 Nodes=node[000-015]
SwitchName=leaf1 Nodes=node[016-031]
SwitchName=spine Switches=leaf[0-1]
"""
HF_CONFIG: Final = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "rms_norm_eps": 1e-5,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 32000, "tie_word_embeddings": False,
    "max_position_embeddings": 2048, "hidden_act": "silu",
}  # fmt: skip
KINETO: Final = {
    "schemaVersion": 1,
    "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}],
    "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 8},
    "traceEvents": [
        {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#3", "pid": 1, "tid": 1, "ts": 100.0, "dur": 900.0},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": 110.0, "dur": 5.0,
         "args": {"correlation": 7}},
        {"ph": "X", "cat": "kernel", "name": "sm90_xmma_gemm_bf16", "pid": 0, "tid": 7, "ts": 150.0, "dur": 500.0,
         "args": {"correlation": 7, "stream": 7, "device": 0}},
    ],
}  # fmt: skip


@dataclass(frozen=True)
class Door:
    """A kind of file. name: of the file; text: a valid one; arguments: of the command, {file} and {plan} are paths.

    {text} is the text itself, for what is written on the command line.
    plan: keys of the scenario beside it, {file} its path; beside: texts of other files; form: json, yaml or text.
    """

    name: str
    text: str
    arguments: tuple[str, ...]
    plan: Mapping[str, Any] = field(default_factory=dict)
    form: str = "text"
    beside: Mapping[str, str] = field(default_factory=dict)
    pack: Callable[[bytes], bytes] = bytes

    def write(self, folder: Path, text: str) -> tuple[str, ...]:
        """Write the file and its scenario; return the arguments of the command."""
        file, plan = folder / self.name, folder / "beside.yaml"
        file.write_bytes(self.pack(text.encode("utf-8", "surrogatepass")))
        for name, other in self.beside.items():
            (folder / name).write_text(other)
        content = json.loads(json.dumps({**PLAN, **self.plan}).replace("{file}", self.name))
        plan.write_text(yaml.safe_dump(content))
        typed = text.replace("\x00", "")  # which no argument of a process can have
        return tuple(argument.format(file=file, plan=plan, text=typed) for argument in self.arguments)


def _packaged(category: str, name: str) -> str:
    return (category_folder(category) / name).read_text(encoding="utf-8")


def _head(table: str, rows: int = 6) -> str:
    lines = (PUBLISHED_FOLDER / table).read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(lines[: rows + 1])


def _graph() -> str:
    link = {"kind": "nic", "bandwidth": "50 GB/s", "latency": "1 us"}
    nodes = [
        *({"id": f"g{gpu}", "kind": "gpu", "node": gpu // 4} for gpu in range(8)),
        *({"id": name, "kind": "switch"} for name in ("s0", "s1", "top")),
    ]
    edges = [
        *({"source": f"g{gpu}", "target": f"s{gpu // 4}", **link} for gpu in range(8)),
        *({"source": name, "target": "top", **link} for name in ("s0", "s1")),
    ]
    return json.dumps({"graph": {"accelerator": "h100-sxm-80gb"}, "nodes": nodes, "edges": edges})


def _of_programs() -> dict[str, Door]:
    """What other programs, and the tools of machines, write and print, as `import auto` reads it."""
    job, many = ("import", "auto", "{file}", "--gpus", "8"), ("import", "auto", "{file}", "--gpus", "64")
    machine, folder = ("import", "auto", "{file}"), {"small.yaml": PRIMUS_MODEL, "base.yaml": PRIMUS_BASE}
    run, arguments = {"run.json": json.dumps(TRAINING_ARGUMENTS)}, ("import", "auto", "run.json", "--gpus", "8")
    with_deepspeed = {"run.json": json.dumps({**TRAINING_ARGUMENTS, "deepspeed": "ds.json"})}
    return {
        "deepspeed": Door("ds.json", json.dumps(DEEPSPEED), arguments, form="json", beside=with_deepspeed),
        "accelerate": Door("accelerate.yaml", yaml.safe_dump(ACCELERATE), arguments, form="yaml", beside=run),
        "argument-table": Door("train.log", table({}), job),
        "bridge": Door("bridge.log", yaml.safe_dump(PRINTED), many),
        "bridge-yaml": Door("bridge.yaml", yaml.safe_dump(PRINTED), many, form="yaml"),
        "nemo": Door("gpt.yaml", NEMO, job, form="yaml"),
        "primus": Door("experiment.yaml", PRIMUS, job, form="yaml", beside=folder),
        "axolotl": Door("axolotl.yaml", yaml.safe_dump(AXOLOTL), job, form="yaml"),
        "llama-factory": Door("sft.yaml", yaml.safe_dump(FACTORY), job, form="yaml"),
        "python-job": Door("jobs.py", PYTHON, ("import", "auto", "{file}", "--gpus", "16")),
        "nccl-topology": Door("topology.xml", system([gpu(index) for index in range(8)]), machine),
        "nvidia-smi": Door("matrix.txt", matrix("NV18", 8, 8), machine),
    }


@cache
def all_doors() -> Mapping[str, Door]:
    """Every door by its name."""
    plan_yaml, check = yaml.safe_dump(dict(PLAN)), ("check", "{file}")
    beside = ("check", "{plan}")
    record = _packaged("records", "h200-1-gpu.json")
    validate = {
        f"validate-{kind}": Door(
            f"{kind}.csv",
            _head(f"{kind}.csv"),
            ("validate", kind, "{file}", "--workers", "1"),
        )
        for kind in ("steps", "memory", "collectives", "kernels", "reliability")
    }
    result = {"name": "plan", "step_time_s": 1.0, "scenario": dict(PLAN)}
    nccl = ("calibrate", "import-nccl-tests", "{file}", "--cluster", "hgx-h200", "-o", "{file}.out.json")
    goodput = ("goodput", "{plan}", "--tokens", "100M", "--runs", "2", "--workers", "1")
    placement = {"cluster": {**PLAN["cluster"], "placement": {"order": "{file}"}}}
    expert_model = {
        "model": "mixtral-8x7b",
        "layout": {"ep": 8, "dp": 8, "data": "fsdp"},
        "training": {**PLAN["training"], "expert_load": {"tokens_per_expert": "{file}"}},
    }
    return {
        "scenario": Door("plan.yaml", plan_yaml, check, form="yaml"),
        "override": Door("set.txt", "training.microbatch=2", (*beside, "--set", "{text}")),
        "co-scheduled": Door("other.yaml", plan_yaml, beside, {"degradations": {"jobs": ["{file}"]}}, form="yaml"),
        "scenario-json": Door("plan.json", json.dumps(PLAN), check, form="json"),
        "example": Door("big.yaml", EXAMPLE.read_text(), check, form="yaml"),
        "cluster": Door(
            "own.yaml", _packaged("clusters", "dgx-h100.yaml"), ("topology", "{file}", "--gpus", "16"), form="yaml"
        ),
        "graph": Door("graph.json", _graph(), ("topology", "{file}"), form="json"),
        "accelerator": Door(
            "chip.yaml",
            _packaged("accelerators", "h100-sxm-80gb.yaml"),
            beside,
            {"cluster": {**PLAN["cluster"], "accelerator": "{file}"}},
            form="yaml",
        ),
        "library": Door(
            "lib.yaml",
            _packaged("libraries", "nccl.yaml"),
            ("run", "{plan}", "--quiet"),
            {"cluster": {"path": "own.yaml", "gpus": 8}},
            form="yaml",
            beside={"own.yaml": _packaged("clusters", "dgx-h100.yaml").replace("library: nccl", "library: lib.yaml")},
        ),
        "framework": Door(
            "software.yaml", _packaged("frameworks", "megatron.yaml"), beside, {"framework": "{file}"}, form="yaml"
        ),
        "record": Door(
            "record.json",
            record,
            beside,
            {"cost": {"record": "{file}"}, "cluster": {"name": "hgx-h200", "gpus": 8}},
            form="json",
        ),
        "report": Door("record.json", record, ("calibrate", "report", "{file}"), form="json"),
        "schedule": Door(
            "my.csv",
            "0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n",
            beside,
            {"schedule": "my.csv"},
        ),
        "placement": Door("order.txt", "".join(f"{gpu}\n" for gpu in range(8)), beside, placement),
        "experts": Door("counts.csv", "5,3,2,6,1,7,4,4\n", beside, expert_model),
        "failures": Door(
            "trace.csv",
            "time_h,what\n1.5,\n7,\n100,end\n",
            goodput,
            {"reliability": {"failures": {"node": {"trace": "{file}"}}}},
        ),
        "reliability": Door(
            "rates.yaml", _packaged("reliability", "typical.yaml"), goodput, {"reliability": "{file}"}, form="yaml"
        ),
        "model": Door("config.json", json.dumps(HF_CONFIG), beside, {"model": {"path": "{file}"}}, form="json"),
        "result": Door("result.json", json.dumps(result), ("diff", "{file}", "--set", "steps=2"), form="json"),
        "trace": Door("rank-0.json", json.dumps(KINETO), ("diff", "{file}", "{plan}"), form="json"),
        "trace-gz": Door(
            "rank-0.json.gz", json.dumps(KINETO), ("diff", "{file}", "{plan}"), form="json", pack=gzip.compress
        ),
        "script": Door("train.sh", MEGATRON_SCRIPT, ("import", "auto", "{file}")),
        "job": Door("job.toml", TORCHTITAN_JOB, ("import", "auto", "{file}", "--gpus", "16")),
        "neox": Door("neox.yml", json.dumps(NEOX), ("import", "auto", "{file}", "--gpus", "16"), form="json"),
        "training-arguments": Door(
            "run.json", json.dumps(TRAINING_ARGUMENTS), ("import", "auto", "{file}", "--gpus", "8"), form="json"
        ),
        "slurm": Door("topology.conf", SLURM_TREE, ("import", "auto", "{file}")),
        "nccl-text": Door("run.txt", (NCCL_FOLDER / "v2.19_h200.txt").read_text(), nccl),
        "nccl-json": Door("run.json", (NCCL_FOLDER / "alltoall_v2.19_h200.json").read_text(), nccl, form="json"),
        **_of_programs(),
        **validate,
    }
