import math

import pytest
import torch

from stapo_lite.algorithm.advantages import group_advantages

NAN, HALF = math.nan, math.sqrt(0.5)


@pytest.mark.parametrize(
    ("scale", "rewards", "expected"),
    [
        # mean 1/4, sample standard deviation sqrt((0.75^2 + 3 * 0.25^2) / 3) = 1/2
        ("group", [[1.0, 0.0, 0.0, 0.0]], [[1.5, -0.5, -0.5, -0.5]]),
        # groups do not see each other
        ("group", [[1.0, -1.0], [5.0, 9.0]], [[HALF, -HALF], [-HALF, HALF]]),
        # a completion without a verdict counts for nobody
        ("group", [[1.0, NAN, 0.0, 0.0, 0.0]], [[1.5, 0.0, -0.5, -0.5, -0.5]]),
        ("group", [[NAN, NAN], [2.0, NAN]], [[0.0, 0.0], [0.0, 0.0]]),
        # without scaling only the mean is taken off
        ("none", [[1.0, 0.0, 0.0, NAN], [2.0] * 4], [[2 / 3, -1 / 3, -1 / 3, 0.0], [0.0] * 4]),
        # of all five rewards: mean 2, standard deviation sqrt((4 + 0 + 1 + 1 + 4) / 4)
        (
            "batch",
            [[4.0, 2.0, NAN], [3.0, 1.0, 0.0]],
            [
                [1 / math.sqrt(2.5), -1 / math.sqrt(2.5), 0.0],
                [difference / 3 / math.sqrt(2.5) for difference in (5, -1, -4)],
            ],
        ),
        ("batch", [[1.0, 1.0], [1.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]]),
        # a right one of four is worth 1 / mean - 1; a group without any is worth nothing
        ("mean", [[1.0, 0.0, 0.0, 0.0], [0.0] * 4], [[3.0, -1.0, -1.0, -1.0], [0.0] * 4]),
        ("mean", [[1.0, 1.0, NAN, 0.0]], [[0.5, 0.5, 0.0, -1.0]]),
    ],
)
def test_groups_by_hand(scale, rewards, expected):
    actual = group_advantages(torch.tensor(rewards, dtype=torch.float64), scale, eps=0.0)
    assert actual.tolist() == [pytest.approx(row) for row in expected]


def test_equal_rewards_give_exactly_zero_and_rounding_is_not_blown_up():
    rewards = torch.tensor([[0.0] * 7, [1.0] * 7, [-1.0] * 7, [0.1] * 7], dtype=torch.float64)
    assert group_advantages(rewards).tolist() == [[0.0] * 7] * 4
    assert (
        group_advantages(torch.tensor([[0.1 + 0.2, 0.3]], dtype=torch.float64)).abs().max() < 1e-9
    )
