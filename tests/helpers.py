"""What tests share beside fixtures: small models, policies, completions, mini-batches and runs."""

import copy
import itertools
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import oracle
import pytest
import torch
import yaml
from accelerate import Accelerator
from random_model import VOCABULARY, qwen3
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AutoTokenizer

from stapo_lite.assemble import open_run
from stapo_lite.cli import main as cli
from stapo_lite.config import Config, Engine, Lora, Train, load_config
from stapo_lite.extras.audit.diagnostics import Diagnostics
from stapo_lite.files import write_lines
from stapo_lite.method.tokens import pack
from stapo_lite.model.adapter import find_start, name_layers
from stapo_lite.model.loading import load_weights
from stapo_lite.model.policy import Policy, make_optimizer, make_policy
from stapo_lite.rollout.engine import RolloutSettings
from stapo_lite.training.checkpoint import Progress, list_checkpoints
from stapo_lite.training.learner import Learner, UpdateSettings
from stapo_lite.training.loop import train
from stapo_lite.training.memory import MemoryBudget, MemorySetting
from stapo_lite.training.metrics import gather_metrics
from stapo_lite.training.update import update
from stapo_lite.types import Completion, Prompt, TokenStatistics

ROOT = Path(__file__).parent.parent
SAMPLING = RolloutSettings(
    num_generations=4,
    max_model_len=400,
    max_completion_length=12,
    temperature=0.8,
    stop_token_ids=(1, 2),
)
TIMES = {"tokens_per_second", "seconds_rollout", "seconds_reward", "seconds_update", "seconds_step"}
ADVANTAGES = [1.2, -0.4, 0.0, 0.7, -1.1, 0.0, 0.3, 2.0]
VLLM = {"engine": "vllm", "vllm": {"kv_cache_memory_bytes": 1 << 27}}
MINIMAL = {"model": "m", "output_dir": "o", "data": {"source": "p.jsonl"}}
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TAU_P = 0.02  # the tiny model is flat: enough candidates to test with
LONGEST = 9
RARELY_RIGHT = """def even(completion_ids, **_):
    return [ids[0] % 4 == ids[-1] % 2 == 0 for ids in completion_ids]"""
PROMPTS = [Prompt("", [10 + (7 * i + 3 * t) % 250 for t in range(5 + 9 * i)], "") for i in range(3)]
# Over two blocks of vLLM's prefix cache.
LONG = [Prompt("", [10 + (13 * t) % 250 for t in range(300)], "")]


def benchmark(script, *options, **environment):
    """Run it from its command line; what it prints."""
    command = [sys.executable, f"benchmarks/{script}.py", *map(str, options)]
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | environment
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | own)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def tiny_qwen3(tied: bool):
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


def double(policy):
    """The decoder computes in float64, so that only the package's own rounding is left: fp32."""
    policy.model.double()
    return policy


def adapted_policy(
    model: Path,
    dtype: str = "float32",
    *,
    adapter_seed: int = 1,
    scale: float = 0.1,
    device: str = "cpu",
    checkpointing: bool = False,
    **changes,
) -> Policy:
    """A policy with an adapter that does something; `changes` are keys such as `lora__r=4`."""
    keys = {
        "lora__r": 8,
        "lora__lora_alpha": 16,
        "rollout__temperature": SAMPLING.temperature,
        "train__lm_head_memory_gb": 2**-10,
    }
    tree = MINIMAL | {"model": str(model), "dtype": dtype}
    config = load_config(changed(tree, keys | changes))
    base = load_weights(config.model, config.dtype, torch.device(device), config.quantization)
    policy = make_policy(base, config, find_start(config.lora))
    randomise_adapter(policy, adapter_seed, scale)
    if checkpointing:
        policy.save_memory(checkpointing=True, offload=False)
    return policy


