"""Put the models of a run onto their meshes, with this rank's weights."""

import torch

from ppl_eval.config.schema import EvalConfig
from ppl_eval.evaluation.preflight import Preflight
from ppl_eval.evaluation.teacher import of_the_teacher, teacher_dims
from ppl_eval.model.prepare import PreparedModel
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

    def read(prepared: PreparedModel, meshes: Meshes | None, reshard: bool) -> Reader:
        prepared.load(meshes, device, reshard_after_forward=reshard, show_progress=show_progress)
        decoder, fp32_logits = prepared.decoder, cfg.logits_dtype == "fp32"
        return Reader(decoder.model, decoder, Groups.of(meshes), fp32_logits)

    reshard = cfg.parallel.reshard_after_forward
    readers = [read(ready.student, meshes, reshard)]
    if ready.teacher is not None:
        degrees = teacher_dims(cfg, dims)
        if meshes is not None and degrees != dims:
            meshes = degrees.build_mesh(device.type, cfg.process_group.timeout_s)
        asked = cfg.teacher_parallel.reshard_after_forward
        with of_the_teacher():
            readers.append(read(ready.teacher, meshes, reshard if asked is None else asked))
    return readers
