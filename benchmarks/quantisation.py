"""The tables of docs/quantisation.md: every scheme on every mesh, and what it costs a model.

    python benchmarks/quantisation.py meshes DIR TEXT.jsonl [key=value ...] [--group-size 64]
        [--meshes dp_shard=2 dp_shard=4 cp=2 tp=3] [--schemes nf4 ...]
    python benchmarks/quantisation.py costs DIR TEXT.jsonl [key=value ...] [--group-size 64]

`meshes` prints the relative difference of each mesh's NLL from that of a plain loop over
transformers' model that torchao has quantised (NF4: from one process), or why the mesh is refused.
"a window" is how far one window of the loop moves (root mean square, relative) if the embedding is
multiplied by 1 + 1e-7: n windows together move by this over the root of n.
`costs` has each scheme beside the unquantised model, which is the teacher; tokens/s are those of
the quantised model alone, on the first document, so run it on an idle machine. All is in fp32 on
CPUs; key=value goes to every run. On the embedded teacher:

    python benchmarks/quantisation.py meshes $(ppl-eval where tiny_teacher) \\
        $(ppl-eval where tiny_text)/heldout.jsonl max_documents=20 --group-size 32 --meshes tp=2
"""

import argparse
import json
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ppl_eval.quantize.schemes import SCHEMES

RUN = "torch.distributed.run", "--standalone", "-m", "ppl_eval", "--config", "auto_ppl_eval"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("table", choices=("meshes", "costs"))
    parser.add_argument("checkpoint_dir")
    parser.add_argument("text")
    parser.add_argument("overrides", nargs="*", help="key=value for every run")
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--meshes", nargs="*", default=["dp_shard=2", "dp_shard=4", "cp=2", "tp=3"])
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES))
    args = parser.parse_args()
    shared = [f"checkpoint_dir={args.checkpoint_dir}", f"dataset.data_files={args.text}"]
    shared += ["dtype=fp32", "device=cpu", "noise_floor=false", *args.overrides]
    sections = {}
    for scheme in args.schemes:
        size = {None: None, 64: 64}.get(SCHEMES[scheme].group_size, args.group_size)
        sections[scheme] = [f"quantizer.scheme={scheme}"]
        sections[scheme] += [] if size is None else [f"quantizer.group_size={size}"]
    packages = ("torch", "torchtune", "torchao", "transformers")
    print(
        f"{Path(args.checkpoint_dir).name}, {Path(args.text).name}, fp32, groups of"
        f" {args.group_size}; {', '.join(f'{name} {version(name)}' for name in packages)};"
        f" {os.cpu_count()} cores, {platform.machine()}\n"
    )
    if args.table == "meshes":
        print_meshes(shared, args.checkpoint_dir, sections, args.meshes)
    else:
        print_costs(shared, args.checkpoint_dir, sections)


def print_meshes(
    shared: list[str], folder: str, sections: dict[str, list[str]], meshes: list[str]
) -> None:
    """A row for each scheme, a column for each mesh."""
    print(f"| scheme | a window | one process | {' | '.join(meshes)} |")
    print(f"| {' | '.join(['---'] * (3 + len(meshes)))} |", flush=True)
    for scheme, section in sections.items():
        found = [run([*shared, *section], mesh) for mesh in ("", *meshes)]
        expected, noise, first = math.nan, "", found[0]
        if not isinstance(first, str):
            loop = plain_nll(folder, scheme, first)
            expected = math.fsum(loop) or first["metrics"]["nll_nats_sum"]
            nudged = plain_nll(folder, scheme, first, 1 + 1e-7)
            moved = [(b / a - 1) ** 2 for a, b in zip(loop, nudged, strict=True)]
            noise = f"{math.sqrt(math.fsum(moved) / len(moved)):.0e}" if moved else ""
        cells = [noise]
        cells += [
            each
            if isinstance(each, str)
            else f"{each['metrics']['nll_nats_sum'] / expected - 1:+.1e}"
            for each in found
        ]
        print(f"| {scheme} | {' | '.join(cells)} |", flush=True)


