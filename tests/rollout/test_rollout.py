"""The engines against the trainer: vLLM for real (its CPU build), in float32 and bfloat16."""

import asyncio
import itertools
import json
import shutil
import threading
import weakref
from contextlib import closing, nullcontext
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from unittest.mock import Mock, call

import psutil
import pytest
import torch
from helpers import LONG, MINIMAL, PROMPTS, SAMPLING, adapted_policy, gap, generate, make_vllm, randomise_adapter
from packaging.version import Version
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer

from stapo_lite.config import PROJECTIONS, Engine, load_config
from stapo_lite.errors import InputError, RunError
from stapo_lite.planning.plan import as_json, model_sizes
from stapo_lite.rollout import Decoding, check_options, make_sampling, resolve_engine
from stapo_lite.rollout import vllm_engine as vllm_engine_module
from stapo_lite.rollout.episodes import play, until_stop
from stapo_lite.rollout.transformers_engine import TransformersEngine
from stapo_lite.rollout.vllm_options import (
    BATCHED_TOKENS,
    WATERMARK,
    check_vllm,
    engine_arguments,
    fp32_head,
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
        patch.setattr("stapo_lite.rollout.vllm_engine.IN_MEMORY", parts.adapters)
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
            stops = [t for t, token in enumerate(completion.token_ids) if token in SAMPLING.stop_token_ids]
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
    """What the model wrote has the log-probabilities that it had in its place; a tool's has none."""
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
        assert completion.loss_mask == [i not in (first, first + 1) for i in range(len(completion.token_ids))]
        assert len(completion.token_ids) <= SAMPLING.max_completion_length
        assert completion.truncated == (completion.token_ids[-1] not in SAMPLING.stop_token_ids)
        assert completion.adapter_version == now
    mask = torch.tensor([written for c in completions for written in c.loss_mask])
    assert gap(policy, groups)[mask].max() < 1e-4
    assert all(c.rollout_logprobs[c.loss_mask.index(False)] == 0.0 for c in completions)
    engine.publish(policy, next(VERSIONS))
    assert tokens(play(engine, SAMPLING, tokenizer, with_a_tool, PROMPTS, [1, 2, 3])) == tokens(groups)


def test_tools_run_side_by_side_and_what_one_raises_ends_all(make_policy, tokenizer):
    engine = TransformersEngine(SAMPLING, max_num_seqs=64)
    engine.publish(make_policy(), 1)
    meeting: list[asyncio.Barrier] = []

    async def meet(episode):
        await episode.generate(max_tokens=1)
        meeting[:] = meeting or [asyncio.Barrier(SAMPLING.num_generations * len(PROMPTS))]
        await asyncio.wait_for(meeting[0].wait(), 60)  # for all the others
        await episode.generate(max_tokens=1)

    async def fail(episode):
        await episode.generate(max_tokens=1)
        if episode.prompt is PROMPTS[1]:
            raise LookupError("no such tool")
        await episode.generate()

    async def nothing(episode):
        episode.add("only a tool")

    async def cut_off(episode):
        await episode.generate(max_tokens=1)
        episode.finished = True  # as after a stop string
        episode.add("a" * 5)
        assert episode.finished
        episode.add("a" * 100)
        assert not episode.finished
        episode.finished = True
        episode.add("")
        assert episode.finished
        assert await episode.generate(max_tokens=0) == ""  # a budget of the caller's that is used up
        episode.add("a")

    async def full(episode):
        episode.add("a" * 100)
        assert episode.room == 0
        assert await episode.generate() == ""
        assert not episode.finished

    async def two_at_once(episode):
        await asyncio.gather(episode.generate(1), episode.generate(1))

    async def forgetful(episode):
        asking = asyncio.ensure_future(episode.generate(1))
        await asyncio.sleep(0)
        assert not asking.done()

    async def more_forgetful(episode):
        await episode.generate(1)
        if episode.prompt is PROMPTS[0]:
            forgotten.append(asyncio.ensure_future(episode.generate(1)))  # has not asked when the coroutine ends
        else:
            await episode.generate(1)

    forgotten: list[asyncio.Task] = []
    groups = play(engine, SAMPLING, tokenizer, more_forgetful, PROMPTS, [1, 2, 3])
    assert {len(c.token_ids) for c in groups[0]} == {1}
    assert {type(task.exception()) for task in forgotten} == {RunError}
    groups = play(engine, SAMPLING, tokenizer, meet, PROMPTS, [1, 2, 3])
    assert {len(c.token_ids) for group in groups for c in group} == {2}
    groups = play(engine, SAMPLING, tokenizer, cut_off, PROMPTS, [1, 2, 3])
    assert all(c.truncated and len(c.token_ids) == 12 for group in groups for c in group)
    for function, error, message in (
        (fail, LookupError, "no such tool"),
        (nothing, RunError, "an episode ended without a turn of the model's"),
        (full, RunError, "an episode ended without a turn of the model's"),
        (two_at_once, RunError, "asked for two turns at once"),
        (forgetful, RunError, "ended before it had its turn"),
    ):
        with pytest.raises(error, match=message):
            play(engine, SAMPLING, tokenizer, function, PROMPTS, [1, 2, 3])
    with pytest.raises(InputError, match="rollout.engine=transformers knows no stop: set rollout.engine=vllm"):
        play(engine, SAMPLING, tokenizer, until_a_letter, PROMPTS, [1, 2, 3])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("episodes")]


