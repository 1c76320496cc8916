"""Launch scripts: what decides that is not known, launchers, older flags, programs that are no pretraining."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from clustersim.common.errors import InputError
from clustersim.interop.import_result import ImportContext, ImportResult
from clustersim.interop.megatron_import import import_megatron
from clustersim.scenario import Scenario
from tests.sentences import parts

SIZE = "--hidden-size 256 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 --vocab-size 1000 "
STEP = "--micro-batch-size 1 --global-batch-size 192 --bf16 "
BASE = f"--num-layers 4 {SIZE}{STEP}"
BF16_GRADIENTS = {"compute": "bf16", "gradients": "bf16"}
FULL_BLOCK = "--recompute-granularity full --recompute-method block"
TORCHRUN = "torchrun --nproc_per_node 8 pretrain_gpt.py "


def imported(text: str, folder: Path | None = None, gpus: int | None = None, **definitions: str) -> ImportResult:
    names = {name.removeprefix("arg"): value for name, value in definitions.items()}
    return import_megatron(text, "run", gpu_count=gpus, context=ImportContext(folder, names))


def mapping(text: str, folder: Path | None = None, gpus: int | None = None, **definitions: str) -> Mapping[str, Any]:
    return imported(text, folder, gpus, **definitions).mapping


BRANCHES = f"""#!/bin/bash
if [ "$KIND" = big ]; then
    LAYERS=8
else
    LAYERS=4
