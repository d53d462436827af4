"""One optimiser update against the oracle, and what it must not depend on."""

import itertools
import math
from functools import partial
from pathlib import Path

import oracle
import pytest
import torch
from accelerate import Accelerator
from conftest import SAMPLING, adapted_policy, fake_completions, randomise_adapter
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from stapo_lite import update as update_module
from stapo_lite.batching import TokenBudget, pack, sequence_length
from stapo_lite.checkpoint import Progress
from stapo_lite.config import Config
from stapo_lite.metrics import VALUES
from stapo_lite.s2t import random_scores
from stapo_lite.types import TokenStatistics
from stapo_lite.update import Learner, find_masks, measure, update

ADVANTAGES = [1.2, -0.4, 0.0, 0.7, -1.1, 0.0, 0.3, 2.0]
TAU_P = 0.02  # the tiny model is flat: enough candidates to test with
ROOT = Path(__file__).parent.parent
LONGEST = 9


def objective(algorithm="stapo", s2t=None, **changes):
    tree = {"s2t": {"tau_p": TAU_P} | (s2t or {})} | changes
    return Config(model="m", output_dir="o", algorithm=algorithm, objective=tree).objective


def run_update(
    policy, completions, objective, *, old=None, max_tokens=10_000, max_grad_norm=1e9, token_log=None, longest=LONGEST
):
    """(gradient of the loss, metrics, result): with SGD at rate 1 the parameters move by minus the gradient."""
    before = torch.cat([p.detach().flatten() for p in policy.parameters.values()])
    learner = make_learner(policy, objective, max_tokens, max_grad_norm, longest, token_log)
    result = update(learner, packed(policy, completions, old))
    after = torch.cat([p.detach().flatten() for p in policy.parameters.values()])
    return before - after, learner.tally.reduce(learner.accelerator), result


def make_learner(policy, objective, max_tokens, max_grad_norm=1e9, longest=LONGEST, token_log=None):
    tree = {"model": "m", "output_dir": "o", "rollout": {"max_completion_length": longest}}
    tree["data"] = {"max_prompt_length": 1}
    tree["train"] = {"max_grad_norm": max_grad_norm, "learning_rate": 1.0, "max_tokens_per_microbatch": 2 * 10**9}
    config = Config(**tree).model_copy(update={"objective": objective})
    budget = max_tokens if isinstance(max_tokens, TokenBudget) else TokenBudget(max_tokens)
    optimizer = torch.optim.SGD(policy.parameters.values(), lr=1.0)
    progress = Progress(tau_p=objective.s2t.tau_p)
    return Learner(config, policy, optimizer, budget, Accelerator(cpu=True), progress, token_log)


def measured(policy, completions, max_tokens=10_000):
    """Statistics of the policy now for each completion."""
    budget = max_tokens if isinstance(max_tokens, TokenBudget) else TokenBudget(max_tokens)
    batch = pack(completions, policy.device)
    return split(batch, *measure(policy, batch, range(len(completions)), budget))


def split(batch, *values):
    """What [N] tensors hold of each completion."""
    parts = zip(*(value.split([len(c.token_ids) for c in batch.completions]) for value in values), strict=True)
    return dict(zip(batch.completions, itertools.starmap(TokenStatistics, parts), strict=True))


def packed(policy, completions, old=None):
    """A mini-batch; `old` has statistics of each completion."""
    batch = pack(completions, policy.device)
    if old is not None:
        batch.old = TokenStatistics(*map(torch.cat, zip(*(old[c] for c in completions), strict=True)))
    return batch


def relative(actual, expected):
    return ((actual - expected).norm() / expected.norm().clamp(min=1e-12)).item()


def sampled_by_an_engine(policy, completions, noise=0.5):
    """Give the completions the log-probabilities of an engine that differs from the trainer a good deal."""
    exact = oracle.statistics(oracle.double(policy.model), completions, SAMPLING.temperature)
    generator = torch.Generator().manual_seed(0)
    for c in completions:
        c.rollout_logprobs = [x + noise * torch.randn((), generator=generator).item() for x in exact[c][0]]
    return completions


