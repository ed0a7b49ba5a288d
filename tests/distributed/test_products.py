"""Every product of dp_replicate x dp_shard x cp x tp gives the number of one process.

The ranks of each world size are started once and run all meshes of that size. The oracle is a loop
over float64 logits in this process that shares no code with the product but torchtune's modules.
"""

import itertools
import json
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import WordTokenizer, chunks, oracle
from ranks import run_on_ranks
from safetensors.torch import load_file
from torchtune.models.convert_weights import hf_to_tune
from torchtune.models.llama2 import llama2
from torchtune.models.llama3_2 import llama3_2

from ppl_eval import evaluate, evaluation, preflight, shipped
from ppl_eval.config import load as load_config
from ppl_eval.data import hf_tokenizer
from ppl_eval.model.load import load
from ppl_eval.parallel.dims import ParallelDims
from ppl_eval.parallel.shard import shard_decoder
from ppl_eval.parallel.tensor import split_decoder

AXES = ("dp_replicate", "dp_shard", "cp", "tp")
BUDGETS = (300, 3000)
WINDOW = 200


def products(size):
    return [m for m in itertools.product(range(1, size + 1), repeat=4) if _product(m) == size]


def _product(mesh):
    return mesh[0] * mesh[1] * mesh[2] * mesh[3]


MESHES = {n: products(n) for n in (1, 2, 4)}
MESHES[8] = [(1, 2, 2, 2), (2, 2, 1, 2), (1, 1, 4, 2)]
ALL = [mesh for meshes in MESHES.values() for mesh in meshes]


def documents(count):
    """Token ids of uneven documents of 1 to 300 tokens, the shortest among them."""
    generator = torch.Generator().manual_seed(0)
    lengths = [1, 2, 3, 5, 7, 8, 9, 13, 300]
    lengths += torch.randint(10, 300, (count - len(lengths),), generator=generator).tolist()
    walk = torch.randint(0, 9, (sum(lengths),), generator=generator).cumsum(0) % 101
    return [ids.tolist() for ids in walk.split(lengths)]


def texts():
    """The embedded texts, cut to every length."""
    lines = (shipped.embedded_path("tiny_text") / "heldout.jsonl").read_text().splitlines()
    whole = [json.loads(line)["text"] for line in lines]
    return [text[: 1 + 37 * n % 900] for n, text in enumerate(whole[:24])]


