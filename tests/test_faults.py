"""Faults that a run outlives, each injected for real: docs/faults.md."""

import importlib
import json
import math
import os
import re
import signal
from contextlib import contextmanager

import interrupted
import pytest
import torch
from accelerate import Accelerator
from conftest import command, fake_completions, in_two_processes, run, same_metrics, without_times
from safetensors.torch import load_file
from test_token_log import Letters
from test_update import ADVANTAGES, TAU_P, measured, objective, run_update

from stapo_lite import checkpoint, opening
from stapo_lite.batching import TokenBudget
from stapo_lite.checkpoint import find_damage, list_checkpoints, read_state
from stapo_lite.config import RunError, load_config
from stapo_lite.export import export
from stapo_lite.files import Journal, read_lines
from stapo_lite.token_log import TokenLog
from stapo_lite.tracking import RunLog, read_metrics

train_module = importlib.import_module("stapo_lite.train")


def refuse_memory():
    """The allocator's own error."""
    torch.empty(2**60, dtype=torch.uint8)


def refuse_memory_as_cuda_does():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@contextmanager
def memory_for(policy, tokens, refuse=refuse_memory, phase="forward", spare=0):
    """Let no micro-batch of more tokens pass the decoder, after the first `spare` such ones."""
    decoder, passes = policy.model.get_base_model().get_decoder(), iter(range(10**9))

    def forward(module, arguments, options, output):
        if module.training and options["input_ids"].numel() > tokens and next(passes) >= spare:
            if phase == "forward":
                refuse()
            elif output.last_hidden_state.requires_grad:
                output.last_hidden_state.register_hook(lambda gradient: refuse())

    hook = decoder.register_forward_hook(forward, with_kwargs=True)
    yield
    hook.remove()


