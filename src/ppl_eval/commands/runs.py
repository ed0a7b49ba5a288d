"""Finished runs, what makes two of them comparable, and how they differ."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ppl_eval.errors import UserError
from ppl_eval.files import read_json
from ppl_eval.metrics.definitions import FIDELITY, exp_or_inf
from ppl_eval.metrics.intervals import paired_log_ratio
from ppl_eval.plural import some
from ppl_eval.report.output import DOCUMENTS, RESULTS

FIDELITY_KEYS = tuple(each.key for each in FIDELITY)


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
        part = self.content.get("fidelity", {}) if key in FIDELITY_KEYS else self.content["metrics"]
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


def read_runs(paths: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """The runs, each once, and a note on folders without results."""
    contents, missing = {}, []
    folders: dict[Path, Path] = {}
    for path in paths:
        folders.setdefault(folder_of(path).resolve(), folder_of(path))
    for folder in folders.values():
        if (folder / RESULTS).is_file():
            contents[folder] = _read_results(folder / RESULTS)
        else:
            missing.append(str(folder))
    if not contents:
        raise UserError(f"there is no {RESULTS} in {some(missing)}: have the runs ended?")
    names = _short_names([folder.resolve() for folder in contents])
    runs = [Run(f, name, c) for (f, c), name in zip(contents.items(), names, strict=True)]
    return runs, [f"{folder} has no {RESULTS}: left out" for folder in missing]


def folder_of(path: Path) -> Path:
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


def differences_of(base: Run, run: Run) -> Iterator[Difference]:
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
    yield _paired(name, nll, other_nll, weight, exp_or_inf, neutral=1.0)
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


def marked(run: Run, base: Run, force: bool) -> Run:
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
