"""A run that Python drives, with functions and rows that exist only there."""

import re
import tempfile
from functools import partial
from pathlib import Path

import datasets
import pandas
import pytest
import torch
import yaml
from helpers import ROOT, without_times

from stapo_lite import Config, InputError, Trainer, load_config
from stapo_lite.config.schema import EvalPrompting
from stapo_lite.extras.evaluation import periodic
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


def test_closures_and_rows_of_ones_own(tree, tmp_path):
    calls = []

    def even(completion_ids, wanted, trainer_state, **_):
        calls.append((sorted(set(wanted)), trainer_state.global_step, trainer_state.max_steps))
        return [sum(i % 2 == 0 for i in ids) for ids in completion_ids]

    lambdas = [
        lambda completions, **_: [0.5] * len(completions),
        lambda completions, **_: [None] * len(completions),
    ]
    options = {"reward_funcs": [even, *lambdas], "train_dataset": datasets.Dataset.from_list(ROWS)}
    trainer = Trainer(config=tree, seed=1, **options)
    assert trainer.config.reward.functions == ["even", "<lambda>", "<lambda>#2"]
    assert (trainer.config.seed, trainer.config.data.source) == (1, "train_dataset")
    metrics = next(iter(trainer))  # and no more: adapter and checkpoint are kept
    assert metrics["reward"] == metrics["reward/even"] + 0.5
    assert (metrics["reward/<lambda>"], metrics["reward_std/<lambda>"]) == (0.5, 0.0)
    assert metrics["reward/<lambda>#2"] is None
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1]
    again = Trainer(config=trainer.config, **options)
    assert [m["step"] for m in again.train(resume=True)] == [2]
    words = ["four", "one", "three", "two"]
    assert calls == [(words, 0, 2), (words, 1, 2)]


def test_trainer_takes_one_function_and_whole_configs(tree, tmp_path, capsys):
    write_lines(tmp_path / "mine.jsonl", [{"problem": "1 + 1?", "answer": "2"}])
    config = load_config(tree | {"data": {"source": "elsewhere", "max_prompt_length": 64}})
    reward = lambda completions, **_: range(len(completions))  # noqa: E731
    trainer = Trainer(config=config, reward_funcs=reward, train_dataset=ROWS)
    assert isinstance(trainer.config, Config)
    assert trainer.config.model_fields_set == config.model_fields_set | {
        "reward"
    }  # memory: auto asks what was given
    assert len(trainer.train()) == 2
    adapter = trainer.export(tmp_path / "out", base_model=tree["model"])
    assert (adapter / "adapter_model.safetensors").exists()
    keys = {
        "rollout": {"num_samples": 2, "engine": "transformers"},
        "data": {"max_prompt_length": 128},
    }
    results = trainer.evaluate(benchmarks=[str(tmp_path / "mine.jsonl")], **keys)
    assert results["benchmarks"]["mine"]["avg"] == 0.0


def test_an_evaluation_is_prompted_as_the_training(tree, tmp_path, monkeypatch):
    monkeypatch.setattr("stapo_lite.trainer.evaluate", lambda config: config)
    tree["data"] |= {"system_prompt": "Be brief.", "chat_template_kwargs": {"a": 1}}
    trainer = Trainer(config=tree, train_dataset=ROWS)
    config = trainer.evaluate(benchmarks=["math500"], limit=3, data={"max_prompt_length": 99})
    assert config.data == EvalPrompting(
        system_prompt="Be brief.",
        prompt_suffix="",
        chat_template_kwargs={"a": 1},
        max_prompt_length=99,
    )
    assert (config.limit, config.rollout.max_completion_length, config.dtype) == (3, 8, "float32")
    assert config.adapter == str(tmp_path / "run" / "adapter")
    served = {"quantization": "bitsandbytes", "vllm": {"block_size": 32}}
    trainer = Trainer(config=tree, rollout=served, train_dataset=ROWS)
    rollout = trainer.evaluate().rollout
    assert (rollout.quantization, rollout.vllm) == ("bitsandbytes", {"block_size": 32})
    rollout = trainer.evaluate(rollout={"engine": "transformers"}).rollout
    assert (rollout.quantization, rollout.vllm) == (None, {})
    for engine, expected in (
        ("transformers", "transformers"),
        ("vllm", "vllm"),
        ("server", "auto"),
    ):
        trainer = Trainer(config=tree, engine=engine, train_dataset=ROWS)
        assert trainer.evaluate().rollout.engine == expected
    assert trainer.evaluate(rollout={"engine": "transformers"}).rollout.engine == "transformers"


