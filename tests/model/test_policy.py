import json
import weakref
from contextlib import nullcontext

import bitsandbytes
import oracle
import pytest
import torch
from helpers import SAMPLING, adapted_policy, fake_completions, learn
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3Config,
    OPTConfig,
    PhiConfig,
    PhiForCausalLM,
    PhimoeConfig,
)

from stapo_lite.algorithm.microbatches import sequence_length
from stapo_lite.config import PROJECTIONS, Lora
from stapo_lite.errors import InputError
from stapo_lite.files import read_object, write_text
from stapo_lite.model.loading import (
    add_adapter,
    find_start,
    load_adapter,
    load_tokenizer,
    use_repeated_keys,
)
from stapo_lite.model.policy import sum_gradients
from stapo_lite.rollout.transformers_engine import TransformersEngine
from stapo_lite.types import Prompt


def dense_statistics(policy, completion, temperature=SAMPLING.temperature):
    """From the model's own full logits, one sequence at a time, without padding."""
    log_p = oracle.token_logits(policy.model, completion, temperature).double().log_softmax(-1)
    chosen = log_p.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    return chosen, -(log_p.exp() * log_p).sum(-1), log_p.exp().square().sum(-1)


def with_gradient(policy, completions):
    """(statistics, the adapter's gradient of the sum of log-probabilities), and no graph."""
    statistics = policy.statistics(completions)
    gradient = torch.autograd.grad(statistics.logprobs.sum(), list(policy.parameters.values()))
    return [values.detach() for values in statistics], torch.cat([g.flatten() for g in gradient])


def assert_close(actual, expected):
    for got, want in zip(actual[0], expected[0], strict=True):
        assert (got - want).abs().max() < 1e-4
    assert (actual[1] - expected[1]).norm() < 1e-4 * expected[1].norm()


@pytest.fixture
def model(request, tiny_model, tmp_path):
    """One of the tiny model's shape, one whose embedding is its head besides, or one whose head has
    a bias."""
    torch.manual_seed(0)
    tied, biased = request.param == "tied", request.param == "biased"
    made = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(tiny_model, tie_word_embeddings=tied)
    )
    if biased:
        shape = {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        }
        made = PhiForCausalLM(PhiConfig(vocab_size=260, **shape))
        torch.nn.init.normal_(made.lm_head.bias)
    made.save_pretrained(tmp_path)
    return tmp_path, tied, biased


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("model", ["untied", "tied", "biased"], indirect=True)
def test_statistics_and_gradient_match_the_full_logits(model, checkpointing):
    folder, tied, biased = model
    modules = ["q_proj", "v_proj"] if biased else PROJECTIONS  # Phi calls the others differently
    policy = adapted_policy(
        folder, lora__target_modules=modules, train__gradient_checkpointing=checkpointing
    )
    embedding, head = policy.model.get_input_embeddings(), policy.model.get_output_embeddings()
    assert (embedding.weight is head.weight, head.bias is not None) == (tied, biased)
    completions = fake_completions(0, [1.0] * 5)
    columns = zip(
        *(dense_statistics(policy, completion) for completion in completions), strict=True
    )
    expected = [torch.cat(column) for column in columns]
    gradient = torch.autograd.grad(expected[0].sum(), list(policy.parameters.values()))
    assert_close(
        with_gradient(policy, completions), (expected, torch.cat([g.flatten() for g in gradient]))
    )


def test_adapters_train_start_neutral_and_load_as_saved(make_policy, tmp_path):
    policy = make_policy(scale=0.0)
    assert all(
        "lora_" in name and p.dtype == torch.float32 for name, p in policy.parameters.items()
    )
    assert len(policy.parameters) == 2 * 7 * 2  # A and B of seven projections in two layers
    completions = fake_completions(1, [1.0] * 3)
    with torch.no_grad():
        assert torch.equal(
            policy.statistics(completions).logprobs, policy.reference_logprobs(completions)
        )
    other = make_policy(adapter_seed=5)
    other.save_adapter(tmp_path)
    load_adapter(policy.model, tmp_path)
    assert all(torch.equal(p, other.parameters[name]) for name, p in policy.parameters.items())


