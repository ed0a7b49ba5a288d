"""Names of the metrics of results.json."""

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
