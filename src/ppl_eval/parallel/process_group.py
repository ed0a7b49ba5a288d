"""This process among the others: its device, the default process group, its peak memory."""

import os
import resource
import sys
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

from ppl_eval.errors import UserError
from ppl_eval.parallel.reduce import reduce_

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Names of dtypes in a config."""


def device_type(name: str | None) -> str:
    """``cpu`` or ``cuda``: the type of the device ``name``; for None, the best of this machine."""
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name.partition(":")[0]


def pick_device(name: str | None, local_rank: int, num_processes: int = 1) -> torch.device:
    """The device that this process computes on; on CUDA also made the current one.

    Args:
        name: ``cpu``, ``cuda``, ``cuda:N`` (one process only), or None for the best there is.
        local_rank: number of this process on its machine; it chooses among several GPUs.
        num_processes: number of processes on all machines.

    Raises:
        UserError: this machine or this build of torch does not have the device.
    """
    name = device_type(None) if name is None else name
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"device is {name!r}, but it is cpu, cuda, cuda:N or null") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise UserError(f"device is {name!r}, but evaluation runs on cpu or cuda only")
    if not torch.cuda.is_available():
        raise UserError(
            f"device is {name!r}, but torch {torch.__version__} sees no CUDA device here:"
            " set device=cpu, or null for the best there is"
        )
    if device.index is not None and num_processes > 1:
        raise UserError(
            f"device is {name!r}, but {num_processes} processes cannot share one GPU: set"
            " device=cuda, and each takes its own"
        )
    num_gpus = torch.cuda.device_count()
    index = local_rank if device.index is None else device.index
    if device.index is None and num_gpus == 1 and os.environ.get("CUDA_VISIBLE_DEVICES"):
        index = 0  # the launcher gave each process a GPU; start() refuses if two have the same
    if index >= num_gpus:
        raise UserError(
            f"process {local_rank} of this machine wants GPU {index}, but"
            f" {'there is' if num_gpus == 1 else 'there are'} {num_gpus}:"
            " start at most one process for each GPU"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def check_dtypes(names: Iterable[str | None], device: torch.device) -> None:
    """Check that ``device`` can compute in each of these dtypes; None stands for none.

    Raises:
        UserError: it cannot.
    """
    is_old = device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
    if is_old and "bf16" in names:
        raise UserError(
            f"dtype is bf16, but {torch.cuda.get_device_name(device)} does not compute in it:"
            " set dtype=fp16 or dtype=fp32"
        )


def start(backend: str, timeout_s: float, device: torch.device) -> None:
    """Join the default process group; every rank calls it once.

    Args:
        backend: ``gloo`` for CPU, ``nccl`` for CUDA (CPU tensors then go over gloo), or ``auto``.
        timeout_s: seconds that a collective waits for the other ranks.
        device: the device of this process.

    Raises:
        UserError: the backend is not the one of the device, or two processes have one GPU.
    """
    is_cuda = device.type == "cuda"
    if backend != "auto" and (backend == "nccl") != is_cuda:
        raise UserError(
            f"process_group.backend is {backend}, but the device is {device.type}:"
            " leave it at auto, which takes gloo for cpu and nccl for cuda"
        )
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if is_cuda else "gloo", timeout=timedelta(seconds=timeout_s)
    )
    if is_cuda:
        _check_gpus_differ(str(torch.cuda.get_device_properties(device).uuid))


def _check_gpus_differ(uuid: str) -> None:
    """Refuse two processes on one GPU, which NCCL cannot connect; every rank calls it with the UUID
    of its GPU."""
    uuids: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(uuids, uuid)
    for rank, other in enumerate(uuids):
        if uuids.index(other) < rank:
            raise UserError(
                f"processes {uuids.index(other)} and {rank} have the same GPU ({other}): start at"
                " most one process for each GPU"
            )


def world() -> dist.ProcessGroup | None:
    """The group of all processes, or None when this process is alone."""
    return dist.group.WORLD if dist.is_initialized() else None


def stop() -> None:
    """Leave the default process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def peak_memory_gib(device: torch.device) -> float:
    """The largest peak of any process, in GiB; every rank calls it.

    On CUDA what torch allocated, on CPU the resident set of the process, interpreter included.
    """
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return float(reduce_(torch.tensor(peak, dtype=torch.float64), world(), "max")) / 2**30
