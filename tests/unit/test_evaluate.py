"""evaluate: against closed forms and a plain float64 loop, on one process."""

import json
import logging
import math

import pytest
import torch
from helpers import BigramTable, ByteTokenizer, WordTokenizer, chunks, oracle, sharp_llama
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ppl_eval
from ppl_eval import UserError, evaluate
from ppl_eval.data.protocol import RULES, Protocol, make_protocol
from ppl_eval.evaluation.loop import Progress, run
from ppl_eval.evaluation.workload import prepare_workload
from ppl_eval.model.torchtune_decoder import decoder_of
from ppl_eval.score.reader import Reader


def words(ids):
    return " ".join(map(str, ids))


@pytest.fixture(scope="module")
def bytes_model():
    return sharp_llama(259)


TEXTS = ["ab", "abc", "hello", "a" * 9, "the quick brown f", "x y z " * 5 + "abc", "lorem " * 10]


def test_a_bigram_table_gives_exactly_two():
    """From every token two followers with probability 1/2 each."""
    log_probs = torch.full((4, 4), -torch.inf)
    for token in range(4):
        log_probs[token, [(token + 1) % 4, (token + 2) % 4]] = math.log(0.5)
    documents = [words([0, 1, 2, 0, 2, 3, 1]), words([3, 0]), words([1, 3, 0, 1, 2, 3, 0] * 20)]
    result = evaluate(BigramTable(log_probs), WordTokenizer(), documents, max_seq_len=16)
    assert result.perplexity == pytest.approx(2.0, rel=1e-6)
    metrics = result.summary.total.metrics()
    assert metrics["document_mean_perplexity"] == pytest.approx(2.0, rel=1e-6)


def test_uniform_and_certain_models():
    uniform = evaluate(BigramTable(torch.zeros(7, 7)), WordTokenizer(), [words([1, 2, 6, 0])])
    assert uniform.perplexity == pytest.approx(7)
    certain = torch.full((7, 7), -1e9).scatter(1, torch.arange(1, 8).remainder(7)[:, None], 0.0)
    result = evaluate(BigramTable(certain), WordTokenizer(), [words([3, 4, 5, 6, 0, 1])])
    assert result.perplexity == 1.0


def test_any_batch_size_equals_the_loop(bytes_model):
    """7 documents of several lengths, any batch size: one count and one NLL."""
    tokenizer = ByteTokenizer()
    ids = [tokenizer.encode(text, False, False) for text in TEXTS]
    expected = oracle(bytes_model, [w for i in ids for w in chunks(i, 32, bos_id=1)])
    assert expected[0] == sum(map(len, ids))
    for budget in (1, 40, 100, 10_000):
        result = evaluate(
            bytes_model, tokenizer, TEXTS, max_seq_len=32, max_tokens_per_batch=budget
        )
        assert result.summary.total.num_scored == expected[0]
        assert result.summary.total.nll_nats_sum == pytest.approx(expected[1], rel=1e-6)


