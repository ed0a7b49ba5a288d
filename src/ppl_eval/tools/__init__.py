"""Programs that made the embedded checkpoints and their text; a run needs none of them."""