def later_update(policy):
    """(completions, statistics of the policy before) of an update after which the policy has moved: ratios, clipping
    and capped weights."""
    completions = sampled_by_an_engine(policy, fake_completions(3, ADVANTAGES, LONGEST))
    old = measured(policy, completions)
    randomise_adapter(policy, seed=2, scale=0.13)
    return completions, old


def assert_same(actual, expected, rel=1e-6):
    """Gradient, every metric and the result of two runs of `run_update`. The loss is a
    difference of terms around 1, so it is allowed that much of 1; the gap of single tokens, a tenth of it."""
    (gradient, metrics, result), (expected_gradient, expected_metrics, expected_result) = actual, expected
    assert relative(gradient, expected_gradient) < rel
    for name, value in expected_metrics.items():
        if name in VALUES:
            values, expected_values = metrics[name].sort().values, value.sort().values
            torch.testing.assert_close(values, expected_values, rtol=rel, atol=5 * rel)
        else:
            scale = 1.0 if name == "loss" else 0.1
            assert metrics[name] == (value if value is None else pytest.approx(value, rel=rel, abs=scale * rel)), name
    assert result.grad_norm == pytest.approx(expected_result.grad_norm, rel=rel)
    assert (result.tau_h or 0.0) == pytest.approx(expected_result.tau_h or 0.0, rel=rel)


# The package's presets and options, and what the formulas say of them.
NO_S2T = {"silence": None}
CASES = {
    "stapo": ({}, {}),
    "another quantile": ({"s2t": {"quantile": 0.3}}, {"q": 0.3}),
    "paper-v1": ({"s2t": {"preset": "paper-v1"}}, {"population": "all", "q": 0.8}),
    "article": (
        {"s2t": {"preset": "article", "tau_p": 0.05}},
        {"population": "all", "q": 0.05, "tau_p": 0.05, "entropy_coef": 0.001},
    ),
    "full": ({"s2t": {"preset": "full"}}, {"silence": "all"}),
    "high-entropy": ({"s2t": {"preset": "high-entropy"}}, {"silence": "high-entropy"}),
    "random": ({"s2t": {"preset": "random"}}, {"silence": "random"}),
    "justrl": ({"algorithm": "justrl"}, NO_S2T),
    "justrl watching paper-v1": (
        {"algorithm": "justrl", "s2t": {"preset": "paper-v1"}},
        NO_S2T | {"population": "all", "q": 0.8},
    ),
    "dapo": ({"algorithm": "dapo"}, NO_S2T),
    "20-entropy": ({"algorithm": "20-entropy"}, NO_S2T | {"top": 0.2, "renormalize": False}),
    "20-entropy renormalized": ({"algorithm": "20-entropy", "renormalize": True}, NO_S2T | {"top": 0.2}),
    "grpo": (
        {"algorithm": "grpo"},
        NO_S2T | {"aggregation": "sequence-mean", "epsilon_high": 0.2, "beta": 0.04},
    ),
    "dr-grpo": (
        {"algorithm": "dr-grpo"},
        NO_S2T | {"aggregation": "constant", "epsilon_high": 0.2, "max_length": LONGEST},
    ),
    "stapo with everything": (
        {"beta": 0.1, "entropy_coef": 0.05, "aggregation": "sequence-mean", "top_entropy_quantile": 0.7},
        {"beta": 0.1, "entropy_coef": 0.05, "aggregation": "sequence-mean", "top": 0.7},
    ),
    "sequence-mask": (
        {"sampler_correction": "sequence-mask", "sampler_cap": 3.0},
        {"correction": "sequence-mask", "cap": 3.0},
    ),
    "no correction": ({"sampler_correction": "off"}, {"correction": "off"}),
    "rollout": ({"old_logprobs": "rollout"}, {"old_is_rollout": True, "correction": "off"}),
}


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean", "constant"])
def test_small_gradients_survive_in_float16(make_policy, aggregation):
    """As if of a large batch: the weight of a token is far below float16's smallest number."""
    kind = objective(aggregation=aggregation, sampler_correction="off")
    longest = 10**9 if aggregation == "constant" else LONGEST
    gradients = []
    for dtype in ("float32", "float16"):
        policy = make_policy(dtype)
        completions = sampled_by_an_engine(policy, fake_completions(3, ADVANTAGES, LONGEST))
        gradient, _, result = run_update(policy, completions, kind, longest=longest)
        if aggregation == "constant":  # SGD's step would be lost in the parameters' own rounding
            gradients.append(torch.tensor([result.grad_norm]))
        else:
            gradients.append(gradient)
    assert relative(gradients[1], gradients[0]) < 0.02
    assert gradients[0].norm() > 0


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("later", "statistics"), [(False, "current"), (True, "current"), (True, "old")])
def test_every_objective_matches_the_oracle(make_policy, tiny_model, case, later, statistics):
    compare_with_the_oracle(make_policy(), tiny_model, case, later, statistics)


