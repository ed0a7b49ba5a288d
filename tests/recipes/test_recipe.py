"""The recipe in this process: what it writes, what it prints, and every kind of mistake."""

import json
import math
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ppl_eval import shipped
from ppl_eval.data import hf_tokenizer
from ppl_eval.metrics.definitions import METRICS


@pytest.fixture
def tune(run_recipe):
    """Run a config in an empty folder: (exit code, stdout, stderr)."""
    return lambda *args, config="tiny_ppl_eval": run_recipe(config, *args)


@pytest.fixture
def student(tmp_path):
    """A copy of the embedded student that may be spoiled."""
    folder = tmp_path / "student"
    folder.mkdir()
    for path in shipped.embedded_path("tiny_student").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def results(folder="out/tiny_ppl_eval"):
    def refuse(constant):
        raise AssertionError(f"{constant} is not strict JSON")

    return json.loads(Path(folder, "results.json").read_text(), parse_constant=refuse)


def rows(folder="out/tiny_ppl_eval"):
    return [json.loads(line) for line in Path(folder, "documents.jsonl").read_text().splitlines()]


def test_results_and_table(tune, held_out):
    code, out, err = tune()
    assert code == 0, err
    content, table = results(), rows()
    texts = [json.loads(line) for line in held_out.read_text().splitlines()]
    tokenizer = hf_tokenizer(str(shipped.embedded_path("tiny_student")))
    num_tokens = sum(len(tokenizer.encode(row["text"], False, False)) for row in texts)

    assert content["schema_version"] == 1
    counts, metrics = content["counts"], content["metrics"]
    assert counts["documents"] == len(texts) == len(table)
    assert counts["scored_tokens"] == num_tokens == sum(row["scored_tokens"] for row in table)
    assert counts["not_scored"] == {
        "no_context": 0,
        "context_only": 0,
        "truncated": 0,
        "masked": 0,
        "empty": 0,
    }
    nll = math.fsum(row["nll_nats_sum"] for row in table)
    assert metrics["nll_nats_sum"] == nll
    assert metrics["token_perplexity"] == math.exp(nll / num_tokens)
    bits = nll / math.log(2) / sum(r["bytes"] for r in table)
    assert metrics["bits_per_byte"] == pytest.approx(bits, rel=1e-15)
    words = sum(len(row["text"].split()) for row in texts)
    assert metrics["word_perplexity"] == math.exp(nll / words)
    assert metrics["byte_perplexity"] == math.exp(nll / sum(r["bytes"] for r in table))
    means = [row["nll_nats_sum"] / row["scored_tokens"] for row in table]
    mean = math.fsum(means) / len(means)
    assert metrics["document_mean_perplexity"] == pytest.approx(math.exp(mean), rel=1e-12)
    assert set(content["domains"]) == {"tale", "bill", "program"}
    parts = content["domains"].values()
    assert sum(part["counts"]["scored_tokens"] for part in parts) == num_tokens
    for part in parts:
        assert set(part["metrics"]) == set(metrics)
    for number, (row, text) in enumerate(zip(table, texts, strict=True)):
        assert (row["document"], row["id"], row["domain"]) == (number, text["id"], text["domain"])
        assert row["bytes"] == len(text["text"].encode())
        assert row["words"] == len(text["text"].split())

    assert content["command"] == "tune run ppl_eval --config tiny_ppl_eval"
    assert content["protocol"]["name"] == "document"
    performance = content["performance"]
    assert performance["tokens_per_s"] > 0
    assert performance["peak_memory_gib"] > 0
    assert set(performance["seconds"]) == {"data", "load", "evaluate"}
    environment = content["environment"]
    assert environment["versions"]["torchtune"].startswith("0.6.1")
    assert (environment["dtype"], environment["checkpoint_dtype"]) == ("fp32", "float32")
    assert content["config"]["protocol"]["max_seq_len"] == 256
    prints = content["fingerprints"]
    assert set(prints) == {"data", "tokenizer", "model", "protocol", "plan"}
    assert all(isinstance(value, str) for value in prints.values())

    for text in (
        f"{num_tokens:,}",
        "document: windows of 256 tokens, no overlap, BOS first",
        "tale",
    ):
        assert text in out
    assert f"{metrics['token_perplexity']:.4f}" in out
    assert "dp_replicate=1 dp_shard=1 cp=1 tp=1 on 1 x cpu" in out
    low, high = content["intervals_95"]["token_perplexity"]
    assert low < metrics["token_perplexity"] < high
    assert f"interval  token ppl {low:.4f} to {high:.4f} (95 %" in out
    assert content["intervals_95_bootstrap"]["bits_per_byte"][0] < metrics["bits_per_byte"]
    iid_low, iid_high = content["intervals_95_token_iid"]["token_perplexity"]
    assert low < iid_low < iid_high < high
    flags = {"overflow", "few_words"}
    sums = {"nll_nats_sum", "nll_nats_per_token"}
    assert {metric.key for metric in METRICS} == set(metrics) - sums - flags
    for section in ("loss_by_position", "loss_by_document_length"):
        assert sum(row["scored_tokens"] for row in content[section]) == num_tokens
        sums = [row["scored_tokens"] * row["nll_nats_per_token"] for row in content[section]]
        assert math.fsum(sums) == pytest.approx(nll, rel=1e-12)
    # with little context the next token is hard to guess
    by_position = content["loss_by_position"]
    assert [row["context_tokens"][0] for row in by_position] == [2**n for n in range(8)]
    assert by_position[0]["nll_nats_per_token"] > 2 * by_position[-1]["nll_nats_per_token"]
    macro = math.fsum(part["metrics"]["bits_per_byte"] for part in parts) / 3
    assert content["macro"]["bits_per_byte"] == pytest.approx(macro, rel=1e-12)
    assert content["macro"]["domains"] == 3
    assert counts["bytes_without_token"] == 0
    assert counts["characters"] == sum(len(text["text"]) for text in texts)
    assert "\r" not in err  # no progress bar where nobody looks


