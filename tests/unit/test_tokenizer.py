"""hf_tokenizer: what the folder says, and what torchtune needs."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from ppl_eval import UserError
from ppl_eval.data import hf_tokenizer
from ppl_eval.data.tokenizer import fingerprint_of, text_encoder, wants_bos
from ppl_eval.shipped import embedded_path


@pytest.fixture
def folder(tmp_path):
    """Write a byte-level tokenizer folder: ids 0 <pad>, 1 <s>, 2 </s>, then bytes."""

    def write(config=None, *, adds_bos=False, change=None):
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocab = {token: n for n, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
        if adds_bos:
            tokenizer.post_processor = processors.TemplateProcessing(
                single="<s> $A", special_tokens=[("<s>", 1)]
            )
        if change:
            change(tokenizer)
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        if config is not None:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return str(tmp_path)

    return write


FULL = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": "<pad>"}


def test_ids_with_and_without_bos_and_eos(folder):
    tokenizer = hf_tokenizer(folder(FULL))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, 0)
    text = "h\u00e9 \u4e2d"
    plain = tokenizer.encode(text, add_bos=False, add_eos=False)
    assert len(plain) == len(text.encode())
    assert tokenizer.encode(text) == [1, *plain, 2]
    assert tokenizer.encode(text, add_bos=True, add_eos=False) == [1, *plain]
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
    assert tokenizer.encode_batch(["a", text]) == [tokenizer.encode("a", False, False), plain]


@pytest.mark.parametrize("config", [{}, {"bos_token": None, "eos_token": None}, None])
def test_without_bos_and_eos(folder, config):
    tokenizer = hf_tokenizer(folder(config))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (None, None)
    assert tokenizer.pad_id == 0
    assert tokenizer.encode("a") == tokenizer.encode("a", False, False)
    assert not wants_bos(tokenizer)


def test_pad_falls_back_to_eos(folder):
    assert hf_tokenizer(folder({"eos_token": "</s>"})).pad_id == 2


@pytest.mark.parametrize(
    ("adds_bos", "config", "wanted"),
    [
        (False, FULL, False),
        (True, FULL, True),
        (True, {**FULL, "add_bos_token": False}, True),
        (False, {**FULL, "add_bos_token": True}, True),
        (False, {"eos_token": "</s>", "add_bos_token": True}, False),
    ],
)
def test_bos_is_wanted_when_the_tokenizer_adds_it_or_its_config_says_so(
    folder, adds_bos, config, wanted
):
    tokenizer = hf_tokenizer(folder(config, adds_bos=adds_bos))
    assert wants_bos(tokenizer) is wanted
    assert tokenizer.encode("a", False, False) == hf_tokenizer(folder(FULL)).encode(
        "a", False, False
    )


def test_special_tokens_in_a_text_are_text(folder):
    tokenizer = hf_tokenizer(folder(FULL))
    ids = tokenizer.encode("a</s>b", add_bos=False, add_eos=False)
    assert len(ids) == 6
    assert 2 not in ids


def test_truncation_and_padding_in_the_file_are_ignored(folder):
    def change(tokenizer):
        tokenizer.enable_truncation(2)
        tokenizer.enable_padding(length=9)

    tokenizer = hf_tokenizer(folder(FULL, change=change))
    assert len(tokenizer.encode("abcde", False, False)) == 5


def test_bad_folders_are_named(tmp_path, folder):
    with pytest.raises(UserError, match="no tokenizer.json in"):
        hf_tokenizer(str(tmp_path / "nothing"))
    with pytest.raises(UserError, match="bos_token is '<x>', but tokenizer.json has no such token"):
        hf_tokenizer(folder({"bos_token": "<x>"}))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match="tokenizer_config.json is not readable JSON"):
        hf_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(UserError, match="holds a list, but it is a mapping"):
        hf_tokenizer(str(tmp_path))
    with pytest.raises(UserError, match="bos_token is 5, but tokenizer.json has no such token"):
        hf_tokenizer(folder({"bos_token": 5}))
    with pytest.raises(UserError, match="tokenizer.path is None, but it is"):
        hf_tokenizer(None)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="tokenizer.json is not a readable tokenizer"):
        hf_tokenizer(str(tmp_path))


def test_fingerprints_tell_tokenizers_apart(folder):
    plain, with_bos = hf_tokenizer(folder(FULL)), hf_tokenizer(folder(FULL, adds_bos=True))
    assert fingerprint_of(plain) != fingerprint_of(with_bos)
    assert fingerprint_of(with_bos) == fingerprint_of(hf_tokenizer(folder(FULL, adds_bos=True)))


def test_torchtune_datasets_accept_it(folder, tmp_path):
    """Text completion and chat: both ask for what torchtune's own base class lacks."""
    from torchtune.datasets import chat_dataset, text_completion_dataset

    path = folder(FULL, adds_bos=True)
    tokenizer = hf_tokenizer(path, max_seq_len=12)
    text = tmp_path / "t.jsonl"
    text.write_text('{"text": "abc"}\n')
    sample = text_completion_dataset(
        tokenizer, "json", data_files=str(text), split="train", cache_dir=str(tmp_path / "hf")
    )[0]
    assert sample["tokens"] == tokenizer.encode("abc")
    chat = tmp_path / "c.jsonl"
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]
    chat.write_text(json.dumps({"conversations": turns}) + "\n")
    sample = chat_dataset(
        tokenizer,
        source="json",
        data_files=str(chat),
        split="train",
        conversation_column="conversations",
        conversation_style="sharegpt",
        cache_dir=str(tmp_path / "hf"),
    )[0]
    ids = tokenizer.encode("hi", True, False) + tokenizer.encode("yo", False, True)
    assert sample["tokens"] == ids
    assert sample["labels"] == [-100, -100, -100, *ids[3:]]


