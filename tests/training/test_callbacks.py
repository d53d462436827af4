"""What callbacks are told, in which order, and what becomes of a run if one fails."""

import re
from functools import partial
from types import SimpleNamespace

import pytest
from helpers import ROOT, run, without_times

from stapo_lite import Callback, RunError, Trainer, load_config
from stapo_lite.assemble import PythonInputs, open_run
from stapo_lite.extras.trackers import Trackers
from stapo_lite.training.clock import Clock
from stapo_lite.training.folder import read_metrics
from stapo_lite.training.loop import train

SHOWN = {
    "on_train_begin": lambda run: (run.progress.step, run.policy.device.type),
    "on_step_begin": lambda run, step: step if run.progress.step == step - 1 else None,
    "on_mini_batches": lambda run, batches: [len(batch.completions) for batch in batches],
    "on_update": lambda run, batch, update: len(update.masks.keep) == len(batch.owner),
    "on_step_end": lambda run, metrics, rollouts: (metrics["step"], len(rollouts.batch)),
    "on_save": lambda run, folder: folder.name if (folder / "state.json").exists() else None,
    "on_train_end": lambda run: (run.folder / "adapter" / "adapter_model.safetensors").exists(),
    "close": lambda: "closed",
}


class Notes(Callback):
    """Notes the events and what they bring."""

    def __init__(self):
        self.events = []
        for event in SHOWN:
            setattr(self, event, partial(self._note, event))

    def _note(self, event, *values):
        self.events.append((event, SHOWN[event](*values)))


def test_events_come_in_order_and_change_nothing(write_config, tmp_path):
    notes = Notes()
    config = write_config(train__max_steps=2, log__save_steps=1)
    metrics = Trainer(config=config, callbacks=[notes]).train()
    expected = [("on_train_begin", (0, "cpu"))]
    for n in (1, 2):
        expected += [("on_step_begin", n), ("on_mini_batches", [8, 8])]
        expected += [("on_update", True), ("on_update", True)]
        expected += [("on_step_end", (n, 4)), ("on_save", f"checkpoint-{n}")]
    assert notes.events == [*expected, ("on_train_end", True), ("close", "closed")]
    without = run(write_config(train__max_steps=2, output_dir=str(tmp_path / "without")))
    assert without_times(metrics) == without_times(without)


@pytest.mark.parametrize("event", ["on_step_begin", "on_update", "on_step_end"])
def test_a_callback_that_fails_is_named_and_the_run_can_be_resumed(write_config, tmp_path, event):
    def fail(self, run, *values):
        if run.progress.step >= 1 and run.history:
            raise LookupError("no such thing")

    breaks = type("Breaks", (Callback,), {event: fail})()
    config = write_config(train__max_steps=3, log__save_steps=0)
    with pytest.raises(RunError, match=rf"callback Breaks: {event} failed \(no such thing\)"):
        Trainer(config=config, callbacks=[breaks]).train()
    run(config, resume=True)
    whole = run(write_config(train__max_steps=3, output_dir=str(tmp_path / "whole")))
    assert without_times(read_metrics(tmp_path / "run")) == without_times(whole)


def test_the_example_of_the_docs_ends_a_run(write_config, tmp_path, capsys):
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    toy = {"configs/quickstart.yaml": str(write_config(log__save_steps=0)), "0.95": "0.5"}
    toy["runs/enough"] = str(tmp_path / "run")
    for ours, small in toy.items():
        example = example.replace(ours, small)
    exec(example, {})
    assert re.search(r"^reward \d\.\d\d: the run ends after step 1$", capsys.readouterr().out, re.M)
    assert (tmp_path / "run" / "adapter").exists()
    assert len(read_metrics(tmp_path / "run")) == 1


@pytest.mark.parametrize("by", ["break", "stop_reason"])
def test_leaving_an_open_run_early_saves_each_thing_once(write_config, tmp_path, by):
    notes, config = Notes(), write_config(log__save_steps=2)
    with open_run(load_config(config), python=PythonInputs(callbacks=[notes])) as opened:
        for metrics in train(opened):
            if metrics["step"] == 3 and by == "break":
                break
            opened.stop_reason = "enough" if metrics["step"] == 3 else None
    saved = [name for event, name in notes.events if event == "on_save"]
    assert saved == ["checkpoint-2", "checkpoint-3"]
    assert (tmp_path / "run" / "adapter").exists()
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


def test_the_clock_leaves_out_what_it_is_stopped_for(monkeypatch):
    times = iter([0.0, 1.0, 2.0, 9.0, 11.0, 13.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    clock = Clock()
    with clock.stopped(), clock.stopped():  # from 1 to 11, and within from 2 to 9
        pass
    clock.lap("rollout")
    assert clock.seconds == {"rollout": 3.0, "reward": 0.0, "update": 0.0}


def test_a_callback_closes_before_the_base_goes(write_config):
    class Last(Callback):
        def on_train_begin(self, run):
            self.run = run

        def close(self):
            self.layers = len(self.run.policy.model.get_base_model().get_decoder().layers)

    last = Last()
    Trainer(config=write_config(train__max_steps=1), callbacks=[last]).train()
    assert last.layers == 2
    assert last.run.policy.model is None


def test_evaluations_are_sent_to_trackers_with_their_step():
    sent = []
    accelerator = SimpleNamespace(log=lambda values, step=None: sent.append((step, values)))
    results = {"temperature": 1.0, "reward": 0.5, "reward/f": None}
    results |= {"benchmarks": {"aime24": {"avg": 0.25, "low": 0.0}}, "average": {"avg": 0.125}}
    Trackers(accelerator).on_evaluate(None, 7, results)
    named = {"reward": 0.5, "aime24": 0.25, "average": 0.125}
    assert sent == [(7, {f"evaluation/{name}": value for name, value in named.items()})]


def test_what_was_not_measured_is_not_sent_to_trackers(monkeypatch):
    sent = []
    monkeypatch.setattr("stapo_lite.extras.trackers.kept_completions", lambda *_: [])
    accelerator = SimpleNamespace(log=lambda values, step: sent.append((step, values)))
    run = SimpleNamespace(config=SimpleNamespace(log=None))
    Trackers(accelerator).on_step_end(run, {"step": 3, "reward": 0.5, "tau_h": None}, None)
    assert sent == [(3, {"reward": 0.5})]