def test_fingerprints_follow_what_they_name(tune, student):
    tune("max_documents=9")
    first = results()["fingerprints"]

    def changed(*args):
        code, _, err = tune(*args)
        assert code == 0, err
        now = results()["fingerprints"]
        return {name for name in now if now[name] != first[name]}

    assert changed("max_documents=9", "output_dir=out/tiny_ppl_eval") == set()
    assert changed("max_documents=9", f"checkpointer.checkpoint_dir={student}") == set()
    assert changed("max_documents=8") == {"data", "plan"}
    assert changed("max_documents=9", "protocol.max_seq_len=200") == {"protocol", "plan"}
    assert changed("max_documents=9", "max_tokens_per_batch=999") == {"plan"}
    weights = load_file(student / "model.safetensors")
    weights["model.norm.weight"] += 1e-3
    save_file(weights, student / "model.safetensors")
    assert changed("max_documents=9", f"checkpointer.checkpoint_dir={student}") == {"model"}


def test_one_override_replaces_the_text(tune, tmp_path):
    (tmp_path / "mine.txt").write_text("Ada lived near the mill.\n\nx\n")
    code, _, err = tune("dataset.data_files=mine.txt", "dataset.unit=line")
    assert code == 0, err
    content = results()
    assert content["counts"]["documents"] == 3
    assert content["counts"]["not_scored"]["empty"] == 1
    assert content["domains"] == {}
    assert [row["words"] for row in rows()] == [5, 0, 1]
    (tmp_path / "lines.txt").write_text("Ada lived near the mill.\nx y z\n")
    code, _, err = tune("dataset.data_files=lines.txt")
    note = "lines.txt is read by line: 2 documents; dataset.unit=paragraph or dataset.unit=file"
    assert note in err
    assert any(note in said for said in results()["notes"])


def test_the_student_is_worse_than_the_teacher_and_both_beat_a_bigram_model(tune):
    from ppl_eval.tools.bigram import bigram_perplexity

    tune()
    tune(config="tiny_teacher_ppl_eval")
    student = results()["metrics"]["token_perplexity"]
    teacher = results("out/tiny_teacher_ppl_eval")["metrics"]["token_perplexity"]
    assert teacher < 0.98 * student
    assert 2 * student < bigram_perplexity()