fi
{TORCHRUN} --num-layers $LAYERS {SIZE}{STEP}
"""


def test_a_branch_that_is_not_known_is_refused_with_both_outcomes() -> None:
    with pytest.raises(InputError) as refused:
        imported(BRANCHES)
    assert parts(
        "run: line 2: ... [ $KIND = big ] ... --num-layers 8 ... --num-layers 4 ... --define KIND=VALUE"
    ).fullmatch(str(refused.value))


@pytest.mark.parametrize(("kind", "layers"), [("big", 8), ("small", 4), ("", 4)])
def test_a_definition_decides_a_branch(kind: str, layers: int) -> None:
    assert mapping(BRANCHES, KIND=kind)["model"]["layers"] == layers


@pytest.mark.parametrize(
    "script",
    [
        'if [ "$KIND" = big ]; then LR=1; else LR=2; fi\n{run} --lr $LR',
        "if [ -f data.bin ]; then A=4; else A=$((2*2)); fi\n{run} --num-layers $A",
        'if [ "$KIND" = a ]; then {run} --save a\nelse\n{run} --save b\nfi',
        "if nvidia-smi | grep H100; then ARGS=(--log-throughput); fi\n{run} ${{ARGS[@]}}",
        'case "$KIND" in a) S=1 ;; b) S=2 ;; esac\n{run} --seed $S',
        'if [ "$KIND" = a ]; then echo usage; exit 1; fi\n{run}',
        "if [ $# -lt 2 ]; then exit 1; fi\n{run} --save $1",
        "f() {{ if [ -d x ]; then return; fi; B=1; }}\nf\n{run} --seed ${{B:-2}}",
    ],
)
def test_a_branch_that_makes_no_difference_is_read(script: str) -> None:
    """Outcomes are compared as scenarios, so data, logs and rates do not count."""
    assert mapping(script.format(run=TORCHRUN + BASE)) == mapping(TORCHRUN + BASE)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ('[ "$SP" = true ] && A="--sequence-parallel --tensor-model-parallel-size 2"\n{run} $A', "[ $SP = true ]"),
        ("[[ $FP8 == 1 ]] && A+=(--fp8-format hybrid)\n{run} ${{A[@]}}", "--define FP8"),
        ("case $1 in 7b) L=32 ;; *) L=8 ;; esac\n{run} --num-layers $L", "--define 1=VALUE"),
        ("(( $N > 2 )) && L=2 || L=8\n{run} --num-layers $L", "--define N=VALUE"),
        ('if [ "$A" = 1 ]; then {run} --num-layers 2; else {run} --num-layers 6; fi', "--num-layers 2, else --num"),
        ("{run} --num-layers 6\n{run} --num-layers 8", "starts trainings that differ, on lines 1 and 2"),
        ("for n in 2 4; do {run} --num-layers $n; done", "starts trainings that differ"),
        ("if [ -f x ]; then L=2; else L=8; fi\n{run} --num-layers $L", "leave one of its branches"),
    ],
)
def test_a_branch_that_makes_a_difference_is_refused(script: str, message: str) -> None:
    with pytest.raises(InputError, match=parts(message)):
        imported(script.format(run=TORCHRUN + BASE))


def test_a_test_of_emptiness_asks_for_what_the_environment_gives() -> None:
    """As ${TP:-2} does; the remark says so."""
    script = f'if [ -z "$TP" ]; then TP=2; fi\n{TORCHRUN} {BASE} --tensor-model-parallel-size $TP'
    result = imported(script)
    assert result.mapping["layout"]["tp"] == 2
    assert result.assumptions == ("line 1: [ -z $TP ] holds, as nothing sets TP",)
    assert mapping(script, TP="4")["layout"]["tp"] == 4


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("{run} --recompute-granularity $R --recompute-method uniform", "--recompute-granularity: its value"),
        ("A=(--fp8-format $FP8 --seed 1)\n{run} ${{A[@]}}", "--fp8-format: its value is not in the script: $FP8"),
        ("{run} --tensor-model-parallel-size $(cat degree)", "$(cat degree) (line 1) is not known"),
        ("{run} --num-layers ${{L:?}}", "--define L=VALUE"),
        ("{run} --num-layers $((N * 2))", "--define N=VALUE"),
        ("{run} --num-layers $2", "--define 2=VALUE"),
        ("shift 2\n{run} --num-layers $1", "--define 3=VALUE"),
        ("{run} --bf16 $(get_arguments)", "line 1: its arguments include $(get_arguments)"),
    ],
)
def test_a_value_that_is_not_known_is_refused_by_flag_and_variable(script: str, message: str) -> None:
    with pytest.raises(InputError, match=parts(message)):
        imported(script.format(run=TORCHRUN + BASE))


def test_values_without_effect_need_not_be_known() -> None:
    result = imported(f"{TORCHRUN} {BASE} --save $OUT --data-path $(find data) --lr ${{LR}} --wandb-project $P/$(date)")
    assert (result.ignored_arguments, result.assumptions) == ((), ())


def test_arguments_that_bash_takes_for_a_command_are_named() -> None:
    """A backslash before white space continues no line, so bash starts the program without what follows."""
    result = imported(f"{TORCHRUN} {BASE} \\ \n  --num-layers 8")
    assert result.mapping["model"]["layers"] == 4
    (assumption,) = result.assumptions
    assert parts("line 2 ... --num-layers ... backslash").fullmatch(assumption)


def test_a_variable_that_may_hold_arguments_is_named() -> None:
    assert imported(f"{TORCHRUN} {BASE} --bf16 $EXTRA").assumptions == (
        "$EXTRA (line 1) holds no arguments, as nothing sets it",
    )
    assert mapping(f"{TORCHRUN} {BASE} $EXTRA", EXTRA="--num-layers 6")["model"]["layers"] == 6


@pytest.mark.parametrize(
    ("script", "gpus"),
    [
        ("torchrun --nproc_per_node=4 --nnodes=2 {p}", 8),
        ("torchrun --nproc-per-node 4 {p}", 4),
        ("torchrun {p}", 1),
        ("torchrun --nnodes 1:4 --nproc_per_node 8 {p}", 32),
        ("python -m torch.distributed.launch --nproc_per_node 8 --nnodes 4 {p}", 32),
        ("python -m torch.distributed.run --nproc_per_node 2 {p}", 2),
        ("export CUDA_VISIBLE_DEVICES=0; nohup python -u {p} &", 1),
        ("export WORLD_SIZE=16\npython {p}", 16),
        ("torchrun --nproc_per_node gpu --nnodes 2 {p}", 16),
        ("G=$(nvidia-smi -L | wc -l)\ntorchrun --nproc_per_node $G {p}", 8),
        ("G=`python -c 'import torch; print(torch.cuda.device_count())'`\ntorchrun --nproc_per_node $G {p}", 8),
        ("mpirun -np 24 --bind-to none -x PATH python {p}", 24),
        ("mpiexec -n 12 python {p}", 12),
        ("deepspeed --num_nodes 2 --num_gpus 4 {p}", 8),
        ("deepspeed {p}", 8),
        ("deepspeed --include localhost:0,1 {p}", 2),
        ("accelerate launch --num_processes 16 {p}", 16),
        ("srun -N 2 --ntasks-per-node=4 python {p}", 8),
        ("srun -N2 --ntasks-per-node 8 --gres=gpu:8 singularity exec x.sif python {p}", 16),
        ("srun -n 6 python {p}", 6),
        ("#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=8\n#SBATCH --gres=gpu:8 # all\nsrun python {p}", 32),
        ("#SBATCH -N 2\n#SBATCH -n 16\nsrun -l python {p}", 16),
        ("#SBATCH --nodes=2\n#SBATCH --gpus-per-node=8\ntorchrun --nnodes $SLURM_NNODES --nproc_per_node "
         "$SLURM_GPUS_PER_NODE {p}", 16),
        ("#SBATCH --nodes=3\nsrun bash -c \"torchrun --nnodes $SLURM_JOB_NUM_NODES --nproc_per_node 4 {p}\"", 12),
        ("#PBS -l select=2:ngpus=4:mpiprocs=4\nmpirun python {p}", 8),
        ("LAUNCHER='torchrun --nproc_per_node 4 --nnodes 4'\nCMD=\"$LAUNCHER {p}\"\necho $CMD\neval $CMD", 16),
        ("export RUN='python -u {p}'\nsrun -N 1 --ntasks-per-node 4 bash -c '$RUN'", 4),
    ],
)  # fmt: skip
def test_launchers_say_how_many_gpus(script: str, gpus: int) -> None:
    assert mapping(script.format(p=f"pretrain_gpt.py {BASE}"))["cluster"]["gpus"] == gpus


def test_jobs_of_one_node_on_each_of_several_are_named() -> None:
    """By default torchrun is of one node, whatever the batch job has."""
    header, program = "#SBATCH --nodes=2\n", f"pretrain_gpt.py {BASE}"
    result = imported(f"{header}srun torchrun --nproc_per_node 4 {program}")
    assert result.mapping["cluster"]["gpus"] == 4
    assert any(parts("torchrun without --nnodes ... 2 nodes").search(text) for text in result.assumptions)
    assert not imported(f"{header}srun torchrun --nnodes 2 --nproc_per_node 4 {program}").assumptions


def test_a_comment_that_looks_like_a_header_is_none() -> None:
    with pytest.raises(InputError, match="does not say how many GPUs"):
        imported(f"##SBATCH --nodes=2\n# SBATCH --ntasks-per-node=4\nsrun python pretrain_gpt.py {BASE}")


def test_unknown_numbers_of_gpus_are_named() -> None:
    with pytest.raises(InputError, match=r"\$NODES is not known.*--define NODES=VALUE.*--gpus"):
        imported(f"torchrun --nnodes $NODES --nproc_per_node 8 pretrain_gpt.py {BASE}")
    assert mapping(f"torchrun --nnodes $NODES pretrain_gpt.py {BASE}", gpus=16)["cluster"]["gpus"] == 16


@pytest.mark.parametrize(
    ("arguments", "recompute"),
    [
        ("--checkpoint-activations", "full"),
        ("--checkpoint-activations --checkpoint-num-layers 1", "full"),
        ("--activations-checkpoint-method uniform", "full"),
        ("--activations-checkpoint-method uniform --activations-checkpoint-num-layers 1", "full"),
        ("--activations-checkpoint-method block --activations-checkpoint-num-layers 3", {"layers": 3}),
        ("--activations-checkpoint-method block --activations-checkpoint-num-layers 0", "none"),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 0", "none"),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 2", {"layers": 2}),
        ("--recompute-method uniform --recompute-num-layers 1", None),
    ],
)
def test_recomputation_of_all_years(arguments: str, recompute: object) -> None:
    assert mapping(f"{TORCHRUN} {BASE} {arguments}")["training"].get("recompute") == recompute
    Scenario.from_mapping(mapping(f"{TORCHRUN} {BASE} {arguments}"))


@pytest.mark.parametrize(
    ("arguments", "layout"),
    [
        ("--cp-comm-type p2p", {}),
        ("--cp-comm-type a2a", {"cp_kind": "ulysses"}),
        ("--cp-comm-type all_gather", {"cp_kind": "all_gather"}),
        (
            "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 4",
            {"cp_kind": "two_dimensional", "cp_inner": 2},
        ),
    ],
)
def test_kinds_of_context_parallelism(arguments: str, layout: dict[str, object]) -> None:
    imported = mapping(f"{TORCHRUN} {BASE} --context-parallel-size 8 {arguments}")["layout"]
    assert {key: value for key, value in imported.items() if key in ("cp_kind", "cp_inner")} == layout
    assert "cp_kind" not in mapping(f"{TORCHRUN} {BASE} {arguments}")["layout"]


def test_deepspeed_sequence_parallel_ranks_exchange_heads() -> None:
    imported = mapping(f"{TORCHRUN} {BASE} --ds-sequence-parallel-size 4")["layout"]
    assert (imported["cp"], imported["cp_kind"]) == (4, "ulysses")
    with pytest.raises(InputError, match="splits sequences, too"):
        mapping(f"{TORCHRUN} {BASE} --ds-sequence-parallel-size 4 --context-parallel-size 2")


@pytest.mark.parametrize(
    ("arguments", "optimizer", "data"),
    [
        ("--optimizer lion", "lion", "ddp"),
        ("--optimizer muon", "muon", "ddp"),
        (
            "--optimizer muon --tensor-model-parallel-size 2",
            {"name": "muon", "tensor_parallel": "blockwise"},
            "ddp",
        ),
        ("--optimizer muon --tensor-model-parallel-size 2 --muon-tp-mode duplicated", "muon", "ddp"),
        ("--optimizer dist_muon", "muon", "zero"),
        ("--optimizer muon --use-distributed-optimizer", "muon", "zero"),
        (
            "--optimizer muon --muon-num-ns-steps 6 --muon-tp-mode blockwise --muon-use-syrk",
            {"name": "muon", "steps": 6, "tensor_parallel": "blockwise", "symmetric": True},
            "ddp",
        ),
    ],
)
def test_optimizers(arguments: str, optimizer: object, data: str) -> None:
    imported = mapping(f"{TORCHRUN} {BASE} {arguments}")
    assert imported["training"]["optimizer"] == optimizer
    assert data in str(imported["layout"]["data"])


@pytest.mark.parametrize(
    ("implementation", "loss"), [("native", "fused"), ("te", "fused"), ("linear", "cut_cross_entropy")]
)
def test_fused_losses(implementation: str, loss: str) -> None:
    fused = f"--cross-entropy-loss-fusion --cross-entropy-fusion-impl {implementation}"
    assert mapping(f"{TORCHRUN} {BASE} {fused}")["training"]["loss"] == loss
    assert "loss" not in mapping(f"{TORCHRUN} {BASE} --cross-entropy-fusion-impl {implementation}")["training"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--attention-backend flsh", "did you mean flash?"),
        ("--recompute-granularity ful", "did you mean full?"),
        ("--moe-token-dispatcher-type all2all --num-experts 4", "'all2all' is not known"),
        ("--transformer-impl te", "transformer_engine"),
        ("--fp8-format e5m2", "'e5m2' is not known"),
        ("--cross-entropy-fusion-impl liger", "'liger' is not known"),
        ("--position-embedding-type ropee", "did you mean rope?"),
        ("--fp16 --bf16", "--fp16: contradicts --bf16"),
    ],
)
def test_misspelt_values_of_known_flags_are_errors(arguments: str, message: str) -> None:
    with pytest.raises(InputError, match=parts(message)):
        imported(f"{TORCHRUN} {BASE} {arguments}")


JSON = '{{"zero_optimization": {{"stage": {stage}}}, "fp16": {{"enabled": true}}}}'


@pytest.mark.parametrize(
    ("stage", "flags", "data"),
    [
        (2, "--no-pipeline-parallel", {"zero": {"stage": 2, "overlap": True}}),
        (2, "", "zero2"),
        (1, "--no-pipeline-parallel", "zero1"),
    ],
)
def test_deepspeed_overlaps_gradients_of_models_that_are_no_pipeline_module(
    tmp_path: Path, stage: int, flags: str, data: object
) -> None:
    """Its engine turns overlap_comm off for a PipelineModule, and of old in stage 1."""
    (tmp_path / "ds.json").write_text(f'{{"zero_optimization": {{"stage": {stage}, "overlap_comm": true}}}}')
    run = f"deepspeed --num_gpus 8 pretrain_gpt.py {BASE} --deepspeed --deepspeed_config ds.json {flags}"
    assert mapping(run, tmp_path)["layout"]["data"] == data


def test_deepspeed_s_json_gives_the_stage(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(JSON.format(stage=2))
    run = f"deepspeed --num_gpus 8 pretrain_gpt.py {BASE} --deepspeed"
    assert mapping(f"{run} --deepspeed_config ds.json", tmp_path)["layout"]["data"] == "zero2"
    written = f"STAGE=3\ncat <<EOT > $DIR/ds.json\n{JSON.format(stage='$STAGE')}\nEOT\n"
    assert mapping(f"{written}{run} --deepspeed_config $DIR/ds.json", tmp_path)["layout"]["data"] == "zero3"
    template = 'sed "s/3/1/" ds3.json > out.json\n'
    (tmp_path / "ds3.json").write_text(JSON.format(stage=3))
    assert mapping(f"{template}{run} --deepspeed_config out.json", tmp_path)["layout"]["data"] == "zero1"
    assert mapping(f"{run} --deepspeed_config none.json --zero-stage 1", tmp_path)["layout"]["data"] == "zero1"
    unused = imported(f"{run.replace(' --deepspeed', '')} --zero-stage 2", tmp_path)
    assert unused.mapping["layout"]["data"] == {"ddp": {"bucket": "megatron", "overlap": False}}
    assert "--zero-stage has no effect, as --deepspeed is not given" in unused.assumptions
    with pytest.raises(InputError, match=parts("none.json is not next to the script")):
        imported(f"{run} --deepspeed_config none.json", tmp_path)


def test_megatron_deepspeed_s_experts_are_on_every_second_layer() -> None:
    run = f"deepspeed --num_gpus 8 pretrain_gpt.py {BASE} --deepspeed --zero-stage 0 --moe-expert-parallel-size 4 "
    result = mapping(f"{run} --num-experts 8 --topk 1")
    assert result["model"]["experts"] | {"bias": True} == {
        "count": 8, "top_k": 1, "ffn": 1024, "bias": True, "capacity_factor": 1.0, "interleave_moe_layer_step": 2,
    }  # fmt: skip
    assert (result["layout"]["ep"], result["layout"]["dispatcher"]) == (4, "alltoall")
    Scenario.from_mapping(result)
    assert "experts" not in mapping(run.replace("size 4", "size 1") + "--num-experts 1")["model"]
    for flag, message in (("--mlp-type residual", "--mlp-type: residual"), ("--mos", "--mos: a teacher")):
        with pytest.raises(InputError, match=parts(message)):
            imported(f"{run} --num-experts 8 {flag}")


def test_alibi_of_bigscience_s_fork() -> None:
    model = mapping(f"{TORCHRUN} {BASE} --position-embedding-type alibi")["model"]
    assert (model["positions"], "max_positions" in model) == ("alibi", False)


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python tasks/main.py --task RACE", "main.py"),
        ("torchrun tools/run_text_generation_server.py", "run_text_generation_server.py"),
        ("python tools/checkpoint/convert.py", "convert.py"),
        ("python -m megatron.tools.export_model", "the module megatron.tools.export_model"),
        ("torchrun pretrain_t5.py", "pretrain_t5.py"),
        ("python examples/post_training/modelopt/quantize.py", "quantize.py"),
        ("python hf2mcore_qwen2.py", "hf2mcore_qwen2.py"),
        ("python my_tool.py --model x", "my_tool.py"),
    ],
)
def test_programs_that_are_no_pretraining_are_told_apart(command: str, name: str) -> None:
    arguments = BASE if "my_tool" not in command else ""
    with pytest.raises(InputError, match=parts(f"run: starts {name}")):
        imported(f"{command} {arguments}")


def test_files_next_to_the_script_are_sourced(tmp_path: Path) -> None:
    (tmp_path / "model.sh").write_text(f'MODEL="{BASE}"\nLAYERS=$1\n')
    script = f'source "$(dirname "$0")/model.sh" 6\n{TORCHRUN} $MODEL --num-layers $LAYERS'
    assert mapping(script, tmp_path)["model"]["layers"] == 6
    result = imported(f"source env.sh\n{TORCHRUN} {BASE}", tmp_path)
    assert result.assumptions == ("env.sh, which line 1 sources, is not next to the script",)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("source self.sh", "deep"),
        ("f() { f; }\nf", "deep"),
        ("bash self.sh", "deep"),
        ("while true; do A=1; done", "commands; a launch script has fewer"),
        ("A=xxxxxxxxxx\nfor i in {1..9999}; do A=$A$A; done", "1,000,000 characters"),
        ("for i in {1..100000000}; do A=1; done", "10,000 words"),
        ("for a in {1..500}; do for b in {1..500}; do B=1; done; done", "commands"),
        ("A=" + "$(echo " * 300 + ")" * 300, "deeply"),
        ("A=" + "${A:-" * 3000 + "}" * 3000, "deep"),
        ("A=$((" + "(" * 5000 + "1" + ")" * 5000 + "))", "deep"),
        ("if true; then " * 3000 + "fi;" * 3000, "deep"),
        ("(" * 100000, "deep"),
        ("A=B B=A\necho $((A))", "stand for each other"),
        ("x" * 200_001, "200,000"),
        ("python \0 pretrain_gpt.py", "NUL"),
        ("if [ a; then", "is not bash"),
    ],
)
def test_bombs_are_one_sentence(script: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "self.sh").write_text("source self.sh\nbash self.sh\n")
    with pytest.raises(InputError, match=parts(message)) as refused:
        imported(f"{script}\n{TORCHRUN} {BASE}", tmp_path)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    "script",
    [
        "python pretrain_gpt.py {base} --use-mpi",
        'echo "rank $OMPI_COMM_WORLD_RANK"\npython pretrain_gpt.py {base}',
        "GPUS=$((NUM_NODES * NUM_GPUS_PER_NODE))\npython pretrain_gpt.py {base}",
    ],
)
def test_a_process_that_another_command_starts_many_times_is_not_one_gpu(script: str) -> None:
    text = script.format(base=BASE)
    with pytest.raises(InputError, match="how many GPUs"):
        imported(text)
    assert mapping(text, gpus=16)["cluster"]["gpus"] == 16


def test_a_python_without_a_launcher_is_one_gpu() -> None:
    assert mapping(f"RANK=0\nWORLD_SIZE=1\npython pretrain_gpt.py {BASE}")["cluster"]["gpus"] == 1


def test_parameters_that_are_not_given_stay_unknown() -> None:
    """The fifth alone is given: the others are not empty, and each is named at once."""
    script = f"TP=${{5}}\nPP=$2\n{TORCHRUN} {BASE} --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP"
    with pytest.raises(InputError, match="--define 2=VALUE"):
        imported(script, arg5="2")
    read = mapping(script, arg5="2", arg2="4")
    assert (read["layout"]["tp"], read["layout"]["pp"]) == (2, 4)
    with pytest.raises(InputError, match=r"--define 5=VALUE, --define 2=VALUE \(--pipeline-model-parallel-size\)"):
        imported(script)


def test_eval_takes_quotes_off_in_branches() -> None:
    script = f"""
