"""What each number of results.json is; its sections, the tables, ``compare`` and ``fail_if`` follow
these rows, and a new statistic is a new row.

This module imports nothing heavy: a config is checked before torch is loaded.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

FEWEST_DOCUMENTS = 3
"""For an interval. Of two documents Student's t has one degree of freedom: the interval holds the
truth as often as it says, and spans a factor of thousands."""

FEWEST_RESAMPLED = 20
"""For a bootstrap. Of fewer its percentiles hold the truth less than 90 % of the time: of two 50 %,
of five 82 %."""


def perplexity(nll_nats_sum: float, count: float) -> float:
    """The perplexity of record: exp(sum of NLL / count), Jelinek, Mercer, Bahl and Baker 1977.

    Args:
        nll_nats_sum: over the scored tokens.
        count: the scored tokens; or the words or bytes that they stand for, for the perplexity of
            a word or a byte.

    Returns:
        inf above float64's range (a mean NLL of 709), nan for a count of 0.
    """
    return exp_or_inf(ratio(nll_nats_sum, count))


def bits(nll_nats_sum: float, count: float) -> float:
    """The mean NLL of a unit in bits; nan for a count of 0."""
    return ratio(nll_nats_sum, count) / math.log(2)


def ratio(numerator: float, count: float) -> float:
    """The quotient; nan for a count of 0."""
    return numerator / count if count else math.nan


def exp_or_inf(value: float) -> float:
    """exp, inf instead of an OverflowError."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


@dataclass(frozen=True)
class Metric:
    """A function of a sum over documents and a count over documents.

    Attributes:
        key: name in results.json.
        total: what is summed: ``nll_nats`` of the tokens, or ``mean_nll_nats`` of the documents.
        unit: what is counted, a name of :attr:`ppl_eval.metrics.summary.DocumentTable.counts`.
        form: (sum, count) -> value.
        heading: in tables.
    """

    key: str
    total: str
    unit: str
    form: Callable[[float, float], float]
    heading: str


WHOLE_TEXT = ("words", "bytes", "characters")
"""Units of the whole text: what is lost by such a unit is unknown where some text is left out."""

METRICS = (
    Metric("token_perplexity", "nll_nats", "scored_tokens", perplexity, "token\nppl"),
    Metric(
        *("document_mean_perplexity", "mean_nll_nats", "documents_scored"),
        *(perplexity, "doc-mean\nppl"),
    ),
    Metric("word_perplexity", "nll_nats", "words", perplexity, "word\nppl"),
    Metric("byte_perplexity", "nll_nats", "bytes", perplexity, "byte\nppl"),
    Metric("bits_per_byte", "nll_nats", "bytes", bits, "bits/\nbyte"),
    Metric("bits_per_character", "nll_nats", "characters", bits, "bits/\nchar"),
)
"""The metrics that have intervals. In ``document_mean_perplexity`` every document weighs the
same."""

MACRO = tuple(metric for metric in METRICS if metric.total == "nll_nats")
"""The metrics of ``macro``, in which every domain weighs the same."""


@dataclass(frozen=True)
class Statistic:
    """How far a student is from its teacher: a mean over the scored tokens, or a function of one.

    Attributes:
        key: name in ``fidelity``.
        columns: column of the ledger -> its factor in the sum that is averaged; empty for what is
            no mean.
        form: what is done to the mean; None where the statistic is the mean. Means have intervals.
        low: the least that the mean can be.
        high: the most that the mean can be.
        heading: in the table of ``compare``; None where it is not in there.
        less_is_better: whether ``fail_if`` can bound it.
    """

    key: str
    columns: Mapping[str, int]
    form: Callable[[float], float] | None = None
    low: float = 0
    high: float = math.inf
    heading: str | None = None
    less_is_better: bool = False


_LOG_RATIO = {"nll_nats": 1, "teacher_nll_nats": -1}

FIDELITY = (
    Statistic(
        *("perplexity_ratio", _LOG_RATIO, exp_or_inf),
        heading="ppl\nratio",
        less_is_better=True,
    ),
    Statistic("ln_perplexity_ratio", _LOG_RATIO, low=-math.inf, less_is_better=True),
    Statistic(
        *("kl_teacher_student_nats", {"kl_teacher_student": 1}),
        heading="KL(t||s)\nnats",
        less_is_better=True,
    ),
    Statistic(
        *("kl_student_teacher_nats", {"kl_student_teacher": 1}),
        heading="KL(s||t)\nnats",
        less_is_better=True,
    ),
    Statistic("js_nats", {"js": 1}, high=math.log(2), heading="JS\nnats", less_is_better=True),
    Statistic(
        "cross_entropy_nats", {"teacher_entropy": 1, "kl_teacher_student": 1}, less_is_better=True
    ),
    Statistic("teacher_entropy_nats", {"teacher_entropy": 1}),
    Statistic("student_entropy_nats", {"student_entropy": 1}),
    Statistic("top1_agreement", {"top1": 1}, high=1, heading="\ntop-1"),
    Statistic("top5_agreement", {"top5": 1}, high=1, heading="\ntop-5"),
    Statistic("probability_difference_mean", {"probability_difference": 1}, low=-1, high=1),
    Statistic(
        *("probability_difference_rms", {"probability_difference_squared": 1}, math.sqrt),
        less_is_better=True,
    ),
    Statistic("kl_maximum_nats", {}, less_is_better=True),
)
"""Of a run with a teacher."""