@pytest.mark.parametrize("limit", [asyncio.Lock, lambda: asyncio.Semaphore(5)])
def test_coroutines_may_wait_for_each_other(make_policy, tokenizer, limit, monkeypatch):
    """A lock or a semaphore around a turn: those behind it never ask, and those before it must not wait for them."""
    engine = TransformersEngine(SAMPLING, max_num_seqs=64)
    engine.publish(make_policy(), 1)
    monkeypatch.setattr("stapo_lite.rollout.episodes.QUIET", 0.05)
    made: list = []

    async def one_by_one(episode):
        made[:] = made or [limit()]
        async with made[0]:
            await episode.generate(max_tokens=1)
        await episode.generate(max_tokens=1)

    groups = play(engine, SAMPLING, tokenizer, one_by_one, PROMPTS, [1, 2, 3])
    assert {len(c.token_ids) for group in groups for c in group} == {2}


def test_a_coroutine_may_stop_waiting_for_the_model(make_policy, tokenizer):
    """Before its round begins, and while it is sampled."""
    others_may_ask: list[asyncio.Event] = []
    asking: list[asyncio.Task] = []

    class Interrupted(TransformersEngine):
        def stream(self, *batch):
            for task in list(asking):  # the first to be cancelled clears it, in the other thread
                task.get_loop().call_soon_threadsafe(task.cancel)
            yield from super().stream(*batch)

    async def ask_in_vain(episode):
        asking.append(task := asyncio.ensure_future(episode.generate()))
        with pytest.raises(asyncio.CancelledError):
            await task

    async def impatient(episode):
        others_may_ask[:] = others_may_ask or [asyncio.Event()]
        if episode.prompt is PROMPTS[0]:
            early = asyncio.ensure_future(episode.generate())
            await asyncio.sleep(0)  # it has asked
            early.cancel()
            with pytest.raises(asyncio.CancelledError):
                await early
            others_may_ask[0].set()
        await others_may_ask[0].wait()
        await ask_in_vain(episode)
        asking.clear()
        await episode.generate(max_tokens=2)
        await ask_in_vain(episode)  # all end while this round is sampled

    engine = Interrupted(SAMPLING, max_num_seqs=64)
    engine.publish(make_policy(), 1)
    groups = play(engine, SAMPLING, tokenizer, impatient, PROMPTS, [1, 2, 3])
    assert all(c.token_ids for group in groups for c in group)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("episodes")]