def test_an_untrained_head_overflows_and_says_so(tune, student):
    """Through the recipe: exit 0, strict JSON, null and a flag."""
    weights = load_file(student / "model.safetensors")
    weights["model.norm.weight"] *= 1e5
    save_file(weights, student / "model.safetensors")
    code, out, _ = tune("max_documents=3", f"checkpointer.checkpoint_dir={student}")
    assert code == 0
    metrics = results()["metrics"]
    assert metrics["token_perplexity"] is None
    assert metrics["overflow"] is True
    assert metrics["nll_nats_per_token"] > 710
    assert "overflow" in out
    assert "null in results.json" in out


@pytest.mark.parametrize(
    ("logger", "found"),
    [
        ("DiskLogger", "logs/log_*.txt"),
        ("TensorBoardLogger", "logs/events*"),
        ("StdoutLogger", None),
    ],
)
def test_torchtune_loggers(tune, logger, found):
    if logger == "TensorBoardLogger":
        pytest.importorskip("tensorboard")
    extra = ["~metric_logger.log_dir"] if logger == "StdoutLogger" else []
    if logger == "TensorBoardLogger":
        extra = ["metric_logger.organize_logs=false"]
    code, out, err = tune(
        f"metric_logger=torchtune.training.metric_logging.{logger}",
        "max_documents=20",
        "log_every_n_steps=1",
        *extra,
    )
    assert code == 0, err
    if found is None:
        text = out
    else:
        files = list(Path("out/tiny_ppl_eval").glob(found))
        assert len(files) == 1
        text = files[0].read_bytes().decode(errors="replace")
    for name in ("running_perplexity", "tokens_per_s", "token_perplexity", "bits_per_byte"):
        assert name in text
    assert Path("out/tiny_ppl_eval/torchtune_config.yaml").is_file()


def test_bf16_and_its_own_logits(tune):
    tune("max_documents=20")
    fp32 = results()["metrics"]["token_perplexity"]
    values = []
    for logits in ("fp32", "model"):
        code, _, err = tune("max_documents=20", "dtype=bf16", f"logits_dtype={logits}")
        assert code == 0, err
        values.append(results()["metrics"]["token_perplexity"])
        assert values[-1] == pytest.approx(fp32, rel=0.02)
    assert len({fp32, *values}) == 3


def spoil(change):
    """A mistake in the checkpoint: ``change(folder)``."""
    return lambda folder: [change(folder), f"checkpointer.checkpoint_dir={folder}"][1:]


def rewrite(change):
    def apply(folder):
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors")

    return spoil(apply)


def text(name, content):
    def write(folder):
        Path(name).write_bytes(content)
        return [f"dataset.data_files={name}"]

    return write


