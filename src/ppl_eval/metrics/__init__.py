"""The perplexity metric and the ledger of results by window."""