def test_122_predictions_of_seven_documents_without_bos(bytes_model):
    """Lengths 2, 3, 5, 9, 17, 33, 60 make 122 predictions."""
    texts = ["x" * n for n in (2, 3, 5, 9, 17, 33, 60)]
    tokenizer = ByteTokenizer(bos_id=None)
    nll = set()
    for budget in (1, 128, 60 * 7):
        result = evaluate(
            bytes_model, tokenizer, texts, max_seq_len=64, max_tokens_per_batch=budget
        )
        total = result.summary.total
        assert (total.num_scored, total.counts["no_context"]) == (122, 7)
        nll.add(round(total.nll_nats_sum, 4))
    assert len(nll) == 1


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    lengths=st.lists(st.integers(0, 150), min_size=1, max_size=5).filter(lambda n: max(n) > 1),
    size=st.integers(2, 64),
    share=st.floats(0.01, 1),
    bos=st.booleans(),
    eos=st.booleans(),
    budget=st.integers(1, 300),
)
def test_any_windows_equal_the_loop(bytes_model, lengths, size, share, bos, eos, budget):
    """Overlap, BOS, EOS: every token scored once, with the context that its window has."""
    tokenizer = ByteTokenizer(bos_id=1 if bos else None)
    texts = [("the cat sat on a mat. " * 8)[:n] for n in lengths]
    text_tokens = size - bos
    stride = max(1, round(text_tokens * share))
    windows = []
    for text in texts:
        ids = tokenizer.encode(text, False, eos) if text else []
        done = start = 0
        while done < len(ids):
            stop = min(start + text_tokens, len(ids))
            lead = [1] if bos else []
            skipped = max(done - start + len(lead), 1)
            if stop - start + len(lead) > skipped:
                windows.append(([*lead, *ids[start:stop]], skipped))
            done, start = stop, start + stride
    if not windows:
        return
    expected = oracle(bytes_model, windows)
    result = evaluate(
        bytes_model,
        tokenizer,
        texts,
        max_seq_len=size,
        stride=stride,
        add_eos=eos,
        max_tokens_per_batch=budget,
    )
    assert result.summary.total.num_scored == expected[0]
    assert result.summary.total.nll_nats_sum == pytest.approx(expected[1], rel=1e-5)


def test_tokens_weigh_the_same_and_documents_do_in_their_own_mean():
    """10 tokens at 2 nats and 1000 at 4 nats: 53.53, and 20.09 for the document mean."""
    log_probs = torch.full((4, 4), -1e9)
    log_probs[0, 0], log_probs[0, 3] = -2.0, math.log1p(-math.exp(-2))
    log_probs[1, 1], log_probs[1, 3] = -4.0, math.log1p(-math.exp(-4))
    documents = [words([0] * 11), words([1] * 1001)]
    total = evaluate(
        BigramTable(log_probs), WordTokenizer(), documents, max_seq_len=2048
    ).summary.total
    assert round(total.perplexity, 2) == 53.53
    assert round(total.metrics()["document_mean_perplexity"], 2) == 20.09


def test_words_bytes_and_bits(bytes_model):
    texts = ["h\u00e9llo w\u00f6rld  again", "\u4e2d\u6587"]
    total = evaluate(bytes_model, ByteTokenizer(bos_id=None), texts, max_seq_len=64).summary.total
    counts, metrics = total.counts, total.metrics()
    assert counts["words"] == 4
    assert counts["bytes"] == len("".join(texts).encode())
    assert total.num_scored == counts["bytes"] - 2
    assert metrics["word_perplexity"] == pytest.approx(math.exp(total.nll_nats_sum / 4))
    assert metrics["bits_per_byte"] == pytest.approx(math.log2(metrics["byte_perplexity"]))


def test_text_that_white_space_does_not_cut_into_words(bytes_model):
    """Fewer than one word in 20 characters: of all text, and of each domain."""
    chinese = "\u4e2d\u6587" * 6
    for text, few_words in ((chinese, False), (chinese * 2, True), ("a" * 19 + " ", False)):
        rows = [{"text": text, "domain": "a"}, {"text": "one two", "domain": "b"}]
        result = evaluate(bytes_model, ByteTokenizer(), rows[:1], max_seq_len=64)
        assert result.summary.total.metrics()["few_words"] is few_words
        domains = evaluate(bytes_model, ByteTokenizer(), rows, max_seq_len=64).summary.domains
        flags = {name: part.metrics()["few_words"] for name, part in domains.items()}
        assert flags == {"a": few_words, "b": False}
    assert result.summary.total.metrics()["word_perplexity"] > 1


def test_documents_that_cannot_be_scored_are_counted(bytes_model):
    """Empty and one-token documents, first in the batch or not."""
    texts = ["", "a", "", "bc", "d"]
    names = ("documents", "documents_scored", "empty", "tokens", "scored_tokens", "no_context")
    for bos_id, expected in ((None, (5, 1, 2, 4, 1, 4 - 1)), (1, (5, 3, 2, 4, 4, 0))):
        tokenizer = ByteTokenizer(bos_id=bos_id)
        counts = evaluate(bytes_model, tokenizer, texts, max_seq_len=8).summary.total.counts
        assert tuple(counts[name] for name in names) == expected


