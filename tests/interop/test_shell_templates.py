"""Scripts that leave values to be filled in, and that hand their variables to scripts which they submit."""

from pathlib import Path

import pytest

from clustersim.common.errors import InputError
from clustersim.interop.import_result import ImportContext, ImportResult
from clustersim.interop.megatron_import import import_megatron
from tests.sentences import parts

SIZE = "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
BASE = f"{SIZE}--vocab-size 1000 --micro-batch-size 1 --global-batch-size 64 --bf16"
RUN = f"torchrun --nproc_per_node 8 pretrain_gpt.py {BASE}"


def imported(text: str, folder: Path | None = None) -> ImportResult:
    return import_megatron(text, "run", context=ImportContext(folder, {}))


@pytest.mark.parametrize(
    "script",
    [
        "DATA=<path to the data>\n{run} --data-path $DATA",
        "export OUT=<your folder, with a slash>/x\n{run} --save $OUT",
        "{run} --load <PATH TO CHECKPOINT> --save <DIR>/x",
        'ARGS="{base} --data-path <PATH>"\nsrun -n 8 sh -c "python pretrain_gpt.py $ARGS"',
        "#SBATCH <SLURM OPTIONS> --nodes=1\n{run} --wandb-project '<name (e.g. mine)>'",
    ],
)
def test_placeholders_of_values_without_effect_make_no_difference(script: str) -> None:
    assert imported(script.format(run=RUN, base=BASE)).mapping == imported(RUN).mapping


def test_a_placeholder_with_effect_is_named() -> None:
    with pytest.raises(InputError, match=r"<number of stages> \(line 1\) is not known"):
        imported(f"PP=<number of stages>\n{RUN} --pipeline-model-parallel-size $PP")


@pytest.mark.parametrize("line", ["sort <in >out", "sort <in>out", "cat <<EOF >x\ntext\nEOF", "[[ a < b ]] && true"])
def test_redirections_are_no_placeholders(line: str) -> None:
    assert imported(f"{line}\n{RUN}").mapping == imported(RUN).mapping


def test_a_submitted_script_has_exports_of_sourced_files_and_its_own_header(tmp_path: Path) -> None:
    """Nodes are those of sbatch's command line, tasks those of the header; variables are exported by a sourced file."""
    (tmp_path / "config.sh").write_text(f'export ARGS="{BASE}"\nexport TP=2\nNOT_EXPORTED=--swiglu\n')
    (tmp_path / "job.sh").write_text(
        "#!/bin/bash\n#SBATCH --nodes=1 --ntasks-per-node=8\n"
        "srun python pretrain_gpt.py $ARGS --tensor-model-parallel-size $TP $NOT_EXPORTED "
        "--pipeline-model-parallel-size $SLURM_NNODES\n"
    )
    read = imported(". $(pwd)/config.sh\nsbatch -p large --nodes=4 --export=ALL job.sh\n", tmp_path).mapping
    assert read["cluster"]["gpus"] == 32
    assert (read["layout"]["tp"], read["layout"]["pp"], read["model"]["mlp"]) == (2, 4, "gelu")


def test_a_script_that_submits_itself_runs_in_a_job(tmp_path: Path) -> None:
    script = 'if [ -z "$SLURM_JOB_ID" ]; then\n    sbatch --nodes=2 --ntasks-per-node=8 job.sh\n    exit\nfi\n'
    script += f"srun python pretrain_gpt.py {BASE}\n"
    (tmp_path / "job.sh").write_text(script)
    assert imported(script, tmp_path).mapping["cluster"]["gpus"] == 16
    header = "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=4\n"
    assert (
        imported(header + script.replace("--nodes=2 --ntasks-per-node=8 ", ""), tmp_path).mapping["cluster"]["gpus"]
        == 8
    )


def test_a_variable_of_one_command_is_exported_for_it_alone(tmp_path: Path) -> None:
    (tmp_path / "inner.sh").write_text(f"{RUN} --tensor-model-parallel-size ${{TP:-1}}\n")
    assert imported("TP=4 bash inner.sh", tmp_path).mapping["layout"]["tp"] == 4
    assert "tp" not in imported("TP=4 true\nbash inner.sh", tmp_path).mapping["layout"]


LOOPS = [
    (
        "for i in 1 2; do if [ -f $D ]; then break; fi; done\n{run} --tensor-model-parallel-size $((i*0+2))",
        2,
    ),
    ("for i in 1 2; do [ -d x$i ] && continue; S=$i; done\n{run} --tensor-model-parallel-size 2 --seed $S", 2),
    ("f() {{ if [ -d x ]; then return 0; else return 1; fi; }}\nf\n{run} --tensor-model-parallel-size 2", 2),
    ("while true; do if [ -f x ]; then break; else break; fi; done\n{run} --tensor-model-parallel-size 2", 2),
]


@pytest.mark.parametrize(("script", "tp"), LOOPS)
def test_loops_and_functions_that_conditions_may_end(script: str, tp: int) -> None:
    assert imported(script.format(run=RUN)).mapping["layout"]["tp"] == tp


ENDS = (
    """
for number in 1 2 3; do
    if [ "$KIND" = first ]; then
        TP=$number
        if [ "$SIZE" = small ]; then
            PP=1
            break
        fi
        PP=2
        continue
    fi
    TP=4
done
is_wide() { if [ "$KIND" = first ]; then return 1; fi; }
if is_wide; then CP=2; else CP=1; fi
"""
    + f"{RUN} --tensor-model-parallel-size $TP --pipeline-model-parallel-size ${{PP:-1}} --context-parallel-size $CP "
    "--global-batch-size 96"
)


@pytest.mark.parametrize(
    ("definitions", "degrees"),
    [
        ({"KIND": "first", "SIZE": "small"}, (1, 1, 1)),
        ({"KIND": "first", "SIZE": "large"}, (3, 2, 1)),
        ({"KIND": "other", "SIZE": "small"}, (4, 1, 2)),
    ],
)
def test_where_a_loop_ends_is_merged_by_all_conditions_that_lead_there(
    definitions: dict[str, str], degrees: tuple[int, int, int]
) -> None:
    """Each outcome is one that bash would have; what the other condition decides is refused while it is not known."""
    context = ImportContext(None, definitions)
    layout = import_megatron(ENDS, "run", gpu_count=48, context=context).mapping["layout"]
    assert tuple(layout.get(name, 1) for name in ("tp", "pp", "cp")) == degrees
    one = {"KIND": definitions["KIND"]}
    if definitions["KIND"] == "other":
        assert import_megatron(ENDS, "run", gpu_count=48, context=ImportContext(None, one)).mapping["layout"] == layout
    else:
        with pytest.raises(InputError, match=r"\$SIZE = small"):
            import_megatron(ENDS, "run", gpu_count=48, context=ImportContext(None, one))


def test_a_loop_that_may_end_in_hundreds_of_places_is_refused() -> None:
    with pytest.raises(InputError, match=parts("line 1: loops ... more than 200")):
        imported(f"for i in $(seq 1 300); do if [ -f x$i ]; then break; fi; done\n{RUN}")
