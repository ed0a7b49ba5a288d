"""pip install ., -e . and a wheel, each in a fresh environment and used from another folder."""

import ast
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of what git knows, so that builds leave nothing in the checkout."""
    folder = tmp_path_factory.mktemp("source") / "checkout"
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if files.returncode:
        pytest.skip("not a git checkout")
    for name in files.stdout.splitlines():
        if (ROOT / name).is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    pip(sys.executable, "wheel", "--no-deps", "-w", folder, source)
    return next(folder.glob("*.whl"))


def pip(python, *args):
    command = [python, "-m", "pip", "--disable-pip-version-check", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def fresh(tmp_path):
    """A new environment that sees this one's packages, but not its ppl_eval."""
    folder = tmp_path / "env"
    venv.create(folder, with_pip=True)
    site = next((folder / "lib").glob("python*")) / "site-packages"
    # packages of a folder that is named here are importable, .pth files in it are not read
    (site / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"])
    return folder / "bin" / "python"


def run(python, *args, cwd):
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [str(python), *args], cwd=cwd, capture_output=True, text=True, env=env, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_holds_recipes_configs_and_models_and_stays_small(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for name in (
        "ppl_eval/recipes/perplexity_eval.py",
        "ppl_eval/configs/tiny_ppl_eval.yaml",
        "ppl_eval/configs/smollm2/135M_ppl_eval.yaml",
        "ppl_eval/embedded/tiny_teacher/model.safetensors",
        "ppl_eval/embedded/tiny_student/tokenizer.json",
        "ppl_eval/embedded/tiny_text/heldout.jsonl",
        "ppl_eval/py.typed",
    ):
        assert name in names
    assert not [name for name in names if name.startswith("ppl_eval/tools/")]
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"ppl_eval"}
    embedded = [i for i in zipfile.ZipFile(wheel).infolist() if "/embedded/" in i.filename]
    assert sum(i.file_size for i in embedded) < 6e6


def test_what_is_imported_is_declared(source):
    """The fresh environments borrow packages, so they would not miss one. The package does without
    what only the extra ``verify`` installs."""
    names = set()
    for file in [*source.glob("src/**/*.py"), *source.glob("recipes/*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names.add(str(node.module).split(".")[0])
    foreign = names - set(sys.stdlib_module_names) - {"ppl_eval"}
    required = importlib.metadata.requires("ppl_eval") or []
    always = [line for line in required if "extra" not in line or "verify" in line]
    declared = {re.match(r"[\w-]+", line)[0].lower() for line in always}
    owners = importlib.metadata.packages_distributions()
    assert {owner.lower() for name in foreign for owner in owners[name]} <= declared


def test_nothing_at_run_time_imports_the_tools():
    """They are not in the wheel."""
    sources = [*(ROOT / "src").rglob("*.py"), *(ROOT / "recipes").glob("*.py")]
    others = [file for file in sources if file.parent.name != "tools"]
    assert len(others) > 50
    for file in others:
        assert "ppl_eval.tools" not in file.read_text(), file


@pytest.mark.parametrize("how", ["wheel", "editable", "folder"])
def test_an_installation_works_from_any_folder(fresh, source, wheel, tmp_path, how):
    what = {"wheel": [wheel], "editable": ["-e", source], "folder": [source]}[how]
    pip(fresh, "install", "--no-deps", *what)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    where = run(fresh, "-c", "import ppl_eval; print(ppl_eval.__file__)", cwd=elsewhere).strip()
    assert Path(where).is_relative_to(source if how == "editable" else fresh.parent.parent)
    listed = run(fresh, "-m", "ppl_eval.cli", "ls", cwd=elsewhere)
    assert "smollm2/135M_ppl_eval" in listed
    run(fresh, "-m", "ppl_eval.cli", "cp", "tiny_ppl_eval", "mine.yaml", cwd=elsewhere)
    if how == "editable":  # what is edited in the checkout counts, not a copy made by pip
        config = source / "configs" / "tiny_ppl_eval.yaml"
        original = config.read_text()
        config.write_text(
            original.replace("max_tokens_per_batch: 2048", "max_tokens_per_batch: 4321")
        )
        run(fresh, "-m", "ppl_eval.cli", "cp", "tiny_ppl_eval", "edited.yaml", cwd=elsewhere)
        config.write_text(original)
        assert "max_tokens_per_batch: 4321" in (elsewhere / "edited.yaml").read_text()
    tune = ("-m", "torchtune._cli.tune", "run")
    config = "mine.yaml" if how == "folder" else "tiny_ppl_eval"
    run(
        fresh,
        *(*tune, *(["--nproc_per_node", "4"] if how == "wheel" else [])),
        *("ppl_eval", "--config", config, "max_documents=20"),
        cwd=elsewhere,
    )
    content = json.loads((elsewhere / "out/tiny_ppl_eval/results.json").read_text())
    assert content["counts"]["documents"] == 20
    processes = "--nproc_per_node 4 " if how == "wheel" else ""
    expected = f"tune run {processes}ppl_eval --config {config} max_documents=20"
    assert content["command"] == expected
    assert content["environment"]["num_processes"] == (4 if how == "wheel" else 1)
    if how == "wheel":  # a recipe in a subfolder and texts of one's own, on two processes
        (elsewhere / "sub").mkdir()
        run(fresh, "-m", "ppl_eval.cli", "cp", "ppl_eval", "sub/mine.py", cwd=elsewhere)
        (elsewhere / "my_texts.py").write_text("def texts(words):\n    return words\n")
        keys = ("source", "data_files", "split", "column", "domain_column")
        run(
            fresh,
            *(*tune, "--nproc_per_node", "2", "sub/mine.py", "--config", "mine.yaml"),
            *("dataset=my_texts.texts", "dataset.words=[ab,cd,ef]"),
            *(f"~dataset.{key}" for key in keys),
            cwd=elsewhere,
        )
        content = json.loads((elsewhere / "out/tiny_ppl_eval/results.json").read_text())
        assert content["counts"]["documents"] == 3
        assert content["command"].startswith("tune run --nproc_per_node 2 sub/mine --config")
