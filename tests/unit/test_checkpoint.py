"""Which files, what identifies them, and what does not go together."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from ppl_eval import UserError, fingerprint, shipped
from ppl_eval.checkpoint.checkpoint import Checkpoint
from ppl_eval.checkpoint.weight_files import find_weight_files
from ppl_eval.config.command_line import load
from ppl_eval.evaluation import preflight


@pytest.fixture
def files(tmp_path):
    """Put empty files into a folder and find the weights among them."""

    def find(*names, index=None):
        for name in names:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).touch()
        for name, shards in (index or {}).items():
            weights = {f"w{n}": shard for n, shard in enumerate(shards)}
            (tmp_path / name).write_text(json.dumps({"weight_map": weights}))
        return find_weight_files(tmp_path)

    return find


SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
BINS = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
INDEX = "model.safetensors.index.json"
OTHERS = [
    "adapter_model.safetensors",
    "adapter_model.bin",
    "consolidated.safetensors",
    "consolidated.00.pth",
    "original/consolidated.00.pth",
    "original/model.safetensors",
    "optimizer.bin",
    "training_args.bin",
]


@pytest.mark.parametrize(
    "found", [["model.safetensors"], SHARDS, ["pytorch_model.bin"], BINS, ["model_v2.safetensors"]]
)
def test_weights_are_found_and_nothing_else(files, found):
    assert files(*found, *OTHERS) == found


def test_the_index_comes_first(files):
    assert files(*SHARDS, "model.safetensors", index={INDEX: SHARDS}) == SHARDS
    assert files("strange.safetensors", index={INDEX: ["strange.safetensors"]}) == [
        "strange.safetensors"
    ]


def test_safetensors_come_before_bin(files):
    assert files(*BINS, "pytorch_model.bin", "model.safetensors") == ["model.safetensors"]


def test_one_file_is_a_whole_model_whatever_lies_beside_it(files):
    assert files("model.safetensors", "model_old.safetensors") == ["model.safetensors"]


@pytest.mark.parametrize(
    "names", [["model_a.safetensors", "model_b.safetensors"], [*SHARDS[:1], "model_b.safetensors"]]
)
def test_files_that_are_no_set_are_not_merged(files, names):
    with pytest.raises(UserError, match="several files of weights, no index, and they are not"):
        files(*names)


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        ([f"model-0000{n}-of-00003.safetensors" for n in (1, 3)], "model-00002-of-00003.saf"),
        (["model-00001-of-00002.safetensors"], "model-00002-of-00002.safetensors"),
        (["pytorch_model-00002-of-00002.bin"], "pytorch_model-00001-of-00002.bin"),
    ],
)
def test_a_set_that_lacks_a_shard(files, names, missing):
    message = f"{names[0]} is one of [23] files of a model, and {missing}.* is missing: is the down"
    with pytest.raises(UserError, match=message):
        files(*names)


def test_one_shard_of_two_by_name(tmp_path):
    (tmp_path / "ft-model-00001-of-00002.bin").touch()
    names = "checkpointer.checkpoint_files=[ft-model-00001-of-00002.bin]"
    config = load(["--config", "tiny_ppl_eval", f"checkpointer.checkpoint_dir={tmp_path}", names])
    with pytest.raises(UserError, match="ft-model-00002-of-00002.bin is missing"):
        Checkpoint.open(config.checkpointer)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 538090408\n"


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"]
)
def test_a_pointer_of_git_lfs_is_called_one(student, name):
    (student / name).write_text(POINTER)
    args = ["--config", "auto_ppl_eval", f"checkpoint_dir={student}", "dataset.data_files=x"]
    with pytest.raises(UserError, match=f"{name} is a git-lfs pointer, not the file itself: run"):
        preflight.prepare(load(args))


@pytest.mark.parametrize("config", ["auto_ppl_eval", "tiny_ppl_eval"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{}/model.safetensors", "which is a file: give its folder, {}$"),
        ("org/model-1B", "no such folder; if it is a model of the hub, `tune download org/model"),
        ("/nowhere/model-1B", "no such folder$"),
    ],
)
def test_a_checkpoint_dir_that_is_no_folder(student, config, name, message):
    args = ["--config", config, f"checkpoint_dir={name.format(student)}", "dataset.data_files=x"]
    with pytest.raises(UserError, match=message.format(student)):
        preflight.prepare(load(args))


@pytest.mark.parametrize(
    ("name", "dtype", "method"),
    [
        ("model.layers.0.mlp.up_proj.qweight", torch.int32, " by GPTQ or AWQ"),
        ("model.layers.0.mlp.up_proj.weight_scale_inv", torch.float32, " by FP8"),
        ("model.layers.0.mlp.up_proj_blocks", torch.uint8, " by MXFP4"),
        ("model.layers.0.mlp.up_proj.SCB", torch.float32, " by bitsandbytes"),
        ("model.layers.0.mlp.up_proj.more", torch.float32, ""),
    ],
)
def test_quantised_weights_without_a_word_in_config_json(student, name, dtype, method):
    weights = load_file(student / "model.safetensors")
    key = "model.layers.0.mlp.up_proj.weight"
    weights |= {key: weights[key].to(torch.int8), name: torch.ones(4, dtype=dtype)}
    save_file(weights, student / "model.safetensors")
    args = ["--config", "auto_ppl_eval", f"checkpoint_dir={student}", "dataset.data_files=x"]
    with pytest.raises(UserError, match=f"weights that are quantised{method} are not evaluated"):
        preflight.prepare(load(args))


def test_a_folder_of_gguf_files(tmp_path):
    (tmp_path / "model.Q4_K.gguf").touch()
    with pytest.raises(UserError, match="has GGUF files only, which are not read"):
        find_weight_files(tmp_path)


def test_an_index_without_its_files_gives_way_to_others(files):
    """`tune download` leaves out *.safetensors by default, and keeps their index."""
    bins = {"pytorch_model.bin.index.json": BINS}
    assert files(*BINS, index={INDEX: SHARDS, **bins}) == BINS


def test_an_index_with_some_of_its_files_is_an_incomplete_download(files):
    with pytest.raises(UserError, match=f"names files that are not there: {SHARDS[1]}: is the"):
        files(SHARDS[0], "pytorch_model.bin", index={INDEX: SHARDS})


@pytest.mark.parametrize(
    "index", ["[]", "{}", '{"weight_map": {"a": null}}', "{", '{"weight_map": 1}']
)
def test_an_unreadable_index(files, tmp_path, index):
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(UserError, match=r"index.json (is not|holds a list)"):
        files("model.safetensors")


def test_no_folder_and_no_weights(files, tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        find_weight_files(tmp_path / "nowhere")
    with pytest.raises(UserError, match="has no weights: neither"):
        files(*(name for name in OTHERS if not name.startswith("adapter")))
    with pytest.raises(UserError, match="names files that are not there"):
        files(index={INDEX: SHARDS})
    with pytest.raises(UserError, match=f"holds an adapter.*set adapter.dir={tmp_path}, and check"):
        files(*OTHERS)


def test_weights_in_a_folder_of_an_epoch(tmp_path):
    """What torchtune's recipes write lies one level deeper."""
    for epoch in ("epoch_0", "epoch_1"):
        (tmp_path / epoch).mkdir()
        (tmp_path / epoch / "model-00001-of-00001.safetensors").touch()
        os.utime(tmp_path / epoch, (0, int(epoch[-1])))
    with pytest.raises(UserError, match=r"did you mean checkpoint_dir=.*epoch_1\?"):
        find_weight_files(tmp_path)


