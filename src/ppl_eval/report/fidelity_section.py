"""The ``fidelity`` section of results.json: how far a student is from its teacher."""

from typing import Any

import numpy as np
import torch

from ppl_eval.data.tokenizer import HFTokenizer, TextTokenizer
from ppl_eval.evaluation.workload import Workload
from ppl_eval.metrics import intervals
from ppl_eval.metrics.definitions import FIDELITY, mean
from ppl_eval.metrics.fidelity import SUMS, Fidelity, fidelity_by_position
from ppl_eval.metrics.profiles import Profile
from ppl_eval.metrics.summary import DocumentTable, Summary, Totals, finite

WORST_DOCUMENTS = 10
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
CONTEXT_TOKENS = 16

_OF_SUMS = [each for each in FIDELITY if each.columns]
_MEANS = [each for each in _OF_SUMS if each.form is mean]
"""The statistics that have intervals."""

_WORST = ("kl_teacher_student_nats", "top1_agreement", "ln_perplexity_ratio")
_NOISE = (*_WORST, "js_nats")


def fidelity(
    summary: Summary, found: Fidelity, by_context: Profile, *, num_ids: tuple[int, ...]
) -> dict[str, Any]:
    """The section: means and 95 % intervals, percentiles, profiles, worst tokens, noise floor.

    Args:
        summary: the student's, with the teacher's columns among its sums.
        found: histograms, extremes and the noise floor, assembled.
        by_context: means by the number of tokens before, assembled.
        num_ids: rows of the student's head and of the teacher's; 0: unknown.
    """
    table = summary.documents
    return {
        "scored_tokens": summary.total.num_scored,
        "vocabulary": {
            "student_ids": num_ids[0] or None,
            "teacher_ids": num_ids[1] or None,
            "shared_ids": min(num_ids) or None,
        },
        **_values(summary.total),
        "interval_95": intervals.of_statistics(_MEANS, summary, intervals.clustered),
        "kl_maximum_nats": found.maximum_kl(),
        "kl_percentiles_nats": found.kl.percentiles(),
        "kl_percentiles_relative_error": 10 ** (0.5 / 200) - 1,
        "probability_difference_percentiles": found.probability_difference.percentiles(),
        "probability_difference_percentiles_error": 0.0005,
        "noise_floor": _noise(found),
        "by_teacher_confidence": found.by_confidence(),
        "by_position": fidelity_by_position(by_context),
        "by_domain": {
            name: {"scored_tokens": part.num_scored, **_values(part)}
            for name, part in summary.domains.items()
        },
        "worst_documents": _worst_documents(table),
        "worst_tokens": [
            {**token, "id": table.labels[token["document"]][0]} for token in found.worst_tokens()
        ],
    }


def _values(total: Totals) -> dict[str, float | None]:
    """The statistics of some documents; none if they have no scored token."""
    return finite({each.key: total.value(each) for each in _OF_SUMS if total.num_scored})


def _noise(found: Fidelity) -> dict[str, Any] | None:
    """The noise floor: a differently rounded teacher against the teacher. None if not measured."""
    count, *sums = found.noise.sums[0].tolist()
    if not count:
        return None
    total = Totals({"scored_tokens": int(count)}, dict(zip(SUMS, sums, strict=True)))
    values = _values(total)
    dtype = _DTYPES.get(found.coarser, str(found.coarser).removeprefix("torch."))
    return {"dtype": dtype, "scored_tokens": int(count), **{name: values[name] for name in _NOISE}}


def with_texts(
    tokens: list[dict[str, Any]], workload: Workload, tokenizer: TextTokenizer
) -> list[dict[str, Any]]:
    """``worst_tokens`` with texts: the token, what came before it, and each model's first choice.
    With torchtune's own tokenizers only the token's id is added.

    Args:
        tokens: the ``worst_tokens`` of the section.
        workload: what was scored.
        tokenizer: gave the text its tokens.
    """
    # others fail on an id that stands for nothing, which a model may well choose
    decode = tokenizer.decode if isinstance(tokenizer, HFTokenizer) else None
    numbers = sorted({token["document"] for token in tokens})
    texts = workload.corpus.fetch(numbers)
    totals = workload.protocol.num_tokens(workload.corpus.num_tokens)
    found = []
    for token in tokens:
        number, position = token["document"], token["position"]
        ids = workload.protocol.read(texts[number], 0, int(totals[number])).tolist()
        more: dict[str, Any] = {"token_id": ids[position]}
        if decode is not None:
            more["token"] = decode([ids[position]])
            more["before"] = decode(ids[max(0, position - CONTEXT_TOKENS) : position])
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
        values = _values(part)
        rows.append(
            {
                "document": number,
                "id": table.labels[number][0],
                "scored_tokens": part.num_scored,
                **{name: values[name] for name in _WORST},
            }
        )
    return rows
