"""Faults that a run outlives, each injected for real: docs/faults.md."""

import importlib
import itertools
import math
import os
import re
import signal
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import interrupted
import pytest
import torch
from accelerate.tracking import TensorBoardTracker
from helpers import (
    ADVANTAGES,
    LONGEST,
    assert_same,
    checkpoints,
    command,
    fake_completions,
    in_two_processes,
    make_learner,
    measured,
    objective,
    run,
    run_update,
    same_metrics,
    sampled_by_an_engine,
    steps,
    without_times,
)
from safetensors.torch import load_file

from stapo_lite import assemble
from stapo_lite.errors import RunError
from stapo_lite.training import checkpoint
from stapo_lite.training.budget import TokenBudget
from stapo_lite.training.checkpoint import find_damage, list_checkpoints, read_state
from stapo_lite.training.folder import read_metrics
from stapo_lite.training.log import step_line
from stapo_lite.training.run import Run
from stapo_lite.training.update import rehearse
from stapo_lite.types import Completion, Prompt

loop = importlib.import_module("stapo_lite.training.loop")


@contextmanager
def memory_for(policy, tokens, error=None, phase="forward", spare=0):
    """Let no micro-batch of more tokens pass the decoder, after the first `spare` such ones."""
    decoder, passes = policy.model.get_base_model().get_decoder(), itertools.count()

    def refuse():
        if error is not None:
            raise error
        torch.empty(2**60, dtype=torch.uint8)  # the allocator's own error

    def forward(module, arguments, options, output):
        if (
            not options["use_cache"]
            and options["input_ids"].numel() > tokens
            and next(passes) >= spare
        ):
            if phase == "forward":
                refuse()
            elif output.last_hidden_state.requires_grad:
                output.last_hidden_state.register_hook(lambda gradient: refuse())

    hook = decoder.register_forward_hook(forward, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def test_memory_that_runs_out_in_the_masks_passes(make_policy):
    """The very masks of a smaller budget."""
    found = []
    for budget, tokens in ((TokenBudget(200), 40), (TokenBudget(100), 10**9)):
        policy = make_policy()
        policy.model.double()
        completions = sampled_by_an_engine(
            policy, fake_completions(3, [-1.0, 1.0, -0.4, 1.0] * 4 + [0.0] * 6)
        )
        with memory_for(policy, tokens, spare=1):
            found.append(
                run_update(
                    policy, completions, objective(s2t={"preset": "paper-v1"}), max_tokens=budget
                )
            )
    assert_same(*found)


@pytest.mark.parametrize(
    ("error", "phase", "tokens", "spare"),
    [
        (None, "forward", 60, 0),
        (None, "backward", 60, 1),
        (None, "backward", 120, 1),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
            "forward",
            120,
            1,
        ),
        (RuntimeError("CUDA error: out of memory\nCompile with"), "forward", 60, 1),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when"), "backward", 60, 0),
    ],
)
def test_an_update_that_does_not_fit_is_made_in_halves(
    make_policy, tmp_path, caplog, error, phase, tokens, spare
):
    """The very update of a smaller budget: gradient, metrics and what it tells of each token."""
    policies, budget = [make_policy(), make_policy()], TokenBudget(tokens)

    def updated(i, max_tokens):
        policies[
            i
        ].model.double()  # the mask's statistics may come from micro-batches of other shapes
        completions = fake_completions(3, ADVANTAGES)
        return run_update(policies[i], completions, objective(), max_tokens=max_tokens)

    with memory_for(policies[0], 20, error, phase, spare):
        halved = updated(0, budget)
    assert budget.tokens == 30
    assert "memory ran out: from now on micro-batches have at most 30 tokens" in caplog.text
    expected = updated(1, 30)
    assert_same(halved, expected)
    assert torch.equal(halved[2].tokens.spurious, expected[2].tokens.spurious)
    torch.testing.assert_close(halved[2].tokens.gradient_norm, expected[2].tokens.gradient_norm)


