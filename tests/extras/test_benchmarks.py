from dataclasses import replace

import pytest
from helpers import shared_data

from stapo_lite.config import BENCHMARK_NAMES
from stapo_lite.errors import InputError
from stapo_lite.extras.evaluation.benchmarks import BENCHMARKS, load_benchmark
from stapo_lite.files import write_lines

# problems, samples of each
PROTOCOL = [(30, 32), (30, 32), (40, 32), (500, 4), (272, 4), (674, 4)]


def load(path, *rows, **options):
    write_lines(path, rows)
    return load_benchmark(str(path), **options)


@pytest.mark.parametrize(("name", "protocol"), zip(BENCHMARK_NAMES, PROTOCOL, strict=True))
def test_the_papers_six_and_their_files(name, protocol):
    assert (BENCHMARKS[name].problems, BENCHMARKS[name].num_samples) == protocol
    path = shared_data({"olympiadbench": "olympiadbench_674"}.get(name, name))
    short, problems, num_samples = load_benchmark(str(path))
    assert (short, len(problems), num_samples) == (name, *protocol)
    assert all(p.text and p.gold and not p.ordered and p.tolerance == 0 for p in problems)


def test_a_file_of_ones_own(tmp_path):
    rows = [
        {"problem": "2+2?", "answer": 4},
        {"problem": "roots in order?", "answer": "1, 3", "answer_type": "list", "id": "x"},
        {"problem": "about?", "answer": "4.2", "error": "1e-1", "level": 3},
        {"problem": "two?", "answer": "1,2", "tolerance": 0.5},
    ]
    short, problems, num_samples = load(tmp_path / "mine.jsonl", *rows)
    assert (short, num_samples) == ("mine", 1)
    expected = [
        ("0", "4", False, 0),
        ("x", "1, 3", True, 0),
        ("2", "4.2", False, 0.1),
        ("3", "1,2", False, 0.5),
    ]
    assert [(p.id, p.gold, p.ordered, p.tolerance) for p in problems] == expected
    assert [p.id for p in load(tmp_path / "mine.jsonl", *rows, limit=2)[1]] == ["0", "x"]
    seeds = {p.seed(run, k) for p in problems for run in (0, 1) for k in range(100)}
    assert len(seeds) == 800
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert problems[0].seed(0, 7) == problems[0].seed(0, 7)


def test_rows_of_the_hub(tmp_path, monkeypatch):
    """`datasets` reads a folder as it reads the Hub: AMC23 has floats there, OlympiadBench
    lists."""

    def on_the_hub(name, split, *rows, **changes):
        (tmp_path / name).mkdir()
        write_lines(tmp_path / name / f"{split}.jsonl", rows)
        source = replace(
            BENCHMARKS[name], dataset=str(tmp_path / name), subset=None, problems=2, **changes
        )
        monkeypatch.setitem(BENCHMARKS, name, source)
        return load_benchmark(name)[1]

    rows = [{"id": 0, "question": "q", "answer": 27.0}, {"question": "r", "answer": 1.5}]
    assert [p.gold for p in on_the_hub("amc23", "test", *rows)] == ["27", "1.5"]
    row = {
        "id": 1606,
        "question": "q",
        "final_answer": ["$1$,$3$"],
        "error": None,
        "answer_type": "Numerical",
    }
    problems = on_the_hub("olympiadbench", "train", row, row | {"id": 1607, "error": "1e-1"})
    assert [(p.id, p.gold, p.tolerance) for p in problems] == [
        ("1606", "$1$,$3$", 0),
        ("1607", "$1$,$3$", 0.1),
    ]
    with pytest.raises(InputError, match="has 1 rows now, not 2"):
        on_the_hub("minerva", "test", row)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "has no problems"),
        ([{"answer": 1}], "a, row 1: `problem` must be text, got None"),
        ([{"problem": "p"}], "`answer` must be"),
        ([{"problem": "p", "answer": [1, 2]}], "`answer` must be"),
        ([{"problem": "p", "answer": float("nan")}], "`answer` must be"),
        ([{"problem": "p", "answer": 1, "tolerance": "x"}], "the tolerance must be"),
        (
            [{"problem": "p", "answer": 1, "id": 3}, {"problem": "q", "answer": 1, "id": 3}],
            "has an id twice",
        ),
    ],
)
def test_bad_files(tmp_path, rows, message):
    with pytest.raises(InputError, match=message):
        load(tmp_path / "a.jsonl", *rows)


def test_rows_without_an_id_have_their_number(tmp_path):
    rows = [{"problem": text, "answer": 1, "id": None} for text in ("p", "q")]
    _, problems, _ = load(tmp_path / "a.jsonl", *rows)
    assert [problem.id for problem in problems] == ["0", "1"]


def test_unknown_names(monkeypatch):
    with pytest.raises(InputError, match="aime26 is none of aime24, aime25"):
        load_benchmark("aime26")
    monkeypatch.setitem(
        BENCHMARKS, "minerva", replace(BENCHMARKS["minerva"], dataset="no/such-dataset")
    )
    with pytest.raises(
        InputError,
        match=r"minerva cannot be loaded from no/such-dataset.*instead, path/minerva.jsonl",
    ):
        load_benchmark("minerva")
