"""Documents -> token ids, counted by all ranks together.

Every rank needs the token count of every document, but the ids of few. So each rank tokenises a
share, one all-reduce adds up the counts, and a rank tokenises again what it scores but did not
count. Documents joined into one, or fewer than the ranks, are tokenised by every rank.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
import torch.distributed as dist

from ppl_eval import fingerprint
from ppl_eval.data.documents import Document, come_as_tokens
from ppl_eval.data.protocol import Protocol, Rule
from ppl_eval.data.tokenizer import TextTokenizer, text_encoder
from ppl_eval.errors import UserError
from ppl_eval.parallel.failure import SharedFailure
from ppl_eval.parallel.reduce import reduce_
from ppl_eval.plural import counted

_SHARE = 64
"""Documents are dealt to the ranks in runs of at most this many."""

_FAILED = 2**48
"""More than the tokens of any document: a rank could not count its share."""

_KEPT_TOKENS = 8_000_000
"""Ids that a rank keeps at most when it can encode them again (32 MB)."""


@dataclass(frozen=True)
class Encoder:
    """Token ids of documents, without the special tokens that the protocol adds.

    Attributes:
        tokenizer: the same on every rank.
        vocab_size: rows of the model's embedding, or None if they are not known.
        added: (BOS, EOS) that the protocol puts around a text, None for none. If the text itself
            begins or ends with one, that one is dropped.
    """

    tokenizer: TextTokenizer
    vocab_size: int | None
    added: tuple[int | None, int | None]

    @cached_property
    def _encode(self) -> Callable[[Sequence[str]], list[list[int]]]:
        return text_encoder(self.tokenizer)

    def ids(self, documents: Sequence[Document], numbers: Sequence[int]) -> list[np.ndarray]:
        """Ids (int32) of each document.

        Args:
            documents: texts, or rows that come as tokens.
            numbers: the documents' numbers in the corpus, for errors.

        Raises:
            UserError: a token id that the model does not have.
        """
        texts = [document.text for document in documents if document.tokens is None]
        encoded = iter(self._encode(texts) if texts else ())
        arrays = [
            self._without_added(next(encoded)) if document.tokens is None else document.tokens
            for document in documents
        ]
        for number, ids in zip(numbers, arrays, strict=True):
            if ids.size and self.vocab_size is not None:
                ends = [int(ids.min()), int(ids.max())]
                check_ids(ends, self.vocab_size, f"document {number}")
        return arrays

    def _without_added(self, ids: Sequence[int]) -> np.ndarray:
        bos_id, eos_id = self.added
        begin = int(len(ids) > 0 and ids[0] == bos_id)
        end = len(ids) - int(len(ids) > begin and ids[-1] == eos_id)
        return np.asarray(ids[begin:end], dtype=np.int32)


@dataclass
class EncodedCorpus:
    """Token counts of all documents, on every rank, and ids on demand.

    Arrays are int64 [documents].

    Attributes:
        documents: the texts.
        num_tokens: text tokens, without BOS and EOS.
        num_bytes: UTF-8 bytes.
        num_characters: code points.
        num_words: words, as the protocol counts them.
        lost_bytes: UTF-8 bytes that no token stands for.
        as_tokens: whether the documents came tokenised.
        fingerprint: hash of the texts in their order.
    """

    documents: Sequence[Document]
    num_tokens: np.ndarray
    num_bytes: np.ndarray
    num_characters: np.ndarray
    num_words: np.ndarray
    lost_bytes: np.ndarray
    as_tokens: bool
    fingerprint: str
    _encoder: Encoder
    _group: dist.ProcessGroup | None
    _ids: dict[int, np.ndarray]
    _may_forget: bool
    _failure: SharedFailure | None = None
    _num_kept: int = field(init=False)

    def __post_init__(self) -> None:
        self._num_kept = sum(len(ids) for ids in self._ids.values())

    def counts(self, document: int) -> np.ndarray | None:
        """Which tokens of a document may be scored (bool [tokens]); None: all."""
        return self.documents[document].counts if self.as_tokens else None

    def fetch(self, documents: Iterable[int]) -> dict[int, np.ndarray]:
        """Text token ids (int32) of several documents, encoding those that are not at hand.

        Raises:
            UserError: the text has another number of tokens here than where it was counted.
        """
        wanted = sorted(set(documents))
        if self._failure is None or self._failure.error is None:
            with self._failure or nullcontext():
                return self._fetch(wanted)
        return {n: np.zeros(self.num_tokens[n], dtype=np.int32) for n in wanted}

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Within it a rank whose text cannot be read again goes on, and at the end all ranks raise.

        For steps with collectives, where the other ranks would wait for a rank that stops. Until
        the end :meth:`fetch` gives that rank zeros for ids, so that every step has the shapes of
        the plan. Every rank that shared the tokenising enters and leaves; leaving reduces a number.

        Raises:
            UserError: the text has another number of tokens on a rank than where it was counted.
            RuntimeError: the data set or the tokenizer has failed on a rank.
        """
        if self._group is None:  # nobody waits
            yield
            return
        self._failure = failure = SharedFailure()
        try:
            yield
        finally:
            self._failure = None
        failure.raise_if_any(self._group)

    def _fetch(self, wanted: Sequence[int]) -> dict[int, np.ndarray]:
        missing = [n for n in wanted if n not in self._ids]
        if missing:
            encoded = self._encoder.ids([self.documents[n] for n in missing], missing)
            for number, ids in zip(missing, encoded, strict=True):
                if len(ids) != self.num_tokens[number]:
                    raise UserError(
                        f"document {number} has {counted(len(ids), 'token')} on this rank but"
                        f" {self.num_tokens[number]} on the rank that counted it:"
                        " do all nodes read the same files?"
                    )
                self._ids[number] = ids
                self._num_kept += len(ids)
        found = {n: self._ids[n] for n in wanted}
        while self._may_forget and self._num_kept > _KEPT_TOKENS and len(self._ids) > 1:
            oldest = next(iter(self._ids))
            self._num_kept -= len(self._ids.pop(oldest))
        return found


