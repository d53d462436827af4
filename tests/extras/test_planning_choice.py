"""`memory: auto` over models, cards and lengths, by the plan's own arithmetic."""

import os
import re
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from helpers import MINIMAL, ROOT, changed
from random_model import qwen3

from stapo_lite import machine
from stapo_lite.config import flatten, load_config, to_yaml
from stapo_lite.errors import InputError
from stapo_lite.extras.planning import choice
from stapo_lite.extras.planning.choice import (
    KEYS,
    MARGIN,
    apply,
    choose,
    choose_for_server,
    find,
    fit,
    fit_server,
    left_open,
    update_ladder,
)
from stapo_lite.extras.planning.plan import (
    CUDA_CONTEXT,
    GIB,
    Hardware,
    checkpointed_layers,
    make_plan,
)
from stapo_lite.extras.planning.speed import KNOWN_CARDS, READING, step_seconds, time_range

MEMORY = (10.7, 14.6, 21.9, 23.5, 31.3, 44.4, 79.1, 139.7)
FOUR_BITS = {"quantization": "nf4", "rollout__quantization": "bitsandbytes"}


def config(**changes):
    return load_config(changed(MINIMAL, changes))


@pytest.mark.parametrize("host", [None, 40, 12])
@pytest.mark.parametrize("longest", [1024, 8192])
@pytest.mark.parametrize("weights", [{}, FOUR_BITS], ids=["bf16", "nf4"])
@pytest.mark.parametrize("size", ["0.6B", "8B", "32B"])
def test_a_choice_fits_uses_the_card_and_grows_with_it(size, weights, longest, host):
    given, model, before = (
        config(**weights, rollout__max_completion_length=longest),
        qwen3(size),
        None,
    )
    for memory in MEMORY:
        cards = Hardware(int(memory * GIB), host and host * GIB)
        found = find(given, model, cards)
        if found is None:
            assert before is None, "a smaller card would do"
            continue
        assert found.keys() == set(KEYS)
        chosen = apply(given, found)
        load_config(chosen.model_dump())  # the values go together
        plan, card = make_plan(chosen, model, cards), cards.gpu_memory
        assert plan.problems == []
        sampling, updating = sum(plan.rollout.values()), sum(plan.update.values())
        everything = chosen.train.batch_size * chosen.rollout.num_generations * plan.longest
        fullest = (
            sampling if chosen.rollout.sleep_level else max(sampling, updating)
        )  # an engine awake needs both
        assert 0.9 * card < fullest <= card or plan.kv_tokens >= everything
        assert updating <= (1 - MARGIN) * card
        ladder = update_ladder(given, model, cards)
        rung = ladder.index({key: found[key] for key in ladder[0]})
        if updating < 0.9 * card and rung + 1 < len(
            ladder
        ):  # what more would do takes more than there is
            more = make_plan(apply(given, found | ladder[rung + 1]), model, cards)
            assert sum(more.update.values()) > (1 - MARGIN) * card or more.problems
        now = comfort(found, model)
        assert before is None or all(
            more >= less for more, less in zip(now, before, strict=True)
        ), (before, now)
        before = now


def comfort(found, model):
    """What must not shrink on a larger card."""
    checkpointed = checkpointed_layers(
        found["train.gradient_checkpointing"], model.num_hidden_layers
    )
    sizes = found["rollout.max_num_seqs"], found["train.max_tokens_per_microbatch"]
    return (
        *sizes,
        not found["train.offload_activations"],
        not found["train.park_trainer"],
        -checkpointed,
    )


def test_what_is_given_wins():
    given = config(
        train__max_tokens_per_microbatch=3072, train__park_trainer=False, rollout__max_num_seqs=9
    )
    found = apply(given, choose(given, qwen3("1.7B"), Hardware(24 * GIB)))
    assert (found.train.max_tokens_per_microbatch, found.train.park_trainer) == (3072, False)
    assert found.rollout.max_num_seqs == 9
    assert found.rollout.gpu_memory_utilization != given.rollout.gpu_memory_utilization
    assert choose(config(memory="off"), qwen3("8B"), Hardware(GIB)) == {}
    assert left_open(load_config(found.model_dump())) == []