def test_passes_without_gradient_are_halved_too(make_policy):
    policy, completions, budget = make_policy(), fake_completions(3, ADVANTAGES), TokenBudget(200)
    with (
        memory_for(policy, 0),
        pytest.raises(RunError, match="memory ran out on a single .*max_comp.*stapo plan"),
    ):
        run_update(policy, completions, objective(), max_tokens=60)
    other = RuntimeError("CUDA error: illegal memory access")
    with memory_for(policy, 0, other), pytest.raises(RuntimeError, match=str(other)):
        run_update(policy, completions, objective(), max_tokens=60)
    with memory_for(policy, 25):
        found = measured(policy, completions, budget)
    assert budget.halvings == 3
    for completion, statistics in measured(policy, completions, 25).items():
        assert torch.equal(found[completion].logprobs, statistics.logprobs)


def test_a_single_sequence_that_does_not_fit_is_checkpointed_then_offloaded(make_policy, caplog):
    """The very gradient of a policy that did so from the start."""
    both = {"train__gradient_checkpointing": True, "train__offload_activations": True}
    policy, saving, tried = make_policy(), make_policy(**both), []
    decode = policy._decode

    def decode_if_it_fits(input_ids):
        tried.append(policy._checkpointing)
        if not policy._offload_activations:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return decode(input_ids)

    policy._decode = decode_if_it_fits
    gradients = []
    for each in (policy, saving):
        budget = TokenBudget(1, save_memory=each.save_memory)
        completions = fake_completions(3, ADVANTAGES)
        gradients.append(run_update(each, completions, objective(), max_tokens=budget)[0])
        assert each.save_memory() is None
    assert torch.equal(*gradients)
    assert tried[:3] == [False, True, True]
    assert [record.message for record in caplog.records] == [
        f"memory ran out: from now on {change}"
        for change in (
            "all layers are checkpointed (train.gradient_checkpointing=true)",
            "activations wait in host memory (train.offload_activations=true)",
        )
    ]


def test_one_long_sequence_does_not_make_the_others_single():
    """Halving would not make it smaller, so memory is saved in another way first."""
    completions = [
        Completion(Prompt("", [0], None), [0] * (length - 1), [], True, 0)
        for length in [800] + [10] * 100
    ]
    batch = SimpleNamespace(select=lambda rows: [completions[row] for row in rows])
    changes = iter(["checkpointed", "offloaded"])
    saved = []

    def save_memory():
        saved.append(next(changes, None))
        return saved[-1]

    def work(micro_batches):
        if any(0 in rows for rows in micro_batches) and saved != ["checkpointed", "offloaded"]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return micro_batches

    budget = TokenBudget(800, save_memory=save_memory)
    assert len(budget.fit(batch, range(101), work)) == 3
    assert budget.halvings == 0
    assert saved == ["checkpointed", "offloaded"]


def test_the_rehearsal_finds_the_budget_before_the_first_step(make_policy):
    """One micro-batch as full as the budget allows."""
    policy = make_policy()
    before = {name: parameter.clone() for name, parameter in policy.parameters.items()}
    budget = TokenBudget(4 * (1 + LONGEST) + 3)
    learner = make_learner(policy, objective(), max_tokens=budget)
    shapes = []
    hook = policy.model.get_decoder().register_forward_hook(
        lambda module, arguments, options, output: shapes.append(options["input_ids"].shape),
        with_kwargs=True,
    )
    with memory_for(policy, 2 * (1 + LONGEST)):
        rehearse(learner)  # 43 tokens are five rows of 8; half of them hold two
    hook.remove()
    assert sorted(shapes) == [(1, 8), (2, 8), (2, 8), (5, 8)]
    assert budget.halvings == 1
    shapes.clear()
    learner.budget = TokenBudget(4)  # less than a sequence, which gets a pass of its own
    hook = policy.model.get_decoder().register_forward_hook(
        lambda module, arguments, options, output: shapes.append(options["input_ids"].shape),
        with_kwargs=True,
    )
    rehearse(learner)
    hook.remove()
    assert shapes == [(1, 1 + LONGEST)]
    for name, parameter in policy.parameters.items():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None


