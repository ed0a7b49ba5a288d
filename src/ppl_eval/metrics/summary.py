"""From the ledger to the perplexity: counts and sums by document, by domain and in total."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ppl_eval.data.documents import labels
from ppl_eval.data.encode import EncodedCorpus
from ppl_eval.data.protocol import Protocol
from ppl_eval.data.windows import Windows
from ppl_eval.metrics.definitions import METRICS, WHOLE_TEXT, Statistic, mean, perplexity
from ppl_eval.metrics.ledger import NLL, Ledger

NOT_SCORED = ("no_context", "context_only", "truncated", "masked", "empty")
"""Reasons why tokens were not scored; ``empty`` counts documents without a scored token."""


@dataclass(frozen=True)
class Totals:
    """Sums over a set of documents, and the metrics that follow from them.

    Attributes:
        counts: as :attr:`DocumentTable.counts`, added up.
        sums: as :attr:`DocumentTable.sums`, added up without rounding.
    """

    counts: Mapping[str, int]
    sums: Mapping[str, float]

    @property
    def num_scored(self) -> int:
        """Scored tokens (an added EOS is one)."""
        return self.counts["scored_tokens"]

    @property
    def nll_nats_sum(self) -> float:
        """Sum of the NLL of the scored tokens."""
        return self.sums["nll_nats"]

    @property
    def perplexity(self) -> float:
        """exp(NLL sum / scored tokens): every token weighs the same."""
        return perplexity(self.nll_nats_sum, self.num_scored)

    @property
    def is_whole(self) -> bool:
        """Whether no text was left out. Otherwise the loss by word or byte is unknown."""
        return self.counts["context_only"] == 0 and self.counts["truncated"] == 0

    @property
    def has_few_words(self) -> bool:
        """Whether there is less than one word in 20 characters, as in Chinese, which has no
        spaces between words. Word perplexity then means nothing."""
        return 20 * self.counts["words"] < self.counts["characters"]

    def value(self, statistic: Statistic) -> float:
        """The statistic of these documents: nan without units, inf above float64's range."""
        columns = statistic.columns.items()
        total = math.fsum(factor * self.sums[name] for name, factor in columns)
        return statistic.form(total, self.count_of(statistic.unit))

    def count_of(self, unit: str) -> int:
        """Number of units that the NLL is divided by; 0 if text was left out and the unit is of the
        whole text."""
        return 0 if unit in WHOLE_TEXT and not self.is_whole else self.counts[unit]

    def metrics(self) -> dict[str, Any]:
        """The ``metrics`` of results.json: null where a value exceeds float64 or has no tokens."""
        values = {metric.key: self.value(metric) for metric in METRICS}
        per_token = mean(self.nll_nats_sum, self.num_scored)
        return {
            "nll_nats_sum": self.nll_nats_sum,
            **finite({"nll_nats_per_token": per_token, **values}),
            "overflow": any(map(math.isinf, values.values())),
            "few_words": self.has_few_words,
        }


def finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """The numbers as JSON can hold them: None in place of inf and nan."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


@dataclass(frozen=True)
class DocumentTable:
    """Results by document, in the order of the documents.

    Attributes:
        labels: (the row's own id or None, domain or None).
        counts: by name, int64 [documents]: ``documents`` (1 each), ``documents_scored`` (1 if a
            token of it was scored), ``empty`` (1 if it has no token, or none that counts);
            ``tokens`` of the text, of which ``scored_tokens``, ``no_context`` (nothing came before
            them in their window), ``context_only`` (read and not scored), ``truncated`` (not read)
            and ``masked`` (the data set says that they do not count); ``bytes`` (UTF-8),
            ``characters`` (code points) and ``words`` (as the protocol counts them) of the text,
            unscored tokens included; ``bytes_without_token``.
        sums: by name, float64 [documents]: every column of the ledger over the scored tokens, and
            ``mean_nll_nats``, the mean NLL of the document's scored tokens (0 without any).
    """

    labels: list[tuple[str | int | None, str | None]]
    counts: Mapping[str, np.ndarray]
    sums: Mapping[str, np.ndarray]

    def totals(self, chosen: np.ndarray | slice = slice(None)) -> Totals:
        """Sums over the ``chosen`` documents; over all if none are named."""
        return Totals(
            counts={name: int(column[chosen].sum()) for name, column in self.counts.items()},
            sums={name: math.fsum(column[chosen].tolist()) for name, column in self.sums.items()},
        )

    def by_domain(self) -> dict[str, np.ndarray]:
        """Name of each domain -> numbers of its documents, in the order of names."""
        found: dict[str, list[int]] = {}
        for number, (_, domain) in enumerate(self.labels):
            if domain is not None:
                found.setdefault(domain, []).append(number)
        return {name: np.asarray(found[name]) for name in sorted(found)}

    def rows(self) -> Iterable[dict[str, Any]]:
        """The lines of documents.jsonl."""
        columns = {
            "scored_tokens": self.counts["scored_tokens"],
            **{f"{name}_sum": self.sums[name] for name in NLL},
            **{name: self.counts[name] for name in ("bytes", "characters", "words")},
            **{f"{k}_sum": v for k, v in self.sums.items() if k not in (*NLL, "mean_nll_nats")},
        }
        values = zip(*(column.tolist() for column in columns.values()), strict=True)
        for number, ((row_id, domain), row) in enumerate(zip(self.labels, values, strict=True)):
            yield {
                "document": number,
                "id": row_id,
                "domain": domain,
                **dict(zip(columns, row, strict=True)),
            }


@dataclass(frozen=True)
class Summary:
    """Totals of the whole and by domain, and the table by document.

    Attributes:
        total: sums over all documents.
        domains: name -> sums over the documents of that domain.
        documents: the table.
        by_position: loss by context length, see
            :func:`ppl_eval.metrics.profiles.loss_by_position`.
        hf_perplexity: the value of the loop in transformers' documentation (``hf_stride`` only).
    """

    total: Totals
    domains: dict[str, Totals]
    documents: DocumentTable
    by_position: list[dict[str, Any]]
    hf_perplexity: float | None = None


def summarise(
    corpus: EncodedCorpus,
    protocol: Protocol,
    windows: Windows,
    ledger: Ledger,
    by_position: list[dict[str, Any]],
) -> Summary:
    """Counts and sums by document, by domain and in total, from an assembled ledger.

    A document's windows are added up in order, and documents by ``math.fsum``, so the result does
    not depend on which rank computed which window.
    """
    num_documents = len(corpus.num_tokens)
    num_scored = _by_document(windows, ledger.num_scored.cpu().numpy(), num_documents)
    masked = _by_document(windows, windows.num_scored, num_documents) - num_scored
    is_scored = num_scored > 0
    sums = {
        name: _by_document(windows, column, num_documents)
        for name, column in zip(ledger.columns, ledger.sums.cpu().numpy(), strict=True)
    }
    counts = {
        "documents": np.ones(num_documents, dtype=np.int64),
        "documents_scored": is_scored.astype(np.int64),
        "empty": (corpus.num_tokens == 0) | ((masked > 0) & ~is_scored),
        "tokens": corpus.num_tokens,
        "scored_tokens": num_scored,
        "no_context": windows.no_context,
        "context_only": windows.context_only,
        "truncated": windows.truncated,
        "masked": masked,
        "bytes": corpus.num_bytes,
        "characters": corpus.num_characters,
        "words": corpus.num_words,
        "bytes_without_token": corpus.lost_bytes,
    }
    sums["mean_nll_nats"] = sums["nll_nats"] / np.maximum(num_scored, 1)
    table = DocumentTable(labels(corpus.documents), counts, sums)
    return Summary(
        total=table.totals(),
        domains={name: table.totals(chosen) for name, chosen in table.by_domain().items()},
        documents=table,
        by_position=by_position,
        hf_perplexity=(
            _hf_perplexity(protocol, windows, ledger) if protocol.name == "hf_stride" else None
        ),
    )


def _hf_perplexity(protocol: Protocol, windows: Windows, ledger: Ledger) -> float:
    """Mean loss of each window, weighted by one token less than it scores if it overlaps another.

    transformers shifts labels inside the model, which costs a window the label of its first
    position; the loop in its documentation takes off one for every window, also where that
    position was context.
    """
    scored = ledger.num_scored.cpu().numpy()
    overlaps = (windows.start > 0) & (protocol.advance < protocol.window_tokens)
    weights = scored - overlaps
    means = ledger.nll_nats_sum.cpu().numpy() / scored
    return perplexity(math.fsum(means * weights), int(weights.sum()))


def _by_document(windows: Windows, values: np.ndarray, num_documents: int) -> np.ndarray:
    sums = np.zeros(num_documents, dtype=values.dtype)
    np.add.at(sums, windows.document, values)
    return sums
