"""The protocols of other tools, against these tools or loops written from their source."""

import json
import math
import re

import pytest
import torch
import torch.nn.functional as F
from helpers import peer
from test_reference import measure

from ppl_eval import shipped
from ppl_eval.data import hf_tokenizer

transformers = pytest.importorskip("transformers")

TEXTS = [
    "Ada lived near the mill with a red goat. " * 9,
    "",
    "a",
    "The bill:  3 pears,\n\n 2 figs \tand a  map. ",
    " ",
    "def f(x):\n    return x + 1\n" * 6,
    "Zoë 漢字 — " * 12,
]


def folder_of(name, real_model):
    return shipped.embedded_path(name) if name.startswith("tiny") else real_model(name)


def run(monkeypatch, tmp_path, folder, texts, *args):
    """(results.json, lines of documents.jsonl) of our run on ``texts``."""
    corpus = tmp_path / "texts.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    rows = measure(
        monkeypatch,
        tmp_path,
        "auto_ppl_eval",
        f"checkpoint_dir={folder}",
        f"dataset.data_files={corpus}",
        "dtype=fp32",
        "max_tokens_per_batch=300",
        *args,
    )
    return json.loads((tmp_path / "out/results.json").read_text()), rows


def by_lm_eval(folder, texts, add_bos):
    """loglikelihood_rolling of lm-eval 0.4.13, HF backend, float32, by text."""
    instance = peer("lm_eval.api.instance").Instance
    model = peer("lm_eval.models.huggingface").HFLM(
        pretrained=transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        tokenizer=transformers.AutoTokenizer.from_pretrained(folder),
        max_length=64,
        add_bos_token=add_bos,
        batch_size=1,
    )
    requests = [instance("loglikelihood_rolling", {}, (text,), 0) for text in texts]
    return model.loglikelihood_rolling(requests, disable_tqdm=True)


@pytest.mark.parametrize("add_bos", [None, True, False])
def test_lm_eval_on_texts_with_their_own_bos(monkeypatch, tmp_path, add_bos):
    """It adds none to a text that begins with one."""
    folder = shipped.embedded_path("tiny_student")
    texts = [f"<|begin|>{text}" for text in TEXTS if text]
    _, rows = run(
        monkeypatch,
        tmp_path,
        folder,
        texts,
        "tokenizer.special_tokens_in_text=true",
        "protocol.name=lm_eval_rolling",
        "protocol.max_seq_len=64",
        f"protocol.add_bos={'auto' if add_bos is None else str(add_bos).lower()}",
    )
    theirs = by_lm_eval(folder, texts, add_bos)
    assert [-row["nll_nats_sum"] for row in rows] == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize("add_bos", [None, True, False])
@pytest.mark.parametrize("name", ["tiny_student", "stories260k-hf"])
def test_lm_eval_itself(monkeypatch, tmp_path, real_model, name, add_bos):
    folder = folder_of(name, real_model)
    # transformers 5 reads a lone space as two tokens where the same tokenizer.json has one
    texts = TEXTS if name == "tiny_student" else [text for text in TEXTS if text != " "]
    theirs = by_lm_eval(folder, texts, add_bos)
    content, rows = run(
        monkeypatch,
        tmp_path,
        folder,
        texts,
        "protocol.name=lm_eval_rolling",
        "protocol.max_seq_len=64",
        f"protocol.add_bos={'auto' if add_bos is None else str(add_bos).lower()}",
    )
    assert [-row["nll_nats_sum"] for row in rows] == pytest.approx(theirs, rel=1e-6)
    metrics, total = content["metrics"], -sum(theirs)
    assert metrics["nll_nats_sum"] == pytest.approx(total, rel=1e-6)
    words = sum(len(re.split(r"\s+", text)) for text in texts)
    num_bytes = sum(len(text.encode()) for text in texts)
    assert metrics["word_perplexity"] == pytest.approx(math.exp(total / words), rel=1e-6)
    assert metrics["byte_perplexity"] == pytest.approx(math.exp(total / num_bytes), rel=1e-6)
    assert metrics["bits_per_byte"] == pytest.approx(total / num_bytes / math.log(2), rel=1e-6)
    assert any("prefix token" in quirk for quirk in content["protocol"]["quirks"])


