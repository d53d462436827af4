"""The check of an engine before the first step, with engines that are wrong in one way each."""

import dataclasses
import json
from contextlib import contextmanager

import pytest
import torch
from helpers import PROMPTS, SAMPLING, adapted_policy, make_learner, objective, run
from transformers import AutoTokenizer

from stapo_lite.errors import RunError
from stapo_lite.extras import self_check
from stapo_lite.extras.self_check import check_engine
from stapo_lite.rollout.transformers_engine import TransformersEngine
from stapo_lite.types import Completion, Prompt


class Faulty(TransformersEngine):
    """Samples as it should but for what `fault` names."""

    def __init__(self, fault=None):
        super().__init__(SAMPLING, max_num_seqs=8)
        self.fault, self.calls, self.rested = fault, [], False

    def publish(self, policy, version):
        super().publish(policy, version)
        self.policy = policy
        self.calls.append("publish")

    def sleep(self):
        self.calls.append("sleep")

    def wake(self):
        self.rested = "publish" in self.calls
        self.calls.append("wake")

    @contextmanager
    def adapter_times(self, factor):
        values = {
            name: p.data * (factor if "lora_B" in name else 1)
            for name, p in self.policy.parameters.items()
        }
        with self.policy.holding(values):
            yield

    def stream(self, prompts, seeds, decodings):
        self.calls.append("stream")
        factor = {"drops the adapter": 0.0, "applies half of it": 0.5, "applies it twice": 2.0}.get(
            self.fault, 1.0
        )
        if self.fault == "loses it in sleep" and self.rested:
            factor = 0.0
        scale = {"is colder": 0.75, "is hotter": 1.3}.get(self.fault, 1.0)
        decodings = [dataclasses.replace(d, temperature=d.temperature * scale) for d in decodings]
        with self.adapter_times(factor):
            yield from list(super().stream(prompts, seeds, decodings))


@pytest.fixture
def learner(make_policy):
    learner = make_learner(make_policy(), objective(), max_tokens=200)
    rollout = learner.config.rollout.model_copy(update={"temperature": SAMPLING.temperature})
    learner.config = learner.config.model_copy(update={"rollout": rollout})
    return learner


def test_an_engine_that_computes_the_same_passes_and_the_adapter_is_as_before(learner):
    before = {name: parameter.clone() for name, parameter in learner.policy.parameters.items()}
    engine = Faulty()
    assert check_engine(engine, learner, PROMPTS) < 1e-3
    assert engine.calls == [
        "wake",
        "publish",
        "stream",
        "sleep",
        "wake",
        "stream",
        "sleep",
    ]
    for name, parameter in learner.policy.parameters.items():
        assert torch.equal(parameter, before[name])


WRONG = "it computes another model, another adapter or at another temperature"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            "drops the adapter",
            "with a new adapter, .* from the base's: it ignores the adapter. Use another version",
        ),
        ("loses it in sleep", "after sleep and wake, .* it ignores the adapter"),
        ("applies half of it", f"with a new adapter, .*: {WRONG}"),
        ("applies it twice", f"with a new adapter, .*: {WRONG}"),
        ("is colder", f"with a new adapter, .*: {WRONG}"),
        ("is hotter", f"with a new adapter, .*: {WRONG}"),
    ],
)
def test_engines_that_compute_something_else(learner, fault, message):
    with pytest.raises(RunError, match=f"rollout.self_check: {message}"):
        check_engine(Faulty(fault), learner, PROMPTS)


def test_faults_are_found_with_a_real_model(smollm2):
    policy = adapted_policy(smollm2, scale=0.0, rollout__temperature=1.0)
    learner = make_learner(policy, objective(), max_tokens=2000)  # whose temperature is 1
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    texts = ("Write one sentence about a garden.", "What is 3 + 4?", "Name a river in France.")
    prompts = [Prompt(text, tokenizer(text).input_ids, None) for text in texts]
    assert check_engine(Faulty(), learner, prompts) < 1e-3
    for fault in ("applies half of it", "is colder"):
        with pytest.raises(RunError, match=f"rollout.self_check: with a new adapter, .*: {WRONG}"):
            check_engine(Faulty(fault), learner, prompts)


def test_an_engine_with_other_weights_must_only_be_nearer_to_the_adapter(learner):
    rollout = learner.config.rollout.model_copy(update={"model": "quantised"})
    learner.config = learner.config.model_copy(update={"rollout": rollout})
    assert check_engine(Faulty("is colder"), learner, PROMPTS) > 0.05
    with pytest.raises(RunError, match="it ignores the adapter"):
        check_engine(Faulty("drops the adapter"), learner, PROMPTS)


def test_a_run_ends_in_one_line_before_its_first_step(write_config, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "stapo_lite.rollout.transformers_engine.TransformersEngine",
        lambda *_: Faulty("drops the adapter"),
    )
    with pytest.raises(
        RunError, match=r"it ignores the adapter\. Use another version of vLLM, or rollout"
    ):
        run(write_config(rollout__temperature=SAMPLING.temperature))
    assert not (tmp_path / "run" / "environment.json").exists()
    assert (
        len(run(write_config(rollout__self_check=False, rollout__temperature=SAMPLING.temperature)))
        == 4
    )


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_its_figure_is_kept(write_config, tmp_path, engine):
    if engine == "vllm":
        pytest.importorskip("vllm", reason="vLLM is not installed")
    run(
        write_config(
            train__max_steps=1,
            rollout__engine=engine,
            rollout__vllm={"kv_cache_memory_bytes": 1 << 28},
        )
    )
    environment = json.loads((tmp_path / "run" / "environment.json").read_text(encoding="utf-8"))
    assert float(environment["self_check"].removesuffix(" nats between engine and trainer")) < 1e-3


@pytest.mark.parametrize(
    ("sampled", "message"),
    [
        ([-0.006, -0.014], None),  # rounding: a third of what the adapter does
        ([-0.025, -0.025], "it ignores the adapter"),
        ([-0.002, -0.018], "it computes another model"),  # more than half of it
    ],
)
def test_rounding_is_no_fault_if_tokens_are_nearly_certain(learner, monkeypatch, sampled, message):
    def logprobs(learner, completions, adapted=True):
        return torch.tensor([-0.010, -0.010] if adapted else [-0.025, -0.025])

    monkeypatch.setattr(self_check, "logprobs", logprobs)
    completions = [Completion(PROMPTS[0], [1, 2], sampled, False, 0)]
    if message is None:
        assert self_check.measure_gap(learner, completions, "now") == pytest.approx(0.004)
    else:
        with pytest.raises(RunError, match=message):
            self_check.measure_gap(learner, completions, "now")
