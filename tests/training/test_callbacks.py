"""What callbacks are told, in which order, and what becomes of a run if one fails."""

import itertools
import re

import pytest
from helpers import ROOT, run, without_times

from stapo_lite import Callback, InputError, RunError, Trainer, load_config
from stapo_lite.assemble import PythonInputs, open_run
from stapo_lite.training.folder import read_metrics
from stapo_lite.training.loop import train
from stapo_lite.training.run import Clock


class Notes(Callback):
    """Notes the events and what they bring."""

    def __init__(self):
        self.events, self.updates, self.metrics = [], [], []

    def on_train_begin(self, run):
        self.events.append(("train begins", run.progress.step, run.policy.device.type))

    def on_step_begin(self, run, step):
        assert run.progress.step == step - 1
        self.events.append(("step begins", step))

    def on_update(self, run, batch, update):
        assert len(update.tokens.keep) == len(batch.rows)
        self.updates.append(update)
        self.events.append(("update", len(batch.completions)))

    def on_step_end(self, run, metrics, rollouts):
        assert len(rollouts.batch) == 4
        self.metrics.append(metrics)
        self.events.append(("step ends", metrics["step"]))

    def on_save(self, run, folder):
        assert (folder / "state.json").exists()
        self.events.append(("saved", folder.name))

    def on_train_end(self, run):
        assert (run.folder / "adapter" / "adapter_model.safetensors").exists()
        self.events.append(("train ends", run.progress.step))

    def close(self):
        self.events.append(("closed",))


def test_events_come_in_order_and_change_nothing(write_config, tmp_path):
    notes = Notes()
    config = write_config(train__max_steps=2, log__save_steps=1)
    metrics = Trainer(config=config, callbacks=[notes]).train()
    steps = [
        [("step begins", n), ("update", 8), ("update", 8), ("step ends", n), ("saved", saved)]
        for n, saved in ((1, "checkpoint-1"), (2, "checkpoint-2"))
    ]
    begin, end = ("train begins", 0, "cpu"), [("train ends", 2), ("closed",)]
    assert notes.events == [begin, *itertools.chain(*steps), *end]
    assert notes.metrics == metrics
    assert all(update.changed for update in notes.updates)
    without = run(write_config(train__max_steps=2, output_dir=str(tmp_path / "without")))
    assert without_times(metrics) == without_times(without)


@pytest.mark.parametrize("event", ["on_step_begin", "on_update", "on_step_end"])
def test_a_callback_that_fails_is_named_and_the_run_can_be_resumed(write_config, tmp_path, event):
    class Breaks(Callback):
        pass

    def fail(self, run, *values):
        if run.progress.step >= 1 and len(run.history) >= 1:
            raise LookupError("no such thing")

    setattr(Breaks, event, fail)
    config = write_config(train__max_steps=3, log__save_steps=0)
    with pytest.raises(RunError, match=rf"callback Breaks: {event} failed \(no such thing\)"):
        Trainer(config=config, callbacks=[Breaks()]).train()
    run(config, resume=True)
    whole = run(write_config(train__max_steps=3, output_dir=str(tmp_path / "whole")))
    assert without_times(read_metrics(tmp_path / "run")) == without_times(whole)


def test_the_example_of_the_docs_ends_a_run(write_config, tmp_path, capsys):
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    config = str(write_config(log__save_steps=0))
    exec(example.replace("configs/quickstart.yaml", config).replace("0.95", "0.5"), {})
    assert re.search(r"^reward \d\.\d\d: the run ends after step 1$", capsys.readouterr().out, re.M)
    assert (tmp_path / "run" / "adapter").exists()
    assert len(read_metrics(tmp_path / "run")) == 1


@pytest.mark.parametrize("by", ["break", "stop_reason"])
def test_leaving_an_open_run_early_saves_each_thing_once(write_config, tmp_path, by):
    notes, folder = Notes(), tmp_path / "run"
    config = write_config(log__save_steps=2)
    with open_run(load_config(config), python=PythonInputs(callbacks=[notes])) as opened:
        for metrics in train(opened):
            if metrics["step"] == 3 and by == "break":
                break
            opened.stop_reason = "enough" if metrics["step"] == 3 else None
    saved = [event for event in notes.events if event[0] == "saved"]
    assert saved == [("saved", "checkpoint-2"), ("saved", "checkpoint-3")]
    assert (folder / "adapter").exists()
    assert len(run(config, resume=True)) == 1


def test_a_callback_that_cannot_be_closed_hides_no_error(write_config, caplog):
    class Unclosed(Callback):
        def on_train_begin(self, run):
            raise LookupError("first")

        def close(self):
            raise LookupError("second")

    with pytest.raises(RunError, match=r"callback Unclosed: on_train_begin failed \(first\)"):
        Trainer(config=write_config(), callbacks=[Unclosed()]).train()
    assert "callback Unclosed: close failed (second)" in caplog.text


@pytest.mark.parametrize("callbacks", [Callback(), [Callback]], ids=["no list", "a class"])
def test_callbacks_are_a_list_of_objects(write_config, callbacks):
    with pytest.raises(InputError, match="callbacks: must be a list of .*Callback objects"):
        Trainer(config=write_config(), callbacks=callbacks)


def test_the_clock_leaves_out_what_it_is_stopped_for(monkeypatch):
    times = iter([0.0, 1.0, 2.0, 9.0, 11.0, 13.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    clock = Clock()
    with clock.stopped(), clock.stopped():  # from 1 to 11, and within from 2 to 9
        pass
    clock.lap("rollout")
    assert clock.seconds == {"rollout": 3.0, "reward": 0.0, "update": 0.0}