@pytest.mark.parametrize("texts", [[""], ["a"], ["a", "", "b"]])
def test_nothing_to_score_is_an_error(bytes_model, texts):
    with pytest.raises(UserError, match="0 scored tokens"):
        evaluate(bytes_model, ByteTokenizer(bos_id=None), texts, max_seq_len=8)


def test_a_long_document_is_scored_to_its_end(bytes_model):
    """200 tokens in windows of 64: nothing is cut, and 196 of them are divided by 196."""
    text = "".join(chr(97 + n % 26) for n in range(200))
    result = evaluate(bytes_model, ByteTokenizer(bos_id=None), [text], max_seq_len=64)
    ids = ByteTokenizer().encode(text, False, False)
    count, nll = oracle(bytes_model, [w for w in chunks(ids, 64) if len(w[0]) > 1])
    assert result.summary.total.num_scored == count == 196
    assert result.perplexity == pytest.approx(math.exp(nll / 196), rel=1e-6)


def test_a_window_longer_than_the_model_is_refused(bytes_model):
    with pytest.raises(
        UserError, match="max_seq_len is 128, but the model reads at most 64 tokens"
    ):
        evaluate(bytes_model, ByteTokenizer(), ["abc"], max_seq_len=128)


def test_an_id_outside_the_model_is_named():
    model = sharp_llama(128)
    with pytest.raises(UserError, match="document 1 has the token id 128, but .* 128 rows"):
        evaluate(model, WordTokenizer(), [words([1, 127]), words([5, 128])], max_seq_len=8)


def test_first_documents_only(bytes_model):
    """max_documents: 3 scores documents 0, 1 and 2."""
    first = evaluate(bytes_model, ByteTokenizer(), TEXTS, max_seq_len=32, max_documents=3)
    alone = evaluate(bytes_model, ByteTokenizer(), TEXTS[:3], max_seq_len=32)
    assert list(first.summary.documents.rows()) == list(alone.summary.documents.rows())
    assert first.summary.total.counts["documents"] == 3


def test_domains_and_documents_add_up(bytes_model):
    rows = [{"text": t, "id": f"n{n}", "domain": "ab"[n % 2]} for n, t in enumerate(TEXTS)]
    summary = evaluate(bytes_model, ByteTokenizer(), rows, max_seq_len=32).summary
    assert list(summary.domains) == ["a", "b"]
    parts = summary.domains.values()
    assert sum(p.num_scored for p in parts) == summary.total.num_scored
    assert math.fsum(p.nll_nats_sum for p in parts) == pytest.approx(summary.total.nll_nats_sum)
    table = list(summary.documents.rows())
    assert [row["id"] for row in table] == [f"n{n}" for n in range(len(TEXTS))]
    for number, row in enumerate(table):
        alone = evaluate(bytes_model, ByteTokenizer(), [TEXTS[number]], max_seq_len=32)
        assert row["nll_nats_sum"] == pytest.approx(alone.summary.total.nll_nats_sum, rel=1e-5)
    json.dumps(table, allow_nan=False)


def test_a_broken_model_overflows_with_a_finite_nll(bytes_model):
    """exp of a mean above 709 nats is more than float64 holds."""
    model = sharp_llama(259, sharpness=1e6)
    total = evaluate(model, ByteTokenizer(), TEXTS, max_seq_len=32).summary.total
    assert math.isfinite(total.nll_nats_sum)
    assert total.nll_nats_sum / total.num_scored > 710
    metrics = total.metrics()
    assert metrics["token_perplexity"] is None
    assert metrics["overflow"] is True
    json.dumps(metrics, allow_nan=False)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_names_document_and_window(value):
    log_probs = torch.zeros(300, 300)
    log_probs[99] = value
    documents = [{"text": words([1, 2, 3])}, {"text": words([4] * 12 + [99, 5]), "id": "bad"}]
    message = r"loss is (nan|inf|-inf) in document 1 \(id 'bad'\), tokens 8 to 13"
    with pytest.raises(UserError, match=message):
        evaluate(BigramTable(log_probs), WordTokenizer(), documents, max_seq_len=8)


