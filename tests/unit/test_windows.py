"""The rules of the protocols, against loops that share nothing with them, token by token."""

import numpy as np
import pytest
from helpers import peer
from hypothesis import given
from hypothesis import strategies as st

from ppl_eval import UserError
from ppl_eval.data.protocol import RULES, Protocol, make_protocol

PREFIX = -1
"""Stands for a lead in the lists below; tokens are their numbers in the document."""


def found(windows, document=0):
    """[(what is read, what is scored)] of a document's windows."""
    rows = []
    for n in range(len(windows)):
        if windows.document[n] == document:
            start, read = int(windows.start[n]), int(windows.num_tokens[n])
            tokens = list(range(start, start + read))
            lead = [PREFIX] if windows.has_lead[n] else []
            rows.append((lead + tokens, tokens[int(windows.num_skipped[n]) :]))
    return rows


@pytest.fixture(scope="module")
def utils():
    """lm-eval's, imported before hypothesis measures time."""
    return peer("lm_eval.utils")


def lm_eval(utils, length, size):
    """The generator of lm-eval 0.4.13 and its make_disjoint_window, on token numbers."""
    pairs = utils.get_rolling_token_windows(list(range(length)), PREFIX, size, 1)
    rows = []
    for context, continuation in map(utils.make_disjoint_window, pairs):
        read = (context + continuation)[-(size + 1) :]
        rows.append((read, continuation))
    return rows


