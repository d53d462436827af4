"""The method on one page: its update is the package's, and it trains."""

import json
import math

import pytest
import torch
from helpers import (
    ADVANTAGES,
    double,
    fake_completions,
    objective,
    packed,
    relative,
    run_update,
    sampled_by_an_engine,
)

from stapo_lite import minimal
from stapo_lite.types import TokenStatistics


@pytest.mark.parametrize("later", [False, True], ids=["first update", "later update"])
def test_its_gradient_is_the_packages(make_policy, monkeypatch, later):
    """From the same completions, cut into other micro-batches."""
    monkeypatch.setattr(minimal, "MAX_GRAD_NORM", math.inf)
    monkeypatch.setattr(minimal, "MICRO_BATCH", 3)
    completions, kind = fake_completions(3, ADVANTAGES), objective()
    policies = [double(make_policy(rollout__temperature=1.0)) for _ in range(2)]
    sampled_by_an_engine(policies[0], completions, temperature=1.0)
    tokens = packed(policies[0], completions, kind=kind)
    with torch.no_grad():
        tokens.old = minimal.statistics(policies[0].model, completions)
    if later:  # the policy has moved on since
        tokens.old = TokenStatistics(tokens.old.logprobs - 0.3, *tokens.old[1:])
    lengths = [len(completion.token_ids) for completion in completions]
    parts = zip(*(column.split(lengths) for column in tokens.old), strict=True)
    old = dict(zip(completions, (TokenStatistics(*part) for part in parts), strict=True))
    expected, _, _ = run_update(policies[1], completions, kind, old=old)
    adapter = policies[0].parameters.values()
    before = torch.cat([p.detach().flatten() for p in adapter])
    minimal.update(policies[0].model, torch.optim.SGD(adapter, lr=1.0), tokens, kind)
    moved = before - torch.cat([p.detach().flatten() for p in adapter])
    assert moved.norm() > 0
    assert relative(moved, expected) < 1e-6
    assert all(p.grad is None for p in adapter)  # the next update's is its own


def test_it_trains_on_rows_of_a_file(tiny_model, tmp_path, monkeypatch, capsys):
    for name, value in {"STEPS": 3, "PROMPTS": 2, "GROUP": 4, "LENGTH": 4}.items():
        monkeypatch.setattr(minimal, name, value)
    rows = [{"prompt": f"say {word}", "word": word} for word in ("one", "two", "three")]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")

    def even(completions, word, **_):
        assert set(word) <= {"one", "two", "three"}
        return [len(text) % 2 for text in completions]  # integers, as many rewards are

    history = minimal.train(str(tiny_model), minimal.read_jsonl(tmp_path / "rows.jsonl"), even)
    assert len(history) == 3
    assert capsys.readouterr().out.count("| reward ") == 3
