"""The trainer on vLLM's weights, against a trainer with a copy of its own: real vLLM on the CPU.

It packs 16- and 32-bit weights away there, which `unpacked` prevents; 4-bit ones are as on a card.
"""

import gc
import os
import re
import signal
import subprocess
import sys
import weakref
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
import torch
from families import FAMILIES, random_checkpoint
from helpers import (
    MINIMAL,
    PROMPTS,
    SAMPLING,
    adapter_bytes,
    gap,
    generate,
    held_out_rows,
    learn,
    randomise_adapter,
    relative,
    run,
    without_times,
)
from safetensors.torch import load_file, save_file
from torch import nn

from stapo_lite import Trainer, assemble
from stapo_lite.assemble import shared_base
from stapo_lite.config import Engine, Lora, load_config
from stapo_lite.errors import InputError
from stapo_lite.files import read_lines
from stapo_lite.model.loading import load_weights
from stapo_lite.model.one_base import base_on, check_weights
from stapo_lite.model.policy import make_policy
from stapo_lite.rollout.vllm_weights import named_weights
from stapo_lite.training.checkpoint import list_checkpoints
from stapo_lite.training.folder import read_metrics

pytest.importorskip("vllm", reason="vLLM is not installed")
CPU = torch.device("cpu")
DTYPES = {None: "float32", "nf4": "bfloat16"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A checkpoint of each family, written once."""
    folder = tmp_path_factory.mktemp("families")
    return {name: random_checkpoint(folder / name, config) for name, config in FAMILIES.items()}


@pytest.fixture
def unpacked(monkeypatch):
    """vLLM's CPU build without its packed weights."""

    def plain(layer, remove_weight):
        layer.cpu_linear = torch.nn.functional.linear

    utilities = "vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm"
    monkeypatch.setattr(utilities, plain)


def start(model, quantization):
    from stapo_lite.rollout.vllm_engine import VLLMEngine

    options = Engine(
        max_num_seqs=16,
        quantization={"nf4": "bitsandbytes"}.get(quantization),
        vllm={"kv_cache_memory_bytes": 1 << 27},
    )
    lora = Lora(r=8, target_modules=["all-linear"])
    return VLLMEngine(str(model), DTYPES[quantization], SAMPLING, options, lora, 1)


def vllm_model(engine):
    models = []
    engine._llm.apply_model(models.append)
    return models[0]


def storages(model):
    return {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}


def backward(policy, completions):
    """The statistics of the completions' tokens, and the gradients of their likelihood."""
    statistics = policy.statistics(completions)
    statistics.logprobs.sum().backward()
    gradients = [parameter.grad.clone() for parameter in policy.parameters.values()]
    policy.model.zero_grad()
    return [values.detach() for values in statistics] + gradients


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, "nf4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_policy_on_vllms_weights_is_that_of_its_own_copy(
    checkpoints, family, quantization, unpacked, tmp_path
):
    """In log-probabilities, gradients and ten steps of training, after which vLLM samples as
    before."""
    model, dtype = checkpoints[family], DTYPES[quantization]
    overrides = {
        "model": str(model),
        "dtype": dtype,
        "quantization": quantization,
        "lora": {"r": 8, "target_modules": ["all-linear"]},
        "rollout": {"temperature": SAMPLING.temperature},
    }
    config = load_config(MINIMAL | overrides)
    engine = start(model, quantization)
    try:
        base = base_on(engine.shared_base(), str(model), dtype, CPU)
        check_weights(base, str(model))
        assert storages(base) <= storages(vllm_model(engine))
        shared = make_policy(base, config)
        own = make_policy(load_weights(str(model), dtype, CPU, quantization), config)
        randomise_adapter(shared, seed=1)
        randomise_adapter(own, seed=1)
        shared.save_adapter(tmp_path / "adapter")
        engine.load_adapter(tmp_path / "adapter", 1)
        groups = generate(engine, PROMPTS)
        assert gap(shared, groups).mean() < {None: 1e-5, "nf4": 0.1}[quantization]
        completions = [c for group in groups for c in group]
        for mine, theirs in zip(*map(backward, (shared, own), [completions] * 2), strict=True):
            assert relative(mine, theirs) < 1e-6
        likelihoods = [learn(policy, completions, "adamw", 1e-3) for policy in (shared, own)]
        assert likelihoods[0] == pytest.approx(likelihoods[1], rel=1e-5)
        engine.load_adapter(tmp_path / "adapter", 2)
        assert [c.token_ids for g in generate(engine, PROMPTS) for c in g] == [
            c.token_ids for c in completions
        ]
    finally:
        engine.close()


@pytest.fixture
def checkpoint(checkpoints):
    return checkpoints["Qwen3"]


@pytest.fixture
def weights(checkpoint):
    """A base's weights by their names, as an engine would give them."""
    base = load_weights(str(checkpoint), "float32")
    return {name: parameter.data for name, parameter in base.named_parameters()}


