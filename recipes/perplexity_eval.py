"""Distributed perplexity evaluation of a torchtune model.

    tune run --nproc_per_node 2 ppl_eval --config tiny_ppl_eval

`ppl-eval cp ppl_eval my_recipe.py` gives you a copy to edit, and `tune run my_recipe --config NAME`
runs it, with the same configs.
"""

import dataclasses
import logging
import os
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from ppl_eval import boundary
from ppl_eval.config import EvalConfig, parse
from ppl_eval.errors import LimitExceeded, UserError
from ppl_eval.evaluation import loop as evaluation
from ppl_eval.evaluation import preflight
from ppl_eval.evaluation.load import load_readers
from ppl_eval.evaluation.teacher import teacher_dims
from ppl_eval.metrics.tokens import TokenRecords
from ppl_eval.model.prepare import num_ids
from ppl_eval.parallel import process_group
from ppl_eval.parallel.dims import ParallelDims
from ppl_eval.parallel.memory import peak_memory_gib
from ppl_eval.report import environment, tables
from ppl_eval.report.fidelity_section import description, fidelity, with_texts
from ppl_eval.report.metric_logger import MetricLogger
from ppl_eval.report.output import DOCUMENTS, RESULTS, TOKENS, OutputFolder
from ppl_eval.report.progress import ProgressBar, Timer
from ppl_eval.report.results import (
    over_limits,
    results,
    teacher_results,
    write_documents,
    write_results,
)
from ppl_eval.report.token_file import write_tokens

logger = logging.getLogger("ppl_eval")