@pytest.mark.parametrize(
    "case", ["stapo", "paper-v1", "20-entropy", "grpo", "dr-grpo", "random", "rollout", "sequence-mask"]
)
@pytest.mark.parametrize("later", [False, True])
def test_tokens_that_the_model_did_not_write(make_policy, tiny_model, case, later):
    """They are read, and neither trained, nor counted, nor asked for thresholds and metrics."""

    def tool_results(completions):
        for c in completions:
            c.loss_mask = [t % 4 != 1 for t in range(len(c.token_ids))]
            c.rollout_logprobs = [x if w else math.nan for x, w in zip(c.rollout_logprobs, c.loss_mask, strict=True)]

    compare_with_the_oracle(make_policy(), tiny_model, case, later, "old" if later else "current", tool_results)


def compare_with_the_oracle(policy, model, case, later, statistics, prepare=lambda completions: None):
    ours, formulas = CASES[case]
    ours = ours | {"s2t": ours.get("s2t", {}) | {"statistics": statistics}}
    completions = sampled_by_an_engine(policy, fake_completions(3, ADVANTAGES, LONGEST))
    prepare(completions)
    old = exact_old = None
    if later:  # the policy has moved: ratios and clipping
        old = measured(policy, completions)
        exact_old = oracle.statistics(oracle.double(policy.model), completions, SAMPLING.temperature)
        randomise_adapter(policy, seed=2, scale=0.13)
    constants = oracle.Settings(**{"tau_p": TAU_P, "correction": "token-truncate"} | formulas)
    constants.random = {c: random_scores(c.token_ids, c.adapter_version).tolist() for c in completions}
    expected, gradient = oracle.loss_and_metrics(
        policy.model,
        completions,
        SAMPLING.temperature,
        constants,
        old=exact_old,
        mask_from=exact_old if statistics == "old" else None,
        reference=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64) if constants.beta else None,
    )
    assert expected["candidate"] > 0, "the case tests nothing"
    assert expected["silenced"] > 0 or constants.silence is None
    assert expected["clipped_low"] + expected["clipped_high"] > 0 or not (later or constants.old_is_rollout)
    assert expected["capped"] > 0 or constants.correction == "off"
    actual, metrics, result = run_update(policy, completions, objective(**ours), old=old, max_tokens=40)
    assert relative(actual, gradient.float()) < 1e-5
    for name, value in expected.items():
        if later and ours.get("old_logprobs") == "rollout" and name.startswith("gap"):
            continue  # nothing measured it
        counted = result.tau_h if name == "tau_h" else metrics[name]
        assert counted == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert result.grad_norm == pytest.approx(gradient.norm().item(), rel=1e-5)


INVARIANT = {
    name: CASES[name][0]
    for name in ("stapo", "random", "20-entropy", "grpo", "dr-grpo", "stapo with everything", "sequence-mask")
} | {"paper-v1 of the current policy": {"s2t": {"preset": "paper-v1", "statistics": "current"}}}


def tolerance(case):
    """The product over a sequence adds up the rounding of its tokens' log-probabilities."""
    return 3e-6 if case == "sequence-mask" else 1e-6


