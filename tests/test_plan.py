"""The planner against counts by hand, real parameters and optimisers, and what torch's profiler sees a CPU allocate."""

import json
import sys
from pathlib import Path

import bitsandbytes
import pytest
import torch
import yaml
from conftest import adapted_policy, fake_completions
from random_model import QWEN3, build, qwen3
from transformers import PhiConfig

from stapo_lite import plan
from stapo_lite.config import PROJECTIONS, Config, InputError, Train, load_config
from stapo_lite.plan import GIB, Cards, make_plan, measure_activations, model_sizes
from stapo_lite.policy import make_optimizer

PARAMETERS = {"1.7B": 1_720_574_976, "8B": 8_190_735_360, "14B": 14_768_307_200}


@pytest.fixture
def small():
    """A Qwen3 whose weights are made in no time and whose activations are many times that."""
    return qwen3(
        "1.7B", vocab_size=2000, hidden_size=128, intermediate_size=320, num_hidden_layers=5, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32,
    )  # fmt: skip


def config(**changes):
    tree: dict = {"model": "m", "output_dir": "o"}
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            tree.setdefault(section, {})[name] = value
        else:
            tree[section] = value
    return Config.model_validate(tree)


def test_a_server_has_a_card_of_its_own_and_holds_the_versions_under_way():
    """At rank 32, over four of the server's cards; each may hold whole adapters, of max_lag + 1 versions."""
    r = {"engine": "server", "max_lag": 2, "tensor_parallel_size": 4, "gpu_memory_utilization": 0.5}
    found = make_plan(
        config(lora__r=32, train__max_tokens_per_microbatch=4096, rollout=r), qwen3("8B"), Cards(48 * GIB)
    )
    adapter = 2 * 36 * 32 * ((4096 + 4096) * 2 + (4096 + 1024) * 2 + (4096 + 12288) * 3)
    assert found.rollout["vLLM: weights"] == 2 * PARAMETERS["8B"] // 4
    assert found.rollout["vLLM: adapter slots"] == 3 * adapter
    assert not any("trainer" in name for name in found.rollout)
    assert not any("vLLM" in name for name in [*found.update, *found.host])
    assert found.kv_tokens == 4 * found.rollout["vLLM: KV cache"] // (36 * 2 * 8 * 128 * 2)
    assert found.traffic["adapter to each server, a step"] == adapter


def test_a_base_spread_over_four_cards_by_hand():
    """Of Qwen3-8B embedding, head (151,936 x 4,096) and norms stay whole; the layers are quartered."""
    c = config(lora__r=32, train__max_tokens_per_microbatch=4096)
    found = make_plan(c, qwen3("8B"), Cards(48 * GIB, processes=4, sharded=True))
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288
    whole = PARAMETERS["8B"] - 36 * layer
    assert 0 < whole - 2 * 151_936 * 4096 < 1e6
    assert found.update["trainer: its shard of the base"] == 2 * 36 * layer // 4 + 2 * whole
    assert found.update["trainer: two layers put together"] == 2 * 2 * layer
    assert found.traffic["layers, a micro-batch"] == 2 * 2 * 36 * layer * 3 // 4
    lora = 36 * 32 * ((4096 + 4096) * 2 + (4096 + 1024) * 2 + (4096 + 12288) * 3)
    assert found.traffic["gradients, an update"] == 2 * 4 * lora * 3 // 4
    assert found.traffic["completions, a step, at most"] == 3 * 64 * 8 // 4 * (1024 + 2048) * 14
    assert make_plan(c, qwen3("8B"), Cards(48 * GIB)).traffic["gradients, an update"] == 0
    with pytest.raises(InputError, match="quantization=nf4: not with a base that FSDP shards"):
        make_plan(config(quantization="nf4"), qwen3("8B"), Cards(48 * GIB, processes=4, sharded=True))


@pytest.mark.parametrize("size", QWEN3)
def test_the_real_models_counted(size):
    sizes = model_sizes(plan.as_json(qwen3(size)))
    linears = [n_in * n_out for shapes in sizes.linears.values() for n_in, n_out in shapes]
    assert sum(linears) + sum(sizes.others) == PARAMETERS[size]
    assert set(sizes.linears) == set(PROJECTIONS)
    assert len(linears) == 7 * QWEN3[size][2]