class PerplexityEvalRecipe:
    """Perplexity of one model on one corpus, over dp_replicate x dp_shard x cp x tp processes.

    Everything that can be wrong without reading a weight is checked before any is read. Then every
    rank runs the same number of steps, and at the end the ledger is added up over the ranks. Rank 0
    alone writes and prints.

    Args:
        cfg: the checked config.

    Raises:
        UserError: device, dtype, mesh or output_dir do not fit this machine or these processes.
    """

    def __init__(self, cfg: EvalConfig) -> None:
        self.cfg = cfg
        self.ranks = boundary.Ranks.from_env()
        self.device = process_group.pick_device(
            cfg.device, self.ranks.local_rank, self.ranks.world_size
        )
        self.dtype = process_group.pick_dtype(cfg.dtype, self.device)
        if cfg.teacher_dtype is not None:
            process_group.pick_dtype(cfg.teacher_dtype, self.device)
        self.dims = ParallelDims(
            dp_replicate=cfg.parallel.dp_replicate,
            dp_shard=cfg.parallel.dp_shard,
            cp=cfg.parallel.cp,
            tp=cfg.parallel.tp,
            world_size=self.ranks.world_size,
        )
        self.timer = Timer()
        self.meshes = None
        self.metric_logger = None
        torch.manual_seed(cfg.seed)
        if self.ranks.rank == 0:
            self.output = OutputFolder(cfg.output_dir)

    def setup(self, cfg: EvalConfig) -> None:
        """Processes, data, plan; then the weights."""
        if self.ranks.world_size > 1:
            group = cfg.process_group
            process_group.start(group.backend, group.timeout_s, self.device)
            self.meshes = self.dims.build_mesh(self.device.type, cfg.process_group.timeout_s)
        with self.timer.phase("data"):
            self.ready = preflight.prepare(
                cfg, self.dtype, process_group.world(), num_ranks=self.dims.batch_size
            )
            self.workload = self.ready.workload
            if self.ranks.rank == 0:
                self.fingerprints = preflight.fingerprints(self.ready)
                self.metric_logger = MetricLogger(cfg.metric_logger)
        for note in self.ready.notes:
            logger.info(note)
        for warning in self.ready.warnings:
            logger.warning("warning: %s", warning)
        for line in tables.describe_workload(self.workload, str(self.dims), self.dims.batch_size):
            logger.info(line)
        if self.ranks.rank == 0:
            self.output.warn_if_smaller(int(self.workload.windows.num_scored.sum()))
        with self.timer.phase("load"):
            self.readers = load_readers(
                self.ready,
                cfg,
                self.dims,
                self.meshes,
                self.device,
                show_progress=self.ranks.rank == 0 and logger.isEnabledFor(logging.INFO),
            )

    def evaluate(self) -> None:
        """Score all windows, write and print the results."""
        cfg = self.cfg
        bar = None
        if self.ranks.rank == 0:
            num_scored = int(self.workload.windows.num_scored.sum())
            bar = ProgressBar(
                num_scored, self.metric_logger, cfg.log_every_n_steps, cfg.log_every_s
            )

        # ranks that share matrices score the same tokens: one of them keeps the records
        repeats = self.meshes is not None and self.meshes.tp.get_local_rank() > 0
        records = TokenRecords() if cfg.save_tokens and not repeats else None
        with self.timer.phase("evaluate"):
            result = evaluation.run(
                self.readers,
                self.workload,
                device=self.device,
                records=records,
                noise_floor=cfg.noise_floor,
                on_step=None if bar is None else bar.update,
                check_every=cfg.log_every_n_steps,
            )
        peak = peak_memory_gib(self.device, process_group.world())
        tokens = None
        if records is not None:
            tokens = records.gather(self.readers[0].groups.loss)
        if bar is not None:
            bar.close()
            self.report(result, tokens, peak if cfg.log_peak_memory_stats else None)
        if cfg.fail_if:
            problem = over_limits(self.content(result, with_bootstrap=False), cfg.fail_if)
            process_group.wait_for_all()  # rank 0 has written
            if problem:
                raise LimitExceeded(problem)

    def report(
        self,
        result: evaluation.Evaluation,
        tokens: Mapping[str, np.ndarray] | None,
        peak_memory: float | None,
    ) -> None:
        """On rank 0: the files, the metric logger, and the table."""
        content = {
            **self.content(result),
            "weights": dataclasses.asdict(result.weights),
            **self.describe(result.summary.total.num_scored, peak_memory),
        }
        if self.ready.teacher is not None:
            worst = content["fidelity"]["worst_tokens"]
            content["fidelity"]["worst_tokens"] = with_texts(
                worst, self.workload, self.ready.tokenizer
            )
        writers = {
            RESULTS: partial(write_results, content=content),
            DOCUMENTS: partial(write_documents, documents=result.summary.documents),
        }
        if tokens is not None:
            writers[TOKENS] = partial(write_tokens, workload=self.workload, records=tokens)
        problem = self.output.publish(writers)
        self.metric_logger.log_config(OmegaConf.structured(self.cfg))
        metrics = {k: v for k, v in content["metrics"].items() if isinstance(v, float)}
        for name, value in content.get("fidelity", {}).items():
            if isinstance(value, float):
                metrics[f"fidelity/{name}"] = value
        self.metric_logger.log_dict(
            metrics, step=self.workload.plan.num_steps(self.dims.batch_size)
        )
        name = os.path.basename(os.path.normpath(self.cfg.output_dir))
        print()
        print(tables.describe_run(content), end="\n\n")
        rows = tables.result_rows(content, name)
        if self.ready.teacher is not None:
            rows += tables.teacher_rows(content, "its teacher")
        print(tables.result_table(rows), end="\n\n")
        if self.ready.teacher is not None:
            print(description(content), end="\n\n")
        if content["metrics"]["overflow"]:
            logger.warning("a perplexity exceeds float64 and is null in results.json: see the NLL")
        self.metric_logger.close()
        if problem or self.metric_logger.problem:
            raise UserError("; ".join(filter(None, (problem, self.metric_logger.problem))))
        print(f"results: {self.output.path / RESULTS}")

    def content(
        self, result: evaluation.Evaluation, *, with_bootstrap: bool = True
    ) -> dict[str, Any]:
        """What was measured, as in results.json; the same on every rank."""
        bootstrap, documents = self.cfg.bootstrap, result.summary.documents
        content = results(
            result.summary,
            resamples=bootstrap.resamples if with_bootstrap else 0,
            seed=bootstrap.seed,
        )
        if self.ready.teacher is None:
            return content
        dims = teacher_dims(self.cfg, self.dims)
        models = (self.ready.student.model, self.ready.teacher.model)
        content["teacher"] = teacher_results(
            result.teacher,
            model=self.ready.teacher.component,
            checkpoint_dir=self.ready.teacher.checkpointer.get("checkpoint_dir"),
            checkpoint_dtype=self.ready.teacher.checkpoint_dtype,
            dtype=self.cfg.teacher_dtype or self.cfg.dtype,
            mesh={**dataclasses.asdict(dims), "description": str(dims)},
        )
        content["fidelity"] = fidelity(
            documents,
            documents.by_domain(),
            result.fidelity,
            result.by_context,
            rows=tuple(map(num_ids, models)),
        )
        return content

    def describe(self, num_scored: int, peak_memory: float | None) -> dict[str, Any]:
        """The sections of results.json that say what was run, and how fast."""
        seconds = self.timer.seconds
        workload = self.workload
        return {
            "command": environment.command(
                sys.argv, self.ranks.world_size, self.ranks.local_world_size
            ),
            "notes": list(self.ready.notes),
            "warnings": list(self.ready.warnings),
            "protocol": workload.protocol.describe(),
            "performance": {
                "tokens_per_s": num_scored / seconds["evaluate"],
                "peak_memory_gib": peak_memory,
                "seconds": dict(seconds),
            },
            "environment": {
                "versions": environment.versions(),
                "device": environment.device_name(self.device),
                "num_processes": self.ranks.world_size,
                "mesh": {**dataclasses.asdict(self.dims), "description": str(self.dims)},
                "dtype": self.cfg.dtype,
                "logits_dtype": self.cfg.logits_dtype,
                "checkpoint_dtype": self.ready.student.checkpoint_dtype,
            },
            "config": dataclasses.asdict(self.cfg),
            "fingerprints": self.fingerprints,
        }

    def cleanup(self) -> None:
        """Leave the process group."""
        process_group.stop()


@parse
def recipe_main(cfg: EvalConfig) -> None:
    """Entry point of ``tune run``."""
    recipe = PerplexityEvalRecipe(cfg)
    recipe.setup(cfg)
    recipe.evaluate()
    recipe.cleanup()


if __name__ == "__main__":
    recipe_main()
