"""Grading: how long 100,000 answers take, whether memory grows, and how far math-verify alone would get.

    python benchmarks/grading.py DATA [--answers 100000] [--workers 2] [--out FILE]

DATA is a folder with JSONL files of `problem` and `answer` (the six benchmarks), and with labelled equivalence cases in
`verify_cases.jsonl`. Responses are 2,000 characters of text and a boxed answer (the gold, a rewritten gold or a wrong
one) or none, where something is extracted all the same. Memory is the workers' resident set.
"""

import argparse
import json
import logging
import random
from dataclasses import asdict
from pathlib import Path

import psutil
from common import now, save

from stapo_lite.data.benchmarks import BENCHMARKS
from stapo_lite.files import read_jsonl
from stapo_lite.rewards.answers import grade
from stapo_lite.rewards.grading import MathGrader, Question

THOUGHTS = "We compute the value step by step, $x = 3$ and then $y^2 + 4 = 7$. " * 30


def responses(folder: Path, count: int) -> list[Question]:
    """As many of each benchmark as an evaluation by the paper's protocol has."""
    rng = random.Random(0)
    golds = []
    for path in sorted(folder.glob("*.jsonl")):
        source = next((source for name, source in BENCHMARKS.items() if path.stem.startswith(name)), None)
        if source and not path.stem.endswith("_meta"):
            golds += [str(row["answer"]) for row in read_jsonl(path)] * source.num_samples

    def respond(gold: str) -> Question:
        kind = rng.choices(("right", "rewritten", "wrong", "none"), (5, 1, 3, 1))[0]
        answer = gold
        if kind == "rewritten":
            answer = gold.replace("\\frac", "\\dfrac").replace("(", "\\left(").replace(")", "\\right)")
        if kind == "wrong":
            digits = (str((int(c) + rng.randrange(1, 9)) % 10) if c.isdigit() else c for c in gold)
            answer = "".join(digits)
        end = "Thus we get 12 and so on" if kind == "none" else f"So the answer is $\\boxed{{{answer}}}$."
        return Question(gold, THOUGHTS + end)

    return [respond(rng.choice(golds)) for _ in range(count)]


def workers_mb() -> int:
    """Resident memory of this process's children that grade."""
    return sum(child.memory_info().rss for child in psutil.Process().children()) >> 20


def agreement(folder: Path) -> dict[str, dict[str, int]]:
    """On the labelled cases, of our grading and of math-verify alone with the gold in a box."""
    from math_verify import parse, verify

    def alone(gold: str, response: str) -> bool:
        answers = [parse(text, parsing_timeout=None) for text in (f"\\boxed{{{gold}}}", response)]
        return bool(verify(*answers, timeout_seconds=None))

    logging.disable(logging.CRITICAL)
    cases = read_jsonl(folder / "verify_cases.jsonl")
    result = {}
    for name, judge in (("ours", lambda g, r: grade(**asdict(Question(g, r)))[0]), ("math_verify", alone)):
        verdicts = [judge(c["gold"], f"\\boxed{{{c['pred']}}}" if c["form"] == "answer" else c["pred"]) for c in cases]
        result[name] = {
            "cases": len(cases),
            "agree": sum(v == c["equal"] for v, c in zip(verdicts, cases, strict=True)),
            "false_positives": sum(v and not c["equal"] for v, c in zip(verdicts, cases, strict=True)),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--answers", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    questions = responses(arguments.data, arguments.answers)
    grader = MathGrader(5.0, arguments.workers)
    tenth = len(questions) // 10
    start, verdicts, progress = now(), [], []
    for first in range(0, len(questions), tenth):
        verdicts += grader.grade(questions[first : first + tenth])
        progress.append({"answers": len(verdicts), "seconds": round(now() - start, 1), "workers_mb": workers_mb()})
        print(json.dumps(progress[-1]), flush=True)
    grader.close()
    save(
        {
            "answers": len(verdicts),
            "workers": arguments.workers,
            "seconds": progress[-1]["seconds"],
            "correct": sum(verdict.correct for verdict in verdicts),
            "progress": progress,
            "labelled_cases": agreement(arguments.data),
        },
        arguments.out,
    )


if __name__ == "__main__":
    main()
