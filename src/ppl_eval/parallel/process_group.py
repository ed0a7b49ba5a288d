"""This process among the others: its device, its rank, and the default process group."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from ppl_eval.errors import UserError

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
        num_processes: of all machines.

    Raises:
        UserError: a device that this machine or this build of torch lacks.
    """
    if name is None:
        name = device_type(None)
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


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of the parameters and activations.

    Raises:
        UserError: the device cannot compute in it.
    """
    dtype = DTYPES[name]
    if (
        dtype is torch.bfloat16
        and device.type == "cuda"
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        raise UserError(
            f"dtype is bf16, but {torch.cuda.get_device_name(device)} does not compute in it:"
            " set dtype=fp16 or dtype=fp32"
        )
    return dtype


def start(backend: str, timeout_s: float, device: torch.device) -> None:
    """Join the default process group; every rank calls it once.

    Args:
        backend: ``auto``, ``gloo`` or ``nccl``. auto is gloo on CPU, and on CUDA nccl for CUDA
            tensors with gloo for CPU tensors.
        timeout_s: seconds that a collective waits for the other ranks.
        device: the device of this process.

    Raises:
        UserError: a backend that does not serve the device, or two processes with one GPU.
    """
    if backend == "auto":
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    elif (backend == "nccl") != (device.type == "cuda"):
        raise UserError(
            f"process_group.backend is {backend}, but the device is {device.type}:"
            " leave it at auto, which takes gloo for cpu and nccl for cuda"
        )
    elif backend == "nccl":
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    if device.type == "cuda":
        _check_gpus_differ(str(torch.cuda.get_device_properties(device).uuid))


def _check_gpus_differ(uuid: str) -> None:
    """Refuse two processes on one GPU, which NCCL does not connect; every rank calls it.

    Args:
        uuid: names the GPU of this rank among those of all machines.
    """
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
