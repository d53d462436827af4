"""A run that Python drives, with functions and rows that exist only there."""

import os
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import datasets
import pytest
import yaml
from helpers import ROOT, contents, held_out_rows, without_times

from stapo_lite import InputError, Trainer, load_config
from stapo_lite.config.schema import EvalPrompting
from stapo_lite.extras.publish import hub as push
from stapo_lite.files import read_lines, write_lines
from stapo_lite.rewards.functions import RewardModel
from stapo_lite.training.folder import read_metrics

ROWS = [{"prompt": f"say {word}", "wanted": word} for word in ("one", "two", "three", "four")]


@pytest.fixture
def tree(write_config):
    tree = yaml.safe_load(write_config(train__max_steps=2).read_text(encoding="utf-8"))
    del tree["data"]["source"], tree["reward"]
    return tree


def test_closures_and_rows_of_ones_own(tree, tmp_path, caplog):
    calls = []

    def even(completion_ids, wanted, trainer_state, **_):
        calls.append((sorted(set(wanted)), trainer_state.global_step, trainer_state.max_steps))
        return [sum(i % 2 == 0 for i in ids) for ids in completion_ids]

    def unsure(completions, **_):
        return [None] * len(completions)

    half = lambda completions, **_: [0.5] * len(completions)  # noqa: E731
    rows = datasets.Dataset.from_list(ROWS)
    options = {"reward_funcs": [even, half, unsure], "train_dataset": rows}
    trainer = Trainer(config=tree, seed=1, **options)
    assert trainer.config.reward.functions == ["even", "<lambda>", "unsure"]
    assert (trainer.config.seed, trainer.config.data.source) == (1, "train_dataset")
    metrics = next(iter(trainer))  # and no more: adapter and checkpoint are kept
    assert metrics["reward"] == metrics["reward/even"] + 0.5
    assert (metrics["reward/<lambda>"], metrics["reward_std/<lambda>"]) == (0.5, 0.0)
    assert metrics.get("reward/unsure") is None
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1]
    assert [m["step"] for m in Trainer(config=trainer.config, **options).train(True)] == [2]
    assert calls == [(["four", "one", "three", "two"], step, 2) for step in (0, 1)]
    alone = options | {"reward_funcs": unsure, "max_steps": 1}
    (metrics,) = Trainer(config=tree, output_dir=tmp_path / "alone", **alone).train()
    assert metrics["reward"] is None


def test_one_function_and_a_whole_config_then_evaluation_and_export(tree, tmp_path):
    write_lines(tmp_path / "mine.jsonl", [{"problem": "1 + 1?", "answer": "2"}])
    config = load_config(tree | {"data": {"source": "elsewhere", "max_prompt_length": 64}})
    reward = lambda completions, **_: range(len(completions))  # noqa: E731
    trainer = Trainer(config=config, reward_funcs=reward, train_dataset=ROWS)
    assert trainer.config.model_fields_set == config.model_fields_set | {"reward"}
    assert len(trainer.train()) == 2
    adapter = trainer.export(tmp_path / "out", base_model=tree["model"])
    assert (adapter / "adapter_model.safetensors").exists()
    keys = {"rollout": {"num_samples": 2, "engine": "transformers"}}
    keys |= {"data": {"max_prompt_length": 128}, "benchmarks": [str(tmp_path / "mine.jsonl")]}
    results = trainer.evaluate(**keys)
    assert results["benchmarks"]["mine"]["avg"] == 0.0


VLLM = {"quantization": "bitsandbytes", "vllm": {"block_size": 32}}


@pytest.mark.parametrize(
    ("rollout", "evaluated", "engine"),
    [
        ({"engine": "transformers"}, {}, ("transformers", None, {})),
        ({"engine": "server"}, {}, ("auto", None, {})),
        (VLLM | {"engine": "server"}, {}, ("auto", "bitsandbytes", {})),
        (VLLM | {"engine": "vllm"}, {}, ("vllm", *VLLM.values())),
        (VLLM | {"engine": "vllm"}, {"engine": "transformers"}, ("transformers", None, {})),
    ],
)
def test_an_evaluation_is_as_the_training(tree, tmp_path, monkeypatch, rollout, evaluated, engine):
    monkeypatch.setattr("stapo_lite.trainer.evaluate", lambda config: config)
    prompting = {"system_prompt": "Be brief.", "chat_template_kwargs": {"a": 1}}
    rollout = rollout | {"max_completion_length": 9}
    data = prompting | {"max_prompt_length": 99}  # benchmarks have longer ones
    trainer = Trainer(config=tree | {"data": data, "rollout": rollout}, train_dataset=ROWS)
    config = trainer.evaluate(limit=3, rollout=evaluated)
    assert config.data == EvalPrompting(**prompting, prompt_suffix="")
    assert (config.limit, config.rollout.max_completion_length, config.dtype) == (3, 9, "float32")
    assert (config.rollout.engine, config.rollout.quantization, config.rollout.vllm) == engine
    assert config.adapter == str(tmp_path / "run" / "adapter")


