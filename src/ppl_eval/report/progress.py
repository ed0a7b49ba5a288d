"""What one sees and logs while a run goes on."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from ppl_eval.metrics.perplexity import Perplexity


class Timer:
    """Seconds by phase.

    Attributes:
        seconds: name of the phase -> seconds, in the order in which the phases ended.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block."""
        begin = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - begin


class ProgressBar:
    """A tqdm bar of scored tokens, and a line to the metric logger every few steps.

    For rank 0. The bar shows tokens per second of all ranks, the time that is left, and the running
    perplexity of rank 0's own windows; it is silent when stderr is not a terminal.

    Args:
        num_scored: tokens to score in all.
        metric_logger: torchtune's interface (``log_dict``).
        every: steps between two readings of the running perplexity, which wait for the device.
    """

    def __init__(self, num_scored: int, metric_logger: Any, every: int) -> None:
        self._bar = tqdm(
            total=num_scored,
            unit="tok",
            unit_scale=True,
            dynamic_ncols=True,
            disable=not sys.stderr.isatty(),
        )
        self._metric_logger = metric_logger
        self._every = every
        self._begin = time.perf_counter()

    def update(self, step: int, num_steps: int, num_scored: int, running: Perplexity) -> None:
        """Note that ``num_scored`` tokens are done after ``step`` of ``num_steps``."""
        if step % self._every == 0 or step in (1, num_steps):
            perplexity = running.compute()
            self._bar.set_postfix_str(f"ppl {perplexity:.4g}", refresh=False)
            values = {
                "running_perplexity": perplexity,
                "tokens_per_s": num_scored / (time.perf_counter() - self._begin),
            }
            self._metric_logger.log_dict(values, step=step)
        self._bar.update(num_scored - self._bar.n)

    def close(self) -> None:
        """Leave the finished bar on the screen."""
        self._bar.close()
