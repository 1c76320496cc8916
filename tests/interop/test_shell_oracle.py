"""Scripts mean what bash passes: the evaluator against bash itself, with stubs in place of the programs."""

import json
import os
import shutil
import stat
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from clustersim.interop.shell.interpreter import run_script
from clustersim.interop.shell.unknowns import HOLE, Unknowns
from tests.conftest import examples

BASH = shutil.which("bash")
pytestmark = pytest.mark.skipif(BASH is None, reason="needs bash")
STUBS = ("torchrun", "python", "python3", "srun", "deepspeed", "mpirun", "accelerate")
STUB = """#!{bash}
printf '%s\\0' "${{0##*/}}" "$@" >> "$STUB_OUT"
printf '\\1\\0' >> "$STUB_OUT"
"""


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stubs")
    for name in STUBS:
        path = folder / name
        path.write_text(STUB.format(bash=BASH))
        path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return folder


def bash_commands(
    script: str, folder: Path, stubs: Path, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> list[list[str]]:
    """The words of each program that bash starts."""
    assert BASH is not None
    path, out = folder / "train.sh", folder / "out"
    path.write_text(script)
    out.write_bytes(b"")
    subprocess.run(
        [BASH, str(path), *arguments],
        cwd=folder,
        env={"PATH": f"{stubs}:{os.environ['PATH']}", "STUB_OUT": str(out), **(environment or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=20,
        check=False,
    )
    words = out.read_bytes().decode().split("\0")[:-1]
    commands: list[list[str]] = [[]]
    for word in words:
        if word == "\1":
            commands.append([])
        else:
            commands[-1].append(word)
    return commands[:-1]


def evaluated_commands(script: str, folder: Path, definitions: Mapping[str, str] | None = None) -> list[list[str]]:
    """The same, of the evaluator."""
    run = run_script(script, str(folder / "train.sh"), folder, definitions or {})
    return [
        where_nothing_is_set(command.shell_words, run.unknowns)
        for command in run.commands
        if command.shell_words[0] in STUBS
    ]


def where_nothing_is_set(words: Sequence[str], unknowns: Unknowns) -> list[str]:
    """Words in an environment without variables: what is not set is empty, and no word where it is not quoted."""
    kept = []
    for word in words:
        assert all(value.is_unset for value in unknowns.unknowns(word)), unknowns.described(word)
        text = HOLE.sub("", word)
        if text or not word or not all(match[2] for match in HOLE.finditer(word)):
            kept.append(text)
    return kept


SCRIPTS = {
    "several_on_a_line": "A=1 B=2; C=$A$B\ntorchrun $A $B $C",
    "prefix": "X=1\nX=2 torchrun x $X\ntorchrun $X",
    "export": 'export A=1 B="2 3"\nexport A C=5\ntorchrun $A $B "$B" $C',
    "readonly_declare": "readonly A=4\ndeclare -i N=3+4\ndeclare -r M=x\ntypeset K=2\ntorchrun $A $N $M $K",
    "let": "let A=3*4 'B = A + 1'\nlet B++\ntorchrun $A $B",
    "defaults": 'A=\nX=${A:-1} Y=${A-2} Z=${B:-3}\n: ${C:=4}\n: ${D=5}\ntorchrun "$X" "$Y" $Z $C $D ${E:+6} ${X:+7}',
    "nested_defaults": 'torchrun ${A:-${B:-"x y"}} "${A:-${B:-x y}}" ${A:-$((2*3))}',
    "suffixes": "P=/a/b.tar.gz\ntorchrun ${P%.*} ${P%%.*} ${P#*/} ${P##*/} ${P/a/x} ${P//a/x} ${P/#\\/a/q} ${P/%gz/q}",
    "lengths": "A=abc B=(1 2 3)\ntorchrun ${#A} ${#B[@]} ${#B} ${#B[*]}",
    "substrings": 'A=abcdef B=(1 2 3 4)\ntorchrun ${A:2} ${A:1:3} ${A: -2} ${A:0:-1} ${B[@]:1:2} "${B[@]:2}"',
    "cases_of_letters": "A=Bf16\ntorchrun ${A^^} ${A,,} ${A^} ${A,}",
    "arithmetic": (
        "N=4\ntorchrun $((N*8)) $(( $N + 2 )) $((N/3)) $((N%3)) $((2**10)) $((N>3?1:0)) $((-7/2)) $((0x10+010))"
    ),
    "arithmetic_statements": "((A=3))\n((A+=4))\n((B=A*2, A++))\n((++B))\ntorchrun $A $B",
    "arithmetic_in_text": 'N=2\nL="--x $((N*3)) --y $[N+1]"\ntorchrun $((N)) --z',
    "array_on_a_line": 'A=(--tp 4 --pp 2)\ntorchrun "${A[@]}" ${A[@]} ${A[*]} "${A[*]}" $A ${A[1]}',
    "array_on_lines": 'A=(\n  --tp 4 # degree\n  # --no 3\n  --name "a b"\n)\ntorchrun "${A[@]}"',
    "array_appended": 'A=(1)\nA+=(2 3)\nA+=("4 5")\nA[1]=9\ntorchrun "${A[@]}" ${A[-1]}',
    "array_empty": 'A=()\ntorchrun x "${A[@]}" ${A[@]} y',
    "array_of_arrays": 'A=(1 2)\nB=(0 "${A[@]}" 3)\nC=("${B[@]}" ${A[@]})\ntorchrun "${C[@]}"',
    "mapping": "declare -A M\nM[a]=1\nM[b]=2\ndeclare -A K=([x]=5 [y]=6)\ntorchrun ${M[a]} ${M[b]} ${K[x]} ${#K[@]}",
    "string_appended": 'A="--x 1"\nA+=" --y 2"\nA="$A --z"\ntorchrun $A',
    "if_elif": "S=m\nif [ $S = s ]; then L=1\nelif [ $S = m ]; then L=2\nelse L=3\nfi\ntorchrun $L",
    "if_without_branch": "if [ a = b ]; then A=1; fi\ntorchrun x$A",
    "tests": (
        'A=3 B=\nif [ $A -gt 2 ] && [ -z "$B" ]; then torchrun 1; fi\nif [[ $A == 3 && -n $A ]]; then torchrun 2; fi\n'
        "[[ $A =~ ^[0-9]+$ ]] && torchrun 3\n[ ! $A -eq 4 ] && torchrun 4\n[[ abc == a* ]] && torchrun 5\n"
        '[[ abc == "a*" ]] || torchrun 6\nif [ "$A" != 3 -o $A -le 3 ]; then torchrun 7; fi\n'
        "[[ ! ( $A -lt 2 || $A -gt 9 ) ]] && torchrun 8\ntest $A -ge 3 && torchrun 9\n[ $A ] && torchrun 10\n"
        "if ((A > 2 && A != 4)); then torchrun 11; fi\nif ! [ $A = 4 ]; then torchrun 12; fi\n"
        "[[ -z $B ]] && torchrun 13"
    ),
    "lists": "true && A=1\nfalse || B=2\nfalse && C=3\n[ x = y ] && D=4 || E=5\ntorchrun $A$B$C$D$E",
    "case": "M=70b\ncase $M in\n  7b|8b) L=32;;\n  70*) L=80 ;;\n  *) L=1 ;;\nesac\n"
    'case "$M" in (x) L=0;; esac\ntorchrun $L',
    "functions": (
        'f() { local a=$1; B=$((a*2)); }\nfunction g { echo "--n $1 $#"; }\nf 4\n'
        "r() { if [ $1 = x ]; then return 1; fi; R=1; }\n"
        "r x || N=1\nr y && M=1\ntorchrun $a $B $(g 7 8) $N $M $R"
    ),
    "function_with_all": 'f() { torchrun "$@" $# "${@:2}"; shift; torchrun "$1" "$*"; }\nf a \'b c\' d',
    "for_words": 'for i in 1 2 3; do A="$A $i"; done\nfor i in {4..6} x{a,b}; do A+=" $i"; done\ntorchrun $A',
    "for_arithmetic": 'for ((i=0; i<3; i++)); do A+=($i); done\ntorchrun "${A[@]}" $i',
    "for_array": 'A=(a \'b c\')\nfor x in "${A[@]}"; do torchrun "$x"; done',
    "while": 'i=0\nwhile [ $i -lt 3 ]; do i=$((i+1)); [ $i = 2 ] && continue; A="$A $i"; done\ntorchrun $A',
    "until_break": "n=0\nuntil false; do ((n++)); if [ $n = 4 ]; then break; fi; done\ntorchrun $n",
    "continuations": 'torchrun \\\n  --a 1 \\\n  --b \\\n  2\nA="--c 3 \\\n  --d 4"\ntorchrun $A',
    "continued_by_nothing": "torchrun a \\\n  b \\",
    "quotes": "A='a  b'\ntorchrun $A \"$A\" '$A' \"\\$A \\\"q\\\"\" a\\ b $'t\\tx' \"\" ''",
    "comments": "# torchrun no\nA=1 # --x 2\ntorchrun $A # --y\ntorchrun a#b",
    "heredoc": "cat > cfg.json <<EOF\n{\"a\": $((1+1))}\nEOF\nX=$(cat <<'EOT'\n--x $A\nEOT\n)\ntorchrun $X",
    "herestring": 'read A B <<< "1 2 3"\ntorchrun $A "$B"\nread -r -d \'\' C <<EOF\n--x 1\n--y 2\nEOF\ntorchrun $C',
    "lines": (
        'while read -r a b; do L+=("$b$a"); done <<< "1 2\n3 4"\nN=0\n'
        "while read x; do N=$((N+1)); done <<EOF\np\nq\nEOF\n"
        "printf 'u\\nv\\n' > list\nwhile read x; do M+=-$x; done < list\nmapfile -t P < list\n"
        "readarray -t Q <<< 'y z'\necho \"5 6\" | { read a b; torchrun $b $a; }\n"
        'torchrun "${L[@]}" $N $M "${P[@]}" "${Q[@]}" $(while read k; do echo =$k; done < list)'
    ),
    "substitutions": (
        'D=$(dirname /a/b/c.sh)\nB=$(basename /a/b/c.sh .sh)\nE=$(echo "x $D" | tr a-z A-Z)\nS=`seq 1 3`\n'
        "N=$(echo $S | wc -w)\ntorchrun $D $B $E $S $N $(expr 3 + 4) $(printf '%s-%s' a b) $(echo a:b | cut -d: -f2)"
    ),
    "subshell": "A=1\n( A=2; torchrun $A )\ntorchrun $A\n{ A=3; }\ntorchrun $A",
    "pipelines": "torchrun a 2>&1 | cat\nA=1 | true\ntorchrun $A b > /dev/null",
    "eval": 'C="torchrun --a 1"\neval $C --b\neval "A=5; torchrun \\$A"\n$C c',
    "shells": "export A=1\nB=2\nbash -c \"torchrun $B \\$A\"\nbash -c 'torchrun $A $B'\nsh -c 'torchrun $0 $1' x y",
    "set": 'set -euo pipefail\nset -- a \'b c\'\ntorchrun $1 "$2" $#\nshift\ntorchrun "$@"',
    "indirect": "A_7=x\nN=A_7\ntorchrun ${!N}\nB=7\nV=A_$B\ntorchrun ${!V}",
    "exit": "torchrun 1\nif [ a = a ]; then exit 0; fi\ntorchrun 2",
    "unset": "A=1\nunset A\ntorchrun ${A:-2}",
    "globs": "torchrun [0]*3+[1]*5 'a*' \"([0]*3)\" --x=*.none",
    "braces": "torchrun {a,b}c x{1..3}y '{a,b}' \"{a,b}\" {} a{b}c ${A:-{}}",
    "local_hides": "A=1\nf() { local A=2; g; }\ng() { torchrun $A; A=3; }\nf\ntorchrun $A",
    "last_wins": "N=4\nN=8\ntorchrun --n $N --n 2",
    "empty_words": 'E=\ntorchrun $E a "$E" b$E',
    "long_options": "O=(--master_addr=localhost --x='a b')\npython -m torch.distributed.run \"${O[@]}\" p.py",
    "srun": 'srun -N 2 --ntasks-per-node=8 bash -c "echo hi"\nsrun python p.py --x',
    "case_fallthrough_of_star": "for a in x yy z; do case $a in ?) torchrun one $a;; *) torchrun more $a;; esac; done",
    "nested_ifs": "A=1 B=2\nif [ $A = 1 ]; then\n if [ $B = 1 ]; then C=11; else C=12; fi\nelse C=0; fi\ntorchrun $C",
    "ternary_by_and_or": "SP=true\nS=$([ $SP = true ] && echo --sequence-parallel || echo --none)\ntorchrun $S",
    "sourced": "source ./common.sh\n. common.sh x\ntorchrun $COMMON $(common_f) $GIVEN",
    "sourced_by_place": "source $(dirname $0)/common.sh\n"
    'source "$(dirname "${BASH_SOURCE[0]}")"/common.sh\ntorchrun $COMMON',
    "called": "export TP=4\nbash inner.sh 7 'a b'",
    "double_digits": "f() { torchrun ${10} $1 ${11:-z}; }\nf a b c d e f g h i j",
}
COMMON = 'COMMON="--common 1"\nGIVEN=$1\ncommon_f() { echo from-function; }\n'
INNER = 'torchrun --tp $TP --n $1 "$2" ${NOT:-d}\n'


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_passes_what_bash_passes(name: str, tmp_path: Path, stubs: Path) -> None:
    (tmp_path / "common.sh").write_text(COMMON)
    (tmp_path / "inner.sh").write_text(INNER)
    script = SCRIPTS[name] + "\n"
    expected = bash_commands(script, tmp_path, stubs)
    assert expected, "the script starts no program, so it proves nothing"
    nested = {"shells", "srun"}  # a stub of srun runs no shell
    if name not in nested:
        assert evaluated_commands(script, tmp_path) == expected
    else:
        assert [words for words in evaluated_commands(script, tmp_path) if words[0] != "srun"] == [
            words for words in expected if words[0] != "srun"
        ]


def test_parameters_and_environment_are_what_define_gives(tmp_path: Path, stubs: Path) -> None:
    script = 'TP=$1\nshift\nfor a in "$@"; do A="$A+$a"; done\ntorchrun $TP $A $# ${SIZE:-none} "$2" ${3:-x}\n'
    definitions = {"1": "8", "2": "a", "3": "b c", "SIZE": "7b"}
    expected = bash_commands(script, tmp_path, stubs, ["8", "a", "b c"], {"SIZE": "7b"})
    assert evaluated_commands(script, tmp_path, definitions) == expected


def test_options_of_the_command_line_are_parsed_by_a_loop(tmp_path: Path, stubs: Path) -> None:
    script = (
        "TP=1\nwhile [[ $# -gt 0 ]]; do\n  case $1 in\n    --tp) TP=$2; shift 2 ;;\n    --sp) SP=1; shift ;;\n"
        "    *) echo bad; exit 1 ;;\n  esac\ndone\ntorchrun $TP $SP\n"
    )
    expected = bash_commands(script, tmp_path, stubs, ["--sp", "--tp", "4"])
    assert evaluated_commands(script, tmp_path, {"1": "--sp", "2": "--tp", "3": "4"}) == expected
    assert evaluated_commands(script, tmp_path) == bash_commands(script, tmp_path, stubs)


NAMES = ("A", "B", "C")
ARRAYS = ("X", "Y")
WORD = st.sampled_from(["1", "2", "16", "--tp", "a b", "x*y", "", "bf16", "/p/q.sh"])
PLAIN = st.sampled_from(["1", "2", "16", "7b", "full", "a-b"])
NAME, ARRAY = st.sampled_from(NAMES), st.sampled_from(ARRAYS)


def quoted(word: str) -> str:
    return f"'{word}'"


VALUE = st.one_of(
    PLAIN,
    WORD.map(quoted),
    NAME.map(lambda name: f'"${name}"'),
    NAME.map(lambda name: f"${{{name}:-3}}"),
    NAME.map(lambda name: f"${{{name}%b*}}"),
    NAME.map(lambda name: f"${{{name}/1/9}}"),
    NAME.map(lambda name: f'"pre ${name} post"'),
    NAME.map(lambda name: f"${{#{name}}}"),
    ARRAY.map(lambda name: f"${{#{name}[@]}}"),
    ARRAY.map(lambda name: f'"${{{name}[*]}}"'),
    st.tuples(st.integers(0, 9), st.sampled_from("+-*"), st.integers(1, 9)).map(lambda t: f"$(({t[0]} {t[1]} {t[2]}))"),
    NAME.map(lambda name: f'$(echo "${name}")'),
)
WORDS = st.one_of(VALUE, NAME.map(lambda name: f"${name}"), ARRAY.map(lambda name: f'"${{{name}[@]}}"'), ARRAY.map(
    lambda name: f"${{{name}[@]}}"))  # fmt: skip
CONDITION = st.one_of(
    st.tuples(NAME, PLAIN).map(lambda t: f'[ "${t[0]}" = {t[1]} ]'),
    st.tuples(NAME, PLAIN).map(lambda t: f"[[ ${t[0]} != {t[1]} ]]"),
    NAME.map(lambda name: f'[ -z "${name}" ]'),
    NAME.map(lambda name: f"[[ ${name} == 1* ]]"),
    ARRAY.map(lambda name: f"(( ${{#{name}[@]}} > 1 ))"),
    st.sampled_from(["true", "false"]),
)
SIMPLE = st.one_of(
    st.tuples(NAME, VALUE).map(lambda t: f"{t[0]}={t[1]}"),
    st.tuples(NAME, VALUE).map(lambda t: f"{t[0]}+={t[1]}"),
    st.tuples(NAME, VALUE).map(lambda t: f"export {t[0]}={t[1]}"),
    st.tuples(ARRAY, st.lists(WORDS, max_size=3)).map(lambda t: f"{t[0]}=({' '.join(t[1])})"),
    st.tuples(ARRAY, st.lists(WORDS, min_size=1, max_size=2)).map(lambda t: f"{t[0]}+=({' '.join(t[1])})"),
    st.lists(WORDS, max_size=3).map(lambda words: " ".join(["torchrun", *words])),
    st.lists(VALUE, min_size=1, max_size=2).map(lambda words: " ".join(["f", *words])),
)


def compound(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    block = st.lists(inner, min_size=1, max_size=3).map("\n".join)
    return st.one_of(
        st.tuples(CONDITION, block, block).map(lambda t: f"if {t[0]}; then\n{t[1]}\nelse\n{t[2]}\nfi"),
        st.tuples(CONDITION, inner).map(lambda t: f"{t[0]} && {{ {t[1]}\n}}"),
        st.tuples(NAME, st.lists(WORDS, min_size=1, max_size=3), block).map(
            lambda t: f"for {t[0]} in {' '.join(t[1])}; do\n{t[2]}\ndone"
        ),
        st.tuples(NAME, PLAIN, block, block).map(
            lambda t: f"case ${t[0]} in\n{t[1]}*)\n{t[2]}\n;;\n*)\n{t[3]}\n;;\nesac"
        ),
        block.map(lambda text: f"( {text}\n)"),
    )


STATEMENT = st.recursive(SIMPLE, compound, max_leaves=6)
PREAMBLE = 'A=1 B= C="x y"\nX=(1 "2 3") Y=()\nf() { local A=$1; torchrun f "$@" $A; }\n'


@given(st.lists(STATEMENT, min_size=1, max_size=6))
@examples(200)
def test_composed_scripts_pass_what_bash_passes(statements: list[str]) -> None:
    """Every variable is assigned, so nothing is unknown."""
    script = PREAMBLE + "\n".join(statements) + '\ntorchrun end "$A" "$B" "$C" "${X[@]}" "${Y[@]}"\n'
    folder = _scratch()
    assert evaluated_commands(script, folder) == bash_commands(script, folder, _scratch_stubs(folder)), json.dumps(
        script
    )


KEY_CONDITION = st.sampled_from(['[ "$K" = a ]', "[[ $K == a ]]", '[ $K = "a" ]', '! [ "$K" = a ]', '[[ "$K" != a ]]'])
EITHER = st.one_of(KEY_CONDITION, CONDITION)


def key_compound(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    block = st.lists(inner, min_size=1, max_size=3).map("\n".join)
    return st.one_of(
        st.tuples(EITHER, block, block).map(lambda t: f"if {t[0]}; then\n{t[1]}\nelse\n{t[2]}\nfi"),
        st.tuples(KEY_CONDITION, CONDITION, block).map(lambda t: f"if {t[0]} && {t[1]}; then\n{t[2]}\nfi"),
        st.tuples(CONDITION, KEY_CONDITION, inner).map(lambda t: f"{t[0]} || {t[1]} || {{ {t[2]}\n}}"),
        st.tuples(block, block).map(lambda t: f'case "$K" in\na)\n{t[0]}\n;;\n*)\n{t[1]}\n;;\nesac'),
        st.tuples(KEY_CONDITION, inner).map(lambda t: f"if {t[0]}; then\n{t[1]}\nexit\nfi"),
        st.tuples(NAME, WORDS, block).map(lambda t: f"for {t[0]} in {t[1]}; do\n{t[2]}\ndone"),
        st.tuples(KEY_CONDITION, VALUE).map(lambda t: f"g() {{ if {t[0]}; then return; fi; A={t[1]}; }}\ng"),
        st.tuples(KEY_CONDITION, block, block, JUMP, JUMP, block).map(_jumping_loop),
        st.tuples(KEY_CONDITION, END, END, inner, inner).map(_ending_function),
    )


JUMP = st.sampled_from(["break", "continue", "exit", ":"])
END = st.sampled_from(["return", "return 0", "return 1", "false", "exit"])


def _jumping_loop(pieces: tuple[str, str, str, str, str, str]) -> str:
    """A loop whose branches leave it, go on, or end the script."""
    condition, first, second, jump, other, rest = pieces
    return f"for D in 1 2; do\nif {condition}; then\n{first}\n{jump}\nelse\n{second}\n{other}\nfi\n{rest}\ndone"


def _ending_function(pieces: tuple[str, str, str, str, str]) -> str:
    """A function whose branches end it, or the script, and a branch on its status."""
    condition, first, second, holds, fails = pieces
    return f"h() {{ if {condition}; then {first}; else {second}; fi; }}\nif h; then\n{holds}\nelse\n{fails}\nfi"


@given(st.lists(st.recursive(SIMPLE, key_compound, max_leaves=6), min_size=1, max_size=6))
@example(['if [ "$K" = a ]; then\nA=1\nelse\nX=(1)\nfi', 'A="${X[*]}"'])  # of two words, or of one
@examples(200)
def test_both_outcomes_of_an_unknown_variable_are_what_bash_passes(statements: list[str]) -> None:
    """Evaluated once, without K; its outcomes are compared with bash's for a K that holds and one that does not."""
    script = PREAMBLE + "\n".join(statements) + '\ntorchrun end "$A" "$B" "$C" "${X[@]}" "${Y[@]}" $A ${X[@]}\n'
    folder = _scratch()
    run = run_script(script, str(folder / "train.sh"), folder, {})
    for key in ("a", "b"):
        outcomes = {decision.number: _outcome(decision.condition, key) for decision in run.unknowns.decisions}
        taken = [
            command
            for command in run.commands
            if all(outcomes[number] == outcome for number, outcome in command.guards.items())
        ]
        with run.unknowns.assuming(outcomes):
            passed = [run.unknowns.settle_words(command.shell_words) for command in taken]
        expected = bash_commands(script, folder, _scratch_stubs(folder), environment={"K": key})
        assert passed == expected, json.dumps([key, script])


def _outcome(condition: str, key: str) -> int:
    """The outcome of a condition on K; 0 is that it holds."""
    assert "$K" in condition, condition
    return int((key == "a") == ("!=" in condition))


def _scratch() -> Path:
    """One folder for all examples, since hypothesis runs many per test."""
    return _SCRATCH


@pytest.fixture(autouse=True, scope="module")
def _scratch_folder(tmp_path_factory: pytest.TempPathFactory, stubs: Path) -> None:
    global _SCRATCH, _STUBS
    _SCRATCH, _STUBS = tmp_path_factory.mktemp("scratch"), stubs


def _scratch_stubs(_folder: Path) -> Path:
    return _STUBS


_SCRATCH = Path()
_STUBS = Path()