def test_a_callable_never_takes_the_place_of_a_named_function(tree):
    def math(**_):
        return []

    trainer = Trainer(
        config=tree, reward_funcs=[math, "math", len, "len", math], train_dataset=ROWS
    )
    assert trainer.config.reward.functions == ["math#2", "math", "len#2", "len", "math#3"]


def test_pushing(hub, tree, tmp_path, monkeypatch):
    reward = lambda completions, **_: [1.0] * len(completions)  # noqa: E731
    trainer = Trainer(config=tree, reward_funcs=reward, train_dataset=ROWS)
    trainer.train()
    trainer.push_to_hub("mine", merge=True)
    assert "model.safetensors" in hub.files["me/mine"]
    assert (
        b"datasets:" not in hub.files["me/mine"]["README.md"]
    )  # there is none of that name on the Hub
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with pytest.raises(InputError, match="--merge, or --base-model"):
        trainer.push_to_hub("mine")
    assert not list(temporary.iterdir())
    monkeypatch.setattr(push.HfApi, "upload_folder", lambda *_, **__: 1 / 0)
    with pytest.raises(
        InputError, match="not pushed .*; (.*) is complete; upload it with: hf upload"
    ) as failed:
        trainer.push_to_hub("mine", merge=True)
    kept = Path(re.search("; (.*) is complete", str(failed.value))[1])
    assert (kept / "model.safetensors").exists()


def test_a_run_that_is_mirrored_on_the_hub(hub, write_config, tmp_path, caplog, monkeypatch):
    """At each checkpoint and at the end; uploads that fail cost a warning."""
    pushed, upload = [], push.HfApi.upload_folder

    def note(api, **options):
        folder = options["folder_path"]
        pushed.append({path.name: path.read_bytes() for path in folder.iterdir()})
        assert str(tmp_path.parent.parent).encode() not in b"".join(
            pushed[-1].values()
        )  # no path of this machine
        if len(pushed) == 1:
            raise OSError("the connection is lost")
        return upload(api, **options)

    monkeypatch.setattr(push.HfApi, "upload_folder", note)
    log = {"save_steps": 2, "hub_model_id": "mine", "hub_private_repo": True}
    Trainer(config=write_config(), log=log).train()
    assert "log.hub_model_id: not pushed this time" in caplog.text
    assert len(pushed) >= 2
    assert hub.created["me/mine"]["visibility"] == "private"
    assert hub.files["me/mine"] == pushed[-1]
    assert {
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
    } <= set(pushed[-1])
    adapter = tmp_path / "run" / "adapter" / "adapter_model.safetensors"
    assert pushed[-1]["adapter_model.safetensors"] == adapter.read_bytes()
    assert pushed[0]["adapter_model.safetensors"] != adapter.read_bytes()
    assert b"| steps | 4 of 4 prompts" in pushed[-1]["README.md"]
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    with pytest.raises(
        InputError, match="log.hub_model_id=other: .*a token that can write comes from"
    ):
        Trainer(config=write_config(output_dir=str(tmp_path / "b")), hub_model_id="other").train()


def test_what_cannot_be_copied_for_the_hub_leaves_nothing(
    hub, write_config, tmp_path, caplog, monkeypatch
):
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    write = Path.write_bytes

    def refuse(path, content):
        if temporary in path.parents:
            raise OSError("No space left on device")
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", refuse)
    Trainer(config=write_config(train__max_steps=1), hub_model_id="mine").train()
    assert "log.hub_model_id: not pushed this time (No space left on device)" in caplog.text
    assert not list(temporary.iterdir())


