"""The engines against the trainer: vLLM for real (its CPU build), in float32 and bfloat16."""

import itertools
import json
import re
import shutil
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest
import torch
from conftest import SAMPLING, adapted_policy, randomise_adapter
from transformers import AutoConfig

from stapo_lite.batching import pack
from stapo_lite.config import PROJECTIONS, Engine, InputError, Lora, RunError
from stapo_lite.plan import as_json, model_sizes
from stapo_lite.rollout import Decoding, check_vllm, resolve_engine
from stapo_lite.rollout.transformers_engine import TransformersEngine
from stapo_lite.rollout.vllm_engine import _ADAPTERS, BATCHED_TOKENS, hf_overrides
from stapo_lite.types import Prompt

PROMPTS = [Prompt("", [10 + (7 * i + 3 * t) % 250 for t in range(5 + 9 * i)], answer="") for i in range(3)]
LONG = [Prompt("", [10 + (13 * t) % 250 for t in range(300)], answer="")]  # over two blocks of vLLM's prefix cache


def make_vllm(model, dtype, quantization=None, sleep_level=1):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from stapo_lite.rollout.vllm_engine import VLLMEngine

    options = Engine(
        max_num_seqs=16, gpu_memory_utilization=0.3, kv_cache_gb=0.125, quantization=quantization, max_restarts=2
    )
    return VLLMEngine(str(model), dtype, SAMPLING, options, Lora(r=8), sleep_level)


@pytest.fixture(scope="module")
def vllm_engine(tiny_model):
    engine = make_vllm(tiny_model, "float32")
    yield engine
    engine.close()


@pytest.fixture(params=["vllm", "transformers"])
def engine(request):
    if request.param == "vllm":
        return request.getfixturevalue("vllm_engine")
    return TransformersEngine(SAMPLING, max_num_seqs=8)


@pytest.fixture
def version(request):
    """A version that no test has used: the vLLM engine is shared."""
    counter = request.config.stash.setdefault(VERSION, [0])

    def following() -> int:
        counter[0] += 1
        return counter[0]

    return following


VERSION = pytest.StashKey[list[int]]()


def generate(engine, prompts, seed=0):
    return engine.generate(prompts, [seed + SAMPLING.num_generations * i for i in range(len(prompts))])


def gap(policy, groups):
    """|rollout_logprobs - the trainer's|, of all tokens."""
    completions = [c for group in groups for c in group]
    with torch.no_grad():
        logprobs = policy.statistics(completions).logprobs
    return (pack(completions, policy.device).rollout_logprobs - logprobs).abs()


def test_groups_follow_the_protocol(engine, make_policy, version):
    now = version()
    engine.publish(make_policy(), now)
    groups = generate(engine, PROMPTS)
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


def test_draws_follow_from_the_seed(engine, make_policy, version):
    def draw(seed):
        engine.publish(make_policy(), version())
        return [[c.token_ids for c in group] for group in generate(engine, PROMPTS, seed=seed)]

    first = draw(3)
    assert draw(3) == first
    assert draw(4) != first


def test_log_probabilities_agree_with_the_trainer(engine, make_policy, version):
    policy = make_policy()
    engine.publish(policy, version())
    assert gap(policy, generate(engine, PROMPTS)).max() < 1e-4


def test_completions_come_from_the_tempered_distribution(engine, make_policy, version):
    """The first token's frequencies against the trainer's probabilities: nothing is cut off or sharpened."""
    policy = make_policy()
    engine.publish(policy, version())
    groups = generate(engine, [PROMPTS[0]] * 256)
    first = torch.tensor([c.token_ids[0] for group in groups for c in group])
    ids = torch.tensor([PROMPTS[0].token_ids])
    with torch.no_grad():
        p = torch.softmax(policy.model(input_ids=ids).logits[0, -1] / SAMPLING.temperature, -1)
    counts = torch.bincount(first, minlength=len(p)).float()
    common = p > 0.01
    deviation = (counts - len(first) * p) / (len(first) * p * (1 - p)).sqrt()
    assert deviation[common].abs().max() < 4.5
    tail = p[~common].sum()
    assert abs(counts[~common].sum() - len(first) * tail) < 4.5 * (len(first) * tail * (1 - tail)).sqrt()


DECODING = Decoding(max_completion_length=10, temperature=0.8, top_p=1.0)


def drawn(engine, prompts, seeds, decoding=DECODING):
    completions = dict(engine.stream(prompts, seeds, decoding))
    assert sorted(completions) == list(range(len(prompts)))
    return [completions[i] for i in range(len(prompts))]


