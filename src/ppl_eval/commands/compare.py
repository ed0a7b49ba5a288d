"""``ppl-eval compare``: results side by side, and what their differences establish."""

import csv
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ppl_eval.commands.runs import (
    FIDELITY_KEYS,
    Difference,
    Run,
    differences_of,
    folder_of,
    marked,
    read_runs,
)
from ppl_eval.errors import UserError
from ppl_eval.hints import did_you_mean
from ppl_eval.metrics.definitions import FEWEST_DOCUMENTS, FIDELITY, METRICS
from ppl_eval.plural import counted
from ppl_eval.report.layout import align, kept, markdown, number, wrapped
from ppl_eval.report.output import DOCUMENTS, RESULTS
from ppl_eval.report.tables import columns_of, result_rows, teacher_rows

FORMATS = ("table", "markdown", "csv", "json")
_SORT_KEYS = ("name", *(each.key for each in METRICS), *FIDELITY_KEYS)


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
    runs, notes = read_runs([*paths, *([] if baseline is None else [baseline])])
    wanted = folder_of(paths[0] if baseline is None else baseline).resolve()
    base = next((run for run in runs if run.folder.resolve() == wanted), runs[0])
    if baseline is not None and base.folder.resolve() != wanted:
        raise UserError(f"--baseline is {baseline}, which has no {RESULTS}: has the run ended?")
    runs = [marked(run, base, force) for run in runs]
    by_bytes = not force and len({run.content["fingerprints"]["tokenizer"] for run in runs}) > 1
    if by_bytes:
        notes.append(
            "the tokenizers differ, so only losses by byte and character are shown (--force shows"
            " all)"
        )
    if sort is not None:
        runs.sort(key=lambda run: ((value := run.value(sort)) is None, value or 0))
    differences = {run.name: [*differences_of(base, run)] for run in runs if run.name != base.name}
    if format == "json":
        return json.dumps([_record(run, base, differences) for run in runs], indent=2)
    if format == "csv":
        return _csv([_flat(_record(run, base, differences)) for run in runs])
    notes += [f"* {run.name}: {mark}" for run in runs for mark in run.marks]
    notes += [
        f"{run.name} has no {DOCUMENTS}, so it takes part in no paired difference"
        for run in runs
        if not (run.folder / DOCUMENTS).is_file() and len(runs) > 1
    ]
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
        **{key: fidelity[key] for key in FIDELITY_KEYS if key in fidelity},
        "against_baseline": [
            {
                "metric": each.metric,
                "ratio" if each.neutral == 1 else "difference_nats": _finite(each.value),
                "interval_95": None if each.low is None else [*map(_finite, (each.low, each.high))],
                "established": each.is_established,
            }
            for each in differences.get(run.name, ())
        ],
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


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
