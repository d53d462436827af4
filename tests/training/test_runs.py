"""Whole runs: in the process on the tiny model, and through the real command with a real model and vLLM."""

import datetime
import importlib
import itertools
import json
import math
import os
import re
import shutil
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from helpers import MINIMAL, RARELY_RIGHT, ROOT, command, run, without_times
from packaging.version import Version
from transformers import AutoTokenizer

from stapo_lite.algorithm.microbatches import cut_evenly
from stapo_lite.config import Config, Log, Train, load_config, load_eval_config
from stapo_lite.errors import InputError
from stapo_lite.evaluation import exam
from stapo_lite.evaluation.evaluate import evaluate
from stapo_lite.files import read_lines, write_lines
from stapo_lite.rewards.functions import RewardModel
from stapo_lite.rollout import vllm_options
from stapo_lite.rollout.transformers_engine import TransformersEngine
from stapo_lite.tools.export import export
from stapo_lite.training import opening
from stapo_lite.training.checkpoint import check_resume
from stapo_lite.training.lifecycle import make_accelerator
from stapo_lite.training.loop import train
from stapo_lite.training.metrics import Tally, Update, has_variance, step_metrics
from stapo_lite.training.run import Run, learning_rate, prompt_order, take_next_best
from stapo_lite.training.tracking import read_metrics
from stapo_lite.types import Completion, Prompt, derived_seed

loop = importlib.import_module("stapo_lite.training.loop")


@pytest.fixture
def trained(monkeypatch):
    """The completions that were trained on, as they come."""
    seen, update = [], loop.update

    def note(learner, batch):
        seen.extend(batch.completions)
        return update(learner, batch)

    monkeypatch.setattr(loop, "update", note)
    return seen


def in_groups(completions):
    return [completions[i : i + 4] for i in range(0, len(completions), 4)]


def adapter_bytes(folder):
    return (folder / "adapter_model.safetensors").read_bytes()


