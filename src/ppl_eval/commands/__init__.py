"""The commands of `ppl-eval` that need more than a few lines."""
