"""The loop: sampling, advantages, mini-batches, seeds and rates."""

import importlib
import itertools
from types import SimpleNamespace
from typing import get_args
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from helpers import RARELY_RIGHT, fake_completions, in_groups, objective, run, without_times

from stapo_lite import assemble
from stapo_lite.config import Config, Reward, Train, load_config
from stapo_lite.extras.transformers_engine import TransformersEngine
from stapo_lite.method.microbatches import cut_evenly
from stapo_lite.training.schedule import learning_rate, prompt_order, share_of_prompts
from stapo_lite.types import derived_seed

loop = importlib.import_module("stapo_lite.training.loop")
KNOWN = get_args(Config.model_fields["algorithm"].annotation)
ALGORITHMS = [name for name in KNOWN if name != "distill"]  # which test_teacher.py trains
HALF = 2**0.5 / 2
FIRST_EVEN = "def even(completion_ids, **_): return [ids[0] % 2 == 0 for ids in completion_ids]"


def test_engine_and_trainer_take_turns(write_config, watch):
    """What was published is sampled, and the engine sleeps while the policy trains."""
    events = []
    for name in ("wake", "publish", "generate", "sleep"):
        watch(TransformersEngine, name, lambda *_, name=name: events.append(name))
    watch(loop, "update", lambda *_: events.append("update"))
    run(write_config(train__max_steps=2, rollout__self_check=False))
    assert events == ["sleep", *2 * ["wake", "publish", "generate", "sleep", "update", "update"]]


def test_random_rewards_follow_the_seed(write_config, user_reward, trained, tmp_path):
    user_reward("import random\ndef even(prompts, **_): return [random.random() for _ in prompts]")
    rewards = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        trained.clear()
        run(write_config(seed=seed, train__max_steps=2, output_dir=str(tmp_path / name)))
        rewards.append([c.reward for c in trained])
    assert rewards[0] == rewards[1]
    assert len({*rewards[0], *rewards[2]}) == 4 * 16  # no draw comes twice


def test_servers_are_told_of_no_prompt_past_the_end(write_config, monkeypatch):
    """The four prompts of each of three steps, while there are as many from the one that begins."""
    monkeypatch.setattr(TransformersEngine, "prefetch", prefetch := Mock())
    config = load_config(write_config())
    rollout = config.rollout.model_copy(update={"max_lag": 2})
    with assemble.open_run(config.model_copy(update={"rollout": rollout})) as opened:
        list(loop.train(opened))
    assert [len(call.args[0]) for call in prefetch.call_args_list] == [12, 12, 8, 4]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_trains(write_config, user_reward, trained, algorithm):
    user_reward(FIRST_EVEN)
    metrics = run(write_config(train__max_steps=2, algorithm=algorithm))
    updated = [m for m in metrics if m["updates"]]
    assert updated
    for m in updated:
        assert m["grad_norm"] > 0
        assert m["kl"] >= 0 if algorithm == "grpo" else "kl" not in m
        kept = {"stapo": 1 - m["silenced_share"], "20-entropy": 0.2}.get(algorithm, 1.0)
        rounding = 0.03 if algorithm == "20-entropy" else 1e-9
        assert m["kept_share"] == pytest.approx(kept, abs=rounding)
        assert m["sampler_capped_share"] == 0
    if algorithm == "gdpo":  # its advantages are also scaled by the step's deviation
        return
    for group in in_groups(trained):
        rewards = np.array([c.reward for c in group])
        others = {"dr-grpo": 1.0, "dppo": 1.0, "maxrl": np.mean(rewards) + 1e-6}
        scale = others.get(algorithm, np.std(rewards, ddof=1) + 1e-6)
        expected = (rewards - np.mean(rewards)) / scale
        assert [c.advantage for c in group] == pytest.approx(expected)


