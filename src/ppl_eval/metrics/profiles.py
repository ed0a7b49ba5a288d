"""Profiles: means over tokens in bins, such as the loss by the number of tokens before."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ppl_eval.parallel.reduce import reduce_
from ppl_eval.score.batch import Tokens

Values = Mapping[str, torch.Tensor]
"""Name -> values of N tokens ([N])."""

NUM_CONTEXT_BINS = 24
"""Bins of context length: 1 token, 2 to 3, 4 to 7, ..."""


class Profile:
    """Number of tokens and sums of their values, in bins.

    Sums are float64, added up batch by batch and then over ranks: their last bits depend on the
    number of ranks. Counts are exact.

    Args:
        num_bins: how many bins there are.
        columns: names of the values that are added up.
        bin_of: gives the bin of each token (int64 [N]), from tokens and values.
        device: where the sums live; updates on a GPU do not wait for it.

    Attributes:
        columns: names of the values.
        sums: tokens, then the sums of each column (float64 [bins, 1 + columns]). float64 holds
            counts exactly up to 2^53.
    """

    def __init__(
        self,
        num_bins: int,
        columns: Sequence[str],
        bin_of: Callable[[Tokens, Values], torch.Tensor],
        device: torch.device | str = "cpu",
    ) -> None:
        self.columns = tuple(columns)
        self._bin_of = bin_of
        shape = (num_bins, 1 + len(self.columns))
        self.sums = torch.zeros(shape, dtype=torch.float64, device=device)

    def update(self, tokens: Tokens, values: Values) -> None:
        """Add the tokens of a batch.

        Args:
            tokens: scored on this rank.
            values: what was found of them.
        """
        bin_N = self._bin_of(tokens, values)
        values_NC = torch.stack([values[name].double() for name in self.columns], dim=1)
        values_NC = torch.cat([torch.ones_like(values_NC[:, :1]), values_NC], dim=1)
        bins = torch.arange(len(self.sums), device=bin_N.device).unsqueeze(1)
        self.sums += (bin_N.unsqueeze(0) == bins).double() @ values_NC  # no atomics, as index_add_

    def assemble(self, group: dist.ProcessGroup | None) -> None:
        """Complete the sums on every rank of ``group``."""
        reduce_(self.sums, group)

    def means(self) -> list[tuple[int, int, dict[str, float]]]:
        """(number of the bin, its tokens, mean of each column) of every bin that has tokens."""
        return [
            (number, int(count), {n: s / count for n, s in zip(self.columns, sums, strict=True)})
            for number, (count, *sums) in enumerate(self.sums.tolist())
            if count
        ]


def context_profile(columns: Sequence[str], device: torch.device | str = "cpu") -> Profile:
    """A profile by the number of tokens before each token in its window."""
    return Profile(
        NUM_CONTEXT_BINS, columns, lambda tokens, values: context_bins(tokens.context_N), device
    )


def context_bins(context_N: torch.Tensor) -> torch.Tensor:
    """Bin of each token by the tokens before it in its window: 0 for 1, 1 for 2 to 3, ..."""
    bounds = 2 ** torch.arange(1, NUM_CONTEXT_BINS, device=context_N.device)
    return torch.bucketize(context_N, bounds, right=True)


def context_bounds(number: int) -> list[int]:
    """Fewest and most tokens before a token of this bin."""
    return [2**number, 2 ** (number + 1) - 1]


def loss_by_position(profile: Profile, column: str = "nll_nats") -> list[dict[str, Any]]:
    """The ``loss_by_position`` of results.json: tokens and mean NLL of each bin of context.

    Args:
        profile: a :func:`context_profile`, assembled.
        column: whose NLL.
    """
    return [
        {
            "context_tokens": context_bounds(number),
            "scored_tokens": count,
            "nll_nats_per_token": means[column],
        }
        for number, count, means in profile.means()
    ]
