"""Every benchmark from its command line to its JSON, at toy size."""

import importlib
import json
import math
import os
import re
import shlex
import subprocess
import sys

import common
import compare_commits
import gpu_suite
import pytest
from conftest import ROOT

from stapo_lite.config import load_config

WAY = "adapter on bf16, logits in fp32, bf16 trainer"


def check_audit(result):
    for name in ("config", "many candidates"):
        assert result[name]["steps"] == 1
        assert 0 < result[name]["share_of_step_median"] <= result[name]["share_of_step_largest"]
        assert result[name]["bytes_per_step"] > 0
    assert result["many candidates"]["candidates_per_step"] > result["config"]["candidates_per_step"]


def check_compare_commits(result):
    assert re.fullmatch("[0-9a-f]{40}", result["old"])
    assert result["differences"]["audit"].keys() >= {"metrics", "adapter", "token log"}


def check_gpu_suite(result):
    for part in ("lm_head", "run:qwen8b_lora"):
        assert result[part] == {"failed with status": 1}


def check_grading(result):
    assert result["answers"] == 20
    assert result["workers"] == 1
    assert 0 < result["correct"] < 20
    assert [line["answers"] for line in result["progress"]] == list(range(2, 21, 2))
    assert result["progress"][-1]["workers_mb"] > 0
    assert result["labelled_cases"]["ours"] == {"cases": 2, "agree": 2, "false_positives": 0}
    assert result["labelled_cases"]["math_verify"]["cases"] == 2


def check_lm_head(result):
    ours, trl = (result["hidden 32"]["forward+backward"][name] for name in ("ours", "trl"))
    assert ours["ours / this"] == 1
    assert ours["seconds"] / trl["seconds"] == pytest.approx(trl["ours / this"])
    assert trl["peak MiB beyond the inputs"] > 0
    assert result["hidden 32"]["forward"].keys() == result["hidden 32"]["forward+backward"].keys()
    errors = result["hidden 32"]["largest error"]
    assert errors["ours"]["logprob"] < 1e-5 < errors["trl"]["logprob"] < 0.1
    assert errors["ours"]["gradient"] < 0.01


def check_mismatch(result):
    assert 0 < result[WAY]["gap"]["mean |d|"] < result[WAY]["effect of the adapter"]["mean |d|"]
    assert result[WAY]["tokens"] > 1000
    assert result[WAY]["seconds of a rollout"] > 0


def check_overlap(result):
    apart, ahead = result["max_lag=0"], result["max_lag=1"]
    assert apart["lag_mean"] == 0 < ahead["lag_mean"] <= 1
    assert 0 < result["the longer phase / the step of max_lag=0"] < 1
    assert result["pairs"] == [ahead["seconds_step"] / apart["seconds_step"]]


def check_presets(result):
    stapo, dapo = (result["first and last five steps"][name] for name in ("stapo", "dapo"))
    assert stapo["sampling_rounds"] == [1, 1]
    assert dapo["sampling_rounds"][0] >= 1
    assert stapo["silenced_share"][0] > dapo["silenced_share"][0] == 0
    assert stapo["reward"][0] > 0
    assert result["overrides"] == ["train.max_steps=2", "objective.s2t.tau_p=0.1"]


def check_s2t_statistics(result):
    (place,) = result["updates after the first, by place in the step"].values()
    assert place["tokens"] > place["silenced by both"] > 0
    assert 0.9 < result["share of tokens on which the masks agree"] <= 1
    assert result["seconds"].keys() == {"first update", "update", "mask pass"}
    assert result["reward, first and last five steps"][0] > 0


def check_safety(result):
    assert result.keys() >= {"seconds_step", "seconds_snapshot", "seconds_checkpoint"}
    assert result["checkpoint_mb"] > 0.1


def check_soak(result):
    assert result["growth"]["memory [MiB]"]["last fifth"] > 100
    for name, count in {"files of adapters": 1, "checkpoints": 2}.items():
        assert result["growth"][name] == {"second fifth": count, "last fifth": count}