VALUES = "model.layers.1.self_attn.v_proj.weight"
KEYS = VALUES.replace("v_proj", "k_proj")


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("missing", rf"{VALUES} is \[64, 128\] in torch.float32, and the engine has no such"),
        ("short", r"the engine has one of \[63, 128\] in torch.float32"),
        ("rounded", r"the engine has one of \[64, 128\] in torch.bfloat16"),
        ("another's", f"{VALUES} in the engine differs from the checkpoint's file"),
        ("one row", f"{VALUES} in the engine differs"),
        ("not a number", f"{VALUES} in the engine differs"),
    ],
)
@pytest.mark.parametrize("asked", ["auto", "on"])
def test_weights_that_cannot_be_shared(checkpoint, weights, fault, problem, asked, caplog):
    """They are named in one line, and the trainer loads a copy of its own, unless the config asks
    for sharing."""
    values = weights.pop(VALUES)
    changed = values.clone()
    changed[-1, -1] = {"one row": changed[-1, -1] + 1e-3}.get(fault, torch.nan)
    faulty = {
        "short": values[:-1],
        "rounded": values.bfloat16(),
        "another's": weights[KEYS],
        "one row": changed,
        "not a number": changed,
    }
    if fault in faulty:
        weights[VALUES] = faulty[fault]
    engine = SimpleNamespace(shared_base=lambda: weights, keep_base=lambda: pytest.fail("kept"))
    config = load_config(
        MINIMAL | {"model": str(checkpoint), "dtype": "float32"}, [f"rollout.share_base={asked}"]
    )
    accelerator = SimpleNamespace(device=CPU)
    if asked == "on":
        with pytest.raises(InputError, match=problem):
            shared_base(engine, config, accelerator)
        return
    assert shared_base(engine, config, accelerator) is None
    [record] = caplog.records
    assert re.search(rf"^rollout.share_base: .*{problem}.*; the trainer loads a", record.message)


def test_a_checkpoint_without_the_weight(checkpoint, weights, tmp_path):
    base = base_on(weights, str(checkpoint), "float32", CPU)
    check_weights(base, str(checkpoint))
    stored = load_file(checkpoint / "model.safetensors")
    del stored[VALUES]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=f"the checkpoint's files do not hold {VALUES}"):
        check_weights(base, str(tmp_path))


def test_a_layout_that_is_not_known_is_missed_by_its_name():
    layer = nn.Linear(4, 6, bias=False)
    model = nn.Module()
    model.attention = nn.Module()
    model.attention.qkv_proj = layer
    model.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    assert named_weights(model) == {}
    layer.output_sizes = [3, 2]  # not its six rows
    assert named_weights(model) == {}
    layer.output_sizes = [3, 2, 1]
    rows = {"q_proj": slice(0, 3), "k_proj": slice(3, 5), "v_proj": slice(5, 6)}
    found = named_weights(model)
    assert found.keys() == {f"attention.{name}.weight" for name in rows}
    for name, part in rows.items():
        assert torch.equal(found[f"attention.{name}.weight"], layer.weight[part])


def test_an_engine_with_nothing_to_share(checkpoint):
    """As vLLM on a CPU with its packed weights."""
    engine, accelerator = SimpleNamespace(shared_base=lambda: None), SimpleNamespace(device=CPU)
    given = MINIMAL | {"model": str(checkpoint), "dtype": "float32"}
    assert shared_base(engine, load_config(given), accelerator) is None
    with pytest.raises(InputError, match="rollout.share_base: the engine has no weights to share"):
        shared_base(engine, load_config(given, ["rollout.share_base=on"]), accelerator)
    engine.shared_base = lambda: pytest.fail("asked")
    assert shared_base(engine, load_config(given, ["rollout.share_base=off"]), accelerator) is None


def test_a_base_that_the_trainer_computes_on_stays_while_vllm_sleeps():
    from stapo_lite.rollout.vllm_engine import VLLMEngine

    engine = object.__new__(VLLMEngine)
    engine._llm, engine._sleep_level, engine._asleep, engine._request = Mock(), 1, False, None
    engine.keep_base()
    engine.sleep()
    step = call.llm_engine.step()
    sleep = [call.sleep(level=0), call.release_kv_cache_memory()]
    assert engine._llm.mock_calls == [step, step, step, *sleep]
    engine._llm.reset_mock()
    engine.wake()
    assert engine._llm.mock_calls == [call.wake_up(tags=["kv_cache", "scheduling"])]


@pytest.mark.slow
def test_vllm_gives_its_cache_back_after_it_has_sampled(checkpoint, monkeypatch):
    """On a CPU all of it is real but for the memory itself. vLLM refuses while its scheduler has
    not forgotten the requests that have ended."""
    engine = start(checkpoint, "nf4")
    core = engine._llm.llm_engine.engine_core.engine_core
    discarded = []
    monkeypatch.setattr(core.model_executor, "discard", discarded.append)
    monkeypatch.setattr(engine, "_sleep_level", 1)  # which a CPU's is not
    engine.keep_base()
    try:
        sampled = []
        for _ in range(2):
            groups = generate(engine, PROMPTS)
            sampled.append([c.token_ids for group in groups for c in group])
            engine.sleep()
            assert core.is_scheduler_paused()
            engine.wake()
            assert not core.is_scheduler_paused()
        assert discarded == [("kv_cache",)] * 2
        assert sampled[0] == sampled[1]
    finally:
        engine.close()


