"""The Perplexity metric: closed forms, any order of updates and merges, no silent nonsense."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from ppl_eval import Perplexity


def test_uniform_logits_give_the_vocabulary_size(device):
    logits = torch.zeros(2, 9, 509, device=device)
    metric = Perplexity(device)
    metric.update_from_logits(logits, torch.zeros(2, 9, device=device).long())
    assert metric.compute() == pytest.approx(509, rel=1e-6)


def test_certainty_gives_one():
    labels = torch.arange(7)
    assert Perplexity().update_from_logits(F.one_hot(labels) * 1e5, labels).compute() == 1.0


def test_tokens_weigh_the_same_not_batches():
    """10 tokens at 2.0 nats and 1000 at 4.0: exp(4020/1010); 30.99 and 20.09 are the wrong ones."""
    metric = Perplexity()
    metric.update(torch.full((10,), 2.0), 10)
    metric.update(torch.full((1000,), 4.0), 1000)
    assert metric.compute() == pytest.approx(math.exp(4020 / 1010))
    assert round(metric.compute(), 2) == 53.53


def test_logits_and_labels_are_aligned_not_shifted():
    """A bigram table: from 0 comes 0 or 1 with 1/4 and 3/4, from 1 always 0."""
    table = torch.tensor([[0.25, 0.75], [1.0, 0.0]]).log().clamp_min(-1e4)
    tokens = torch.tensor([[0, 1, 0, 0, 1]])
    metric = Perplexity().update_from_logits(table[tokens[:, :-1]], tokens[:, 1:])
    assert metric.compute() == pytest.approx((0.75 * 1.0 * 0.25 * 0.75) ** (-1 / 4))


def test_labels_are_masked_by_position_never_by_id():
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 5, 8), torch.randint(8, (2, 5))
    labels[0, 3] = 0
    everything = Perplexity().update_from_logits(logits, labels)
    assert int(everything.num_tokens) == 10
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[0, 3] = False
    masked = Perplexity().update_from_logits(logits, labels, mask=mask)
    labels[0, 3] = -100
    ignored = Perplexity().update_from_logits(logits, labels)
    assert int(masked.num_tokens) == int(ignored.num_tokens) == 9
    assert masked.compute() == ignored.compute() != everything.compute()


def test_a_batch_without_labels_adds_nothing():
    metric = Perplexity().update(6.0, 3)
    metric.update_from_logits(torch.randn(2, 4, 8), torch.full((2, 4), -100))
    assert metric.compute() == pytest.approx(math.exp(2))


def test_before_any_token_it_is_nan_and_above_float64_inf():
    assert math.isnan(Perplexity().compute())
    overflowing = Perplexity().update(7100.0, 10)
    assert overflowing.mean_nll() == 710.0
    assert overflowing.compute() == math.inf


def test_no_graph_is_kept_alive():
    logits = torch.randn(4, 8, requires_grad=True)
    metric = Perplexity().update_from_logits(logits, torch.arange(4)).update(logits.sum(), 1)
    assert not metric.nll_nats_sum.requires_grad


def test_many_small_updates_are_not_lost_in_float32():
    """A float32 count stops at 2**24 when ones are added, and a float32 sum soon after."""
    metric = Perplexity().update(float(2**26), 2**26)
    for _ in range(100):
        metric.update(torch.tensor(1.0), 1)
    assert int(metric.num_tokens) == 2**26 + 100
    assert float(metric.nll_nats_sum) == 2**26 + 100


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_scored_in_fp32(dtype, device):
    torch.manual_seed(0)
    logits, labels = (torch.randn(50, 300) * 5).to(dtype), torch.randint(300, (50,))
    truth = F.cross_entropy(logits.double(), labels).exp().item()
    metric = Perplexity(device).update_from_logits(logits.to(device), labels.to(device))
    assert metric.compute() == pytest.approx(truth, rel=1e-6)


@pytest.mark.parametrize(
    ("logits", "labels"),
    [
        (torch.zeros(2, 5, 8), torch.zeros(2, 4).long()),
        (torch.zeros(2, 5, 8), torch.full((2, 5), 8)),
        (torch.zeros(2, 5, 8), torch.full((2, 5), -1)),
    ],
)
def test_wrong_shapes_and_labels_are_refused(logits, labels):
    with pytest.raises(ValueError, match="logits"):
        Perplexity().update_from_logits(logits, labels)


updates = st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 10**9)), min_size=1, max_size=30)


@given(updates, st.data())
def test_merging_in_any_split_and_order_is_one_metric(values, data):
    order = data.draw(st.permutations(values))
    cut = data.draw(st.integers(0, len(values)))
    whole, left, right = Perplexity(), Perplexity(), Perplexity()
    for nll, count in values:
        whole.update(nll, count)
    for nll, count in order[:cut]:
        left.update(nll, count)
    for nll, count in order[cut:]:
        right.update(nll, count)
    merged = Perplexity().merge_state([left, right])
    assert int(merged.num_tokens) == int(whole.num_tokens) == sum(count for _, count in values)
    assert float(merged.nll_nats_sum) == pytest.approx(math.fsum(n for n, _ in values), rel=1e-12)


def test_state_dict_reset_and_sync_alone():
    metric = Perplexity().update(20.0, 10)
    other = Perplexity()
    other.load_state_dict(metric.state_dict())
    assert other.compute() == metric.compute() == pytest.approx(math.exp(2))
    synced = metric.sync()
    synced.update(1.0, 1)
    assert int(metric.num_tokens) == 10
    assert math.isnan(metric.reset().compute())
    assert int(other.num_tokens) == 10