@pytest.mark.parametrize(
    ("text", "before", "stop", "expected"),
    [
        ("see </tool>\n", 10, ["</tool>"], "see </tool>"),  # the last token is ">" and a newline
        ("see </tool>\n", 10, "</tool>", "see </tool>"),
        ("a = b =\n", 5, ["=", "\n"], "a = b ="),  # what stopped it is in the last token
        ("a = b", 5, ["="], "a = b"),  # a stop token ended it
        ("a = b", 5, [], "a = b"),
        ("a\U0001f527b", 1, ["\U0001f527"], "a\U0001f527"),  # the last token completes a character
    ],
)
def test_a_turn_ends_with_its_stop_string(text, before, stop, expected):
    assert until_stop(text, before, stop) == expected


async def until_a_letter(episode):
    text = await episode.generate(stop=["a", "e", "i"])
    assert episode.finished == (text[-1:] in ("a", "e", "i") or episode.token_ids[-1] in SAMPLING.stop_token_ids)
    episode.prompt.columns.setdefault("texts", []).append(text)


def test_stop_strings(vllm_engine, make_policy, tokenizer):
    policy = make_policy(scale=0.0)
    vllm_engine.publish(policy, next(VERSIONS))
    prompts = [Prompt("", prompt.token_ids, "") for prompt in PROMPTS]
    groups = play(vllm_engine, SAMPLING, tokenizer, until_a_letter, prompts, [7, 8, 9])
    assert gap(policy, groups).max() < 1e-4
    assert any(text.endswith(("a", "e", "i")) for prompt in prompts for text in prompt.columns["texts"])
    assert not any(letter in text[:-1] for prompt in prompts for text in prompt.columns["texts"] for letter in "aei")


def deviations(completions, p):
    """How far first tokens' frequencies are from their probabilities, in standard deviations: each common token's, and
    that of the others together."""
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in completions]), minlength=len(p)).float()
    common = p > 0.015
    assert common.sum() > 3
    counts, p = (torch.cat([x[common], x[~common].sum()[None]]) for x in (counts, p))
    return (counts - len(completions) * p) / (len(completions) * p * (1 - p)).sqrt().clamp(min=1e-9)


def test_groups_come_from_the_tempered_distribution_and_streamed_samples_from_its_nucleus(engine, make_policy):
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
    completions = drawn(engine, [PROMPTS[0]] * 512, range(512), Decoding(1, SAMPLING.temperature, 0.6))
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
    prompts = [Prompt("", [10 + (i + 13 * t) % 250 for t in range(380)], answer="") for i in range(16)]
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


ADAPTERS = [*((projection, {}) for projection in PROJECTIONS), ("", {"lora__r": 5}), ("", {"lora__use_rslora": True})]


def test_an_adapter_of_layers_that_vllm_does_not_serve(vllm_engine, make_policy, tmp_path):
    policy = make_policy()
    policy.save_adapter(tmp_path)
    values = {name.replace("up_proj", "router"): value for name, value in policy.adapter_tensors("float32").items()}
    save_file(values, tmp_path / "adapter_model.safetensors")
    with pytest.raises(InputError, match="lora.target_modules: vLLM cannot serve the adapter .*router"):
        vllm_engine.load_adapter(tmp_path, next(VERSIONS))
    vllm_engine.publish(policy, next(VERSIONS))  # it goes on
    assert gap(policy, generate(vllm_engine, PROMPTS)).max() < 1e-4


@pytest.mark.parametrize(("projection", "kind"), ADAPTERS)
def test_every_target_module_reaches_vllm(vllm_engine, make_policy, projection, kind):
    """An adapter in one projection alone has the same effect in vLLM as in the trainer, and has one; in all of them, of
    a rank between those that vLLM allows, and rank-stabilised, too."""
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
        assert len(list(vllm_parts.adapters.glob("*/*"))) == 1
        return [c.rollout_logprobs for group in generate(vllm_parts.engine, PROMPTS) for c in group]

    before, _, after = serve(0.0), serve(0.1), serve(0.0)
    assert after == before