if nvidia-smi | grep H100; then EXTRA="--moe-layer-freq '[0]*1+[1]*3'"; else EXTRA="--moe-layer-freq '[0,1,1,1]'"; fi
RUN="{TORCHRUN} {BASE} --num-experts 4 ${{EXTRA}}"
eval $RUN
"""
    assert mapping(script)["model"]["experts"]["dense_layers"] == 1


def test_underscores_of_forks_are_dashes() -> None:
    flags = re.sub(r"--[\w-]+", lambda match: "--" + match[0][2:].replace("-", "_"), BASE)
    assert mapping(f"{TORCHRUN} {flags} --use_bias") == mapping(f"{TORCHRUN} {BASE}")


def test_a_model_without_positions_has_no_rotary_kernels() -> None:
    assert mapping(f"{TORCHRUN} {BASE} --position-embedding-type none")["model"]["rotary_percent"] == 0


@pytest.mark.parametrize(
    ("arguments", "entries"),
    [
        ("--patch-tokenizer-type DeepSeekV2Tokenizer --extra-vocab-size 2400", 102400),
        ("--patch-tokenizer-type DeepSeekV2Tokenizer --extra-vocab-size 467", 129280),
        ("--patch-tokenizer-type QwenTokenizer --extra-vocab-size 85", 151936),
        ("--patch-tokenizer-type FalconTokenizer --extra-vocab-size 0", 65024),
        ("--patch-tokenizer-type BloomTokenizerFromHF --extra-vocab-size 7", 250880),
        ("--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model /models/llama-7b/tokenizer.model", 32000),
    ],
)
def test_tokenizers_give_the_released_vocabularies(arguments: str, entries: int) -> None:
    script = f"{TORCHRUN} {BASE.replace('--vocab-size 1000 ', '')} {arguments}"
    assert mapping(script)["model"]["vocab"] == entries


def test_parameters_of_an_unknown_file_are_named(tmp_path: Path) -> None:
    (tmp_path / "small.sh").write_text(f"ARGS=({BASE})\n", encoding="utf-8")
    script = f"source ./$1.sh\n{TORCHRUN} ${{ARGS[@]}}"
    with pytest.raises(InputError, match=r"\./\$1\.sh, which line 1 sources"):
        imported(script, tmp_path)
    assert mapping(script, tmp_path, arg1="small")["model"]["layers"] == 4


@pytest.mark.parametrize(
    ("extra", "tp"),
    [("--is-scaling-mode --x", 1), ("--other", 2), ("", 2), ("--IS-SCALING-MODE", 2)],
)
def test_grep_of_a_known_text_is_known(extra: str, tp: int) -> None:
    script = f"""