mistakes = {
    "unknown key": (["protocol.max_seq=1"], "unknown config key protocol.max_seq; did you mean"),
    "no checkpoint folder": (["checkpointer.checkpoint_dir=nowhere"], "no such folder"),
    "no weights": (
        spoil(lambda folder: (folder / "model.safetensors").unlink()),
        "student has no weights: neither",
    ),
    "zero bytes of weights": (
        spoil(lambda folder: (folder / "model.safetensors").write_bytes(b"")),
        "model.safetensors cannot be read as safetensors",
    ),
    "no config.json": (
        spoil(lambda folder: (folder / "config.json").unlink()),
        "there is no .*config.json, which a Hugging Face",
    ),
    "no tokenizer": (
        spoil(lambda folder: (folder / "tokenizer.json").unlink()),
        "no tokenizer.json in",
    ),
    "missing weight": (
        rewrite(lambda w: w.pop("model.layers.1.mlp.up_proj.weight")),
        "1 missing from the checkpoint: layers.1.mlp.w3.weight",
    ),
    "extra weight": (
        rewrite(lambda w: w.update({"model.layers.7.mlp.up_proj.weight": torch.zeros(1)})),
        "1 unknown to the model: layers.7.mlp.w3.weight",
    ),
    "weight of no llama": (
        rewrite(lambda w: w.update({"model.strange.weight": torch.zeros(1)})),
        "1 unknown to the model: model.strange.weight",
    ),
    "another shape": (
        ["model.vocab_size=600"],
        r"of another shape: tok_embeddings.weight is \(509, 64\) in the checkpoint and \(600, 64\)",
    ),
    "a head that is not tied": (
        rewrite(lambda w: w.update({"lm_head.weight": w["model.norm.weight"].repeat(509, 1)})),
        "ties its head to the embedding, but the checkpoint has an output.weight that",
    ),
    "wrong model type": (
        ["checkpointer.model_type=LAMA"],
        "model_type is 'LAMA', but it is one of",
    ),
    "another family": (
        ["checkpointer.model_type=QWEN2"],
        "is of a llama, but .*model_type is QWEN2",
    ),
    "other heads": (
        ["model.num_heads=4", "model.num_kv_heads=2"],
        "gives num_attention_heads 8, but the model section builds 4",
    ),
    "another rotary base": (["model.rope_base=500000"], "rope_theta 10000.0, but .* builds 500000"),
    "another epsilon": (["model.norm_eps=0.1"], "rms_norm_eps 1e-05, but .* builds 0.1"),
    "quantised weights": (
        rewrite(lambda w: w.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)})),
        "model.norm.weight is int8 in the checkpoint: weights that are quantised are not evaluated",
    ),
    "no checkpoint": (["checkpointer.checkpoint_dir=null"], "path is None|checkpoint_dir is None"),
    "a checkpoint that is a number": (["checkpointer.checkpoint_dir=5"], "checkpoint_dir is 5"),
    "a config.json that is a list": (
        spoil(lambda folder: (folder / "config.json").write_text("[]")),
        "config.json holds a list",
    ),
    "training state": (
        ["checkpointer.should_load_recipe_state=true"],
        "is True, but a checkpointer",
    ),
    "no protocol": (["protocol.name=sliding"], "protocol.name is 'sliding', but it is one of"),
    "no size": (["model.vocab_size=-1"], r"model \(torchtune.*\) fails: "),
    "a decoder that is none": (["model=builtins.dict"], "is a dict, but only text decoders"),
    "a tokenizer that is none": (
        ["tokenizer=builtins.dict", "~tokenizer.path"],
        r"tokenizer \(dict\) has no encode",
    ),
    "a logger that is none": (
        ["metric_logger=builtins.dict", "~metric_logger.log_dir"],
        r"metric_logger \(dict\) has no log_dict",
    ),
    "logs nowhere": (["metric_logger.log_dir=null"], r"metric_logger \(.*DiskLogger\) fails: "),
    "logs under a file": (["metric_logger.log_dir=afile/logs"], "fails: NotADirectoryError"),
    "a logger that is not installed": (
        ["metric_logger=torchtune.training.metric_logging.CometLogger", "~metric_logger.log_dir"],
        r"metric_logger \(.*CometLogger\) fails: ImportError",
    ),
    "wrong model argument": (["model.num_heads=7"], "fails: ValueError: num_heads"),
    "window too long": (
        ["protocol.max_seq_len=300"],
        "max_seq_len is 300, but the model reads at most 256 tokens",
    ),
    "stride too long": (["protocol.stride=256"], "stride is 256, but it is between 1 and 255"),
    "cuda on cpu": (["device=cuda"], "device is 'cuda', but torch .* sees no CUDA device"),
    "no device": (["device=gpu"], "device is 'gpu'"),
    "world size": (["parallel.dp_shard=2"], r"dp_shard\(2\) .* = 2, but 1 process was started"),
    "empty corpus": (text("e.txt", b""), "e.txt is empty: there is nothing to measure"),
    "blank corpus": (text("b.txt", b"\n\n"), "0 scored tokens: the 2 documents have 0 tokens"),
    "wrong column": (
        ["dataset.column=body"],
        "column is 'body', but .* has the columns id, domain",
    ),
    "wrong split": (
        ["dataset.split=test"],
        "split is 'test', but .* has the split train: Unknown split",
    ),
    "bad utf-8": (text("l.txt", "ok\ncaf\u00e9\n".encode("latin-1")), "l.txt, line 2 is not UTF-8"),
    "bad json": (text("j.jsonl", b'{"text": "a"}\n{"text'), "j.jsonl, line 2 is not JSON"),
    "null row": (text("n.jsonl", b'{"text": "a"}\n{"text": null}\n'), "line 2: .* holds null"),
    "text of unknown units": (text("u.txt", b"a\n \nb\n"), "paragraph: 2 documents, blank lines"),
    "output under a file": (
        ["output_dir=afile/out"],
        "output_dir is afile/out, but nothing can be",
    ),
    "no such logger": (["metric_logger=torchtune.NoLogger"], "torchtune has no NoLogger"),
}


