"""The content of results.json, and the writers of it and of documents.jsonl."""

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ppl_eval.config.schema import BootstrapConfig, EvalConfig
from ppl_eval.data.tokenizer import TextTokenizer
from ppl_eval.evaluation.loop import Measurement
from ppl_eval.evaluation.preflight import Preflight
from ppl_eval.evaluation.teacher import teacher_dims
from ppl_eval.metrics import intervals
from ppl_eval.metrics.definitions import MACRO, METRICS, mean
from ppl_eval.metrics.summary import NOT_SCORED, DocumentTable, Summary, Totals, finite
from ppl_eval.parallel.dims import ParallelDims
from ppl_eval.ranks import Ranks
from ppl_eval.report import environment
from ppl_eval.report.fidelity_section import fidelity, with_texts
from ppl_eval.report.output import DOCUMENTS, RESULTS, TOKENS, WINDOWS
from ppl_eval.report.token_file import write_tokens
from ppl_eval.report.window_file import write_windows

SCHEMA_VERSION = 1

_NO_UTF8 = "backslashreplace"
"""A name that is not UTF-8 has lone surrogates, and these become what JSON writes them as."""


@dataclass(frozen=True)
class RunInfo:
    """What a number depends on and does not tell itself.

    Attributes:
        tokenizer: the model's.
        fingerprints: gives those of data, tokenizer, model, protocol, plan, and of a teacher; None:
            unknown.
        environment: the ``environment`` of results.json.
        seconds: phase of the run -> how long it took; ``evaluate`` is among them.
        num_ids: rows of the student's head and of the teacher's.
        notes: what was decided for the user, one sentence each.
        warnings: one sentence each.
        command: what starts the run again, None if it was no command.
        config: the checked config, None if there is none.
        peak_memory_gib: the largest of any rank; None where it is not wanted.
        teacher: the ``teacher`` of results.json without its numbers.
        quantization: the ``quantization`` of results.json; None for an unquantised model.
        bootstrap: how documents are resampled.
    """

    tokenizer: TextTokenizer
    fingerprints: Callable[[], Mapping[str, str | None]]
    environment: Mapping[str, Any]
    seconds: Mapping[str, float]
    num_ids: tuple[int, ...] = ()
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()
    command: str | None = None
    config: EvalConfig | None = None
    peak_memory_gib: float | None = None
    teacher: Mapping[str, Any] | None = None
    quantization: Mapping[str, Any] | None = None
    bootstrap: BootstrapConfig = field(default_factory=BootstrapConfig)


def run_info(
    cfg: EvalConfig,
    prepared: Preflight,
    dims: ParallelDims,
    *,
    fingerprints: Mapping[str, str],
    seconds: Mapping[str, float],
    peak_memory_gib: float | None,
    quantization: Sequence[Mapping[str, Any] | None],
    device: torch.device,
) -> RunInfo:
    """The info of a run by config.

    Args:
        cfg: the checked config.
        prepared: the models, the tokenizer and the workload.
        dims: the student's mesh.
        fingerprints: name -> hash of what the number depends on.
        seconds: phase of the run -> how long it took.
        peak_memory_gib: the largest of any rank; None where it is not wanted.
        quantization: what was quantised of each model; None for an unquantised one.
        device: where this rank computed.
    """
    ranks = Ranks.from_env()
    teacher, about_teacher = prepared.teacher, None
    if teacher is not None:
        about_teacher = {
            "model": teacher.component,
            "checkpoint_dir": teacher.checkpoint.folder,
            "checkpoint_dtype": teacher.checkpoint_dtype,
            "dtype": cfg.teacher_dtype or cfg.dtype,
            "mesh": _mesh(teacher_dims(cfg, dims)),
            "quantization": quantization[1],
        }
    return RunInfo(
        prepared.tokenizer,
        lambda: fingerprints,
        environment={
            "versions": environment.versions(),
            "device": environment.device_name(device),
            "num_processes": ranks.world_size,
            "mesh": _mesh(dims),
            "dtype": cfg.dtype,
            "logits_dtype": cfg.logits_dtype,
            "checkpoint_dtype": prepared.student.checkpoint_dtype,
        },
        seconds=dict(seconds),
        num_ids=tuple(each.decoder.num_ids for each in prepared.models),
        notes=prepared.notes,
        warnings=prepared.warnings,
        command=environment.command(sys.argv, ranks.world_size, ranks.local_world_size),
        config=cfg,
        peak_memory_gib=peak_memory_gib,
        teacher=about_teacher,
        quantization=quantization[0],
        bootstrap=cfg.bootstrap,
    )


def assemble(found: Measurement, info: RunInfo) -> dict[str, Any]:
    """The content of results.json: what was run, and what was measured."""
    content = {
        "schema_version": SCHEMA_VERSION,
        "command": info.command,
        "notes": list(info.notes),
        "warnings": list(info.warnings),
        "protocol": found.workload.protocol.as_dict(),
        "performance": {
            "tokens_per_s": found.summary.total.num_scored / info.seconds["evaluate"],
            "peak_memory_gib": info.peak_memory_gib,
            "seconds": info.seconds,
        },
        "environment": info.environment,
        "config": asdict(info.config) if info.config else None,
        "fingerprints": dict(info.fingerprints()),
        "weights": asdict(found.weights) if found.weights else None,
        "quantization": info.quantization,
        **measured(found.summary, info.bootstrap.resamples, info.bootstrap.seed),
    }
    if found.teacher is None or found.fidelity is None or info.teacher is None:
        return content
    its = measured(found.teacher)
    names = ("metrics", "intervals_95", "domains", "loss_by_position")
    content["teacher"] = {**info.teacher, **{name: its[name] for name in names}}
    section = fidelity(found.summary, found.fidelity, found.by_context, num_ids=info.num_ids)
    section["worst_tokens"] = with_texts(section["worst_tokens"], found.workload, info.tokenizer)
    return {**content, "fidelity": section}


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
    found: Measurement,
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