async def spell(episode):
    await episode.generate(max_tokens=2)
    episode.add(episode.prompt.columns["wanted"])
    await episode.generate()


def test_several_turns(tree, tmp_path, monkeypatch):
    """The tool's tokens count for the length, and for nothing else; the same by the function's
    path."""
    seen, score = [], RewardModel.score
    monkeypatch.setattr(
        RewardModel, "score", lambda self, c, *rest: (score(self, c, *rest), seen.extend(c))
    )

    settings, play = [], periodic.play
    monkeypatch.setattr(
        periodic, "play", lambda *given: (play(*given), settings.append(given[1]))[0]
    )

    def even(completion_ids, **_):
        return [sum(i % 2 == 0 for i in ids) for ids in completion_ids]

    changes = {"train_dataset": ROWS, "reward_funcs": even}
    trainer = Trainer(config=tree, output_dir=str(tmp_path / "own"), rollout_func=spell, **changes)
    assert trainer.config.rollout.function == "spell"
    other = Trainer(config=tree, rollout_func=partial(spell), **changes)
    assert other.config.rollout.function == "partial"
    metrics = trainer.train()
    first = seen[:16]
    assert all(c.prompt.columns["wanted"] in c.text for c in seen)
    written = [
        x for c in first for x, own in zip(c.rollout_logprobs, c.loss_mask, strict=True) if own
    ]
    assert len(written) == sum(len(c.token_ids) - len(c.prompt.columns["wanted"]) for c in first)
    assert metrics[0]["sampled_nll"] == pytest.approx(-sum(written) / len(written), rel=1e-5)
    assert metrics[0]["completion_length"] == sum(len(c.token_ids) for c in first) / 16
    assert metrics[0]["sampler_gap_max"] < 1e-4
    assert all(m["updates"] == 2 for m in metrics)
    (tmp_path / "my_tools.py").write_text(
        "from test_trainer import spell\nplain = len\n", encoding="utf-8"
    )
    write_lines(tmp_path / "held.jsonl", ROWS[:3])
    held = {"source": str(tmp_path / "held.jsonl"), "steps": 10, "temperature": 0.5}
    by_path = Trainer(
        config=tree,
        function="my_tools:spell",
        output_dir=str(tmp_path / "path"),
        evaluation=held,
        **changes,
    )
    seen.clear()
    assert without_times(by_path.train()) == without_times(metrics)
    evaluated = seen[:3]  # before the first step, in turns as well
    assert [c.prompt.columns["wanted"] for c in evaluated] == [row["wanted"] for row in ROWS[:3]]
    assert all(c.prompt.columns["wanted"] in c.text and not all(c.loss_mask) for c in evaluated)
    before, _ = read_lines(tmp_path / "path" / "evaluations.jsonl")
    assert before["reward"] == pytest.approx(sum(c.reward for c in evaluated) / 3)
    assert all(given.stop_token_ids for given in settings)  # turns end as in training


def run_with(tree, overrides):
    config = load_config(tree, ["data.source=none", *overrides])
    Trainer(config=config, train_dataset=ROWS, reward_funcs=len).train()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.function=nowhere:f"], "rollout.function=nowhere:f: cannot be imported"),
        (
            ["rollout.function=builtins:len"],
            "rollout.function=builtins:len: must be a coroutine function",
        ),
        (
            ["rollout.function=a:b", "rollout.engine=server", "rollout.max_lag=1"],
            "rollout.function needs rollout.max_lag=0",
        ),
        (
            [
                "rollout.function=a:b",
                "evaluation.steps=1",
                "evaluation.source=a",
                "evaluation.top_p=0.9",
            ],
            "evaluation.top_p=0.9: rollout.function makes the completions of evaluation.source",
        ),
    ],
)
def test_turns_that_cannot_be(tree, overrides, message):
    with pytest.raises(InputError, match=message):
        run_with(tree, overrides)


