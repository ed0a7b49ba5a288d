"""Arguments read from source against inspect.signature of what is imported."""

import importlib
import inspect
import pkgutil

import pytest
import torchtune
import torchtune.datasets
import torchtune.models
import torchtune.training.checkpointing
import torchtune.training.metric_logging

from ppl_eval import signature

MODULES = [
    *("ppl_eval.data", "torchtune.datasets", "torchtune.training", "torchtune.data"),
    *("torchtune.training.checkpointing", "torchtune.training.metric_logging"),
    *(
        module.name
        for module in pkgutil.iter_modules(torchtune.models.__path__, "torchtune.models.")
        if not any(word in module.name for word in ("clip", "vision", "flamingo"))  # torchvision
    ),
]


def shape(read):
    return [(p.name, p.kind, p.default is p.empty) for p in read.parameters.values()]


@pytest.mark.parametrize("name", MODULES)
def test_every_component_of_torchtune(name):
    module = importlib.import_module(name)
    found = [
        (each, thing)
        for each, thing in inspect.getmembers(module, callable)
        if not each.startswith("_") and str(thing.__module__).startswith(name.split(".")[0])
    ]
    settled = 0
    for each, thing in found:
        read = signature.read(f"{name}.{each}")
        if read is not None:
            assert shape(read) == shape(inspect.signature(thing)), each
            settled += 1
    assert settled >= 0.5 * len(found) or name.endswith("llama3_3")  # other names of llama3_1


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package that must not be imported."""
    (tmp_path / "unread" / "inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    def write(**files):
        for name, text in {"__init__": "", "inner/__init__": "", **files}.items():
            path = tmp_path / "unread" / f"{name}.py"
            path.write_text(f"{text}\nraise SystemExit('imported')\n")

    return write


def test_imports_are_followed(package):
    package(
        __init__="from .inner import far as near\nfrom unread.inner.deep import Made",
        **{
            "inner/__init__": "from .deep import far",
            "inner/deep": """
def far(a: str, /, b, *c, d=print(1), e, **f): ...
class Made:
    def __init__(self, x: int = 5): ...
""",
        },
    )
    read = signature.read("unread.near")
    assert str(read) == "(a: 'str', /, b, *c, d=None, e, **f)"
    assert str(signature.read("unread.Made")) == "(x: 'int' = None)"
    assert str(signature.read("unread.inner.deep.far")) == str(read)


@pytest.mark.parametrize(
    "source",
    [
        "thing = print",
        "from os.path import *",
        "@decorated\ndef thing(): ...",
        "def thing(a): ...\nif True:\n    def thing(b): ...",
        "try:\n    from x import thing\nexcept ImportError:\n    thing = None",
        "class thing(dict): ...",
        "class thing(metaclass=Meta):\n    def __init__(self): ...",
        "class thing:\n    def __new__(cls, a): ...\n    def __init__(self, b): ...",
        "import thing",
        "from nowhere import thing",
        "def __getattr__(name): ...",
        "def thing(:",
    ],
)
def test_only_an_import_tells(package, source):
    package(**{"inner/mod": source})
    assert signature.read("unread.inner.mod.thing") is None


def test_names_that_are_not_there(package):
    package(**{"inner/mod": "def thing(): ..."})
    with pytest.raises(LookupError) as error:
        signature.read("unread.inner.mod.thin")
    assert error.value.args == ("unread.inner.mod", "thin", ["thing"])
    with pytest.raises(LookupError) as error:
        signature.read("unread.iner.mod.thing")
    assert error.value.args[:2] == ("unread", "iner")
    assert "inner" in error.value.args[2]
    assert signature.read("nowhere.thing") is None
    assert signature.read("unread..thing") is None
