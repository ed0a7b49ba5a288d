"""The notebook of docs/, executed without a screen."""

import json
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
NOTEBOOK = Path(__file__).parents[2] / "docs/notebook.ipynb"


def test_the_notebook(tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    printed = "".join(
        text
        for output in outputs
        for text in (output.get("text", ""), *output.get("data", {}).values())
    )
    assert len(printed) < 5_000
    page = next(o["data"]["text/html"] for o in outputs if "text/html" in o.get("data", {}))
    content = json.loads((tmp_path / "out/student/results.json").read_text())
    perplexity = f"{content['metrics']['token_perplexity']:.4f}"
    assert f"<td>{perplexity}</td>" in page
    assert page.count("<tr>") == 1 + 1 + 3
    assert "26.7k/26.7k tok" in printed  # the bar
    assert "student: perplexity x 1.064 of teacher (95 %" in printed
    assert "Traceback" not in printed
    assert (tmp_path / "out/teacher/windows.parquet").is_file()
