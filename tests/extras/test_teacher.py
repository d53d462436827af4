"""On-policy distillation: advantages from a teacher, and a student that learns."""

import math
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch
from helpers import SAMPLING, adapted_policy
from peft import PeftModel
from transformers import AutoModelForCausalLM

from stapo_lite import InputError, RunError, Trainer
from stapo_lite.algorithm.microbatches import pack
from stapo_lite.config import load_config
from stapo_lite.extras import teacher as teachers
from stapo_lite.extras.teacher import AdapterTeacher, ServerTeacher
from stapo_lite.training.budget import TokenBudget
from stapo_lite.types import Completion, Prompt


def completions():
    """Of two prompts; the second holds a tool's tokens."""
    first = Completion(Prompt("", [5, 6, 7], None), [8, 9, 10, 11], [-1.0] * 4, False, 1)
    rest = {"advantage": 0.5, "loss_mask": [True, False, True]}
    return [
        first,
        Completion(Prompt("", [9], None), [3, 4, 5], [-0.5, 0.0, -2.0], False, 1, **rest),
    ]


@pytest.fixture
def teacher_folder(tiny_model, tmp_path):
    """A random adapter, of the rank of `write_config`."""
    adapted_policy(tiny_model, adapter_seed=5, scale=0.1).save_adapter(tmp_path / "teacher")
    return tmp_path / "teacher"


def test_advantages_are_the_teachers_log_ratios(tiny_model, make_policy, teacher_folder):
    policy, batch = make_policy(), pack(completions(), "cpu")
    before = {name: value.detach().clone() for name, value in policy.parameters.items()}
    learner = SimpleNamespace(budget=TokenBudget(64, 0, lambda: None))
    run = SimpleNamespace(policy=policy, learner=learner)
    teacher = AdapterTeacher(0.25, teacher_folder)
    teacher.on_train_begin(run)
    teacher.on_mini_batches(run, [batch])
    oracle = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny_model), teacher_folder
    )
    expected = []
    for completion in completions():
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
    return load_config(
        write_config(
            train__max_steps=40, train__learning_rate=6e-3, rollout__max_completion_length=16
        ),
        {
            "algorithm": "distill",
            "teacher_adapter": str(teacher_folder),
            "lora_alpha": 16,
            "functions": [],
            "batch_size": 4,
            "mini_batch_size": 4,
            "num_generations": 8,
            "max_tokens_per_microbatch": 1024,
        },
    )


def test_a_student_becomes_its_teacher(distilling, caplog):
    metrics = Trainer(config=distilling).train()
    kl = [m["teacher_kl"] for m in metrics]
    assert fmean(kl[-5:]) < 0.3 * fmean(kl[:2])
    assert {m["reward"] for m in metrics} == {None}
    assert all(m["updates"] == 1 for m in metrics)
    assert "no_signal" not in caplog.text
    assert "no reward function" not in caplog.text


def test_a_teacher_beside_rewards(distilling, tmp_path):
    both = distilling.model_copy(update={"output_dir": str(tmp_path / "both")})
    first, *_ = Trainer(config=both, functions=["parity:even"], max_steps=1).train()
    alone, *_ = Trainer(config=distilling, max_steps=1).train()
    assert first["reward"] is not None
    assert first["teacher_kl"] == alone["teacher_kl"]  # of the same samples
    assert first["loss"] != alone["loss"]
    assert math.isfinite(first["grad_norm"])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"algorithm": "distill"}, "algorithm=distill needs objective.teacher_adapter or"),
        ({"functions": []}, r"reward.functions=\[\]: give one, or a teacher"),
        ({"teacher_adapter": "a", "teacher_server": "b"}, "choose one teacher"),
        (
            {"algorithm": "dapo", "functions": [], "teacher_server": "b"},
            r"reward.functions=\[\]: rollout.dynamic_sampling, reward.overlong_penalty and",
        ),
        ({"teacher_server": "b", "temperature": 0.7}, "rollout.temperature=0.7: a server scores"),
    ],
)
def test_what_does_not_go_together(write_config, keys, message):
    with pytest.raises(InputError, match=message):
        load_config(write_config(), keys)


def test_a_teacher_of_another_kind_is_refused(distilling):
    with pytest.raises(
        InputError, match="objective.teacher_adapter=.* is another kind of adapter: "
    ):
        Trainer(config=distilling, r=4).train()


def test_an_answer_that_breaks_off_is_asked_for_again(monkeypatch):
    asked = []

    class BreaksOff(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", "99")
            self.end_headers()
            self.wfile.write(b"{")

        def log_message(self, *_):
            pass

    monkeypatch.setattr(teachers, "PAUSE", 0.01)
    with HTTPServer(("127.0.0.1", 0), BreaksOff) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(RunError, match="does not score .IncompleteRead"):
            ServerTeacher(1.0, f"http://127.0.0.1:{server.server_port}", "")
        server.shutdown()
    assert asked == ["/v1/models"] * teachers.ATTEMPTS
