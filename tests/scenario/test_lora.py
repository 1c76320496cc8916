"""`training.lora`: target names of several libraries, error messages, and round trip."""

from collections.abc import Callable
from typing import Any

import pytest

from clustersim import simulate
from clustersim.common.dtypes import DType
from clustersim.model.lora import Lora, LoraTarget
from clustersim.results.memory_check import check
from clustersim.scenario import Scenario
from clustersim.scenario.changes.diff import changed_keys
from tests.sentences import parts

Refusal = Callable[..., str]
ATTENTION = (LoraTarget.Q, LoraTarget.K, LoraTarget.V, LoraTarget.O)
MLP = (LoraTarget.GATE, LoraTarget.UP, LoraTarget.DOWN)


def load_lora(mapping: dict[str, Any], *overrides: str) -> Lora | None:
    return Scenario.from_mapping(mapping, overrides).training.lora


@pytest.mark.parametrize(
    ("written", "targets"),
    [
        ("all", (*ATTENTION, *MLP)),
        ("[attention]", ATTENTION),
        ("[mlp, up]", MLP),
        ("[q_proj, v_proj, output_proj]", (LoraTarget.Q, LoraTarget.V, LoraTarget.O)),
        (
            "[linear_qkv, linear_proj, linear_fc1, linear_fc2]",
            (LoraTarget.QKV, LoraTarget.O, LoraTarget.GATE_UP, LoraTarget.DOWN),
        ),
    ],
)
def test_targets_accept_library_names(mapping: dict[str, Any], written: str, targets: tuple[LoraTarget, ...]) -> None:
    lora = load_lora(mapping, f"training.lora={{rank: 16, alpha: 32, targets: {written}}}")
    assert lora == Lora(16, targets, 32.0)


def test_lora_shorthands(mapping: dict[str, Any]) -> None:
    assert load_lora(mapping, "training.lora=8") == Lora(8, (*ATTENTION, *MLP), 32.0)
    assert load_lora(mapping, "training.lora=8", "training.lora=none") is None
    quantized = load_lora(mapping, "training.lora=8", "training.lora.base=nf4")
    assert quantized is not None and quantized.base is DType.NF4


def test_target_groups_depend_on_the_model(mapping: dict[str, Any]) -> None:
    lora = load_lora(mapping, "model=gpt3-1.3b", "training.sequence=2048", "training.lora={rank: 8, targets: mlp}")
    assert lora is not None and lora.targets == (LoraTarget.UP, LoraTarget.DOWN)


@pytest.mark.parametrize(
    ("lora", "sentence"),
    [
        ("{targets: [q]}", "training.lora.rank: is missing; write rank: 16"),
        ("0", "training.lora: 0 is too small; the smallest legal value is 1"),
        ("-4", "training.lora: -4 ... smallest ... 1"),
        ("{rank: 8, alpha: 0}", "training.lora.alpha: 0.0 ... above zero ... alpha / rank"),
        ("{rank: 8, alpha: twice}", "training.lora.alpha: 'twice' ... number (no unit, no quotes)"),
        ("false", "training.lora: false ... mapping ... {rank: 16, targets: all}, or none"),
        ("{rank: 8, dropout: 1.5}", "training.lora.dropout: 1.5 is more than all of it"),
        ("{rank: 8, targets: [q_prj]}", "training.lora.targets: 'q_prj' ... q_proj"),
        ("{rank: 8, targets: []}", "training.lora.targets: is empty ... all, attention, mlp, q, k"),
        ("{rank: 8, targets: [linear_qkv, q]}", "linear_qkv and q are both adapters of q; keep one of them"),
        ("{rank: 8, base: int4}", "training.lora.base: 'int4' is unknown; did you mean int8?"),
        ("{rank: 8, ranks: 9}", "training.lora.ranks: unknown key; did you mean rank"),
        # keys are 8 x 128 = 1,024 wide
        ("{rank: 1028, targets: [k]}", "training.lora.rank: 1028 ... 1024 inputs or outputs"),
        ("{rank: 6}", "training.lora.rank: 6 ... tp 4 ... rank 4 or 8"),
    ],
)
def test_invalid_lora_is_rejected_with_a_correction(refusal: Refusal, lora: str, sentence: str) -> None:
    assert parts(sentence).search(refusal(f"training.lora={lora}"))


def test_missing_target_lists_available_ones(refusal: Refusal) -> None:
    message = refusal("model=gpt3-1.3b", "training.sequence=2048", "training.lora={rank: 8, targets: [gate]}")
    assert parts(
        "training.lora.targets: gpt3-1.3b has no gate; it has q, k, v, linear_qkv, o, up, linear_fc1, down"
    ).search(message)


def test_lora_round_trip_and_changed_keys(mapping: dict[str, Any]) -> None:
    mapping |= {"cluster": {"name": "laptop", "gpus": 2}, "model": "llama-tiny", "layout": {"dp": 2}}
    mapping["training"] = {"sequence": 64, "global_batch": 4, "lora": {"rank": 8, "targets": ["q_proj", "mlp"]}}
    scenario = Scenario.from_mapping(mapping)
    reread = Scenario.from_mapping(simulate(scenario).to_json()["scenario"])
    assert reread == scenario and reread.training.lora is not None
    plain, wider = scenario.with_overrides("training.lora=none"), scenario.with_overrides("training.lora.rank=16")
    assert (
        plain.training.lora is None
        and plain.with_overrides("training.lora={rank: 8, targets: [q, mlp]}").training == scenario.training
    )
    (change,) = changed_keys(scenario, wider)
    assert (change.key, change.first, change.second) == ("training.lora.rank", 8, 16)


def test_lora_peak_memory_below_full_training(mapping: dict[str, Any]) -> None:
    """70 billion weights take 140 GB and 1,120 GB with their gradients and states; frozen in 4 bits some 37 GB."""
    mapping |= {"model": "llama3-70b", "cluster": {"name": "dgx-h100", "gpus": 1}, "layout": {}}
    mapping["training"] = {"sequence": 2048, "global_batch": 1, "recompute": "full"}
    peaks = [
        check(Scenario.from_mapping(mapping, [f"training.lora={lora}"])).peak_memory_bytes
        for lora in ("none", "16", "{rank: 16, base: nf4}")
    ]
    assert peaks[0] > 1120e9 > peaks[1] > 140e9
    assert 80e9 > peaks[2] > 37e9
