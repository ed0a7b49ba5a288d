"""What each axis communicates, in order and in size: counted, not estimated."""

import torch
import torch.distributed as dist
from helpers import ByteTokenizer, nll_of, sharp_llama
from ranks import run_on_ranks
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from ppl_eval import evaluate
from ppl_eval.metrics.fidelity import SUMS
from ppl_eval.model.torchtune_decoder import decoder_of
from ppl_eval.parallel.dims import ParallelDims
from ppl_eval.parallel.shard import shard_decoder
from ppl_eval.parallel.tensor import split_decoder

LAYERS, DIM, KV_HEADS, HEAD_DIM, VOCABULARY = 2, 64, 2, 16, 259


def texts():
    return ["the cat sat on the mat, " * (n % 7) + "x" * (n % 5 + 1) for n in range(40)]


def split(tied=True, **degrees):
    model = sharp_llama(VOCABULARY, tied=tied)
    meshes = ParallelDims(**degrees, world_size=dist.get_world_size()).build_mesh("cpu")
    split_decoder(decoder_of(model), meshes.tp)
    shard_decoder(decoder_of(model), meshes.fsdp)
    return model, meshes


def measure(model, meshes, teacher=None):
    return evaluate(
        model,
        ByteTokenizer(),
        texts(),
        max_seq_len=32,
        max_tokens_per_batch=128,
        meshes=meshes,
        teacher=teacher,
    )


def calls_of(rank, degrees, with_teacher=False):
    """(collectives of a whole run, [(rows, positions, scored tokens)] of its batches)."""
    calls = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "c10d":
                tensors = [t for t in torch.utils._pytree.tree_leaves(args) if torch.is_tensor(t)]
                calls.append((func.overloadpacket.__name__, tensors[0].numel()))
            return func(*args, **(kwargs or {}))

    model, meshes = split(**degrees)
    teacher = split(tied=False, **degrees)[0] if with_teacher else None
    with Watch():
        result = measure(model, meshes, teacher)
    workload, shapes = result.workload, []
    for number in range(len(workload.plan.batches)):
        batch = workload.batch(number)
        shapes.append((*batch.inputs_BT.shape, len(batch.tokens)))
    return calls, shapes, len(workload.windows)


BEFORE = [("allreduce_", n) for n in (2, 6 * 40)]


def after(num_windows):
    return [("allreduce_", n) for n in (1, num_windows, num_windows, 2 * num_windows, 48)]


def test_tensor_parallel():
    """Embedding: one sum. A layer: two. The head: three numbers for each scored token."""
    for calls, shapes, num_windows in run_on_ranks(2, calls_of, {"tp": 2}):
        steps = []
        for rows, positions, scored in shapes:
            hidden = ("allreduce_", rows * positions * DIM)
            steps += [hidden] * (1 + 2 * LAYERS)
            steps += [("allreduce_", scored), ("allreduce_", 2 * scored)]
        assert len(shapes) > 10
        assert calls == [*BEFORE, *steps, *after(num_windows)]


def test_context_parallel():
    """A layer gathers keys and values once, with the heads that the model has of them."""
    for calls, shapes, num_windows in run_on_ranks(2, calls_of, {"cp": 2, "dp_shard": 1}):
        gathers = [size for name, size in calls if name == "_allgather_base_"]
        padded = [(rows, -(-positions // 4) * 4) for rows, positions, _ in shapes]
        layer = [2 * rows * KV_HEADS * positions * HEAD_DIM for rows, positions in padded]
        # FSDP2 shares the parameters over cp: the root's once, a layer's before it runs
        kv = [size for size in gathers if size in set(layer)]
        assert kv == [size for size in layer for _ in range(LAYERS)]
        assert len(gathers) == len(kv) + 1 + LAYERS * len(shapes)
        reductions = [call for call in calls if call[0] == "allreduce_"]
        assert reductions == [*BEFORE, *after(num_windows)]
        assert len(reductions) + len(gathers) == len(calls)


def test_beside_a_teacher():
    """The heads exchange three times for each chunk of scored tokens: the five largest of each part
    (with ids, the target's logit and what one model lacks), two sums, five sums. Afterwards the
    teacher reads one batch in sixteen twice, for the noise."""
    for calls, shapes, num_windows in run_on_ranks(2, calls_of, {"tp": 2}, True):
        steps, noise = [], []
        for number, (rows, positions, scored) in enumerate(shapes):
            hidden = ("allreduce_", rows * positions * DIM)
            pair = [("_allgather_base_", 2 * 2 * 12 * scored)]
            pair += [("allreduce_", 2 * scored), ("allreduce_", 5 * scored)]
            steps += [hidden] * 2 * (1 + 2 * LAYERS) + pair
            if number % 16 == 0:
                noise += [hidden] * 2 * (1 + 2 * LAYERS) + pair
        steps += noise
        assert len(shapes) > 16
        totals = [1, num_windows, num_windows, len(SUMS) * num_windows, 24 * 5]
        profiles = (13 * 200 + 2) + (2000 + 2) + 5 * 10
        assert calls[: len(BEFORE) + len(steps)] == [*BEFORE, *steps]
        ends = calls[len(BEFORE) + len(steps) :]
        assert [size for name, size in ends if name == "allreduce_"] == [
            *totals,
            profiles,
            len(SUMS) + 1,
        ]
        assert [call for call in ends if call[0] != "allreduce_"] == [("_allgather_base_", 140)]


def debug_counts(rank, tied):
    model, _ = split(tied=tied, tp=2)
    for layer in model.layers:  # CommDebugMode loses its way in a module that is called twice
        for owner, name in ((layer.attn, "pos_embeddings"), (layer.mlp, "activation")):
            forward = getattr(owner, name).forward
            delattr(owner, name)
            setattr(owner, name, forward)
    batch = torch.arange(60).view(2, 30) % VOCABULARY
    with CommDebugMode() as mode, torch.no_grad():
        nll_of(model, batch[:, :-1], batch[:, 1:], torch.ones(2, 29, dtype=torch.bool))
    return {str(op): n for op, n in mode.get_comm_counts().items()}


def test_no_rank_ever_has_all_logits():
    """CommDebugMode sees reductions alone, tied and untied."""
    for tied in (True, False):
        for counts in run_on_ranks(2, debug_counts, tied):
            assert counts == {"c10d.allreduce_": 1 + 2 * LAYERS + 2}
