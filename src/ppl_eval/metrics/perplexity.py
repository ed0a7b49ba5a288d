"""Perplexity as a metric object: update, merge, sync over ranks, compute."""

from collections.abc import Iterable

import torch
import torch.distributed as dist

from ppl_eval.metrics.definitions import mean, perplexity
from ppl_eval.parallel.reduce import reduce_
from ppl_eval.score.nll import token_nll


class Perplexity:
    """exp(sum of NLL / number of tokens), the sums kept in float64 and int64.

    Sums and counts are held on ``device`` and are read only by :meth:`compute`, so updates on a GPU
    do not wait for it. The order of updates and how the tokens are split over updates, objects or
    ranks changes the result by float64 rounding at most.

    Args:
        device: where the two sums live.

    Example:
        >>> metric = Perplexity()
        >>> _ = metric.update(nll_sum=20.0, num_tokens=10).update(nll_sum=4000.0, num_tokens=1000)
        >>> round(metric.compute(), 2)
        53.53
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.nll_nats_sum = torch.zeros((), dtype=torch.float64, device=device)
        self.num_tokens = torch.zeros((), dtype=torch.int64, device=device)

    def update(self, nll_sum: float | torch.Tensor, num_tokens: int | torch.Tensor) -> "Perplexity":
        """Add a sum of NLL in nats over ``num_tokens`` tokens.

        Args:
            nll_sum: a number, or a tensor of any shape whose elements are added up in float64.
            num_tokens: a number, or an integer tensor whose elements are added up.
        """
        device = self.nll_nats_sum.device
        nll = torch.as_tensor(nll_sum, dtype=torch.float64, device=device).detach()
        self.nll_nats_sum += nll.sum()
        self.num_tokens += torch.as_tensor(num_tokens, dtype=torch.int64, device=device).sum()
        return self

    def update_from_logits(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        *,
        ignore_index: int = -100,
        mask: torch.Tensor | None = None,
    ) -> "Perplexity":
        """Add the NLL of ``labels`` under ``logits``.

        Args:
            logits: [..., V], any floating dtype; ``logits[i]`` predicts ``labels[i]``: shift them
                by one yourself (``logits[:, :-1], tokens[:, 1:]``).
            labels: [...] token ids.
            ignore_index: a label that does not count; not a token's id.
            mask: [...] bool, True where a label counts; None: all do.

        Raises:
            ValueError: shapes that do not match, or a label that is no column of the logits.
        """
        if logits.shape[:-1] != labels.shape or (mask is not None and mask.shape != labels.shape):
            raise ValueError(
                f"logits {tuple(logits.shape)}, labels {tuple(labels.shape)}"
                + (f", mask {tuple(mask.shape)}" if mask is not None else "")
                + ": labels and mask have the shape of the logits without their last dimension"
            )
        counted = labels != ignore_index
        if mask is not None:
            counted &= mask
        targets_N = labels[counted]
        if targets_N.numel() == 0:
            return self
        if int(targets_N.min()) < 0 or int(targets_N.max()) >= logits.shape[-1]:
            raise ValueError(
                f"labels from {int(targets_N.min())} to {int(targets_N.max())},"
                f" but the logits have {logits.shape[-1]} columns"
            )
        nll_N = token_nll(logits[counted], targets_N)
        return self.update(nll_N, targets_N.numel())

    def merge_state(self, metrics: Iterable["Perplexity"]) -> "Perplexity":
        """Add the sums of other metrics to this one."""
        for metric in metrics:
            self.update(metric.nll_nats_sum, metric.num_tokens)
        return self

    def sync(self, group: dist.ProcessGroup | None = None) -> "Perplexity":
        """A new metric with the sums of all ranks; this one keeps its own, so none counts twice.

        Args:
            group: ranks that hold different tokens; None: all processes, or only this one when no
                process group exists. Leave out ranks that repeat the same tokens (tensor parallel).
        """
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        total = Perplexity(self.nll_nats_sum.device)
        total.update(self.nll_nats_sum, self.num_tokens)
        reduce_(total.nll_nats_sum, group)
        reduce_(total.num_tokens, group)
        return total

    def mean_nll(self) -> float:
        """Mean NLL of a token in nats; nan before any token."""
        return mean(float(self.nll_nats_sum), int(self.num_tokens))

    def compute(self) -> float:
        """The perplexity: inf above float64's range (a mean NLL of 709), nan before any token."""
        return perplexity(float(self.nll_nats_sum), int(self.num_tokens))

    def reset(self) -> "Perplexity":
        """Set both sums to zero."""
        self.nll_nats_sum.zero_()
        self.num_tokens.zero_()
        return self

    def to(self, device: torch.device | str) -> "Perplexity":
        """Move the sums to ``device``."""
        self.nll_nats_sum = self.nll_nats_sum.to(device)
        self.num_tokens = self.num_tokens.to(device)
        return self

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies of the two sums."""
        return {
            "nll_nats_sum": self.nll_nats_sum.clone(),
            "num_tokens": self.num_tokens.clone(),
        }

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Load the sums that :meth:`state_dict` returned."""
        self.nll_nats_sum.copy_(state["nll_nats_sum"])
        self.num_tokens.copy_(state["num_tokens"])
