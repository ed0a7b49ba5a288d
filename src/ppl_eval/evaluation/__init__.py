"""From a checked config, or a model at hand, to an evaluated ledger."""
