"""How the next-token distributions of a student and its teacher differ, token by token.

All logarithms are natural. p is the teacher's distribution and q the student's, over the ids that
both have (renormalised to them where one model has more rows):

- KL(p || q) = sum p (ln p - ln q), and the other way round (Kullback and Leibler 1951);
- JS = (KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2 (Lin 1991), at most ln 2;
- entropies -sum p ln p; the cross-entropy -sum p ln q is H(p) + KL(p || q).

KL is summed as p (d + e^-d - 1) with d = ln p - ln q, which is the same sum because sum p = sum q =
1. Every term is at least 0, and an error of the normalisers cancels in first order, so that a small
KL is not lost in the rounding of large terms.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ppl_eval.parallel.reduce import all_gather
from ppl_eval.score.nll import row_blocks, target_logits

MEANS = (
    "kl_teacher_student",
    "kl_student_teacher",
    "js",
    "teacher_entropy",
    "student_entropy",
    "top1",
    "top5",
)
"""Columns whose mean over tokens is a result."""

COLUMNS = (
    "nll_nats",
    "teacher_nll_nats",
    *MEANS,
    "probability_difference",
    "teacher_confidence",
    "top1_id",
    "teacher_top1_id",
)
"""The values of a token. NLL (of each model over all of its ids), divergences and entropies are in
nats. top1: 1 if both models have the same most probable id, else 0. top5: the share of their five
most probable ids that both models have. probability_difference: the student's probability of the
token that followed, minus the teacher's. teacher_confidence: the teacher's largest probability."""

TOP = 5
BLOCK_ELEMENTS = defaultdict(lambda: 2**20, cpu=2**16)
"""Device type -> logits of a model that element-wise work takes at a time: on a CPU so few that
temporaries stay in its cache, elsewhere so many that there are few kernels."""


@dataclass(frozen=True)
class Ids:
    """The ids whose logits this rank has.

    Attributes:
        first: id of the first column, the same for both models.
        num_shared: number of ids that both models have, on all ranks together.
        group: ranks that have the other ids, and the same tokens; None if this rank has all ids.
    """

    first: int
    num_shared: int
    group: dist.ProcessGroup | None = None


def compare_logits_(
    student_NV: torch.Tensor, teacher_NV: torch.Tensor, targets_N: torch.Tensor, ids: Ids
) -> torch.Tensor:
    """Compare the distributions of N tokens; overwrites both logits.

    Three collectives over ``ids.group``, a few hundred bytes a token: the top five of each rank,
    two sums of exponentials, five sums of terms.

    Args:
        student_NV: the student's logits, fp32 or fp64; column 0 is the id ``ids.first``.
        teacher_NV: the teacher's, in the same dtype. Columns that only one model has come last.
        targets_N: the ids that followed (int64), in the whole vocabulary; below ``num_shared``.
        ids: which ids the columns are.

    Returns:
        :data:`COLUMNS` [columns, N] (float64), the same on every rank of the group.
    """
    models = (student_NV, teacher_NV)
    num_columns = min(max(ids.num_shared - ids.first, 0), *(x.shape[1] for x in models))
    shared = [x[:, :num_columns] for x in models]
    outlines = _merged([_outline(x, num_columns, targets_N, ids.first) for x in models], ids.group)
    for x, outline in zip(shared, outlines, strict=True):
        x.sub_(outline.largest_N.to(x.dtype).unsqueeze(1))
    log_sums_N2 = _summed(_exponentials, ids.group, *shared).log_()
    terms_N5 = _summed(_terms, ids.group, *shared, log_sums_N2)
    nll = [
        torch.logaddexp(outline.largest_N + log_sum_N, outline.log_rest_N) - outline.target_N
        for outline, log_sum_N in zip(outlines, log_sums_N2.T, strict=True)
    ]
    student, teacher = outlines
    same = student.top_ids_Nk.unsqueeze(2) == teacher.top_ids_Nk.unsqueeze(1)
    same &= student.top_ids_Nk.unsqueeze(2) >= 0
    return torch.stack(
        [
            *nll,
            *terms_N5.T,
            same[:, 0, 0].double(),
            same.sum(dim=(1, 2)).double() / min(TOP, ids.num_shared),
            (-nll[0]).exp() - (-nll[1]).exp(),
            (-log_sums_N2[:, 1]).exp(),
            student.top_ids_Nk[:, 0].double(),
            teacher.top_ids_Nk[:, 0].double(),
        ]
    )


@dataclass(frozen=True)
class _Outline:
    """A model's logits before they are normalised, of one rank or of all ranks (float64).

    Attributes:
        top_Nk: the largest shared logits, in order; -inf where there are fewer than ``TOP``.
        top_ids_Nk: their ids; -1 where there are fewer.
        log_rest_N: logsumexp of the logits that the other model lacks; -inf if there are none.
        target_N: the logit of the id that followed; 0 on a rank that does not have it.
    """

    top_Nk: torch.Tensor
    top_ids_Nk: torch.Tensor
    log_rest_N: torch.Tensor
    target_N: torch.Tensor

    @property
    def largest_N(self) -> torch.Tensor:
        """The largest shared logit."""
        return self.top_Nk[:, 0]

    def packed(self) -> torch.Tensor:
        """All of it as [N, 2 TOP + 2]; float64 holds ids exactly."""
        others = torch.stack([self.log_rest_N, self.target_N], dim=1)
        return torch.cat([self.top_Nk, self.top_ids_Nk.double(), others], dim=1)

    @classmethod
    def joined(cls, packed_RNk: torch.Tensor) -> "_Outline":
        """The outline of all ranks, from the packed outline of each."""
        top, ids = (
            packed_RNk[:, :, n * TOP : (n + 1) * TOP].transpose(0, 1).flatten(1) for n in (0, 1)
        )
        top_Nk, places_Nk = top.topk(TOP, dim=1)
        log_rest_RN, target_RN = packed_RNk[:, :, 2 * TOP :].unbind(dim=2)
        ids_Nk = ids.gather(1, places_Nk).long()
        return cls(top_Nk, ids_Nk, log_rest_RN.logsumexp(dim=0), target_RN.sum(dim=0))


def _outline(x_NV: torch.Tensor, num_shared: int, targets_N: torch.Tensor, first: int) -> _Outline:
    """The outline of one rank's columns, of which the first ``num_shared`` are shared."""
    top_Nk, columns_Nk = x_NV[:, :num_shared].topk(min(TOP, num_shared), dim=1)
    lacking = TOP - top_Nk.shape[1]
    target_N = target_logits(x_NV, targets_N - first).double()
    log_rest_N = torch.full_like(target_N, -math.inf)
    if x_NV.shape[1] > num_shared:
        log_rest_N = x_NV[:, num_shared:].double().logsumexp(dim=1)
    return _Outline(
        F.pad(top_Nk.double(), (0, lacking), value=-math.inf),
        F.pad(columns_Nk + first, (0, lacking), value=-1),
        log_rest_N,
        target_N,
    )