def test_arguments_of_the_config_reach_vllm_which_listens_to_this_machine_only(vllm_parts, tiny_model):
    """The KV cache of `rollout.vllm.kv_cache_memory_bytes` holds as many tokens as the plan says."""
    cache = vllm_parts.config.cache_config
    per_token = 4 * model_sizes(as_json(AutoConfig.from_pretrained(tiny_model))).kv_per_token
    assert cache.num_gpu_blocks * cache.block_size == pytest.approx(2**27 / per_token, rel=0.01)
    assert vllm_parts.config.model_config.logprobs_mode == "processed_logprobs"
    assert vllm_parts.config.scheduler_config.watermark == WATERMARK
    connections = psutil.Process().net_connections()
    everywhere = {"::"} if vllm_version() < Version("0.28") else set()  # torch's store, as vLLM starts it
    assert {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN} <= {"127.0.0.1", "::1"} | everywhere


def test_a_request_that_vllm_refuses_leaves_it_usable(vllm_engine, make_policy, caplog):
    vllm_engine.publish(make_policy(), next(VERSIONS))
    good = Decoding(4, 1.0, 1.0)
    with pytest.raises(RunError, match=r"^vLLM refuses a request \(.*logit_bias"):
        list(vllm_engine.stream(PROMPTS, [1, 2, 3], [good, good, replace(good, options={"logit_bias": {9999: 1.0}})]))
    with pytest.raises(RunError, match=r"^vLLM refuses a request \(.*typo"):
        list(vllm_engine.stream(PROMPTS[:1], [1], [replace(good, options={"typo": 1})]))
    assert "starting it anew" not in caplog.text
    assert len(list(vllm_engine.stream(PROMPTS, [1, 2, 3], [good] * 3))) == 3


def test_waking_loads_no_adapter_and_the_next_request_finds_it(vllm_engine, make_policy, monkeypatch):
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