EXTRA="{extra}"
TP=2
if echo "$EXTRA" | grep -q -- "--is-scaling-mode"; then TP=1; fi
{TORCHRUN} {BASE} --tensor-model-parallel-size $TP
"""
    assert mapping(script)["layout"].get("tp", 1) == tp


@pytest.mark.parametrize("offset", ["$START", "$START-1+1", "2", "$START:1"])
def test_offsets_in_substrings_are_read(offset: str) -> None:
    script = f'TEXT=xx4\nSTART=2\n{TORCHRUN} {BASE} --tensor-model-parallel-size "${{TEXT:{offset}}}"'
    assert mapping(script)["layout"]["tp"] == 4


@pytest.mark.parametrize(
    ("flags", "section", "expected"),
    [
        ("--attention-head-type multiquery", "model", {"kv_heads": 1}),
        ("--attention-head-type multihead", "model", {"kv_heads": 4}),
        ("--use-bnb-optimizer", "training", {"optimizer": "adam8bit"}),
        ("--DDP-impl torch", "layout", {"data": {"ddp": {"bucket": "25 MiB"}}}),
        ("--DDP-impl local", "layout", {"data": {"ddp": {"bucket": "megatron", "overlap": False}}}),
        ("--deepspeed --zero-stage 0", "layout", {"data": "zero1"}),
        ("--deepspeed --ds-sequence-parallel-size 2", "layout", {"cp": 2, "cp_kind": "ulysses", "data": "zero1"}),
        (f"{FULL_BLOCK} --recompute-num-layers 9", "training", {"recompute": "full"}),
        (f"{FULL_BLOCK} --recompute-num-layers 4", "training", {"recompute": "full"}),
        (f"{FULL_BLOCK} --recompute-num-layers 3", "training", {"recompute": {"layers": 3}}),
        (f"{FULL_BLOCK} --recompute-num-layers 2 --pipeline-model-parallel-size 2", "training", {"recompute": "full"}),
        ("--main-grads-dtype fp32 --grad-reduce-in-bf16", "training", {"precision": BF16_GRADIENTS}),
    ],
)
def test_flags_of_forks_and_their_meaning(flags: str, section: str, expected: Mapping[str, Any]) -> None:
    """DeepSpeed's BF16 optimizer shards its states at stage 0, too; more layers than a stage has are all of them."""
    read = mapping(f"{TORCHRUN} {BASE} {flags}")[section]
    assert {key: read[key] for key in expected} == expected


