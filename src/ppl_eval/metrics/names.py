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
