"""Run a function or a script on several ranks: forks of a server that imports what they need."""

import multiprocessing
import os
import runpy
import sys
import tempfile
import traceback
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from time import monotonic
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

_FORK = multiprocessing.get_context("forkserver")
_FORK.set_forkserver_preload(
    [
        *("torch", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"),
        *("torch.distributed.checkpoint.state_dict_saver", "torch.profiler"),
        *("datasets", "pytest", "scipy.stats", "torchtune.training", "transformers"),
        *("ppl_eval.evaluation.loop", "ppl_eval.commands.plan", "helpers", "meshes"),
        *("ppl_eval.boundary", "ppl_eval.report.output", "torch.distributed.rendezvous"),
    ]
)
_SPAWN = multiprocessing.get_context("spawn")
"""For CUDA, which a fork could not use if an import had woken it in the server."""


def run_on_ranks(world_size, function, *args, device="cpu", timeout_s=120):
    """What ``function(rank, *args)`` returns on each of ``world_size`` ranks, in order.

    The ranks have one thread each, and one process group over all of them.

    Args:
        world_size: number of processes.
        function: of a module, so that it can be pickled.
        args: what it takes after its rank.
        device: ``cpu`` (gloo), or ``cuda`` (nccl, and gloo for CPU tensors; rank r has GPU r).
        timeout_s: seconds until the ranks are ended.

    Raises:
        AssertionError: a rank failed (with the traceback of the first), or took too long.
        pytest.skip.Exception: this machine has fewer GPUs than ranks.
    """
    require(device, world_size)
    context = _SPAWN if device == "cuda" else _start_server()
    processes, readers = [], []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(world_size):
                reader, writer = context.Pipe(duplex=False)
                place = rank, world_size, device, f"{folder}/store"
                process = context.Process(target=_rank, args=(writer, *place, function, args))
                process.start()
                writer.close()  # or else the reader would not see that the process has ended
                processes.append(process)
                readers.append(reader)
            return _answers(readers, timeout_s)
        finally:
            failed = any(not reader.closed for reader in readers)
            for process in processes:
                process.join(0.1 if failed else 10)
                process.kill()


class Ended(NamedTuple):
    """A process that has ended: its exit code and what it wrote."""

    code: int
    out: str
    err: str


def run_script(num_processes, script, *args, cwd, timeout_s=240, **env):
    """Run a script as ``__main__`` on several processes, which torchrun's variables number.

    For what no launcher is needed to see: a fork starts in a hundredth of the CPU time.

    Args:
        num_processes: 1 runs it without those variables.
        script: path of the script.
        args: of its command line.
        cwd: folder in which it runs.
        timeout_s: seconds until the processes are ended.
        env: variables; ``{rank}`` in a value is the process's rank.

    Returns:
        An :class:`Ended` for each rank, in order.
    """
    context = _start_server()
    env |= {"OMP_NUM_THREADS": "1"}
    if num_processes > 1:  # the store outlives the ranks, as torchrun's does
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        env |= {"WORLD_SIZE": str(num_processes), "RANK": "{rank}", "LOCAL_RANK": "{rank}"}
        env |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
        env |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    with tempfile.TemporaryDirectory() as folder:
        processes, end = [], monotonic() + timeout_s
        try:
            for rank in range(num_processes):
                own = {key: value.format(rank=rank) for key, value in env.items()}
                files = [Path(folder) / f"{stream}{rank}" for stream in ("out", "err")]
                place = files, own, str(cwd)
                process = context.Process(target=_script, args=(*place, str(script), args))
                process.start()
                processes.append((process, files))
            for process, _ in processes:
                process.join(max(0, end - monotonic()))
                assert process.exitcode is not None, f"no end within {timeout_s} s"
            return [Ended(p.exitcode, *(f.read_text() for f in files)) for p, files in processes]
        finally:
            for process, _ in processes:
                process.kill()


def require(device, world_size=1):
    """Skip the test that runs where ``device`` has too few GPUs for ``world_size`` ranks."""
    if device == "cuda" and torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} CUDA devices, and there are {torch.cuda.device_count()}")


def rank_device():
    """The device of this rank of :func:`run_on_ranks`."""
    if "nccl" in dist.get_backend_config():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _start_server():
    """The context whose server runs; it finds the modules of this folder."""
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    with mock.patch.dict(os.environ, {"PYTHONPATH": os.pathsep.join(paths)}):
        forkserver.ensure_running()
    return _FORK


def _script(files, env, cwd, script, args):
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(cwd)
    os.environ.update(env)
    sys.argv = [script, *args]
    runpy.run_path(script, run_name="__main__")


def _answers(readers, timeout_s):
    """The results in order; a reader is closed once its rank has answered well."""
    results, end = {}, monotonic() + timeout_s
    while len(results) < len(readers):
        heard = wait([r for r in readers if not r.closed], max(0, end - monotonic()))
        missing = [rank for rank in range(len(readers)) if rank not in results]
        assert heard, f"no answer of ranks {missing} within {timeout_s} s"
        for rank in missing:
            if readers[rank] not in heard:
                continue
            try:
                ok, value = readers[rank].recv()
            except EOFError:
                ok, value = False, "the process ended without an answer"
            assert ok, f"rank {rank}:\n{value}"
            results[rank] = value
            readers[rank].close()
    return [results[rank] for rank in range(len(readers))]


def _rank(writer, rank, world_size, device, store, function, args):
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    try:
        if device == "cuda":
            torch.cuda.set_device(rank)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        writer.send((True, function(rank, *args)))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        writer.send((False, traceback.format_exc()))
        raise
