"""Distributed perplexity evaluation of a torchtune model.

    tune run --nproc_per_node 2 ppl_eval --config tiny_ppl_eval

`ppl-eval cp ppl_eval my_recipe.py` gives you a copy to edit, and `tune run my_recipe --config NAME`
runs it, with the same configs.
"""

import logging

import torch

from ppl_eval.config import EvalConfig, parse
from ppl_eval.config.limits import over_limits
from ppl_eval.errors import LimitExceeded, UserError
from ppl_eval.evaluation import loop, preflight
from ppl_eval.evaluation.load import load_readers
from ppl_eval.metrics.tokens import TokenRecords
from ppl_eval.parallel import process_group
from ppl_eval.parallel.dims import ParallelDims
from ppl_eval.ranks import Ranks
from ppl_eval.report.layout import wrapped
from ppl_eval.report.metric_logger import MetricLogger
from ppl_eval.report.output import RESULTS, OutputFolder
from ppl_eval.report.progress import ProgressBar, Timer, TokenisingProgress
from ppl_eval.report.results import assemble, run_info, writers
from ppl_eval.report.terminal import log_workload, results_text
from ppl_eval.verify.verify import verify_run

logger = logging.getLogger("ppl_eval")


class PerplexityEvalRecipe:
    """Perplexity of one model on one corpus, over dp_replicate x dp_shard x cp x tp processes.

    Everything that can be wrong without reading a weight is checked before any is read. Then every
    rank runs the same number of steps, and at the end the ledger is added up over the ranks. Rank 0
    alone writes and prints, when no other rank waits for it any more.

    Args:
        cfg: the checked config.

    Raises:
        UserError: device, dtype, mesh or output_dir do not fit this machine or these processes.
    """

    def __init__(self, cfg: EvalConfig) -> None:
        self.cfg = cfg
        self.ranks = Ranks.from_env()
        self.is_first = self.ranks.rank == 0
        self.device = process_group.pick_device(
            cfg.device, self.ranks.local_rank, self.ranks.world_size
        )
        process_group.check_dtypes((cfg.dtype, cfg.teacher_dtype), self.device)
        self.dims = ParallelDims.of(cfg.parallel, self.ranks.world_size)
        self.meshes = None  # with one process there are none
        self.timer = Timer()
        torch.manual_seed(cfg.seed)
        # what only rank 0 has
        self.output = OutputFolder(cfg.output_dir) if self.is_first else None
        self.metric_logger = MetricLogger(None)
        self.fingerprints: dict[str, str] = {}

    def setup(self, cfg: EvalConfig) -> None:
        """Start the processes, read the text, plan the batches, then load the weights."""
        if self.ranks.world_size > 1:
            group = cfg.process_group
            process_group.start(group.backend, group.timeout_s, self.device)
            self.meshes = self.dims.build_mesh(self.device.type, group.timeout_s)
        with self.timer.phase("data"):
            self.prepared = preflight.prepare(
                cfg,
                process_group.world(),
                num_ranks=self.dims.batch_size,
                on_encode=TokenisingProgress(cfg.log_every_s) if self.is_first else None,
            )
            self.workload = self.prepared.workload
            if self.is_first:
                self.fingerprints = preflight.fingerprints(self.prepared)
                self.metric_logger = MetricLogger(cfg.metric_logger)
        log_workload(self.prepared, self.dims)
        self.num_scored = int(self.workload.windows.num_scored.sum())
        if self.output is not None:
            self.output.warn_if_smaller(self.num_scored)
        with self.timer.phase("load"):
            self.load_checkpoint()

    def load_checkpoint(self) -> None:
        """Read this rank's weights of the model, and of its teacher if there is one."""
        self.readers = load_readers(
            self.prepared,
            self.cfg,
            self.dims,
            self.meshes,
            self.device,
            show_progress=self.is_first and logger.isEnabledFor(logging.INFO),
        )

    def evaluate(self) -> None:
        """Score all windows. Every rank gets the result; rank 0 gets the records of tokens."""
        cfg, bar = self.cfg, None
        if self.is_first:
            bar = ProgressBar(
                self.num_scored,
                self.metric_logger,
                self.device,
                every=cfg.log_every_n_steps,
                every_s=cfg.log_every_s,
            )
        # ranks that share matrices score the same tokens: one of them keeps the records
        repeats = self.meshes is not None and self.meshes.tp.get_local_rank() > 0
        records = TokenRecords() if cfg.save_tokens and not repeats else None
        with self.timer.phase("evaluate"):
            self.found = loop.run(
                self.readers,
                self.workload,
                device=self.device,
                records=records,
                noise_floor=cfg.noise_floor,
                on_step=None if bar is None else bar.update,
                check_every=cfg.log_every_n_steps,
            )
        if bar is not None:
            bar.close()
        peak = process_group.peak_memory_gib(self.device)
        self.peak_memory_gib = peak if cfg.log_peak_memory_stats else None
        self.quantization = [model.quantization() for model in self.prepared.models]
        self.tokens = None if records is None else records.gather(self.readers[0].groups.loss)

    def cleanup(self) -> None:
        """Leave the process group: from here on no rank waits for another."""
        process_group.stop()

    def report(self) -> None:
        """On rank 0: write the files, tell the metric logger, print the table.

        Raises:
            UserError: a file or the metric logger failed.
        """
        if self.output is None:
            return
        info = run_info(
            self.cfg,
            self.prepared,
            self.dims,
            fingerprints=self.fingerprints,
            seconds=self.timer.seconds,
            peak_memory_gib=self.peak_memory_gib,
            quantization=self.quantization,
            device=self.device,
        )
        content = assemble(self.found, info)
        problem = self.output.publish(writers(content, self.found, self.tokens))
        num_steps = self.workload.plan.num_steps(self.dims.batch_size)
        self.metric_logger.log_results(content, self.cfg, step=num_steps)
        print(f"\n{results_text(content, self.output.path.resolve().name)}\n")
        if problem or self.metric_logger.problem:
            raise UserError("; ".join(filter(None, (problem, self.metric_logger.problem))))
        print(f"results: {self.output.path / RESULTS}")
        self.exceeded = over_limits(content, self.cfg.fail_if)

    def check(self) -> None:
        """On rank 0: verify the numbers by other code, and compare them with their limits.

        Raises:
            UserError: a number is not what a plain model gives.
            LimitExceeded: a number is above its limit in ``fail_if``.
        """
        if self.output is None:
            return
        del self.readers, self.prepared, self.found  # the plain model needs their memory
        if self.cfg.verify.windows:
            print(*wrapped(verify_run(self.output.path, self.cfg), indent="  "), sep="\n")
        if self.exceeded:
            raise LimitExceeded(self.exceeded)


@parse
def recipe_main(cfg: EvalConfig) -> None:
    """Entry point of ``tune run``."""
    recipe = PerplexityEvalRecipe(cfg)
    recipe.setup(cfg)
    recipe.evaluate()
    recipe.cleanup()
    recipe.report()
    recipe.check()


if __name__ == "__main__":
    recipe_main()
