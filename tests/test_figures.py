"""README and tables quote benchmarks/results as they are: which sentences a new run changes."""

import json
import re

import countdown_report
import experiments_report
import pytest
from helpers import ROOT
from study_csv import steps_paths

RESULTS = ROOT / "benchmarks" / "results"
TABLES = "benchmarks/README.md"
MEASURES = ("reward, all steps", "held-out reward", "entropy at reward 0.3", "entropy at the end")


def result(name):
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def against_trl():
    step, update = result("step"), result("update")
    token, whole = step["TRL / ours, a completion token"], step["TRL / ours, a step"]
    yield TABLES, f"TRL takes {token:.1f} times as long for a completion token"
    yield TABLES, f"and {whole:.1f} times for a step"
    own = 1 / update["zero 0.0"]["TRL / ours"]
    yield "README.md", f"| an update on two CPU cores | {own:.2f} of TRL's time | 1 |"
    for share in (0.0, 0.5, 0.75):
        ratio = update[f"zero {share}"]["TRL / ours"]
        yield TABLES, f"| {100 * share:.0f} % | {ratio:.1f} |"


def one_base():
    on, off = (result("one_base")["medians"][side] for side in ("on", "off"))
    yield "docs/how.md", f"peaks at {on['peak']:.2f} GiB instead of {off['peak']:.2f}"


def studies():
    found = experiments_report.load(steps_paths(RESULTS, "countdown"))
    for line in countdown_report.table(found).splitlines():
        yield TABLES, line
    runs = experiments_report.load(steps_paths(RESULTS, "writing"))
    for method, seeds in experiments_report.measure_runs(runs).items():
        cells = [experiments_report.cell([run[m] for run in seeds.values()]) for m in MEASURES]
        yield TABLES, f"| {' | '.join([method, str(len(seeds)), *cells])} |"


@pytest.mark.parametrize("figures", [against_trl, one_base, studies])
def test_the_docs_quote_the_results(figures):
    def words(text):  # the same wherever lines break, and however wide columns are
        return re.sub(r"-{3,}", "-", re.sub(r"\s+", " ", text))

    pages = {name: words((ROOT / name).read_text("utf-8")) for name, _ in figures()}
    assert [text for name, text in figures() if words(text) not in pages[name]] == []
