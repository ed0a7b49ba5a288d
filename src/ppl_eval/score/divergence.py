"""How the next-token distributions of a student and its teacher differ, token by token.

All logarithms are natural, p is the teacher's distribution, q the student's, over the ids that both
have (each renormalised to them where one model has more rows):

- KL(p || q) = sum p (ln p - ln q), and the other way round (Kullback and Leibler 1951);
- JS = (KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2 (Lin 1991), at most ln 2;
- entropies -sum p ln p; the cross-entropy -sum p ln q is H(p) + KL(p || q).

KL is summed as p (d + e^-d - 1) with d = ln p - ln q, the same sum, since sum p = sum q = 1. Every
term is at least 0, and an error of the normalisers cancels in first order, so that a small KL is
not lost in the rounding of large terms.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ppl_eval.parallel.reduce import all_gather

MEANS = (
    "kl_teacher_student",
    "kl_student_teacher",
    "js",
    "teacher_entropy",
    "student_entropy",
    "top1",
    "top5",
)
"""What is averaged over tokens as it stands."""

COLUMNS = (
    "nll_nats",
    "teacher_nll_nats",
    *MEANS,
    "probability_difference",
    "teacher_confidence",
    "top1_id",
    "teacher_top1_id",
)
"""What is known of a token. NLL (each model's, over all of its own ids), divergences and entropies
in nats; top1: whether both have the same most probable id (0 or 1); top5: share of the five most
probable ids that both have; probability_difference: the student's probability of the token that
followed less the teacher's; teacher_confidence: the teacher's largest probability."""

TOP = 5
BLOCK_ELEMENTS = {"cpu": 2**16}
"""Logits of a model that one pass of element-wise work takes, so that its temporaries stay in a
CPU's cache; on other devices :data:`LARGE_BLOCK`, so that there are few kernels."""

LARGE_BLOCK = 2**20


@dataclass(frozen=True)
class Ids:
    """The ids whose logits a rank has.

    Attributes:
        first: id of the first column of both models.
        num_shared: ids that both models have, on all ranks.
        group: ranks that have the other ids, and the same tokens; None if this one has all.
    """

    first: int
    num_shared: int
    group: dist.ProcessGroup | None = None


def compare_logits_(
    student_NV: torch.Tensor, teacher_NV: torch.Tensor, targets_N: torch.Tensor, ids: Ids
) -> torch.Tensor:
    """Compare N tokens; overwrites both logits.

    Three exchanges over ``ids.group``: the top five of each part, two sums of exponentials, five
    sums of terms; a few hundred bytes a token.

    Args:
        student_NV: the student's logits, fp32 or fp64; column 0 is ``ids.first``.
        teacher_NV: the teacher's; either may have columns that the other lacks, and then they are
            the last.
        targets_N: the ids that followed (int64), in the whole vocabulary; below ``num_shared``.
        ids: which columns these are.

    Returns:
        ``COLUMNS`` [columns, N] (float64), the same on every rank of the group.
    """
    models = (student_NV, teacher_NV)
    num_columns = min(max(ids.num_shared - ids.first, 0), *(x.shape[1] for x in models))
    shared = [x[:, :num_columns] for x in models]
    columns_N = targets_N - ids.first
    is_split = ids.group is not None
    outlines = _merged([_outline(x, num_columns, columns_N, is_split) for x in models], ids)
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
    """What a rank, or all of them, know of a model's logits before any is normalised; float64.

    Attributes:
        top_Nk: the largest shared logits, in order.
        top_ids_Nk: their ids.
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

    def packed(self, first: int) -> torch.Tensor:
        """All of it as [N, 2 TOP + 2], for ranks whose first column is the id ``first``; float64
        holds ids exactly."""
        has_id = self.top_ids_Nk >= 0
        ids = torch.where(has_id, self.top_ids_Nk + first, self.top_ids_Nk)
        others = torch.stack([self.log_rest_N, self.target_N], dim=1)
        return torch.cat([self.top_Nk, ids.double(), others], dim=1)

    @classmethod
    def joined(cls, packed_RNk: torch.Tensor) -> "_Outline":
        """What all ranks together know, from what each has packed."""
        top, ids = (
            packed_RNk[:, :, n * TOP : (n + 1) * TOP].transpose(0, 1).flatten(1) for n in (0, 1)
        )
        top_Nk, places_Nk = top.topk(TOP, dim=1)
        log_rest_RN, target_RN = packed_RNk[:, :, 2 * TOP :].unbind(dim=2)
        ids_Nk = ids.gather(1, places_Nk).long()
        return cls(top_Nk, ids_Nk, log_rest_RN.logsumexp(dim=0), target_RN.sum(dim=0))


def _outline(
    x_NV: torch.Tensor, num_shared: int, columns_N: torch.Tensor, is_split: bool
) -> _Outline:
    """Of one rank's columns; ids are columns. Where they are all there are, the target is there."""
    top, top_columns = x_NV[:, :num_shared].topk(min(TOP, num_shared), dim=1)
    lacking = TOP - top.shape[1]
    absent_N = (columns_N < 0) | (columns_N >= x_NV.shape[1])
    if not is_split:
        target_N = x_NV.gather(1, columns_N.unsqueeze(1)).squeeze(1).double()
    elif x_NV.shape[1]:
        inside_N1 = columns_N.masked_fill(absent_N, 0).unsqueeze(1)
        target_N = x_NV.gather(1, inside_N1).squeeze(1).double().masked_fill_(absent_N, 0)
    else:
        target_N = torch.zeros(len(x_NV), dtype=torch.float64, device=x_NV.device)
    rest_NV = x_NV[:, num_shared:]
    if rest_NV.shape[1]:
        log_rest_N = rest_NV.double().logsumexp(dim=1)
    else:
        log_rest_N = torch.full_like(target_N, -math.inf)
    return _Outline(
        F.pad(top.double(), (0, lacking), value=-math.inf),
        F.pad(top_columns, (0, lacking), value=-1),
        log_rest_N,
        target_N,
    )


def _merged(outlines: Sequence[_Outline], ids: Ids) -> list[_Outline]:
    """Of all ranks; ids are those of the whole vocabulary. Ids that no rank has are negative."""
    if ids.group is None:
        return list(outlines)
    mine = torch.stack([outline.packed(ids.first) for outline in outlines])
    return [_Outline.joined(of_ranks) for of_ranks in all_gather(mine, ids.group).unbind(dim=1)]


def _summed(
    of_rows: Callable[..., torch.Tensor], group: dist.ProcessGroup | None, *tensors: torch.Tensor
) -> torch.Tensor:
    """``of_rows`` of some rows of the tensors at a time, added up over the ranks: [N, sums]."""
    count, width = tensors[0].shape
    elements = BLOCK_ELEMENTS.get(tensors[0].device.type, LARGE_BLOCK)
    size = max(1, elements // max(1, width))
    blocks = [
        of_rows(*(tensor[begin : begin + size] for tensor in tensors))
        for begin in range(0, count, size)
    ]
    sums = torch.cat(blocks)
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
        student_NV: logits less the largest; overwritten.
        teacher_NV: logits less the largest; overwritten.
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
    below_1 = 1 - torch.finfo(d.dtype).eps / 2  # what is lost beyond is below the dtype's epsilon
    u = torch.tanh(d / 2).clamp_(-below_1, below_1)
    return (p * u.log1p()).add_(q * u.neg_().log1p_()).div_(2)


def _kl_terms(p: torch.Tensor, q: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """p (d + e^-d - 1) where d = ln p - ln q."""
    near = d.abs() < 0.5
    small = d.masked_fill(~near, 0)
    return torch.where(near, (small + torch.expm1(-small)).mul_(p), (p * d).sub_(p).add_(q))
