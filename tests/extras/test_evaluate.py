"""Whole evaluations: on the tiny model in the process, and through the real command."""

import importlib
import io
import itertools
import json
import os
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers import changed, command, write_yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from stapo_lite.config import load_eval_config
from stapo_lite.errors import InputError
from stapo_lite.extras.evaluation.benchmarks import Problem
from stapo_lite.extras.evaluation.evaluate import evaluate
from stapo_lite.extras.evaluation.tasks import Task, draw, judge, sample_key, summarise
from stapo_lite.extras.evaluation.verifier import INSTRUCTION, Case, ModelVerifier
from stapo_lite.extras.math.grading import MathGrader
from stapo_lite.files import read_lines, read_object, write_lines
from stapo_lite.rollout import Decoding
from stapo_lite.types import Completion, Prompt

evaluation = importlib.import_module("stapo_lite.extras.evaluation.evaluate")


@pytest.fixture(scope="module", autouse=True)
def grader():
    """One for all evaluations here: starting its processes takes longest."""
    grader = MathGrader(timeout=20.0, num_workers=1)
    close, grader.close = grader.close, lambda: None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "MathGrader", lambda: grader)
        yield grader
    close()


def write_config(tiny_model, folder, **changes):
    tree = {
        "model": str(tiny_model),
        "output_dir": str(folder / "eval"),
        "dtype": "float32",
        "decoding": "justrl",
        "benchmarks": [str(folder / "aime24.jsonl"), str(folder / "mine.jsonl")],
        "data": {"max_prompt_length": 150},
        "rollout": {
            "engine": "transformers",
            "num_samples": 4,
            "max_completion_length": 8,
            "max_num_seqs": 3,
        },
    }
    return write_yaml(folder / "eval.yaml", changed(tree, changes))


@pytest.fixture(scope="module")
def finished(tiny_model, tmp_path_factory):
    """The folder of a finished evaluation on two small benchmarks, and the words of its command."""
    folder = tmp_path_factory.mktemp("finished")
    write_lines(
        folder / "aime24.jsonl",
        [{"problem": f"say {w}", "answer": i} for i, w in enumerate(("one", "two"))],
    )
    write_lines(folder / "mine.jsonl", [{"problem": "say three", "answer": "3", "id": "t"}])
    with redirect_stdout(io.StringIO()) as printed:
        assert command("evaluate", write_config(tiny_model, folder)) == 0
    return folder, printed.getvalue()


@pytest.fixture
def config(finished, tiny_model, tmp_path):
    """For evaluations that continue in a copy of the finished one."""
    shutil.copytree(finished[0], tmp_path, dirs_exist_ok=True)
    return partial(write_config, tiny_model, tmp_path)


@pytest.fixture
def run(config):
    return lambda **changes: evaluate(load_eval_config(config(**changes)))