def check_sync(result):
    assert result["parameters"]["adapter"] > 0
    assert 0 < result["trl / ours"]["min"] <= result["trl / ours"]["median"] <= result["trl / ours"]["max"]
    for number in (1, 2):
        drift = result["drift"][f"after {number}"]
        assert drift["ours: trainer"]["differing"] == drift["ours: vLLM"]["differing"] == 0
        assert drift["trl: trainer"]["differing"] > 0
    for side in result["sampler against trainer after the last sync"].values():
        assert 0 < side["gap"]["mean |d|"] < side["effect of the adapter"]["mean |d|"]


def check_update(result):
    whole, half = result["zero 0.0"], result["zero 0.5"]
    assert whole["TRL / ours"] == pytest.approx(whole["seconds"]["TRL"] / whole["seconds"]["ours"])
    assert whole["tokens with a gradient"] == whole["tokens"] == half["tokens"] > half["tokens with a gradient"]
    for part in (whole, half):
        assert part["peak MiB beyond the models"]["TRL"] > 0
        # A difference of terms around 1, each rounded to bfloat16.
        assert part["loss"]["ours"] == pytest.approx(part["loss"]["float32"], abs=0.004)
        assert part["relative difference of the gradients"]["ours, TRL"] < 0.1


# MODEL is the tiny one, CONFIG a small run of it, DATA a folder with questions.
SMOKE = {
    "audit": ("CONFIG --steps 2", check_audit),
    "compare_commits": ("--cases audit", check_compare_commits),
    "gpu_suite": ("--only lm_head run:qwen8b_lora", check_gpu_suite),
    "grading": ("DATA --answers 20 --workers 1", check_grading),
    "lm_head": ("--tokens 48 --hidden 32 --vocabulary 300 --pairs 1", check_lm_head),
    "mismatch": (f"--model MODEL --only '{WAY}'", check_mismatch),
    "overlap": ("CONFIG --pairs 1 --steps 3", check_overlap),
    "presets": ("CONFIG train.max_steps=2 objective.s2t.tau_p=0.1 --algorithms stapo dapo", check_presets),
    "s2t_statistics": ("CONFIG train.max_steps=2 objective.s2t.tau_p=0.1", check_s2t_statistics),
    "safety": ("CONFIG --steps 2", check_safety),
    "soak": ("--steps 50", check_soak),
    "sync": ("--model MODEL --pairs 2", check_sync),
    "update": (
        "--model MODEL --prompts 2 --generations 4 --prompt-length 4 --longest 16 --max-tokens 64 --zero 0 0.5 "
        "--pairs 1",
        check_update,
    ),
}
USE_VLLM = {"mismatch", "overlap", "soak", "sync"}
USE_TRL = {"lm_head", "sync", "update"}


@pytest.fixture
def data(tmp_path):
    """What the grading benchmark grades."""
    files = {
        "amc23": [{"problem": "What is 20 + 22?", "answer": "42"}, {"problem": "Half of one?", "answer": "\\frac12"}],
        "verify_cases": [
            {"gold": "\\frac12", "pred": "0.5", "equal": True, "form": "answer"},
            {"gold": "42", "pred": "Thus \\boxed{41}.", "equal": False, "form": "response"},
        ],
    }
    for name, rows in files.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("name", SMOKE)