def randomise_adapter(policy: Policy, seed: int, scale: float = 0.1, only: str = "") -> None:
    """Set B to random values in modules whose name contains `only`, to zero in all others."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.parameters.items():
            if "lora_B" in name:
                # On the CPU: a card gets the same values.
                drawn = torch.empty(parameter.shape).normal_(std=scale, generator=generator)
                parameter.copy_(drawn.mul_(float(only in name)))


def fake_completions(seed, advantages, longest=LONGEST, vocabulary=VOCABULARY):
    """Completions of random tokens, lengths and adapter versions, one for each advantage."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    completions = []
    for version, advantage in enumerate(advantages):
        prompt = Prompt("", [draw(4, vocabulary) for _ in range(draw(1, 12))], answer="")
        ids = [draw(4, vocabulary) for _ in range(draw(1, longest + 1))]
        logprobs = [-1.0] * len(ids)
        completions.append(Completion(prompt, ids, logprobs, True, version, advantage=advantage))
    return completions


def changed(tree, changes):
    """A copy of a config whose keys `changes` names, those of a section as `section__key`."""
    tree = copy.deepcopy(tree)
    for key, value in changes.items():
        section, _, name = key.partition("__")
        (tree.setdefault(section, {}) if name else tree)[name or section] = value
    return tree


def contents(folder):
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {path: path.read_bytes() for path in files if path.parent.name != "__pycache__"}


def shared_data(name):
    path = ROOT.parent / "shared" / "data" / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"{path.name} of the shared benchmark data is not here")
    return path


def held_out_rows(folder, **changes):
    """Write three held-out rows; the `evaluation` section that keeps the best adapter by them."""
    rows = [{"prompt": f"say {word}"} for word in ("five", "six", "seven")]
    write_lines(folder / "held_out.jsonl", rows)
    source = str(folder / "held_out.jsonl")
    return {"steps": 1, "source": source, "best": "reward"} | changes


def write_yaml(path, tree):
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def steps(config, resume=False, force=False):
    """Train step by step."""
    with open_run(load_config(config), resume, force) as opened:
        yield from train(opened)


def run(config, resume=False):
    return list(steps(config, resume))


def command(*arguments):
    """Run a command of `stapo` in this process; its exit status."""
    argv, sys.argv = sys.argv, ["stapo", *map(str, arguments)]
    try:
        cli()
    except SystemExit as exit_:
        return exit_.code
    finally:
        sys.argv = argv
    return 0


def in_groups(completions):
    return [completions[i : i + 4] for i in range(0, len(completions), 4)]


def adapter_bytes(folder):
    return (folder / "adapter_model.safetensors").read_bytes()


def without_times(metrics):
    return [{k: v for k, v in line.items() if k not in TIMES} for line in metrics]


def near(value, **tolerance):
    """A metric up to rounding; one without a value is None."""
    return value if value is None else pytest.approx(value, **tolerance)


def same_metrics(metrics, others):
    """Compare two runs, but for times and rounding."""
    for line, other in zip(without_times(metrics), without_times(others), strict=True):
        assert line.keys() == other.keys()
        for name, value in other.items():
            # A gap in float32 is all rounding. test_update allows a gradient 1e-6, in float64.
            rounding = 1e-5 if name.startswith("sampler_gap") else 1e-7
            relative = 1e-5 if name == "grad_norm" else 2e-6
            assert line[name] == near(value, rel=relative, abs=rounding), name


def in_two_processes(config, folder, *options, status=0):
    """Launch a training that finds the test's modules in `folder`; what it prints."""
    launch = ["--multi_gpu", "-m", "stapo_lite.train", config, *options]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{folder}:{ROOT}"}
    shown = accelerate_launch(2, *launch, status=status, cwd=folder, env=env)
    assert "on 2 process(es)" in shown
    return shown


def objective(algorithm="stapo", s2t=None, **changes):
    tree = {"s2t": {"tau_p": TAU_P} | (s2t or {})} | changes
    return Config(**MINIMAL, algorithm=algorithm, objective=tree).objective


