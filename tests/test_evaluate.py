"""Whole evaluations: on the tiny model in the process, and through the real command with vLLM, killed on the way."""

import importlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from stapo_lite.benchmarks import Problem
from stapo_lite.config import InputError, load_eval_config
from stapo_lite.evaluate import evaluate, main
from stapo_lite.exam import Task, judge, sample_key, summarise
from stapo_lite.files import read_lines, write_lines
from stapo_lite.grading import MathGrader
from stapo_lite.types import Prompt
from stapo_lite.verifier import INSTRUCTION, Case, Verifier

evaluate_module = importlib.import_module("stapo_lite.evaluate")  # the package's attribute is the function

GENEROUS = 20.0
ROOT = Path(__file__).parent.parent


@pytest.fixture
def write_config(tiny_model, tmp_path):
    """Two small benchmarks for the tiny model and the transformers engine."""
    write_lines(tmp_path / "aime24.jsonl", [{"problem": f"say {w}", "answer": i} for i, w in enumerate(("one", "two"))])
    write_lines(tmp_path / "mine.jsonl", [{"problem": "say three", "answer": "3", "id": "t"}])

    def write(**changes) -> Path:
        tree = {
            "model": str(tiny_model),
            "output_dir": str(tmp_path / "eval"),
            "dtype": "float32",
            "benchmarks": [str(tmp_path / "aime24.jsonl"), str(tmp_path / "mine.jsonl")],
            "data": {"max_prompt_length": 150},
            "rollout": {
                "engine": "transformers",
                "num_samples": 4,
                "max_completion_length": 8,
                "max_num_seqs": 3,
                "kv_cache_gb": 0.125,
            },
            "grading": {"timeout": GENEROUS, "num_workers": 1},
        }
        for key, value in changes.items():
            section, _, name = key.partition("__")
            (tree.setdefault(section, {}) if name else tree)[name or section] = value
        path = tmp_path / "eval.yaml"
        path.write_text(yaml.safe_dump(tree), encoding="utf-8")
        return path

    return write


@pytest.fixture
def run(write_config):
    return lambda **changes: evaluate(load_eval_config(write_config(**changes)))


@pytest.fixture
def adapter(make_policy, tmp_path):
    make_policy(scale=0.5).save_adapter(tmp_path / "adapter")
    return str(tmp_path / "adapter")


def drawn(folder):
    lines = [line for path in sorted(folder.glob("samples-*.jsonl")) for line in read_lines(path)]
    return {sample_key(line)[:3]: (line["seed"], line["response"]) for line in lines}


def test_an_evaluation_leaves_everything_behind(write_config, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["evaluate", str(write_config()), "decoding=justrl"])
    main()
    printed = capsys.readouterr().out
    folder = tmp_path / "eval"
    assert {path.name for path in folder.iterdir()} == (
        {"config.yaml", "settings.json", "samples-0.jsonl", "verdicts.jsonl", "results.json", "results.md"}
    )
    assert printed.rstrip().endswith(f"results: {folder}")
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    for table in printed.split("\n\n")[:2]:
        assert table.strip() in (folder / "results.md").read_text(encoding="utf-8")
    assert list(results["benchmarks"]) == ["aime24", "mine"]
    assert (results["temperature"], results["top_p"]) == (0.7, 0.9)
    assert results["rates"]["aime24"].keys() == {"0", "1"}
    samples = read_lines(folder / "samples-0.jsonl")
    assert len(samples) == 12
    assert len({line["seed"] for line in samples}) == 12
    verdicts = read_lines(folder / "verdicts.jsonl")
    assert [(v["benchmark"], v["id"], v["sample"]) for v in verdicts] == (
        [("aime24", i, k) for i in "01" for k in range(4)] + [("mine", "t", k) for k in range(4)]
    )
    resolved = load_eval_config(folder / "config.yaml")
    assert (resolved.rollout.temperature, resolved.decoding) == (0.7, "justrl")