def test_the_8b_model_by_hand():
    """LoRA of rank 32 on all projections; 36 layers of 8 key-value heads x 128, keys and values, two bytes each."""
    found = make_plan(config(lora__r=32, train__max_tokens_per_microbatch=4096), qwen3("8B"), Cards(48 * GIB))
    per_layer = 32 * ((4096 + 4096) * 2 + (4096 + 1024) * 2 + (4096 + 12288) * 3)
    assert found.update["trainer: base weights"] == 2 * PARAMETERS["8B"]
    assert found.update["trainer: adapter"] == found.update["trainer: gradients"] == 4 * 36 * per_layer
    assert found.update["trainer: optimiser"] == 2 * 4 * 36 * per_layer
    assert found.rollout["vLLM: adapter slots"] == 2 * 36 * per_layer
    share = sum(size for name, size in found.rollout.items() if name.startswith("vLLM"))
    assert share == int(0.45 * 48 * GIB)
    assert found.kv_tokens == found.rollout["vLLM: KV cache"] // 147_456


def test_4_bit_weights_and_optimiser_as_they_really_are(small, tmp_path):
    """Bytes of the tensors that bitsandbytes makes, against the plan's."""
    build(tmp_path, small)
    policy = adapted_policy(tmp_path, "bfloat16", quantization="nf4", lora__r=64)
    found = make_plan(
        config(quantization="nf4", lora__r=64, train__optim="paged_adamw_8bit", rollout__quantization="bitsandbytes"),
        small,
        Cards(GIB),
    )
    real = 0
    for module in policy.model.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            state = module.weight.quant_state
            real += sum(t.nbytes for t in (module.weight, state.absmax, state.state2.absmax))
    real += sum(p.nbytes for n, p in policy.model.named_parameters() if not p.requires_grad and p.dtype != torch.uint8)
    assert found.update["trainer: base weights"] == pytest.approx(real, rel=0.01)
    assert found.update["trainer: adapter"] == sum(p.nbytes for p in policy.parameters.values())
    optimizer = make_optimizer(policy, Train(optim="paged_adamw_8bit"))
    for parameter in policy.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    states = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    tables = 2 * 256 * 4 * len(policy.parameters)  # qmap, the same one for all
    assert found.update["trainer: optimiser"] == pytest.approx(sum(t.nbytes for t in states) - tables, rel=0.05)


@pytest.mark.parametrize(("dtype", "checkpointing"), [("float32", True), ("bfloat16", True), ("bfloat16", False)])
def test_activations_as_the_profiler_sees_them(small, tmp_path, checkpointing, dtype):
    """The most that a forward and backward pass of the trainer allocates on a CPU, within a tenth."""
    build(tmp_path, small)
    changes = {"train__gradient_checkpointing": checkpointing, "train__lm_head_memory_gb": 2 / 1024}
    policy = adapted_policy(tmp_path, dtype, **changes)
    completions = fake_completions(0, [1.0] * 8, longest=1)
    for completion in completions:
        completion.prompt.token_ids[:] = [5] * 64
        completion.token_ids[:] = [5] * 64
    found = config(
        **changes, dtype=dtype, lora__r=8, train__max_tokens_per_microbatch=1024, data__max_prompt_length=64,
        rollout__max_completion_length=64,
    )  # fmt: skip
    kept, decoder, head = measure_activations(found, small)
    assert kept < decoder
    gradients = sum(p.nbytes for p in policy.parameters.values())  # which the plan counts apart
    for _ in range(2):  # the first pass warms caches up
        policy.model.zero_grad()
        real = allocated(lambda: policy.statistics(completions).logprobs.sum().backward(), tmp_path / "trace.json")
    assert decoder + head == pytest.approx(real - gradients, rel=0.1)


def allocated(run, trace):
    """Most bytes allocated at one time, beyond those before, from the allocator's events."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    profiler.export_chrome_trace(str(trace))
    events = [e["args"] for e in json.loads(trace.read_text())["traceEvents"] if e["name"] == "[memory]"]
    before = events[0]["Total Allocated"] - events[0]["Bytes"]
    return max(event["Total Allocated"] for event in events) - before


def test_parking_sleeping_and_offloading_move_memory():
    model, card = qwen3("1.7B"), 24 * GIB
    plain = make_plan(config(train__max_tokens_per_microbatch=4096), model, Cards(card))
    moved = make_plan(
        config(train__max_tokens_per_microbatch=4096, train__park_trainer=True, train__offload_activations=True,
               rollout__sleep_level=2), model, Cards(card),
    )  # fmt: skip
    awake = make_plan(config(train__max_tokens_per_microbatch=4096, rollout__sleep_level=0), model, Cards(card))
    weights = plain.update["trainer: base weights"]
    assert sum(plain.rollout.values()) - sum(moved.rollout.values()) == weights
    inputs = 27 * 4096 * 2048 * 2  # bfloat16 inputs of 28 layers; the last ones are in use at the peak
    assert sum(plain.update.values()) - sum(moved.update.values()) == pytest.approx(inputs, rel=0.1)
    assert sum(awake.update.values()) - sum(plain.update.values()) == pytest.approx(0.45 * card, rel=0.1)
    assert "vLLM: weights" in plain.host
    assert "vLLM: weights" not in moved.host
    assert moved.host["trainer: base weights"] >= weights


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Run the command for Qwen3 of a size; (exit status, output)."""

    def run(size, *arguments, **tree):
        qwen3(size).save_pretrained(tmp_path / size)
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump({"model": str(tmp_path / size), "output_dir": "o"} | tree), encoding="utf-8")
        monkeypatch.setattr(sys, "argv", ["plan", str(path), *arguments])
        try:
            plan.main()
        except SystemExit as exit_:
            return exit_.code, capsys.readouterr()
        return 0, capsys.readouterr()

    return run


