"""Verify a finished run: windows of the raw text, scored by a plain model, against its files."""

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from ppl_eval.config.build import build
from ppl_eval.config.schema import EvalConfig
from ppl_eval.errors import UserError
from ppl_eval.files import read_json
from ppl_eval.parallel.process_group import device_type
from ppl_eval.plural import counted
from ppl_eval.report.output import DOCUMENTS, RESULTS, replace_results
from ppl_eval.report.results import SCHEMA_VERSION, write_results
from ppl_eval.verify.files import (
    read_documents,
    read_windows,
    sums_differ,
    tokens_differ,
    windows_differ,
)
from ppl_eval.verify.plain import PlainModel, load_plain
from ppl_eval.verify.texts import Texts
from ppl_eval.verify.windows import Window

TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-3}
"""dtype -> how far the NLL of a window, and of all of them, may be from the plain model's: relative
to it, or to 1 nat a token if it is less."""

_DYNAMIC = 1e-3
"""The same where activations are quantised: their last bit may round to another int8."""

_WINDOWS = 20
"""Windows that ``ppl-eval verify`` compares where neither it nor the config says how many."""

_CAUSAL = 1e-3
"""Nats by which a later token may change an earlier loss. In fp32 kernels that group tokens, such
as those of mixtures of experts, round by much less."""


def verify_run(folder: Path, cfg: EvalConfig) -> str:
    """Verify the run in ``folder`` and write the ``verify`` section of its results.json.

    One process is enough: no other rank may wait meanwhile.

    Args:
        folder: the output folder of a finished run.
        cfg: the run's config; ``cfg.verify`` has the number of windows and the tolerance.

    Returns:
        What was found, in words.

    Raises:
        UserError: a number differs by more than the tolerance, after the section is written; a file
            of the run is missing, was cut short, or is of another schema.
    """
    content = read_results(folder)
    section = _verify(folder, content, cfg)
    content["verify"] = None if isinstance(section, str) else section
    replace_results(folder, partial(write_results, content=content))
    if isinstance(section, str):
        return f"not verified: {section}"
    if section["problems"]:
        more = len(section["problems"]) - 1
        raise UserError(
            f"{folder} is not verified: {section['problems'][0]}"
            + (
                f" (and {counted(more, 'more problem')}: see verify in results.json)"
                if more
                else ""
            )
        )
    return (
        f"verified {section['windows']:,} of {counted(section['windows_of_run'], 'window')} by"
        f" {section['method']}: NLL {section['relative_difference']:+.1e} in total, at most"
        f" {section['largest_relative_difference']:.1e} in a window"
        f" (tolerance {section['tolerance']:.0e})"
    )


def verify_folder(folder: Path, windows: int | str | None, tolerance: float | None) -> str:
    """``ppl-eval verify``: :func:`verify_run` with the config that results.json has.

    Args:
        folder: the output folder of a finished run; its relative paths are of the current folder.
        windows: number of windows, or ``all``; None: as the config says, else
            :data:`_WINDOWS`.
        tolerance: None: by the run's dtype.
    """
    content = read_results(folder)
    if content.get("config") is None:  # saved from Python
        for problem in sums_differ(content, read_windows(folder), read_documents(folder), folder):
            raise UserError(f"{folder} is not verified: {problem}")
        return (
            f"the files of {folder} agree with each other; windows were not scored again, because"
            " results.json has no config"
        )
    config = dict(content["config"])
    asked = {**config.get("verify", {}), **({"tolerance": tolerance} if tolerance else {})}
    asked["windows"] = windows or asked.get("windows") or _WINDOWS
    cfg = build({**config, "verify": asked}, {})
    return verify_run(folder, cfg)


def read_results(folder: Path) -> dict[str, Any]:
    """The results.json in a folder.

    Raises:
        UserError: there is none, or it is of another schema.
    """
    file = folder / RESULTS
    if not file.is_file():
        raise UserError(f"there is no {file}: give the output folder of a finished run")
    content = read_json(file)
    if content.get("schema_version") != SCHEMA_VERSION:
        raise UserError(
            f"{file} has schema_version {content.get('schema_version')!r}, but this version of"
            f" ppl_eval reads {SCHEMA_VERSION}: verify it with the version that wrote it"
        )
    return content