@pytest.fixture(params=INVARIANT)
def compare(request, make_policy):
    """A function that runs a later update, changed in one way, and compares it with the unchanged one.

    The decoder computes in float64, so that what is left is what the package computes, which is fp32; the decoder's
    own matrix products in fp32 differ by up to 3e-6 in the gradient from one shape to another.
    """

    def run(*, reverse=False, max_tokens=10_000, prepare=lambda policy: None, **changes):
        policy = make_policy(**changes)
        policy.model.double()
        completions, old = later_update(policy)
        prepare(policy)
        return run_update(policy, completions[:: -1 if reverse else 1], preset, old=old, max_tokens=max_tokens)

    preset = objective(**INVARIANT[request.param])
    expected = run()
    return lambda **changes: assert_same(run(**changes), expected, tolerance(request.param))


@pytest.mark.parametrize("max_tokens", [1, 25, 60])
def test_the_token_budget_changes_nothing(compare, max_tokens):
    compare(max_tokens=max_tokens)


def test_the_order_of_sequences_changes_nothing(compare):
    compare(reverse=True, max_tokens=40)


def test_gradient_checkpointing_changes_nothing(compare):
    compare(train__gradient_checkpointing=True)


@pytest.mark.parametrize("memory", [1 << 12, 1 << 14, 1 << 26])
def test_the_head_s_chunk_sizes_change_nothing(compare, memory):
    compare(train__lm_head_memory_gb=memory / 2**30)


@pytest.mark.parametrize("amount", [1, 13])
def test_the_amount_of_padding_changes_nothing(compare, monkeypatch, amount):
    pad_sequence = torch.nn.utils.rnn.pad_sequence

    def padded(rows, batch_first, padding_value):
        rows = pad_sequence(rows, batch_first=batch_first, padding_value=padding_value)
        return torch.nn.functional.pad(rows, (0, amount), value=padding_value)

    monkeypatch.setattr(torch.nn.utils.rnn, "pad_sequence", padded)
    compare()


def test_the_side_of_the_padding_changes_nothing(compare):
    """The decoder fed as most trainers do, padded on the left with an attention mask and positions."""
    lengths = []

    def padded_on_the_left(forward, input_ids, **arguments):
        width = input_ids.shape[1]
        shifts = [width - length for length in lengths]
        turned = torch.stack([row.roll(shift) for row, shift in zip(input_ids, shifts, strict=True)])
        mask = torch.arange(width) >= torch.tensor(shifts)[:, None]
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        output = forward(input_ids=turned, attention_mask=mask.long(), position_ids=positions, **arguments)
        rows = [row.roll(-shift, 0) for row, shift in zip(output.last_hidden_state, shifts, strict=True)]
        output.last_hidden_state = torch.stack(rows)
        return output

    def prepare(policy):
        decoder, hidden_states = policy._causal_lm.get_decoder(), policy.hidden_states

        def note_lengths(completions):
            lengths[:] = map(sequence_length, completions)
            return hidden_states(completions)

        policy.hidden_states = note_lengths
        decoder.forward = partial(padded_on_the_left, decoder.forward)

    compare(max_tokens=60, prepare=prepare)


def test_skipping_completions_of_zero_advantage_changes_nothing(compare, monkeypatch):
    monkeypatch.setattr(update_module, "with_gradient", lambda completions, objective: [*range(len(completions))])
    compare(max_tokens=60)


def test_a_float32_decoder_adds_little(make_policy):
    def run(max_tokens):
        policy = make_policy()
        completions = sampled_by_an_engine(policy, fake_completions(3, ADVANTAGES, LONGEST))
        return run_update(policy, completions, objective("grpo"), max_tokens=max_tokens)

    assert_same(run(25), run(10_000), rel=5e-6)


ADVANTAGE = st.sampled_from([-1.5, -0.3, 0.0, 0.4, 1.1])