def test_a_run_leaves_everything_behind_but_secrets(write_config, tmp_path, capsys, monkeypatch):
    for name in ("HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, f"secret-of-{name}")
    log = {"save_steps": 1, "log_completions_steps": 2, "audit_tokens": 64, "report_to": ["tensorboard"]}
    metrics, folder = run(write_config(log=log)), tmp_path / "run"
    assert read_metrics(folder) == metrics
    assert [m["step"] for m in metrics] == [1, 2, 3, 4]
    assert [m["updates"] for m in metrics] == [2] * 4
    assert [m["learning_rate"] for m in metrics] == pytest.approx([0.001, 0.002, 0.003, 0.004])  # steps, not updates
    assert load_config(folder / "config.yaml").train.max_steps == 4
    assert {p.name for p in folder.glob("*checkpoint-*")} == {"checkpoint-3", "checkpoint-4"}  # the newest two
    assert adapter_bytes(folder / "adapter") == adapter_bytes(folder / "checkpoint-4")
    assert (folder / "reward.png").read_bytes().startswith(b"\x89PNG")
    environment = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
    assert environment["hardware"] == f"CPU with {os.cpu_count()} cores" or torch.cuda.is_available()
    assert environment["torch"] == torch.__version__.partition("+")[0] or "+" in environment["torch"]
    export(folder, folder / "export", dtype="float32")
    written = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    output, errors = capsys.readouterr()
    assert b"secret-of" not in written + output.encode() + errors.encode()
    assert len(re.findall(r"^step \d/4 \| reward ", output, re.MULTILINE)) == 4
    assert len(re.findall(r"samples of step", output)) == 2
    assert "silenced share" in output
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8"), re.MULTILINE)
    named = [name.replace("parity:even", "FUNCTION") for name in metrics[0]]
    assert sorted(name for row in rows for name in re.findall(r"`([\w/]+)`", row)) == sorted(named)


def test_metrics_and_token_log_of_a_step_by_hand(write_config, trained, monkeypatch, tmp_path):
    """Counted from the completions; shares and means of docs/metrics.md from sums that the oracle checks."""
    totals, reduce = [], Tally.reduce
    monkeypatch.setattr(Tally, "reduce", lambda self, a: totals.append(reduce(self, a)) or totals[-1])
    changes = {"algorithm": "grpo", "objective": {"s2t": {"enabled": True, "tau_p": 0.01}}}
    m = run(write_config(train__max_steps=1, log__audit_tokens=3, **changes))[0]
    t, completions = totals[0], trained
    lengths = [len(c.token_ids) for c in completions]
    tokens = sum(lengths)
    right = sum(i % 2 == 0 for c in completions for i in c.token_ids)
    cut = sum(n == 8 and c.token_ids[-1] not in (1, 2) for n, c in zip(lengths, completions, strict=True))
    flat = sum(len({c.reward for c in group}) == 1 for group in in_groups(trained))
    assert m["completion_length"] == pytest.approx(tokens / 16)
    rewards = [sum(i % 2 == 0 for i in c.token_ids) for c in completions]
    assert m["reward"] == m["reward/parity:even"] == pytest.approx(right / 16)
    assert m["reward_std"] == m["reward_std/parity:even"] == pytest.approx(np.std(rewards, ddof=1))
    assert m["truncated_share"] == pytest.approx(cut / 16)
    assert m["zero_variance_groups"] == flat / 4
    assert m["sampled_nll"] == pytest.approx(-sum(sum(c.rollout_logprobs) for c in completions) / tokens, rel=1e-5)
    assert m["sampler_gap_max"] < 1e-4
    active = sum(len(c.token_ids) for c in completions if c.advantage)
    trains = active - t["silenced"]
    assert active > trains > 0
    assert t["candidate"] > t["spurious"] > 0
    assert len(t["entropies"]) == active
    assert m["entropy"] == pytest.approx(t["entropies"].double().mean().item())
    for p in (10, 50, 90):
        assert m[f"entropy_p{p}"] == pytest.approx(np.quantile(t["entropies"].double(), p / 100))
    for count in ("kept", "silenced", "candidate", "spurious", "negative_rare", "negative_sure"):
        assert m[f"{count}_share"] == pytest.approx(t[count] / tokens), count
    for kind in ("spurious", "negative_rare", "negative_sure"):
        assert m[f"{kind}_gradient_share"] == pytest.approx(t[f"{kind}_mass"] / t["gradient_mass"]), kind
    for metric, total, count in (
        ("entropy", "entropy", active),
        ("collision", "collision", active),
        ("logit_grad_norm", "logit_grad_norm", trains),
        ("clip_low_share", "clipped_low", trains),
        ("clip_high_share", "clipped_high", trains),
        ("kl", "kl", tokens - t["silenced"]),
        ("sampler_gap_mean", "gap", active),
        ("sampler_gap_k3", "gap_k3", active),
        ("sampler_capped_share", "capped", active),
    ):
        assert m[metric] == pytest.approx(t[total] / count), metric
    (step,) = read_lines(tmp_path / "run" / "quadrants.jsonl")
    assert (sum(step["tokens"][:2]), step["tokens"][0]) == (t["candidate"], t["spurious"])
    assert step["tau_h"] == pytest.approx(m["tau_h"])
    assert len(read_lines(tmp_path / "run" / "tokens.jsonl")) == 3 < t["candidate"]


def test_means_over_the_updates_of_a_step_by_hand():
    tally = Tally(torch.device("cpu"), [])
    tally.add(loss=3.0, tokens=50)
    updates = [Update(2.0, 0.5), Update(4.0), Update(9.0, 1.5)]
    seconds = {"rollout": 3.0, "reward": 1.0, "update": 6.0}
    m = step_metrics(7, tally.reduce(Accelerator(cpu=True)), updates, seconds)
    assert (m["step"], m["updates"], m["loss"], m["grad_norm"]) == (7, 3, 1.0, 5.0)
    assert m["tau_h"] == 1.0  # of the updates that have one
    assert (m["seconds_step"], m["seconds_update"], m["tokens_per_second"]) == (10.0, 6.0, 5.0)
    none = step_metrics(7, tally.reduce(Accelerator(cpu=True)), [], seconds)
    assert (none["loss"], none["grad_norm"], none["tau_h"]) == (None, None, None)


def test_a_step_gives_the_memory_back_before_it_updates(write_config, monkeypatch):
    """Engine and trainer take turns: what was published is sampled, and the engine sleeps while the policy trains."""
    events = []
    for name in ("wake", "publish", "generate", "sleep"):
        original = getattr(TransformersEngine, name)

        def note(self, *arguments, _name=name, _original=original, **options):
            events.append(_name)
            return _original(self, *arguments, **options)

        monkeypatch.setattr(TransformersEngine, name, note)
    original_update = loop.update
    monkeypatch.setattr(loop, "update", lambda *arguments: events.append("update") or original_update(*arguments))
    run(write_config(train__max_steps=2, rollout__self_check=False))
    assert events == 2 * ["wake", "publish", "generate", "sleep", "update", "update"]


def test_random_rewards_follow_the_seed_and_differ_from_step_to_step(write_config, user_reward, trained, tmp_path):
    user_reward("import random\ndef even(prompts, **columns): return [random.random() for _ in prompts]")
    rewards = []
    for seed in (0, 0, 1):
        trained.clear()
        run(write_config(seed=seed, train__max_steps=2, output_dir=str(tmp_path / f"run{len(rewards)}")))
        rewards.append([c.reward for c in trained])
    assert rewards[0] == rewards[1]
    assert len({*rewards[0], *rewards[2]}) == 4 * 16  # no draw comes twice


def test_the_best_adapter_by_held_out_rows_with_ones_own_reward(write_config, tmp_path, monkeypatch, capsys):
    """Scores from the completions; the adapter is that of the step with the best of them, also over a resumption."""
    folder, judged = tmp_path / "run", []
    write_lines(tmp_path / "held_out.jsonl", [{"prompt": f"say {word}"} for word in ("five", "six", "seven")])
    score = RewardModel.score

    def note(self, completions, seed, step):
        score(self, completions, seed, step)
        if completions[0].prompt.prompt == "say five":
            judged.append((step, completions))

    monkeypatch.setattr(RewardModel, "score", note)
    held_out = {"steps": 1, "source": str(tmp_path / "held_out.jsonl"), "best": "reward", "num_samples": 2, "limit": 2}
    changes = {"evaluation": held_out, "log": {"save_steps": 1, "save_total_limit": 9}, "train__learning_rate": 0.03}
    run(write_config(train__max_steps=2, **changes))
    run(write_config(train__max_steps=5, **changes), resume=True)
    lines = read_lines(folder / "evaluations.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5] == [step - 1 for step, _ in judged]
    assert all(len(completions) == 4 for _, completions in judged)
    rewards = [sum(c.reward for c in completions) / 4 for _, completions in judged]
    assert [line["reward"] for line in lines] == [line["reward/parity:even"] for line in lines] == rewards
    best = rewards.index(max(rewards))
    assert best > 0  # the untrained adapter has no checkpoint to compare with
    assert adapter_bytes(folder / "best") == adapter_bytes(folder / f"checkpoint-{best}")
    score = {"metric": "reward", "score": max(rewards), "step": best}
    kept = json.loads((folder / "best" / "score.json").read_text(encoding="utf-8"))
    assert {key: kept[key] for key in score} == score
    shown = f"best so far: reward {max(rewards):.3f} after step {best}, kept in {folder / 'best'}"
    assert shown in capsys.readouterr().out
    with pytest.raises(InputError, match="evaluation.source=nowhere.jsonl: no such file"):
        run(write_config(output_dir=str(tmp_path / "b"), evaluation=held_out | {"source": "nowhere.jsonl"}))
    with pytest.raises(InputError, match="evaluation.best=math500: choose one of reward"):
        run(write_config(output_dir=str(tmp_path / "b"), evaluation=held_out | {"best": "math500"}))


def test_completions_are_kept_with_their_rewards_and_shown_with_the_table(write_config, trained, tmp_path, capsys):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics = run(write_config(log={"completions": 6, "report_to": ["tensorboard"]}, train__mini_batch_size=4))
    lines = read_lines(tmp_path / "run" / "completions.jsonl")
    assert [line["step"] for line in lines] == [step for step in (1, 2, 3, 4) for _ in range(6)]
    for line, completion in zip(lines[6:12], trained[16:22], strict=True):
        assert line["text"] == completion.text
        assert line["prompt"] == completion.prompt.prompt
        assert line["reward"] == line["scores"]["parity:even"] == completion.reward
        assert line["advantage"] == completion.advantage
        assert (line["tokens"], line["truncated"]) == (len(completion.token_ids), completion.truncated)
    events = EventAccumulator(str(tmp_path / "run" / "logs" / "stapo_lite")).Reload()
    known = {name for line in metrics for name, value in line.items() if value is not None}
    assert set(events.Tags()["scalars"]) == known - {"step"}  # our names alone
    assert [event.value for event in events.Scalars("reward")] == pytest.approx([line["reward"] for line in metrics])
    texts = events.Tensors("completions/text_summary")
    assert [text.step for text in texts] == [1, 2, 3, 4]
    assert b"say " in texts[0].tensor_proto.string_val[0]
    capsys.readouterr()
    (tmp_path / "run" / "reward.png").unlink()
    assert command("show", tmp_path / "run", "--worst", 3, "--step", 2) == 0
    table, plot, completions = capsys.readouterr().out.partition(f"plot: {tmp_path / 'run' / 'reward.png'}\n\n")
    assert plot
    assert "silenced share" in table
    assert "4 steps in" in table
    assert (tmp_path / "run" / "reward.png").exists()
    shown = re.findall(r"^step 2 \| reward (\S+) \| advantage \S+ \| \d tokens", completions, re.MULTILINE)
    assert [float(reward) for reward in shown] == sorted(line["reward"] for line in lines[6:12])[:3]
    assert command("show", tmp_path / "run", "--step", 9) == 2
    assert "no completions of step 9 were kept; see log.completions" in capsys.readouterr().err


def test_what_there_is_to_show(write_config, tmp_path, capsys):
    folder = tmp_path / "run"
    run(write_config(train__max_steps=1, log__completions=0))
    capsys.readouterr()
    assert command("show", folder) == 0
    assert capsys.readouterr().out.endswith(
        f"1 steps in {read_metrics(folder)[0]['seconds_step']:.0f} s\nplot: {folder / 'reward.png'}\n"
    )
    (folder / "reward.png").unlink()
    (folder / "reward.png").mkdir()
    assert command("show", folder) == 2
    assert "run: cannot be written (Is a directory" in capsys.readouterr().err
    assert command("show", tmp_path / "none") == 2
    assert "none: no metrics.jsonl with steps in it; is it a run folder?" in capsys.readouterr().err


def test_prompts_with_a_tool_call_and_configs_with_a_date_are_kept(write_config, tmp_path):
    """A message may have no text, and YAML reads `2024-07-26` as a date."""
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    messages = [{"role": "user", "content": "1+1?"}, call, {"role": "user", "content": "So?"}]
    write_lines(tmp_path / "calls.jsonl", [{"prompt": messages}])
    template = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
    tokenizer = AutoTokenizer.from_pretrained(load_config(write_config()).model)
    shutil.copytree(load_config(write_config()).model, tmp_path / "model")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path / "model")
    changes = {"model": str(tmp_path / "model"), "data__source": str(tmp_path / "calls.jsonl")}
    changes |= {"data__chat_template_kwargs": {"day": datetime.date(2024, 7, 26)}, "train__max_steps": 1}
    run(write_config(**changes))
    lines = read_lines(tmp_path / "run" / "completions.jsonl")
    assert {line["prompt"] for line in lines} == {"1+1?\n\nSo?"}
    assert (tmp_path / "run" / "checkpoint-1").exists()
    assert command("train", write_config(**changes), "--resume") == 0


def test_the_reward_rises(write_config):
    metrics = run(write_config(train__max_steps=30, log__save_steps=0, log__log_completions_steps=0))
    first, last = (sum(m["reward"] for m in part) / 5 for part in (metrics[:5], metrics[-5:]))
    assert last > first + 1.5  # of at most 8


def test_benchmarks_during_training(write_config, tiny_model, tmp_path, monkeypatch, capsys):
    """Before, during and after; like a token log they change nothing in the training; a resumed run repeats none; and
    the last one gives what an evaluation of the final adapter gives."""
    benchmark, folder = tmp_path / "mine.jsonl", tmp_path / "run"
    write_lines(benchmark, [{"problem": f"say {word}", "answer": n} for n, word in enumerate(("five", "six"))])
    settings = {"steps": 2, "benchmarks": [str(benchmark)], "num_samples": 6, "temperature": 0.7, "top_p": 0.9}
    plain = run(write_config(output_dir=str(tmp_path / "plain"), train__max_steps=3))
    draw, responses = exam.draw, []

    def note(*arguments):
        for line in draw(*arguments):
            responses.append(line["response"])
            yield line

    monkeypatch.setattr(exam, "draw", note)
    folder.mkdir()
    (folder / "environment.json").write_text('{"stapo_lite": "0"}', encoding="utf-8")
    write_lines(folder / "evaluations.jsonl", [{"step": 0}])  # of a run that was killed in its first step
    run(write_config(train__max_steps=2, evaluation=settings, log__audit_tokens=3))
    for name in ("evaluations.jsonl", "metrics.jsonl"):  # of a step after the checkpoint
        write_lines(folder / name, [*read_lines(folder / name), {"step": 3}])
    run(write_config(train__max_steps=3, evaluation=settings, log__audit_tokens=3), resume=True)
    assert without_times(read_metrics(folder)) == without_times(plain)
    assert adapter_bytes(folder / "adapter") == adapter_bytes(tmp_path / "plain" / "adapter")
    evaluations = read_lines(folder / "evaluations.jsonl")
    assert [line["step"] for line in evaluations] == [0, 2, 3]
    assert all(line["benchmarks"]["mine"]["samples"] == 6 for line in evaluations)
    assert len(re.findall(r"^benchmarks after step [023]\n\| benchmark ", capsys.readouterr().out, re.MULTILINE)) == 3
    tree = {"model": str(tiny_model), "adapter": str(folder / "adapter"), "output_dir": str(tmp_path / "evaluation")}
    tree |= {"dtype": "float32", "benchmarks": settings["benchmarks"], "decoding": "justrl"}
    tree |= {"data": {"max_prompt_length": 64, "prompt_suffix": ""}}
    tree |= {"rollout": {"engine": "transformers", "num_samples": 6, "max_completion_length": 8}}
    results = evaluate(load_eval_config(tree))
    assert results["benchmarks"] == evaluations[-1]["benchmarks"]
    assert [line["response"] for line in read_lines(tmp_path / "evaluation" / "samples-0.jsonl")] == responses[24:]
    assert responses[:12] != responses[12:24] != responses[24:]


def test_rows_that_are_left_out_are_counted(write_config, tmp_path, capsys):
    write_lines(tmp_path / "mine.jsonl", [{"problem": "Say two!", "answer": 1}, {"problem": "say seven", "answer": 1}])
    config = write_config(data__drop_contaminated=[str(tmp_path / "mine.jsonl")])
    prompts, _, _ = opening.load_prompts(load_config(config), None, print)
    assert [p.prompt for p in prompts] == ["say one", "say three", "say four"]
    shorter = write_config(data__max_prompt_length=26, data__filter_overlong_prompts=True)
    opening.load_prompts(load_config(shorter), None, print)
    printed = capsys.readouterr().out
    assert f"left out 1 rows of {tmp_path / 'prompts.jsonl'}, which hold 1 benchmark problems" in printed
    assert re.search(r"^2 prompts from .*prompts.jsonl; 2 longer than 26 tokens left out$", printed, re.MULTILINE)
    with pytest.raises(InputError, match="data.drop_contaminated: nowhere.jsonl: cannot be read .*; or set data.drop"):
        opening.load_prompts(load_config(config, ["data.drop_contaminated=[nowhere.jsonl]"]), None, print)


@pytest.mark.parametrize(
    "changes", [{"algorithm": "dapo"}, {"train__optim": "paged_adamw_8bit", "lora": {"r": 64}}], ids=str
)  # bitsandbytes keeps small tensors in 32 bits
def test_who_stops_early_goes_on_bit_for_bit(write_config, user_reward, tmp_path, changes):
    if "algorithm" in changes:
        user_reward(RARELY_RIGHT)
    whole, folder = run(write_config(**changes, output_dir=str(tmp_path / "whole"))), tmp_path / "run"
    for metrics in loop.train(load_config(write_config(**changes, log__save_steps=0))):
        if metrics["step"] == 2:
            break
    del metrics
    assert adapter_bytes(folder / "adapter") == adapter_bytes(folder / "checkpoint-2")
    assert (folder / "reward.png").exists()
    steps = loop.train(load_config(write_config(**changes)), resume=True)
    next(steps)
    assert not (folder / "adapter").exists()  # until it ends
    with pytest.raises(InputError, match="another run writes to it now; choose another folder"):
        run(write_config(**changes), resume=True)
    next(steps)
    assert list(steps) == []
    assert without_times(read_metrics(folder)) == without_times(whole)
    for name in ("adapter_model.safetensors", "optimizer.pt"):
        expected, actual = ((path / "checkpoint-4" / name).read_bytes() for path in (tmp_path / "whole", folder))
        assert expected == actual


def test_a_resumed_run_keeps_the_adapter_that_it_began_from_as_its_reference(write_config, tmp_path):
    run(write_config(output_dir=str(tmp_path / "start"), train__max_steps=1, train__learning_rate=0.5))
    changes = {"lora__adapter": str(tmp_path / "start" / "adapter"), "objective__beta": 0.1}
    whole = run(write_config(**changes, output_dir=str(tmp_path / "whole")))
    assert 0 <= whole[0]["kl"] < whole[-1]["kl"]
    run(write_config(**changes, train__max_steps=2))
    run(write_config(**changes), resume=True)
    assert without_times(read_metrics(tmp_path / "run")) == without_times(whole)


ALWAYS = {
    "output_dir": "p", "train.max_steps": 9, "reward.function_timeout": 1.0, "rollout.servers": ["http://b:1"],
    "stop_on": ["ratio"], "log.save_steps": 1, "evaluation.steps": 3,
}  # fmt: skip
WITH_FORCE = {
    "seed": 1, "model": "n", "dtype": "float32", "algorithm": "justrl", "data.source": "q.jsonl",
    "reward.weights": [2.0], "rollout.num_generations": 4, "rollout.engine": "server", "objective.beta": 0.1,
    "train.learning_rate": 1.0, "train.max_tokens_per_microbatch": 2048, "lora.adapter": "start",
}  # fmt: skip
NEVER = {
    "lora.r": 8, "lora.lora_alpha": 8, "lora.use_rslora": True, "lora.target_modules": ["q_proj"],
    "train.optim": "paged_adamw_8bit",
}  # fmt: skip


@pytest.mark.parametrize(("key", "value"), (ALWAYS | WITH_FORCE | NEVER).items())
def test_what_may_change_when_a_run_is_resumed(key, value, tmp_path):
    """Always, what changes nothing that is computed; never, what the checkpoint's tensors have their shapes from."""
    before = load_config(MINIMAL).model_dump()
    now = load_config(MINIMAL, [f"{key}={json.dumps(value)}"]).model_dump()
    state = {"progress": {"tau_p": 0.002}, "config": before, "environment": {"torch": "1"}}
    (tmp_path / "state.json").write_text(json.dumps(state), encoding="utf-8")
    for force in (False, True):
        may = key in ALWAYS or (force and key in WITH_FORCE)
        with nullcontext() if may else pytest.raises(InputError, match=f"--resume: .*{re.escape(key)}"):
            assert check_resume(tmp_path, now, {"torch": "1"}, force)


def test_servers_are_told_of_no_prompt_past_the_end(write_config, monkeypatch):
    """Three steps' prompts of four while there are as many steps, counted from the one that begins."""
    told = []
    monkeypatch.setattr(TransformersEngine, "prefetch", lambda self, prompts, seeds: told.append(len(prompts)))
    config = load_config(write_config())
    run = config.model_copy(update={"rollout": config.rollout.model_copy(update={"max_lag": 2})})
    list(loop.train(run))
    assert told == [12, 12, 8, 4]


def test_resuming_with_another_config_names_the_key(write_config, tmp_path, capsys):
    run(write_config(train__max_steps=2))
    lines = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    changed = write_config(train__max_steps=3, train__learning_rate=0.02)
    for arguments, message in (
        ([changed, "--resume", "--force", "lora.r=16"], "--resume: lora.r cannot change in a run (lora.r 8 -> 16, "),
        ([changed, "--resume"], "(train.learning_rate 0.01 -> 0.02, train.max_steps 2 -> 3): set the keys back"),
        ([changed], "holds a run: continue it with --resume"),
    ):
        assert command("train", *arguments) == 2
        assert message in capsys.readouterr().err
        assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == lines
    settings = ["objective.s2t.tau_p=0.02", "train.weight_decay=0.5", "train.max_steps=4"]
    assert command("train", changed, "--resume", "--force", *settings) == 0
    resumed = read_metrics(tmp_path / "run")[2:]
    assert [m["tau_p"] for m in resumed] == [0.02, 0.02]
    assert [m["learning_rate"] for m in resumed] == pytest.approx([0.02 * 3 / 10, 0.02 * 4 / 10])
    state = torch.load(tmp_path / "run" / "checkpoint-4" / "optimizer.pt", weights_only=True)
    assert state["param_groups"][0]["weight_decay"] == 0.5
    last = [write_config(log__save_steps=1, train__learning_rate=0.02), *settings, "train.max_steps=5"]
    assert command("train", *last, "--resume") == 0
    assert "with another config: log.save_steps 2 -> 1, train.max_steps 4 -> 5\n" in capsys.readouterr().out


def test_a_finished_run_without_checkpoints_is_not_begun_anew(write_config, tmp_path):
    config = write_config(train__max_steps=1)
    run(config)
    shutil.rmtree(tmp_path / "run" / "checkpoint-1")
    with pytest.raises(InputError, match="holds a run without a checkpoint to resume"):
        run(config, resume=True)
    assert len(read_metrics(tmp_path / "run")) == 1


def test_a_schedule_that_falls_is_of_its_max_steps(write_config):
    """Another end is another run; a constant rate has none."""
    run(write_config(train__max_steps=1, train__lr_scheduler_type="linear"))
    with pytest.raises(InputError, match="train.max_steps 1 -> 2"):
        run(write_config(train__max_steps=2, train__lr_scheduler_type="linear"), resume=True)


@pytest.mark.parametrize("algorithm", ["stapo", "grpo", "dr-grpo", "dapo", "justrl", "20-entropy"])
def test_every_algorithm_trains(write_config, user_reward, trained, algorithm):
    user_reward("def even(completion_ids, **columns): return [float(ids[0] % 2 == 0) for ids in completion_ids]")
    updated = [m for m in run(write_config(train__max_steps=2, algorithm=algorithm)) if m["updates"]]
    assert updated
    assert all(m["grad_norm"] > 0 for m in updated)
    assert all((m["kl"] is not None) == (algorithm == "grpo") for m in updated)
    assert updated[-1]["kl"] is None or updated[-1]["kl"] >= 0
    for m in updated:
        kept = {"stapo": 1 - m["silenced_share"], "20-entropy": 0.2}.get(algorithm, 1.0)
        assert m["kept_share"] == pytest.approx(kept, abs=0.03 if algorithm == "20-entropy" else 1e-9)
        assert m["sampler_capped_share"] == 0
    for group in in_groups(trained):
        rewards = [c.reward for c in group]
        deviation = 1.0 if algorithm == "dr-grpo" else np.std(rewards, ddof=1) + 1e-6
        assert [c.advantage for c in group] == pytest.approx([(r - np.mean(rewards)) / deviation for r in rewards])


def test_dynamic_sampling_fills_the_batch_with_groups_that_vary(write_config, user_reward, trained):
    user_reward(RARELY_RIGHT)
    metrics = run(write_config(algorithm="dapo", train__max_steps=3, train__learning_rate=1e-9))
    assert max(m["sampling_rounds"] for m in metrics) > 1, "the case tests nothing"
    assert [m["batch_groups"] for m in metrics] == [4] * 3
    assert any(m["zero_variance_groups"] for m in metrics)  # of all that were sampled
    assert len(trained) == 3 * 16
    for group in in_groups(trained):
        assert (len({c.reward for c in group}), len({id(c.prompt) for c in group})) == (2, 1)


@pytest.mark.parametrize(
    ("reward", "groups"),
    [("float('two' in str(p))", 0), ("float(i % 2 == 0 and 'two' in str(p))", 3)],
    ids=["equal within groups", "one group in each round"],
)
def test_dynamic_sampling_is_bounded_and_goes_on_with_what_it_has(write_config, user_reward, reward, groups):
    user_reward(f"def even(prompts, **columns): return [{reward} for i, p in enumerate(prompts)]")
    metrics = run(write_config(algorithm="dapo", train__max_steps=1, rollout__max_sampling_rounds=3))[0]
    assert metrics["sampling_rounds"] == 3
    assert metrics["batch_groups"] == groups
    assert (metrics["updates"] > 0) == (groups > 0)


def test_sizes_of_rounds_and_mini_batches_by_hand():
    assert loop.prompts_wanted(filled=0, size=8, drawn=0) == 8
    assert loop.prompts_wanted(filled=0, size=8, drawn=16) == 8
    assert loop.prompts_wanted(filled=6, size=8, drawn=9) == 3
    assert loop.prompts_wanted(filled=1, size=8, drawn=24) == 8
    assert cut_evenly(range(9), 4) == [range(3), range(3, 6), range(6, 9)]
    assert cut_evenly(range(5), 4) == [range(2), range(2, 5)]
    assert cut_evenly([], 4) == []


def test_processes_share_what_only_the_mask_reads():
    """20-Entropy's depends on the completions without advantage, too."""
    config = load_config(MINIMAL | {"algorithm": "20-entropy"})
    prompt, ids, logprobs = Prompt("", [4, 5], None), [6] * 6, [-1.0] * 6
    completions = [Completion(prompt, ids, logprobs, False, 0, advantage=a) for a in [1.0] * 8 + [0.0] * 8]
    learner = SimpleNamespace(objective=config.objective, on_tokens=None)
    policy, found = SimpleNamespace(device=torch.device("cpu")), []
    for index in range(2):
        accelerator = SimpleNamespace(num_processes=2, process_index=index)
        run = SimpleNamespace(config=config, learner=learner, accelerator=accelerator, policy=policy)
        (batch,) = loop.mini_batches(run, [completions])
        found.append(Counter(c.advantage for c in batch.completions))
    assert [counts[1.0] for counts in found] == [4, 4]
    assert [counts[0.0] for counts in found] == [4, 4]


def test_a_best_score_that_cannot_be_read_costs_a_warning(tmp_path, caplog):
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "score.json").write_text("{", encoding="utf-8")
    config = Config(**MINIMAL, evaluation={"steps": 1, "source": "h.jsonl", "best": "reward"})
    run = SimpleNamespace(config=config, folder=tmp_path, progress=SimpleNamespace(step=1))
    Run.keep_best(run, {"reward": 1.0})
    assert re.search(r"best was not written \(.*score.json: not JSON", caplog.text)


