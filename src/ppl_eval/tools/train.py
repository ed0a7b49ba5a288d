"""Remake the embedded folders: tokenizer, teacher, distilled student, held-out text.

    python -m ppl_eval.tools.train DEST

writes DEST/tiny_teacher, DEST/tiny_student and DEST/tiny_text. It takes about half an hour on two
CPU cores. The text is the same everywhere; the weights depend on the machine's arithmetic.
"""

import argparse
import json
import logging
import math
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torchtune.models.convert_weights import tune_to_hf
from torchtune.models.llama3_2 import llama3_2
from torchtune.modules import TransformerDecoder

from ppl_eval.data.tokenizer import HFTokenizer
from ppl_eval.tools.bigram import HELD_OUT_SEED, TRAINING_SEED
from ppl_eval.tools.text import documents

logger = logging.getLogger("ppl_eval.embedded")

_BOS, _EOS, _PAD = "<|begin|>", "<|end|>", "<|pad|>"
_VOCAB_SIZE = 509
_MAX_SEQ_LEN = 256
_ROPE_BASE = 10_000
_NORM_EPS = 1e-5
_HELD_OUT_DOCUMENTS = 120
_ROWS = 32

_SHAPES: dict[str, dict[str, Any]] = {
    "tiny_teacher": {
        "num_layers": 6,
        "embed_dim": 128,
        "intermediate_dim": 256,
        "tie_word_embeddings": False,
    },
    "tiny_student": {
        "num_layers": 3,
        "embed_dim": 64,
        "intermediate_dim": 160,
        "tie_word_embeddings": True,
    },
}
_NUM_HEADS, _NUM_KV_HEADS = 8, 4


def make_tokenizer(folder: Path) -> None:
    """Train a byte-level BPE on training text and write it in Hugging Face's layout."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        special_tokens=[_PAD, _BOS, _EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (document["text"] for document in islice(documents(TRAINING_SEED), 2000))
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != _VOCAB_SIZE:
        raise RuntimeError(f"{tokenizer.get_vocab_size()} tokens, not {_VOCAB_SIZE}")
    bos_id = tokenizer.token_to_id(_BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{_BOS} $A", pair=f"{_BOS} $A $B", special_tokens=[(_BOS, bos_id)]
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": _BOS,
            "eos_token": _EOS,
            "pad_token": _PAD,
            "add_bos_token": True,
            "clean_up_tokenization_spaces": False,
            "model_max_length": _MAX_SEQ_LEN,
        },
    )


def build(name: str) -> TransformerDecoder:
    """The teacher's or the student's architecture, with the same fresh weights every time."""
    torch.manual_seed(0)
    model = llama3_2(
        vocab_size=_VOCAB_SIZE,
        num_heads=_NUM_HEADS,
        num_kv_heads=_NUM_KV_HEADS,
        max_seq_len=_MAX_SEQ_LEN,
        rope_base=_ROPE_BASE,
        norm_eps=_NORM_EPS,
        scale_factor=1,
        **_SHAPES[name],
    )
    if _SHAPES[name]["tie_word_embeddings"]:  # torch's embedding is too large for a head
        torch.nn.init.normal_(model.tok_embeddings.weight, std=_SHAPES[name]["embed_dim"] ** -0.5)
    return model


def batches(tokenizer: HFTokenizer) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (inputs, labels), both [rows, window]; a label of -100 does not count.

    Each row is a window of one document behind a BOS, as in evaluation.
    """
    stream = documents(TRAINING_SEED)
    while True:
        rows = []
        while len(rows) < _ROWS:
            ids = tokenizer.encode(next(stream)["text"], add_bos=False, add_eos=True)
            for start in range(0, len(ids), _MAX_SEQ_LEN):
                rows.append([tokenizer.bos_id, *ids[start : start + _MAX_SEQ_LEN]])
        inputs = torch.zeros(len(rows), _MAX_SEQ_LEN, dtype=torch.int64)
        labels = torch.full_like(inputs, -100)
        for number, row in enumerate(rows):
            inputs[number, : len(row) - 1] = torch.tensor(row[:-1])
            labels[number, : len(row) - 1] = torch.tensor(row[1:])
        width = int((labels != -100).sum(dim=1).max())
        yield inputs[:, :width], labels[:, :width]


