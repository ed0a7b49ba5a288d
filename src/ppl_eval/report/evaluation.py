"""Evaluation: what ``evaluate`` returns; it can be shown, saved and compared."""

import html
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ppl_eval.errors import UserError
from ppl_eval.evaluation.loop import Measurement
from ppl_eval.plural import counted
from ppl_eval.report.layout import number
from ppl_eval.report.output import OutputFolder
from ppl_eval.report.results import RunInfo, assemble, writers
from ppl_eval.report.tables import columns_of, result_rows, result_table, teacher_rows
from ppl_eval.report.terminal import fidelity_text


@dataclass(frozen=True, repr=False, kw_only=True)
class Evaluation(Measurement):
    """The result of :func:`ppl_eval.evaluate`; the same on every rank.

    Attributes:
        info: what the numbers depend on.
    """

    info: RunInfo

    @property
    def notes(self) -> tuple[str, ...]:
        """What the reading of texts and the choice of windows decided, one sentence each."""
        return tuple(self.info.notes)

    @property
    def intervals(self) -> Mapping[str, tuple[float, float] | None]:
        """95 % interval of each metric, the documents being the sample; None for too few."""
        return self._content["intervals_95"]

    def to_dict(self) -> dict[str, Any]:
        """What results.json has. ``config``, ``command`` and the model's fingerprint are None."""
        return dict(self._content)

    def save(self, folder: str | Path) -> None:
        """Write results.json, documents.jsonl and windows.parquet, as a run does.

        With several processes let one of them call it. ``ppl-eval compare`` reads the folder.

        Raises:
            UserError: the folder cannot be written, or has files of the same names that are not
                from ppl_eval.
        """
        problem = OutputFolder(str(folder)).publish(writers(self._content, self, None))
        if problem:
            raise UserError(problem)

    def table(self) -> str:
        """The metrics of the corpus and its domains as text of 80 columns; with a teacher also its
        metrics, and how far the student is from it."""
        parts = [result_table(self._rows()[1:])]
        if "fidelity" in self._content:
            parts.append(fidelity_text(self._content["fidelity"]))
        return "\n\n".join(parts)

    def __repr__(self) -> str:
        interval = self.intervals["token_perplexity"]
        sure = "" if interval is None else ", 95 % {} to {}".format(*map(number, interval))
        total = self.summary.total
        return (
            f"Evaluation(perplexity {number(total.perplexity)}{sure};"
            f" {counted(total.num_scored, 'token')} of"
            f" {counted(total.counts['documents'], 'document')})"
        )

    def _repr_html_(self) -> str:
        def line(cells: list[str], tag: str) -> str:
            escaped = (html.escape(cell).replace("  ", "&emsp;") for cell in cells)
            return f"<tr>{''.join(f'<{tag}>{cell}</{tag}>' for cell in escaped)}</tr>"

        heading, *rows = self._rows()
        body = "".join(line(row, "td") for row in rows)
        return (
            f'<table style="text-align: right"><thead>{line(heading, "th")}</thead>'
            f"<tbody>{body}</tbody></table><p>{html.escape(repr(self))}</p>"
        )

    def _rows(self) -> list[list[str]]:
        heading = ["", *(" ".join(heading.split()) for heading, _, _ in columns_of())]
        rows = [heading, *result_rows(self._content, "all")]
        return rows + (teacher_rows(self._content, "teacher") if self.teacher else [])

    @cached_property
    def _content(self) -> dict[str, Any]:
        return assemble(self, self.info)