def test_the_best_adapter_of_steps_that_are_taken_again_is_dropped(write_config, tmp_path):
    write_lines(tmp_path / "held_out.jsonl", [{"prompt": f"say {word}"} for word in ("five", "six", "seven")])
    held_out = {"steps": 1, "source": str(tmp_path / "held_out.jsonl"), "best": "reward", "num_samples": 4}
    changes = {"evaluation": held_out, "log": {"save_steps": 1, "save_total_limit": 9}}
    run(write_config(train__max_steps=3, train__learning_rate=0.1, **changes))
    folder = tmp_path / "run"
    score = json.loads((folder / "best" / "score.json").read_text(encoding="utf-8"))
    lucky = json.dumps(score | {"score": 1e6, "step": 3})
    (folder / "best" / "score.json").write_text(lucky, encoding="utf-8")
    for step in (2, 3):
        shutil.rmtree(folder / f"checkpoint-{step}")
    run(write_config(train__max_steps=3, train__learning_rate=0.1, **changes), resume=True)
    kept = json.loads((folder / "best" / "score.json").read_text(encoding="utf-8"))
    again = {line["step"]: line["reward"] for line in read_lines(folder / "evaluations.jsonl") if line["step"] > 1}
    assert kept == score | {"score": max(again.values()), "step": max(again, key=again.get)}


