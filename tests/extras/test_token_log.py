"""The token log against plain loops over all logits."""

import copy
from types import SimpleNamespace

import helpers
import oracle
import pytest
from helpers import ADVANTAGES, SAMPLING, TAU_P, Letters, make_learner, packed

from stapo_lite.extras.audit import token_log
from stapo_lite.files import read_lines
from stapo_lite.training.checkpoint import take_snapshot
from stapo_lite.training.update import update


@pytest.fixture
def batch(make_policy, monkeypatch):
    """Random and probable tokens in turn; the model did not write all of them."""
    monkeypatch.setattr(token_log, "CONTEXT", 3)  # fewer than there are
    policy, completions = make_policy(), helpers.fake_completions(3, ADVANTAGES)
    for c in completions:
        c.loss_mask = [t % 8 != 1 for t in range(len(c.token_ids))]
        for t in range(0, len(c.token_ids), 2):
            logits = oracle.token_logits(policy.model, c, SAMPLING.temperature)[t]
            c.token_ids[t] = logits.argsort(descending=True)[t % 4].item()
    return policy, helpers.sampled_by_an_engine(policy, completions, noise=0.0)


def begin_step(policy, folder, algorithm="stapo", max_tokens=10_000):
    folder.mkdir(exist_ok=True)
    learner = make_learner(policy, helpers.objective(algorithm), max_tokens)
    run = SimpleNamespace(folder=folder, tokenizer=Letters(), policy=policy)
    run.learner, run.accelerator = learner, learner.accelerator
    run.snapshot = take_snapshot(learner.progress, policy, learner.optimizer)
    return run


def logged(run, *mini_batches, limit=10_000, old=None):
    """The lines of updates that all start from the policy as it is."""
    log, start = token_log.TokenLog(limit), copy.deepcopy(run.policy.model.state_dict())
    for completions in mini_batches:
        batch = packed(run.policy, completions, old, run.learner.settings.objective)
        log.on_update(run, batch, update(run.learner, batch))
        run.policy.model.load_state_dict(start)
    log.on_step_end(run, {"step": 7}, None)
    lines = read_lines(run.folder / "tokens.jsonl")
    return sorted((line | dict(line.pop("alternatives", [])) for line in lines), key=place_of)


def place_of(line):
    return line.get("before", ""), line.get("position", 0), line["probability"]


def expected(completions, before, now, algorithm):
    """The lines by plain loops: masked by the model `before` the step; `now` is updated."""
    numbers = oracle.statistics(before, completions, SAMPLING.temperature)
    _, silenced, tau_h = oracle.masks(completions, numbers, oracle.Settings(tau_p=TAU_P))
    lines = []
    for c in (c for c in completions if c.advantage > 0):
        logits = [oracle.token_logits(m, c, SAMPLING.temperature) for m in (before, now)]
        text, start = c.prompt.token_ids + c.token_ids, len(c.prompt.token_ids)
        for t in oracle.written(c):
            token, at = c.token_ids[t], start + t
            p, q = (rows[t].detach().softmax(-1) for rows in logits)
            ratio = q[token] / p[token]
            norm = ratio * (ratio <= 1.28) * (1 - 2 * q[token] + q.square().sum()).sqrt()
            line = {"step": 7, "kind": "other", "tau_h": tau_h, "gradient_norm": norm.item()}
            line |= {"probability": p[token].item(), "entropy": numbers[c][1][t]}
            if p[token] >= TAU_P:
                lines.append(line)
            else:
                silent = algorithm == "stapo" and (c, t) in silenced
                line = line | {"kind": "silenced" if silent else "kept", "advantage": c.advantage}
                line |= {"token": str(token), "token_id": token, "position": t}
                line["before"] = Letters().decode(text[:at][-3:])
                line["after"] = Letters().decode(text[at + 1 :][:3])
                shares, ids = p.topk(5)
                lines.append(line | dict(zip(map(str, ids.tolist()), shares.tolist(), strict=True)))
    return sorted(lines, key=place_of)


@pytest.mark.parametrize(
    ("algorithm", "later", "max_tokens"),
    [
        ("stapo", False, 9999),
        ("stapo", False, 40),
        ("20-entropy", False, 40),
        ("stapo", True, 9999),
    ],
)
def test_lines_are_those_of_plain_loops(batch, tmp_path, algorithm, later, max_tokens):
    """Of a later mini-batch, all but the norm is what the policy before the step said."""
    policy, completions = batch
    run, old = begin_step(policy, tmp_path, algorithm, max_tokens), None
    before = oracle.double(policy.model)
    if later:
        old = helpers.measured(policy, completions)
        helpers.randomise_adapter(policy, seed=2, scale=0.1)
    now = oracle.double(policy.model)
    exact = expected(completions, before, now, algorithm)
    assert (expected(completions, now, now, algorithm) != exact) == later
    assert ("silenced" in {line["kind"] for line in exact}) == (algorithm == "stapo")
    for line, other in zip(logged(run, completions, old=old), exact, strict=True):
        assert line.keys() == other.keys()
        for name, value in other.items():
            close = isinstance(value, float)
            assert line[name] == (pytest.approx(value, rel=1e-3) if close else value), name


def test_a_step_writes_no_more_than_its_limit(batch, tmp_path):
    """Which candidates it writes depends on the tokens alone."""
    policy, completions = batch
    halves = [completions[::2], completions[1::2]]
    run, narrow = (begin_step(policy, tmp_path / f"{n}", max_tokens=n) for n in (9999, 40))
    some, others = logged(run, *halves, limit=5), logged(narrow, *halves[::-1], limit=5)
    places = [[place_of(line)[:2] for line in lines if "token" in line] for lines in (some, others)]
    assert places[0] == places[1]
    assert len(places[0]) == 5 < len(some) <= 10
