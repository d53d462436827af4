import json
import re
import shutil
from functools import partial

import bitsandbytes
import oracle
import pytest
import torch
from families import FAMILIES, random_checkpoint
from helpers import (
    PROJECTIONS,
    PROMPTS,
    SAMPLING,
    adapted_policy,
    fake_completions,
    gap,
    generate,
    learn,
    with_gradient,
)
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma3Config, OPTConfig, PhiConfig, PhimoeConfig

from stapo_lite.config import Lora
from stapo_lite.errors import InputError
from stapo_lite.extras.transformers_engine import TransformersEngine
from stapo_lite.method.microbatches import sequence_length
from stapo_lite.model.adapter import add_adapter, load_adapter, name_layers
from stapo_lite.model.attention import use_repeated_keys
from stapo_lite.model.loading import load_weights
from stapo_lite.types import Prompt

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
TWO = ["q_proj", "v_proj"]
NOT_PLAIN = "^adapter=.*: not a plain LoRA adapter$"
COMPLETIONS = fake_completions(0, [1.0] * 4)


def dense_statistics(policy, completion, temperature=SAMPLING.temperature):
    """From the model's own full logits, one sequence at a time, without padding."""
    log_p = oracle.token_logits(policy.model, completion, temperature).double().log_softmax(-1)
    chosen = log_p.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    return chosen, -(log_p.exp() * log_p).sum(-1), log_p.exp().square().sum(-1)


def assert_close(actual, expected, statistics=3):
    """Statistics and gradient; some of the statistics."""
    for got, want in zip(actual[:statistics], expected[:statistics], strict=True):
        assert (got - want).abs().max() < 1e-4
    got, want = (torch.cat([x.flatten() for x in values[3:]]) for values in (actual, expected))
    assert (got - want).norm() < 1e-4 * want.norm()


def assert_equal(actual, expected):
    assert all(map(torch.equal, actual, expected))


HEADS = {
    "untied": FAMILIES["Qwen3"],
    "tied": FAMILIES["Qwen3, tied"],
    "biased": PhiConfig(vocab_size=260, **TINY),
}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("head", HEADS)
def test_statistics_and_gradient_match_the_full_logits(tmp_path, head, checkpointing):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(HEADS[head])
    if head == "biased":
        torch.nn.init.normal_(model.lm_head.bias)
    model.save_pretrained(tmp_path)
    policy = adapted_policy(tmp_path, lora__target_modules=TWO, checkpointing=checkpointing)
    statistics = zip(*(dense_statistics(policy, each) for each in COMPLETIONS), strict=True)
    expected = [torch.cat(values) for values in statistics]
    expected += torch.autograd.grad(expected[0].sum(), list(policy.parameters.values()))
    assert_close(with_gradient(policy, COMPLETIONS), expected)


def test_the_adapter_that_training_starts_from_is_the_reference(make_policy, tmp_path):
    first = make_policy(scale=0.5)
    first.save_adapter(tmp_path)
    with torch.no_grad():
        expected = first.statistics(COMPLETIONS).logprobs
    policy = make_policy(lora__adapter=str(tmp_path), objective__beta=0.1)  # which moves on
    assert torch.equal(policy.reference_logprobs(COMPLETIONS), expected)
    alone = with_gradient(policy, COMPLETIONS)
    logprobs = policy.statistics(COMPLETIONS).logprobs
    policy.reference_logprobs(COMPLETIONS)  # between the passes of a graph
    assert_equal(torch.autograd.grad(logprobs.sum(), list(policy.parameters.values())), alone[3:])
    assert not torch.allclose(logprobs, expected, atol=1e-2)


