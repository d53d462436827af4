"""Whole evaluations: on the tiny model in the process, and through the real command."""

import importlib
import itertools
import shutil
from functools import partial
from itertools import chain
from types import SimpleNamespace

import pytest
from helpers import changed, command, write_yaml
from safetensors.torch import load_file, save_file

from stapo_lite.config import load_eval_config
from stapo_lite.errors import InputError
from stapo_lite.extras.evaluation import samples
from stapo_lite.extras.evaluation.samples import Task, draw, grade, sample_line
from stapo_lite.extras.math.grading import MathGrader
from stapo_lite.extras.transformers_engine import TransformersEngine
from stapo_lite.files import read_lines, read_object, write_lines
from stapo_lite.rollout.engine import Decoding
from stapo_lite.types import Completion, Prompt

evaluation = importlib.import_module("stapo_lite.extras.evaluation.evaluate")


@pytest.fixture(scope="module", autouse=True)
def grader():
    """One for all evaluations here: starting its processes takes longest."""
    grader = MathGrader(timeout=20.0, num_workers=1)
    close, grader.close = grader.close, lambda: None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samples, "MathGrader", lambda: grader)
        yield grader
    close()


def write_config(tiny_model, folder, **changes):
    rollout = {"engine": "transformers", "num_samples": 4, "max_num_seqs": 3}
    tree = {
        "model": str(tiny_model),
        "output_dir": str(folder / "eval"),
        "dtype": "float32",
        "decoding": "justrl",
        "benchmarks": [str(folder / "aime24.jsonl"), str(folder / "mine.jsonl")],
        "data": {"max_prompt_length": 150},
        "rollout": rollout | {"max_completion_length": 8},
    }
    return write_yaml(folder / "eval.yaml", changed(tree, changes))


@pytest.fixture(scope="module")
def finished(tiny_model, tmp_path_factory):
    """The folder of a finished evaluation on two small benchmarks."""
    folder = tmp_path_factory.mktemp("finished")
    rows = [{"problem": f"say {word}", "answer": i} for i, word in enumerate(("one", "two"))]
    write_lines(folder / "aime24.jsonl", rows)
    write_lines(folder / "mine.jsonl", [{"problem": "say three", "answer": "3", "id": "t"}])
    assert command("evaluate", write_config(tiny_model, folder)) == 0
    return folder


@pytest.fixture
def run(finished, tiny_model, tmp_path):
    """Evaluates the same benchmarks, in a folder of their own."""
    for name in ("aime24.jsonl", "mine.jsonl"):
        shutil.copy(finished / name, tmp_path)
    config = partial(write_config, tiny_model, tmp_path)
    return lambda **changes: evaluation.evaluate(load_eval_config(config(**changes)))


def drawn(folder):
    lines = [line for path in sorted(folder.glob("samples-*.jsonl")) for line in read_lines(path)]
    return {(s["benchmark"], s["id"], s["sample"]): (s["seed"], s["response"]) for s in lines}


def test_an_evaluation_writes_all_its_files(finished):
    folder = finished / "eval"
    files = {".lock", "config.yaml", "samples-0.jsonl", "verdicts.jsonl", "results.json"}
    assert {path.name for path in folder.iterdir()} == {*files, "results.md"}
    problems = [("aime24", "0"), ("aime24", "1"), ("mine", "t")]
    expected = [(*problem, number) for problem in problems for number in range(4)]
    assert list(drawn(folder)) == expected
    assert len({seed for seed, _ in drawn(folder).values()}) == 12
    verdicts = read_lines(folder / "verdicts.jsonl")
    assert [(v["benchmark"], v["id"], v["sample"]) for v in verdicts] == expected
    assert [v["gold"] for v in verdicts] == ["0"] * 4 + ["1"] * 4 + ["3"] * 4
    results = read_object(folder / "results.json")
    assert [list(rates) for rates in results["rates"].values()] == [["0", "1"], ["t"]]
    assert (results["temperature"], results["top_p"]) == (0.7, 0.9)  # decoding=justrl


def test_a_sample_depends_on_its_prompt_and_seed_alone(run, finished, tmp_path):
    scores = run(rollout__num_samples=6, rollout__max_num_seqs=5, limit=1)["benchmarks"]["aime24"]
    assert (scores["problems"], scores["samples"]) == (1, 6)
    more, before = drawn(tmp_path / "eval"), drawn(finished / "eval")
    assert (len(more), len(more.items() & before.items())) == (12, 8)  # six of each first problem


def test_an_interrupted_evaluation_continues(run, finished, tmp_path, monkeypatch):
    folder, closed = tmp_path / "eval", []

    def interrupted(*arguments):
        yield from itertools.islice(draw(*arguments), 5)
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluation, "draw", interrupted)
    monkeypatch.setattr(TransformersEngine, "close", lambda engine: closed.append(engine))
    with pytest.raises(KeyboardInterrupt):
        run()
    assert (len(drawn(folder)), len(closed)) == (5, 1)
    monkeypatch.setattr(evaluation, "draw", draw)
    with (folder / "samples-0.jsonl").open("ab") as file:
        file.write('{"seed": 1, "response": "é'.encode()[:-1])  # in the middle of a letter
    results = run()
    assert drawn(folder) == drawn(finished / "eval")
    assert results["benchmarks"] == read_object(finished / "eval" / "results.json")["benchmarks"]
    monkeypatch.setattr(evaluation, "open_evaluation_engine", None)  # nothing is left to draw
    assert run() == results


