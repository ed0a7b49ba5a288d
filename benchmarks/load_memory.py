"""Memory and disk reads of loading a checkpoint, by ppl_eval and by torchtune's own loader.

    python benchmarks/load_memory.py CHECKPOINT_DIR [--ranks 1 2 4] [--scheme int4_weight_only]

For each number of ranks and each loader, fresh processes load the folder from a cold page cache
(through auto_ppl_eval's sections, in fp32). The program prints a Markdown table. "peak above base"
is the anonymous memory of the largest rank (RssAnon, sampled every 2 ms), less what it had before
loading. "disk" is the bytes that all ranks read, divided by the size of the files.

With --scheme the weights are quantised: by ppl_eval as they are read; with torchtune's loader by
``torchao.quantization.quantize_`` on each rank after loading, unsharded, since FSDP2 shards none of
the results. --pair loads student (quantised) and teacher from the same folder.
"""

import argparse
import json
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MIB = 2**20


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint_dir")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--scheme", help="as quantizer.scheme in a config")
    parser.add_argument("--group-size", type=int, default=64, help="for schemes that have groups")
    parser.add_argument("--pair", action="store_true", help="load a teacher, too")
    args = parser.parse_args()
    how = args.scheme, args.group_size, args.pair
    files = sorted(Path(args.checkpoint_dir).glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    print(f"{args.checkpoint_dir}: {size / MIB:.0f} MiB in {len(files)} files\n")
    print("| loader | ranks | own shards | largest tensor | peak above base | allowed | disk |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for ranks in args.ranks:
        for loader in ("ppl_eval", "torchtune")[: 1 if args.pair else 2]:
            for file in files:
                drop_from_cache(file)
            rows = run(args.checkpoint_dir, loader, ranks, how)
            worst = max(rows, key=lambda row: row["peak"] - row["base"])
            shards, largest = worst["shards"], worst["largest"]
            disk = sum(row["disk"] for row in rows) / size
            print(
                f"| {loader} | {ranks} | {shards / MIB:.0f} MiB | {largest / MIB:.0f} MiB"
                f" | {(worst['peak'] - worst['base']) / MIB:.0f} MiB"
                f" | {(shards + 2 * largest) / MIB:.0f} MiB | {disk:.2f} |",
                flush=True,
            )


def drop_from_cache(file: Path) -> None:
    """Make the next read of ``file`` come from disk."""
    handle = os.open(file, os.O_RDONLY)
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)


def run(folder: str, loader: str, ranks: int, how: tuple[Any, ...]) -> list[dict[str, Any]]:
    """The measurements of each rank."""
    return on_ranks(ranks, rank_main, ranks, folder, loader, how)


def on_ranks(ranks: int, target: Callable[..., None], *args: Any) -> list[dict[str, Any]]:
    """Run ``target(rank, *args, scratch)`` in fresh processes; each writes scratch/RANK.json.

    Returns:
        The contents of these files, by rank.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as scratch:
        processes = [
            context.Process(target=target, args=(rank, *args, scratch)) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            if process.exitcode:
                raise SystemExit(f"a rank failed with exit code {process.exitcode}")
        return [json.loads(Path(scratch, f"{r}.json").read_text()) for r in range(ranks)]


def rank_main(
    rank: int, world_size: int, folder: str, loader: str, how: tuple[Any, ...], scratch: str
) -> None:
    """One rank: build and shard the model, then measure only the loading."""
    import torch
    import torch.distributed as dist

    from ppl_eval import compat

    compat.quiet()
    from ppl_eval.config.command_line import load as load_config
    from ppl_eval.model.prepare import load_models, prepare_model
    from ppl_eval.parallel.dims import ParallelDims
    from ppl_eval.quantize.linear import quantize
    from ppl_eval.quantize.schemes import SCHEMES, read_quantizer

    torch.set_num_threads(1)
    cfg = load_config(
        [
            *("--config", "auto_ppl_eval", f"checkpoint_dir={folder}"),
            "dataset.data_files=unused",
        ]
    )
    scheme, size, with_teacher = how
    section = {} if scheme is None else {"scheme": scheme, "group_size": size}
    if scheme is not None and SCHEMES[scheme].group_size is None:
        del section["group_size"]
    quantizers = [read_quantizer(section), *([None] if with_teacher else [])]
    if loader == "torchtune":
        quantizers = [None]
    models = [
        prepare_model(cfg.model, cfg.checkpointer, torch.float32, quantizer=quantizer)
        for quantizer in quantizers
    ]
    if world_size > 1:
        store = f"file://{scratch}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
        meshes = ParallelDims(world_size=world_size).build_mesh("cpu")
        for each in models if loader == "ppl_eval" or scheme is None else ():
            each.shard(meshes)
        dist.barrier()
    if scheme is not None:  # torchao's first import and call
        quantize(torch.zeros(256, 64), read_quantizer(section))
    model = models[0].decoder.model
    largest = max(t.numel() * 4 for t in models[0].decoder.weights().values())
    base, disk_before = rss_anon(), disk_reads()
    with Peak() as peak:
        if loader == "ppl_eval":
            load_models(models, torch.device("cpu"))
        else:
            is_sharded = world_size > 1 and scheme is None
            load_with_torchtune(model, models[0].checkpoint, sharded=is_sharded)
            if scheme is not None:
                quantize_with_torchao(models[0].decoder.layers, read_quantizer(section))
    parameters = [p for each in models for p in each.decoder.model.parameters()]
    shards = sum(num_bytes(p) for p in parameters)
    found = {"base": base, "peak": peak.value, "disk": disk_reads() - disk_before}
    Path(scratch, f"{rank}.json").write_text(
        json.dumps({**found, "largest": largest, "shards": shards})
    )
    if world_size > 1:
        dist.barrier()
        dist.destroy_process_group()


def quantize_with_torchao(layers: Any, quantizer: Any) -> None:
    """Quantise the layers of a loaded model, one matrix after the other."""
    from torch import nn

    from ppl_eval.quantize.linear import quantize

    for module in layers.modules():
        if isinstance(module, nn.Linear):
            quantised = quantize(module.weight.data, quantizer)
            module.weight = nn.Parameter(quantised, requires_grad=False)


def load_with_torchtune(model: Any, checkpoint: Any, *, sharded: bool) -> None:
    """Load the whole state dict on every rank, as torchtune's distributed recipes do."""
    import torch
    from torchtune.training import FullModelHFCheckpointer, load_from_full_model_state_dict

    with tempfile.TemporaryDirectory() as nowhere:
        names, kind = [path.name for path in checkpoint.files], checkpoint.model_type
        theirs = FullModelHFCheckpointer(checkpoint.folder, names, kind, output_dir=nowhere)
        state = theirs.load_checkpoint()["model"]
    if sharded:
        load_from_full_model_state_dict(model, state, torch.device("cpu"), strict=True)
    else:
        model.to_empty(device="cpu")
        model.load_state_dict(state)


def num_bytes(parameter: Any) -> int:
    """Bytes of a parameter that lie on this rank."""
    if hasattr(parameter, "to_local"):
        parameter = parameter.to_local()
    if hasattr(parameter, "__tensor_flatten__"):
        names = parameter.__tensor_flatten__()[0]
        return sum(num_bytes(getattr(parameter, name)) for name in names)
    return parameter.numel() * parameter.element_size()


class Peak:
    """Largest RssAnon while the block runs."""

    def __enter__(self) -> "Peak":
        self.value, self._done = rss_anon(), False
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done:
            self.value = max(self.value, rss_anon())
            time.sleep(0.002)

    def __exit__(self, *_: object) -> None:
        self.value = max(self.value, rss_anon())
        self._done = True
        self._thread.join()


def rss_anon() -> int:
    """Anonymous resident memory of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("this benchmark needs Linux: /proc/self/status has no RssAnon")


def disk_reads() -> int:
    """Bytes that this process caused to be read from disk."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise SystemExit("/proc/self/io has no read_bytes")


if __name__ == "__main__":
    main()
