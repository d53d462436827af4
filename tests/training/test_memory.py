"""Memory: what vLLM gets, what updates begin with, and how they go on when it runs out."""

import gc
import itertools
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers import (
    ADVANTAGES,
    MINIMAL,
    assert_same,
    double,
    fake_completions,
    make_learner,
    objective,
    run_update,
    steps,
)
from safetensors.torch import load_file

from stapo_lite.assemble import open_run
from stapo_lite.config import load_config
from stapo_lite.errors import RunError
from stapo_lite.extras.transformers_engine import TransformersEngine
from stapo_lite.files import read_object
from stapo_lite.method.tokens import pack
from stapo_lite.model.sizes import Sizes
from stapo_lite.training import memory
from stapo_lite.training.loop import train
from stapo_lite.training.memory import MemoryBudget, MemorySetting
from stapo_lite.training.rehearsal import largest_batch, rehearse
from stapo_lite.types import Completion, Prompt

OUT = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.fixture(autouse=True)
def collections_of_garbage_are_quick():
    gc.freeze()
    yield
    gc.unfreeze()


def setting(tokens, checkpointing=False, offload=False):
    return MemorySetting(offload, checkpointing, tokens)


@contextmanager
def memory_for(policy, tokens, error=None, phase="forward", spare=0):
    """Only `spare` micro-batches of more tokens pass the decoder. Gives the shapes of all."""
    most = tokens if callable(tokens) else lambda: tokens
    shapes, passes = [], itertools.count()

    def refuse(*_):
        if error is not None:
            raise error
        torch.empty(2**60, dtype=torch.uint8)

    def forward(module, arguments, options, output):
        hidden = output.last_hidden_state
        shapes.append(tuple(hidden.shape[:2]))
        if options["use_cache"] or hidden[..., 0].numel() <= most() or next(passes) < spare:
            return
        if phase == "forward":
            refuse()
        elif hidden.requires_grad:
            hidden.register_hook(refuse)

    hook = policy.model.get_decoder().register_forward_hook(forward, with_kwargs=True)
    yield shapes
    hook.remove()


def test_settings_go_down_the_list_to_its_end():
    one, found = setting(16_384), []
    for alone in (False, False, False, False, False, True, True):
        one = one.next(alone)
        found.append(one)
    whole = [setting(8192), setting(4096), setting(2048), setting(2048, True), setting(1024, True)]
    assert found == [*whole, setting(1024, True, True), None]
    assert setting(4096).next(alone=True) == setting(4096, True)


