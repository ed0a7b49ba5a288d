"""Every product of dp_replicate x dp_shard x cp x tp gives the number of one process.

The ranks of each world size are started once and run all meshes of that size. The oracle is a loop
over float64 logits in this process that shares no code with the product but torchtune's modules.
"""

import copy
import itertools
import json
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import WordTokenizer, chunks, oracle, student_in_float64
from meshes import on_mesh
from ranks import rank_device, run_on_ranks
from safetensors.torch import load_file
from torchtune.models.convert_weights import hf_to_tune
from torchtune.models.llama2 import llama2
from torchtune.models.llama3_2 import llama3_2

from ppl_eval import evaluate, shipped
from ppl_eval.data import hf_tokenizer
from ppl_eval.data.protocol import RULES
from ppl_eval.model.torchtune_decoder import decoder_of
from ppl_eval.parallel.dims import ParallelDims
from ppl_eval.parallel.shard import shard_decoder
from ppl_eval.parallel.tensor import split_decoder, vocabulary_part

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


def small_llama():
    """Tied, with 101 rows and 50 hidden units."""
    return llama3_2(
        vocab_size=101,
        num_layers=2,
        num_heads=8,
        num_kv_heads=4,
        embed_dim=32,
        intermediate_dim=50,
        max_seq_len=512,
        scale_factor=1,
    )


def trained_llama():
    """After some steps on the documents."""
    torch.manual_seed(0)
    model = small_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for ids in documents(30)[9:] * 20:
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
        return student_in_float64()
    model = llama2(vocab_size=512, **sizes, intermediate_dim=172, max_seq_len=512)
    weights = load_file(folder_of(name) / "model.safetensors")
    dim = weights["model.norm.weight"].numel()
    model.load_state_dict(hf_to_tune(weights, num_heads=8, num_kv_heads=4, dim=dim))
    return model.double().eval()


def measure_llama(state, dims, budget):
    """As a training loop does it: a model that has its weights already."""
    model = small_llama()
    model.load_state_dict(state)
    model.to(rank_device())
    meshes = dims.build_mesh(rank_device().type)
    split_decoder(decoder_of(model), meshes.tp)
    shard_decoder(decoder_of(model), meshes.fsdp)
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
        for budget, name in itertools.product(BUDGETS, names):
            if name == "llama":
                result = measure_llama(state, ParallelDims(*mesh, world_size=world_size), budget)
            else:
                result = on_mesh(
                    folder_of(name),
                    mesh,
                    world_size,
                    f"protocol.max_seq_len={WINDOW}",
                    f"max_tokens_per_batch={budget}",
                    dataset=f"{__name__}.texts",
                )
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
def found(names, state, device):
    """Results of all ranks, by world size; started when first asked for."""
    cache = {}

    def of(world_size):
        if world_size not in cache:
            cache[world_size] = run_on_ranks(
                world_size, on_all_meshes, world_size, names, state, timeout_s=600, device=device
            )
        return cache[world_size]

    return of


@pytest.fixture(scope="module")
def truth(names, state):
    """Model -> (scored tokens, NLL) by a float64 loop."""
    cache = {}
    for name in names:
        if name == "llama":
            model = small_llama().eval()
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
def test_a_mesh_gives_the_number_of_one_process(found, truth, names, mesh, rtol):
    """Equal counts, and the NLL of a float64 loop to 1e-6, on every rank."""
    results = found(_product(mesh))
    assert all(of_rank == results[0] for of_rank in results)
    for name, budget in itertools.product(names, BUDGETS):
        num_scored, nll, _ = results[0][mesh, name, budget]
        assert num_scored == truth[name][0]
        assert nll == pytest.approx(truth[name][1], rel=rtol)


@pytest.mark.parametrize(
    "mesh",
    [mesh for mesh in ALL if mesh[0] * mesh[1] > 1],
    ids=lambda mesh: "x".join(map(str, mesh)),
)
def test_data_parallelism_changes_no_bit(found, names, mesh):
    """Also on top of cp and tp."""
    small = (1, 1, *mesh[2:])
    here, there = found(_product(mesh))[0], found(_product(small))[0]
    for name, budget in itertools.product(names, BUDGETS):
        assert here[mesh, name, budget] == there[small, name, budget]


def in_dtype(rank, world_size, meshes, dtype):
    """Mesh -> NLL of each document of the embedded student."""
    return {
        mesh: [
            row["nll_nats_sum"]
            for row in on_mesh(
                folder_of("tiny_student"),
                mesh,
                world_size,
                f"protocol.max_seq_len={WINDOW}",
                f"dtype={dtype}",
                dataset=f"{__name__}.texts",
            ).summary.documents.rows()
        ]
        for mesh in meshes
    }


