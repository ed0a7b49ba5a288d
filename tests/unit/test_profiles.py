"""Profiles, such as loss by context length, against a loop."""

import math

import pytest
import torch
from helpers import tokens_of

from ppl_eval.metrics.profiles import Profile, context_profile, loss_by_position


@pytest.mark.parametrize("length", [1, 2, 40])
def test_loss_by_context(length):
    torch.manual_seed(0)
    profile, expected = context_profile(["nll_nats"]), {}
    for _ in range(2):
        scored = torch.rand(3, length) > 0.3
        tokens, nll = tokens_of(torch.zeros(3, length).long(), scored), torch.rand(3, length)
        profile.update(tokens, {"nll_nats": nll[scored], "another": nll[scored]})
        for row, column in scored.nonzero().tolist():
            power = int(math.log2(column + 1))
            bounds = (2**power, 2 ** (power + 1) - 1)
            expected.setdefault(bounds, []).append(float(nll[row, column]))
    profile.assemble(None)
    found = {tuple(row["context_tokens"]): row for row in loss_by_position(profile)}
    assert set(found) == set(expected)
    for bounds, values in expected.items():
        assert found[bounds]["scored_tokens"] == len(values)
        mean = math.fsum(values) / len(values)
        assert found[bounds]["nll_nats_per_token"] == pytest.approx(mean, rel=1e-6)


def test_a_batch_that_counts_nothing():
    profile = Profile(3, ["a"], lambda tokens, values: tokens.context_N)
    nothing = tokens_of(torch.zeros(1, 1).long(), torch.zeros(1, 1).bool())
    profile.update(nothing, {"a": torch.zeros(0)})
    assert profile.means() == []
