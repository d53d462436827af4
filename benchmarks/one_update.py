"""The argument for the mask, measured directly: one update with it, without it, and with others, from the same state.

    python benchmarks/one_update.py [--steps 30] [--every 3] [--out benchmarks/results/one_update.json]

Trains the baseline without a mask (`justrl`) on the writing task. In every few steps its first mini-batch is used
several times from the same weights and optimiser state: without a mask, with S2T's, and silencing the lower or the
upper half of the candidates (rare tokens with A > 0) by entropy, or as many tokens with A > 0 as S2T silences, drawn at
random. These updates have no momentum, nine tenths of which would come from updates without a mask; so they are larger
than those of the training, by up to four times. After each, on that mini-batch: how the entropy and the
log-probabilities of the candidates and of all other tokens have changed; and the reward on held-out prompts, with the
same draws for all updates of a state. Before, by quadrant of the probability-entropy plane: the norm of a token's
gradient with respect to its logits at an advantage of 1, and with its own; and the share of the squared gradient that
the silenced tokens carry. Means with 95 % intervals (Student's t over the states, which are of one run, and so not
independent).
"""

import argparse
import itertools
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from common import save
from experiments import STUDIES, answer, prepare, render_held_out
from scipy.stats import ttest_1samp
from torch import Tensor

from stapo_lite.algorithm.microbatches import MiniBatch
from stapo_lite.algorithm.objective import logit_gradient_norm
from stapo_lite.algorithm.s2t import candidate_mask, linear_quantile, spurious_mask
from stapo_lite.training.checkpoint import take_snapshot
from stapo_lite.training.loop import assign_advantages, mini_batches, sample_groups
from stapo_lite.training.opening import open_run
from stapo_lite.training.run import Run
from stapo_lite.training.token_log import QUADRANTS
from stapo_lite.training.update import measure, update
from stapo_lite.types import Prompt, TokenStatistics

ARMS: dict[str, dict[str, Any]] = {
    "without": {"enabled": False},
    "with the mask": {"enabled": True},
    "lower half": {"enabled": True, "quantile": 0.5},
    "upper half": {"enabled": True, "quantile": 0.5, "silence": "high-entropy"},
    "any rewarded": {"enabled": True, "tau_p": 1.0, "silence": "random"},  # and as quantile the share that S2T takes
}
"""What an update has in place of the config's S2T. The mask takes three quarters of the candidates, and those of lowest
and of highest entropy have two thirds of their tokens in common; the halves have none."""
PAIRS = [(arm, "without") for arm in ARMS if arm != "without"]
PAIRS += [("lower half", "upper half"), ("with the mask", "any rewarded")]
"""Arms whose difference is reported."""


@contextmanager
def same_state(run: Run) -> Iterator[None]:
    """Put adapter, optimiser and counts back afterwards."""
    learner = run.learner
    snapshot = take_snapshot(learner.progress, run.policy, learner.optimizer)
    rate = learner.optimizer.param_groups[0]["lr"]
    yield
    with torch.no_grad():
        for name, parameter in run.policy.parameters.items():
            parameter.copy_(snapshot.adapter[name])
    learner.optimizer.load_state_dict(snapshot.optimizer)
    learner.progress = snapshot.progress
    learner.begin_step(rate)  # also the objective of the config


def switch(run: Run, changes: dict[str, Any]) -> None:
    """Have the next update silence what an arm silences, and take its own gradient alone."""
    objective = run.learner.objective
    run.learner.objective = objective.model_copy(update={"s2t": objective.s2t.model_copy(update=changes)})
    for group in run.learner.optimizer.param_groups:
        group["betas"] = (0.0, group["betas"][1])


def gradients(
    batch: MiniBatch, silenced: Tensor, statistics: TokenStatistics, tau_p: float, tau_h: float
) -> dict[str, float]:
    """Norms of tokens' gradients by quadrant, A > 0 only, and the silenced ones' share of the squares of all."""
    logprobs, entropy, collision = statistics
    positive = batch.loss_mask & (batch.advantages > 0)
    at_one = logit_gradient_norm(torch.ones_like(logprobs), logprobs, collision)
    own = at_one * batch.advantages.abs()
    quadrant = 2 * (logprobs.exp() >= tau_p) + (entropy >= tau_h)
    active = batch.loss_mask & (batch.advantages != 0)
    found = {"silenced: share of the squared gradient": (own[silenced] ** 2).sum() / (own[active] ** 2).sum()}
    found["silenced: share of the tokens"] = silenced.sum() / active.sum()
    for number, name in enumerate(QUADRANTS):
        there = positive & (quadrant == number)
        if there.any():
            found[f"{name}: norm at an advantage of 1"] = at_one[there].mean()
            found[f"{name}: norm with its own"] = own[there].mean()
    return {name: float(value) for name, value in found.items()}