@pytest.fixture
def student(tmp_path):
    folder = tmp_path / "student"
    folder.mkdir()
    for path in shipped.embedded_path("tiny_student").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_the_fingerprint_of_files_sees_every_tensor(student):
    path = student / "model.safetensors"
    weights = load_file(path)
    first = fingerprint.of_files([path])
    for name in weights:
        changed = {**weights, name: weights[name] + 1e-3}
        save_file(changed, path, metadata={"format": "pt"})
        assert fingerprint.of_files([path]) != first, name
    save_file(weights, path, metadata={"format": "pt"})
    assert fingerprint.of_files([path]) == first
    path.rename(student / "other.safetensors")
    assert fingerprint.of_files([student / "other.safetensors"]) == first


def test_the_fingerprint_of_other_files(tmp_path):
    path = tmp_path / "w.bin"
    seen = set()
    for content in (b"", b"a", b"b", bytes(9000), bytes(8999) + b"x", b"not safetensors " * 9):
        path.write_bytes(content)
        seen |= {fingerprint.of_files([path]), fingerprint.of_files([path])}
    path.with_suffix(".safetensors").write_bytes(b"not safetensors " * 9)
    seen.add(fingerprint.of_files([path.with_suffix(".safetensors")]))
    assert len(seen) >= 6


def model_fingerprint(*overrides):
    config = load(["--config", "tiny_ppl_eval", *overrides])
    return Checkpoint.open(config.checkpointer).fingerprint(config.model)


def test_the_fingerprint_of_a_model(student):
    here = f"checkpointer.checkpoint_dir={student}"
    first = model_fingerprint()
    assert model_fingerprint(here) == first
    assert model_fingerprint("model.rope_base=20000") != first
    assert model_fingerprint("checkpointer.model_type=QWEN2") != first
    config = json.loads((student / "config.json").read_text())
    (student / "config.json").write_text(json.dumps({**config, "num_attention_heads": 4}))
    assert model_fingerprint(here) != first


bad_sections = {
    "adapter_checkpoint='a.pt'": "adapter_checkpoint is 'a.pt', but a checkpointer reads full",
    "recipe_checkpoint='a.pt'": "recipe_checkpoint is 'a.pt'",
    "should_load_recipe_state=True": "should_load_recipe_state is True",
    "checkpoint_dir=None": "checkpointer.checkpoint_dir is None, but it is the folder",
    "checkpoint_dir=5": "checkpointer.checkpoint_dir is 5",
    "checkpoint_files=5": "checkpoint_files is 5, but it is a list of names",
    "checkpoint_files=[5]": r"checkpoint_files is \[5\]",
    "checkpoint_files=['x.safetensors']": "lacks weight files that are asked for: x.safetensors",
    "output_dir=5": "output_dir is 5",
    "model_type=7": "model_type is 7, but it is one of",
}


@pytest.mark.parametrize("change", bad_sections)
def test_a_checkpointer_section_that_cannot_be(change):
    node = {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": str(shipped.embedded_path("tiny_student")),
        "checkpoint_files": None,
        "model_type": "LLAMA3_2",
        "output_dir": None,
    }
    key, value = change.split("=")
    with pytest.raises(UserError, match=bad_sections[change]):
        Checkpoint.open({**node, key: eval(value)})