def test_bf16_differs_less_between_meshes_than_from_fp32():
    """Sums over tp are rounded once; their parts rounded too, it would be as much."""
    alone = (1, 1, 1, 1)
    fp32, bf16 = (
        torch.tensor(run_on_ranks(1, in_dtype, 1, [alone], dtype)[0][alone], dtype=torch.float64)
        for dtype in ("fp32", "bf16")
    )
    by_dtype = (bf16 / fp32 - 1).abs().mean()
    assert 1e-4 < by_dtype < 1e-2
    meshes = [(1, 4, 1, 1), (1, 1, 1, 4), (1, 2, 1, 2), (1, 1, 4, 1), (1, 1, 2, 2)]
    found = run_on_ranks(4, in_dtype, 4, meshes, "bf16")[0]
    for mesh, documents in found.items():
        by_mesh = (torch.tensor(documents, dtype=torch.float64) / bf16 - 1).abs().mean()
        assert by_mesh < (0.7 if mesh[2] > 1 else 0.05) * by_dtype, mesh
        if mesh[2:] == (1, 1):
            assert by_mesh == 0


def five_rows(rank, tied):
    """A vocabulary of 5 on four ranks: the last has no row at all."""
    torch.manual_seed(1)
    sizes = {"num_layers": 1, "num_heads": 4, "num_kv_heads": 4, "embed_dim": 16}
    sizes |= {"vocab_size": 5, "intermediate_dim": 6, "max_seq_len": 16}
    model = llama3_2(**sizes, scale_factor=1) if tied else llama2(**sizes)
    for parameter in model.parameters():
        parameter.data.mul_(3)
    rows = [[n % 5 for n in range(length)] for length in (2, 9, 16, 30)]
    reference = copy.deepcopy(model).double().eval()
    count, nll = oracle(reference, [w for row in rows for w in chunks(row, 16)])
    meshes = ParallelDims(tp=4, world_size=4).build_mesh("cpu")
    split_decoder(decoder_of(model), meshes.tp)
    assert len(vocabulary_part(model.tok_embeddings).weight_VD) == (
        0 if rank > 2 else [2, 2, 1][rank]
    )
    texts = [" ".join(map(str, row)) for row in rows]
    total = evaluate(model, WordTokenizer(), texts, max_seq_len=16, meshes=meshes).summary.total
    assert total.num_scored == count
    assert total.nll_nats_sum == pytest.approx(nll, rel=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_more_ranks_than_rows(tied):
    run_on_ranks(4, five_rows, tied)


def biased(rank, world_size):
    """Biases of matrices that are split by rows, which no family of torchtune has."""
    torch.manual_seed(2)
    model = small_llama()
    for layer in model.layers:
        layer.attn.output_proj = torch.nn.Linear(32, 32)
        layer.mlp.w2 = torch.nn.Linear(50, 32)
    meshes = ParallelDims(tp=world_size, world_size=world_size).build_mesh("cpu")
    split_decoder(decoder_of(model), meshes.tp)
    rows = [" ".join(map(str, ids)) for ids in documents(12)]
    result = evaluate(model, WordTokenizer(), rows, max_seq_len=WINDOW, meshes=meshes)
    return result.summary.total.nll_nats_sum


def test_a_bias_is_added_once():
    alone = run_on_ranks(1, biased, 1)[0]
    assert run_on_ranks(2, biased, 2) == [pytest.approx(alone, rel=1e-6)] * 2


def samples():
    """Rows that come as tokens, of which every third does not count."""
    rows = [ids for ids in documents(20) if len(ids) > 2]
    return [{"tokens": ids, "mask": [n % 3 == 0 for n in range(len(ids))]} for ids in rows]


def by_protocol(rank, world_size, mesh):
    """(protocol, data) -> (scored tokens, NLL) of the embedded student."""
    found = {}
    for name, data in itertools.product(RULES, ("texts", "samples")):
        rule = RULES[name]
        if data == "samples" and (rule.separator is not None or rule.opens_with_bos):
            continue
        result = on_mesh(
            folder_of("tiny_student"),
            mesh,
            world_size,
            *(f"protocol.name={name}", "protocol.max_seq_len=48", "max_tokens_per_batch=200"),
            dataset=f"{__name__}.{data}",
        )
        total = result.summary.total
        found[name, data] = total.num_scored, total.nll_nats_sum
    return found


@pytest.mark.parametrize("mesh", [(1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)])
def test_every_protocol_on_a_mesh(mesh):
    """One process is held to other tools and to loops in tests/recipes."""
    alone = run_on_ranks(1, by_protocol, 1, (1, 1, 1, 1))[0]
    assert len(alone) == len(RULES) + 1
    for found in run_on_ranks(2, by_protocol, 2, mesh):
        assert found.keys() == alone.keys()
        for key, (num_scored, nll) in found.items():
            assert num_scored == alone[key][0], key
            assert nll == pytest.approx(alone[key][1], rel=0 if mesh[1] > 1 else 1e-6), key
