"""``verify`` catches faults planted in the run: in fp32, on the embedded pair, with all windows."""

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from families import write
from ranks import run_script
from safetensors.torch import save_file

from ppl_eval import cli, shipped
from ppl_eval.data import collate as collating
from ppl_eval.data import protocol as protocols
from ppl_eval.data import windows
from ppl_eval.errors import UserError
from ppl_eval.evaluation import workload
from ppl_eval.metrics.ledger import Ledger
from ppl_eval.model import corrections, prepare
from ppl_eval.score.head import Head
from ppl_eval.verify import plain
from ppl_eval.verify.verify import check_causal, later_token_changes, verify_folder
from ppl_eval.verify.windows import Window

TEACHER = ("tiny_teacher_ppl_eval", "verify.windows=all")
TRANSFORMERS = pytest.importorskip("transformers")


def section():
    with open("out/tiny_teacher_ppl_eval/results.json") as file:
        return json.load(file)["verify"]


def caught(run_recipe, what, *args):
    """The run fails, says ``what``, and results.json has the problem."""
    code, out, err = run_recipe(*TEACHER, "output_dir=out/tiny_teacher_ppl_eval", *args)
    assert code == 1
    assert "is not verified" in err
    assert "results:" in out  # they were written before
    found = section()
    assert any(what in problem for problem in found["problems"])
    assert found["problems"][0] in err
    assert found["method"].endswith(f"of transformers {TRANSFORMERS.__version__}, fp32")
    return found


@pytest.mark.parametrize(
    "protocol",
    [
        ("document",),
        ("document", "protocol.stride=30", "protocol.add_eos=true"),
        ("document", "protocol.add_bos=false"),
        ("concat",),
        ("hf_stride",),
        ("hf_stride", "protocol.stride=100", "protocol.add_bos=false"),
        ("lm_eval_rolling",),
        ("lm_eval_rolling", "protocol.add_bos=false"),
        ("llama_cpp",),
        ("llama_cpp", "protocol.add_bos=false"),
        ("gptq",),
        ("gptq", "protocol.add_bos=false"),
    ],
    ids=" ".join,
)
def test_every_protocol_agrees_with_its_definition_and_transformers(run_recipe, protocol):
    name, *more = protocol
    args = f"protocol.name={name}", "protocol.max_seq_len=100", "max_documents=30", *more
    code, out, err = run_recipe(*TEACHER, *args)
    assert code == 0, err
    assert "verified" in out
    found = section()
    assert found["problems"] == []
    assert found["windows"] == found["windows_of_run"] == len(found["by_window"])
    assert abs(found["relative_difference"]) < 1e-6
    assert found["largest_relative_difference"] < 5e-6


def test_labels_shifted_by_one(run_recipe, monkeypatch):
    def shifted(*args):
        batch = collating.collate(*args)
        inputs, tokens = batch.inputs_BT.flatten(), batch.tokens
        return replace(batch, tokens=replace(tokens, target_N=inputs[tokens.index_N]))

    monkeypatch.setattr(workload, "collate", shifted)
    caught(run_recipe, "differs from the plain model's")


def test_bos_missing(run_recipe, monkeypatch):
    monkeypatch.setattr(protocols, "wants_bos", lambda tokenizer: False)
    caught(run_recipe, "the run's")


@pytest.mark.parametrize("fault", ["dropped", "scored twice"])
def test_a_window(run_recipe, monkeypatch, fault):
    sliding, kept = windows.sliding, [0, 1, 3] if fault == "dropped" else [0, 1, 2, 2, 3]

    def faulty(length, *args, **more):
        found = sliding(length, *args, **more)
        chosen = np.asarray([*kept, *range(4, len(found))])
        rows = ("document", "start", "num_tokens", "num_skipped", "has_lead")
        return replace(found, **{name: getattr(found, name)[chosen] for name in rows})

    monkeypatch.setattr(windows, "sliding", faulty)
    caught(run_recipe, "the run scored")


def test_sums_in_bf16(run_recipe, monkeypatch):
    update = Ledger.update

    def rounded(self, tokens, values):
        update(self, tokens, values)
        self.sums.copy_(self.sums.bfloat16())

    monkeypatch.setattr(Ledger, "update", rounded)
    caught(run_recipe, "differs from the plain model's")


