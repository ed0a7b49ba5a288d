"""tokens.parquet: every token of every document, scored or not."""

from pathlib import Path
from typing import Any

import numpy as np

_DOCUMENTS_AT_A_TIME = 256


def write_tokens(
    folder: Path, workload: Any, document: np.ndarray, token: np.ndarray, nll: np.ndarray
) -> None:
    """Write ``tokens.parquet`` into ``folder``: whole, then renamed.

    A row for each token of each document, what the protocol adds to be scored included: document
    (int64), position among the document's tokens (int64), token_id (int32), nll_nats (float32 as
    computed; null where not scored), scored (bool).

    Args:
        folder: of the results.
        workload: of :mod:`ppl_eval.evaluation`.
        document: of each scored token (int64 [scored]), in order.
        token: its place in the document (int64 [scored]), in order within a document.
        nll: its NLL in nats (float [scored]).
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    corpus, protocol = workload.corpus, workload.protocol
    totals = protocol.num_tokens(corpus.num_tokens)
    ends = np.searchsorted(document, np.arange(len(totals)), side="right")
    value = pa.float64() if nll.dtype == np.float64 else pa.float32()
    schema = pa.schema(
        {
            "document": pa.int64(),
            "position": pa.int64(),
            "token_id": pa.int32(),
            "nll_nats": value,
            "scored": pa.bool_(),
        }
    )
    unfinished = folder / ".tokens.parquet"
    with pq.ParquetWriter(unfinished, schema) as writer:
        for begin in range(0, len(totals), _DOCUMENTS_AT_A_TIME):
            numbers = range(begin, min(begin + _DOCUMENTS_AT_A_TIME, len(totals)))
            texts = corpus.fetch(numbers)
            for number in numbers:
                total = int(totals[number])
                first = 0 if number == 0 else int(ends[number - 1])
                chosen = slice(first, int(ends[number]))
                scored = np.zeros(total, dtype=bool)
                scored[token[chosen]] = True
                values = np.zeros(total, dtype=nll.dtype)
                values[token[chosen]] = nll[chosen]
                columns = [
                    pa.array(np.full(total, number), pa.int64()),
                    pa.array(np.arange(total), pa.int64()),
                    pa.array(protocol.read(texts[number], 0, total), pa.int32()),
                    pa.array(values, value, mask=~scored),
                    pa.array(scored, pa.bool_()),
                ]
                writer.write_batch(pa.record_batch(columns, schema=schema))
    unfinished.replace(folder / "tokens.parquet")
