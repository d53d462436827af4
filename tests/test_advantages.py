import math

import pytest
import torch

from stapo_lite.advantages import group_advantages


def test_hand_computed_group():
    # mean 1/4, sample standard deviation sqrt((0.75^2 + 3 * 0.25^2) / 3) = 1/2
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    assert group_advantages(rewards, eps=0.0)[0].tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5])


def test_groups_do_not_see_each_other():
    rewards = torch.tensor([[1.0, -1.0], [5.0, 9.0]], dtype=torch.float64)
    half = math.sqrt(0.5)
    expected = [[half, -half], [-half, half]]
    for row, values in zip(group_advantages(rewards, eps=0.0).tolist(), expected, strict=True):
        assert row == pytest.approx(values)


@pytest.mark.parametrize("reward", [0.0, 1.0, -1.0, 0.1])
def test_equal_rewards_give_exactly_zero(reward):
    assert group_advantages(torch.full((1, 7), reward, dtype=torch.float64)).tolist() == [[0.0] * 7]


def test_rounding_noise_is_not_blown_up():
    rewards = torch.tensor([[0.1 + 0.2, 0.3]], dtype=torch.float64)
    assert group_advantages(rewards).abs().max() < 1e-9


def test_a_completion_without_verdict_counts_for_nobody():
    rewards = torch.tensor([[1.0, math.nan, 0.0, 0.0, 0.0]], dtype=torch.float64)
    assert group_advantages(rewards, eps=0.0)[0].tolist() == pytest.approx([1.5, 0.0, -0.5, -0.5, -0.5])
    assert group_advantages(torch.full((1, 3), math.nan)).tolist() == [[0.0] * 3]
    assert group_advantages(torch.tensor([[2.0, math.nan]])).tolist() == [[0.0, 0.0]]


def test_without_scaling_only_the_mean_is_taken_off():
    rewards = torch.tensor([[1.0, 0.0, 0.0, math.nan], [2.0, 2.0, 2.0, 2.0]], dtype=torch.float64)
    first, second = group_advantages(rewards, scale=False).tolist()
    assert first == pytest.approx([2 / 3, -1 / 3, -1 / 3, 0.0])
    assert second == [0.0] * 4
