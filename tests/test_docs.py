"""What README and docs say: their Python runs, and their commands are ones that exist."""

import re
import shlex
from pathlib import Path

import pytest
from ranks import run_script

import ppl_eval
from ppl_eval.cli import _parser
from ppl_eval.config import reference
from ppl_eval.config.command_line import load
from ppl_eval.config.schema import known_keys
from ppl_eval.shipped import embedded_path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page, *languages):
    """Contents of the fenced blocks of ``page`` in one of the languages ("" for none)."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [content for language, content in fenced if language in languages]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {}
    for code in blocks(page, "python"):
        exec(compile(code, page.name, "exec"), namespace)


def test_scripts_for_two_processes(tmp_path):
    """As they are printed: a training loop under FSDP2, and a model split by tp."""
    loop, split = blocks(ROOT / "docs/python_api.md", "py")
    found = []
    for script in (loop, split):
        (tmp_path / "script.py").write_text(script)
        ended = run_script(2, tmp_path / "script.py", cwd=tmp_path)
        assert [process.code for process in ended] == [0, 0], ended[0].err
        assert ended[1].out == ""
        lines = ended[0].out.splitlines()
        found.append([float(re.search(r"perplexity ([\d.]+)", line)[1]) for line in lines])
    assert len(found[0]) == 2
    assert found[0][0] != found[0][1]
    model, tokenizer = ppl_eval.load(embedded_path("tiny_student"))
    alone = ppl_eval.evaluate(model, tokenizer, ["Ada lived near the mill with a red goat."])
    assert found[1] == [pytest.approx(alone.perplexity, abs=1e-4)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in "".join(blocks(page, "", "bash")).splitlines():
        if not line.startswith(("make ", "tune run ", "ppl-eval ")) or "$" in line:
            continue  # with variables: the tutorial, which tests/recipes run
        words = shlex.split(line, comments=True)
        if words[:1] == ["make"]:
            assert set(words[1:]) <= targets
        elif words[:2] == ["tune", "run"] and "ppl_eval" in words:
            args = words[words.index("--config") :]
            args = [
                arg.replace("_dir=DIR", f"_dir={embedded_path('tiny_student')}") for arg in args
            ]
            if args[1] != "NAME":
                load(args)
        elif words[:1] == ["ppl-eval"]:
            args = _parser().parse_args(words[1:])
            if words[1] in ("ls", "cp", "where"):
                args.run(args)


def test_links_between_pages_lead_somewhere():
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} -> {target}"


def test_the_table_of_config_json_s_keys_is_the_one_that_is_read():
    import families

    assert "\n".join(families.table_of_keys()) in (ROOT / "docs/families.md").read_text()


def test_the_reference_of_the_config_is_that_of_the_schema():
    """`python -m ppl_eval.config.reference` prints it."""
    assert "\n".join(reference.table()) in (ROOT / "docs/config.md").read_text()


@pytest.mark.parametrize("key", known_keys())
def test_every_key_of_the_config_is_explained_in_a_sentence(key):
    meaning = reference.meanings()[key]
    assert meaning.endswith(".")
    assert len(meaning.split()) >= 3
