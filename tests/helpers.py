"""Small models and an oracle that shares no code with the product."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torchtune.models.convert_weights import hf_to_tune
from torchtune.models.llama3 import llama3
from torchtune.models.llama3_2 import llama3_2

from ppl_eval.data import hf_tokenizer
from ppl_eval.model.torchtune_decoder import decoder_of
from ppl_eval.score.batch import Batch, Tokens
from ppl_eval.score.reader import Reader
from ppl_eval.shipped import embedded_path


def peer(module):
    """A module of the ``peers`` extra; the test that needs it is skipped without it."""
    return pytest.importorskip(module, reason=f"{module} is missing: pip install -e '.[peers]'")


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


def words():
    """Config component."""
    return WordTokenizer()


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


def tokens_of(targets, scored):
    """The scored tokens of a batch: its windows are its rows, each a document of its own."""
    row, column = scored.nonzero(as_tuple=True)
    return Tokens(
        index_N=row * scored.shape[1] + column,
        target_N=targets[scored],
        document_N=row,
        position_N=column + 1,
        context_N=column + 1,
        window_W=torch.arange(len(scored), device=scored.device),
        num_tokens_W=scored.sum(dim=1),
    )


def nll_of(model, inputs, targets, scored, **options):
    """NLL [B, T] of the scored targets by the product, 0 elsewhere."""
    reader = Reader(model, decoder_of(model), **options)
    nll = reader.nll(Batch(inputs, tokens_of(targets, scored)))
    return nll.new_zeros(targets.shape).masked_scatter(scored, nll)


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


def held_out_windows(folder, num_documents):
    """Windows of at most 200 tokens of the embedded text, for :func:`oracle`."""
    tokenizer, lines = hf_tokenizer(str(folder)), embedded_path("tiny_text") / "heldout.jsonl"
    texts = [json.loads(line)["text"] for line in lines.read_text().splitlines()]
    ids = [tokenizer.encode(text, False, False) for text in texts[:num_documents]]
    return [window for each in ids for window in chunks(each, 200, tokenizer.bos_id)]


def student_in_float64():
    """The embedded student, built by torchtune alone."""
    return in_float64(embedded_path("tiny_student"))


def in_float64(folder):
    """A checkpoint of the embedded models' kind, built by torchtune alone."""
    config = json.loads((folder / "config.json").read_text())
    heads = {"num_heads": config["num_attention_heads"]}
    heads["num_kv_heads"] = config["num_key_value_heads"]
    model = llama3_2(
        vocab_size=config["vocab_size"],
        num_layers=config["num_hidden_layers"],
        **heads,
        embed_dim=config["hidden_size"],
        intermediate_dim=config["intermediate_size"],
        max_seq_len=256,
        rope_base=config.get("rope_theta") or config["rope_parameters"]["rope_theta"],
        scale_factor=1,
        norm_eps=config["rms_norm_eps"],
        tie_word_embeddings=config["tie_word_embeddings"],
    )
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict(hf_to_tune(weights, **heads, dim=config["hidden_size"]))
    return model.double().eval()


def compared(student, teacher, windows, shared_ids=None):
    """What a float64 loop over full logits finds of each scored token, straight from definitions.

    Args:
        student, teacher: tokens [1, T] -> logits [1, T, V].
        windows: as for :func:`oracle`.
        shared_ids: ids that both have; divergences are of distributions over these.

    Returns:
        Name -> values [tokens].
    """
    columns = {}

    def add(name, values):
        columns.setdefault(name, []).append(values.double())

    with torch.no_grad():
        for tokens, skipped in windows:
            if len(tokens) < 2:
                continue
            kept = slice(max(skipped - 1, 0), None)
            targets = torch.tensor(tokens[1:])[kept]
            logits = [m(torch.tensor([tokens]))[0, :-1][kept].double() for m in (student, teacher)]
            q, p = (x[:, :shared_ids].log_softmax(dim=1) for x in logits)
            m = torch.log((p.exp() + q.exp()) / 2)
            add("kl_teacher_student", (p.exp() * (p - q)).sum(dim=1))
            add("kl_student_teacher", (q.exp() * (q - p)).sum(dim=1))
            to_middle = (p.exp() * (p - m)).sum(dim=1), (q.exp() * (q - m)).sum(dim=1)
            add("js", sum(to_middle) / 2)
            add("teacher_entropy", -(p.exp() * p).sum(dim=1))
            add("student_entropy", -(q.exp() * q).sum(dim=1))
            add("cross_entropy", -(p.exp() * q).sum(dim=1))
            add("top1", q.argmax(dim=1) == p.argmax(dim=1))
            tops = [x.topk(5, dim=1).indices.tolist() for x in (q, p)]
            overlaps = [len(set(a) & set(b)) / 5 for a, b in zip(*tops, strict=True)]
            add("top5", torch.tensor(overlaps))
            add("teacher_confidence", p.exp().amax(dim=1))
            add("top1_id", q.argmax(dim=1))
            add("teacher_top1_id", p.argmax(dim=1))
            own = [F.cross_entropy(x, targets, reduction="none") for x in logits]
            add("nll_nats", own[0])
            add("teacher_nll_nats", own[1])
            add("probability_difference", (-own[0]).exp() - (-own[1]).exp())
            add("context", torch.arange(1, len(tokens))[kept])
    return {name: torch.cat(parts) for name, parts in columns.items()}