@pytest.fixture
def adapter(make_policy, tmp_path):
    make_policy(scale=0.5).save_adapter(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_an_engine_is_closed_also_if_sampling_fails(run, tmp_path, monkeypatch):
    class Engine:
        closed = False

        def close(self):
            self.closed = True

    def interrupted(*given):
        raise KeyboardInterrupt

    engine = Engine()
    monkeypatch.setattr("stapo_lite.extras.evaluation.evaluate.start_engine", lambda *_: engine)
    monkeypatch.setattr("stapo_lite.extras.evaluation.evaluate.draw_samples", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(output_dir=str(tmp_path / "other"))
    assert engine.closed


def drawn(folder):
    lines = [line for path in sorted(folder.glob("samples-*.jsonl")) for line in read_lines(path)]
    return {sample_key(line)[:3]: (line["seed"], line["response"]) for line in lines}


def test_an_evaluation_writes_all_its_files(finished):
    folder, printed = finished[0] / "eval", finished[1]
    names = {
        "config.yaml",
        "settings.json",
        "samples-0.jsonl",
        "verdicts.jsonl",
        "results.json",
        "results.md",
    }
    names.add(".lock")
    assert {path.name for path in folder.iterdir()} == names
    assert printed.rstrip().endswith(f"results: {folder}")
    for table in printed.split("\n\n")[:2]:
        assert table.strip() in (folder / "results.md").read_text(encoding="utf-8")
    results = read_object(folder / "results.json")
    assert {name: list(rates) for name, rates in results["rates"].items()} == {
        "aime24": ["0", "1"],
        "mine": ["t"],
    }
    assert (results["temperature"], results["top_p"]) == (0.7, 0.9)
    assert len({line["seed"] for line in read_lines(folder / "samples-0.jsonl")}) == 12
    expected = [
        (name, i, k)
        for name, i in (("aime24", "0"), ("aime24", "1"), ("mine", "t"))
        for k in range(4)
    ]
    assert [
        (v["benchmark"], v["id"], v["sample"]) for v in read_lines(folder / "verdicts.jsonl")
    ] == expected
    resolved, other = (
        load_eval_config(folder / "config.yaml", o) for o in ([], ["decoding=training-aligned"])
    )
    assert (resolved.decoding, resolved.rollout.temperature, resolved.rollout.top_p) == (
        "justrl",
        0.7,
        0.9,
    )
    assert (other.rollout.temperature, other.rollout.top_p) == (1.0, 1.0)


def test_samples_depend_on_prompt_and_seed_alone(run, tmp_path, monkeypatch):
    """A second evaluation gives the same; one of more samples contains it."""
    first = drawn(tmp_path / "eval")
    run(output_dir=str(tmp_path / "again"), rollout__max_num_seqs=5)
    assert drawn(tmp_path / "again") == first
    results = run(rollout__num_samples=6, limit=1)
    more = drawn(tmp_path / "eval")
    assert (len(first), len(more)) == (12, 16)  # two more of the first problem of each
    assert first.items() <= more.items()
    assert (
        results["benchmarks"]["aime24"]["problems"],
        results["benchmarks"]["aime24"]["samples"],
    ) == (1, 6)
    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "start_engine", None)  # nothing is left to draw
        assert run()["benchmarks"]["mine"]["samples"] == 4
    # another text under the same id is another problem
    write_lines(tmp_path / "mine.jsonl", [{"problem": "say eight", "answer": "3", "id": "t"}])
    run()
    after = drawn(tmp_path / "eval")
    assert {key[1] for key in first if first[key] != after[key]} == {"t"}
    assert len(read_lines(tmp_path / "eval" / "samples-0.jsonl")) == 20


def test_an_interrupted_evaluation_continues(run, finished, tmp_path, monkeypatch):
    folder, draw = tmp_path / "cut", evaluation.draw

    def interrupted(*arguments):
        yield from itertools.islice(draw(*arguments), 5)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "draw", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(output_dir=str(folder))
    assert len(drawn(folder)) == 5
    with (folder / "samples-0.jsonl").open("ab") as file:
        file.write(
            '{"benchmark": "aime24", "response": "é'.encode()[:-1]
        )  # cut off in the middle of a letter
    results = run(output_dir=str(folder))
    assert drawn(folder) == drawn(finished[0] / "eval")
    assert results["benchmarks"] == read_object(finished[0] / "eval" / "results.json")["benchmarks"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "holds samples drawn with seed=0, not 1"),
        (
            {"decoding": "training-aligned"},
            "holds samples drawn with rollout.temperature=0.7, not 1.0",
        ),
        (
            {"rollout__vllm": {"kv_cache_dtype": "fp8"}},
            "drawn with rollout.vllm.kv_cache_dtype=None, not fp8",
        ),
        ({"adapter": "adapter"}, r"drawn with adapter \(its files\)=None, not"),
        ({"adapter": "nowhere"}, "adapter=.*nowhere: no adapter in PEFT's format"),
        (
            {"data__max_prompt_length": 3},
            "benchmarks=.*aime24.jsonl, row 1: the prompt has .* tokens",
        ),
        ({"benchmarks": ["aime24.jsonl", "aime24.jsonl"]}, "benchmarks: aime24 is given twice"),
        ({"rollout__quantization": "fp8"}, "rollout.quantization=fp8 needs vLLM"),
        ({"verifier__model": "nowhere"}, "model=nowhere: not a causal language model"),
    ],
)
def test_bad_input_is_one_line(run, adapter, tmp_path, monkeypatch, changes, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message):
        run(**changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, r"not a plain LoRA adapter \(use_dora=True\)"),
        ({"peft_type": "IA3"}, r"not a plain LoRA adapter \(peft_type='IA3'\)"),
        ({"target_modules": "all-linear"}, "must be a list of layer names, got all-linear"),
        ({"target_modules": ["mlp.up_proj"]}, "must be a list of layer names"),
        ({"target_modules": ["up_proj"]}, "the adapter does not fit the model"),
        ({"r": 600}, "its rank must be at most 512, got 600"),
        ({"r": None}, "its rank must be at most 512, got None"),
        (None, "cannot be read .No such file or directory: .*adapter_model.safetensors"),
    ],
)
def test_unsupported_adapters_are_refused(run, adapter, tmp_path, change, message):
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(read_object(path) | (change or {})), encoding="utf-8")
    if change is None:
        (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(InputError, match=message):
        run(adapter=str(adapter), output_dir=str(tmp_path / "new"))


def test_changed_weights_under_the_same_path_are_refused(run, tiny_model, tmp_path):
    """An export that was made anew: its weights differ somewhere, not their names and sizes."""
    shutil.copytree(tiny_model, tmp_path / "merged")
    new = {"model": str(tmp_path / "merged"), "output_dir": str(tmp_path / "new")}
    run(**new)
    run(**new)
    weights = load_file(tmp_path / "merged" / "model.safetensors")
    changed = {
        name: value + 0.01 if "layers.1" in name else value for name, value in weights.items()
    }
    save_file(changed, tmp_path / "merged" / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"holds samples drawn with model \(its files\)"):
        run(**new)


def test_a_response_cut_off_in_its_reasoning_has_no_answer(grader):
    """A sample that was cut off in its reasoning."""
    task = Task(
        Problem("b", "0", "p", "4", False, 0.0), 0, Prompt("", [1], None, opens_thinking=True)
    )
    engine = SimpleNamespace(stream=lambda *_: [(0, Completion(task.prompt, [5], [], True, 0))])
    words = SimpleNamespace(decode=lambda ids, skip_special_tokens: r"is it \boxed{4}?")
    lines = list(draw(engine, [task], Decoding(9, 1.0, 1.0), 0, words))
    (sample,) = judge([task], lines, grader)
    assert (sample.correct, sample.answer) == (False, None)


def test_judged_samples_and_their_summary(grader):
    """A response that was cut off states no answer."""
    problems = [
        Problem("b", "0", "p0", "4.1", False, 0.2),
        Problem("b", "1", "p1", "1, 3", False, 0.0),
    ]
    responses = [
        (r"\boxed{4}", False),
        ("it is 4", True),
        ("it is 5", False),
        (r"\boxed{3, 1}", False),
    ]
    tasks = [
        Task(problem, number, Prompt("", [1], None)) for problem in problems for number in range(2)
    ]
    lines = [{"response": r, "tokens": len(r), "truncated": t} for r, t in responses]
    samples = judge(tasks, lines, grader)
    judged = [(True, "4", False), (False, None, True), (False, "5", False), (True, "3,1", False)]
    assert [(s.correct, s.answer, s.truncated) for s in samples] == judged
    results = summarise(tasks, samples)
    assert results["rates"] == {"b": {"0": 0.5, "1": 0.5}}
    assert results["average"]["avg"] == results["benchmarks"]["b"]["avg"] == 0.5


def test_the_verifier_takes_the_likeliest_of_three_letters(tiny_model, tmp_path):
    """Against one forward pass per case, without padding; of a long response it sees the end."""
    cases = [
        Case("What is 2+2?", "4", f"{'Some thoughts. ' * (n % 7)} The answer is {n}.")
        for n in range(24)
    ]
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    ids = tokenizer.convert_tokens_to_ids(["A", "B", "C"])
    letters = model.lm_head.weight.detach()[ids]

    def tokens(case):
        message = [{"role": "user", "content": INSTRUCTION.format(**case._asdict())}]
        return tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_tensors="pt"
        )["input_ids"]

    with torch.no_grad():
        hidden = torch.stack([model.model(tokens(case)).last_hidden_state[0, -1] for case in cases])
        mean = hidden.mean(0)  # without it the letters differ from case to case
        letters -= torch.outer(letters @ mean, mean) / (mean @ mean)
        model.lm_head.weight[ids] = letters
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    expected = ((hidden @ letters.T).argmax(1) == 0).tolist()
    assert 4 <= sum(expected) <= 20

    counts, longest = [], tokens(cases[0]._replace(response="")).shape[1] + 20

    def verifier(max_prompt_length):
        settings = {"model": str(tmp_path), "max_prompt_length": max_prompt_length, "batch_size": 5}
        tree = {"model": "m", "output_dir": "o", "dtype": "float32", "verifier": settings}
        return ModelVerifier(load_eval_config(tree), torch.device("cpu"))

    whole, short = verifier(4096), verifier(longest)
    assert whole.accepts(cases, on_case=counts.append) == expected
    assert counts == [5, 5, 5, 5, 4]
    ends = [case._replace(response=case.response[-20:]) for case in cases]
    assert short.accepts(cases) == whole.accepts(ends) != expected


