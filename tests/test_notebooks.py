"""The notebooks from the first cell to the last, at toy size."""

import nbformat
import pytest
from helpers import ROOT
from nbclient import NotebookClient

pytestmark = pytest.mark.slow

# What a reader changes in the cell tagged `parameters`, how many pictures come, what is printed.
NOTEBOOKS = {
    "quickstart": ("steps, batch_size = 2, 4", 2, ["reward ", "index.html", "rather", "trained: "]),
    "spurious_tokens": ("", 2, ["identity", "tau_h = ", "spurious, %", "difference"]),
    "compare_algorithms": ("steps, batch_size, algorithms = 2, 2, ['grpo']", 1, ["step 2 of 2"]),
}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_runs_from_the_first_cell_to_the_last(smollm2, tmp_path, monkeypatch, name):
    parameters, pictures, texts = NOTEBOOKS[name]
    path = ROOT / "notebooks" / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    assert path.stat().st_size < 1_000_000
    assert not [name for name in ("/root", "/home", "/tmp") if name in str(notebook)]  # a machine's
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # other tests run beside it
    tags = [cell.metadata.get("tags") for cell in notebook.cells]
    index = tags.index(["parameters"])
    notebook.cells.insert(index + 1, nbformat.v4.new_code_cell(parameters))
    where = {"metadata": {"path": str(tmp_path)}}
    limits = {"timeout": 900, "startup_timeout": 300, "iopub_timeout": 120}
    NotebookClient(notebook, resources=where, **limits).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = str([(o.get("text"), o.get("data", {}).get("text/plain")) for o in outputs])
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= pictures
    assert [text for text in texts if text not in printed] == []