def variant(tmp_path, name, **changes):
    """The embedded teacher's trained weights under another config.json."""
    folder = tmp_path / "variant"
    shutil.copytree(shipped.embedded_path(name), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return "auto_ppl_eval", f"checkpoint_dir={folder}"


def of_variant(run_recipe, name_and_folder, held_out, *args):
    return run_recipe(
        *name_and_folder,
        *(f"dataset.data_files={held_out}", "dtype=fp32", "max_documents=20"),
        *("output_dir=out/tiny_teacher_ppl_eval", "verify.windows=all", "protocol.max_seq_len=90"),
        *args,
    )


@pytest.mark.parametrize("planted", [False, True])
def test_a_sliding_window_ignored(run_recipe, monkeypatch, tmp_path, held_out, planted):
    folder = variant(tmp_path, "tiny_teacher", model_type="mistral", sliding_window=16)
    if planted:
        monkeypatch.setattr(corrections, "_windows", lambda config, count: (None,) * count)
    code, _, err = of_variant(run_recipe, folder, held_out)
    assert code == int(planted), err
    assert ("differs from the plain model's" in err) == planted
    assert section()["method"].startswith("MistralForCausalLM")


@pytest.mark.parametrize("planted", [False, True])
def test_a_cap_of_the_logits_forgotten(run_recipe, monkeypatch, tmp_path, held_out, planted):
    write("gemma2 (caps 2 and 4, window of 11)", tmp_path / "variant")
    if planted:
        of = Head.of
        monkeypatch.setattr(Head, "of", lambda owner, tail, **more: of(owner, None, **more))
    folder = "auto_ppl_eval", f"checkpoint_dir={tmp_path / 'variant'}"
    code, _, err = of_variant(run_recipe, folder, held_out)
    assert code == int(planted), err
    assert ("differs from the plain model's" in err) == planted


@pytest.mark.parametrize("planted", [False, True])
def test_a_stale_rope_theta(run_recipe, monkeypatch, planted):
    if planted:
        monkeypatch.setattr(prepare, "check_against_config", lambda model, checkpoint: None)
        caught(run_recipe, "differs from the plain model's", "model.rope_base=500000")
    else:
        code, _, err = run_recipe(*TEACHER, "model.rope_base=500000")
        assert code == 1
        assert "rope" in err


TP = """
import runpy
import sys
import torch.distributed as dist
from ppl_eval.parallel import tensor
from ppl_eval.shipped import recipe_path

class Twice:
    def __getattr__(self, name):
        return getattr(dist, name)

    def all_reduce(self, *args, **more):
        dist.all_reduce(*args, **more)
        # of the embedding's too, the norms would cancel it
        if sys._getframe(1).f_code.co_name != "forward":
            dist.all_reduce(*args, **more)

if sys.argv.pop() == "planted":
    tensor.dist = Twice()
runpy.run_path(str(recipe_path()), run_name="__main__")
"""


@pytest.mark.parametrize("planted", [False, True])
def test_a_sum_over_tp_too_many(tmp_path, monkeypatch, planted):
    (tmp_path / "script.py").write_text(TP)
    monkeypatch.chdir(tmp_path)
    args = "--config", *TEACHER, "max_documents=20", "parallel.tp=2", "planted" if planted else "no"
    ended = run_script(2, tmp_path / "script.py", *args, cwd=tmp_path)
    assert [process.code for process in ended] == [int(planted), 0], ended[0].err
    assert ("differs from the plain model's" in ended[0].err) == planted
    assert bool(section()["problems"]) == planted


@pytest.mark.parametrize("planted", [False, True])
def test_an_adapter_applied_twice(run_recipe, monkeypatch, tmp_path, planted):
    """A checkpoint with the adapter merged already, as torchtune's recipes write, and the same
    adapter again; the plain model begins with the base."""
    folder, generator = tmp_path / "adapter", torch.Generator().manual_seed(5)
    folder.mkdir()
    name = "model.layers.{}.self_attn.{}_proj.{}weight"
    tensors = {}
    for layer in range(6):
        for proj, rows in (("q", 128), ("v", 64)):
            key = f"base_model.model.{name.format(layer, proj, '')}".removesuffix("weight")
            tensors[f"{key}lora_A.weight"] = torch.randn(4, 128, generator=generator) / 10
            tensors[f"{key}lora_B.weight"] = torch.randn(rows, 4, generator=generator) / 10
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    if planted:
        merged = prepare.PreparedModel.load

        def twice(self, *args, **more):
            adapter = self.adapter
            adapter_shards = type(adapter).shards

            def doubled(adapter, full, name, slots, device):
                found = adapter_shards(adapter, full, name, slots, device)
                if found is None or adapter.update_of(name) is None:
                    return found
                return adapter_shards(adapter, found[name], name, slots, device)

            monkeypatch.setattr(type(adapter), "shards", doubled)
            merged(self, *args, **more)

        monkeypatch.setattr(prepare.PreparedModel, "load", twice)
        caught(run_recipe, "differs from the plain model's", f"adapter.dir={folder}")
    else:
        code, _, err = run_recipe(*TEACHER, f"adapter.dir={folder}")
        assert code == 0, err


@pytest.fixture
def finished(run_recipe):
    """Folder of a finished run of twelve documents."""
    code, _, err = run_recipe("tiny_teacher_ppl_eval", "max_documents=12", "save_tokens=true")
    assert code == 0, err
    return Path("out/tiny_teacher_ppl_eval")


@pytest.fixture
def ppl_eval_verify(monkeypatch, capsys):
    """``ppl-eval verify`` in this process: (exit code, stdout, stderr)."""

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["ppl-eval", "verify", *map(str, args)])
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return run


