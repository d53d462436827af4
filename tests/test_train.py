"""Whole runs: in the process on the tiny model, and through the real command with a real model and vLLM."""

import importlib
import itertools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from conftest import ROOT, command, run, without_times
from safetensors.torch import load_file

from stapo_lite import exam, opening
from stapo_lite import run as run_module
from stapo_lite.batching import cut_evenly
from stapo_lite.config import InputError, Train, load_config, load_eval_config
from stapo_lite.evaluate import evaluate
from stapo_lite.files import read_lines, write_lines
from stapo_lite.lifecycle import card_memory, make_accelerator
from stapo_lite.metrics import Tally
from stapo_lite.sharding import make_sharding
from stapo_lite.tracking import read_metrics
from stapo_lite.types import derived_seed

train_module = importlib.import_module("stapo_lite.train")  # the package's attribute is the function


@pytest.fixture
def trained(monkeypatch):
    """The mini-batches that were trained on, as they come."""
    seen, update = [], train_module.update

    def note(learner, batch):
        seen.append(batch.completions)
        return update(learner, batch)

    monkeypatch.setattr(train_module, "update", note)
    return seen


def test_a_run_leaves_everything_behind(write_config, tmp_path, capsys):
    metrics = run(write_config())
    folder = tmp_path / "run"
    assert read_metrics(folder) == metrics
    assert [m["step"] for m in metrics] == [1, 2, 3, 4]
    assert load_config(folder / "config.yaml").train.max_steps == 4
    assert {p.name for p in folder.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}
    final = load_file(folder / "adapter" / "adapter_model.safetensors")
    saved = load_file(folder / "checkpoint-4" / "adapter_model.safetensors")
    assert final.keys() == saved.keys()
    assert all(torch.equal(final[name], saved[name]) for name in final)
    assert (folder / "reward.png").read_bytes().startswith(b"\x89PNG")
    output = capsys.readouterr().out
    assert len(re.findall(r"^step \d/4 \| reward ", output, re.MULTILINE)) == 4
    assert len(re.findall(r"samples of step", output)) == 2
    assert "first 5" in output
    assert "silenced share" in output


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"train__park_trainer": True}, "train.park_trainer=True"),
        ({"rollout__quantization": "fp8"}, "rollout.quantization=fp8"),
        ({"rollout__model": "m"}, "rollout.model=m"),
    ],
)
def test_what_only_vllm_can_do(write_config, change, key):
    with pytest.raises(InputError, match=f"{key} needs vLLM"):
        run(write_config(**change))


@pytest.mark.parametrize("change", [{"rollout__max_lag": 1}, {"rollout__tensor_parallel_size": 2}], ids=str)
def test_what_only_a_server_can_do(write_config, change):
    with pytest.raises(InputError, match="needs rollout.engine=server"):
        run(write_config(**change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantization": "nf4"}, "quantization=nf4: not with a base that FSDP"),
        ({"train__compile": True}, "train.compile=True: not with"),
        ({}, "rollout.engine=transformers: not with"),
    ],
    ids=str,
)
def test_what_a_sharded_base_cannot_do(write_config, monkeypatch, change, message):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    with pytest.raises(InputError, match=message):
        run(write_config(**change))


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, "fsdp_version: 1: set 2"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "DEEPSPEED: FSDP2 does it here"),
    ],
    ids=str,
)
def test_sharding_that_would_not_help(monkeypatch, variables, message):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=message):
        make_sharding(torch.device("cpu"))


def test_dropped_prompts_are_counted(write_config, capsys):
    run(write_config(train__max_steps=1, data__max_prompt_length=26, data__filter_overlong_prompts=True))
    output = capsys.readouterr().out
    assert re.search(r"^2 prompts from .*prompts.jsonl; 2 longer than 26 tokens left out$", output, re.MULTILINE)


def test_every_metric_is_in_the_glossary(write_config):
    (metrics, *_) = run(write_config(train__max_steps=1))
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8"), re.MULTILINE)
    defined = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(defined) == sorted(metrics)


