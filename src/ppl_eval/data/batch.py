"""Batch: the tensors of one forward pass."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from ppl_eval.data.encode import EncodedCorpus
from ppl_eval.data.plan import Plan
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
        document_BT: document of each target (int64).
        token_BT: place of each target among the document's tokens (int64).
        positions: places of the inputs in their windows (int64 [T]), or None for 0, 1, 2, ...
    """

    rows: torch.Tensor
    inputs_BT: torch.Tensor
    targets_BT: torch.Tensor
    scored_BT: torch.Tensor
    document_BT: torch.Tensor
    token_BT: torch.Tensor
    positions: torch.Tensor | None = None

    def part(self, context: ContextSplit | None) -> "Batch":
        """What this rank has of windows that several ranks share."""
        if context is None:
            return self
        length = self.inputs_BT.shape[1]
        positions = context.positions(length).clamp_(max=length - 1)  # padding lies nowhere
        return self._with(context.take, positions)

    def to(self, device: torch.device) -> "Batch":
        """The same on ``device``."""
        if device.type == "cpu":
            return self

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.pin_memory().to(device, non_blocking=True)

        positions = None if self.positions is None else move(self.positions)
        return replace(self._with(move, positions), rows=move(self.rows))

    def _with(
        self, change: Callable[[torch.Tensor], torch.Tensor], positions: torch.Tensor | None
    ) -> "Batch":
        """The same windows, their [B, T] tensors changed."""
        names = ("inputs_BT", "targets_BT", "scored_BT", "document_BT", "token_BT")
        changed = {name: change(getattr(self, name)) for name in names}
        return replace(self, positions=positions, **changed)


def collate(
    number: int | None,
    plan: Plan,
    windows: Windows,
    corpus: EncodedCorpus,
    protocol: Protocol,
) -> Batch:
    """Tensors of one batch of a plan, or of the smallest batch that counts nothing.

    Args:
        number: of the batch; None gives one row of one position with nothing scored.
        plan: of the whole corpus.
        windows: of the whole corpus.
        corpus: gives the ids.
        protocol: gives the tokens of a document and what comes before a window.
    """
    if number is None:
        nothing = torch.zeros((1, 1), dtype=torch.int64)
        rows = torch.empty(0, dtype=torch.int64)
        scored_nothing = torch.zeros((1, 1), dtype=torch.bool)
        return Batch(rows, nothing, nothing, scored_nothing, nothing, nothing)
    numbers = plan.batches[number]
    inputs = np.zeros((len(numbers), int(windows.num_inputs[numbers].max())), dtype=np.int64)
    targets, documents, places = (np.zeros_like(inputs) for _ in range(3))
    scored = np.zeros(inputs.shape, dtype=bool)
    texts = corpus.fetch(windows.document[numbers].tolist())
    for row, window in enumerate(numbers):
        start = int(windows.start[window])
        stop = start + int(windows.num_tokens[window])
        lead = [protocol.bos_id] if windows.has_lead[window] else []
        read = protocol.read(texts[int(windows.document[window])], start, stop)
        tokens = np.concatenate([np.asarray(lead, dtype=np.int64), read])
        length = len(tokens) - 1
        inputs[row, :length] = tokens[:-1]
        targets[row, :length] = tokens[1:]
        documents[row, :length] = windows.document[window]
        places[row, :length] = np.arange(length) + start + 1 - len(lead)
        first_target = len(lead) + int(windows.num_skipped[window]) - 1
        counts = corpus.counts(int(windows.document[window]))
        if counts is None:
            scored[row, first_target:length] = True
        else:  # a row that came as tokens: its places are the document's
            scored[row, first_target:length] = counts[start + first_target + 1 : stop]
    return Batch(
        rows=torch.from_numpy(np.ascontiguousarray(numbers)),
        inputs_BT=torch.from_numpy(inputs),
        targets_BT=torch.from_numpy(targets),
        scored_BT=torch.from_numpy(scored),
        document_BT=torch.from_numpy(documents),
        token_BT=torch.from_numpy(places),
    )
