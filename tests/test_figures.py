"""Figures of the docs that come from files in benchmarks/results: README and pages must quote what
the files hold. Run a benchmark again, and this file says which sentences are to be changed."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import countdown_report
import experiments_report
import pytest
from study_csv import steps_paths

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def words(text: str) -> str:
    """The text with single spaces: a sentence is the same wherever its lines break, and a row of a
    table however wide its columns are."""
    return re.sub(r"\s+", " ", text)


def row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def step_against_trl() -> Iterator[tuple[str, str]]:
    step = result("step")
    pairs = ", ".join(f"{ratio:.1f}" for ratio in step["of each pair"])
    yield (
        "docs/results.md",
        f"TRL takes {step['TRL / ours, a completion token']:.1f} times as long for a completion "
        f"token (pairs: {pairs}) and {step['TRL / ours, a step']:.1f} times for a step",
    )


def update_against_trl() -> Iterator[tuple[str, str]]:
    update = result("update")
    for share in (0.0, 0.5, 0.75):
        case = update[f"zero {share}"]
        peaks = case["peak MiB beyond the models"]
        yield (
            "docs/results.md",
            f"| {100 * share:.0f} % | {case['TRL / ours']:.1f} | "
            f"{case['TRL from its first micro-batch on / ours']:.1f} | "
            f"{peaks['ours']:.0f}, {peaks['TRL']:.0f} MiB |",
        )
    whole = 1 / update["zero 0.0"]["TRL / ours"]
    yield "README.md", f"| an update on two CPU cores | {whole:.2f} of TRL's time | 1 |"


def lm_head() -> Iterator[tuple[str, str]]:
    sizes = [result("lm_head")[f"hidden {size}"] for size in (2048, 4096)]
    names = {
        "ours": "ours",
        "trl": "TRL's `ChunkedLogProbFunction`",
        "recomputed": "recomputed by chunks of tokens, as verl's torch version",
        "dense": "dense",
    }
    for key, name in names.items():
        cells = [name]
        for size in sizes:
            case = size["forward+backward"][key]
            cells.append(f"{case['seconds']:.1f} s, {case['ours / this']:.2f}")
        peaks = [f"{s['forward+backward'][key]['peak MiB beyond the inputs']:.0f}" for s in sizes]
        cells.append(f"{', '.join(peaks)} MiB")
        yield "docs/results.md", row(cells)

    def largest(whose: Sequence[str], *kinds: str) -> float:
        errors = [size["largest error"][key] for size in sizes for key in whose]
        return max(error[kind] for error in errors for kind in kinds)

    ours, others = ["ours"], ["trl", "recomputed", "dense"]
    yield (
        "docs/results.md",
        f"Ours errs by at most {largest(ours, 'logprob', 'entropy'):.0e} in log-probability and "
        f"entropy and {100 * largest(ours, 'gradient'):.1f} % in the gradient, the others by up to "
        f"{largest(others, 'logprob', 'entropy'):.1f} and "
        f"{100 * largest(others, 'gradient'):.1f} %",
    )
    slower = [f"{size['forward']['trl']['ours / this']:.2f}" for size in sizes]
    yield "docs/results.md", f"Without gradient ours takes {' and '.join(slower)} times as long"


def sampler_against_trainer() -> Iterator[tuple[str, str]]:
    served = {
        "adapter on bf16, bf16 trainer": "bfloat16 base and adapter, bfloat16",
        "adapter on bf16, logits in fp32, bf16 trainer": (
            "the same with logits in fp32 (`head_dtype`), the default on a GPU"
        ),
        "merged bf16, bf16 trainer": "merged bfloat16 weights (TRL's sync), bfloat16",
        "adapter on bitsandbytes nf4, nf4 trainer": "bitsandbytes nf4 and adapter, nf4",
        "adapter on bf16, nf4 trainer": "bfloat16 base and adapter, nf4",
    }
    mismatch = result("mismatch")
    for key, name in served.items():
        yield "docs/results.md", f"| {name} | {mismatch[key]['gap']['mean |d|']:.3f} |"


def one_base() -> Iterator[tuple[str, str]]:
    found = result("one_base")
    on, off = found["medians"]["on"], found["medians"]["off"]
    assert found["metrics equal to the bit"]
    yield (
        "docs/how.md",
        f"peaks at {on['peak']:.2f} GiB instead of {off['peak']:.2f}, the first step ends after "
        f"{on['first step']:.1f} s instead of {off['first step']:.1f}, and a step takes "
        f"{on['step']:.1f} s instead of {off['step']:.1f}",
    )


def start_up() -> Iterator[tuple[str, str]]:
    wall = {name: seconds["wall"] for name, seconds in result("startup")["seconds"].items()}
    refused = {
        f"{wall[name]:.1f}"
        for name in ("train --dry-run", "an unknown key", "evaluate, a value out of range")
    }
    assert len(refused) == 1
    yield (
        "docs/results.md",
        f"`--help` answers in {wall['train --help']:.2f} s, `--dry-run`, an unknown key and a "
        f"value out of range in {refused.pop()} s, a plan in {wall['plan']:.1f} s",
    )


def study_of_countdown() -> Iterator[tuple[str, str]]:
    found = experiments_report.load(steps_paths(RESULTS, "countdown"))
    for line in countdown_report.table(found).splitlines():
        yield "docs/results.md", line
    tests = {}
    for line in countdown_report.primary(found).splitlines():
        method, _, _, _, entropy, p, _ = (cell.strip() for cell in line.strip("|").split("|"))
        tests[method] = f"`{method}` {entropy} (p {p})"
    masks = ("stapo", "full", "random", "stare")
    yield "docs/results.md", ", ".join(tests[method] for method in masks)
    smallest = 2 / 2 ** len(found["stapo"])  # of an exact paired test; Holm's first is of two
    yield (
        "docs/results.md",
        f"pairs allow p = {smallest:.2f} at best, and {2 * smallest:.2f} after Holm's correction",
    )


def studies_of_smollm2() -> Iterator[tuple[str, str]]:
    names = (
        "reward, all steps",
        "held-out reward",
        "entropy at reward 0.3",
        "entropy at the end",
    )
    for study in ("writing", "unstable", "unstable-3e-3", "alliteration"):
        runs = experiments_report.load(steps_paths(RESULTS, study))
        for method, seeds in experiments_report.measure_runs(runs).items():
            cells = [study, method, str(len(seeds))]
            for name in names:
                cells.append(experiments_report.cell([run[name] for run in seeds.values()]))
            yield "docs/results.md", row(cells)


@pytest.mark.parametrize(
    "figures",
    [
        step_against_trl,
        update_against_trl,
        lm_head,
        sampler_against_trainer,
        one_base,
        start_up,
        study_of_countdown,
        studies_of_smollm2,
    ],
)
def test_the_docs_quote_the_results(figures):
    missing = []
    for page, sentence in figures():
        if words(sentence) not in words((ROOT / page).read_text(encoding="utf-8")):
            missing.append(f"{page}: {sentence}")
    assert missing == []
