"""Protocols: the named rules that turn documents into windows.

A window is what one forward row reads. Every text token is scored by exactly one window, or counted
under a reason why not.
"""

from dataclasses import asdict, dataclass, field

import numpy as np

from ppl_eval import components, fingerprint
from ppl_eval.data.tokenizer import TextTokenizer, wants_bos
from ppl_eval.errors import UserError


@dataclass(frozen=True)
class Windows:
    """Windows of a corpus, in document order; those that score nothing are left out.

    All arrays are int64 [windows]. "Token" below is one of a document: its text and, if EOS is
    added, that; a BOS comes before them in every window and is never scored.

    Attributes:
        document: number of the document.
        start: first token of the document that the window reads.
        num_tokens: how many tokens it reads, BOS not counted.
        num_skipped: how many of these, from the first on, it does not score.
        no_context: tokens by document (int64 [documents]) that have nothing before them in their
            window and therefore are never scored.
    """

    document: np.ndarray
    start: np.ndarray
    num_tokens: np.ndarray
    num_skipped: np.ndarray
    no_context: np.ndarray

    def __len__(self) -> int:
        return len(self.document)

    @property
    def num_scored(self) -> np.ndarray:
        """Tokens that each window scores (int64 [windows])."""
        return self.num_tokens - self.num_skipped


@dataclass(frozen=True)
class DocumentProtocol:
    """``document``: windows of one document each, the next one ``stride`` tokens further.

    A window holds at most ``max_seq_len`` tokens of one document, BOS included. It scores the
    tokens that no earlier window scored and that have at least one token before them in the window.

    Args:
        max_seq_len: tokens in a window, BOS included; at least 2.
        stride: text tokens by which windows advance, 1 to the window's text tokens; None: all of
            them, so that windows do not overlap.
        bos_id: id of the BOS that opens every window, or None for none.
        eos_id: id of the EOS that ends every document, or None for none. It is scored.

    Raises:
        UserError: a window or a stride out of range.
    """

    max_seq_len: int
    stride: int | None = None
    bos_id: int | None = None
    eos_id: int | None = None
    name: str = field(default="document", init=False)

    def __post_init__(self) -> None:
        if self.max_seq_len < 2:
            raise UserError(
                f"protocol.max_seq_len is {self.max_seq_len}, but a window of fewer than 2 tokens"
                " scores nothing"
            )
        if self.stride is not None and not 1 <= self.stride <= self.window_tokens:
            bos = " (max_seq_len without its BOS)" if self.bos_id is not None else ""
            raise UserError(
                f"protocol.stride is {self.stride}, but it is between 1 and {self.window_tokens},"
                f" the window's text tokens{bos}, or null for windows that do not overlap"
            )

    @property
    def window_tokens(self) -> int:
        """Tokens of a document that fit into one window."""
        return self.max_seq_len - (self.bos_id is not None)

    @property
    def advance(self) -> int:
        """Tokens by which windows advance."""
        return self.window_tokens if self.stride is None else self.stride

    def windows(self, num_text_tokens: np.ndarray) -> Windows:
        """Windows of all documents.

        Args:
            num_text_tokens: text tokens by document (int64 [documents]). A document without any has
                no windows, EOS or not.
        """
        has_eos = int(self.eos_id is not None)
        length = np.where(num_text_tokens > 0, num_text_tokens + has_eos, 0)
        beyond_first = np.maximum(length - self.window_tokens, 0)
        num_windows = np.where(length > 0, 1 + -(-beyond_first // self.advance), 0)
        document = np.repeat(np.arange(len(length)), num_windows)
        nth = np.arange(len(document)) - np.repeat(
            np.cumsum(num_windows) - num_windows, num_windows
        )
        start = nth * self.advance
        end = np.minimum(start + self.window_tokens, length[document])
        scored_before = np.where(nth > 0, start - self.advance + self.window_tokens, 0)
        num_skipped = scored_before - start
        num_skipped = np.where(nth > 0, num_skipped, 0)
        bare = (num_skipped == 0) & (self.bos_id is None)
        no_context = np.bincount(document[bare], minlength=len(length))
        num_skipped = num_skipped + bare
        kept = end - start > num_skipped
        return Windows(
            document=document[kept],
            start=start[kept],
            num_tokens=(end - start)[kept],
            num_skipped=num_skipped[kept],
            no_context=no_context.astype(np.int64),
        )

    @property
    def fingerprint(self) -> str:
        """Hash of the rule and its parameters."""
        return fingerprint.of(asdict(self))


def document_protocol(
    tokenizer: TextTokenizer,
    *,
    max_seq_len: int,
    stride: int | None = None,
    add_bos: bool | str = "auto",
    add_eos: bool = False,
) -> DocumentProtocol:
    """The ``document`` protocol with this tokenizer's BOS and EOS.

    Args:
        tokenizer: decides about BOS when ``add_bos`` is ``auto``.
        max_seq_len: tokens in a window, BOS included.
        stride: see :class:`DocumentProtocol`.
        add_bos: True, False, or ``auto``: as the tokenizer has it.
        add_eos: score an EOS after each document.

    Raises:
        UserError: BOS or EOS is asked of a tokenizer without one; stride or window out of range.
    """
    components.need(tokenizer, "tokenizer", "encode", "bos_id", "eos_id")
    if add_bos not in (True, False, "auto"):
        raise UserError(f"protocol.add_bos is {add_bos!r}, but it is auto, true or false")
    if add_bos is True and tokenizer.bos_id is None:
        raise UserError("protocol.add_bos is true, but the tokenizer has no BOS: set it to auto")
    if add_eos and tokenizer.eos_id is None:
        raise UserError("protocol.add_eos is true, but the tokenizer has no EOS: set it to false")
    bos = wants_bos(tokenizer) if add_bos == "auto" else add_bos
    return DocumentProtocol(
        max_seq_len=max_seq_len,
        stride=stride,
        bos_id=tokenizer.bos_id if bos else None,
        eos_id=tokenizer.eos_id if add_eos else None,
    )
