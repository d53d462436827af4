"""Benchmarks as data sets, and training rows that hold their problems."""

import pytest
from helpers import shared_data

from stapo_lite.config import BENCHMARK_NAMES, Data
from stapo_lite.errors import InputError
from stapo_lite.extras.evaluation.benchmarks import NUM_SAMPLES, SOURCES, load_benchmark
from stapo_lite.extras.evaluation.contamination import find_contaminated, find_overlaps
from stapo_lite.files import read_lines, write_lines

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


TEN = "One two three, four five six $seven$ eight nine TEN?"


@pytest.mark.parametrize(
    ("text", "problem", "overlaps"),
    [
        ("zero one two three four five six seven eight nine ten eleven", TEN, True),
        ("one two three four five six seven eight nine 10", TEN, True),  # two of its three
        ("two three four five six seven eight nine", TEN, False),  # one
        ("ten nine eight seven six five four three two one", TEN, False),
        ("tell me: what is 7 + 8, please", "What is 7 + 8?", True),  # shorter, so one n-gram
        ("what is 7 + 9", "What is 7 + 8?", False),
        ("7", "7?", True),
        ("7", "$$", False),  # no word
    ],
)
def test_a_text_overlaps_a_problem_if_it_holds_most_of_its_8_grams(text, problem, overlaps):
    assert find_overlaps(["", text], ["1 2", problem]) == ({1} if overlaps else set())


def test_contaminated_rows_are_found(tmp_path):
    words = "the quick brown fox jumps over the lazy dog and runs away from it"
    write_lines(tmp_path / "mine.jsonl", [{"problem": words, "answer": 1}])
    data = Data(source="a.jsonl", drop_contaminated=[str(tmp_path / "mine.jsonl")])
    messages, shown = [{"role": "user", "content": f"Solve: {words}"}], []
    rows = [{"prompt": "something else"}, {"prompt": messages}, {"prompt": {"from": "human"}}]
    assert find_contaminated(rows, data, shown.append) == {1}
    assert shown == ["left out 1 rows of a.jsonl, which hold benchmark problems"]
    data = Data(source="a.jsonl", drop_contaminated=["nowhere.jsonl"])
    with pytest.raises(InputError, match="data.drop_contaminated .*nowhere.jsonl: no such file"):
        find_contaminated(rows, data, shown.append)


@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.slow)])
def test_the_cleaned_training_set_holds_no_benchmark(every):
    problems = []
    for name in ("aime24", "aime25", "amc23", "math500", "minerva", "olympiadbench_674"):
        _, _, rows = load_benchmark(str(shared_data(name)))
        problems += [row["problem"] for row in rows]
    rows = read_lines(shared_data("train_math_clean"))[::every]
    assert find_overlaps([row["problem"] for row in rows], problems) == set()
    again = find_overlaps([f"Solve this. {text} Think." for text in problems[:100]], problems)
    assert again == set(range(100))