def compare(run: Run, batch: MiniBatch, prompts: Sequence[Prompt], version: int) -> dict[str, float] | None:
    """One mini-batch in each arm; None where the mask takes no candidate out.

    Args:
        version: of the first arm's adapter; the others' follow.
    """
    learner, every = run.learner, list(range(len(batch.completions)))
    tau_p = learner.objective.s2t.tau_p
    before = measure(run.policy, batch, every, learner.budget)
    candidates = batch.loss_mask & candidate_mask(before.logprobs, batch.advantages, tau_p)
    tau_h = linear_quantile(before.entropy[candidates], learner.objective.s2t.quantile)
    silenced = spurious_mask(candidates, before.entropy, tau_h)
    if tau_h is None or not silenced.any():
        return None
    found = gradients(batch, silenced, before, tau_p, tau_h)
    groups = {"silenced": silenced, "other candidates": candidates & ~silenced}
    for half, score in (("lower half", before.entropy), ("upper half", -before.entropy)):
        groups[half] = spurious_mask(candidates, score, linear_quantile(score[candidates], 0.5))
    groups["all others"] = batch.loss_mask & ~candidates
    groups = {name: mask for name, mask in groups.items() if mask.any()}  # halves of equal entropies are empty
    rewarded = batch.loss_mask & candidate_mask(before.logprobs, batch.advantages, 1.0)
    share = (silenced.sum() / rewarded.sum()).item()
    arms = ARMS | {"any rewarded": ARMS["any rewarded"] | {"quantile": share}}
    for index, (arm, changes) in enumerate(arms.items()):
        with same_state(run):
            switch(run, changes)
            update(learner, batch)
            after = measure(run.policy, batch, every, learner.budget)
            found[f"{arm}: entropy"] = (after.entropy - before.entropy)[batch.loss_mask].mean().item()
            for group, mask in groups.items():
                found[f"{arm}: log-probability, {group}"] = (after.logprobs - before.logprobs)[mask].mean().item()
            run.engine.publish(run.policy, version=version + index)
            drawn = answer(run, prompts, run.config.rollout.temperature, salt=f"state {version}")
            found[f"{arm}: held-out reward"] = fmean(c.reward or 0.0 for c in drawn)
    measured = ["entropy", "held-out reward", *(f"log-probability, {group}" for group in groups)]
    for (one, other), name in itertools.product(PAIRS, measured):
        found[f"{one} less {other}: {name}"] = found[f"{one}: {name}"] - found[f"{other}: {name}"]
    return found


def interval(values: Sequence[float]) -> dict[str, float]:
    """The mean, and its 95 % interval by Student's t."""
    if len(values) < 2:
        return {"avg": values[0]}
    low, high = ttest_1samp(values, 0.0).confidence_interval()
    return {"avg": fmean(values), "low": float(low), "high": float(high)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--every", type=int, default=3, help="steps between two states")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of experiments.yaml")
    given = parser.parse_args()
    states: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        overrides = ["log.save_steps=0", f"train.max_steps={given.steps}", *given.set]
        config, held_out = prepare(STUDIES["writing"], "justrl", given.seed, Path(folder), overrides)
        with open_run(config) as run:
            prompts = render_held_out(held_out, run)
            for step in run.steps():
                rollouts = sample_groups(run, step)
                assign_advantages(run, rollouts.batch)
                if step % given.every == 0:
                    version = 10**6 + len(ARMS) * step
                    found = compare(run, next(mini_batches(run, rollouts.batch)), prompts, version)
                    states += [] if found is None else [{"step": step} | found]
                updates = [update(run.learner, batch) for batch in mini_batches(run, rollouts.batch)]
                run.record(step, rollouts, updates)
    names = [name for name in dict.fromkeys(name for state in states for name in state) if name != "step"]
    values = {name: [state[name] for state in states if name in state] for name in names}
    save({"means": {name: interval(values[name]) for name in names}, "states": states}, given.out)


if __name__ == "__main__":
    main()
