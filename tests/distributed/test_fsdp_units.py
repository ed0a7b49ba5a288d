"""Models that a training loop has sharded in its own way, as torchtune's recipes do."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from fake_cuda import one_of
from helpers import ByteTokenizer, sharp_llama
from ranks import rank_device, run_on_ranks
from tolerance import RTOL
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torchtune import training

from ppl_eval import evaluate
from ppl_eval.api import device_of

TEXTS = ["the cat sat on the mat, " * n + "x" * n for n in (1, 7, 2, 3, 1)]
OPTIONS = {"max_seq_len": 32, "max_tokens_per_batch": 33}
"""An odd number of batches: one rank of two has none in the last step."""


def sharded(names, tied, seed=0, cpu_offload=False):
    """As torchtune's recipes shard a model with ``custom_sharded_layers: names``."""
    model = sharp_llama(259, tied=tied, seed=seed)
    mesh = init_device_mesh(rank_device().type, (dist.get_world_size(),))
    conditions = [partial(training.get_shard_conditions, names_to_match=names)]
    model = model if cpu_offload else model.to(rank_device())
    training.shard_model(model, conditions, cpu_offload=cpu_offload, dp_mesh=mesh)
    return model


def found(model, teacher=None):
    result = evaluate(model, ByteTokenizer(), TEXTS, **OPTIONS, teacher=teacher)
    assert len(result.workload.plan.batches) % 2 == 1
    kl = 0.0 if teacher is None else float(result.ledger.column("kl_teacher_student").sum())
    return result.summary.total.num_scored, result.summary.total.nll_nats_sum, kl


def on_ranks(rank, names, tied):
    return found(sharded(names, tied)), found(sharded(names, tied), sharded(names, tied, seed=1))


def offloaded(rank):
    model = sharded(["output"], tied=False, cpu_offload=True)
    for buffer in model.buffers():  # FSDP2 moves parameters alone
        buffer.data = buffer.data.to(rank_device())
    return found(model)


def in_one_process(tied):
    student, teacher = (sharp_llama(259, tied=tied, seed=seed) for seed in (0, 1))
    return found(student), found(student, teacher)


@pytest.mark.parametrize(
    ("names", "tied"),
    [
        (["tok_embeddings", "output"], False),
        (["output"], False),
        (["norm", "output"], False),
        (["tok_embeddings"], True),
        (["tok_embeddings"], False),
    ],
)
def test_a_head_that_is_an_fsdp_unit_of_its_own_is_gathered_once_a_step(names, tied, device, rtol):
    """It was gathered for each chunk of tokens, of which the ranks have different numbers."""
    expected = in_one_process(tied)
    for of_rank in run_on_ranks(2, on_ranks, names, tied, device=device):
        for ours, single in zip(of_rank, expected, strict=True):
            assert ours[0] == single[0]
            assert ours[1:] == pytest.approx(single[1:], rel=rtol)


@pytest.mark.gpu
def test_parameters_that_fsdp_keeps_on_the_cpu():
    """Batches go where FSDP2 brings the parameters; the targets stayed on the CPU."""
    expected = in_one_process(tied=False)[0]
    for ours in run_on_ranks(1, offloaded, device="cuda"):
        assert ours[0] == expected[0]
        assert ours[1] == pytest.approx(expected[1], rel=RTOL["cuda"])


def test_the_device_of_parameters_that_fsdp_keeps_on_the_cpu(monkeypatch):
    """It is the mesh's, also on a machine without that device."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    with one_of(2, 0):
        mesh = DeviceMesh("cuda", torch.arange(2))
        model = torch.nn.Linear(2, 2)
        meta = TensorMeta(torch.Size((2, 2)), (2, 1), torch.float32)
        spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=meta)
        shard = DTensor(torch.ones(1, 2), spec, requires_grad=False)  # from_local would move it
        model.weight = torch.nn.Parameter(shard)
        assert device_of(model) == torch.device("cuda", 3)
    assert device_of(torch.nn.Linear(2, 2)) == torch.device("cpu")
