"""README and tables quote benchmarks/results as they are: which sentences a new run changes."""

import json
import re
from statistics import fmean

import experiments_report
import pandas as pd
import pytest
from helpers import ROOT, benchmark
from study_file import study_path

RESULTS = ROOT / "benchmarks" / "results"
TABLES = "benchmarks/README.md"
RESULTS_PAGE = "docs/results.md"
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
    yield RESULTS_PAGE, f"TRL takes {token:.1f} times as long per completion token"
    ratios = {share: update[f"zero {share}"]["TRL / ours"] for share in (0.0, 0.5, 0.75)}
    for share, ratio in ratios.items():
        yield TABLES, f"| {100 * share:.0f} % | {ratio:.1f} |"
    yield RESULTS_PAGE, "TRL's time / ours " + ", ".join(f"{r:.1f}" for r in ratios.values())


def learned():
    scores = pd.read_parquet(RESULTS / "qwen_gsm8k" / "scores.parquet")
    scores = scores.set_index(["score", "evaluation"])
    percent = (100 * scores).round(6)  # 28.75, not 28.749999
    rights = {name: f"{mean:.1f}" for name, mean in percent.loc["right", "mean"].items()}
    gains = {}
    for name in ("eval-stapo", "eval-justrl"):
        row = percent.loc[("right", name), ["change", "change from", "change to"]]
        gains[name] = "+{:.1f} ({:.1f} to {:.1f})".format(*row)
        cut, code = (percent.loc[(score, name), "mean"] for score in ("cut off", "code"))
        cells = [rights[name], gains[name], f"{cut:.1f}"]
        cells += [f"{scores.loc[('tokens', name), 'mean']:.0f}", f"{code:.2g}"]
        yield RESULTS_PAGE, " | ".join(cells)
    before, after, baseline = (rights[f"eval-{name}"] for name in ("base", "stapo", "justrl"))
    yield "README.md", f"from {before} % to {after} % with the mask and to {baseline} % without"
    gain = gains["eval-stapo"].replace(" (", " points, ").removesuffix(")")
    seen = f"{before} % right before and {after} % after ({gain}"
    yield "configs/qwen2.5-0.5b_gsm8k.yaml", seen


def gym():
    reward = result("reasoning_gym")["reward"]
    first, last = fmean(reward[:5]), fmean(reward[-5:])
    yield "docs/data.md", f"from {first:.2f} (mean of the first five steps) to {last:.2f}"


def studies():
    runs = experiments_report.load(study_path(RESULTS, "writing"))
    for method, seeds in experiments_report.measure_runs(runs).items():
        cells = [experiments_report.cell([run[m] for run in seeds.values()]) for m in MEASURES]
        yield TABLES, f"| {' | '.join([method, str(len(seeds)), *cells])} |"


def breaks():
    *lines, prevented = filter(None, benchmark("break_report").splitlines())
    for line in lines:
        if line.startswith("|"):
            yield TABLES, line
        if row := re.match(r"\| (?:stapo|justrl|random|full) +\| (\d+ of .*)\|$", line):
            breaks, _, back, reward, _, sums = map(str.strip, row[1].split("|"))
            yield RESULTS_PAGE, f"| {breaks} | {back.split()[0]} | {reward} | {sums} |"
    yield RESULTS_PAGE, re.search(r"found in .*", prevented)[0]


@pytest.mark.parametrize("figures", [against_trl, learned, gym, studies, breaks])
def test_the_docs_quote_the_results(figures):
    def words(text):  # the same wherever lines break, and however wide columns are
        return re.sub(r"-{3,}", "-", re.sub(r"\s+", " ", text))

    quoted = list(figures())
    pages = {name: words((ROOT / name).read_text("utf-8")) for name, _ in quoted}
    assert [text for name, text in quoted if words(text) not in pages[name]] == []
