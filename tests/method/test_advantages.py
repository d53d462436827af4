import math

import pytest
import torch

from stapo_lite.errors import InputError
from stapo_lite.method.advantages import group_advantages, separate_advantages

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


def test_several_rewards_by_hand():
    """The first one's range is ten times as large; in a sum it would drown the second."""
    scores = [[[10.0, 0.0], [10.0, 0.0]], [[0.0, 1.0], [1.0, 1.0]]]
    # In groups: (H, -H) and (H, -H); (-H, H) and (0, 0). With weights 1 and 2: (-H, H), (H, -H).
    # Their deviation is sqrt(4 H^2 / 3).
    expected = math.sqrt(3) / 2
    actual = separate_advantages(torch.tensor(scores, dtype=torch.float64), [1.0, 2.0], eps=0.0)
    assert actual.tolist() == [
        pytest.approx([-expected, expected]),
        pytest.approx([expected, -expected]),
    ]
    # Where both rewards are equal nothing is learned, to the last bit; nor without any reward.
    scores = [[[1.0, 0.0], [3.0, 3.0], [NAN, 1.0]], [[0.1, 0.2], [0.3, 0.3], [NAN, 2.0]]]
    actual = separate_advantages(torch.tensor(scores, dtype=torch.float64), [1.0, 1.0])
    assert actual[1:].tolist() == [[0.0, 0.0], [0.0, 0.0]]
    # A completion that only one of the functions scored has what that one gives. In groups:
    # (H, -H), and 0 for a group of one; their sum's deviation is H sqrt(2).
    scores = [[[1.0, 0.0]], [[NAN, 1.0]]]
    actual = separate_advantages(torch.tensor(scores, dtype=torch.float64), [1.0, 1.0], eps=0.0)
    assert actual.tolist() == [pytest.approx([HALF, -HALF])]


def test_several_rewards_as_in_trl():
    """TRL's `normalize_then_sum`, read from its trainer: group by group, summed, over the batch."""
    scores = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = [1.0, 0.5, 2.0]
    total = sum(
        weight * (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)
        for weight, reward in zip(weights, scores, strict=True)
    )
    expected = (total - total.mean()) / (total.std() + 1e-4)
    torch.testing.assert_close(separate_advantages(scores, weights, eps=1e-4), expected)
