"""A rank moves its own shards to its GPU, not the whole model."""

import pytest
import torch
from adapters import LINEARS, loaded, prepared, write_base, write_peft
from fake_cuda import CUDA, FakeCuda, one_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from ppl_eval.model.load import Target, load
from ppl_eval.model.torchtune_decoder import TorchtuneDecoder
from ppl_eval.parallel.tensor import split_axes

NAME = "qwen2_5 (biases, untied)"
FSDP, TP = 2, 2


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Sections of a checkpoint and of a distributed copy, a LoRA and a DoRA adapter."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    root = tmp_path_factory.mktemp("written")
    node, checkpointer = write_base(NAME, root / "base")
    kinds = {"lora": {"r": 3}, "dora": {"r": 5, "use_dora": True}}
    for kind, settings in kinds.items():
        write_peft(NAME, root / kind, target_modules=LINEARS, **settings)
    base, _ = loaded(node, checkpointer)
    save(base.state_dict(), storage_writer=FileSystemWriter(root / "dist"), no_dist=True)
    distributed = {
        "_component_": "torchtune.training.DistributedCheckpointer",
        "checkpoint_dir": str(root / "dist"),
        "output_dir": None,
        "model_type": "QWEN2",
    }
    sections = {"files": checkpointer, "distributed": distributed}
    return node, sections, {kind: str(root / kind) for kind in kinds} | {None: None}


def shard(model, mesh):
    """Parameters as FSDP2 on tensor parallelism leaves them; FSDP2 itself wants a real device."""
    axes = split_axes(TorchtuneDecoder(model))
    for path, parameter in list(model.named_parameters()):
        axis = axes.get(path)
        tp = Replicate() if axis is None else Shard(axis)
        fsdp = _StridedShard(0, split_factor=TP) if axis == 0 else Shard(0)
        placed = distribute_tensor(parameter.data, mesh, [fsdp, tp], src_data_rank=None)
        owner, _, key = path.rpartition(".")
        setattr(model.get_submodule(owner), key, nn.Parameter(placed, requires_grad=False))


def allowed(model, adapter):
    """Bytes that a rank needs: its shards, and what its shards take of the adapter, in fp32."""
    numbers = 0
    for path, parameter in model.named_parameters():
        own = parameter.to_local()
        numbers += own.numel()
        update = None if adapter is None else adapter.updates.get(path.removesuffix(".weight"))
        if update is None:
            continue
        rank, columns = update.a.shape
        rows = len(own)
        numbers += rank * (rows + own.shape[1])
        if update.magnitude is not None:  # norms are of whole rows
            numbers += rows * columns + rank * (rows + columns) + rows
        if path == "output.weight":  # compared with the copy that PEFT stores
            numbers += own.numel()
    return 4 * numbers


@pytest.mark.parametrize(
    ("kind", "folder", "merge"),
    [
        ("files", None, True),
        ("distributed", None, True),
        ("files", "lora", True),
        ("files", "lora", False),
        ("distributed", "lora", True),
        ("files", "dora", True),
        ("files", "dora", False),
    ],
)
def test_whole_tensors_are_not_uploaded(written, kind, folder, merge):
    node, sections, folders = written
    for rank in (1, 2):
        model, checkpoint, adapter = prepared(
            node, sections[kind], folders[folder], merge=merge, dtype=torch.bfloat16
        )
        with one_of(FSDP * TP, rank):
            shard(model, DeviceMesh("cuda", torch.arange(FSDP * TP).view(FSDP, TP)))
            with FakeCuda() as cuda:
                load(checkpoint, [Target(TorchtuneDecoder(model), adapter)], CUDA)
            shards = [parameter.to_local() for parameter in model.parameters()]
            assert {(shard.device, shard.dtype) for shard in shards} >= {(CUDA, torch.bfloat16)}
            assert sum(shard.numel() for shard in shards) < 0.35 * whole(model)
            assert 4 * sum(shard.numel() for shard in shards) <= sum(cuda.uploads)
            assert sum(cuda.uploads) <= allowed(model, adapter)


def whole(model):
    """Numbers in all parameters."""
    return sum(parameter.numel() for parameter in model.parameters())