def test_an_evaluation_with_a_verifier(run, tiny_model, tmp_path):
    path = tmp_path / "eval" / "samples-0.jsonl"
    lines = read_lines(path)
    write_lines(
        path, [line | {"response": "it is 7", "truncated": False} for line in lines[:2]] + lines[2:]
    )
    results = run(verifier__model=str(tiny_model))
    verdicts = read_lines(tmp_path / "eval" / "verdicts.jsonl")
    asked = [v for v in verdicts if "accepted_by_verifier" in v]
    assert len(asked) == sum(not v["correct"] and v["answer"] is not None for v in verdicts) >= 2
    assert sum(b.get("asked", 0) for b in results["benchmarks"].values()) == len(asked)


@pytest.mark.slow
def test_vllm_with_an_adapter_continues_an_evaluation(config, adapter, tmp_path):
    """Through the real command: samples that are drawn later are those of an uninterrupted
    evaluation."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    rollout = {"engine": "vllm", "num_samples": 40, "max_completion_length": 8, "max_num_seqs": 4}
    rollout["vllm"] = {"kv_cache_memory_bytes": 1 << 27}
    whole, cut_off = tmp_path / "whole", tmp_path / "cut"
    path = config(adapter=str(adapter), output_dir=str(whole), rollout=rollout, limit=1)
    arguments = [sys.executable, "-m", "stapo_lite", "evaluate", str(path)]
    subprocess.run(arguments, check=True, capture_output=True)
    shutil.copytree(whole, cut_off)
    write_lines(cut_off / "samples-0.jsonl", read_lines(cut_off / "samples-0.jsonl")[:10])
    subprocess.run([*arguments, f"output_dir={cut_off}"], check=True, capture_output=True)
    assert len(drawn(whole)) == 80
    assert drawn(cut_off) == drawn(whole)


@pytest.mark.slow
@pytest.mark.parametrize("left", [12, 1])
def test_two_processes_share_the_samples(config, finished, tmp_path, left):
    """Even if fewer samples are left than there are processes."""
    path = tmp_path / "eval" / "samples-0.jsonl"
    write_lines(path, read_lines(path)[left:])
    launcher = (
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        "-m",
        "stapo_lite",
        "evaluate",
    )
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-m", *launcher, str(config())],
        check=True,
        capture_output=True,
        env=one_thread,
    )
    assert drawn(tmp_path / "eval") == drawn(finished[0] / "eval")
    counts = [len(read_lines(path)) for path in sorted((tmp_path / "eval").glob("samples-*.jsonl"))]
    assert counts == ([6, 6] if left == 12 else [12, 0])
