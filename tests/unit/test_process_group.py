"""Which GPU a process takes and what it can compute in, by what torch.cuda says of the machine."""

from types import SimpleNamespace

import pytest
import torch
from ranks import run_on_ranks

from ppl_eval import UserError
from ppl_eval.parallel.process_group import _check_gpus_differ, check_dtypes, pick_device

CUDA = torch.device("cuda", 0)


@pytest.fixture
def machine(monkeypatch):
    """Let torch.cuda say that it sees GPUs of a compute capability; returns the one chosen."""

    def sees(num_gpus, major=9, visible=None):
        chosen = []
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        answers = {
            "is_available": lambda: True,
            "device_count": lambda: num_gpus,
            "set_device": chosen.append,
            "current_device": lambda: 0,
            "get_device_name": lambda device=None: "Tesla T4",
            "get_device_properties": lambda device=None: SimpleNamespace(major=major),
            "_check_bf16_tensor_supported": lambda device: True,  # a tensor can be made anywhere
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        monkeypatch.setattr(torch.version, "cuda", "12.8")
        return chosen

    return sees


@pytest.mark.parametrize("name", [None, "cuda"])
def test_each_process_of_a_machine_takes_its_own_gpu(machine, name):
    chosen = machine(4)
    assert pick_device(name, 3, 4) == torch.device("cuda", 3)
    assert chosen == [torch.device("cuda", 3)]


@pytest.mark.parametrize("visible", ["3", "0", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"])
def test_a_launcher_that_shows_each_process_one_gpu_is_not_refused(machine, visible):
    """SLURM's --gpus-per-task=1; inside a cgroup each one's only GPU may be called 0."""
    chosen = machine(1, visible=visible)
    assert pick_device(None, 3, 4) == torch.device("cuda", 0)
    assert chosen == [torch.device("cuda", 0)]


@pytest.mark.parametrize(
    ("num_gpus", "visible", "found"),
    [(1, None, "wants GPU 3, but there is 1"), (2, "0,1", "wants GPU 3, but there are 2")],
)
def test_more_processes_than_gpus_are_refused(machine, num_gpus, visible, found):
    machine(num_gpus, visible=visible)
    with pytest.raises(UserError, match=f"{found}: start at most one process for each GPU"):
        pick_device("cuda", 3, 4)


def test_a_gpu_that_emulates_bf16_is_refused_it(machine):
    """torch counts emulation as support unless it is asked not to."""
    machine(1, major=7)
    with pytest.raises(UserError, match="Tesla T4 does not compute in it: set dtype=fp16"):
        check_dtypes(("fp32", "bf16"), CUDA)
    check_dtypes(("fp16", None), CUDA)


def test_a_gpu_that_has_bf16_computes_in_it(machine):
    machine(1, major=8)
    check_dtypes(("bf16", "fp32"), CUDA)


def shared(rank, uuids):
    try:
        _check_gpus_differ(uuids[rank])
    except UserError as error:
        return str(error)


def test_two_processes_with_the_same_gpu_are_refused_on_every_rank():
    said = "processes 1 and 2 have the same GPU (GPU-b): start at most one process for each GPU"
    assert run_on_ranks(3, shared, ["GPU-a", "GPU-b", "GPU-b"]) == [said] * 3
    assert run_on_ranks(3, shared, ["GPU-a", "GPU-b", "GPU-c"]) == [None] * 3