def test_on_a_card_a_copy_was_not_planned(checkpoint, weights):
    del weights[VALUES]
    engine = SimpleNamespace(shared_base=lambda: weights, keep_base=lambda: pytest.fail("kept"))
    accelerator = SimpleNamespace(device=CPU)
    config = load_config(MINIMAL | {"model": str(checkpoint), "dtype": "float32"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assemble, "base_on", lambda *_: base_on(*_[:3], CPU))
        accelerator.device = torch.device("cuda")
        with pytest.raises(InputError, match=f"{VALUES} .*; set it to off, and memory is planned"):
            shared_base(engine, config, accelerator)
        by_hand = load_config(config.model_dump(exclude_unset=True), ["memory=off"])
        assert shared_base(engine, by_hand, accelerator) is None


def test_an_error_of_the_hub_is_a_reason_too(checkpoint, weights, monkeypatch, caplog):
    def offline(*_):
        raise OSError("offline")

    monkeypatch.setattr(assemble, "check_weights", offline)
    engine = SimpleNamespace(shared_base=lambda: weights, keep_base=lambda: pytest.fail("kept"))
    config = load_config(MINIMAL | {"model": str(checkpoint), "dtype": "float32"})
    assert shared_base(engine, config, SimpleNamespace(device=CPU)) is None
    assert "the weights of the engine cannot be used (offline); the trainer loads" in caplog.text


@pytest.fixture
def in_4_bits(write_config, checkpoint, tmp_path):
    """A config of a run in 4 bits, whose checkpoint is in bfloat16: from float32 the two would
    round to 4 bits in different ways."""

    def write(**changes):
        rollout = {"engine": "vllm", "quantization": "bitsandbytes", "max_completion_length": 8}
        rollout |= {"num_generations": 4} | changes.pop("rollout", {})
        return write_config(
            model=str(checkpoint),
            dtype="bfloat16",
            quantization="nf4",
            rollout=rollout,
            train__gradient_checkpointing=True,
            evaluation=held_out_rows(tmp_path),
            **changes,
        )

    return write


def outcome(folder):
    evaluations = read_lines(folder / "evaluations.jsonl")
    return without_times(read_metrics(folder)), evaluations, adapter_bytes(folder / "adapter")


@pytest.mark.slow
def test_a_run_on_one_base_is_that_of_two_copies(in_4_bits, tmp_path, caplog):
    """With evaluations while it trains, stopped and resumed, one run after the other in the
    process."""
    folders = [tmp_path / name for name in ("off", "on", "resumed")]
    for folder in folders[:2]:
        run(in_4_bits(output_dir=str(folder), rollout={"share_base": folder.name}))
    run(in_4_bits(output_dir=str(folders[2]), train__max_steps=2))
    run(in_4_bits(output_dir=str(folders[2])), resume=True)
    off, on, resumed = map(outcome, folders)
    assert on == off
    assert resumed == off
    assert "share_base" not in caplog.text


@pytest.mark.slow
def test_nothing_holds_the_weights_when_the_engine_is_closed(in_4_bits, monkeypatch):
    """On a card no other engine would start in this process."""
    from stapo_lite.rollout.vllm_engine import VLLMEngine

    bases, alive, close = [], [], VLLMEngine.close

    def note(*arguments):
        bases.append(weakref.ref(base := base_on(*arguments)))
        return base

    def closing(engine):
        gc.collect()
        alive.extend(base() is not None for base in bases)
        close(engine)

    monkeypatch.setattr(assemble, "base_on", note)
    monkeypatch.setattr(VLLMEngine, "close", closing)
    run(in_4_bits(train__max_steps=1))
    assert alive == [False]


async def in_two_turns(episode):
    await episode.generate(max_tokens=3)
    episode.add("!?")
    await episode.generate()


@pytest.mark.slow
def test_several_turns_on_one_base(in_4_bits, tmp_path):
    for share_base in ("off", "on"):
        config = load_config(
            in_4_bits(output_dir=str(tmp_path / share_base), rollout={"share_base": share_base})
        )
        Trainer(config=config, max_steps=2, rollout_func=in_two_turns).train()
    assert outcome(tmp_path / "on") == outcome(tmp_path / "off")


@pytest.mark.slow
def test_a_run_on_one_base_that_is_killed_goes_on(in_4_bits, tmp_path):
    run(in_4_bits(output_dir=str(tmp_path / "whole"), log__save_steps=1))
    config, folder = in_4_bits(log__save_steps=1), tmp_path / "run"
    command = [sys.executable, "-m", "stapo_lite", "train", str(config)]
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith("step 2/4"):
                process.kill()
    assert process.returncode == -signal.SIGKILL
    assert len(list_checkpoints(folder)) < 4
    run(config, resume=True)
    assert outcome(folder) == outcome(tmp_path / "whole")
