"""The engines against the trainer: vLLM for real (its CPU build), in float32."""

import re
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from engine_cases import *  # noqa: F403  # the tests of every engine, for the two of the process
from engine_cases import VERSIONS
from helpers import (
    MINIMAL,
    PROJECTIONS,
    PROMPTS,
    SAMPLING,
    gap,
    generate,
    make_vllm,
    randomise_adapter,
)
from peft import LoraConfig, PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from stapo_lite.config import Prompting, load_config
from stapo_lite.errors import InputError, RunError
from stapo_lite.extras.transformers_engine import TransformersEngine
from stapo_lite.extras.turns.episodes import run_episodes
from stapo_lite.extras.turns.tools import Chat
from stapo_lite.model.adapter import load_adapter
from stapo_lite.model.sizes import count_sizes
from stapo_lite.rollout.engine import Decoding, each_sample
from stapo_lite.rollout.vllm_options import WATERMARK
from stapo_lite.types import derived_seed


@pytest.fixture(scope="module")
def vllm_engine(tiny_model):
    with closing(make_vllm(tiny_model, "float32")) as engine:
        yield engine
    assert not Path(engine._folder.name).exists()


@pytest.fixture(params=["vllm", "transformers"])
def engine(request):
    if request.param == "vllm":
        return request.getfixturevalue("vllm_engine")
    return TransformersEngine(SAMPLING, max_num_seqs=8)


def test_the_samples_of_neighbouring_seeds_share_none():
    drawn = list(each_sample(PROMPTS[:2], [5, 6], 3))
    assert [prompt for prompt, _ in drawn] == [PROMPTS[0]] * 3 + [PROMPTS[1]] * 3
    assert [seed for _, seed in drawn] == [derived_seed(s, g) for s in (5, 6) for g in range(3)]
    assert len({seed for _, seed in drawn}) == 6


def test_options_of_a_turn_win_over_the_runs_settings():
    given = {"temperature": 0.3, "stop": ["a"]}
    found = Decoding(9, 0.8, 1.0, logprobs=True, options=given).parameters(seed=4)
    fixed = {"top_p": 1.0, "max_tokens": 9, "logprobs": 0, "seed": 4}
    assert found == fixed | given


def test_a_long_rollout_counts_its_completions(minutes, vllm_engine, make_policy, capfd):
    vllm_engine.publish(make_policy(scale=0.0), next(VERSIONS))
    count = sum(map(len, vllm_engine.generate(PROMPTS, [7, 8, 9])))
    shown = re.findall(rf"rollout: (\d+) of {count} completions in", capfd.readouterr().err)
    done = list(map(int, shown))
    assert done == sorted(done)
    assert len(set(done)) > len(PROMPTS)  # more often than groups end
    assert done[-1] == count


def test_stop_strings(vllm_engine, make_policy, tokenizer):
    policy, texts = make_policy(scale=0.0), []
    vllm_engine.publish(policy, next(VERSIONS))

    async def until_a_letter(episode):
        texts.append(await episode.generate(stop=["a", "e", "i"]))
        stopped = texts[-1][-1:] in ("a", "e", "i")
        assert episode.finished == (stopped or episode.token_ids[-1] in SAMPLING.stop_token_ids)

    chat = Chat(tokenizer, Prompting())
    groups = run_episodes(vllm_engine, SAMPLING, chat, until_a_letter, PROMPTS, [7, 8, 9])
    assert gap(policy, groups).max() < 1e-4
    assert any(text.endswith(("a", "e", "i")) for text in texts)
    assert not any(letter in text[:-1] for text in texts for letter in "aei")


@pytest.mark.parametrize("modules", [PROJECTIONS, "all-linear"], ids=["names", "whole paths"])
def test_an_adapter_from_its_folder(vllm_engine, make_policy, tiny_model, tmp_path, modules):
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=modules, init_lora_weights=False)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    PeftModel(model, lora).save_pretrained(tmp_path)
    policy = make_policy(lora__adapter=str(tmp_path))
    vllm_engine.publish(policy, next(VERSIONS))
    load_adapter(policy.model, tmp_path)
    vllm_engine.load_adapter(tmp_path, next(VERSIONS))
    assert gap(policy, generate(vllm_engine, PROMPTS)).max() < 1e-4
    vllm_engine.publish(policy, next(VERSIONS))
    assert (tmp_path / "adapter_config.json").exists()  # only the engine's own folders are cleared


