"""Weights: every format gives the same model; what is wrong is named before any big read."""

import json
import random

import pytest
import torch
from safetensors.torch import load_file, save_file
from torchtune.models.convert_weights import hf_to_tune, tune_to_meta
from torchtune.training import FullModelHFCheckpointer

from ppl_eval import UserError, shipped
from ppl_eval.checkpoint.checkpoint import Checkpoint
from ppl_eval.checkpoint.config_json import NOTHING
from ppl_eval.checkpoint.tensor_files import DistributedSource, FileSource
from ppl_eval.config.command_line import load as load_config
from ppl_eval.model.build import build_on_meta
from ppl_eval.model.check_names import check_names
from ppl_eval.model.load import Target, load
from ppl_eval.model.torchtune_decoder import decoder_of

STUDENT = shipped.embedded_path("tiny_student")
TEACHER = shipped.embedded_path("tiny_teacher")


def section(folder, **changes):
    return {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": str(folder),
        "checkpoint_files": None,
        "model_type": "LLAMA3_2",
        "output_dir": None,
        **changes,
    }


def meta_model(name="tiny_ppl_eval", dtype=torch.float32, **changes):
    node = load_config(["--config", name]).model
    return build_on_meta({**node, **changes}, dtype, NOTHING)


def loaded(node, model=None):
    model = meta_model() if model is None else model
    checkpoint = Checkpoint.open(node)
    check_names(decoder_of(model), checkpoint)
    load(checkpoint, [Target(decoder_of(model))], torch.device("cpu"))
    return dict(model.named_parameters())


@pytest.fixture(scope="module")
def expected():
    """torchtune's names, converted in one go."""
    weights = load_file(STUDENT / "model.safetensors")
    return hf_to_tune(weights, num_heads=8, num_kv_heads=4, dim=64)


@pytest.fixture
def student(tmp_path):
    folder = tmp_path / "student"
    folder.mkdir()
    for path in STUDENT.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def same(found, expected):
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor.to(found[name].dtype)), name


def test_one_safetensors_file(expected):
    same(loaded(section(STUDENT)), expected)