def _merged(outlines: Sequence[_Outline], group: dist.ProcessGroup | None) -> Sequence[_Outline]:
    """The outlines of all ranks together."""
    if group is None:
        return outlines
    packed = torch.stack([outline.packed() for outline in outlines])
    return [_Outline.joined(packed_RNk) for packed_RNk in all_gather(packed, group).unbind(dim=1)]


def _summed(
    sums_of: Callable[..., torch.Tensor], group: dist.ProcessGroup | None, *tensors: torch.Tensor
) -> torch.Tensor:
    """``sums_of`` blocks of the tensors' rows, added up over the ranks: [N, sums]."""
    elements = BLOCK_ELEMENTS[tensors[0].device.type]
    blocks = row_blocks(elements, tensors[0].shape[1], *tensors)
    sums = torch.cat([sums_of(*block) for block in blocks])
    if group is not None:
        dist.all_reduce(sums, group=group)
    return sums


def _exponentials(student_NV: torch.Tensor, teacher_NV: torch.Tensor) -> torch.Tensor:
    """Sums of exponentials of logits that are at most 0: [N, 2] float64."""
    sums = [x.exp().sum(dim=1, dtype=torch.float64) for x in (student_NV, teacher_NV)]
    return torch.stack(sums, dim=1)


def _terms(
    student_NV: torch.Tensor, teacher_NV: torch.Tensor, log_sums_N2: torch.Tensor
) -> torch.Tensor:
    """Sums of both KL, JS and both entropies (teacher, student): [N, 5] float64.

    Args:
        student_NV: logits minus the largest; overwritten.
        teacher_NV: logits minus the largest; overwritten.
        log_sums_N2: logarithms of the sums of their exponentials (float64).
    """
    log_q = student_NV.sub_(log_sums_N2[:, :1].to(student_NV.dtype))
    log_p = teacher_NV.sub_(log_sums_N2[:, 1:].to(teacher_NV.dtype))
    p, q, d = log_p.exp(), log_q.exp(), log_p - log_q
    terms = (
        _kl_terms(p, q, d),
        _kl_terms(q, p, -d),
        _js_terms(p, q, d),
        (p * log_p).neg_(),
        (q * log_q).neg_(),
    )
    return torch.stack([term_NV.sum(dim=1).double() for term_NV in terms], dim=1)


def _js_terms(p: torch.Tensor, q: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """(p ln(p / m) + q ln(q / m)) / 2; p / m = 1 + u and q / m = 1 - u with u = tanh(d / 2)."""
    below_1 = 1 - torch.finfo(d.dtype).eps / 2  # ln(1 - u) stays finite, and the error small
    u = torch.tanh(d / 2).clamp_(-below_1, below_1)
    return (p * u.log1p()).add_(q * u.neg_().log1p_()).div_(2)


def _kl_terms(p: torch.Tensor, q: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """p (d + e^-d - 1) where d = ln p - ln q."""
    near = d.abs() < 0.5
    small = d.masked_fill(~near, 0)
    return torch.where(near, (small + torch.expm1(-small)).mul_(p), (p * d).sub_(p).add_(q))