def test_a_halved_budget_is_remembered_and_resumed(write_config, tmp_path, monkeypatch):
    make_policy, policies, folder = assemble.make_policy, [], tmp_path / "run"

    def note(*arguments):
        policies.append(make_policy(*arguments))
        return policies[-1]

    monkeypatch.setattr(assemble, "make_policy", note)
    training = steps(write_config(log__save_steps=1))
    next(training)
    with memory_for(policies[0], 128):
        assert next(training)["microbatch_tokens"] == 128
    training.close()
    assert read_state(folder / "checkpoint-2")["progress"]["halvings"] == 1
    assert [m["microbatch_tokens"] for m in run(write_config(), resume=True)] == [128, 128]
    assert [m["microbatch_tokens"] for m in read_metrics(folder)] == [256, 128, 128, 128]


HUGE = (
    "def even(prompts, **_): return [9e29 if i % 2 and {} else float(i) for i, p in "
    "enumerate(prompts)]"
)
UNSCALED = {
    "objective": {"scale_rewards": "none", "s2t": {"tau_p": 0.01}},
    "rollout__max_completion_length": 16,
}


def test_an_update_that_is_not_finite_is_skipped(write_config, user_reward, tmp_path, caplog):
    """An advantage beyond fp32 in one of the two mini-batches: the step is what the other one makes
    of it."""
    user_reward(HUGE.format("'two' in p"))
    metrics = run(
        write_config(**UNSCALED, train__max_steps=6, train__max_tokens_per_microbatch=512)
    )
    assert "no update: not finite" in step_line(metrics[0] | {"updates": 0}, max_steps=6)
    assert [m["skipped_updates"] for m in metrics] == [
        1
    ] * 6  # one more than end a run, were they in a row
    assert [m["updates"] for m in metrics] == [1] * 6
    assert all(abs(m["loss"]) < 1000 for m in metrics)  # nothing of the skipped update
    assert caplog.text.count("update skipped: loss or gradient is not finite (norm inf)") == 6
    assert all(math.isfinite(value) for m in metrics for value in m.values() if value is not None)
    saved = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    assert all(value.isfinite().all() for value in saved.values())


@pytest.mark.parametrize(
    ("reward", "message", "skipped"),
    [
        (
            HUGE.format("True"),
            "5 updates in a row had a loss or gradient that is not finite: lower train.learning_",
            4,
        ),
        (
            "def even(**columns): raise ConnectionError('judge is down')",
            "reward.functions=parity:even: raised ConnectionError: judge is down (parity.py, line "
            "1); it failed on 3 "
            "batches in",
            0,
        ),
    ],
    ids=["updates", "rewards"],
)
def test_too_many_faults_in_a_row_end_the_run_with_a_checkpoint(
    write_config, user_reward, tmp_path, capsys, reward, message, skipped
):
    user_reward(reward)
    config = write_config(**UNSCALED, train__max_tokens_per_microbatch=512, log__save_steps=0)
    assert command("train", config) == 1
    (error,) = re.findall("^error: .*$", capsys.readouterr().err, re.MULTILINE)
    assert message in error
    assert [(m["updates"], m["reward"] is None) for m in read_metrics(tmp_path / "run")] == [
        (0, not skipped)
    ] * 2
    assert checkpoints(tmp_path / "run") == ["checkpoint-2"]
    progress = read_state(tmp_path / "run" / "checkpoint-2")["progress"]
    assert (progress["step"], progress["prompts_drawn"], progress["skipped_in_a_row"]) == (
        2,
        8,
        skipped,
    )


