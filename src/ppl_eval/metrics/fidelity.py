"""Student against teacher beyond sums by window: histograms, profiles, worst tokens.

All of it is accumulated on the device and reduced over the ranks once, at the end.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ppl_eval.metrics.ledger import NLL
from ppl_eval.metrics.profiles import Profile, context_bounds
from ppl_eval.parallel.reduce import all_gather, reduce_
from ppl_eval.score.batch import Tokens
from ppl_eval.score.divergence import MEANS

SUMS = (
    *NLL,
    *(f"teacher_{name}" for name in NLL),
    *MEANS,
    "probability_difference",
    "probability_difference_squared",
)
"""Columns of a ledger with a teacher."""

PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9)
WORST_TOKENS = 20

PROFILED = ("kl_teacher_student", "top1", "nll_nats", "teacher_nll_nats")
"""Values that are averaged by the teacher's confidence and by context length."""

_CONFIDENCE_BINS = 10
_WORST = ("kl_teacher_student", "nll_nats", "teacher_nll_nats", "top1_id", "teacher_top1_id")


class Histogram:
    """Counts in fixed bins, from which percentiles are read.

    Args:
        edges: where the bins begin and end, in order (bins + 1 of them); values beyond them are
            counted in one bin below and one above.
        values: what a percentile in each of the bins + 2 is reported as.
        device: where the counts live.
    """

    def __init__(
        self, edges: Sequence[float], values: Sequence[float], device: torch.device | str = "cpu"
    ) -> None:
        self._edges = torch.tensor(edges, dtype=torch.float64, device=device)
        self._values = list(values)
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
        exponents = range(round(first), round(last) + 1)
        inside = [10 ** ((exponent + 0.5) / per_decade) for exponent in exponents[:-1]]
        edges = [10 ** (exponent / per_decade) for exponent in exponents]
        return cls(edges, [0.0, *inside, high], device)

    @classmethod
    def linear(cls, num_bins: int, device: torch.device | str = "cpu") -> "Histogram":
        """Equal bins from -1 to 1; a value is reported as the middle of its bin."""
        edges = [2 * number / num_bins - 1 for number in range(num_bins + 1)]
        inside = [round((low + high) / 2, 9) for low, high in itertools.pairwise(edges)]
        return cls(edges, [-1.0, *inside, 1.0], device)

    def update(self, values_N: torch.Tensor) -> None:
        """Count values (float64)."""
        bins = torch.bucketize(values_N, self._edges, right=True)
        self.counts.index_add_(0, bins, torch.ones_like(bins))

    def percentile(self, percent: float) -> float:
        """The smallest bin value that at least ``percent`` % of the tokens do not exceed (the
        inverse of the empirical distribution function)."""
        cumulated = self.counts.cumsum(0)
        wanted = max(1, math.ceil(percent / 100 * int(cumulated[-1])))
        return self._values[int(torch.searchsorted(cumulated, wanted))]

    def percentiles(self) -> dict[str, float]:
        """Percent (``"99.9"``) -> value, for each of :data:`PERCENTILES`."""
        return {f"{percent:g}": self.percentile(percent) for percent in PERCENTILES}