def stream(folder, separator):
    """(model in float32, ids of all texts joined)."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, hf_tokenizer(str(folder)).encode(separator.join(TEXTS), False, False)


@torch.no_grad()
def nll_of(model, tokens):
    logits = model(torch.tensor([tokens])).logits[0, :-1].double()
    return F.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="none")


@pytest.mark.parametrize("stride", [16, 40, 64])
def test_the_loop_of_transformers_documentation(monkeypatch, tmp_path, stride):
    folder = shipped.embedded_path("tiny_student")
    model, ids = stream(folder, "\n\n")
    total = count = plain = scored = previous_end = 0
    for begin in range(0, len(ids), stride):
        end = min(begin + 64, len(ids))
        targets = min(end - previous_end, end - begin - 1)
        nll = nll_of(model, ids[begin:end])[-targets:]
        # the documentation: mean loss x (labels that are not -100, less one)
        weight = (end - previous_end) - 1
        total, count = total + float(nll.mean()) * weight, count + weight
        plain, scored = plain + float(nll.sum()), scored + targets
        previous_end = end
        if end == len(ids):
            break
    content, _ = run(
        monkeypatch,
        tmp_path,
        folder,
        TEXTS,
        "protocol.name=hf_stride",
        f"protocol.stride={stride}",
        *("protocol.max_seq_len=64", "protocol.add_bos=false"),
    )
    assert content["counts"]["scored_tokens"] == scored
    metrics = content["metrics"]
    assert metrics["hf_perplexity"] == pytest.approx(math.exp(total / count), rel=1e-6)
    assert metrics["token_perplexity"] == pytest.approx(math.exp(plain / scored), rel=1e-6)
    differs = metrics["hf_perplexity"] != pytest.approx(metrics["token_perplexity"], rel=1e-6)
    assert differs == (stride < 64)


@pytest.mark.parametrize("bos", [False, True])
def test_gptq(monkeypatch, tmp_path, bos):
    """Mean loss of each block x its length, over blocks x their length."""
    folder = shipped.embedded_path("tiny_student")
    model, ids = stream(folder, "\n\n")
    lead = [1] if bos else []
    step = 48 - bos
    losses = [
        nll_of(model, lead + ids[block * step : (block + 1) * step]).mean()
        for block in range(len(ids) // step)
    ]
    content, _ = run(
        monkeypatch,
        tmp_path,
        folder,
        TEXTS,
        *("protocol.name=gptq", "protocol.max_seq_len=48", f"protocol.add_bos={str(bos).lower()}"),
    )
    theirs = math.exp(float(sum(losses)) / len(losses))
    assert content["metrics"]["token_perplexity"] == pytest.approx(theirs, rel=1e-6)
    assert content["counts"]["not_scored"]["truncated"] == len(ids) % step
    assert content["metrics"]["word_perplexity"] is None  # a tail of the text was not measured
    assert content["metrics"]["overflow"] is False


@pytest.mark.parametrize("bos", [False, True])
def test_llama_cpp(monkeypatch, tmp_path, bos):
    folder = shipped.embedded_path("tiny_student")
    model, ids = stream(folder, "\n")
    tokens = [1, *ids] if bos else ids
    total, count = 0.0, 0
    for chunk in range(len(tokens) // 40):
        window = tokens[chunk * 40 : (chunk + 1) * 40]
        if bos:
            window[0] = 1
        second_half = nll_of(model, window)[20:]
        total, count = total + float(second_half.sum()), count + len(second_half)
    content, _ = run(
        monkeypatch,
        tmp_path,
        folder,
        TEXTS,
        "protocol.name=llama_cpp",
        "protocol.max_seq_len=40",
        f"protocol.add_bos={str(bos).lower()}",
    )
    assert content["counts"]["scored_tokens"] == count
    theirs = math.exp(total / count)
    assert content["metrics"]["token_perplexity"] == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize(("context", "theirs"), [(512, 22.4006), (1024, 19.6117)])
def test_llama_cpp_itself(monkeypatch, tmp_path, real_model, real_corpus, context, theirs):
    """What llama.cpp printed for SmolLM2 (f32 weights and cache) on five articles."""
    lines = real_corpus("en_wikitext2_raw_test.jsonl").read_text().splitlines()[:5]
    content, _ = run(
        monkeypatch,
        tmp_path,
        real_model("smollm2"),
        [json.loads(line)["text"] for line in lines],
        *("protocol.name=llama_cpp", f"protocol.max_seq_len={context}"),
        "max_tokens_per_batch=4096",
    )
    assert content["metrics"]["token_perplexity"] == pytest.approx(theirs, abs=5e-5)