def test_samples_are_those_of_the_prompt_and_the_seed(run, tmp_path, monkeypatch):
    """A second evaluation gives the same; one of more samples contains it."""
    run()
    first = drawn(tmp_path / "eval")
    run(output_dir=str(tmp_path / "again"), rollout__max_num_seqs=5)
    assert drawn(tmp_path / "again") == first
    results = run(rollout__num_samples=6, limit=1)
    more = drawn(tmp_path / "eval")
    assert len(first) == 12
    assert len(more) == 16  # two more of the first problem of each
    assert first.items() <= more.items()
    assert (results["benchmarks"]["aime24"]["problems"], results["benchmarks"]["aime24"]["samples"]) == (1, 6)
    monkeypatch.setattr(evaluate_module, "make_engine", None)  # nothing is left to draw
    assert run()["benchmarks"]["mine"]["samples"] == 4


def test_going_on_after_an_interruption(run, tmp_path, monkeypatch):
    run(output_dir=str(tmp_path / "whole"))
    draw = evaluate_module.draw
    monkeypatch.setattr(evaluate_module, "draw", lambda *a: itertools.chain(itertools.islice(draw(*a), 5), stop()))
    with pytest.raises(KeyboardInterrupt):
        run()
    monkeypatch.undo()
    path = tmp_path / "eval" / "samples-0.jsonl"
    assert len(read_lines(path)) == 5
    with path.open("a", encoding="utf-8") as file:
        file.write('{"benchmark": "aime24", "response": "é')  # cut off while it was written
    path.write_bytes(path.read_bytes()[:-1])  # and in the middle of a letter
    results = run()
    assert drawn(tmp_path / "eval") == drawn(tmp_path / "whole")
    assert len(read_lines(path)) == 12
    whole = json.loads((tmp_path / "whole" / "results.json").read_text(encoding="utf-8"))
    assert results["benchmarks"] == whole["benchmarks"]


def test_another_text_under_the_same_id_is_another_problem(run, tmp_path):
    run()
    before = drawn(tmp_path / "eval")
    write_lines(tmp_path / "mine.jsonl", [{"problem": "say eight", "answer": "3", "id": "t"}])
    run()
    after = drawn(tmp_path / "eval")
    changed = {key[1] for key in before if before[key] != after[key]}
    assert changed == {"t"}
    assert len(read_lines(tmp_path / "eval" / "samples-0.jsonl")) == 16


def stop():
    raise KeyboardInterrupt
    yield


def test_an_adapter_changes_the_samples(run, adapter, tmp_path):
    run(output_dir=str(tmp_path / "base"))
    run(adapter=adapter)
    base, adapted = drawn(tmp_path / "base"), drawn(tmp_path / "eval")
    assert base.keys() == adapted.keys()
    assert sum(base[key] != adapted[key] for key in base) > 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "holds samples drawn with seed=0, not 1"),
        ({"decoding": "justrl"}, "holds samples drawn with rollout.temperature=1.0, not 0.7"),
        ({"adapter": "adapter"}, r"drawn with adapter \(its files\)=None, not"),
        ({"adapter": "nowhere"}, "adapter=.*nowhere: no adapter in PEFT's format"),
        ({"benchmarks": ["aime24.jsonl", "aime24.jsonl"]}, "benchmarks: aime24 is given twice"),
        ({"benchmarks": ["aime26"]}, "aime26 is none of"),
        ({"data__max_prompt_length": 20}, "row 1: the prompt has .* tokens, data.max_prompt_length is 20"),
        ({"rollout__quantization": "fp8"}, "rollout.quantization=fp8 needs vLLM"),
        ({"model": "nowhere"}, "model=nowhere: not a causal language model"),
        ({"verifier__model": "nowhere"}, "model=nowhere: not a causal language model"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_bad_input_is_one_line(run, adapter, tmp_path, monkeypatch, changes, message):
    monkeypatch.chdir(tmp_path)
    run()
    with pytest.raises(InputError, match=message):
        run(**changes)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("use_rslora", True, r"not a plain LoRA adapter \(use_rslora\)"),
        ("peft_type", "IA3", r"not a plain LoRA adapter \(IA3\)"),
        ("target_modules", "all-linear", "must be a list of layer names, got all-linear"),
        ("target_modules", ["mlp.up_proj"], "must be a list of layer names"),
        ("target_modules", ["up_proj"], "the adapter does not fit the model, .* is on one side only"),
        ("r", 600, "its rank must be at most 512, got 600"),
    ],
)
def test_adapters_that_the_engines_would_not_apply_alike(run, adapter, field, value, message):
    path = Path(adapter) / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {field: value}), encoding="utf-8")
    with pytest.raises(InputError, match=message):
        run(adapter=adapter)