@pytest.mark.parametrize(
    ("refuse", "phase"),
    [(refuse_memory, "forward"), (refuse_memory, "backward"), (refuse_memory_as_cuda_does, "forward")],
)
@pytest.mark.parametrize(("tokens", "spare"), [(60, 0), (60, 1), (120, 1)])
def test_an_update_that_does_not_fit_is_made_in_halves(make_policy, tmp_path, caplog, refuse, phase, tokens, spare):
    """The very update of a smaller budget: gradient, metrics and token log."""
    completions, logs = fake_completions(3, ADVANTAGES), []

    def log(policy):
        logs.append(TokenLog(tmp_path, 100, 3, policy, Letters(), Accelerator(cpu=True)))
        return logs[-1]

    policy, budget = make_policy(), TokenBudget(tokens)
    with memory_for(policy, 20, refuse, phase, spare):
        gradient, metrics, result = run_update(
            policy, completions, objective(), max_tokens=budget, token_log=log(policy)
        )
    policy = make_policy()
    expected = run_update(policy, completions, objective(), max_tokens=30, token_log=log(policy))
    assert budget.tokens == 30
    assert "memory ran out: from now on micro-batches have at most 30 tokens" in caplog.text
    # To rounding: the mask's statistics may come from micro-batches of other shapes, whose kernels add up differently.
    torch.testing.assert_close(gradient, expected[0], rtol=1e-5, atol=1e-6)
    assert result == pytest.approx(expected[2], rel=2e-6)
    torch.testing.assert_close(metrics.pop("entropies").sort().values, expected[1].pop("entropies").sort().values)
    assert metrics.pop("lag_max") is expected[1].pop("lag_max") is None  # which the loop counts
    assert metrics == pytest.approx(expected[1], rel=2e-6, abs=1e-7)
    for one in logs:
        one.write(1, TAU_P)
    lines = read_lines(tmp_path / "tokens.jsonl")
    assert lines[: len(lines) // 2] == [roughly(line) for line in lines[len(lines) // 2 :]] != []


def roughly(value):
    """A value whose numbers may be rounded differently."""
    if isinstance(value, dict):
        return {key: roughly(part) for key, part in value.items()}
    if isinstance(value, list):
        return [roughly(part) for part in value]
    return pytest.approx(value, rel=1e-5) if isinstance(value, float) else value


def test_a_pass_without_gradient_is_halved_too(make_policy):
    policy, completions, budget = make_policy(), fake_completions(3, ADVANTAGES), TokenBudget(200)
    with memory_for(policy, 25):
        found = measured(policy, completions, budget)
    assert budget.halvings == 3
    for completion, statistics in measured(policy, completions, 25).items():
        assert torch.equal(found[completion].logprobs, statistics.logprobs)


def test_one_sequence_that_does_not_fit_ends_the_run_with_a_reason(make_policy):
    policy = make_policy()
    with (
        memory_for(policy, 0),
        pytest.raises(RunError, match="memory ran out on a single sequence: lower rollout.max_comp.*stapo_lite.plan"),
    ):
        run_update(policy, fake_completions(3, ADVANTAGES), objective(), max_tokens=60)


@pytest.mark.parametrize("wording", ["CUDA error: out of memory\nCompile with", "CUBLAS_STATUS_ALLOC_FAILED when"])
def test_other_wordings_of_the_same(make_policy, wording):
    def refuse():
        raise RuntimeError(wording)

    policy, budget = make_policy(), TokenBudget(60)
    with memory_for(policy, 20, refuse):
        run_update(policy, fake_completions(3, ADVANTAGES), objective(), max_tokens=budget)
    assert budget.halvings == 1


def test_other_errors_are_not_taken_for_memory(make_policy):
    def refuse():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    policy = make_policy()
    with memory_for(policy, 0, refuse), pytest.raises(RuntimeError, match="illegal memory access"):
        run_update(policy, fake_completions(3, ADVANTAGES), objective())


def test_a_halved_budget_is_remembered_and_resumed(write_config, tmp_path, monkeypatch):
    load_policy, policies = opening.load_policy, []

    def note(*arguments):
        policies.append(load_policy(*arguments))
        return policies[-1]

    monkeypatch.setattr(opening, "load_policy", note)
    folder = tmp_path / "run"
    steps = train_module.train(load_config(write_config(log__save_steps=1)))
    next(steps)
    with memory_for(policies[0], 128):
        assert next(steps)["microbatch_tokens"] == 128
    steps.close()
    assert read_state(folder / "checkpoint-2")["progress"]["halvings"] == 1
    assert [m["microbatch_tokens"] for m in run(write_config(), resume=True)] == [128, 128]
    assert [m["microbatch_tokens"] for m in read_metrics(folder)] == [256, 128, 128, 128]


HUGE = "def even(prompts, **_): return [9e29 if i % 2 and {} else float(i) for i, p in enumerate(prompts)]"
UNSCALED = {"objective": {"scale_rewards": "none", "s2t": {"tau_p": 0.01}}, "rollout__max_completion_length": 16}


def test_an_update_that_is_not_finite_is_skipped(write_config, user_reward, tmp_path, caplog):
    """An advantage beyond fp32 in one of the two mini-batches: the step is what the other one makes of it."""
    user_reward(HUGE.format("'two' in p"))
    metrics = run(write_config(**UNSCALED, train__max_tokens_per_microbatch=512, train__max_skipped_updates=3))
    assert [m["skipped_updates"] for m in metrics] == [1] * 4  # never three in a row
    assert [m["updates"] for m in metrics] == [1] * 4
    assert all(abs(m["loss"]) < 1000 for m in metrics)  # nothing of the skipped update
    assert caplog.text.count("update skipped: loss or gradient is not finite (norm inf)") == 4
    assert all(math.isfinite(value) for m in metrics for value in m.values() if value is not None)
    assert metrics[-1]["learning_rate"] in (pytest.approx(0.004), pytest.approx(0.005))  # whichever came last
    saved = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    assert all(value.isfinite().all() for value in saved.values())


def test_too_many_skipped_updates_end_the_run(write_config, user_reward, tmp_path, monkeypatch, capsys):
    user_reward(HUGE.format("True"))
    config = write_config(**UNSCALED, train__max_tokens_per_microbatch=512, train__max_skipped_updates=5)
    assert command(monkeypatch, config) == 1
    (error,) = re.findall("^error: .*$", capsys.readouterr().err, re.MULTILINE)
    assert "5 updates in a row had a loss or gradient that is not finite (train.max_skipped_updates)" in error
    newest = list_checkpoints(tmp_path / "run")[-1]
    assert read_state(newest)["progress"] | {"tau_p": 0} == {
        "tau_p": 0, "step": 2, "prompts_drawn": 8, "halvings": 0, "skipped_in_a_row": 4
    }  # fmt: skip


def test_a_reward_function_that_keeps_failing_ends_the_run_with_a_checkpoint(
    write_config, user_reward, tmp_path, monkeypatch, capsys
):
    user_reward(
        "import pathlib\n"
        "def even(completion_ids, **columns):\n"
        "    calls = pathlib.Path(__file__).with_suffix('.calls')\n"
        "    calls.write_text(calls.read_text() + 'x' if calls.exists() else 'x')\n"
        "    if len(calls.read_text()) > 2: raise ConnectionError('judge is down')\n"
        "    return [float(ids[0] % 2) for ids in completion_ids]\n"
    )
    reward = {"functions": ["parity:even"], "max_failures": 2}
    assert command(monkeypatch, write_config(reward=reward, train__max_steps=9, log__save_steps=0)) == 1
    (error,) = re.findall("^error: .*$", capsys.readouterr().err, re.MULTILINE)
    assert "reward.functions=parity:even: raised ConnectionError: judge is down; it failed on 2 batches in" in error
    metrics = read_metrics(tmp_path / "run")
    assert [m["reward"] is None for m in metrics] == [False, False, True]
    assert [m["updates"] > 0 for m in metrics] == [True, True, False]
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["checkpoint-3"]


def test_no_signal_disturbs_the_last_checkpoint(write_config, user_reward, tmp_path, monkeypatch):
    """`accelerate launch` that is interrupted sends a SIGTERM after the Ctrl-C."""
    user_reward("def even(completion_ids, **columns): return [float(len(ids)) for ids in completion_ids]")
    save, update, handler = (
        checkpoint.save_checkpoint,
        train_module.update,
        signal.getsignal(signal.SIGTERM),
    )

    def disturbed(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        save(*arguments)

    def interrupted_in_step_3(*arguments, **options):
        if next(calls) == 5:
            raise KeyboardInterrupt
        return update(*arguments, **options)

    calls = iter(range(99))
    monkeypatch.setattr(checkpoint, "save_checkpoint", disturbed)
    monkeypatch.setattr(train_module, "update", interrupted_in_step_3)
    with pytest.raises(KeyboardInterrupt):
        run(write_config(log__save_steps=0))
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["checkpoint-2"]
    assert signal.getsignal(signal.SIGTERM) == handler


def test_a_full_disk_costs_nothing_but_checkpoints(children, write_config, tmp_path):
    config = str(write_config(train__max_steps=6, log__save_steps=1, log__save_total_limit=9, audit={"enabled": True}))
    for name, steps, status in (("whole", (0, 0), 0), ("run", (3, 4), 0), ("last", (5, 6), 1)):
        arguments = [config, f"output_dir={tmp_path / name}"]
        assert children(interrupted.train_on_a_full_disk, arguments, *steps) == status
    assert children(interrupted.command, [*arguments, "--resume"]) == 0
    assert outcome(tmp_path / "last") == outcome(tmp_path / "whole")
    whole, cut = tmp_path / "whole", tmp_path / "run"
    assert outcome(cut) == outcome(whole)
    assert [path.name for path in list_checkpoints(cut)] == [f"checkpoint-{step}" for step in (1, 2, 5, 6)]
    assert not [path for path in list_checkpoints(cut) if find_damage(path)]
    assert not list(cut.glob(".checkpoint*"))


@pytest.mark.parametrize("name", ["metrics.jsonl", "tokens.jsonl"])
def test_what_waits_is_written_before_a_checkpoint_and_at_the_end(write_config, tmp_path, monkeypatch, name):
    flush, refused = Journal.flush, []

    def fail(journal):
        if journal.path.name == name and len(refused) in fails:
            refused.append(1)
            raise OSError(28, "No space left on device")
        flush(journal)

    monkeypatch.setattr(Journal, "flush", fail)
    fails = {0}
    steps = train_module.train(load_config(write_config(log__save_steps=1, audit={"enabled": True})))
    next(steps)
    assert refused
    assert {line["step"] for line in read_lines(tmp_path / "run" / name)} == {1}
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["checkpoint-1"]
    fails = range(99)
    with pytest.raises(RunError, match="cannot be written .*No space left.*; make room, and continue with --resume"):
        list(steps)
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["checkpoint-1"]


def outcome(folder):
    names = ("tokens.jsonl", "quadrants.jsonl", "adapter/adapter_model.safetensors")
    return [(folder / name).read_bytes() for name in names], without_times(read_metrics(folder))


def test_a_journal_writes_whole_lines_or_none(tmp_path, caplog):
    journal = Journal(tmp_path / "folder" / "lines.jsonl")
    journal.add([{"a": 1}])
    journal.add([{"a": 2}])
    assert caplog.text.count("cannot be written, its lines are kept (No such file or directory)") == 1
    (tmp_path / "folder").mkdir()
    journal.add([{"a": 3}])
    assert read_lines(journal.path) == [{"a": 1}, {"a": 2}, {"a": 3}]


def test_trackers_that_cannot_be_started_are_left_out(write_config, tmp_path, caplog):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "logs").write_text("", encoding="utf-8")  # where TensorBoard wants a folder
    config = write_config(log={"report_to": ["tensorboard"]})
    assert len(run(config)) == 4
    assert "log.report_to: training goes on without tensorboard (" in caplog.text


def test_a_tracker_that_fails_later_is_left_out(write_config, tmp_path, caplog):
    config = write_config(log={"report_to": ["tensorboard"]})
    logs, start = [], RunLog.start_trackers

    def note(log, *arguments):
        start(log, *arguments)
        logs.append(log)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunLog, "start_trackers", note)
        steps = train_module.train(load_config(config))
        next(steps)
    logs[0]._trackers[0].writer._get_file_writer().close()
    assert len(list(steps)) == 3
    assert caplog.text.count("log.report_to: training goes on without tensorboard (") == 1