class Fidelity:
    """Histograms, the profile by the teacher's confidence, the worst tokens and the noise floor.

    Args:
        device: where everything is added up; updates on a GPU do not wait for it.
        coarser: the dtype of the two models with the larger rounding error.

    Attributes:
        coarser: the dtype whose rounding the noise floor measures.
        kl: histogram of KL(teacher || student) in nats, 200 bins a decade from 1e-10 to 1e3: a
            percentile is off by 0.58 % at most.
        probability_difference: histogram of the student's probability of the right token less the
            teacher's, in bins of 0.001: a percentile is off by 0.0005 at most.
        noise: sums of :data:`SUMS` over a sample of batches, with a differently rounded copy of
            the teacher as the student. One bin.
    """

    def __init__(
        self, device: torch.device | str = "cpu", coarser: torch.dtype = torch.float32
    ) -> None:
        self.coarser = coarser
        self.kl = Histogram.logarithmic(1e-10, 1e3, 200, device)
        self.probability_difference = Histogram.linear(2000, device)
        self._by_confidence = Profile(_CONFIDENCE_BINS, PROFILED, _confidence_bins, device)
        self.noise = Profile(1, SUMS, lambda tokens, _: torch.zeros_like(tokens.index_N), device)
        # KL first; then document, position, and the rest of _WORST
        self._worst = torch.full(
            (WORST_TOKENS, 2 + len(_WORST)), -1.0, dtype=torch.float64, device=device
        )

    def update(self, tokens: Tokens, values: Mapping[str, torch.Tensor]) -> None:
        """Add a batch.

        Args:
            tokens: scored on this rank.
            values: :data:`ppl_eval.score.divergence.COLUMNS` of each, by name (float64 [N]).
        """
        self.kl.update(values["kl_teacher_student"])
        self.probability_difference.update(values["probability_difference"])
        self._by_confidence.update(tokens, values)
        kl, *others = (values[name] for name in _WORST)
        where = (tokens.document_N.double(), tokens.position_N.double())
        rows = torch.cat([self._worst, torch.stack([kl, *where, *others], dim=1)])
        for column in (2, 1):  # of equal KL the first tokens of the corpus, on any number of ranks
            rows = rows.index_select(0, rows.select(1, column).argsort(stable=True))
        order = rows.select(1, 0).argsort(descending=True, stable=True)
        self._worst = rows.index_select(0, order[:WORST_TOKENS])

    def update_noise(self, tokens: Tokens, values: Mapping[str, torch.Tensor]) -> None:
        """Add a batch with a differently rounded copy of the teacher as the student."""
        squares = {f"{name}_squared": value.square() for name, value in values.items()}
        self.noise.update(tokens, {**values, **squares})

    def assemble(
        self, group: dist.ProcessGroup | None, noise_group: dist.ProcessGroup | None = None
    ) -> None:
        """Complete everything on every rank: a reduction, a gather, and a reduction of the noise.

        Args:
            group: ranks that scored different tokens (the student's ``loss`` mesh).
            noise_group: the teacher's.
        """
        parts = (self.kl.counts, self.probability_difference.counts, self._by_confidence.sums)
        flat = reduce_(torch.cat([part.flatten().double() for part in parts]), group)
        for part, total in zip(parts, flat.split([p.numel() for p in parts]), strict=True):
            part.copy_(total.view_as(part))
        if group is not None:
            self._worst = all_gather(self._worst, group).flatten(0, 1)
        self.noise.assemble(noise_group)

    def by_confidence(self) -> list[dict[str, Any]]:
        """Means by the teacher's largest probability, in bins of 0.1; empty bins are left out."""
        bounds = [n / _CONFIDENCE_BINS for n in range(_CONFIDENCE_BINS + 1)]
        return [
            {"teacher_confidence": bounds[number : number + 2], **_profiled(count, means)}
            for number, count, means in self._by_confidence.means()
        ]

    def worst_tokens(self) -> list[dict[str, Any]]:
        """Tokens with the largest KL: document, position, both losses, both top-1 ids."""
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


def _confidence_bins(tokens: Tokens, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
    tenth_N = (values["teacher_confidence"] * _CONFIDENCE_BINS).long()
    return tenth_N.clamp_(0, _CONFIDENCE_BINS - 1)


def fidelity_by_position(profile: Profile) -> list[dict[str, Any]]:
    """The ``by_position`` of results.json: means over tokens with 1, 2 to 3, 4 to 7, ... before.

    Args:
        profile: of :data:`PROFILED` over context bins, assembled.
    """
    return [
        {"context_tokens": context_bounds(number), **_profiled(count, means)}
        for number, count, means in profile.means()
    ]


def _profiled(count: int, means: Mapping[str, float]) -> dict[str, Any]:
    return {
        "scored_tokens": count,
        "kl_teacher_student_nats": means["kl_teacher_student"],
        "top1_agreement": means["top1"],
        "student_nll_nats_per_token": means["nll_nats"],
        "teacher_nll_nats_per_token": means["teacher_nll_nats"],
    }