def test_truncated_completions_leave_the_loss(write_config, user_reward, trained, tmp_path):
    """Their rewards count in their groups. The records of what was sampled stay as they are."""
    user_reward(FIRST_EVEN)
    sampled, metrics = [], []
    for mask in (False, True):
        trained.clear()
        changes = {"train__max_steps": 1, "rollout__max_completion_length": 60}
        changes |= {"objective__mask_truncated_completions": mask}
        metrics += run(write_config(**changes, output_dir=str(tmp_path / str(mask))))
        sampled.append(trained.copy())
    assert 0 < sum(c.truncated for c in sampled[0]) < len(sampled[0]), "the case tests nothing"
    for before, after in zip(*sampled, strict=True):
        assert after.token_ids == before.token_ids
        assert after.advantage == (0.0 if before.truncated else before.advantage)
        assert after.written == (0 if before.truncated else before.written)
    assert metrics[0]["sampled_nll"] == metrics[1]["sampled_nll"]


def test_dynamic_sampling_fills_the_batch_with_groups_that_vary(write_config, user_reward, trained):
    user_reward(RARELY_RIGHT)
    metrics = run(write_config(algorithm="dapo", train__max_steps=3, train__learning_rate=1e-9))
    assert max(m["sampling_rounds"] for m in metrics) > 1, "the case tests nothing"
    assert [m["batch_groups"] for m in metrics] == [4] * 3
    assert any(m["zero_variance_groups"] for m in metrics)  # of all that were sampled
    assert len(trained) == 3 * 16
    for group in in_groups(trained):
        assert (len({c.reward for c in group}), len({id(c.prompt) for c in group})) == (2, 1)


@pytest.mark.parametrize(
    ("reward", "groups"),
    [("float('two' in str(p))", 0), ("float(i % 2 == 0 and 'two' in str(p))", 3)],
    ids=["equal within groups", "one group in each round"],
)
def test_dynamic_sampling_is_bounded(write_config, user_reward, reward, groups):
    user_reward(f"def even(prompts, **_): return [{reward} for i, p in enumerate(prompts)]")
    bounded = {"train__max_steps": 1, "rollout__max_sampling_rounds": 3}
    (metrics,) = run(write_config(algorithm="dapo", **bounded))
    assert (metrics["sampling_rounds"], metrics["batch_groups"]) == (3, groups)
    assert (metrics["updates"] > 0) == (groups > 0)


def test_sizes_of_rounds_and_mini_batches_by_hand():
    for filled, drawn, wanted in ((0, 0, 8), (0, 16, 8), (6, 9, 3), (1, 24, 8)):
        assert loop.prompts_wanted(filled, 8, drawn) == wanted
    assert cut_evenly(range(9), 4) == [range(3), range(3, 6), range(6, 9)]
    assert cut_evenly(range(5), 4) == [range(2), range(2, 5)]
    assert cut_evenly([], 4) == []


def test_processes_share_what_only_the_mask_reads():
    """20-Entropy's depends on the completions without advantage, too."""
    settings = SimpleNamespace(objective=objective("20-entropy"))
    completions = [fake_completions(0, [advantage])[0] for advantage in [1.0] * 8 + [0.0] * 8]
    policy = SimpleNamespace(device=torch.device("cpu"))
    learner = SimpleNamespace(settings=settings, policy=policy)
    for index in range(2):
        learner.accelerator = SimpleNamespace(num_processes=2, process_index=index)
        (batch,) = loop.make_mini_batches([completions], 16, learner)
        assert sorted(c.advantage for c in batch.completions) == [0.0] * 4 + [1.0] * 4


def test_a_seed_decides_prompts_draws_and_the_first_adapter(make_policy):
    assert prompt_order(10, 0, 10, 10) != prompt_order(10, 1, 0, 10)
    seeds = []
    for seed in (0, 1):
        share = share_of_prompts([0, 1, 2], seed, start=4, count=2, process=0, processes=1)
        seeds += share.seeds
    assert len(set(seeds)) == 4
    first, second, again = (make_policy(seed=seed).parameters for seed in (0, 1, 1))
    assert all(torch.equal(second[name], again[name]) for name in second)
    assert any(not torch.equal(first[name], second[name]) for name in first if "lora_A" in name)


