"""A bigram model of the embedded text: what any model that uses context must beat.

    python -m ppl_eval.tools.bigram

It prints the token perplexity of the held-out text, on the tokens that `tune run ppl_eval --config
tiny_ppl_eval` scores, under a bigram table with interpolated unigrams, counted on training text.
"""

import json
import math
from itertools import islice

import numpy as np

from ppl_eval.data.tokenizer import HFTokenizer
from ppl_eval.shipped import embedded_path
from ppl_eval.tools.text import documents

TRAINING_SEED = 1
HELD_OUT_SEED = 2
_DOCUMENTS = 20_000
_UNIGRAM_WEIGHT = 1.0


def bigram_perplexity() -> float:
    """Token perplexity of the held-out text (every token after BOS scored)."""
    tokenizer = HFTokenizer(str(embedded_path("tiny_teacher")))
    size = tokenizer.vocab_size
    counts = np.zeros((size, size))
    for document in islice(documents(TRAINING_SEED), _DOCUMENTS):
        ids = np.asarray(tokenizer.encode(document["text"], add_bos=True, add_eos=False))
        np.add.at(counts, (ids[:-1], ids[1:]), 1)
    unigram = (counts.sum(axis=0) + 1) / (counts.sum() + size)
    given = counts.sum(axis=1, keepdims=True)
    table = (counts + _UNIGRAM_WEIGHT * unigram) / (given + _UNIGRAM_WEIGHT)

    nll, tokens = 0.0, 0
    with (embedded_path("tiny_text") / "heldout.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            ids = np.asarray(
                tokenizer.encode(json.loads(line)["text"], add_bos=True, add_eos=False)
            )
            nll -= float(np.log(table[ids[:-1], ids[1:]]).sum())
            tokens += len(ids) - 1
    return math.exp(nll / tokens)


if __name__ == "__main__":
    print(f"bigram token perplexity: {bigram_perplexity():.4f}")  # noqa: T201
