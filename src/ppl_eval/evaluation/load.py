"""Put the models of a run onto their meshes, with this rank's weights."""

import torch

from ppl_eval.config.schema import EvalConfig
from ppl_eval.evaluation.preflight import Preflight
from ppl_eval.evaluation.teacher import of_the_teacher, teacher_dims
from ppl_eval.model.prepare import load_models
from ppl_eval.parallel.dims import Groups, Meshes, ParallelDims
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
    """Split and shard the models, and read this rank's weights of each. Every rank calls it.

    Args:
        ready: from :func:`ppl_eval.evaluation.preflight.prepare`; its models move to ``device``.
        cfg: the checked config.
        dims: the student's parallel degrees.
        meshes: the student's meshes, or None for one process.
        device: where this rank computes.
        show_progress: show bars, if stderr is a terminal.

    Returns:
        The student, and the teacher if there is one.
    """

    student, teacher = ready.student, ready.teacher
    reshard = cfg.parallel.reshard_after_forward
    student.shard(meshes, reshard_after_forward=reshard)
    placed = [(student, meshes)]
    if teacher is not None:
        degrees = teacher_dims(cfg, dims)
        if meshes is not None and degrees != dims:
            meshes = degrees.build_mesh(device.type, cfg.process_group.timeout_s)
        asked = cfg.teacher_parallel.reshard_after_forward
        with of_the_teacher():
            teacher.shard(meshes, reshard_after_forward=reshard if asked is None else asked)
        placed.append((teacher, meshes))
    if teacher is not None and teacher.reads_the_files_of(student):
        load_models([student, teacher], device, show_progress=show_progress)
    else:
        student.load(device, show_progress=show_progress)
        if teacher is not None:
            with of_the_teacher():
                teacher.load(device, show_progress=show_progress)
    fp32_logits = cfg.logits_dtype == "fp32"
    return [
        Reader(model.decoder.model, model.decoder, Groups.of(its_meshes), fp32_logits)
        for model, its_meshes in placed
    ]