@pytest.mark.parametrize("killed", ["before the old one goes", "while it goes", "before the new one comes"])
def test_no_kill_loses_the_best_adapter(tmp_path, killed):
    for name, step in (("best", 1), (".best", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_model.safetensors").write_text(name, encoding="utf-8")
        (tmp_path / name / "score.json").write_text(json.dumps({"step": step}), encoding="utf-8")
    if killed != "before the old one goes":
        (tmp_path / "best" / "score.json").unlink()
    if killed == "before the new one comes":
        shutil.rmtree(tmp_path / "best")
    take_next_best(tmp_path)
    take_next_best(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
    assert (tmp_path / "best" / "adapter_model.safetensors").read_text(encoding="utf-8") == ".best"
    (tmp_path / ".best").mkdir()  # one that was killed while it was written
    take_next_best(tmp_path)
    assert json.loads((tmp_path / "best" / "score.json").read_text(encoding="utf-8")) == {"step": 2}


def test_what_a_seed_decides(make_policy):
    """Two runs have other prompts, other draws and another first adapter; a group of one reward has no variance."""
    assert prompt_order(10, 0, 10, 10) != prompt_order(10, 1, 0, 10)
    alone = SimpleNamespace(num_processes=1, process_index=0)
    progress, seeds = SimpleNamespace(prompts_drawn=4), []
    for seed in (0, 1):
        one = SimpleNamespace(
            progress=progress, accelerator=alone, prompts=[0, 1, 2], config=SimpleNamespace(seed=seed)
        )
        seeds.append(Run.share(one, 2).seeds)
    assert not set(seeds[0]) & set(seeds[1])
    first, second = (make_policy(seed=seed).parameters for seed in (0, 1))
    assert any(not torch.equal(first[name], second[name]) for name in first if "lora_A" in name)


def test_unjudged_completions_make_no_variance():
    group = [Completion(Prompt("", [1], None), [1], [0.0], False, 0, reward=reward) for reward in (None, 1.0, 1.0)]
    assert not has_variance(group)


def test_learning_rates_by_hand():
    falling = {"constant": [1.0] * 3, "linear": [0.75, 0.5, 0.25]}
    falling["cosine"] = [(2 + 2**0.5) / 4, 0.5, (2 - 2**0.5) / 4]
    for schedule, rates in falling.items():
        train = Train(max_steps=8, warmup_steps=4, learning_rate=2.0, lr_scheduler_type=schedule)
        expected = [0.25, 0.5, 0.75, 1.0, 1.0, *rates]
        assert [learning_rate(train, step) / 2 for step in range(8)] == pytest.approx(expected), schedule


def test_no_two_runs_or_samples_share_a_seed():
    seeds = {derived_seed(derived_seed(a, b), c) for a, b, c in itertools.product(range(4), range(100), range(8))}
    assert len(seeds) == 4 * 100 * 8
    assert derived_seed(1, 23) != derived_seed(12, 3)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_allocators_settings_under_vllms_name_and_a_card_that_torch_cannot_use(monkeypatch, tmp_path, caplog):
    ours, vllms = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
    for given, expected in ((None, "expandable_segments:True"), ("b:2", "b:2")):
        for name, value in ((ours, given), (vllms, given and "a:1")):
            monkeypatch.setenv(name, value or "")  # what the call sets ends with the test
            if value is None:
                monkeypatch.delenv(name)
        make_accelerator(Log(), tmp_path)
        assert os.environ[vllms] == expected
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr("stapo_lite.model.processes.NVIDIA_DRIVER", tmp_path)
    make_accelerator(Log(), tmp_path)
    assert "running on the CPU although there is an NVIDIA card: torch 2." in caplog.text


def test_soft_overlong_punishment_enters_the_advantage(write_config, user_reward, trained):
    user_reward("def even(completion_ids, **columns): return [1.0 for ids in completion_ids]")
    changes = {"rollout__max_completion_length": 64, "reward": {"functions": ["parity:even"], "overlong_penalty": 0.5}}
    metrics = run(write_config(train__max_steps=1, **changes, train__max_tokens_per_microbatch=512))[0]
    assert metrics["reward"] == 1.0  # before the punishment
    assert metrics["zero_variance_groups"] == 1.0
    assert 0 < metrics["overlong_penalty"] < 0.5
    trained.sort(key=lambda c: len(c.token_ids))
    assert trained[-1].advantage < 0 < trained[0].advantage


def test_adaptive_tau_p_moves_and_is_logged(write_config):
    metrics = run(write_config(objective={"s2t": {"tau_p": 0.02, "target_share": 1e-4}}))
    assert metrics[0]["tau_p"] == 0.02
    for before, after in itertools.pairwise(metrics):
        factor = math.exp(0.1 * max(-10, 1 - before["silenced_share"] / 1e-4))
        assert after["tau_p"] == pytest.approx(min(0.2, max(2e-3, before["tau_p"] * factor)))
    assert metrics[-1]["tau_p"] < 0.02
    fixed = write_config(objective={"s2t": {"tau_p": 0.02}}, train__max_steps=5)
    *_, last = train(load_config(fixed), resume=True, force=True)
    assert last["tau_p"] == 0.02


def test_dry_run_prints_the_config_and_stops(write_config, tmp_path, capsys):
    assert command("train", write_config(), "train.max_steps=9", "algorithm=grpo", "--dry-run") == 0
    output = capsys.readouterr().out
    for line in ("max_steps: 9", "aggregation: sequence-mean", "beta: 0.04", "enabled: false"):
        assert line in output
    assert "4 prompts x 4 completions = 16 rollouts a step, 2 update(s) of 8 completions" in output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.max_prompt_length=20", "row 1: the prompt has"),
        ("reward.functions=[parity:odd]", "reward.functions=parity:odd: cannot be imported"),
        ("rollout.engine=vllm", "rollout.engine=vllm: vLLM is not installed"),
        ("log.report_to=[trackio]", "log.report_to: trackio is not installed; pip install trackio"),
        ("train.park_trainer=true", "train.park_trainer=True needs vLLM"),
        ("rollout.model=m", "rollout.model=m needs vLLM"),
    ],
)
def test_bad_input_is_found_before_the_model_loads(write_config, monkeypatch, capsys, override, message):
    monkeypatch.setattr(opening, "load_policy", lambda *_, **__: pytest.fail("the model was loaded"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert command("train", write_config(), override) == 2
    assert message in capsys.readouterr().err


def test_what_is_chosen_for_the_card_is_checked_and_kept_from_a_checkpoint_on(write_config, monkeypatch, capsys):
    """An attempt that died without a checkpoint, on another card perhaps, leaves no choice behind."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    config, asked = write_config(train__max_steps=1), []

    def choose(given, engine, going_on, *_):
        asked.append(going_on and going_on.name)
        return given

    monkeypatch.setattr(opening, "fit", choose)
    folder = Path(load_config(config).output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "environment.json").write_text('{"stapo_lite": "0"}', encoding="utf-8")
    (folder / "config.yaml").write_text("rollout: {max_num_seqs: 3}", encoding="utf-8")
    for _ in range(2):
        run(config, resume=True)
    assert asked == [None, folder.name]

    def choose_level_2(given, *_):
        rollout = given.rollout.model_copy(update={"sleep_level": 2})
        return given.model_copy(update={"rollout": rollout})

    monkeypatch.setattr(opening, "fit", choose_level_2)
    monkeypatch.setattr(vllm_options, "vllm_version", lambda: Version("0.27.1"))
    monkeypatch.setattr(opening, "load_policy", lambda *_, **__: pytest.fail("the model was loaded"))
    assert command("train", config, "--force", "--resume", "rollout.engine=vllm") == 2
    assert "set rollout.sleep_level=1" in capsys.readouterr().err


@pytest.mark.slow
def test_compiled_layers_beside_vllm(write_config, tmp_path):
    """The sampler is left as it is, and the update is that of plain layers."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    changes = {"rollout__engine": "vllm", "train__max_steps": 1}
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    plain = run(write_config(**changes, output_dir=str(tmp_path / "plain")))[0]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    compiled = run(write_config(**changes, train__compile=True))[0]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > graphs
    for name in ("reward", "sampled_nll", "completion_length"):
        assert compiled[name] == plain[name]
    for name in ("entropy", "loss", "grad_norm"):
        assert compiled[name] == pytest.approx(plain[name], rel=1e-3)