def llama_cpp(length, context, bos):
    """Chunks of the token list, its first replaced by BOS, the second half scored."""
    stream = [PREFIX, *range(length)] if bos else list(range(length))
    rows = []
    for chunk in range(len(stream) // context):
        read = stream[chunk * context : (chunk + 1) * context]
        if bos:
            read[0] = PREFIX
        rows.append((read, [read[i + 1] for i in range(context // 2, context - 1)]))
    return [row for row in rows if row[1]]


def gptq(length, size, bos):
    step = size - bos
    rows = []
    for block in range(length // step):
        tokens = list(range(block * step, (block + 1) * step))
        rows.append(([PREFIX, *tokens], tokens) if bos else (tokens, tokens[1:]))
    return [row for row in rows if row[1]]


def hf_stride(length, size, stride):
    """The loop of transformers' documentation; labels are shifted, so position 0 has none."""
    rows, previous_end = [], 0
    for begin in range(0, length, stride):
        end = min(begin + size, length)
        targets = list(range(begin, end))[-(end - previous_end) :]
        rows.append((list(range(begin, end)), [t for t in targets if t > begin]))
        previous_end = end
        if end == length:
            break
    return [row for row in rows if row[1]]


@given(st.integers(0, 70), st.integers(2, 20))
def test_lm_eval_rolling(utils, length, size):
    windows = Protocol(size, bos_id=1, name="lm_eval_rolling").windows(np.asarray([length]))
    assert found(windows) == lm_eval(utils, length, size)


@given(st.integers(0, 70), st.integers(2, 20), st.booleans())
def test_llama_cpp(length, context, bos):
    windows = Protocol(context, bos_id=1 if bos else None, name="llama_cpp").windows(
        np.asarray([length])
    )
    assert found(windows) == llama_cpp(length, context, bos)


@given(st.integers(0, 70), st.integers(2, 20), st.booleans())
def test_gptq(length, size, bos):
    windows = Protocol(size, bos_id=1 if bos else None, name="gptq").windows(np.asarray([length]))
    assert found(windows) == gptq(length, size, bos)


@given(st.integers(0, 70), st.integers(2, 20), st.data())
def test_hf_stride(length, size, data):
    stride = data.draw(st.integers(1, size))
    windows = Protocol(size, stride, name="hf_stride").windows(np.asarray([length]))
    assert found(windows) == hf_stride(length, size, stride)


@given(
    st.sampled_from(list(RULES)),
    st.lists(st.integers(0, 90), min_size=1, max_size=6),
    st.integers(2, 20),
    st.sampled_from([None, 1]),
    st.sampled_from([None, 2]),
    st.sampled_from([None, 3]),
    st.data(),
)
def test_every_ledger_adds_up(name, lengths, size, bos_id, eos_id, opening_id, data):
    """Scored and not scored by reason are all tokens, each token once."""
    rule = RULES[name]
    stride = None
    if rule.strides:
        window = size - (bos_id is not None)
        stride = data.draw(st.one_of(st.none(), st.integers(1, window)))
    if rule.opens_with_bos:
        bos_id = 1
    else:
        opening_id = None
    protocol = Protocol(size, stride, bos_id, eos_id, name=name, opening_id=opening_id)
    windows = protocol.windows(np.asarray(lengths))
    total = protocol.num_tokens(np.asarray(lengths))
    assert (windows.num_inputs <= size).all()
    assert (windows.num_inputs >= 1).all()
    for number, length in enumerate(total):
        rows = found(windows, number)
        scored = [token for _, targets in rows for token in targets]
        read = {token for tokens, _ in rows for token in tokens} - {PREFIX}
        assert len(scored) == len(set(scored))
        assert all(set(targets) <= set(tokens[1:]) for tokens, targets in rows)
        assert all(0 <= token < length for token in read)
        reasons = (windows.no_context, windows.context_only, windows.truncated)
        counts = [int(reason[number]) for reason in reasons]
        assert min(counts) >= 0
        assert len(scored) + sum(counts) == length
        if rows and (windows.num_tokens > 1).all():
            assert counts[2] >= length - len(read) - counts[0]
        if name == "lm_eval_rolling":
            assert counts == [0, 0, 0]


@given(st.lists(st.integers(5, 99), max_size=12), st.sampled_from([None, 1]), st.data())
def test_what_a_window_reads(text, opening_id, data):
    protocol = Protocol(8, eos_id=2, opening_id=opening_id)
    whole = ([] if opening_id is None else [1]) + text + [2]
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    read = protocol.read(np.asarray(text, dtype=np.int32), start, stop)
    assert read.tolist() == whole[start:stop]


class Tokenizer:
    def __init__(self, bos_id=None, eos_id=None, adds_bos=False):
        self.bos_id, self.eos_id, self.adds_bos = bos_id, eos_id, adds_bos

    def encode(self, text, add_bos=True, add_eos=True):
        return []


def test_the_prefix_token_of_lm_eval():
    """BOS, else EOS, whatever add_bos says; a BOS that is added is scored."""

    def ids(tokenizer, add_bos):
        protocol = make_protocol(tokenizer, "lm_eval_rolling", add_bos=add_bos)
        return protocol.bos_id, protocol.opening_id

    assert ids(Tokenizer(1, 2, adds_bos=True), "auto") == (1, 1)
    assert ids(Tokenizer(1, 2, adds_bos=False), "auto") == (1, None)
    assert ids(Tokenizer(1, 2, adds_bos=True), False) == (1, None)
    assert ids(Tokenizer(1, 2, adds_bos=False), True) == (1, 1)
    assert ids(Tokenizer(None, 2), "auto") == (2, None)
    with pytest.raises(UserError, match="needs a prefix token"):
        ids(Tokenizer(), "auto")


def test_defaults_and_refusals():
    assert make_protocol(Tokenizer(), "llama_cpp").max_seq_len == 512
    assert make_protocol(Tokenizer(), "gptq").max_seq_len == 2048
    assert make_protocol(Tokenizer(), "hf_stride").stride == 512
    assert make_protocol(Tokenizer(), "concat").separator == "\n\n"
    assert make_protocol(Tokenizer(), "concat", separator="").separator == ""
    for name, options, message in [
        ("wiki", {}, "protocol.name is 'wiki', but it is one of document, concat"),
        ("gptq", {"stride": 4}, "gptq has none: set it to null"),
        ("document", {"separator": " "}, "document keeps documents apart"),
    ]:
        with pytest.raises(UserError, match=message):
            make_protocol(Tokenizer(), name, **options)
