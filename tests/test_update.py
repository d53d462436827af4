"""One optimiser update against the oracle, and what it must not depend on."""

import subprocess
import sys
from pathlib import Path

import oracle
import pytest
import torch
from accelerate import Accelerator
from conftest import SAMPLING, fake_completions, randomise_adapter
from oracle import stapo_loss

from stapo_lite.config import S2T, Objective
from stapo_lite.tracking import Tally
from stapo_lite.train import MAXIMA, SUMS, measure, update

ADVANTAGES = [1.2, -0.4, 0.0, 0.7, -1.1, 0.0, 0.3, 2.0]
TAU_P = 0.02  # the tiny model is flat: enough candidates to test with


def objective(**s2t):
    return Objective(s2t=S2T(**{"tau_p": TAU_P} | s2t))


def run_update(policy, completions, objective, *, old=None, max_tokens=10_000, max_grad_norm=1e9):
    """(gradient of the loss, metrics, result): with SGD at rate 1 the parameters move by minus the gradient."""
    before = torch.cat([p.detach().flatten() for p in policy.parameters.values()])
    optimizer = torch.optim.SGD(policy.parameters.values(), lr=1.0)
    accelerator = Accelerator(cpu=True)
    tally = Tally(SUMS, MAXIMA, policy.device)
    result = update(
        policy,
        optimizer,
        completions,
        old,
        objective,
        max_tokens=max_tokens,
        max_grad_norm=max_grad_norm,
        accelerator=accelerator,
        tally=tally,
    )
    after = torch.cat([p.detach().flatten() for p in policy.parameters.values()])
    return before - after, tally.reduce(accelerator), result


def oracle_gradient(policy, completions, **settings):
    loss, silenced = stapo_loss(policy.model, completions, SAMPLING.temperature, **settings)
    gradients = torch.autograd.grad(loss, list(policy.parameters.values()))
    return torch.cat([g.flatten() for g in gradients]), loss.item(), silenced