def train(
    model: TransformerDecoder,
    loss_of: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    data: Iterator[tuple[torch.Tensor, torch.Tensor]],
    steps: int,
    peak_lr: float,
) -> None:
    """AdamW with warm-up and cosine decay.

    Args:
        model: trained in place.
        loss_of: (inputs, logits, labels) -> loss.
        data: from :func:`batches`.
        steps: optimiser steps.
        peak_lr: the largest learning rate.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / 50, 0.5 * (1 + math.cos(math.pi * step / steps)) + 0.01),
    )
    for step, (inputs, labels) in enumerate(islice(data, steps)):
        loss = loss_of(inputs, model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            logger.info(f"step {step} of {steps}: loss {loss.item():.4f}")


def cross_entropy(_: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean NLL of the labels that count."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def distillation(teacher: TransformerDecoder) -> Callable[..., torch.Tensor]:
    """The loss of a student: half KL(teacher || student), half cross-entropy."""

    def loss_of(inputs: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = teacher(inputs)[labels != -100].log_softmax(dim=-1)
        found = logits[labels != -100].log_softmax(dim=-1)
        divergence = F.kl_div(found, wanted, log_target=True, reduction="batchmean")
        return 0.5 * divergence + 0.5 * cross_entropy(inputs, logits, labels)

    return loss_of


def save(model: TransformerDecoder, name: str, folder: Path, tokenizer: HFTokenizer) -> None:
    """Write config.json and model.safetensors as Hugging Face's llama."""
    shape = _SHAPES[name]
    weights = tune_to_hf(
        dict(model.state_dict()),
        num_heads=_NUM_HEADS,
        num_kv_heads=_NUM_KV_HEADS,
        dim=shape["embed_dim"],
    )
    save_file(
        {key: value.contiguous() for key, value in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    _write_json(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": _VOCAB_SIZE,
            "hidden_size": shape["embed_dim"],
            "intermediate_size": shape["intermediate_dim"],
            "num_hidden_layers": shape["num_layers"],
            "num_attention_heads": _NUM_HEADS,
            "num_key_value_heads": _NUM_KV_HEADS,
            "head_dim": shape["embed_dim"] // _NUM_HEADS,
            "max_position_embeddings": _MAX_SEQ_LEN,
            "rms_norm_eps": _NORM_EPS,
            "rope_theta": float(_ROPE_BASE),
            "rope_scaling": None,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": shape["tie_word_embeddings"],
            "bos_token_id": tokenizer.bos_id,
            "eos_token_id": tokenizer.eos_id,
            "pad_token_id": tokenizer.pad_id,
            "torch_dtype": "float32",
        },
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dest", type=Path)
    parser.add_argument("--teacher-steps", type=int, default=1200)
    parser.add_argument("--student-steps", type=int, default=1200)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")

    for name in _SHAPES:
        make_tokenizer(args.dest / name)
    tokenizer = HFTokenizer(str(args.dest / "tiny_teacher"))
    held_out = args.dest / "tiny_text" / "heldout.jsonl"
    held_out.parent.mkdir(parents=True, exist_ok=True)
    with held_out.open("w", encoding="utf-8") as file:
        for document in islice(documents(HELD_OUT_SEED), _HELD_OUT_DOCUMENTS):
            file.write(json.dumps(document) + "\n")

    teacher = build("tiny_teacher")
    train(teacher, cross_entropy, batches(tokenizer), args.teacher_steps, peak_lr=2e-3)
    save(teacher, "tiny_teacher", args.dest / "tiny_teacher", tokenizer)
    student = build("tiny_student")
    data = batches(tokenizer)
    train(student, distillation(teacher.eval()), data, args.student_steps, peak_lr=3e-3)
    save(student, "tiny_student", args.dest / "tiny_student", tokenizer)


if __name__ == "__main__":
    main()