def run_update(policy, completions, objective, *, old=None, max_tokens=10_000, **options):
    """(gradient, metrics, result): SGD at rate 1 moves the parameters by minus the gradient."""
    before = torch.cat([p.detach().flatten() for p in policy.parameters.values()])
    learner = make_learner(policy, objective, max_tokens, **options)
    batch = packed(policy, completions, old, objective)
    result = update(learner, batch)
    after = torch.cat([p.detach().flatten() for p in policy.parameters.values()])
    metrics, run = gather_metrics([result.metrics]), SimpleNamespace(learner=learner, policy=policy)
    diagnostics = Diagnostics()
    diagnostics.on_update(run, batch, result)
    diagnostics.on_step_end(run, metrics, None)
    return before - after, metrics, result


def make_learner(policy, objective, max_tokens, max_grad_norm=1e9, longest=LONGEST):
    settings = UpdateSettings(objective, max_grad_norm, longest, 1 + longest)
    optimizer = torch.optim.SGD(policy.parameters.values(), lr=1.0)
    budget = make_budget(max_tokens)
    return Learner(settings, policy, optimizer, budget, Accelerator(cpu=True), Progress())


def make_budget(tokens):
    """Micro-batches of at most so many tokens; or a budget as it is."""
    if isinstance(tokens, MemoryBudget):
        return tokens
    setting = MemorySetting(offload=False, checkpointing=False, tokens=tokens)
    return MemoryBudget(setting, lambda checkpointing, offload: None)


def measured(policy, completions):
    """Statistics of the policy now for each completion."""
    batch = pack(completions, policy.device, objective())
    learner = SimpleNamespace(policy=policy, budget=make_budget(10_000))
    lengths = [len(c.token_ids) for c in completions]
    whole = Learner.measure(learner, batch, range(len(completions)))
    parts = zip(*(values.split(lengths) for values in whole), strict=True)
    return dict(zip(completions, itertools.starmap(TokenStatistics, parts), strict=True))


def packed(policy, completions, old=None, kind=None):
    """A mini-batch; `old` has statistics of each completion."""
    batch = pack(completions, policy.device, kind or objective())
    if old is not None:
        values = zip(*(old[c] for c in completions), strict=True)
        batch.old = TokenStatistics(*map(torch.cat, values))
    return batch


def rms_norm_of_a_card(monkeypatch):
    """On a card `rms_norm` is one kernel, and another one backward, and saves its input only."""
    rms_norm = nn.functional.rms_norm

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, *options):
            ctx.save_for_backward(x)
            ctx.options = options
            with _disable_current_modes():
                y = rms_norm(x, *options)
            return torch.empty_like(x).copy_(y)

        @staticmethod
        def backward(ctx, gradient):
            x = ctx.saved_tensors[0].detach().requires_grad_()
            with _disable_current_modes(), torch.enable_grad():
                rms_norm(x, *ctx.options).backward(gradient)
            return torch.empty_like(x).copy_(x.grad), None, None, None

    monkeypatch.setattr(nn.functional, "rms_norm", Norm.apply)


def relative(actual, expected):
    return ((actual - expected).norm() / expected.norm().clamp(min=1e-12)).item()


def sampled_by_an_engine(policy, completions, noise=0.5, temperature=SAMPLING.temperature):
    """Give the completions log-probabilities of an engine that differs a good deal."""
    exact = oracle.statistics(oracle.double(policy.model), completions, temperature)
    draw = partial(torch.randn, (), generator=torch.Generator().manual_seed(0))
    for c in completions:
        c.rollout_logprobs = [x + noise * draw().item() for x in exact[c][0]]
    return completions


def later_update(policy):
    """(completions, statistics of the policy that sampled them), from which it has moved on."""
    completions = sampled_by_an_engine(policy, fake_completions(3, ADVANTAGES, LONGEST))
    old = measured(policy, completions)
    randomise_adapter(policy, seed=2, scale=0.13)
    return completions, old


def assert_same(actual, expected, rel=1e-6):
    """Compare all that two runs of `run_update` gave."""
    gradient, metrics, result = actual
    exact, numbers, other = expected
    assert relative(gradient, exact) < rel
    for name, value in numbers.items():
        scale = 1.0 if name == "loss" else 0.1  # the loss is a difference of terms around 1
        assert metrics[name] == near(value, rel=rel, abs=scale * rel), name
    assert result.grad_norm == pytest.approx(other.grad_norm, rel=rel)


