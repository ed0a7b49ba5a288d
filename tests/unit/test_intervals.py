"""Intervals: closed forms, and coverage on simulated corpora whose tokens are correlated."""

import functools
import math

import numpy as np
import pytest
from scipy import stats

from ppl_eval.metrics import intervals
from ppl_eval.metrics.definitions import METRICS
from ppl_eval.metrics.summary import DocumentTable, Summary

REPEATS = 2000


def summary(nll, tokens, units=0):
    """Documents of so many words, bytes and characters each."""
    scored = tokens > 0
    counts = {"scored_tokens": tokens, "documents_scored": scored.astype(int)}
    counts |= dict.fromkeys(("words", "bytes", "characters"), np.broadcast_to(units, len(nll)))
    counts |= dict.fromkeys(("context_only", "truncated"), np.zeros(len(nll), dtype=int))
    sums = {"nll_nats": nll, "mean_nll_nats": nll / np.maximum(tokens, 1)}
    table = DocumentTable([(None, None)] * len(nll), counts, sums)
    return Summary(table.totals(), {}, table, [])


def corpus(random, documents):
    """(scored tokens, NLL, squared NLL) by document: lengths are skewed, documents differ."""
    tokens = np.maximum(1, random.lognormal(4, 0.7, documents)).astype(int)
    level = np.maximum(0.2, 2.5 + 0.6 * random.standard_normal(documents))
    level = level - 0.05 * (np.log(tokens) - 4)
    # a sum of n gamma variables of shape 0.8
    nll = random.gamma(0.8 * tokens, level / 0.8)
    return tokens, nll, tokens * level**2 * (1 + 1 / 0.8)


@pytest.fixture(scope="module")
def truth():
    """What the ratios are over five million documents."""
    random = np.random.default_rng(1)
    tokens, nll, _ = corpus(random, 5_000_000)
    return nll.sum() / tokens.sum(), (nll / tokens).mean()


@pytest.mark.parametrize("documents", [50, 150, 500])
def test_coverage(truth, documents):
    """93 to 97 % of 2,000 intervals hold the truth; those of independent tokens do not."""
    random = np.random.default_rng(documents)
    per_token = document_mean = independent = 0
    for _ in range(REPEATS):
        tokens, nll, squares = corpus(random, documents)
        found = intervals.of_statistics(METRICS, summary(nll, tokens), intervals.clustered)
        low, high = found["token_perplexity"]
        per_token += low <= math.exp(truth[0]) <= high
        low, high = found["document_mean_perplexity"]
        document_mean += low <= math.exp(truth[1]) <= high
        low, high = intervals.token_iid(int(tokens.sum()), nll.sum(), squares.sum())
        independent += low <= math.exp(truth[0]) <= high
    assert 0.93 <= per_token / REPEATS <= 0.97
    assert 0.93 <= document_mean / REPEATS <= 0.97
    assert independent / REPEATS < 0.8


@pytest.mark.parametrize("documents", [50, 500])
def test_coverage_of_paired_differences(documents):
    """Two models on the same documents; what makes a document hard for both cancels."""
    random = np.random.default_rng(documents)
    difference, held, unpaired = 0.03, 0, []
    for _ in range(REPEATS):
        tokens, nll, _ = corpus(random, documents)
        shift = difference + 0.1 * random.standard_normal(documents)
        other = nll - tokens * shift
        value, (low, high) = intervals.paired_log_ratio(nll, other, tokens)
        # the true ratio weighs documents by their tokens, and shifts do not depend on these
        held += low <= difference <= high
        assert low <= value <= high
        wide = intervals.clustered(np.stack([nll, tokens], axis=1), intervals.ratio(0, 1))
        unpaired.append((high - low) / (wide[1] - wide[0]))
    assert 0.93 <= held / REPEATS <= 0.97
    assert np.median(unpaired) < 0.3


def test_equal_documents_give_the_textbook_interval():
    """With equal lengths the jackknife is the standard error of a mean, and t is Student's."""
    means = np.asarray([1.0, 2.0, 4.0, 4.5, 3.0])
    columns = np.stack([means * 10, np.full(5, 10.0)], axis=1)
    low, high = intervals.clustered(columns, intervals.ratio(0, 1))
    reach = stats.t.ppf(0.975, 4) * means.std(ddof=1) / math.sqrt(5)
    assert (low, high) == pytest.approx((means.mean() - reach, means.mean() + reach))


def test_the_bootstrap_is_seeded_and_near_the_clustered_one():
    tokens, nll, _ = corpus(np.random.default_rng(3), 400)
    columns = np.stack([nll, tokens], axis=1)
    statistic = intervals.ratio(0, 1)
    one, again, other = (
        intervals.bootstrapped(columns, statistic, resamples=2000, seed=seed) for seed in (1, 1, 2)
    )
    assert one == again != other
    assert one == pytest.approx(intervals.clustered(columns, statistic), rel=0.02)
    assert intervals.bootstrapped(columns, statistic, resamples=0, seed=1) is None


def multinomial_bootstrap(by_document, resamples, seed):
    """Percentile interval of a ratio, each resample drawn in one piece."""
    random = np.random.default_rng(seed)
    documents = len(by_document)
    drawn = random.integers(documents, size=(resamples, documents))
    sums = by_document[drawn].sum(axis=1)
    return np.quantile(sums[:, 0] / sums[:, 1], [0.025, 0.975])


