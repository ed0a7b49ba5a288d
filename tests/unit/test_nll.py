"""token_nll: closed forms, float64 truth, and the obvious implementation beside it."""

import math

import pytest
import torch
import torch.nn.functional as F

from ppl_eval.score import nll


@pytest.fixture
def token_nll(device):
    """The function on ``device``, of tensors that are on the CPU."""
    return lambda logits, targets: nll.token_nll(logits.to(device), targets.to(device)).cpu()


@pytest.mark.parametrize("vocab_size", [1, 2, 101, 49_152])
def test_uniform_logits_give_the_log_of_the_vocabulary_size(token_nll, vocab_size):
    logits = torch.full((3, vocab_size), 7.5)
    found = token_nll(logits, torch.tensor([0, vocab_size // 2, vocab_size - 1]))
    torch.testing.assert_close(found, torch.full((3,), math.log(vocab_size)))


def test_certainty_gives_zero_and_confident_misses_stay_finite(token_nll):
    logits = torch.zeros(2, 5)
    logits[:, 3] = 1e4
    found = token_nll(logits, torch.tensor([3, 0]))
    assert found.tolist() == [0.0, 1e4]


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 65])
@pytest.mark.parametrize("vocab_size", [2, 101, 5003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_further_from_the_truth_than_cross_entropy(token_nll, num_tokens, vocab_size, dtype):
    torch.manual_seed(0)
    logits = (torch.randn(num_tokens, vocab_size) * 4).to(dtype)
    targets = torch.randint(vocab_size, (num_tokens,))
    truth = F.cross_entropy(logits.double(), targets, reduction="none")
    obvious = F.cross_entropy(logits.float(), targets, reduction="none").double()
    ours = token_nll(logits, targets)
    assert ours.dtype == torch.float32
    error, allowed = (ours - truth).abs().max(), (obvious - truth).abs().max() + 1e-6
    assert error <= allowed


def test_float64_logits_are_computed_in_float64(token_nll):
    torch.manual_seed(0)
    logits, targets = torch.randn(9, 33, dtype=torch.float64), torch.randint(33, (9,))
    found = token_nll(logits, targets)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, F.cross_entropy(logits, targets, reduction="none"))
