"""The plan: nothing lost, nothing repeated, equal steps, the same batches for any ranks."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ppl_eval.data.plan import largest_budget_for, make_plan
from ppl_eval.data.protocol import Protocol

lengths = st.lists(st.integers(0, 120), min_size=1, max_size=40)


def plan_of(lengths, max_tokens_per_batch, bos_id=1):
    windows = Protocol(33, None, bos_id).windows(np.asarray(lengths))
    plan = make_plan(windows, max_tokens_per_batch=max_tokens_per_batch)
    return windows, plan


@given(lengths, st.integers(1, 200), st.integers(1, 9))
def test_every_window_runs_once_whatever_the_number_of_ranks(lengths, budget, num_ranks):
    windows, plan = plan_of(lengths, budget)
    steps = plan.num_steps(num_ranks)
    of_rank = [list(plan.batches_of(rank, num_ranks)) for rank in range(num_ranks)]
    assert {len(batches) for batches in of_rank} == {steps}
    runs = [batch for batches in of_rank for batch in batches]
    seen = np.concatenate([plan.batches[b] for b in runs if b is not None] or [np.empty(0, int)])
    assert sorted(seen.tolist()) == list(range(len(windows)))
    idle = [b is None for b in runs]
    assert sum(idle) < num_ranks
    # a rank without a batch has none in the last step only
    assert all(batch is not None for batches in of_rank for batch in batches[:-1])


@given(lengths, st.integers(1, 9), st.integers(2, 20))
def test_a_sample_takes_one_batch_in_so_many_once(lengths, num_ranks, every):
    _, plan = plan_of(lengths, 1)
    of_rank = [list(plan.batches_of(rank, num_ranks, every)) for rank in range(num_ranks)]
    assert len({len(batches) for batches in of_rank}) == 1
    found = sorted(batch for batches in of_rank for batch in batches if batch is not None)
    assert found == [number for number in range(len(plan.batches)) if number % every == 0]
    assert sum(map(len, of_rank)) - len(found) < num_ranks


@given(lengths, st.integers(1, 200), st.sampled_from([None, 1]))
def test_batches_keep_to_the_budget_unless_one_window_exceeds_it(lengths, budget, bos_id):
    windows, plan = plan_of(lengths, budget, bos_id)
    inputs = windows.num_tokens + (bos_id is not None) - 1
    for batch, positions in zip(plan.batches, plan.num_positions, strict=True):
        assert positions == len(batch) * inputs[batch].max()
        assert positions <= budget or len(batch) == 1


@given(lengths, st.integers(1, 200))
def test_longest_first_and_neighbours_in_length_together(lengths, budget):
    windows, plan = plan_of(lengths, budget)
    order = [int(windows.num_tokens[n]) for batch in plan.batches for n in batch]
    assert order == sorted(order, reverse=True)


def test_ranks_have_nearly_the_same_work():
    rng = np.random.default_rng(0)
    windows, plan = plan_of(rng.integers(1, 400, 300), 256)
    loads = [
        sum(
            int(windows.num_tokens[plan.batches[batch]].sum())
            for batch in plan.batches_of(rank, 4)
            if batch is not None
        )
        for rank in range(4)
    ]
    assert max(loads) - min(loads) <= 2 * 256


def test_the_fingerprint_follows_windows_and_batches():
    lengths = [5, 40, 7]
    same = {plan_of(lengths, 64)[1].fingerprint for _ in range(2)}
    assert len(same) == 1
    others = {plan_of(lengths, 32)[1].fingerprint, plan_of([5, 40, 8], 64)[1].fingerprint}
    assert not same & others


@given(
    st.lists(st.integers(2, 120), min_size=1, max_size=40),
    st.integers(1, 400),
    st.integers(1, 40),
)
def test_the_largest_budget_that_gives_each_rank_a_batch(lengths, budget, num_more):
    """It does, one more does not; none where there are fewer windows than ranks."""
    windows = Protocol(33, None, 1).windows(np.asarray(lengths))

    def num_batches(budget):
        return len(make_plan(windows, max_tokens_per_batch=budget).batches)

    num_ranks = num_batches(budget) + num_more
    found = largest_budget_for(num_ranks, windows, budget)
    if found is None:
        assert num_batches(1) < num_ranks
    else:
        assert num_batches(found) >= num_ranks > num_batches(found + 1)
