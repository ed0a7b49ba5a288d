"""Small models and an oracle that shares no code with the product."""

import json
import math

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torchtune.models.convert_weights import hf_to_tune
from torchtune.models.llama3 import llama3
from torchtune.models.llama3_2 import llama3_2

from ppl_eval.shipped import embedded_path


class ByteTokenizer:
    """UTF-8 bytes behind PAD=0, BOS=1, EOS=2."""

    vocab_size = 259

    def __init__(self, bos_id=1, eos_id=2, adds_bos=True):
        self.bos_id, self.eos_id, self.adds_bos = bos_id, eos_id, adds_bos

    def encode(self, text, add_bos=True, add_eos=True):
        bos = [self.bos_id] if add_bos and self.bos_id is not None else []
        eos = [self.eos_id] if add_eos and self.eos_id is not None else []
        return [*bos, *(byte + 3 for byte in text.encode()), *eos]


class WordTokenizer:
    """Every word is a number and stands for that id: full control over the tokens."""

    def __init__(self, bos_id=None, eos_id=None):
        self.bos_id, self.eos_id, self.adds_bos = bos_id, eos_id, bos_id is not None

    def encode(self, text, add_bos=True, add_eos=True):
        return [int(word) for word in text.split()]


def sharp_llama(vocab_size=101, *, tied=False, max_seq_len=64, sharpness=10.0, seed=0):
    """A small random llama whose head is sharpened, so that a shifted label changes the loss."""
    torch.manual_seed(seed)
    shape = {
        "vocab_size": vocab_size,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "embed_dim": 64,
        "intermediate_dim": 128,
        "max_seq_len": max_seq_len,
    }
    model = llama3_2(**shape, scale_factor=1) if tied else llama3(**shape)
    with torch.no_grad():
        if tied:  # or else a token predicts itself, being its own nearest neighbour
            model.tok_embeddings.weight.mul_(0.5)
            for layer in model.layers:
                layer.mlp.w2.weight.mul_(20)
        else:
            model.output.weight.mul_(sharpness)
    return model.eval()


class BigramTable(nn.Module):
    """Logits that depend on the last token alone: any window gives the table's own NLL."""

    def __init__(self, log_probs):
        super().__init__()
        self.register_buffer("log_probs", log_probs)

    def forward(self, tokens):
        return self.log_probs[tokens]


def oracle(model, windows):
    """(scored tokens, NLL in nats) of windows, one by one and in float64.

    Args:
        model: tokens [1, T] -> logits [1, T, V].
        windows: (tokens, number of leading tokens that are not scored) pairs.
    """
    count, parts = 0, []
    with torch.no_grad():
        for tokens, skipped in windows:
            logits = model(torch.tensor([tokens]))[0, :-1].double()
            nll = F.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="none")
            scored = nll[max(skipped - 1, 0) :]
            count += len(scored)
            parts += scored.tolist()
    return count, math.fsum(parts)


def chunks(ids, size, bos_id=None):
    """Windows without overlap, for :func:`oracle`: (tokens, unscored leading tokens)."""
    lead = [] if bos_id is None else [bos_id]
    step = size - len(lead)
    return [([*lead, *ids[i : i + step]], 1) for i in range(0, len(ids), step)]


def student_in_float64():
    """The embedded student, built by torchtune alone."""
    folder = embedded_path("tiny_student")
    config = json.loads((folder / "config.json").read_text())
    model = llama3_2(
        vocab_size=config["vocab_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=8,
        num_kv_heads=4,
        embed_dim=config["hidden_size"],
        intermediate_dim=config["intermediate_size"],
        max_seq_len=256,
        rope_base=config.get("rope_theta") or config["rope_parameters"]["rope_theta"],
        scale_factor=1,
        norm_eps=config["rms_norm_eps"],
    )
    weights = load_file(folder / "model.safetensors")
    dim = config["hidden_size"]
    model.load_state_dict(hf_to_tune(weights, num_heads=8, num_kv_heads=4, dim=dim))
    return model.double().eval()
