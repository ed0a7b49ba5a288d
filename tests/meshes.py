"""A checkpoint on a mesh, as the recipe runs it; for functions that run on ranks."""

from ranks import rank_device

from ppl_eval.config.command_line import load as load_config
from ppl_eval.evaluation import preflight
from ppl_eval.evaluation.load import load_readers
from ppl_eval.evaluation.loop import run
from ppl_eval.parallel.dims import ParallelDims

AXES = ("dp_replicate", "dp_shard", "cp", "tp")


def on_mesh(folder, mesh, world_size, *overrides, dataset=None):
    """Evaluate the checkpoint in ``folder`` on this rank's device; every rank calls it.

    Args:
        mesh: (dp_replicate, dp_shard, cp, tp).
        overrides: ``key=value`` after auto_ppl_eval's.
        dataset: import path of a function that gives texts.
    """
    dims = ParallelDims(*mesh, world_size=world_size)
    device = rank_device()
    meshes = dims.build_mesh(device.type)
    cfg = configured(folder, mesh, *overrides, dataset=dataset)
    ready = preflight.prepare(cfg)
    readers = load_readers(ready, cfg, dims, meshes, device)
    return run(readers, ready.workload, device=device)


def prepared(folder, mesh, *overrides, dataset=None):
    """The checkpoint as it is before any weight is read."""
    cfg = configured(folder, mesh, *overrides, dataset=dataset)
    return preflight.prepare(cfg)


def configured(folder, mesh, *overrides, dataset=None):
    """The config of :func:`on_mesh`."""
    cfg = load_config(
        [
            *("--config", "auto_ppl_eval", f"checkpoint_dir={folder}", "dtype=fp32"),
            *(f"parallel.{axis}={degree}" for axis, degree in zip(AXES, mesh, strict=True)),
            *(["dataset.data_files=unused"] if dataset else []),
            *overrides,
        ]
    )
    if dataset:
        cfg.dataset = {"_component_": dataset}
    return cfg
