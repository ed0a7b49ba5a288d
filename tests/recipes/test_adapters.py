"""Adapters through the recipe: which folder means what, and the numbers of merged weights.

How they are read is held against torchtune and PEFT in tests/unit and tests/distributed.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torchtune.models.llama3_2 import lora_llama3_2
from torchtune.modules.peft import get_adapter_params, get_merged_lora_ckpt
from torchtune.training import FullModelHFCheckpointer

from ppl_eval import shipped

BASE = shipped.embedded_path("tiny_student")
LORA = {
    "lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"],
    "apply_lora_to_mlp": True,
    "lora_rank": 4,
    "lora_alpha": 16,
}
SHAPE = {
    "vocab_size": 509,
    "num_layers": 3,
    "num_heads": 8,
    "num_kv_heads": 4,
    "embed_dim": 64,
    "intermediate_dim": 160,
    "max_seq_len": 256,
    "rope_base": 10000,
    "scale_factor": 1,
    "norm_eps": 1e-5,
}


def trained(folder, *, use_dora):
    """What torchtune's LoRA recipes write of the embedded student: epoch_0 with merged weights,
    index and adapter, as its checkpointer saves them."""
    torch.manual_seed(3)
    model = lora_llama3_2(**SHAPE, **LORA, use_dora=use_dora)
    base = FullModelHFCheckpointer(
        checkpoint_dir=str(BASE),
        checkpoint_files=["model.safetensors"],
        model_type="LLAMA3_2",
        output_dir=str(folder),
    )
    model.load_state_dict(base.load_checkpoint()["model"], strict=False)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_b.weight"):
            torch.nn.init.normal_(parameter, std=0.03)
    if use_dora:
        for module in model.modules():
            if hasattr(module, "initialize_dora_magnitude"):
                module.initialize_dora_magnitude()
                module.magnitude.data.mul_(1 + 0.2 * torch.rand_like(module.magnitude))
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    merged = get_merged_lora_ckpt(state, rank=LORA["lora_rank"], alpha=LORA["lora_alpha"])
    settings = {
        "r": LORA["lora_rank"],
        "lora_alpha": LORA["lora_alpha"],
        "target_modules": [*LORA["lora_attn_modules"], "w1", "w2", "w3"],
        "peft_type": "LORA",
    }
    adapter = {name: p.detach().clone() for name, p in get_adapter_params(model).items()}
    state = {"model": merged, "adapter": adapter, "adapter_config": settings}
    base.save_checkpoint(state, epoch=0)
    return folder / "epoch_0"


@pytest.fixture(scope="module")
def epochs(tmp_path_factory):
    """What torchtune writes: for LoRA and for DoRA."""
    root = tmp_path_factory.mktemp("trained")
    return {kind: trained(root / kind, use_dora=kind == "dora") for kind in ("lora", "dora")}


@pytest.fixture(scope="module")
def adapters(epochs):
    """The same without the merged weights, as with ``save_adapter_weights_only``."""
    found = {}
    for kind, epoch in epochs.items():
        found[kind] = epoch.parent / "adapter"
        shutil.copytree(epoch, found[kind])
        for path in found[kind].glob("model-*"):
            path.unlink()
    return found


@pytest.fixture
def tune(run_recipe, held_out):
    """Run auto_ppl_eval: (NLL of each document, stderr), or (None, stderr) of a failure."""
    text = (f"dataset.data_files={held_out}", "max_documents=10", "protocol.max_seq_len=256")

    def run(*args, config="auto_ppl_eval"):
        code, _, err = run_recipe(config, *text, "dtype=fp32", "output_dir=out", *args)
        if code:
            return None, err
        lines = Path("out/documents.jsonl").read_text().splitlines()
        return [json.loads(line)["nll_nats_sum"] for line in lines], err

    return run


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_merged_unmerged_and_torchtunes_merged_checkpoint(tune, epochs, adapters, kind):
    """Three ways to one loss; the adapter is in the fingerprint of the model."""
    base, _ = tune(f"checkpoint_dir={BASE}")
    fingerprints = [results()["fingerprints"]["model"]]
    theirs, said = tune(f"checkpoint_dir={epochs[kind]}")
    assert (
        f"{epochs[kind]} has model weights and an adapter: the weights are taken as merged" in said
    )
    fingerprints.append(results()["fingerprints"]["model"])
    for merge in ("true", "false"):
        ours, said = tune(
            f"checkpoint_dir={BASE}", f"adapter.dir={adapters[kind]}", f"adapter.merge={merge}"
        )
        assert ours == pytest.approx(theirs, rel=1e-5), said
        assert "warning" not in said
    fingerprints.append(results()["fingerprints"]["model"])
    assert len(set(fingerprints)) == 3
    assert max(abs(a / b - 1) for a, b in zip(base, theirs, strict=True)) > 0.05


def results():
    return json.loads(Path("out/results.json").read_text())


def lora_config(folder, path, **changes):
    """A pasted lora_* builder."""
    model = {"_component_": "torchtune.models.llama3_2.lora_llama3_2", **SHAPE, **LORA, **changes}
    config = {
        "checkpoint_dir": str(folder),
        "model": model,
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": str(folder),
            "model_type": "LLAMA3_2",
        },
        "tokenizer": {"_component_": "ppl_eval.data.hf_tokenizer", "path": str(folder)},
        "dataset": {"_component_": "ppl_eval.data.text_corpus"},
    }
    path.write_text(json.dumps(config))  # JSON is YAML
    return path


def test_a_lora_builder(tune, epochs, adapters, tmp_path):
    """Over merged weights, over the base alone, and with the adapter."""
    theirs, _ = tune(f"checkpoint_dir={epochs['lora']}")
    config = lora_config(epochs["lora"], tmp_path / "merged.yaml")
    found, said = tune(config=config)
    assert found == theirs
    assert "has model weights and an adapter: the weights are taken as merged" in said
    config = lora_config(BASE, tmp_path / "base.yaml")
    found, said = tune(config=config)
    assert found == tune(f"checkpoint_dir={BASE}")[0]
    assert "lora_llama3_2 and no adapter is given: its base is evaluated" in said
    found, _ = tune(f"adapter.dir={adapters['lora']}", config=config)
    assert found == pytest.approx(theirs, rel=1e-5)
    config = lora_config(BASE, tmp_path / "other.yaml", lora_alpha=32)
    found, said = tune(f"adapter.dir={adapters['lora']}", config=config)
    assert found is None
    assert "lora_alpha=32" in said
    assert "alpha 16" in said


def test_an_adapter_on_weights_that_have_it_already_is_warned_of(tune, epochs, adapters):
    """Adding it twice may be meant, but hardly ever is."""
    for folder in (epochs["lora"], epochs["lora"].parent / "adapter"):
        found, said = tune(f"checkpoint_dir={epochs['lora']}", f"adapter.dir={folder}")
        assert found is not None
        assert "warning: adapter.dir is given, and" in said
        assert "then it counts twice" in said


def test_a_folder_with_an_adapter_only(tune, adapters, tmp_path):
    """With torchtune's copy of config.json, and without as PEFT leaves it."""
    bare = tmp_path / "bare"
    shutil.copytree(adapters["lora"], bare)
    (bare / "config.json").unlink()
    for folder in (adapters["lora"], bare):
        found, said = tune(f"checkpoint_dir={folder}")
        assert found is None
        assert (
            f"{folder} holds an adapter and no model weights: set adapter.dir={folder}, and" in said
        )
        assert len(said.splitlines()) == 1


def test_an_adapter_that_is_zero_or_not_there(tune, adapters, tmp_path):
    zero = tmp_path / "zero"
    zero.mkdir()
    shutil.copy(adapters["lora"] / "adapter_config.json", zero)
    tensors = load_file(adapters["lora"] / "adapter_model.safetensors")
    zeroed = {k: t * 0 if "lora_B" in k else t for k, t in tensors.items()}
    save_file(zeroed, zero / "adapter_model.safetensors", {"format": "pt"})
    base, _ = tune(f"checkpoint_dir={BASE}")
    found, said = tune(f"checkpoint_dir={BASE}", f"adapter.dir={zero}")
    assert found == base
    assert "warning: all lora_B of the adapter" in said
    [warning] = json.loads(Path("out/results.json").read_text())["warnings"]
    assert f"warning: {warning}" in said.splitlines()
    found, said = tune(f"checkpoint_dir={BASE}", f"adapter.dir={tmp_path / 'nowhere'}")
    assert found is None
    assert "there is no such folder" in said
