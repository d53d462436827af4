"""The argument for the mask, measured directly: one update with it and one without it, from the same state.

    python benchmarks/one_update.py [--steps 30] [--every 3] [--out benchmarks/results/one_update.json]

Trains the baseline without a mask (`justrl`) on the writing task. In every few steps its first mini-batch is used twice
from the same weights and optimiser state: with S2T's mask and without. After each, on that mini-batch: how the entropy
and the log-probabilities of the silenced tokens, of the other candidates and of all others have changed; and the reward
on held-out prompts, with the same seeds. Before, by quadrant of the probability-entropy plane: the norm of a token's
gradient with respect to its logits at an advantage of 1, and with its own; and the share of the squared gradient that
the silenced tokens carry. Means and 95 % intervals (bootstrap over states).
"""

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from common import save
from experiments import STUDIES, judge, prepare, render_held_out

from stapo_lite.algorithm.microbatches import MiniBatch
from stapo_lite.algorithm.objective import logit_gradient_norm
from stapo_lite.evaluation.scores import average_scores
from stapo_lite.training.checkpoint import take_snapshot
from stapo_lite.training.loop import assign_advantages, mini_batches, sample_groups
from stapo_lite.training.opening import open_run
from stapo_lite.training.run import Run
from stapo_lite.training.token_log import QUADRANTS
from stapo_lite.training.update import Masks, find_masks, measure, update
from stapo_lite.types import TokenStatistics


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


def switch(run: Run, enabled: bool) -> None:
    """Have the next update silence tokens, or not."""
    objective = run.learner.objective
    run.learner.objective = objective.model_copy(update={"s2t": objective.s2t.model_copy(update={"enabled": enabled})})


def gradients(batch: MiniBatch, masks: Masks, statistics: TokenStatistics, tau_p: float) -> dict[str, float]:
    """Norms of tokens' gradients by quadrant, and the silenced ones' share of their squares; A > 0 only."""
    assert masks.tau_h is not None
    logprobs, entropy, collision = statistics
    positive = batch.loss_mask & (batch.advantages > 0)
    at_one = logit_gradient_norm(torch.ones_like(logprobs), logprobs, collision)
    own = at_one * batch.advantages.abs()
    quadrant = 2 * (logprobs.exp() >= tau_p) + (entropy >= masks.tau_h)
    active = batch.loss_mask & (batch.advantages != 0)
    found = {"silenced: share of the squared gradient": (own[masks.silenced] ** 2).sum() / (own[active] ** 2).sum()}
    found["silenced: share of the tokens"] = masks.silenced.sum() / active.sum()
    for number, name in enumerate(QUADRANTS):
        there = positive & (quadrant == number)
        if there.any():
            found[f"{name}: norm at an advantage of 1"] = at_one[there].mean()
            found[f"{name}: norm with its own"] = own[there].mean()
    return {name: float(value) for name, value in found.items()}


def compare(run: Run, batch: MiniBatch, prompts: list[Any], version: int) -> dict[str, float] | None:
    """One mini-batch with and without the mask; None where the mask takes nothing out."""
    learner, every = run.learner, list(range(len(batch.completions)))
    tau_p = learner.objective.s2t.tau_p
    switch(run, enabled=True)
    masks = find_masks(learner, batch)
    masks.first = None  # its graph
    before = measure(run.policy, batch, every, learner.budget)
    candidates = batch.loss_mask & (batch.advantages > 0) & (before.logprobs.exp() < tau_p)
    if masks.tau_h is None or not masks.silenced.any() or not (candidates & ~masks.silenced).any():
        return None
    found = gradients(batch, masks, before, tau_p)
    groups = {"silenced": masks.silenced, "other candidates": candidates & ~masks.silenced}
    groups["all others"] = batch.loss_mask & ~candidates
    for index, (name, enabled) in enumerate((("with the mask", True), ("without", False))):
        with same_state(run):
            switch(run, enabled)
            update(learner, batch)
            after = measure(run.policy, batch, every, learner.budget)
            found[f"{name}: entropy"] = (after.entropy - before.entropy)[batch.loss_mask].mean().item()
            for group, mask in groups.items():
                found[f"{name}: log-probability, {group}"] = (after.logprobs - before.logprobs)[mask].mean().item()
            run.engine.publish(run.policy, version=version + index)
            found[f"{name}: held-out reward"] = judge(run, prompts)["reward"]
    for measured in ("entropy", "log-probability, silenced", "log-probability, all others", "held-out reward"):
        found[f"with less without: {measured}"] = found[f"with the mask: {measured}"] - found[f"without: {measured}"]
    return found


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
                    with same_state(run):  # whatever the comparison switches on
                        found = compare(run, next(mini_batches(run, rollouts.batch)), prompts, 10**6 + 2 * step)
                    states += [] if found is None else [{"step": step} | found]
                updates = [update(run.learner, batch) for batch in mini_batches(run, rollouts.batch)]
                run.record(step, rollouts, updates)
    names = [name for name in dict.fromkeys(name for state in states for name in state) if name != "step"]
    values = {name: [state[name] for state in states if name in state] for name in names}
    save({"means": {name: average_scores([values[name]]) for name in names}, "states": states}, given.out)


if __name__ == "__main__":
    main()
