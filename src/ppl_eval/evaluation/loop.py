"""The evaluation loop: models and workload -> ledger, summary and fidelity, on every rank."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ppl_eval.errors import UserError
from ppl_eval.evaluation.teacher import check_same_batches
from ppl_eval.evaluation.workload import Workload
from ppl_eval.metrics.fidelity import PROFILED, SUMS, Fidelity
from ppl_eval.metrics.ledger import NLL, Ledger
from ppl_eval.metrics.perplexity import Perplexity
from ppl_eval.metrics.profiles import Profile, context_profile, loss_by_position
from ppl_eval.metrics.summary import Summary, summarise
from ppl_eval.metrics.tokens import TokenRecords
from ppl_eval.model.stored import StoredWeights, stored_weights
from ppl_eval.parallel.tensor import check_groups
from ppl_eval.score.reader import Reader, evaluating
from ppl_eval.score.scoring import Scorer

NOISE_EVERY = 16
"""For the noise floor the teacher reads one batch in so many twice more: as it is, and with its
layers' outputs perturbed."""


@dataclass(frozen=True)
class Progress:
    """Where a run stands after a step.

    Attributes:
        step: steps done, from 1; those of the noise floor come after ``num_steps``.
        num_steps: steps that score.
        num_scored: tokens that all ranks together have scored so far.
        share: fraction of all ranks' forward work that is done, by input positions, the noise
            floor included.
        perplexity: gives the perplexity of this rank's tokens so far; it waits for the device.
    """

    step: int
    num_steps: int
    num_scored: int
    share: float
    perplexity: Callable[[], float]


@dataclass(frozen=True)
class Measurement:
    """What an evaluation found; the same on every rank.

    Attributes:
        workload: what was scored.
        ledger: sums by window.
        summary: counts and metrics of the corpus, by domain and by document.
        by_context: means over tokens, by the number of tokens before them.
        teacher: the teacher's counts and metrics, if there is a teacher.
        fidelity: histograms, profiles and the noise floor, if there is a teacher.
        weights: dtypes of the model's stored weights, and how many linear layers are quantised.
    """

    workload: Workload
    ledger: Ledger
    summary: Summary
    by_context: Profile
    teacher: Summary | None = None
    fidelity: Fidelity | None = None
    weights: StoredWeights | None = None

    @property
    def perplexity(self) -> float:
        """exp(NLL sum / scored tokens) over the whole corpus."""
        return self.summary.total.perplexity


