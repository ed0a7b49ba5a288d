"""Fixtures: the embedded pair, and real models and corpora when their folders are given."""

import os
from pathlib import Path

import pytest
from ranks import require
from tolerance import RTOL

from ppl_eval.shipped import embedded_path

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def _from_env(variable: str, name: str) -> Path:
    folder = os.environ.get(variable)
    if not folder:
        pytest.skip(f"{variable} is not set: it names the folder with {name}")
    path = Path(folder) / name
    if not path.exists():
        pytest.skip(f"{variable} has no {name}")
    return path


@pytest.fixture(scope="module")
def rtol(device) -> float:
    """How far a loss on ``device`` may be from float64's, relative to it."""
    return RTOL[device]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Skips for want of GPUs are one line of the summary, not one for each test."""
    report = yield
    if report.skipped and item.get_closest_marker("gpu"):
        report.longrepr = (__file__, 1, report.longrepr[2])
    return report


@pytest.fixture(scope="session")
def real_model():
    """Name -> folder of a real checkpoint, or a skip that says what is missing."""
    return lambda name: _from_env("PPL_EVAL_TEST_MODELS", name)


@pytest.fixture(scope="session")
def real_corpus():
    """Name -> file of a real corpus, or a skip that says what is missing."""
    return lambda name: _from_env("PPL_EVAL_TEST_CORPORA", name)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    """Where the test computes: each of its cases runs on the CPU and, if there is one, on a GPU."""
    require(request.param)
    return request.param


@pytest.fixture(scope="session")
def held_out() -> Path:
    """The embedded text."""
    return embedded_path("tiny_text") / "heldout.jsonl"


@pytest.fixture
def hf_cache(tmp_path, monkeypatch) -> Path:
    """A cache of data sets that is this test's alone."""
    import datasets

    cache = tmp_path / "hf"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    return cache
