"""Batch: the tensors of one forward pass; Tokens: what it scores, the unit of all results."""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from ppl_eval.parallel.context import ContextSplit


@dataclass(frozen=True)
class Tokens:
    """The N scored tokens of a batch that this rank has, window after window.

    All tensors are int64. What is found of the tokens are values [N] in the same order.

    Attributes:
        index_N: place, among the B x T flattened inputs, of the input that predicts the token.
        target_N: the token's id.
        document_N: number of its document.
        position_N: place among the document's tokens.
        context_N: tokens before it in its window, at least 1.
        window_W: numbers of the batch's windows in the ledger.
        num_tokens_W: how many of the tokens each window has here. With cp it may be none.
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
        """The same tokens, each tensor changed."""
        return Tokens(*(change(getattr(self, item.name)) for item in fields(self)))

    def part(self, context: ContextSplit, length: int) -> "Tokens":
        """The tokens that this rank predicts in windows that several ranks share.

        Args:
            context: how the windows are split.
            length: positions T of the whole windows.
        """
        own = context.positions(length)
        local_T = torch.full((max(length, int(own.max()) + 1),), -1).index_copy_(
            0, own, torch.arange(len(own))
        )
        row_N, column_N = self.index_N // length, local_T[self.index_N % length]
        kept_N = column_N >= 0
        segment_N = torch.arange(len(self.window_W)).repeat_interleave(self.num_tokens_W)
        counts_W = segment_N[kept_N].bincount(minlength=len(self.window_W))
        return Tokens(
            index_N=(row_N * len(own) + column_N)[kept_N],
            target_N=self.target_N[kept_N],
            document_N=self.document_N[kept_N],
            position_N=self.position_N[kept_N],
            context_N=self.context_N[kept_N],
            window_W=self.window_W,
            num_tokens_W=counts_W,
        )


@dataclass(frozen=True)
class Batch:
    """Inputs of some windows, padded on the right, a window in each row.

    Attributes:
        inputs_BT: token ids that the model reads (int64). Padding is id 0 and is never attended to
            by a scored position, since attention is causal.
        tokens: the scored tokens; none in a batch that counts nothing.
        positions_T: places of the inputs in their windows (int64 [T]), or None for 0, 1, 2, ...
    """

    inputs_BT: torch.Tensor
    tokens: Tokens
    positions_T: torch.Tensor | None = None

    def part(self, context: ContextSplit | None) -> "Batch":
        """What this rank has of windows that several ranks share."""
        if context is None:
            return self
        length = self.inputs_BT.shape[1]
        positions_T = context.positions(length).clamp_(max=length - 1)  # padding lies nowhere
        return Batch(context.take(self.inputs_BT), self.tokens.part(context, length), positions_T)

    def to(self, device: torch.device) -> "Batch":
        """The same on ``device``; the copies to a GPU do not wait for it."""
        if self.inputs_BT.device.type == device.type:
            return self

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.pin_memory().to(device, non_blocking=True)

        positions_T = None if self.positions_T is None else move(self.positions_T)
        return Batch(move(self.inputs_BT), self.tokens.changed(move), positions_T)
