"""How sure a number is: 95 % intervals that know that tokens of a document belong together.

A corpus is taken as a sample of documents. All metrics are functions of sums over documents, so a
document left out, or drawn twice, is all that these intervals need.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np
from scipy import stats

from ppl_eval.metrics.names import FEWEST_DOCUMENTS, FEWEST_RESAMPLED

LEVEL = 0.95

_DRAWS_AT_A_TIME = 2_000_000

Interval = tuple[float, float]
Statistic = Callable[[np.ndarray], np.ndarray]
"""Sums over documents [..., columns] -> values [...] whose distribution is nearly normal."""


def ratio(numerator: int, denominator: int) -> Statistic:
    """The quotient of two columns of sums."""
    return lambda sums: sums[..., numerator] / sums[..., denominator]


def jackknife(by_document: np.ndarray, statistic: Statistic) -> tuple[float, float, int]:
    """(value, standard error, degrees of freedom) of a function of sums over documents.

    Leave-one-document-out (Efron and Stein 1981). For a ratio of sums it is the linearised,
    cluster-robust variance with residuals inflated by each document's share, so that few documents
    of unequal length do not make it too small.

    Args:
        by_document: what is summed (float64 [documents, columns]); at least 2 documents.
        statistic: of the sums.
    """
    sums = by_document.sum(axis=0)
    count = len(by_document)
    without = statistic(sums - by_document)
    variance = (count - 1) / count * np.square(without - without.mean()).sum()
    return float(statistic(sums)), math.sqrt(variance), count - 1


def clustered(by_document: np.ndarray, statistic: Statistic) -> Interval | None:
    """95 % interval by :func:`jackknife` and Student's t; None below three documents."""
    if len(by_document) < FEWEST_DOCUMENTS:
        return None
    value, error, freedom = jackknife(by_document, statistic)
    reach = float(stats.t.ppf((1 + LEVEL) / 2, freedom)) * error
    return value - reach, value + reach


def bootstrapped(
    by_document: np.ndarray, statistic: Statistic, *, resamples: int, seed: int
) -> Interval | None:
    """95 % percentile interval over resampled documents; None below twenty documents."""
    count = len(by_document)
    if count < FEWEST_RESAMPLED or resamples < 1:
        return None
    random = np.random.default_rng(seed)
    values = []
    at_a_time = max(1, _DRAWS_AT_A_TIME // count)
    for start in range(0, resamples, at_a_time):
        size = min(at_a_time, resamples - start)
        draws = random.multinomial(count, np.full(count, 1 / count), size=size)
        values.append(statistic(draws @ by_document))
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(np.concatenate(values), [tail, 1 - tail])
    return float(low), float(high)


def token_iid(num_tokens: int, nll_sum: float, nll_squared_sum: float) -> Interval | None:
    """Interval of the token perplexity as if tokens were independent; None below two tokens.

    llama.cpp's: perplexity * sqrt((E[x^2] - E[x]^2) / (n - 1)) is its standard error. It is too
    narrow, since tokens of a document are not independent.
    """
    if num_tokens < 2:
        return None
    mean = nll_sum / num_tokens
    variance = max(nll_squared_sum / num_tokens - mean * mean, 0.0) / (num_tokens - 1)
    try:
        value = math.exp(mean)
    except OverflowError:
        return None
    reach = stats.norm.ppf((1 + LEVEL) / 2) * value * math.sqrt(variance)
    return float(value - reach), float(value + reach)


def paired_log_ratio(
    nll_sum: np.ndarray, other_nll_sum: np.ndarray, weight: np.ndarray
) -> tuple[float, Interval | None]:
    """How two models differ on the same documents: ln of the ratio of their perplexities.

    What makes a document hard for both cancels, so the interval is far narrower than those of the
    two perplexities suggest.

    Args:
        nll_sum: NLL of each document (float64 [documents]).
        other_nll_sum: the other model's.
        weight: of each document: its scored tokens, or its bytes if the tokenizers differ.

    Returns:
        (ln(perplexity / other perplexity), its 95 % interval clustered by document).
    """
    used = weight > 0
    columns = np.stack([nll_sum - other_nll_sum, weight.astype(np.float64)], axis=1)[used]
    statistic = ratio(0, 1)
    return float(statistic(columns.sum(axis=0))), clustered(columns, statistic)


def of_metrics(
    columns: Mapping[str, np.ndarray], interval: Callable[[np.ndarray, Statistic], Interval | None]
) -> dict[str, list[float] | None]:
    """Intervals of the metrics of results.json.

    Args:
        columns: by document: ``nll`` (nats), ``tokens`` (scored), ``words``, ``bytes``,
            ``characters``.
        interval: :func:`clustered`, or :func:`bootstrapped` with its numbers.

    Returns:
        Metric -> [low, high]; null where it has no value or exceeds float64. A loss is never below
        0, so neither is an end of its interval.
    """
    nll, tokens = columns["nll"], columns["tokens"]
    scored = tokens > 0

    def per(name: str) -> Interval | None:
        unit = columns[name]
        if not unit.sum():
            return None
        return interval(np.stack([nll, unit.astype(np.float64)], axis=1)[scored], ratio(0, 1))

    means = np.divide(nll, tokens, out=np.zeros(len(nll)), where=scored)[scored]
    ones = np.ones(len(means))
    document_mean = interval(np.stack([means, ones], axis=1), ratio(0, 1)) if len(means) else None
    by_byte, by_character = per("bytes"), per("characters")
    return {
        "token_perplexity": _exp(per("tokens")),
        "document_mean_perplexity": _exp(document_mean),
        "word_perplexity": _exp(per("words")),
        "byte_perplexity": _exp(by_byte),
        "bits_per_byte": _bits(by_byte),
        "bits_per_character": _bits(by_character),
    }


def _exp(interval: Interval | None) -> list[float] | None:
    if interval is None or interval[1] > math.log(1.7e308):
        return None
    return [math.exp(max(end, 0.0)) for end in interval]


def _bits(interval: Interval | None) -> list[float] | None:
    return None if interval is None else [max(end, 0.0) / math.log(2) for end in interval]
