"""Histograms, against the values that they count; profiles are held on meshes."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import tokens_of
from hypothesis import given
from hypothesis import strategies as st

from ppl_eval.metrics.fidelity import PERCENTILES, Fidelity, Histogram
from ppl_eval.score.divergence import COLUMNS


def ranked(values, percent):
    """The smallest value such that this share of all is not above it."""
    return float(np.percentile(values, percent, method="inverted_cdf"))


@given(st.lists(st.floats(1e-9, 900.0), min_size=1, max_size=300))
def test_percentiles_of_a_logarithmic_histogram(values):
    found = Fidelity().kl
    for part in (values[: len(values) // 2], values[len(values) // 2 :]):
        found.update(torch.tensor(part, dtype=torch.float64))
    assert int(found.counts.sum()) == len(values)
    for percent in PERCENTILES:
        expected = ranked(values, percent)
        assert abs(math.log(found.percentile(percent) / expected)) <= math.log(10) / 400 + 1e-9


@given(st.lists(st.floats(-1.0, 1.0), min_size=1, max_size=300))
def test_percentiles_of_a_linear_histogram(values):
    found = Fidelity().probability_difference
    found.update(torch.tensor(values, dtype=torch.float64))
    for percent in PERCENTILES:
        assert found.percentile(percent) == pytest.approx(ranked(values, percent), abs=0.0005001)


def test_values_beyond_the_edges():
    found = Histogram.logarithmic(1e-3, 10, 100)
    found.update(torch.tensor([0.0, -1e-9, 1e-4, 0.1, 50.0], dtype=torch.float64))
    assert [found.percentile(p) for p in (1, 60)] == [0, 0]
    assert found.percentile(80) == pytest.approx(0.1, rel=0.012)
    assert found.percentile(100) == 10


def test_the_worst_of_several_batches():
    torch.manual_seed(0)
    fidelity, everything = Fidelity(), []
    for batch in range(4):
        scored = torch.rand(3, 20) > 0.4
        tokens = tokens_of(torch.zeros(3, 20).long(), scored)
        where = zip([batch] * len(tokens), tokens.index_N.tolist(), strict=True)
        tokens = replace(
            tokens, document_N=torch.full_like(tokens.index_N, batch), position_N=tokens.index_N
        )
        values = {name: torch.rand(len(tokens), dtype=torch.float64) for name in COLUMNS}
        fidelity.update(tokens, values)
        kl = values["kl_teacher_student"].tolist()
        everything += [(value, *place) for value, place in zip(kl, where, strict=True)]
    worst = sorted(everything, reverse=True)[:20]
    keys = ("kl_teacher_student_nats", "document", "position")
    assert [tuple(row[k] for k in keys) for row in fidelity.worst_tokens()] == worst
    assert fidelity.maximum_kl() == worst[0][0]
    few = Fidelity()
    few.update(tokens, values)
    few.assemble(None)
    assert len(few.worst_tokens()) == min(20, int(scored.sum()))


def test_of_tokens_with_equal_divergence_the_first_are_the_worst():
    """Also where two ranks saw them in another order."""

    def worst(*batches):
        fidelity = Fidelity()
        for documents in batches:
            scored = torch.ones(len(documents), 8, dtype=torch.bool)
            tokens = tokens_of(torch.zeros(len(documents), 8).long(), scored)
            position_N = tokens.index_N % 8
            document_N = torch.tensor(documents).repeat_interleave(8)
            tokens = replace(tokens, document_N=document_N, position_N=position_N)
            zeros = torch.zeros(len(tokens), dtype=torch.float64)
            fidelity.update(tokens, dict.fromkeys(COLUMNS, zeros))
        return [(row["document"], row["position"]) for row in fidelity.worst_tokens()]

    expected = [(0, n) for n in range(8)] + [(1, n) for n in range(8)] + [(2, n) for n in range(4)]
    assert worst([0, 1], [2, 3], [4]) == worst([4, 1], [3], [2, 0]) == expected
