"""Documents -> token ids, counted by all ranks together.

Every rank needs the number of tokens of every document (the plan is made for the whole corpus) but
the ids of few. So each rank tokenises its share, the counts are added up once, and a rank encodes
again what it has to score and did not count.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist

from ppl_eval import fingerprint
from ppl_eval.data.documents import Document, come_as_tokens
from ppl_eval.data.tokenizer import TextTokenizer, text_encoder
from ppl_eval.errors import UserError
from ppl_eval.parallel.reduce import reduce_
from ppl_eval.plural import counted

_SHARE = 64
"""Documents are dealt to the ranks in runs of this many."""

_FAULT = 2**48
"""More than the tokens of any document: a rank has found a fault."""

_KEPT_TOKENS = 8_000_000
"""Ids that a rank keeps at most when it can encode them again (32 MB)."""


@dataclass
class EncodedCorpus:
    """Token counts of all documents, on every rank, and ids on demand.

    Attributes:
        documents: the texts.
        num_tokens: text tokens by document, without BOS and EOS (int64 [documents]).
        num_bytes: UTF-8 bytes by document (int64 [documents]).
        num_characters: code points by document (int64 [documents]).
        num_words: words by document, as the protocol counts them (int64 [documents]).
        lost_bytes: UTF-8 bytes by document that no token stands for (int64 [documents]).
        as_tokens: whether the documents came tokenised.
        added: (BOS, EOS) that the protocol puts around a text, None for none: one that is written
            in the text itself is not taken for a token of it.
        fingerprint: hash of the texts in their order.
    """

    documents: Sequence[Document]
    tokenizer: TextTokenizer
    vocab_size: int | None
    num_tokens: np.ndarray
    num_bytes: np.ndarray
    num_characters: np.ndarray
    num_words: np.ndarray
    lost_bytes: np.ndarray
    as_tokens: bool
    added: tuple[int | None, int | None]
    fingerprint: str
    _ids: "OrderedDict[int, np.ndarray]" = field(default_factory=OrderedDict)
    _may_forget: bool = True
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
        missing = [n for n in wanted if n not in self._ids]
        if missing:
            chosen = [self.documents[n] for n in missing]
            encoded = _encode(self.tokenizer, chosen, missing, self.vocab_size, self.added)
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
        self._forget_oldest()
        return found

    def _forget_oldest(self) -> None:
        while self._may_forget and self._num_kept > _KEPT_TOKENS and len(self._ids) > 1:
            _, ids = self._ids.popitem(last=False)
            self._num_kept -= len(ids)


def encode_corpus(
    documents: Sequence[Document],
    tokenizer: TextTokenizer,
    *,
    vocab_size: int | None = None,
    added: tuple[int | None, int | None] = (None, None),
    count_words: Callable[[str], int] = lambda text: len(text.split()),
    group: dist.ProcessGroup | None = None,
    on_encode: Callable[[int, int], None] | None = None,
) -> EncodedCorpus:
    """Tokenise this rank's share and add up the counts over ``group``.

    Args:
        documents: the same on every rank.
        tokenizer: the same on every rank.
        vocab_size: rows of the model's embedding; an id outside is an error.
        added: (BOS, EOS) that the protocol puts around a text; see :class:`EncodedCorpus`.
        count_words: of a text.
        group: ranks that share the counting (CPU tensors are reduced over it); None: this rank
            counts everything.
        on_encode: called on this rank with the documents of its share that are done, and all of
            its share, after every few of them.

    Raises:
        UserError: a token id that the model does not have, or ranks that see different corpora.
    """
    rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    counts = np.zeros((6, len(documents)), dtype=np.int64)
    ids: OrderedDict[int, np.ndarray] = OrderedDict()
    _check_same_length(len(documents), group)
    lost_bytes = getattr(tokenizer, "lost_bytes", lambda text: 0)
    fault = None
    starts = range(rank * _SHARE, len(documents), size * _SHARE)
    num_own = sum(min(_SHARE, len(documents) - start) for start in starts)
    num_done = 0
    for start in starts:
        numbers = range(start, min(start + _SHARE, len(documents)))
        chosen = documents[start : numbers.stop]
        try:
            raws = [_bytes(document, n) for document, n in zip(chosen, numbers, strict=True)]
            encoded = _encode(tokenizer, chosen, numbers, vocab_size, added)
        except UserError as error:
            fault = str(error)
            break
        for number, document, raw, token_ids in zip(numbers, chosen, raws, encoded, strict=True):
            digest = hashlib.blake2b(raw, digest_size=8).digest()
            has_text = document.tokens is None
            counts[:, number] = (
                len(token_ids),
                len(raw) if has_text else 0,
                len(document.text),
                count_words(document.text) if has_text else 0,
                lost_bytes(document.text),
                np.frombuffer(digest, dtype=np.int64)[0],
            )
            ids[number] = token_ids
        num_done += len(numbers)
        if on_encode is not None:
            on_encode(num_done, num_own)
    counts[0, 0] = _FAULT if fault else counts[0, 0]
    reduce_(torch.from_numpy(counts), group)
    if counts[0, 0] >= _FAULT:
        _raise_everywhere(fault, group)
    return EncodedCorpus(
        documents=documents,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        num_tokens=counts[0],
        num_bytes=counts[1],
        num_characters=counts[2],
        num_words=counts[3],
        lost_bytes=counts[4],
        as_tokens=come_as_tokens(documents),
        added=added,
        fingerprint=fingerprint.of_arrays(counts[5]),
        _ids=ids,
        _may_forget=size > 1,
    )


def _raise_everywhere(fault: str | None, group: dist.ProcessGroup | None) -> NoReturn:
    """All ranks raise what one of them found, so that none waits for it in a later collective."""
    faults: list[str | None] = [fault]
    if group is not None:
        faults = [None] * dist.get_world_size(group)
        dist.all_gather_object(faults, fault, group=group)
    raise UserError(next(found for found in faults if found))


def _check_same_length(length: int, group: dist.ProcessGroup | None) -> None:
    longest = reduce_(torch.tensor([length, -length]), group, "max")
    if longest[0] != -longest[1]:
        raise UserError(
            f"the ranks see corpora of {-int(longest[1])} to {int(longest[0])} documents:"
            " do all nodes read the same files?"
        )


def _encode(
    tokenizer: TextTokenizer,
    documents: Sequence[Document],
    numbers: Sequence[int],
    vocab_size: int | None,
    added: tuple[int | None, int | None],
) -> list[np.ndarray]:
    """Ids (int32) of ``documents``, whose numbers are ``numbers``, without an ``added`` (BOS, EOS)
    that begins or ends a text."""
    texts = [document.text for document in documents if document.tokens is None]
    encoded = iter(text_encoder(tokenizer)(texts)) if texts else iter(())
    arrays = [
        _without(next(encoded), *added) if document.tokens is None else document.tokens
        for document in documents
    ]
    for number, ids in zip(numbers, arrays, strict=True):
        if ids.size and vocab_size is not None:
            check_ids([int(ids.min()), int(ids.max())], vocab_size, f"document {number}")
    return arrays


def _without(ids: Sequence[int], bos_id: int | None, eos_id: int | None) -> np.ndarray:
    begin = int(len(ids) > 0 and ids[0] == bos_id)
    end = len(ids) - int(len(ids) > begin and ids[-1] == eos_id)
    return np.asarray(ids[begin:end], dtype=np.int32)


def check_ids(ids: Iterable[int | None], vocab_size: int, where: str) -> None:
    """Refuse ids that the model's embedding does not have.

    Args:
        ids: token ids; None is no id.
        vocab_size: rows of the embedding.
        where: what has the ids, for the error.
    """
    for index in ids:
        if index is not None and not 0 <= index < vocab_size:
            raise UserError(
                f"{where} has the token id {index}, but the model's embedding has {vocab_size}"
                " rows: are tokenizer and model of one family?"
            )


def _bytes(document: Document, number: int) -> bytes:
    """What identifies a document: its text in UTF-8, or its tokens and which of them count."""
    if document.tokens is None:
        return _utf8(document.text, number)
    counts = b"" if document.counts is None else document.counts.tobytes()
    return document.tokens.tobytes() + counts


def _utf8(text: str, number: int) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"document {number} holds half a surrogate pair at character {error.start}, which is no"
            " text: mend it"
        ) from error
