"""Run a function on several gloo ranks, quickly: a fork server with torch already imported."""

import multiprocessing
import os
import tempfile
import traceback
from datetime import timedelta

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["torch", "torchtune.training", "datasets", "ppl_eval.evaluation.loop"]
)


def run_on_ranks(world_size, function, *args, timeout_s=120):
    """What ``function(rank, *args)`` returns on each of ``world_size`` ranks, in order.

    The ranks have one thread each, and a gloo group over all of them.

    Raises:
        AssertionError: a rank failed (with the traceback of the first), or took too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        queue = _CONTEXT.SimpleQueue()
        processes = [
            _CONTEXT.Process(
                target=_rank, args=(rank, world_size, f"{folder}/store", queue, function, args)
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        results, failures = {}, []
        try:
            for _ in processes:
                rank, ok, value = _get(queue, processes, timeout_s)
                if not ok:
                    failures.append(f"rank {rank}:\n{value}")
                    break
                results[rank] = value
        finally:
            for process in processes:
                process.join(10 if not failures else 0.1)
                process.kill()
        assert not failures, failures[0]
        return [results[rank] for rank in range(world_size)]


def _get(queue, processes, timeout_s):
    if not queue._reader.poll(timeout_s):
        codes = [process.exitcode for process in processes]
        raise AssertionError(f"no answer within {timeout_s} s; exit codes {codes}")
    return queue.get()


def _rank(rank, world_size, store, queue, function, args):
    import torch
    import torch.distributed as dist

    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        queue.put((rank, True, function(rank, *args)))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        queue.put((rank, False, traceback.format_exc()))
        raise