@pytest.fixture
def made_by_peft(tiny_model, tmp_path):
    """Writes an adapter with random values into a folder, which is returned."""

    def make(save_embedding_layers=False, **keys):
        default = {"r": 8, "lora_alpha": 16, "target_modules": PROJECTIONS, "lora_dropout": 0.1}
        base = AutoModelForCausalLM.from_pretrained(tiny_model)
        model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **default | keys))
        torch.manual_seed(3)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.2)
        model.save_pretrained(tmp_path, save_embedding_layers=save_embedding_layers)
        return tmp_path

    return make


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "orthogonal"},
        {"target_modules": "all-linear"},  # written as whole paths
        {"target_modules": r".*\d\.(self_attn|mlp)\..*_proj"},
        {"use_rslora": True},
    ],
    ids=str,
)
def test_an_adapter_is_applied_as_peft_applies_it(made_by_peft, make_policy, tiny_model, keys):
    folder = made_by_peft(**keys)
    by_root = keys.get("use_rslora", False)
    policy = make_policy(lora__adapter=str(folder), lora__use_rslora=by_root, scale=0.0)
    load_adapter(policy.model, folder)
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), folder)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        ours, theirs = (model.eval()(input_ids=ids).logits for model in (policy.model, loaded))
    assert (ours - theirs).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("keys", "config", "message"),
    [
        ({}, {"r": 4}, "lora.adapter=.* has another lora.r$"),
        ({}, {"lora_alpha": 8, "use_rslora": True}, "another lora.lora_alpha, lora.use_rslora$"),
        ({}, {"target_modules": TWO}, "another lora.target_modules$"),
        ({}, {"adapter": "nobody/nothing"}, "nobody/nothing: neither a folder nor on the Hub"),
        ({}, {"adapter": "."}, "adapter=.: no adapter in PEFT's format"),
        ({"layers_to_transform": [0]}, {}, "does not fit the model, .* is on one side only"),
        ({"target_modules": TWO}, {"target_modules": "all-linear"}, "is on one side only"),
        ({"init_lora_weights": "pissa"}, {}, NOT_PLAIN),
        ({"init_lora_weights": "pissa_niter_4"}, {}, NOT_PLAIN),
        ({"init_lora_weights": "olora"}, {}, NOT_PLAIN),
        ({"bias": "lora_only"}, {}, NOT_PLAIN),
        ({"bias": "all"}, {}, NOT_PLAIN),
        ({"use_dora": True}, {}, NOT_PLAIN),
        ({"modules_to_save": ["lm_head"]}, {}, NOT_PLAIN),
        ({"alpha_pattern": {"q_proj": 4}}, {}, NOT_PLAIN),
        ({"rank_pattern": {"q_proj": 16}}, {}, NOT_PLAIN),
        ({"save_embedding_layers": True}, {}, NOT_PLAIN),
    ],
)
def test_a_start_that_does_not_fit_is_refused(made_by_peft, make_policy, keys, config, message):
    config = {"adapter": str(made_by_peft(**keys))} | config
    with pytest.raises(InputError, match=message):
        make_policy(**{f"lora__{name}": value for name, value in config.items()})


def test_a_start_of_another_size_is_refused(made_by_peft, make_policy):
    folder = made_by_peft()
    path = folder / "adapter_model.safetensors"
    weights = {name: value[:, 1:].contiguous() for name, value in load_file(path).items()}
    save_file(weights, path)
    with pytest.raises(InputError, match="does not fit the model .*size mismatch"):
        make_policy(lora__adapter=str(folder))


def test_repeated_keys_attend_as_grouped_queries_do(tiny_model):
    """As on a card before Ampere: without a mask, with padding, and one token after a cache."""
    load = partial(AutoModelForCausalLM.from_pretrained, tiny_model)
    plain, repeated = (load(attn_implementation=name) for name in ("sdpa", use_repeated_keys()))
    assert repeated.config.num_key_value_heads < repeated.config.num_attention_heads
    ids = torch.randint(10, 260, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    for inputs in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": mask}):
        expected, actual = (model(**inputs).logits for model in (plain, repeated))
        torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()])
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 5}
    texts = [model.generate(ids, **options) for model in (plain, repeated)]
    assert torch.equal(*texts)


RATES = ["dropout", "attention_dropout", "layerdrop", "resid_pdrop", "embd_pdrop"]
DROPOUT = dict.fromkeys(RATES, 0.5)
EXPERTS = {"num_local_experts": 4, "num_key_value_heads": 2, "router_jitter_noise": 0.5}
AT_RANDOM = [
    (OPTConfig, DROPOUT | {"ffn_dim": 48, "word_embed_proj_dim": 32}),  # rates as numbers
    (PhiConfig, DROPOUT),  # as modules
    (PhimoeConfig, EXPERTS | {"lm_head_bias": False}),
]
"""What draws dropout, or the experts of its tokens, in training mode."""


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("family", "keys"), AT_RANDOM)
def test_nothing_is_drawn_at_random_in_training(tmp_path, family, keys, checkpointing):
    torch.manual_seed(0)
    config = family(vocab_size=260, **TINY, **keys)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    policy = adapted_policy(tmp_path, lora__target_modules=TWO, checkpointing=checkpointing)
    attention = next(m for n, m in policy.model.named_modules() if n.endswith("layers.0.self_attn"))
    calls: list = []
    attention.register_forward_hook(lambda *_: calls.append(1))
    first = with_gradient(policy, COMPLETIONS)
    assert len(calls) == 1 + checkpointing
    assert any(gradient.any() for gradient in first[3:])
    assert_equal(with_gradient(policy, COMPLETIONS), first)
    policy.model.eval()
    assert torch.equal(policy.statistics(COMPLETIONS).logprobs, first[0])


def test_sampling_leaves_checkpointed_layers_as_they_were(make_policy):
    policy = make_policy(checkpointing=True)
    layers = policy.model.get_base_model().model.layers
    engine = TransformersEngine(SAMPLING, 4)
    engine.publish(policy, 1)
    for _ in range(2):
        assert all(layer.training for layer in layers)
        assert not any(module.training for layer in layers for module in layer.children())
        engine.generate([Prompt("", [5, 6], None)], [1])


def test_what_a_model_recommends_for_sampling_biases_no_log_probability(tiny_model, tmp_path):
    """Qwen2.5's generation_config.json has a repetition penalty."""
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    recommended = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 1, "min_new_tokens": 3}
    (folder / "generation_config.json").write_text(json.dumps(recommended), encoding="utf-8")
    policy = adapted_policy(folder)
    engine = TransformersEngine(SAMPLING, 4)
    engine.publish(policy, 1)
    assert gap(policy, generate(engine, PROMPTS)).max() < 1e-4