def test_servers_have_cards_of_their_own():
    given = config(rollout__engine="server", quantization="nf4")
    found = choose(given, qwen3("14B"), Hardware(15 * GIB))  # the served weights alone take 27 GiB
    assert found.keys() == {
        "rollout.max_num_seqs",
        *update_ladder(given, qwen3("14B"), Hardware(15 * GIB))[0],
    }
    assert found["rollout.max_num_seqs"] == 512  # they queue what they cannot take
    several = choose(given, qwen3("14B"), Hardware(15 * GIB, processes=4))
    assert several["rollout.max_num_seqs"] == 512  # of all that train
    theirs = choose_for_server(given, qwen3("14B"), Hardware(40 * GIB))
    assert theirs["rollout.gpu_memory_utilization"] == pytest.approx(
        0.96 - CUDA_CONTEXT / (40 * GIB), abs=0.01
    )
    cache = make_plan(apply(given, theirs), qwen3("14B"), Hardware(40 * GIB)).kv_tokens
    longest = given.data.max_prompt_length + given.rollout.max_completion_length
    assert (
        cache / longest < theirs["rollout.max_num_seqs"] < 7 * cache / longest
    )  # under way it has half of its mean length, and an eighth of its prompt


def test_a_container_has_less_than_its_host(monkeypatch, tmp_path):
    """A job of 6 GiB in a container of 8 GiB: what each has left, cached files included."""
    free = psutil.virtual_memory()._replace(available=100 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    monkeypatch.setattr(machine, "CGROUPS", tmp_path)
    monkeypatch.setattr(machine, "OWN_CGROUP", tmp_path / "self")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    assert machine.host_memory_left() == 100 * GIB  # no cgroups
    assert machine.host_memory() == psutil.virtual_memory().total
    assert machine.cores() == 64
    (tmp_path / "cpu.max").write_text("250000 100000\n", encoding="ascii")
    (tmp_path / "self").write_text("0::/jobs/7\n", encoding="ascii")
    for folder, limit, used, cached in (("", 8, 7, 3), ("jobs", "max", 2, 0), ("jobs/7", 6, 2, 1)):
        group = tmp_path / folder
        group.mkdir(exist_ok=True)
        (group / "memory.max").write_text(
            f"{limit if limit == 'max' else limit * GIB}\n", encoding="ascii"
        )
        (group / "memory.current").write_text(f"{used * GIB}\n", encoding="ascii")
        (group / "memory.stat").write_text(
            f"anon 5\ninactive_file {cached * GIB}\n", encoding="ascii"
        )
    assert machine.host_memory_left() == 4 * GIB  # the container's: 8 - 7 + 3
    assert machine.host_memory() == 6 * GIB
    (tmp_path / "memory.max").write_text("max\n", encoding="ascii")
    (tmp_path / "jobs" / "cpu.max").write_text("max 100000\n", encoding="ascii")
    assert machine.cores() == 2
    assert machine.host_memory_left() == 5 * GIB  # the job's


@pytest.fixture
def card(monkeypatch):
    """A card of 24 GiB, 2 of which another process has, and 9 torch's caches."""
    cached = dict.fromkeys(["card", "host"], 9 * GIB)
    monkeypatch.setattr(
        choice, "clear_device_cache", lambda garbage_collection: cached.update(card=0)
    )
    if hasattr(torch.accelerator, "empty_host_cache"):  # not in torch 2.11
        monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: cached.update(host=0))
    monkeypatch.setattr(
        psutil,
        "virtual_memory",
        lambda: SimpleNamespace(available=40 * GIB - cached["host"], total=64 * GIB),
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(
        torch.cuda,
        "mem_get_info",
        lambda card: (22 * GIB - CUDA_CONTEXT - cached["card"], 24 * GIB),
    )
    monkeypatch.setattr(choice, "load_model_config", lambda name: qwen3("1.7B"))
    monkeypatch.setattr(
        choice, "gather_object", lambda own: [*own, (30 * GIB, psutil.virtual_memory().total)]
    )
    monkeypatch.setattr(machine, "OWN_CGROUP", Path("nowhere"))
    return cached


def test_a_run_uses_what_is_free_on_the_fullest_card(card, tmp_path, capsys, monkeypatch):
    given = config()
    run = fit(given, "vllm", None, 1)
    assert card == {
        "card": 0,
        "host": 0 if hasattr(torch.accelerator, "empty_host_cache") else 9 * GIB,
    }
    assert "memory for a card of 22.0 GiB" in capsys.readouterr().out
    host = psutil.virtual_memory().available
    expected = apply(given, choose(given, qwen3("1.7B"), Hardware(22 * GIB, host)))
    assert run.rollout.gpu_memory_utilization == pytest.approx(
        expected.rollout.gpu_memory_utilization * 22 / 24, abs=0.01
    )
    assert run.train == expected.train
    kept = run.model_copy(
        update={"train": run.train.model_copy(update={"max_tokens_per_microbatch": 3333})}
    )
    (tmp_path / "config.yaml").write_text(to_yaml(kept), encoding="utf-8")
    assert flatten(fit(given, "vllm", tmp_path, 1).model_dump()) == flatten(kept.model_dump())
    assert fit(given, "transformers", None, 1) is given
    capsys.readouterr()
    fit(config(rollout__engine="server"), "server", None, 1)
    assert "KV cache of 0" not in (told := capsys.readouterr().out)
    server = fit_server(config(rollout__engine="server"))
    assert f"{server.rollout.max_num_seqs} sequences at a time" in told
    assert 0.8 < server.rollout.gpu_memory_utilization < 22 / 24
    assert fit_server(config(memory="off")) == config(memory="off")
    monkeypatch.setattr(choice, "load_model_config", lambda name: qwen3("14B"))
    with pytest.raises(InputError, match="rollouts: .*: choose a larger card"):
        fit_server(config(rollout__engine="server"))


def test_torch_2_11_has_no_cache_of_host_memory_to_empty(card, monkeypatch):
    monkeypatch.delattr(torch.accelerator, "empty_host_cache", raising=False)
    assert fit(config(), "vllm", None, 1).rollout.gpu_memory_utilization > 0.5
    assert card["card"] == 0


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(3, "2 to 4 s"), (150, "100 to 225 s"), (240, "3 to 6 min"), (86400, "16 to 36 h")],
)
def test_a_guess_is_a_range(seconds, words):
    assert time_range(seconds) == words


