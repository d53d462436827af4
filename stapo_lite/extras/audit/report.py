"""A run at a glance: a table, `reward.png`, and its worst completions."""

from pathlib import Path

import pandas as pd

from stapo_lite.errors import InputError
from stapo_lite.extras.audit.charts import curves
from stapo_lite.files import read_lines
from stapo_lite.training.callbacks import Callback, Phase
from stapo_lite.training.folder import COMPLETIONS_FILE, METRICS_FILE, SYMPTOMS_FILE
from stapo_lite.training.log import shorten
from stapo_lite.training.run import Run

ROWS = {
    "reward": "reward",
    "sampled_nll": "-ln pi [nats]",
    "silenced_share": "silenced share",
    "completion_length": "completion length",
    "tokens_per_second": "tokens/s",
}


def read_log(path: Path) -> pd.DataFrame:
    """Read a log of a run. Values stay as they are; pandas' own reader would turn digits into
    numbers.

    Raises:
        InputError: there is no log, or it is empty.
    """
    lines = read_lines(path)
    if not lines:
        raise InputError(f"{path.parent}: no {path.name} with lines in it; is it a run folder?")
    return pd.DataFrame(lines)


def write_report(run_folder: Path) -> str:
    """Draw `reward.png` into the run folder; return a table of the first and the last steps, and
    the run's symptoms.

    Raises:
        InputError: the folder holds no metrics.
    """
    metrics = read_log(run_folder / METRICS_FILE).set_index("step")
    (run_folder / "reward.png").write_bytes(curves(metrics, ["reward"], "mean reward"))
    rows = metrics.reindex(columns=list(ROWS)).astype(float)
    rows = rows.rename(columns=ROWS)
    means = {"first 5": rows.head(5).mean(), "last 5": rows.tail(5).mean()}
    table = pd.DataFrame(means)
    seconds = metrics.seconds_step.sum()
    lines = [table.to_string(float_format="{:.4g}".format)]
    lines.append(f"{len(metrics)} steps in {seconds:.0f} s")
    for symptom in read_lines(run_folder / SYMPTOMS_FILE):
        lines.append("symptom at step {step}, {name}: {text}".format(**symptom))
    return "\n".join(lines)


def show_completions(folder: Path, worst: int, step: int | None) -> str:
    """The kept completions with the lowest rewards.

    Args:
        worst: how many to show.
        step: show only completions of this step; None for all.
    """
    if not (folder / COMPLETIONS_FILE).exists():  # log.completions=0
        return ""
    completions = read_log(folder / COMPLETIONS_FILE).astype({"reward": float})
    if step is not None:
        completions = completions[completions.step == step]
    texts = []
    for line in completions.nsmallest(worst, "reward").itertuples():
        head = f"step {line.step} | reward {line.reward} | row {shorten(str(line.columns))}"
        texts.append(f"{head}\n> {line.prompt}\n{line.text}")
    return "\n\n".join(texts)


class Report(Callback):
    """Prints the table at the end of a run."""

    phase = Phase.PUBLISH

    def on_train_end(self, run: Run) -> None:
        if run.accelerator.is_main_process:
            print(write_report(run.folder))
