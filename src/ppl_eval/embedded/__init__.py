"""The embedded teacher, student and held-out text, and the programs that made them."""
