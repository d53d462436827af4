"""The planner against counts by hand, real parameters and optimisers, and what torch's profiler
sees a CPU allocate."""

import json
import re

import bitsandbytes
import pytest
import torch
from helpers import (
    MINIMAL,
    ROOT,
    adapted_policy,
    changed,
    command,
    fake_completions,
    make_learner,
    objective,
    packed,
    write_yaml,
)
from memory import peak_bytes
from random_model import QWEN3, build, qwen3
from transformers import PhiConfig

from stapo_lite.config import PROJECTIONS, Rollout, Train, load_config
from stapo_lite.errors import InputError
from stapo_lite.extras.planning import plan
from stapo_lite.extras.planning.choice import apply, choose
from stapo_lite.extras.planning.plan import (
    GIB,
    Hardware,
    as_json,
    count_activations,
    count_graphs,
    make_plan,
    model_sizes,
    served_bytes,
)
from stapo_lite.machine import on_wsl
from stapo_lite.model.loading import load_model_config
from stapo_lite.model.policy import make_optimizer
from stapo_lite.training.update import update

LORA_OF_RANK_32 = (
    36 * 32 * ((4096 + 4096) * 2 + (4096 + 1024) * 2 + (4096 + 12288) * 3)
)  # in the 8B, all projections
PARAMETERS = {
    "0.6B": 596_049_920,
    "1.7B": 1_720_574_976,
    "8B": 8_190_735_360,
    "14B": 14_768_307_200,
    "32B": 32_762_123_264,
}


@pytest.fixture
def small():
    """A Qwen3 whose weights are made in no time and whose activations are many times that."""
    return qwen3(
        "1.7B",
        vocab_size=2000,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
    )


def config(**changes):
    """The LM head's workspace is large: a small one takes more passes, which take time here."""
    tree = MINIMAL | {"train": {"lm_head_memory_gb": 4, "max_tokens_per_microbatch": 4096}}
    return load_config(changed(tree, changes))


def test_a_server_has_a_card_of_its_own_and_holds_the_versions_under_way():
    """At rank 32, over four of the server's cards; each may hold whole adapters, of max_lag + 1
    versions."""
    r = {
        "engine": "server",
        "max_lag": 2,
        "vllm": {"tensor_parallel_size": 4},
        "gpu_memory_utilization": 0.5,
    }
    found = make_plan(config(lora__r=32, rollout=r), qwen3("8B"), Hardware(48 * GIB))
    assert found.rollout["vLLM: weights"] == 2 * PARAMETERS["8B"] // 4
    assert found.rollout["vLLM: adapter slots"] == 3 * 2 * LORA_OF_RANK_32
    assert not any("trainer" in name for name in found.rollout)
    assert not any("vLLM" in name for name in [*found.update, *found.host])
    assert found.kv_tokens == 4 * found.rollout["vLLM: KV cache"] // (36 * 2 * 8 * 128 * 2)
    assert found.traffic["adapter to each server, a step"] == 2 * LORA_OF_RANK_32


def test_what_four_trainers_send_by_hand():
    found = make_plan(config(lora__r=32), qwen3("8B"), Hardware(48 * GIB, processes=4))
    assert found.traffic["gradients, an update"] == 2 * 4 * LORA_OF_RANK_32 * 3 // 4
    assert found.traffic["completions, a step, at most"] == 3 * 64 * 8 // 4 * (1024 + 2048) * 14
    alone = make_plan(config(lora__r=32), qwen3("8B"), Hardware(48 * GIB))
    assert alone.traffic["gradients, an update"] == 0
    assert found.update == alone.update


def test_the_real_models_counted_and_the_8b_by_hand():
    """36 layers of 8 key-value heads x 128, keys and values, two bytes each."""
    for size in QWEN3:
        sizes = model_sizes(as_json(qwen3(size)))
        assert sum(sizes.matrices) + sum(sizes.others) == PARAMETERS[size]
        assert set(sizes.linears) == set(PROJECTIONS)
        assert len(sizes.matrices) == 7 * QWEN3[size][2]
    apart = config(lora__r=32, rollout__share_base="off")
    found = make_plan(apart, qwen3("8B"), Hardware(48 * GIB))
    assert found.update["trainer: base weights"] == 2 * PARAMETERS["8B"]
    assert (
        found.update["trainer: adapter"]
        == found.update["trainer: gradients"]
        == 4 * LORA_OF_RANK_32
    )
    assert found.update["trainer: optimiser"] == 2 * 4 * LORA_OF_RANK_32
    assert found.rollout["vLLM: adapter slots"] == 2 * LORA_OF_RANK_32
    # Pinned memory comes in powers of two: of queries, keys and values together, and of both
    # projections to 12,288.
    layer = 2 * (2**25 + 2**24 + 2**27 + 2**26)
    norms = 36 * (2 * 2**13 + 2 * 2**8) + 2**13
    assert found.host["vLLM: weights"] == 36 * layer + 2 * 2**31 + norms
    assert found.host["vLLM: adapter slots"] == 4 * LORA_OF_RANK_32
    share = sum(size for name, size in found.rollout.items() if name.startswith("vLLM"))
    assert share == int(0.45 * 48 * GIB)
    assert found.kv_tokens == found.rollout["vLLM: KV cache"] // 147_456


