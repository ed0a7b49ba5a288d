"""windows.parquet: what each window reads and what was found of it."""

from pathlib import Path

from ppl_eval.data.windows import Windows
from ppl_eval.metrics.ledger import Ledger


def write_windows(path: Path, windows: Windows, ledger: Ledger) -> None:
    """Write ``windows.parquet`` to ``path``: a row for each window that was run.

    Columns: document, start (first token of the document that is read), num_tokens (how many are
    read, a BOS not counted), scored_tokens (int64); and a sum over the scored tokens for each
    column of the ledger, such as nll_nats_sum (float64).
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    sums = ledger.sums.cpu().numpy()
    columns = {
        "document": windows.document,
        "start": windows.start,
        "num_tokens": windows.num_tokens,
        "scored_tokens": ledger.num_scored.cpu().numpy(),
        **{f"{name}_sum": column for name, column in zip(ledger.columns, sums, strict=True)},
    }
    pq.write_table(pa.table(columns), path)
