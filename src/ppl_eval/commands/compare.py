"""``ppl-eval compare``: results side by side, and what their differences establish."""

import csv
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ppl_eval.errors import UserError
from ppl_eval.files import read_json
from ppl_eval.hints import did_you_mean
from ppl_eval.metrics.definitions import FEWEST_DOCUMENTS, FIDELITY, METRICS
from ppl_eval.metrics.intervals import paired_log_ratio
from ppl_eval.plural import counted, some
from ppl_eval.report.layout import align, kept, markdown, number, wrapped
from ppl_eval.report.output import DOCUMENTS, RESULTS
from ppl_eval.report.tables import columns_of, result_rows, teacher_rows

FORMATS = ("table", "markdown", "csv", "json")
_FIDELITY_KEYS = tuple(each.key for each in FIDELITY)
_SORT_KEYS = ("name", *(each.key for each in METRICS), *_FIDELITY_KEYS)


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        folder: its output folder.
        name: the shortest end of the path that no other run shares.
        content: its results.json.
        marks: why its numbers cannot be compared with the baseline's, if ``--force`` shows them.
    """

    folder: Path
    name: str
    content: Mapping[str, Any]
    marks: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The name in tables; a star says that the row cannot be compared with the baseline's."""
        return f"{self.name} *" if self.marks else self.name

    def value(self, key: str) -> float | str | None:
        """A metric, or what tells how far the run is from its teacher, or ``name``."""
        if key == "name":
            return self.name
        part = (
            self.content.get("fidelity", {}) if key in _FIDELITY_KEYS else self.content["metrics"]
        )
        return part.get(key)


@dataclass(frozen=True)
class Difference:
    """How a run differs from the baseline on the same documents, paired by document.

    Attributes:
        metric: what was compared, such as ``perplexity``.
        value: the ratio of the two; for KL the difference in nats.
        low: lower end of its 95 % interval, None where there is no interval.
        high: upper end.
        neutral: the value of no difference.
        num_documents: that have something to compare.
    """

    metric: str
    value: float
    low: float | None
    high: float | None
    neutral: float
    num_documents: int

    @property
    def is_established(self) -> bool:
        """Whether the 95 % interval leaves out the value of no difference."""
        if self.low is None or self.high is None:
            return False
        return not self.low <= self.neutral <= self.high


def compare(
    paths: Sequence[Path],
    *,
    baseline: Path | None = None,
    sort: str | None = None,
    format: str = "table",
    with_domains: bool = False,
    force: bool = False,
) -> str:
    """A row for each run, and how each differs from the baseline.

    Args:
        paths: output folders, or results.json files. A folder without results is left out, and a
            note says so.
        baseline: the run that the others are compared with; None: the first of ``paths``.
        sort: ``name``, or the key of a metric, least first; None: the order of ``paths``.
        format: one of :data:`FORMATS`; csv and json have all digits.
        with_domains: below each run, a row for each of its domains.
        force: show runs that cannot be compared with the baseline too, and mark them.

    Raises:
        UserError: no results at all, a file that is no results.json, an unknown key to sort by, or
            (without ``force``) runs over different texts or by different protocols.
    """
    if sort is not None and sort not in _SORT_KEYS:
        hint = did_you_mean(sort, _SORT_KEYS) or f": it is one of {', '.join(_SORT_KEYS)}"
        raise UserError(f"--sort is {sort!r}, which is no metric{hint}")
    runs, notes = _read([*paths, *([] if baseline is None else [baseline])])
    wanted = _folder(paths[0] if baseline is None else baseline)
    base = next((run for run in runs if run.folder == wanted), runs[0])
    if baseline is not None and base.folder != wanted:
        raise UserError(f"--baseline is {baseline}, which has no {RESULTS}: has the run ended?")
    runs = [_marked(run, base, force) for run in runs]
    by_bytes = not force and len({run.content["fingerprints"]["tokenizer"] for run in runs}) > 1
    if by_bytes:
        notes.append(
            "the tokenizers differ, so only losses by byte and character are shown (--force shows"
            " all)"
        )
    if sort is not None:
        runs.sort(key=lambda run: ((value := run.value(sort)) is None, value or 0))
    differences = {run.name: [*_differences(base, run)] for run in runs if run.name != base.name}
    if format == "json":
        return json.dumps([_record(run, base, differences) for run in runs], indent=2)
    if format == "csv":
        return _csv([_flat(_record(run, base, differences)) for run in runs])
    notes += [f"* {run.name}: {mark}" for run in runs for mark in run.marks]
    notes += _teacher_notes(runs)
    table = align if format == "table" else markdown
    blocks = [table(_rows(runs, with_domains, by_bytes))]
    if any("fidelity" in run.content for run in runs):
        blocks.append(table(fidelity_rows(runs, with_domains=with_domains)))
    bullet = "- " if format == "markdown" else ""
    sentences = [
        f"{run.name}: {sentence(difference, base.name)}"
        for run in runs
        for difference in differences.get(run.name, ())
    ]
    lines = [*sentences, *(f"note: {note}" for note in notes)]
    if lines:
        broken = [wrapped(bullet + line, indent="  ") for line in lines]
        blocks.append("\n".join(line for part in broken for line in part))
    return "\n\n".join(blocks)


