"""Intervals: closed forms, and coverage on simulated corpora whose tokens are correlated."""

import functools
import math

import numpy as np
import pytest
from scipy import stats

from ppl_eval.metrics import intervals

REPEATS = 2000


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
        columns = {"nll": nll, "tokens": tokens}
        columns |= dict.fromkeys(("words", "bytes", "characters"), np.zeros(documents, dtype=int))
        found = intervals.of_metrics(columns, intervals.clustered)
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
        rows = {"nll": 2.0 * np.asarray(tokens) + np.arange(len(tokens))}
        rows |= dict.fromkeys(("tokens", "words", "bytes", "characters"), np.asarray(tokens))
        found = set(map(bool, intervals.of_metrics(rows, intervals.clustered).values()))
        assert found == {np.count_nonzero(tokens) == 3}
        assert set(intervals.of_metrics(rows, bootstrap).values()) == {None}


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
    huge = {"nll": np.asarray([2000.0, 3000.0, 2500.0]), "tokens": np.asarray([1, 1, 1])}
    huge |= {name: np.zeros(3, dtype=int) for name in ("words", "bytes", "characters")}
    assert intervals.of_metrics(huge, intervals.clustered)["token_perplexity"] is None


def test_no_interval_reaches_below_a_loss_of_zero():
    three = {"nll": np.asarray([1.0, 90.0, 1.0])}
    three |= dict.fromkeys(("tokens", "words", "bytes", "characters"), np.asarray([10, 10, 10]))
    found = intervals.of_metrics(three, intervals.clustered)
    assert found["token_perplexity"][0] == 1
    assert found["bits_per_byte"][0] == 0