def test_metrics_by_hand_on_a_step(write_config, monkeypatch):
    """Counts that can be recomputed from the completions of the first step."""
    steps = []
    count = run_module.count_rollouts
    monkeypatch.setattr(
        run_module, "count_rollouts", lambda tally, groups, step: steps.append(groups) or count(tally, groups, step)
    )
    metrics = run(write_config(train__max_steps=1))[0]
    groups = steps[0]
    completions = [c for group in groups for c in group]
    tokens = [len(c.token_ids) for c in completions]
    assert metrics["completion_length"] == pytest.approx(sum(tokens) / len(tokens))
    assert metrics["reward"] == pytest.approx(
        sum(i % 2 == 0 for c in completions for i in c.token_ids) / len(completions)
    )
    assert metrics["truncated_share"] == pytest.approx(
        sum(n == 8 and c.token_ids[-1] not in (1, 2) for n, c in zip(tokens, completions, strict=True)) / len(tokens)
    )
    flat = sum(len({c.reward for c in group}) == 1 for group in groups) / len(groups)
    assert metrics["zero_variance_groups"] == flat
    nll = -sum(sum(c.rollout_logprobs) for c in completions) / sum(tokens)
    assert metrics["sampled_nll"] == pytest.approx(nll, rel=1e-5)
    assert metrics["sampler_gap_max"] < 1e-4
    assert metrics["learning_rate"] == pytest.approx(0.01 * 1 / 10)  # the first of ten warm-up steps


def test_step_metrics_follow_their_formulas(write_config, monkeypatch):
    """Each share and mean of docs/metrics.md from the step's sums, which the oracle checks."""
    totals, reduce = [], Tally.reduce
    monkeypatch.setattr(Tally, "reduce", lambda self, a: totals.append(reduce(self, a)) or totals[-1])
    changes = {"algorithm": "grpo", "objective": {"s2t": {"enabled": True, "tau_p": 0.01}}}
    m = run(write_config(train__max_steps=1, **changes))[0]
    t = totals[0]
    for p in (10, 50, 90):
        assert m[f"entropy_p{p}"] == pytest.approx(np.quantile(t["entropies"].double(), p / 100))
    for count in ("kept", "silenced", "candidate", "spurious", "negative_rare", "negative_sure"):
        assert m[f"{count}_share"] == pytest.approx(t[count] / t["batch_tokens"]), count
    for kind in ("spurious", "negative_rare", "negative_sure"):
        assert m[f"{kind}_gradient_share"] == pytest.approx(t[f"{kind}_mass"] / t["gradient_mass"]), kind
    for metric, total, count in (
        ("entropy", "entropy", "active_tokens"),
        ("collision", "collision", "active_tokens"),
        ("logit_grad_norm", "logit_grad_norm", "trained_tokens"),
        ("clip_low_share", "clipped_low", "trained_tokens"),
        ("clip_high_share", "clipped_high", "trained_tokens"),
        ("kl", "kl", "kl_tokens"),
        ("sampler_gap_mean", "gap", "gap_tokens"),
        ("sampler_gap_k3", "gap_k3", "gap_tokens"),
        ("sampler_capped_share", "capped", "active_tokens"),
    ):
        assert m[metric] == pytest.approx(t[total] / t[count]), metric
    assert t["candidate"] > t["spurious"] > 0
    assert t["active_tokens"] > t["trained_tokens"] > 0


def test_the_reward_rises(write_config):
    metrics = run(write_config(train__max_steps=30, log__save_steps=0, log__log_completions_steps=0))
    first, last = (sum(m["reward"] for m in part) / 5 for part in (metrics[:5], metrics[-5:]))
    assert last > first + 1.5  # of at most 8


RARELY_RIGHT = (
    "def even(completion_ids, **columns): return [float(ids[0] % 4 == ids[-1] % 2 == 0) for ids in completion_ids]"
)


@pytest.mark.parametrize("changes", [{}, {"algorithm": "dapo"}, {"objective": {"s2t": {"adaptive": True}}}], ids=str)
def test_resuming_gives_the_same_run_bit_for_bit(write_config, user_reward, tmp_path, changes):
    if "algorithm" in changes:
        user_reward(RARELY_RIGHT)
    whole = run(write_config(output_dir=str(tmp_path / "whole"), **changes))
    run(write_config(output_dir=str(tmp_path / "cut"), train__max_steps=2, **changes))
    run(write_config(output_dir=str(tmp_path / "cut"), **changes), resume=True)
    resumed = read_metrics(tmp_path / "cut")
    assert without_times(resumed) == without_times(whole)
    for name in ("adapter_model.safetensors", "optimizer.safetensors"):
        expected, actual = ((tmp_path / run_ / "checkpoint-4" / name).read_bytes() for run_ in ("whole", "cut"))
        assert expected == actual


