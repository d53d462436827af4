import weakref

import bitsandbytes
import pytest
import torch
from conftest import SAMPLING, adapted_policy, fake_completions, randomise_adapter
from transformers import AutoConfig, AutoModelForCausalLM, PhiConfig, PhiForCausalLM

from stapo_lite.batching import sequence_length
from stapo_lite.config import PROJECTIONS, InputError, Train
from stapo_lite.policy import load_tokenizer, make_optimizer, sum_gradients
from stapo_lite.types import TokenStatistics


def dense_statistics(policy, completion, temperature=SAMPLING.temperature):
    """From the model's own full logits, one sequence at a time, without padding."""
    ids = torch.tensor([completion.prompt.token_ids + completion.token_ids])
    logits = policy.model(input_ids=ids, use_cache=False).logits[0].double() / temperature
    log_p = logits.log_softmax(-1)[len(completion.prompt.token_ids) - 1 : -1]
    chosen = log_p.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    return chosen, -(log_p.exp() * log_p).sum(-1), log_p.exp().square().sum(-1)


@pytest.fixture
def tied_model(tiny_model, tmp_path):
    """A model of the same shape whose embedding is its head."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(tiny_model, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    return tmp_path


def test_a_head_with_bias(tmp_path):
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = PhiForCausalLM(PhiConfig(vocab_size=260, **shape))
    torch.nn.init.normal_(model.lm_head.bias)
    model.save_pretrained(tmp_path)
    policy = adapted_policy(tmp_path, lora__target_modules=["q_proj", "v_proj"])
    (completion,) = fake_completions(0, [1.0])
    expected = dense_statistics(policy, completion)
    for got, want in zip(policy.statistics([completion]), expected, strict=True):
        assert (got - want).abs().max() < 1e-4


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("model", ["tiny_model", "tied_model"])
def test_statistics_and_gradient_match_the_full_logits(request, model, checkpointing):
    policy = adapted_policy(request.getfixturevalue(model), train__gradient_checkpointing=checkpointing)
    embedding, head = policy.model.get_input_embeddings().weight, policy.model.get_output_embeddings().weight
    assert (embedding is head) == (model == "tied_model")
    completions = fake_completions(0, [1.0] * 5)
    statistics = policy.statistics(completions)
    lengths = [len(completion.token_ids) for completion in completions]
    cut = list(zip(*(values.split(lengths) for values in statistics), strict=True))
    expected_sum = torch.zeros(())
    for row, completion in enumerate(completions):
        expected = dense_statistics(policy, completion)
        for got, want in zip(cut[row], expected, strict=True):
            assert (got - want).abs().max() < 1e-4
        expected_sum = expected_sum + expected[0].sum()
    parameters = list(policy.parameters.values())
    actual = torch.autograd.grad(statistics.logprobs.sum(), parameters)
    for got, want in zip(actual, torch.autograd.grad(expected_sum, parameters), strict=True):
        assert (got - want).norm() < 1e-4 * want.norm()


def test_only_the_adapter_trains(make_policy):
    policy = make_policy()
    assert all("lora_" in name and p.dtype == torch.float32 for name, p in policy.parameters.items())
    assert len(policy.parameters) == 2 * 7 * 2  # A and B of seven projections in two layers


def test_a_new_adapter_changes_nothing(make_policy):
    policy = make_policy(scale=0.0)
    completions = fake_completions(1, [1.0] * 3)
    with torch.no_grad():
        ours = policy.statistics(completions).logprobs
        with policy.model.disable_adapter():
            assert torch.equal(ours, policy.statistics(completions).logprobs)


def test_the_adapter_is_the_same_after_saving_and_loading(make_policy, tmp_path):
    policy = make_policy()
    policy.save_adapter(tmp_path)
    saved = {name: p.detach().clone() for name, p in policy.parameters.items()}
    randomise_adapter(policy, seed=5)
    policy.load_adapter(tmp_path)
    assert all(torch.equal(p, saved[name]) for name, p in policy.parameters.items())


def test_bf16_stays_close(make_policy):
    completions = fake_completions(0, [1.0] * 4)
    with torch.no_grad():
        exact = make_policy().statistics(completions)
        rounded = make_policy("bfloat16").statistics(completions)
    assert rounded.logprobs.dtype == torch.float32
    assert (exact.logprobs - rounded.logprobs).abs().mean() < 0.1


def with_gradient(policy, completions):
    """(statistics, the adapter's gradient of the sum of log-probabilities), and no graph."""
    statistics = policy.statistics(completions)
    gradient = torch.autograd.grad(statistics.logprobs.sum(), list(policy.parameters.values()))
    return TokenStatistics(*(values.detach() for values in statistics)), torch.cat([g.flatten() for g in gradient])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_4_bit_base_computes_with_its_dequantised_weights(make_policy, checkpointing):
    """Against a plain model whose weights are those that NF4 with double quantisation gives back."""
    policy = make_policy(quantization="nf4", train__gradient_checkpointing=checkpointing)
    plain = make_policy(seed=0)
    quantised = 0
    for (_, module), (_, other) in zip(policy.model.named_modules(), plain.model.named_modules(), strict=True):
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            state = module.weight.quant_state
            assert (state.quant_type, state.nested, state.blocksize) == ("nf4", True, 64)
            other.weight.data = bitsandbytes.functional.dequantize_4bit(module.weight.data, state)
            quantised += 1
    assert quantised == 2 * 7
    completions = fake_completions(0, [1.0] * 4)
    (statistics, gradient), (expected, expected_gradient) = (with_gradient(p, completions) for p in (policy, plain))
    for got, want in zip(statistics, expected, strict=True):
        assert (got - want).abs().max() < 1e-4
    assert (gradient - expected_gradient).norm() < 1e-4 * expected_gradient.norm()


@pytest.mark.parametrize("lora_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optim", ["adamw", "paged_adamw_8bit"])
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_qlora_learns_on_an_unchanged_base(make_policy, optim, lora_dtype):
    policy = make_policy("bfloat16", quantization="nf4", train__gradient_checkpointing=True, lora__dtype=lora_dtype)
    assert {p.dtype for p in policy.parameters.values()} == {getattr(torch, lora_dtype)}
    base = {name: p.detach().clone() for name, p in policy.model.named_parameters() if not p.requires_grad}
    completions = fake_completions(0, [1.0] * 4)
    optimizer = make_optimizer(policy, Train(optim=optim, learning_rate=0.01, weight_decay=0.0))
    likelihoods = []
    for _ in range(10):
        logprobs = policy.statistics(completions).logprobs
        likelihoods.append(logprobs.sum().item())
        (-logprobs.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert likelihoods[-1] > likelihoods[0] + 20
    after = dict(policy.model.named_parameters())
    assert all(torch.equal(after[name], values) for name, values in base.items())


@pytest.mark.parametrize("quantization", [None, "nf4"])
def test_parking_the_base_and_back(make_policy, quantization):
    policy = make_policy(quantization=quantization)
    completions = fake_completions(0, [1.0] * 3)
    before, gradient = with_gradient(policy, completions)
    frozen = [p for p in policy.model.parameters() if not p.requires_grad]
    on_card = [weakref.ref(p.untyped_storage()) for p in frozen]
    policy.park()
    assert not any(storage() for storage in on_card)  # nothing holds the device's copy
    parked = [p.data_ptr() for p in frozen]
    policy.unpark()
    policy.park()
    assert [p.data_ptr() for p in frozen] == parked  # copied once
    policy.unpark()
    after, gradient_after = with_gradient(policy, completions)
    assert torch.equal(before.logprobs, after.logprobs)
    assert torch.equal(gradient, gradient_after)


def test_offloaded_activations_change_nothing(make_policy, monkeypatch):
    """What goes to the host is the input of each checkpointed layer and the little that follows them: no weights."""
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
    assert torch.equal(actual[0].logprobs, expected[0].logprobs)
    assert torch.equal(actual[1], expected[1])
    hidden = (3, max(map(sequence_length, completions)), 64)
    assert offloaded.count(hidden) >= 2  # of both layers
    assert set(offloaded) <= {hidden, (*hidden[:2], 1), (64,), (0,)}  # and the final norm


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_layers_change_little(make_policy, checkpointing):
    completions = fake_completions(0, [1.0] * 3)
    expected = with_gradient(make_policy(), completions)
    actual = with_gradient(make_policy(train__compile=True, train__gradient_checkpointing=checkpointing), completions)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert (actual[0].logprobs - expected[0].logprobs).abs().max() < 1e-4
    assert (actual[1] - expected[1]).norm() < 1e-4 * expected[1].norm()


def test_gradients_of_all_processes_in_one_collective(make_policy):
    policy = make_policy()
    first, *rest = policy.parameters.values()
    first.grad = torch.ones_like(first)
    calls = []
    sum_gradients(policy, lambda flat: calls.append(flat.shape) or flat * 3)
    assert len(calls) == 1
    assert torch.equal(first.grad, torch.full_like(first, 3.0))
    assert not any(p.grad.any() for p in rest)


def test_model_checks(tiny_model, tmp_path):
    tokenizer, model_eos = load_tokenizer(str(tiny_model), 512, PROJECTIONS)
    assert (len(tokenizer), model_eos) == (260, 1)
    with pytest.raises(InputError, match="holds 512 tokens"):
        load_tokenizer(str(tiny_model), 513, PROJECTIONS)
    with pytest.raises(InputError, match="lora.target_modules: .* has no qkv_proj: leave them out"):
        load_tokenizer(str(tiny_model), 512, ["q_proj", "qkv_proj"])
    (tmp_path / "config.json").write_text('{"model_type": "t5"}', encoding="utf-8")
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(InputError, match="not a causal language model") as error:
            load_tokenizer(str(folder), 10, PROJECTIONS)
        assert "\n" not in str(error.value)
