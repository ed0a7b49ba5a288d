"""Loading on several ranks: every rank has its own shards, its own rotary table, and no more."""

import re

import pytest
import torch
import torch.distributed as dist
from ranks import rank_device, run_on_ranks
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torchtune.models.convert_weights import hf_to_tune

from ppl_eval import UserError, shipped
from ppl_eval.checkpoint.checkpoint import Checkpoint
from ppl_eval.config.command_line import load as load_config
from ppl_eval.model.build import build_on_meta
from ppl_eval.model.check_names import check_names
from ppl_eval.model.load import Target, load
from ppl_eval.model.torchtune_decoder import decoder_of
from ppl_eval.parallel.dims import ParallelDims
from ppl_eval.parallel.shard import shard_decoder

NAMES = {"tiny_teacher": "tiny_teacher_ppl_eval", "tiny_student": "tiny_ppl_eval"}


def prepared(name, folder=None):
    cfg = load_config(["--config", NAMES[name], *([f"checkpoint_dir={folder}"] if folder else [])])
    checkpoint = Checkpoint.open(cfg.checkpointer)
    model = build_on_meta(cfg.model, torch.float32, checkpoint.config)
    check_names(decoder_of(model), checkpoint)
    return model, checkpoint


def expected(name):
    weights = load_file(shipped.embedded_path(name) / "model.safetensors")
    dim = weights["model.norm.weight"].numel()
    return hf_to_tune(weights, num_heads=8, num_kv_heads=4, dim=dim)


def load_sharded(rank, name, dp_replicate):
    """Whether each gathered parameter is the file's, bytes kept, and this rank's own logits."""
    model, checkpoint = prepared(name)
    dims = ParallelDims(dp_replicate=dp_replicate, world_size=dist.get_world_size())
    meshes = dims.build_mesh(rank_device().type)
    shard_decoder(decoder_of(model), meshes.fsdp)
    load(checkpoint, [Target(decoder_of(model))], rank_device())
    local = sum(
        (p.to_local() if isinstance(p, DTensor) else p).untyped_storage().nbytes()
        for p in model.parameters()
    )
    truth, wrong = expected(name), []
    for key, parameter in model.named_parameters():
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        if not torch.equal(full.cpu(), truth[key]):
            wrong.append(key)
    with torch.no_grad():
        logits = model(torch.arange(3, 40, device=rank_device()).unsqueeze(0))
    return wrong, local, logits.tolist()


@pytest.mark.parametrize("name", ["tiny_teacher", "tiny_student"])
@pytest.mark.parametrize(("world_size", "dp_replicate"), [(2, 1), (3, 1), (4, 2)])
def test_shards_and_rotary_tables_of_every_rank(name, world_size, dp_replicate, device):
    """The logits of every rank, not of rank 0 alone. 509 rows divide by none of the sizes."""
    (_, whole, alone), *_ = run_on_ranks(1, load_sharded, name, 1, device=device)
    fsdp_size = world_size // dp_replicate
    found = run_on_ranks(world_size, load_sharded, name, dp_replicate, device=device)
    for wrong, local, logits in found:
        assert wrong == []
        assert local < 1.05 * whole / fsdp_size + 4096
        assert logits == alone


def load_on_two_axes(rank):
    """FSDP2 on tensor parallel: the placements that the next mesh will have."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model, checkpoint = prepared("tiny_teacher")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    columns = ("attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.w1", "mlp.w3")
    plan = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in ("attn.output_proj", "mlp.w2")}
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], plan)
        fully_shard(layer, mesh=mesh["fsdp"])
    parallelize_module(
        model,
        mesh["tp"],
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate()),
            "output": ColwiseParallel(output_layouts=Replicate()),
        },
    )
    fully_shard(model, mesh=mesh["fsdp"])
    load(checkpoint, [Target(decoder_of(model))], torch.device("cpu"))
    truth = expected("tiny_teacher")
    kinds = {tuple(type(p).__name__ for p in t.placements) for t in model.parameters()}
    assert ("_StridedShard", "Shard") in kinds
    assert any(p.placements == (Shard(0), Shard(1)) for p in model.parameters())
    return [k for k, p in model.named_parameters() if not torch.equal(p.full_tensor(), truth[k])]


def test_placements_of_fsdp_on_tensor_parallel():
    assert run_on_ranks(4, load_on_two_axes) == [[]] * 4


def load_distributed_checkpoint(rank, folder):
    """Written by two ranks as torchtune's recipes do, read by three."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    model, checkpoint = prepared("tiny_teacher")
    shard_decoder(decoder_of(model), ParallelDims(world_size=2).build_mesh("cpu").fsdp)
    load(checkpoint, [Target(decoder_of(model))], torch.device("cpu"))
    state = {"model": model.state_dict(), "epochs_run": 1}
    save(state, storage_writer=FileSystemWriter(f"{folder}/dist_epoch_0"))


def read_distributed_checkpoint(rank, folder):
    cfg = load_config(["--config", "tiny_teacher_ppl_eval"])
    node = {
        "_component_": "torchtune.training.DistributedCheckpointer",
        "checkpoint_dir": folder,
        "output_dir": None,
    }
    checkpoint = Checkpoint.open(node)
    model = build_on_meta(cfg.model, torch.float32, checkpoint.config)
    check_names(decoder_of(model), checkpoint)
    meshes = ParallelDims(world_size=dist.get_world_size()).build_mesh("cpu")
    shard_decoder(decoder_of(model), meshes.fsdp)
    load(checkpoint, [Target(decoder_of(model))], torch.device("cpu"))
    truth = expected("tiny_teacher")
    return [k for k, p in model.named_parameters() if not torch.equal(p.full_tensor(), truth[k])]


def test_a_distributed_checkpoint_on_another_number_of_ranks(tmp_path):
    run_on_ranks(2, load_distributed_checkpoint, str(tmp_path))
    assert run_on_ranks(3, read_distributed_checkpoint, str(tmp_path)) == [[]] * 3


def load_damaged(rank, folder):
    model, checkpoint = prepared("tiny_student", folder)
    shard_decoder(decoder_of(model), ParallelDims(world_size=2).build_mesh("cpu").fsdp)
    try:
        load(checkpoint, [Target(decoder_of(model))], torch.device("cpu"))
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("row", "finder"), [(3, 0), (500, 1)])
def test_the_rank_that_holds_a_nan_names_it(tmp_path, row, finder):
    for path in shipped.embedded_path("tiny_student").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.embed_tokens.weight"][row, 5] = torch.nan
    save_file(weights, tmp_path / "model.safetensors")
    messages = run_on_ranks(2, load_damaged, str(tmp_path))
    assert re.match("model.embed_tokens.weight holds NaN", messages[finder])
    assert messages[1 - finder] is None


def collectives_of_loading(rank):
    from torch.utils._python_dispatch import TorchDispatchMode

    model, checkpoint = prepared("tiny_student")
    shard_decoder(decoder_of(model), ParallelDims(world_size=2).build_mesh("cpu").fsdp)
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "c10d" in func.namespace:
                seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():
        load(checkpoint, [Target(decoder_of(model))], torch.device("cpu"))
    return seen


def test_loading_communicates_nothing():
    assert run_on_ranks(2, collectives_of_loading) == [[], []]