def test_each_sample_follows_from_its_own_seed(engine, make_policy, version):
    now = version()
    engine.publish(make_policy(), now)
    prompts, seeds = [*PROMPTS, *PROMPTS, *PROMPTS[:2]] * 2, [*range(100, 116)]
    first = drawn(engine, prompts, seeds)
    assert [c.token_ids for c in drawn(engine, prompts[::-1], seeds[::-1])] == [c.token_ids for c in first][::-1]
    assert [c.token_ids for c in drawn(engine, prompts[5:8], seeds[5:8])] == [c.token_ids for c in first[5:8]]
    assert [c.token_ids for c in drawn(engine, prompts, range(16))] != [c.token_ids for c in first]
    for prompt, completion in zip(prompts, first, strict=True):
        assert completion.prompt is prompt
        assert completion.adapter_version == now
        assert completion.rollout_logprobs == []
        assert 1 <= len(completion.token_ids) <= 10
        assert completion.truncated == (completion.token_ids[-1] not in SAMPLING.stop_token_ids)
    assert {c.truncated for c in first} == {False, True}


def test_more_prompt_tokens_than_fit_into_one_pass(engine, make_policy, version):
    engine.publish(make_policy(), version())
    prompts = [Prompt("", [10 + (i + 13 * t) % 250 for t in range(380)], answer="") for i in range(16)]
    assert len(drawn(engine, prompts, list(range(16)))) == 16


@pytest.mark.parametrize("top_p", [1.0, 0.6])
def test_streamed_samples_come_from_the_nucleus(engine, make_policy, version, top_p):
    """The first token's frequencies against the trainer's probabilities over the smallest set that holds `top_p`."""
    policy = make_policy()
    engine.publish(policy, version())
    completions = drawn(engine, [PROMPTS[0]] * 512, range(512), Decoding(1, 0.8, top_p))
    first = torch.tensor([c.token_ids[0] for c in completions])
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([PROMPTS[0].token_ids])).logits[0, -1]
    p, order = torch.softmax(logits / 0.8, -1).sort(descending=True)
    nucleus = p.cumsum(0) - p < top_p
    assert set(first.tolist()) <= set(order[nucleus].tolist())
    p = p[nucleus] / p[nucleus].sum()
    counts = torch.bincount(first, minlength=len(logits))[order[nucleus]].float()
    common = p > 0.02
    assert common.sum() > 3
    deviation = (counts - 512 * p) / (512 * p * (1 - p)).sqrt()
    assert deviation[common].abs().max() < 4


def test_a_stream_that_is_left_early_leaves_nothing_behind(engine, make_policy, version):
    engine.publish(make_policy(), version())
    expected = [c.token_ids for c in drawn(engine, PROMPTS, [1, 2, 3])]
    stream = engine.stream(PROMPTS * 20, range(60), DECODING)
    next(stream)
    stream.close()
    assert [c.token_ids for c in drawn(engine, PROMPTS, [1, 2, 3])] == expected


def test_an_adapter_from_its_folder(vllm_engine, make_policy, version, tmp_path):
    policy = make_policy(scale=0.5)
    vllm_engine.publish(policy, version())
    published = [c.token_ids for c in drawn(vllm_engine, PROMPTS, [1, 2, 3])]
    vllm_engine.publish(make_policy(adapter_seed=9), version())
    assert [c.token_ids for c in drawn(vllm_engine, PROMPTS, [1, 2, 3])] != published
    policy.save_adapter(tmp_path)
    vllm_engine.load_adapter(tmp_path, version())
    assert [c.token_ids for c in drawn(vllm_engine, PROMPTS, [1, 2, 3])] == published
    vllm_engine.publish(policy, version())
    assert (tmp_path / "adapter_config.json").exists()  # only the engine's own folders are cleared


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_every_target_module_reaches_vllm(vllm_engine, make_policy, version, projection):
    """An adapter in one projection alone has the same effect in vLLM as in the trainer, and has one."""
    policy = make_policy()
    randomise_adapter(policy, seed=3, scale=0.5, only=projection)
    vllm_engine.publish(policy, version())
    groups = generate(vllm_engine, PROMPTS)
    assert gap(policy, groups).max() < 1e-4
    randomise_adapter(policy, seed=3, scale=0.0)
    assert gap(policy, groups).max() > 1e-2


def test_a_rank_between_those_that_vllm_allows(vllm_engine, make_policy, version):
    policy = make_policy(lora__r=5, scale=0.5)
    vllm_engine.publish(policy, version())
    assert gap(policy, generate(vllm_engine, PROMPTS)).max() < 1e-4


def test_a_new_version_does_not_see_the_cache_of_the_one_before(vllm_engine, make_policy, version):
    first, second = make_policy(adapter_seed=1), make_policy(adapter_seed=2)
    for policy, other in ((first, second), (second, first), (first, second)):
        vllm_engine.publish(policy, version())
        groups = generate(vllm_engine, LONG)
        assert gap(policy, groups).max() < 1e-4
        assert gap(other, groups).mean() > 1e-2