@pytest.mark.parametrize("room", [True, False])
def test_adapters_lie_in_memory_where_there_is_room(room, monkeypatch, tmp_path):
    """A container's /dev/shm has 64 MiB by default, which an adapter of rank 32 for a 2B model fills."""
    monkeypatch.setattr(vllm_engine_module, "IN_MEMORY", tmp_path)
    usage = SimpleNamespace(free=vllm_engine_module.ROOM if room else 64 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert vllm_engine_module.place_for_adapters() == (tmp_path if room else None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # both would take it
    assert vllm_engine_module.place_for_adapters() is None
    monkeypatch.setattr(vllm_engine_module, "IN_MEMORY", tmp_path / "nowhere")
    assert vllm_engine_module.place_for_adapters() is None


def test_no_adapter_slot_outlives_its_engine():
    """vLLM's tables of slots, filled by its own functions; both are private."""
    kernels = pytest.importorskip("vllm.lora.ops.triton_ops.utils", reason="vLLM is not installed")
    slots = [torch.zeros(1, 4, 8), torch.zeros(1, 8, 4)]
    kernels._get_lora_a_ptr(slots[:1], slots[0].device)
    kernels._get_lora_b_ptr(slots[1:], 0, slots[1].device)
    left = [weakref.ref(slot) for slot in slots]
    del slots
    assert all(slot() is not None for slot in left)
    engine = object.__new__(vllm_engine_module.VLLMEngine)
    engine._llm = None
    engine._shut_down()
    assert all(slot() is None for slot in left)


@pytest.mark.parametrize("joined", [True, False])
def test_the_process_group_of_all_is_kept_where_it_is_not_vllms(monkeypatch, joined):
    """In test_parallel.py two processes train, export and evaluate with it."""
    ended = []
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda group=None: ended.append(group))
    with vllm_engine_module.kept_process_group(joined):
        for group in ("vLLM's own", None):
            torch.distributed.destroy_process_group(group)
    torch.distributed.destroy_process_group("later")
    assert ended == ["vLLM's own", *([] if joined else [None]), "later"]


def test_a_model_that_vllm_cannot_serve_is_one_line(tiny_model, tmp_path):
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(InputError, match="rollout: vLLM cannot serve .*model \\(") as error:
        make_vllm(tmp_path / "model", "float32")
    assert "\n" not in str(error.value)


def test_bfloat16_agrees_loosely(tiny_model, make_policy):
    policy, other = make_policy("bfloat16"), make_policy("bfloat16", adapter_seed=2)
    with closing(make_vllm(tiny_model, "bfloat16")) as engine:
        engine.publish(policy, 1)
        groups = generate(engine, PROMPTS)
    assert gap(policy, groups).mean() < 0.1
    assert gap(policy, groups).max() < 1.0
    assert gap(other, groups).mean() > 3 * gap(policy, groups).mean()


@pytest.mark.slow
def test_the_same_4_bit_weights_on_both_sides(smollm2):
    """vLLM's bitsandbytes weights are those of an nf4 trainer: they agree as bfloat16 does with bfloat16."""
    try:
        check_vllm(Engine(quantization="bitsandbytes"))
    except InputError as error:
        pytest.skip(str(error))
    policy = adapted_policy(smollm2, "bfloat16", quantization="nf4", scale=0.05)
    with closing(make_vllm(smollm2, "bfloat16", "bitsandbytes")) as engine:
        engine.publish(policy, 1)
        groups = generate(engine, PROMPTS)
    same = gap(policy, groups).mean()
    assert same < 0.1
    assert gap(adapted_policy(smollm2, "bfloat16", scale=0.05), groups).mean() > 3 * same
    randomise_adapter(policy, seed=1, scale=0.0)
    assert gap(policy, groups).mean() > 3 * same


def test_auto_is_vllm_where_it_is_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert resolve_engine("auto") == "transformers"
    with pytest.raises(InputError, match="rollout.engine=vllm: vLLM is not installed"):
        resolve_engine("vllm")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("stapo_lite.rollout.vllm_options.version", lambda name: "0.32.0+cpu")
    assert [resolve_engine(name) for name in ("auto", "vllm", "transformers")] == ["vllm", "vllm", "transformers"]
    monkeypatch.setattr("stapo_lite.rollout.vllm_options.version", Mock(side_effect=PackageNotFoundError))
    assert resolve_engine("auto") == "vllm"  # the CPU build on PyPI has another name
    monkeypatch.setattr("stapo_lite.rollout.vllm_options.version", lambda name: "0.32.0")
    for usable, engine in ((True, "vllm"), (False, "transformers")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda usable=usable: usable)
        assert resolve_engine("auto") == engine


def test_rollouts_have_the_configs_temperature():
    assert make_sampling(load_config(MINIMAL, ["rollout.temperature=0.6"]), ()).temperature == 0.6


@pytest.mark.parametrize(
    ("vllm", "plugin", "quantization", "level", "problem"),
    [
        ("0.26.0", False, "bitsandbytes", 1, None),
        ("0.27.1", True, "bitsandbytes", 1, "pip uninstall vllm-bnb-plugin"),
        ("0.28.0", False, "bitsandbytes", 1, "pip install --no-deps vllm-bnb-plugin==0.0.2"),
        ("0.32.0", False, "bitsandbytes", 1, "pip install --no-deps vllm-bnb-plugin==0.0.3"),
        ("0.32.0", True, "bitsandbytes", 1, None),
        ("0.27.1", False, None, 2, "0.27.1 cannot read a base with LoRA again; set rollout.sleep_level=1"),
        ("0.33.0", False, "fp8", 2, None),
    ],
)
def test_each_vllm_has_its_limits(monkeypatch, vllm, plugin, quantization, level, problem):
    monkeypatch.setattr("stapo_lite.rollout.vllm_options.version", lambda name: vllm)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if plugin else None)
    with pytest.raises(InputError, match=problem) if problem else nullcontext():
        check_vllm(Engine(quantization=quantization), level)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"kv_cache_dtype": "fp8", "speculative_config": {"method": "ngram"}}, None),
        ({"kv_cach_dtype": "fp8"}, r"vllm.kv_cach_dtype: not an engine argument of vLLM .*; did you mean 'kv_cache_dt"),
        ({"zzz": 1}, r"rollout.vllm.zzz: not an engine argument of vLLM .*; see vLLM's documentation"),
        ({"logprobs_mode": "raw_logprobs"}, "rollout.vllm.logprobs_mode: the run sets it itself"),
        ({"kv_cache_dtype": "fp8", "max_model_len": 9}, "rollout.vllm.max_model_len: the run sets it itself"),
    ],
)
def test_arguments_that_vllm_gets(given, problem):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    config = load_config(MINIMAL | {"rollout": {"vllm": given}})
    with pytest.raises(InputError, match=problem) if problem else nullcontext():
        check_options("vllm", config)


