"""Names of the metrics of results.json, and how many documents their intervals need."""

METRICS = (
    "nll_nats_per_token",
    "token_perplexity",
    "document_mean_perplexity",
    "word_perplexity",
    "byte_perplexity",
    "bits_per_byte",
    "bits_per_character",
    "hf_perplexity",
)

MACRO = (
    "token_perplexity",
    "word_perplexity",
    "byte_perplexity",
    "bits_per_byte",
    "bits_per_character",
)
"""Names of ``macro``, in which every domain weighs the same."""

LIMITED_FIDELITY = (
    "kl_teacher_student_nats",
    "kl_student_teacher_nats",
    "js_nats",
    "cross_entropy_nats",
    "ln_perplexity_ratio",
    "perplexity_ratio",
    "probability_difference_rms",
    "kl_maximum_nats",
)
"""Names of ``fidelity`` for which less is better, so that ``fail_if`` can bound them."""

FEWEST_DOCUMENTS = 3
"""For an interval. Of two documents Student's t has one degree of freedom: the interval holds the
truth as often as it says, and spans a factor of thousands."""

FEWEST_RESAMPLED = 20
"""For a bootstrap. Of fewer its percentiles hold the truth less than 90 % of the time: of two 50 %,
of five 82 %."""
