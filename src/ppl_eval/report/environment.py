"""Versions, device and command of a run, for results.json."""

import os
import platform
import shlex
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from ppl_eval.shipped import recipe_path

_PACKAGES = ("ppl_eval", "torch", "torchtune", "torchao", "datasets", "tokenizers", "omegaconf")


def versions() -> dict[str, str | None]:
    """Python's version and those of the packages that matter."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def device_name(device: torch.device) -> str:
    """``cpu``, or the GPU's name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def command(argv: Sequence[str], num_processes: int, local_num_processes: int) -> str:
    """The ``tune run`` line that starts this run again.

    Args:
        argv: what a rank was started with: its script or module, then ``--config NAME key=value``.
        num_processes: processes on all nodes.
        local_num_processes: processes on this node.
    """
    launcher = ["tune", "run"]
    if num_processes > 1:
        launcher += ["--nproc_per_node", str(local_num_processes)]
    if num_processes > local_num_processes:
        launcher += ["--nnodes", str(num_processes // local_num_processes)]
    script = Path(argv[0])
    if script.resolve() == recipe_path() or script.name == "ppl_eval":
        recipe = "ppl_eval"
    elif script.suffix == ".py":  # tune takes a path from the current folder
        recipe = Path(os.path.relpath(script.with_suffix(""))).as_posix()
    else:  # and on one process it leaves a module's name here
        recipe = argv[0].replace(".", "/")
    return shlex.join([*launcher, recipe, *argv[1:]])
