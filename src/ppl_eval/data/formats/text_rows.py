"""Text files: a line, a paragraph or the file is a document."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ppl_eval.data.files import File
from ppl_eval.data.formats.rows import Rows
from ppl_eval.data.formats.stream import decoded, lines_of
from ppl_eval.data.formats.wanted import UNITS, Seen, Wanted, places
from ppl_eval.errors import UserError
from ppl_eval.plural import counted


@dataclass
class Lines:
    """What there would be of each unit, while lines are read because none was chosen."""

    documents: dict[str, int] = field(default_factory=lambda: dict.fromkeys(UNITS, 0))
    blank: int = 0
    blank_between: bool = False
    _after_text: bool = False
    _after_gap: bool = False

    def file(self) -> None:
        """A file begins."""
        self.documents["file"] += 1
        self._after_text = self._after_gap = False

    def line(self, text: str) -> None:
        """A line of it, without its end."""
        self.documents["line"] += 1
        if not text or text.isspace():
            self.blank += 1
            self._after_gap = self._after_text
            return
        self.blank_between |= self._after_gap
        if self._after_gap or not self._after_text:
            self.documents["paragraph"] += 1
        self._after_text, self._after_gap = True, False

    def check(self, files: Sequence[File]) -> None:
        """Refuse files with blank lines between others.

        Raises:
            UserError: with the choices, and the number of documents that each gives.
        """
        if not self.blank_between:
            return
        what = {
            "line": f"each line is a document ({self.blank:,} of them blank)",
            "paragraph": "blank lines separate documents",
            "file": "each file is a document",
        }
        choices = "; ".join(
            f"{unit}: {counted(self.documents[unit], 'document')}, {what[unit]}" for unit in UNITS
        )
        names = files[0].name if len(files) == 1 else f"{files[0].name} and others"
        raise UserError(
            f"{names} has blank lines between others, so what is a document has to be said: set"
            f" dataset.unit to {choices}"
        )


def text_rows(file: File, wanted: Wanted, seen: Seen, lines: Lines) -> Rows:
    """The documents of a text file, which has one column, ``text``.

    Raises:
        UserError: another column is wanted.
    """
    places(file.name, ["text"], wanted, seen)
    return Rows("line", _rows(file, wanted.unit, lines))


def _rows(file: File, unit: str | None, lines: Lines) -> Iterator[tuple[int, str, None, None]]:
    if unit == "file":
        yield 1, "".join(text for _, text in decoded(file)), None, None
    elif unit == "paragraph":
        for number, text in _paragraphs(lines_of(file)):
            yield number, text, None, None
    else:
        lines.file()
        for number, line in lines_of(file):
            text = line.rstrip("\r\n")
            if unit is None:
                lines.line(text)
            yield number, text, None, None


def _paragraphs(lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Runs of lines that are not blank, as they stand, without the last one's end."""
    start, run = 0, list[str]()
    for number, text in lines:
        if text.strip():
            start = start if run else number
            run.append(text)
        elif run:
            yield start, "".join(run).rstrip("\r\n")
            run = []
    if run:
        yield start, "".join(run).rstrip("\r\n")
