"""Text that a run prints: the workload before it starts, the results at its end."""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from ppl_eval.evaluation.preflight import Preflight
from ppl_eval.evaluation.workload import Workload
from ppl_eval.metrics.definitions import FEWEST_DOCUMENTS, exp_or_inf
from ppl_eval.parallel.dims import ParallelDims
from ppl_eval.plural import counted, some
from ppl_eval.report.layout import columns, entries, kept, number
from ppl_eval.report.tables import result_rows, result_table, teacher_rows

logger = logging.getLogger("ppl_eval")


def results_text(content: Mapping[str, Any], name: str) -> str:
    """What a run found: how it was measured, the table, and how far it is from its teacher.

    Args:
        content: what results.json has.
        name: what the table calls the run.
    """
    rows = result_rows(content, name)
    if "teacher" in content:
        rows += teacher_rows(content, "its teacher")
    parts = [entries(_run_entries(content), 10), result_table(rows)]
    if "fidelity" in content:
        parts.append(fidelity_text(content["fidelity"]))
    if content["metrics"]["overflow"]:
        parts.append("a perplexity exceeds float64 and is null in results.json: see the NLL")
    return "\n\n".join(parts)


def _run_entries(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What was measured and how."""
    environment, config = content["environment"], content["config"]
    checkpoint = config["checkpointer"].get("checkpoint_dir", "")
    yield "model", f"{config['model']['_component_']} {checkpoint}".rstrip() + _adapted(config)
    if "teacher" in content:
        yield "teacher", _teacher(content["teacher"], environment)
    yield "text", _dataset(config["dataset"])
    yield "protocol", protocol_line(content["protocol"])
    yield "scored", _scored(content["counts"])
    interval = content["intervals_95"]["token_perplexity"]
    num_documents = content["counts"]["documents_scored"]
    if interval is not None:
        low, high = map(number, interval)
        yield "interval", f"token ppl {low} to {high} (95 %, clustered by document)"
    elif 1 < num_documents < FEWEST_DOCUMENTS:  # one may be a stream of many
        yield "interval", too_few(num_documents)
    dtype = kept(f"{environment['dtype']} (checkpoint {environment['checkpoint_dtype']})")
    if content["quantization"] is not None:
        yield "quantised", _quantised(content["quantization"])
    devices = f"{environment['num_processes']} x {environment['device']}"
    yield "mesh", f"{environment['mesh']['description']} on {devices}, {dtype}"
    yield "speed", f"{content['performance']['tokens_per_s']:,.0f} scored tokens/s"


def _quantised(found: Mapping[str, Any]) -> str:
    size = "" if found["group_size"] is None else f", groups of {found['group_size']}"
    layers = f"{found['quantized_linear_layers']} of {found['linear_layers']} linear layers"
    before, after = (found[f"bytes_{when}"] / 2**20 for when in ("before", "after"))
    activations = "" if found["activations"] is None else f", activations {found['activations']}"
    scheme = found["scheme"] or f"in the checkpoint: weights {found['weights']}{activations}"
    text = f"{scheme}{size}; {layers}, {before:,.1f} to {after:,.1f} MiB"
    error = found["largest_error_in_steps"]
    return text if error is None else f"{text}, at most {kept(f'{error:.2f} steps')} off"


def _teacher(teacher: Mapping[str, Any], environment: Mapping[str, Any]) -> str:
    named = f"{teacher['model']} {teacher['checkpoint_dir'] or ''}".rstrip()
    about = kept(f"{teacher['dtype']} (checkpoint {teacher['checkpoint_dtype']})")
    if teacher["quantization"] is not None:
        about += f", quantised {_quantised(teacher['quantization'])}"
    if teacher["mesh"] != environment["mesh"]:
        about += f" on {teacher['mesh']['description']}"
    return f"{named}, {about}"


def _dataset(dataset: Mapping[str, Any]) -> str:
    """The files of a text, or the names of its corpora, or the component that makes it."""
    files = dataset.get("data_files") or dataset.get("source") or []
    files = [files] if isinstance(files, str) else [*files]
    return some(files, 2) or ", ".join(dataset.get("corpora", ())) or dataset["_component_"]


def too_few(num_documents: int) -> str:
    """Why there is no interval."""
    return (
        f"none, too few documents: {counted(num_documents, 'document')}, at least"
        f" {FEWEST_DOCUMENTS} are needed"
    )


def _scored(counts: Mapping[str, Any]) -> str:
    """How many tokens counted, and how many did not and why."""
    skipped = counts["not_scored"]
    reasons = [
        f"{counted(skipped[reason], 'token')} {why}"
        for reason, why in (
            ("no_context", "without context"),
            ("context_only", "as context only"),
            ("truncated", "truncated"),
            ("masked", "masked"),
        )
        if skipped[reason]
    ]
    if skipped["empty"]:
        reasons.append(counted(skipped["empty"], "empty document"))
    scored = counted(counts["scored_tokens"], "token")
    documents = counted(counts["documents"], "document")
    return f"{scored} of {documents}; not scored: {', '.join(map(kept, reasons)) or 'none'}"


def _adapted(config: Mapping[str, Any]) -> str:
    adapter = config["adapter"]
    how = "merged" if adapter["merge"] else "not merged"
    return "" if adapter["dir"] is None else f", adapter {adapter['dir']} ({how})"


def log_workload(prepared: Preflight, dims: ParallelDims) -> None:
    """Log what was decided for the user, warnings, and how much is about to run."""
    workload = prepared.workload
    windows, plan, corpus = workload.windows, workload.plan, workload.corpus
    for note in prepared.notes:
        logger.info(note)
    for warning in prepared.warnings:
        logger.warning("warning: %s", warning)
    logger.info(
        f"{counted(len(corpus.documents), 'document')},"
        f" {counted(corpus.num_tokens.sum(), 'token')}: {counted(len(windows), 'window')} in"
        f" {counted(len(plan.batches), 'batch')} ({padding(workload):.1%} padding)"
    )
    logger.info(f"{counted(plan.num_steps(dims.batch_size), 'step')} on {dims}")


def padding(workload: Workload) -> float:
    """Share of the input positions that hold no token."""
    return float(1 - workload.windows.num_inputs.sum() / workload.plan.num_positions.sum())


def protocol_line(protocol: Mapping[str, Any]) -> str:
    """One line such as ``document: windows of 1,024 tokens, no overlap, no BOS, no EOS``."""
    stride = protocol["stride"]
    overlap = "no overlap" if stride is None else f"stride {stride:,}"
    bos = "no BOS" if protocol["bos_id"] is None else "BOS first"
    if protocol["name"] == "lm_eval_rolling":
        bos = "prefix token" if protocol["opening_id"] is None else "prefix token, BOS scored"
    eos = "no EOS" if protocol["eos_id"] is None else "EOS scored"
    window = f"windows of {counted(protocol['max_seq_len'], 'token')}"
    joined = protocol["separator"]
    joined = "" if joined is None else f", texts joined by {joined!r}"
    return f"{protocol['name']}: {window}, {overlap}, {bos}, {eos}{joined}"


def fidelity_text(found: Mapping[str, Any]) -> str:
    """How far a student is from its teacher.

    Args:
        found: the ``fidelity`` section.
    """
    percentiles = found["kl_percentiles_nats"]
    kl = f"{found['kl_teacher_student_nats']:.5f} nats"
    interval = found["interval_95"]["kl_teacher_student_nats"]
    if interval is not None:
        kl += ", " + kept(f"95 % {_small(interval[0])} to {_small(interval[1])}")
    lines = [
        ("perplexity", _ratio_line(found)),
        ("KL(t||s)", kl),
        (
            "",
            f"median {_small(percentiles['50'])}, 95th percentile {_small(percentiles['95'])},"
            f" 99th {_small(percentiles['99'])},"
            f" {kept('largest ' + _small(found['kl_maximum_nats']))}",
        ),
        (
            "KL(s||t), JS",
            f"{_small(found['kl_student_teacher_nats'])}, {_small(found['js_nats'])} nats",
        ),
        ("agreement", f"top-1 {found['top1_agreement']:.2%}, top-5 {found['top5_agreement']:.2%}"),
        (
            "right token",
            f"probability {found['probability_difference_mean']:+.4f} on average, rms"
            f" {found['probability_difference_rms']:.4f}",
        ),
    ]
    return entries([*lines, *_exceptions(found)], 14)


def _exceptions(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The worst token, the noise floor, and ids that only one of the two models has."""
    worst = next(iter(found["worst_tokens"]), {})
    if "token" in worst and worst["kl_teacher_student_nats"] > 0:
        about = f"document {worst['document']}"
        about += "" if worst["id"] is None else f" ({worst['id']})"
        yield (
            "worst token",
            f"{about}\nafter {_end(worst['before'])}: {kept(repr(worst['token']))}\n"
            f"first choice of the teacher {kept(repr(worst['teacher_top1']))},"
            f" of the student {kept(repr(worst['student_top1']))}",
        )
    noise, ids = found["noise_floor"], found["vocabulary"]
    if noise is not None:
        yield (
            "noise floor",
            f"KL {noise['kl_teacher_student_nats']:.1e}, top-1 {noise['top1_agreement']:.2%}: the"
            f" teacher against itself, rounded otherwise in {noise['dtype']}",
        )
    if ids["student_ids"] != ids["teacher_ids"]:
        yield (
            "vocabulary",
            f"{ids['shared_ids']:,} ids that both have, of the student's"
            f" {ids['student_ids']:,} and the teacher's {ids['teacher_ids']:,}",
        )


def _end(text: str) -> str:
    """The last words, quoted; at most 40 columns."""
    while columns(repr(text)) > 40:
        text = text[1:]
    return kept(repr(text))


def _small(value: float) -> str:
    """With what is left of a small number: 0.06290 or 7.1e-06."""
    return f"{value:.5f}" if abs(value) >= 1e-3 or value == 0 else f"{value:.1e}"


def _ratio_line(found: Mapping[str, Any]) -> str:
    ratio, interval = found["perplexity_ratio"], found["interval_95"]["ln_perplexity_ratio"]
    if ratio is None:
        return "ratio to the teacher's exceeds float64"
    text = f"x {ratio:.5f} of the teacher's"
    if interval is None:
        return text
    low, high = map(exp_or_inf, interval)
    return f"{text}, {kept(f'95 % {low:.5f} to {high:.5f}')} {kept('(paired by document)')}"
