"""The ``fidelity`` section of results.json: how far a student is from its teacher."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from ppl_eval.data.tokenizer import HFTokenizer
from ppl_eval.metrics import intervals
from ppl_eval.metrics.fidelity import SUMS, Fidelity, fidelity_by_position
from ppl_eval.metrics.perplexity import exp_or_inf
from ppl_eval.metrics.profiles import Profile
from ppl_eval.report.results import DocumentTable
from ppl_eval.report.tables import columns, entries, kept

WORST_DOCUMENTS = 10
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
CONTEXT_TOKENS = 16

_MEANS = {
    "kl_teacher_student_nats": ("kl_teacher_student",),
    "kl_student_teacher_nats": ("kl_student_teacher",),
    "js_nats": ("js",),
    "cross_entropy_nats": ("teacher_entropy", "kl_teacher_student"),
    "teacher_entropy_nats": ("teacher_entropy",),
    "student_entropy_nats": ("student_entropy",),
    "top1_agreement": ("top1",),
    "top5_agreement": ("top5",),
    "probability_difference_mean": ("probability_difference",),
}
"""Name -> columns of the ledger whose sum, over the scored tokens, it is."""

_RANGES = {
    "js_nats": (0, math.log(2)),
    "top1_agreement": (0, 1),
    "top5_agreement": (0, 1),
    "probability_difference_mean": (-1, 1),
}
"""What a mean can be, where that is not just 0 or more: an interval does not go beyond."""


def fidelity(
    table: DocumentTable,
    domains: Mapping[str, np.ndarray],
    found: Fidelity,
    by_context: Profile,
    *,
    rows: tuple[int, int],
) -> dict[str, Any]:
    """Means over scored tokens, their 95 % intervals, distributions, profiles, extremes, the noise.

    Args:
        table: results by document, with a teacher's columns.
        domains: name -> numbers of its documents.
        found: assembled.
        by_context: means by the number of tokens before, assembled.
        rows: of the student's and the teacher's head.
    """
    sums = np.stack([table.sums[name] for name in SUMS])
    return {
        "scored_tokens": int(table.num_scored.sum()),
        "vocabulary": {
            "student_ids": rows[0],
            "teacher_ids": rows[1],
            "shared_ids": min(rows),
        },
        **_values(sums, table.num_scored),
        "interval_95": _intervals(table),
        "kl_maximum_nats": found.maximum_kl(),
        "kl_percentiles_nats": found.kl.percentiles(),
        "kl_percentiles_relative_error": 10 ** (0.5 / 200) - 1,
        "probability_difference_percentiles": found.probability_difference.percentiles(),
        "probability_difference_percentiles_error": 0.0005,
        "noise_floor": _noise(found),
        "by_teacher_confidence": found.by_confidence(),
        "by_position": fidelity_by_position(by_context),
        "by_domain": {
            name: {
                "scored_tokens": int(table.num_scored[chosen].sum()),
                **_values(sums[:, chosen], table.num_scored[chosen]),
            }
            for name, chosen in domains.items()
        },
        "worst_documents": _worst_documents(table),
        "worst_tokens": [
            {**token, "id": table.labels[token["document"]][0]} for token in found.worst_tokens()
        ],
    }


def _values(sums: np.ndarray, num_scored: np.ndarray) -> dict[str, Any]:
    """Means over the tokens of some documents.

    Args:
        sums: by column of the ledger and document.
        num_scored: tokens by document.
    """
    total = {name: math.fsum(column) for name, column in zip(SUMS, sums, strict=True)}
    return _means(total, int(num_scored.sum()))


def _means(total: Mapping[str, float], count: int) -> dict[str, Any]:
    if count == 0:
        return {}
    squares = total["probability_difference_squared"] / count
    log_ratio = (total["nll_nats"] - total["teacher_nll_nats"]) / count
    ratio = exp_or_inf(log_ratio)
    return {
        **{
            name: math.fsum(total[column] for column in columns) / count
            for name, columns in _MEANS.items()
        },
        "probability_difference_rms": math.sqrt(squares),
        "ln_perplexity_ratio": log_ratio,
        "perplexity_ratio": ratio if math.isfinite(ratio) else None,
    }


def _intervals(table: DocumentTable) -> dict[str, list[float] | None]:
    """Of the means and of the log ratio, clustered by document; the ratio's is paired by that."""
    scored = table.num_scored > 0
    tokens = table.num_scored[scored].astype(np.float64)

    def of(column: np.ndarray, low: float, high: float) -> list[float] | None:
        by_document = np.stack([column[scored], tokens], axis=1)
        found = intervals.clustered(by_document, intervals.ratio(0, 1))
        return None if found is None else [min(max(end, low), high) for end in found]

    sums = table.sums
    means = {name: sum(sums[column] for column in columns) for name, columns in _MEANS.items()}
    difference = sums["nll_nats"] - sums["teacher_nll_nats"]
    return {
        **{name: of(np.asarray(means[name]), *_RANGES.get(name, (0, math.inf))) for name in means},
        "ln_perplexity_ratio": of(difference, -math.inf, math.inf),
    }


def _noise(found: Fidelity) -> dict[str, Any] | None:
    """The teacher as its own student, on a sample; None where it was not measured."""
    count, *sums = found.noise.sums[0].tolist()
    if not count:
        return None
    values = _means(dict(zip(SUMS, sums, strict=True)), int(count))
    dtype = _DTYPES.get(found.coarser, str(found.coarser).removeprefix("torch."))
    kept = ("kl_teacher_student_nats", "js_nats", "top1_agreement", "ln_perplexity_ratio")
    return {"dtype": dtype, "scored_tokens": int(count), **{name: values[name] for name in kept}}


