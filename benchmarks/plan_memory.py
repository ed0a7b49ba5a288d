"""Planned memory against measured peaks, and what context parallelism saves on a long window.

    python benchmarks/plan_memory.py

Random llamas (512 features, 8 heads, 4 kv heads, 32,000 rows, tied, fp32) run one step on CPU ranks
with one thread each. The program prints two Markdown tables:

1. meshes of 1, 2 and 4 ranks on a batch of 8 x 1,024 positions (8 layers);
2. cp = 1, 2, 4 on one window of 32,768 tokens (1 layer).

All numbers are MiB of anonymous memory on the largest rank (RssAnon, sampled every 2 ms), above
what the process had before its parameters. glibc is told to return freed memory at once. By default
it keeps some, and a process that runs one step then shows up to twice as much.
"""

import json
import os
from pathlib import Path

from load_memory import MIB, Peak, on_ranks, rss_anon

MESHES = [
    (1, 1, 1, 1),
    (1, 2, 1, 1),
    (1, 1, 2, 1),
    (1, 1, 1, 2),
    (1, 4, 1, 1),
    (1, 2, 2, 1),
    (1, 1, 2, 2),
    (1, 1, 1, 4),
]


def main() -> None:
    """Command line."""
    print("| dp_replicate | dp_shard | cp | tp | parameters | planned | peak | planned |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for mesh in MESHES:
        one = run(mesh, 8, 1024, layers=8)
        degrees = " | ".join(map(str, mesh))
        print(
            f"| {degrees} | {one['parameters']:.0f} | {one['planned_parameters']:.0f}"
            f" | {one['peak']:.0f} | {one['planned']:.0f} |",
            flush=True,
        )
    print()
    print("| cp | peak without parameters | of which K and V, planned | the rest, of cp=1 |")
    print("| --- | --- | --- | --- |")
    whole = None
    for cp in (1, 2, 4):
        one = run((1, 1, cp, 1), 1, 32_768, layers=1)
        used = one["peak"] - one["parameters"] - one["gathered"]
        rest = used - one["shared"]
        whole = whole or rest
        print(f"| {cp} | {used:.0f} | {one['shared']:.0f} | {rest / whole:.2f} |", flush=True)


def run(mesh: tuple[int, int, int, int], rows: int, length: int, layers: int) -> dict[str, float]:
    """The measurements of the rank with the largest peak, in MiB."""
    world_size = mesh[0] * mesh[1] * mesh[2] * mesh[3]
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # what is freed goes back at once
    found = on_ranks(world_size, rank_main, world_size, mesh, rows, length, layers)
    return max(found, key=lambda one: one["peak"])


def rank_main(
    rank: int,
    world_size: int,
    mesh: tuple[int, int, int, int],
    rows: int,
    length: int,
    layers: int,
    scratch: str,
) -> None:
    """One rank: fill its shards with random numbers, then measure one step."""
    import torch
    import torch.distributed as dist

    from ppl_eval import compat
    from ppl_eval.checkpoint.config_json import NOTHING
    from ppl_eval.commands.estimate import estimate
    from ppl_eval.model.build import build_on_meta
    from ppl_eval.model.torchtune_decoder import decoder_of
    from ppl_eval.parallel.dims import Groups, ParallelDims
    from ppl_eval.parallel.shard import shard_decoder
    from ppl_eval.parallel.tensor import split_decoder
    from ppl_eval.score.batch import Batch, Tokens
    from ppl_eval.score.reader import Reader, evaluating
    from ppl_eval.score.scoring import Scorer

    torch.set_num_threads(1)
    store = f"file://{scratch}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    dims = ParallelDims(*mesh, world_size=world_size)
    meshes = dims.build_mesh("cpu")
    node = {
        "_component_": "torchtune.models.llama3_2.llama3_2",
        "vocab_size": 32_000,
        "num_layers": layers,
        "num_heads": 8,
        "num_kv_heads": 4,
        "embed_dim": 512,
        "intermediate_dim": 1536,
        "max_seq_len": 32_768,
        "scale_factor": 1,
    }
    model = build_on_meta(node, torch.float32, NOTHING).eval()
    decoder = decoder_of(model)
    assert decoder is not None
    planned = estimate(decoder, dims, rows * length)
    split_decoder(decoder, meshes.tp)
    shard_decoder(decoder, meshes.fsdp)

    base = rss_anon()
    model.to_empty(device="cpu")
    with torch.device("cpu"):
        compat.rebuild_rope(model)
    with torch.no_grad():
        for parameter in model.parameters():
            getattr(parameter, "_local_tensor", parameter).normal_(std=0.05)
    dist.barrier()
    parameters = rss_anon() - base
    tokens = torch.randint(0, 32_000, (rows, length))
    every = torch.arange(rows * length)
    windows, lengths = torch.arange(rows), torch.full((rows,), length)
    scored = Tokens(every, tokens.flatten(), every, every, every, windows, lengths)
    readers = [Reader(model, decoder, Groups.of(meshes))]
    with Peak() as peak, evaluating(readers):
        Scorer(readers, torch.device("cpu")).score(Batch(tokens, scored))
    kv, heads = 4 * 64, 8 * 64
    shared = 2 * kv * rows * length / mesh[2] + 2 * max(heads, 2 * kv) * rows * length
    found = {
        "parameters": parameters / MIB,
        "planned_parameters": planned.parameters / MIB,
        "peak": (peak.value - base) / MIB,
        "planned": planned.total / MIB,
        "gathered": planned.gathered / MIB,
        "shared": 4 * shared / MIB if mesh[2] > 1 else 0.0,
    }
    Path(scratch, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