def test_the_page_about_turns(write_config, tmp_path, monkeypatch):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    page = (ROOT / "docs" / "turns.md").read_text(encoding="utf-8")
    _, lines = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    config = write_config(
        train__max_steps=1, rollout__engine="vllm", train__max_tokens_per_microbatch=1024
    )
    lines = lines.replace("configs/quickstart.yaml", str(config))
    exec(lines.replace("max_steps=10", "max_steps=1"), {})
    assert (tmp_path / "runs" / "calculator" / "adapter" / "adapter_model.safetensors").exists()


TOY = "engine='transformers', dtype='float32', max_prompt_length=99"


@pytest.mark.parametrize("page", ["README.md", "docs/data.md"])
def test_lines_to_copy(write_config, tiny_model, tmp_path, monkeypatch, page):
    readme = (ROOT / page).read_text(encoding="utf-8")
    (lines,) = re.findall(r"```python\n(from stapo_lite import Trainer.*?)```", readme, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    lines = lines.replace("configs/quickstart.yaml", str(write_config(train__max_steps=1)))
    lines = (
        lines.replace("Qwen/Qwen3-0.6B", str(tiny_model))
        .replace("=256", "=32")
        .replace("max_steps=20", f"max_steps=1, {TOY}")
    )
    exec(lines, {})
    assert (tmp_path / "runs" / "brief-adapter" / "adapter_model.safetensors").exists()


def test_a_batch_that_no_function_judges_is_noticed(tree, caplog):
    def unjudged(completions, **columns):
        return [None] * len(completions)

    Trainer(config=tree, max_steps=1, reward_funcs=unjudged, train_dataset=ROWS).train()
    assert "no reward function judged a completion of step 1" in caplog.text


def of_trl(prompts, trainer):
    """A rollout function as TRL calls it."""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"train_dataset": []}, "data.source=train_dataset: no rows"),
        ({"train_dataset": ["one"]}, "data.source=train_dataset: rows must be dictionaries"),
        (
            {"train_dataset": ROWS, "reward_funcs": ["nowhere:f"]},
            "reward.functions=nowhere:f: cannot be imported",
        ),
        ({"reward_funcs": len}, "key 'data.source' is required: add it"),
        ({"train_dataset": ROWS, "reward_funcs": ["math", "math"]}, "one is listed twice"),
        ({"train_dataset": ROWS, "reward_funcs": []}, r"reward_funcs=\[\]: give a function"),
        (
            {"train_dataset": ROWS, "reward_funcs": torch.nn.Linear(1, 1)},
            "reward_funcs: Linear is a model or a class",
        ),
        (
            {"train_dataset": ROWS, "per_device_train_batch_size": 8},
            "unknown key 'per_device_train_batch_size': TRL's name; here train.mini_batch_size",
        ),
        ({"model": object()}, "model: give a folder or a name on the Hub; got object"),
        ({"model": "run.yaml"}, r"model=run.yaml: a YAML file is a config, Trainer\(config=...\)"),
        (
            {"train_dataset": ROWS, "rollout_func": spell, "tools": [len]},
            "tools: a rollout_func gives them to",
        ),
        ({"train_dataset": ROWS, "tools": [len]}, "tools: a list of functions with type hints"),
        (
            {"train_dataset": {"train": ROWS}},
            "must be a list of rows or a datasets.Dataset, got dict",
        ),
        (
            {"train_dataset": iter(ROWS)},
            "must be a list of rows or a datasets.Dataset, got list_iterator",
        ),
        (
            {"train_dataset": ROWS, "rollout_func": of_trl},
            "rollout_func: must take one argument, the episode",
        ),
        (
            {"train_dataset": ROWS, "rollout_func": lambda episode: None},
            "rollout_func: must be a coroutine function",
        ),
        (
            {"train_dataset": pandas.DataFrame(ROWS)},
            "must be a list of rows or a datasets.Dataset",
        ),
    ],
)
def test_mistakes(tree, given, message):
    with pytest.raises(InputError, match=message):
        Trainer(config=tree, **given).train()
