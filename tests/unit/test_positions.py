"""Loss by context length, against a loop."""

import math

import pytest
import torch

from ppl_eval.metrics.positions import PositionLoss


@pytest.mark.parametrize("in_parts", [False, True])
def test_bins(in_parts):
    torch.manual_seed(0)
    nll = torch.rand(3, 40)
    scored = torch.rand(3, 40) > 0.3
    nll = nll * scored
    positions = torch.arange(40) % 13 if in_parts else torch.arange(40)
    loss = PositionLoss()
    for _ in range(2):
        loss.update(nll, scored, positions if in_parts else None)
    loss.assemble(None)
    found = {tuple(row["context_tokens"]): row for row in loss.rows()}
    expected = {}
    for row in range(3):
        for column in range(40):
            if scored[row, column]:
                power = int(math.log2(int(positions[column]) + 1))
                bounds = (2**power, 2 ** (power + 1) - 1)
                expected.setdefault(bounds, []).append(float(nll[row, column]))
    assert set(found) == set(expected)
    for bounds, values in expected.items():
        assert found[bounds]["scored_tokens"] == 2 * len(values)
        mean = math.fsum(values) / len(values)
        assert found[bounds]["nll_nats_per_token"] == pytest.approx(mean, rel=1e-6)
