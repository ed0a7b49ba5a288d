"""Protocols: the named rules that say what is read and which tokens are scored.

Every token of a text is scored by exactly one window, or counted under a reason why not. The rules
are in :mod:`ppl_eval.data.windows`; docs/protocols.md defines each in words.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ppl_eval import components, fingerprint
from ppl_eval.data import windows
from ppl_eval.data.documents import Document, NamedCorpora
from ppl_eval.data.tokenizer import TextTokenizer, wants_bos
from ppl_eval.data.windows import Windows
from ppl_eval.errors import UserError


@dataclass(frozen=True)
class Rule:
    """What is particular to a protocol.

    Attributes:
        windows: (tokens by document (int64 [documents]), the protocol) -> windows.
        max_seq_len: default tokens in a window.
        separator: default text between texts that are joined; None keeps documents apart.
        strides: whether the protocol has a ``stride``.
        opens_with_bos: a wanted BOS is a scored token of the document, not a lead of its windows.
        count_words: counts the words of a text.
        quirks: what a reader of the results must know, one sentence each.
    """

    windows: Callable[[np.ndarray, "Protocol"], Windows]
    max_seq_len: int = 1024
    separator: str | None = None
    strides: bool = False
    opens_with_bos: bool = False
    count_words: Callable[[str], int] = lambda text: len(text.split())
    quirks: tuple[str, ...] = ()


def _sliding(length: np.ndarray, protocol: "Protocol") -> Windows:
    return windows.sliding(
        length, protocol.window_tokens, protocol.advance, lead=protocol.bos_id is not None
    )


RULES = {
    "document": Rule(_sliding, strides=True),
    "concat": Rule(_sliding, separator="\n\n"),
    "hf_stride": Rule(
        _sliding,
        separator="\n\n",
        strides=True,
        quirks=(
            "the loop in transformers' documentation weighs a window that overlaps the one before"
            " by one token less than it scores: metrics.hf_perplexity is its value",
        ),
    ),
    "lm_eval_rolling": Rule(
        lambda length, protocol: windows.rolling(length, protocol.max_seq_len),
        opens_with_bos=True,
        count_words=lambda text: len(re.split(r"\s+", text)),
        quirks=(
            "the first window of a document follows a prefix token (BOS, else EOS), and a BOS that"
            " the tokenizer adds is scored after it",
            "later windows begin with one token of context",
            "words are counted by re.split, which sees one in an empty text",
        ),
    ),
    "llama_cpp": Rule(
        lambda length, protocol: windows.second_halves(
            length, protocol.max_seq_len, lead=protocol.bos_id is not None
        ),
        max_seq_len=512,
        separator="\n",
        quirks=(
            "only the second half of each window is scored",
            "the tail that fills no window is dropped; a BOS replaces the first token of a window",
        ),
    ),
    "gptq": Rule(
        lambda length, protocol: windows.blocks(
            length, protocol.window_tokens, lead=protocol.bos_id is not None
        ),
        max_seq_len=2048,
        separator="\n\n",
        quirks=("the tail that fills no block is dropped",),
    ),
}


def rule_of(name: str) -> Rule:
    """The rule of this name; a UserError if there is none."""
    if name == "packed":
        raise UserError(
            "protocol.name is 'packed', which is no longer a protocol: batches hold windows of"
            " nearly the same length, so document has as little padding and fewer batches, for the"
            " same number; set protocol.name=document"
        )
    if name not in RULES:
        raise UserError(f"protocol.name is {name!r}, but it is one of {', '.join(RULES)}")
    return RULES[name]


@dataclass(frozen=True)
class Protocol:
    """A rule with its parameters and the special tokens of a tokenizer.

    Args:
        name: one of :data:`RULES`.
        max_seq_len: tokens in a window, a BOS before it included; at least 2.
        stride: tokens by which windows advance, 1 to the window's tokens; None: all of them, so
            that windows do not overlap.
        bos_id: id of the token before every window (``lm_eval_rolling``: before the first window of
            a document), or None for none. It is never scored.
        eos_id: id of the EOS that ends every document, or None for none. It is scored.
        opening_id: id of the BOS that is a document's first token and scored, or None for none.
        separator: joins all texts into one; None keeps documents apart.

    Raises:
        UserError: a window or a stride out of range.
    """

    max_seq_len: int
    stride: int | None = None
    bos_id: int | None = None
    eos_id: int | None = None
    name: str = "document"
    opening_id: int | None = None
    separator: str | None = None

    def __post_init__(self) -> None:
        if self.max_seq_len < 2:
            raise UserError(
                f"protocol.max_seq_len is {self.max_seq_len}, but a window of fewer than 2 tokens"
                " scores nothing"
            )
        if self.stride is not None and not self.rule.strides:
            names = " and ".join(name for name, rule in RULES.items() if rule.strides)
            raise UserError(
                f"protocol.stride is {self.stride}, but {self.name} has none: set it to null"
                f" ({names} have one)"
            )
        if self.stride is not None and not 1 <= self.stride <= self.window_tokens:
            bos = " (max_seq_len without its BOS)" if self.bos_id is not None else ""
            raise UserError(
                f"protocol.stride is {self.stride}, but it is between 1 and {self.window_tokens},"
                f" the window's text tokens{bos}, or null for windows that do not overlap"
            )

    @property
    def rule(self) -> Rule:
        """What is particular to this protocol."""
        return rule_of(self.name)

    @property
    def window_tokens(self) -> int:
        """Tokens that fit into a window, without its BOS."""
        return self.max_seq_len - (self.bos_id is not None)

    @property
    def advance(self) -> int:
        """Tokens by which windows advance."""
        return self.window_tokens if self.stride is None else self.stride

    @property
    def added(self) -> tuple[int | None, int | None]:
        """(BOS, EOS) that stand once around a text, even if the text has them itself. The prefix
        token of ``lm_eval_rolling`` is not one of them."""
        return (self.opening_id if self.rule.opens_with_bos else self.bos_id), self.eos_id

    def windows(self, num_text_tokens: np.ndarray) -> Windows:
        """Windows of all documents, given their text tokens (int64 [documents]).

        A document without any has no windows, unless it has an opening BOS that is scored.
        """
        return self.rule.windows(self.num_tokens(num_text_tokens), self)

    def num_tokens(self, num_text_tokens: np.ndarray) -> np.ndarray:
        """Tokens by document, with those that the protocol adds to be scored."""
        opened = num_text_tokens + (self.opening_id is not None)
        return np.where(opened > 0, opened + (self.eos_id is not None), 0)

    def read(self, text: np.ndarray, start: int, stop: int) -> np.ndarray:
        """Tokens ``start`` to ``stop`` of a document (int64), from the ids of its text."""
        before = int(self.opening_id is not None)
        opening = [self.opening_id][start:stop] if before else []
        piece = text[max(start - before, 0) : max(stop - before, 0)]
        closing = [self.eos_id] if stop - start > len(opening) + len(piece) else []
        parts = (np.asarray(part, dtype=np.int64) for part in (opening, piece, closing))
        return np.concatenate([*parts])

    def joined(self, documents: Sequence[Document]) -> Sequence[Document]:
        """The documents, or all of each data set as one."""
        if self.separator is None:
            return documents
        parts = documents.parts if isinstance(documents, NamedCorpora) else {None: documents}
        return [
            Document(self.separator.join(document.text for document in part), name, name)
            for name, part in parts.items()
        ]

    def for_tokens(self) -> "Protocol":
        """The same for rows that come as tokens, to which no special token is added.

        Raises:
            UserError: a protocol that joins texts or puts something before them.
        """
        if self.separator is not None or self.opening_id is not None or self.rule.opens_with_bos:
            raise UserError(
                f"protocol.name is {self.name}, which reads texts, but the data set gives tokens:"
                " set protocol.name=document"
            )
        return replace(self, bos_id=None, eos_id=None)

    def as_dict(self) -> dict[str, Any]:
        """The ``protocol`` of results.json."""
        return {**asdict(self), "quirks": list(self.rule.quirks)}

    @property
    def fingerprint(self) -> str:
        """Hash of the rule and its parameters."""
        return fingerprint.of(asdict(self))


def make_protocol(
    tokenizer: TextTokenizer,
    name: str = "document",
    *,
    max_seq_len: int | None = None,
    stride: int | None = None,
    add_bos: bool | str = "auto",
    add_eos: bool = False,
    separator: str | None = None,
) -> Protocol:
    """A protocol with this tokenizer's BOS and EOS.

    The arguments are those of :class:`ppl_eval.config.schema.ProtocolConfig`. Without a stride
    ``hf_stride`` advances by half a window.

    Raises:
        UserError: no such protocol; BOS or EOS is asked of a tokenizer without one; stride or
            window out of range; a separator for documents that are not joined.
    """
    components.need(tokenizer, "tokenizer", "encode", "bos_id", "eos_id")
    rule = rule_of(name)
    if add_bos not in (True, False, "auto"):
        raise UserError(f"protocol.add_bos is {add_bos!r}, but it is auto, true or false")
    if add_bos is True and tokenizer.bos_id is None:
        raise UserError("protocol.add_bos is true, but the tokenizer has no BOS: set it to auto")
    if add_eos and tokenizer.eos_id is None:
        raise UserError("protocol.add_eos is true, but the tokenizer has no EOS: set it to false")
    if separator is not None and rule.separator is None:
        raise UserError(
            f"protocol.separator is {separator!r}, but {name} keeps documents apart: set it to null"
        )
    bos_id = tokenizer.bos_id if (wants_bos(tokenizer) if add_bos == "auto" else add_bos) else None
    opening_id = None
    if rule.opens_with_bos:
        opening_id, bos_id = bos_id, tokenizer.bos_id
        bos_id = tokenizer.eos_id if bos_id is None else bos_id
        if bos_id is None:
            raise UserError(f"{name} needs a prefix token, but the tokenizer has no BOS and no EOS")
    max_seq_len = rule.max_seq_len if max_seq_len is None else max_seq_len
    if name == "hf_stride" and stride is None:
        stride = max(1, max_seq_len // 2)
    return Protocol(
        max_seq_len=max_seq_len,
        stride=stride,
        bos_id=bos_id,
        eos_id=tokenizer.eos_id if add_eos else None,
        name=name,
        opening_id=opening_id,
        separator=rule.separator if separator is None else separator,
    )