def test_4_bit_weights_and_optimiser_as_they_really_are(small, tmp_path):
    """Bytes of the tensors that bitsandbytes makes, against the plan's."""
    build(tmp_path, small)
    policy = adapted_policy(tmp_path, "bfloat16", quantization="nf4", lora__r=64)
    c = config(
        quantization="nf4",
        lora__r=64,
        train__optim="paged_adamw_8bit",
        rollout__quantization="bitsandbytes",
        rollout__share_base="off",
    )
    found = make_plan(c, small, Hardware(GIB))
    real = 0
    for module in policy.model.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            state = module.weight.quant_state
            real += sum(t.nbytes for t in (module.weight, state.absmax, state.state2.absmax))
    real += sum(
        p.nbytes
        for n, p in policy.model.named_parameters()
        if not p.requires_grad and p.dtype != torch.uint8
    )
    assert found.update["trainer: base weights"] == pytest.approx(real, rel=0.01)
    assert found.update["trainer: adapter"] == sum(p.nbytes for p in policy.parameters.values())
    optimizer = make_optimizer(policy, Train(optim="paged_adamw_8bit"))
    for parameter in policy.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    states = [
        t
        for state in optimizer.state.values()
        for t in state.values()
        if isinstance(t, torch.Tensor)
    ]
    tables = 2 * 256 * 4 * len(policy.parameters)  # qmap, the same one for all
    assert found.update["trainer: optimiser"] == pytest.approx(
        sum(t.nbytes for t in states) - tables, rel=0.05
    )


@pytest.mark.parametrize(
    ("dtype", "checkpointing"),
    [("float32", True), ("bfloat16", True), ("bfloat16", False), ("bfloat16", 2)],
)
def test_activations_as_the_profiler_sees_them(small, tmp_path, checkpointing, dtype):
    """The most that a forward and backward pass of the trainer allocates on a CPU, within a
    tenth."""
    build(tmp_path, small)
    changes = {"train__gradient_checkpointing": checkpointing, "train__lm_head_memory_gb": 2 / 1024}
    policy = adapted_policy(tmp_path, dtype, **changes)
    completions = fake_completions(0, [1.0] * 8, longest=1)
    for completion in completions:
        completion.prompt.token_ids[:] = [5] * 64
        completion.token_ids[:] = [5] * 64
    found = config(
        **changes,
        dtype=dtype,
        lora__r=8,
        train__max_tokens_per_microbatch=1024,
        data__max_prompt_length=64,
        rollout__max_completion_length=64,
    )
    kept, decoder, head = count_activations(found, small)
    assert kept < decoder
    gradients = sum(p.nbytes for p in policy.parameters.values())  # which the plan counts apart
    for _ in range(2):  # the first pass warms caches up
        policy.model.zero_grad()
        real = allocated(
            lambda: policy.statistics(completions).logprobs.sum().backward(),
            tmp_path / "trace.json",
        )
    assert decoder + head == pytest.approx(real - gradients, rel=0.1)


def test_an_update_takes_no_more_than_its_largest_micro_batch(small, tmp_path):
    """The passes that the mask needs beside the first one's graph would add a layer's activations
    to it."""
    build(tmp_path, small)
    changes = {"train__gradient_checkpointing": 4, "train__lm_head_memory_gb": 2 / 1024}
    policy = adapted_policy(tmp_path, "bfloat16", **changes)
    completions = fake_completions(0, [1.0] * 24, longest=1)
    for completion in completions:
        completion.prompt.token_ids[:] = [5] * 64
        completion.token_ids[:] = [5] * 64
        completion.rollout_logprobs = [-1.0] * 64
    learner, batch = (
        make_learner(policy, objective(), 1024, longest=64),
        packed(policy, completions),
    )
    found = config(
        **changes,
        dtype="bfloat16",
        lora__r=8,
        train__max_tokens_per_microbatch=1024,
        data__max_prompt_length=64,
        rollout__max_completion_length=64,
    )
    _, decoder, head = count_activations(found, small)
    gradients = sum(p.nbytes for p in policy.parameters.values())
    assert update(learner, batch).changed
    assert peak_bytes(lambda: update(learner, batch)) < 1.1 * (decoder + head) + gradients


