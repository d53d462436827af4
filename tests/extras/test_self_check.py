"""The check of an engine before the first step, with engines that are wrong in one way each."""

import dataclasses
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from helpers import PROMPTS, SAMPLING, adapted_policy, make_learner, objective, run
from transformers import AutoTokenizer

from stapo_lite.errors import RunError
from stapo_lite.extras import self_check
from stapo_lite.extras.self_check import check_engine
from stapo_lite.extras.transformers_engine import TransformersEngine
from stapo_lite.types import Completion, Prompt

WRONG = "it computes another model, another adapter or at another temperature"
IGNORES = "it ignores the adapter"
FACTORS = {"drops the adapter": 0.0, "applies half of it": 0.5, "applies it twice": 2.0}
TEMPERATURES = {"is colder": 0.75, "is hotter": 1.3}


class Faulty(TransformersEngine):
    """Samples as it should but for what `fault` names."""

    def __init__(self, fault=None):
        super().__init__(SAMPLING, max_num_seqs=8)
        self.fault, self.calls = fault, []
        self.sleep = partial(self.calls.append, "sleep")
        self.wake = partial(self.calls.append, "wake")

    def publish(self, policy, version):
        super().publish(policy, version)
        self.policy = policy
        self.calls.append("publish")

    def add(self, index, prompt, seed, decoding):
        temperature = decoding.temperature * TEMPERATURES.get(self.fault, 1.0)
        super().add(index, prompt, seed, dataclasses.replace(decoding, temperature=temperature))

    def step(self):
        slept = self.calls[-2:] == ["sleep", "wake"]
        self.calls.append("stream")
        factor = FACTORS.get(self.fault, 1 - (slept and self.fault == "loses it in sleep"))
        parameters = self.policy.parameters.items()
        with self.policy.holding({n: p * factor if "lora_B" in n else p for n, p in parameters}):
            return super().step()


@pytest.fixture
def learner(make_policy):
    return make_learner(make_policy(), objective(), max_tokens=200)


def check(engine, learner, prompts=PROMPTS, temperature=SAMPLING.temperature, same_weights=True):
    return check_engine(engine, learner, prompts, temperature, same_weights)


def test_an_engine_that_computes_the_same_passes_and_the_adapter_is_as_before(learner):
    before = {name: parameter.clone() for name, parameter in learner.policy.parameters.items()}
    engine = Faulty()
    assert check(engine, learner) < 1e-3
    assert engine.calls == ["wake", "publish", "stream", "sleep", "wake", "stream", "sleep"]
    for name, parameter in learner.policy.parameters.items():
        assert torch.equal(parameter, before[name])


@pytest.mark.parametrize("fault", [*FACTORS, *TEMPERATURES, "loses it in sleep"])
def test_engines_that_compute_something_else(learner, fault):
    moment = "after sleep and wake" if "sleep" in fault else "with a new adapter"
    found = IGNORES if fault in ("drops the adapter", "loses it in sleep") else WRONG
    message = f"rollout.self_check: {moment}, .* from the base's: {found}"
    with pytest.raises(RunError, match=message):
        check(Faulty(fault), learner)


def test_faults_are_found_with_a_real_model(smollm2):
    policy = adapted_policy(smollm2, scale=0.0, rollout__temperature=1.0)
    learner = make_learner(policy, objective(), max_tokens=2000)  # whose temperature is 1
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    texts = ("Write one sentence about a garden.", "What is 3 + 4?", "Name a river in France.")
    prompts = [Prompt(text, tokenizer(text).input_ids, None) for text in texts]
    assert check(Faulty(), learner, prompts, 1.0) < 1e-3
    for fault in ("applies half of it", "is colder"):
        with pytest.raises(RunError, match=f"rollout.self_check: with a new adapter, .*: {WRONG}"):
            check(Faulty(fault), learner, prompts, 1.0)


def test_an_engine_with_other_weights_must_only_be_nearer_to_the_adapter(learner):
    assert check(Faulty("is colder"), learner, same_weights=False) > 0.05
    with pytest.raises(RunError, match=IGNORES):
        check(Faulty("drops the adapter"), learner, same_weights=False)


def test_a_run_ends_before_its_first_step(write_config, tmp_path, monkeypatch):
    engine = Faulty("drops the adapter")
    monkeypatch.setattr("stapo_lite.assemble.TransformersEngine", lambda *_: engine)
    keys = {"rollout__temperature": SAMPLING.temperature, "train__max_steps": 1}
    with pytest.raises(RunError, match=f"{IGNORES}\\. Use another version of vLLM .*, or rollout"):
        run(write_config(**keys))
    assert not (tmp_path / "run" / "environment.json").exists()
    assert len(run(write_config(**keys, rollout__self_check=False))) == 1


@pytest.mark.parametrize(
    ("sampled", "message"),
    [
        ([-0.006, -0.014], None),  # rounding: a third of what the adapter does
        ([-0.025, -0.025], IGNORES),
        ([-0.002, -0.018], "it computes another model"),  # more than half of it
    ],
)
def test_rounding_is_no_fault_if_tokens_are_nearly_certain(learner, monkeypatch, sampled, message):
    def logprobs(learner, completions, adapted=True):
        return torch.tensor([-0.010, -0.010] if adapted else [-0.025, -0.025])

    monkeypatch.setattr(self_check, "logprobs", logprobs)
    completions = [Completion(PROMPTS[0], [1, 2], sampled, False, 0)]
    with pytest.raises(RunError, match=message) if message else nullcontext():
        assert self_check.measure_gap(learner, completions, "now", True) == pytest.approx(0.004)


def test_the_larger_of_the_two_gaps_counts(learner, monkeypatch):
    gaps = iter([0.1, 0.3])
    monkeypatch.setattr(self_check, "measure_gap", lambda *_: next(gaps))
    assert check(Faulty(), learner) == 0.3