def test_shards_with_an_index(student, expected):
    weights = load_file(student / "model.safetensors")
    (student / "model.safetensors").unlink()
    names, index = sorted(weights), {}
    for number in range(3):
        file = f"model-{number + 1:05}-of-00003.safetensors"
        save_file({name: weights[name] for name in names[number::3]}, student / file)
        index |= dict.fromkeys(names[number::3], file)
    (student / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    same(loaded(section(student)), expected)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_bin_file(student, expected, legacy):
    weights = load_file(student / "model.safetensors")
    (student / "model.safetensors").unlink()
    torch.save(weights, student / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    same(loaded(section(student)), expected)


def test_weights_of_8_bits_in_a_bin_file_are_refused_as_in_safetensors(student):
    weights = load_file(student / "model.safetensors")
    (student / "model.safetensors").unlink()
    torch.save({**weights, UP: weights[UP].to(torch.float8_e4m3fn)}, student / "pytorch_model.bin")
    with pytest.raises(UserError, match=f"{UP} is float8_e4m3fn in the checkpoint: weights that"):
        loaded(section(student))


def test_a_pattern_of_files(student, expected):
    (student / "part-1-of-1.safetensors").symlink_to("model.safetensors")
    pattern = {"filename_format": "part-{}-of-{}.safetensors", "max_filename": "1"}
    same(loaded(section(student, checkpoint_files=pattern)), expected)


def test_torchtune_format(student, expected):
    torch.save(expected, student / "mine.pt")
    component = "torchtune.training.FullModelTorchTuneCheckpointer"
    node = section(student, _component_=component, checkpoint_files=["mine.pt"])
    same(loaded(node), expected)


def test_meta_format(student, expected):
    torch.save(tune_to_meta(expected), student / "consolidated.00.pth")
    component = "torchtune.training.FullModelMetaCheckpointer"
    node = section(student, _component_=component, checkpoint_files=["consolidated.00.pth"])
    same(loaded(node), expected)


@pytest.mark.parametrize("prefix", ["model", None])
def test_a_distributed_checkpoint(tmp_path, expected, prefix):
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    state = {prefix: dict(expected), "epoch": 3} if prefix else dict(expected)
    folder = tmp_path / "dist_epoch_7"
    save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
    (tmp_path / "dist_epoch_9").mkdir()  # unfinished: no metadata
    component = "torchtune.training.DistributedCheckpointer"
    for where in (folder, tmp_path):
        node = {"_component_": component, "checkpoint_dir": str(where), "output_dir": None}
        same(loaded(node), expected)
    with pytest.raises(UserError, match="holds no distributed checkpoint"):
        Checkpoint.open({**node, "checkpoint_dir": str(tmp_path / "dist_epoch_9")})
    (folder / ".metadata").write_bytes(b"x")
    with pytest.raises(UserError, match="dist_epoch_7 is no distributed checkpoint"):
        loaded(node)


class OwnCheckpointer:
    def __init__(self, checkpoint_dir, output_dir):
        self.folder, self.output_dir = checkpoint_dir, output_dir

    def load_checkpoint(self):
        weights = load_file(f"{self.folder}/model.safetensors")
        return {"model": hf_to_tune(weights, num_heads=8, num_kv_heads=4, dim=64)}


def own_checkpointer(name="OwnCheckpointer"):
    component = f"{__name__}.{name}"
    return {"_component_": component, "checkpoint_dir": str(STUDENT), "output_dir": None}


def test_a_checkpointer_of_ones_own(expected):
    same(loaded(own_checkpointer()), expected)


class Forgetful(OwnCheckpointer):
    def load_checkpoint(self):
        return super().load_checkpoint()["model"]


class Broken(OwnCheckpointer):
    def load_checkpoint(self):
        return self.no_such_attribute


def test_a_checkpointer_of_ones_own_that_gives_no_state_dict():
    with pytest.raises(
        UserError, match=r'load_checkpoint\(\) gives no state dict under the key "mo'
    ):
        loaded(own_checkpointer("Forgetful"))


def test_an_error_in_a_checkpointer_of_ones_own_keeps_its_traceback():
    """It is no mistake in the config, and one sentence would hide where it is."""
    with pytest.raises(AttributeError, match="no_such_attribute"):
        loaded(own_checkpointer("Broken"))


class FilesAreNamed(FullModelHFCheckpointer):
    pass


def test_a_checkpointer_of_ones_own_is_given_the_files_that_are_found(expected):
    component = f"{__name__}.FilesAreNamed"
    same(loaded(section(STUDENT, _component_=component)), expected)


def test_a_section_without_checkpoint_files_reads_the_files_of_the_folder(expected):
    """It read none, and said that every weight was missing."""
    node = section(STUDENT)
    del node["checkpoint_files"]
    same(loaded(node), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_another_dtype_and_the_rotary_table_in_fp32(dtype, expected):
    model = meta_model(dtype=dtype)
    found = loaded(section(STUDENT), model)
    same(found, expected)
    assert {tensor.dtype for tensor in found.values()} == {dtype}
    caches = {name: b.dtype for name, b in model.named_buffers() if name.endswith("cache")}
    assert set(caches.values()) == {torch.float32}


def test_the_parameters_are_no_view_of_the_file(student, expected):
    model = meta_model()
    loaded(section(student), model)
    with (student / "model.safetensors").open("r+b") as file:
        file.seek(2000)
        file.write(bytes(600_000))
    same(dict(model.named_parameters()), expected)


def spoiled(student, change):
    weights = load_file(student / "model.safetensors")
    change(weights)
    save_file(weights, student / "model.safetensors")
    return section(student)


UP = "model.layers.1.mlp.up_proj.weight"
EMBEDDING = "model.embed_tokens.weight"


def never_read(*args):
    raise AssertionError("a weight was read before the names were checked")


@pytest.mark.parametrize(
    ("change", "model", "message"),
    [
        (lambda w: w.pop(UP), {}, "1 missing from the checkpoint: layers.1.mlp.w3.weight"),
        (
            lambda w: w.update({UP.replace("1", "7"): torch.ones(1)}),
            {},
            "1 unknown to the model: layers.7.mlp.w3.weight",
        ),
        (
            lambda w: w.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}),
            {},
            "1 unknown to the model: model.layers.0.self_attn.q_proj.bias",
        ),
        (
            lambda w: [w.pop(key) for key in list(w) if "mlp" in key],
            {},
            r"9 missing from the checkpoint: (\S+; ){4}\S+ and 4 more",
        ),
        (
            lambda w: None,
            {"vocab_size": 512},
            r"1 of another shape: tok_embeddings.weight is \(509, 64\) in the checkpoint and"
            r" \(512, 64\)",
        ),
        (
            lambda w: None,
            {"tie_word_embeddings": False},
            "1 missing from the checkpoint: output.weight",
        ),
        (
            lambda w: w.update({"lm_head.weight": torch.ones(512, 64)}),
            {},
            "1 unknown to the model: output.weight",
        ),
        (
            lambda w: w.update({UP: torch.ones(160, 64, dtype=torch.int8)}),
            {},
            f"{UP} is int8 in the checkpoint: weights that are quantised are not",
        ),
        (
            lambda w: w.update({"model.layers.0.self_attn.k_proj.weight": torch.ones(30, 64)}),
            {},
            r"k_proj.weight is \(30, 64\) in the checkpoint, which does not go with the heads",
        ),
    ],
)
def test_what_does_not_match_is_listed_before_any_read(
    student, monkeypatch, change, model, message
):
    node = spoiled(student, change)
    monkeypatch.setattr(FileSource, "tensors", never_read)
    with pytest.raises(UserError, match=message):
        loaded(node, meta_model(**model))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_weight_that_is_no_number_is_named(student, value):
    node = spoiled(student, lambda w: w[UP].view(-1)[77].fill_(value))
    with pytest.raises(UserError, match=f"{UP} holds NaN or infinite"):
        loaded(node)


def test_a_number_that_fp16_cannot_hold(student):
    node = spoiled(student, lambda w: w[UP].view(-1)[77].fill_(1e6))
    loaded(node)
    with pytest.raises(UserError, match="dtype=fp16 cannot hold them"):
        loaded(node, meta_model(dtype=torch.float16))


def test_the_copy_of_a_tied_head(student, expected):
    """A copy with the same values is accepted, one with others is not."""
    node = spoiled(student, lambda w: w.update({"lm_head.weight": w[EMBEDDING].clone()}))
    same(loaded(node), expected)
    node = spoiled(student, lambda w: w["lm_head.weight"].view(-1)[-1].add_(1))
    with pytest.raises(UserError, match="ties its head to the embedding, but the checkpoint has"):
        loaded(node)


def test_a_tensor_in_two_files(student):
    (student / "again.safetensors").write_bytes((student / "model.safetensors").read_bytes())
    node = section(student, checkpoint_files=["model.safetensors", "again.safetensors"])
    with pytest.raises(UserError, match=r"is in model.safetensors and in again.safetensors: name"):
        loaded(node)


@pytest.mark.parametrize("content", [b"", b"x" * 100, None])
def test_files_that_are_cut_short(student, content):
    path = student / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10] if content is None else content)
    with pytest.raises(UserError, match="model.safetensors cannot be read as safetensors"):
        loaded(section(student))


