"""One optimiser update against the oracle, and what it must not depend on."""

import copy
import math
from types import SimpleNamespace

import oracle
import pytest
import torch
from helpers import (
    ADVANTAGES,
    LONGEST,
    SAMPLING,
    TAU_P,
    adapted_policy,
    assert_same,
    double,
    fake_completions,
    later_update,
    make_learner,
    measured,
    near,
    objective,
    packed,
    randomise_adapter,
    relative,
    run_update,
    sampled_by_an_engine,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from objectives import CASES, INVARIANT, tolerance
from torch.nn.utils import parameters_to_vector
from transformers import AutoModelForCausalLM

from stapo_lite.extras.audit.diagnostics import Diagnostics
from stapo_lite.method.masks import random_scores
from stapo_lite.method.tokens import pack
from stapo_lite.training.loop import leave_out
from stapo_lite.training.update import gradient_scale, update


def sampled(policy, seed=3, advantages=ADVANTAGES, longest=LONGEST):
    return sampled_by_an_engine(policy, fake_completions(seed, advantages, longest))


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean", "constant"])
def test_small_gradients_survive_in_float16(make_policy, aggregation):
    """As if of a large batch: the weight of a token is far below float16's smallest number."""
    kind = objective(aggregation=aggregation, sampler_correction="off")
    longest = 10**9 if aggregation == "constant" else LONGEST
    gradients = []
    for policy in (make_policy("float32"), make_policy("float16")):
        gradient, _, result = run_update(policy, sampled(policy), kind, longest=longest)
        if aggregation == "constant":  # SGD's step would be lost in the parameters' own rounding
            gradient = torch.tensor([result.grad_norm])
        gradients.append(gradient)
    assert relative(gradients[1], gradients[0]) < 0.02
    assert gradients[0].norm() > 0


def test_float16_backs_off_where_gradients_overflow_and_comes_back(make_policy):
    tries, moves, kind = [], [], objective(sampler_correction="off")
    for policy in (make_policy("float32"), make_policy("float16")):
        completions = sampled(policy, advantages=[1e8 * a for a in ADVANTAGES])
        learner = make_learner(policy, kind, 10_000, max_grad_norm=0.01)
        before, number = parameters_to_vector(policy.parameters.values()).detach(), 1
        while update(learner, packed(policy, completions, kind=kind)).skipped:
            assert torch.equal(before, parameters_to_vector(policy.parameters.values()))
            number += 1
        assert learner.progress.skipped_in_a_row == 0
        assert learner.progress.backoff == max(0, 4 * (number - 1) - 1 / 64)
        tries.append(number)
        moves.append(before - parameters_to_vector(policy.parameters.values()).detach())
    assert tries[0] == 1 < tries[1]
    assert torch.cosine_similarity(*moves, dim=0) > 0.999


def test_the_scale_of_float16_grows_after_64_good_updates(make_policy):
    learner, scales = make_learner(make_policy("float16"), objective(), 10_000), []
    for learner.progress.backoff in (4.0, 4 - 1 / 64, 3.0):
        scales.append(gradient_scale(learner, torch.full([9], 1e-3)))
    assert scales == [0.5, 0.5, 1.0]  # 2 ** (10 - 7 - 4), as 1e-3 is about 2 ** -10
    # Most sequences have no kept token, and the weight of one; a long one's tokens count.
    assert gradient_scale(learner, torch.tensor([1 / 8, 1 / 8, 2.0**-20])) == 2.0 ** (20 - 7 - 3)


def compare(policy, model, completions, case, *, later, rel=1e-5, exact=None, s2t=None, **options):
    """Make an update in float32 and by the oracle; its metrics, or None where nothing trains."""
    ours, formulas = CASES[case]
    s2t = {"statistics": "old"} | (s2t or {})
    ours = ours | {"s2t": ours.get("s2t", {}) | s2t}
    changes = {"q" if key == "quantile" else key: value for key, value in s2t.items()}
    of_old = changes.pop("statistics") == "old"
    formulas = {"tau_p": TAU_P, "correction": "token-truncate"} | formulas | changes
    constants = oracle.Settings(**formulas)
    for c in completions:
        constants.random[c] = random_scores(c.token_ids, c.adapter_version).tolist()
    temperature, old = SAMPLING.temperature, None
    now = exact_old = oracle.statistics(oracle.double(policy.model), completions, temperature)
    if later:
        old = measured(policy, completions)
        randomise_adapter(policy, seed=2, scale=0.13)
        now = oracle.statistics(oracle.double(policy.model), completions, temperature)
    kept, silenced, _ = oracle.masks(completions, exact_old if of_old else now, constants)
    before = copy.deepcopy(policy.model)
    moved, metrics, result = run_update(policy, completions, objective(**ours), old=old, **options)
    tokens = sum(len(oracle.written(c)) for c in completions)
    shares = metrics["kept_share"], metrics["silenced_share"]
    assert shares == (len(kept) / tokens, len(silenced) / tokens)
    if not any(c.advantage or constants.beta or constants.entropy_coef for c, _ in kept):
        assert (result.grad_norm, result.outputs) == (None, None)
        assert not moved.any()
        return None
    reference = None
    if constants.beta:
        reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    expected, gradient = oracle.loss_and_metrics(
        before,
        completions,
        temperature,
        constants,
        old=exact_old if later else None,
        mask_from=exact_old if later and of_old else None,
        reference=reference,
    )
    assert relative(moved, gradient.to(moved.dtype)) < (exact or rel)
    assert result.grad_norm == pytest.approx(gradient.norm().item(), rel=rel)
    unmeasured = later and constants.old_is_rollout
    for name, value in expected.items():
        if unmeasured and name.startswith("sampler_gap"):
            assert name not in metrics
        else:
            assert metrics.get(name) == near(value, rel=rel, abs=rel / 10), name
    return expected


CURRENT = ["stapo", "paper-v1", "random", "20-entropy", "dapo", "stare"]
TOOLS = ["stapo", "paper-v1", "20-entropy", "grpo", "dr-grpo", "random", "rollout", "sequence-mask"]
TOOLS += ["gspo", "dppo", "stare, both"]


@pytest.mark.parametrize(
    ("case", "later", "statistics", "tools"),
    [
        *((case, later, "old", False) for case in CASES for later in (False, True)),
        *((case, True, "current", False) for case in CURRENT),
        *((case, True, "old", True) for case in TOOLS),
        *((case, False, "old", True) for case in TOOLS[:2]),
    ],
)
def test_objectives_match_the_oracle(make_policy, tiny_model, case, later, statistics, tools):
    """Tokens that the model did not write are read, but nothing is trained on or counts them."""
    policy = make_policy()
    completions = sampled(policy)
    for c in completions if tools else []:
        c.loss_mask = [t % 4 != 1 for t in range(len(c.token_ids))]
        both = zip(c.rollout_logprobs, c.loss_mask, strict=True)
        c.rollout_logprobs = [x if written else math.nan for x, written in both]
    options = {"later": later, "s2t": {"statistics": statistics}, "max_tokens": 40}
    expected = compare(policy, tiny_model, completions, case, **options)
    constants = oracle.Settings(**{"correction": "token-truncate"} | CASES[case][1])
    assert expected["candidate_share"] > 0, "the case tests nothing"
    assert expected["silenced_share"] > 0 or constants.silence is None
    bounded = (later or constants.old_is_rollout) and constants.token_loss != "sapo"
    assert expected["clip_low_share"] + expected["clip_high_share"] > 0 or not bounded
    assert expected["amplified_share"] > 0 or constants.stare == (1.0, 1.0)
    assert expected["sampler_capped_share"] > 0 or constants.correction == "off"


@pytest.mark.parametrize("case", CASES)
def test_every_gradient_is_exact_to_a_millionth(make_policy, tiny_model, case):
    policy = double(make_policy())
    exact = tolerance(case) if case != "gspo" else 1e-6
    options = {"later": True, "exact": exact, "max_tokens": 40}
    compare(policy, tiny_model, sampled(policy), case, **options)


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(
    advantages=st.lists(st.sampled_from([-1.5, -0.3, 0.0, 0.4, 1.1]), min_size=1, max_size=7),
    longest=st.integers(1, 12),
    seed=st.integers(0, 1000),
    later=st.booleans(),
    max_tokens=st.integers(1, 120),
    case=st.sampled_from(list(CASES)),
    s2t=st.fixed_dictionaries(
        {
            "tau_p": st.sampled_from([1e-9, 0.001, 0.02, 1.0]),
            "quantile": st.sampled_from([0.0, 0.05, 0.5, 0.75, 1.0]),
            "population": st.sampled_from(["candidates", "all"]),
        }
        # Whether a token of the lowest or the highest entropy is below it is a matter of rounding.
    ).filter(lambda s2t: s2t["population"] == "candidates" or 0 < s2t["quantile"] < 1),
)
def test_any_mini_batch(tiny_model, advantages, longest, seed, later, max_tokens, case, s2t):
    """With none, one or only equal candidates, with everything masked, without any advantage."""
    policy = double(adapted_policy(tiny_model))
    completions = sampled(policy, seed, advantages, longest)
    # Of one or two tokens nothing averages out, and a KL gradient can be next to nothing: rounding
    # shows.
    options = {"later": later, "rel": 1e-4, "s2t": s2t, "max_tokens": max_tokens}
    compare(policy, tiny_model, completions, case, **options)


VARIATIONS = [
    {"max_tokens": 1},
    {"max_tokens": 40, "reverse": True},
    {"checkpointing": True},
    {"train__lm_head_memory_gb": 2**-18},  # the smallest chunks
    {"train__lm_head_memory_gb": 2**-4},  # a single one
]


@pytest.mark.parametrize("case", INVARIANT)
def test_update_is_invariant_to_cuts_order_and_checkpointing(make_policy, case):
    """In fp32 the decoder's products of other shapes would change gradients by up to 3e-6."""

    def vary(*, reverse=False, max_tokens=10_000, **changes):
        policy, preset = double(make_policy(**changes)), objective(**INVARIANT[case])
        completions, old = later_update(policy)
        completions = completions[:: -1 if reverse else 1]
        return run_update(policy, completions, preset, old=old, max_tokens=max_tokens)

    expected = vary()
    for changes in VARIATIONS:
        assert_same(vary(**changes), expected, tolerance(case))


@pytest.mark.parametrize(
    ("statistics", "later", "passes"),
    [("current", False, 1), ("old", True, 0), ("current", True, 1)],
)
def test_no_unneeded_forward_passes(make_policy, statistics, later, passes):
    """Old statistics need no pass for the masks, completions without advantage none at all."""
    policy, completions = make_policy(), fake_completions(0, [1.0, 1.0, 0.0, 1.0])
    old = measured(policy, completions) if later else None
    rows = {True: [], False: []}

    def note(module, arguments, options, output):
        rows[output.last_hidden_state.requires_grad].append(len(options["input_ids"]))

    policy.model.get_decoder().register_forward_hook(note, with_kwargs=True)
    kind = objective(s2t={"statistics": statistics})
    run_update(policy, completions, kind, old=old, max_tokens=1)
    assert rows == {True: [1, 1, 1], False: [1, 1, 1] * passes}


@pytest.mark.parametrize("token_loss", ["clip", "sapo"])
def test_a_silenced_tokens_ratio_may_be_infinite(make_policy, token_loss):
    """And so may the KL term's: the gradient is that of the other tokens."""
    kind = objective(beta=0.1, token_loss=token_loss, s2t={"statistics": "current"})
    found = []
    parts = [torch.zeros(len(c.token_ids)) for c in fake_completions(3, ADVANTAGES)]
    for _ in range(2):
        policy = make_policy()
        completions, old = later_update(policy)
        offsets = dict(zip(completions, parts, strict=True))
        for c in completions:
            old[c].logprobs.sub_(offsets[c])

        def reference(some, policy=policy, offsets=offsets):
            with torch.no_grad():
                return policy.statistics(some).logprobs + torch.cat([offsets[c] for c in some])

        policy.reference_logprobs = reference
        gradient, _, result = run_update(policy, completions, kind, old=old)
        found.append(gradient)
        assert result.masks.silenced.sum() > 3
        parts = (200.0 * result.masks.silenced).split(list(map(len, parts)))
    assert found[0].isfinite().all()
    assert torch.equal(*found)


def test_how_far_the_first_update_has_moved_the_policy(make_policy):
    policy = make_policy()
    completions = fake_completions(0, [1.0, 0.0, -1.0])
    old = measured(make_policy(adapter_seed=2), completions)
    batch = packed(policy, completions, old)
    learner = make_learner(policy, objective(), 10_000)
    result = update(learner, batch)
    run = SimpleNamespace(learner=learner, policy=policy)
    diagnostics = Diagnostics()
    for metrics in ({}, {}):  # the count begins anew with each step
        diagnostics.on_update(run, batch, result)
        diagnostics.on_update(run, batch, result)
        diagnostics.on_update(run, batch, result)
        diagnostics.on_step_end(run, metrics, None)
        now = result.outputs.statistics.logprobs.tolist()
        k3 = []
        for before, after, advantage in zip(
            batch.old.logprobs.tolist(), now, batch.advantages.tolist(), strict=True
        ):
            if advantage:
                k3.append(math.exp(after - before) - 1 - (after - before))
        assert metrics["update_kl"] == pytest.approx(sum(k3) / len(k3), rel=1e-4)


def test_gradient_is_clipped_once_by_its_global_norm(make_policy):
    completions, bound = fake_completions(3, ADVANTAGES), {"max_tokens": 25, "max_grad_norm": 1e-3}
    whole, _, result = run_update(make_policy(), completions, objective())
    clipped, _, again = run_update(make_policy(), completions, objective(), **bound)
    assert again.grad_norm == pytest.approx(result.grad_norm, rel=1e-4)
    assert clipped.norm().item() == pytest.approx(1e-3, rel=1e-2)
    assert relative(clipped / clipped.norm(), whole / whole.norm()) < 1e-3


def test_later_updates_need_old_statistics_of_all_that_the_masks_read():
    """Rows without advantage count for thresholds over all tokens, which zeros would lower."""
    pair = fake_completions(0, [1.0, 0.0])

    def remembered(kind):
        return pack(pair, "cpu", kind).remembered

    for kind in (objective(s2t={"preset": "paper-v1"}), objective("20-entropy")):
        assert remembered(kind) == [0, 1]
    assert remembered(objective()) == [0]
    assert remembered(objective("justrl", old_logprobs="rollout")) == []
    # A teacher gives tokens a positive advantage whose completion has none: S2T's candidates, too.
    taught = objective(teacher_server="http://a", old_logprobs="rollout")
    assert pack(pair, "cpu", taught).decisive == remembered(taught) == [0, 1]


def test_a_completion_that_is_left_out_is_not_in_the_mini_batch(make_policy):
    found, completions = [], fake_completions(3, ADVANTAGES)
    left_out = [leave_out(c) if row % 3 == 0 else c for row, c in enumerate(completions)]
    rest = [c for row, c in enumerate(completions) if row % 3]
    for some in (left_out, rest):
        found.append(run_update(make_policy(), some, objective(), max_tokens=1))
    assert_same(*found)
