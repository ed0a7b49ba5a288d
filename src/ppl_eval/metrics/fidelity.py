"""How far a student is from its teacher, beyond sums by window: distributions, profiles, extremes.

Everything is added up on the device and brought together once, at the end.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ppl_eval.metrics.ledger import NLL
from ppl_eval.metrics.positions import NUM_BINS, context_bins
from ppl_eval.parallel.reduce import all_gather, reduce_
from ppl_eval.score.divergence import COLUMNS, MEANS

SUMS = (
    *NLL,
    *(f"teacher_{name}" for name in NLL),
    *MEANS,
    "probability_difference",
    "probability_difference_squared",
)
"""Columns of a ledger with a teacher. The difference is the student's probability of the token that
followed less the teacher's."""

PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9)
WORST_TOKENS = 20

_CONFIDENCE_BINS = 10
_PROFILE = ("kl_teacher_student", "top1", "nll", "teacher_nll")
_WORST = ("kl_teacher_student", "nll", "teacher_nll", "top1_id", "teacher_top1_id")


class Histogram:
    """Counts in fixed bins, from which percentiles are read.

    Args:
        edges: of the bins, in order (float64 [bins + 1]); values beyond them are counted in one bin
            below and one above.
        values: what a percentile in each bin is reported as [bins + 2].
        device: where the counts live.
    """

    def __init__(
        self, edges: torch.Tensor, values: torch.Tensor, device: torch.device | str = "cpu"
    ) -> None:
        self._edges = edges.to(device)
        self._values = values.tolist()
        self.counts = torch.zeros(len(edges) + 1, dtype=torch.int64, device=device)

    @classmethod
    def logarithmic(
        cls, low: float, high: float, per_decade: int, device: torch.device | str = "cpu"
    ) -> "Histogram":
        """Bins of equal ratio; a value below ``low`` is reported as 0, one above as ``high``.

        In between it is reported as the geometric middle of its bin: off by a factor of at most
        ``10 ** (0.5 / per_decade)``.
        """
        first, last = math.log10(low) * per_decade, math.log10(high) * per_decade
        exponents = torch.arange(round(first), round(last) + 1, dtype=torch.float64)
        inside = (exponents[:-1] + 0.5).div(per_decade)
        values = torch.cat([torch.zeros(1), 10**inside, torch.tensor([high])])
        return cls(10 ** (exponents / per_decade), values, device)

    @classmethod
    def linear(cls, num_bins: int, device: torch.device | str = "cpu") -> "Histogram":
        """Equal bins from -1 to 1; a value is reported as the middle of its bin."""
        edges = torch.linspace(-1, 1, num_bins + 1, dtype=torch.float64)
        inside = ((edges[:-1] + edges[1:]) / 2).round(decimals=9)
        return cls(edges, torch.cat([edges[:1], inside, edges[-1:]]), device)

    def update(self, values_N: torch.Tensor) -> None:
        """Count values (float64)."""
        bins = torch.bucketize(values_N, self._edges, right=True)
        self.counts.index_add_(0, bins, torch.ones_like(bins))

    def percentile(self, percent: float) -> float:
        """The value of the bin that holds the token at this rank: the smallest value such that at
        least this share of the tokens is not above it (inverse of the empirical distribution)."""
        cumulated = self.counts.cumsum(0)
        wanted = max(1, math.ceil(percent / 100 * int(cumulated[-1])))
        return self._values[int(torch.searchsorted(cumulated, wanted))]

    def percentiles(self) -> dict[str, float]:
        """Of :data:`PERCENTILES`, by name."""
        return {f"{percent:g}": self.percentile(percent) for percent in PERCENTILES}


