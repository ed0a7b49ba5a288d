"""Adapters on several ranks, merged and not: the weights and the loss of one process."""

import helpers
import pytest
import torch
import torch.distributed as dist
from adapters import LINEARS, TOKENS, loaded, prepared, write_base, write_peft
from helpers import sharp_llama
from ranks import run_on_ranks
from torch.distributed.tensor import DTensor

from ppl_eval.model.load import Target, load
from ppl_eval.model.torchtune_decoder import decoder_of
from ppl_eval.parallel.cut import local_part
from ppl_eval.parallel.dims import ParallelDims
from ppl_eval.parallel.lora import AdaptedLinear
from ppl_eval.parallel.shard import shard_decoder
from ppl_eval.parallel.tensor import split_decoder

NAME = "qwen2_5 (biases, untied)"
CPU = torch.device("cpu")


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
    return node, checkpointer, distributed, {kind: str(root / kind) for kind in kinds}


def nll_of(model, tokens=TOKENS):
    targets = tokens[:, 1:]
    with torch.no_grad():
        return helpers.nll_of(
            model, tokens[:, :-1], targets, torch.ones_like(targets).bool()
        ).tolist()


def whole(parameter):
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def on_mesh(dims, section, node, folder, merge, dtype):
    meshes = dims.build_mesh("cpu")
    model, checkpoint, adapter = prepared(node, section, folder, merge=merge, dtype=dtype)
    split_decoder(decoder_of(model), meshes.tp)
    shard_decoder(decoder_of(model), meshes.fsdp)
    load(checkpoint, [Target(decoder_of(model), adapter)], CPU)
    return model


def compare(rank, node, checkpointer, distributed, folders, dp_shard, tp):
    """For each way to load: names of parameters that differ, and the loss here and alone."""
    dims = ParallelDims(dp_shard=dp_shard, tp=tp, world_size=dist.get_world_size())
    found = {}
    for kind, merge, dtype in (
        ("lora", True, torch.float32),
        ("lora", False, torch.float32),
        ("dora", True, torch.float32),
        ("dora", False, torch.float32),
        ("dora", True, torch.bfloat16),
        ("dora", False, torch.bfloat16),
        ("distributed", True, torch.float32),
        ("distributed", False, torch.float32),
    ):
        section = distributed if kind == "distributed" else checkpointer
        folder = folders["lora" if kind == "distributed" else kind]
        model = on_mesh(dims, section, node, folder, merge, dtype)
        alone, _ = loaded(node, checkpointer, folder, merge=merge, dtype=dtype)
        expected = dict(alone.named_parameters())
        nll = nll_of(model)
        for module in model.modules():
            if hasattr(module, "reshard"):
                module.reshard()
        parameters = dict(model.named_parameters())
        assert set(parameters) == set(expected)
        wrong = [n for n, p in parameters.items() if not torch.equal(whole(p), expected[n])]
        found[kind, merge, dtype] = wrong, nll, nll_of(alone)
    return found


@pytest.mark.parametrize(("dp_shard", "tp"), [(2, 1), (1, 2), (2, 2)])
def test_as_in_one_process(written, dp_shard, tp):
    for results in run_on_ranks(dp_shard * tp, compare, *written, dp_shard, tp):
        assert len(results) == 8
        for (kind, merge, dtype), (wrong, nll, alone) in results.items():
            assert wrong == [], (kind, merge)
            if tp == 1:  # the same kernels on the same numbers
                assert nll == alone, (kind, merge)
            else:
                close = 1e-6 if dtype == torch.float32 else 1e-3
                difference = (torch.tensor(nll) - torch.tensor(alone)).abs()
                assert float(difference.mean() / torch.tensor(alone).mean()) < close, (kind, merge)


def test_what_the_adapter_does(written):
    """Or else all of the above could be a checkpoint without one."""
    node, checkpointer, _, folders = written
    nll = {
        (kind, merge): torch.tensor(nll_of(loaded(node, checkpointer, folder, merge=merge)[0]))
        for kind, folder in {**folders, None: None}.items()
        for merge in (True, False)
    }
    for kind in folders:
        torch.testing.assert_close(nll[kind, True], nll[kind, False], rtol=1e-4, atol=1e-4)
        assert float((nll[kind, True] - nll[None, True]).abs().mean()) > 1


def split_with_biases(rank):
    """No family has a bias where a matrix is split by rows: it must be added once, unscaled."""
    model = sharp_llama()
    torch.manual_seed(3)
    for name in ("attn.q_proj", "attn.output_proj", "mlp.w1", "mlp.w2"):
        plain = model.layers[1].get_submodule(name)
        adapted = AdaptedLinear(
            plain.in_features,
            plain.out_features,
            3,
            bias=True,
            is_dora=name != "mlp.w1",
            device=CPU,
            dtype=torch.float32,
        )
        with torch.no_grad():
            for parameter in adapted.parameters():
                parameter.normal_(std=0.3)
        adapted.weight = plain.weight
        model.layers[1].set_submodule(name, adapted)
    alone = nll_of(model, TOKENS % 101)
    split_decoder(decoder_of(model), ParallelDims(tp=2, world_size=2).build_mesh("cpu").tp)
    kinds = {type(m).__name__ for m in model.layers[1].modules() if isinstance(m, AdaptedLinear)}
    assert kinds == {"TensorParallelAdaptedLinear"}
    parts = {
        name: tuple(local_part(parameter).shape)
        for name, parameter in model.layers[1].named_parameters()
        if "q_proj" in name or "w2" in name
    }
    return alone, nll_of(model, TOKENS % 101), parts


def test_biases_on_tensor_parallel():
    for alone, split, parts in run_on_ranks(2, split_with_biases):
        torch.testing.assert_close(torch.tensor(split), torch.tensor(alone), rtol=1e-5, atol=1e-5)
        assert parts == {
            "attn.q_proj.weight": (32, 64),
            "attn.q_proj.bias": (32,),
            "attn.q_proj.dora_scale": (32,),
            "attn.q_proj.lora_a.weight": (3, 64),
            "attn.q_proj.lora_b.weight": (32, 3),
            "mlp.w2.weight": (64, 64),
            "mlp.w2.bias": (64,),
            "mlp.w2.dora_scale": (64,),
            "mlp.w2.lora_a.weight": (3, 64),
            "mlp.w2.lora_b.weight": (64, 3),
        }
