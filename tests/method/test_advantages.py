import math

import pytest
import torch

from stapo_lite.errors import InputError
from stapo_lite.method.advantages import group_advantages

NAN, HALF, ROOT = math.nan, math.sqrt(0.5), math.sqrt(2.5)
SPREAD = [[1 / ROOT, -1 / ROOT, 0.0], [difference / 3 / ROOT for difference in (5, -1, -4)]]


@pytest.mark.parametrize(
    ("scale", "rewards", "expected"),
    [
        # mean 1/4, sample standard deviation sqrt((0.75^2 + 3 * 0.25^2) / 3) = 1/2
        ("group", [[1.0, 0.0, 0.0, 0.0]], [[1.5, -0.5, -0.5, -0.5]]),
        # groups do not see each other
        ("group", [[1.0, -1.0], [5.0, 9.0]], [[HALF, -HALF], [-HALF, HALF]]),
        # a completion without a reward counts for nobody
        ("group", [[1.0, NAN, 0.0, 0.0, 0.0]], [[1.5, 0.0, -0.5, -0.5, -0.5]]),
        ("group", [[NAN, NAN], [2.0, NAN]], [[0.0, 0.0], [0.0, 0.0]]),
        # without scaling only the mean is taken off
        ("none", [[1.0, 0.0, 0.0, NAN], [2.0] * 4], [[2 / 3, -1 / 3, -1 / 3, 0.0], [0.0] * 4]),
        # of all five rewards: mean 2, standard deviation sqrt((4 + 0 + 1 + 1 + 4) / 4)
        ("batch", [[4.0, 2.0, NAN], [3.0, 1.0, 0.0]], SPREAD),
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
    equal = torch.tensor([[0.0] * 7, [1.0] * 7, [-1.0] * 7, [0.1] * 7], dtype=torch.float64)
    assert group_advantages(equal).tolist() == [[0.0] * 7] * 4
    rounded = torch.tensor([[0.1 + 0.2, 0.3]], dtype=torch.float64)
    assert group_advantages(rounded).abs().max() < 1e-9


@pytest.mark.parametrize("rewards", [[-0.28, -0.17], [1.0, -1.0], [2.0, 0.0]])
def test_a_mean_that_is_no_pass_rate_is_refused(rewards):
    with pytest.raises(InputError, match="rewards from 0 to 1"):
        group_advantages(torch.tensor([rewards]), "mean")
