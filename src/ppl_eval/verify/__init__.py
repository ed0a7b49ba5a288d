"""A check of a run's numbers by code that shares nothing with the run."""