def test_a_start_from_an_adapter_which_is_the_reference(make_policy, tmp_path):
    first, completions = make_policy(scale=0.5), fake_completions(1, [1.0] * 3)
    first.save_adapter(tmp_path)
    with torch.no_grad():
        expected = first.statistics(completions).logprobs
    policy = make_policy(lora__adapter=str(tmp_path), objective__beta=0.1)  # which moves on
    assert torch.equal(policy.reference_logprobs(completions), expected)
    alone = with_gradient(policy, completions)
    logprobs = policy.statistics(completions).logprobs
    policy.reference_logprobs(completions)  # between the passes of a graph
    gradient = torch.autograd.grad(logprobs.sum(), list(policy.parameters.values()))
    assert torch.equal(torch.cat([g.flatten() for g in gradient]), alone[1])
    assert not torch.allclose(logprobs, expected, atol=1e-2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": 4}, "lora.adapter=.* is another kind of adapter: set lora.r=8$"),
        ({"lora_alpha": 8, "use_rslora": True}, "set lora.lora_alpha=16 lora.use_rslora=false$"),
        ({"target_modules": ["q_proj", "v_proj"]}, r'set lora.target_modules=\[".*q_proj.*"\]$'),
        (
            {"adapter": "nobody/nothing"},
            r"lora.adapter=nobody/nothing: neither a folder nor on the Hub \(",
        ),
        ({"adapter": "."}, "adapter=.: no adapter in PEFT's format"),
        ({"target_modules": "all-linear"}, None),
    ],
)
def test_a_start_that_does_not_fit_the_config(make_policy, tmp_path, change, message):
    make_policy().save_adapter(tmp_path)
    lora = Lora(**{"adapter": str(tmp_path), "r": 8, "lora_alpha": 16} | change)
    with pytest.raises(InputError, match=message) if message else nullcontext():
        assert find_start(lora) == tmp_path


def test_starts_that_are_broken(make_policy, tmp_path):
    make_policy().save_adapter(tmp_path)
    path = tmp_path / "adapter_config.json"
    old = read_object(path)
    del old["use_rslora"]  # of a PEFT that did not know it
    write_text(path, json.dumps(old))
    lora = Lora(adapter=str(tmp_path), r=8, lora_alpha=16)
    assert find_start(lora) == tmp_path
    values = load_file(tmp_path / "adapter_model.safetensors")
    save_file(
        {name: value[:, :4].contiguous() for name, value in values.items()},
        tmp_path / "adapter_model.safetensors",
    )
    with pytest.raises(InputError, match="the adapter does not fit the model .*size mismatch"):
        make_policy(lora__adapter=str(tmp_path))
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(InputError, match="adapter=.*: cannot be read .*adapter_model.safetensors"):
        find_start(lora)


@pytest.mark.parametrize(
    "change",
    [
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "pissa_niter_4"},
        {"init_lora_weights": "olora"},
        {"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}},
        {"init_lora_weights": "corda"},
        {"bias": "lora_only"},
        {"bias": "all"},
        {"alora_invocation_tokens": [1, 2]},
        {"use_qalora": True},
        {"use_bdlora": {"nblocks": 2}},
        {"layer_replication": [[0, 1], [0, 2]]},
        {"arrow_config": {"top_k": 2}},
        {"lora_bias": True},
        {"rank_pattern": {"q_proj": 4}},
        {"target_parameters": ["mlp.weight"]},
        {"of_a_peft_to_come": True},
    ],
    ids=str,
)
def test_adapters_that_are_more_than_plain_lora_are_refused(make_policy, tmp_path, change):
    make_policy().save_adapter(tmp_path)
    path = tmp_path / "adapter_config.json"
    write_text(path, json.dumps(read_object(path) | change))
    with pytest.raises(InputError, match=rf"not a plain LoRA adapter \({next(iter(change))}="):
        find_start(Lora(adapter=str(tmp_path), r=8, lora_alpha=16))


def test_an_adapter_that_also_holds_an_embedding_is_refused(make_policy, tmp_path):
    policy = make_policy()
    policy.model.save_pretrained(tmp_path, save_embedding_layers=True)
    with pytest.raises(
        InputError, match=r"not a plain LoRA adapter \(it holds .*(embed_tokens|lm_head)"
    ):
        find_start(Lora(adapter=str(tmp_path), r=8, lora_alpha=16))


@pytest.mark.parametrize(
    "kind", [{}, {"init_lora_weights": "gaussian"}, {"init_lora_weights": "orthogonal"}]
)
def test_an_adapter_that_peft_made_is_applied_as_peft_applies_it(
    make_policy, tiny_model, tmp_path, kind
):
    lora = LoraConfig(
        r=8,
        lora_alpha=16,
        target_modules=PROJECTIONS,
        lora_dropout=0.1,
        task_type="CAUSAL_LM",
        **kind,
    )
    made = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model), lora)
    torch.manual_seed(3)
    for name, parameter in made.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    made.save_pretrained(tmp_path)
    policy = make_policy(lora__adapter=str(tmp_path), scale=0.0)
    load_adapter(policy.model, tmp_path)
    loaded = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny_model), tmp_path
    ).eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        assert (
            policy.model(input_ids=ids).logits - loaded(input_ids=ids).logits
        ).abs().max() < 1e-5


