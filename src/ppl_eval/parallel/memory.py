"""How much memory a run took at its peak."""

import resource
import sys

import torch
import torch.distributed as dist

from ppl_eval.parallel.reduce import reduce_


def peak_memory_gib(device: torch.device, group: dist.ProcessGroup | None) -> float:
    """The largest peak of any rank in ``group``, in GiB; every rank calls it.

    On CUDA what torch allocated, on CPU the resident set of the process, interpreter included.
    """
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return float(reduce_(torch.tensor(peak, dtype=torch.float64), group, "max")) / 2**30
