"""Both models onto their meshes, with this rank's weights of each."""

import torch

from ppl_eval.config.schema import EvalConfig
from ppl_eval.evaluation.preflight import Preflight
from ppl_eval.evaluation.steps import Teacher
from ppl_eval.evaluation.teacher import of_the_teacher, teacher_dims
from ppl_eval.parallel.dims import Meshes, ParallelDims


def place(
    ready: Preflight,
    cfg: EvalConfig,
    dims: ParallelDims,
    meshes: Meshes | None,
    device: torch.device,
    *,
    show_progress: bool = False,
) -> Teacher | None:
    """Split and shard both models, and read this rank's weights of each.

    Args:
        ready: from :func:`ppl_eval.evaluation.preflight.prepare`; its models are on meta before and
            on ``device`` after.
        cfg: the checked config.
        dims: the student's.
        meshes: the student's, or None for one process.
        device: of this rank.
        show_progress: show bars, if stderr is a terminal.

    Returns:
        The teacher on its meshes, if there is one.
    """
    reshard, its = cfg.parallel.reshard_after_forward, cfg.teacher_parallel.reshard_after_forward
    ready.student.place(meshes, device, reshard_after_forward=reshard, show_progress=show_progress)
    if ready.teacher is None:
        return None
    own_dims = teacher_dims(cfg, dims)
    if meshes is not None and own_dims != dims:
        meshes = own_dims.build_mesh(device.type, cfg.process_group.timeout_s)
    with of_the_teacher():
        ready.teacher.place(
            meshes,
            device,
            reshard_after_forward=reshard if its is None else its,
            show_progress=show_progress,
        )
    return Teacher.on(ready.teacher.model, meshes)