def print_costs(shared: list[str], folder: str, sections: dict[str, list[str]]) -> None:
    """A row for each scheme that runs on this device."""
    print("| scheme | perplexity | ratio (95 %) | KL, nats | top-1 | layers | MiB | tokens/s |")
    print(f"| {' | '.join(['---'] * 8)} |")
    plain, alone = run(shared), run([*shared, "max_documents=1"])
    assert not isinstance(plain, str), plain
    assert not isinstance(alone, str), alone
    print(
        f"| none | {plain['metrics']['token_perplexity']:.4f} | 1 | 0 | 100 % | |"
        f" {sum(plain['weights']['parameters'].values()) * 4 / 2**20:,.1f} |"
        f" {alone['performance']['tokens_per_s']:,.0f} |",
        flush=True,
    )
    for scheme, section in sections.items():
        alone = run([*shared, *section, "max_documents=1"])
        if isinstance(alone, str):
            continue
        pair = run([*shared, *section, f"teacher_checkpoint_dir={folder}"])
        assert not isinstance(pair, str), pair
        fidelity, made = pair["fidelity"], pair["quantization"]
        low, high = map(math.exp, fidelity["interval_95"]["ln_perplexity_ratio"])
        print(
            f"| {scheme} | {pair['metrics']['token_perplexity']:.4f}"
            f" | {fidelity['perplexity_ratio']:.5f} ({low:.5f} to {high:.5f})"
            f" | {fidelity['kl_teacher_student_nats']:.1e} | {fidelity['top1_agreement']:.2%}"
            f" | {made['quantized_linear_layers']} of {made['linear_layers']}"
            f" | {made['bytes_after'] / 2**20:,.1f}"
            f" | {alone['performance']['tokens_per_s']:,.0f} |",
            flush=True,
        )


def run(overrides: list[str], mesh: str = "") -> dict[str, Any] | str:
    """results.json of a run; or the start of the sentence with which it was refused."""
    axis, _, degree = mesh.partition("=")
    size = int(degree or 1)
    with tempfile.TemporaryDirectory() as folder:
        args = [*overrides, f"output_dir={folder}/out"]
        args += [f"parallel.{axis}={size}"] if mesh else []
        threads = max(1, (os.cpu_count() or 1) // size)
        done = subprocess.run(
            [sys.executable, "-m", *RUN[:2], f"--nproc_per_node={size}", *RUN[2:], *args],
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            reason = re.search(r"ppl_eval: error: (.*)", done.stderr)
            return "refused: " + (reason[1] if reason else done.stderr[-200:]).split(":")[0]
        return json.loads(Path(folder, "out/results.json").read_text())


def plain_nll(folder: str, scheme: str, content: dict[str, Any], factor: float = 1) -> list[float]:
    """NLL of each window of a run, by a model that shares no code with ppl_eval's.

    The windows are read from the run's config; their tokens are the tokenizer's own. The embedding
    is multiplied by ``factor``. Empty for a scheme that transformers' model cannot have.
    """
    import torch
    import torch.nn.functional as F
    from torchao import quantization as ao
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    size = content["quantization"]["group_size"]
    config = {
        "int8_weight_only": lambda: ao.Int8WeightOnlyConfig(),
        "int8_dynamic": lambda: ao.Int8DynamicActivationInt8WeightConfig(),
        "int8_dynamic_int4": lambda: ao.Int8DynamicActivationIntxWeightConfig(
            weight_dtype=torch.int4, weight_granularity=ao.PerGroup(size)
        ),
        "int4_weight_only": lambda: ao.IntxWeightOnlyConfig(
            weight_dtype=torch.int4, granularity=ao.PerGroup(size)
        ),
        "float8_weight_only": lambda: ao.Float8WeightOnlyConfig(),
    }.get(scheme)
    if config is None:
        return []
    ao.quantize_(model.model.layers, config())
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(factor)
    tokenizer, protocol = AutoTokenizer.from_pretrained(folder), content["protocol"]
    bos = [] if protocol["bos_id"] is None else [protocol["bos_id"]]
    step = protocol["max_seq_len"] - len(bos)
    lines = Path(content["config"]["dataset"]["data_files"]).read_text().splitlines()
    parts, count = [], 0
    with torch.no_grad():
        for line in lines[: content["config"]["max_documents"]]:
            ids = tokenizer(json.loads(line)["text"], add_special_tokens=False)["input_ids"]
            for start in range(0, len(ids), step):
                window = torch.tensor([[*bos, *ids[start : start + step]]])
                logits = model(window[:, :-1]).logits[0].double()
                count += window.shape[1] - 1
                parts.append(F.cross_entropy(logits, window[0, 1:], reduction="sum").item())
    assert count == content["counts"]["scored_tokens"], "the loop reads other windows"
    return parts


if __name__ == "__main__":
    main()
