"""The files of a run against each other, and against the windows that its texts give."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ppl_eval.errors import UserError
from ppl_eval.plural import counted
from ppl_eval.report.output import DOCUMENTS, TOKENS, WINDOWS
from ppl_eval.verify.windows import Window

_SAME_SUM = 1e-9
"""Relative difference of two sums of the same float64 numbers, added in different orders."""


def windows_differ(
    number: int, windows: list[Window], rows: Mapping[str, np.ndarray]
) -> Iterator[str]:
    """Whether a document has other windows than the run scored."""
    expected = [(window.start, len(window.scored)) for window in windows]
    begin, end = np.searchsorted(rows["document"], [number, number + 1])
    columns = (rows[name][begin:end].tolist() for name in ("start", "scored_tokens"))
    scored = list(zip(*columns, strict=True))
    if expected != scored:
        pairs = enumerate(zip(expected, scored, strict=False))
        shorter = min(len(expected), len(scored))
        place = next((number for number, (one, other) in pairs if one != other), shorter)
        yield (
            f"document {number} has {counted(len(expected), 'window')}, and the run scored"
            f" {len(scored):,}: window {place} is {_window(expected, place)}, and the run's"
            f" {_window(scored, place)}"
        )


def _window(windows: list[tuple[int, int]], place: int) -> str:
    if place >= len(windows):
        return "none"
    start, num_scored = windows[place]
    return f"{counted(num_scored, 'scored token')} from token {start} on"


def tokens_differ(num_tokens: int, counts: Mapping[str, Any]) -> Iterator[str]:
    """Whether scored and unscored tokens are all tokens of the texts."""
    unscored = {name: n for name, n in counts["not_scored"].items() if name != "empty"}
    found = counts["scored_tokens"] + sum(unscored.values())
    if found != num_tokens:
        yield (
            f"the texts have {num_tokens:,} tokens, but {counts['scored_tokens']:,} scored and"
            f" {sum(unscored.values()):,} unscored ones are {found:,}"
        )


def sums_differ(
    content: Mapping[str, Any],
    rows: Mapping[str, np.ndarray],
    documents: list[dict[str, Any]],
    folder: Path,
) -> Iterator[str]:
    """Whether windows, documents, domains, positions and tokens add up to results.json."""
    total = content["counts"]["scored_tokens"], content["metrics"]["nll_nats_sum"]
    by_domain = [(d["counts"], d["metrics"]) for d in content["domains"].values()]
    with_domain = [row for row in documents if row["domain"] is not None]
    tables = {
        WINDOWS: (rows["scored_tokens"].tolist(), rows["nll_nats_sum"].tolist(), total),
        DOCUMENTS: (*_columns(documents), total),
        "its domains": (
            [counts["scored_tokens"] for counts, _ in by_domain],
            [metrics["nll_nats_sum"] for _, metrics in by_domain],
            tuple(
                f(column) for f, column in zip((sum, math.fsum), _columns(with_domain), strict=True)
            ),
        ),
    }
    positions = content["loss_by_position"]
    tables["loss_by_position"] = (
        [row["scored_tokens"] for row in positions],
        [row["scored_tokens"] * row["nll_nats_per_token"] for row in positions],
        total,
    )
    if (folder / TOKENS).is_file():
        import pyarrow.parquet as pq

        nll = pq.read_table(folder / TOKENS, columns=["nll_nats"])["nll_nats"].drop_null()
        tables[TOKENS] = ([len(nll)], [math.fsum(nll.to_pylist())], total)
    for name, (scored, nll, (num_scored, nll_sum)) in tables.items():
        if sum(scored) != num_scored or not math.isclose(
            math.fsum(nll), nll_sum, rel_tol=_SAME_SUM, abs_tol=_SAME_SUM
        ):
            yield (
                f"{name} adds up to {sum(scored):,} scored tokens and {math.fsum(nll):.6f} nats,"
                f" but results.json has {num_scored:,} and {nll_sum:.6f}"
            )


def _columns(documents: list[dict[str, Any]]) -> tuple[list[int], list[float]]:
    return (
        [row["scored_tokens"] for row in documents],
        [row["nll_nats_sum"] for row in documents],
    )


def read_windows(folder: Path) -> dict[str, np.ndarray]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(folder / WINDOWS)
        names = ("document", "start", "scored_tokens", "nll_nats_sum")
        return {name: table[name].to_numpy() for name in names}
    except (OSError, pa.ArrowInvalid, KeyError) as error:
        raise UserError(
            f"{folder / WINDOWS} cannot be read, so no window can be compared: it is missing or was"
            " cut short; run the evaluation again"
        ) from error


def read_documents(folder: Path) -> list[dict[str, Any]]:
    try:
        with (folder / DOCUMENTS).open(encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder / DOCUMENTS} cannot be read: it is missing or was cut short; run the"
            " evaluation again"
        ) from error
