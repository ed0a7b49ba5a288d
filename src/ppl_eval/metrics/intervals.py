"""95 % confidence intervals. The sampling unit is the document, since its tokens are correlated.

All metrics are functions of sums over documents, so jackknife and bootstrap need only these sums.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy import stats

from ppl_eval.metrics.definitions import FEWEST_DOCUMENTS, FEWEST_RESAMPLED, Statistic, perplexity
from ppl_eval.metrics.summary import Summary

LEVEL = 0.95

_BLOCK = 16_384
"""Documents per block of the bootstrap: its counters fit into a core's cache."""

Ends = tuple[np.ndarray, np.ndarray]
"""Lower and upper ends of intervals, [...] each."""

Function = Callable[[np.ndarray], np.ndarray]
"""Sums over documents [..., columns] -> approximately normal values [...] or [..., values]."""


def ratio(numerator: int | list[int], denominator: int | list[int]) -> Function:
    """The quotient of two columns of sums, or of several pairs of columns."""
    return lambda sums: sums[..., numerator] / sums[..., denominator]


def jackknife(by_document: np.ndarray, function: Function) -> tuple[np.ndarray, np.ndarray]:
    """(values, standard errors) of functions of sums over documents.

    Leave-one-document-out (Efron and Stein 1981). For a ratio of sums it is the linearised,
    cluster-robust variance with residuals inflated by each document's share, so that few documents
    of unequal length do not make it too small.

    Args:
        by_document: what is summed (float64 [documents, columns]); at least 2 documents.
        function: what is wanted, of the sums.
    """
    sums = by_document.sum(axis=0)
    count = len(by_document)
    without = function(sums - by_document)
    variance = (count - 1) / count * np.square(without - without.mean(axis=0)).sum(axis=0)
    return function(sums), np.sqrt(variance)


def clustered(by_document: np.ndarray, function: Function) -> Ends | None:
    """95 % intervals by :func:`jackknife` and Student's t; None below three documents."""
    count = len(by_document)
    if count < FEWEST_DOCUMENTS:
        return None
    value, error = jackknife(by_document, function)
    reach = float(stats.t.ppf((1 + LEVEL) / 2, count - 1)) * error
    return value - reach, value + reach


def bootstrapped(
    by_document: np.ndarray, function: Function, *, resamples: int, seed: int
) -> Ends | None:
    """95 % percentile intervals over resampled documents; None below twenty documents.

    All columns are summed over the same draws. A resample draws as many documents as there are, at
    random and with replacement: first how many from each block of documents, then which of the
    block. That is one multinomial draw, in an order that suits the cache.
    """
    count = len(by_document)
    if count < FEWEST_RESAMPLED or resamples < 1:
        return None
    random = np.random.default_rng(seed)
    blocks = [by_document[begin : begin + _BLOCK] for begin in range(0, count, _BLOCK)]
    shares = np.asarray([len(block) / count for block in blocks])
    num_drawn = random.multinomial(count, shares, size=resamples)
    sums = np.zeros((resamples, by_document.shape[1]))
    for block, of_resamples in zip(blocks, num_drawn.T, strict=True):
        for resample, drawn in enumerate(of_resamples):
            documents = random.integers(len(block), size=drawn)
            sums[resample] += np.bincount(documents, minlength=len(block)) @ block
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(function(sums), [tail, 1 - tail], axis=0)
    return low, high


def token_iid(num_tokens: int, nll_sum: float, nll_squared_sum: float) -> list[float] | None:
    """Interval of the token perplexity as if tokens were independent; None below two tokens.

    llama.cpp's: perplexity * sqrt((E[x^2] - E[x]^2) / (n - 1)) is its standard error. It is too
    narrow, since tokens of a document are not independent.
    """
    if num_tokens < 2:
        return None
    mean = nll_sum / num_tokens
    variance = max(nll_squared_sum / num_tokens - mean * mean, 0.0) / (num_tokens - 1)
    value = perplexity(nll_sum, num_tokens)
    if math.isinf(value):
        return None
    reach = float(stats.norm.ppf((1 + LEVEL) / 2)) * value * math.sqrt(variance)
    return [value - reach, value + reach]


def paired_log_ratio(
    nll_sum: np.ndarray, other_nll_sum: np.ndarray, weight: np.ndarray
) -> tuple[float, tuple[float, float] | None]:
    """How two models differ on the same documents: ln of the ratio of their perplexities.

    What makes a document hard for both cancels, so the interval is far narrower than those of the
    two perplexities.

    Args:
        nll_sum: NLL of the first model by document (float64 [documents]).
        other_nll_sum: NLL of the second model.
        weight: what both are divided by: scored tokens or bytes by document.

    Returns:
        (ln of the ratio, its 95 % interval).
    """
    used = weight > 0
    columns = np.stack([nll_sum - other_nll_sum, weight.astype(np.float64)], axis=1)[used]
    function = ratio(0, 1)
    ends = clustered(columns, function)
    value = float(function(columns.sum(axis=0)))
    return value, None if ends is None else (float(ends[0]), float(ends[1]))


def of_statistics(
    statistics: Sequence[Statistic],
    summary: Summary,
    interval: Callable[[np.ndarray, Function], Ends | None],
) -> dict[str, list[float] | None]:
    """Intervals of statistics, the documents being the sample.

    Args:
        statistics: functions of sums over documents.
        summary: the documents.
        interval: :func:`clustered`, or :func:`bootstrapped` with its numbers.

    Returns:
        Key -> [low, high]; null where it has no value, where one document decides whether it has
        one (the only one with words), or above float64. No end lies where a value cannot.
    """
    table, found = summary.documents, dict.fromkeys(each.key for each in statistics)
    known = [each for each in statistics if summary.total.count_of(each.unit)]
    scored = table.counts["scored_tokens"] > 0
    totals = [sum(f * table.sums[name] for name, f in each.columns.items()) for each in known]
    units = list({each.unit: None for each in known})
    columns = np.stack([*totals, *(table.counts[unit] for unit in units)], axis=1)[scored]
    counts = [len(known) + units.index(each.unit) for each in known]
    with np.errstate(divide="ignore", invalid="ignore"):
        ends = interval(columns, ratio(list(range(len(known))), counts))
    for each, pair in zip(known, () if ends is None else zip(*ends, strict=True), strict=False):
        inside = [min(max(float(end), each.low), each.high) for end in pair]
        values = [each.form(end, 1) for end in inside]
        found[each.key] = values if np.isfinite([*pair, *values]).all() else None
    return found