def encode_corpus(
    documents: Sequence[Document],
    tokenizer: TextTokenizer,
    protocol: Protocol,
    *,
    vocab_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    on_encode: Callable[[int, int], None] | None = None,
) -> EncodedCorpus:
    """Tokenise this rank's share and add up the counts over ``group``.

    Args:
        documents: the same on every rank; joined, if the protocol joins them.
        tokenizer: the same on every rank.
        protocol: decides which special tokens are added, and how words are counted.
        vocab_size: rows of the model's embedding; an id outside is an error.
        group: ranks that share the counting (CPU tensors are reduced over it); None: this rank
            counts everything.
        on_encode: called on this rank every few documents with (documents done, documents of its
            share).

    Raises:
        UserError: a token id that the model does not have, or ranks that see different corpora.
            Every rank raises it.
        RuntimeError: the data set or the tokenizer has failed on one of several ranks; likewise.
    """
    rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    least, most = _extremes(np.asarray([len(documents)]), group)
    if least != most:
        raise UserError(
            f"the ranks see corpora of {int(least[0])} to {int(most[0])} documents:"
            " do all nodes read the same files?"
        )
    encoder = Encoder(tokenizer, vocab_size, protocol.added)
    is_shared = len(documents) >= size > 1 and protocol.separator is None
    runs = _runs(len(documents), *((rank, size) if is_shared else (0, 1)))
    counts = np.zeros((6, len(documents)), dtype=np.int64)
    ids: dict[int, np.ndarray] = {}
    failure = SharedFailure()
    with failure:
        for numbers in runs:
            _count(documents, numbers, encoder, protocol.rule, counts, ids)
            if on_encode is not None:
                on_encode(len(ids), sum(map(len, runs)))
    if failure.error is not None:
        counts[0, 0] = _FAILED
    if is_shared:
        reduce_(torch.from_numpy(counts), group)
    least, most = (counts, counts) if is_shared else _extremes(counts, group)
    if most[0, 0] >= _FAILED:
        failure.raise_on_all(group)
    if (least != most).any():
        raise UserError(
            f"document {int((least != most).any(axis=0).argmax())} is not the same on all ranks:"
            " do all nodes read the same files?"
        )
    *measures, hashes = counts
    return EncodedCorpus(
        documents,
        *measures,
        as_tokens=come_as_tokens(documents),
        fingerprint=fingerprint.of_arrays(hashes),
        _encoder=encoder,
        _group=group,
        _ids=ids,
        _may_forget=is_shared,
    )


def _runs(num_documents: int, rank: int, size: int) -> list[range]:
    """Numbers of the documents that a rank tokenises; the ranks' shares are nearly equal."""
    length = max(1, min(_SHARE, num_documents // size))
    return [
        range(start, min(start + length, num_documents))
        for start in range(rank * length, num_documents, size * length)
    ]


def _count(
    documents: Sequence[Document],
    numbers: range,
    encoder: Encoder,
    rule: Rule,
    counts: np.ndarray,
    ids: dict[int, np.ndarray],
) -> None:
    """Tokenise documents into ``ids`` and their columns of ``counts``: tokens, bytes, characters,
    words, lost bytes, hash of the content."""
    chosen = documents[numbers.start : numbers.stop]
    contents = [_content(document, n) for n, document in zip(numbers, chosen, strict=True)]
    ids.update(zip(numbers, encoder.ids(chosen, numbers), strict=True))
    lost_bytes = getattr(encoder.tokenizer, "lost_bytes", lambda text: 0)
    for n, document, content in zip(numbers, chosen, contents, strict=True):
        digest = hashlib.blake2b(content, digest_size=8).digest()
        counts[0, n] = len(ids[n])
        counts[5, n] = np.frombuffer(digest, dtype=np.int64)[0]
        if document.tokens is None:
            text = document.text
            counts[1:5, n] = len(content), len(text), rule.count_words(text), lost_bytes(text)


def _extremes(values: np.ndarray, group: dist.ProcessGroup | None) -> tuple[np.ndarray, np.ndarray]:
    """(least, most) of each value over the ranks, the same on every rank."""
    both = torch.from_numpy(np.stack([-values, values]))
    negated, most = reduce_(both, group, "max").numpy()
    return -negated, most


def check_ids(ids: Iterable[int | None], vocab_size: int, where: str) -> None:
    """Refuse ids, None aside, that the embedding does not have; the error names their owner."""
    for index in ids:
        if index is not None and not 0 <= index < vocab_size:
            raise UserError(
                f"{where} has the token id {index}, but the model's embedding has {vocab_size}"
                " rows: are tokenizer and model of one family?"
            )


def _content(document: Document, number: int) -> bytes:
    """What identifies a document: its text in UTF-8, or its tokens and which of them count."""
    if document.tokens is not None:
        counts = b"" if document.counts is None else document.counts.tobytes()
        return document.tokens.tobytes() + counts
    try:
        return document.text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"document {number} holds half a surrogate pair at character {error.start}, which is no"
            " text: mend it"
        ) from error
