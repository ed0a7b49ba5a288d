"""Memory of comparing a student with its teacher, by number of tokens and by size of a chunk.

    python benchmarks/teacher_memory.py

Both models have random hidden states of 64 features. The program measures their heads (32,768 rows,
fp32) and everything after them, on one CPU thread. "peak" is MiB of anonymous memory (RssAnon,
sampled every 2 ms) above what the process had before. "full logits" is what a comparison without
chunks would hold for both models.
"""

import json
import os
from pathlib import Path

from load_memory import MIB, Peak, on_ranks, rss_anon

VOCABULARY, FEATURES = 32_768, 64
TOKENS = (2048, 8192, 32_768)
CHUNKS = (2**23, 2**24, 2**25, 2**26)


def main() -> None:
    """Command line."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # what is freed goes back at once
    print("| tokens | logits in a chunk | peak | of the chunk's logits | full logits |")
    print("| --- | --- | --- | --- | --- |")
    cases = [(count, 2**25) for count in TOKENS]
    cases += [(8192, chunk) for chunk in CHUNKS if chunk != 2**25]
    for count, chunk in cases:
        peak = on_ranks(1, rank_main, count, chunk)[0]["peak"]
        full = 2 * 4 * count * VOCABULARY / MIB
        ratio = peak / (4 * chunk / MIB)
        print(f"| {count:,} | {chunk:,} | {peak:.0f} | {ratio:.2f} | {full:,.0f} |", flush=True)


def rank_main(rank: int, count: int, chunk: int, scratch: str) -> None:
    """One comparison, in its own process."""
    import torch

    from ppl_eval.score import scoring
    from ppl_eval.score.head import Head

    torch.set_num_threads(1)
    scoring.CHUNK_ELEMENTS = chunk
    heads = [Head.by_weight(torch.randn(VOCABULARY, FEATURES) / 8, fp32=True) for _ in range(2)]
    rows = [torch.randn(count, FEATURES) for _ in range(2)]
    targets = torch.randint(0, VOCABULARY, (count,))
    scoring.compare_rows(rows[0][:64], heads[0], rows[1][:64], heads[1], targets[:64])  # libraries
    base = rss_anon()
    with Peak() as peak:
        scoring.compare_rows(rows[0], heads[0], rows[1], heads[1], targets)
    found = {"peak": (peak.value - base) / MIB}
    Path(scratch, f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