@pytest.mark.parametrize(
    ("preset", "error", "phase", "tokens", "spare"),
    [
        ("paper", None, "forward", 60, 0),
        ("paper-v1", None, "forward", 120, 1),  # within the pass for the masks
        ("paper", None, "backward", 60, 1),
        ("paper-v1", OUT, "backward", 120, 0),
        ("paper", OUT, "forward", 60, 1),
        ("paper", RuntimeError("CUDA error: out of memory\nCompile"), "forward", 60, 1),
        ("paper", RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when"), "backward", 60, 0),
    ],
)
def test_updates_that_do_not_fit(make_policy, caplog, preset, error, phase, tokens, spare):
    """They are those of a smaller budget."""
    found, completions = [], fake_completions(3, ADVANTAGES)
    kind = objective(s2t={"preset": preset})
    for least, begin in ((20, setting(tokens)), (10**9, setting(30, True))):
        policy = double(make_policy())  # micro-batches of other shapes, and the masks are the same
        budget = MemoryBudget(begin, policy.save_memory)
        with memory_for(policy, least, error, phase, spare):
            found.append(run_update(policy, completions, kind, max_tokens=budget))
        assert budget.setting == setting(30, True)
    assert_same(*found)
    for name in ("keep", "silenced"):
        assert torch.equal(*(getattr(result.masks, name) for _, _, result in found))
    assert "from now on micro-batches of at most 30 tokens, layers checkpointed" in caplog.text


def test_a_single_sequence_is_checkpointed_then_offloaded_and_then_ends_the_run(make_policy):
    gradients, completions = [], fake_completions(3, ADVANTAGES)

    def update(budget):
        return run_update(policy, completions, objective(), max_tokens=budget)[0]

    for begin in (setting(1), setting(1, True, True)):
        policy = make_policy()
        budget = MemoryBudget(begin, policy.save_memory)
        with memory_for(policy, lambda policy=policy: 10**9 if policy._offload else 0):
            gradients.append(update(budget))
        assert budget.setting == setting(1, True, True)
    assert torch.equal(*gradients)
    ends = pytest.raises(RunError, match="memory ran out on a single sequence: lower rollout.max_c")
    with memory_for(policy, 0), ends:
        update(budget)
    other = RuntimeError("CUDA error: illegal memory access")
    with memory_for(policy, 0, other), pytest.raises(RuntimeError, match=str(other)):
        update(budget)


def test_one_long_sequence_does_not_make_the_others_single():
    prompt, lengths = Prompt("", [0], None), [800] + [10] * 100
    batch = pack(
        [Completion(prompt, [0] * (n - 1), [], True, 0) for n in lengths], "cpu", objective()
    )
    budget = MemoryBudget(setting(800), lambda *_: None)

    def work(micro_batches):
        if not budget.setting.offload:
            raise OUT
        return list(micro_batches)

    assert len(budget.fit(batch, range(101), work)) == 3
    assert budget.setting == setting(800, True, True)


@pytest.mark.parametrize(
    ("begin", "shapes", "found"),
    [
        # 43 tokens are five rows of 8; they are cut in halves, and 21 tokens are three rows of 7
        (setting(43), [(1, 8), (2, 8), (2, 8), (3, 7), (5, 8), (5, 8)], setting(21, True)),
        (setting(4), [(1, 10)], setting(4)),  # a longer sequence gets a pass of its own
    ],
)
def test_the_rehearsal_runs_the_largest_micro_batch(make_policy, begin, shapes, found):
    policy = make_policy()
    before = [parameter.clone() for parameter in policy.parameters.values()]
    budget = MemoryBudget(begin, policy.save_memory)
    with memory_for(policy, 21) as seen:
        rehearse(make_learner(policy, objective(), max_tokens=budget))
    assert (sorted(seen), budget.setting) == (shapes, found)
    for parameter, value in zip(policy.parameters.values(), before, strict=True):
        assert torch.equal(parameter, value)
        assert parameter.grad is None


def test_the_rehearsals_rows_are_completions_as_far_as_they_may_be(make_policy):
    """Since the LM head reads only those: 4 of 20 tokens, and 19 of 20."""
    learner, lengths = make_learner(make_policy(), objective(), max_tokens=40), []
    for prompt, completion in ((20, 4), (4, 20)):
        longest = {"max_completion_length": completion, "max_sequence_length": prompt + completion}
        learner.settings = replace(learner.settings, **longest)
        rows = largest_batch(learner).completions
        assert [len(c.prompt.token_ids) + len(c.token_ids) for c in rows] == [20, 20]
        lengths.append(len(rows[0].token_ids))
    assert lengths == [4, 19]


def gathered(other, mine):
    """What two processes gather."""
    return [*mine, other]


def test_all_processes_take_the_setting_that_saves_most(make_policy, monkeypatch):
    learner = make_learner(make_policy(), objective(), max_tokens=8192)
    kept = [setting(8192), setting(4096), setting(16_384, True), setting(16_384, True)]
    others = [setting(16_384), setting(4096), setting(16_384, True), setting(2048)]
    last = setting(16_384, True, True)
    for other, expected in zip([*others, last], [*kept, last], strict=True):
        gather = partial(gathered, other)
        monkeypatch.setattr("stapo_lite.training.learner.gather_object", gather)
        assert learner.agree() == learner.budget.setting == expected


@pytest.fixture
def card(monkeypatch):
    """Sets the free bytes of two processes' cards, where a token takes 10, or 1 if checkpointed."""

    def cost(config, tokens, checkpointing):
        return tokens if checkpointing else 10 * tokens

    def put(free, others=10**9):
        monkeypatch.setattr(memory, "count_activations", cost)
        monkeypatch.setattr(memory, "count_sizes", lambda config: Sizes(20_000, 1000, 0, 0))
        monkeypatch.setattr(memory, "free_memory", lambda: free and (free, 100_000))
        monkeypatch.setattr(memory, "gather_object", partial(gathered, others))

    return put


@pytest.mark.parametrize(
    ("room", "given", "expected"),
    [
        (163_840, [], setting(16_384)),
        (163_839, [], setting(8192)),
        (40_960, [], setting(4096)),
        (40_959, [], setting(2048)),  # a sequence may have 3,072 tokens
        (30_719, [], setting(16_384, True)),
        (16_383, [], setting(8192, True)),
        (3072, [], setting(2048, True)),
        (3071, [], setting(2048, True, True)),
        (30_720, ["max_tokens_per_microbatch=512"], setting(512)),
        (163_840, ["gradient_checkpointing=true"], setting(16_384, True)),
        (40_959, ["gradient_checkpointing=false"], setting(2048)),
        (163_840, ["offload_activations=true"], setting(16_384, True, True)),
        (1, ["gradient_checkpointing=false"], setting(2048, True, True)),
        (1, ["offload_activations=false"], setting(2048, True)),
        (None, [], setting(16_384, True)),  # without a card
        (None, ["gradient_checkpointing=false", "max_tokens_per_microbatch=99"], setting(99)),
    ],
)
def test_the_first_setting_that_fits_every_card_is_proposed(card, room, given, expected):
    config = load_config(MINIMAL, [f"train.{key}" for key in given])
    card(room and room + 12 * 100 + 4000)  # AdamW's states, and the margin
    assert memory.propose(config, parameters=100) == expected
    card(room and 10**9, others=room)
    assert memory.propose(config, parameters=100) == expected


@pytest.mark.parametrize(
    ("free", "given", "share"),
    [
        # Adapter and optimiser wait in host memory.
        (60_000, "rollout.share_base=true", 60_000 / 100_000 - 0.04),
        # value, gradient and states; the base; activations of one sequence
        (60_000, "rollout.share_base=false", (60_000 - 16 * 1000 - 20_000 - 3072) / 100_000 - 0.04),
        (60_000, "objective.teacher_adapter=one", (60_000 - 4 * 1000) / 100_000 - 0.04),
        (60_000, "objective.beta=0.1", 60_000 / 100_000 - 0.04),  # from the base
        (60_000, "lora.adapter=one", 60_000 / 100_000 - 0.04),
        (60_000, "lora.adapter=one objective.beta=0.1", (60_000 - 4 * 1000) / 100_000 - 0.04),
        (60_000, "rollout.gpu_memory_utilization=0.5", 0.5),
        (None, "rollout.share_base=true", None),
    ],
)
def test_vllm_gets_what_the_trainer_leaves(card, free, given, share):
    card(free)
    found = memory.vllm_share(load_config(MINIMAL, given.split()))
    assert found == (share and pytest.approx(share))


def test_what_trains_waits_in_host_memory_while_an_engine_has_the_card(
    write_config, tmp_path, monkeypatch
):
    """It comes back bit for bit: the run is that of an engine that shares no card."""
    moves = []

    def moved(values, device):
        moves.append(values.shape)
        return values.clone()  # at another address, as from a card and back

    def trained(name):
        config = write_config(output_dir=str(tmp_path / name), train__max_steps=3)
        norms = [line["grad_norm"] for line in steps(config)]
        return norms, (tmp_path / name / "adapter" / "adapter_model.safetensors").read_bytes()

    monkeypatch.setattr(memory, "moved", moved)
    alone = trained("alone")
    assert not moves
    monkeypatch.setattr(TransformersEngine, "sleeps", True)
    assert trained("shared") == alone
    values = len(load_file(tmp_path / "shared" / "adapter" / "adapter_model.safetensors"))
    states = 3 * values  # with AdamW's count of steps
    # There and back: self-check, twice, and three steps, of which the first has no states.
    assert len(moves) == 2 * (5 * values + 2 * states)


def test_a_resumed_run_keeps_its_setting_unless_keys_change(write_config, tmp_path):
    with open_run(load_config(write_config())) as opened:
        training = train(opened)
        assert next(training)["microbatch_tokens"] == 256
        with memory_for(opened.policy, 128):
            assert next(training)["microbatch_tokens"] == 128
    state = read_object(tmp_path / "run" / "checkpoint-2" / "state.json")
    assert state["progress"]["memory"] == [False, True, 128]
    assert next(steps(write_config(), resume=True))["microbatch_tokens"] == 128
    given = write_config(train__max_tokens_per_microbatch=64)
    assert next(steps(given, resume=True, force=True))["microbatch_tokens"] == 64
