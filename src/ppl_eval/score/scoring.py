"""Scoring: a batch -> what one model, or a student and its teacher, make of its tokens."""

from collections.abc import Mapping, Sequence

import torch

from ppl_eval.score.batch import Batch, Tokens
from ppl_eval.score.reader import Reader
from ppl_eval.score.teacher_student import TeacherStudent, compare_with_rounded

Scored = tuple[Tokens, Mapping[str, torch.Tensor]]
"""The tokens that this rank scored, and what was found of them by name ([N] each)."""


class Scorer:
    """Reads batches with one or two models on one device.

    Args:
        readers: the model that is measured and, if there is one, its teacher after it.
        device: where the models are, and the batch is brought.
    """

    def __init__(self, readers: Sequence[Reader], device: torch.device) -> None:
        self._device = device
        self._student, self._teacher = readers[0], (readers[1] if len(readers) > 1 else None)
        self._pair = None if self._teacher is None else TeacherStudent(self._student, self._teacher)

    def score(self, whole: Batch) -> Scored:
        """Score a batch; every rank calls it equally often.

        Args:
            whole: this rank's batch, of whole windows, on the CPU.

        Returns:
            The tokens of this rank's part, and ``nll_nats`` of each; beside a teacher all of
            :data:`ppl_eval.score.divergence.COLUMNS`.
        """
        own = whole.part(self._student.context).to(self._device)
        if self._pair is None or self._teacher is None:
            nll_N = self._student.nll(own.inputs_BT, own.tokens, own.positions_T)
            return own.tokens, {"nll_nats": nll_N}
        teachers = own
        if self._student.context is not None or self._teacher.context is not None:
            teachers = whole.part(self._teacher.context).to(self._device)
        return own.tokens, self._pair.compare(own, teachers, whole.inputs_BT.shape[1])

    def score_noise(self, whole: Batch, seed: int, epsilon: float) -> Scored:
        """Score a batch with the teacher as the student of itself, rounded otherwise; see
        :func:`ppl_eval.score.teacher_student.compare_with_rounded`."""
        assert self._teacher is not None
        part = whole.part(self._teacher.context).to(self._device)
        return part.tokens, compare_with_rounded(self._teacher, part, seed, epsilon)
