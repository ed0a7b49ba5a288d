"""Divergences of two sets of logits, against closed forms and against float64 definitions."""

import math

import pytest
import torch

from ppl_eval.score import divergence
from ppl_eval.score.divergence import COLUMNS, Ids, compare_logits_


@pytest.fixture
def compare(device):
    """Column -> values of each row, compared on ``device``."""

    def on_device(student, teacher, targets=None, shared=None):
        if targets is None:
            targets = torch.zeros(len(student), dtype=torch.int64)
        ids = Ids(0, shared or min(student.shape[1], teacher.shape[1]))
        logits = (each.to(device, copy=True) for each in (student, teacher))
        values = compare_logits_(*logits, targets.to(device), ids)
        return dict(zip(COLUMNS, values.cpu(), strict=True))

    return on_device


def defined(student, teacher, targets, shared):
    """Plain definitions, in the dtype of the logits."""
    q, p = (x[:, :shared].log_softmax(dim=1) for x in (student, teacher))
    m = torch.logaddexp(p, q) - math.log(2)

    def kl(a, b):
        return (a.exp() * (a - b)).sum(dim=1)

    rows = torch.arange(len(targets), device=targets.device)
    return {
        "nll_nats": -student.log_softmax(dim=1)[rows, targets],
        "teacher_nll_nats": -teacher.log_softmax(dim=1)[rows, targets],
        "kl_teacher_student": kl(p, q),
        "kl_student_teacher": kl(q, p),
        "js": (kl(p, m) + kl(q, m)) / 2,
        "teacher_entropy": -(p.exp() * p).sum(dim=1),
        "student_entropy": -(q.exp() * q).sum(dim=1),
        "teacher_confidence": p.exp().amax(dim=1),
        "top1_id": q.argmax(dim=1).double(),
        "teacher_top1_id": p.argmax(dim=1).double(),
        "top1": (p.argmax(dim=1) == q.argmax(dim=1)).double(),
    }


def test_equal_logits(compare):
    """A cross-entropy, sold as a KL, would give the entropy here."""
    logits = torch.randn(7, 101) * 5
    found = compare(logits, logits)
    for name in ("kl_teacher_student", "kl_student_teacher", "js"):
        assert found[name].tolist() == [0] * 7, name
    assert found["top1"].tolist() == found["top5"].tolist() == [1] * 7
    assert torch.equal(found["nll_nats"], found["teacher_nll_nats"])
    assert torch.equal(found["teacher_entropy"], found["student_entropy"])


def test_a_uniform_student_of_a_certain_teacher(compare):
    student, teacher = torch.zeros(1, 8, dtype=torch.float64), torch.full((1, 8), -1e3).double()
    teacher[0, 3] = 1e3
    found = compare(student, teacher, torch.tensor([3]))
    assert float(found["kl_teacher_student"]) == pytest.approx(math.log(8))
    assert float(found["nll_nats"]) == pytest.approx(math.log(8))
    assert float(found["teacher_nll_nats"]) == 0
    assert float(found["teacher_entropy"]) == 0
    assert float(found["student_entropy"]) == pytest.approx(math.log(8))
    # m is 9/16 and seven times 1/16
    js = (math.log(16 / 9) + math.log(2 / 9) / 8 + 7 / 8 * math.log(2)) / 2
    assert float(found["js"]) == pytest.approx(js, rel=1e-12)
    assert float(found["teacher_confidence"]) == 1


def test_distributions_that_do_not_meet(compare):
    student, teacher = torch.tensor([[200.0, 0, 0]]), torch.tensor([[0, 0, 200.0]])
    found = compare(student, teacher)
    assert float(found["kl_teacher_student"]) == pytest.approx(200, rel=1e-6)
    assert float(found["js"]) == pytest.approx(math.log(2), rel=1e-6)
    assert float(found["top1"]) == 0
    assert float(found["top5"]) == 1  # all three ids


@pytest.mark.parametrize("vocabulary", [5, 7, 101, 70_000])
@pytest.mark.parametrize("distance", [1e-3, 0.1, 3.0])
def test_against_definitions(compare, device, vocabulary, distance):
    """In float64 to its precision; in float32 no farther from the truth than the definitions are
    when they are computed in float32."""
    generator = torch.Generator().manual_seed(vocabulary)
    teacher = torch.randn(40, vocabulary, generator=generator) * 4
    student = teacher + torch.randn(40, vocabulary, generator=generator) * distance
    targets = torch.randint(0, vocabulary, (40,), generator=generator)
    truth = defined(student.double(), teacher.double(), targets, vocabulary)
    in_float64 = compare(student.double(), teacher.double(), targets)
    in_float32 = compare(student, teacher, targets)
    plain = defined(*(each.to(device) for each in (student, teacher, targets)), vocabulary)
    for name, expected in truth.items():
        torch.testing.assert_close(in_float64[name], expected, rtol=1e-11, atol=1e-14)
        error = (in_float32[name] - expected).abs().mean()
        allowed = (plain[name].cpu() - expected).abs().mean() + 1e-7 * expected.abs().mean()
        assert error <= allowed, name


@pytest.mark.parametrize("sizes", [(128, 136), (136, 128), (101, 100)])
def test_rows_that_only_one_model_has(compare, sizes):
    """Over the ids that both have; each loss over all of its own."""
    student, teacher = (torch.randn(6, size, dtype=torch.float64) * 3 for size in sizes)
    student[:, -1] += 4  # what is left out has weight
    targets = torch.randint(0, min(sizes), (6,))
    found = compare(student, teacher, targets)
    for name, expected in defined(student, teacher, targets, min(sizes)).items():
        torch.testing.assert_close(found[name], expected, rtol=1e-10, atol=1e-12)


def test_a_small_divergence_is_not_lost(compare):
    """fp32 logits that differ by little: the plain sum of p (ln p - ln q) is off by far more."""
    torch.manual_seed(0)
    teacher = (torch.randn(200, 5000) * 4).round(decimals=3)
    student = teacher + (torch.rand(200, 5000) - 0.5) * 2**-10
    found = compare(student, teacher)["kl_teacher_student"].mean()
    targets = torch.zeros(200).long()
    expected = defined(student.double(), teacher.double(), targets, 5000)
    expected = expected["kl_teacher_student"].mean()
    plain = defined(student, teacher, targets, 5000)["kl_teacher_student"].double().mean()
    assert float(expected) < 1e-6
    assert abs(found / expected - 1) < 1e-3
    assert abs(plain / expected - 1) > 1e-2


def test_rows_are_taken_in_blocks(compare, device, monkeypatch):
    student, teacher = torch.randn(50, 33), torch.randn(50, 33)
    targets = torch.randint(0, 33, (50,))
    whole = compare(student, teacher, targets)
    monkeypatch.setattr(divergence, "BLOCK_ELEMENTS", {device: 100})
    for name, values in compare(student, teacher, targets).items():
        assert torch.equal(values, whole[name]), name
