"""The token log against plain loops over all logits."""

import copy
import math
from types import SimpleNamespace

import oracle
import pytest
from helpers import (
    ADVANTAGES,
    SAMPLING,
    TAU_P,
    Letters,
    fake_completions,
    make_learner,
    measured,
    objective,
    packed,
    randomise_adapter,
    sampled_by_an_engine,
)

from stapo_lite.extras.audit import token_log
from stapo_lite.extras.audit.token_log import TokenLog
from stapo_lite.files import read_lines
from stapo_lite.training.update import update

CONTEXT = 3
"""Tokens around a candidate, so that they are fewer than there are."""
NUMBERS = ("probability", "entropy", "gradient_norm", "advantage", "tau_h")


@pytest.fixture(autouse=True)
def short_context(monkeypatch):
    monkeypatch.setattr(token_log, "CONTEXT", CONTEXT)


def logged(
    policy,
    folder,
    *mini_batches,
    limit=10_000,
    max_tokens=10_000,
    algorithm="stapo",
    old=None,
    s2t=None,
    before=None,
):
    """(candidates, the step's line) of updates that all start from `policy`.

    Args:
        before: the adapter at the step's beginning, if it is another one.
    """
    folder.mkdir(exist_ok=True)
    kind, log, results = objective(algorithm, s2t), TokenLog(limit), []
    learner = make_learner(policy, kind, max_tokens)
    start = copy.deepcopy(policy.model.state_dict())
    now = {name: parameter.detach().clone() for name, parameter in policy.parameters.items()}
    run = SimpleNamespace(
        folder=folder,
        tokenizer=Letters(),
        policy=policy,
        learner=learner,
        accelerator=learner.accelerator,
        progress=learner.progress,
        snapshot=SimpleNamespace(adapter=before or now),
    )
    for completions in mini_batches:
        policy.model.load_state_dict(start)
        results.append(update(learner, packed(policy, completions, old)))
        log.on_update(run, packed(policy, completions), results[-1])
    policy.model.load_state_dict(start)
    thresholds = [result.tau_h for result in results if result.tau_h is not None]
    tau_h = sum(thresholds) / len(thresholds) if thresholds else None
    log.on_step_end(run, {"step": 7, "tau_p": TAU_P, "tau_h": tau_h}, None)
    (line,) = read_lines(folder / "quadrants.jsonl")
    return read_lines(folder / "tokens.jsonl"), line


def expected(policy, completions, numbers, ratios, kept_all=False, before=None):
    """{(tokens before, token): line} of the candidates, and of every token with A > 0 (probability,
    entropy, norm).

    Args:
        before: the policy that the step began with, whose most probable tokens are the
            alternatives.
    """
    kept, _, tau_h = oracle.masks(completions, numbers, oracle.Settings(tau_p=TAU_P))
    candidates, points = {}, []
    for c in completions:
        if c.advantage <= 0:
            continue
        distributions, alternatives = (
            oracle.token_logits(model, c, SAMPLING.temperature).detach().double().softmax(-1)
            for model in (policy, before or policy)
        )
        for t, token in enumerate(c.token_ids):
            p = distributions[t]
            norm = (
                abs(c.advantage)
                * ratios(c, t)
                * (1 - 2 * p[token] + p.square().sum()).sqrt().item()
            )
            points.append((math.exp(numbers[c][0][t]), numbers[c][1][t], norm, c.advantage))
            if points[-1][0] >= TAU_P:
                continue
            text = c.prompt.token_ids + c.token_ids
            at = len(c.prompt.token_ids) + t
            shares = alternatives[t]
            best = sorted(range(len(shares)), key=lambda v: -shares[v])[:5]
            left, after = text[max(0, at - CONTEXT) : at], text[at + 1 : at + 1 + CONTEXT]
            candidates[" ".join(map(str, left)), str(token), t] = (
                (" ".join(map(str, after)), kept_all or (c, t) in kept, points[-1][1] < tau_h),
                [*points[-1], tau_h, *(shares[v].item() for v in best)],
                [str(v) for v in best],
            )
    return candidates, points, tau_h


def check(lines, candidates):
    assert len(lines) == len(candidates) > 3
    for line in lines:
        facts, numbers, alternatives = candidates[line["before"], line["token"], line["position"]]
        texts, shares = zip(*line["alternatives"], strict=True)
        assert (line["step"], line["token"]) == (7, str(line["token_id"]))
        assert (line["after"], line["kept"], line["spurious"]) == facts
        assert [line[name] for name in NUMBERS] + list(shares) == pytest.approx(numbers, rel=1e-3)
        assert list(texts) == alternatives


