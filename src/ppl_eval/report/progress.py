"""Progress of a run: a bar on a terminal, lines in a log, and seconds by phase."""

import logging
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from tqdm import tqdm

from ppl_eval.evaluation.loop import Progress
from ppl_eval.plural import counted
from ppl_eval.report.metric_logger import MetricLogger

logger = logging.getLogger("ppl_eval")

_TOKENISING_AFTER_S = 10


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


class _Display:
    """A bar on a terminal, lines in the log elsewhere; silent above log level INFO.

    Args:
        every_s: seconds between two lines.
        after_s: seconds before the bar is drawn; the first line comes no later.
        always: draw the bar everywhere, as in a notebook, and at any log level.
    """

    def __init__(
        self, every_s: float, after_s: float | None = None, *, always: bool = False
    ) -> None:
        self._every_s = every_s
        self._begin = time.perf_counter()
        self._next_line = self._begin + min(every_s, after_s or every_s)
        self._on_terminal = always or (sys.stderr is not None and sys.stderr.isatty())
        self._bar = tqdm(
            total=1.0,
            bar_format="{percentage:3.0f} %|{bar}| {desc}",
            dynamic_ncols=True,
            miniters=0,
            delay=after_s or 0,
            mininterval=0.5,
            disable=not always and not (self._on_terminal and logger.isEnabledFor(logging.INFO)),
        )

    def show(self, share: float, line: str, short: str, *, at_once: bool = False) -> None:
        """Show how far it is.

        Args:
            share: of the work that is done, above 0.
            line: for the log.
            short: for the bar.
            at_once: draw the bar even if it was drawn a moment ago.
        """
        now = time.perf_counter()
        left = tqdm.format_interval((now - self._begin) * (1 - share) / share)
        self._bar.set_description_str(f"{short}{left} left", refresh=False)
        self._bar.update(share - self._bar.n)
        if at_once:
            self._bar.refresh()
        if not self._on_terminal and now >= self._next_line and share < 1:
            logger.info("%s, %s left", line, left)
            self._next_line = now + self._every_s

    def close(self) -> None:
        """Leave the finished bar on the screen."""
        self._bar.close()


class ProgressBar:
    """How far a run is, and a line to the metric logger every few steps. For rank 0.

    A bar on a terminal, elsewhere a line in the log every ``every_s`` seconds: tokens done, tokens
    per second of all ranks, the running perplexity of rank 0's own windows, the time that is left.
    Percent and time left count the noise floor, by positions.

    Args:
        num_scored: tokens to score in all.
        metric_logger: hears the running perplexity and the tokens per second.
        device: where the sums are; on a CPU the running perplexity is read after every step.
        every: steps between two lines for the metric logger, and on a GPU between two readings of
            the running perplexity, which wait for it.
        every_s: seconds between two lines.
        always: draw the bar even where stderr is no terminal.
    """

    def __init__(
        self,
        num_scored: int,
        metric_logger: MetricLogger,
        device: torch.device,
        *,
        every: int = 10,
        every_s: float = 30,
        always: bool = False,
    ) -> None:
        self._num_scored, self._metric_logger, self._every = num_scored, metric_logger, every
        self._is_cpu = device.type == "cpu"
        self._display = _Display(every_s, always=always)
        self._begin = time.perf_counter()
        self._perplexity = self._tokens_per_s = math.nan

    def update(self, progress: Progress) -> None:
        """Note where the run stands."""
        if progress.step <= progress.num_steps:
            self._read(progress)
        done, rate, ppl = progress.num_scored, self._tokens_per_s, f"ppl {self._perplexity:.4g}"
        percent = f"{progress.share:.1%}".replace("%", " %")
        line = f"{done:,} of {counted(self._num_scored, 'token')} ({percent})"
        short = f"{_short(done)}/{_short(self._num_scored)} tok, {_short(rate)} tok/s, {ppl}, "
        if done == self._num_scored and progress.share < 1:
            line, short = f"noise floor ({percent})", "noise floor, "
            self._display.show(progress.share, line, short, at_once=True)
        else:
            self._display.show(progress.share, f"{line}, {rate:,.0f} tokens/s, {ppl}", short)

    def _read(self, progress: Progress) -> None:
        is_due = progress.step % self._every == 0 or progress.step in (1, progress.num_steps)
        if is_due or self._is_cpu:
            self._perplexity = progress.perplexity()
            self._tokens_per_s = progress.num_scored / (time.perf_counter() - self._begin)
        if is_due:
            values = {
                "running_perplexity": self._perplexity,
                "tokens_per_s": self._tokens_per_s,
            }
            self._metric_logger.log_dict(values, step=progress.step)

    def close(self) -> None:
        """Leave the finished bar on the screen."""
        self._display.close()


class TokenisingProgress:
    """How far rank 0 is with its share of the documents, if that takes more than 10 s.

    Args:
        every_s: seconds between two lines in the log; the first comes after at most 10.
    """

    def __init__(self, every_s: float) -> None:
        self._display = _Display(every_s, _TOKENISING_AFTER_S)

    def __call__(self, num_done: int, num_documents: int) -> None:
        """Note that so many documents of the share are done."""
        share = num_done / num_documents
        self._display.show(share, f"tokenising ({share:.1%})".replace("%", " %"), "tokenising, ")
        if num_done == num_documents:
            self._display.close()


def _short(number: float) -> str:
    """At most 5 characters: 12.3k."""
    return tqdm.format_sizeof(number)
