import json
from dataclasses import replace
from pathlib import Path

import pytest

from stapo_lite import benchmarks
from stapo_lite.benchmarks import BENCHMARKS, load_benchmark
from stapo_lite.config import BENCHMARK_NAMES, InputError

DATA = Path(__file__).parent.parent.parent / "shared" / "data"


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_the_papers_protocol():
    assert list(BENCHMARKS) == BENCHMARK_NAMES
    assert {name: b.num_samples for name, b in BENCHMARKS.items()} == {
        "aime24": 32, "aime25": 32, "amc23": 32, "math500": 4, "minerva": 4, "olympiadbench": 4,
    }  # fmt: skip


@pytest.mark.parametrize("name", BENCHMARK_NAMES)
def test_the_files_of_all_six(name):
    path = DATA / {"olympiadbench": "olympiadbench_674.jsonl"}.get(name, f"{name}.jsonl")
    if not path.exists():
        pytest.skip(f"{path.name} of the shared benchmark data is not here")
    short, problems, num_samples = load_benchmark(str(path))
    assert (short, num_samples, len(problems)) == (name, BENCHMARKS[name].num_samples, BENCHMARKS[name].problems)
    assert all(p.text and p.gold and not p.ordered and p.tolerance == 0 for p in problems)


def test_a_file_of_ones_own(tmp_path):
    rows = [
        {"problem": "2+2?", "answer": 4},
        {"problem": "roots in order?", "answer": "1, 3", "answer_type": "list", "id": "x"},
        {"problem": "about?", "answer": "4.2", "error": "1e-1", "level": 3},
        {"problem": "two?", "answer": "1,2", "tolerance": 0.5},
    ]
    short, problems, num_samples = load_benchmark(write(tmp_path / "mine.jsonl", *rows))
    assert (short, num_samples) == ("mine", 1)
    assert [(p.id, p.gold, p.ordered, p.tolerance) for p in problems] == (
        [("0", "4", False, 0), ("x", "1, 3", True, 0), ("2", "4.2", False, 0.1), ("3", "1,2", False, 0.5)]
    )
    assert [p.id for p in load_benchmark(str(tmp_path / "mine.jsonl"), limit=2)[1]] == ["0", "x"]


def test_hub_rows(tmp_path, monkeypatch):
    """`datasets` reads a folder as it reads the Hub: AMC23 has floats there, OlympiadBench lists."""
    (tmp_path / "amc").mkdir()
    write(tmp_path / "amc" / "test.jsonl", {"id": 0, "question": "q", "answer": 27.0}, {"question": "r", "answer": 1.5})
    monkeypatch.setitem(BENCHMARKS, "amc23", replace(BENCHMARKS["amc23"], dataset=str(tmp_path / "amc"), problems=2))
    assert [p.gold for p in load_benchmark("amc23")[1]] == ["27", "1.5"]
    row = {"id": 1606, "question": "q", "final_answer": ["$1$,$3$"], "error": None, "answer_type": "Numerical"}
    (tmp_path / "ob").mkdir()
    write(tmp_path / "ob" / "train.jsonl", row, row | {"id": 1607, "error": "1e-1"})
    source = replace(BENCHMARKS["olympiadbench"], dataset=str(tmp_path / "ob"), subset=None, problems=2)
    monkeypatch.setitem(BENCHMARKS, "olympiadbench", source)
    assert [(p.id, p.gold, p.tolerance) for p in load_benchmark("olympiadbench")[1]] == (
        [("1606", "$1$,$3$", 0), ("1607", "$1$,$3$", 0.1)]
    )
    monkeypatch.setitem(BENCHMARKS, "olympiadbench", replace(source, problems=674))
    with pytest.raises(InputError, match="has 2 rows now, not 674"):
        load_benchmark("olympiadbench")


def test_seeds_belong_to_the_sample(tmp_path):
    _, (first, second), _ = load_benchmark(
        write(tmp_path / "a.jsonl", {"problem": "p", "answer": 1}, {"problem": "q", "answer": 1})
    )
    seeds = {p.seed(run, k) for p in (first, second) for run in (0, 1) for k in range(100)}
    assert len(seeds) == 400
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert first.seed(0, 7) == first.seed(0, 7)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "has no problems"),
        ([{"answer": 1}], "a, row 1: `problem` must be text, got None"),
        ([{"problem": "p"}], "a, row 1: `answer` must be an answer, got None"),
        ([{"problem": "p", "answer": [1, 2]}], "`answer` must be an answer, got"),
        ([{"problem": "p", "answer": 1, "tolerance": "x"}], "the tolerance must be a number, got 'x'"),
        ([{"problem": "p", "answer": 1, "id": 3}, {"problem": "q", "answer": 1, "id": 3}], "has an id twice"),
    ],
)
def test_bad_files(tmp_path, rows, message):
    with pytest.raises(InputError, match=message):
        load_benchmark(write(tmp_path / "a.jsonl", *rows))


def test_unknown_names():
    with pytest.raises(InputError, match="aime26 is none of aime24, aime25"):
        load_benchmark("aime26")
    with pytest.raises(InputError, match="nowhere.jsonl: cannot be read"):
        load_benchmark("nowhere.jsonl")


def test_without_the_hub_a_file_is_offered(monkeypatch):
    monkeypatch.setitem(benchmarks.BENCHMARKS, "minerva", replace(BENCHMARKS["minerva"], dataset="no/such-dataset"))
    with pytest.raises(InputError, match=r"minerva cannot be loaded from no/such-dataset.*instead, path/minerva.jsonl"):
        load_benchmark("minerva")
