"""Documents: a Hugging Face data set or local text, one row a document."""

import glob
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, overload

from ppl_eval.errors import UserError

_LOADERS = {
    ".txt": "text",
    ".text": "text",
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
}
_LOADER_NAMES = {"text": "text", "txt": "text", "json": "json", "jsonl": "json"} | {
    name: name for name in ("csv", "parquet")
}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")


@dataclass(frozen=True, slots=True)
class Document:
    """One text to be measured, with what its row says about it."""

    text: str
    id: str | int | None = None
    domain: str | None = None


class Corpus(Sequence[Document]):
    """Rows of a ``datasets.Dataset`` as documents, read on demand from its memory-mapped table.

    Args:
        table: the rows.
        column: holds the text.
        domain_column: holds the domain's name, or None.
        id_column: holds the row's own id, or None.
        origin: where the rows come from.
    """

    def __init__(
        self,
        table: Any,
        column: str,
        domain_column: str | None,
        id_column: str | None,
        origin: "_Origin",
    ) -> None:
        wanted = [c for c in (column, domain_column, id_column) if c is not None]
        self._table = table.select_columns(list(dict.fromkeys(wanted)))
        self._column, self._domain, self._id = column, domain_column, id_column
        self._origin = origin

    def __len__(self) -> int:
        return len(self._table)

    def first(self, count: int) -> "Corpus":
        """The first ``count`` documents, or all if there are fewer."""
        table = self._table.select(range(min(count, len(self))))
        return Corpus(table, self._column, self._domain, self._id, self._origin)

    def labels(self) -> list[tuple[str | int | None, str | None]]:
        """(id, domain) of every row, without reading the texts."""
        nothing = [None] * len(self)
        ids = list(self._table[self._id]) if self._id else nothing
        domains = list(self._table[self._domain]) if self._domain else nothing
        return [
            (_row_id(i), None if d is None else str(d)) for i, d in zip(ids, domains, strict=True)
        ]

    @overload
    def __getitem__(self, index: int) -> Document: ...
    @overload
    def __getitem__(self, index: slice) -> list[Document]: ...
    def __getitem__(self, index: int | slice) -> Document | list[Document]:
        if isinstance(index, int):
            return self[index : index + 1][0]
        numbers = range(len(self))[index]
        try:
            columns = self._table[index]
        except UnicodeDecodeError as error:  # Arrow does not check what JSON strings hold
            raise UserError(self._origin.explain(error)) from error
        nothing = [None] * len(numbers)
        ids = columns[self._id] if self._id else nothing
        domains = columns[self._domain] if self._domain else nothing
        return [
            Document(
                text=self._checked(number, text),
                id=_row_id(row_id),
                domain=None if domain is None else str(domain),
            )
            for number, text, row_id, domain in zip(
                numbers, columns[self._column], ids, domains, strict=True
            )
        ]

    def _checked(self, number: int, text: Any) -> str:
        if isinstance(text, str):
            return text
        found = "null" if text is None else f"{type(text).__name__} {text!r:.60}"
        raise UserError(
            f"{self._origin.name}, row {number} (the first is 0): column {self._column!r} holds"
            f" {found}, but every row needs a text: mend or drop the row"
        )


def labels(documents: Sequence[Document]) -> list[tuple[str | int | None, str | None]]:
    """(id, domain) of every document."""
    if isinstance(documents, Corpus):
        return documents.labels()
    return [(document.id, document.domain) for document in documents]


def _row_id(value: Any) -> str | int | None:
    return value if value is None or isinstance(value, str | int) else str(value)


def text_corpus(
    source: str | None = None,
    data_files: str | list[str] | None = None,
    split: str | None = None,
    column: str = "text",
    domain_column: str | None = None,
    name: str | None = None,
    revision: str | None = None,
    unit: str = "line",
) -> Corpus:
    """Config component: texts of a Hugging Face data set or of local files.

    A local file, folder or loader name is recognised before any hub is asked.

    Args:
        source: a data set's name, a local file or folder, or a loader (json, text, csv, parquet).
            None with ``data_files``: the suffix decides.
        data_files: files or glob patterns, read in the order given.
        split: which split; None takes the only one there is.
        column: holds the text.
        domain_column: holds each row's domain, for results by domain; None takes a column named
            ``domain`` if there is one.
        name: the data set's configuration, such as ``wikitext-2-raw-v1``.
        revision: the data set's commit, tag or branch.
        unit: of a .txt file: each ``line`` is a document, or the whole ``file``.

    Raises:
        UserError: no such file, split or column; a file that is not UTF-8 or not JSON; no rows.
    """
    import datasets
    from datasets.exceptions import DatasetsError

    if unit not in ("line", "file"):
        raise UserError(f"dataset.unit is {unit!r}, but it is line or file")
    source, files = _locate(source, data_files)
    loader = _LOADER_NAMES.get(source) if source is not None else _loader_of(files)
    options: dict[str, Any] = {"split": split, "name": name, "revision": revision}
    if files:
        options["data_files"] = files
    if loader == "text":
        options |= {
            "encoding": "utf-8-sig",
            "sample_by": {"line": "line", "file": "document"}[unit],
        }
    elif loader == "csv":  # a CSV field is text as it stands, also when it reads NA or 12
        options |= {"encoding": "utf-8-sig", "na_filter": False, "converters": {column: str}}
        if files[0].removesuffix(".gz").endswith(".tsv"):
            options["sep"] = "\t"
    origin = _Origin(", ".join(files) if files else str(source), files, loader)
    if not sys.stderr.isatty() or os.environ.get("RANK", "0") != "0":
        datasets.disable_progress_bars()
    try:
        loaded = datasets.load_dataset(loader or source or "", **options)
    except StopIteration as error:
        raise UserError(f"{origin.name} is empty: there is nothing to measure") from error
    except (DatasetsError, OSError, ValueError) as error:
        raise UserError(origin.explain(error)) from error
    table = _only_split(loaded, origin.name)
    for key, wanted in (("column", column), ("domain_column", domain_column)):
        if wanted is not None and wanted not in table.column_names:
            raise UserError(
                f"dataset.{key} is {wanted!r}, but {origin.name} has the columns"
                f" {', '.join(table.column_names)}"
            )
    if len(table) == 0:
        raise UserError(f"{origin.name} has no rows: there is nothing to measure")
    id_column = "id" if "id" in table.column_names else None
    if domain_column is None and "domain" in table.column_names:
        domain_column = "domain"
    return Corpus(table, column, domain_column, id_column, origin)


