"""The planner's formulas against what torch allocates and what ranks send."""

import itertools

import pytest
import torch
import torch.distributed as dist
from helpers import tokens_of
from ranks import run_on_ranks
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from ppl_eval import UserError, compat
from ppl_eval.checkpoint.config_json import NOTHING
from ppl_eval.commands import plan as planner
from ppl_eval.model.build import build_on_meta
from ppl_eval.model.torchtune_decoder import decoder_of
from ppl_eval.parallel.dims import ParallelDims
from ppl_eval.parallel.groups import Groups
from ppl_eval.parallel.shard import shard_decoder
from ppl_eval.parallel.tensor import split_decoder
from ppl_eval.score.batch import Batch
from ppl_eval.score.reader import Reader, evaluating
from ppl_eval.score.scoring import Scorer

MESHES = {
    1: [(1, 1, 1, 1)],
    2: [(1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)],
    4: [(1, 2, 2, 1), (1, 1, 2, 2), (1, 2, 1, 2), (1, 1, 4, 1)],
}
CASES = {
    "activations": (1000, torch.float32, 8, 512),
    "activations in bf16": (1000, torch.bfloat16, 8, 512),
    "one long window": (1000, torch.float32, 1, 4096),
    "the head": (20_000, torch.float32, 8, 256),
    "the head in bf16": (20_000, torch.bfloat16, 8, 256),
    "layers": (100, torch.float32, 1, 32),
    "the root": (20_000, torch.float32, 1, 32),
}
"""What the peak is made of: rows of the vocabulary, dtype, rows and positions of the batch."""


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


def allocated(function):
    """Most bytes that ``function`` has from torch's allocator at a time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = profiler.profiler.kineto_results.events()
    memory = sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns())
    return max(itertools.accumulate(e.nbytes() for e in memory))


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


def measure(rank, world_size, vocabulary, dtype, num_rows, length):
    """(mesh, bytes of parameters, most bytes of a step, bytes received by a step, estimate)."""
    rows = []
    for mesh in MESHES[world_size]:
        dims = ParallelDims(*mesh, world_size=world_size)
        meshes = dims.build_mesh("cpu")
        model = build_on_meta(node(vocabulary), dtype, NOTHING).eval()
        planned = planner.estimate(planner.Sizes.of(model), dims, num_rows * length)
        split_decoder(decoder_of(model), meshes.tp)
        shard_decoder(decoder_of(model), meshes.fsdp)
        model.to_empty(device="cpu")
        compat.rebuild_rope(model)
        parameters = 0
        for parameter in model.parameters():
            shard = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            shard.data.normal_(std=0.05)
            parameters += shard.numel() * shard.element_size()
        tokens = torch.randint(0, vocabulary, (num_rows, length))
        every = torch.ones_like(tokens).bool()
        whole = Batch(tokens, tokens_of(tokens, every))
        readers = [Reader(model, decoder_of(model), Groups.of(meshes))]

        def step(readers=readers, whole=whole):
            with evaluating(readers):
                Scorer(readers, torch.device("cpu")).score(whole)

        first = allocated(step)
        rows.append((mesh, parameters, first, received(step), planned))
    return rows


def measure_all(rank, world_size):
    return [measure(rank, world_size, *case) for case in CASES.values()]


@pytest.mark.parametrize("world_size", MESHES)
def test_memory_and_traffic(world_size):
    of_ranks = run_on_ranks(world_size, measure_all, world_size)
    for case, *of_case in zip(CASES, *of_ranks, strict=True):
        for rows in zip(*of_case, strict=True):
            check(case, rows, world_size)


def check(case, rows, world_size):
    """One mesh: what its ranks measured against its plan."""
    mesh, _, _, traffic, planned = rows[0]
    assert max(row[1] for row in rows) == planned.parameters
    # the least, since gloo's threads may still hold what they have just added up or gathered; and
    # the bit that an allocator and its users need for everything small
    most = min(row[2] for row in rows)
    rest = planned.total - planned.parameters
    masks, length = 0.0, CASES[case][3]
    if planned.dims.cp > 1:  # only CPUs need them: of 512 queries at most, as bools and as floats
        masks = 5 * min(512, length / (2 * planned.dims.cp)) * length
    assert 0.8 * rest < most < 1.15 * (rest + masks) + 2**19, (case, mesh, most, rest)
    assert traffic["allreduce_"] == pytest.approx(planned.tp_traffic, rel=1e-6), (case, mesh)
    gathered = planned.fsdp_traffic + planned.cp_traffic
    assert traffic["_allgather_base_"] == pytest.approx(gathered, rel=1e-2), (case, mesh)


def test_the_table_has_all_that_fit_the_least_communication_first():
    args = ["--config", "llama3_1/70B_ppl_eval", "device=cuda"]
    lines = planner.describe(args, 8, 24 * 1024).splitlines()
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
    roomy = planner.describe(args, 8, 200 * 1024).splitlines()
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
        assert positions in planner.describe([*args, *given], 1, 80 * 1024)


def test_a_teacher_lies_on_the_same_mesh():
    """Of the 8B's 8 kv heads and the 1B's: parameters of both, exactly."""
    args = ["--config", "llama3_2/8B_to_1B_KD_ppl_eval", "device=cuda"]
    lines = planner.describe(args, 8, 80 * 1024).splitlines()
    assert "llama3_2_1b in bf16 on cuda, batches of 8,192 positions, beside " in lines[0]
    assert lines[0].endswith("llama3_1_8b in bf16 on the same mesh")
    parameters = 8_030_261_248 + 1_235_814_400  # as the publishers have them
    rows = {tuple(line.split()[:4]): line.split()[4:] for line in lines[6:]}
    whole = rows["8", "1", "1", "1"]
    assert float(whole[0].replace(",", "")) == pytest.approx(2 * parameters / 2**20, abs=1)
    alone = planner.describe(
        ["--config", "llama3_1/8B_ppl_eval", "device=cuda"], 8, 80 * 1024
    ).splitlines()
    alone = {tuple(line.split()[:4]): line.split()[4:] for line in alone[6:]}
    for degrees, row in rows.items():
        assert float(row[4].replace(",", "")) > float(alone[degrees][4].replace(",", ""))


def test_nothing_fits():
    with pytest.raises(UserError) as error:
        planner.describe(["--config", "llama3_1/70B_ppl_eval", "device=cuda"], 2, 16 * 1024)
    assert str(error.value).startswith(
        "torchtune.models.llama3_1.llama3_1_70b in bf16 on cuda, batches of 8,192 positions: none"
        " of 4 meshes on 2 processes fits into 16,384 MiB; dp_replicate=1 dp_shard=1 cp=1 tp=2"
        " needs least, "
    )
    with pytest.raises(UserError, match="both are above 0"):
        planner.describe(["--config", "llama3_1/70B_ppl_eval"], 0, 1024)


def test_meshes_that_the_heads_do_not_allow_are_left_out():
    with torch.device("meta"):
        model = build_on_meta({**node(11), "num_kv_heads": 2}, torch.float32, NOTHING)
    found = list(planner.meshes(model, 8))
    assert {dims.tp for dims in found} == {1, 2}
    assert len(found) == len(set(found)) == 10 + 6