def test_stop_on_ends_a_run_with_adapter_and_checkpoint(
    write_config, user_reward, tmp_path, monkeypatch, capsys, caplog
):
    user_reward("def even(completions, **columns): return [1.0 for c in completions]")
    config = write_config(train__max_steps=30, log__save_steps=0, stop_on=["no_signal"])
    assert command(monkeypatch, config) == 0
    assert "stop_on=no_signal: the run ends after step 20" in capsys.readouterr().out
    assert caplog.text.count("step 20, no_signal: more than 95 % of the groups have equal rewards") == 1
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["checkpoint-20"]
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").exists()
    resumed = write_config(train__max_steps=22, log__save_steps=0)
    assert command(monkeypatch, resumed, "--resume") == 0
    assert caplog.text.count("no_signal") == 1  # it is no news


def test_secrets_stay_out_of_the_run_folder(write_config, tmp_path, monkeypatch, capsys):
    secrets = {name: f"secret-of-{name}" for name in ("HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY")}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    run(write_config(audit={"enabled": True}, log={"report_to": ["tensorboard"]}))
    export(tmp_path / "run", tmp_path / "run" / "export", dtype="float32")
    written = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert (tmp_path / "run" / "export" / "README.md").exists()
    printed = "".join(capsys.readouterr())
    assert json.dumps("seconds_step").encode() in written
    assert b"secret-of" not in written
    assert "secret-of" not in printed


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


def test_a_lost_trainer_ends_the_job_and_the_other_one_s_work_is_kept(write_config, user_reward, tmp_path):
    whole = run(write_config(output_dir=str(tmp_path / "whole"), log__save_steps=0, train__learning_rate=1e-4))
    user_reward(DEADLY)
    config = write_config(log__save_steps=0, train__learning_rate=1e-4)
    in_two_processes(config, tmp_path, status=1)
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-2"]
    same_metrics(run(config, resume=True), whole[2:])  # with one process