def test_a_model_that_reads_images_gets_no_adapter_in_its_vision_tower():
    text = TINY | {"vocab_size": 260, "head_dim": 16, "num_key_value_heads": 1}
    vision = TINY | {"hidden_size": 16, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    model = add_adapter(AutoModelForCausalLM.from_config(config), Lora(r=4))
    adapted = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(adapted) == 2 * 7 * 2
    assert all(".language_model." in name for name in adapted)
    pattern = model.peft_config["default"].exclude_modules  # for those who load it with the tower
    assert re.fullmatch(pattern, "model.vision_tower.encoder.layers.0.self_attn.q_proj")
    assert not re.fullmatch(pattern, "model.language_model.layers.0.self_attn.q_proj")


def test_a_language_model_in_a_larger_one_has_the_checkpoints_names(tmp_path):
    """Those of vLLM, which would ignore an adapter with others. What reads images is dropped."""
    random_checkpoint(tmp_path, FAMILIES["Qwen3.5"])
    stored = load_file(tmp_path / "model.safetensors").keys()
    base = load_weights(str(tmp_path), "float32")
    names = {name for name, _ in base.named_parameters()}
    assert names == {name for name in stored if ".visual." not in name} < stored
    whole = load_weights(str(tmp_path), "float32", whole=True)
    assert {name for name, _ in whole.named_parameters()} == stored


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_4_bit_base_computes_with_its_dequantised_weights(make_policy, checkpointing):
    """Those that NF4 with double quantisation gives back, in a plain model."""
    policy = make_policy(quantization="nf4", checkpointing=checkpointing)
    plain = make_policy(seed=0)
    quantised = 0
    for module, other in zip(policy.model.modules(), plain.model.modules(), strict=True):
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            state = module.weight.quant_state
            assert (state.quant_type, state.nested, state.blocksize) == ("nf4", True, 64)
            # What it packs has no backward pass.
            assert vars(module)["support_avx512bf16_for_cpu"] is False
            other.weight.data = bitsandbytes.functional.dequantize_4bit(module.weight.data, state)
            quantised += 1
    assert quantised == 2 * 7
    assert_close(with_gradient(policy, COMPLETIONS), with_gradient(plain, COMPLETIONS))


def test_a_float32_checkpoint_is_rounded_to_4_bits_before_anything_else(make_policy, tiny_model):
    """As vLLM does it; the rest of the base has the run's dtype."""
    policy = make_policy("bfloat16", quantization="nf4")
    weights = load_file(tiny_model / "model.safetensors")
    base = policy.model.get_base_model()
    for name in ("q_proj", "o_proj"):
        packed = getattr(base.model.layers[0].self_attn, name).base_layer.weight.data
        whole = weights[f"model.layers.0.self_attn.{name}.weight"]
        assert whole.dtype == torch.float32
        expected, _ = bitsandbytes.functional.quantize_4bit(whole, quant_type="nf4")
        cast, _ = bitsandbytes.functional.quantize_4bit(whole.bfloat16(), quant_type="nf4")
        assert torch.equal(packed, expected)
        assert not torch.equal(packed, cast)
    frozen = {p.dtype for p in base.parameters() if not p.requires_grad}
    assert frozen == {torch.uint8, torch.bfloat16}


def test_qlora_learns_on_an_unchanged_base(make_policy):
    policy = make_policy("bfloat16", quantization="nf4", checkpointing=True)
    assert {p.dtype for p in policy.parameters.values()} == {torch.float32}
    likelihoods = learn(policy, COMPLETIONS, 0.01)
    assert likelihoods[-1] > likelihoods[0] + 20


def test_offloaded_activations_change_nothing(make_policy, monkeypatch):
    """The host gets the inputs of checkpointed layers and little else: no weights."""
    offloaded = []

    class Noted(torch.autograd.graph.save_on_cpu):
        def __init__(self, **options):
            super().__init__(**options)
            pack = self.pack_hook
            self.pack_hook = lambda tensor: offloaded.append(tuple(tensor.shape)) or pack(tensor)

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", Noted)
    policy = make_policy(checkpointing=True)
    expected = with_gradient(policy, COMPLETIONS)
    assert not offloaded
    policy.save_memory(checkpointing=True, offload=True)
    assert_equal(with_gradient(policy, COMPLETIONS), expected)
    hidden = (4, max(map(sequence_length, COMPLETIONS)), 64)
    assert offloaded.count(hidden) >= 2  # of both layers
    assert set(offloaded) <= {hidden, (*hidden[:2], 1), (64,), (0,)}  # and the final norm


def test_target_modules_are_checked_before_weights_are_loaded(tiny_model):
    assert name_layers(Lora(), str(tiny_model)).target_modules == PROJECTIONS
    missing = r"target_modules: the model has no linear layer lm_head, qkv_proj: .* q_proj, "
    with pytest.raises(InputError, match=missing):
        name_layers(Lora(target_modules=["q_proj", "qkv_proj", "lm_head"]), str(tiny_model))
