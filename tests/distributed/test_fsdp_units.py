"""Models that a training loop has sharded in its own way, as torchtune's recipes do."""

from functools import partial

import pytest
from helpers import ByteTokenizer, sharp_llama
from ranks import rank_device, run_on_ranks
from torchtune import training

from ppl_eval import evaluate

TEXTS = ["the cat sat on the mat, " * n + "x" * n for n in (1, 7, 2, 3, 1)]
OPTIONS = {"max_seq_len": 32, "max_tokens_per_batch": 33}
"""An odd number of batches: one rank of two has none in the last step."""


def sharded(names, tied, seed=0):
    """As torchtune's recipes shard a model with ``custom_sharded_layers: names``."""
    model = sharp_llama(259, tied=tied, seed=seed).to(rank_device())
    conditions = [partial(training.get_shard_conditions, names_to_match=names)]
    training.shard_model(model, conditions, cpu_offload=False)
    return model


def found(model, teacher=None):
    result = evaluate(model, ByteTokenizer(), TEXTS, **OPTIONS, teacher=teacher)
    assert len(result.workload.plan.batches) % 2 == 1
    kl = 0.0 if teacher is None else float(result.ledger.column("kl_teacher_student").sum())
    return result.summary.total.num_scored, result.summary.total.nll_nats_sum, kl


def on_ranks(rank, names, tied):
    return found(sharded(names, tied)), found(sharded(names, tied), sharded(names, tied, seed=1))


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
def test_a_head_that_is_an_fsdp_unit_of_its_own_is_gathered_once_a_step(names, tied):
    """It was gathered for each chunk of tokens, of which the ranks have different numbers."""
    expected = in_one_process(tied)
    for of_rank in run_on_ranks(2, on_ranks, names, tied):
        for ours, single in zip(of_rank, expected, strict=True):
            assert ours[0] == single[0]
            assert ours[1:] == pytest.approx(single[1:], rel=1e-6)