@pytest.mark.parametrize("one", ["hello", {"text": "hello"}, b"hello", 5, ppl_eval.Document("a")])
def test_one_text_is_no_list_of_documents(bytes_model, one):
    with pytest.raises(UserError, match="the documents are one "):
        evaluate(bytes_model, ByteTokenizer(), one, max_seq_len=8)


def test_half_a_surrogate_pair_is_no_text(bytes_model):
    with pytest.raises(UserError, match="document 1 holds half a surrogate pair at character 1"):
        evaluate(bytes_model, ByteTokenizer(), ["a", "b\ud800"], max_seq_len=8)


@pytest.mark.parametrize("special", [{"bos_id": 259}, {"eos_id": 700}, {"bos_id": -1}])
def test_a_special_token_outside_the_model_is_named(bytes_model, special):
    with pytest.raises(UserError, match="tokenizer's (BOS|EOS) has the token id .* 259 rows"):
        evaluate(bytes_model, ByteTokenizer(**special), ["a"], max_seq_len=8, add_eos=True)


def test_an_opening_bos_outside_the_model_is_named():
    """The scored BOS of lm_eval_rolling, where the prefix token is another."""
    protocol = Protocol(8, name="lm_eval_rolling", bos_id=1, opening_id=259)
    with pytest.raises(UserError, match="tokenizer's BOS has the token id 259, .* 259 rows"):
        prepare_workload(ByteTokenizer(), ["a"], protocol, max_tokens_per_batch=8, vocab_size=259)


def test_an_object_that_is_no_tokenizer(bytes_model):
    with pytest.raises(UserError, match=r"tokenizer is of type int, but it needs encode\("):
        evaluate(bytes_model, 5, ["a"], max_seq_len=8)


def test_labels_of_any_type_are_kept_as_text(bytes_model):
    rows = [{"text": "ab", "id": 2.5, "domain": 1}, {"text": "cd", "domain": "x"}]
    summary = evaluate(bytes_model, ByteTokenizer(), rows, max_seq_len=8).summary
    assert list(summary.domains) == ["1", "x"]
    assert [row["id"] for row in summary.documents.rows()] == ["2.5", None]


def test_training_mode_and_gradients_are_as_before(bytes_model):
    model = sharp_llama(259).train()
    evaluate(model, ByteTokenizer(), TEXTS, max_seq_len=32)
    assert model.training
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    model(torch.tensor([[1, 2, 3]])).sum().backward()
    evaluate(model, ByteTokenizer(), TEXTS, max_seq_len=32)
    model(torch.tensor([[1, 2, 3]])).sum().backward()


def test_progress_counts_every_token(bytes_model):
    protocol = make_protocol(ByteTokenizer(), max_seq_len=32)
    work = prepare_workload(ByteTokenizer(), TEXTS, protocol, max_tokens_per_batch=64)
    seen: list[Progress] = []
    reader = Reader(bytes_model, decoder_of(bytes_model))
    result = run([reader], work, device=torch.device("cpu"), on_step=seen.append)
    assert [p.step for p in seen] == list(range(1, len(work.plan.batches) + 1))
    done = [sum(work.plan.num_positions[: p.step]) for p in seen]
    assert [p.share for p in seen] == [n / done[-1] for n in done]
    assert seen[-1].num_scored == result.summary.total.num_scored
    assert seen[-1].perplexity() == pytest.approx(result.perplexity)


