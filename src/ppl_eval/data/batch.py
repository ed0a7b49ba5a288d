"""Batch: the tensors of one forward pass."""

from dataclasses import dataclass

import numpy as np
import torch

from ppl_eval.data.encode import EncodedCorpus
from ppl_eval.data.protocol import Protocol
from ppl_eval.data.windows import Windows
from ppl_eval.parallel.context import ContextSplit


@dataclass(frozen=True)
class Batch:
    """Inputs and targets of some windows, padded on the right.

    Attributes:
        rows: window numbers (int64 [B]); empty for a batch that counts nothing.
        inputs_BT: token ids that the model reads (int64). Padding is id 0 and is never attended to
            by a scored position, since attention is causal.
        targets_BT: the token after each input (int64); 0 where there is none.
        scored_BT: which targets count (bool).
        positions_T: places of the inputs in their windows (int64), or None for 0, 1, 2, ...
    """

    rows: torch.Tensor
    inputs_BT: torch.Tensor
    targets_BT: torch.Tensor
    scored_BT: torch.Tensor
    positions_T: torch.Tensor | None = None

    def part(self, context: ContextSplit | None) -> "Batch":
        """What this rank has of windows that several ranks share."""
        if context is None:
            return self
        length = self.inputs_BT.shape[1]
        whole = (self.inputs_BT, self.targets_BT, self.scored_BT)
        positions_T = context.positions(length).clamp_(max=length - 1)  # padding lies nowhere
        inputs_BT, targets_BT, scored_BT = map(context.take, whole)
        return Batch(self.rows, inputs_BT, targets_BT, scored_BT, positions_T)

    def to(self, device: torch.device) -> "Batch":
        """The same on ``device``."""
        if device.type == "cpu":
            return self

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.pin_memory().to(device, non_blocking=True)

        whole = (self.rows, self.inputs_BT, self.targets_BT, self.scored_BT)
        positions_T = None if self.positions_T is None else move(self.positions_T)
        rows, inputs_BT, targets_BT, scored_BT = map(move, whole)
        return Batch(rows, inputs_BT, targets_BT, scored_BT, positions_T)


def collate(
    numbers: np.ndarray | None, windows: Windows, corpus: EncodedCorpus, protocol: Protocol
) -> Batch:
    """Tensors of the windows ``numbers``, or of the smallest batch that counts nothing.

    Args:
        numbers: window numbers (int64 [B]); None gives one row of one position with nothing scored.
        windows: of the whole corpus.
        corpus: gives the ids.
        protocol: gives the tokens of a document and what comes before a window.
    """
    if numbers is None:
        nothing = torch.zeros((1, 1), dtype=torch.int64)
        rows = torch.empty(0, dtype=torch.int64)
        return Batch(rows, nothing, nothing, torch.zeros((1, 1), dtype=torch.bool))
    width = int(windows.num_inputs[numbers].max())
    inputs = np.zeros((len(numbers), width), dtype=np.int64)
    targets = np.zeros_like(inputs)
    scored = np.zeros(inputs.shape, dtype=bool)
    texts = corpus.fetch(windows.document[numbers].tolist())
    for row, number in enumerate(numbers):
        start = int(windows.start[number])
        stop = start + int(windows.num_tokens[number])
        lead = [protocol.bos_id] if windows.has_lead[number] else []
        read = protocol.read(texts[int(windows.document[number])], start, stop)
        tokens = np.concatenate([np.asarray(lead, dtype=np.int64), read])
        length = len(tokens) - 1
        inputs[row, :length] = tokens[:-1]
        targets[row, :length] = tokens[1:]
        first_target = len(lead) + int(windows.num_skipped[number]) - 1
        scored[row, first_target:length] = True
    return Batch(
        rows=torch.from_numpy(np.ascontiguousarray(numbers)),
        inputs_BT=torch.from_numpy(inputs),
        targets_BT=torch.from_numpy(targets),
        scored_BT=torch.from_numpy(scored),
    )