@pytest.fixture
def benchmark_file(tmp_path):
    path = tmp_path / "mine.jsonl"
    write_lines(path, [{"problem": f"say {word}", "answer": number} for number, word in enumerate(("five", "six"))])
    return {"steps": 2, "benchmarks": [str(path)], "num_samples": 6, "temperature": 0.7, "top_p": 0.9}


def test_an_audit_changes_nothing_and_is_continued(write_config, tmp_path):
    plain = run(write_config(output_dir=str(tmp_path / "plain"), train__max_steps=3))
    audited = {"audit": {"enabled": True, "tokens_per_step": 3, "context": 2}}
    run(write_config(output_dir=str(tmp_path / "whole"), train__max_steps=3, **audited))
    run(write_config(train__max_steps=2, **audited))
    files = ("tokens.jsonl", "quadrants.jsonl")
    for name in files:  # of a step after the checkpoint
        write_lines(tmp_path / "run" / name, [*read_lines(tmp_path / "run" / name), {"step": 3}])
    run(write_config(train__max_steps=3, **audited), resume=True)
    assert without_times(read_metrics(tmp_path / "whole")) == without_times(plain)
    adapters = [tmp_path / name / "adapter" / "adapter_model.safetensors" for name in ("plain", "whole", "run")]
    assert len({path.read_bytes() for path in adapters}) == 1
    for name in files:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "run" / name).read_bytes()
    lines, steps = (read_lines(tmp_path / "run" / name) for name in files)
    assert [step["step"] for step in steps] == [1, 2, 3]
    for step, m in zip(steps, plain, strict=True):
        written = [line for line in lines if line["step"] == step["step"]]
        batch_tokens = 16 * m["completion_length"]
        assert sum(step["tokens"][:2]) == pytest.approx(m["candidate_share"] * batch_tokens)
        assert step["tokens"][0] == pytest.approx(m["spurious_share"] * batch_tokens)
        assert len(written) == min(3, sum(step["tokens"][:2]))
        assert step["tau_h"] == pytest.approx(m["tau_h"]) if m["tau_h"] else step["tau_h"] is None
    assert any(sum(step["tokens"][:2]) > 3 for step in steps)