def test_bos_is_known_without_tokenizer_config(folder, tmp_path):
    """What tokenizer.json itself puts before a text is a BOS, whatever the other file lacks."""
    assert hf_tokenizer(folder(None, adds_bos=True)).bos_id == 1
    tokenizer = hf_tokenizer(folder({"eos_token": "</s>"}, adds_bos=True))
    assert (tokenizer.bos_id, tokenizer.adds_bos) == (1, True)


def test_eos_after_a_text_is_no_bos(folder):
    def change(tokenizer):
        tokenizer.post_processor = processors.TemplateProcessing(
            single="$A </s>", special_tokens=[("</s>", 2)]
        )

    tokenizer = hf_tokenizer(folder({"eos_token": "</s>"}, change=change))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.adds_bos) == (None, 2, False)


def test_torchtune_base_tokenizer_adds_nothing_twice(folder):
    """It adds what the template says even when told not to."""
    from torchtune.modules.transforms.tokenizers import HuggingFaceBaseTokenizer

    for template in ("<s> $A", "$A </s>", "<s> $A </s>", "$A"):

        def change(tokenizer, template=template):
            tokenizer.post_processor = processors.TemplateProcessing(
                single=template, special_tokens=[("<s>", 1), ("</s>", 2)]
            )

        path = folder({"bos_token": "<s>", "eos_token": "</s>"}, change=change)
        theirs = HuggingFaceBaseTokenizer(
            f"{path}/tokenizer.json", tokenizer_config_json_path=f"{path}/tokenizer_config.json"
        )
        plain = hf_tokenizer(path).encode("hello", False, False)
        assert text_encoder(theirs)(["hello", ""]) == [plain, []]
        assert len(theirs.encode("hello", False, False)) == 5 + template.count("s>")


def test_a_continued_text_gets_no_blank_of_its_own(folder):
    """A SentencePiece-like tokenizer puts a blank before the first word, not in the middle."""
    from tokenizers import normalizers

    def prepend(tokenizer):
        tokenizer.normalizer = normalizers.Prepend(" ")

    tokenizer = hf_tokenizer(folder(FULL, change=prepend))
    apart = tokenizer.encode("ab", False, False, trim_leading_whitespace=True)
    assert tokenizer.decode(apart) == "ab"
    assert tokenizer.decode(tokenizer.encode("ab", False, False)) == " ab"


@pytest.mark.parametrize("name", ["tiny_teacher", "tiny_student"])
def test_ids_equal_those_of_transformers_on_the_embedded_text(name, held_out):
    transformers = pytest.importorskip("transformers")
    path = embedded_path(name)
    ours, theirs = hf_tokenizer(str(path)), transformers.AutoTokenizer.from_pretrained(path)
    for line in held_out.read_text().splitlines():
        text = json.loads(line)["text"]
        assert ours.encode(text, add_bos=True, add_eos=False) == theirs(text)["input_ids"]


def test_ids_equal_those_of_transformers_on_real_text(real_model, real_corpus):
    transformers = pytest.importorskip("transformers")
    path = real_model("stories260k-hf")
    ours, theirs = hf_tokenizer(str(path)), transformers.AutoTokenizer.from_pretrained(path)
    assert wants_bos(ours)
    for corpus in ("en_tinystories.jsonl", "zh_fortunes_1500.jsonl"):
        for line in real_corpus(corpus).read_text().splitlines()[:50]:
            text = json.loads(line)["text"]
            assert ours.encode(text, add_bos=True, add_eos=False) == theirs(text)["input_ids"]


def test_torchtune_sentencepiece_tokenizer_gives_the_same_ids(real_model, real_corpus):
    from torchtune.models.llama2 import llama2_tokenizer

    path = real_model("stories260k-hf")
    theirs = llama2_tokenizer(str(path / "tokenizer.model"))
    assert wants_bos(theirs)
    ours = hf_tokenizer(str(path))
    for line in real_corpus("en_tinystories.jsonl").read_text().splitlines():
        text = json.loads(line)["text"]
        assert ours.encode(text) == theirs.encode(text)


def test_special_tokens_in_a_text_when_asked_for(folder):
    path = folder(FULL)
    as_text, as_token = (hf_tokenizer(path, special_tokens_in_text=flag) for flag in (False, True))
    assert len(as_text.encode("a</s>b", False, False)) == 6
    ids = as_token.encode("a</s>b", False, False)
    assert (len(ids), ids[1]) == (3, 2)
    assert as_text.fingerprint != as_token.fingerprint
    assert as_text.fingerprint == hf_tokenizer(path).fingerprint


@pytest.mark.parametrize("unknown", ["<unk>", None])
def test_bytes_that_no_token_stands_for(tmp_path, unknown):
    """A vocabulary of characters: what it lacks becomes <unk>, or nothing at all."""
    vocab = {token: n for n, token in enumerate(["<unk>", *"abc"])}
    model = models.BPE(vocab=vocab, merges=[], unk_token=unknown)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = hf_tokenizer(str(tmp_path))
    assert ours.encode("ab c", False, False) == [1, 2, 3]
    assert ours.lost_bytes("ab c") == 0
    assert ours.lost_bytes("a z c") == 1
    assert ours.lost_bytes("a\u4e2db \n z") == 3 + 1
    assert ours.lost_bytes("") == 0


def test_a_vocabulary_of_bytes_loses_nothing(folder):
    assert hf_tokenizer(folder(FULL)).lost_bytes("\u4e2d z \U0001f600") == 0
