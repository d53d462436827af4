"""Benchmarks as data sets, and training rows that hold their problems."""

import datasets
import pytest
from helpers import module_of_the_page, shared_data

from stapo_lite.config import BENCHMARK_NAMES
from stapo_lite.extras.evaluation.benchmarks import NUM_SAMPLES, SOURCES, load_benchmark
from stapo_lite.files import write_lines

# problems, samples of each
PROTOCOL = [(30, 32), (30, 32), (40, 32), (500, 4), (272, 4), (674, 4)]


def load(path, *rows, **options):
    write_lines(path, rows)
    return load_benchmark(str(path), **options)


@pytest.mark.parametrize(("name", "protocol"), zip(BENCHMARK_NAMES, PROTOCOL, strict=True))
def test_the_papers_six_and_their_files(name, protocol):
    assert list(SOURCES) == list(NUM_SAMPLES) == BENCHMARK_NAMES
    path = shared_data({"olympiadbench": "olympiadbench_674"}.get(name, name))
    short, num_samples, rows = load_benchmark(str(path))
    assert (short, len(rows), num_samples) == (name, *protocol)
    assert all(row["problem"] and row["answer"] != "" for row in rows)
    assert not any(row["ordered"] or row["tolerance"] for row in rows)


def test_a_file_of_ones_own(tmp_path):
    rows = [
        {"problem": "2+2?", "answer": 4},
        {"problem": "roots in order?", "answer": "1, 3", "answer_type": "list", "id": "x"},
        {"problem": "about?", "answer": "4.2", "error": "1e-1", "level": 3, "id": None},
        {"problem": "two?", "answer": "1,2", "tolerance": 0.5},
    ]
    short, num_samples, problems = load(tmp_path / "mine.jsonl", *rows)
    assert (short, num_samples) == ("mine", 1)
    names = ("id", "problem", "answer", "ordered", "tolerance")
    assert [tuple(row[name] for name in names) for row in problems] == [
        ("0", "2+2?", 4, False, 0),
        ("x", "roots in order?", "1, 3", True, 0),
        ("2", "about?", "4.2", False, 0.1),
        ("3", "two?", "1,2", False, 0.5),
    ]
    assert load(tmp_path / "mine.jsonl", *rows, limit=2)[2] == problems[:2]


def test_rows_of_the_hub(tmp_path, monkeypatch):
    """`datasets` reads a folder as it reads the Hub, which has floats and lists of answers."""

    def on_the_hub(name, *rows):
        (tmp_path / name).mkdir()
        write_lines(tmp_path / name / f"{SOURCES[name].split}.jsonl", rows)
        there = {"source": str(tmp_path / name), "subset": None}
        monkeypatch.setitem(SOURCES, name, SOURCES[name].model_copy(update=there))
        _, _, problems = load_benchmark(name)
        return [(row["id"], row["answer"], row["tolerance"]) for row in problems]

    rows = [{"id": 0, "question": "q", "answer": 27.0}, {"question": "r", "answer": 1.5}]
    assert on_the_hub("amc23", *rows) == [("0", 27, 0), ("1", 1.5, 0)]
    row = {"id": 1606, "question": "q", "final_answer": ["$1$,$3$"], "error": None}
    expected = [("1606", "$1$,$3$", 0), ("1607", "$1$,$3$", 0.1)]
    assert on_the_hub("olympiadbench", row, row | {"id": 1607, "error": "1e-1"}) == expected


def test_the_pages_function_leaves_out_rows_with_a_problem(monkeypatch):
    """Eight words in a row are enough; seven are not."""
    problem = "One two three, four five six $seven$ eight nine TEN?"
    near = "Say: two three four five six seven eight"
    texts = [f"Solve: {problem}", "THREE four five six seven eight nine ten.", near, "1 + 1?"]
    columns = {"math-ai/amc23": {"question": [problem, "$x$?"]}}
    columns["open-r1/DAPO-Math-17k-Processed"] = {"prompt": texts}
    monkeypatch.setattr(
        datasets, "load_dataset", lambda name, *_, **__: datasets.Dataset.from_dict(columns[name])
    )
    names = module_of_the_page("data.md", "clean.py")
    assert list(names["rows"]()["prompt"]) == [near, "1 + 1?"]


def test_the_pages_task_of_reasoning_gym():
    pytest.importorskip("reasoning_gym", reason="pip install reasoning-gym")
    names = module_of_the_page("data.md", "gym.py")
    first, second, *_ = names["rows"]()
    answers = [names["TASK"][row["number"]]["answer"] for row in (first, second)]
    texts = [f"It is <answer>{answers[0]}</answer>", f"It is {answers[1]}"]
    assert "Reply with <answer>" in first["prompt"]
    assert names["reward"](texts, [first["number"], second["number"]], prompts=[]) == [1.0, 0.0]
