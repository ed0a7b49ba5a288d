"""Meshes, and the promise: the same bits for any number of data-parallel ranks."""

import math

import pytest
import torch
import torch.distributed as dist
from helpers import BigramTable, ByteTokenizer, WordTokenizer, sharp_llama
from ranks import rank_device, run_on_ranks

from ppl_eval import Perplexity, UserError, evaluate
from ppl_eval.model.stored import stored_weights
from ppl_eval.model.torchtune_decoder import decoder_of
from ppl_eval.parallel.dims import ParallelDims
from ppl_eval.parallel.shard import shard_decoder
from ppl_eval.parallel.tensor import split_decoder


def texts(count):
    """Documents of very uneven lengths; the first is unlike the others."""
    rows = [
        ("zq" * 40) if n == 0 else "the cat sat on the mat, " * (n % 7) + "x" * (n % 5 + 1)
        for n in range(count)
    ]
    return rows


def measure(rank, counts, dp_replicate, tied):
    """Per-window NLL of several corpora on this mesh; the same on every rank."""
    model = sharp_llama(259, tied=tied).to(rank_device())
    world_size = dist.get_world_size()
    dims = ParallelDims(dp_replicate=dp_replicate, world_size=world_size)
    meshes = dims.build_mesh(rank_device().type)
    shard_decoder(decoder_of(model), meshes.fsdp)
    found = []
    for count in counts:
        result = evaluate(
            model,
            ByteTokenizer(),
            texts(count),
            max_seq_len=32,
            max_tokens_per_batch=128,
            group=meshes.batch.get_group(),
        )
        total = result.summary.total
        found.append((result.ledger.nll_nats_sum.tolist(), total.num_scored, total.nll_nats_sum))
    return found


COUNTS = [1, 2, 3, 5, 7, 101]


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def tied(request):
    return request.param


@pytest.fixture(scope="module")
def alone(tied, device):
    """One process, no sharding: what every mesh must repeat bit by bit."""
    return run_on_ranks(1, measure, COUNTS, 1, tied, device=device)[0]