@pytest.fixture
def batch(make_policy):
    """Random tokens, and tokens of medium and highest probability between them."""
    policy = make_policy()
    completions = fake_completions(3, ADVANTAGES)
    for c in completions:
        for t in range(0, len(c.token_ids), 2):
            order = oracle.token_logits(policy.model, c, SAMPLING.temperature)[t].argsort(
                descending=True
            )
            c.token_ids[t] = order[t % 4].item()
    return policy, sampled_by_an_engine(policy, completions, noise=0.0)


@pytest.mark.parametrize(
    ("algorithm", "later", "max_tokens"),
    [
        ("stapo", False, 10_000),
        ("stapo", False, 40),
        ("justrl", False, 40),
        ("stapo", True, 10_000),
    ],
)
def test_candidates_in_context(batch, tmp_path, algorithm, later, max_tokens):
    """A later mini-batch is judged by the policy before the first update: probability and entropy
    are those that the mask was made from, and so are the alternatives; the norm is of the
    update."""
    policy, completions = batch
    numbers = now = oracle.statistics(
        oracle.double(policy.model), completions, SAMPLING.temperature
    )
    model = oracle.double(policy.model)  # as it is before the step
    old = before = None
    if later:
        old = measured(policy, completions)
        before = {name: p.detach().clone() for name, p in policy.parameters.items()}
        randomise_adapter(policy, seed=2, scale=0.1)
        now = oracle.statistics(oracle.double(policy.model), completions, SAMPLING.temperature)
    lines, step = logged(
        policy,
        tmp_path,
        completions,
        algorithm=algorithm,
        old=old,
        max_tokens=max_tokens,
        before=before,
    )

    def ratio(c, t):
        rho = math.exp(now[c][0][t] - numbers[c][0][t])
        return rho if rho <= 1.28 else 0.0

    moved = oracle.double(policy.model)
    candidates, points, tau_h = expected(
        moved, completions, numbers, ratio, kept_all=algorithm == "justrl", before=model
    )
    check(lines, candidates)
    by_now, _, _ = expected(moved, completions, now, ratio)
    assert (by_now.keys() != candidates.keys()) == later, "the case tests nothing"
    assert {line["spurious"] for line in lines} == {True, False}
    assert all(line["kept"] for line in lines) == (algorithm == "justrl")
    quadrants = [[], [], [], []]
    for p, entropy, norm, advantage in points:
        quadrants[2 * (p >= TAU_P) + (entropy >= tau_h)].append(norm / advantage)
    assert step["tokens"] == [len(norms) for norms in quadrants]
    assert all(step["tokens"])
    assert step["gradient_norm"] == pytest.approx(
        [sum(norms) / len(norms) for norms in quadrants], rel=1e-3
    )
    assert (step["tau_p"], step["tau_h"]) == (TAU_P, pytest.approx(tau_h, rel=1e-4))
    for got, want in zip(sorted(step["points"]), sorted(points), strict=True):
        assert got == pytest.approx(want[:3], rel=1e-3)


def test_a_step_writes_no_more_than_its_limit(batch, tmp_path):
    """Which candidates it writes depends on the tokens alone; the quadrants count all."""
    policy, completions = batch
    halves = [completions[::2], completions[1::2]]
    everything, whole = logged(policy, tmp_path, *halves)
    written = []
    for number, (mini_batches, max_tokens) in enumerate([(halves, 10_000), (halves[::-1], 40)]):
        lines, step = logged(
            policy, tmp_path / str(number), *mini_batches, limit=5, max_tokens=max_tokens
        )
        assert len(lines) == 5 < len(everything)
        assert len(step["points"]) <= 5
        assert step["tokens"] == whole["tokens"]
        shares = [line.pop("alternatives") for line in lines]  # rounded by other micro-batches
        assert all(shares)
        assert all(any(line.items() <= one.items() for one in everything) for line in lines)
        written.append(lines)
    assert [line["before"] for line in written[0]] == [line["before"] for line in written[1]]


def test_without_candidates_and_with_tokens_that_the_model_did_not_write(batch, tmp_path):
    policy, completions = batch
    everything, _ = logged(policy, tmp_path / "all", completions)
    assert any(line["position"] % 4 == 1 for line in everything)
    for c in completions:
        c.loss_mask = [t % 4 != 1 for t in range(len(c.token_ids))]
    lines, step = logged(policy, tmp_path / "written", completions)
    assert lines
    assert all(line["position"] % 4 != 1 for line in lines)
    assert sum(step["tokens"]) == sum(sum(c.loss_mask) for c in completions if c.advantage > 0)
    for c in completions:
        c.advantage = -abs(c.advantage)
    nothing = {"tau_h": None, "tokens": [0] * 4, "gradient_norm": [None] * 4, "points": []}
    assert logged(policy, tmp_path / "none", completions) == (
        [],
        {"step": 7, "tau_p": TAU_P} | nothing,
    )
