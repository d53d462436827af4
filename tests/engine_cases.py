"""What every rollout engine must do: for modules that have a fixture `engine`."""

import itertools

import pytest
import torch
from helpers import LONG, PROMPTS, SAMPLING, gap, generate

from stapo_lite.config import Prompting
from stapo_lite.extras.transformers_engine import TransformersEngine
from stapo_lite.extras.turns.episodes import run_episodes
from stapo_lite.extras.turns.tools import Chat
from stapo_lite.rollout.engine import Decoding
from stapo_lite.types import Prompt

DECODING = Decoding(max_completion_length=10, temperature=0.8, top_p=1.0)
VERSIONS = itertools.count(1)
"""An engine is shared: no version is published twice."""


def tokens(groups):
    return [[c.token_ids for c in group] for group in groups]


def drawn(engine, prompts, seeds, decoding=DECODING):
    completions = dict(engine.stream(prompts, seeds, [decoding] * len(prompts)))
    assert sorted(completions) == list(range(len(prompts)))
    return [completions[i] for i in range(len(prompts))]


def drawn_ids(engine, prompts, seeds):
    return [c.token_ids for c in drawn(engine, prompts, seeds)]


def test_groups_follow_the_protocol_and_the_seed(engine, make_policy):
    policy, now = make_policy(), next(VERSIONS)
    engine.publish(policy, now)
    groups = generate(engine, PROMPTS, seed=3)
    assert [len(group) for group in groups] == [SAMPLING.num_generations] * len(PROMPTS)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            ids = completion.token_ids
            assert completion.prompt is prompt
            assert completion.adapter_version == now
            assert len(completion.rollout_logprobs) == len(ids)
            assert 1 <= len(ids) <= SAMPLING.max_completion_length
            stops = [t for t, token in enumerate(ids) if token in SAMPLING.stop_token_ids]
            assert stops == ([] if completion.truncated else [len(ids) - 1])
    assert any(c.truncated for group in groups for c in group)
    assert len({tuple(c.token_ids) for group in groups for c in group}) > len(PROMPTS)
    assert gap(policy, groups).max() < 1e-4
    engine.publish(policy, next(VERSIONS))
    assert tokens(generate(engine, PROMPTS, seed=3)) == tokens(groups)
    assert tokens(generate(engine, PROMPTS, seed=4)) != tokens(groups)


async def with_a_tool(episode):
    """Two turns of the model's, and what a tool says between them."""
    await episode.generate(max_tokens=3)
    episode.add("!?")
    await episode.generate()


def test_turns_with_a_tool_between_them(engine, make_policy, tokenizer):
    """What the model wrote has the log-probabilities of its place; a tool's text has none."""
    policy, now = make_policy(), next(VERSIONS)
    engine.publish(policy, now)
    chat = Chat(tokenizer, Prompting())
    groups = run_episodes(engine, SAMPLING, chat, with_a_tool, PROMPTS, [1, 2, 3])
    assert [len(group) for group in groups] == [SAMPLING.num_generations] * len(PROMPTS)
    completions = [completion for group in groups for completion in group]
    said = tokenizer("!?").input_ids
    for completion in completions:
        length = len(completion.token_ids)
        first = completion.loss_mask.index(False)  # its first turn may end sooner
        assert 1 <= first <= 3
        assert completion.token_ids[first : first + 2] == said
        assert completion.loss_mask == [i not in (first, first + 1) for i in range(length)]
        assert length <= SAMPLING.max_completion_length
        assert completion.truncated == (completion.token_ids[-1] not in SAMPLING.stop_token_ids)
        assert completion.adapter_version == now
    mask = torch.tensor([written for c in completions for written in c.loss_mask])
    assert gap(policy, groups)[mask].max() < 1e-4
    assert all(c.rollout_logprobs[c.loss_mask.index(False)] == 0.0 for c in completions)
    engine.publish(policy, next(VERSIONS))
    again = run_episodes(engine, SAMPLING, chat, with_a_tool, PROMPTS, [1, 2, 3])
    assert tokens(again) == tokens(groups)