def with_template(folder, name):
    """A byte-level tokenizer with one of TRL's chat templates, whose special tokens it gets."""
    import trl

    tokenizer = AutoTokenizer.from_pretrained(folder)
    path = Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja"
    tokenizer.chat_template = path.read_text(encoding="utf-8")
    kinds = r"<\|\w+\|>|<\w+_of_turn>|</?tool_(?:call|response)>"
    special = sorted({*re.findall(kinds, tokenizer.chat_template), "<|python_tag|>"})
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    return tokenizer


class Letters:
    """A tokenizer whose text is the token ids."""

    def decode(self, ids):
        return str(ids) if isinstance(ids, int) else " ".join(map(str, ids))


def make_vllm(model, dtype, quantization=None, cache_bytes=1 << 27, share_base=False, **lora):
    """An engine; without `cache_bytes` its KV cache takes what is left of its share of a GPU."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from stapo_lite.rollout.vllm_engine import VLLMEngine

    cache = {"kv_cache_memory_bytes": cache_bytes} if cache_bytes else {}
    sizes = {"max_num_seqs": 16, "gpu_memory_utilization": 0.3}
    options = Engine(**sizes, quantization=quantization, vllm=cache)
    layers = name_layers(Lora(r=8, **lora), str(model))
    return VLLMEngine(str(model), dtype, SAMPLING, options, layers, share_base)


def generate(engine, prompts, seed=0):
    seeds = [seed + SAMPLING.num_generations * i for i in range(len(prompts))]
    return engine.generate(prompts, seeds)


def gap(policy, groups):
    """|rollout_logprobs - the trainer's|, of all tokens."""
    completions = [c for group in groups for c in group]
    with torch.no_grad():
        logprobs = policy.statistics(completions).logprobs
    return (pack(completions, policy.device, objective()).rollout_logprobs - logprobs).abs()


def with_gradient(policy, completions):
    """Statistics, and the gradient of the sum of log-probabilities by every parameter."""
    statistics = policy.statistics(completions)
    gradients = torch.autograd.grad(statistics.logprobs.sum(), list(policy.parameters.values()))
    return [*(values.detach() for values in statistics), *gradients]


def dense(hidden, weight, bias, targets, temperature):
    logits = hidden.double() @ weight.double().T
    if bias is not None:
        logits = logits + bias.double()
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    p = log_p.exp()
    return log_p[torch.arange(len(targets)), targets], -(p * log_p).sum(-1), p.square().sum(-1)


def learn(policy, completions, learning_rate):
    """The likelihoods of completions in ten steps up; what is frozen stays as it was."""
    named = policy.model.named_parameters
    base = {name: p.detach().clone() for name, p in named() if not p.requires_grad}
    train = Train(learning_rate=learning_rate, weight_decay=0.0)
    optimizer = make_optimizer(policy, train)
    likelihoods = []
    for _ in range(10):
        likelihood = policy.statistics(completions).logprobs.sum()
        likelihoods.append(likelihood.item())
        (-likelihood).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = dict(named())
    assert all(torch.equal(after[name], values) for name, values in base.items())
    return likelihoods


def checkpoints(folder):
    return [path.name for path in list_checkpoints(folder)]


def accelerate_launch(processes, *arguments, status=0, timeout=1200, **options):
    """Run it to its end; what it prints."""
    executable = str(Path(sys.executable).with_name("accelerate"))
    sizes = ["--num_processes", str(processes), "--num_machines", "1", "--main_process_port", "0"]
    sizes += ["--mixed_precision", "no"]
    command = [executable, "launch", *sizes, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, **options)
    assert done.returncode == status, done.stderr[-3000:]
    assert status or "Traceback" not in done.stderr
    return done.stdout


def module_of_the_page(page, name, *changes):
    """The names in a module that a page of the docs shows, after replacing some of its text."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    code = text.partition(f"`{name}`")[2].split("```python")[1].split("```")[0]
    for old, new in changes:
        assert old in code
        code = code.replace(old, new)
    names: dict = {}
    exec(code, names)
    return names