@settings(max_examples=120, deadline=None, derandomize=True, database=None)
@given(
    advantages=st.lists(ADVANTAGE, min_size=1, max_size=7),
    longest=st.integers(1, 12),
    seed=st.integers(0, 1000),
    later=st.booleans(),
    max_tokens=st.integers(1, 120),
    order=st.randoms(use_true_random=False),
    s2t=st.fixed_dictionaries(
        {
            "enabled": st.booleans(),
            "tau_p": st.sampled_from([1e-9, 0.001, 0.02, 1.0]),
            "quantile": st.sampled_from([0.0, 0.05, 0.5, 0.75, 1.0]),
            "population": st.sampled_from(["candidates", "all"]),
            "silence": st.sampled_from(["low-entropy", "high-entropy", "random", "all"]),
            "statistics": st.sampled_from(["current", "old"]),
        }
    ),
    rest=st.fixed_dictionaries(
        {
            "aggregation": st.sampled_from(["token-mean", "sequence-mean", "constant"]),
            "beta": st.sampled_from([0.0, 0.1]),
            "entropy_coef": st.sampled_from([0.0, 0.01]),
            "top_entropy_quantile": st.sampled_from([1.0, 0.4]),
            "renormalize": st.booleans(),
            "sampler_correction": st.sampled_from(["token-truncate", "off"]),
        }
    ),
)
def test_any_mini_batch(property_run, advantages, longest, seed, later, max_tokens, order, s2t, rest):
    """Of any shape, with none, one or only equal candidates, with everything masked, with no advantage at all: the
    oracle's mask and gradient, or no update; and the same however it is cut and ordered."""
    policy, preset = property_run.policy, objective(s2t=s2t, **rest)
    property_run.start()
    completions = sampled_by_an_engine(policy, fake_completions(seed, advantages, longest))
    before = oracle.statistics(policy.model, completions, SAMPLING.temperature)
    old = measured(policy, completions) if later else None
    constants = oracle.Settings(
        tau_p=s2t["tau_p"],
        q=s2t["quantile"],
        population=s2t["population"],
        silence=s2t["silence"] if s2t["enabled"] else None,
        top=rest["top_entropy_quantile"],
        renormalize=rest["renormalize"],
        aggregation=rest["aggregation"],
        max_length=LONGEST,
        beta=rest["beta"],
        entropy_coef=rest["entropy_coef"],
        correction=rest["sampler_correction"],
        random={c: random_scores(c.token_ids, c.adapter_version).tolist() for c in completions},
    )
    if later:
        property_run.move()
    numbers = before if later and s2t["statistics"] == "old" else None
    now = oracle.statistics(policy.model, completions, SAMPLING.temperature)
    kept, silenced, _ = oracle.masks(completions, numbers or now, constants)
    shuffled = list(completions)
    order.shuffle(shuffled)
    batch = packed(policy, shuffled, old)
    keep = find_masks(make_learner(policy, preset, max_tokens), batch).keep.tolist()
    assert {
        (c, t) for row, c in enumerate(shuffled) for t in range(len(c.token_ids)) if keep[batch.starts[row] + t]
    } == kept
    whole = run_update(policy, completions, preset, old=old)
    property_run.move() if later else property_run.start()
    cut = run_update(policy, shuffled, preset, old=old, max_tokens=max_tokens)
    assert (whole[1]["kept"], whole[1]["silenced"]) == (len(kept), len(silenced))
    if not any(c.advantage != 0 or rest["beta"] or rest["entropy_coef"] for c, _ in kept):
        assert whole[2] is None
        assert cut[2] is None
        assert not whole[0].any()
        return
    # Of one or two tokens nothing averages out, and a KL gradient can be next to nothing: rounding shows.
    assert_same(cut, whole, rel=1e-4)
    property_run.move() if later else property_run.start()
    _, gradient = oracle.loss_and_metrics(
        policy.model,
        completions,
        SAMPLING.temperature,
        constants,
        old=before if later else None,
        mask_from=numbers,
        reference=property_run.reference if rest["beta"] else None,
    )
    assert relative(whole[0], gradient) < 1e-4


class PropertyRun:
    """A policy with a float64 decoder that can be put back, its reference, and what it becomes when it moves."""

    def __init__(self, model):
        self.policy = adapted_policy(model)
        self.reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
        self._start = [p.detach().clone() for p in self.policy.parameters.values()]
        randomise_adapter(self.policy, seed=2, scale=0.13)
        self._moved = [p.detach().clone() for p in self.policy.parameters.values()]
        self.policy.model.double()

    def __repr__(self):
        return "PropertyRun"

    def start(self):
        self._set(self._start)

    def move(self):
        self._set(self._moved)

    def _set(self, values):
        for parameter, value in zip(self.policy.parameters.values(), values, strict=True):
            parameter.data.copy_(value)