def test_flags_with_underscores_are_those_of_megatron_llm() -> None:
    """Its layers have no biases, where Megatron-LM's have; other flags have names of their own."""
    flags = "--use_rms_norm --no_tie_embed_logits --num_attention_heads_kv 2 --glu_activation swiglu"
    read = mapping(f"{TORCHRUN} {BASE} {flags}".replace("--num-layers", "--num_layers"))["model"]
    assert (read["linear_bias"], read["norm"], read["kv_heads"], read["mlp"]) == (False, "rmsnorm", 2, "swiglu")
    assert read["tied_embeddings"] is False
    assert mapping(f"{TORCHRUN} {BASE} --use_bias".replace("--num-l", "--num_l"))["model"]["linear_bias"] is True


@pytest.mark.parametrize(
    ("tokenizer", "vocab"),
    [
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model /data/llama/tokenizer.model", 32000),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model $TOKENIZER", 32000),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model m/llm-jp-tokenizer-100k.ver3.0b1.model", 99584),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model /own/japanese.model", None),
        ("--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model $1", None),
    ],
)
def test_a_sentencepiece_model_of_another_name_is_not_llama_s(tokenizer: str, vocab: int | None) -> None:
    """Llama2Tokenizer is Megatron-LM's class for any SentencePiece model."""
    line = f"{TORCHRUN} {BASE.replace('--vocab-size 1000 ', '')} {tokenizer}"
    if vocab is None:
        with pytest.raises(InputError, match=r"vocabulary's size.*tokenizer"):
            imported(line)
    else:
        assert mapping(line)["model"]["vocab"] == vocab


