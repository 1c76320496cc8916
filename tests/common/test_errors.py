"""Error messages: no Python terms, and suggestions of the nearest name."""

import pickle

import pytest

from clustersim.common.errors import combined_error, format_value, problems_of, suggest_nearest


@pytest.mark.parametrize(
    ("word", "choices", "meant"),
    [
        ("BF16", ["bf16", "fp16"], "did you mean bf16?"),
        ("fspd", ["ddp", "fsdp"], "did you mean fsdp?"),
        ("oversub", ["oversubscription", "uber"], "did you mean oversubscription?"),  # a prefix before a similar name
        ("h100", ["h100-pcie", "h100-sxm", "h200"], "did you mean h100-pcie or h100-sxm?"),
        ("a.tp", ["a.tp_size", "b.tp"], "did you mean a.tp_size?"),  # keys of the same section before others
        ("c.tp", ["a.tp", "b.pp"], "did you mean a.tp?"),
        ("gpt3-2.7", ["gpt3-1.3b", "gpt3-2.7b"], "did you mean gpt3-2.7b?"),  # a name with a dot is no key path
        ("x", ["b", "xanthan"], "choose one of b, xanthan"),  # one letter is no prefix
    ],
)
def test_the_nearest_name_is_suggested(word: str, choices: list[str], meant: str) -> None:
    assert suggest_nearest(word, choices) == meant


def test_names_elsewhere_are_matched_but_not_listed() -> None:
    assert suggest_nearest("tp", ["model"], unlisted=["layout.tp"]) == "did you mean layout.tp?"
    assert suggest_nearest("zz", ["model"], unlisted=["layout.tp"]) == "choose one of model"


def test_a_long_list_of_choices_is_left_to_its_command() -> None:
    names = [f"name{index}" for index in range(20)]
    assert suggest_nearest("zzz", names, listed_by="list names").endswith("list names lists all")
    assert suggest_nearest("zzz", names[:3], listed_by="list names") == "choose one of name0, name1, name2"
    assert "(or 16 more)" in suggest_nearest("name", names)


def test_several_problems_survive_pickling() -> None:
    error = combined_error("plan.yaml", ["a: is missing", "b: is empty"])
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert problems_of(error) == ("plan.yaml: a: is missing", "plan.yaml: b: is empty")
    assert str(combined_error("plan.yaml", ["a: is missing"])) == "plan.yaml: a: is missing"


def test_values_are_formatted_as_in_yaml_and_truncated() -> None:
    assert format_value({"a": None, "b": [True, 1.5]}) == "{'a': nothing, 'b': [true, 1.5]}"
    recursive: list[object] = []
    recursive.append(recursive)
    assert len(format_value(recursive)) <= 60
    assert len(format_value("x" * 1000)) <= 60
