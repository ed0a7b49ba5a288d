"""Text files: a line, a paragraph or the file is a document."""

from collections.abc import Iterator, Sequence
from itertools import groupby, islice

from ppl_eval.data.files import File
from ppl_eval.data.formats.rows import UNITS, Row, Seen, Wanted, places
from ppl_eval.data.formats.stream import decoded, lines_of, named
from ppl_eval.errors import UserError
from ppl_eval.plural import counted


def text_rows(file: File, wanted: Wanted, seen: Seen) -> Iterator[Row]:
    """The documents of a text file, which has one column, ``text``.

    Raises:
        UserError: another column is wanted.
    """
    places(file.name, ["text"], wanted, seen)
    for text in _documents(file, wanted.unit or "line"):
        yield "", text, None, None


def need_no_unit(files: Sequence[File]) -> None:
    """Refuse files with blank lines between others, where no unit was chosen.

    Raises:
        UserError: with the choices, and the number of documents that each gives.
    """
    if all(len([*islice(_documents(file, "paragraph"), 2)]) < 2 for file in files):
        return
    counts = {unit: sum(1 for file in files for _ in _documents(file, unit)) for unit in UNITS}
    blank = sum(not text.strip() for file in files for text in _documents(file, "line"))
    what = {
        "line": f"each line is a document ({blank:,} of them blank)",
        "paragraph": "blank lines separate documents",
        "file": "each file is a document",
    }
    choices = "; ".join(f"{u}: {counted(counts[u], 'document')}, {what[u]}" for u in UNITS)
    names = files[0].name if len(files) == 1 else f"{files[0].name} and others"
    raise UserError(
        f"{names} has blank lines between others, so what is a document has to be said: set"
        f" dataset.unit to {choices}"
    )


def _documents(file: File, unit: str) -> Iterator[str]:
    with named(file):
        if unit == "file":
            yield "".join(text for _, text in decoded(file))
            return
        lines = (text for _, text in lines_of(file))
        if unit == "line":
            yield from (line.rstrip("\r\n") for line in lines)
            return
        for is_text, paragraph in groupby(lines, lambda line: bool(line.strip())):
            if is_text:
                yield "".join(paragraph).rstrip("\r\n")
