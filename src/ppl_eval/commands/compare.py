"""``ppl-eval compare``: several results as one table, and reasons not to compare them."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ppl_eval.errors import UserError
from ppl_eval.files import read_json
from ppl_eval.metrics.definitions import FIDELITY
from ppl_eval.metrics.intervals import paired_log_ratio
from ppl_eval.report.layout import align, kept, number, wrapped
from ppl_eval.report.tables import result_rows, result_table, teacher_rows
from ppl_eval.report.terminal import too_few


def compare(paths: Sequence[Path], *, with_domains: bool = False) -> str:
    """A table with a row for each run, each run's difference from the first, and notes.

    Args:
        paths: output folders, or results.json files.
        with_domains: below each run, a row for each of its domains.

    Raises:
        UserError: a file that is missing or is not a results.json of ppl_eval.
    """
    contents = [_read_results(path) for path in paths]
    folders = [path if path.is_dir() else path.parent for path in paths]
    names = [folder.resolve().name for folder in folders]
    rows = []
    for content, name in zip(contents, names, strict=True):
        rows += result_rows(content, name, with_domains=with_domains)
    for content in {_teacher_key(c): c for c in contents if "teacher" in c}.values():
        name = Path(content["teacher"]["checkpoint_dir"] or "").name
        rows += teacher_rows(content, f"{name} (teacher)".strip(), with_domains=with_domains)
    lines = [result_table(rows)]
    if any("fidelity" in content for content in contents):
        lines += ["", fidelity_table(contents, names, with_domains=with_domains), ""]
    for folder, content, name in list(zip(folders, contents, names, strict=True))[1:]:
        for difference in _differences(contents[0], folders[0], content, folder):
            lines += wrapped(f"{name} against {names[0]}: {difference}", indent="  ")
    for note in _notes(contents):
        lines += wrapped(f"note: {note}", indent="  ")
    return "\n".join(lines)


def _differences(
    first: Mapping[str, Any], first_folder: Path, other: Mapping[str, Any], folder: Path
) -> Iterator[str]:
    """How ``other`` differs from ``first`` on the same documents, with 95 % intervals.

    Perplexity by token if the tokenizers are the same, else by byte; and KL if both runs have the
    same teacher. Nothing if texts or protocol differ, or a documents.jsonl is missing.
    """
    prints = first["fingerprints"], other["fingerprints"]
    if any(prints[0][key] != prints[1][key] for key in ("data", "protocol")):
        return
    tables = _documents(first_folder), _documents(folder)
    if not tables[0] or len(tables[0]) != len(tables[1]):
        return

    def columns(name: str) -> list[np.ndarray]:
        return [np.asarray([row[name] for row in table]) for table in tables]

    same_tokenizer = prints[0]["tokenizer"] == prints[1]["tokenizer"]
    key, unit = ("scored_tokens", "token") if same_tokenizer else ("bytes", "byte")
    weight = columns(key)[0]
    nll, other_nll = columns("nll_nats_sum")
    if not weight.any():
        return
    yield f"{unit} ppl x {_paired(nll, other_nll, weight, lambda x: f'{math.exp(x):.4f}')}"
    teachers = [each.get("teacher") for each in prints]
    tokens, other_tokens = columns("scored_tokens")
    if teachers[0] is None or teachers[0] != teachers[1] or (tokens != other_tokens).any():
        return
    kl, other_kl = columns("kl_teacher_student_sum")
    yield f"KL to the teacher {_paired(kl, other_kl, tokens, '{:+.5f}'.format, ' nats')}"


def _paired(
    first: np.ndarray,
    other: np.ndarray,
    weight: np.ndarray,
    shown: Callable[[float], str],
    unit: str = "",
) -> str:
    """The difference of two means over documents, and its 95 % interval."""
    difference, interval = paired_log_ratio(other, first, weight)
    found = f"{shown(difference)}{unit}, "
    if interval is None:
        return f"{found}95 % {too_few(int((weight > 0).sum()))}"
    low, high = map(shown, interval)
    return f"{found}{kept(f'95 % {low} to {high}')} {kept('(paired by document)')}"


def fidelity_table(
    contents: Sequence[Mapping[str, Any]], names: Sequence[str], *, with_domains: bool = False
) -> str:
    """A row for each run with a teacher: how far it is from its teacher; also by domain."""
    columns = {each.key: each.heading for each in FIDELITY if each.heading}
    rows = [["versus its teacher", *columns.values()]]
    for content, name in zip(contents, names, strict=True):
        if "fidelity" not in content:
            continue
        parts = [(name, content["fidelity"])]
        if with_domains:
            parts += [(f"  {key}", part) for key, part in content["fidelity"]["by_domain"].items()]
        for title, part in parts:
            values = (part.get(key) for key in columns)
            rows.append([title, *("-" if value is None else number(value) for value in values)])
    return align(rows)


def _teacher_key(content: Mapping[str, Any]) -> tuple[str, ...]:
    """Everything that a teacher's numbers depend on."""
    prints = (content["fingerprints"][name] for name in ("teacher", "data", "protocol"))
    return *prints, content["teacher"]["dtype"]


def _documents(folder: Path) -> list[dict[str, Any]]:
    """The rows of documents.jsonl; none if there is no such file."""
    file = folder / "documents.jsonl"
    if not file.is_file():
        return []
    with file.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _read_results(path: Path) -> dict[str, Any]:
    file = path / "results.json" if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"there is no {file}: has the run ended?")
    content = read_json(file)
    missing = {"schema_version", "counts", "metrics", "domains", "fingerprints"} - set(content)
    if missing:
        raise UserError(
            f"{file} is no results.json of ppl_eval: it lacks {', '.join(sorted(missing))}"
        )
    return content


def _notes(contents: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Why numbers of these runs may not be compared, one sentence each."""
    with_teacher = [content for content in contents if "fidelity" in content]

    def differ(key: str, among: Sequence[Mapping[str, Any]] = contents) -> bool:
        return len({content["fingerprints"][key] for content in among}) > 1

    if differ("data"):
        yield "the runs read different texts: no number is comparable"
    if differ("tokenizer"):
        yield "the tokenizers differ: compare byte ppl and bits/byte, not token ppl"
    if differ("protocol"):
        yield "the protocols differ: windows, stride, BOS or EOS are not the same"
    if differ("teacher", with_teacher):
        yield "the teachers differ: no KL is comparable"
    elif len({content["teacher"]["dtype"] for content in with_teacher}) > 1:
        yield "the teacher was read in different dtypes: small differences of KL mean nothing"
