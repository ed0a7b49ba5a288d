"""The content of results.json, and the writers of it and of documents.jsonl."""

import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ppl_eval.boundary import Ranks
from ppl_eval.config.schema import EvalConfig
from ppl_eval.evaluation.loop import Evaluation
from ppl_eval.evaluation.preflight import Preflight
from ppl_eval.evaluation.teacher import teacher_dims
from ppl_eval.metrics import intervals
from ppl_eval.metrics.definitions import MACRO, METRICS, mean
from ppl_eval.metrics.summary import NOT_SCORED, DocumentTable, Summary, Totals, finite
from ppl_eval.parallel.dims import ParallelDims
from ppl_eval.report import environment
from ppl_eval.report.fidelity_section import fidelity, with_texts
from ppl_eval.report.output import DOCUMENTS, RESULTS, TOKENS, WINDOWS
from ppl_eval.report.token_file import write_tokens
from ppl_eval.report.window_file import write_windows

SCHEMA_VERSION = 1

_NO_UTF8 = "backslashreplace"
"""A name that is not UTF-8 has lone surrogates, and these become what JSON writes them as."""


def assemble(
    cfg: EvalConfig,
    prepared: Preflight,
    found: Evaluation,
    dims: ParallelDims,
    *,
    fingerprints: Mapping[str, str],
    seconds: Mapping[str, float],
    peak_memory_gib: float | None,
    device: torch.device,
) -> dict[str, Any]:
    """The content of results.json: what was run, and what was measured.

    Args:
        cfg: the checked config.
        prepared: the models, the tokenizer and the workload.
        found: what the evaluation found.
        dims: the student's mesh.
        fingerprints: name -> hash of what the number depends on.
        seconds: phase of the run -> how long it took; ``evaluate`` is among them.
        peak_memory_gib: the largest of any rank; None where it is not wanted.
        device: where this rank computed.
    """
    ranks = Ranks.from_env()
    content = {
        "schema_version": SCHEMA_VERSION,
        "command": environment.command(sys.argv, ranks.world_size, ranks.local_world_size),
        "notes": list(prepared.notes),
        "warnings": list(prepared.warnings),
        "protocol": prepared.workload.protocol.as_dict(),
        "performance": {
            "tokens_per_s": found.summary.total.num_scored / seconds["evaluate"],
            "peak_memory_gib": peak_memory_gib,
            "seconds": dict(seconds),
        },
        "environment": {
            "versions": environment.versions(),
            "device": environment.device_name(device),
            "num_processes": ranks.world_size,
            "mesh": _mesh(dims),
            "dtype": cfg.dtype,
            "logits_dtype": cfg.logits_dtype,
            "checkpoint_dtype": prepared.student.checkpoint_dtype,
        },
        "config": asdict(cfg),
        "fingerprints": dict(fingerprints),
        "weights": asdict(found.weights) if found.weights else None,
        **measured(found.summary, cfg.bootstrap.resamples, cfg.bootstrap.seed),
    }
    teacher = prepared.teacher
    if teacher is None or found.teacher is None or found.fidelity is None:
        return content
    its = measured(found.teacher)
    content["teacher"] = {
        "model": teacher.component,
        "checkpoint_dir": teacher.checkpoint.folder,
        "checkpoint_dtype": teacher.checkpoint_dtype,
        "dtype": cfg.teacher_dtype or cfg.dtype,
        "mesh": _mesh(teacher_dims(cfg, dims)),
        **{name: its[name] for name in ("metrics", "intervals_95", "domains", "loss_by_position")},
    }
    ids = prepared.student.decoder.num_ids, teacher.decoder.num_ids
    content["fidelity"] = fidelity(found.summary, found.fidelity, found.by_context, num_ids=ids)
    worst = content["fidelity"]["worst_tokens"]
    content["fidelity"]["worst_tokens"] = with_texts(worst, prepared.workload, prepared.tokenizer)
    return content


def _mesh(dims: ParallelDims) -> dict[str, Any]:
    return {**asdict(dims), "description": str(dims)}


