"""The tutorial of docs/distillation.md, as it stands there, in fewer steps: torchtune's recipe as
released, then ours on two processes, before and after."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import ppl_eval
from ppl_eval import evaluate, shipped
from ppl_eval.data import hf_tokenizer

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "distillation.md"
STEPS = 40


def commands():
    """The shell of the section, in order."""
    text = PAGE.read_text()
    section = text[text.index("## The whole way, on a CPU") : text.index("## On GPUs")]
    blocks = re.findall(r"^```\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return [block for block in blocks if re.match(r"mkdir|tune|python|ppl-eval", block)]


@pytest.fixture(scope="module")
def tutorial(tmp_path_factory):
    """(the folder with ``out``, what was printed by each block)."""
    folder = tmp_path_factory.mktemp("clone")
    (folder / "docs").symlink_to(ROOT / "docs")
    first, distil, *rest = commands()
    assert "knowledge_distillation_single_device" in distil
    distil = distil.rstrip() + f" max_steps_per_epoch={STEPS}\n"
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    script = "echo NEXT\n".join([first, distil, *rest])
    done = subprocess.run(
        ["bash", "-e", "-c", script],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, done.stdout.split("NEXT\n"), done.stderr


def results(folder, name):
    return json.loads((folder / "out" / name / "results.json").read_text())


def test_the_student_is_nearer_to_its_teacher_than_before(tutorial):
    folder, (*_, evaluated), stderr = tutorial
    before, after = (results(folder, name) for name in ("before", "after"))
    for run in (before, after):
        assert run["environment"]["num_processes"] == 2
    assert before["teacher"]["metrics"] == after["teacher"]["metrics"]
    ratios = [run["fidelity"]["perplexity_ratio"] for run in (before, after)]
    assert 1 < ratios[1] < 0.8 * ratios[0]
    kls = [run["fidelity"]["kl_teacher_student_nats"] for run in (before, after)]
    assert kls[1] < 0.6 * kls[0]
    said = evaluated[evaluated.index("after: perplexity x") :].replace("\n ", "")
    perplexity, kl = re.findall(r"\(95 % (\S+) to (\S+)\); the difference is established", said)
    assert float(perplexity[0]) < float(perplexity[1]) < 1
    assert float(kl[0]) < float(kl[1]) < 0
    said = "epoch_0 has model weights and an adapter: the weights are taken as merged"
    assert stderr.count(said) == 1


def test_what_torchtune_wrote_is_what_is_measured(tutorial, run_recipe, held_out):
    """Merged weights, and the adapter of torchtune's own recipe on the student before it, in
    both of its layouts; the first also against transformers, which must not see the adapter."""
    folder, *_ = tutorial
    epoch, student = folder / "out/distilled/epoch_0", folder / "out/student"
    text = (f"dataset.data_files={held_out}", "protocol.max_seq_len=256", "max_documents=12")

    def measure(*args):
        code, _, err = run_recipe(
            "auto_ppl_eval", *text, "dtype=fp32", "output_dir=out/measured", *args
        )
        assert code == 0, err
        lines = Path("out/measured/documents.jsonl").read_text().splitlines()
        return [json.loads(line)["nll_nats_sum"] for line in lines]

    merged = measure(f"checkpoint_dir={epoch}")
    base = measure(f"checkpoint_dir={student}")
    peft = folder / "peft"
    peft.mkdir()
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (peft / name).write_bytes((epoch / name).read_bytes())
    for adapter in (epoch, peft):
        for merge in ("true", "false"):
            found = measure(
                f"checkpoint_dir={student}", f"adapter.dir={adapter}", f"adapter.merge={merge}"
            )
            assert found == pytest.approx(merged, rel=1e-5)
    assert max(abs(a / b - 1) for a, b in zip(base, merged, strict=True)) > 0.1
    plain = folder / "plain"
    plain.mkdir()
    for path in epoch.iterdir():
        if not path.name.startswith("adapter"):
            (plain / path.name).write_bytes(path.read_bytes())
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(plain).eval()
    texts = [json.loads(line)["text"] for line in held_out.read_text().splitlines()[:12]]
    tokenizer = hf_tokenizer(str(shipped.embedded_path("tiny_teacher")))
    theirs = evaluate(model, tokenizer, texts, max_seq_len=256).summary.documents
    assert theirs.sums["nll_nats"].tolist() == pytest.approx(merged, rel=1e-5)


def test_the_page_has_what_the_commands_print(tutorial):
    """The student before distillation does not depend on the number of steps."""
    _, (*_, evaluated), _ = tutorial
    page = {" ".join(line.split()) for line in PAGE.read_text().splitlines()}
    printed = [" ".join(line.split()) for line in evaluated.splitlines()]
    same = [line for line in printed if re.match(r"documents scored|versus its|before \d", line)]
    same += [line for line in printed if line.startswith("tiny_teacher (teacher)")]
    assert len(same) >= 5
    assert set(same) <= page


def test_an_evaluation_in_torchtunes_own_loop(tutorial, tmp_path, held_out):
    """A copy of the recipe with the lines of docs/python_api.md; the last evaluation is of the
    weights that the recipe saves."""
    folder, *_ = tutorial
    page = (ROOT / "docs/python_api.md").read_text()
    (lines,) = re.findall(r"^```\n(# in setup.*?)^```$", page, re.MULTILINE | re.DOTALL)
    setup, train = lines.replace("FILE.jsonl", str(held_out)).replace("% 10", "% 3").split("\n\n")
    recipe = (Path(torchtune_recipes()) / "knowledge_distillation_single_device.py").read_text()
    for mark, more in (("self._tokenizer = ", setup), ("self.global_step += 1", train)):
        line = next(x for x in recipe.splitlines() if x.strip().startswith(mark))
        indent = line[: len(line) - len(line.lstrip())]
        recipe = recipe.replace(line, line + "\n" + textwrap.indent(more, indent), 1)
    (tmp_path / "mine.py").write_text(f"import ppl_eval\n{recipe}")
    args = f"teacher_dir={shipped.embedded_path('tiny_teacher')} student_dir={folder}/out/student"
    args += f" train_file={folder}/out/train.jsonl output_dir=watched max_steps_per_epoch=6"
    config = ROOT / "docs/tiny_distillation.yaml"
    done = subprocess.run(
        [sys.executable, "mine.py", "--config", str(config), *args.split()],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (log,) = (tmp_path / "watched/logs").glob("*.txt")
    found = [float(x) for x in re.findall(r"perplexity:([\d.]+)", log.read_text())]
    model, tokenizer = ppl_eval.load(tmp_path / "watched/epoch_0")
    texts = ppl_eval.text_corpus(data_files=str(held_out))
    saved = ppl_eval.evaluate(model, tokenizer, texts, max_seq_len=256).perplexity
    assert len(found) == 2
    assert found[1] == pytest.approx(saved, rel=1e-5)
    assert found[0] > 1.02 * found[1]


def torchtune_recipes():
    """The folder of torchtune's recipes, which cannot be imported."""
    (folder,) = importlib.util.find_spec("recipes").submodule_search_locations
    return folder