def sentence(difference: Difference, base: str) -> str:
    """What a difference is, and whether it is established."""
    low, high = difference.low, difference.high
    is_ratio = difference.neutral == 1
    is_wide = low is None or high is None or high - low > 0.01
    digits = 3 if is_ratio and is_wide else 5
    shown: Callable[[float], str] = f"{{:{'' if is_ratio else '+'}.{digits}f}}".format
    if is_ratio:
        text = f"{difference.metric} x {shown(difference.value)} of {base}"
    else:
        text = f"{difference.metric} {shown(difference.value)} nats against {base}"
    if low is None or high is None:
        few = f"{counted(difference.num_documents, 'document')} of at least {FEWEST_DOCUMENTS}"
        return f"{text}; no interval ({few}), so nothing is established"
    interval = kept(f"(95 % {shown(low)} to {shown(high)})")
    state = "established" if difference.is_established else "not established"
    return f"{text} {interval}; the difference is {state}"


def _rows(runs: Sequence[Run], with_domains: bool, by_bytes: bool) -> list[list[str]]:
    """The table of metrics with its heading, then the teachers that differ."""
    columns = columns_of(by_bytes=by_bytes)
    rows = [["", *(heading for heading, _, _ in columns)]]
    for run in runs:
        rows += result_rows(run.content, run.title, columns, with_domains=with_domains)
    with_teacher = {_teacher_key(r.content): r for r in runs if "teacher" in r.content}
    for run in with_teacher.values():
        name = Path(run.content["teacher"]["checkpoint_dir"] or "").name
        title = f"{name} (teacher)".strip()
        rows += teacher_rows(run.content, title, columns, with_domains=with_domains)
    return rows


def fidelity_rows(runs: Sequence[Run], *, with_domains: bool = False) -> list[list[str]]:
    """A row for each run with a teacher: how far it is from its teacher; also by domain."""
    columns = {each.key: each.heading for each in FIDELITY if each.heading}
    rows = [["versus its teacher", *columns.values()]]
    for run in runs:
        if "fidelity" not in run.content:
            continue
        parts = [(run.title, run.content["fidelity"])]
        if with_domains:
            by_domain = run.content["fidelity"]["by_domain"]
            parts += [(f"  {key}", part) for key, part in by_domain.items()]
        for title, part in parts:
            values = (part.get(key) for key in columns)
            rows.append([title, *("-" if value is None else number(value) for value in values)])
    return rows


def _record(run: Run, base: Run, differences: Mapping[str, Sequence[Difference]]) -> dict[str, Any]:
    """One run for csv and json."""
    fidelity = run.content.get("fidelity", {})
    return {
        "name": run.name,
        "path": str(run.folder),
        "is_baseline": run.name == base.name,
        "not_comparable": list(run.marks),
        "documents": run.content["counts"]["documents"],
        "scored_tokens": run.content["counts"]["scored_tokens"],
        **{each.key: run.value(each.key) for each in METRICS},
        **{key: fidelity[key] for key in _FIDELITY_KEYS if key in fidelity},
        "against_baseline": [
            {
                "metric": each.metric,
                "ratio" if each.neutral == 1 else "difference_nats": each.value,
                "interval_95": None if each.low is None else [each.low, each.high],
                "established": each.is_established,
            }
            for each in differences.get(run.name, ())
        ],
    }


