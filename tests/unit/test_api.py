"""The Python API: load a folder, evaluate with any tokenizer, show, save."""

import json
import shutil

import pytest
import torch
from ranks import run_on_ranks

import ppl_eval
from ppl_eval.commands.compare import compare
from ppl_eval.data import hf_tokenizer
from ppl_eval.parallel.dims import ParallelDims
from ppl_eval.shipped import embedded_path
from ppl_eval.verify.verify import verify_folder

transformers = pytest.importorskip("transformers")
STUDENT, TEACHER = embedded_path("tiny_student"), embedded_path("tiny_teacher")


@pytest.fixture(scope="module")
def texts(held_out):
    return ppl_eval.text_corpus(data_files=str(held_out))[:12]


@pytest.fixture(scope="module")
def result(texts):
    model, tokenizer = ppl_eval.load(STUDENT)
    return ppl_eval.evaluate(model, tokenizer, texts, max_seq_len=200)


def nll_of(result):
    return result.summary.total.nll_nats_sum


def test_a_loaded_model_is_transformers_own(result, texts):
    model = transformers.AutoModelForCausalLM.from_pretrained(STUDENT, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(STUDENT)
    theirs = ppl_eval.evaluate(model, tokenizer, texts, max_seq_len=200)
    assert nll_of(theirs) == pytest.approx(nll_of(result), rel=1e-6)
    assert theirs.summary.total.counts == result.summary.total.counts
    assert theirs.to_dict()["fingerprints"]["tokenizer"] != ""


@pytest.mark.parametrize("bos", [True, False])
def test_a_tokenizer_of_transformers_gives_the_ids_of_its_folder(tmp_path, texts, bos):
    """With a template that adds a BOS, and without; special tokens in a text are text."""
    shutil.copytree(STUDENT, tmp_path / "model")
    file = tmp_path / "model/tokenizer.json"
    content = json.loads(file.read_text())
    if not bos:
        content["post_processor"] = None
        config = tmp_path / "model/tokenizer_config.json"
        settings = {**json.loads(config.read_text()), "add_bos_token": False}
        config.write_text(json.dumps(settings))
    file.write_text(json.dumps(content))
    ours = hf_tokenizer(str(tmp_path / "model"))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    model, _ = ppl_eval.load(STUDENT)
    documents = [*texts, "a text with <|begin|> in it, twice: <|begin|>"]
    found = [
        ppl_eval.evaluate(model, tokenizer, documents, max_seq_len=200)
        for tokenizer in (ours, theirs)
    ]
    assert found[0].workload.protocol == found[1].workload.protocol
    assert (found[0].workload.protocol.bos_id is not None) == bos
    assert nll_of(found[0]) == nll_of(found[1])


def test_a_result_is_short_to_look_at(result):
    low, high = result.intervals["token_perplexity"]
    assert repr(result) == (
        f"Evaluation(perplexity {result.perplexity:.4f}, 95 % {low:.4f} to {high:.4f};"
        f" {result.summary.total.num_scored:,} tokens of 12 documents)"
    )
    assert len(result._repr_html_()) < 3_000
    assert all(len(line) <= 80 for line in result.table().splitlines())


def test_a_saved_result_is_a_runs(result, tmp_path, run_recipe_folder):
    """The same keys and numbers as the recipe's on the same documents; compare reads both."""
    result.save(tmp_path / "api")
    saved = json.loads((tmp_path / "api/results.json").read_text())
    assert saved == json.loads(json.dumps(result.to_dict()))
    run = json.loads((run_recipe_folder / "results.json").read_text())
    assert saved.keys() == run.keys()
    for section in ("counts", "metrics", "intervals_95", "domains", "protocol", "weights"):
        assert saved[section] == run[section]
    for key in ("data", "tokenizer", "protocol"):
        assert saved["fingerprints"][key] == run["fingerprints"][key]
    assert saved["environment"].keys() == run["environment"].keys()
    for name in ("documents.jsonl", "windows.parquet"):
        ours, theirs = ((f / name).read_bytes() for f in (tmp_path / "api", run_recipe_folder))
        assert ours == theirs
    shown = compare([run_recipe_folder, tmp_path / "api"]).replace("\n ", "")
    assert "api: perplexity x 1.00000 of" in shown
    assert "agree with each other" in verify_folder(tmp_path / "api", None, None)
    saved["metrics"]["nll_nats_sum"] += 1
    (tmp_path / "api/results.json").write_text(json.dumps(saved))
    with pytest.raises(ppl_eval.UserError, match=r"windows.parquet adds up to 2,791 scored tokens"):
        verify_folder(tmp_path / "api", None, None)


@pytest.fixture(scope="module")
def run_recipe_folder(tmp_path_factory):
    """Output of the recipe on the same twelve documents."""
    import runpy
    import sys
    from unittest import mock

    folder = tmp_path_factory.mktemp("run") / "out"
    args = f"--config tiny_ppl_eval max_documents=12 protocol.max_seq_len=200 output_dir={folder}"
    args += " max_tokens_per_batch=1024"
    with mock.patch.object(sys, "argv", ["ppl_eval", *args.split()]):
        path = str(ppl_eval.shipped.recipe_path())
        runpy.run_path(path, run_name="recipe")["recipe_main"]()
    return folder


def test_with_a_teacher(texts, tmp_path):
    (student, tokenizer), (teacher, _) = ppl_eval.load(STUDENT), ppl_eval.load(TEACHER)
    result = ppl_eval.evaluate(student, tokenizer, texts, max_seq_len=200, teacher=teacher)
    result.save(tmp_path / "pair")
    saved = json.loads((tmp_path / "pair/results.json").read_text())
    assert saved["teacher"]["metrics"]["token_perplexity"] == result.teacher.total.perplexity
    assert saved["fidelity"]["vocabulary"]["shared_ids"] == 509
    assert "KL(t||s)" in result.table()
    assert "pair" in compare([tmp_path / "pair"])


def on_ranks(rank, texts, tp, cp):
    dims = ParallelDims(dp_shard=-1, tp=tp, cp=cp, world_size=2)
    meshes = dims.build_mesh("cpu")
    model, tokenizer = ppl_eval.load(STUDENT, device="cpu", meshes=meshes)
    local = sum(getattr(p, "to_local", lambda p=p: p)().numel() for p in model.parameters())
    result = ppl_eval.evaluate(model, tokenizer, texts, max_seq_len=200, meshes=meshes)
    return nll_of(result), local


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (1, 2)], ids=["dp", "tp", "cp"])
def test_shards_of_a_folder(texts, result, tp, cp):
    found = run_on_ranks(2, on_ranks, list(texts), tp, cp)
    whole = sum(p.numel() for p in ppl_eval.load(STUDENT)[0].parameters())
    for nll, local in found:
        assert nll == pytest.approx(nll_of(result), rel=1e-6)
        assert local < 0.6 * whole


