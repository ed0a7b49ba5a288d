"""From the ledger to counts and metrics, and from these to results.json and documents.jsonl."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ppl_eval.data.documents import labels
from ppl_eval.data.encode import EncodedCorpus
from ppl_eval.data.protocol import Protocol
from ppl_eval.data.windows import Windows
from ppl_eval.errors import UserError
from ppl_eval.metrics import intervals
from ppl_eval.metrics.ledger import NLL, Ledger
from ppl_eval.metrics.perplexity import exp_or_inf

SCHEMA_VERSION = 1

_NO_UTF8 = "backslashreplace"
"""A name that is not UTF-8 has lone surrogates, and these become what JSON writes them as."""


@dataclass(frozen=True)
class DocumentTable:
    """Results by document, in order; arrays are [documents].

    Attributes:
        labels: (the row's own id or None, domain or None).
        num_scored: scored tokens (int64).
        no_context: tokens that had nothing before them in their window (int64).
        context_only: tokens that were read and not scored for another reason (int64).
        truncated: tokens that no window read (int64).
        masked: tokens that the data set says do not count (int64).
        nll_nats_sum: sum of the NLL of the scored tokens (float64).
        nll_nats_squared_sum: sum of its squares (float64).
        num_tokens: text tokens (int64).
        num_bytes: UTF-8 bytes of the text (int64).
        num_characters: code points of the text (int64).
        num_words: words of the text, as the protocol counts them (int64).
        lost_bytes: bytes of the text that no token stands for (int64).
        sums: sums of every column of the ledger, by name (float64).
    """

    labels: list[tuple[str | int | None, str | None]]
    num_scored: np.ndarray
    no_context: np.ndarray
    context_only: np.ndarray
    truncated: np.ndarray
    masked: np.ndarray
    nll_nats_sum: np.ndarray
    nll_nats_squared_sum: np.ndarray
    num_tokens: np.ndarray
    num_bytes: np.ndarray
    num_characters: np.ndarray
    num_words: np.ndarray
    lost_bytes: np.ndarray
    sums: Mapping[str, np.ndarray]

    def by_domain(self) -> dict[str, np.ndarray]:
        """Name of each domain -> numbers of its documents, in the order of names."""
        found: dict[str, list[int]] = {}
        for number, (_, domain) in enumerate(self.labels):
            if domain is not None:
                found.setdefault(domain, []).append(number)
        return {name: np.asarray(found[name]) for name in sorted(found)}

    def rows(self) -> Iterable[dict[str, Any]]:
        """The lines of documents.jsonl."""
        more = [name for name in self.sums if name not in NLL]
        for number, (row_id, domain) in enumerate(self.labels):
            yield {
                "document": number,
                "id": row_id,
                "domain": domain,
                "scored_tokens": int(self.num_scored[number]),
                "nll_nats_sum": float(self.nll_nats_sum[number]),
                "nll_nats_squared_sum": float(self.nll_nats_squared_sum[number]),
                "bytes": int(self.num_bytes[number]),
                "characters": int(self.num_characters[number]),
                "words": int(self.num_words[number]),
                **{f"{name}_sum": float(self.sums[name][number]) for name in more},
            }


@dataclass(frozen=True)
class Totals:
    """Sums over a set of documents, and the metrics that follow from them.

    Attributes:
        num_documents: documents read, empty ones included.
        num_documents_scored: those with at least one scored token.
        num_empty: documents without any token, or with none that counts.
        num_tokens: tokens of the texts.
        num_scored: scored tokens (an added EOS is one).
        no_context: tokens never scored because nothing came before them in their window.
        context_only: tokens that the protocol reads and never scores.
        truncated: tokens that the protocol does not read.
        masked: tokens that the data set says do not count.
        num_bytes: UTF-8 bytes of the texts, unscored tokens included.
        num_characters: code points of the texts.
        num_words: words of the texts, as the protocol counts them.
        lost_bytes: bytes of the texts that no token stands for.
        nll_nats_sum: sum of the NLL of the scored tokens, added up without rounding.
        document_mean_nll: mean over scored documents of each one's mean NLL.
    """

    num_documents: int
    num_documents_scored: int
    num_empty: int
    num_tokens: int
    num_scored: int
    no_context: int
    context_only: int
    truncated: int
    masked: int
    num_bytes: int
    num_characters: int
    num_words: int
    lost_bytes: int
    nll_nats_sum: float
    document_mean_nll: float

    @property
    def perplexity(self) -> float:
        """exp(NLL sum / scored tokens): token-weighted."""
        return exp_or_inf(_ratio(self.nll_nats_sum, self.num_scored))

    @property
    def document_mean_perplexity(self) -> float:
        """exp(mean over documents of their mean NLL): every document weighs the same."""
        return exp_or_inf(self.document_mean_nll)

    @property
    def word_perplexity(self) -> float:
        """exp(NLL sum / words)."""
        return exp_or_inf(_ratio(self.nll_nats_sum, self.num_words if self.is_whole else 0))

    @property
    def byte_perplexity(self) -> float:
        """exp(NLL sum / UTF-8 bytes)."""
        return exp_or_inf(_ratio(self.nll_nats_sum, self.num_bytes if self.is_whole else 0))

    @property
    def bits_per_byte(self) -> float:
        """NLL sum in bits / UTF-8 bytes."""
        return _ratio(self.nll_nats_sum, self.num_bytes if self.is_whole else 0) / math.log(2)

    @property
    def bits_per_character(self) -> float:
        """NLL sum in bits / code points."""
        characters = self.num_characters if self.is_whole else 0
        return _ratio(self.nll_nats_sum, characters) / math.log(2)

    @property
    def is_whole(self) -> bool:
        """Whether all text was measured that could be: else no loss by word or byte is known."""
        return self.context_only == 0 and self.truncated == 0

    def counts(self) -> dict[str, Any]:
        """The ``counts`` of results.json."""
        return {
            "documents": self.num_documents,
            "documents_scored": self.num_documents_scored,
            "tokens": self.num_tokens,
            "scored_tokens": self.num_scored,
            "not_scored": {
                "no_context": self.no_context,
                "context_only": self.context_only,
                "truncated": self.truncated,
                "masked": self.masked,
                "empty": self.num_empty,
            },
            "bytes": self.num_bytes,
            "characters": self.num_characters,
            "words": self.num_words,
            "bytes_without_token": self.lost_bytes,
        }

    @property
    def has_few_words(self) -> bool:
        """Whether white space does not separate words, as in Chinese: below one in 20 characters.

        What counts as a word is then a sentence or more, and its perplexity says nothing.
        """
        return 20 * self.num_words < self.num_characters

    def metrics(self) -> dict[str, Any]:
        """The ``metrics`` of results.json: null where a value exceeds float64 or has no tokens."""
        values = {
            "token_perplexity": self.perplexity,
            "document_mean_perplexity": self.document_mean_perplexity,
            "word_perplexity": self.word_perplexity,
            "byte_perplexity": self.byte_perplexity,
            "bits_per_byte": self.bits_per_byte,
            "bits_per_character": self.bits_per_character,
        }
        finite = {name: v if math.isfinite(v) else None for name, v in values.items()}
        return {
            "nll_nats_sum": self.nll_nats_sum,
            "nll_nats_per_token": self.nll_nats_sum / self.num_scored if self.num_scored else None,
            **finite,
            "overflow": any(math.isinf(v) for v in values.values()),
            "few_words": self.has_few_words,
        }


def _ratio(numerator: float, count: int) -> float:
    return numerator / count if count else math.nan


@dataclass(frozen=True)
class Summary:
    """Totals of the whole and by domain, and the table by document.

    Attributes:
        total: of all documents.
        domains: of those of each domain.
        documents: the table.
        by_position: loss by number of tokens before; see :class:`PositionLoss`.
        hf_perplexity: what the loop in transformers' documentation gives for these windows
            (``hf_stride`` only).
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
    """Derive everything that is reported from an assembled ledger.

    Window sums are added up in window order within a document, and without rounding over
    documents, so that the result does not depend on who computed which window.
    """
    num_documents = len(corpus.num_tokens)
    num_scored = _by_document(windows, ledger.num_scored.cpu().numpy(), num_documents)
    sums = {
        name: _by_document(windows, column, num_documents)
        for name, column in zip(ledger.columns, ledger.sums.cpu().numpy(), strict=True)
    }
    table = DocumentTable(
        labels=labels(corpus.documents),
        num_scored=num_scored,
        no_context=windows.no_context,
        context_only=windows.context_only,
        truncated=windows.truncated,
        masked=_by_document(windows, windows.num_scored, num_documents) - num_scored,
        nll_nats_sum=sums["nll_nats"],
        nll_nats_squared_sum=sums["nll_nats_squared"],
        num_tokens=corpus.num_tokens,
        num_bytes=corpus.num_bytes,
        num_characters=corpus.num_characters,
        num_words=corpus.num_words,
        lost_bytes=corpus.lost_bytes,
        sums=sums,
    )
    everything = np.arange(num_documents)
    return Summary(
        total=_total(table, everything),
        domains={name: _total(table, chosen) for name, chosen in table.by_domain().items()},
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
    return exp_or_inf(_ratio(math.fsum(means * weights), int(weights.sum())))


def _by_document(windows: Windows, values: np.ndarray, num_documents: int) -> np.ndarray:
    sums = np.zeros(num_documents, dtype=values.dtype)
    np.add.at(sums, windows.document, values)
    return sums


def _is_empty(table: DocumentTable) -> np.ndarray:
    """Documents without any token, or none that counts."""
    return (table.num_tokens == 0) | ((table.masked > 0) & (table.num_scored == 0))


def _total(table: DocumentTable, chosen: np.ndarray) -> Totals:
    num_scored, nll = table.num_scored[chosen], table.nll_nats_sum[chosen]
    scored = num_scored > 0
    means = nll[scored] / num_scored[scored]
    return Totals(
        num_documents=len(chosen),
        num_documents_scored=int(scored.sum()),
        num_empty=int(_is_empty(table)[chosen].sum()),
        num_tokens=int(table.num_tokens[chosen].sum()),
        num_scored=int(num_scored.sum()),
        no_context=int(table.no_context[chosen].sum()),
        context_only=int(table.context_only[chosen].sum()),
        truncated=int(table.truncated[chosen].sum()),
        masked=int(table.masked[chosen].sum()),
        num_bytes=int(table.num_bytes[chosen].sum()),
        num_characters=int(table.num_characters[chosen].sum()),
        num_words=int(table.num_words[chosen].sum()),
        lost_bytes=int(table.lost_bytes[chosen].sum()),
        nll_nats_sum=math.fsum(nll),
        document_mean_nll=math.fsum(means) / len(means) if len(means) else math.nan,
    )


def results(summary: Summary, *, resamples: int = 0, seed: int = 0, **more: Any) -> dict[str, Any]:
    """The content of results.json.

    Args:
        summary: counts and metrics.
        resamples: of the bootstrap; 0 for none.
        seed: of the bootstrap.
        more: the sections that describe the run (command, protocol, performance, environment,
            config, fingerprints).
    """
    return {
        "schema_version": SCHEMA_VERSION,
        **more,
        "counts": summary.total.counts(),
        "metrics": {**summary.total.metrics(), **_of_peers(summary)},
        **_intervals(summary, resamples, seed),
        "domains": {
            name: {"counts": part.counts(), "metrics": part.metrics()}
            for name, part in summary.domains.items()
        },
        "macro": _macro(list(summary.domains.values())),
        "loss_by_position": summary.by_position,
        "loss_by_document_length": _by_length(summary.documents),
    }


def teacher_results(summary: Summary, **more: Any) -> dict[str, Any]:
    """The ``teacher`` section of results.json: its own metrics on the same tokens.

    Args:
        summary: of the teacher.
        more: what describes it.
    """
    content = results(summary)
    kept = ("metrics", "intervals_95", "domains", "loss_by_position")
    return {**more, **{name: content[name] for name in kept}}


def _macro(domains: list[Totals]) -> dict[str, Any] | None:
    """Every domain weighs the same: means of the loss per unit, then exp; null without domains."""
    if not domains:
        return None

    def mean(unit: str) -> float:
        ratios = [_ratio(part.nll_nats_sum, getattr(part, unit)) for part in domains]
        whole = unit == "num_scored" or all(part.is_whole for part in domains)
        return math.fsum(ratios) / len(ratios) if whole else math.nan

    values = {
        "token_perplexity": exp_or_inf(mean("num_scored")),
        "word_perplexity": exp_or_inf(mean("num_words")),
        "byte_perplexity": exp_or_inf(mean("num_bytes")),
        "bits_per_byte": mean("num_bytes") / math.log(2),
        "bits_per_character": mean("num_characters") / math.log(2),
    }
    return {
        "domains": len(domains),
        **{name: value if math.isfinite(value) else None for name, value in values.items()},
    }


def _by_length(table: DocumentTable) -> list[dict[str, Any]]:
    """Loss of documents of 1, 2 to 3, 4 to 7, ... tokens."""
    rows = []
    longest = int(table.num_tokens.max(initial=0))
    for power in range(longest.bit_length()):
        inside = (table.num_tokens >> power == 1) & (table.num_scored > 0)
        count = int(table.num_scored[inside].sum())
        if count:
            nll = math.fsum(table.nll_nats_sum[inside])
            rows.append(
                {
                    "document_tokens": [2**power, 2 ** (power + 1) - 1],
                    "documents": int(inside.sum()),
                    "scored_tokens": count,
                    "nll_nats_per_token": nll / count,
                }
            )
    return rows


def _intervals(summary: Summary, resamples: int, seed: int) -> dict[str, Any]:
    table, total = summary.documents, summary.total
    nothing = np.zeros(len(table.num_scored), dtype=np.int64)
    columns = {
        "nll": table.nll_nats_sum,
        "tokens": table.num_scored,
        "words": table.num_words if total.is_whole else nothing,
        "bytes": table.num_bytes if total.is_whole else nothing,
        "characters": table.num_characters if total.is_whole else nothing,
    }
    bootstrap = partial(intervals.bootstrapped, resamples=resamples, seed=seed)
    squares = math.fsum(table.nll_nats_squared_sum)
    by_token = intervals.token_iid(total.num_scored, total.nll_nats_sum, squares)
    return {
        "intervals_95": intervals.of_metrics(columns, intervals.clustered),
        "intervals_95_bootstrap": intervals.of_metrics(columns, bootstrap),
        "intervals_95_token_iid": {"token_perplexity": by_token and list(by_token)},
    }


def _of_peers(summary: Summary) -> dict[str, float | None]:
    value = summary.hf_perplexity
    if value is None:
        return {}
    return {"hf_perplexity": value if math.isfinite(value) else None}


def write_results(path: Path, content: Mapping[str, Any]) -> None:
    """Write ``results.json`` to ``path``."""
    path.write_text(f"{_dumps(content, indent=2)}\n", encoding="utf-8", errors=_NO_UTF8)


def write_documents(path: Path, documents: DocumentTable) -> None:
    """Write ``documents.jsonl`` to ``path``."""
    with path.open("w", encoding="utf-8", errors=_NO_UTF8) as file:
        file.writelines(f"{_dumps(row)}\n" for row in documents.rows())


def _dumps(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, indent=indent, allow_nan=False, ensure_ascii=False, default=str)


def over_limits(content: Mapping[str, Any], limits: Mapping[str, float]) -> str | None:
    """What of ``fail_if`` a results.json exceeds, in one sentence; None if nothing.

    A metric that is null (not finite, or without tokens) exceeds every limit.

    Raises:
        UserError: a key that the results do not have.
    """
    problems = []
    for key, limit in limits.items():
        section, _, name = key.rpartition(".")
        value: Any = content
        for part in _path(section, content):
            value = value.get(part) if isinstance(value, Mapping) else None
        if not isinstance(value, Mapping) or name not in value:
            raise UserError(f"fail_if has {key}, but the results have no such key")
        value = value[name]
        if value is None:
            problems.append(f"{key} is null, which no limit allows")
        elif value > limit:
            problems.append(f"{key} is {value:.6g}, above {limit:g}")
    return f"fail_if: {'; '.join(problems)}" if problems else None


def _path(section: str, content: Mapping[str, Any]) -> list[str]:
    """``domains.a.b.metrics`` is the metrics of the domain ``a.b``."""
    if section.startswith("domains.") and section.endswith(".metrics"):
        return ["domains", section.removeprefix("domains.").removesuffix(".metrics"), "metrics"]
    return section.split(".")
