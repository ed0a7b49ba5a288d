"""The definition of every metric. results.json, tables, ``compare`` and ``fail_if`` follow it.

A new statistic is a new row. Imports nothing heavy, since a config is checked before torch is
imported.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

FEWEST_DOCUMENTS = 3
"""For an interval. With two documents Student's t has one degree of freedom, and the interval spans
a factor of thousands."""

FEWEST_RESAMPLED = 20
"""For a bootstrap interval. With fewer documents it covers the truth less than 90 % of the time:
50 % with two, 82 % with five."""


def perplexity(nll_nats_sum: float, count: float) -> float:
    """The perplexity of record: exp(sum of NLL / count), Jelinek, Mercer, Bahl and Baker 1977.

    Args:
        nll_nats_sum: over the scored tokens.
        count: the scored tokens; or the words or bytes that they stand for, for the perplexity of
            a word or a byte.

    Returns:
        inf above float64's range (a mean NLL of 709), nan for a count of 0.
    """
    return exp_or_inf(mean(nll_nats_sum, count))


def bits(nll_nats_sum: float, count: float) -> float:
    """The mean NLL of a unit in bits; nan for a count of 0."""
    return mean(nll_nats_sum, count) / math.log(2)


def root_mean(total: float, count: float) -> float:
    """The root of the mean, of squares; nan for a count of 0."""
    return math.sqrt(mean(total, count))


def mean(total: float, count: float) -> float:
    """The mean; nan for a count of 0."""
    return total / count if count else math.nan


def exp_or_inf(value: float) -> float:
    """exp, inf instead of an OverflowError."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


@dataclass(frozen=True)
class Statistic:
    """A function of sums over documents: of a mean of what is known of their tokens.

    Attributes:
        key: name in results.json.
        columns: name in :attr:`ppl_eval.metrics.summary.DocumentTable.sums` -> its factor in the
            sum; none for what is no function of sums.
        heading: in tables; empty where it is in none.
        form: (sum, count) -> value.
        unit: what is counted, a name in :attr:`ppl_eval.metrics.summary.DocumentTable.counts`.
        low: the least that the mean can be.
        high: the most that the mean can be.
        less_is_better: whether ``fail_if`` can bound it.
    """

    key: str
    columns: Mapping[str, int]
    heading: str = ""
    form: Callable[[float, float], float] = mean
    unit: str = "scored_tokens"
    low: float = 0.0
    high: float = math.inf
    less_is_better: bool = True


WHOLE_TEXT = ("words", "bytes", "characters")
"""Units of the whole text: what is lost by such a unit is unknown where some text is left out."""

_NLL = {"nll_nats": 1}

METRICS = (
    Statistic("token_perplexity", _NLL, "token\nppl", perplexity),
    Statistic(
        "document_mean_perplexity",
        {"mean_nll_nats": 1},
        "doc-mean\nppl",
        perplexity,
        "documents_scored",
    ),
    Statistic("word_perplexity", _NLL, "word\nppl", perplexity, "words"),
    Statistic("byte_perplexity", _NLL, "byte\nppl", perplexity, "bytes"),
    Statistic("bits_per_byte", _NLL, "bits/\nbyte", bits, "bytes"),
    Statistic("bits_per_character", _NLL, "bits/\nchar", bits, "characters"),
)
"""Of every run; all have intervals. In ``document_mean_perplexity`` every document weighs the
same."""

MACRO = tuple(each for each in METRICS if each.columns is _NLL)
"""In ``macro``, where every domain weighs the same."""

_LOG_RATIO = {"nll_nats": 1, "teacher_nll_nats": -1}

FIDELITY = (
    Statistic("perplexity_ratio", _LOG_RATIO, "ppl\nratio", perplexity),
    Statistic("ln_perplexity_ratio", _LOG_RATIO, low=-math.inf),
    Statistic("kl_teacher_student_nats", {"kl_teacher_student": 1}, "KL(t||s)\nnats"),
    Statistic("kl_student_teacher_nats", {"kl_student_teacher": 1}, "KL(s||t)\nnats"),
    Statistic("js_nats", {"js": 1}, "JS\nnats", high=math.log(2)),
    Statistic("cross_entropy_nats", {"teacher_entropy": 1, "kl_teacher_student": 1}),
    Statistic("teacher_entropy_nats", {"teacher_entropy": 1}, less_is_better=False),
    Statistic("student_entropy_nats", {"student_entropy": 1}, less_is_better=False),
    Statistic("top1_agreement", {"top1": 1}, "\ntop-1", high=1.0, less_is_better=False),
    Statistic("top5_agreement", {"top5": 1}, "\ntop-5", high=1.0, less_is_better=False),
    Statistic(
        "probability_difference_mean",
        {"probability_difference": 1},
        low=-1.0,
        high=1.0,
        less_is_better=False,
    ),
    Statistic("probability_difference_rms", {"probability_difference_squared": 1}, form=root_mean),
    Statistic("kl_maximum_nats", {}),
)
"""Of a run with a teacher. The means among them have intervals."""
