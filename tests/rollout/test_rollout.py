"""The engines against the trainer: vLLM for real (its CPU build), in float32."""

import itertools
import tempfile
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
import torch
from helpers import (
    LONG,
    PROMPTS,
    SAMPLING,
    gap,
    generate,
    make_vllm,
    randomise_adapter,
)
from packaging.version import Version
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer

from stapo_lite.config import PROJECTIONS
from stapo_lite.errors import InputError, RunError
from stapo_lite.extras.planning.plan import as_json, model_sizes
from stapo_lite.extras.turns import play
from stapo_lite.rollout import Decoding
from stapo_lite.rollout.transformers_engine import TransformersEngine
from stapo_lite.rollout.vllm_options import (
    WATERMARK,
    vllm_version,
)
from stapo_lite.types import Prompt

DECODING = Decoding(max_completion_length=10, temperature=0.8, top_p=1.0)
VERSIONS = itertools.count(1)
"""The vLLM engine is shared: no version is published twice."""


@pytest.fixture(scope="module")
def vllm_parts(tiny_model, tmp_path_factory):
    """An engine, what vLLM made of its arguments, and the folder of its adapters."""
    vllm = pytest.importorskip("vllm", reason="vLLM is not installed")
    parts = SimpleNamespace(adapters=tmp_path_factory.mktemp("adapters"))

    class Noted(vllm.LLM):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            parts.config = self.llm_engine.vllm_config

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm, "LLM", Noted)
        patch.setattr(tempfile, "tempdir", str(parts.adapters))
        parts.engine = make_vllm(tiny_model, "float32")
    yield parts
    parts.engine.close()
    assert not list(parts.adapters.iterdir())


@pytest.fixture
def vllm_engine(vllm_parts):
    return vllm_parts.engine


@pytest.fixture(params=["vllm", "transformers"])
def engine(request):
    if request.param == "vllm":
        return request.getfixturevalue("vllm_engine")
    return TransformersEngine(SAMPLING, max_num_seqs=8)


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model)


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
            assert completion.prompt is prompt
            assert completion.adapter_version == now
            assert len(completion.rollout_logprobs) == len(completion.token_ids)
            assert 1 <= len(completion.token_ids) <= SAMPLING.max_completion_length
            stops = [
                t
                for t, token in enumerate(completion.token_ids)
                if token in SAMPLING.stop_token_ids
            ]
            assert stops == ([] if completion.truncated else [len(completion.token_ids) - 1])
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
    """What the model wrote has the log-probabilities that it had in its place; a tool's has
    none."""
    policy, now = make_policy(), next(VERSIONS)
    engine.publish(policy, now)
    groups = play(engine, SAMPLING, tokenizer, with_a_tool, PROMPTS, [1, 2, 3])
    assert [len(group) for group in groups] == [SAMPLING.num_generations] * len(PROMPTS)
    completions = [completion for group in groups for completion in group]
    said = tokenizer("!?").input_ids
    for completion in completions:
        first = completion.loss_mask.index(False)  # its first turn may end sooner
        assert 1 <= first <= 3
        assert completion.token_ids[first : first + 2] == said
        assert completion.loss_mask == [
            i not in (first, first + 1) for i in range(len(completion.token_ids))
        ]
        assert len(completion.token_ids) <= SAMPLING.max_completion_length
        assert completion.truncated == (completion.token_ids[-1] not in SAMPLING.stop_token_ids)
        assert completion.adapter_version == now
    mask = torch.tensor([written for c in completions for written in c.loss_mask])
    assert gap(policy, groups)[mask].max() < 1e-4
    assert all(c.rollout_logprobs[c.loss_mask.index(False)] == 0.0 for c in completions)
    engine.publish(policy, next(VERSIONS))
    assert tokens(play(engine, SAMPLING, tokenizer, with_a_tool, PROMPTS, [1, 2, 3])) == tokens(
        groups
    )


async def until_a_letter(episode):
    text = await episode.generate(stop=["a", "e", "i"])
    assert episode.finished == (
        text[-1:] in ("a", "e", "i") or episode.token_ids[-1] in SAMPLING.stop_token_ids
    )
    episode.prompt.columns.setdefault("texts", []).append(text)


