"""text_corpus and as_documents: what they read, and what they say about what they cannot."""

import gzip
import json
import os

import pytest

from ppl_eval import Document, UserError
from ppl_eval.data import text_corpus
from ppl_eval.data.documents import NamedCorpora, as_documents, labels

pytestmark = pytest.mark.usefixtures("hf_cache")


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write


def texts(corpus):
    return [document.text for document in corpus]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.ndjson"])
def test_jsonl_with_id_and_domain(write, name):
    rows = [{"id": f"r{n}", "text": f"text {n}", "domain": "xy"[n % 2]} for n in range(3)]
    corpus = text_corpus(data_files=write(name, "\n".join(map(json.dumps, rows))))
    assert list(corpus) == [Document(r["text"], r["id"], r["domain"]) for r in rows]
    assert labels(corpus) == [(r["id"], r["domain"]) for r in rows]


def test_columns_by_name(write):
    file = write("a.jsonl", '{"body": "b", "kind": 7, "id": 3}\n')
    corpus = text_corpus(data_files=file, column="body", domain_column="kind")
    assert list(corpus) == [Document("b", 3, "7")]


def test_lines_of_a_text_file_blank_ones_included(write):
    assert texts(text_corpus(data_files=write("a.txt", "a\n\n\nb\n"))) == ["a", "", "", "b"]


def test_a_text_file_as_one_document(write):
    assert texts(text_corpus(data_files=write("a.txt", "a\n\nb\n"), unit="file")) == ["a\n\nb\n"]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv"])
def test_a_byte_order_mark_is_no_text(write, name):
    body = {"a.txt": "abc\n", "a.jsonl": '{"text": "abc"}\n', "a.csv": "text\nabc\n"}[name]
    assert texts(text_corpus(data_files=write(name, "\ufeff" + body))) == ["abc"]


def test_csv_fields_are_text_as_they_stand(write):
    file = write("a.csv", 'text,n\nNA,1\n"",2\n12,3\n"x, ""y""",4\nnull,5\n')
    assert texts(text_corpus(data_files=file)) == ["NA", "", "12", 'x, "y"', "null"]
    tabs = write("a.tsv", "n\ttext\n1\ta, b\n")
    assert texts(text_corpus(data_files=tabs)) == ["a, b"]


def test_parquet(tmp_path):
    from datasets import Dataset

    file = str(tmp_path / "a.parquet")
    Dataset.from_dict({"text": ["p", "q"]}).to_parquet(file)
    assert texts(text_corpus(data_files=file)) == ["p", "q"]


def test_compressed_and_several_files_in_the_order_given(tmp_path, write):
    packed = tmp_path / "z.jsonl.gz"
    packed.write_bytes(gzip.compress(b'{"text": "packed"}\n'))
    plain = write("a.jsonl", '{"text": "plain"}\n')
    assert texts(text_corpus(data_files=[str(packed), plain])) == ["packed", "plain"]
    pattern = text_corpus(data_files=str(tmp_path / "*.jsonl"))
    assert texts(pattern) == ["plain"]


@pytest.mark.parametrize("source", ["json", "jsonl"])
def test_a_loader_name_is_no_hub_name(write, source):
    assert texts(text_corpus(source, data_files=write("strange.dat", '{"text": "a"}\n'))) == ["a"]