@pytest.mark.parametrize("mistake", mistakes)
def test_a_mistake_is_one_sentence_and_leaves_nothing(tune, student, tmp_path, mistake):
    args, message = mistakes[mistake]
    Path("afile").write_text("")
    if callable(args):
        args = args(student)
    code, out, err = tune(*args)
    assert code == 1
    sentences = [line for line in err.splitlines() if line.startswith("ppl_eval: error: ")]
    assert len(sentences) == 1, err
    import re

    assert re.search(message, sentences[0]), sentences[0]
    assert "Traceback" not in err
    assert "perplexity" not in out
    left = [p for p in Path("out").rglob("*") if p.name in ("results.json", "documents.jsonl")]
    assert left == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_output_dir_without_permission(tune, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    code, _, err = tune("output_dir=locked/out")
    assert code == 1
    assert "output_dir is locked/out, but nothing can be written there" in err


def test_an_earlier_result_survives_a_run_that_fails(tune, student):
    tune("max_documents=3")
    before = Path("out/tiny_ppl_eval/results.json").read_bytes()
    code, _, _ = tune("max_documents=3", "checkpointer.checkpoint_dir=nowhere")
    assert code == 1
    assert Path("out/tiny_ppl_eval/results.json").read_bytes() == before


def test_eos_stride_and_bos_reach_the_protocol(tune, held_out):
    tune("max_documents=30")
    plain = results()["counts"]
    tune("max_documents=30", "protocol.add_eos=true")
    with_eos = results()
    assert with_eos["counts"]["scored_tokens"] == plain["scored_tokens"] + 30
    assert with_eos["protocol"]["eos_id"] == 2
    tune("max_documents=30", "protocol.add_bos=false", "protocol.stride=100")
    without_bos = results()["counts"]
    assert without_bos["scored_tokens"] == plain["scored_tokens"] - 30
    assert without_bos["not_scored"]["no_context"] == 30


def test_a_defect_shows_its_traceback(tune, monkeypatch):
    from ppl_eval.evaluation import loop as evaluation

    def broken(*args, **kwargs):
        raise RuntimeError("a defect")

    monkeypatch.setattr(evaluation, "run", broken)
    code, _, err = tune()
    assert code == 1
    assert err.count("Traceback (most recent call last)") == 1
    assert "RuntimeError: a defect" in err


def test_a_tied_checkpoint_may_carry_its_head_twice(tune, student):
    tune("max_documents=3")
    before = results()["metrics"]
    weights = load_file(student / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, student / "model.safetensors")
    code, _, err = tune("max_documents=3", f"checkpointer.checkpoint_dir={student}")
    assert code == 0, err
    assert results()["metrics"] == before


@pytest.mark.parametrize(
    "value",
    ["fail_if.metrics.token_perplexity=1.2", "fail_if={domains.bill.metrics.bits_per_byte: 0.1}"],
)
def test_above_a_limit_the_run_fails_with_code_3_and_keeps_its_results(tune, value):
    code, out, err = tune("max_documents=9", value)
    assert code == 3
    assert err.splitlines()[-1].startswith("ppl_eval: error: fail_if: ")
    assert "above" in err
    assert "results: " in out
    assert results()["counts"]["documents"] == 9


def test_below_a_limit_all_is_well(tune):
    assert tune("max_documents=9", "fail_if.metrics.token_perplexity=3")[0] == 0


@pytest.mark.parametrize(
    ("limit", "there"),
    [("domains.poem.metrics.bits_per_byte", "the domains bill, program, tale"), ("macro.x", "")],
)
def test_a_limit_on_what_there_is_not_is_refused_before_weights_are_read(
    tune, monkeypatch, limit, there
):
    from ppl_eval.checkpoint.tensor_files import FileSource

    monkeypatch.setattr(FileSource, "tensors", lambda *args: pytest.fail("a weight was read"))
    code, _, err = tune("max_documents=9", f"fail_if.{limit}=3")
    assert code == 1
    assert f"fail_if has {limit}, but " in err
    assert there in err


@pytest.mark.parametrize("domains", ["dataset.domain_column=''", "protocol.name=concat"])
def test_a_limit_on_domains_of_a_text_without_any(tune, domains):
    code, _, err = tune(domains, "fail_if.macro.bits_per_byte=3")
    assert code == 1
    assert "fail_if has macro.bits_per_byte, but the text has no domains" in err


def test_documents_of_white_space_do_not_cost_the_results(tune, tmp_path):
    """Words in one document alone: no interval by word, which was NaN and so no JSON."""
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "one two three"}\n{"text": "  \\n "}\n{"text": "\\n\\n  "}\n')
    code, _, err = tune(f"dataset.data_files={texts}", "dataset.domain_column=null")
    assert code == 0, err
    found = results()["intervals_95"]
    assert found["word_perplexity"] is None
    assert found["token_perplexity"] is not None


