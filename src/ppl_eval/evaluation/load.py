"""The models of a run onto their meshes, with this rank's weights."""

import torch

from ppl_eval.config.schema import EvalConfig
from ppl_eval.evaluation.preflight import Preflight
from ppl_eval.evaluation.teacher import of_the_teacher, teacher_dims
from ppl_eval.model.torchtune_decoder import decoder_of
from ppl_eval.parallel.dims import Meshes, ParallelDims
from ppl_eval.parallel.groups import Groups
from ppl_eval.score.reader import Reader


def load_readers(
    ready: Preflight,
    cfg: EvalConfig,
    dims: ParallelDims,
    meshes: Meshes | None,
    device: torch.device,
    *,
    show_progress: bool = False,
) -> list[Reader]:
    """Split and shard the models, and read this rank's weights of each.

    Args:
        ready: from :func:`ppl_eval.evaluation.preflight.prepare`; its models are on meta before and
            on ``device`` after.
        cfg: the checked config.
        dims: degrees of the student.
        meshes: the student's, or None for one process.
        device: where this rank computes.
        show_progress: show bars, if stderr is a terminal.

    Returns:
        The student, and the teacher if there is one.
    """
    reshard = cfg.parallel.reshard_after_forward
    fp32_logits = cfg.logits_dtype == "fp32"
    ready.student.load(meshes, device, reshard_after_forward=reshard, show_progress=show_progress)
    model = ready.student.model
    readers = [Reader(model, decoder_of(model), Groups.of(meshes), fp32_logits)]
    if ready.teacher is None:
        return readers
    own_dims, own_reshard = teacher_dims(cfg, dims), cfg.teacher_parallel.reshard_after_forward
    if meshes is not None and own_dims != dims:
        meshes = own_dims.build_mesh(device.type, cfg.process_group.timeout_s)
    with of_the_teacher():
        ready.teacher.load(
            meshes,
            device,
            reshard_after_forward=reshard if own_reshard is None else own_reshard,
            show_progress=show_progress,
        )
    model = ready.teacher.model
    return [*readers, Reader(model, decoder_of(model), Groups.of(meshes))]