def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record with the first difference in columns of its own."""
    flat = {key: value for key, value in record.items() if key != "against_baseline"}
    flat["not_comparable"] = "; ".join(record["not_comparable"])
    first = next(iter(record["against_baseline"]), {})
    low, high = first.get("interval_95") or (None, None)
    return flat | {
        "ratio_of": first.get("metric"),
        "ratio": first.get("ratio"),
        "ratio_low": low,
        "ratio_high": high,
        "established": first.get("established"),
    }


def _csv(records: Sequence[Mapping[str, Any]]) -> str:
    keys = dict.fromkeys(key for record in records for key in record)
    file = io.StringIO()
    writer = csv.DictWriter(file, keys, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return file.getvalue().rstrip("\n")


def _differences(base: Run, run: Run) -> Iterator[Difference]:
    """Perplexity by token if the tokenizers are the same, else by byte; and the KL if both runs
    have the same teacher. None of two runs that cannot be compared."""
    if run.marks and any(mark != _TOKENIZER for mark in run.marks):
        return
    tables = _documents(base.folder), _documents(run.folder)
    if not tables[0] or len(tables[0]) != len(tables[1]):
        return

    def columns(name: str) -> list[np.ndarray]:
        return [np.asarray([row[name] for row in table]) for table in tables]

    prints = [each.content["fingerprints"] for each in (base, run)]
    same_tokenizer = prints[0]["tokenizer"] == prints[1]["tokenizer"]
    weight = columns("scored_tokens" if same_tokenizer else "bytes")[0]
    nll, other_nll = columns("nll_nats_sum")
    if not weight.any():
        return
    name = "perplexity" if same_tokenizer else "byte perplexity"
    yield _paired(name, nll, other_nll, weight, math.exp, neutral=1.0)
    teachers = [each.get("teacher") for each in prints]
    tokens, other_tokens = columns("scored_tokens")
    if teachers[0] is None or teachers[0] != teachers[1] or (tokens != other_tokens).any():
        return
    kl, other_kl = columns("kl_teacher_student_sum")
    yield _paired("KL to the teacher", kl, other_kl, tokens, lambda x: x, neutral=0.0)


def _paired(
    metric: str,
    first: np.ndarray,
    other: np.ndarray,
    weight: np.ndarray,
    form: Callable[[float], float],
    neutral: float,
) -> Difference:
    difference, interval = paired_log_ratio(other, first, weight)
    low, high = (None, None) if interval is None else map(form, interval)
    return Difference(metric, form(difference), low, high, neutral, int((weight > 0).sum()))


_TOKENIZER = "its tokenizer differs: compare byte ppl and bits/byte, not token ppl"


def _marked(run: Run, base: Run, force: bool) -> Run:
    """The run with the reasons not to compare it with the baseline.

    Raises:
        UserError: there is one that also forbids bits per byte, and ``force`` is not given.
    """
    prints = [each.content["fingerprints"] for each in (base, run)]
    marks = []
    if prints[0]["data"] != prints[1]["data"]:
        marks.append("it read other texts")
    protocols = [_comparable(each.content["protocol"]) for each in (base, run)]
    changed = [
        f"{key} is {protocols[1].get(key)!r}, not {value!r}"
        for key, value in protocols[0].items()
        if protocols[1].get(key) != value
    ]
    if changed:
        marks.append(f"its protocol differs: {', '.join(changed)}")
    if marks and not force:
        raise UserError(
            f"{run.name} cannot be compared with {base.name}: {marks[0]}; leave it out, or mark its"
            " row with --force"
        )
    if force and prints[0]["tokenizer"] != prints[1]["tokenizer"]:
        marks.append(_TOKENIZER)
    return Run(run.folder, run.name, run.content, tuple(marks))


def _comparable(protocol: Mapping[str, Any]) -> dict[str, Any]:
    """The rule and its parameters; of each special token whether there is one, not its id."""
    return {
        key.replace("_id", ""): value is not None if key.endswith("_id") else value
        for key, value in protocol.items()
        if key != "quirks"
    }


def _teacher_key(content: Mapping[str, Any]) -> tuple[str, ...]:
    """Everything that a teacher's numbers depend on."""
    prints = (content["fingerprints"][name] for name in ("teacher", "data", "protocol"))
    return *prints, content["teacher"]["dtype"]


def _teacher_notes(runs: Sequence[Run]) -> Iterator[str]:
    """Why divergences from the teachers cannot be compared."""
    contents = [run.content for run in runs if "fidelity" in run.content]
    if len({content["fingerprints"]["teacher"] for content in contents}) > 1:
        yield "the teachers differ: no KL is comparable"
    elif len({content["teacher"]["dtype"] for content in contents}) > 1:
        yield "the teacher was read in different dtypes: small differences of KL mean nothing"


def _read(paths: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """The runs, each once, and a note on folders without results."""
    contents, missing = {}, []
    for folder in dict.fromkeys(map(_folder, paths)):
        if (folder / RESULTS).is_file():
            contents[folder] = _read_results(folder / RESULTS)
        else:
            missing.append(str(folder))
    if not contents:
        raise UserError(f"there is no {RESULTS} in {some(missing)}: have the runs ended?")
    names = _short_names([folder.resolve() for folder in contents])
    runs = [Run(f, name, c) for (f, c), name in zip(contents.items(), names, strict=True)]
    return runs, [f"{folder} has no {RESULTS}: left out" for folder in missing]


def _folder(path: Path) -> Path:
    return path.parent if path.name == RESULTS else path


def _short_names(folders: Sequence[Path]) -> list[str]:
    """The shortest end of each path that no other has."""

    def end(folder: Path, length: int) -> str:
        return "/".join(folder.parts[-length:])

    def shortest(folder: Path) -> str:
        others = [other for other in folders if other != folder]
        for length in range(1, len(folder.parts)):
            if end(folder, length) not in {end(other, length) for other in others}:
                return end(folder, length)
        return str(folder)

    return [shortest(folder) for folder in folders]


def _documents(folder: Path) -> list[dict[str, Any]]:
    """The rows of documents.jsonl; none if there is no such file."""
    file = folder / DOCUMENTS
    if not file.is_file():
        return []
    with file.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _read_results(file: Path) -> dict[str, Any]:
    content = read_json(file)
    missing = {"schema_version", "counts", "metrics", "domains", "fingerprints", "protocol"}
    missing -= set(content)
    if missing:
        raise UserError(
            f"{file} is no results.json of ppl_eval: it lacks {', '.join(sorted(missing))}"
        )
    return content