def deviations(completions, p):
    """By how many standard deviations first tokens' frequencies are off; rare ones count as one."""
    firsts = torch.tensor([c.token_ids[0] for c in completions])
    counts = torch.bincount(firsts, minlength=len(p)).float()
    common = p > 0.015
    assert common.sum() > 3
    counts, p = (torch.cat([x[common], x[~common].sum()[None]]) for x in (counts, p))
    return (counts - len(completions) * p) / (len(completions) * p * (1 - p)).sqrt().clamp(min=1e-9)


def test_samples_come_from_the_tempered_distribution_or_its_nucleus(engine, make_policy):
    """The nucleus is the smallest set of tokens that holds a probability of `top_p`."""
    policy = make_policy()
    engine.publish(policy, next(VERSIONS))
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([PROMPTS[0].token_ids])).logits[0, -1]
    tempered = torch.softmax(logits / SAMPLING.temperature, -1)
    groups = generate(engine, [PROMPTS[0]] * 128)
    assert deviations(list(itertools.chain(*groups)), tempered).abs().max() < 4
    p, order = tempered.sort(descending=True)
    nucleus = torch.zeros_like(p).scatter(0, order, p * (p.cumsum(0) - p < 0.6))
    decoding = Decoding(1, SAMPLING.temperature, 0.6)
    completions = drawn(engine, [PROMPTS[0]] * 512, range(512), decoding)
    assert deviations(completions, nucleus / nucleus.sum()).abs().max() < 4


def test_each_sample_follows_from_its_own_seed(engine, make_policy):
    now = next(VERSIONS)
    engine.publish(make_policy(), now)
    prompts, seeds = [*PROMPTS, *PROMPTS, *PROMPTS[:2]] * 2, [*range(100, 116)]
    first = drawn(engine, prompts, seeds)
    ids = [c.token_ids for c in first]
    assert drawn_ids(engine, prompts[::-1], seeds[::-1]) == ids[::-1]
    assert drawn_ids(engine, prompts[5:8], seeds[5:8]) == ids[5:8]
    assert drawn_ids(engine, prompts, range(16)) != ids
    for prompt, completion in zip(prompts, first, strict=True):
        assert completion.prompt is prompt
        assert completion.adapter_version == now
        assert 1 <= len(completion.token_ids) <= 10
        assert completion.truncated == (completion.token_ids[-1] not in SAMPLING.stop_token_ids)
    assert {c.truncated for c in first} == {False, True}


def test_a_stream_that_is_left_early_leaves_nothing_behind(engine, make_policy):
    """Also of more prompt tokens than fit into one pass."""
    engine.publish(make_policy(), next(VERSIONS))
    prompts = [Prompt("", [10 + (i + 13 * t) % 250 for t in range(380)], "") for i in range(16)]
    expected = drawn_ids(engine, prompts, range(16))
    stream = engine.stream(prompts * 2, range(32), [DECODING] * 32)
    next(stream)
    stream.close()
    assert drawn_ids(engine, prompts, range(16)) == expected


def test_a_new_version_does_not_see_the_cache_of_the_one_before(engine, make_policy):
    first, second = make_policy(adapter_seed=1), make_policy(adapter_seed=2)
    for policy, other in ((first, second), (second, first), (first, second)):
        engine.publish(policy, next(VERSIONS))
        groups = generate(engine, LONG)
        assert gap(policy, groups).max() < 1e-4
        assert gap(other, groups).mean() > 1e-2


def test_stop_tokens_of_a_turn_come_in_addition(engine, make_policy, tokenizer):
    if isinstance(engine, TransformersEngine):
        pytest.skip("it takes no options of a turn")
    engine.publish(make_policy(), next(VERSIONS))
    usual, added, ends = set(SAMPLING.stop_token_ids), {3, 4, 5, 6, 7, 8}, set()

    async def turn(episode):
        await episode.generate(stop_token_ids=list(added))
        *before, last = episode.token_ids
        assert not (usual | added) & set(before)
        assert episode.finished == (last in usual | added)
        if episode.finished:
            ends.add(last in added)

    chat = Chat(tokenizer, Prompting())
    run_episodes(engine, SAMPLING, chat, turn, PROMPTS * 8, [*range(24)])
    assert ends == {False, True}