def test_benchmarks_during_training(write_config, benchmark_file, tiny_model, tmp_path, monkeypatch, capsys):
    """Before, during and after; they change nothing in the training; a resumed run repeats none; and the last one gives
    what an evaluation of the final adapter gives."""
    plain = run(write_config(output_dir=str(tmp_path / "plain"), train__max_steps=3))
    draw, responses = exam.draw, []

    def note(*arguments):
        for line in draw(*arguments):
            responses.append(line["response"])
            yield line

    monkeypatch.setattr(exam, "draw", note)
    folder = tmp_path / "run"
    folder.mkdir()
    write_lines(folder / "evaluations.jsonl", [{"step": 0}])  # of a run that was killed in its first step
    run(write_config(train__max_steps=2, evaluation=benchmark_file))
    for name in ("evaluations.jsonl", "metrics.jsonl"):  # of a step after the checkpoint
        write_lines(folder / name, [*read_lines(folder / name), {"step": 3}])
    run(write_config(train__max_steps=3, evaluation=benchmark_file), resume=True)
    assert without_times(read_metrics(tmp_path / "run")) == without_times(plain)
    evaluations = read_lines(tmp_path / "run" / "evaluations.jsonl")
    assert [line["step"] for line in evaluations] == [0, 2, 3]
    assert all(line["benchmarks"]["mine"]["samples"] == 6 for line in evaluations)
    assert len(re.findall(r"^benchmarks after step [023]\n\| benchmark ", capsys.readouterr().out, re.MULTILINE)) == 3
    tree = {
        "model": str(tiny_model),
        "adapter": str(tmp_path / "run" / "adapter"),
        "output_dir": str(tmp_path / "evaluation"),
        "dtype": "float32",
        "benchmarks": benchmark_file["benchmarks"],
        "decoding": "justrl",
        "data": {"max_prompt_length": 64, "prompt_suffix": ""},
        "rollout": {"engine": "transformers", "num_samples": 6, "max_completion_length": 8},
    }
    (tmp_path / "eval.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    results = evaluate(load_eval_config(tmp_path / "eval.yaml"))
    assert results["benchmarks"] == evaluations[-1]["benchmarks"]
    assert [line["response"] for line in read_lines(tmp_path / "evaluation" / "samples-0.jsonl")] == responses[24:]
    assert responses[:12] != responses[12:24] != responses[24:]


def test_contaminated_rows_are_left_out(write_config, tmp_path, capsys):
    write_lines(tmp_path / "mine.jsonl", [{"problem": "Say two!", "answer": 1}, {"problem": "say seven", "answer": 1}])
    config = write_config(data__drop_contaminated=True, data__benchmarks=[str(tmp_path / "mine.jsonl")])
    prompts, _, _ = opening.load_prompts(load_config(config), print)
    assert [p.prompt for p in prompts] == ["say one", "say three", "say four"]
    printed = capsys.readouterr().out
    with pytest.raises(InputError, match="data.drop_contaminated: nowhere.jsonl: cannot be read .*; or set data.drop"):
        opening.load_prompts(load_config(config, ["data.benchmarks=[nowhere.jsonl]"]), print)
    assert f"1 rows of {tmp_path / 'prompts.jsonl'} that hold 1 benchmark problems left out" in printed


def test_who_stops_early_keeps_what_was_learned(write_config, tmp_path):
    whole = run(write_config(output_dir=str(tmp_path / "whole")))
    for metrics in train_module.train(load_config(write_config(log__save_steps=0))):
        if metrics["step"] == 3:
            break
    del metrics
    folder = tmp_path / "run"
    saved, final = (load_file(folder / name / "adapter_model.safetensors") for name in ("checkpoint-3", "adapter"))
    assert all(torch.equal(value, saved[name]) for name, value in final.items())
    assert (folder / "reward.png").exists()
    assert without_times(run(write_config(), resume=True)) == without_times(whole[3:])
    expected, actual = (tmp_path / name / "adapter" / "adapter_model.safetensors" for name in ("whole", "run"))
    assert expected.read_bytes() == actual.read_bytes()


def test_a_resumed_run_has_no_adapter_until_it_ends(write_config, tmp_path):
    run(write_config(train__max_steps=1))
    assert (tmp_path / "run" / "adapter").exists()
    steps = train_module.train(load_config(write_config()), resume=True)
    next(steps)
    assert not (tmp_path / "run" / "adapter").exists()
    steps.close()
    assert (tmp_path / "run" / "adapter").exists()


def test_the_folder_says_what_the_run_ran_on(write_config, tmp_path):
    run(write_config(train__max_steps=1))
    environment = json.loads((tmp_path / "run" / "environment.json").read_text(encoding="utf-8"))
    assert environment["hardware"] == f"CPU with {os.cpu_count()} cores" or torch.cuda.is_available()
    assert environment["torch"] == torch.__version__.partition("+")[0] or "+" in environment["torch"]
    assert environment["stapo_lite"] == "0.1.0"


def test_8_bit_adamw_resumes_too(write_config, tmp_path):
    eight_bit = {"train__optim": "paged_adamw_8bit", "lora": {"r": 64}}  # bitsandbytes keeps small tensors in 32 bits
    whole = run(write_config(output_dir=str(tmp_path / "whole"), **eight_bit))
    run(write_config(output_dir=str(tmp_path / "cut"), train__max_steps=2, **eight_bit))
    run(write_config(output_dir=str(tmp_path / "cut"), **eight_bit), resume=True)
    assert [m["loss"] for m in read_metrics(tmp_path / "cut")] == [m["loss"] for m in whole]
    expected, actual = (
        (tmp_path / run_ / "checkpoint-4" / "adapter_model.safetensors").read_bytes() for run_ in ("whole", "cut")
    )
    assert expected == actual


def test_resuming_with_another_config_names_the_key(write_config, tmp_path, monkeypatch, capsys):
    run(write_config(train__max_steps=2))
    assert command(monkeypatch, write_config(lora={"r": 16}), "--resume", "--force") == 2
    assert "error: --resume: lora.r cannot change in a run (lora.r 8 -> 16, " in capsys.readouterr().err
    changed = write_config(train__max_steps=3, train__learning_rate=0.02)
    assert command(monkeypatch, changed, "--resume") == 2
    error = capsys.readouterr().err
    assert "(train.learning_rate 0.01 -> 0.02, train.max_steps 2 -> 3): set the keys back" in error
    assert read_metrics(tmp_path / "run")[-1]["step"] == 2
    assert command(monkeypatch, changed, "--resume", "--force") == 0
    assert read_metrics(tmp_path / "run")[-1]["learning_rate"] == pytest.approx(0.02 * 3 / 10)
    settings = ["objective.s2t.tau_p=0.02", "train.weight_decay=0.5", "train.max_steps=4"]
    assert command(monkeypatch, changed, "--resume", "--force", *settings) == 0
    assert read_metrics(tmp_path / "run")[-1]["tau_p"] == 0.02
    state = json.loads((tmp_path / "run" / "checkpoint-4" / "state.json").read_text(encoding="utf-8"))
    assert state["optimizer"]["param_groups"][0]["weight_decay"] == 0.5
    last = [write_config(log__save_steps=1, train__learning_rate=0.02), *settings, "train.max_steps=5"]
    assert command(monkeypatch, *last, "--resume") == 0
    assert "with another config: log.save_steps 2 -> 1, train.max_steps 4 -> 5\n" in capsys.readouterr().out


def test_only_the_newest_checkpoints_are_kept(write_config, tmp_path):
    run(write_config(log__save_steps=1, log__save_total_limit=2))
    assert sorted(p.name for p in (tmp_path / "run").glob("*checkpoint-*")) == ["checkpoint-3", "checkpoint-4"]


def test_a_step_without_any_advantage_changes_nothing_and_says_so(write_config, user_reward, tmp_path, capsys):
    user_reward("def even(completions, **columns): return [1.0 for c in completions]")
    metrics = run(write_config(train__max_steps=2))
    assert [m["updates"] for m in metrics] == [0, 0]
    assert metrics[0]["zero_variance_groups"] == 1.0
    assert metrics[0]["loss"] is None
    assert "no update: no token to train" in capsys.readouterr().out
    saved = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    assert not any(value.any() for name, value in saved.items() if "lora_B" in name)


@pytest.mark.parametrize(
    "changes", [{"train__mini_batch_size": 4}, {"objective": {"old_logprobs": "rollout"}}], ids=str
)
def test_one_update_a_step_and_rollout_logprobs_need_no_old_pass(write_config, monkeypatch, changes):
    measured = []
    measure = train_module.measure
    monkeypatch.setattr(
        train_module, "measure", lambda policy, batch, rows, n: measured.extend(rows) or measure(policy, batch, rows, n)
    )
    metrics = run(write_config(train__max_steps=1, algorithm="justrl", **changes))
    assert not measured
    assert metrics[0]["sampler_gap_max"] < 1e-4  # of the first mini-batch in any case


@pytest.mark.parametrize("algorithm", ["stapo", "grpo", "dr-grpo", "dapo", "justrl", "20-entropy"])
def test_every_algorithm_trains(write_config, user_reward, algorithm):
    user_reward("def even(completion_ids, **columns): return [float(ids[0] % 2 == 0) for ids in completion_ids]")
    metrics = run(write_config(train__max_steps=3, algorithm=algorithm))
    assert sum(m["updates"] for m in metrics) > 0
    updated = [m for m in metrics if m["updates"]]
    assert all(m["grad_norm"] > 0 for m in updated)
    assert all((m["kl"] is not None) == (algorithm == "grpo") for m in updated)
    assert updated[-1]["kl"] is None or updated[-1]["kl"] >= 0
    for m in updated:
        kept = {"stapo": 1 - m["silenced_share"], "20-entropy": 0.2}.get(algorithm, 1.0)
        assert m["kept_share"] == pytest.approx(kept, abs=0.03 if algorithm == "20-entropy" else 1e-9)
        assert m["sampler_capped_share"] == 0


def test_dynamic_sampling_fills_the_batch_with_groups_that_vary(write_config, user_reward, trained, monkeypatch):
    user_reward(RARELY_RIGHT)
    sampled, count = [], run_module.count_rollouts
    monkeypatch.setattr(
        run_module, "count_rollouts", lambda t, groups, n: sampled.append(groups) or count(t, groups, n)
    )
    metrics = run(write_config(algorithm="dapo", train__max_steps=3, train__learning_rate=1e-9))
    assert max(m["sampling_rounds"] for m in metrics) > 1, "the case tests nothing"
    for step, m in enumerate(metrics):
        groups = sampled[step]
        varied = [group for group in groups if len({c.reward for c in group}) == 2]
        drawn = filled = 0  # later rounds draw what the yield so far promises to fill the batch
        while filled < 4:
            count = min(4, math.ceil((4 - filled) * drawn / filled)) if filled else 4
            filled += sum(group in varied for group in groups[drawn : drawn + count])
            drawn += count
        assert drawn == len(groups)
        assert m["batch_groups"] == 4
        assert [c for mini_batch in trained[2 * step : 2 * step + 2] for c in mini_batch] == [
            c for group in varied[:4] for c in group
        ]
        assert m["zero_variance_groups"] == pytest.approx(1 - len(varied) / len(groups))
        assert m["reward"] == pytest.approx(sum(c.reward for group in groups for c in group) / (4 * len(groups)))


@pytest.mark.parametrize("reward", ["1.0", "float('two' in str(p))"])
def test_dynamic_sampling_is_bounded(write_config, user_reward, reward):
    user_reward(f"def even(prompts, **columns): return [{reward} for p in prompts]")
    metrics = run(write_config(algorithm="dapo", train__max_steps=1, rollout__max_sampling_rounds=3))[0]
    assert metrics["sampling_rounds"] == 3
    assert metrics["batch_groups"] == 0
    assert metrics["updates"] == 0


def test_dynamic_sampling_goes_on_with_fewer_groups_at_the_bound(write_config, user_reward):
    user_reward("def even(prompts, **c): return [float(i % 2 == 0 and 'two' in str(p)) for i, p in enumerate(prompts)]")
    metrics = run(write_config(algorithm="dapo", train__max_steps=1, rollout__max_sampling_rounds=2))[0]
    assert metrics["batch_groups"] == 2  # one of the four prompts varies, in each of two rounds
    assert metrics["updates"] == 1


def test_places_by_hand():
    assert train_module.prompts_wanted(filled=0, size=8, drawn=0) == 8
    assert train_module.prompts_wanted(filled=0, size=8, drawn=16) == 8
    assert train_module.prompts_wanted(filled=6, size=8, drawn=9) == 3
    assert train_module.prompts_wanted(filled=1, size=8, drawn=24) == 8


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.25, 0.5, 0.75, 1.0, 1.0, (2 + 2**0.5) / 4, 0.5, (2 - 2**0.5) / 4]),
    ],
)
def test_learning_rates_by_hand(schedule, expected):
    train = Train(max_steps=8, warmup_steps=4, learning_rate=2.0, lr_scheduler_type=schedule)
    assert [run_module.learning_rate(train, step) / 2 for step in range(8)] == pytest.approx(expected)