@pytest.fixture
def start(monkeypatch):
    """How vLLM is started: as on a GPU, one that only notes what it is asked for."""
    vllm = pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda platform: False)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(vllm, "LLM", start := Mock())
    return start


def test_a_vllm_that_dies_ends_the_run_in_one_line(start, tiny_model):
    start.return_value.llm_engine.step.side_effect = RuntimeError("the device\nfell off the bus")
    failure = r"vLLM failed while it sampled \(RuntimeError: the device fell off the bus\): go on with the same command"
    with closing(make_vllm(tiny_model, "float32")) as engine, pytest.raises(RunError, match=failure):
        generate(engine, PROMPTS)


def test_a_card_that_is_full_when_vllm_wakes_is_one_line(start, tiny_model):
    llm, full = start.return_value, RuntimeError("CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62")
    llm.wake_up.side_effect = [None, full, full]
    engine = make_vllm(tiny_model, "bfloat16")
    options = start.call_args.kwargs
    assert options["max_num_batched_tokens"] == 16 * SAMPLING.max_model_len  # there cannot be more
    assert options["hf_overrides"] == {"head_dtype": "float32"}  # logits as the trainer's
    many = engine_arguments(str(tiny_model), "bfloat16", 1024, Engine(max_num_seqs=16), None, max_loras=1, on_cpu=False)
    assert many["max_num_batched_tokens"] == BATCHED_TOKENS  # what the planner counts on
    rope = {"rope_scaling": {"factor": 2.0}}
    lengthened = Engine(engine="vllm", vllm={"hf_overrides": rope})
    both = engine_arguments(str(tiny_model), "bfloat16", 64, lengthened, None, max_loras=1, on_cpu=False)
    assert both["hf_overrides"] == {"head_dtype": "float32"} | rope
    engine.sleep()
    engine.wake()
    engine.sleep()
    with pytest.raises(RunError, match=r"lower rollout.gpu_memory_utilization, or set train.park_trainer=true"):
        engine.wake()
    engine.close()  # wakes it first: else the next engine of the process does not get its memory
    slept, shut_down = call.sleep(level=1), call.llm_engine.engine_core.shutdown()
    assert llm.mock_calls == [slept, call.wake_up(), slept, call.wake_up(), call.wake_up(), shut_down]


def test_a_quantised_head_keeps_its_type(tiny_model, tmp_path):
    assert fp32_head(str(tiny_model), Engine(quantization="bitsandbytes")) == {"head_dtype": "float32"}
    assert fp32_head(str(tiny_model), Engine(quantization="fp8")) == {}
    config = json.loads((tiny_model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert fp32_head(str(tmp_path), Engine()) == {}


def test_each_turn_of_each_completion_has_draws_of_its_own(tiny_model):
    asked = []

    class Noted(TransformersEngine):
        def stream(self, prompts, seeds, decodings):
            asked.extend(seeds)
            yield from super().stream(prompts, seeds, decodings)

    async def two_turns(episode):
        await episode.generate(1)
        await episode.generate(1)

    engine = Noted(SAMPLING, 64)
    engine.publish(adapted_policy(tiny_model), 1)
    play(engine, SAMPLING, AutoTokenizer.from_pretrained(tiny_model), two_turns, PROMPTS, [1, 2, 3])
    assert len(set(asked)) == len(asked) == 2 * len(PROMPTS) * SAMPLING.num_generations