def test_progress_counts_the_noise_floor(bytes_model):
    """35 batches of one position beside a teacher; numbers 0, 16 and 32 are read again."""
    protocol = make_protocol(ByteTokenizer(), max_seq_len=32)
    work = prepare_workload(ByteTokenizer(), ["a"] * 35, protocol, max_tokens_per_batch=1)
    for noise_floor, steps in ((True, 38), (False, 35)):
        seen: list[Progress] = []
        result = run(
            [Reader(bytes_model, decoder_of(bytes_model))] * 2,
            work,
            device=torch.device("cpu"),
            noise_floor=noise_floor,
            on_step=seen.append,
        )
        assert [p.share for p in seen] == [n / steps for n in range(1, steps + 1)]
        assert [p.num_scored for p in seen] == [min(n, 35) for n in range(1, steps + 1)]
        assert result.fidelity.noise.sums[0, 0] == (3 if noise_floor else 0)


def test_the_budget_of_a_cpu_is_1024_positions(bytes_model):
    """100 windows of 30 input positions: 34 in each batch but the last."""
    texts = ["x" * 30] * 100
    for budget, size in ((None, 34), (60, 2)):
        result = evaluate(
            bytes_model, ByteTokenizer(), texts, max_seq_len=31, max_tokens_per_batch=budget
        )
        assert [len(batch) for batch in result.workload.plan.batches][:2] == [size] * 2


def test_two_tokenizers_are_compared_by_byte():
    """A model of bytes and one of pairs of bytes that find a text equally likely."""

    class Bytes(torch.nn.Module):
        def __init__(self, width):
            super().__init__()
            self.width, self.bos_id, self.eos_id, self.adds_bos = width, 0, None, True

        def encode(self, text, add_bos=True, add_eos=True):
            raw = text.encode()
            pieces = (raw[n : n + self.width] for n in range(0, len(raw), self.width))
            return [int.from_bytes(piece, "big") for piece in pieces]

        def forward(self, tokens):
            return torch.zeros(*tokens.shape, 256**self.width)

    texts = ["an even text", "4 bytes!", "\u4e2d\u00e9 z!"]
    one, two = (
        evaluate(Bytes(width), Bytes(width), texts, max_seq_len=64).summary.total
        for width in (1, 2)
    )
    assert two.nll_nats_sum == pytest.approx(one.nll_nats_sum, rel=1e-6)
    bits = [total.metrics()["bits_per_byte"] for total in (one, two)]
    assert bits == pytest.approx([8, 8], rel=1e-6)
    assert one.num_scored == 2 * two.num_scored
    assert one.perplexity == pytest.approx(256, rel=1e-5)
    assert two.perplexity == pytest.approx(256**2, rel=1e-5)


class MarkingTokenizer(ByteTokenizer):
    """Reads ``<s>`` and ``</s>`` that are written in a text as BOS and EOS."""

    def encode(self, text, add_bos=True, add_eos=True):
        begin, end = text.startswith("<s>"), text.endswith("</s>")
        inner = super().encode(text.removeprefix("<s>").removesuffix("</s>"), False, False)
        ids = [*([1] if begin else []), *inner, *([2] if end else [])]
        return [*([1] if add_bos else []), *ids, *([2] if add_eos else [])]


@pytest.mark.parametrize("name", RULES)
def test_a_bos_or_eos_in_a_text_comes_once(bytes_model, name):
    """A text with its own BOS is the text without it, in every protocol that gives it one."""
    texts = [text * 4 for text in TEXTS] if RULES[name].separator is None else ["lorem ipsum " * 20]
    sums = []
    for begin, end in (("", ""), ("<s>", ""), ("", "</s>"), ("<s>", "</s>")):
        total = evaluate(
            bytes_model,
            MarkingTokenizer(),
            [f"{begin}{text}{end}" for text in texts],
            protocol=name,
            max_seq_len=32,
            add_bos=True,
            add_eos=True,
        ).summary.total
        sums.append((total.num_scored, total.nll_nats_sum))
    assert sums == [sums[0]] * 4