def run(
    readers: Sequence[Reader],
    workload: Workload,
    *,
    device: torch.device,
    records: TokenRecords | None = None,
    noise_floor: bool = True,
    on_step: Callable[[Progress], None] | None = None,
    check_every: int | None = None,
) -> Measurement:
    """Score a workload. Every rank calls it and runs the same number of steps.

    Args:
        readers: the model that is measured, then its teacher if there is one, which reads the same
            windows on the same ranks. Models are put into eval mode and back.
        workload: from :func:`ppl_eval.evaluation.workload.prepare_workload`.
        device: where the models are.
        records: filled with every token that this rank scores.
        noise_floor: with a teacher, measure how far a differently rounded teacher is from it.
        on_step: called on this rank after every step, those of the noise floor included.
        check_every: look for a NaN or infinite loss of this rank after so many steps; each look
            waits for the device. Only the rank that finds one raises, so give it only where one
            error ends all processes. None: look at the end only, and all ranks raise.

    Raises:
        UserError: a loss is NaN or infinite, or a model is split over ranks that would read
            different windows.
    """
    student, groups, plan = readers[0], readers[0].groups, workload.plan
    for reader in readers:
        check_groups(reader.model, reader.groups.loss)
        check_same_batches(student, reader)
    has_teacher = len(readers) > 1
    columns, profiled = (SUMS, PROFILED) if has_teacher else (NLL, ("nll_nats",))
    num_parts = 1 if student.context is None else student.context.size
    ledger = Ledger(len(workload.windows), device, num_parts, columns=columns)
    by_context = context_profile(profiled, device)
    coarser = max((reader.dtype for reader in readers), key=lambda dtype: torch.finfo(dtype).eps)
    fidelity = Fidelity(device, coarser) if has_teacher else None
    tables = [table for table in (ledger, by_context, fidelity, records) if table is not None]
    running, scorer = Perplexity(device), Scorer(readers, device)
    has_noise = has_teacher and noise_floor and readers[-1].can_round_layers
    progress = _progress(workload, groups.num_batch_ranks, has_noise, running)

    # where an error ends all processes, a rank that cannot read a text need not go on
    together = workload.corpus.failing_together() if check_every is None else nullcontext()
    with together, evaluating(readers):
        weights = stored_weights(student.model)
        batches = plan.batches_of(groups.batch_rank, groups.num_batch_ranks)
        for step, number in enumerate(batches, 1):
            tokens, values = scorer.score(workload.batch(number))
            for table in tables:
                table.update(tokens, values)
            running.update(values["nll_nats"], len(tokens))
            if check_every is not None and step % check_every == 0:
                _raise_if_not_finite(ledger, workload)
            if on_step is not None:
                on_step(next(progress))
        if fidelity is not None and has_noise:
            for number in plan.batches_of(groups.batch_rank, groups.num_batch_ranks, NOISE_EVERY):
                batch, epsilon = workload.batch(number), torch.finfo(coarser).eps
                found = scorer.score_noise(batch, seed=number or 0, epsilon=epsilon)
                fidelity.update_noise(*found)
                if on_step is not None:
                    on_step(next(progress))

    ledger.assemble(groups.loss)
    by_context.assemble(groups.loss)
    if fidelity is not None:
        fidelity.assemble(groups.loss, readers[-1].groups.loss)
    _raise_if_not_finite(ledger, workload)

    total, teacher = _summary(workload, ledger, by_context, "nll_nats"), None
    if has_teacher:
        of_teacher = ledger.with_nll_of("teacher_")
        teacher = _summary(workload, of_teacher, by_context, "teacher_nll_nats")
    return Measurement(workload, ledger, total, by_context, teacher, fidelity, weights)


def _summary(workload: Workload, ledger: Ledger, by_context: Profile, column: str) -> Summary:
    profile = loss_by_position(by_context, column)
    return summarise(workload.corpus, workload.protocol, workload.windows, ledger, profile)


def _progress(
    workload: Workload, num_ranks: int, has_noise: bool, running: Perplexity
) -> Iterator[Progress]:
    """Where all ranks together stand after each step, known from the plan alone."""

    def by_step(by_batch: Any) -> np.ndarray:
        return np.add.reduceat(by_batch, range(0, len(by_batch), num_ranks))

    plan = workload.plan
    scored = by_step([workload.windows.num_scored[numbers].sum() for numbers in plan.batches])
    work = by_step(plan.num_positions)
    num_steps = len(work)
    # each step is two forward passes: both models read a batch, for the noise the teacher twice
    if has_noise:
        work = np.concatenate([work, by_step(plan.num_positions[::NOISE_EVERY])])
        scored = np.pad(scored, (0, len(work) - num_steps))
    done, num_scored = np.cumsum(work), np.cumsum(scored)
    for step in range(len(work)):
        share = float(done[step] / done[-1])
        yield Progress(step + 1, num_steps, int(num_scored[step]), share, running.compute)


def _raise_if_not_finite(ledger: Ledger, workload: Workload) -> None:
    found = ledger.first_non_finite()
    if found is None:
        return
    number, column = found
    windows = workload.windows
    document, start = int(windows.document[number]), int(windows.start[number])
    row_id = workload.corpus.documents[document].id
    name = {"nll_nats": "the loss", "teacher_nll_nats": "the teacher's loss"}.get(column, column)
    raise UserError(
        f"{name} is {float(ledger.column(column)[number])} in document {document}"
        f"{'' if row_id is None else f' (id {row_id!r})'}, tokens {start} to"
        f" {start + int(windows.num_tokens[number]) - 1}: look for NaN in the checkpoint, or try"
        " dtype=fp32 (fp16 overflows at 65,504)"
    )
