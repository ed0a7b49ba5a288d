"""Documents: texts with what their rows say about them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from ppl_eval.data.columns import as_text
from ppl_eval.errors import UserError
from ppl_eval.plural import counted


@dataclass(frozen=True, slots=True)
class Document:
    """One text to be measured, with what its row says about it.

    Attributes:
        text: what is tokenised; empty if the row comes as tokens.
        id: the row's own, or None.
        domain: the row's own, or None.
        tokens: ids of a row that comes tokenised (int32 [tokens]), special tokens included; or
            None.
        counts: which of these tokens may be scored (bool [tokens]); None with ``tokens``: all.
    """

    text: str
    id: str | int | None = None
    domain: str | None = None
    tokens: np.ndarray | None = None
    counts: np.ndarray | None = None


class Corpus(Sequence[Document]):
    """Rows of a ``datasets.Dataset`` as documents, read on demand from its memory-mapped table.

    Args:
        table: the rows.
        column: holds the text.
        domain_column: holds the domain's name, or None.
        id_column: holds the row's own id, or None.
        origin: where the rows come from, for errors.
        notes: what a user should know of how they were read, one sentence each.
    """

    def __init__(
        self,
        table: Any,
        column: str,
        domain_column: str | None,
        id_column: str | None,
        origin: str,
        notes: tuple[str, ...] = (),
    ) -> None:
        wanted = [c for c in (column, domain_column, id_column) if c is not None]
        self._table = table.select_columns(list(dict.fromkeys(wanted))).with_format("arrow")
        self._column, self._domain, self._id = column, domain_column, id_column
        self._origin = origin
        self.notes = notes

    def __len__(self) -> int:
        return len(self._table)

    def first(self, count: int) -> "Corpus":
        """The first ``count`` documents, or all if there are fewer."""
        table = self._table.select(range(min(count, len(self))))
        return Corpus(table, self._column, self._domain, self._id, self._origin, self.notes)

    def labels(self) -> list[tuple[str | int | None, str | None]]:
        """(id, domain) of every row, without reading the texts."""
        names = [name for name in (self._id, self._domain) if name is not None]
        rows = self._table.select_columns(list(dict.fromkeys(names)))[:] if names else None
        return list(zip(*self._texts(rows, range(len(self)), self._id, self._domain), strict=True))

    def __getitem__(self, index: Any) -> Any:
        """One document, or a list of them for a slice."""
        numbers = range(len(self))[index]
        if isinstance(numbers, int):
            return self[numbers : numbers + 1][0]
        names = self._column, self._id, self._domain
        columns = self._texts(self._table[index], numbers, *names)
        return [Document(str(text), *labels) for text, *labels in zip(*columns, strict=True)]

    def _texts(self, rows: Any, numbers: range, *columns: str | None) -> list[list[str | None]]:
        """Values of each column; None for each row where there is no such column."""
        return [
            [None] * len(numbers)
            if name is None
            else as_text(
                rows[name], name, self._origin, numbers, is_needed=name == self._column
            ).to_pylist()
            for name in columns
        ]


class NamedCorpora(Sequence[Document]):
    """Several data sets as one corpus; the name of each is the domain of its documents.

    A row that has a domain itself gets ``NAME/DOMAIN``.

    Args:
        parts: name -> documents.
    """

    def __init__(self, parts: Mapping[str, Sequence[Document]]) -> None:
        self.parts = dict(parts)

    def __len__(self) -> int:
        return sum(map(len, self.parts.values()))

    @property
    def notes(self) -> tuple[str, ...]:
        """See :func:`notes`; each begins with the data set's name."""
        return tuple(f"{name}: {note}" for name, part in self.parts.items() for note in notes(part))

    def first(self, count: int) -> "NamedCorpora":
        """The first ``count`` documents of each data set."""
        return NamedCorpora({name: as_documents(part, count) for name, part in self.parts.items()})

    def labels(self) -> list[tuple[str | int | None, str | None]]:
        """(id, domain) of every row, without reading the texts."""
        return [
            (row_id, _below(name, domain))
            for name, part in self.parts.items()
            for row_id, domain in labels(part)
        ]

    def __getitem__(self, index: Any) -> Any:
        """One document, or a list of them for a slice."""
        numbers = range(len(self))[index]
        if isinstance(numbers, int):
            return self[numbers : numbers + 1][0]
        if numbers.step != 1:
            return [self[number] for number in numbers]
        found: list[Document] = []
        start, stop = numbers.start, numbers.stop
        for name, part in self.parts.items():
            inside = part[max(start, 0) : max(stop, 0)]
            found += [replace(d, domain=_below(name, d.domain)) for d in inside]
            start, stop = start - len(part), stop - len(part)
        return found


