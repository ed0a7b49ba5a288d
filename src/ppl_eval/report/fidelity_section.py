"""The ``fidelity`` section of results.json: how far a student is from its teacher."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ppl_eval.data.tokenizer import HFTokenizer
from ppl_eval.metrics import intervals
from ppl_eval.metrics.definitions import FIDELITY
from ppl_eval.metrics.fidelity import SUMS, Fidelity
from ppl_eval.metrics.summary import DocumentTable, Summary, finite

WORST_DOCUMENTS = 10
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
CONTEXT_TOKENS = 16

_MEANS = [each for each in FIDELITY if each.columns and each.form is None]
"""The statistics that have intervals."""

_WORST = ("kl_teacher_student_nats", "top1_agreement", "ln_perplexity_ratio")
_NOISE = (*_WORST, "js_nats")


def fidelity(summary: Summary, found: Fidelity, *, num_ids: tuple[int, int]) -> dict[str, Any]:
    """Means over scored tokens, their 95 % intervals, distributions, profiles, extremes, the noise.

    Args:
        summary: the student's, whose sums have a teacher's columns.
        found: assembled.
        num_ids: rows of the student's head and of the teacher's.
    """
    table = summary.documents
    return {
        "scored_tokens": summary.total.num_scored,
        "vocabulary": {
            "student_ids": num_ids[0],
            "teacher_ids": num_ids[1],
            "shared_ids": min(num_ids),
        },
        **_values(summary.total.sums, summary.total.num_scored),
        "interval_95": _intervals(table),
        "kl_maximum_nats": found.maximum_kl(),
        "kl_percentiles_nats": found.kl.percentiles(),
        "kl_percentiles_relative_error": 10 ** (0.5 / 200) - 1,
        "probability_difference_percentiles": found.probability_difference.percentiles(),
        "probability_difference_percentiles_error": 0.0005,
        "noise_floor": _noise(found),
        "by_teacher_confidence": found.by_confidence(),
        "by_position": found.by_position(),
        "by_domain": {
            name: {"scored_tokens": part.num_scored, **_values(part.sums, part.num_scored)}
            for name, part in summary.domains.items()
        },
        "worst_documents": _worst_documents(table),
        "worst_tokens": [
            {**token, "id": table.labels[token["document"]][0]} for token in found.worst_tokens()
        ],
    }


def _values(sums: Mapping[str, float], count: int) -> dict[str, float | None]:
    """The statistics of ``count`` tokens, from sums by column; none if there is no token."""
    values = {}
    for each in FIDELITY if count else ():
        if each.columns:
            total = math.fsum(factor * sums[name] for name, factor in each.columns.items())
            values[each.key] = each.form(total / count) if each.form else total / count
    return finite(values)


def _intervals(table: DocumentTable) -> dict[str, list[float] | None]:
    """Intervals of the means, clustered by document; the log ratio's is paired by that."""
    scored = table.counts["scored_tokens"] > 0
    totals = [
        sum(factor * table.sums[name] for name, factor in each.columns.items()) for each in _MEANS
    ]
    columns = np.stack([*totals, table.counts["scored_tokens"]], axis=1)[scored]
    numbers = list(range(len(_MEANS)))
    ends = intervals.clustered(columns, intervals.ratio(numbers, [len(_MEANS)]))
    if ends is None:
        return {each.key: None for each in _MEANS}
    return {
        each.key: [min(max(float(end), each.low), each.high) for end in pair]
        for each, pair in zip(_MEANS, zip(*ends, strict=True), strict=True)
    }


def _noise(found: Fidelity) -> dict[str, Any] | None:
    """The teacher as its own student, on a sample; None where it was not measured."""
    *sums, count = found.noise.tolist()
    if not count:
        return None
    values = _values(dict(zip(SUMS, sums, strict=True)), int(count))
    dtype = _DTYPES.get(found.coarser, str(found.coarser).removeprefix("torch."))
    return {"dtype": dtype, "scored_tokens": int(count), **{name: values[name] for name in _NOISE}}


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
    scored = np.flatnonzero(table.counts["scored_tokens"])
    means = table.sums["kl_teacher_student"][scored] / table.counts["scored_tokens"][scored]
    rows = []
    for number in scored[np.argsort(-means, kind="stable")][:WORST_DOCUMENTS].tolist():
        part = table.totals(np.asarray([number]))
        values = _values(part.sums, part.num_scored)
        rows.append(
            {
                "document": number,
                "id": table.labels[number][0],
                "scored_tokens": part.num_scored,
                **{name: values[name] for name in _WORST},
            }
        )
    return rows