def test_all_updates_of_a_step_have_one_rate(write_config):
    """Warm-up counts steps, not updates."""
    metrics = run(write_config(train__max_steps=3, train__warmup_steps=4, train__learning_rate=0.004))
    assert [m["learning_rate"] for m in metrics] == pytest.approx([0.001, 0.002, 0.003])
    assert [m["updates"] for m in metrics] == [2, 2, 2]


def test_no_two_runs_or_samples_share_a_seed():
    seeds = {
        derived_seed(derived_seed(run, position), g) for run in range(4) for position in range(500) for g in range(8)
    }
    assert len(seeds) == 4 * 500 * 8
    assert derived_seed(1, 23) != derived_seed(12, 3)
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "a:1", "PYTORCH_ALLOC_CONF": "b:2"}, "b:2"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "a:1"}, "a:1"),
    ],
)
def test_the_allocators_settings_under_the_name_that_vllm_reads(write_config, monkeypatch, given, expected):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # what the call sets ends with the test
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    make_accelerator(load_config(write_config()).log)
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == expected


def test_a_card_that_torch_cannot_use_is_named(write_config, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr("stapo_lite.lifecycle.NVIDIA_DRIVER", tmp_path / "none")
    make_accelerator(load_config(write_config()).log)
    assert "NVIDIA" not in caplog.text
    (tmp_path / "version").touch()
    monkeypatch.setattr("stapo_lite.lifecycle.NVIDIA_DRIVER", tmp_path / "version")
    make_accelerator(load_config(write_config()).log)
    assert "running on the CPU although there is an NVIDIA card: torch 2." in caplog.text


def test_the_cards_memory_is_what_is_held(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert card_memory() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10 * 2**30, 24 * 2**30))
    assert card_memory() == 14.0