@pytest.mark.parametrize("dtype", ["bf16", torch.bfloat16, "bfloat16"])
def test_a_dtype(dtype):
    model, _ = ppl_eval.load(STUDENT, dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: ppl_eval.load("nowhere"), "nowhere"),
        (lambda: ppl_eval.load(STUDENT, dtype="fp8"), "dtype is 'fp8', but it is one of fp32"),
        (lambda: ppl_eval.load(embedded_path("tiny_text")), "config.json"),
        (
            lambda: ppl_eval.evaluate(str(STUDENT), None, ["a"]),
            r"model, tokenizer = ppl_eval.load\('",
        ),
        (
            lambda: ppl_eval.evaluate(len, None, ["a"]),
            "model is of type builtin_function_or_method, but it is a torch.nn.Module",
        ),
        (
            lambda: ppl_eval.evaluate(torch.nn.Identity(), "gpt2", ["a"]),
            r"tokenizer is of type str, but it needs encode\(",
        ),
    ],
)
def test_what_is_no_model_no_tokenizer_no_folder(call, sentence):
    with pytest.raises(ppl_eval.UserError, match=sentence):
        call()


def test_progress(texts, capsys):
    model, tokenizer = ppl_eval.load(STUDENT)
    ppl_eval.evaluate(model, tokenizer, texts[:4], max_seq_len=200, progress=True)
    assert "100 %" in capsys.readouterr().err
    ppl_eval.evaluate(model, tokenizer, texts[:4], max_seq_len=200)
    assert capsys.readouterr().err == ""