def test_seconds_of_a_step_by_hand():
    """Qwen3-8B: 7 GB of 16-bit linears and as much cache for what is sampled at once; passes at a
    third of the peak."""
    given = config(
        rollout__max_completion_length=3072,
        rollout__max_num_seqs=64,
        train__gradient_checkpointing=False,
    )
    model, cards = qwen3("8B"), Hardware(80 * GIB)
    plan = make_plan(given, model, cards)._replace(kv_tokens=10**6)
    linears = 36 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 12288)
    prompt, completion = 256, 1024
    cache = 64 * (prompt + completion // 2) * 36 * 2 * 1024 * 2
    reads = plan.rollout["vLLM: weights"] + cache
    decoding = 1.25 * 512 / 64 * completion * reads / (0.6 * 3.35e12)
    training = 512 * (prompt + completion) * 2 * linears * 3 / (0.35 * 990e12)
    assert step_seconds(given, model, plan, KNOWN_CARDS["H100"]) == pytest.approx(
        decoding + training, rel=1e-6
    )
    # The cache holds ten sequences, each with an eighth of its group's prompt, half its length.
    few = plan._replace(kv_tokens=10 * (prompt // 8 + completion // 2))
    cache = 10 * (prompt + completion // 2) * 36 * 2 * 1024 * 2
    reads = plan.rollout["vLLM: weights"] + cache
    decoding = 1.25 * 512 / 10 * completion * reads / (0.6 * 3.35e12)
    assert step_seconds(given, model, few, KNOWN_CARDS["H100"]) == pytest.approx(
        decoding + training, rel=1e-6
    )


LINEARS_8B = 36 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 12288)


@pytest.mark.parametrize(("name", "reported"), [("H100", 8900), ("RTX 5090", 3500)])
def test_training_speeds_that_were_reported(name, reported):
    """Tokens a second of LoRA on 8B (docs/cards.md): forward, backward without the base's gradient,
    and recomputed."""
    card = KNOWN_CARDS[name]
    assert card.busy * card.flops / (3 * 2 * LINEARS_8B) == pytest.approx(reported, rel=0.1)


@pytest.mark.parametrize(("count", "reported"), [(8, 818), (16, 1345), (32, 1917), (64, 2510)])
def test_decoding_speeds_that_were_reported(count, reported):
    """Tokens a second of Qwen3-8B on an H100 without an adapter, with answers of 8,000 tokens
    (docs/cards.md): each step reads the weights, and 4,200 tokens of each sequence."""
    weights, context = 2 * 8_190_735_360, 4200 * 36 * 2 * 1024 * 2
    steps = READING * KNOWN_CARDS["H100"].bandwidth / (weights + count * context)
    assert count * steps == pytest.approx(reported, rel=0.1)


def test_4_bit_rollouts_are_few_where_more_would_be_slower():
    """Beyond 32 at a time bitsandbytes writes the weights out: 16-bit ones, and twice."""
    given, model = config(**FOUR_BITS, rollout__max_completion_length=4096), qwen3("8B")
    cards = Hardware(KNOWN_CARDS["RTX 4090"].memory)
    found = find(given, model, cards)
    assert found["rollout.max_num_seqs"] == 32
    plan = make_plan(apply(given, found), model, cards)._replace(kv_tokens=10**6)
    seconds = []
    for count in (32, 33):
        few = given.rollout.model_copy(update={"max_num_seqs": count})
        chosen = given.model_copy(update={"rollout": few})
        seconds.append(step_seconds(chosen, model, plan, KNOWN_CARDS["RTX 4090"]))
    assert seconds[1] > 1.5 * seconds[0]


@pytest.mark.parametrize(
    ("name", "size", "card", "host"),
    [
        ("qwen8b_qlora", "8B", "T4", 12),  # Colab's
        ("qwen8b_lora", "8B", "RTX 4090", 16),
        ("qwen14b_qlora", "14B", "RTX 4090", 16),
    ],
)
def test_one_base_fits_a_small_host(name, size, card, host):
    given, cards = (
        load_config(ROOT / "configs" / f"{name}.yaml"),
        Hardware(KNOWN_CARDS[card].memory, host * GIB),
    )
    found = find(given, qwen3(size), cards)
    assert (found["train.park_trainer"], found["rollout.sleep_level"]) == (False, 1)
    apart = load_config(ROOT / "configs" / f"{name}.yaml", ["rollout.share_base=off"])
    assert find(apart, qwen3(size), cards) is None


def test_the_memory_that_configs_ask_for_is_what_the_planner_needs():
    """`For: one card of 24 GB or more and 8 GiB of free host memory`: with a GiB less on the host
    nothing fits."""
    reported = {8: 7.6, 12: 11.6, 16: 14.6, 24: 23.5}  # GiB
    sizes = {"1.7b": "1.7B", "8b": "8B", "14b": "14B"}
    checked = 0
    for path in (ROOT / "configs").glob("qwen*.yaml"):
        found = re.search(
            r"card of (\d+) GB or more and (\d+) GiB of free host memory", path.read_text("utf-8")
        )
        if found is None:  # of servers
            continue
        given, model = load_config(path), qwen3(sizes[re.search(r"[\d.]+b", path.stem)[0]])
        card, host = int(reported[int(found[1])] * GIB), int(found[2])
        fitting = [
            find(given, model, Hardware(card, gib * GIB)) is not None for gib in (host - 1, host)
        ]
        assert fitting == [False, True], path
        if named := re.search(r"On an RTX 4090 (\d+ to \d+) hours", path.read_text("utf-8")):
            card = KNOWN_CARDS["RTX 4090"]
            chosen = apply(given, find(given, model, Hardware(card.memory)))
            plan = make_plan(chosen, model, Hardware(card.memory))
            described = choice.describe(chosen, plan, model, Hardware(card.memory))
            assert f"{named[1]} h for {given.train.max_steps}" in described
        checked += 1
    assert checked == 5


def test_the_tables_of_cards_in_the_docs_are_the_planners():
    sizes = {
        "qwen1.7b_lora": "1.7B",
        "qwen8b_lora": "8B",
        "qwen8b_qlora": "8B",
        "qwen14b_qlora": "14B",
    }
    guide, readme = ((ROOT / name).read_text("utf-8") for name in ("docs/cards.md", "README.md"))
    hours = []
    for name, size in sizes.items():
        given, model, cells, hosts = load_config(ROOT / f"configs/{name}.yaml"), qwen3(size), [], []
        ranges = []
        for card in map(KNOWN_CARDS.get, ("T4", "RTX 4090", "L40S", "A100")):
            cards = Hardware(card.memory)
            if (found := find(given, model, cards)) is None:
                cells.append(["does not fit"])
                ranges.append("does not fit")
                continue
            chosen = choice.apply_all(given, found, model, cards)
            plan = make_plan(chosen, model, cards)
            layers = checkpointed_layers(
                chosen.train.gradient_checkpointing, model.num_hidden_layers
            )
            minutes = step_seconds(chosen, model, plan, card) / 60
            digits = 0 if minutes >= 10 else 1
            cells.append([str(chosen.rollout.max_num_seqs), str(layers), f"{minutes:.{digits}f}"])
            hosts.append(sum(plan.host.values()) / GIB)
            described = choice.describe(chosen, plan, model, cards)
            ranges += re.findall(r"(\d+ to \d+) h for", described)
            hours.append(minutes * chosen.train.max_steps / 60)
        row = " | ".join(", ".join(cell) + " min" * (len(cell) == 3) for cell in cells)
        assert f"| `{name}` | {row} | {max(hosts):.0f} GiB |" in guide
        row = next(line for line in readme.splitlines() if line.startswith(f"| `{name}`"))
        assert [cell.strip() for cell in row.split("|")[2:-1]] == ranges
    extremes = f"from {min(hours):.0f} hours (8B on 80 GB) to {max(hours):.0f} (14B on 16 GB)"
    assert extremes in guide