def _verify(folder: Path, content: Mapping[str, Any], cfg: EvalConfig) -> dict[str, Any] | str:
    """The section; or why the model does not fit into one process."""
    started = perf_counter()
    rows, documents = read_windows(folder), read_documents(folder)
    texts = Texts(cfg, content["protocol"])
    if len(texts.documents) != len(documents):
        raise UserError(
            f"{folder} has {counted(len(documents), 'document')}, but its texts now have"
            f" {len(texts.documents):,}: they have changed, or {DOCUMENTS} was cut short"
        )
    num_windows, asked = len(rows["document"]), cfg.verify.windows
    chosen = np.arange(num_windows)
    if asked != "all" and int(asked) < num_windows:
        chosen = np.random.default_rng(cfg.seed).choice(num_windows, int(asked), replace=False)
    numbers = sorted(set(rows["document"][chosen].tolist()))
    numbers = range(len(documents)) if len(chosen) == num_windows else numbers
    plain = load_plain(cfg, int(content["protocol"]["max_seq_len"]), _device(cfg))
    if isinstance(plain, str):
        return plain
    problems = [*sums_differ(content, rows, documents, folder)]
    windows: dict[tuple[int, int], Window] = {}
    num_tokens = 0
    for number in numbers:
        of_document = texts.windows(number)
        windows |= {(number, window.start): window for window in of_document}
        num_tokens += len(texts.tokens(number))
        problems += windows_differ(number, of_document, rows)
    if len(numbers) == len(documents):
        problems += tokens_differ(num_tokens, content["counts"])
    compared, probe = [], None
    for row in sorted(chosen.tolist()):
        key = int(rows["document"][row]), int(rows["start"][row])
        window = windows.get(key)
        if window is None or not window.scored:
            continue
        nll = math.fsum(plain.nll(window).tolist())
        compared.append((*key, len(window.scored), float(rows["nll_nats_sum"][row]), nll))
        if probe is None and len(window.ids) > 3:
            probe = later_token_changes(plain, window)
    tolerance = cfg.verify.tolerance
    if tolerance is None:
        is_dynamic = (content["quantization"] or {}).get("activations") is not None
        tolerance = max(TOLERANCES[cfg.dtype], _DYNAMIC if is_dynamic else 0)
    return {
        "method": plain.description,
        "windows_of_run": num_windows,
        "tolerance": tolerance,
        **_compare(compared, tolerance, problems),
        "later_token_changes_nats": check_causal(probe, problems),
        "problems": problems,
        "seconds": perf_counter() - started,
    }


def _compare(
    compared: list[tuple[int, int, int, float, float]], tolerance: float, problems: list[str]
) -> dict[str, Any]:
    """How far the run's NLL is from the plain model's; what is too far is added to ``problems``."""

    def difference(num_scored: int, run: float, plain: float) -> float:
        return (run - plain) / max(plain, num_scored)

    by_window = [
        {
            "document": document,
            "start": start,
            "scored_tokens": num_scored,
            "nll_nats_sum": run,
            "plain_nll_nats_sum": plain,
            "relative_difference": difference(num_scored, run, plain),
        }
        for document, start, num_scored, run, plain in compared
    ]
    num_scored = sum(row["scored_tokens"] for row in by_window)
    run, plain = (math.fsum(row[k] for row in by_window) for k in ("nll_nats_sum", _PLAIN))
    total = difference(num_scored, run, plain) if by_window else 0.0
    worst = max(by_window, key=lambda row: abs(row["relative_difference"]), default=None)
    too_far = [row for row in by_window if not abs(row["relative_difference"]) <= tolerance]
    if worst is not None and too_far:
        problems.append(
            f"the NLL of {counted(len(too_far), 'window')} of {len(by_window):,} differs from the"
            f" plain model's by more than {tolerance:.0e}: by"
            f" {worst['relative_difference']:+.1e} in document {worst['document']} from token"
            f" {worst['start']} on ({worst['nll_nats_sum']:.6f} and {worst[_PLAIN]:.6f} nats), by"
            f" {total:+.1e} in total"
        )
    return {
        "windows": len(by_window),
        "scored_tokens": num_scored,
        "nll_nats_sum": run,
        _PLAIN: plain,
        "relative_difference": total,
        "largest_relative_difference": abs(worst["relative_difference"]) if worst else 0.0,
        "by_window": by_window,
    }


_PLAIN = "plain_nll_nats_sum"


def later_token_changes(plain: PlainModel, window: Window) -> float:
    """By how many nats other tokens in the second half of a window change the losses before."""
    half = len(window.ids) // 2
    changed = {i: window.ids[i - half] for i in range(half, len(window.ids) - 1)}
    early = [place for place in window.scored if place <= half]
    if not early:
        early = list(range(1, half + 1))
    probed = Window(window.start, window.ids, early, window.num_added)
    return float((plain.nll(probed) - plain.nll(probed, changed)).abs().max())


def check_causal(change: float | None, problems: list[str]) -> float | None:
    """Add a problem if a later token changed an earlier loss by more than rounding."""
    if change is not None and not change <= _CAUSAL:
        problems.append(
            f"the model is not causal: later tokens change an earlier loss by {change:.3g} nats, so"
            " its perplexity means nothing"
        )
    return change


def _device(cfg: EvalConfig) -> torch.device:
    """This process's device: of a run on several GPUs, the first rank's."""
    kind = device_type(cfg.device)
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