def test_no_metric_logger(tune):
    assert tune("max_documents=3", "metric_logger=null")[0] == 0
    assert sorted(path.name for path in Path("out/tiny_ppl_eval").iterdir()) == [
        "documents.jsonl",
        "results.json",
        "windows.parquet",
    ]
    assert results()["config"]["metric_logger"] is None


def test_a_component_that_fails_to_import_says_why(tune, tmp_path):
    (tmp_path / "my_broken_texts.py").write_text("import no_such_package\ndef texts(): ...\n")
    code, _, err = tune("dataset=my_broken_texts.texts")
    assert code == 1
    assert "importing it fails: No module named 'no_such_package'" in err


def test_results_have_the_short_name_of_a_dtype(tune):
    assert tune("max_documents=3", "dtype=float32")[0] == 0
    assert results()["environment"]["dtype"] == results()["config"]["dtype"] == "fp32"


def test_one_document_has_no_interval(tune):
    code, out, _ = tune("max_documents=1", "protocol.name=concat")
    assert code == 0
    assert set(results()["intervals_95"].values()) == {None}
    assert "interval" not in out


@pytest.mark.parametrize(
    "protocol",
    [
        ["protocol.add_eos=true"],
        ["protocol.max_seq_len=50", "protocol.stride=20", "protocol.add_bos=false"],
        ["protocol.name=lm_eval_rolling", "protocol.max_seq_len=40"],
        ["protocol.name=llama_cpp", "protocol.max_seq_len=64"],
    ],
    ids=lambda options: options[0],
)
def test_the_records_of_tokens_add_up(tune, held_out, protocol):
    import pyarrow.parquet as pq

    assert tune("max_documents=20", "save_tokens=true", *protocol)[0] == 0
    table = pq.read_table("out/tiny_ppl_eval/tokens.parquet").to_pydict()
    content, documents = results(), rows()
    assert sum(table["scored"]) == content["counts"]["scored_tokens"]
    scored = [nll for nll in table["nll_nats"] if nll is not None]
    assert len(scored) == sum(table["scored"])
    assert math.fsum(scored) == pytest.approx(content["metrics"]["nll_nats_sum"], rel=1e-13)
    reasons = content["counts"]["not_scored"]
    not_scored = reasons["no_context"] + reasons["context_only"] + reasons["truncated"]
    assert len(table["scored"]) - len(scored) == not_scored
    tokenizer = hf_tokenizer(str(shipped.embedded_path("tiny_student")))
    texts = [json.loads(line)["text"] for line in held_out.read_text().splitlines()[:20]]
    texts = texts if len(documents) == 20 else ["\n".join(texts)]
    for number, (text, row) in enumerate(zip(texts, documents, strict=True)):
        mine = [n for n, d in enumerate(table["document"]) if d == number]
        assert [table["position"][n] for n in mine] == list(range(len(mine)))
        ids = [table["token_id"][n] for n in mine]
        opening = [1] if "lm_eval_rolling" in protocol[0] else []
        closing = [2] if "add_eos" in protocol[0] else []
        assert ids == [*opening, *tokenizer.encode(text, False, False), *closing]
        nlls = [table["nll_nats"][n] for n in mine if table["scored"][n]]
        assert len(nlls) == row["scored_tokens"]
        assert math.fsum(nlls) == pytest.approx(row["nll_nats_sum"], rel=1e-13)