def test_an_adapter_without_weights(run, adapter):
    (Path(adapter) / "adapter_model.safetensors").unlink()
    with pytest.raises(InputError, match="adapter_model.safetensors cannot be read"):
        run(adapter=adapter)


def test_comparing_runs(run, write_config, tmp_path, monkeypatch, capsys):
    run()
    shutil.copytree(tmp_path / "eval", tmp_path / "copy")
    monkeypatch.setattr(sys, "argv", ["evaluate", "compare", str(tmp_path / "eval"), str(tmp_path / "copy")])
    main()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert rows[0][1:] == ["aime24", "mine", "average", f"less {tmp_path / 'eval'}", "95 % interval"]
    assert rows[3][-2:] == ["+0.0", "0.0 to 0.0"]
    for folders, message in [([tmp_path, "x"], "no results of an evaluation"), ([tmp_path], "two evaluations or more")]:
        monkeypatch.setattr(sys, "argv", ["evaluate", "compare", *map(str, folders)])
        with pytest.raises(SystemExit, match="2"):
            main()
        assert message in capsys.readouterr().err


def test_the_resolved_config_takes_another_decoding(run, tmp_path):
    run()
    again = load_eval_config(tmp_path / "eval" / "config.yaml", ["decoding=justrl"])
    assert (again.rollout.temperature, again.rollout.top_p) == (0.7, 0.9)


def lines_and_tasks():
    problems = [Problem("b", "0", "p0", "4.1", False, 0.2), Problem("b", "1", "p1", "1, 3", False, 0.0)]
    responses = [(r"\boxed{4}", False), ("it is 4", True), ("it is 5", False), (r"\boxed{3, 1}", False)]
    tasks = [Task(problem, number, Prompt("", [1], None)) for problem in problems for number in range(2)]
    return tasks, [{"response": r, "tokens": len(r), "truncated": t} for r, t in responses]


def test_grading_by_hand():
    """A response that was cut off states no answer."""
    grader = MathGrader(GENEROUS, 1)
    tasks, lines = lines_and_tasks()
    samples = judge(tasks, lines, grader)
    assert [(s.correct, s.answer, s.truncated, s.accepted) for s in samples] == (
        [(True, "4", False, None), (False, None, True, None), (False, "5", False, None), (True, "3,1", False, None)]
    )

    class Lenient:
        def accepts(self, cases, on_case):
            assert cases == [Case("p1", "1, 3", "it is 5")]  # only what the rules reject and has an answer
            return [True]

    samples = judge(tasks, lines, grader, Lenient())
    grader.close()
    assert [s.accepted for s in samples] == [None, None, True, None]
    results = summarise(tasks, samples)
    assert results["rates"] == {"b": {"0": 0.5, "1": 0.5}}
    assert (results["average"]["avg"], results["average"]["verified"]) == (0.5, 0.75)
    assert results["benchmarks"]["b"]["asked"] == 1


