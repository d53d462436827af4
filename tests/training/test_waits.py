"""An update asks the device for few values, and none of them once for each micro-batch: on a GPU
every such question waits until all that was started before is done."""

import inspect
from collections import Counter

import pytest
import torch
from helpers import ADVANTAGES, ROOT, fake_completions, make_learner, measured, objective, packed
from torch.overrides import TorchFunctionMode

from stapo_lite.training.update import update

PACKAGE = str(ROOT / "stapo_lite")
PLACES = {"find_factors", "gather_values", "linear_quantile", "silence", "find_masks"}
PLACES |= {"clip_gradient"}
"""Functions that may wait: for counts, for thresholds, and for the gradient's norm."""
NAMES = ["item", "tolist", "cpu", "numpy", "nonzero", "masked_select"]
NAMES += ["__bool__", "__int__", "__float__", "__index__"]
ASKING = {getattr(torch.Tensor, name) for name in NAMES} | {torch.nonzero, torch.masked_select}


class Waits(TorchFunctionMode):
    """Counts calls that would wait for a GPU, by the function of the package that makes them."""

    def __init__(self):
        super().__init__()
        self.places = Counter()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        indexing = function in (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
        if function in ASKING or (indexing and by_mask(args[1])):
            self.places[caller()] += 1
        return function(*args, **(kwargs or {}))


def by_mask(index):
    """A boolean index has as many results as it has True: the host must know how many."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, torch.Tensor) and part.dtype == torch.bool for part in parts)


def caller():
    """The innermost function of the package on the stack."""
    for frame in inspect.stack(context=0):
        if frame.filename.startswith(PACKAGE) and frame.function[0] != "<":
            return frame.function
    return "elsewhere"


KINDS = {
    "stapo": objective(),
    "grpo": objective("grpo"),
    "20-entropy": objective("20-entropy"),
    "sequence-mask": objective(sampler_correction="sequence-mask"),
}


@pytest.mark.parametrize("later", [False, True], ids=["first update", "later update"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_update_waits_in_few_places_and_never_for_a_micro_batch(make_policy, kind, later):
    counts, policy, completions = [], make_policy(), fake_completions(3, ADVANTAGES)
    for max_tokens in (10_000, 1):
        learner = make_learner(policy, KINDS[kind], max_tokens)
        old = measured(policy, completions) if later else None
        batch = packed(policy, completions, old, KINDS[kind])
        with Waits() as waits:
            assert update(learner, batch).changed
        # transformers' at each pass: whether positions begin anew in a row
        assert waits.places.pop("_decode") >= 1
        counts.append(waits.places)
    assert counts[0] == counts[1], "one micro-batch against six"
    assert counts[0].keys() <= PLACES
    assert counts[0]["find_factors"] == counts[0]["clip_gradient"] == 1