def test_old_versions_leave_no_files(vllm_engine, make_policy, version):
    for _ in range(3):
        vllm_engine.publish(make_policy(), version())
    assert len(list(Path(vllm_engine._folder.name).iterdir())) == 1
    assert list(_ADAPTERS) == [vllm_engine._request.lora_path]


def test_the_kv_cache_holds_as_many_tokens_as_the_plan_says(vllm_engine, tiny_model):
    cache = vllm_engine._llm.llm_engine.vllm_config.cache_config
    per_token = 4 * model_sizes(as_json(AutoConfig.from_pretrained(tiny_model))).kv_per_token
    assert cache.num_gpu_blocks * cache.block_size == pytest.approx(2**27 / per_token, rel=0.01)  # kv_cache_gb=0.125


def test_publishing_never_touches_the_base(vllm_engine, make_policy, version):
    """With an adapter that is zero, vLLM serves the base bit for bit as before any adapter."""

    def serve():
        vllm_engine.publish(make_policy(scale=0.0), version())
        return [c.rollout_logprobs for group in generate(vllm_engine, PROMPTS) for c in group]

    before = serve()
    vllm_engine.publish(make_policy(), version())
    generate(vllm_engine, PROMPTS)
    assert serve() == before


def test_the_adapter_is_read_anew_after_a_wake(vllm_engine, make_policy, version):
    """What `wake` does once the weights are back, under the same version; sleeping itself needs a GPU."""
    now, other = version(), make_policy(adapter_seed=2)
    vllm_engine.publish(make_policy(), now)
    vllm_engine._reload_adapter()
    assert gap(other, generate(vllm_engine, PROMPTS)).mean() > 1e-2
    for name, tensor in _ADAPTERS[vllm_engine._request.lora_path].items():
        tensor.copy_(other.parameters[name.replace(".weight", ".default.weight")].detach())
    vllm_engine._reload_adapter()
    groups = generate(vllm_engine, PROMPTS)
    assert {c.adapter_version for group in groups for c in group} == {now}
    assert gap(other, groups).max() < 1e-4


@pytest.fixture
def dying(monkeypatch):
    """Let vLLM's forward pass fail for real at its `first` call and the `count - 1` after it."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    def let(first, count=1):
        execute, calls = CPUModelRunner.execute_model, itertools.count()

        def failing(runner, *arguments, **options):
            if first <= next(calls) < first + count:
                raise RuntimeError("the device\nfell off the bus")
            return execute(runner, *arguments, **options)

        monkeypatch.setattr(CPUModelRunner, "execute_model", failing)

    return let


def test_a_vllm_that_dies_is_started_anew_for_what_is_missing(vllm_engine, make_policy, version, dying, caplog):
    policy, now = make_policy(), version()
    vllm_engine.publish(make_policy(adapter_seed=2), version())
    vllm_engine.publish(policy, now)
    dying(first=14)  # of 12 tokens, 16 sequences at a time: some groups have ended
    groups = generate(vllm_engine, PROMPTS * 4)
    (left,) = re.findall(
        r"vLLM failed while it sampled \(RuntimeError: the device fell off the bus\): starting it anew for (\d+) of 12",
        caplog.text,
    )
    assert 0 < int(left) < 12
    assert [group[0].prompt for group in groups] == PROMPTS * 4
    assert [len(group) for group in groups] == [4] * 12
    assert {c.adapter_version for group in groups for c in group} == {now}
    assert gap(policy, groups).max() < 1e-4
    vllm_engine.publish(policy, version())
    assert gap(policy, generate(vllm_engine, LONG)).max() < 1e-4


def test_streamed_samples_are_the_same_after_a_death(vllm_engine, make_policy, version, dying):
    vllm_engine.publish(make_policy(), version())
    expected = [c.token_ids for c in drawn(vllm_engine, PROMPTS * 2, range(6))]
    dying(first=5)
    assert [c.token_ids for c in drawn(vllm_engine, PROMPTS * 2, range(6))] == expected


def test_a_vllm_that_keeps_dying_ends_the_run(vllm_engine, make_policy, version, dying, monkeypatch, caplog):
    vllm_engine.publish(make_policy(), version())
    dying(first=1, count=100)
    with pytest.raises(RunError, match=r"fell off the bus\), after 2 restarts \(rollout.max_restarts\)"):
        generate(vllm_engine, PROMPTS)
    assert caplog.text.count("starting it anew for 3 of 3 prompts") == 2
    monkeypatch.undo()
    vllm_engine._restart()  # for the tests to come
    generate(vllm_engine, PROMPTS)


def test_vllm_listens_to_this_machine_only(vllm_engine):
    connections = psutil.Process().net_connections()
    assert {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN} <= {"127.0.0.1", "::1"}


def test_a_model_that_vllm_cannot_serve_is_one_line(tiny_model, tmp_path):
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(InputError, match="rollout: vLLM cannot serve .*model \\(") as error:
        make_vllm(tmp_path / "model", "float32")
    assert "\n" not in str(error.value)


def test_bfloat16_agrees_loosely(tiny_model, make_policy):
    engine, policy = make_vllm(tiny_model, "bfloat16"), make_policy("bfloat16")
    try:
        engine.publish(policy, 1)
        groups = generate(engine, PROMPTS)
        assert gap(policy, groups).mean() < 0.1
        assert gap(policy, groups).max() < 1.0
        other = make_policy("bfloat16", adapter_seed=2)
        assert gap(other, groups).mean() > 3 * gap(policy, groups).mean()
    finally:
        engine.close()


def test_the_same_4_bit_weights_on_both_sides(smollm2):
    """vLLM's bitsandbytes weights are those of an nf4 trainer: they agree as bfloat16 does with bfloat16."""
    pytest.importorskip("vllm_bnb_plugin", reason="vLLM's bitsandbytes plugin is not installed")
    engine = make_vllm(smollm2, "bfloat16", "bitsandbytes")
    try:
        policy = adapted_policy(smollm2, "bfloat16", quantization="nf4", scale=0.05)
        engine.publish(policy, 1)
        groups = generate(engine, PROMPTS)
        same = gap(policy, groups).mean()
        assert same < 0.1
        assert gap(adapted_policy(smollm2, "bfloat16", scale=0.05), groups).mean() > 3 * same
        randomise_adapter(policy, seed=1, scale=0.0)
        assert gap(policy, groups).mean() > 3 * same
    finally:
        engine.close()


