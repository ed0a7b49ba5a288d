"""The planner's formulas against what ranks hold and receive, and its table."""

import itertools

import pytest
import torch
import torch.distributed as dist
from helpers import tokens_of
from ranks import run_on_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from ppl_eval import UserError, compat
from ppl_eval.checkpoint.config_json import NOTHING
from ppl_eval.commands.estimate import estimate
from ppl_eval.commands.plan import meshes, plan
from ppl_eval.config.command_line import load
from ppl_eval.model.build import build_on_meta
from ppl_eval.model.torchtune_decoder import decoder_of
from ppl_eval.parallel.dims import Groups, ParallelDims
from ppl_eval.parallel.shard import shard_decoder
from ppl_eval.parallel.tensor import split_decoder
from ppl_eval.score.batch import Batch
from ppl_eval.score.reader import Reader, evaluating
from ppl_eval.score.scoring import Scorer

MESHES = {
    2: [(1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)],
    4: [(1, 2, 2, 1), (1, 1, 2, 2), (1, 2, 1, 2), (1, 1, 4, 1)],
}
DTYPES = [torch.float32, torch.bfloat16]
ROWS, LENGTH, VOCABULARY = 4, 64, 1000


def node(vocabulary):
    return {
        "_component_": "torchtune.models.llama3_2.llama3_2",
        "vocab_size": vocabulary,
        "num_layers": 4,
        "num_heads": 8,
        "num_kv_heads": 4,
        "embed_dim": 256,
        "intermediate_dim": 352,
        "max_seq_len": 4096,
        "scale_factor": 1,
    }


def received(function):
    """Bytes that this rank receives from others, by kind of collective, in rings."""
    found = {"allreduce_": 0.0, "_allgather_base_": 0.0}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "c10d":
                leaves = torch.utils._pytree.tree_leaves(args)
                tensor = next(leaf for leaf in leaves if torch.is_tensor(leaf))
                group = next(leaf for leaf in leaves if isinstance(leaf, torch.ScriptObject))
                ranks = dist.ProcessGroup.unbox(group).size()
                size = tensor.numel() * tensor.element_size() * (ranks - 1) / ranks
                name = func.overloadpacket.__name__
                found[name] += 2 * size if name == "allreduce_" else size
            return func(*args, **(kwargs or {}))

    with Watch():
        function()
    return found


def measure(rank, world_size):
    """For each mesh and dtype: bytes of this rank's parameters, bytes received by a step, plan."""
    found = []
    for mesh, dtype in itertools.product(MESHES[world_size], DTYPES):
        dims = ParallelDims(*mesh, world_size=world_size)
        meshes = dims.build_mesh("cpu")
        model = build_on_meta(node(VOCABULARY), dtype, NOTHING).eval()
        decoder = decoder_of(model)
        planned = estimate(decoder, dims, ROWS * LENGTH)
        split_decoder(decoder, meshes.tp)
        shard_decoder(decoder, meshes.fsdp)
        model.to_empty(device="cpu")
        compat.rebuild_rope(model)
        num_bytes = 0
        for parameter in model.parameters():
            shard = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            shard.data.normal_(std=0.05)
            num_bytes += shard.numel() * shard.element_size()
        tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH))
        batch = Batch(tokens, tokens_of(tokens, torch.ones_like(tokens).bool()))
        readers = [Reader(model, decoder, Groups.of(meshes))]
        scorer = Scorer(readers, torch.device("cpu"))
        with evaluating(readers):
            scorer.score(batch)  # gathers embedding and head, once in a run
            traffic = received(lambda scorer=scorer, batch=batch: scorer.score(batch))
        found.append((mesh, num_bytes, traffic, planned))
    return found


@pytest.mark.parametrize("world_size", MESHES)
def test_parameters_and_traffic_are_what_ranks_hold_and_receive(world_size):
    for ranks in zip(*run_on_ranks(world_size, measure, world_size), strict=True):
        mesh, _, traffic, planned = ranks[0]
        assert max(num_bytes for _, num_bytes, _, _ in ranks) == planned.parameters, mesh
        assert traffic["allreduce_"] == pytest.approx(planned.tp_traffic, rel=1e-12), mesh
        gathered = planned.fsdp_traffic + planned.cp_traffic
        assert traffic["_allgather_base_"] == pytest.approx(gathered, rel=1e-12), mesh


