"""Adapters as torchtune and PEFT write them, on the small checkpoints of tests/families.py."""

import json
from pathlib import Path
from unittest import mock

import torch
from families import reference, write
from helpers import peer

from ppl_eval.adapter.check import install, read_adapter, strip
from ppl_eval.checkpoint.checkpoint import Checkpoint
from ppl_eval.config.command_line import load as load_config
from ppl_eval.model.build import build_on_meta
from ppl_eval.model.check_names import check_names
from ppl_eval.model.load import Target, load
from ppl_eval.model.torchtune_decoder import decoder_of

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
TOKENS = torch.randint(3, 500, (2, 23), generator=torch.Generator().manual_seed(7))
LORA = {
    "lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"],
    "apply_lora_to_mlp": True,
    "lora_rank": 4,
    "lora_alpha": 10,
}


def write_base(name, folder):
    """A checkpoint of transformers; returns its ``model`` and ``checkpointer`` sections."""
    write(name, folder)
    cfg = load_config(["--config", "auto_ppl_eval", f"checkpoint_dir={folder}"])
    return dict(cfg.model), dict(cfg.checkpointer)


def lora_node(node, **changes):
    """The ``model`` section of torchtune's lora_* builder of the same family."""
    package, name = node["_component_"].rsplit(".", 1)
    if name == "llama2":  # lora_llama2 knows no other
        node = {key: value for key, value in node.items() if key != "rope_base" or value != 10000.0}
    return {**node, "_component_": f"{package}.lora_{name}", **LORA, **changes}


def write_peft(name, folder, **settings):
    """Save an adapter by PEFT with trained-looking numbers; returns its model with the adapter."""
    peft = peer("peft")
    with without_torchao():
        settings = {"r": 4, "lora_alpha": 10, **settings}
        model = peft.get_peft_model(reference(name), peft.LoraConfig(**settings))
    randomise(model)
    model.save_pretrained(folder)
    return model.eval()


def without_torchao():
    """PEFT 0.21 fails where it finds the torchao that torchtune 0.6.1 needs."""
    peer("peft")
    return mock.patch("peft.tuners.lora.torchao.is_torchao_available", return_value=False)


def randomise(model):
    """Adapters that matter: B is zero before training, and DoRA's magnitudes are the norms."""
    torch.manual_seed(11)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_b" in key.lower():
                parameter.normal_(std=0.1)
            elif "magnitude" in key:
                parameter.mul_(1 + 0.4 * torch.rand_like(parameter))


def edit(folder, **changes):
    """Change adapter_config.json; a value of None removes the key."""
    path = Path(folder) / "adapter_config.json"
    settings = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))


def prepared(node, checkpointer, folder=None, *, merge=True, dtype=torch.float32):
    """Everything that loading needs, as the recipe prepares it."""
    checkpoint = Checkpoint.open(checkpointer)
    model = build_on_meta(node, dtype, checkpoint.config)
    slots = strip(model)
    adapter = read_adapter(str(folder), checkpoint, model, slots) if folder else None
    if adapter and not merge:
        install(model, adapter)
    check_names(decoder_of(model), checkpoint, adapter)
    return model, checkpoint, adapter


def loaded(*args, **options):
    """The model with its weights, and the adapter."""
    model, checkpoint, adapter = prepared(*args, **options)
    load(checkpoint, [Target(decoder_of(model), adapter)], torch.device("cpu"))
    return model.eval(), adapter


@torch.no_grad()
def logits(model):
    """Of the same tokens by any model."""
    out = model(TOKENS)
    return getattr(out, "logits", out).double()


def distance(ours, theirs):
    """Largest difference of a logit, by the spread of the logits."""
    return float((ours - theirs).abs().max() / theirs.std())