@pytest.mark.parametrize(("world_size", "dp_replicate"), [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
def test_every_dp_mesh_gives_the_same_bits(alone, tied, device, world_size, dp_replicate):
    """1, 2, 3, 5, 7 and 101 documents on up to 4 ranks: nothing lost, repeated or hung."""
    for found in run_on_ranks(world_size, measure, COUNTS, dp_replicate, tied, device=device):
        assert found == alone
    for count, (_, num_scored, _) in zip(COUNTS, alone, strict=True):
        assert num_scored == sum(len(text.encode()) for text in texts(count))


def stored(rank, degrees):
    model = sharp_llama(259)
    meshes = ParallelDims(**degrees, world_size=dist.get_world_size()).build_mesh("cpu")
    split_decoder(decoder_of(model), meshes.tp)
    shard_decoder(decoder_of(model), meshes.fsdp)
    texts = ["the cat sat on the mat"]
    return evaluate(model, ByteTokenizer(), texts, max_seq_len=32, meshes=meshes).weights


@pytest.mark.parametrize("degrees", [{"dp_shard": 2}, {"tp": 2}, {"dp_shard": 2, "tp": 2}])
def test_the_weights_are_those_of_all_shards(degrees):
    num_ranks = math.prod(degrees.values())
    assert (
        run_on_ranks(num_ranks, stored, degrees) == [stored_weights(sharp_llama(259))] * num_ranks
    )


def train_between(rank):
    """An evaluation, a change of the shards, and another one; then the same change first."""
    found = []
    for change_first in (False, True):
        model = sharp_llama(259)
        meshes = ParallelDims(world_size=2).build_mesh("cpu")
        shard_decoder(decoder_of(model), meshes.fsdp)
        if not change_first:
            evaluate(model, ByteTokenizer(), texts(4), max_seq_len=32)
        with torch.no_grad():
            model.output.weight.mul_(0.5)
        after = evaluate(model, ByteTokenizer(), texts(4), max_seq_len=32)
        found.append(after.summary.total.nll_nats_sum)
        assert type(model.output.weight.data).__name__ == "DTensor"
    loss = model(torch.tensor([[5, 6, 7]])).sum()
    loss.backward()
    evaluate(model, ByteTokenizer(), texts(4), max_seq_len=32)
    torch.optim.SGD(model.parameters(), lr=1e-9).step()
    model(torch.tensor([[5, 6, 7]])).sum().backward()
    return found


def test_an_evaluation_in_a_training_loop_reads_the_weights_of_now():
    for stale, fresh in run_on_ranks(2, train_between):
        assert stale == fresh


def first_documents(rank):
    found = []
    for documents, limit in ((texts(9), 3), (texts(3), None)):
        result = evaluate(
            sharp_llama(259), ByteTokenizer(), documents, max_seq_len=32, max_documents=limit
        )
        found.append(list(result.summary.documents.rows()))
    return found


def test_the_first_documents_are_the_corpus_s_not_each_ranks():
    """On two ranks, max_documents: 3 means documents 0, 1 and 2 of the whole."""
    for limited, alone in run_on_ranks(2, first_documents):
        assert limited == alone


def coordinates(rank, degrees):
    meshes = ParallelDims(**degrees, world_size=dist.get_world_size()).build_mesh("cpu")
    names = ("batch", "fsdp", "loss", "cp", "tp")
    return {name: getattr(meshes, name).mesh.tolist() for name in names}


def test_meshes_by_purpose():
    """dp_replicate 1, dp_shard 2, cp 1, tp 2 of 4 ranks: tp is innermost."""
    found = run_on_ranks(4, coordinates, {"dp_shard": 2, "tp": 2})
    assert [f["tp"] for f in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    for purpose in ("batch", "fsdp", "loss"):
        assert [f[purpose] for f in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [f["cp"] for f in found] == [[0], [1], [2], [3]]


def test_replicas_and_context_in_the_right_purposes():
    found = run_on_ranks(4, coordinates, {"dp_replicate": 2, "cp": 2})
    assert [f["batch"] for f in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [f["fsdp"] for f in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [f["loss"] for f in found] == [[0, 1, 2, 3]] * 4
    assert [f["cp"] for f in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def timeouts(rank):
    """Seconds that the group of each purpose waits for a rank."""
    meshes = ParallelDims(dp_shard=1, cp=2, tp=2, world_size=4).build_mesh("cpu", timeout_s=77)
    names = ("batch", "fsdp", "loss", "cp", "tp")
    groups = [getattr(meshes, name).get_group() for name in names]
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    return [backend.options._timeout.total_seconds() for backend in backends]


def test_groups_of_a_mesh_do_not_wait_for_half_an_hour():
    """torch gives a new group its own default, whatever the default group was started with."""
    assert run_on_ranks(4, timeouts) == [[77] * 5] * 4


def collectives(rank, dp_replicate):
    """What a whole evaluation communicates: name of each collective and elements of its tensors."""
    from torch.utils._python_dispatch import TorchDispatchMode

    model = sharp_llama(259)
    meshes = ParallelDims(dp_replicate=dp_replicate, world_size=2).build_mesh("cpu")
    shard_decoder(decoder_of(model), meshes.fsdp)
    calls = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "c10d":
                tensors = [t for t in torch.utils._pytree.tree_leaves(args) if torch.is_tensor(t)]
                calls.append((func.overloadpacket.__name__, sum(t.numel() for t in tensors)))
            return func(*args, **(kwargs or {}))

    with Watch():
        result = evaluate(
            model, ByteTokenizer(), texts(40), max_seq_len=32, max_tokens_per_batch=64
        )
    workload = result.workload
    return calls, len(workload.windows), workload.plan.num_steps(2)


def test_replicas_communicate_before_and_after_but_in_no_step():
    """Counts of tokens before the run; after it whether a rank has failed, and the ledger."""
    for calls, num_windows, num_steps in run_on_ranks(2, collectives, 2):
        assert num_steps > 20
        sizes = [2, 6 * 40, 1, num_windows, num_windows, 2 * num_windows, 48]
        assert calls == [("allreduce_", size) for size in sizes]


def test_shards_only_gather_parameters_in_a_step():
    """The root once in the whole run, each of the two layers once a step."""
    for calls, _, num_steps in run_on_ranks(2, collectives, 1):
        names = [name for name, _ in calls]
        assert names.count("allreduce_") == 7
        gathers = [name for name in names if name != "allreduce_"]
        assert set(gathers) == {"_allgather_base_"}
        assert len(gathers) == 1 + 2 * num_steps


def table_on_ranks(rank):
    log_probs = torch.full((5, 5), math.log(0.5) - 30.0)
    log_probs[4, 4] = -3.0
    log_probs[2, 2] = -1.0
    documents = [" ".join(["4"] * 11)] + [" ".join(["2"] * 11)] * 4
    return evaluate(
        BigramTable(log_probs.log_softmax(dim=1)), WordTokenizer(), documents, max_seq_len=16
    ).summary.total.nll_nats_sum


def test_a_plain_module_on_all_ranks():
    alone = run_on_ranks(1, table_on_ranks)
    assert set(run_on_ranks(4, table_on_ranks)) == set(alone)


def sync_metric(rank):
    metric = Perplexity().update(float(rank + 1), rank)
    synced = [metric.sync(), metric.sync()]
    return [(float(m.nll_nats_sum), int(m.num_tokens)) for m in (*synced, metric)]


def test_sync_adds_the_ranks_and_counts_none_twice():
    for rank, found in enumerate(run_on_ranks(4, sync_metric)):
        assert found == [(10.0, 6), (10.0, 6), (rank + 1.0, rank)]


def different_corpora(rank):
    try:
        evaluate(sharp_llama(259), ByteTokenizer(), texts(3 + rank), max_seq_len=32)
    except UserError as error:
        return str(error)


def test_ranks_that_see_different_corpora_are_told():
    for message in run_on_ranks(2, different_corpora):
        assert "the ranks see corpora of 3 to 4 documents" in message


def forget(rank):
    """Every rank encodes again what it neither counted nor kept."""
    from ppl_eval.data import encode

    encode._KEPT_TOKENS = 50
    encode._SHARE = 2
    result = evaluate(sharp_llama(259), ByteTokenizer(), texts(30), max_seq_len=32)
    return result.summary.total.nll_nats_sum, result.workload.corpus.fingerprint


def test_ids_that_were_forgotten_come_back():
    alone = run_on_ranks(1, forget)
    assert set(run_on_ranks(3, forget)) == set(alone)


def message_of(function):
    with pytest.raises(UserError) as error:
        function()
    return str(error.value)


def faults_of_one_rank(rank):
    """A NaN, and a token id that the model lacks, in what only one rank reads."""
    model = sharp_llama(259)
    with torch.no_grad():
        model.tok_embeddings.weight[ord("q") + 3] = math.nan
    documents = ["aaa"] * 30 + ["qq"]
    loss = message_of(
        lambda: evaluate(model, ByteTokenizer(), documents, max_seq_len=8, max_tokens_per_batch=9)
    )
    words = ["1 2"] * 100 + ["3 300"]
    ids = message_of(lambda: evaluate(sharp_llama(259), WordTokenizer(), words, max_seq_len=8))
    return loss, ids


def test_what_one_rank_finds_all_ranks_raise():
    """In a training loop nobody else ends the others, which would wait for it."""
    first, second = run_on_ranks(2, faults_of_one_rank)
    assert first == second
    assert "the loss is nan in document 30" in first[0]
    assert "document 100 has the token id 300, but" in first[1]


def without_meshes(rank):
    model = sharp_llama(259)
    split_decoder(decoder_of(model), ParallelDims(tp=2, world_size=2).build_mesh("cpu").tp)
    return message_of(lambda: evaluate(model, ByteTokenizer(), texts(8), max_seq_len=32))


def test_a_split_model_needs_its_meshes():
    """Else the ranks would add up hidden states of different texts."""
    for message in run_on_ranks(2, without_meshes):
        assert "the model is split over tp" in message
        assert "meshes=..." in message


def with_cast_outputs(rank, output_dtype):
    """NLL, and KL to a teacher, of models that a training loop has wrapped by itself."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(output_dtype=output_dtype)
    models = [sharp_llama(259, seed=seed) for seed in (0, 1)]
    for model in models:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    texts = ["the cat sat on the mat " * n for n in range(1, 6)]
    options = {"max_seq_len": 32, "max_tokens_per_batch": 64}
    alone = evaluate(models[0], ByteTokenizer(), texts, **options)
    beside = evaluate(models[0], ByteTokenizer(), texts, **options, teacher=models[1])
    kl = float(beside.ledger.column("kl_teacher_student").sum())
    return alone.summary.total.nll_nats_sum, beside.summary.total.nll_nats_sum, kl


def test_what_fsdp2_casts_is_not_the_loss():
    """A policy's output_dtype rounds what a model returns; no result goes that way."""
    plain = run_on_ranks(2, with_cast_outputs, None)
    for found in run_on_ranks(2, with_cast_outputs, torch.bfloat16):
        assert found == plain[0]
        assert found[0] == pytest.approx(found[1], rel=1e-6)