def test_tokenizers_that_a_condition_decides_are_not_taken_for_equal() -> None:
    tokenizer = 'if [ "$M" = 3 ]; then T=meta-llama/Llama-3.1-8B; else T=meta-llama/Llama-2-7b; fi\n'
    line = f"{TORCHRUN} {BASE.replace('--vocab-size 1000 ', '')} --tokenizer-type HuggingFaceTokenizer"
    with pytest.raises(InputError, match=r"whether \[ \$M = 3 \] is not known"):
        imported(f"{tokenizer}{line} --tokenizer-model $T")
    assert mapping(f"{tokenizer}{line} --tokenizer-model $T", M="3")["model"]["vocab"] == 128256


def test_gpus_that_the_batch_does_not_fit_are_named() -> None:
    with pytest.raises(InputError, match=r"192 sequences.*microbatches of 5 on 8 data-parallel"):
        imported(f"{TORCHRUN} {BASE} --micro-batch-size 5")
    with pytest.raises(InputError, match="on 128 data-parallel ranks; give --gpus 96"):
        imported(f"{TORCHRUN} {BASE}", gpus=128)


@pytest.mark.parametrize(
    "program", ["pretrain_megatron_llava", "hf2mcore_qwen1.5", "pretrain_qwen2_vl", "finetune_dpo"]
)
def test_programs_that_train_no_decoder_alone_are_told_apart(program: str) -> None:
    with pytest.raises(InputError, match=parts(f"starts {program}.py")):
        imported(f"torchrun {program}.py {BASE}")