def test_what_it_suggests_fits(command):
    status, output = command("8B", "--gpu-memory", "24", "rollout.max_completion_length=4096")
    assert status == 1
    assert "It does not fit.\n  rollouts: " in output.out
    overrides = output.out.partition("It would with\n  ")[2].partition("\n")[0].split()
    assert "train.park_trainer=true" in overrides
    assert not any("quantization" in override for override in overrides)  # as long as there is a gentler way
    status, output = command("8B", "--gpu-memory", "24", "rollout.max_completion_length=4096", *overrides)
    assert status == 0
    assert output.out.endswith("It fits.\n")


def test_what_it_suggests_can_be_loaded(command):
    """4-bit weights cannot be read again after a level-2 sleep, though only that would leave room in host memory."""
    sizes = ("--gpu-memory", "24", "--host-memory", "18")
    output = command("14B", *sizes, quantization="nf4", train={"max_tokens_per_microbatch": 16384})[1].out
    assert not ("sleep_level=2" in output and "bitsandbytes" in output)


def test_the_table_counts_sequences_of_its_own_length():
    found = make_plan(config(rollout__max_completion_length=4096), qwen3("1.7B"), Cards(24 * GIB))
    assert f"{found.kv_tokens // 5120} sequences of the longest length (5,120) at a time" in plan.report(found)


def test_what_no_change_makes_fit(command):
    status, output = command("14B", "--gpu-memory", "6")
    assert status == 1
    assert output.out.endswith("take a smaller model or a larger card.\n")


def test_host_memory_counts_too(command):
    arguments = ("1.7B", "--gpu-memory", "24", "--host-memory", "8")
    assert "host: " in command(*arguments)[1].out
    assert command(*arguments, "rollout.sleep_level=2")[0] == 0


def test_what_cannot_be_planned(command):
    status, output = command("1.7B", "--gpu-memory", "24", "rollout.engine=transformers")
    assert (status, output.err.count("\n")) == (2, 1)
    with pytest.raises(InputError, match="rollout.quantization=strange"):
        make_plan(config(rollout__quantization="strange"), qwen3("1.7B"), Cards(GIB))
    other = PhiConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    with pytest.raises(InputError, match="the model has no down_proj, .* leave them out"):
        make_plan(config(), other, Cards(GIB))


def test_a_quantised_checkpoint_next_to_the_trainer(tmp_path):
    """AWQ of group size 128: half a byte, a 16-bit scale and a 4-bit zero point per group."""
    served = qwen3("1.7B")
    served.quantization_config = {"quant_method": "awq", "bits": 4, "group_size": 128}
    served.save_pretrained(tmp_path)
    found = make_plan(config(rollout__model=str(tmp_path)), qwen3("1.7B"), Cards(24 * GIB))
    linears = PARAMETERS["1.7B"] - 151_936 * 2048  # the norms hardly count
    assert found.rollout["vLLM: weights"] == pytest.approx(linears * (0.5 + 2.5 / 128) + 2 * 151_936 * 2048, rel=1e-3)
    assert found.rollout["trainer: base weights"] == 2 * PARAMETERS["1.7B"]


@pytest.mark.parametrize(
    ("name", "size"),
    [("qwen1.7b_lora", "1.7B"), ("qwen8b_lora", "8B"), ("qwen8b_qlora", "8B"), ("qwen14b_qlora", "14B")],
)
def test_the_shipped_configs_fit_24_gib(name, size):
    shipped = load_config(Path(__file__).parent.parent / f"configs/{name}.yaml")
    found = make_plan(shipped, qwen3(size), Cards(24 * GIB))
    assert found.problems == []
    assert found.kv_tokens >= 4 * (shipped.data.max_prompt_length + shipped.rollout.max_completion_length)
