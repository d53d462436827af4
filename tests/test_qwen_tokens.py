"""The measurement of tokens of a real Qwen: its tables by hand, and a run of it at toy size."""

from types import SimpleNamespace

import pytest
import qwen_tokens
import qwen_tokens_report as report
import torch
from helpers import benchmark
from pandas import DataFrame, read_parquet

from stapo_lite.config import load_config
from stapo_lite.files import write_lines
from stapo_lite.types import Completion


def line(problem, right, *tokens):
    """A completion; its tokens are (probability, entropy, collision probability)."""
    p, entropy, collision = (list(values) for values in zip(*tokens, strict=True))
    return {
        "problem": problem,
        "right": right,
        "token_ids": list(range(len(p))),
        "logprobs": torch.tensor(p).log().tolist(),
        "entropy": entropy,
        "collision": collision,
    }


LINES = [
    line(0, True, (0.001, 0.1, 0.9), (0.0015, 2.0, 0.2), (0.5, 0.5, 0.5)),
    line(0, False, (0.001, 0.05, 0.95)),
    line(1, True, (0.001, 0.01, 0.99)),  # a group without advantage
    line(1, True, (0.001, 3.0, 0.1)),
]


def test_shares_by_hand():
    """tau_h = 0.1 + 3/4 (2.0 - 0.1), so that one of two candidates is spurious."""
    found = report.shares(report.token_table(LINES), report.VERSIONS["paper"])
    norms = [(1 - 2 * p + c) ** 0.5 for p, c in ((0.001, 0.9), (0.0015, 0.2), (0.5, 0.5))]
    norms.append((1 - 0.002 + 0.95) ** 0.5)
    expected = {
        "candidates, %": 100 * 2 / 6,
        "spurious, %": 100 / 6,
        "of the gradient, %": 100 * norms[0] / sum(norms),
        "times a token's gradient": norms[0] / (sum(norms) / 4),
        "tau_h": 1.525,
        "same kind in wrong answers, %": 100 / 6,
        "their gradient, %": 100 * norms[3] / sum(norms),
    }
    assert found == pytest.approx(expected, rel=1e-5)


def test_rare_tokens_of_right_answers_are_found_in_every_group():
    """But not those that end their completion."""
    last = (0.001, 0.01, 0.99)
    longer = [line(1, True, (0.001, entropy, 0.5), last) for entropy in (0.01, 3.0)]
    assert report.spurious_and_others(LINES[:2] + longer) == {
        "spurious": [(0, 0), (2, 0)],
        "open": [(0, 1), (3, 0)],
    }


def test_the_papers_bounds_hold():
    log_p = (4 * torch.randn(500, 50, generator=torch.Generator().manual_seed(0))).log_softmax(1)
    p, chosen = log_p.exp(), torch.arange(500) % 50
    tokens = DataFrame(
        {
            "p": p[range(500), chosen].numpy(),
            "entropy": -(p * log_p).sum(1).numpy(),
            "norm": (torch.nn.functional.one_hot(chosen, 50) - p).norm(dim=1).numpy(),
        }
    )
    found = report.bounds(tokens, 50)
    assert found["tokens"].sum() == 500
    assert (found[["norm_by_lower", "upper_by_norm"]].fillna(1) >= 1 - 1e-5).all(axis=None)
    assert (found.loc[found["p"].map(lambda bin: bin.right) <= 0.5, "lower_is_0"] == 0).all()


def test_intervals_are_over_problems():
    """With one problem every sample is the same."""
    found = report.with_intervals(
        report.token_table(LINES[:2]), lambda tokens: {"p": tokens["p"].mean()}
    )
    assert found["p from"] == found["p"] == found["p to"] == pytest.approx(0.5035 / 4)


def test_effects_by_hand():
    effects = DataFrame(
        {"kind": ["spurious", "spurious"], "right_before": [8, 4], "right_after": [0, 4]}
    )
    (row,) = report.effects_table(effects).to_dict("records")
    assert (row["before"], row["after"], row["difference"]) == (0.75, 0.25, -0.5)
    assert (row["difference from"], row["difference to"]) == (-1, 0)


def test_answers_go_on_from_just_before_and_just_after(write_config):
    """The engine gives one token more; an answer is right if it has two."""
    asked = []

    def stream(prompts, seeds, decodings):
        asked.extend(zip((tuple(p.token_ids) for p in prompts), decodings, strict=True))
        assert len(set(seeds)) == len(seeds)
        for index, prompt in reversed(list(enumerate(prompts))):
            yield index, Completion(prompt, [5], [], False, 0)

    config = load_config(write_config())
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: "x" * len(ids))
    grader = SimpleNamespace(grade=lambda asked: [(len(q.response) == 2, None) for q in asked])
    engine = SimpleNamespace(stream=stream)
    setup = qwen_tokens.Setup(config, [], tokenizer, engine, None, grader)
    lines = [{"token_ids": [7, 8, 9], "prompt_ids": [1], "answer": "2"}]
    found = qwen_tokens.answer_from(setup, lines, [(0, 0), (0, 1)])
    assert [(f["position"], f["right_before"], f["right_after"]) for f in found] == [
        (0, 0, 8),  # 5, and 7 5
        (1, 8, 0),  # 7 5, and 7 8 5
    ]
    assert asked[0][0] == (1,)
    assert asked[8][0] == asked[16][0] == (1, 7)
    assert asked[24][0] == (1, 7, 8)
    longest = config.rollout.max_completion_length
    assert [longest - d.max_completion_length for _, d in asked[::8]] == [0, 1, 1, 2]


@pytest.mark.slow
def test_a_toy_measurement_that_was_stopped_goes_on(tiny_model, tmp_path):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    rows = [{"problem": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(2)]
    write_lines(tmp_path / "rows.jsonl", rows)
    options = [tiny_model, "--data", tmp_path / "rows.jsonl", "--folder", tmp_path / "run"]
    options += ["--problems", 2, "--short", 0, "--longest", 6, "--cache", 64, "--dtype", "float32"]
    printed = [benchmark("qwen_tokens", *options) for _ in range(2)]
    assert "problems 0 to 1" in printed[0]
    assert "problems 0 to 1" not in printed[1]  # it was there
    summary = read_parquet(tmp_path / "run" / "summary.parquet").to_dict("records")[0]
    assert (summary["problems"], summary["completions"]) == (2, 16)
    assert summary["gap between engine and trainer, nats"] < 1e-4