def test_repeated_keys_attend_as_grouped_queries_do(tiny_model):
    """As on a card before Ampere: without a mask, with padding, and one token after a cache."""
    names = ("sdpa", use_repeated_keys())
    plain, repeated = (
        AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation=name) for name in names
    )
    assert repeated.config.num_key_value_heads < repeated.config.num_attention_heads
    ids = torch.randint(10, 260, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    for inputs in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": mask}):
        expected, actual = (model(**inputs).logits for model in (plain, repeated))
        torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()])
    texts = [
        model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=5)
        for model in (plain, repeated)
    ]
    assert torch.equal(*texts)


def test_bf16_stays_close(make_policy):
    completions = fake_completions(0, [1.0] * 4)
    with torch.no_grad():
        exact, rounded = (
            make_policy(dtype).statistics(completions) for dtype in ("float32", "bfloat16")
        )
    assert rounded.logprobs.dtype == torch.float32
    assert (exact.logprobs - rounded.logprobs).abs().mean() < 0.1


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", [OPTConfig, PhiConfig])
def test_a_base_that_was_trained_with_dropout_has_none_here(tmp_path, family, checkpointing):
    """OPT keeps its rates as numbers, Phi as modules."""
    rates = {
        "dropout": 0.5,
        "attention_dropout": 0.5,
        "layerdrop": 0.5,
        "resid_pdrop": 0.5,
        "embd_pdrop": 0.5,
    }
    shape = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "word_embed_proj_dim": 32,
    }
    config = family(vocab_size=260, intermediate_size=48, ffn_dim=48, **shape, **rates)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    policy = adapted_policy(
        tmp_path,
        lora__target_modules=["q_proj", "v_proj"],
        train__gradient_checkpointing=checkpointing,
    )
    completions = fake_completions(0, [1.0] * 4)
    first, second = (policy.statistics(completions) for _ in range(2))
    assert torch.equal(first.logprobs, second.logprobs)
    policy.model.eval()
    assert torch.allclose(policy.statistics(completions).logprobs, first.logprobs, atol=1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_experts_are_chosen_as_the_engine_chooses_them(tmp_path, checkpointing):
    """In training mode PhiMoE draws its experts at random."""
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = PhimoeConfig(
        vocab_size=260,
        **shape,
        num_key_value_heads=2,
        num_local_experts=4,
        router_jitter_noise=0.5,
        lm_head_bias=False,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    modules = ["q_proj", "v_proj"]
    policy = adapted_policy(
        tmp_path,
        lora__target_modules=modules,
        train__gradient_checkpointing=checkpointing,
        lora__r=4,
    )
    calls: list = []
    attention = policy.model.get_base_model().model.layers[0].self_attn
    attention.register_forward_hook(lambda *_: calls.append(1))
    completions = fake_completions(0, [1.0] * 4)
    first, gradient = with_gradient(policy, completions)
    assert len(calls) == 1 + checkpointing
    assert torch.equal(first[0], with_gradient(policy, completions)[0][0])
    policy.model.eval()
    assert torch.equal(policy.statistics(completions).logprobs, first[0])
    assert gradient.norm() > 0


def test_sampling_leaves_checkpointed_layers_as_they_were(make_policy):
    policy = make_policy(train__gradient_checkpointing=1)
    layers = policy.model.get_base_model().model.layers
    engine = TransformersEngine(SAMPLING, 4)
    engine.publish(policy, 1)
    for _ in range(2):
        assert [layer.training for layer in layers] == [True, False]
        assert not any(module.training for layer in layers for module in layer.children())
        engine.generate([Prompt("", [5, 6], None)], [1])


def test_a_model_that_reads_images_gets_no_adapter_in_its_vision_tower():
    text = {
        "vocab_size": 260,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "head_dim": 16,
    }
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    vision |= {"image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    torch.manual_seed(0)
    model = add_adapter(
        AutoModelForCausalLM.from_config(config), Lora(r=4), gradient_checkpointing=False
    )
    adapted = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(adapted) == 2 * 7
    assert all(".language_model." in name for name in adapted)
    plain = Lora(r=4, target_modules=["gate_proj"])  # which the vision tower does not have
    only = add_adapter(
        AutoModelForCausalLM.from_config(config), plain, gradient_checkpointing=False
    )
    assert only.peft_config["default"].exclude_modules is None


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_4_bit_base_computes_with_its_dequantised_weights(make_policy, checkpointing):
    """Against a plain model whose weights are those that NF4 with double quantisation gives
    back."""
    policy = make_policy(quantization="nf4", train__gradient_checkpointing=checkpointing)
    plain = make_policy(seed=0)
    quantised = 0
    for module, other in zip(policy.model.modules(), plain.model.modules(), strict=True):
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            state = module.weight.quant_state
            assert (state.quant_type, state.nested, state.blocksize) == ("nf4", True, 64)
            assert (
                vars(module)["support_avx512bf16_for_cpu"] is False
            )  # what it packs has no backward pass
            other.weight.data = bitsandbytes.functional.dequantize_4bit(module.weight.data, state)
            quantised += 1
    assert quantised == 2 * 7
    completions = fake_completions(0, [1.0] * 4)
    assert_close(with_gradient(policy, completions), with_gradient(plain, completions))


@pytest.mark.parametrize("optim", ["adamw", "paged_adamw_8bit"])
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_qlora_learns_on_an_unchanged_base(make_policy, optim):
    policy = make_policy("bfloat16", quantization="nf4", train__gradient_checkpointing=True)
    assert {p.dtype for p in policy.parameters.values()} == {torch.float32}
    likelihoods = learn(policy, fake_completions(0, [1.0] * 4), optim, 0.01)
    assert likelihoods[-1] > likelihoods[0] + 20


@pytest.mark.parametrize("quantization", [None, "nf4"])
def test_parking_the_base_and_back(make_policy, quantization):
    policy = make_policy(quantization=quantization)
    completions = fake_completions(0, [1.0] * 3)
    before = with_gradient(policy, completions)
    frozen = [p for p in policy.model.parameters() if not p.requires_grad]
    on_card = [weakref.ref(p.untyped_storage()) for p in frozen]
    policy.park()
    assert not any(storage() for storage in on_card)  # nothing holds the device's copy
    parked = [p.data_ptr() for p in frozen]
    policy.unpark()
    policy.park()
    assert [p.data_ptr() for p in frozen] == parked  # copied once
    policy.unpark()
    after = with_gradient(policy, completions)
    assert torch.equal(before[0][0], after[0][0])
    assert torch.equal(before[1], after[1])


def test_offloaded_activations_change_nothing(make_policy, monkeypatch):
    """To the host go the input of each checkpointed layer and the little that follows them: no
    weights."""
    completions = fake_completions(0, [1.0] * 3)
    offloaded = []

    class Noted(torch.autograd.graph.save_on_cpu):
        def __init__(self, **options):
            super().__init__(**options)
            pack = self.pack_hook
            self.pack_hook = lambda tensor: offloaded.append(tuple(tensor.shape)) or pack(tensor)

    expected = with_gradient(make_policy(train__gradient_checkpointing=True), completions)
    policy = make_policy(train__gradient_checkpointing=True, train__offload_activations=True)
    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", Noted)
    actual = with_gradient(policy, completions)
    assert torch.equal(actual[0][0], expected[0][0])
    assert torch.equal(actual[1], expected[1])
    hidden = (3, max(map(sequence_length, completions)), 64)
    assert offloaded.count(hidden) >= 2  # of both layers
    assert set(offloaded) <= {hidden, (*hidden[:2], 1), (64,), (0,)}  # and the final norm


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_layers_change_little(make_policy, checkpointing):
    completions = fake_completions(0, [1.0] * 3)
    expected = with_gradient(make_policy(), completions)
    actual = with_gradient(
        make_policy(train__compile=True, train__gradient_checkpointing=checkpointing), completions
    )
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert_close((actual[0][:1], actual[1]), (expected[0][:1], expected[1]))


def test_gradients_of_all_processes_in_one_collective(make_policy, monkeypatch):
    policy = make_policy()
    first, *rest = policy.parameters.values()
    first.grad = torch.ones_like(first)
    sizes = []
    monkeypatch.setattr(
        torch.distributed, "all_reduce", lambda flat: sizes.append(flat.numel()) or flat.mul_(3)
    )
    sum_gradients(policy)
    assert sizes == [sum(p.numel() for p in policy.parameters.values())]
    assert torch.equal(first.grad, torch.full_like(first, 3.0))
    assert not any(p.grad.any() for p in rest)


def test_a_model_is_checked_before_its_weights_are_loaded(tiny_model):
    tokenizer, model_eos = load_tokenizer(str(tiny_model), 512, PROJECTIONS)
    assert (len(tokenizer), model_eos) == (260, 1)
    with pytest.raises(InputError, match="holds 512 tokens"):
        load_tokenizer(str(tiny_model), 513, PROJECTIONS)
    message = (
        "lora.target_modules: the model has no linear layer lm_head, qkv_proj: choose from "
        ".*q_proj, "
    )
    with pytest.raises(InputError, match=message):
        load_tokenizer(str(tiny_model), 512, ["q_proj", "qkv_proj", "lm_head"])
