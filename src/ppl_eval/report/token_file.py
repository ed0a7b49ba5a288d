"""tokens.parquet: every token of every document, scored or not."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ppl_eval.evaluation.workload import Workload

_DOCUMENTS_AT_A_TIME = 256


def write_tokens(path: Path, workload: Workload, records: Mapping[str, np.ndarray]) -> None:
    """Write ``tokens.parquet`` to ``path``.

    A row for each token of each document, what the protocol adds to be scored included: document
    (int64), position among the document's tokens (int64), token_id (int32), what was recorded
    (float32 or float64, as computed; null where not scored: nll_nats, and with a teacher
    teacher_nll_nats and kl_teacher_student_nats), and scored (bool).

    Args:
        path: where the file goes.
        workload: what was scored.
        records: ``document`` and ``position`` of each scored token (int32 [scored]), in order, and
            what is known of it, by name.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    corpus, protocol = workload.corpus, workload.protocol
    totals = protocol.num_tokens(corpus.num_tokens)
    document, token = records["document"], records["position"]
    recorded = {k: v for k, v in records.items() if k not in ("document", "position")}
    ends = np.searchsorted(document, np.arange(len(totals)), side="right")
    schema = pa.schema(
        {
            "document": pa.int64(),
            "position": pa.int64(),
            "token_id": pa.int32(),
            **{name: pa.from_numpy_dtype(values.dtype) for name, values in recorded.items()},
            "scored": pa.bool_(),
        }
    )
    with pq.ParquetWriter(path, schema) as writer:
        for begin in range(0, len(totals), _DOCUMENTS_AT_A_TIME):
            numbers = range(begin, min(begin + _DOCUMENTS_AT_A_TIME, len(totals)))
            texts = corpus.fetch(numbers)
            for number in numbers:
                total = int(totals[number])
                first = 0 if number == 0 else int(ends[number - 1])
                chosen = slice(first, int(ends[number]))
                scored = np.zeros(total, dtype=bool)
                scored[token[chosen]] = True
                columns = [
                    pa.array(np.full(total, number), pa.int64()),
                    pa.array(np.arange(total), pa.int64()),
                    pa.array(protocol.read(texts[number], 0, total), pa.int32()),
                ]
                for values in recorded.values():
                    spread = np.zeros(total, dtype=values.dtype)
                    spread[token[chosen]] = values[chosen]
                    columns.append(pa.array(spread, mask=~scored))
                columns.append(pa.array(scored, pa.bool_()))
                writer.write_batch(pa.record_batch(columns, schema=schema))