def relative(actual, expected):
    return ((actual - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize(
    "s2t",
    [
        {},
        {"quantile": 0.3},
        {"population": "all", "quantile": 0.8},
        {"population": "all", "quantile": 0.05, "tau_p": 0.05},
        {"enabled": False},
    ],
)
def test_first_update_matches_the_oracle(make_policy, s2t):
    policy, completions = make_policy(), fake_completions(3, ADVANTAGES)
    settings = {"tau_p": TAU_P, "q": 0.75} | {{"quantile": "q", "enabled": "s2t"}.get(k, k): v for k, v in s2t.items()}
    expected, loss, silenced = oracle_gradient(policy, completions, **settings)
    if s2t.get("enabled", True):
        assert silenced > 0, "the case tests nothing"
    exact = oracle.statistics(policy.model, completions, SAMPLING.temperature)
    active = [c for c in completions if c.advantage != 0]
    entropy = sum(sum(exact[c][1]) for c in active) / sum(len(c.token_ids) for c in active)
    actual, metrics, result = run_update(policy, completions, objective(**s2t), max_tokens=40)
    assert metrics["entropy"] / metrics["active_tokens"] == pytest.approx(entropy, rel=1e-5)
    assert relative(actual, expected) < 2e-4
    assert metrics["silenced"] == silenced
    assert metrics["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
    assert result.grad_norm == pytest.approx(expected.norm().item(), rel=1e-3)


@pytest.mark.parametrize("statistics", ["current", "old"])
def test_later_update_matches_the_oracle(make_policy, statistics):
    policy, completions = make_policy(), fake_completions(4, ADVANTAGES)
    old = measure(policy, completions, 10_000)
    exact_old = oracle.statistics(policy.model, completions, SAMPLING.temperature)
    randomise_adapter(policy, seed=2, scale=0.13)  # the policy has moved: ratios and clipping
    expected, loss, silenced = oracle_gradient(
        policy, completions, tau_p=TAU_P, old=exact_old, mask_from=exact_old if statistics == "old" else None
    )
    assert silenced > 0, "the case tests nothing"
    actual, metrics, _ = run_update(policy, completions, objective(statistics=statistics), old=old)
    assert metrics["clipped_low"] > 0
    assert metrics["clipped_high"] > 0
    assert metrics["silenced"] == silenced
    assert metrics["loss"] == pytest.approx(loss, rel=1e-4)
    assert relative(actual, expected) < 2e-4


@pytest.mark.parametrize("s2t", [{}, {"population": "all"}])
@pytest.mark.parametrize("max_tokens", [1, 25, 60])
def test_micro_batches_and_order_change_nothing(make_policy, s2t, max_tokens):
    completions = fake_completions(3, ADVANTAGES)
    whole, metrics, _ = run_update(make_policy(), completions, objective(**s2t))
    cut, cut_metrics, _ = run_update(make_policy(), completions[::-1], objective(**s2t), max_tokens=max_tokens)
    assert relative(cut, whole) < 1e-5
    for name, value in metrics.items():
        assert cut_metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_zero_advantage_completions_are_skipped_exactly(make_policy, monkeypatch):
    """The same update as when their zero terms are run, and none of their tokens is."""
    policy, completions = make_policy(), fake_completions(3, ADVANTAGES)
    expected = oracle_gradient(policy, completions, tau_p=TAU_P)[0]  # the oracle runs them all
    seen, statistics = [], policy.statistics
    monkeypatch.setattr(policy, "statistics", lambda batch: seen.append(batch) or statistics(batch))
    actual, _, _ = run_update(policy, completions, objective())
    assert relative(actual, expected) < 2e-4
    assert all((batch.advantages != 0).all() for batch in seen)


def test_only_zero_advantages_is_no_update(make_policy):
    policy, completions = make_policy(), fake_completions(5, [0.0, 0.0, 0.0])
    moved, metrics, result = run_update(policy, completions, objective(population="all"))
    assert result is None
    assert not moved.any()
    assert metrics["loss"] == 0


def test_every_trainable_token_masked_is_no_update(make_policy):
    completions = fake_completions(6, [1.0, 0.0])
    # tau_p = 1 makes every token of the first a candidate; the all-token threshold lies above them
    policy = make_policy(scale=0.0)
    statistics = measure(policy, completions, 10_000)
    highest = statistics[completions[0]].entropy.max()
    if statistics[completions[1]].entropy.max() <= highest:
        completions[0].advantage, completions[1].advantage = 0.0, 1.0
    moved, metrics, result = run_update(policy, completions, objective(population="all", quantile=1.0, tau_p=1.0))
    assert metrics["silenced"] == len(next(c for c in completions if c.advantage).token_ids)
    assert result is None
    assert not moved.any()


def test_gradient_is_clipped_once_by_its_global_norm(make_policy):
    completions = fake_completions(3, ADVANTAGES)
    whole, _, result = run_update(make_policy(), completions, objective())
    clipped, _, again = run_update(make_policy(), completions, objective(), max_tokens=25, max_grad_norm=1e-3)
    assert again.grad_norm == pytest.approx(result.grad_norm, rel=1e-4)
    assert clipped.norm().item() == pytest.approx(1e-3, rel=1e-2)
    assert relative(clipped / clipped.norm(), whole / whole.norm()) < 1e-3


def test_two_processes_make_the_same_update_as_one(make_policy, tiny_model, tmp_path):
    """Same gradient, mask and metrics, also where one process has nothing to train."""
    completions = fake_completions(3, ADVANTAGES)
    expected, metrics, _ = run_update(make_policy(), completions, objective())
    assert metrics["silenced"] > 0
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    script = Path(__file__).with_name("two_processes.py")
    done = subprocess.run(
        [*command, str(script), str(tiny_model), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in (0, 1):
        for split, actual in torch.load(tmp_path / f"{rank}.pt", weights_only=True).items():
            assert actual["world_size"] == 2
            assert relative(actual["gradient"], expected) < 1e-5, split
            for name, value in metrics.items():
                assert actual["metrics"][name] == pytest.approx(value, rel=1e-5, abs=1e-6), (split, name)