def test_a_schedule_that_falls_is_of_its_max_steps(write_config):
    """Another end is another run; a constant rate has none."""
    for schedule in ("constant", "linear"):
        changes = {"train__lr_scheduler_type": schedule, "output_dir": str(Path(write_config()).parent / schedule)}
        run(write_config(train__max_steps=1, **changes))
        longer = write_config(train__max_steps=2, **changes)
        if schedule == "constant":
            assert len(run(longer, resume=True)) == 1
        else:
            with pytest.raises(InputError, match="train.max_steps 1 -> 2"):
                run(longer, resume=True)


def test_what_is_left_of_a_batch_is_cut_evenly():
    assert [len(part) for part in cut_evenly(range(9), 4)] == [3, 3, 3]
    assert [len(part) for part in cut_evenly(range(8), 4)] == [4, 4]
    assert [len(part) for part in cut_evenly(range(5), 4)] == [2, 3]
    assert cut_evenly([], 4) == []
    assert [x for part in cut_evenly(range(11), 4) for x in part] == list(range(11))


def test_soft_overlong_punishment_enters_the_advantage(write_config, user_reward, trained):
    user_reward("def even(completion_ids, **columns): return [1.0 for ids in completion_ids]")
    changes = {"rollout__max_completion_length": 64, "reward": {"functions": ["parity:even"], "overlong_penalty": 0.5}}
    metrics = run(write_config(train__max_steps=1, **changes, train__max_tokens_per_microbatch=512))[0]
    assert metrics["reward"] == 1.0  # before the punishment
    assert metrics["zero_variance_groups"] == 1.0
    assert 0 < metrics["overlong_penalty"] < 0.5
    longest, shortest = (pick((c for m in trained for c in m), key=lambda c: len(c.token_ids)) for pick in (max, min))
    assert longest.advantage < 0
    assert shortest.advantage > 0