def test_a_bos_in_a_text_stays_where_the_protocol_gives_none(bytes_model):
    """It is then the first token, which nothing stands before."""
    ids = MarkingTokenizer().encode("<s>hello there", False, False)
    expected = oracle(bytes_model, chunks(ids, 32))
    result = evaluate(
        bytes_model, MarkingTokenizer(), ["<s>hello there"], max_seq_len=32, add_bos=False
    )
    assert (expected[0], result.summary.total.counts["no_context"]) == (len(ids) - 1, 1)
    assert result.summary.total.nll_nats_sum == pytest.approx(expected[1], rel=1e-6)


def test_protocol_packed_is_gone_and_the_error_says_what_to_take(bytes_model):
    with pytest.raises(UserError, match="no longer a protocol: .*set protocol.name=document"):
        evaluate(bytes_model, ByteTokenizer(), TEXTS, protocol="packed")


def transformers_model(positions):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 259, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(
        **sizes, num_attention_heads=4, max_position_embeddings=positions
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.lm_head.weight.data.mul_(40)
    return model


def test_a_window_that_is_not_given_is_the_models_if_that_is_less(caplog):
    """transformers says it by max_position_embeddings; a sentence says that it counted."""
    model = transformers_model(48)
    texts = ["lorem ipsum dolor sit amet " * 9]
    ids = ByteTokenizer().encode(texts[0], False, False)
    expected = oracle(lambda t: model(t).logits, chunks(ids, 48, bos_id=1))
    with caplog.at_level("WARNING", "ppl_eval"):
        logging.getLogger("ppl_eval").propagate = True
        result = evaluate(model, ByteTokenizer(), texts)
    assert result.summary.total.num_scored == expected[0] == len(ids)
    assert result.summary.total.nll_nats_sum == pytest.approx(expected[1], rel=1e-6)
    assert result.notes == (
        "protocol.max_seq_len is not given: windows have 48 tokens, all that the model reads"
        " (document would take 1,024)",
    )
    assert result.notes[0] in caplog.text
    whole = evaluate(transformers_model(4096), ByteTokenizer(), texts)
    assert whole.workload.protocol.max_seq_len == RULES["document"].max_seq_len
    assert whole.notes == ()
    with pytest.raises(UserError, match="max_seq_len is 49, but the model reads at most 48 tokens"):
        evaluate(model, ByteTokenizer(), texts, max_seq_len=49)


class Wrapped(torch.nn.Module):
    """A model in a module of one's own, which says nothing of its window."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, tokens):
        return getattr(out := self.inner(tokens), "logits", out)


def test_a_model_in_a_module_of_ones_own_says_its_window_too(bytes_model):
    for inner in (transformers_model(48), bytes_model):
        with pytest.raises(UserError, match="but the model reads at most"):
            evaluate(Wrapped(inner), ByteTokenizer(), ["a text"], max_seq_len=4096)


def test_models_that_call_it_otherwise_or_have_none():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 259, "d_model": 16, "n_layers": 1, "n_heads": 2}
    model = transformers.MptForCausalLM(transformers.MptConfig(**sizes, max_seq_len=24))
    result = evaluate(model.eval(), ByteTokenizer(), ["lorem ipsum dolor sit amet " * 3])
    assert result.workload.protocol.max_seq_len == 24
    sizes = {"vocab_size": 259, "hidden_size": 16, "n_layer": 1, "n_head": 2}
    unbounded = transformers.BloomForCausalLM(transformers.BloomConfig(**sizes)).eval()
    assert evaluate(unbounded, ByteTokenizer(), ["lorem ipsum"]).notes == ()


def test_a_token_that_a_transformers_model_does_not_have():
    transformers = pytest.importorskip("transformers")
    sizes = {"n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=100, **sizes)).eval()
    with pytest.raises(UserError, match="document 1 .* 100"):
        evaluate(model, ByteTokenizer(), ["A", "zebra"])


def test_the_shorter_of_two_models_decides(bytes_model):
    """The teacher reads 64 tokens, the student fewer."""
    student = sharp_llama(259, max_seq_len=40)
    result = evaluate(student, ByteTokenizer(), TEXTS, protocol="hf_stride", teacher=bytes_model)
    assert (result.workload.protocol.max_seq_len, result.workload.protocol.stride) == (40, 20)