def _below(name: str, domain: str | None) -> str:
    return name if domain is None else f"{name}/{domain}"


def as_documents(rows: Iterable[Any], max_documents: int | None = None) -> Sequence[Document]:
    """Documents from whatever a caller or a dataset component offers.

    Args:
        rows: a :class:`Corpus`, or an iterable of texts, :class:`Document` or mappings with
            ``text`` and perhaps ``id`` and ``domain``; or samples of torchtune's data sets:
            mappings with ``tokens`` and ``labels`` or ``mask``.
        max_documents: keep the first N.

    Raises:
        UserError: not an iterable of documents, a row that is none (with its number), or no rows.
    """
    if not isinstance(rows, Iterable) and hasattr(rows, "__getitem__") and hasattr(rows, "__len__"):
        samples: Any = rows  # torch's map-style data sets have no __iter__
        rows = (samples[number] for number in range(len(samples)))
    if isinstance(rows, str | bytes | Mapping | Document) or not isinstance(rows, Iterable):
        raise UserError(
            f"the documents are one {type(rows).__name__}, but a list or another iterable of"
            " texts, mappings with 'text', or Documents is needed"
        )
    if isinstance(rows, Corpus | NamedCorpora):
        documents = rows if max_documents is None else rows.first(max_documents)
    else:
        documents = [_as_document(n, row) for n, row in enumerate(islice(rows, max_documents))]
    if not documents:
        raise UserError("the corpus has no documents: there is nothing to measure")
    return documents


def labels(documents: Sequence[Document]) -> list[tuple[str | int | None, str | None]]:
    """(id, domain) of every document."""
    if isinstance(documents, Corpus | NamedCorpora):
        return documents.labels()
    return [(document.id, document.domain) for document in documents]


def notes(documents: Any) -> tuple[str, ...]:
    """What a user should know of how the documents were read, one sentence each."""
    return documents.notes if isinstance(documents, Corpus | NamedCorpora) else ()


def come_as_tokens(documents: Sequence[Document]) -> bool:
    """Whether the rows come tokenised, found out without reading texts.

    Raises:
        UserError: some do and some do not: special tokens are the rows' own in the one case and the
            protocol's in the other.
    """
    if isinstance(documents, Corpus):
        return False
    if isinstance(documents, NamedCorpora):
        kinds = {come_as_tokens(part) for part in documents.parts.values()}
    else:
        kinds = {document.tokens is not None for document in documents}
    if len(kinds) > 1:
        raise UserError(
            "some documents are texts and some come as tokens, which have their own BOS: measure"
            " them in two runs"
        )
    return True in kinds


def _as_document(number: int, row: Any) -> Document:
    if isinstance(row, str):
        return Document(row)
    if isinstance(row, Document) and isinstance(row.text, str):
        return replace(row, id=_own_id(row.id), domain=_own_domain(row.domain))
    if isinstance(row, Mapping) and "tokens" in row:
        return _as_tokens(number, row)
    if isinstance(row, Mapping) and isinstance(row.get("text"), str):
        return Document(row["text"], _own_id(row.get("id")), _own_domain(row.get("domain")))
    raise UserError(
        f"document {number} is {type(row).__name__} {row!r:.60}, but it must be a text, a Document,"
        " or a mapping whose 'text' is a text"
    )


def _as_tokens(number: int, row: Mapping[str, Any]) -> Document:
    """A sample of torchtune's data sets.

    Labels of torchtune 0.6.1 are the tokens themselves, -100 where they do not count; a mask is
    True where they do not.
    """
    tokens = np.asarray(row["tokens"], dtype=np.int32)
    labels, mask = row.get("labels"), row.get("mask")
    counts = None
    if labels is not None:
        labels = np.asarray(labels)
        counts = labels != -100
        if labels.shape != tokens.shape or (labels[counts] != tokens[counts]).any():
            raise UserError(
                f"document {number}: its labels are not its tokens (nor -100): labels that are"
                " shifted by one already are not read; torchtune 0.6.1 leaves that to the loss"
            )
    elif mask is not None:
        counts = ~np.asarray(mask, dtype=bool)
        if counts.shape != tokens.shape:
            raise UserError(
                f"document {number} has {counted(len(tokens), 'token')} and a mask of"
                f" {len(counts)}: they are of one length"
            )
    row_id, domain = _own_id(row.get("id")), _own_domain(row.get("domain"))
    return Document("", row_id, domain, tokens, counts)


def _own_id(value: Any) -> str | int | None:
    return value if value is None or isinstance(value, str | int) else str(value)


def _own_domain(value: Any) -> str | None:
    return None if value is None else str(value)