def damaged(content, count=120):
    """Copies that are cut short, overwritten, or random, the same in every run."""
    chance = random.Random(1)
    for number in range(count):
        copy = bytearray(content)
        start = chance.randrange(len(copy))
        if number % 3 == 0:
            copy = copy[:start]
        elif number % 3 == 1:
            copy[start : start + chance.randrange(30)] = chance.randbytes(chance.randrange(10))
        else:
            copy = bytearray(chance.randbytes(chance.randrange(300)))
        yield bytes(copy)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_damaged_pickle_is_told_in_a_sentence(tmp_path, legacy):
    """Unpickling it raises whatever it may."""
    path = tmp_path / "pytorch_model.bin"
    weights = {f"w{number}": torch.ones(7, 5) for number in range(4)}
    torch.save(weights, path, _use_new_zipfile_serialization=not legacy)
    refused = 0
    for content in damaged(path.read_bytes()):
        path.write_bytes(content)
        try:
            FileSource([path])
        except UserError:
            refused += 1
    assert refused > 80


def test_damaged_metadata_of_a_distributed_checkpoint(tmp_path):
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    save({"w": torch.ones(7, 5)}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    path, refused = tmp_path / ".metadata", 0
    for content in damaged(path.read_bytes()):
        path.write_bytes(content)
        try:
            DistributedSource(tmp_path)
        except UserError:
            refused += 1
    assert refused > 80


class Unsafe:
    def __reduce__(self):
        return print, ("executed",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"a": Unsafe()}, "pytorch_model.bin cannot be loaded with weights_only=True"),
        ({"a": 5}, "pytorch_model.bin is no state dict of tensors by name"),
        ([1, 2], "pytorch_model.bin is no state dict of tensors by name"),
    ],
)
def test_pickles_that_are_no_weights(student, content, message, capsys):
    (student / "model.safetensors").unlink()
    torch.save(content, student / "pytorch_model.bin")
    with pytest.raises(UserError, match=message) as error:
        loaded(section(student))
    assert "\n" not in str(error.value)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("component", "advice"),
    [
        (
            "FullModelMetaCheckpointer",
            "the names are Hugging Face's: use .*FullModelHFCheckpointer",
        ),
        ("FullModelTorchTuneCheckpointer", "the names are Hugging Face's: use"),
    ],
)
def test_the_wrong_checkpointer_is_refused_with_the_right_one(component, advice):
    node = section(STUDENT, _component_=f"torchtune.training.{component}")
    with pytest.raises(UserError, match=advice):
        loaded(node)


def test_a_torchtune_file_with_the_hugging_face_checkpointer(student, expected):
    save_file(expected, student / "model.safetensors")
    with pytest.raises(UserError, match=r"torchtune's: use .*FullModelTorchTuneCheckpointer"):
        loaded(section(student))


def test_a_family_that_is_no_text_decoder(student):
    with pytest.raises(UserError, match="model_type is CLIP_TEXT, but text decoders are one of"):
        loaded(section(student, model_type="CLIP_TEXT"))


def test_config_json_without_sizes(student):
    (student / "config.json").write_text("{}")
    with pytest.raises(UserError, match="does not give num_attention_heads and hidden_size"):
        loaded(section(student))
    (student / "config.json").unlink()
    with pytest.raises(UserError, match=r"there is no .*config.json, which a Hugging Face"):
        loaded(section(student))


def test_the_dtype_of_the_checkpoint():
    assert check_names(decoder_of(meta_model()), Checkpoint.open(section(STUDENT))) == "float32"
