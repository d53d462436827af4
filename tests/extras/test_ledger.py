"""The order in which a run takes and gives back memory, against the plan: an engine and a policy
that hold bytes in place of weights go through a start and two steps, and the card and the host
never hold more than there is."""

import pytest
from helpers import MINIMAL, changed
from random_model import qwen3

from stapo_lite.config import load_config
from stapo_lite.extras.planning.choice import apply, find
from stapo_lite.extras.planning.plan import GIB, Hardware, make_plan
from stapo_lite.training.run import lent_device

CACHE = ("vLLM: KV cache",)
STAYS = ("vLLM: CUDA graphs",)  # though the rest sleeps
PASSING = ("vLLM: activations",)  # torch's, given back when the engine is done
SLOTS = "vLLM: adapter slots"


class Ledger:
    """Bytes in use by what they are for; fails if they are more than there is."""

    def __init__(self, plan, cards):
        self.plan, self.room = plan, {"card": cards.gpu_memory, "host": cards.host_memory}
        self.held = {"card": {"CUDA context": plan.rollout["CUDA context"]}, "host": {}}
        self.fullest = {"card": 0, "host": 0}
        self.take("host", "processes", "snapshots of two steps", parts=plan.host)

    def take(self, where, *names, parts):
        for name in names:
            self.held[where][name] = parts[name]
            total = sum(self.held[where].values())
            self.fullest[where] = max(self.fullest[where], total)
            assert total <= self.room[where], (where, name, self.held)

    def drop(self, where, *names):
        for name in names:
            del self.held[where][name]


class Engine:
    def __init__(self, ledger, level, shares):
        self.ledger, self.level, self.shares, self.asleep = ledger, level, shares, False
        ledger.take("card", "vLLM: weights", SLOTS, *STAYS, *CACHE, parts=ledger.plan.rollout)

    def sleep(self):
        if not self.level:
            return
        self.asleep = True
        if not self.shares:
            if self.level == 1:
                self.ledger.take("host", "vLLM: weights", SLOTS, parts=self.ledger.plan.host)
            self.ledger.drop("card", "vLLM: weights", SLOTS)
        self.ledger.drop("card", *CACHE)

    def wake(self):
        if not self.asleep:
            return
        self.asleep = False
        taken = CACHE if self.shares else ("vLLM: weights", SLOTS, *CACHE)
        self.ledger.take("card", *taken, parts=self.ledger.plan.rollout)
        if not self.shares and self.level == 1:
            self.ledger.drop("host", "vLLM: weights", SLOTS)

    def sample(self):
        self.ledger.take("card", *PASSING, parts=self.ledger.plan.rollout)
        self.ledger.drop("card", *PASSING)


class Policy:
    BASE = "trainer: base weights"

    def __init__(self, ledger, config):
        self.ledger, self.parked, self.config = ledger, False, config
        if self.BASE in ledger.plan.update:
            ledger.take("card", self.BASE, parts=ledger.plan.update)
        own = ("trainer: adapter", "trainer: optimiser")
        ledger.take("card", *own, parts=ledger.plan.update)

    def park(self):
        host = self.ledger.held["host"]
        if self.BASE not in host:  # it is copied there only once
            self.ledger.take("host", self.BASE, parts=self.ledger.plan.host)
        self.ledger.drop("card", self.BASE)
        scales = "trainer: scales of 4-bit weights"
        if scales in self.ledger.plan.rollout:
            self.ledger.take("card", scales, parts=self.ledger.plan.rollout)
        self.parked = True

    def unpark(self):
        if self.parked:
            for name in [n for n in self.ledger.held["card"] if "scales" in n]:
                self.ledger.drop("card", name)
            self.ledger.take("card", self.BASE, parts=self.ledger.plan.update)
            self.parked = False

    def update(self):
        known = {"CUDA context", *self.ledger.held["card"]}
        passing = [name for name in self.ledger.plan.update if name not in known]
        passing = [name for name in passing if not name.startswith("vLLM")]
        self.ledger.held["card"] |= {name: self.ledger.plan.update[name] for name in passing}
        total = sum(self.ledger.held["card"].values())
        assert total <= self.ledger.room["card"], self.ledger.held
        self.ledger.fullest["card"] = max(self.ledger.fullest["card"], total)
        if "activations" in self.ledger.plan.host:
            self.ledger.take("host", "activations", parts=self.ledger.plan.host)
            self.ledger.drop("host", "activations")
        self.ledger.drop("card", *passing)


FOUR_BITS = {"quantization": "nf4", "rollout__quantization": "bitsandbytes"}
KINDS = {
    "one base": {},
    "one base in 4 bits": FOUR_BITS,
    "two copies": {"rollout__share_base": "off"},
    "two copies in 4 bits": FOUR_BITS | {"rollout__share_base": "off"},
    "fp8 served": {"rollout__quantization": "fp8"},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", ["1.7B", "8B", "14B"])
def test_no_moment_of_a_run_needs_more_than_there_is(size, kind):
    given, model, fitting = load_config(changed(MINIMAL, KINDS[kind])), qwen3(size), 0
    for card in (14.6, 23.5, 44.4, 79.1):
        for host in (12, 32, 64):
            cards = Hardware(int(card * GIB), host * GIB)
            if (choice := find(given, model, cards)) is None:
                continue
            config, fitting = apply(given, choice), fitting + 1
            plan = make_plan(config, model, cards)
            ledger = Ledger(plan, cards)
            park, level = config.train.park_trainer, config.rollout.sleep_level
            # As `assemble.build`: the engine first, which sleeps before the trainer is made.
            engine = Engine(ledger, level, config.may_share_base)
            engine.sleep()
            policy = Policy(ledger, config)
            for _ in range(2):
                with lent_device(engine, policy, park):
                    engine.sample()
                policy.update()
            planned = max(sum(plan.rollout.values()), sum(plan.update.values()))
            # For an engine that stays awake the plan counts its activations in updates, too.
            assert ledger.fullest["card"] <= planned
            assert ledger.fullest["card"] == planned or not level
            assert ledger.fullest["host"] <= sum(plan.host.values())
    assert fitting > 0