@pytest.mark.parametrize("block", [7, 64])
def test_resamples_in_blocks_are_distributed_as_those_drawn_in_one_piece(monkeypatch, block):
    """Means, variances and the covariance between two blocks of 20,000 resamples of 150 documents;
    and the interval is that of the plain bootstrap."""
    monkeypatch.setattr(intervals, "_BLOCK", block)
    tokens, nll, _ = corpus(np.random.default_rng(5), 150)
    columns = np.stack([nll, tokens], axis=1)
    found = intervals.bootstrapped(columns, intervals.ratio(0, 1), resamples=20_000, seed=1)
    plain = multinomial_bootstrap(columns, 20_000, seed=2)
    width = plain[1] - plain[0]
    assert found == pytest.approx(plain, abs=0.03 * width)

    # how often the first and the last document are drawn, and how many are drawn in all
    marks = np.zeros((150, 3))
    marks[0, 0] = marks[-1, 1] = 1
    marks[:, 2] = 1
    seen = []
    intervals.bootstrapped(marks, lambda sums: seen.append(sums) or sums, resamples=20_000, seed=3)
    first, last, drawn = seen[0].T
    assert set(drawn) == {150}
    p = 1 / 150
    for times in (first, last):
        assert times.mean() == pytest.approx(1, abs=4 / math.sqrt(20_000))
        assert times.var() == pytest.approx(150 * p * (1 - p), rel=0.05)
    error = 1 / math.sqrt(20_000)
    assert np.cov(first, last)[0, 1] == pytest.approx(-150 * p * p, abs=4 * error)


def test_all_metrics_are_bootstrapped_from_the_same_draws():
    """Where a word is a token and a byte is half a token, their intervals say the same."""
    tokens, nll, _ = corpus(np.random.default_rng(6), 60)
    documents = summary(nll, tokens, 2 * tokens)
    bootstrap = functools.partial(intervals.bootstrapped, resamples=300, seed=1)
    found = intervals.of_statistics(METRICS, documents, bootstrap)
    by_token, by_byte = (found[f"{unit}_perplexity"] for unit in ("token", "byte"))
    assert by_token == pytest.approx(np.square(by_byte), rel=1e-12)
    assert found["bits_per_byte"] == pytest.approx(np.log2(by_byte), rel=1e-12)


def test_words_in_one_document_alone_have_no_interval():
    """Without that document there is no loss by word; NaN is no JSON."""
    tokens, words = np.asarray([5, 3, 4]), np.asarray([3, 0, 0])
    found = intervals.of_statistics(
        METRICS, summary(2.0 * tokens + [1, 2, 4], tokens, words), intervals.clustered
    )
    assert found["word_perplexity"] is None
    assert found["token_perplexity"] is not None


def test_llama_cpp_s_standard_error():
    nll = np.asarray([1.0, 2.5, 0.5, 3.0, 2.0])
    low, high = intervals.token_iid(5, nll.sum(), np.square(nll).sum())
    value = math.exp(nll.mean())
    error = value * math.sqrt((np.square(nll).mean() - nll.mean() ** 2) / 4)
    assert (high + low) / 2 == pytest.approx(value)
    assert (high - low) / 2 == pytest.approx(1.959964 * error, rel=1e-6)


def test_two_documents_are_too_few():
    """No interval of one or two documents, nor of three of which one has no scored token."""
    bootstrap = functools.partial(intervals.bootstrapped, resamples=100, seed=1)
    for tokens in ([3], [3, 4], [3, 0, 4], [3, 5, 4]):
        nll = 2.0 * np.asarray(tokens) + np.arange(len(tokens))
        documents = summary(nll, np.asarray(tokens), np.asarray(tokens))
        found = intervals.of_statistics(METRICS, documents, intervals.clustered)
        assert set(map(bool, found.values())) == {np.count_nonzero(tokens) == 3}
        assert set(intervals.of_statistics(METRICS, documents, bootstrap).values()) == {None}


@pytest.mark.parametrize("documents", [3, 5, 10])
def test_coverage_of_few_documents(truth, documents):
    """92 to 96 % of 2,000 intervals hold the truth."""
    random = np.random.default_rng(documents)
    held = 0
    for _ in range(REPEATS):
        tokens, nll, _ = corpus(random, documents)
        columns = np.stack([nll, tokens], axis=1)
        low, high = intervals.clustered(columns, intervals.ratio(0, 1))
        held += low <= truth[0] <= high
    assert 0.92 <= held / REPEATS <= 0.96


def test_coverage_of_the_bootstrap(truth):
    """Of twenty documents, the fewest that it takes, about 90 % of the intervals hold the truth."""
    random = np.random.default_rng(20)
    held, repeats = 0, 500
    for seed in range(repeats):
        tokens, nll, _ = corpus(random, 20)
        columns = np.stack([nll, tokens], axis=1)
        low, high = intervals.bootstrapped(columns, intervals.ratio(0, 1), resamples=500, seed=seed)
        held += low <= truth[0] <= high
    assert 0.88 <= held / repeats <= 0.96


def test_too_little_to_say():
    assert intervals.token_iid(1, 2.0, 4.0) is None
    huge = summary(np.asarray([2000.0, 3000.0, 2500.0]), np.asarray([1, 1, 1]))
    assert intervals.of_statistics(METRICS, huge, intervals.clustered)["token_perplexity"] is None


def test_no_interval_reaches_below_a_loss_of_zero():
    three = summary(np.asarray([1.0, 90.0, 1.0]), np.asarray([10, 10, 10]), 10)
    found = intervals.of_statistics(METRICS, three, intervals.clustered)
    assert found["token_perplexity"][0] == 1
    assert found["bits_per_byte"][0] == 0
