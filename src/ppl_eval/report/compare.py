"""Several results side by side, and what keeps them from being comparable."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ppl_eval.errors import UserError
from ppl_eval.report.tables import result_rows, result_table


def compare(paths: Sequence[Path], *, with_domains: bool = False) -> str:
    """A table with a row for each run, and a line for each reason not to compare them.

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
    table = result_table(rows)
    return "\n".join([table, *(f"note: {note}" for note in notes(contents))])


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