def test_a_finished_run(finished, ppl_eval_verify):
    before = json.loads((finished / "results.json").read_text())
    code, out, err = ppl_eval_verify(finished, "--windows", "7")
    assert code == 0, err
    assert "verified 7 of" in out
    after = json.loads((finished / "results.json").read_text())
    assert after.pop("verify")["windows"] == 7
    assert after == before
    code, _, err = ppl_eval_verify(finished, "--windows", "all", "--tolerance", "1e-12")
    assert code == 1
    assert "by more than 1e-12" in err


def test_a_run_that_was_changed(finished, ppl_eval_verify):
    file = finished / "documents.jsonl"
    first, *others = file.read_text().splitlines()
    changed = json.loads(first)
    changed["nll_nats_sum"] += 1.0
    file.write_text("".join(f"{line}\n" for line in (json.dumps(changed), *others)))
    code, _, err = ppl_eval_verify(finished)
    assert code == 1
    assert "documents.jsonl adds up to" in err


def damaged(folder, fault):
    results = folder / "results.json"
    content = json.loads(results.read_text())
    if fault == "no results":
        results.unlink()
    elif fault == "cut short":
        data = (folder / "windows.parquet").read_bytes()
        (folder / "windows.parquet").write_bytes(data[: len(data) // 2])
    elif fault == "documents cut short":
        lines = (folder / "documents.jsonl").read_text()
        (folder / "documents.jsonl").write_text(lines[: len(lines) // 2])
    elif fault == "other schema":
        results.write_text(json.dumps({**content, "schema_version": 99}))
    elif fault == "unknown protocol":
        content["protocol"]["name"] = "backwards"
        results.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("no results", "give the output folder of a finished run"),
        ("cut short", "windows.parquet cannot be read"),
        ("documents cut short", "documents.jsonl"),
        ("other schema", "schema_version 99"),
        ("unknown protocol", "the run's protocol is 'backwards'"),
    ],
)
def test_a_folder_that_cannot_be_verified(finished, fault, sentence):
    damaged(finished, fault)
    with pytest.raises(UserError, match=re.escape(sentence)):
        verify_folder(finished, None, None)


def test_a_model_too_large_for_one_process(finished, monkeypatch):
    monkeypatch.setattr(plain, "free_bytes", lambda device: 2**20)
    said = verify_folder(finished, None, None)
    assert said.startswith("not verified: the whole model needs about")
    assert section() is None


@pytest.mark.parametrize("value", ["some", "-1"])
def test_a_number_of_windows_that_is_none(run_recipe, value):
    code, _, err = run_recipe("tiny_teacher_ppl_eval", f"verify.windows={value}")
    assert code == 1
    assert "verify.windows is" in err


@pytest.mark.parametrize(("reads_ahead", "least", "most"), [(True, 0.1, 1e9), (False, 0, 1e-6)])
def test_a_model_that_reads_later_tokens(reads_ahead, least, most):
    table = torch.randn(30, 30, generator=torch.Generator().manual_seed(2))

    def logits(ids):
        whole = table[ids].mean(0) if reads_ahead else 0
        return table[ids] + whole

    model = plain.PlainModel(logits, torch.device("cpu"), "a test's")
    window = Window(0, list(range(12)), list(range(1, 12)), 0)
    change, problems = later_token_changes(model, window), []
    assert least <= change <= most
    check_causal(change, problems)
    assert bool(problems) == reads_ahead