def test_a_local_path_as_source(write, tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    file = write("texts/a.txt", "a\n")
    assert texts(text_corpus(file)) == ["a"]
    assert texts(text_corpus(str(folder))) == ["a"]


def test_a_local_folder_is_read_as_its_files_are(write, tmp_path):
    (tmp_path / "f").mkdir()
    write("f/a.txt", "\ufeffone\ntwo\n")
    assert texts(text_corpus(str(tmp_path / "f"), unit="file")) == ["one\ntwo\n"]
    (tmp_path / "c").mkdir()
    write("c/test.csv", "text,id\nNA,007\n")
    corpus = text_corpus(str(tmp_path / "c"))
    assert list(corpus) == [Document("NA", "007")]


def test_a_rewritten_file_with_the_same_time_is_read_anew(write, tmp_path):
    file = write("a.txt", "aaa\n")
    os.utime(file, (1, 1))
    assert texts(text_corpus(data_files=file)) == ["aaa"]
    write("a.txt", "bbb\n")
    os.utime(file, (1, 1))
    assert texts(text_corpus(data_files=file)) == ["bbb"]


def test_a_name_may_hold_brackets(write):
    assert texts(text_corpus(data_files=write("w[1].txt", "a\n"))) == ["a"]


def test_no_domain_on_request(write):
    file = write("a.jsonl", '{"text": "a", "domain": "d"}\n')
    assert text_corpus(data_files=file)[0].domain == "d"
    assert text_corpus(data_files=file, domain_column="")[0].domain is None


def test_indices_and_slices(write):
    corpus = text_corpus(data_files=write("a.txt", "a\nb\nc\n"))
    assert (corpus[0].text, corpus[-1].text, len(corpus[1:])) == ("a", "c", 2)
    with pytest.raises(IndexError):
        _ = corpus[3]


def test_the_first_documents_only(write):
    corpus = text_corpus(data_files=write("a.txt", "a\nb\nc\n"))
    assert texts(as_documents(corpus, 2)) == ["a", "b"]
    assert texts(as_documents(corpus, 9)) == ["a", "b", "c"]
    assert texts(as_documents(["x", {"text": "y"}, Document("z")], 2)) == ["x", "y"]


bad_files = {
    "empty.jsonl": ("", "empty.jsonl is empty"),
    "empty.txt": ("", "empty.txt is empty"),
    "latin.txt": ("a\nb\ncaf\u00e9\n".encode("latin-1"), "latin.txt, line 3 is not UTF-8"),
    "latin.jsonl": (
        '{"text": "a"}\n{"text": "caf\u00e9"}\n'.encode("latin-1"),
        "latin.jsonl, line 2 is not UTF-8",
    ),
    "cut.jsonl": ('{"text": "a"}\n{"text": "b', "cut.jsonl, line 2 is not JSON"),
    "words.jsonl": ("hello\n", "words.jsonl, line 1 is not JSON"),
    "ragged.csv": ("text,d\na,b\nc,d,e,f\n", "ragged.csv cannot be read as a data set: .*line 3"),
    "no.parquet": ("xxxx", "no.parquet cannot be read as a data set"),
    "a.xyz": ("a\n", "cannot tell what .*a.xyz is by its suffix"),
}


@pytest.mark.parametrize("name", bad_files)
def test_a_bad_file_is_named_with_its_line(write, name):
    content, message = bad_files[name]
    with pytest.raises(UserError, match=message) as error:
        list(text_corpus(data_files=write(name, content)))
    assert "\n" not in str(error.value)


bad_rows = {
    '{"text": "a"}\n{"text": null}\n': "row 1 .*holds null",
    '{"text": "a"}\n{"x": 1}\n': "row 1 .*holds null",
    '{"text": "a"}\n{"text": 5}\n': "row 1 .*holds int 5",
    '{"text": 5}\n{"text": "a"}\n': "row 0 .*holds int 5",
    '{"text": "a"}\n{"text": ["b"]}\n': "row 1 .*holds list",
    '{"text": ["a"]}\n': "row 0 .*holds list",
}


@pytest.mark.parametrize("content", bad_rows)
def test_a_row_that_is_no_text_is_named_by_its_number(write, content):
    corpus = text_corpus(data_files=write("a.jsonl", content))
    with pytest.raises(UserError, match=bad_rows[content]):
        list(corpus)


def test_wrong_column_lists_the_columns(write):
    file = write("a.jsonl", '{"body": "b", "kind": 1}\n')
    with pytest.raises(
        UserError, match="dataset.column is 'text', but .* has the columns body, kind"
    ):
        text_corpus(data_files=file)
    with pytest.raises(UserError, match="dataset.domain_column is 'dom', but"):
        text_corpus(data_files=file, column="body", domain_column="dom")


def test_wrong_split_lists_the_splits(write, tmp_path):
    file = write("a.jsonl", '{"text": "a"}\n')
    with pytest.raises(UserError, match="Unknown split \"test\".*'train'"):
        text_corpus(data_files=file, split="test")
    with pytest.raises(UserError, match="corresponds to no data"):
        text_corpus(data_files=file, split="train[:0]")
    folder = tmp_path / "two"
    folder.mkdir()
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(UserError, match="splits train, test: choose one by dataset.split"):
        text_corpus(str(folder))
    assert len(text_corpus(str(folder), split="test")) == 1


def test_missing_files_and_sources_ask_no_hub():
    with pytest.raises(UserError, match=r"data_files is 'no.jsonl', but there is no such file"):
        text_corpus(data_files="no.jsonl")
    with pytest.raises(UserError, match=r"source is './no.txt', but there is no such file"):
        text_corpus("./no.txt")
    with pytest.raises(
        UserError, match="source 'txt', which is a loader's name, and no data_files"
    ):
        text_corpus("txt")
    with pytest.raises(UserError, match="no source and no data_files"):
        text_corpus()
    with pytest.raises(UserError, match="unit is 'page'"):
        text_corpus(data_files="x.txt", unit="page")
    with pytest.raises(UserError, match="source is 'mine/set' and data_files is"):
        text_corpus("mine/set", data_files=__file__)


wrong_arguments = [
    ({"column": None}, "dataset.column is None"),
    ({"column": ""}, "dataset.column is ''"),
    ({"data_files": 5}, "dataset.data_files is 5"),
    ({"data_files": [5]}, r"dataset.data_files is \[5\]"),
    ({"source": 5}, "dataset.source is 5"),
    ({"source": ""}, "dataset.source is ''"),
    ({"data_files": "."}, "dataset.data_files is '.', but that is a folder"),
]


@pytest.mark.parametrize(("arguments", "message"), wrong_arguments)
def test_arguments_of_the_wrong_kind(arguments, message):
    with pytest.raises(UserError, match=message):
        text_corpus(**arguments)


def test_a_bad_file_is_not_reported_by_datasets_as_well(write, capfd):
    with pytest.raises(UserError):
        text_corpus(data_files=write("a.jsonl", '{"text": "a"}\n{"text'))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("row", [5, None, {"body": "x"}, {"text": None}])
def test_python_rows_are_checked(row):
    with pytest.raises(UserError, match="document 1 is"):
        as_documents(["a", row])


def test_no_documents_at_all():
    with pytest.raises(UserError, match="no documents"):
        as_documents([])


def test_several_data_sets_as_one_sequence(write):
    lines = "".join(json.dumps({"text": f"a{n}", "domain": f"d{n % 2}"}) + "\n" for n in range(5))
    corpora = NamedCorpora(
        {
            "one": text_corpus(data_files=write("a.jsonl", lines)),
            "two": [Document("b0"), Document("b1")],
        }
    )
    whole = [(f"a{n}", f"one/d{n % 2}") for n in range(5)] + [("b0", "two"), ("b1", "two")]
    found = [(document.text, document.domain) for document in corpora]
    assert found == whole
    assert [domain for _, domain in corpora.labels()] == [domain for _, domain in whole]
    for piece in (slice(3, 6), slice(None), slice(-2, None), slice(6, 1, -2), slice(1, 7, 3)):
        assert [(d.text, d.domain) for d in corpora[piece]] == whole[piece]
    assert corpora[-1].text == "b1"
    assert [d.text for d in corpora.first(1)] == ["a0", "b0"]
    with pytest.raises(IndexError):
        corpora[7]