def test_no_signal_disturbs_the_last_checkpoint(write_config, tmp_path, monkeypatch):
    """`accelerate launch` that is interrupted sends a SIGTERM after the Ctrl-C."""
    save, handler = checkpoint.save_checkpoint, signal.getsignal(signal.SIGTERM)

    def disturbed(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        save(*arguments)

    monkeypatch.setattr(checkpoint, "save_checkpoint", disturbed)
    training = steps(write_config(log__save_steps=0))
    assert [next(training)["step"], next(training)["step"]] == [1, 2]
    with pytest.raises(KeyboardInterrupt):
        training.throw(KeyboardInterrupt())
    assert checkpoints(tmp_path / "run") == ["checkpoint-2"]
    assert signal.getsignal(signal.SIGTERM) == handler


def outcome(folder):
    files = ("tokens.jsonl", "quadrants.jsonl", "adapter/adapter_model.safetensors")
    return [(folder / name).read_bytes() for name in files], without_times(read_metrics(folder))


def test_a_full_disk_ends_a_run_which_can_go_on(children, write_config, tmp_path):
    log = {"audit_tokens": 64, "save_steps": 1, "save_total_limit": 9}
    config = str(write_config(train__max_steps=6, log=log))
    assert children(interrupted.command, [config, f"output_dir={tmp_path / 'whole'}"]) == 0
    cut = tmp_path / "run"
    assert children(interrupted.train_on_a_full_disk, [config], {3}) == 1
    assert checkpoints(cut) == ["checkpoint-1", "checkpoint-2"]
    assert children(interrupted.command, [config, "--resume"]) == 0
    assert outcome(cut) == outcome(tmp_path / "whole")
    assert checkpoints(cut) == [f"checkpoint-{step}" for step in range(1, 7)]
    assert not [path for path in list_checkpoints(cut) if find_damage(path)]
    assert not list(cut.glob(".checkpoint*"))


@pytest.mark.parametrize("moment", ["start", "log"])
def test_trackers_that_fail_are_left_out(write_config, tmp_path, monkeypatch, caplog, moment):
    if moment == "start":
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "logs").write_text(
            "", encoding="utf-8"
        )  # where TensorBoard wants a folder
    else:
        monkeypatch.setattr(
            TensorBoardTracker, moment, lambda *_, **__: (_ for _ in ()).throw(OSError("away"))
        )
    assert len(run(write_config(log={"report_to": ["tensorboard"]}))) == 4
    assert caplog.text.count("log.report_to: training goes on without trackers (") == 1


def test_stop_on_ends_a_run_with_adapter_and_checkpoint(
    write_config, user_reward, tmp_path, capsys, caplog
):
    user_reward("def even(completions, **columns): return [1.0 for c in completions]")
    config = write_config(train__max_steps=30, log__save_steps=0, stop_on=["no_signal"])
    assert command("train", config) == 0
    output = capsys.readouterr().out
    assert "no update: no token to train" in output
    assert "stop_on=no_signal: the run ends after step 20" in output
    assert (
        caplog.text.count("step 20, no_signal: more than 95 % of the groups have equal rewards")
        == 1
    )
    assert checkpoints(tmp_path / "run") == ["checkpoint-20"]
    saved = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    assert not any(
        value.any() for name, value in saved.items() if "lora_B" in name
    )  # nothing has moved
    last = read_metrics(tmp_path / "run")[-1]
    assert (last["updates"], last["loss"], last["zero_variance_groups"]) == (0, None, 1)
    assert command("train", write_config(train__max_steps=22, log__save_steps=0), "--resume") == 0
    assert caplog.text.count("no_signal") == 1  # it is no news


def test_stop_on_ends_a_run_that_was_killed_before_it_had_written_its_adapter(
    write_config, user_reward, tmp_path, monkeypatch
):
    user_reward("def even(completions, **columns): return [1.0 for c in completions]")
    config = write_config(train__max_steps=30, log__save_steps=0, stop_on=["no_signal"])
    with monkeypatch.context() as patch:
        patch.setattr(Run, "finish", lambda self: sys.exit(143))
        assert command("train", config) == 143
    assert not (tmp_path / "run" / "adapter").exists()
    assert command("train", config, "--resume") == 0
    assert len(read_metrics(tmp_path / "run")) == 20
    assert (tmp_path / "run" / "adapter").exists()


DEADLY = """
import os
calls = 0
def even(completion_ids, **columns):
    global calls
    calls += 1
    if os.environ.get("RANK") == "1" and calls == 3:
        os.kill(os.getppid(), 9)  # the trainer
    return [float(sum(i % 2 == 0 for i in ids)) for ids in completion_ids]
"""


@pytest.mark.slow
def test_a_lost_trainer_ends_the_job_and_the_other_one_s_work_is_kept(
    write_config, user_reward, tmp_path
):
    whole = run(
        write_config(
            output_dir=str(tmp_path / "whole"), log__save_steps=0, train__learning_rate=1e-4
        )
    )
    user_reward(DEADLY)
    config = write_config(log__save_steps=0, train__learning_rate=1e-4)
    in_two_processes(config, tmp_path, status=128 + signal.SIGKILL)
    assert checkpoints(tmp_path / "run") == ["checkpoint-2"]
    same_metrics(run(config, resume=True), whole[2:])  # with one process
