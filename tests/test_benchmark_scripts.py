"""Each benchmark from its command line to its JSON, at toy size."""

import json
import math
import re
import shlex

import compare_commits
import gpu_suite
import pytest
import scaling
from helpers import ROOT, benchmark

WAY = "adapter on bf16, logits in fp32, bf16 trainer"
EFFECT = "effect of the adapter"
# Options of each script; MODEL stands for the tiny model.
SMOKE = {
    "compare_commits": "--cases audit",
    "gpu_suite": "--only lm_head run:qwen8b_lora",
    "hybrids": "--sizes 0.8B --rows 1 --length 16 --pairs 1",
    "lm_head": "--tokens 48 --hidden 32 --vocabulary 300 --pairs 1",
    "mismatch": f"--model MODEL --only '{WAY}'",
    "scaling": "--model MODEL --lengths 16 --completions 8 --pairs 1",
    "step": (
        "--pairs 1 --set model=MODEL data.max_prompt_length=300 rollout.max_completion_length=8 "
        "dtype=float32 rollout.engine=transformers"
    ),
    "startup": "--model MODEL --runs 1",
    "update": (
        "--model MODEL --prompts 2 --generations 4 --prompt-length 4 --longest 16 --max-tokens 64 "
        "--pairs 1 --zero 0 0.5"
    ),
}
FILES = (ROOT / "benchmarks").glob("*.py")
SCRIPTS = [path.stem for path in FILES if '"--out"' in path.read_text("utf-8")]
# What the result must hold.
CHECKS = {
    "gpu_suite": lambda r: r["lm_head"] == r["run:qwen8b_lora"] == {"failed with status": 1},
    "lm_head": lambda r: r["hidden 32"]["largest error"]["ours"]["logprob"] < 1e-5,
    "mismatch": lambda r: 0 < r[WAY]["gap"]["mean |d|"] < 0.1 < r[WAY][EFFECT]["mean |d|"],
    "scaling": lambda r: min(r["processes"]["2"]["ms"].values()) > 0,
    "step": lambda r: all(0 < s["tokens"] <= 8 * 64 for pair in r["steps"] for s in pair.values()),
    "update": lambda r: r["zero 0.0"]["relative difference of the gradients"]["ours, TRL"] < 0.1,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*SMOKE, *SCRIPTS}))
def test_benchmark(tiny_model, tmp_path, name):
    options = shlex.split(SMOKE[name].replace("MODEL", shlex.quote(str(tiny_model))))
    out = tmp_path / "out.json"
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if name == "gpu_suite" else {}
    benchmark(name, *options, "--out", out, **hidden)
    result = json.loads(out.read_text("utf-8"), parse_constant=pytest.fail)  # of NaN or Infinity
    assert re.fullmatch("[0-9a-f]{40}|unknown", result["commit"])
    assert result["versions"].keys() >= {"torch", "transformers", "peft"}
    assert CHECKS.get(name, bool)(result)


def test_the_figure_of_scaling(tmp_path):
    sides = {"ours": 1.0, "TRL": 3.0}
    points = {"8": {"ms": sides, "peak KiB": sides}, "16": {"ms": sides, "peak KiB": sides}}
    scaling.draw({"lengths": points, "completions": points}, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 8])
def test_decoding(tiny_model, rank):
    """The part of the GPU suite, on a CPU."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    found = gpu_suite.decode(str(tiny_model), None, rank, length=4)
    assert list(found["tokens per second"]) == [8, 16, 32, 64, 128]
    assert min(found["tokens per second"].values()) > 0


@pytest.mark.parametrize(
    ("other", "expected"),
    [({"seconds_step": 9.0}, 0), ({"loss": 0.4}, 0.2), ({"tau_h": 0.1}, math.inf), ({"new": 1}, 0)],
)
def test_difference_between_two_commits(other, expected):
    old = {"step": 1, "loss": 0.5, "tau_h": None, "seconds_step": 3.0, "lag_max": 0}
    assert compare_commits.difference([old], [old | other]) == pytest.approx(expected)
    assert compare_commits.difference([old], [old, old]) == math.inf
