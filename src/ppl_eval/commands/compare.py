"""Several results side by side, and what keeps them from being comparable."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ppl_eval.errors import UserError
from ppl_eval.metrics.definitions import FIDELITY
from ppl_eval.metrics.intervals import paired_log_ratio
from ppl_eval.report.layout import align, kept, number, wrapped
from ppl_eval.report.tables import result_rows, result_table, teacher_rows
from ppl_eval.report.terminal import too_few


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
    for content in {_teacher_read(c): c for c in contents if "teacher" in c}.values():
        name = Path(content["teacher"]["checkpoint_dir"] or "").name
        title = f"{name} (teacher)".strip()
        rows += teacher_rows(content, title, with_domains=with_domains)
    lines = [result_table(rows)]
    if any("fidelity" in content for content in contents):
        lines += ["", fidelity_table(contents, names, with_domains=with_domains), ""]
    for path, content, name in list(zip(paths, contents, names, strict=True))[1:]:
        for difference in paired(contents[0], paths[0], content, path):
            lines += wrapped(f"{name} against {names[0]}: {difference}", indent="  ")
    for note in notes(contents):
        lines += wrapped(f"note: {note}", indent="  ")
    return "\n".join(lines)


def paired(
    first: dict[str, Any], first_path: Path, other: dict[str, Any], path: Path
) -> Iterator[str]:
    """How ``other`` differs from ``first`` on the same documents, with 95 % intervals.

    Perplexity by token where both have the same tokenizer, else by byte; and KL where both were
    read beside the same teacher. Nothing where texts or protocol differ, or a documents.jsonl is
    missing.
    """
    prints = first["fingerprints"], other["fingerprints"]
    if any(prints[0][key] != prints[1][key] for key in ("data", "protocol")):
        return
    rows = _documents(first_path), _documents(path)
    if not rows[0] or len(rows[0]) != len(rows[1]):
        return

    def columns(name: str) -> list[np.ndarray]:
        return [np.asarray([row[name] for row in table]) for table in rows]

    same = prints[0]["tokenizer"] == prints[1]["tokenizer"]
    key, unit = ("scored_tokens", "token") if same else ("bytes", "byte")
    weight = columns(key)[0]
    nll, other_nll = columns("nll_nats_sum")
    if not weight.any():
        return
    ratio, interval = paired_log_ratio(other_nll, nll, weight)
    ends = None if interval is None else [f"{math.exp(end):.4f}" for end in interval]
    yield f"{unit} ppl x {math.exp(ratio):.4f}, {_interval(ends, weight)}"
    teachers = [each.get("teacher") for each in prints]
    tokens, other_tokens = columns("scored_tokens")
    if teachers[0] is None or teachers[0] != teachers[1] or (tokens != other_tokens).any():
        return
    kl, other_kl = columns("kl_teacher_student_sum")
    difference, interval = paired_log_ratio(other_kl, kl, tokens)
    ends = None if interval is None else [f"{end:+.5f}" for end in interval]
    yield f"KL to the teacher {difference:+.5f} nats, {_interval(ends, tokens)}"


def _interval(ends: Sequence[str] | None, weight: np.ndarray) -> str:
    if ends is None:
        return f"95 % {too_few(int((weight > 0).sum()))}"
    return f"{kept(f'95 % {ends[0]} to {ends[1]}')} {kept('(paired by document)')}"


def fidelity_table(
    contents: Sequence[dict[str, Any]], names: Sequence[str], *, with_domains: bool = False
) -> str:
    """A row for each run beside a teacher: how far it is from it; and for each of its domains."""
    columns = {each.key: each.heading for each in FIDELITY if each.heading}
    rows = [["beside its teacher", *columns.values()]]
    for content, name in zip(contents, names, strict=True):
        if "fidelity" not in content:
            continue
        domains = content["fidelity"]["by_domain"] if with_domains else {}
        for title, part in ((name, content["fidelity"]), *domains.items()):
            indent = "" if part is content["fidelity"] else "  "
            values = (part.get(key) for key in columns)
            cells = ("-" if value is None else number(value) for value in values)
            rows.append([indent + title, *cells])
    return align(rows)


def _teacher_read(content: dict[str, Any]) -> tuple[str, ...]:
    """What a teacher's numbers depend on."""
    prints = (content["fingerprints"][name] for name in ("teacher", "data", "protocol"))
    return *prints, content["teacher"]["dtype"]


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
    beside = [c for c in contents if "fidelity" in c]
    if len({c["fingerprints"]["teacher"] for c in beside}) > 1:
        found.append("the teachers differ: no KL is comparable")
    elif len({c["teacher"]["dtype"] for c in beside}) > 1:
        found.append(
            "the teacher was read in different dtypes: small differences of KL mean nothing"
        )
    return found