def trained_llama():
    """A small tied llama with 101 rows and 50 hidden units, after some steps on the documents."""
    torch.manual_seed(0)
    model = llama3_2(
        vocab_size=101,
        num_layers=2,
        num_heads=8,
        num_kv_heads=4,
        embed_dim=32,
        intermediate_dim=50,
        max_seq_len=512,
        scale_factor=1,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for ids in documents(30)[9:] * 2:
        tokens = torch.tensor([ids])
        F.cross_entropy(model(tokens[:, :-1])[0], tokens[0, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


# the folder of each checkpoint, and the float64 model that its weights make


def folder_of(name):
    if name == "tiny_student":
        return shipped.embedded_path(name)
    return Path(os.environ["PPL_EVAL_TEST_MODELS"]) / name


def in_float64(name):
    sizes = {"num_layers": 5, "num_heads": 8, "num_kv_heads": 4, "embed_dim": 64}
    if name == "tiny_student":
        config = json.loads((folder_of(name) / "config.json").read_text())
        model = llama3_2(
            vocab_size=config["vocab_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=8,
            num_kv_heads=4,
            embed_dim=config["hidden_size"],
            intermediate_dim=config["intermediate_size"],
            max_seq_len=256,
            rope_base=config.get("rope_theta") or config["rope_parameters"]["rope_theta"],
            scale_factor=1,
            norm_eps=config["rms_norm_eps"],
        )
    else:
        model = llama2(vocab_size=512, **sizes, intermediate_dim=172, max_seq_len=512)
    weights = load_file(folder_of(name) / "model.safetensors")
    dim = weights["model.norm.weight"].numel()
    weights.pop("lm_head.weight", None) if name == "tiny_student" else None
    model.load_state_dict(hf_to_tune(weights, num_heads=8, num_kv_heads=4, dim=dim))
    return model.double().eval()


def measure_checkpoint(name, dims, meshes, budget, dtype="fp32"):
    """As the recipe does it: on meta, split, sharded, loaded, run."""
    cfg = load_config(
        [
            *("--config", "auto_ppl_eval", f"checkpoint_dir={folder_of(name)}", f"dtype={dtype}"),
            *("dataset.data_files=unused", f"protocol.max_seq_len={WINDOW}"),
            *(f"parallel.{axis}={getattr(dims, axis)}" for axis in AXES),
        ]
    )
    cfg.dataset = {"_component_": f"{__name__}.texts"}
    cfg.max_tokens_per_batch = budget
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    ready = preflight.prepare(cfg, dtype)
    split_decoder(ready.model, meshes.tp)
    shard_decoder(ready.model, ready.model.layers, meshes.fsdp)
    load(ready.model, ready.source, ready.convert, torch.device("cpu"))
    return evaluation.run(
        ready.model,
        ready.workload,
        device=torch.device("cpu"),
        batch_group=meshes.batch.get_group(),
        loss_group=meshes.loss.get_group(),
        cp_group=meshes.cp.get_group(),
    )


def measure_llama(state, dims, meshes, budget):
    """As a training loop does it: a model that has its weights already."""
    model = llama3_2(
        vocab_size=101,
        num_layers=2,
        num_heads=8,
        num_kv_heads=4,
        embed_dim=32,
        intermediate_dim=50,
        max_seq_len=512,
        scale_factor=1,
    )
    model.load_state_dict(state)
    split_decoder(model, meshes.tp)
    shard_decoder(model, model.layers, meshes.fsdp)
    return evaluate(
        model,
        WordTokenizer(bos_id=0),
        [" ".join(map(str, ids)) for ids in documents(30)],
        max_seq_len=WINDOW,
        max_tokens_per_batch=budget,
        meshes=meshes,
    )


def on_all_meshes(rank, world_size, names, state):
    """(mesh, model, budget) -> (scored tokens, NLL, NLL by window)."""
    found = {}
    for mesh in MESHES[world_size]:
        dims = ParallelDims(*mesh, world_size=world_size)
        meshes = dims.build_mesh("cpu")
        for budget, name in itertools.product(BUDGETS, names):
            if name == "llama":
                result = measure_llama(state, dims, meshes, budget)
            else:
                result = measure_checkpoint(name, dims, meshes, budget)
            total = result.summary.total
            by_window = result.ledger.nll_nats_sum.tolist()
            found[mesh, name, budget] = total.num_scored, total.nll_nats_sum, by_window
    return found


@pytest.fixture(scope="module")
def names():
    models = os.environ.get("PPL_EVAL_TEST_MODELS")
    has_stories = models and (Path(models) / "stories260k-hf").exists()
    return ["llama", "tiny_student", *(["stories260k-hf"] if has_stories else [])]


@pytest.fixture(scope="module")
def state():
    return trained_llama().state_dict()


@pytest.fixture(scope="module")
def found(names, state):
    """Results of all ranks, by world size; started when first asked for."""
    cache = {}

    def of(world_size):
        if world_size not in cache:
            cache[world_size] = run_on_ranks(
                world_size, on_all_meshes, world_size, names, state, timeout_s=600
            )
        return cache[world_size]

    return of


@pytest.fixture(scope="module")
def truth(names, state):
    """Model -> (scored tokens, NLL) by a float64 loop."""
    cache = {}
    for name in names:
        if name == "llama":
            model = trained_llama()
            model.load_state_dict(state)
            model, all_ids, bos = model.double(), documents(30), 0
        else:
            tokenizer = hf_tokenizer(str(folder_of(name)))
            model, bos = in_float64(name), tokenizer.bos_id
            all_ids = [tokenizer.encode(text, False, False) for text in texts()]
        windows = [window for ids in all_ids for window in chunks(ids, WINDOW, bos)]
        cache[name] = oracle(model, windows)
    return cache


@pytest.mark.parametrize("mesh", ALL, ids=lambda mesh: "x".join(map(str, mesh)))
def test_a_mesh_gives_the_number_of_one_process(found, truth, names, mesh):
    """B6, C3, C4, C7, C9: equal counts, and the NLL of a float64 loop to 1e-6, on every rank."""
    results = found(_product(mesh))
    assert all(of_rank == results[0] for of_rank in results)
    for name, budget in itertools.product(names, BUDGETS):
        num_scored, nll, _ = results[0][mesh, name, budget]
        assert num_scored == truth[name][0]
        assert nll == pytest.approx(truth[name][1], rel=1e-6)


@pytest.mark.parametrize("mesh", ALL, ids=lambda mesh: "x".join(map(str, mesh)))
def test_data_parallelism_changes_no_bit(found, names, mesh):
    """Also on top of cp and tp."""
    small = (1, 1, *mesh[2:])
    if _product(small) not in MESHES:
        pytest.skip(f"{small} is not among the meshes")
    here, there = found(_product(mesh))[0], found(_product(small))[0]
    for name, budget in itertools.product(names, BUDGETS):
        assert here[mesh, name, budget] == there[small, name, budget]
