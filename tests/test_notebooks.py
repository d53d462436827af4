"""The notebooks from the first cell to the last, at toy size."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"

# What a reader changes in the cell tagged `parameters`.
TOY = {
    "quickstart": "steps, batch_size = 2, 4",
    "spurious_tokens": "steps, batch_size = 2, 4",
    "compare_algorithms": "steps, batch_size, algorithms = 2, 2, ['grpo']",
}


def printed(notebook):
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    texts = [output.get("text", "") + str(output.get("data", {}).get("text/plain", "")) for output in outputs]
    return "\n".join(texts), sum("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.parametrize(
    ("name", "images", "texts"),
    [
        (
            "quickstart",
            2,
            ["reward ", "index.html", "log-probabilities in bfloat16", "7 + 45 =", "trained"],
        ),
        ("spurious_tokens", 3, ["banana", "identity", "tau_h = ", "silenced", "of the gradient mass", "rather"]),
        ("compare_algorithms", 4, ["objective.beta", "run 2 of 2, grpo: step 2 of 2", "index.html"]),
    ],
)
def test_it_runs_from_the_first_cell_to_the_last(smollm2, tmp_path, monkeypatch, name, images, texts):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    (index,) = (i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", []))
    notebook.cells.insert(index + 1, nbformat.v4.new_code_cell(TOY[name]))
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    text, pictures = printed(notebook)
    assert pictures >= images
    for expected in texts:
        assert expected in text, expected


@pytest.mark.parametrize("name", TOY)
def test_cells_are_short_and_outputs_say_nothing_of_a_machine(name):
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    for cell in notebook.cells:
        assert cell.source.count("\n") < 45
        for private in ("/root", "/home", "/tmp"):
            assert private not in str(cell)
    assert (NOTEBOOKS / f"{name}.ipynb").stat().st_size < 1_000_000