def test_the_table_has_all_that_fit_the_least_communication_first():
    args = ["--config", "llama3_1/70B_ppl_eval", "device=cuda"]
    lines = plan(load(args), 8, 24 * 1024).splitlines()
    assert lines[0].startswith(
        "torchtune.models.llama3_1.llama3_1_70b in bf16 on cuda, batches of 8,192"
    )
    rows = [line.split() for line in lines[6:]]
    assert 0 < len(rows) < 20
    assert lines[1].startswith(f"{len(rows)} of 20 meshes on 8 processes fit into 24,576 MiB")
    per_batch = [float(row[-1].replace(",", "")) for row in rows]
    assert per_batch == sorted(per_batch)
    assert all(float(row[8].replace(",", "")) <= 24 * 1024 for row in rows)
    # a replica on every device communicates nothing
    roomy = plan(load(args), 8, 200 * 1024).splitlines()
    assert roomy[6].split()[:4] == ["8", "1", "1", "1"]
    assert roomy[6].split()[-4:] == ["0"] * 4
    assert all(len(line) <= 80 for line in lines[3:])


def test_the_budget_of_a_batch_is_the_device_s():
    """One window of 512 tokens, 1,024 positions on a CPU and 8,192 on a GPU, or what is given."""
    args = ["--config", "llama3_2/1B_ppl_eval", "protocol.max_seq_len=512"]
    for given, positions in (
        (["device=cpu"], "cpu, batches of 1,024 "),
        (["device=cuda:1"], "cuda, batches of 8,192 "),
        (["device=cpu", "max_tokens_per_batch=4000"], "cpu, batches of 4,000 "),
        (["device=cpu", "max_tokens_per_batch=100"], "cpu, batches of 512 "),
    ):
        assert positions in plan(load([*args, *given]), 1, 80 * 1024)


def test_a_teacher_lies_on_the_same_mesh():
    """Of the 8B's 8 kv heads and the 1B's: parameters of both, exactly."""
    args = ["--config", "llama3_2/8B_to_1B_KD_ppl_eval", "device=cuda"]
    lines = plan(load(args), 8, 80 * 1024).splitlines()
    assert "llama3_2_1b in bf16 on cuda, batches of 8,192 positions, teacher " in lines[0]
    assert lines[0].endswith("llama3_1_8b in bf16 on the same mesh")
    parameters = 8_030_261_248 + 1_235_814_400  # as the publishers have them
    rows = {tuple(line.split()[:4]): line.split()[4:] for line in lines[6:]}
    whole = rows["8", "1", "1", "1"]
    assert float(whole[0].replace(",", "")) == pytest.approx(2 * parameters / 2**20, abs=1)
    teacher = load(["--config", "llama3_1/8B_ppl_eval", "device=cuda"])
    alone = plan(teacher, 8, 80 * 1024).splitlines()
    alone = {tuple(line.split()[:4]): line.split()[4:] for line in alone[6:]}
    for degrees, row in rows.items():
        assert float(row[4].replace(",", "")) > float(alone[degrees][4].replace(",", ""))


def test_nothing_fits():
    with pytest.raises(UserError) as error:
        plan(load(["--config", "llama3_1/70B_ppl_eval", "device=cuda"]), 2, 16 * 1024)
    assert str(error.value).startswith(
        "torchtune.models.llama3_1.llama3_1_70b in bf16 on cuda, batches of 8,192 positions: none"
        " of 4 meshes on 2 processes fits into 16,384 MiB; dp_replicate=1 dp_shard=1 cp=1 tp=2"
        " needs least, "
    )
    with pytest.raises(UserError, match="both are above 0"):
        plan(load(["--config", "llama3_1/70B_ppl_eval"]), 0, 1024)


def test_meshes_that_the_heads_do_not_allow_are_left_out():
    with torch.device("meta"):
        model = build_on_meta({**node(11), "num_kv_heads": 2}, torch.float32, NOTHING)
    found = list(meshes(decoder_of(model), 8))
    assert {dims.tp for dims in found} == {1, 2}
    assert len(found) == len(set(found)) == 10 + 6