def as_documents(rows: Iterable[Any], max_documents: int | None = None) -> Sequence[Document]:
    """Documents from whatever a caller or a dataset component offers.

    Args:
        rows: a :class:`Corpus`, or an iterable of texts, :class:`Document` or mappings with
            ``text`` and perhaps ``id`` and ``domain``.
        max_documents: keep the first N.

    Raises:
        UserError: a row that is none of these (with its number), or no rows at all.
    """
    if isinstance(rows, Corpus):
        documents = rows if max_documents is None else rows.first(max_documents)
    else:
        documents = [_as_document(n, row) for n, row in enumerate(islice(rows, max_documents))]
    if not documents:
        raise UserError("the corpus has no documents: there is nothing to measure")
    return documents


def _as_document(number: int, row: Any) -> Document:
    if isinstance(row, Document):
        return row
    if isinstance(row, str):
        return Document(row)
    if isinstance(row, Mapping) and isinstance(row.get("text"), str):
        return Document(row["text"], row.get("id"), row.get("domain"))
    raise UserError(
        f"document {number} is {type(row).__name__} {row!r:.60}, but it must be a text, a Document,"
        " or a mapping whose 'text' is a text"
    )


def _locate(source: str | None, data_files: str | list[str] | None) -> tuple[str | None, list[str]]:
    """(source or None if the suffix decides, local or remote files)."""
    patterns = [data_files] if isinstance(data_files, str) else list(data_files or [])
    if source is not None and source not in _LOADER_NAMES and not patterns:
        if Path(source).is_file():
            return None, [source]
        if Path(source).is_dir():
            return source, []
        if _suffix(source) in _LOADERS or source.startswith((".", "/", "~")):
            raise UserError(f"dataset.source is {source!r}, but there is no such file or folder")
        return source, []
    if not patterns:
        which = "no source" if source is None else f"source {source!r}, which is a loader's name,"
        raise UserError(f"dataset has {which} and no data_files: set dataset.data_files=FILE")
    files = []
    for pattern in patterns:
        found = [pattern] if "://" in pattern else sorted(glob.glob(pattern, recursive=True))
        if not found:
            raise UserError(f"dataset.data_files is {pattern!r}, but there is no such file")
        files += found
    return source, files


def _suffix(file: str) -> str:
    path = Path(file)
    return Path(path.stem).suffix if path.suffix in _COMPRESSED else path.suffix


def _loader_of(files: list[str]) -> str:
    loaders = {_LOADERS.get(_suffix(file)) for file in files}
    if len(loaders) != 1 or None in loaders:
        raise UserError(
            f"cannot tell what {', '.join(files)} is by its suffix (known: {', '.join(_LOADERS)}):"
            " set dataset.source to json, text, csv or parquet"
        )
    return str(loaders.pop())


def _only_split(loaded: Any, origin: str) -> Any:
    if not isinstance(loaded, Mapping):
        return loaded
    if len(loaded) != 1:
        raise UserError(f"{origin} has the splits {', '.join(loaded)}: choose one by dataset.split")
    return next(iter(loaded.values()))


@dataclass(frozen=True)
class _Origin:
    """Where a corpus comes from, to say what is wrong with it.

    Attributes:
        name: as an error calls it.
        files: its local or remote files, if any.
        loader: what reads them, or None for a data set of the hub.
    """

    name: str
    files: list[str]
    loader: str | None

    def explain(self, error: Exception) -> str:
        """One sentence for a data set that cannot be read, with file and line if there is one."""
        for file in self.files:
            if "://" in file or Path(file).suffix in _COMPRESSED:
                continue
            if Path(file).stat().st_size == 0:
                return f"{file} is empty: there is nothing to measure"
            if self.loader in ("text", "json", "csv"):
                fault = _first_bad_line(file, is_json=self.loader == "json")
                if fault:
                    return fault
        reason = error if error.__cause__ is None else error.__cause__
        return f"{self.name} cannot be read as a data set: {' '.join(str(reason).split())}"


def _first_bad_line(file: str, *, is_json: bool) -> str | None:
    is_array = False
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                return f"{file}, line {number} is not UTF-8: {error.reason} at byte {error.start}"
            is_array |= number == 1 and text.lstrip().startswith("[")
            if is_json and not is_array and text.strip():
                try:
                    json.loads(text)
                except ValueError as error:
                    return f"{file}, line {number} is not JSON: {error}"
    return None