def test_an_adapter_of_layers_that_vllm_does_not_serve(vllm_engine, make_policy, tmp_path):
    policy = make_policy()
    policy.save_adapter(tmp_path)
    tensors = policy.adapter_tensors("float32").items()
    values = {name.replace("up_proj", "router"): value for name, value in tensors}
    save_file(values, tmp_path / "adapter_model.safetensors")
    refused = "lora.target_modules: vLLM cannot serve the adapter .*router"
    with pytest.raises(InputError, match=refused):
        vllm_engine.load_adapter(tmp_path, next(VERSIONS))
    vllm_engine.publish(policy, next(VERSIONS))  # it goes on
    assert gap(policy, generate(vllm_engine, PROMPTS)).max() < 1e-4


OTHER_KINDS = [("", {"lora__r": 5}), ("", {"lora__use_rslora": True})]


@pytest.mark.parametrize(("projection", "kind"), [*((p, {}) for p in PROJECTIONS), *OTHER_KINDS])
def test_every_target_module_reaches_vllm(vllm_engine, make_policy, projection, kind):
    """Each alone; and all, of a rank between those that vLLM allows, and rank-stabilised."""
    policy = make_policy(**kind)
    randomise_adapter(policy, seed=3, scale=0.5, only=projection)
    vllm_engine.publish(policy, next(VERSIONS))
    groups = generate(vllm_engine, PROMPTS)
    assert gap(policy, groups).max() < 1e-4
    randomise_adapter(policy, seed=3, scale=0.0)
    assert gap(policy, groups).max() > 1e-2


def test_publishing_never_touches_the_base_and_leaves_no_old_files(vllm_engine, make_policy):
    """With an adapter that is zero, vLLM serves the base bit for bit as before any adapter."""

    def serve(scale):
        vllm_engine.publish(make_policy(scale=scale), next(VERSIONS))
        assert len(list(Path(vllm_engine._folder.name).iterdir())) == 1
        return [c.rollout_logprobs for group in generate(vllm_engine, PROMPTS) for c in group]

    before, _, after = serve(0.0), serve(0.1), serve(0.0)
    assert after == before


def test_arguments_of_the_config_reach_vllm(vllm_engine, tiny_model):
    """`rollout.vllm.kv_cache_memory_bytes` holds as many tokens as the sizes say."""
    config, cache = vllm_engine._engine.vllm_config, vllm_engine._engine.vllm_config.cache_config
    sizes = count_sizes(load_config(MINIMAL | {"model": str(tiny_model), "dtype": "float32"}))
    held = cache.num_gpu_blocks * cache.block_size
    assert held == pytest.approx(2**27 / sizes.cached_token, rel=0.01)
    assert config.model_config.logprobs_mode == "processed_logprobs"
    assert config.scheduler_config.watermark == WATERMARK


def test_vllm_listens_to_this_machine_only(vllm_engine):
    listening = psutil.Process().net_connections()
    addresses = {c.laddr.ip for c in listening if c.status == psutil.CONN_LISTEN}
    assert addresses <= {"127.0.0.1", "::1"}


@pytest.mark.parametrize("name", ["logit_bias", "typo"])
def test_a_request_that_vllm_refuses_leaves_it_usable(vllm_engine, make_policy, name):
    vllm_engine.publish(make_policy(), next(VERSIONS))
    good, bad = Decoding(4, 1.0, 1.0), Decoding(4, 1.0, 1.0, options={name: {9999: 1.0}})
    with pytest.raises(RunError, match=rf"^vLLM refuses a request \(.*{name}"):
        list(vllm_engine.stream(PROMPTS, [1, 2, 3], [good, good, bad]))
    assert len(list(vllm_engine.stream(PROMPTS, [1, 2, 3], [good] * 3))) == 3
