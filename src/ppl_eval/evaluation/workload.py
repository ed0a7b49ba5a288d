"""Workload: everything that is to be scored, known before any weight is read."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ppl_eval.data.collate import collate
from ppl_eval.data.documents import as_documents, come_as_tokens
from ppl_eval.data.encode import EncodedCorpus, check_ids, encode_corpus
from ppl_eval.data.plan import Plan, make_plan
from ppl_eval.data.protocol import Protocol
from ppl_eval.data.tokenizer import TextTokenizer
from ppl_eval.data.windows import Windows
from ppl_eval.errors import UserError
from ppl_eval.plural import counted
from ppl_eval.score.batch import Batch


@dataclass(frozen=True)
class Workload:
    """Documents, windows and batches of a whole corpus; the same on every rank."""

    corpus: EncodedCorpus
    protocol: Protocol
    windows: Windows
    plan: Plan

    def batch(self, number: int | None) -> Batch:
        """The tensors of one batch of the plan; None gives a batch that counts nothing."""
        return collate(number, self.plan, self.windows, self.corpus, self.protocol)


def prepare_workload(
    tokenizer: TextTokenizer,
    documents: Iterable[Any],
    protocol: Protocol,
    *,
    max_tokens_per_batch: int,
    max_documents: int | None = None,
    vocab_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    on_encode: Callable[[int, int], None] | None = None,
) -> Workload:
    """Read, tokenise, cut into windows and plan. Every rank of ``group`` calls it.

    Args:
        tokenizer: the model's tokenizer.
        documents: see :func:`ppl_eval.data.documents.as_documents`; the same on every rank.
        protocol: the rule that makes windows.
        max_tokens_per_batch: most input positions of a batch, padding included.
        max_documents: take the first N documents.
        vocab_size: rows of the model's embedding; an id outside is an error.
        group: ranks that share the work of tokenising; None for this rank alone.
        on_encode: see :func:`ppl_eval.data.encode.encode_corpus`.

    Raises:
        UserError: a bad row, an empty corpus, an id that the model lacks, or nothing to score.
    """
    rows = as_documents(documents, max_documents)
    if come_as_tokens(rows):
        protocol = protocol.for_tokens()
        if not any(d.counts is None or d.counts[1:].any() for d in rows):
            raise UserError(
                f"0 scored tokens: of {counted(len(rows), 'document')} none has a token that counts"
                " and has one before it: are all masked, or were the answers cut off by the"
                " tokenizer's max_seq_len?"
            )
    rows = protocol.joined(rows)
    if vocab_size is not None:
        check_ids([protocol.bos_id, protocol.opening_id], vocab_size, "the tokenizer's BOS")
        check_ids([protocol.eos_id], vocab_size, "the tokenizer's EOS")
    corpus = encode_corpus(
        rows, tokenizer, protocol, vocab_size=vocab_size, group=group, on_encode=on_encode
    )
    windows = protocol.windows(corpus.num_tokens)
    if len(windows) == 0:
        why = "no token has another before it in its window: give longer documents or add a BOS"
        if windows.truncated.any():
            why = "no document has enough for a window: take a smaller protocol.max_seq_len"
        raise UserError(
            f"0 scored tokens: the {counted(len(rows), 'document')}"
            f" {'has' if len(rows) == 1 else 'have'} {counted(corpus.num_tokens.sum(), 'token')},"
            f" but {why}"
        )
    plan = make_plan(windows, max_tokens_per_batch=max_tokens_per_batch)
    return Workload(corpus, protocol, windows, plan)