def test_layers_that_do_not_divide_into_stages_are_refused() -> None:
    """As Megatron-LM does; DeepSpeed's pipeline may have stages of different sizes."""
    flags = "--pipeline-model-parallel-size 4 --num-layers 6"
    with pytest.raises(InputError, match="6 do not divide into 4 stages"):
        imported(f"{TORCHRUN} {BASE} {flags}")
    assert mapping(f"{TORCHRUN} {BASE} {flags} --deepspeed --zero-stage 1")["layout"]["pp"] == 4
    uneven = mapping(f"{TORCHRUN} {BASE} {flags} --decoder-first-pipeline-num-layers 3")
    assert uneven["layout"]["pp"] == 4


@pytest.mark.parametrize(
    ("launcher", "is_bound"),
    [
        ("torchrun --nproc_per_node 8", False),
        ("torchrun --nproc_per_node 8 --numa-binding=node", True),
        ("torchrun --nproc_per_node 8 --numa-binding none", False),
        ("deepspeed --num_nodes 1 --num_gpus 8 --bind_cores_to_rank", True),
        ("srun -n 8 bindpcie python", True),
        ("srun -n 8 numactl --cpunodebind=$((SLURM_LOCALID/4)) --membind=$((SLURM_LOCALID/4)) python", True),
        ("srun -n 8 numactl -N $SLURM_LOCALID python", True),
        ("srun -n 8 numactl --cpunodebind=0 python", False),
        ("numactl --cpunodebind=$NODE torchrun --nproc_per_node 8", False),
        ("srun -n 8 numactl --membind=$SLURM_LOCALID python", False),
        ("srun -n 8 --cpu-bind=map_ldom:0,0,0,0,1,1,1,1 python", True),
        ("srun -n 8 --cpu_bind verbose,mask_cpu:0xff*4,0xff00*4 python", True),
        ("MASKS=ff,ff00; srun -n 8 --cpu-bind=mask_cpu:$MASKS python", True),
        ("SLURM_CPU_BIND=map_cpu:0,8,16,24,32,40,48,56 srun -n 8 python", True),
        ("srun -n 8 --cpu-bind=map_ldom:0 python", False),
        ("srun -n 8 --cpu-bind=none python", False),
        ("srun -n 8 --cpu-bind=cores python", False),
        ("srun -N 1 --cpu-bind=map_ldom:0,1 torchrun --nproc_per_node 8", False),
    ],
)
def test_launchers_that_bind_each_rank_are_read(launcher: str, is_bound: bool) -> None:
    """It counts for launches of models with experts, so it is written for these."""
    experts = "--num-experts 8 --expert-model-parallel-size 8 --moe-router-topk 2"
    script = f"#!/bin/bash\n{launcher} pretrain_gpt.py {BASE} {experts}\n"
    framework = {"name": "megatron", "numa_binding": True} if is_bound else "megatron"
    assert mapping(script)["framework"] == framework
    assert mapping(script.replace(experts, ""))["framework"] == "megatron"
