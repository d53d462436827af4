"""The engines against the trainer: vLLM for real (its CPU build), in float32."""

import tempfile
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
from engine_cases import *  # noqa: F403  # the tests of every engine, for the two of the process
from engine_cases import VERSIONS, drawn_ids
from helpers import (
    LONG,
    PROMPTS,
    SAMPLING,
    gap,
    generate,
    make_vllm,
    randomise_adapter,
)
from safetensors.torch import save_file
from transformers import AutoConfig

from stapo_lite.config import PROJECTIONS, Prompting
from stapo_lite.errors import InputError, RunError
from stapo_lite.extras.planning.plan import as_json, model_sizes
from stapo_lite.extras.turns.episodes import play
from stapo_lite.extras.turns.tools import Chat
from stapo_lite.rollout import Decoding
from stapo_lite.rollout.transformers_engine import TransformersEngine
from stapo_lite.rollout.vllm_options import (
    WATERMARK,
)
from stapo_lite.types import Prompt


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
    chat = Chat(tokenizer, Prompting())
    groups = play(vllm_engine, SAMPLING, chat, until_a_letter, prompts, [7, 8, 9])
    assert gap(policy, groups).max() < 1e-4
    texts = [text for prompt in prompts for text in prompt.columns["texts"]]
    assert any(text.endswith(("a", "e", "i")) for text in texts)
    assert not any(letter in text[:-1] for text in texts for letter in "aei")


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
    listening = psutil.Process().net_connections()
    addresses = {c.laddr.ip for c in listening if c.status == psutil.CONN_LISTEN}
    assert addresses <= {"127.0.0.1", "::1"}


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