def test_stop_strings(vllm_engine, make_policy, tokenizer):
    policy = make_policy(scale=0.0)
    vllm_engine.publish(policy, next(VERSIONS))
    prompts = [Prompt("", prompt.token_ids, "") for prompt in PROMPTS]
    groups = play(vllm_engine, SAMPLING, tokenizer, until_a_letter, prompts, [7, 8, 9])
    assert gap(policy, groups).max() < 1e-4
    texts = [text for prompt in prompts for text in prompt.columns["texts"]]
    assert any(text.endswith(("a", "e", "i")) for text in texts)
    assert not any(letter in text[:-1] for text in texts for letter in "aei")


def deviations(completions, p):
    """How far first tokens' frequencies are from their probabilities, in standard deviations: each
    common token's, and that of the others together."""
    counts = torch.bincount(
        torch.tensor([c.token_ids[0] for c in completions]), minlength=len(p)
    ).float()
    common = p > 0.015
    assert common.sum() > 3
    counts, p = (torch.cat([x[common], x[~common].sum()[None]]) for x in (counts, p))
    return (counts - len(completions) * p) / (len(completions) * p * (1 - p)).sqrt().clamp(min=1e-9)


def test_groups_come_from_the_tempered_distribution_and_streamed_samples_from_its_nucleus(
    engine, make_policy
):
    """That is the smallest set of tokens that holds a probability of `top_p`."""
    policy = make_policy()
    engine.publish(policy, next(VERSIONS))
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([PROMPTS[0].token_ids])).logits[0, -1]
    tempered = torch.softmax(logits / SAMPLING.temperature, -1)
    groups = generate(engine, [PROMPTS[0]] * 128)
    assert deviations(list(itertools.chain(*groups)), tempered).abs().max() < 4
    p, order = tempered.sort(descending=True)
    nucleus = torch.zeros_like(p).scatter(0, order, p * (p.cumsum(0) - p < 0.6))
    completions = drawn(
        engine, [PROMPTS[0]] * 512, range(512), Decoding(1, SAMPLING.temperature, 0.6)
    )
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
    prompts = [
        Prompt("", [10 + (i + 13 * t) % 250 for t in range(380)], answer="") for i in range(16)
    ]
    expected = drawn_ids(engine, prompts, range(16))
    stream = engine.stream(prompts * 2, range(32), [DECODING] * 32)
    next(stream)
    stream.close()
    assert drawn_ids(engine, prompts, range(16)) == expected


def test_an_adapter_from_its_folder(vllm_engine, make_policy, tmp_path):
    policy = make_policy(scale=0.5)
    vllm_engine.publish(policy, next(VERSIONS))
    published = drawn_ids(vllm_engine, PROMPTS, [1, 2, 3])
    vllm_engine.publish(make_policy(adapter_seed=9), next(VERSIONS))
    assert drawn_ids(vllm_engine, PROMPTS, [1, 2, 3]) != published
    policy.save_adapter(tmp_path)
    vllm_engine.load_adapter(tmp_path, next(VERSIONS))
    assert drawn_ids(vllm_engine, PROMPTS, [1, 2, 3]) == published
    vllm_engine.publish(policy, next(VERSIONS))
    assert (tmp_path / "adapter_config.json").exists()  # only the engine's own folders are cleared


ADAPTERS = [
    *((projection, {}) for projection in PROJECTIONS),
    ("", {"lora__r": 5}),
    ("", {"lora__use_rslora": True}),
]


def test_an_adapter_of_layers_that_vllm_does_not_serve(vllm_engine, make_policy, tmp_path):
    policy = make_policy()
    policy.save_adapter(tmp_path)
    values = {
        name.replace("up_proj", "router"): value
        for name, value in policy.adapter_tensors("float32").items()
    }
    save_file(values, tmp_path / "adapter_model.safetensors")
    with pytest.raises(
        InputError, match="lora.target_modules: vLLM cannot serve the adapter .*router"
    ):
        vllm_engine.load_adapter(tmp_path, next(VERSIONS))
    vllm_engine.publish(policy, next(VERSIONS))  # it goes on
    assert gap(policy, generate(vllm_engine, PROMPTS)).max() < 1e-4


