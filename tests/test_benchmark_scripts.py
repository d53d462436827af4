"""Each benchmark from its command line to its JSON, at toy size."""

import json
import math
import os
import re
import shlex
import subprocess
import sys

import compare_commits
import gpu_suite
import memory_figure
import pytest
from helpers import ROOT, tiny_qwen3
from random_model import build

pytestmark = pytest.mark.slow

WAY = "adapter on bf16, logits in fp32, bf16 trainer"
# Options of each script; MODEL stands for the tiny model.
SMOKE = {
    "compare_commits": "--cases audit",
    "gpu_suite": "--only lm_head run:qwen8b_lora",
    "lm_head": "--tokens 48 --hidden 32 --vocabulary 300 --pairs 1",
    "mismatch": f"--model MODEL --only '{WAY}'",
    "step": (
        "--pairs 1 --set model=MODEL data.max_prompt_length=300 rollout.max_completion_length=8 "
        "dtype=float32 rollout.engine=transformers"
    ),
    "one_base": "--steps 1 --pairs 1 --set model=MODEL data.max_prompt_length=100",
    "startup": "--model MODEL --runs 1",
    "update": (
        "--model MODEL --prompts 2 --generations 4 --prompt-length 4 --longest 16 --max-tokens 64 "
        "--pairs 1 --zero 0 0.5"
    ),
}
SCRIPTS = [
    path.stem for path in (ROOT / "benchmarks").glob("*.py") if '"--out"' in path.read_text("utf-8")
]
# What the result must hold.
CHECKS = {
    "gpu_suite": lambda r: r["lm_head"] == r["run:qwen8b_lora"] == {"failed with status": 1},
    "lm_head": lambda r: r["hidden 32"]["largest error"]["ours"]["logprob"] < 1e-5,
    "mismatch": lambda r: (
        0 < r[WAY]["gap"]["mean |d|"] < r[WAY]["effect of the adapter"]["mean |d|"]
    ),
    "one_base": lambda r: all(
        side["first step"] > side["step"] > 0 and side["peak"] > 0.1
        for side in r["medians"].values()
    ),
    "step": lambda r: all(
        0 < side["tokens"] <= 8 * 64 for pair in r["steps"] for side in pair.values()
    ),
    "update": lambda r: r["zero 0.0"]["relative difference of the gradients"]["ours, TRL"] < 0.1,
}


@pytest.mark.parametrize("name", sorted({*SMOKE, *SCRIPTS}))
def test_benchmark(tiny_model, tmp_path, name):
    if name in {"lm_head", "step", "update"}:
        pytest.importorskip("trl", reason="TRL is not installed: pip install -e '.[test]'")
    if name == "compare_commits" and not (ROOT / ".git").exists():
        pytest.skip("not in a repository: there is no commit to compare with")
    model = tiny_model
    if name == "one_base":  # on a CPU bitsandbytes' blocks of 64 must fit into rows
        model = build(tmp_path / "model", tiny_qwen3(tied=True, intermediate_size=128))
    options = shlex.split(SMOKE[name].replace("MODEL", shlex.quote(str(model))))
    out = tmp_path / "out.json"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)}
    if name == "gpu_suite":
        environment |= {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, f"benchmarks/{name}.py", *options, "--out", str(out)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
        cwd=ROOT,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    text = out.read_text(encoding="utf-8")
    result = json.loads(text, parse_constant=pytest.fail)  # fails on NaN or Infinity
    assert re.fullmatch("[0-9a-f]{40}|unknown", result["commit"])
    assert result["versions"].keys() >= {"torch", "transformers", "peft"}
    assert CHECKS.get(name, bool)(result)


@pytest.mark.parametrize("rank", [0, 8])
def test_decoding(tiny_model, rank):
    """The part of the GPU suite, on a CPU."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    found = gpu_suite.decode(str(tiny_model), None, rank, length=4)
    assert list(found["tokens per second"]) == [8, 16, 32, 64, 128]
    assert min(found["tokens per second"].values()) > 0


def test_the_figure_of_memory(tmp_path):
    memory_figure.draw(tmp_path / "memory.png")
    assert (tmp_path / "memory.png").stat().st_size > 10_000


def test_difference_between_two_commits():
    old = [{"step": 1, "loss": 0.5, "tau_h": None, "seconds_step": 3.0}]
    others = [{"seconds_step": 9.0}, {"loss": 0.4}, {"tau_h": 0.1}]
    differences = [compare_commits.difference(old, [old[0] | other]) for other in others]
    assert differences == [0, pytest.approx(0.2), math.inf]
    assert compare_commits.difference(old, [*old, old[0]]) == math.inf
