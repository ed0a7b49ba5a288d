"""Windows of a plan -> the batch of one forward pass."""

import numpy as np
import torch

from ppl_eval.data.encode import EncodedCorpus
from ppl_eval.data.plan import Plan
from ppl_eval.data.protocol import Protocol
from ppl_eval.data.windows import Windows
from ppl_eval.score.batch import Batch, Tokens


def collate(
    number: int | None,
    plan: Plan,
    windows: Windows,
    corpus: EncodedCorpus,
    protocol: Protocol,
) -> Batch:
    """Tensors of batch ``number`` of a plan; None gives one position of which nothing is scored."""
    if number is None:
        nothing = torch.empty(0, dtype=torch.int64)
        return Batch(torch.zeros((1, 1), dtype=torch.int64), Tokens(*[nothing] * 7))
    numbers = plan.batches[number]
    inputs = np.zeros((len(numbers), int(windows.num_inputs[numbers].max())), dtype=np.int64)
    texts = corpus.fetch(windows.document[numbers].tolist())
    parts = []
    for row, window in enumerate(numbers):
        document, start = int(windows.document[window]), int(windows.start[window])
        lead = [protocol.bos_id] if windows.has_lead[window] else []
        read = protocol.read(texts[document], start, start + int(windows.num_tokens[window]))
        ids = np.concatenate([np.asarray(lead, dtype=np.int64), read])
        inputs[row, : len(ids) - 1] = ids[:-1]
        context = np.arange(len(lead) + int(windows.num_skipped[window]), len(ids))
        position = context + start - len(lead)
        counts = corpus.counts(document)
        if counts is not None:  # a row that came as tokens says which of them count
            context, position = context[counts[position]], position[counts[position]]
        index = row * inputs.shape[1] + context - 1
        parts.append([index, ids[context], np.full(len(index), document), position, context])
    of_tokens = (np.concatenate(column) for column in zip(*parts, strict=True))
    counted = np.asarray([len(index) for index, *_ in parts], dtype=np.int64)
    columns = (*of_tokens, np.ascontiguousarray(numbers), counted)
    return Batch(torch.from_numpy(inputs), Tokens(*map(torch.from_numpy, columns)))