def test_a_problem_that_has_changed_gets_new_samples(run, tmp_path):
    run(limit=1)
    (row,) = read_lines(tmp_path / "mine.jsonl")
    write_lines(tmp_path / "mine.jsonl", [row | {"answer": "4"}])
    assert run(limit=1)["rates"]["mine"] == {"t": 0.0}
    assert len(read_lines(tmp_path / "eval" / "samples-0.jsonl")) == 8
    write_lines(tmp_path / "mine.jsonl", [row | {"problem": "say four"}])
    run(limit=1)
    assert len(read_lines(tmp_path / "eval" / "samples-0.jsonl")) == 12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "output_dir=.*eval holds samples of another config or adapter"),
        ({"output_dir": "."}, "output_dir=. holds .*: choose another folder"),
        ({"adapter": "nowhere"}, "adapter=nowhere: no adapter in PEFT's format"),
        ({"data__max_prompt_length": 3}, "aime24.jsonl, row 1: the prompt has .* tokens"),
        ({"benchmarks": ["aime24.jsonl", "aime24.jsonl"]}, "benchmarks: an id occurs twice"),
        ({"benchmarks": ["mine.jsonl", "no.jsonl"]}, "benchmarks=no.jsonl: no such file"),
        ({"benchmarks": ["odd.jsonl"]}, r"odd.jsonl: a row cannot be read \(KeyError\('problem'\)"),
        ({"rollout__quantization": "fp8"}, "rollout.quantization=fp8 needs vLLM"),
    ],
)
def test_bad_input_is_one_line(run, finished, tmp_path, monkeypatch, changes, message):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "odd.jsonl", [{"question": "say four", "answer": "4"}])
    run()
    with pytest.raises(InputError, match=message):
        run(**changes)


BREAKAGES = {
    "the prefix of another model": lambda name, value: {
        name.replace("model.l", "text_model.l"): value
    },
    "half of the layers": lambda name, value: {} if "layers.1" in name else {name: value},
    "no lora_B": lambda name, value: {} if "lora_B" in name else {name: value},
    "another rank": lambda name, value: {name: value[:4] if "lora_A" in name else value[:, :4]},
    "nothing": lambda name, value: {name: value},
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_an_adapter_that_does_not_fit_is_refused_before_anything_is_loaded(
    run, make_policy, tiny_model, tmp_path, monkeypatch, capsys, recwarn, breakage
):
    """Engines leave out what they do not know, and would evaluate the base."""
    folder = tmp_path / "adapter"
    make_policy().save_adapter(folder)
    tensors = load_file(folder / "adapter_model.safetensors").items()
    broken = dict(chain(*(BREAKAGES[breakage](*tensor).items() for tensor in tensors)))
    save_file(
        {name: v.contiguous() for name, v in broken.items()}, folder / "adapter_model.safetensors"
    )
    serve = f"serve configs/quickstart.yaml model={tiny_model} lora.adapter={folder}"
    serve += " lora.r=8 lora.lora_alpha=16"
    monkeypatch.setattr("stapo_lite.extras.servers.serve.become_server", lambda *_: None)
    if breakage == "nothing":
        assert run(adapter=str(folder))["adapter"] == str(folder)
        assert command(*serve.split()) == 0
    else:
        monkeypatch.setattr(evaluation, "open_evaluation_engine", None)
        with pytest.raises(InputError, match="the adapter does not fit the model"):
            run(adapter=str(folder))
        assert command(*serve.split()) == 2
        assert "the adapter does not fit the model" in capsys.readouterr().err
    assert not [warning for warning in recwarn if "meta" in str(warning.message)]


def test_samples_of_an_adapter_that_has_learned_since_are_refused(tmp_path):
    tree = {"model": "-", "adapter": str(tmp_path), "output_dir": str(tmp_path / "eval")}
    config, weights = load_eval_config(tree), tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"before")
    for _ in range(2):
        with evaluation.open_folder(config):
            pass
    weights.write_bytes(b"after")
    with pytest.raises(InputError, match="holds samples of another config or adapter"):
        evaluation.open_folder(config)


def problem(gold, ordered=False, tolerance=0.0, thinking=False):
    columns = {"ordered": ordered, "tolerance": tolerance}
    return Prompt("p", [1], gold, columns, opens_thinking=thinking)


@pytest.mark.parametrize(
    ("prompt", "response", "truncated", "correct", "answered"),
    [
        (problem("4"), r"\boxed{4}", False, True, True),
        (problem("4.1", tolerance=0.2), r"\boxed{4}", False, True, True),
        (problem("4"), "it is 5", False, False, True),
        (problem("4"), "it is 4", True, False, False),
        (problem("1, 3"), r"\boxed{3, 1}", False, True, True),
        (problem("1, 3", ordered=True), r"\boxed{3, 1}", False, False, True),
        (problem("4", thinking=True), r"is it \boxed{4}?", True, False, False),  # in its reasoning
    ],
)
def test_a_sample_and_its_verdict(prompt, response, truncated, correct, answered):
    task, completion = Task(prompt, 7, {"id": "0"}), Completion(prompt, [5, 6], [], truncated, 0)
    engine = SimpleNamespace(stream=lambda *given: [(0, completion)])
    tokenizer = SimpleNamespace(decode=lambda ids, **_: response, added_tokens_decoder={})
    ((index, completion),) = draw(engine, [task], Decoding(9, 1.0, 1.0), tokenizer)
    line = sample_line(task, completion)
    text = f"<think>{response}" if prompt.opens_thinking else response
    expected = {"id": "0", "seed": 7, "tokens": 2, "truncated": truncated, "response": text}
    assert (index, line) == (0, expected)
    (judged,) = grade([task], {7: line})
    assert (judged["correct"], judged["answer"] is not None) == (correct, answered)
