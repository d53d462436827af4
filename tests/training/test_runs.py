"""Whole runs: in the process on the tiny model, and through the real command with a real model and
vLLM."""

import datetime
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from helpers import (
    ROOT,
    adapter_bytes,
    command,
    run,
)
from transformers import AutoTokenizer

from stapo_lite import assemble
from stapo_lite.config import Log, load_config
from stapo_lite.errors import InputError
from stapo_lite.extras.publish.export import export
from stapo_lite.files import read_lines, write_lines
from stapo_lite.rollout import vllm_options
from stapo_lite.training.folder import read_metrics
from stapo_lite.training.lifecycle import make_accelerator


def test_a_run_leaves_everything_behind_but_secrets(write_config, tmp_path, capsys, monkeypatch):
    for name in ("HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, f"secret-of-{name}")
    log = {
        "save_steps": 1,
        "log_completions_steps": 2,
        "audit_tokens": 64,
        "report_to": ["tensorboard"],
    }
    metrics, folder = run(write_config(log=log)), tmp_path / "run"
    assert read_metrics(folder) == metrics
    assert [m["step"] for m in metrics] == [1, 2, 3, 4]
    assert [m["updates"] for m in metrics] == [2] * 4
    assert [m["learning_rate"] for m in metrics] == pytest.approx(
        [0.001, 0.002, 0.003, 0.004]
    )  # steps, not updates
    assert load_config(folder / "config.yaml").train.max_steps == 4
    assert {p.name for p in folder.glob("*checkpoint-*")} == {
        "checkpoint-3",
        "checkpoint-4",
    }  # the newest two
    assert adapter_bytes(folder / "adapter") == adapter_bytes(folder / "checkpoint-4")
    assert (folder / "reward.png").read_bytes().startswith(b"\x89PNG")
    environment = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
    assert (
        environment["hardware"] == f"CPU with {os.cpu_count()} cores" or torch.cuda.is_available()
    )
    assert (
        environment["torch"] == torch.__version__.partition("+")[0] or "+" in environment["torch"]
    )
    export(folder, folder / "export", dtype="float32")
    written = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    output, errors = capsys.readouterr()
    assert b"secret-of" not in written + output.encode() + errors.encode()
    assert len(re.findall(r"^step \d/4 \| reward ", output, re.MULTILINE)) == 4
    assert len(re.findall(r"samples of step", output)) == 2
    assert "silenced share" in output
    rows = re.findall(
        r"^\| (`.*?) \|", (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    named = [name.replace("parity:even", "FUNCTION") for name in metrics[0]]
    assert sorted(name for row in rows for name in re.findall(r"`([\w/]+)`", row)) == sorted(named)


def test_completions_are_kept_with_their_rewards_and_shown_with_the_table(
    write_config, trained, tmp_path, capsys
):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics = run(
        write_config(log={"completions": 6, "report_to": ["tensorboard"]}, train__mini_batch_size=4)
    )
    lines = read_lines(tmp_path / "run" / "completions.jsonl")
    assert [line["step"] for line in lines] == [step for step in (1, 2, 3, 4) for _ in range(6)]
    for line, completion in zip(lines[6:12], trained[16:22], strict=True):
        assert line["text"] == completion.text
        assert line["prompt"] == completion.prompt.prompt
        assert line["reward"] == line["scores"]["parity:even"] == completion.reward
        assert line["advantage"] == completion.advantage
        assert (line["tokens"], line["truncated"]) == (
            len(completion.token_ids),
            completion.truncated,
        )
    events = EventAccumulator(str(tmp_path / "run" / "logs" / "stapo_lite")).Reload()
    known = {name for line in metrics for name, value in line.items() if value is not None}
    assert set(events.Tags()["scalars"]) == known - {"step"}  # our names alone
    assert [event.value for event in events.Scalars("reward")] == pytest.approx(
        [line["reward"] for line in metrics]
    )
    texts = events.Tensors("completions/text_summary")
    assert [text.step for text in texts] == [1, 2, 3, 4]
    assert b"say " in texts[0].tensor_proto.string_val[0]
    capsys.readouterr()
    (tmp_path / "run" / "reward.png").unlink()
    assert command("show", tmp_path / "run", "--worst", 3, "--step", 2) == 0
    table, plot, completions = capsys.readouterr().out.partition(
        f"plot: {tmp_path / 'run' / 'reward.png'}\n\n"
    )
    assert plot
    assert "silenced share" in table
    assert "4 steps in" in table
    assert (tmp_path / "run" / "reward.png").exists()
    shown = re.findall(
        r"^step 2 \| reward (\S+) \| advantage \S+ \| \d tokens", completions, re.MULTILINE
    )
    assert [float(reward) for reward in shown] == sorted(line["reward"] for line in lines[6:12])[:3]
    assert command("show", tmp_path / "run", "--step", 9) == 2
    assert "no completions of step 9 were kept; see log.completions" in capsys.readouterr().err


def test_what_stapo_show_prints(write_config, tmp_path, capsys):
    folder = tmp_path / "run"
    run(write_config(train__max_steps=1, log__completions=0))
    capsys.readouterr()
    assert command("show", folder) == 0
    assert capsys.readouterr().out.endswith(
        f"1 steps in {read_metrics(folder)[0]['seconds_step']:.0f} s\nplot: "
        f"{folder / 'reward.png'}\n"
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
    changes |= {
        "data__chat_template_kwargs": {"day": datetime.date(2024, 7, 26)},
        "train__max_steps": 1,
    }
    run(write_config(**changes))
    lines = read_lines(tmp_path / "run" / "completions.jsonl")
    assert {line["prompt"] for line in lines} == {"1+1?\n\nSo?"}
    assert (tmp_path / "run" / "checkpoint-1").exists()
    assert command("train", write_config(**changes), "--resume") == 0


def test_the_reward_rises(write_config):
    metrics = run(
        write_config(train__max_steps=30, log__save_steps=0, log__log_completions_steps=0)
    )
    first, last = (sum(m["reward"] for m in part) / 5 for part in (metrics[:5], metrics[-5:]))
    assert last > first + 1.5  # of at most 8


def test_rows_that_are_left_out_are_counted(write_config, tmp_path, capsys):
    write_lines(
        tmp_path / "mine.jsonl",
        [{"problem": "Say two!", "answer": 1}, {"problem": "say seven", "answer": 1}],
    )
    config = write_config(data__drop_contaminated=[str(tmp_path / "mine.jsonl")])
    prompts, _, _ = assemble.load_prompts(load_config(config), None, print)
    assert [p.prompt for p in prompts] == ["say one", "say three", "say four"]
    shorter = write_config(data__max_prompt_length=26, data__filter_overlong_prompts=True)
    assemble.load_prompts(load_config(shorter), None, print)
    printed = capsys.readouterr().out
    assert (
        f"left out 1 rows of {tmp_path / 'prompts.jsonl'}, which hold 1 benchmark problems"
        in printed
    )
    assert re.search(
        r"^2 prompts from .*prompts.jsonl; 2 longer than 26 tokens left out$", printed, re.MULTILINE
    )
    with pytest.raises(
        InputError,
        match="data.drop_contaminated: nowhere.jsonl: cannot be read .*; or set data.drop",
    ):
        assemble.load_prompts(
            load_config(config, ["data.drop_contaminated=[nowhere.jsonl]"]), None, print
        )


def test_the_allocators_settings_under_vllms_name_and_a_card_that_torch_cannot_use(
    monkeypatch, tmp_path, caplog
):
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
def test_bad_input_is_found_before_the_model_loads(
    write_config, monkeypatch, capsys, override, message
):
    monkeypatch.setattr(
        assemble, "load_weights", lambda *_, **__: pytest.fail("the model was loaded")
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert command("train", write_config(), override) == 2
    assert message in capsys.readouterr().err


def test_what_is_chosen_for_the_card_is_checked_and_kept_from_a_checkpoint_on(
    write_config, monkeypatch, capsys
):
    """An attempt that died without a checkpoint, on another card perhaps, leaves no choice
    behind."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    config, asked = write_config(train__max_steps=1), []

    def choose(given, engine, going_on, *_):
        asked.append(going_on and going_on.name)
        return given

    monkeypatch.setattr(assemble, "fit", choose)
    folder = Path(load_config(config).output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "environment.json").write_text('{"stapo_lite": "0"}', encoding="utf-8")
    (folder / "config.yaml").write_text("rollout: {max_num_seqs: 3}", encoding="utf-8")
    for _ in range(2):
        run(config, resume=True)
    assert asked == [None, folder.name]

    def choose_4_bits(given, *_):
        rollout = given.rollout.model_copy(update={"quantization": "bitsandbytes"})
        return given.model_copy(update={"rollout": rollout})

    monkeypatch.setattr(assemble, "fit", choose_4_bits)
    monkeypatch.setattr(vllm_options, "find_spec", lambda name: None)
    monkeypatch.setattr(
        assemble, "load_weights", lambda *_, **__: pytest.fail("the model was loaded")
    )
    assert command("train", config, "--force", "--resume", "rollout.engine=vllm") == 2
    assert "vLLM needs a plugin" in capsys.readouterr().err


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