def test_no_two_runs_or_samples_share_a_seed():
    numbers = itertools.product(range(4), range(100), range(8))
    seeds = {derived_seed(derived_seed(a, b), c) for a, b, c in numbers}
    assert len(seeds) == 4 * 100 * 8
    assert derived_seed(1, 23) != derived_seed(12, 3)
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [1.0] * 3),
        ("linear", [0.75, 0.5, 0.25]),
        ("cosine", [(1 + HALF) / 2, 0.5, (1 - HALF) / 2]),
    ],
)
def test_learning_rates_by_hand(schedule, rates):
    train = Train(max_steps=8, warmup_steps=4, learning_rate=2.0, lr_scheduler_type=schedule)
    expected = [0.25, 0.5, 0.75, 1.0, 1.0, *rates]
    assert [learning_rate(train, step) / 2 for step in range(8)] == pytest.approx(expected)


def test_each_reward_has_advantages_of_its_own():
    """A reward that does not differ in a group adds nothing; the penalty is one more reward."""
    group = fake_completions(0, [0.0] * 4, longest=4)
    for completion, first, second in zip(group, (1, 0, 0, 0), (5, 5, 5, 5), strict=True):
        completion.token_ids = [7] * 4
        completion.scores = {"first": float(first), "second": float(second)}
        completion.reward = 1.0
    group[3].scores = {}
    group[3].reward = None
    reward = Reward(functions=["first", "second"], weights=[2.0, 1.0], overlong_penalty=1.0)
    loop.assign_advantages([group], reward, "each", longest=4)
    # 2 (1, 0, 0) in standard units of the three, over its own deviation of 2
    unit = 1 / 3**0.5
    expected = [2 * unit, -unit, -unit, 0.0]
    assert [c.advantage for c in group] == pytest.approx(expected, rel=1e-5)


def test_the_penalty_is_a_reward_of_its_own_weight():
    """The reward differs in the first group, the lengths differ in the second one."""
    groups = [fake_completions(0, [0.0] * 2, longest=4) for _ in range(2)]
    for group, scores, lengths in zip(groups, [(1, 0), (5, 5)], [(4, 4), (3, 4)], strict=True):
        for completion, value, length in zip(group, scores, lengths, strict=True):
            completion.token_ids = [7] * length
            completion.scores = {"first": float(value)}
            completion.reward = float(value)
    reward = Reward(functions=["first"], overlong_penalty=3.0)
    loop.assign_advantages(groups, reward, "each", longest=4)
    # (H, -H) from the reward, (3H, -3H) from the penalty: a deviation of sqrt(20 H^2 / 3).
    unit = (3 / 20) ** 0.5
    found = [c.advantage for group in groups for c in group]
    assert found == pytest.approx([unit, -unit, 3 * unit, -3 * unit], rel=1e-5)


def test_soft_overlong_punishment_enters_the_advantage(write_config, user_reward, trained):
    user_reward("def even(completion_ids, **columns): return [1.0 for ids in completion_ids]")
    longer = {"rollout__max_completion_length": 64, "train__max_tokens_per_microbatch": 512}
    (metrics,) = run(write_config(train__max_steps=1, reward__overlong_penalty=0.5, **longer))
    assert metrics["reward"] == 1.0  # before the punishment
    assert metrics["zero_variance_groups"] == 1.0
    assert 0 < metrics["overlong_penalty"] < 0.5
    trained.sort(key=lambda c: len(c.token_ids))
    assert trained[-1].advantage < 0 < trained[0].advantage


def test_groups_are_in_the_order_of_their_prompts_whichever_process_made_them(
    write_config, tmp_path, monkeypatch
):
    changes = {"train__max_steps": 2, "train__batch_size": 4, "train__mini_batch_size": 2}
    expected = run(write_config(**changes))
    monkeypatch.setattr("stapo_lite.training.loop.gather_object", lambda pairs: pairs[::-1])
    found = run(write_config(**changes, output_dir=str(tmp_path / "reversed")))
    assert without_times(found) == without_times(expected)