def test_dr_grpo_takes_only_the_mean_off(write_config, trained):
    run(write_config(train__max_steps=1, algorithm="dr-grpo"))
    for mini_batch in trained:
        for start in range(0, len(mini_batch), 4):
            group = mini_batch[start : start + 4]
            mean = sum(c.reward for c in group) / 4
            assert [c.advantage for c in group] == pytest.approx([c.reward - mean for c in group])


def test_adaptive_tau_p_moves_and_is_logged(write_config):
    metrics = run(write_config(objective={"s2t": {"adaptive": True, "tau_p": 0.02, "target_share": 1e-4}}))
    assert metrics[0]["tau_p"] == 0.02
    for before, after in itertools.pairwise(metrics):
        factor = math.exp(0.1 * max(-10, 1 - before["silenced_share"] / 1e-4))
        assert after["tau_p"] == pytest.approx(min(0.02, max(2e-4, before["tau_p"] * factor)))
    assert metrics[-1]["tau_p"] < 0.02


def test_dry_run_prints_the_config_and_stops(write_config, tmp_path, monkeypatch, capsys):
    assert command(monkeypatch, write_config(), "train.max_steps=9", "algorithm=grpo", "--dry-run") == 0
    output = capsys.readouterr().out
    assert "max_steps: 9" in output
    assert "aggregation: sequence-mean" in output
    assert "beta: 0.04" in output
    assert "enabled: false" in output
    assert "4 prompts x 4 completions = 16 rollouts a step, 2 update(s) of 8 completions" in output
    assert not (tmp_path / "run").exists()