@pytest.mark.parametrize(("projection", "kind"), ADAPTERS)
def test_every_target_module_reaches_vllm(vllm_engine, make_policy, projection, kind):
    """An adapter in one projection alone has the same effect in vLLM as in the trainer, and has
    one; in all of them, of a rank between those that vLLM allows, and rank-stabilised, too."""
    policy = make_policy(**kind)
    randomise_adapter(policy, seed=3, scale=0.5, only=projection)
    vllm_engine.publish(policy, next(VERSIONS))
    groups = generate(vllm_engine, PROMPTS)
    assert gap(policy, groups).max() < 1e-4
    randomise_adapter(policy, seed=3, scale=0.0)
    assert gap(policy, groups).max() > 1e-2


def test_a_new_version_does_not_see_the_cache_of_the_one_before(engine, make_policy):
    first, second = make_policy(adapter_seed=1), make_policy(adapter_seed=2)
    for policy, other in ((first, second), (second, first), (first, second)):
        engine.publish(policy, next(VERSIONS))
        groups = generate(engine, LONG)
        assert gap(policy, groups).max() < 1e-4
        assert gap(other, groups).mean() > 1e-2


def test_publishing_never_touches_the_base_and_leaves_no_old_files(vllm_parts, make_policy):
    """With an adapter that is zero, vLLM serves the base bit for bit as before any adapter."""

    def serve(scale):
        vllm_parts.engine.publish(make_policy(scale=scale), next(VERSIONS))
        assert len(list(vllm_parts.adapters.glob("*/v*"))) == 1
        return [c.rollout_logprobs for group in generate(vllm_parts.engine, PROMPTS) for c in group]

    before, _, after = serve(0.0), serve(0.1), serve(0.0)
    assert after == before


def test_arguments_of_the_config_reach_vllm_which_listens_to_this_machine_only(
    vllm_parts, tiny_model
):
    """The KV cache of `rollout.vllm.kv_cache_memory_bytes` holds as many tokens as the plan
    says."""
    cache = vllm_parts.config.cache_config
    per_token = 4 * model_sizes(as_json(AutoConfig.from_pretrained(tiny_model))).kv_per_token
    assert cache.num_gpu_blocks * cache.block_size == pytest.approx(2**27 / per_token, rel=0.01)
    assert vllm_parts.config.model_config.logprobs_mode == "processed_logprobs"
    assert vllm_parts.config.scheduler_config.watermark == WATERMARK
    local = {"127.0.0.1", "::1"}
    if vllm_version() < Version("0.28"):  # torch's store, as vLLM starts it
        local.add("::")
    connections = psutil.Process().net_connections()
    assert {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN} <= local


def test_a_request_that_vllm_refuses_leaves_it_usable(vllm_engine, make_policy, caplog):
    vllm_engine.publish(make_policy(), next(VERSIONS))
    good = Decoding(4, 1.0, 1.0)
    with pytest.raises(RunError, match=r"^vLLM refuses a request \(.*logit_bias"):
        list(
            vllm_engine.stream(
                PROMPTS, [1, 2, 3], [good, good, replace(good, options={"logit_bias": {9999: 1.0}})]
            )
        )
    with pytest.raises(RunError, match=r"^vLLM refuses a request \(.*typo"):
        list(vllm_engine.stream(PROMPTS[:1], [1], [replace(good, options={"typo": 1})]))
    assert "starting it anew" not in caplog.text
    assert len(list(vllm_engine.stream(PROMPTS, [1, 2, 3], [good] * 3))) == 3


def test_waking_loads_no_adapter_and_the_next_request_finds_it(
    vllm_engine, make_policy, monkeypatch
):
    policy, now = make_policy(), next(VERSIONS)
    vllm_engine.publish(policy, now)
    monkeypatch.setattr(vllm_engine, "_asleep", True)  # which a CPU's never is
    monkeypatch.setattr(vllm_engine._llm, "wake_up", Mock())
    monkeypatch.setattr(vllm_engine._engine, "add_lora", Mock(side_effect=AssertionError))
    vllm_engine.wake()
    assert vllm_engine._engine.list_loras() == set()
    groups = generate(vllm_engine, LONG)
    assert {c.adapter_version for group in groups for c in group} == {now}
    assert gap(policy, groups).max() < 1e-4