def test_several_data_sets_with_names(tune, tmp_path, held_out):
    """Each is a domain, and one stream of its own where texts are joined."""
    lines = held_out.read_text().splitlines()[:9]
    plain = [json.dumps({"text": json.loads(line)["text"]}) for line in lines[5:]]
    (tmp_path / "held.jsonl").write_text("\n".join(lines[:5]))
    (tmp_path / "mine.jsonl").write_text("\n".join(plain))
    shipped_config = shipped.config_path("tiny_ppl_eval").read_text()
    head, rest = shipped_config.split("\ndataset:\n")
    named = """
dataset:
  - {name: held, data_files: held.jsonl}
  - {name: mine, _component_: ppl_eval.data.text_corpus, data_files: mine.jsonl}
"""
    (tmp_path / "both.yaml").write_text(head + named + rest[rest.index("\nprotocol:") :])
    assert tune(config="both.yaml")[0] == 0
    content, table = results(), rows()
    assert [row["domain"] for row in table[5:]] == ["mine"] * 4
    assert all(row["domain"].startswith("held/") for row in table[:5])
    assert set(content["domains"]) == {row["domain"] for row in table}
    assert content["counts"]["documents"] == 9
    assert tune("max_documents=2", config="both.yaml")[0] == 0
    assert [row["bytes"] for row in rows()] == [table[n]["bytes"] for n in (0, 1, 5, 6)]
    code, out, _ = tune("protocol.name=concat", config="both.yaml")
    assert code == 0
    assert [(row["id"], row["domain"]) for row in rows()] == [("held", "held"), ("mine", "mine")]
    assert results()["domains"]["held"]["counts"]["documents"] == 1
    assert "text      held, mine" in out

    for fault, message in (
        ("{name: mine, data_file: x}", "unknown config key dataset mine.data_file"),
        ("{data_files: x}", "each is a data set with a name"),
        ("{name: held, data_files: x}", "two of dataset are called held"),
    ):
        broken = named.replace(named.splitlines()[-1], f"  - {fault}")
        (tmp_path / "bad.yaml").write_text(head + broken + rest[rest.index("\nprotocol:") :])
        code, _, err = tune(config="bad.yaml")
        assert code == 1
        assert message in err


CHAT = [
    {"input": "What does Ada have?", "output": "A red goat and a map. " * 3},
    {"input": "Where? " * 30, "output": "Near the mill."},
    {"input": "", "output": "Ada lived near the mill. " * 20},
]


def instruct(tmp_path, rows):
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = ("source", "data_files", "split", "column", "domain_column")
    return [
        "dataset=torchtune.datasets.instruct_dataset",
        *(f"~dataset.{key}" for key in keys),
        *("dataset.source=json", "dataset.data_files=chat.jsonl", "dataset.split=train"),
        "dataset.train_on_input=false",
    ]


def test_instruction_data_counts_answers_only(tune, tmp_path):
    """Against a float64 loop over the tokens and labels that torchtune gives."""
    from helpers import oracle, student_in_float64
    from torchtune.datasets import instruct_dataset

    options = instruct(tmp_path, CHAT)
    code, _, err = tune("protocol.max_seq_len=100", *options)
    assert code == 0, err
    content, table = results(), rows()
    tokenizer = hf_tokenizer(str(shipped.embedded_path("tiny_student")))
    samples = instruct_dataset(
        tokenizer,
        source="json",
        data_files=str(tmp_path / "chat.jsonl"),
        split="train",
        train_on_input=False,
    )
    model = student_in_float64()
    for row, number in zip(table, range(len(samples)), strict=True):
        tokens, labels = samples[number]["tokens"], samples[number]["labels"]
        scored, nll = 0, 0.0
        for start in range(0, len(tokens), 100):
            window = list(map(int, tokens[start : start + 100]))
            for place in range(1, len(window)):
                if labels[start + place] != -100:
                    count, loss = oracle(model, [(window[: place + 1], place)])
                    scored, nll = scored + count, nll + loss
        assert row["scored_tokens"] == scored
        assert row["nll_nats_sum"] == pytest.approx(nll, rel=1e-6)
    counts = content["counts"]
    assert counts["not_scored"]["masked"] > 0
    total = counts["scored_tokens"] + sum(
        counts["not_scored"][reason] for reason in ("no_context", "masked")
    )
    assert total == counts["tokens"] == sum(len(s["tokens"]) for s in samples)
    assert content["metrics"]["word_perplexity"] is None
    assert content["protocol"]["bos_id"] is None
    performance = content["performance"]
    scored_in_time = performance["tokens_per_s"] * performance["seconds"]["evaluate"]
    assert scored_in_time == pytest.approx(counts["scored_tokens"])