BAD_RUNS = {
    "unknown key": (["train.lr=1"], "unknown key 'train.lr'"),
    "missing file": (["data.source=nowhere.jsonl"], "data.source=nowhere.jsonl: no such file"),
    "missing column": (["data.answer_column=gold", "reward.functions=[math]"], "data.answer_column=gold: "),
    "no model": (["model=/nowhere/at/all"], "model=/nowhere/at/all: "),
    "long prompt": (["data.max_prompt_length=20"], "row 1: the prompt has"),
    "context": (["rollout.max_completion_length=500", "train.max_tokens_per_microbatch=999"], "holds 512 tokens"),
    "reward": (["reward.functions=[parity:odd]"], "reward.functions=parity:odd: cannot be imported"),
    "module": (["lora.target_modules=[q_proj]", "model=/dev"], "not a causal language model"),
    "folder": (["output_dir=/proc/run"], "output_dir=/proc/run: cannot be written"),
}


@pytest.mark.parametrize("case", BAD_RUNS)
def test_bad_input_is_one_line_and_status_2_before_the_model_loads(write_config, monkeypatch, capsys, case):
    monkeypatch.setattr(opening, "load_policy", lambda *_, **__: pytest.fail("the model was loaded"))
    overrides, message = BAD_RUNS[case]
    assert command(monkeypatch, write_config(), *overrides) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.engine=vllm", "rollout.engine=vllm: vLLM is not installed"),
        ("log.report_to=[trackio]", "log.report_to: trackio is not installed; pip install trackio"),
    ],
)
def test_packages_that_are_not_installed(write_config, monkeypatch, capsys, override, message):
    monkeypatch.setattr(opening, "load_policy", lambda *_, **__: pytest.fail("the model was loaded"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert command(monkeypatch, write_config(), override) == 2
    assert message in capsys.readouterr().err


def test_a_finished_run_is_not_overwritten(write_config, tmp_path, monkeypatch, capsys):
    run(write_config(train__max_steps=1))
    before = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8")
    assert command(monkeypatch, write_config()) == 2
    assert "holds a run: continue it with --resume" in capsys.readouterr().err
    assert (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8") == before


def launch(*arguments, timeout):
    flags = ["--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    flags += ["--num_cpu_threads_per_process", str(os.cpu_count())]
    executable = str(Path(sys.executable).with_name("accelerate"))
    return subprocess.run(
        [executable, "launch", *flags, "-m", "stapo_lite.train", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        cwd=ROOT,
        env=os.environ | {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"},  # a Hub that is out of reach
    )


def test_the_command_trains_a_real_model_with_vllm(smollm2, tmp_path):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    folder = tmp_path / "run"
    overrides = [f"model={smollm2}", f"output_dir={folder}", "rollout.engine=vllm", "train.max_steps=2"]
    done = launch("configs/quickstart.yaml", *overrides, "log.report_to=[tensorboard]", timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    metrics = read_metrics(folder)
    assert len(metrics) == 2
    assert metrics[0]["updates"] == 2
    assert 0.05 <= metrics[0]["reward"] <= 0.6  # the untrained model gets some sums right
    assert metrics[0]["sampler_gap_mean"] < 0.1  # bf16 in vLLM and in the trainer
    assert all(math.isfinite(m["grad_norm"]) for m in metrics)
    assert "adapter: " in done.stdout
    assert list(folder.rglob("events.out.tfevents*"))

    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(smollm2), folder / "adapter")
    assert any(p.any() for name, p in model.named_parameters() if "lora_B" in name)


@pytest.mark.slow
def test_the_quickstart_learns_to_add(smollm2, tmp_path):
    done = launch("configs/quickstart.yaml", f"model={smollm2}", f"output_dir={tmp_path / 'run'}", timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    rewards = [m["reward"] for m in read_metrics(tmp_path / "run")]
    assert 0.05 < rewards[0] < 0.5
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2