def test_benchmark(tiny_model, write_config, data, tmp_path, name):
    if name in USE_VLLM:
        pytest.importorskip("vllm", reason="vLLM is not installed")
    if name in USE_TRL:
        pytest.importorskip("trl", reason="TRL is not installed: pip install -e '.[test]'")
    if name == "compare_commits" and common.commit() == "unknown":
        pytest.skip("no git, or not in a repository: there is no commit to compare with")
    places = {"MODEL": tiny_model, "CONFIG": write_config(), "DATA": data}
    words, check = SMOKE[name]
    options = [str(places.get(word, word)) for word in shlex.split(words)]
    out = tmp_path / "out.json"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)}
    if name == "gpu_suite":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        [sys.executable, f"benchmarks/{name}.py", *options, "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=ROOT,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(out.read_text(encoding="utf-8"))
    assert re.fullmatch("[0-9a-f]{40}|unknown", result["commit"])
    assert result["versions"].keys() >= {"torch", "transformers", "peft"}
    for path, value in figures(result):
        assert math.isfinite(value), path
        assert value > 0 or "seconds" not in path or name == "grading", path  # which rounds
    check(result)


def figures(tree, path=""):
    """The numbers of a JSON and where they are."""
    if isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from figures(value, f"{path}/{key}")
    elif isinstance(tree, int | float):
        yield path, tree


def test_every_benchmark_has_a_smoke_run():
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if '"--out"' in path.read_text("utf-8")}
    assert scripts == SMOKE.keys()


def test_what_differs_between_two_commits():
    old = [{"step": 1, "loss": 0.5, "tau_h": None, "seconds_step": 3.0}]
    assert compare_commits.difference(old, [old[0] | {"seconds_step": 9.0}]) == 0
    assert compare_commits.difference(old, [old[0] | {"loss": 0.4}]) == pytest.approx(0.2)
    assert compare_commits.difference(old, [old[0] | {"tau_h": 0.1}]) == math.inf
    assert compare_commits.difference(old, [*old, old[0]]) == math.inf


@pytest.mark.parametrize(("variable", "value"), [("PATH", ""), ("GIT_DIR", "nowhere")])
def test_a_result_is_saved_without_git(tmp_path, monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    common.save({"figure": 1}, tmp_path / "out.json")
    result = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert result["figure"] == 1
    assert result["commit"] == "unknown"


def test_gpu_suite_keeps_the_parts_that_it_does_not_run(tmp_path, monkeypatch):
    out = tmp_path / "out.json"
    out.write_text(json.dumps({"update": {"figure": 1}}), encoding="utf-8")
    ran = []

    def run(command, **_):
        ran.append(command[command.index("--only") + 1])
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(gpu_suite.subprocess, "run", run)
    monkeypatch.setattr(common, "commit", lambda: "unknown")
    monkeypatch.setattr(sys, "argv", ["gpu_suite", "--only", "sync", "tests", "--out", str(out)])
    gpu_suite.main()
    assert ran == ["sync", "tests"]
    result = json.loads(out.read_text(encoding="utf-8"))
    assert {name: result[name] for name in ("update", "sync", "tests")} == {
        "update": {"figure": 1},
        "sync": {"failed with status": 3},
        "tests": {"failed with status": 3},
    }


@pytest.mark.parametrize(
    ("part", "work"), [("lm_head", "compare"), ("update", "compare"), ("sync", "measure"), ("mismatch", "compare")]
)
def test_benchmarks_take_the_options_of_the_gpu_suite(tmp_path, monkeypatch, part, work):
    pytest.importorskip("trl", reason="TRL is not installed: pip install -e '.[test]'")
    monkeypatch.setattr(gpu_suite, "build", lambda folder, *_: folder)
    monkeypatch.setattr(gpu_suite, "run_script", lambda *command: command)
    script = importlib.import_module(part)
    monkeypatch.setattr(script, work, lambda *_, **__: {"figure": 1})
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", [*gpu_suite.run_part(part, 0, tmp_path), "--out", str(out)])
    script.main()
    assert '"figure": 1' in out.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", gpu_suite.RUNS)
def test_runs_of_the_gpu_suite_are_short_ones_of_shipped_configs(name):
    config = load_config(ROOT / f"configs/{name}.yaml", gpu_suite.SHORT)
    assert config.train.max_steps == 3
    assert config.reward.functions == ["gpu_suite:parity"]


def test_reward_of_the_gpu_suite_is_right_half_of_the_time():
    assert gpu_suite.parity([[1, 2], [2, 2]], prompts=["a", "b"]) == [1, 0]