def allocated(run, trace):
    """Most bytes allocated at one time, beyond those before, from the allocator's events."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        run()
    profiler.export_chrome_trace(str(trace))
    events = [
        e["args"] for e in json.loads(trace.read_text())["traceEvents"] if e["name"] == "[memory]"
    ]
    before = events[0]["Total Allocated"] - events[0]["Bytes"]
    return max(event["Total Allocated"] for event in events) - before


def test_graphs_are_counted_as_vllm_captures_them():
    """2, 4, 8 and 16 tokens of 8 sequences layer by layer, and up to 8 as whole steps."""

    def count(dtype="auto", **rollout):
        return count_graphs(Rollout(**rollout), dtype)

    assert count(max_num_seqs=8) == 5 + 4
    assert count(max_num_seqs=256) == 51 + 35
    assert count(vllm={"enforce_eager": True}) == 0
    assert count("float16", quantization="bitsandbytes") == 0  # a T4
    assert count("float16") == count("bfloat16", quantization="bitsandbytes") > 0


def test_a_cache_in_8_bits_holds_twice_the_tokens():
    model, cards = qwen3("8B"), Hardware(48 * GIB)
    plans = [
        make_plan(config(rollout__vllm={"kv_cache_dtype": dtype}), model, cards)
        for dtype in ("auto", "fp8_e4m3")
    ]
    assert plans[1].kv_tokens == pytest.approx(2 * plans[0].kv_tokens, abs=1)
    assert plans[0].rollout == plans[1].rollout


def test_windows_pins_half_of_the_memory(monkeypatch):
    """Two copies of 1.7B pin their weights; one base pins nothing."""
    model, cards = qwen3("1.7B"), Hardware(24 * GIB, 20 * GIB, pinned_memory=2 * GIB)
    apart = make_plan(config(rollout__share_base="off"), model, cards)
    assert [problem.partition(":")[0] for problem in apart.problems] == ["host"]
    assert "of pinned memory needed, 2.0 GiB available" in apart.problems[0]
    assert make_plan(config(), model, cards).problems == []
    linux = cards._replace(pinned_memory=None)
    assert make_plan(config(rollout__share_base="off"), model, linux).problems == []
    for release, found in (("6.6.87.2-microsoft-standard-WSL2", True), ("6.8.0-45-generic", False)):
        monkeypatch.setattr("platform.release", lambda release=release: release)
        assert on_wsl() == found


def test_one_base_is_on_the_card_once_and_not_on_the_host():
    model, cards = qwen3("1.7B"), Hardware(24 * GIB)
    apart = make_plan(config(rollout__share_base="off"), model, cards)
    shared, awake = (
        make_plan(config(rollout__sleep_level=level), model, cards) for level in (1, 0)
    )
    weights = apart.update["trainer: base weights"]
    assert sum(apart.rollout.values()) - sum(shared.rollout.values()) == weights
    slots = shared.rollout["vLLM: adapter slots"]
    assert shared.rollout["vLLM: weights"] == weights  # in 16 bits
    assert sum(shared.update.values()) - sum(apart.update.values()) == slots
    assert awake.update["vLLM: KV cache"] == shared.rollout["vLLM: KV cache"]
    assert "vLLM: KV cache" not in shared.update
    assert shared.host.keys() == {"processes", "snapshots of two steps"}


def test_parking_sleeping_and_offloading_move_memory():
    model, cards = qwen3("1.7B"), Hardware(24 * GIB)
    plain, awake = (
        make_plan(config(rollout__share_base="off"), model, cards),
        make_plan(config(rollout__share_base="off", rollout__sleep_level=0), model, cards),
    )
    changes = {
        "train__park_trainer": True,
        "train__offload_activations": True,
        "rollout__sleep_level": 2,
    }
    moved = make_plan(config(**changes), model, cards)
    weights = plain.update["trainer: base weights"]
    assert sum(plain.rollout.values()) - sum(moved.rollout.values()) == weights
    inputs = (
        27 * 4096 * 2048 * 2
    )  # bfloat16 inputs of 28 layers; the last ones are in use at the peak
    assert sum(plain.update.values()) - sum(moved.update.values()) == pytest.approx(inputs, rel=0.1)
    graphs = plain.update["vLLM: CUDA graphs"]
    assert sum(awake.update.values()) - sum(plain.update.values()) == pytest.approx(
        0.45 * 24 * GIB - graphs, rel=0.01
    )
    assert "vLLM: weights" in plain.host
    assert "vLLM: weights" not in moved.host
    assert moved.host["trainer: base weights"] >= weights
    parked = make_plan(config(quantization="nf4", train__park_trainer=True), model, cards)
    scales = parked.rollout[
        "trainer: scales of 4-bit weights"
    ]  # which bitsandbytes keeps beside the parameters
    assert scales == pytest.approx(28 * 50_331_648 * (1 / 64 + 4 / (64 * 256)), rel=1e-6)
    assert "trainer: base weights" not in parked.rollout


@pytest.fixture
def planned(tmp_path, capsys):
    """Run the command for Qwen3 of a size; (exit status, output)."""

    def run(size, *arguments):
        qwen3(size, vocab_size=8000).save_pretrained(tmp_path / size)
        write_yaml(tmp_path / "config.yaml", MINIMAL | {"model": str(tmp_path / size)})
        return command(
            "plan", tmp_path / "config.yaml", "--gpu-memory", *arguments
        ), capsys.readouterr()

    return run


def test_the_command_shows_what_would_be_chosen(planned):
    status, output = planned("8B", "23.5", "rollout.max_completion_length=4096")
    assert status == 0
    head, *lines, _ = output.out.splitlines()[:6]
    assert head == "memory for a card of 23.5 GiB, predicted"
    assert [line.split(":")[0].strip() for line in lines] == [
        "rollouts",
        "update",
        "host",
        "time (RTX 4090)",
    ]
    assert output.out.endswith("It fits.\n")
    assert " sequences of the longest length (5,120) at a time" in output.out


def test_the_command_names_what_shortens_a_step(planned):
    """Each change by the share of the time that is left, the best first; the run's length in a
    given time."""
    status, output = planned("8B", "23.5", "--hours", "12", "train.max_steps=1")
    assert status == 0
    lines = output.out.partition("what would shorten a step, each change alone:\n")[2].splitlines()
    shares = [int(re.match(r"  to (\d+)%: ", line)[1]) for line in lines[:-2]]
    assert shares == sorted(shares)
    assert 0 < shares[0] < shares[-1] < 95
    half = "rollout.max_completion_length=1024 (cuts longer answers off)"
    assert any(line.endswith(half) for line in lines)
    low, high = re.search(r"(\d+) to (\d+) min a step", output.out).groups()
    steps = int(re.search(r"^12 hours: train.max_steps=(\d+)$", output.out, re.MULTILINE)[1])
    assert 12 * 60 / float(high) < steps < 12 * 60 / float(low)
    both = planned("8B", "23.5", "--hours", "12", f"train.max_steps={2 * steps}")[1].out
    line = rf"^12 hours: train.max_steps={steps}, or {2 * steps} with (.+)$"
    smaller = re.search(line, both, re.MULTILINE)[1].split()
    alone = planned("8B", "23.5", "--hours", "12", f"train.max_steps={2 * steps}", *smaller)[1].out
    assert int(re.search(r"^12 hours: train.max_steps=(\d+)$", alone, re.MULTILINE)[1]) >= 2 * steps
    already = planned("8B", "23.5", "quantization=nf4", "rollout.quantization=bitsandbytes")[1].out
    assert "quantization=" not in already.partition("what would shorten")[2]


def test_steps_in_some_hours_are_those_of_the_plan_that_is_printed(planned):
    for card, *overrides in (
        ("79", "memory=off", "rollout.max_num_seqs=64"),
        ("48", "rollout.engine=server", "rollout.max_completion_length=8192"),
    ):
        out = planned("8B", card, "--hours", "100", *overrides)[1].out
        low, high = re.search(r"(\d+) to (\d+) min a step", out).groups()
        steps = int(re.search(r"^100 hours: train.max_steps=(\d+)", out, re.MULTILINE)[1])
        assert 6000 / float(high) < steps < 6000 / float(low)


def test_a_batch_is_not_smaller_than_the_number_of_processes(planned):
    status, output = planned("8B", "80", "--hours", "0.02", "--processes", "8")
    assert status == 0
    assert "0.02 hours: train.max_steps=" in output.out


def test_the_command_names_the_smallest_changes_that_would_fit(planned):
    for arguments, changes in [
        (
            ("8B", "14.6"),
            ["quantization=nf4 rollout.quantization=bitsandbytes", "a card of 21.9 GiB"],
        ),
        (
            ("1.7B", "14.6", "rollout.max_num_seqs=9", "rollout.gpu_memory_utilization=0.2"),
            [
                "these keys left open: rollout.gpu_memory_utilization, rollout.max_num_seqs",
                "quantization=nf4 rollout.quantization=bitsandbytes",
                "a card of 21.9 GiB",
            ],
        ),
        (  # without the second key the first one is refused
            ("14B", "14.6", "rollout.num_generations=256", "rollout.max_num_seqs=256"),
            ["quantization=nf4 rollout.quantization=bitsandbytes", "a card of 31.3 GiB"],
        ),
    ]:
        status, output = planned(*arguments)
        assert (status, output.err.count("\n")) == (2, 1)
        assert output.err.strip().partition("it would with ")[2].split("; or ") == changes


def test_without_auto_the_plan_says_what_is_too_much(planned):
    status, output = planned("8B", "23.5", "memory=off", "rollout.max_completion_length=4096")
    assert status == 1
    assert "\n  rollouts: " in output.out.partition("It does not fit.")[2]


@pytest.mark.parametrize(
    "arguments", [("0",), ("24", "--processes", "0"), ("24", "--host-memory", "inf")]
)
def test_no_card_no_plan(planned, arguments):
    status, output = planned("1.7B", *arguments)
    assert status == 2
    assert f"must be greater than 0, got {arguments[-1]}" in output.err


def test_some_runs_cannot_be_planned(planned):
    status, output = planned("1.7B", "24", "rollout.engine=transformers")
    assert (status, output.err.count("\n")) == (2, 1)
    other = PhiConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    with pytest.raises(InputError, match="the model has no linear layer down_proj.*: choose from "):
        make_plan(config(), other, Hardware(GIB))


def test_a_quantised_checkpoint_next_to_the_trainer(tmp_path, monkeypatch):
    """AWQ of group size 128: half a byte, a 16-bit scale and a 4-bit zero point per group."""
    served = qwen3("1.7B")
    served.quantization_config = {"quant_method": "awq", "bits": 4, "group_size": 128}
    served.save_pretrained(tmp_path)
    given, reads = config(rollout__model=str(tmp_path)), []
    monkeypatch.setattr(
        plan, "load_model_config", lambda name: [reads.append(name), load_model_config(name)][1]
    )
    choose(given, qwen3("1.7B"), Hardware(24 * GIB))
    found = make_plan(given, qwen3("1.7B"), Hardware(24 * GIB))
    assert len(reads) == 1, "each may be a request to the Hub"
    linears = PARAMETERS["1.7B"] - 151_936 * 2048  # the norms hardly count
    assert found.rollout["vLLM: weights"] == pytest.approx(
        linears * (0.5 + 2.5 / 128) + 2 * 151_936 * 2048, rel=1e-3
    )
    assert found.rollout["trainer: base weights"] == 2 * PARAMETERS["1.7B"]


def test_a_checkpoint_with_one_group_a_column(tmp_path):
    """GPTQ's group_size -1: scales and zero points hardly count."""
    served = qwen3("0.6B")
    served.quantization_config = {"quant_method": "gptq", "bits": 4, "group_size": -1}
    served.save_pretrained(tmp_path)
    assert served_bytes(config(rollout__model=str(tmp_path)), 2) == 0.5


def test_a_kv_cache_of_a_given_size_is_what_vllm_takes():
    """Whatever gpu_memory_utilization says; 2,340 tokens of 36 layers, 8 heads of 128 and two
    bytes."""
    given = config(rollout__vllm={"kv_cache_memory_bytes": 2340 * 36 * 2 * 8 * 128 * 2})
    found = make_plan(given, qwen3("8B"), Hardware(80 * GIB))
    assert (found.rollout["vLLM: KV cache"], found.kv_tokens) == (2340 * 147_456, 2340)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "gib"),
    [("1.7b_lora", 10.7), ("8b_lora", 23.5), ("8b_qlora", 14.6), ("14b_qlora", 23.5)],
)
def test_the_shipped_configs_fit(name, gib):
    model, cards = qwen3(name.partition("_")[0].upper()), Hardware(int(gib * GIB))
    given = load_config(ROOT / f"configs/qwen{name}.yaml")
    found = make_plan(apply(given, choose(given, model, cards)), model, cards)
    assert found.problems == []
    assert found.kv_tokens >= found.longest