def test_a_chat_by_override(tune, tmp_path):
    """Without a word on the config's own data set; the loss is a float64 loop's."""
    from helpers import oracle, student_in_float64
    from torchtune.datasets import chat_dataset

    turns = ["Who lives near the mill?", "Ada, with a red goat.", "And then?", "She went home."]
    rows = [turns, turns[:2]]
    sides = ("human", "gpt") * 2
    chats = [
        {"talk": [{"from": side, "value": text} for side, text in zip(sides, row, strict=False)]}
        for row in rows
    ]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    code, _, err = tune(
        "dataset.conversation_style=sharegpt",
        "dataset.source=json",
        "dataset.data_files=chat.jsonl",
        "dataset=torchtune.datasets.chat_dataset",
        "dataset.conversation_column=talk",
    )
    assert code == 0, err
    samples = chat_dataset(
        hf_tokenizer(str(shipped.embedded_path("tiny_student"))),
        source="json",
        data_files=str(tmp_path / "chat.jsonl"),
        conversation_column="talk",
        conversation_style="sharegpt",
    )
    wanted = []
    for number in range(len(rows)):
        tokens, labels = (list(map(int, samples[number][key])) for key in ("tokens", "labels"))
        places = [place for place in range(1, len(tokens)) if labels[place] != -100]
        wanted += [(tokens[: place + 1], place) for place in places]
    count, nll = oracle(student_in_float64(), wanted)
    content = results()
    assert content["counts"]["scored_tokens"] == count > 0
    assert content["metrics"]["nll_nats_sum"] == pytest.approx(nll, rel=1e-6)
    assert content["config"]["dataset"] == {
        "_component_": "torchtune.datasets.chat_dataset",
        "source": "json",
        "data_files": "chat.jsonl",
        "conversation_column": "talk",
        "conversation_style": "sharegpt",
    }


def test_an_answer_that_is_cut_off_counts_nothing(tune, tmp_path):
    """Such documents count as empty, and the others have the NLL that they have without them."""
    short = "tokenizer.max_seq_len=60"
    code, _, err = tune(short, *instruct(tmp_path, CHAT[:2]))
    assert code == 0
    assert "1 of 2 samples is as long as tokenizer.max_seq_len=60 allows" in err
    both, table = results(), rows()
    assert table[1]["scored_tokens"] == 0
    assert both["counts"]["not_scored"]["empty"] == 1
    assert tune(short, *instruct(tmp_path, CHAT[:1]))[0] == 0
    assert results()["metrics"]["token_perplexity"] == both["metrics"]["token_perplexity"]
    code, _, err = tune(short, *instruct(tmp_path, CHAT[1:2]))
    assert code == 1
    assert "0 scored tokens" in err
    assert "nan" not in err
    code, _, err = tune("protocol.name=concat", *instruct(tmp_path, CHAT))
    assert code == 1
    assert "the data set gives tokens: set protocol.name=document" in err


def test_a_limit_that_cuts_nothing_changes_nothing(tune, tmp_path):
    """Null and far above the longest text; one that does cut is said to."""
    found = []
    for limit in ("null", "8192", "40"):
        code, _, err = tune(f"tokenizer.max_seq_len={limit}", *instruct(tmp_path, CHAT[:1]))
        assert code == 0
        assert ("as long as tokenizer.max_seq_len" in err) == (limit == "40")
        found.append((results()["counts"]["scored_tokens"], results()["metrics"]["nll_nats_sum"]))
    assert found[0] == found[1]
    assert found[2][0] < found[0][0]


def test_texts_and_tokens_are_not_mixed(tune, tmp_path):
    """The protocol's BOS belongs before the one and not before the other."""
    instruct(tmp_path, CHAT)
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "Ada lived near the mill."}))
    head, rest = shipped.config_path("tiny_ppl_eval").read_text().split("\ndataset:\n")
    named = """
dataset:
  - {name: texts, data_files: text.jsonl}
  - name: answers
    _component_: torchtune.datasets.instruct_dataset
    source: json
    data_files: chat.jsonl
    split: train
"""
    (tmp_path / "mixed.yaml").write_text(head + named + rest[rest.index("\nprotocol:") :])
    code, _, err = tune(config="mixed.yaml")
    assert code == 1
    assert "some documents are texts and some come as tokens" in err
