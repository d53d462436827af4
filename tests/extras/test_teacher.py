"""On-policy distillation: advantages from a teacher, and a student that learns."""

import json
import math
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch
from helpers import SAMPLING, adapted_policy, make_budget, objective
from peft import PeftModel
from transformers import AutoModelForCausalLM

from stapo_lite import InputError, RunError, Trainer
from stapo_lite.config import load_config
from stapo_lite.extras import teacher as teachers
from stapo_lite.extras.teacher import AdapterTeacher, ServerTeacher
from stapo_lite.method.tokens import pack
from stapo_lite.training.folder import read_metrics
from stapo_lite.training.learner import Learner
from stapo_lite.types import Completion, Prompt

TOOL = {"advantage": 0.5, "loss_mask": [True, False, True]}  # its second token is a tool's
COMPLETIONS = [
    Completion(Prompt("", [5, 6, 7], None), [8, 9, 10, 11], [-1.0] * 4, False, 1),
    Completion(Prompt("", [9], None), [3, 4, 5], [-0.5, 0.0, -2.0], False, 1, **TOOL),
]


@pytest.fixture
def teacher_folder(tiny_model, tmp_path):
    """A random adapter, of the rank of `write_config`."""
    adapted_policy(tiny_model, adapter_seed=5, scale=0.1).save_adapter(tmp_path / "teacher")
    return tmp_path / "teacher"


def test_advantages_are_the_teachers_log_ratios(tiny_model, make_policy, teacher_folder):
    policy, batch = make_policy(), pack(COMPLETIONS, "cpu", objective())
    before = {name: value.detach().clone() for name, value in policy.parameters.items()}
    learner = SimpleNamespace(policy=policy, budget=make_budget(64))
    learner.measure = partial(Learner.measure, learner)
    run = SimpleNamespace(policy=policy, learner=learner)
    teacher = AdapterTeacher(0.25, teacher_folder)
    teacher.on_train_begin(run)
    teacher.on_mini_batches(run, [batch])
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    oracle, expected = PeftModel.from_pretrained(base, teacher_folder), []
    for completion in COMPLETIONS:
        ids = torch.tensor([completion.prompt.token_ids + completion.token_ids])
        start = len(completion.prompt.token_ids)
        log_p = (oracle(ids).logits[0] / SAMPLING.temperature).log_softmax(-1)
        for place, token in enumerate(completion.token_ids):
            own = completion.loss_mask is None or completion.loss_mask[place]
            ratio = log_p[start + place - 1, token] - completion.rollout_logprobs[place]
            expected.append(completion.advantage + 0.25 * (ratio.item() if own else 0.0))
    torch.testing.assert_close(batch.advantages, torch.tensor(expected), atol=1e-5, rtol=1e-5)
    assert all(torch.equal(before[name], value) for name, value in policy.parameters.items())


@pytest.fixture
def distilling(write_config, teacher_folder):
    """A config whose teacher is the random adapter."""
    keys = {"algorithm": "distill", "teacher_adapter": str(teacher_folder), "functions": []}
    keys |= {"lora_alpha": 16, "batch_size": 4, "mini_batch_size": 4, "num_generations": 8}
    keys |= {"max_steps": 40, "learning_rate": 6e-3, "max_completion_length": 16}
    return load_config(write_config(), keys | {"max_tokens_per_microbatch": 1024})


def test_a_student_becomes_its_teacher(distilling, caplog):
    metrics = Trainer(config=distilling).train()
    kl = [m["teacher_kl"] for m in metrics]
    assert fmean(kl[-5:]) < 0.3 * fmean(kl[:2])
    assert {m.get("reward") for m in metrics} == {None}
    assert all(m["updates"] == 1 for m in metrics)
    assert "no_signal" not in caplog.text


def test_a_teacher_beside_rewards(distilling, tmp_path):
    both = distilling.model_copy(update={"output_dir": str(tmp_path / "both")})
    weighted = {"functions": ["parity:even"], "teacher_weight": 3.0}
    first, *_ = Trainer(config=both, max_steps=1, **weighted).train()
    alone, *_ = Trainer(config=distilling, max_steps=1).train()
    assert first["reward"] is not None
    assert first["teacher_kl"] == alone["teacher_kl"]  # of the same samples
    logged, *_ = read_metrics(tmp_path / "both")
    assert logged["teacher_kl"] == first["teacher_kl"] > 0
    assert first["loss"] != alone["loss"]
    assert math.isfinite(first["grad_norm"])


def test_teachers_that_cannot_teach(distilling, write_config, monkeypatch):
    with pytest.raises(InputError, match="rollout.temperature=0.7: a server scores"):
        load_config(write_config(), {"teacher_server": "http://a", "temperature": 0.7})
    with pytest.raises(InputError, match="objective.teacher_adapter=.* has another lora.r"):
        Trainer(config=distilling, r=4).train()
    monkeypatch.setattr(teachers, "MAX_RETRIES", 0)
    with pytest.raises(RunError, match="teacher_server=http://127.0.0.1:9: does not answer"):
        ServerTeacher(1.0, "http://127.0.0.1:9", "any")


def test_a_probability_of_0_costs_a_bounded_advantage():
    """vLLM sends -9999 for -inf."""
    teacher = object.__new__(ServerTeacher)
    scores = [{"8": {"logprob": -0.5}}, {"9": {"logprob": -9999.0}}, {"10": {"logprob": -math.inf}}]
    scores.append({"11": {"logprob": -1.0}})
    answer = SimpleNamespace(choices=[SimpleNamespace(prompt_logprobs=[None] * 3 + scores)])
    completions = SimpleNamespace(create=lambda **_: answer)
    teacher._client, teacher._model = SimpleNamespace(completions=completions), "m"
    found = teacher.logprobs(SimpleNamespace(), pack(COMPLETIONS[:1], "cpu", objective()))
    assert found.tolist() == [-0.5, -30.0, -30.0, -1.0]


class Teaching(BaseHTTPRequestHandler):
    """A server that is busy at first, and sends what is asked of its address `localhost` on."""

    def do_GET(self):
        self.server.seen.append((self.headers["Host"], self.headers["Authorization"]))
        busy, elsewhere = len(self.server.seen) == 1, "localhost" in self.headers["Host"]
        self.send_response(429 if busy else 302 if elsewhere else 200)
        self.send_header("retry-after-ms", "1")
        if elsewhere:
            self.send_header("Location", f"http://127.0.0.1:{self.server.server_port}{self.path}")
        body = json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]}).encode()
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def test_a_busy_teacher_is_asked_again_and_the_key_stays_with_its_host():
    with ThreadingHTTPServer(("127.0.0.1", 0), Teaching) as server:
        server.seen = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        ServerTeacher(1.0, f"http://localhost:{server.server_port}", "secret")
        server.shutdown()
    first, second, third = server.seen
    assert first == second
    assert first[1] == "Bearer secret"
    assert third[0].startswith("127.0.0.1")
    assert third[1] is None
