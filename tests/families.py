"""A small checkpoint of each family, written by transformers, and how far we are from it.

    python tests/families.py

prints the tables of docs/families.md: keys and defaults, then distances. Weights are sharpened, so
that a wrong window, cap, norm, rotary angle or head shows; sizes are awkward on purpose.
"""

import contextlib
import json
import sys
import tempfile
from pathlib import Path

import torch

MAX_SEQ_LEN = 96
_SIZES = {
    "vocab_size": 521,
    "hidden_size": 48,
    "intermediate_size": 76,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 6.0,
    "low_freq_factor": 1.5,
    "high_freq_factor": 5.0,
    "original_max_position_embeddings": 40,
    "rope_theta": 5000.0,
}
_GEMMA = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 20}
_CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0}

FAMILIES = {
    "llama2": ("Llama", {}),
    "llama2, as many kv heads": ("Llama", {"num_key_value_heads": 6}),
    "llama3 (large vocabulary, rope_theta 500000)": (
        "Llama",
        {"vocab_size": 100_011, "rope_theta": 500_000.0},
    ),
    "llama3_1 (scaled rope)": ("Llama", {"rope_parameters": _LLAMA3_ROPE}),
    "llama3_2 (tied, scaled rope)": (
        "Llama",
        {"rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": True},
    ),
    "SmolLM2 (llama, tied, rope_theta 100000)": (
        "Llama",
        {"rope_theta": 100_000.0, "tie_word_embeddings": True},
    ),
    "code_llama2 (rope_theta 1000000)": ("Llama", {"rope_theta": 1e6}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral (window of 7)": ("Mistral", {"sliding_window": 7}),
    "qwen2 (biases, tied)": ("Qwen2", {"rope_theta": 1e6, "tie_word_embeddings": True}),
    "qwen2_5 (biases, untied)": ("Qwen2", {"rope_theta": 1e6}),
    "qwen2 (window of 9 from layer 1 on)": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "gemma": ("Gemma", _GEMMA),
    "gemma2 (caps 2 and 4, window of 11)": (
        "Gemma2",
        {
            **_GEMMA,
            **_CAPS,
            "num_key_value_heads": 2,
            "query_pre_attn_scalar": 30,
            "sliding_window": 11,
        },
    ),
    "phi3": ("Phi3", {"sliding_window": None}),
    "phi3 (window of 13)": ("Phi3", {"sliding_window": 13}),
    "phi4 (rope_theta 250000)": (
        "Phi3",
        {"sliding_window": None, "rope_theta": 250_000.0, "num_key_value_heads": 3},
    ),
}


def reference(name):
    """The model as transformers builds it, in fp32, with plain (eager) attention."""
    import transformers

    family, changes = FAMILIES[name]
    config = getattr(transformers, f"{family}Config")(**{**_SIZES, **changes})
    torch.manual_seed(len(name))
    model = getattr(transformers, f"{family}ForCausalLM")._from_config(
        config, attn_implementation="eager"
    )
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "embed" in key:
                parameter.mul_(12 if config.tie_word_embeddings else 30)
            elif "lm_head" in key:
                parameter.mul_(25)
            elif "norm" in key:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif key.endswith("bias"):
                parameter.normal_(std=0.5)
            else:
                parameter.mul_(6)
    return model.float().eval()


def write(name, folder):
    """Save the checkpoint with the embedded tokenizer; returns transformers' model."""
    from ppl_eval.shipped import embedded_path

    model = reference(name)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (Path(folder) / file).write_bytes((embedded_path("tiny_teacher") / file).read_bytes())
    return model


def documents(count=25):
    """The first of the embedded held-out texts, from one line to several windows long."""
    from ppl_eval.shipped import embedded_path

    lines = (embedded_path("tiny_text") / "heldout.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines[:count]]


def compare(name, folder, overrides=()):
    """Our NLL of each document and token beside transformers'.

    Returns:
        (largest relative difference of a document, largest difference of a token in nats,
        perplexity).
    """
    from helpers import nll_of

    from ppl_eval.config.command_line import load as load_config
    from ppl_eval.evaluation import preflight
    from ppl_eval.evaluation.load import load_readers
    from ppl_eval.evaluation.loop import run
    from ppl_eval.parallel.dims import ParallelDims

    model = write(name, folder)
    texts = Path(folder) / "texts.jsonl"
    texts.write_text("".join(json.dumps(row) + "\n" for row in documents()))
    cfg = load_config(
        [
            *("--config", "auto_ppl_eval", f"checkpoint_dir={folder}"),
            *(f"dataset.data_files={texts}", f"protocol.max_seq_len={MAX_SEQ_LEN}", "dtype=fp32"),
            *overrides,
        ]
    )
    ready = preflight.prepare(cfg)
    cpu = torch.device("cpu")
    result = run(load_readers(ready, cfg, ParallelDims(), None, cpu), ready.workload, device=cpu)
    by_document = worst_token = 0.0
    for row, document in zip(documents(), result.summary.documents.rows(), strict=True):
        nll = 0.0
        ids = ready.tokenizer.encode(row["text"], add_bos=False, add_eos=False)
        for start in range(0, len(ids), MAX_SEQ_LEN - 1):
            tokens = torch.tensor([[1, *ids[start : start + MAX_SEQ_LEN - 1]]])
            inputs, targets = tokens[:, :-1], tokens[:, 1:]
            with torch.no_grad():
                log_probs = model(inputs).logits.double().log_softmax(dim=-1)
                every = torch.ones_like(targets).bool()
                ours = nll_of(ready.student.decoder.model, inputs, targets, every)
            theirs = -log_probs.gather(2, targets.unsqueeze(2)).squeeze(2)
            worst_token = max(worst_token, float((ours - theirs).abs().max()))
            nll += float(theirs.sum())
        by_document = max(by_document, abs(document["nll_nats_sum"] / nll - 1))
    return by_document, worst_token, result.perplexity


def table_of_keys():
    """Lines of the table of keys that each family reads, and its defaults."""
    from ppl_eval.checkpoint.families import FAMILIES as READ

    def cell(family, key):
        if key not in family.defaults:
            return ""
        value = family.defaults[key]
        if not isinstance(value, int | float | str | None):
            return "derived"
        shown = "null" if value is None else json.dumps(value).strip('"')
        return f"{shown}, null" if key in family.nullable else shown

    keys = dict.fromkeys(key for family in READ.values() for key in family.defaults)
    rows = [f"`{key}` | {' | '.join(cell(f, key) for f in READ.values())}" for key in keys]
    return [f"| key | {' | '.join(READ)} |", "| --- |" + " --- |" * len(READ)] + [
        f"| {row} |".replace("  ", " ") for row in rows
    ]


def main():
    print(*table_of_keys(), sep="\n", end="\n\n")
    print("| checkpoint | documents, relative | tokens, nats | perplexity |")
    print("| --- | --- | --- | --- |")
    for name in FAMILIES:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
            document, token, perplexity = compare(name, folder)
        print(f"| {name} | {document:.1e} | {token:.1e} | {perplexity:.4g} |", flush=True)


if __name__ == "__main__":
    main()
