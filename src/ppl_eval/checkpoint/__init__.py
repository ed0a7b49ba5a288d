"""Checkpoint folders: which files, which tensors, under which names, and their config.json."""