@pytest.fixture(scope="module")
def property_run(tiny_model):
    return PropertyRun(tiny_model)


def test_zero_advantage_completions_are_not_run(make_policy, monkeypatch):
    policy, completions = make_policy(), fake_completions(3, ADVANTAGES)
    seen, hidden_states = [], policy.hidden_states
    monkeypatch.setattr(policy, "hidden_states", lambda rows: seen.append(rows) or hidden_states(rows))
    run_update(policy, completions, objective())
    assert seen
    assert all(completion.advantage != 0 for rows in seen for completion in rows)


@pytest.mark.parametrize(
    ("statistics", "later", "passes"), [("current", False, 1), ("old", True, 0), ("current", True, 1)]
)
def test_no_pass_that_is_not_needed(make_policy, monkeypatch, statistics, later, passes):
    """Of three micro-batches the first one's forward pass serves the mask as well; old statistics need no pass."""
    policy, completions = make_policy(), fake_completions(0, [1.0] * 3)
    old = measured(policy, completions) if later else None
    rows = {True: [], False: []}
    original = policy.hidden_states

    def note(completions):
        rows[torch.is_grad_enabled()].append(len(completions))
        return original(completions)

    monkeypatch.setattr(policy, "hidden_states", note)
    run_update(policy, completions, objective(s2t={"statistics": statistics}), old=old, max_tokens=1)
    assert rows == {True: [1, 1, 1], False: [1, 1] * passes}


def test_only_zero_advantages_is_no_update(make_policy):
    policy, completions = make_policy(), fake_completions(5, [0.0, 0.0, 0.0])
    moved, metrics, result = run_update(policy, completions, objective(s2t={"population": "all"}))
    assert result is None
    assert not moved.any()
    assert metrics["loss"] == 0


def test_every_trainable_token_masked_is_no_update(make_policy):
    completions = fake_completions(6, [1.0, 0.0])
    moved, metrics, result = run_update(make_policy(), completions, objective(s2t={"preset": "full", "tau_p": 1.0}))
    assert metrics["silenced"] == len(completions[0].token_ids)
    assert result is None
    assert not moved.any()


def test_kl_alone_pulls_the_policy_back(make_policy):
    """Without any advantage GRPO still updates, and the update lowers the divergence."""
    policy, completions = make_policy(), fake_completions(5, [0.0, 0.0, 0.0])
    before = run_update(policy, completions, objective("grpo", beta=1e-3))[1]
    after = run_update(policy, completions, objective("grpo", beta=1e-3))[1]
    assert before["kl"] > after["kl"] > 0


def test_the_entropy_bonus_raises_the_entropy(make_policy):
    def entropy_after(coefficient):
        policy, completions = make_policy(), fake_completions(3, ADVANTAGES)
        run_update(policy, completions, objective(entropy_coef=coefficient))
        statistics = measured(policy, completions)
        return torch.cat([statistics[c].entropy for c in completions]).mean()

    assert entropy_after(0.03) > entropy_after(0.0)


def test_the_reference_is_the_base_and_the_adapter_survives(make_policy, tiny_model):
    policy, completions = make_policy(train__gradient_checkpointing=True), fake_completions(3, ADVANTAGES)
    reference = policy.reference_logprobs(completions)
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    exact = oracle.statistics(base, completions, SAMPLING.temperature)
    assert reference.tolist() == pytest.approx([x for c in completions for x in exact[c][0]], abs=1e-4)
    assert all(p.requires_grad for p in policy.parameters.values())
    assert not torch.allclose(policy.statistics(completions).logprobs, reference, atol=1e-3)


def test_gradient_is_clipped_once_by_its_global_norm(make_policy):
    completions = fake_completions(3, ADVANTAGES)
    whole, _, result = run_update(make_policy(), completions, objective())
    clipped, _, again = run_update(make_policy(), completions, objective(), max_tokens=25, max_grad_norm=1e-3)
    assert again.grad_norm == pytest.approx(result.grad_norm, rel=1e-4)
    assert clipped.norm().item() == pytest.approx(1e-3, rel=1e-2)
    assert relative(clipped / clipped.norm(), whole / whole.norm()) < 1e-3