def test_a_finished_run_is_pushed(hub, tree, tmp_path, monkeypatch):
    reward = lambda completions, **_: [1.0] * len(completions)  # noqa: E731
    trainer = Trainer(config=tree, reward_funcs=reward, train_dataset=ROWS)
    trainer.train()
    adapter = contents(tmp_path / "run" / "adapter")
    for name in ("mine", "mine", "me/adapter"):  # again, and under the name of a folder of the run
        trainer.push_to_hub(name, merge=name == "mine")
    assert contents(tmp_path / "run" / "adapter") == adapter
    assert "model.safetensors" in hub.files["me/mine"]
    assert b"datasets:" not in hub.files["me/mine"]["README.md"]  # the Hub has none of that name
    pushed = b"".join(b"".join(files.values()) for files in hub.files.values())
    assert str(Path(tree["model"]).parent).encode() not in pushed
    monkeypatch.setattr(push.HfApi, "upload_folder", lambda *_, **__: 1 / 0)
    with pytest.raises(InputError, match="not pushed .*hub/other is complete; upload it with: hf"):
        trainer.push_to_hub("me/other", merge=True)
    assert (tmp_path / "run" / "hub" / "other" / "model.safetensors").exists()


def test_runs_exports_and_what_servers_read_have_the_umasks_permissions(write_config, tmp_path):
    """safetensors writes files that only their owner may read."""
    keys = {"evaluation": held_out_rows(tmp_path), "log": {"save_steps": 1}}
    trainer = Trainer(config=write_config(train__max_steps=1, **keys))
    before = os.umask(0o027)
    try:
        trainer.train()
        for merge in (False, True):
            trainer.export(tmp_path / "run" / str(merge), merge=merge, dtype="float32")
    finally:
        os.umask(before)
    modes = {
        path.parent.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*.safetensors")
    }
    assert modes == dict.fromkeys(("adapter", "best", "checkpoint-1", "True", "False"), 0o640)


def test_a_run_is_mirrored_on_the_hub(hub, write_config, tmp_path, monkeypatch):
    """At each checkpoint and at the end, in this order; an upload that fails ends no run."""
    pushed, create_commit = [], push.HfApi.create_commit

    def note(api, *arguments, **options):
        pushed.append({o.path_in_repo: Path(o.path_or_fileobj) for o in options["operations"]})
        if len(pushed) == 1:
            raise OSError("the connection is lost")
        return create_commit(api, *arguments, **options)

    monkeypatch.setattr(push.HfApi, "create_commit", note)
    log = {"save_steps": 2, "hub_model_id": "mine", "hub_private_repo": True}
    Trainer(config=write_config(), log=log).train()
    folders = [files["adapter_model.safetensors"].parent.name for files in pushed]
    assert folders == ["checkpoint-2", "checkpoint-4", "adapter"]
    assert hub.created["me/mine"]["visibility"] == "private"
    assert hub.files["me/mine"].keys() == {"adapter_config.json", "adapter_model.safetensors"}
    for name, content in hub.files["me/mine"].items():
        assert content == (tmp_path / "run" / "adapter" / name).read_bytes()
        assert str(tmp_path.parent).encode() not in content  # the base's path


async def spell(episode):
    await episode.generate(max_tokens=2)
    episode.add(episode.prompt.columns["wanted"])
    await episode.generate()


