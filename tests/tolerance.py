"""How far a loss may be from the one of float64, relative to it, by device."""

RTOL = {"cpu": 1e-6, "cuda": 1e-5}
"""In fp32. A GPU adds in another order and takes its own exponentials."""