def test_auto_is_vllm_where_it_is_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert resolve_engine("auto") == "transformers"
    with pytest.raises(InputError, match="rollout.engine=vllm: vLLM is not installed"):
        resolve_engine("vllm")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert (resolve_engine("auto"), resolve_engine("vllm")) == ("vllm", "vllm")
    assert resolve_engine("transformers") == "transformers"


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
def test_what_each_vllm_cannot_do(monkeypatch, vllm, plugin, quantization, level, problem):
    monkeypatch.setattr("stapo_lite.rollout.version", lambda name: vllm)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if plugin else None)
    with pytest.raises(InputError, match=problem) if problem else nullcontext():
        check_vllm(quantization, level)


@pytest.fixture
def recorded(monkeypatch):
    """The engine as on a GPU, whose vLLM notes what it is asked for."""
    vllm = pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm.platforms import current_platform

    calls = []

    class Recorder:
        def __init__(self, model, **options):
            calls.append(options)
            self.llm_engine = self.engine_core = self

        def sleep(self, level):
            calls.append(f"sleep {level}")

        def wake_up(self, tags=None):
            calls.append("wake")
            if calls.count("wake") >= 2:
                raise RuntimeError("CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62")

        def shutdown(self):
            calls.append("shutdown")

    monkeypatch.setattr(vllm, "LLM", Recorder)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda platform: False)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    return calls


def test_a_card_that_is_full_when_vllm_wakes_is_one_line(recorded, tiny_model):
    engine = make_vllm(tiny_model, "bfloat16")
    options = recorded.pop()
    assert options["max_num_batched_tokens"] == BATCHED_TOKENS  # what the planner counts on
    assert options["hf_overrides"] == {"head_dtype": "float32"}  # logits as the trainer's
    engine.sleep()
    engine.wake()
    engine.sleep()
    with pytest.raises(RunError, match=r"lower rollout.gpu_memory_utilization, or set train.park_trainer=true"):
        engine.wake()
    engine.close()  # ends it all the same
    assert recorded == ["sleep 1", "wake", "sleep 1", "wake", "wake", "shutdown"]


def test_a_sleeping_vllm_is_woken_before_it_ends(recorded, tiny_model):
    """Else the next engine of the process does not get its memory."""
    engine = make_vllm(tiny_model, "bfloat16")
    recorded.clear()
    engine.sleep()
    engine.close()
    assert recorded == ["sleep 1", "wake", "shutdown"]


def test_a_quantised_head_keeps_its_type(tiny_model, tmp_path):
    assert hf_overrides(str(tiny_model), "bitsandbytes") == {"head_dtype": "float32"}
    assert hf_overrides(str(tiny_model), "fp8") == {}
    config = json.loads((tiny_model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert hf_overrides(str(tmp_path), None) == {}
