"""The rules behind the protocols: token counts of documents -> windows. Pure functions.

docs/protocols.md defines each in words. All take the tokens by document (int64 [documents]) and the
tokens that fit into a window, without what is put before it.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Windows:
    """Windows of a corpus, in document order; those that score nothing are left out.

    Arrays are int64 [windows] unless said. "Token" below is one of a document: its text and, where
    the protocol adds them, an opening BOS and a closing EOS that are scored like text. A lead is a
    token before the window that is read and never scored.

    Attributes:
        document: number of the document.
        start: first token of the document that the window reads.
        num_tokens: how many tokens it reads, the lead not counted.
        num_skipped: how many of these, from the first on, it does not score.
        has_lead: whether a lead comes before them (bool).
        no_context: tokens by document (int64 [documents]) that have nothing before them in their
            window and therefore are never scored.
        truncated: tokens by document that no window reads.
        context_only: tokens by document that windows read and none scores, for another reason than
            ``no_context``.
    """

    document: np.ndarray
    start: np.ndarray
    num_tokens: np.ndarray
    num_skipped: np.ndarray
    has_lead: np.ndarray
    no_context: np.ndarray
    truncated: np.ndarray
    context_only: np.ndarray

    def __len__(self) -> int:
        return len(self.document)

    @property
    def num_scored(self) -> np.ndarray:
        """Tokens that each window scores (int64 [windows])."""
        return self.num_tokens - self.num_skipped

    @property
    def num_inputs(self) -> np.ndarray:
        """Positions that each window feeds to the model (int64 [windows]).

        The last token of a window is only a target: nothing is predicted from it.
        """
        return self.num_tokens + self.has_lead - 1


def sliding(length: np.ndarray, size: int, advance: int, *, lead: bool) -> Windows:
    """Windows of ``size`` tokens of one document, each ``advance`` tokens further than the last.

    A window scores the tokens that no earlier window scored and that have a token, or the lead,
    before them. The last one ends with the document.
    """
    beyond_first = np.maximum(length - size, 0)
    document, nth = _numbered(np.where(length > 0, 1 + -(-beyond_first // advance), 0))
    start = nth * advance
    num_tokens = np.minimum(size, length[document] - start)
    num_skipped = np.where(nth > 0, size - advance, 0)
    bare = (num_skipped == 0) & (not lead)
    no_context = np.bincount(document[bare], minlength=len(length))
    return _kept(length, document, start, num_tokens, num_skipped + bare, lead, no_context)


def rolling(length: np.ndarray, size: int) -> Windows:
    """lm-eval's disjoint rolling windows: ``size`` predictions each, the first after a lead.

    A later window has one token before its predictions; the last one, if it predicts fewer, has as
    many as fill the window.
    """
    document, nth = _numbered(-(-length // size))
    end = np.minimum((nth + 1) * size, length[document])
    start = np.where(nth > 0, end - size - 1, 0)
    num_skipped = np.where(nth > 0, nth * size - start, 0)
    return _kept(length, document, start, end - start, num_skipped, nth == 0)


def blocks(length: np.ndarray, size: int, *, lead: bool) -> Windows:
    """Blocks of exactly ``size`` tokens, all scored that have a token before them; the tail is
    dropped."""
    count = length // size
    document, nth = _numbered(count)
    bare = int(not lead)
    dropped = length - count * size
    return _kept(length, document, nth * size, size, bare, lead, count * bare, dropped)


def second_halves(length: np.ndarray, context: int, *, lead: bool) -> Windows:
    """llama.cpp's chunks of ``context`` positions, of which the second half is scored.

    With a lead the document is taken to begin with one as well, and the lead replaces the first
    position of every chunk, so a token between two chunks is not read. The tail is dropped.
    """
    count = (length + lead) // context
    document, nth = _numbered(count)
    read, num_skipped = context - lead, context // 2 + (not lead)
    unread = np.where(count > 0, length - count * read, length)
    return _kept(length, document, nth * context, read, num_skipped, lead, truncated=unread)


def _numbered(count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(document, how many windows of it came before) of each window, given windows by document."""
    document = np.repeat(np.arange(len(count)), count)
    return document, np.arange(len(document)) - np.repeat(np.cumsum(count) - count, count)


def _kept(
    length: np.ndarray,
    document: np.ndarray,
    start: np.ndarray,
    num_tokens: np.ndarray | int,
    num_skipped: np.ndarray | int,
    has_lead: np.ndarray | bool,
    no_context: np.ndarray | int = 0,
    truncated: np.ndarray | int = 0,
) -> Windows:
    """The windows that score something; what is left of a document was context only.

    A number stands for an array of equal values.
    """
    columns = np.broadcast_arrays(document, start, num_tokens, num_skipped, has_lead)
    kept = columns[2] > columns[3]
    document, start, num_tokens, num_skipped, has_lead = (column[kept] for column in columns)
    no_context, truncated = (
        np.broadcast_to(tokens, length.shape).astype(np.int64) for tokens in (no_context, truncated)
    )
    scored = np.zeros(len(length), dtype=np.int64)
    np.add.at(scored, document, num_tokens - num_skipped)
    rest = length - scored - no_context - truncated
    return Windows(
        *(document, start, num_tokens, num_skipped, has_lead), no_context, truncated, rest
    )