def with_texts(tokens: list[dict[str, Any]], workload: Any, tokenizer: Any) -> list[dict[str, Any]]:
    """``worst_tokens`` with what a reader wants to see: the token, what came before it, and what
    each model would have said; of torchtune's tokenizers only the token's id.

    Args:
        tokens: of the section.
        workload: of :mod:`ppl_eval.evaluation.loop`.
        tokenizer: the text's.
    """
    # others fail on an id that stands for nothing, which a model may well choose
    decode = tokenizer.decode if isinstance(tokenizer, HFTokenizer) else None
    numbers = sorted({token["document"] for token in tokens})
    texts = workload.corpus.fetch(numbers)
    totals = workload.protocol.num_tokens(workload.corpus.num_tokens)
    found = []
    for token in tokens:
        number, place = token["document"], token["position"]
        ids = workload.protocol.read(texts[number], 0, int(totals[number])).tolist()
        more: dict[str, Any] = {"token_id": ids[place]}
        if decode is not None:
            more["token"] = decode([ids[place]])
            more["before"] = decode(ids[max(0, place - CONTEXT_TOKENS) : place])
            for whose in ("student", "teacher"):
                more[f"{whose}_top1"] = decode([token[f"{whose}_top1_id"]])
        found.append({**token, **more})
    return found


def _worst_documents(table: DocumentTable) -> list[dict[str, Any]]:
    """Those with the largest mean KL."""
    scored = np.flatnonzero(table.num_scored > 0)
    mean = partial(_mean_of_document, table)
    order = sorted(scored.tolist(), key=lambda n: (-mean("kl_teacher_student", n), n))
    return [
        {
            "document": number,
            "id": table.labels[number][0],
            "scored_tokens": int(table.num_scored[number]),
            "kl_teacher_student_nats": mean("kl_teacher_student", number),
            "top1_agreement": mean("top1", number),
            "ln_perplexity_ratio": mean("nll_nats", number) - mean("teacher_nll_nats", number),
        }
        for number in order[:WORST_DOCUMENTS]
    ]


def _mean_of_document(table: DocumentTable, column: str, number: int) -> float:
    return float(table.sums[column][number] / table.num_scored[number])


def description(content: Mapping[str, Any]) -> str:
    """Lines for the terminal: what was found of a student beside its teacher."""
    found, noise = content["fidelity"], content["fidelity"]["noise_floor"]
    ids = found["vocabulary"]
    percentiles = found["kl_percentiles_nats"]

    def spread(name: str) -> str:
        interval = found["interval_95"][name]
        if interval is None:
            return ""
        return ", " + kept(f"95 % {_small(interval[0])} to {_small(interval[1])}")

    lines = [
        ("perplexity", _ratio_line(found)),
        (
            "KL(t||s)",
            f"{found['kl_teacher_student_nats']:.5f} nats{spread('kl_teacher_student_nats')}",
        ),
        (
            "",
            f"median {_small(percentiles['50'])}, 95th percentile {_small(percentiles['95'])},"
            f" 99th {_small(percentiles['99'])},"
            f" {kept('largest ' + _small(found['kl_maximum_nats']))}",
        ),
        (
            "KL(s||t), JS",
            f"{_small(found['kl_student_teacher_nats'])}, {_small(found['js_nats'])} nats",
        ),
        ("agreement", f"top-1 {found['top1_agreement']:.2%}, top-5 {found['top5_agreement']:.2%}"),
        (
            "right token",
            f"probability {found['probability_difference_mean']:+.4f} on average, rms"
            f" {found['probability_difference_rms']:.4f}",
        ),
    ]
    worst = next(iter(found["worst_tokens"]), {})
    if "token" in worst:
        about = f"document {worst['document']}" + (
            "" if worst["id"] is None else f" ({worst['id']})"
        )
        lines.append(
            (
                "worst token",
                f"{about}\nafter {_end(worst['before'])}: {kept(repr(worst['token']))}\n"
                f"first choice of the teacher {kept(repr(worst['teacher_top1']))},"
                f" of the student {kept(repr(worst['student_top1']))}",
            )
        )
    if noise is not None:
        lines.append(
            (
                "noise floor",
                f"KL {noise['kl_teacher_student_nats']:.1e}, top-1"
                f" {noise['top1_agreement']:.2%}: the teacher against itself, rounded otherwise in"
                f" {noise['dtype']}",
            )
        )
    if ids["student_ids"] != ids["teacher_ids"]:
        lines.append(
            (
                "vocabulary",
                f"{ids['shared_ids']:,} ids that both have, of the student's"
                f" {ids['student_ids']:,} and the teacher's {ids['teacher_ids']:,}",
            )
        )
    return entries(lines, 14)


def _end(text: str) -> str:
    """The last words, quoted; at most 40 columns."""
    while columns(repr(text)) > 40:
        text = text[1:]
    return kept(repr(text))


def _small(value: float) -> str:
    """With what is left of a small number: 0.06290 or 7.1e-06."""
    return f"{value:.5f}" if abs(value) >= 1e-3 or value == 0 else f"{value:.1e}"


def _ratio_line(found: Mapping[str, Any]) -> str:
    ratio, interval = found["perplexity_ratio"], found["interval_95"]["ln_perplexity_ratio"]
    if ratio is None:
        return "ratio to the teacher's exceeds float64"
    text = f"x {ratio:.5f} of the teacher's"
    if interval is None:
        return text
    low, high = map(exp_or_inf, interval)
    return f"{text}, {kept(f'95 % {low:.5f} to {high:.5f}')} {kept('(paired by document)')}"
