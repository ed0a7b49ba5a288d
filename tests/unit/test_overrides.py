"""What key=value and ~key do to the content of a config file."""

import itertools

import pytest

from ppl_eval import UserError
from ppl_eval.config.overrides import apply

values = {
    # text keys: as typed
    "output_dir=1e5": "1e5",
    "output_dir=no": "no",
    "output_dir=1_000": "1_000",
    "output_dir=007": "007",
    "output_dir=2024-05-01": "2024-05-01",
    "output_dir=a=b": "a=b",
    "output_dir=a: b": "a: b",
    "output_dir=a #b": "a #b",
    "output_dir=[a]": "[a]",
    "output_dir=C:\\new": "C:\\new",
    "output_dir='null'": "null",
    'output_dir="a\\tb"': "a\tb",
    "output_dir=''": "",
    "output_dir=é 中文": "é 中文",
    "output_dir=null": None,
    "output_dir=None": None,
    "protocol.separator= ": " ",
    # the others: as YAML has it, text without quotes as typed
    "seed=5": 5,
    "seed=1_000": 1000,
    "model.norm_eps=1e-5": 1e-5,
    "save=yes": True,
    "save=false": False,
    "save=None": None,
    "dataset.data_files=[a.txt, 'b c.txt']": ["a.txt", "b c.txt"],
    "dataset.data_files=*.jsonl": "*.jsonl",
    "dataset.data_files='*.jsonl'": "*.jsonl",
    "dataset.data_files=a #b.txt": "a #b.txt",
    "dataset.data_files=a: b.txt": "a: b.txt",
    "dataset.data_files=x&y!z@%|": "x&y!z@%|",
    "dataset.data_files=C:\\new": "C:\\new",
    "dataset.revision='007'": "007",
    "dataset.path=${oc.env:HOME}/x": "${oc.env:HOME}/x",
    "protocol={name: concat, max_seq_len: 64}": {"name": "concat", "max_seq_len": 64},
}


@pytest.mark.parametrize("argument", values)
def test_values(argument):
    content = {}
    apply(content, [argument])
    for part in argument.split("=")[0].split("."):
        content = content[part]
    assert content == values[argument]


def test_the_spelling_of_numbers_is_kept():
    spelled = apply({}, ["a.b=1e5", "a.c=no", "a.d=x", "output_dir=1e5", "seed=3"])
    assert spelled == {"a.b": "1e5", "a.c": "no", "seed": "3"}


def content():
    return {
        "dataset": {"_component_": "ppl_eval.data.text_corpus", "column": "text", "source": None},
        "metric_logger": {"_component_": "a.b", "log_dir": "x"},
        "protocol": {"name": "document", "stride": 5},
        "model": {},
        "tokenizer": None,
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": "x",
            "model_type": "LLAMA3",
            "safe_serialization": True,
        },
    }


sections = {
    "another component drops the keys of the old one": (
        ["dataset=my.data", "dataset.words=3"],
        {"dataset": {"_component_": "my.data", "words": 3}},
    ),
    "spelled out": (
        ["dataset._component_=my.data", "dataset.column=c"],
        {"dataset": {"_component_": "my.data", "column": "c"}},
    ),
    "the same component keeps them": (
        ["metric_logger=a.b", "metric_logger.more=1"],
        {"metric_logger": {"_component_": "a.b", "log_dir": "x", "more": 1}},
    ),
    "a key of the old one may be removed as well": (
        ["metric_logger=c.d", "~metric_logger.log_dir"],
        {"metric_logger": {"_component_": "c.d"}},
    ),
    "an empty section": (
        ["model=m.b", "model.x=1", "tokenizer.path=p", "tokenizer=t.b"],
        {"model": {"_component_": "m.b", "x": 1}, "tokenizer": {"_component_": "t.b", "path": "p"}},
    ),
    "an absent section": (
        ["teacher_model.x=1", "teacher_model=m.b"],
        {"teacher_model": {"_component_": "m.b", "x": 1}},
    ),
    "a checkpoint is the same for another checkpointer": (
        ["checkpointer=torchtune.training.FullModelMetaCheckpointer"],
        {
            "checkpointer": {
                "_component_": "torchtune.training.FullModelMetaCheckpointer",
                "checkpoint_dir": "x",
                "model_type": "LLAMA3",
            }
        },
    ),
    "a mapping replaces a section": (
        ["metric_logger={_component_: c.d, y: 1}"],
        {"metric_logger": {"_component_": "c.d", "y": 1}},
    ),
    "keys of it follow": (
        ["protocol={name: concat}", "protocol.stride=7"],
        {"protocol": {"name": "concat", "stride": 7}},
    ),
    "a list replaces a section": (
        ["dataset=[{name: a, data_files: x}, {name: b}]"],
        {"dataset": [{"name": "a", "data_files": "x"}, {"name": "b"}]},
    ),
    "null": (["metric_logger=null", "model=null"], {"metric_logger": None, "model": {}}),
    "removed": (["~dataset"], {}),
    "removed and given": (["~dataset", "dataset.x=1"], {"dataset": {"x": 1}}),
}


@pytest.mark.parametrize("case", sections)
def test_sections_in_any_order(case):
    arguments, expected = sections[case]
    for order in itertools.permutations(arguments):
        changed = content()
        apply(changed, order)
        keys = {argument.lstrip("~").split("=")[0].split(".")[0] for argument in arguments}
        assert {key: changed[key] for key in keys if key in changed} == expected
        kept = {key: value for key, value in content().items() if key not in keys}
        assert {key: changed[key] for key in kept} == {
            **kept,
            **({"tokenizer": {}} if "tokenizer" in kept else {}),
        }


def test_the_later_of_a_value_and_a_removal_wins():
    content = {"dataset": {"_component_": "a.b", "split": "test"}}
    apply(content, ["dataset.split=train", "~dataset.split"])
    assert content == {"dataset": {"_component_": "a.b"}}
    apply(content, ["dataset={_component_: a.b, split: x, column: y}", "~dataset.column"])
    assert content == {"dataset": {"_component_": "a.b", "split": "x"}}
    apply(content, ["~dataset.split", "dataset.split=train"])
    assert content["dataset"]["split"] == "train"


def test_the_last_of_two_values_wins():
    changed = content()
    apply(changed, ["dataset=a.b", "seed=1", "dataset=c.d", "seed=2"])
    assert (changed["seed"], changed["dataset"]) == (2, {"_component_": "c.d"})


@pytest.mark.parametrize("argument", ["dataset.data_files=z", "dataset.2.name=z"])
def test_a_list_is_given_as_a_whole(argument):
    changed = {"dataset": [{"name": "a"}, {"name": "b"}]}
    with pytest.raises(
        UserError, match="dataset is a list of 2, not .*: give the whole of dataset"
    ):
        apply(changed, [argument])
