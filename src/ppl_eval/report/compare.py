"""Several results side by side, and what keeps them from being comparable."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ppl_eval.errors import UserError
from ppl_eval.metrics.intervals import paired_log_ratio
from ppl_eval.report.tables import result_rows, result_table


def compare(paths: Sequence[Path], *, with_domains: bool = False) -> str:
    """A table with a row for each run, how each differs from the first on the same documents, and a
    line for each reason not to compare them.

    Args:
        paths: output folders, or results.json files.
        with_domains: below each run, a row for each of its domains.

    Raises:
        UserError: a file that is missing or is no result of ours.
    """
    contents = [read_results(path) for path in paths]
    names = [(path.parent if path.suffix == ".json" else path).resolve().name for path in paths]
    rows = []
    for content, name in zip(contents, names, strict=True):
        rows += result_rows(content, name, with_domains=with_domains)
    lines = [result_table(rows)]
    for path, content, name in list(zip(paths, contents, names, strict=True))[1:]:
        difference = paired(contents[0], paths[0], content, path)
        if difference is not None:
            lines.append(f"{name} against {names[0]}: {difference}")
    return "\n".join([*lines, *(f"note: {note}" for note in notes(contents))])


def paired(
    first: dict[str, Any], first_path: Path, other: dict[str, Any], path: Path
) -> str | None:
    """How ``other`` differs from ``first`` on the same documents, with its 95 % interval.

    By token where both have the same tokenizer, else by byte. None where texts or protocol differ,
    where a documents.jsonl is missing, and for fewer than two documents.
    """
    prints = first["fingerprints"], other["fingerprints"]
    if any(prints[0][key] != prints[1][key] for key in ("data", "protocol")):
        return None
    rows = _documents(first_path), _documents(path)
    if not rows[0] or len(rows[0]) != len(rows[1]):
        return None
    nll, other_nll = (np.asarray([row["nll_nats_sum"] for row in table]) for table in rows)
    same = prints[0]["tokenizer"] == prints[1]["tokenizer"]
    key, unit = ("scored_tokens", "token") if same else ("bytes", "byte")
    weight = np.asarray([row[key] for row in rows[0]])
    ratio, interval = paired_log_ratio(other_nll, nll, weight)
    if interval is None:
        return None
    low, high = (math.exp(end) for end in interval)
    return f"{unit} ppl x {math.exp(ratio):.4f}, 95 % {low:.4f} to {high:.4f} (paired by document)"


def _documents(path: Path) -> list[dict[str, Any]]:
    """The lines of the documents.jsonl beside a results.json; none if there is no such file."""
    file = (path if path.is_dir() else path.parent) / "documents.jsonl"
    if not file.is_file():
        return []
    with file.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def read_results(path: Path) -> dict[str, Any]:
    """The content of a results.json, given itself or its folder."""
    file = path / "results.json" if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}; has the run ended?") from error
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {error}") from error
    sections = {"schema_version", "counts", "metrics", "domains", "fingerprints"}
    missing = sections - set(content) if isinstance(content, dict) else sections
    if missing:
        raise UserError(
            f"{file} is no results.json of ppl_eval: it lacks {', '.join(sorted(missing))}"
        )
    return content


def notes(contents: Sequence[dict[str, Any]]) -> list[str]:
    """Why numbers of these runs may not be compared, one sentence each; empty if they may."""

    def differ(name: str) -> bool:
        return len({content["fingerprints"][name] for content in contents}) > 1

    found = []
    if differ("data"):
        found.append("the runs read different texts: no number is comparable")
    if differ("tokenizer"):
        found.append("the tokenizers differ: compare byte ppl and bits/byte, not token ppl")
    if differ("protocol"):
        found.append("the protocols differ: windows, stride, BOS or EOS are not the same")
    return found
