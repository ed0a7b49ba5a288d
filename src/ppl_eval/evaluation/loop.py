"""The evaluation loop: models, workload -> ledger, summary and fidelity, on any number of ranks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

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
from ppl_eval.parallel.groups import Groups
from ppl_eval.parallel.tensor import check_groups
from ppl_eval.score.reader import Reader, evaluating
from ppl_eval.score.scoring import Scorer

NOISE_EVERY = 16
"""One batch in so many is read twice more, by the teacher and by the teacher rounded otherwise."""


@dataclass(frozen=True)
class Progress:
    """Where a run stands after a step.

    Attributes:
        step: steps done, from 1; those of the noise floor come after ``num_steps``.
        num_steps: steps that score.
        num_scored: tokens that all ranks together have scored so far.
        share: of the run's forward work that all ranks together have done, in input positions; the
            noise floor is part of it.
        perplexity: gives that of this rank's own tokens so far; it waits for the device.
    """

    step: int
    num_steps: int
    num_scored: int
    share: float
    perplexity: Callable[[], float]


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found; the same on every rank.

    Attributes:
        workload: what was scored.
        ledger: results by window.
        summary: counts and metrics of the whole, by domain and by document.
        teacher: the teacher's, if there is one.
        fidelity: how far the model is from its teacher, beside the ledger's sums.
        by_context: means of what was found of tokens, by the number of tokens before them.
        weights: what the model's numbers are stored in, and how many linear layers are quantised.
        notes: what the reading of texts and the choice of windows decided, one sentence each.
    """

    workload: Workload
    ledger: Ledger
    summary: Summary
    by_context: Profile
    teacher: Summary | None = None
    fidelity: Fidelity | None = None
    weights: StoredWeights | None = None
    notes: tuple[str, ...] = ()

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
) -> Evaluation:
    """Score a workload. Every rank calls it and runs the same number of steps.

    Args:
        readers: the model that is measured and, if there is one, its teacher after it, which reads
            the same windows on the same ranks. Models are put into eval mode and back.
        workload: from :func:`ppl_eval.evaluation.workload.prepare_workload`.
        device: where the models are.
        records: filled with every token that this rank scores.
        noise_floor: with a teacher, measure what another rounding of it would give.
        on_step: called on this rank after every step, those of the noise floor included.
        check_every: steps between looks for a NaN or infinite loss among this rank's own (each
            waits for the device). Only a rank that has one raises, so give it where such an error
            ends all processes. None: only at the end, when all ranks raise.

    Raises:
        UserError: a loss is NaN or infinite, naming document and window; a model that is split over
            ranks which would read different windows.
    """
    student, groups = readers[0], readers[0].groups
    for reader in readers:
        check_groups(reader.model, reader.groups.loss)
        check_same_batches(student, reader)
    has_teacher = len(readers) > 1
    fidelity = Fidelity(device, _coarser(readers)) if has_teacher else None
    by_context = context_profile(PROFILED if has_teacher else ("nll_nats",), device)
    num_parts = 1 if student.context is None else student.context.size
    ledger = Ledger(len(workload.windows), device, num_parts, columns=SUMS if has_teacher else NLL)
    tables = [table for table in (ledger, by_context, fidelity, records) if table is not None]
    running, scorer = Perplexity(device), Scorer(readers, device)
    sample = range(0)
    if has_teacher and noise_floor and readers[-1].can_round_layers:
        sample = range(0, len(workload.plan.batches), NOISE_EVERY)
    tell = _teller(workload, sample, groups, running, on_step)

    # where an error ends all processes there is no need to go on until the end with it
    together = workload.corpus.failing_together() if check_every is None else nullcontext()
    with together, evaluating(readers):
        weights = stored_weights(student.model)
        for step in range(workload.plan.num_steps(groups.num_batch_ranks)):
            number = workload.plan.batch_of(step, groups.batch_rank, groups.num_batch_ranks)
            tokens, values = scorer.score(workload.batch(number))
            for table in tables:
                table.update(tokens, values)
            running.update(values["nll_nats"], len(tokens))
            if check_every is not None and (step + 1) % check_every == 0:
                _raise_if_not_finite(ledger, workload)
            tell(step + 1, 0)
        for turn, number in enumerate(_shared(sample, groups), 1):
            assert fidelity is not None
            epsilon = torch.finfo(fidelity.coarser).eps
            fidelity.update_noise(
                *scorer.score_noise(workload.batch(number), seed=number or 0, epsilon=epsilon)
            )
            tell(workload.plan.num_steps(groups.num_batch_ranks), turn)

    ledger.assemble(groups.loss)
    by_context.assemble(groups.loss)
    if fidelity is not None:
        fidelity.assemble(groups.loss, readers[-1].groups.loss)
    _raise_if_not_finite(ledger, workload)

    def summary(of: Ledger, column: str) -> Summary:
        profile = loss_by_position(by_context, column)
        return summarise(workload.corpus, workload.protocol, workload.windows, of, profile)

    return Evaluation(
        workload,
        ledger,
        summary(ledger, "nll_nats"),
        by_context,
        summary(ledger.with_nll_of("teacher_"), "teacher_nll_nats") if has_teacher else None,
        fidelity,
        weights,
    )


def _coarser(readers: Sequence[Reader]) -> torch.dtype:
    """The dtype among the models' that rounds most."""
    return max((reader.dtype for reader in readers), key=lambda dtype: torch.finfo(dtype).eps)


def _shared(sample: range, groups: Groups) -> Iterator[int | None]:
    """The batches of a sample that this rank reads, None for one that counts nothing. All ranks
    have as many turns, as few as there can be."""
    for begin in range(0, len(sample), groups.num_batch_ranks):
        turn = begin + groups.batch_rank
        yield sample[turn] if turn < len(sample) else None


def _teller(
    workload: Workload,
    sample: range,
    groups: Groups,
    running: Perplexity,
    on_step: Callable[[Progress], None] | None,
) -> Callable[[int, int], None]:
    """What reports the progress of all ranks after a step, from the plan alone.

    Returns:
        A function of the steps that are done, and of the turns of the noise floor.
    """
    plan, size = workload.plan, groups.num_batch_ranks
    by_batch = [workload.windows.num_scored[numbers].sum() for numbers in plan.batches]
    num_scored = np.cumsum(by_batch)
    # two forwards of each position: a batch is read by both models, for the noise twice by one
    work = np.cumsum([*plan.num_positions, *(plan.num_positions[number] for number in sample)])

    def tell(step: int, turn: int) -> None:
        if on_step is None:
            return
        num_batches = min(step * size, len(plan.batches))
        share = work[min(num_batches + turn * size, len(work)) - 1] / work[-1]
        scored = int(num_scored[num_batches - 1])
        num_steps = plan.num_steps(size)
        on_step(Progress(step + turn, num_steps, scored, float(share), running.compute))

    return tell


def _raise_if_not_finite(ledger: Ledger, workload: Workload) -> None:
    found = ledger.first_non_finite()
    if found is None:
        return
    number, column = found
    windows = workload.windows
    document, start = int(windows.document[number]), int(windows.start[number])
    row_id = workload.corpus.documents[document].id
    what = {"nll_nats": "the loss", "teacher_nll_nats": "the teacher's loss"}.get(column, column)
    raise UserError(
        f"{what} is {float(ledger.column(column)[number])} in document {document}"
        f"{'' if row_id is None else f' (id {row_id!r})'}, tokens {start} to"
        f" {start + int(windows.num_tokens[number]) - 1}: look for NaN in the checkpoint, or try"
        " dtype=fp32 (fp16 overflows at 65,504)"
    )