def measured(summary: Summary, resamples: int = 0, seed: int = 0) -> dict[str, Any]:
    """The sections of results.json that a ledger gives.

    Args:
        summary: counts and metrics.
        resamples: how often the bootstrap draws documents; 0 for no bootstrap.
        seed: what its draws begin with.
    """
    return {
        "counts": _counts(summary.total),
        "metrics": {**summary.total.metrics(), **_hf_perplexity(summary)},
        **_intervals(summary, resamples, seed),
        "domains": {
            name: {"counts": _counts(part), "metrics": part.metrics()}
            for name, part in summary.domains.items()
        },
        "macro": _macro(list(summary.domains.values())),
        "loss_by_position": summary.by_position,
        "loss_by_document_length": _by_length(summary.documents),
    }


def _counts(total: Totals) -> dict[str, Any]:
    """The ``counts`` of results.json."""
    return {
        **{name: count for name, count in total.counts.items() if name not in NOT_SCORED},
        "not_scored": {name: total.counts[name] for name in NOT_SCORED},
    }


def _macro(domains: list[Totals]) -> dict[str, Any] | None:
    """Every domain weighs the same: means of the loss per unit, then exp; null without domains."""
    if not domains:
        return None
    values = {}
    for metric in MACRO:
        means = [mean(part.nll_nats_sum, part.count_of(metric.unit)) for part in domains]
        values[metric.key] = metric.form(math.fsum(means), len(means))
    return {"domains": len(domains), **finite(values)}


def _by_length(table: DocumentTable) -> list[dict[str, Any]]:
    """Loss of documents of 1, 2 to 3, 4 to 7, ... tokens."""
    rows = []
    longest = int(table.counts["tokens"].max(initial=0))
    for power in range(longest.bit_length()):
        part = table.totals(table.counts["tokens"] >> power == 1)
        if part.num_scored:
            rows.append(
                {
                    "document_tokens": [2**power, 2 ** (power + 1) - 1],
                    "documents": part.counts["documents_scored"],
                    "scored_tokens": part.num_scored,
                    "nll_nats_per_token": part.nll_nats_sum / part.num_scored,
                }
            )
    return rows


def _intervals(summary: Summary, resamples: int, seed: int) -> dict[str, Any]:
    bootstrap = partial(intervals.bootstrapped, resamples=resamples, seed=seed)
    total = summary.total
    by_token = intervals.token_iid(
        total.num_scored, total.nll_nats_sum, total.sums["nll_nats_squared"]
    )
    return {
        "intervals_95": intervals.of_statistics(METRICS, summary, intervals.clustered),
        "intervals_95_bootstrap": intervals.of_statistics(METRICS, summary, bootstrap),
        "intervals_95_token_iid": {"token_perplexity": by_token},
    }


def _hf_perplexity(summary: Summary) -> dict[str, float | None]:
    value = summary.hf_perplexity
    return {} if value is None else finite({"hf_perplexity": value})


def writers(
    content: Mapping[str, Any],
    found: Evaluation,
    tokens: Mapping[str, np.ndarray] | None,
) -> dict[str, Callable[[Path], None]]:
    """Name of each file of a run -> what writes it to a path, the most important first.

    Args:
        content: what results.json has.
        found: what the evaluation found.
        tokens: what is known of each scored token, for tokens.parquet; None for no such file.
    """
    files: dict[str, Callable[[Path], None]] = {
        RESULTS: partial(write_results, content=content),
        DOCUMENTS: partial(write_documents, documents=found.summary.documents),
        WINDOWS: partial(write_windows, windows=found.workload.windows, ledger=found.ledger),
    }
    if tokens is not None:
        files[TOKENS] = partial(write_tokens, workload=found.workload, records=tokens)
    return files


def write_results(path: Path, content: Mapping[str, Any]) -> None:
    """Write ``results.json`` to ``path``."""
    path.write_text(f"{_dumps(content, indent=2)}\n", encoding="utf-8", errors=_NO_UTF8)


def write_documents(path: Path, documents: DocumentTable) -> None:
    """Write ``documents.jsonl`` to ``path``."""
    with path.open("w", encoding="utf-8", errors=_NO_UTF8) as file:
        file.writelines(f"{_dumps(row)}\n" for row in documents.rows())


def _dumps(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, indent=indent, allow_nan=False, ensure_ascii=False, default=str)