def test_the_verifier_takes_the_likeliest_of_three_letters(smollm2):
    """Against one forward pass per case, without padding."""
    cases = [Case("What is 2+2?", "4", f"{'Some thoughts. ' * n} The answer is {n}.") for n in range(6)]
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    expected = []
    for case in cases:
        message = [{"role": "user", "content": INSTRUCTION.format(**case._asdict())}]
        inputs = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt")
        with torch.no_grad():
            logits = model(inputs["input_ids"]).logits[0, -1]
        expected.append(logits[[tokenizer.convert_tokens_to_ids(letter) for letter in "ABC"]])
    verifier = Verifier(str(smollm2), torch.float32, torch.device("cpu"), max_prompt_length=1024, batch_size=4)
    torch.testing.assert_close(
        verifier._logits([verifier._render(case) for case in cases]), torch.stack(expected), atol=1e-3, rtol=0
    )
    shifted = torch.tensor([[1.0, 2.0, 0.0], [2.0, 1.0, 0.0], [0.0, 1.0, 2.0]])
    counts = []
    assert verifier.accepts(cases, on_case=counts.append) == [logits.argmax() == 0 for logits in expected]
    assert counts == [4, 2]
    longest_last = sorted(cases[:3], key=lambda case: -len(case.response))
    verifier._logits = lambda texts: shifted
    assert verifier.accepts(longest_last) == [False, True, False]  # judged from the shortest, returned in order
    short = Verifier(str(smollm2), torch.float32, torch.device("cpu"), max_prompt_length=200, batch_size=4)
    rendered = short._render(Case("What?", "4", "before " * 500 + "the end"))
    assert len(tokenizer.encode(rendered, add_special_tokens=False)) == pytest.approx(200, abs=3)
    assert "before the end\n" in rendered


def test_a_second_judge_in_a_run(run, tiny_model, tmp_path):
    results = run(verifier__model=str(tiny_model))
    verdicts = read_lines(tmp_path / "eval" / "verdicts.jsonl")
    asked = [v for v in verdicts if "accepted_by_verifier" in v]
    assert len(asked) == sum(not v["correct"] and v["answer"] is not None for v in verdicts)
    assert sum(b.get("asked", 0) for b in results["benchmarks"].values()) == len(asked)


def command(path, *overrides):
    return [sys.executable, "-m", "stapo_lite.evaluate", str(path), *overrides]


def test_killed_with_vllm_and_an_adapter(write_config, adapter, tmp_path):
    """kill -9 in the middle; what is left is drawn, and all samples are those of an uninterrupted run."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    path = write_config(
        adapter=adapter, rollout__engine="vllm", rollout__num_samples=40, rollout__max_num_seqs=4, limit=1
    )
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    process = subprocess.Popen(command(path), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    samples = tmp_path / "eval" / "samples-0.jsonl"
    while process.poll() is None and not (samples.exists() and len(read_lines(samples)) >= 10):
        try:
            process.wait(timeout=0.02)
        except subprocess.TimeoutExpired:
            continue
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stderr.close()
    before = drawn(tmp_path / "eval")
    assert 10 <= len(before) < 80
    whole = str(tmp_path / "whole")
    for output in (str(tmp_path / "eval"), whole):
        subprocess.run(command(path, f"output_dir={output}"), env=environment, check=True, capture_output=True)
    after = drawn(tmp_path / "eval")
    assert before.items() <= after.items()
    assert len(after) == 80
    assert after == drawn(Path(whole))
    results = [json.loads(Path(f, "results.json").read_text("utf-8")) for f in (tmp_path / "eval", whole)]
    assert results[0]["benchmarks"] == results[1]["benchmarks"]


def test_two_processes_share_the_samples(write_config, run, tmp_path):
    run(output_dir=str(tmp_path / "one"))
    launcher = [
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        "-m",
        "stapo_lite.evaluate",
        str(write_config()),
    ]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}

    def launch():
        subprocess.run([sys.executable, "-m", *launcher], check=True, capture_output=True, env=one_thread)

    launch()
    assert drawn(tmp_path / "eval") == drawn(tmp_path / "one")
    files = sorted((tmp_path / "eval").glob("samples-*.jsonl"))
    assert [len(read_lines(path)) for path in files] == [6, 6]
    write_lines(files[1], read_lines(files[1])[1:])  # one is missing, fewer than there are processes
    launch()
    assert drawn(tmp_path / "eval") == drawn(tmp_path / "one")
