"""Batch: the inputs of one forward pass; Tokens: the tokens that it scores."""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from ppl_eval.parallel.context import ContextSplit


@dataclass(frozen=True)
class Tokens:
    """The N scored tokens of a batch on this rank, window after window; all tensors are int64.

    Scores of tokens are tensors [N] in the same order.

    Attributes:
        index_N: index into the flattened inputs [B x T] of the input that predicts the token.
        target_N: the token's id.
        document_N: number of its document.
        position_N: its position in the document.
        context_N: number of tokens before it in its window, at least 1.
        window_W: rows of the batch's windows in the ledger.
        num_tokens_W: number of scored tokens of each window on this rank; with cp it may be 0.
    """

    index_N: torch.Tensor
    target_N: torch.Tensor
    document_N: torch.Tensor
    position_N: torch.Tensor
    context_N: torch.Tensor
    window_W: torch.Tensor
    num_tokens_W: torch.Tensor

    def __len__(self) -> int:
        return len(self.index_N)

    def changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Tokens":
        """The same tokens, ``change`` applied to each tensor."""
        return Tokens(*(change(getattr(self, item.name)) for item in fields(self)))

    def part(self, context: ContextSplit, length: int) -> "Tokens":
        """The tokens that this rank predicts in whole windows of ``length`` positions that are
        split by ``context``."""
        positions = context.positions(length)
        local_T = torch.full((max(length, int(positions.max()) + 1),), -1)
        local_T[positions] = torch.arange(len(positions))
        row_N, column_N = self.index_N // length, local_T[self.index_N % length]
        kept_N = column_N >= 0
        segment_N = torch.arange(len(self.window_W)).repeat_interleave(self.num_tokens_W)
        counts_W = segment_N[kept_N].bincount(minlength=len(self.window_W))
        return Tokens(
            index_N=(row_N * len(positions) + column_N)[kept_N],
            target_N=self.target_N[kept_N],
            document_N=self.document_N[kept_N],
            position_N=self.position_N[kept_N],
            context_N=self.context_N[kept_N],
            window_W=self.window_W,
            num_tokens_W=counts_W,
        )


@dataclass(frozen=True)
class Batch:
    """Windows, one a row, padded on the right.

    Attributes:
        inputs_BT: token ids that the model reads (int64). Padding is id 0; attention is causal, so
            no scored position attends to it.
        tokens: the scored tokens; none in the filler batch of a rank without work.
        positions_T: positions of the inputs in their windows (int64 [T]); None for 0, 1, 2, ...
    """

    inputs_BT: torch.Tensor
    tokens: Tokens
    positions_T: torch.Tensor | None = None

    def part(self, context: ContextSplit | None) -> "Batch":
        """This rank's part of whole windows that are split by ``context``."""
        if context is None:
            return self
        length = self.inputs_BT.shape[1]
        # padding may be at any position, but not beyond those that the model knows
        positions_T = context.positions(length).clamp_(max=length - 1)
        return Batch(context.take(self.inputs_BT), self.tokens.part(context, length), positions_T)

    def to(self, device: torch.device) -> "Batch":
        """The batch on ``device``; copying to a GPU does not wait for it."""
        if self.inputs_BT.device.type == device.type:
            return self

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.pin_memory().to(device, non_blocking=True)

        positions_T = None if self.positions_T is None else move(self.positions_T)
        return Batch(move(self.inputs_BT), self.tokens.changed(move), positions_T)