def test_several_turns(tree, tmp_path, watch):
    """Only the model's tokens are trained on; held-out rows are answered in turns as well."""
    seen = []
    watch(RewardModel, "score", lambda _, rewards, completions, *__: seen.extend(completions))

    def even(completion_ids, **_):
        return [sum(i % 2 == 0 for i in ids) for ids in completion_ids]

    changes = {"train_dataset": ROWS, "reward_funcs": even}
    own = {"rollout_func": partial(spell), "output_dir": tmp_path / "own"}
    trainer = Trainer(config=tree, **own, **changes)
    assert trainer.config.rollout.function == "partial"
    metrics, first = trainer.train(), seen[:16]
    assert all(c.prompt.columns["wanted"] in c.text for c in seen)
    tokens = [pair for c in first for pair in zip(c.rollout_logprobs, c.loss_mask, strict=True)]
    written = [logprob for logprob, own in tokens if own]
    assert len(written) == sum(len(c.token_ids) - len(c.prompt.columns["wanted"]) for c in first)
    assert metrics[0]["sampled_nll"] == pytest.approx(-sum(written) / len(written), rel=1e-5)
    assert metrics[0]["completion_length"] == sum(c.written for c in first) / 16
    assert metrics[0]["sampler_gap_mean"] < 1e-5
    write_lines(tmp_path / "held.jsonl", ROWS[:3])
    held = {"source": str(tmp_path / "held.jsonl"), "steps": 10, "temperature": 0.5}
    keys = {"function": "test_trainer:spell", "evaluation": held, "output_dir": tmp_path / "path"}
    seen.clear()
    assert without_times(Trainer(config=tree, **keys, **changes).train()) == without_times(metrics)
    evaluated = seen[:3]  # before the first step
    assert [c.prompt.columns["wanted"] for c in evaluated] == [row["wanted"] for row in ROWS[:3]]
    assert all(c.prompt.columns["wanted"] in c.text and not all(c.loss_mask) for c in evaluated)
    before, _ = read_lines(tmp_path / "path" / "evaluations.jsonl")
    assert before["reward"] == pytest.approx(sum(c.reward for c in evaluated) / 3)


TOY = "max_steps=1, engine='transformers', dtype='float32', max_prompt_length=99"


@pytest.mark.parametrize(
    ("page", "engine", "adapter"),
    [
        ("README.md", "transformers", "brief-adapter"),
        ("docs/turns.md", "vllm", "calculator/adapter"),
    ],
)
def test_lines_to_copy(write_config, tiny_model, tmp_path, monkeypatch, page, engine, adapter):
    if engine == "vllm":
        pytest.importorskip("vllm", reason="vLLM is not installed")
    text = (ROOT / page).read_text(encoding="utf-8")
    lines = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[-1]
    keys = {"train__max_steps": 1, "train__max_tokens_per_microbatch": 1024}
    toy = {
        "configs/quickstart.yaml": str(write_config(rollout__engine=engine, **keys)),
        "Qwen/Qwen3-0.6B": str(tiny_model),
        "=256": "=32",
        "max_steps=20": TOY,
        "max_steps=10": "max_steps=1",
    }
    for given, smaller in toy.items():
        lines = lines.replace(given, smaller)
    monkeypatch.chdir(tmp_path)
    exec(lines, {})
    assert (tmp_path / "runs" / adapter / "adapter_model.safetensors").exists()


def of_trl(prompts, trainer):
    """A rollout function as TRL calls it."""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"train_dataset": []}, "data.source=train_dataset: must be a list of rows"),
        (
            {"train_dataset": iter(ROWS)},
            "must be a list of rows, at least one, or a datasets.Dataset",
        ),
        ({"reward_funcs": [len, len]}, "a name occurs twice"),
        ({"rollout_func": spell, "tools": [len]}, "tools: a rollout_func gives them to"),
        ({"rollout_func": of_trl}, "rollout_func: must take one argument, the episode"),
        ({"rollout_func": lambda episode: None}, "rollout_func: must be a coroutine function"),
        ({"function": "nowhere:f"}, "rollout.function=nowhere:f: cannot be imported"),
        ({"function": "builtins:len"}, "rollout.function=builtins:len: must be a coroutine"),
    ],
)
def test_mistakes(tree, given, message):
    with pytest.raises(InputError, match=message):
        Trainer(config=tree, **{"train_dataset": ROWS, "reward_funcs": len} | given).train()


def test_a_run_ends_once_its_adapter_is_on_the_hub(tmp_path, monkeypatch):
    upload = Mock()
    monkeypatch.setattr(push, "prepare_repository", lambda *_: "me/mine")
    monkeypatch.setattr(push.HfApi, "upload_folder", lambda *_, **__: upload)
    mirror = push.HubMirror("mine", private=False)
    mirror.on_save(None, tmp_path)
    upload.result.assert_not_called()
    mirror.on_train_end(SimpleNamespace(folder=tmp_path))
    upload.result.assert_called_once_with()
