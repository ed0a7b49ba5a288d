"""The document protocol, against a loop that follows its sentence token by token."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppl_eval import UserError
from ppl_eval.data.protocol import Protocol, make_protocol

BOS, EOS = 1, 2


def by_the_sentence(length, protocol):
    """(window start, tokens read, offsets scored) of every window of one document, and no_context.

    "It advances by stride text tokens; it scores the tokens that no earlier window scored and that
    have at least one token (text or BOS) before them in the window."
    """
    if length == 0:
        return [], 0
    length += protocol.eos_id is not None
    size = protocol.max_seq_len - (protocol.bos_id is not None)
    windows, scored, start = [], set(), 0
    while True:
        tokens = list(range(start, min(start + size, length)))
        new = []
        for place, token in enumerate(tokens):
            has_context = place > 0 or protocol.bos_id is not None
            if token not in scored and has_context:
                new.append(token)
        scored |= set(new)
        windows.append((start, len(tokens), new))
        if tokens[-1] == length - 1:
            break
        start += size if protocol.stride is None else protocol.stride
    return windows, length - len(scored)


def protocols():
    def build(max_seq_len, bos, eos, stride_share):
        bos_id, eos_id = BOS if bos else None, EOS if eos else None
        text = max_seq_len - bos
        stride = None if stride_share is None else max(1, min(text, round(text * stride_share)))
        return Protocol(max_seq_len, stride, bos_id, eos_id)

    share = st.one_of(st.none(), st.floats(0, 1))
    return st.builds(build, st.integers(2, 20), st.booleans(), st.booleans(), share)


@given(st.lists(st.integers(0, 70), min_size=1, max_size=8), protocols())
def test_windows_follow_the_sentence(lengths, protocol):
    windows = protocol.windows(np.asarray(lengths))
    found = {}
    for d, s, n, k in zip(
        windows.document, windows.start, windows.num_tokens, windows.num_skipped, strict=True
    ):
        found.setdefault(int(d), []).append((int(s), int(n), list(range(s + k, s + n))))
    for number, length in enumerate(lengths):
        expected, no_context = by_the_sentence(length, protocol)
        assert found.get(number, []) == [w for w in expected if w[2]]
        assert windows.no_context[number] == no_context


@given(st.lists(st.integers(0, 300), min_size=1, max_size=8), protocols())
def test_every_token_is_scored_once_or_counted(lengths, protocol):
    windows = protocol.windows(np.asarray(lengths))
    for number, length in enumerate(lengths):
        mine = windows.document == number
        scored = [
            token
            for start, skipped, read in zip(
                windows.start[mine],
                windows.num_skipped[mine],
                windows.num_tokens[mine],
                strict=True,
            )
            for token in range(start + skipped, start + read)
        ]
        total = length + (protocol.eos_id is not None) if length else 0
        assert len(scored) == len(set(scored)) == total - windows.no_context[number]
    assert (windows.num_tokens <= protocol.window_tokens).all()
    assert (windows.num_scored > 0).all()


@pytest.mark.parametrize(
    ("length", "bos_id", "scored", "no_context"),
    [
        (0, None, 0, 0),
        (1, None, 0, 1),
        (2, None, 1, 1),
        (1, BOS, 1, 0),
        (64, None, 63, 1),
        (65, None, 63, 2),
        (200, None, 196, 4),
        (200, BOS, 200, 0),
    ],
)
def test_counts_of_windows_of_64(length, bos_id, scored, no_context):
    windows = Protocol(64, None, bos_id).windows(np.asarray([length]))
    assert windows.num_scored.sum() == scored
    assert windows.no_context.sum() == no_context


def test_full_overlap_gives_every_token_the_longest_context():
    windows = Protocol(8, 1).windows(np.asarray([20]))
    assert windows.num_scored.sum() == 19
    assert windows.num_skipped[1:].tolist() == [7] * 12


@pytest.mark.parametrize("stride", [0, -1, 65])
def test_stride_out_of_range_is_refused(stride):
    with pytest.raises(UserError, match=f"stride is {stride}, but it is between 1 and 64"):
        Protocol(64, stride)
    with pytest.raises(UserError, match="between 1 and 63"):
        Protocol(64, 64, bos_id=BOS)


@pytest.mark.parametrize("stride", [1, 64])
def test_stride_in_range_is_taken(stride):
    assert Protocol(64, stride).advance == stride


def test_a_window_of_one_token_is_refused():
    with pytest.raises(UserError, match="max_seq_len is 1"):
        Protocol(1)


class _Tokenizer:
    def __init__(self, bos_id, adds_bos=None):
        self.bos_id, self.eos_id = bos_id, None
        if adds_bos is not None:
            self.adds_bos = adds_bos

    def encode(self, text, add_bos=True, add_eos=True):
        return [self.bos_id] if add_bos and self.bos_id is not None else []


def test_bos_is_what_the_tokenizer_wants_unless_told():
    def bos(tokenizer, add_bos):
        return make_protocol(tokenizer, max_seq_len=8, add_bos=add_bos).bos_id

    assert bos(_Tokenizer(1, adds_bos=True), "auto") == 1
    assert bos(_Tokenizer(1, adds_bos=False), "auto") is None
    assert bos(_Tokenizer(1), "auto") == 1  # torchtune's own say it by what they encode
    assert bos(_Tokenizer(None), "auto") is None
    assert bos(_Tokenizer(1, adds_bos=False), True) == 1
    assert bos(_Tokenizer(1, adds_bos=True), False) is None
    with pytest.raises(UserError, match="no BOS"):
        bos(_Tokenizer(None), True)
    with pytest.raises(UserError, match="'yes', but it is auto, true or false"):
        bos(_Tokenizer(1), "yes")
    with pytest.raises(UserError, match="no EOS"):
        make_protocol(_Tokenizer(1), max_seq_len=8, add_eos=True)
