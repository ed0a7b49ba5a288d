"""A model without some layers is what transformers computes once they are deleted."""

import json
import shutil
import sys

import families
import pytest
import torch
from safetensors.torch import load_file

from ppl_eval import UserError, cli
from ppl_eval.commands.drop_layers import drop_layers
from ppl_eval.shipped import embedded_path

TEACHER = embedded_path("tiny_teacher")
LENGTH = 40  # longer than the windows of families.py
ONE_FILE, FILE_PER_TENSOR = "1GB", "1KB"


def logits(model):
    torch.manual_seed(0)
    tokens = torch.randint(3, 500, (2, LENGTH))
    with torch.no_grad():
        return model.eval()(tokens, use_cache=False).logits


def loaded(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


@pytest.fixture
def teacher(tmp_path):
    """A copy of the embedded teacher, to be spoilt."""
    return shutil.copytree(TEACHER, tmp_path / "teacher")


@pytest.mark.parametrize(("dropped", "kept"), [([3, 1], [0, 2, 4, 5]), ([0, 5], [1, 2, 3, 4])])
def test_logits_are_those_of_the_teacher_without_these_layers(dropped, kept, tmp_path):
    model = loaded(TEACHER)
    assert drop_layers(TEACHER, tmp_path / "student", dropped) == kept
    whole = logits(model)
    for number in sorted(dropped, reverse=True):
        del model.model.layers[number]
    assert torch.equal(logits(loaded(tmp_path / "student")), logits(model))
    assert not torch.allclose(logits(model), whole)


@pytest.mark.parametrize("size", [ONE_FILE, FILE_PER_TENSOR])
@pytest.mark.parametrize("dropped", [0, 1, 2])
@pytest.mark.parametrize(
    "name",
    [
        "llama3_2 (tied, scaled rope)",
        "qwen2 (window of 9 from layer 1 on)",
        "gemma2 (caps 2 and 4, window of 11)",
        "phi3 (window of 13)",
    ],
)
def test_every_family_and_number_of_files(name, dropped, size, tmp_path):
    """Of three layers one goes; what windows the others have goes with them."""
    model = families.reference(name)
    model.save_pretrained(tmp_path / "teacher", max_shard_size=size)
    drop_layers(tmp_path / "teacher", tmp_path / "student", [dropped])
    student = loaded(tmp_path / "student")

    del model.model.layers[dropped]
    if hasattr(model.config, "layer_types"):
        del model.config.layer_types[dropped]
    assert torch.equal(logits(student), logits(model))
    assert student.num_parameters() == model.num_parameters()
    files = {path.name for path in (tmp_path / "student").glob("*.safetensors")}
    index = tmp_path / "student" / "model.safetensors.index.json"
    if size == ONE_FILE:
        assert files == {"model.safetensors"}
        assert not index.exists()
    else:
        content = json.loads(index.read_text())
        assert files == set(content["weight_map"].values())
        assert content["metadata"]["total_size"] == sum(
            tensor.nbytes
            for file in files
            for tensor in load_file(tmp_path / "student" / file).values()
        )


def test_all_but_weights_and_the_number_of_layers_stays(teacher, tmp_path):
    (teacher / "LICENSE").write_text("free")
    (teacher / "adapter_config.json").write_text("{}")
    (teacher / "consolidated.00.pth").write_bytes(b"large")
    (teacher / "original").mkdir()
    drop_layers(teacher, tmp_path / "a" / "student", [2])
    student = tmp_path / "a" / "student"
    assert {path.name for path in student.iterdir()} == {
        *("config.json", "model.safetensors", "LICENSE"),
        *("tokenizer.json", "tokenizer_config.json"),
    }
    for name in ("tokenizer.json", "tokenizer_config.json", "LICENSE"):
        assert (student / name).read_bytes() == (teacher / name).read_bytes()
    config = json.loads((teacher / "config.json").read_text())
    assert json.loads((student / "config.json").read_text()) == {**config, "num_hidden_layers": 5}


def without_config(folder):
    (folder / "config.json").unlink()


def other_config(**changes):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return change


def in_bin(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def in_bin_with_an_adapter(folder):
    shutil.copyfile(folder / "model.safetensors", folder / "adapter_model.safetensors")
    in_bin(folder)


def cut(folder):
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000])


@pytest.mark.parametrize(
    ("spoil", "dropped", "message"),
    [
        (None, [1, 6], "has no layer 6: it has 6 layers, from 0"),
        (None, [-1], "has no layer -1"),
        (None, range(6), "every layer of .* would go: leave at least one"),
        (without_config, [1], "there is no .*config.json: the teacher must be a"),
        (other_config(num_hidden_layers=None), [1], "has no num_hidden_layers"),
        (other_config(num_hidden_layers=7), [1], "weights of 6 layers, but .* is 7"),
        (other_config(num_hidden_layers=5), [1], "weights of 6 layers, but .* is 5"),
        (other_config(layer_types=["full_attention"] * 4), [0], "has 4 layers in layer_types and"),
        (in_bin, [1], "no weights in .safetensors files"),
        (in_bin_with_an_adapter, [1], "in pytorch_model.bin: only .safetensors files do"),
        (cut, [1], "cannot be read as safetensors"),
    ],
)
def test_what_cannot_be_is_said_and_nothing_is_written(spoil, dropped, message, teacher, tmp_path):
    if spoil:
        spoil(teacher)
    with pytest.raises(UserError, match=message):
        drop_layers(teacher, tmp_path / "student", dropped)
    assert not (tmp_path / "student").exists()


def test_a_folder_in_use_is_left_alone(tmp_path):
    (tmp_path / "empty").mkdir()
    drop_layers(TEACHER, tmp_path / "empty", [1])
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "empty").iterdir()}
    with pytest.raises(UserError, match="is there and not empty"):
        drop_layers(TEACHER, tmp_path / "empty", [2])
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "empty").iterdir()}
    with pytest.raises(UserError, match="is there and not empty"):
        drop_layers(TEACHER, tmp_path / "empty" / "config.json", [2])


def test_command(tmp_path, monkeypatch, capsys):
    student = tmp_path / "student"
    monkeypatch.setattr(
        sys, "argv", ["ppl-eval", "drop-layers", str(TEACHER), str(student), "1", "3"]
    )
    cli.main()
    assert capsys.readouterr().out == f"{student}: 4 layers, those that were 0, 2, 4, 5\n"
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 1
    assert capsys.readouterr().err.count("\n") == 1