class Fidelity:
    """Histograms, profiles and the worst tokens of a student beside its teacher.

    Args:
        device: where everything is added up.
        coarser: dtype of that of the two models which rounds more.

    Attributes:
        coarser: whose rounding the noise is.
        kl: histogram of KL(teacher || student) in nats, 200 bins a decade from 1e-10 to 1e3: a
            percentile is off by 0.58 % at most.
        probability_difference: histogram of the student's probability of the right token less the
            teacher's, in bins of 0.001: a percentile is off by 0.0005 at most.
        noise: sums of a sample in which the teacher is its own student, :data:`SUMS` and the
            number of tokens last (float64).
    """

    def __init__(
        self, device: torch.device | str = "cpu", coarser: torch.dtype = torch.float32
    ) -> None:
        self.coarser = coarser
        self.kl = Histogram.logarithmic(1e-10, 1e3, 200, device)
        self.probability_difference = Histogram.linear(2000, device)
        # tokens, then sums of _PROFILE; float64 counts are exact up to 2^53
        shape = (1 + len(_PROFILE),)
        self._by_confidence = torch.zeros(
            _CONFIDENCE_BINS, *shape, dtype=torch.float64, device=device
        )
        self._by_position = torch.zeros(NUM_BINS, *shape, dtype=torch.float64, device=device)
        self.noise = torch.zeros(len(SUMS) + 1, dtype=torch.float64, device=device)
        # KL first; then document, place, and the rest of _WORST
        self._worst = torch.full(
            (WORST_TOKENS, 2 + len(_WORST)), -1.0, dtype=torch.float64, device=device
        )

    def update(
        self,
        values_CBT: torch.Tensor,
        scored_BT: torch.Tensor,
        positions: torch.Tensor | None,
        document_BT: torch.Tensor,
        token_BT: torch.Tensor,
    ) -> None:
        """Add a batch.

        Args:
            values_CBT: :data:`ppl_eval.score.divergence.COLUMNS` of each target.
            scored_BT: which targets were scored (bool).
            positions: places of the inputs in their windows ([T] or [B, T]); None: 0, 1, 2, ...
            document_BT: document of each target (int64).
            token_BT: its place among the document's tokens (int64).
        """
        of: dict[str, torch.Tensor] = dict(zip(COLUMNS, values_CBT[:, scored_BT], strict=True))
        self.kl.update(of["kl_teacher_student"])
        self.probability_difference.update(_probability_difference(of))
        ones = torch.ones_like(of["nll"])
        profile_N5 = torch.stack([ones, *(of[name] for name in _PROFILE)], dim=1)
        confidence = (of["teacher_confidence"] * _CONFIDENCE_BINS).long()
        confidence.clamp_(0, _CONFIDENCE_BINS - 1)
        self._by_confidence.index_add_(0, confidence, profile_N5)
        bins_BT = context_bins(scored_BT.shape[1], positions, scored_BT.device)
        self._by_position.index_add_(0, bins_BT.expand_as(scored_BT)[scored_BT], profile_N5)
        kl, *others = (of[name] for name in _WORST)
        where = (document_BT[scored_BT].double(), token_BT[scored_BT].double())
        rows = torch.cat([self._worst, torch.stack([kl, *where, *others], dim=1)])
        self._worst = rows[rows[:, 0].topk(WORST_TOKENS).indices]

    def update_noise(self, values_CBT: torch.Tensor, scored_BT: torch.Tensor) -> None:
        """Add a batch in which the teacher is its own student."""
        self.noise[:-1] += ledger_values(values_CBT).sum(dim=(1, 2))
        self.noise[-1] += scored_BT.sum()

    def assemble(
        self, group: dist.ProcessGroup | None, noise_group: dist.ProcessGroup | None = None
    ) -> None:
        """Complete everything on every rank: a reduction, a gather, and a reduction of the noise.

        Args:
            group: ranks that scored different tokens (the student's ``loss`` mesh).
            noise_group: the teacher's.
        """
        counts = (self.kl.counts, self.probability_difference.counts)
        parts = (*counts, self._by_confidence, self._by_position)
        flat = reduce_(torch.cat([part.flatten().double() for part in parts]), group)
        for part, total in zip(parts, flat.split([p.numel() for p in parts]), strict=True):
            part.copy_(total.view_as(part))
        if group is not None:
            self._worst = all_gather(self._worst, group).flatten(0, 1)
        reduce_(self.noise, noise_group)

    def by_confidence(self) -> list[dict[str, Any]]:
        """Profile over the teacher's largest probability, in tenths; empty bins are left out."""
        tenths = [n / _CONFIDENCE_BINS for n in range(_CONFIDENCE_BINS + 1)]
        bounds = list(itertools.pairwise(tenths))
        return _profile(self._by_confidence, "teacher_confidence", bounds)

    def by_position(self) -> list[dict[str, Any]]:
        """Profile over the number of tokens before, in bins of 1, 2 to 3, 4 to 7, ..."""
        bounds = [(2**n, 2 ** (n + 1) - 1) for n in range(NUM_BINS)]
        return _profile(self._by_position, "context_tokens", bounds)

    def worst_tokens(self) -> list[dict[str, Any]]:
        """Tokens with the largest KL: document, place in it, both losses, both first choices."""
        rows = [row for row in self._worst.tolist() if row[1] >= 0]
        rows.sort(key=lambda row: (-row[0], row[1], row[2]))
        return [
            {
                "document": int(document),
                "position": int(place),
                "kl_teacher_student_nats": kl,
                "student_nll_nats": nll,
                "teacher_nll_nats": teacher_nll,
                "student_top1_id": int(student_id),
                "teacher_top1_id": int(teacher_id),
            }
            for kl, document, place, nll, teacher_nll, student_id, teacher_id in rows[:WORST_TOKENS]
        ]

    def maximum_kl(self) -> float:
        """The largest KL of a token in nats."""
        return float(self._worst[:, 0].max())


def ledger_values(values_CBT: torch.Tensor) -> torch.Tensor:
    """:data:`SUMS` of each target, from the columns of :mod:`ppl_eval.score.divergence`.

    Where nothing is scored all columns are 0, and so are these.
    """
    of: dict[str, torch.Tensor] = dict(zip(COLUMNS, values_CBT, strict=True))
    difference = _probability_difference(of)
    more = {
        "nll_nats": of["nll"],
        "nll_nats_squared": of["nll"].square(),
        "teacher_nll_nats": of["teacher_nll"],
        "teacher_nll_nats_squared": of["teacher_nll"].square(),
        "probability_difference": difference,
        "probability_difference_squared": difference.square(),
    }
    return torch.stack([more[name] if name in more else of[name] for name in SUMS])


def _probability_difference(of: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return (-of["nll"]).exp() - (-of["teacher_nll"]).exp()


def _profile(
    sums: torch.Tensor, key: str, bounds: Sequence[tuple[float, float]]
) -> list[dict[str, Any]]:
    rows = []
    for (low, high), (count, kl, top1, nll, teacher_nll) in zip(bounds, sums.tolist(), strict=True):
        if count:
            rows.append(
                {
                    key: [low, high],
                    "scored_tokens": int(count),
                    "kl_teacher_student_nats": kl / count,
                    "top1_agreement": top1 / count,
                    "student_nll_nats_per_token": nll / count,
                    "teacher_nll_nats_per_token": teacher_nll / count,
                }
            )
    return rows
